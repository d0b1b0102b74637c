"""Token files (`NAME.tok`): one file that says itself what it holds.

    bytes 0..63    preamble: magic, format version, where the header lies and its crc32
    tokens         uint16 or uint32, little-endian; every document ends with the tokenizer's end-of-text id
    padding        to a multiple of 8
    documents      int64 offsets into the tokens: the start of each document, then the end of the last
    header         JSON: counts, tokenizer, sources, and a crc32 of each 16 MiB from byte 64 to here

The header comes last because it is known last: the writer streams. The preamble is written after it, and the file gets its
name after that, so a file that was cut off is never taken for whole.
"""

import errno
import fcntl
import hashlib
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

MAGIC = b"jaxtrtok"
VERSION = 1
BLOCK = 16 << 20  # bytes under one checksum
PREAMBLE = struct.Struct("<8sIIQQ32x")  # magic, version, crc32 of the header, header offset, header length


class TokenFileError(ValueError):
    """A token file that is damaged, cut off, or no token file; the message names it."""


def _align(n: int) -> int:
    return -n % 8


def open_locked(path: Path) -> BinaryIO:
    """An empty file for writing that no other process is writing; what an earlier, dead one left in it is gone."""
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            file.close()
            raise TokenFileError(f"{path}: another process is writing it. Wait for it, or choose another output.") from e
        except OSError as e:
            if e.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            # a file system without locks: the rename at the end still keeps readers safe
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            os.ftruncate(file.fileno(), 0)
            return file
        file.close()  # its owner has renamed it meanwhile: that file is finished and not ours


class TokenWriter:
    """Streams documents into `path`; memory does not grow. Finish with `close` (`seal`, then `publish`) or `abort`.

    Writes `path + suffix` and renames it when all is on disk. As a context manager it closes, or aborts on an exception.
    """

    def __init__(
        self, path: Path | str, tokenizer: dict[str, Any], *, suffix: str = ".partial", sources: list[str] | None = None
    ):
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + suffix)
        self._offsets_path = self.path.with_name(self.path.name + suffix + ".offsets")
        self.tokenizer = tokenizer
        self.sources = sources or []
        self.dtype = np.dtype("<u2" if tokenizer["vocab_size"] <= 1 << 16 else "<u4")
        self.tokens = self.documents = self.source_bytes = 0
        self._crcs: list[int] = []
        self._crc = self._in_block = 0
        self._file: BinaryIO = open_locked(self.partial)
        self._offsets: BinaryIO = self._offsets_path.open("w+b")
        self._file.write(bytes(PREAMBLE.size))
        self._offsets.write(struct.pack("<q", 0))

    def _put(self, data: bytes | memoryview) -> None:
        """Writes, and takes the checksum of each whole block on the way."""
        self._file.write(data)
        view = memoryview(data)
        while len(view):
            part = view[: BLOCK - self._in_block]
            self._crc = zlib.crc32(part, self._crc)
            self._in_block += len(part)
            view = view[len(part) :]
            if self._in_block == BLOCK:
                self._crcs.append(self._crc)
                self._crc = self._in_block = 0

    def write(self, ids: np.ndarray | list[int], source_bytes: int) -> None:
        """Tokens of the current document (or a part of it), which stand for `source_bytes` bytes of text."""
        array = np.asarray(ids)
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < self.tokenizer["vocab_size"]:
            raise TokenFileError(
                f"{self.path}: id {int(array.max())} is outside the vocabulary of {self.tokenizer['vocab_size']} tokens"
            )
        self._put(np.ascontiguousarray(array, self.dtype).tobytes())
        self.tokens += array.size
        self.source_bytes += source_bytes

    def end_document(self) -> None:
        self._put(np.asarray([self.tokenizer["eot"]], self.dtype).tobytes())
        self.tokens += 1
        self.documents += 1
        self._offsets.write(struct.pack("<q", self.tokens))

    def close(self) -> dict[str, Any]:
        """Everything to disk, then the name. Returns the header."""
        header = self.seal()
        self.publish()
        return header

    def seal(self) -> dict[str, Any]:
        """Everything to disk, still under the temporary name. Returns the header."""
        token_bytes = self.tokens * self.dtype.itemsize
        self._put(bytes(_align(token_bytes)))
        self._offsets.flush()
        self._offsets.seek(0)
        while data := self._offsets.read(1 << 20):
            self._put(data)
        if self._in_block:
            self._crcs.append(self._crc)
        content = [self.dtype.str, self.tokens, self.documents, self.tokenizer["sha256"], self._crcs]
        header = {
            "dtype": self.dtype.str,
            "tokens": self.tokens,
            "documents": self.documents,
            "source_bytes": self.source_bytes,
            "tokenizer": self.tokenizer,
            "content_sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
            "sources": self.sources,
            "block_bytes": BLOCK,
            "block_crc32": self._crcs,
        }
        encoded = json.dumps(header).encode()
        header_offset = self._file.tell()
        self._file.write(encoded)
        self._file.seek(0)
        self._file.write(PREAMBLE.pack(MAGIC, VERSION, zlib.crc32(encoded), header_offset, len(encoded)))
        self._file.flush()
        os.fsync(self._file.fileno())
        return header

    def publish(self) -> None:
        """The name, after `seal`."""
        os.replace(self.partial, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself
        finally:
            os.close(folder)
        self._close_files()

    def _close_files(self) -> None:
        try:
            self._file.close()
            self._offsets.close()
        finally:
            self._offsets_path.unlink(missing_ok=True)

    def abort(self) -> None:
        """Leaves nothing behind, also where closing fails because the disk is full."""
        try:
            self._close_files()
        finally:
            self.partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if self._file.closed:
            return
        if kind is None:
            self.close()
        else:
            self.abort()


class TokenFile:
    """An open token file: memory maps and the header. Made by `TokenFile.open`."""

    def __init__(self, path: Path, header: dict[str, Any], tokens: np.ndarray, doc_offsets: np.ndarray):
        self.path = path
        self.header = header
        self.tokens = tokens  # (tokens,) uint16 or uint32
        self.doc_offsets = doc_offsets  # (documents + 1,) int64

    @classmethod
    def open(cls, path: Path | str) -> "TokenFile":
        """Maps the file; reads and checks the preamble, the header and the size. Raises TokenFileError or FileNotFoundError."""
        path = Path(path).expanduser()
        header, header_offset = read_header(path)
        dtype = np.dtype(header["dtype"])
        tokens = np.memmap(path, dtype, "r", PREAMBLE.size, (header["tokens"],)) if header["tokens"] else np.empty(0, dtype)
        start = header_offset - 8 * (header["documents"] + 1)
        doc_offsets = np.memmap(path, "<i8", "r", start, (header["documents"] + 1,))
        return cls(path, header, tokens, doc_offsets)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header and where it begins, checked against the file's size."""
    remedy = "Make it again with: python -m jaxtrain.data prepare"
    with path.open("rb") as f:
        preamble = f.read(PREAMBLE.size)
        if len(preamble) < PREAMBLE.size or not preamble.startswith(MAGIC):
            raise TokenFileError(f"{path}: not a token file (it does not begin with {MAGIC!r}). {remedy}")
        _, version, crc, offset, length = PREAMBLE.unpack(preamble)
        if version != VERSION:
            raise TokenFileError(f"{path}: format version {version}; this program reads version {VERSION}. {remedy}")
        size = os.fstat(f.fileno()).st_size
        if size != offset + length:
            raise TokenFileError(f"{path}: has {size:,} bytes, should have {offset + length:,}: cut off or added to. {remedy}")
        f.seek(offset)
        encoded = f.read(length)
    if zlib.crc32(encoded) != crc:
        raise TokenFileError(f"{path}: the header (at byte {offset:,}) does not match its checksum. {remedy}")
    header = json.loads(encoded)
    token_bytes = header["tokens"] * np.dtype(header["dtype"]).itemsize
    expected = PREAMBLE.size + token_bytes + _align(token_bytes) + 8 * (header["documents"] + 1)
    if offset != expected:
        raise TokenFileError(f"{path}: the header says {expected:,} bytes of data, the file has {offset:,}. {remedy}")
    return header, offset


def verify(path: Path | str) -> list[str]:
    """Reads all of the file. What is wrong with it, a line each; empty where nothing is."""
    path = Path(path).expanduser()
    try:
        file = TokenFile.open(path)
    except (TokenFileError, OSError) as e:
        return [str(e)]
    header, faults = file.header, []
    raw = np.memmap(path, np.uint8, "r")
    _, end = read_header(path)
    block = header["block_bytes"]
    starts = range(PREAMBLE.size, end, block)
    if len(starts) != len(header["block_crc32"]):
        faults.append(f"{path}: {len(starts)} blocks, {len(header['block_crc32'])} checksums")
    itemsize = np.dtype(header["dtype"]).itemsize
    for i, (start, crc) in enumerate(zip(starts, header["block_crc32"], strict=False)):
        stop = min(start + block, end)
        if zlib.crc32(raw[start:stop]) != crc:
            first, last = ((b - PREAMBLE.size) // itemsize for b in (start, stop))
            faults.append(
                f"{path}: block {i} (bytes {start:,} to {stop:,}, tokens {first:,} to {min(last, header['tokens']):,}) "
                "does not match its checksum"
            )
    step = block // itemsize
    vocab = header["tokenizer"]["vocab_size"]
    for first in range(0, header["tokens"], step):
        largest = int(file.tokens[first : first + step].max())
        if largest >= vocab:
            faults.append(f"{path}: id {largest} among tokens {first:,} to {first + step:,}; the vocabulary has {vocab}")
    offsets = file.doc_offsets
    if offsets[0] != 0 or offsets[-1] != header["tokens"]:
        faults.append(f"{path}: documents span {offsets[0]:,} to {offsets[-1]:,}, tokens 0 to {header['tokens']:,}")
    for first in range(0, header["documents"], 1 << 20):
        part = np.asarray(offsets[first : first + (1 << 20) + 1])
        bad = np.flatnonzero(np.diff(part) <= 0)
        if bad.size:
            faults.append(f"{path}: document {first + int(bad[0]):,} ends at or before its start")
            break
        if part[0] >= 0 and part[-1] <= header["tokens"]:
            bad = np.flatnonzero(file.tokens[part[1:] - 1] != header["tokenizer"]["eot"])
            if bad.size:
                faults.append(f"{path}: document {first + int(bad[0]):,} does not end with end-of-text")
                break
    return faults
