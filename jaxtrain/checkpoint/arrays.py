"""The arrays of a step, as Orbax writes and reads them, and what has to fit before they are read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

# Bounds on Orbax's files: a reader on another mesh fetches whole chunks, a copying tool moves whole files.
CHUNK_BYTES = 64 << 20
FILE_BYTES = 1 << 30


def differences(
    stored: "Mapping[str, jax.ShapeDtypeStruct]", wanted: "Mapping[str, jax.ShapeDtypeStruct]", *, subset: bool, cast: bool
) -> list[str]:
    """One line for each tensor missing, left over, or of another shape or dtype. The flags are those of `restore`."""
    import jax.numpy as jnp

    out = [f"{name}: not in the checkpoint" for name in sorted(wanted.keys() - stored.keys())]
    if not subset:
        out += [f"{name}: in the checkpoint, not in this run" for name in sorted(stored.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & stored.keys()):
        have, want = stored[name], wanted[name]
        floats = jnp.issubdtype(have.dtype, jnp.floating) and jnp.issubdtype(want.dtype, jnp.floating)
        if have.shape != want.shape:
            out.append(f"{name}: shape {have.shape} in the checkpoint, {want.shape} in this run")
        elif have.dtype != want.dtype and not (cast and floats):
            out.append(f"{name}: dtype {have.dtype} in the checkpoint, {want.dtype} in this run")
    return out


def orbax() -> Any:
    """Imported on first use: 0.7 s that a fresh run does not pay before its first step."""
    # `import orbax.checkpoint.v1` does not work in 0.12: v1 is an attribute.
    from orbax.checkpoint import v1 as ocp

    return ocp


def context(ocp: Any, subset: bool = False, processes: int = 1) -> Any:
    """How it writes: in pieces that other meshes can read, uncompressed. subset: whether a part of a step may be read."""
    context = ocp.Context()
    if processes > 1:
        # With the processes named, Orbax waits for them at the coordination service, with a time limit, and not on the devices.
        context.multiprocessing.active_processes = set(range(processes))
    saving = context.array.saving
    saving.use_compression = False  # random floats do not compress; zstd costs most of the time of a save
    saving.ocdbt_target_data_file_size = FILE_BYTES
    saving.storage_options.chunk_byte_size = CHUNK_BYTES
    # Created in the background, a folder that cannot be created leaves threads waiting for it: 20 minutes at exit.
    context.asynchronous.create_directories_asynchronously = False
    context.pytree.loading.partial_load = subset
    return context


def cause(error: Exception) -> Exception:
    """Of a page of wrappers the one inside."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def innermost(error: Exception) -> str:
    """Of a page of wrappers the sentence that says what happened."""
    error = cause(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"


def of_processes(errors: list[str]) -> str:
    """The errors of all processes in one line."""
    return "; ".join(f"process {i}: {error}" for i, error in enumerate(errors) if error)
