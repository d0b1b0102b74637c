"""What a token file is read through: bytes that have just matched their checksums, of a file that is still the one opened.

Everything is read by pread, and nothing through a memory map: of a file that is cut off under a running job, a map ends the
process with SIGBUS, and pread comes back short, which can be said. A checksum is taken at every read and not at the first
alone, so damage that comes later (a rewritten file, a bad page of memory) is seen too; blocks are small, so that a row of a
batch costs little more than its own bytes.
"""

import os
import time
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.commands import spelled

LOOK_SECONDS = 1.0  # between two looks at a path: on a network file system a look may be a request
SPAN = 4 << 20  # bytes read together where all of a file is read


class TokenFileError(ValueError):
    """A token file that is damaged, cut off, changed while it was read, or no token file; the message names it."""


def remedy(path: Path, copied: bool = False) -> str:
    """How a file that is of no use is replaced. `copied`: a whole one may be elsewhere."""
    if path.name.startswith("stdlib-"):  # stdlib.py made it
        return "Delete it: the next run with data.source=stdlib makes it again."
    again = spelled("ake it again with: python -m jaxtrain.data prepare")
    return f"Copy it again from where it is whole, or m{again}" if copied else f"M{again}"


class OpenFile:
    """A file open for reading, with what it was then: device, inode, size in bytes, time of change. Closed with the object."""

    def __init__(self, path: Path):
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd).atexit = False  # a thread may be reading still
        self._was = os.fstat(self._fd)
        self.size = self._was.st_size
        self._looked = time.monotonic()

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start..stop-1, all of them. Raises TokenFileError."""
        try:
            data = os.pread(self._fd, stop - start, start)
            while len(data) < stop - start:  # at the end of the file, or above 2 GiB, which Linux gives at a time
                more = os.pread(self._fd, stop - start - len(data), start + len(data))
                if not more:
                    break
                data += more
        except OSError as e:
            again = (
                "Is its file system there, and its disk sound? A run that is started again goes on from its last checkpoint."
            )
            raise self.refuse(f"bytes {start:,} to {stop:,} cannot be read ({e.strerror})", again) from e
        if len(data) < stop - start:
            what = f"bytes {start + len(data):,} to {stop:,} are missing"
            raise self.refuse(what, remedy(self.path, copied=True))
        return data

    def look_at_times(self) -> None:
        """`look`, where the last one is LOOK_SECONDS ago."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self.look()

    def look(self) -> None:
        """Raises TokenFileError where the path does not lead to the file that was opened, as it was then.

        Of a file that was deleted or renamed over, the old one is still what is read here: but a run that is started again
        would find another one, or none.
        """
        if self.changed():
            raise self.refuse("is not the file that was opened")
        self._looked = time.monotonic()

    def changed(self) -> str:
        """What has become of the path since it was opened; empty where nothing has."""
        was = self._was
        try:
            now = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return "was deleted, or renamed,"
        except OSError as e:
            return f"can no longer be looked at ({e.strerror})"
        if (now.st_dev, now.st_ino) != (was.st_dev, was.st_ino):
            return "was replaced by another"
        if now.st_size != was.st_size:
            how = "cut off" if now.st_size < was.st_size else "added to"
            return f"was {how} ({was.st_size:,} bytes, now {now.st_size:,})"
        return "was written to" if now.st_mtime_ns != was.st_mtime_ns else ""

    def refuse(self, what: str, otherwise: str = "") -> TokenFileError:
        """`what` is wrong: because the file was changed, if it was, or with `otherwise` for a way out."""
        if not (how := self.changed()):
            return TokenFileError(f"{self.path}: {what}. {otherwise}")
        return TokenFileError(
            f"{self.path}: {what}: the file {how} while it was being read. Nothing that differs from what it held when it was "
            "opened has been used. Put that file back, and start the run again: it goes on from its last checkpoint. With "
            "another file in its place it would go on with other data, and warn of it."
        )


class Blocks:
    """Bytes `begin` to `end` of a file, which give none that do not match their checksum at that moment.

    Block k is the bytes from k * `block_bytes` on, the first without what lies before `begin`. At `end` begins a table, the
    crc32 of each block as uint32, and `table_crc32` are the checksums of the table itself, one for each `block_bytes` of it.
    `lies(start, stop)` says what the bytes are, for messages.
    """

    def __init__(
        self,
        file: OpenFile,
        begin: int,
        end: int,
        block_bytes: int,
        table_crc32: list[int],
        lies: Callable[[int, int], str],
    ):
        self.file = file
        self.begin, self.end, self.block_bytes = begin, end, block_bytes
        self.count = -(-end // block_bytes)
        self._lies = lies
        self._table_crc32 = table_crc32
        # Of the table, what was read and checked once: a copy of this process's own, which nothing outside can change.
        self._sums = np.empty(self.count, "<u4")
        self._read = bytearray(len(table_crc32))

    def start(self, block: int) -> int:
        """Where a block begins; of `count`, where the last one ends."""
        return min(max(block * self.block_bytes, self.begin), self.end)

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes start..stop-1. Raises TokenFileError, which names the first block that is damaged."""
        if start >= stop:
            return memoryview(b"")
        first, last = start // self.block_bytes, (stop - 1) // self.block_bytes + 1
        origin = self.start(first)
        data = memoryview(self.file.read(origin, self.start(last)))
        if bad := self._differing(first, last, data):
            raise self._refuse(f"{self.name(bad[0])} does not match its checksum")
        return data[start - origin : stop - origin]

    def name(self, first: int, last: int | None = None) -> str:
        """Blocks first..last-1 (just the first where no last is given) in words."""
        last = first + 1 if last is None else last
        start, stop = self.start(first), self.start(last)
        blocks = f"block {first}" if last == first + 1 else f"blocks {first} to {last - 1}"
        return f"{blocks} (bytes {start:,} to {stop:,}: {self._lies(start, stop)})"

    def faults(self) -> list[str]:
        """Reads all; every run of damaged blocks in words. Raises TokenFileError where the file cannot be read."""
        unknown = {part for part in range(len(self._table_crc32)) if not self._load(part)}
        bad = []
        step = min(SPAN, self.block_bytes**2 // 4) // self.block_bytes  # within a part of the table
        for first in range(0, self.count, step):
            last = min(first + step, self.count)
            if self._part(first) not in unknown:
                bad += self._differing(first, last, memoryview(self.file.read(self.start(first), self.start(last))))
        found = [f"{self._table_name(part)} do not match theirs" for part in sorted(unknown)]
        for run in np.split(np.asarray(bad, np.int64), np.flatnonzero(np.diff(bad) != 1) + 1) if bad else ():
            first, last = int(run[0]), int(run[-1]) + 1
            do = "does not match its checksum" if len(run) == 1 else "do not match their checksums"
            found.append(f"{self.name(first, last)} {do}")
        return found

    def _differing(self, first: int, last: int, data: memoryview) -> list[int]:
        """Which of the blocks first..last-1, whose bytes are `data`, are not what they were."""
        for part in range(self._part(first), self._part(last - 1) + 1):
            if not self._read[part] and not self._load(part):
                raise self._refuse(f"{self._table_name(part)} do not match theirs")
        bad, at = [], 0
        skipped = self.start(first) - first * self.block_bytes  # of the first block, what lies before `begin`
        for block, checksum in enumerate(self._sums[first:last].tolist(), first):
            stop = (block + 1 - first) * self.block_bytes - skipped
            if zlib.crc32(data[at:stop]) != checksum:
                bad.append(block)
            at = stop
        return bad

    def _part(self, block: int) -> int:
        """The part of the table in which the checksum of a block is."""
        return block * 4 // self.block_bytes

    def _load(self, part: int) -> bool:
        """Reads a part of the table. Whether it is what the header says."""
        first = part * self.block_bytes // 4
        last = min((part + 1) * self.block_bytes // 4, self.count)
        data = self.file.read(self.end + 4 * first, self.end + 4 * last)
        if zlib.crc32(data) != self._table_crc32[part]:
            return False
        self._sums[first:last] = np.frombuffer(data, "<u4")
        self._read[part] = True  # after what it stands for: another thread may look
        return True

    def _table_name(self, part: int) -> str:
        first = part * self.block_bytes // 4
        last = min((part + 1) * self.block_bytes // 4, self.count)
        where = f"(bytes {self.end + 4 * first:,} to {self.end + 4 * last:,})"
        return f"the checksums of blocks {first} to {last - 1} {where}"

    def _refuse(self, what: str) -> TokenFileError:
        path = self.file.path
        see = spelled(f"See all that is damaged with: python -m jaxtrain.data verify {path}")
        return self.file.refuse(what, f"Nothing of it has been used. {see}. {remedy(path, copied=True)}")


class Column:
    """One array of a token file, on the disk: a slice of it is read and checked (TokenFileError), and comes as an ndarray."""

    def __init__(self, blocks: Blocks, dtype: Any, begin: int, size: int):
        """`size` elements from byte `begin` on."""
        self.blocks = blocks
        self.dtype = np.dtype(dtype)
        self.begin, self.size = begin, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: slice | int) -> Any:
        if not isinstance(key, slice):
            at = range(self.size)[key]
            return self[at : at + 1][0]
        first, last, step = key.indices(self.size)
        if step != 1:
            raise IndexError(f"{self.blocks.file.path}: is read in slices of step 1, not {step}")
        width = self.dtype.itemsize
        return np.frombuffer(self.blocks.read(self.begin + first * width, self.begin + last * width), self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of it, in memory."""
        if copy is False:
            raise ValueError(f"{self.blocks.file.path}: is on the disk, and becomes an array only as a copy")
        return self[:].astype(dtype or self.dtype, copy=bool(copy))

    def block_borders(self) -> np.ndarray:
        """Numbers of the elements that begin a block, with 0 before them and `size` behind."""
        width, block = self.dtype.itemsize, self.blocks.block_bytes
        lead = (-self.begin % block or block) // width
        return np.asarray([0, *range(lead, self.size, block // width), self.size])
