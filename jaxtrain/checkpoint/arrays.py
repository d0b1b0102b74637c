"""Orbax's options for the arrays of a step, and texts: differences of a checkpoint from a run, and errors of Orbax."""

import functools
import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxtrain.checkpoint import storage

if TYPE_CHECKING:
    import jax
    from etils import epath

# Limits of Orbax's files: a restore on another mesh reads whole chunks, and copy tools copy whole files.
CHUNK_BYTES = 64 << 20
FILE_BYTES = 1 << 30
WRITE_BYTES = 4 << 30  # host memory that one process uses for writes, in addition to the copies of the arrays
# Timeout of processes that wait for each other at a save or a restore. One process may first finish a save on a slow disk, or
# compile a program that other processes found in their caches. The watchdog ends hangs earlier.
PEERS_S = 5400.0


def import_orbax() -> Any:
    """Return Orbax's v1 API. Orbax is imported at the first call: the import would add 0.7 s to the start of each run."""
    # `import orbax.checkpoint.v1` does not work in 0.12: v1 is an attribute.
    from orbax.checkpoint import v1 as ocp

    return ocp


def orbax_context(folder: "epath.Path", arrays: "Iterable[jax.Array]" = (), partial: bool = False, processes: int = 1) -> Any:
    """Return the options of a save to, or a load from, `folder`.

    Args:
      arrays: the arrays to save. Their largest shard may raise the limit of host memory for writes.
      partial: whether a load may read only some of the arrays.
      processes: number of processes of the run.
    """
    context = import_orbax().Context()
    if processes > 1:
        # With a list of processes, Orbax waits for them at the coordination service, with a timeout, and not on the devices.
        context.multiprocessing.active_processes = set(range(processes))
    saving = context.array.saving
    saving.use_compression = False  # random floats do not compress; zstd costs most of the time of a save
    saving.ocdbt_target_data_file_size = FILE_BYTES
    saving.storage_options.chunk_byte_size = CHUNK_BYTES
    largest = max((math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays), default=0)
    context.memory.write_concurrent_bytes = max(WRITE_BYTES, 2 * largest)  # Orbax refuses a shard that does not fit
    # If Orbax creates a folder in the background and fails, its threads wait for the folder: the exit takes 20 minutes.
    context.asynchronous.create_directories_asynchronously = False
    context.pytree.loading.partial_load = partial
    if os.fspath(folder).startswith("s3://"):
        context.atomicity.mode = type(context.atomicity.mode).COMMIT_FILE  # as Orbax itself does at gs://
        _open_s3_in_tensorstore()
    return context


@functools.cache
def _open_s3_in_tensorstore() -> None:
    """Make Orbax write arrays to s3:// by tensorstore's own S3 driver.

    A function of Orbax 0.12 chooses tensorstore's driver. It supports gs:// and disks only, and has no option for others.
    (Orbax writes its small files by epath, which supports s3://.) So the function is wrapped. For an s3:// path, the wrapper
    calls the function with the same path at gs://, and replaces the driver in the result.
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils

    describe = tensorstore_utils.build_kvstore_tspec
    client = storage.open_client("s3").s3.meta
    driver: dict[str, Any] = {"driver": "s3"}
    if not client.endpoint_url.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        driver |= {"endpoint": client.endpoint_url, "aws_region": client.region_name or "us-east-1"}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        driver["aws_credentials"] = {"type": "environment"}  # the default also searches files, and logs each missing file

    def use_s3_driver(description: Any) -> Any:
        if isinstance(description, list):
            return [use_s3_driver(item) for item in description]
        if not isinstance(description, dict):
            return description
        spec = {key: use_s3_driver(value) for key, value in description.items()}
        return spec | driver if spec.get("driver") == "gcs" else spec

    def describe_any(directory: str, *args: Any, **options: Any) -> Any:
        scheme, _, path = directory.partition(":")
        if scheme != "s3":
            return describe(directory, *args, **options)
        return use_s3_driver(describe(f"gs://{path.lstrip('/')}", *args, **options))

    tensorstore_utils.build_kvstore_tspec = describe_any


def differences(
    stored: "Mapping[str, jax.ShapeDtypeStruct]", wanted: "Mapping[str, jax.ShapeDtypeStruct]", *, subset: bool, cast: bool
) -> list[str]:
    """Return a line for each tensor that is only in the checkpoint or only in the run, or has another shape or dtype.

    subset, cast: as in `Checkpoints.restore`.
    """
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


def first_cause(error: Exception) -> Exception:
    """Return the exception at the beginning of the chain of causes (`raise ... from`) that ends with `error`."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def describe_error(error: Exception) -> str:
    """Return the first cause of an exception in one line, without the specifications that tensorstore appends."""
    error = first_cause(error)
    text = " ".join(str(error).partition("[tensorstore_spec=")[0].partition("[source locations=")[0].split())
    return f"{type(error).__name__}: {text if len(text) <= 400 else f'{text[:150]} ... {text[-250:]}'}"
