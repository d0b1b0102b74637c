"""Times writing to and reading from a file system.

It does not import jax, so that preflight can measure disks on a node whose jax is broken.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

DISK_BYTES = 2**30  # written, and read back
WRITE_BYTES = 2**24  # written in one call
SYNC_BYTES = 2**27  # written between two fsyncs; the time limit is checked after each fsync
FREE_FACTOR = 4  # free space that is required, as a multiple of the file's size


class Unmeasured(Exception):
    """The rates of a file system cannot be measured. The message has the reason."""


def existing_folder(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists. Creates nothing."""
    folder = folder.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    return folder if folder.is_dir() else folder.parent


def measure_disk(folder: Path, seconds: float, size: int = DISK_BYTES) -> dict[str, float | None]:
    """Write a file to a file system, read it back from the disk, and return write_gb_s and read_gb_s.

    The file has no name, so a crash leaves no file. If the folder is read-only, its largest file is read, and
    `write_gb_s` is None. The server of a network file system may cache the file, so the read may not reach its disk.

    Args:
        seconds: time limit of writing and reading together. At the limit, the rates follow from the bytes so far.
        size: bytes to write and read.

    Raises:
        Unmeasured: there is too little free space, no file to read, or no system call that drops a file from the page cache.
        OSError: the file system returns an error, for example because of a quota.
    """
    folder = existing_folder(folder)
    if not os.access(folder, os.W_OK):
        with os.scandir(folder) as entries:
            files = [(entry.stat().st_size, entry.path) for entry in entries if entry.is_file()]
        length, path = max(files, default=(0, ""))
        if not length:
            raise Unmeasured(f"{folder} is not writable, and has no file to read")
        with open(path, "rb", buffering=0) as file:
            return {"write_gb_s": None, "read_gb_s": _read_rate(file.fileno(), seconds, min(length, size))}
    free = shutil.disk_usage(folder).free
    if free < FREE_FACTOR * size:
        least = FREE_FACTOR * size / 2**30
        raise Unmeasured(f"{folder} has {free / 2**30:.2f} GiB free; the test needs {least:.2f}")
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        write_gb_s = _write_rate(file.fileno(), seconds / 2, size)
        return {"write_gb_s": write_gb_s, "read_gb_s": _read_rate(file.fileno(), seconds / 2, file.tell())}


def _write_rate(handle: int, seconds: float, size: int) -> float:
    """Write random bytes, which no file system can compress. Return GB/s until all are on the disk."""
    block = memoryview(os.urandom(min(WRITE_BYTES, size)))
    start, written = time.perf_counter(), 0
    while written < size and (not written or time.perf_counter() - start < seconds):
        end = min(written + SYNC_BYTES, size)
        while written < end:
            written += os.write(handle, block[: end - written])
        os.fsync(handle)
    return written / (time.perf_counter() - start) / 1e9


def _read_rate(handle: int, seconds: float, size: int) -> float:
    """Read up to `size` bytes of a file from the disk, for at most about `seconds`. Return GB/s.

    Raises Unmeasured if the system has no posix_fadvise, which drops a file from the page cache.
    """
    advise: Callable[[int, int, int, int], None] | None = getattr(os, "posix_fadvise", None)
    if advise is None:
        raise Unmeasured("this system cannot drop a file from its memory, so a read would not measure the disk")
    advise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(handle, 0, os.SEEK_SET)
    buffer = bytearray(min(WRITE_BYTES, max(size, 1)))
    start, read = time.perf_counter(), 0
    while read < size and time.perf_counter() - start < seconds:
        count = os.readv(handle, [buffer])
        if not count:
            break
        read += count
    return read / (time.perf_counter() - start) / 1e9
