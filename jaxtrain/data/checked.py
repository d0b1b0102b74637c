"""Read token files through a memory map, and compare each block with its checksum at its first use.

The first read of a block is a pread. If the disk fails or the file was cut off, pread returns an error, whereas a memory map
would end the process with SIGBUS. Later reads of the block use the map alone. Before each batch `OpenFile.look` compares the
file's size and modification time with their values when the file was opened.
"""

import mmap
import os
import shlex
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.commands import spelled

SPAN = 4 << 20  # bytes read at a time


class TokenFileError(ValueError):
    """An error: a file is no token file, or is damaged, cut off, or changed while it is read. The message names the file."""


def remedy(path: Path) -> str:
    """Return the sentence of an error message that explains how to replace the unusable file `path`."""
    if path.name.startswith("stdlib-"):  # stdlib.py made it
        return "Delete it: the next run with data.source=stdlib makes it again."
    return spelled(
        "Copy it again from an intact copy, or repeat the python -m jaxtrain data prepare that made it, with --force"
    )


class OpenFile:
    """A file open for reading, with the size in bytes and the modification time that it had when it was opened."""

    def __init__(self, path: Path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.fd).atexit = False  # a thread may still be reading
        was = os.fstat(self.fd)
        self.size, self._mtime_ns = was.st_size, was.st_mtime_ns

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes start..stop-1 of the file. Raises TokenFileError if any of them cannot be read."""
        try:
            data = os.pread(self.fd, stop - start, start)
            while len(data) < stop - start:  # the file has ended, or more than 2 GiB were requested, Linux's limit for a read
                more = os.pread(self.fd, stop - start - len(data), start + len(data))
                if not more:
                    break
                data += more
        except OSError as e:
            again = "Check its file system and its disk. A run that is started again resumes from its last checkpoint."
            raise self.refuse(f"bytes {start:,} to {stop:,} cannot be read ({e.strerror})", again) from e
        if len(data) < stop - start:
            missing = f"bytes {start + len(data):,} to {stop:,} are missing"
            raise self.refuse(missing, remedy(self.path))
        return data

    def look(self) -> None:
        """Raise TokenFileError if another program has changed the file since it was opened.

        Deleting the file, or renaming another file to its name, is no change: the open file keeps its contents.
        """
        if self.changed():
            raise self.refuse("has changed")

    def changed(self) -> str:
        """Return in words how the file has changed since it was opened; "" if it has not."""
        now = os.fstat(self.fd)
        if now.st_size != self.size:
            how = "cut off" if now.st_size < self.size else "added to"
            return f"was {how} ({self.size:,} bytes, now {now.st_size:,})"
        return "was written to" if now.st_mtime_ns != self._mtime_ns else ""

    def refuse(self, fault: str, otherwise: str = "") -> TokenFileError:
        """Return the error for `fault`. Its message ends with the file's change since it was opened, else with `otherwise`."""
        if not (how := self.changed()):
            return TokenFileError(f"{self.path}: {fault}. {otherwise}")
        return TokenFileError(
            f"{self.path}: {fault}: the file {how} while it was being read. Nothing that differs from its contents when it was "
            "opened has been used. Put that file back, and start the run again: it resumes from its last checkpoint."
        )


class Blocks:
    """Bytes `begin` to `end` of a file, memory-mapped. Before use, bytes are compared with the checksums of their blocks.

    Block k begins at byte k * `block_bytes` of the file; the first block begins at `begin`. crc32_K: the blocks' checksums.
    """

    def __init__(self, file: OpenFile, begin: int, end: int, block_bytes: int, crc32_K: np.ndarray):
        self.file = file
        self.begin, self.end, self.block_bytes = begin, end, block_bytes
        self.count = len(crc32_K)
        self._crc32_K = crc32_K
        self.map = mmap.mmap(file.fd, end, access=mmap.ACCESS_READ)
        # Rows are read in random order: without this, the kernel reads megabytes around every page.
        self.map.madvise(mmap.MADV_RANDOM)
        self._new = bytearray(b"\1") * self.count  # 1: not compared yet
        self._new_K = np.frombuffer(self._new, np.uint8)

    def check(self, start: int, stop: int) -> None:
        """Compare the blocks of bytes start..stop-1 with their checksums, each at its first use. Raises TokenFileError."""
        first, last = start // self.block_bytes, -(-stop // self.block_bytes)
        while (first := self._new.find(1, first, last)) >= 0:
            end = self._new.find(0, first, last)
            end = min(last if end < 0 else end, first + SPAN // self.block_bytes)
            if bad := self._differing(first, end):
                see = spelled(f"List all damage with: python -m jaxtrain data verify {shlex.quote(str(self.file.path))}")
                fix = f"No data of this read has been used. {see}. {remedy(self.file.path)}"
                raise self.file.refuse(f"{self.name(bad[0], bad[0] + 1)} does not match its checksum", fix)
            self._new[first:end] = bytes(end - first)

    def check_rows(self, start_R: np.ndarray, size: int) -> None:
        """Call `check` for the `size` bytes that begin at each of start_R, (R,). Skip the calls if all blocks were compared."""
        first_R, last_R = start_R // self.block_bytes, (start_R + size - 1) // self.block_bytes
        most = int((last_R - first_R).max(initial=0)) + 1
        block_RK = np.minimum(first_R[:, None] + np.arange(most), last_R[:, None])
        if self._new_K[block_RK].any():
            for first, last in zip(first_R.tolist(), last_R.tolist(), strict=True):
                self.check(first * self.block_bytes, (last + 1) * self.block_bytes)

    def faults(self) -> list[str]:
        """Read all blocks. Return a line for each range of damaged blocks. Raises TokenFileError if the file cannot be read."""
        step = SPAN // self.block_bytes
        bad = [k for first in range(0, self.count, step) for k in self._differing(first, min(first + step, self.count))]
        found = []
        for run in np.split(np.asarray(bad, np.int64), np.flatnonzero(np.diff(bad) != 1) + 1) if bad else ():
            do = "does not match its checksum" if len(run) == 1 else "do not match their checksums"
            found.append(f"{self.name(int(run[0]), int(run[-1]) + 1)} {do}")
        return found

    def name(self, first: int, last: int) -> str:
        """Return a text with the numbers and the range of bytes of blocks first..last-1."""
        blocks = f"block {first}" if last == first + 1 else f"blocks {first} to {last - 1}"
        return f"{blocks} (bytes {self._start(first):,} to {self._start(last):,})"

    def _start(self, block: int) -> int:
        """Return the offset in the file of a block's first byte. For `count`, the number after the last block, return `end`."""
        return min(max(block * self.block_bytes, self.begin), self.end)

    def _differing(self, first: int, last: int) -> list[int]:
        """Read blocks first..last-1. Return the numbers of the blocks that do not match their checksums."""
        origin = self._start(first)
        data, at, bad = memoryview(self.file.read(origin, self._start(last))), 0, []
        for block, checksum in enumerate(self._crc32_K[first:last].tolist(), first):
            stop = self._start(block + 1) - origin
            if zlib.crc32(data[at:stop]) != checksum:
                bad.append(block)
            at = stop
        return bad


class Column:
    """One array of a token file. Slicing checks the slice's blocks (raises TokenFileError), and returns a view of the map."""

    def __init__(self, blocks: Blocks, dtype: Any, begin: int, size: int):
        """Map `size` elements from byte `begin` on. The attribute `unchecked` is for callers that check blocks themselves."""
        self.blocks = blocks
        self.dtype = np.dtype(dtype)
        self.begin, self.size = begin, size
        self.unchecked = np.frombuffer(blocks.map, self.dtype, size, begin)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: slice | int) -> Any:
        if not isinstance(key, slice):
            at = range(self.size)[key]
            return self[at : at + 1][0]
        first, last, step = key.indices(self.size)
        if step != 1:
            raise IndexError(f"{self.blocks.file.path}: is read in slices of step 1, not {step}")
        if first < last:
            width = self.dtype.itemsize
            self.blocks.check(self.begin + first * width, self.begin + last * width)
        return self.unchecked[first:last]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return a copy of the complete array in memory."""
        return self[:].astype(dtype or self.dtype)
