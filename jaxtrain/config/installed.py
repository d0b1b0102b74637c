"""Versions of the installed packages, from their metadata. Imports no jax."""

import functools
import hashlib
import importlib.metadata
import sys
from pathlib import Path

VERSION = "0.1.0"  # of jaxtrain: jaxtrain.__version__, for modules below the top
# Packages that compute.
PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "ml_collections", "ml_dtypes", "tokenizers",
    "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt",
    "nvidia-cudnn-cu12", "nvidia-nccl-cu12", "nvidia-cublas-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-cublas",
)  # fmt: skip
# Further packages of a run: ptxas and libdevice, which compile its kernels, NVSHMEM, and packages that read and write
# checkpoints.
RUN_PACKAGES = (
    *PACKAGES,
    "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13", "tensorstore",
)  # fmt: skip


def version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def script(name: str) -> str:
    """Return a script of this environment as a user types it: its path, such as `.venv/bin/hf`, if installed, else its name."""
    path = Path(sys.executable).with_name(name)
    if not path.is_file():
        return name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def install_remedy(extra: str) -> str:
    """Return the sentence with the command that installs an extra of pyproject.toml into run.sh's environment."""
    return f"In the folder of jaxtrain, run: uv pip install --python .venv/bin/python -r pyproject.toml --extra {extra}"


@functools.cache
def code_sha256() -> str:
    """Return the SHA-256 of jaxtrain's own Python files, as they are at the first call."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return the versions of all of these packages that are installed, by name."""
    return {name: number for name in names if (number := version(name))}
