"""The folder that the suite keeps from run to run, and the options with which its programs are compiled."""

import os
from pathlib import Path

FOLDER = Path(os.environ.get("JAXTRAIN_TEST_CACHE") or "~/.cache/jaxtrain/tests").expanduser()
# Compiled programs, of all workers and child processes. JAX finds them by their text, XLA's options and jaxlib's version.
COMPILED = FOLDER / "xla"
# Half of the time of compiling goes to LLVM's optimizations, and programs of a few steps never earn it back. XLA's own passes,
# the partitioner among them, are all there.
LLVM = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
MOST_BYTES = 4 * 2**30


def trim(folder: Path = COMPILED, most: int = MOST_BYTES) -> None:
    """Delete the oldest programs until at most `most` bytes are left.

    Programs for described GPUs are never found again, since each is compiled with a dump folder of its own.
    """
    files = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in folder.glob("*-cache"))
    left = sum(size for _, size, _ in files)
    for _, size, path in files:
        if left <= most:
            break
        path.unlink(missing_ok=True)
        left -= size
