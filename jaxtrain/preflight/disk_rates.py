"""How fast a place writes and reads: a file that has no name, so that nothing is left of it however this ends. No jax."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from jaxtrain.preflight.bounded import GRACE_S, Unmeasured, within

SIZE = 2**30  # bytes that are written, and read back
PIECE = 2**24  # bytes in one write
SYNC = 2**27  # bytes after which the disk must have them: the clock is looked at only then
ROOM = 4  # times the size that must be free

DiskRates = dict[str, float | None]  # write_gb_s, read_gb_s


class Failed(Unmeasured):
    """The file system refused to write or to read: no room by a quota, an error of the disk."""


def rates(place: Path, seconds: float, size: int = SIZE) -> DiskRates:
    """GB/s of writing a file until the disk has it, and of reading it back from there and not from memory.

    A place that may only be read is read from: its largest file. Its `write_gb_s` is then None. `seconds`: for both together;
    what was moved by then counts. A network file system's server may still have the file in its own memory.

    Raises Unmeasured where there is no room, nothing to read, or the file system does not answer in time; Failed, which is one,
    where it refuses.
    """
    return _asked(seconds + GRACE_S, place, lambda: _rates(existing(place), seconds, size))


def disk_of(place: Path) -> int:
    """A number that places on one disk share. Raises Unmeasured as `rates` does."""
    return _asked(GRACE_S, place, lambda: os.stat(existing(place)).st_dev)


def _asked[T](seconds: float, place: Path, ask: Callable[[], T]) -> T:
    """What `ask` returns. A mount whose server is gone holds whoever touches it."""
    try:
        return within(seconds, f"{place} (its file system hangs, or is very slow)", ask)
    except OSError as error:
        raise Failed(f"{place}: {error.strerror or error}") from error


def existing(place: Path) -> Path:
    """The folder itself, or the one above that exists already: nothing is made here."""
    place = place.expanduser().absolute()
    while not place.exists():
        place = place.parent
    return place if place.is_dir() else place.parent


def _rates(folder: Path, seconds: float, size: int) -> DiskRates:
    if not os.access(folder, os.W_OK):
        return {"write_gb_s": None, "read_gb_s": _read_largest(folder, seconds, size)}
    free = shutil.disk_usage(folder).free
    if free < ROOM * size:
        least = ROOM * size / 2**30
        raise Unmeasured(f"{folder} has {free / 2**30:.2f} GiB free; a file is written only where there are {least:.2f}")
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        handle = file.fileno()
        written, write_s = _write(handle, seconds / 2, size)
        drop_cached(handle)
        os.lseek(handle, 0, os.SEEK_SET)
        read, read_s = _read(handle, seconds / 2, written)
    return {"write_gb_s": written / write_s / 1e9, "read_gb_s": read / read_s / 1e9}


def _write(handle: int, seconds: float, size: int) -> tuple[int, float]:
    """(bytes, seconds) until the disk has them. Random bytes, which no file system can make smaller."""
    piece = memoryview(os.urandom(min(PIECE, size)))
    began, written = time.perf_counter(), 0
    while written < size and (not written or time.perf_counter() - began < seconds):
        upto = min(written + SYNC, size)
        while written < upto:
            written += os.write(handle, piece[: upto - written])
        os.fsync(handle)
    return written, time.perf_counter() - began


def _read(handle: int, seconds: float, size: int) -> tuple[int, float]:
    """(bytes, seconds) of reading on from where the file stands."""
    buffer = bytearray(min(PIECE, max(size, 1)))
    began, read = time.perf_counter(), 0
    while read < size and time.perf_counter() - began < seconds:
        count = os.readv(handle, [buffer])
        if not count:
            break
        read += count
    return read, time.perf_counter() - began


def _read_largest(folder: Path, seconds: float, size: int) -> float:
    with os.scandir(folder) as entries:
        files = [(entry.stat().st_size, entry.path) for entry in entries if entry.is_file()]
    length, path = max(files, default=(0, ""))
    if not length:
        raise Unmeasured(f"{folder} may not be written to, and holds no file to read")
    handle = os.open(path, os.O_RDONLY)
    try:
        drop_cached(handle)
        read, read_s = _read(handle, seconds, min(length, size))
    finally:
        os.close(handle)
    return read / read_s / 1e9


def drop_cached(handle: int) -> None:
    """Takes a file's pages out of this machine's memory. Raises Unmeasured where that cannot be asked for."""
    advise: Callable[[int, int, int, int], None] | None = getattr(os, "posix_fadvise", None)
    if advise is None:
        raise Unmeasured("this system does not take a file out of its memory on request, so that reads would not be the disk's")
    advise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
