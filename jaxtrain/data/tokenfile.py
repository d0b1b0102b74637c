"""Token files (`NAME.tok`): one file that says itself what it holds.

    bytes 0..63    preamble: magic, format version, where the header lies and its crc32; zeros
    tokens         uint16 or uint32, little-endian; every document begins with what the tokenizer puts before a text, if
                   anything (made with --chat: what the template writes), and ends with its end-of-text id
    padding        to a multiple of 8
    loss           in files made with --chat: one bit a token, lowest bit first, set where the token counts as a target;
                   padding to a multiple of 8
    documents      int64 offsets into the tokens: the start of each document, then the end of the last
    checksums      uint32, the crc32 of each block: of each 16 KiB of the file up to here, the first without the preamble
    header         JSON: counts, tokenizer, sources, and a crc32 of each 16 KiB of the checksums

The header comes last because it is known last: the writer streams. The preamble is written after it, and the file gets its
name after that, so a file that was cut off is never taken for whole. Every read is checked block by block (checked.py).
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from jaxtrain.data.checked import Blocks, Column, OpenFile, TokenFileError, remedy

MAGIC = b"jaxtrtok"
VERSION = 5  # 1 had no loss bits, 2 no largest id, 3 no token that begins a document, 4 checksums of 16 MiB alone
BLOCK = 16 << 10  # bytes under one checksum: of a row of a batch two or three blocks are read, and their checksums are 0.02%
PREAMBLE = struct.Struct("<8sIIQQ32s")  # magic, version, crc32 of the header, header offset, header length, zeros


def _align(n: int) -> int:
    return -n % 8


def loss_bytes(tokens: int) -> int:
    """Bytes that the loss bits of so many tokens take, padding left out."""
    return -(-tokens // 8)


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
    `loss`: the file holds loss bits, and every `write` gives them. `made`: what else the header is to say of its making.
    """

    def __init__(
        self,
        path: Path | str,
        tokenizer: dict[str, Any],
        *,
        suffix: str = ".partial",
        sources: list[str] | None = None,
        loss: bool = False,
        made: dict[str, Any] | None = None,
    ):
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + suffix)
        self._offsets_path = self.path.with_name(self.path.name + suffix + ".offsets")
        self._sums_path = self.path.with_name(self.path.name + suffix + ".checksums")
        self.tokenizer = tokenizer
        self.sources = sources or []
        self.made = made or {}
        self.dtype = np.dtype("<u2" if tokenizer["vocab_size"] <= 1 << 16 else "<u4")
        self.tokens = self.documents = self.source_bytes = self.largest_id = 0
        self._crc, self._in_block = 0, PREAMBLE.size  # of the current block: its checksum so far, and the bytes before here
        self._begin, self._ended = 0, False  # of the current document: its first token, and whether its last is end-of-text
        self._file: BinaryIO = open_locked(self.partial)
        self._offsets: BinaryIO = self._offsets_path.open("w+b")
        self._sums: BinaryIO = self._sums_path.open("w+b")
        self._file.write(bytes(PREAMBLE.size))
        self._offsets.write(struct.pack("<q", 0))
        self._loss_path = self.path.with_name(self.path.name + suffix + ".loss") if loss else None
        self._loss: BinaryIO | None = self._loss_path.open("w+b") if self._loss_path else None
        self._loss_rest = np.empty(0, bool)  # flags of less than a byte
        self.loss = {"tokens": 0, "bytes": 0, "first": 0}

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
                self._end_block()

    def _end_block(self) -> None:
        self._sums.write(struct.pack("<I", self._crc))
        self._crc = self._in_block = 0

    def _put_loss(self, flags: np.ndarray, first: int, num_bytes: int) -> None:
        """`first`: how many of them stand first in a document."""
        if self._loss is None:
            return
        self.loss["tokens"] += int(np.count_nonzero(flags))
        self.loss["bytes"] += num_bytes
        self.loss["first"] += first
        flags = np.concatenate([self._loss_rest, flags])
        whole = flags.size // 8 * 8
        self._loss.write(np.packbits(flags[:whole], bitorder="little").tobytes())
        self._loss_rest = flags[whole:]

    def write(
        self, ids: np.ndarray | list[int], source_bytes: int, loss: np.ndarray | None = None, loss_bytes: int = 0
    ) -> None:
        """Tokens of the current document (or a part of it), which stand for `source_bytes` bytes of text.

        `loss` (bool, as many): which of them count, where the file holds loss bits; these stand for `loss_bytes` of text.
        """
        array = np.asarray(ids)
        if (loss is None) != (self._loss is None) or (loss is not None and loss.shape != array.shape):
            raise ValueError(f"{self.path}: loss flags belong to every token of a file that holds them, and to no other file")
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < self.tokenizer["vocab_size"]:
            raise TokenFileError(
                f"{self.path}: id {int(array.max())} is outside the vocabulary of {self.tokenizer['vocab_size']} tokens"
            )
        if loss is not None:
            first = bool(array.size) and self.tokens == self._begin and bool(loss[0])
            self._put_loss(loss, int(first), loss_bytes)
        self._put(np.ascontiguousarray(array, self.dtype).tobytes())
        self.tokens += array.size
        self.source_bytes += source_bytes
        if array.size:
            self._ended = int(array[-1]) == self.tokenizer["eot"]
            self.largest_id = max(self.largest_id, int(array.max()))

    def end_document(self, loss: bool = False, once: bool = False) -> None:
        """Writes the end-of-text id; with `once` only where the document does not end with it already.

        `loss`: whether that id counts, where the file holds loss bits.
        """
        if not (once and self._ended):
            if self._loss is not None:
                self._put_loss(np.asarray([loss]), int(loss and self.tokens == self._begin), 0)
            self._put(np.asarray([self.tokenizer["eot"]], self.dtype).tobytes())
            self.tokens += 1
            self.largest_id = max(self.largest_id, self.tokenizer["eot"])
        self.documents += 1
        self._begin, self._ended = self.tokens, False
        self._offsets.write(struct.pack("<q", self.tokens))

    def append(self, file: "TokenFile") -> None:
        """All documents of another file of the same kind, without a look into them. Raises TokenFileError for a damaged one."""
        if file.header["tokenizer"] != self.tokenizer or (file.loss_bits is None) != (self._loss is None):
            raise ValueError(f"{file.path} is of another kind than {self.path}")
        step = 1 << 20  # tokens; a multiple of 8
        for first in range(0, file.header["tokens"], step):
            part = file.tokens[first : first + step]
            self._put(part.tobytes())
            if self._loss is not None:
                self._put_loss(file.loss_flags(first, first + part.size), 0, 0)
        if self._loss is not None:
            for key in ("bytes", "first"):
                self.loss[key] += file.header["loss"][key]
        for first in range(1, file.header["documents"] + 1, 1 << 20):
            self._offsets.write((file.doc_offsets[first : first + (1 << 20)] + self.tokens).astype("<i8").tobytes())
        for key in ("tokens", "documents", "source_bytes"):
            setattr(self, key, getattr(self, key) + file.header[key])
        self.largest_id = max(self.largest_id, file.header["largest_id"])
        self._begin, self._ended = self.tokens, False

    def close(self) -> dict[str, Any]:
        """Everything to disk, then the name. Returns the header."""
        header = self.seal()
        self.publish()
        return header

    def seal(self) -> dict[str, Any]:
        """Everything to disk, still under the temporary name. Returns the header."""
        token_bytes = self.tokens * self.dtype.itemsize
        self._put(bytes(_align(token_bytes)))
        if self._loss is not None:
            self._loss.write(np.packbits(self._loss_rest, bitorder="little").tobytes())
            self._loss.flush()
            self._loss.seek(0)
            while data := self._loss.read(1 << 20):
                self._put(data)
            self._put(bytes(_align(loss_bytes(self.tokens))))
        self._offsets.flush()
        self._offsets.seek(0)
        while data := self._offsets.read(1 << 20):
            self._put(data)
        if self._in_block:
            self._end_block()
        loss = None if self._loss is None else self.loss
        content = [self.dtype.str, self.tokens, self.documents, self.tokenizer["sha256"], loss]
        digest, table_crc32 = hashlib.sha256(json.dumps(content).encode()), []
        self._sums.flush()
        self._sums.seek(0)
        while data := self._sums.read(BLOCK):
            self._file.write(data)
            digest.update(data)
            table_crc32.append(zlib.crc32(data))
        header = {
            "dtype": self.dtype.str,
            "tokens": self.tokens,
            "documents": self.documents,
            "source_bytes": self.source_bytes,
            "largest_id": self.largest_id,
            "loss": loss,
            "tokenizer": self.tokenizer,
            "content_sha256": digest.hexdigest(),
            "sources": self.sources,
            "made": self.made,
            "block_bytes": BLOCK,
            "table_crc32": table_crc32,
        }
        encoded = json.dumps(header).encode()
        header_offset = self._file.tell()
        self._file.write(encoded)
        self._file.seek(0)
        self._file.write(PREAMBLE.pack(MAGIC, VERSION, zlib.crc32(encoded), header_offset, len(encoded), b""))
        self._file.flush()
        os.fsync(self._file.fileno())
        return header

    def publish_unless_there(self) -> None:
        """As `publish`, but a file that has the name by now stays: others may be reading it."""
        try:
            os.link(self.partial, self.path)  # replaces nothing, as a rename would
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            if not self.path.exists():
                self.publish()
                return
        self.partial.unlink()
        self._named()

    def publish(self) -> None:
        """The name, after `seal`."""
        os.replace(self.partial, self.path)
        self._named()

    def _named(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself
        finally:
            os.close(folder)
        self._close_files()

    def _close_files(self) -> None:
        with contextlib.ExitStack() as stack:  # all of it, also where closing one fails
            for path in filter(None, (self._offsets_path, self._sums_path, self._loss_path)):
                stack.callback(path.unlink, missing_ok=True)
            for file in filter(None, (self._file, self._offsets, self._sums, self._loss)):
                stack.callback(file.close)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def abort(self) -> None:
        """Leaves nothing behind, also where closing fails because the disk is full."""
        try:
            self._close_files()
        finally:
            self.partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if self.closed:
            return
        if kind is None:
            self.close()
        else:
            self.abort()


class TokenFile:
    """An open token file: the header, and its arrays, which stay on the disk. Made by `TokenFile.open`.

    A slice of an array is read when it is asked for, and checked then: TokenFileError where it is damaged or cut off.
    """

    def __init__(
        self,
        path: Path,
        header: dict[str, Any],
        blocks: Blocks,
        tokens: Column,
        doc_offsets: Column,
        loss_bits: Column | None = None,
    ):
        self.path = path
        self.header = header
        self.blocks = blocks
        self.tokens = tokens  # (tokens,) uint16 or uint32
        self.doc_offsets = doc_offsets  # (documents + 1,) int64
        self.loss_bits = loss_bits  # (ceil(tokens / 8),) uint8; None: every token counts

    @classmethod
    def open(cls, path: Path | str) -> "TokenFile":
        """Reads and checks the preamble, the header and the size. Raises TokenFileError or FileNotFoundError."""
        path = Path(path).expanduser()
        file = OpenFile(path)
        header = _header(file)
        parts = layout(header)
        end, block = parts["documents"].stop, header["block_bytes"]
        blocks = Blocks(file, PREAMBLE.size, end, block, header["table_crc32"], functools.partial(_lies, header))
        tokens = Column(blocks, header["dtype"], parts["tokens"].start, header["tokens"])
        doc_offsets = Column(blocks, "<i8", parts["documents"].start, header["documents"] + 1)
        loss_bits = None if header["loss"] is None else Column(blocks, np.uint8, parts["loss"].start, len(parts["loss"]))
        return cls(path, header, blocks, tokens, doc_offsets, loss_bits)

    def loss_flags(self, first: int, last: int) -> np.ndarray:
        """Whether each of the tokens first..last-1 counts as a target: bool (last - first,)."""
        if self.loss_bits is None:
            return np.ones(last - first, bool)
        bits = np.unpackbits(self.loss_bits[first // 8 : loss_bytes(last)], bitorder="little")
        return bits[first % 8 : first % 8 + last - first].view(bool)


def layout(header: dict[str, Any]) -> dict[str, range]:
    """The bytes of each part of the file, by its name in the format."""
    sizes = {
        "tokens": header["tokens"] * np.dtype(header["dtype"]).itemsize,
        "loss": 0 if header["loss"] is None else loss_bytes(header["tokens"]),
        "documents": 8 * (header["documents"] + 1),
    }
    parts, at = {}, PREAMBLE.size
    for name, size in sizes.items():
        parts[name] = range(at, at + size)
        at += size + _align(size)
    parts["checksums"] = range(at, at + 4 * -(-at // header["block_bytes"]))
    return parts


def _lies(header: dict[str, Any], start: int, stop: int) -> str:
    """What the bytes start..stop-1 are."""
    parts, found = layout(header), []
    per = {"tokens": 1 / np.dtype(header["dtype"]).itemsize, "loss": 8, "documents": 1 / 8}
    for name, what in {"tokens": "tokens", "loss": "loss bits of tokens", "documents": "offsets of documents"}.items():
        part = parts[name]
        if part and start < part.stop and stop > part.start:
            first, last = (int((min(max(at, part.start), part.stop) - part.start) * per[name]) for at in (start, stop))
            count = header["documents" if name == "documents" else "tokens"]
            found.append(f"{what} {first:,} to {min(last, count):,}")
    return ", ".join(found) or "padding"


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header and where the checksums begin, checked against the file's size."""
    header = _header(OpenFile(path))
    return header, layout(header)["checksums"].start


def _header(file: OpenFile) -> dict[str, Any]:
    path, again, copy = file.path, remedy(file.path), remedy(file.path, copied=True)
    preamble = file.read(0, min(file.size, PREAMBLE.size))
    if len(preamble) < PREAMBLE.size or not preamble.startswith(MAGIC):
        raise TokenFileError(f"{path}: not a token file (it does not begin with {MAGIC.decode()}). {again}")
    _, version, crc, offset, length, zeros = PREAMBLE.unpack(preamble)
    if version != VERSION:
        raise TokenFileError(f"{path}: format version {version}; this program reads version {VERSION}. {again}")
    if file.size != offset + length:
        raise TokenFileError(f"{path}: has {file.size:,} bytes, should have {offset + length:,}: cut off or added to. {copy}")
    encoded = file.read(offset, offset + length)
    if zlib.crc32(encoded) != crc or any(zeros):
        raise TokenFileError(
            f"{path}: the header (at byte {offset:,}) does not match its checksum, or the preamble is damaged. {copy}"
        )
    header = json.loads(encoded)
    expected = layout(header)["checksums"].stop
    if offset != expected:
        raise TokenFileError(f"{path}: the header says {expected:,} bytes of data, the file has {offset:,}. {again}")
    return header
