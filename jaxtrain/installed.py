"""Which packages are installed here, by the versions that their own metadata tells. No jax."""

import importlib.metadata

# Those that compute something.
PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "ml_collections", "ml_dtypes", "tokenizers",
    "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt",
    "nvidia-cudnn-cu12", "nvidia-nccl-cu12", "nvidia-cublas-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-cublas",
)  # fmt: skip


def version(name: str) -> str | None:
    """Of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Of all of them that are installed, by name."""
    return {name: found for name in names if (found := version(name))}
