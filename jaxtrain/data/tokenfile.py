"""Token files (`NAME.tok`): tokens of documents, with a header and checksums.

    bytes 0..63    preamble: magic, format version, crc32, offset and length of the header; zeros
    tokens         uint16 or uint32, little-endian; each document begins with the tokenizer's own first token, if there is one
                   (with --chat: as the template writes the document), and ends with the end-of-text id
    padding        to a multiple of 8
    loss           in files made with --chat or --preference: one bit a token, lowest bit first, set if the token counts as
                   a target; padding to a multiple of 8
    documents      int64 offsets into the tokens: the start of each document, then the end of the last document
    checksums      uint32, the crc32 of each 16 KiB block of the file up to here; the first block excludes the preamble
    header         JSON: counts, tokenizer, sources, and the crc32 of the checksums

The header comes last because the counts are complete only after the last document. The preamble is written after the header,
and then the file gets its name. So a file that was cut off is never read as complete. checked.py compares blocks with their
checksums.
"""

import array
import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from jaxtrain.data.checked import Blocks, Column, OpenFile, TokenFileError, remedy

MAGIC = b"jaxtrtok"
VERSION = 8
BLOCK = 16 << 10  # bytes under one checksum: a row of a batch needs two or three blocks, and their checksums are 0.02%
PAIRS = "pairs"  # key in `made` of the header: documents 2i and 2i + 1 are the chosen and the rejected member of a pair
PREAMBLE = struct.Struct("<8sIIQQ32s")  # magic, version, crc32 of the header, header offset, header length, zeros
COPIED = 1 << 20  # tokens, documents or bytes copied or compared at a time; a multiple of 8


def _align(n: int) -> int:
    return -n % 8


def loss_bytes(tokens: int) -> int:
    """Return the size in bytes of the loss bits of `tokens` tokens, without the padding to a multiple of 8 bytes."""
    return -(-tokens // 8)


def open_locked(path: Path) -> BinaryIO:
    """Open a file for writing, empty and locked against other processes. Raises TokenFileError if another process has it."""
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
            # The file system has no locks. The rename at the end still keeps readers safe.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            os.ftruncate(file.fileno(), 0)
            return file
        file.close()  # another process has finished and renamed this file in the meantime: open the path again


class TokenWriter:
    """A writer of a token file: it streams documents to the disk, in almost constant memory.

    Finish with `close` (`seal`, then `publish`), or with `abort`. At the end of a `with` block the writer closes; after an
    exception it aborts. The file has the name `path + suffix` until it is completely on the disk.

    Args:
      tokenizer: the result of `tokenizer.info`.
      sources: names of the inputs, for the header.
      loss: whether the file has loss bits. If True, every `write` needs loss flags.
      made: options that made the file, for the header.

    Attributes:
      turn_ends: ids that end an assistant's turn, or a document, and count in the loss; of files with loss bits.
      in_turns: ids of control tokens inside of such turns. A model that stopped there would not finish its answer.
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
        self.tokenizer = tokenizer
        self.sources = sources or []
        self.made = made or {}
        self.dtype = np.dtype("<u2" if tokenizer["vocab_size"] <= 1 << 16 else "<u4")
        self.tokens = self.documents = self.source_bytes = self.largest_id = 0
        self.loss = {"tokens": 0, "bytes": 0, "first": 0} if loss else None
        self.turn_ends: set[int] = set()
        self.in_turns: set[int] = set()
        self._sums = array.array("I")  # the crc32 of each finished block
        self._crc, self._in_block = 0, PREAMBLE.size  # of the current block: its checksum and number of bytes so far
        self._begin, self._ended = 0, False  # of the current document: its first token, and whether its last is end-of-text
        self._end_counts = False  # whether its last token counts in the loss
        self._loss_rest = np.empty(0, bool)  # flags that do not fill a byte yet
        self._files = contextlib.ExitStack()
        self._file: BinaryIO = self._files.enter_context(open_locked(self.partial))
        # Loss bits and offsets come after the tokens, so until the end they are in temporary files without a name.
        unnamed = functools.partial(tempfile.TemporaryFile, dir=self.path.parent)
        self._loss, self._offsets = (self._files.enter_context(unnamed()) for _ in range(2))
        self._file.write(bytes(PREAMBLE.size))
        self._offsets.write(struct.pack("<q", 0))

    def _put(self, data: bytes | memoryview) -> None:
        """Append bytes to the file, and update the checksums of its blocks."""
        self._file.write(data)
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: BLOCK - self._in_block]
            self._crc = zlib.crc32(part, self._crc)
            self._in_block += len(part)
            view = view[len(part) :]
            if self._in_block == BLOCK:
                self._end_block()

    def _end_block(self) -> None:
        self._sums.append(self._crc)
        self._crc = self._in_block = 0

    def _put_file(self, file: BinaryIO) -> None:
        file.seek(0)
        while data := file.read(COPIED):
            self._put(data)

    def _put_loss(self, flags: np.ndarray, first: int, num_bytes: int) -> None:
        """Append loss flags, and add to the counts of the header. Without loss bits, do nothing.

        Args:
          first: number of True flags on first tokens of documents.
          num_bytes: bytes of the text of the tokens that count in the loss.
        """
        if self.loss is None:
            return
        for key, count in (("tokens", int(np.count_nonzero(flags))), ("bytes", num_bytes), ("first", first)):
            self.loss[key] += count
        flags = np.concatenate([self._loss_rest, flags])
        whole = flags.size // 8 * 8
        self._loss.write(np.packbits(flags[:whole], bitorder="little").tobytes())
        self._loss_rest = flags[whole:]

    def write(
        self, ids: np.ndarray | list[int], source_bytes: int, loss: np.ndarray | None = None, loss_bytes: int = 0
    ) -> None:
        """Append tokens to the current document.

        Args:
          ids: token ids, (N,).
          source_bytes: bytes of the text that the ids encode.
          loss: bool (N,), whether each token counts as a target. None if and only if the file has no loss bits.
          loss_bytes: bytes of the text of the tokens that count as targets.
        """
        found = np.asarray(ids)
        if (loss is None) != (self.loss is None) or (loss is not None and loss.shape != found.shape):
            raise ValueError(
                f"{self.path}: a file with loss bits needs loss flags for every token, and no other file takes any"
            )
        if found.size:
            largest = int(found.max())
            if found.min() < 0 or largest >= self.tokenizer["vocab_size"]:
                raise TokenFileError(
                    f"{self.path}: id {largest} is outside the vocabulary of {self.tokenizer['vocab_size']} tokens"
                )
            self.largest_id = max(self.largest_id, largest)
            self._ended = int(found[-1]) == self.tokenizer["eot"]
            self._end_counts = loss is not None and bool(loss[-1])
        if loss is not None:
            first = bool(found.size) and self.tokens == self._begin and bool(loss[0])
            self._put_loss(loss, int(first), loss_bytes)
        self._put(np.ascontiguousarray(found, self.dtype).data)
        self.tokens += found.size
        self.source_bytes += source_bytes

    def end_document(self, loss: bool = False, once: bool = False) -> None:
        """End the current document with the end-of-text id. If `once` and the document ends with this id already, add none.

        loss: whether the added end-of-text token counts as a target, in a file with loss bits.
        """
        if once and self._ended:
            self.turn_ends |= {self.tokenizer["eot"]} if self._end_counts else set()
        else:
            self.turn_ends |= {self.tokenizer["eot"]} if loss else set()
            self._put_loss(np.asarray([loss]), int(loss and self.tokens == self._begin), 0)
            self._put(np.asarray([self.tokenizer["eot"]], self.dtype).data)
            self.tokens += 1
            self.largest_id = max(self.largest_id, self.tokenizer["eot"])
        self.documents += 1
        self._begin, self._ended = self.tokens, False
        self._offsets.write(struct.pack("<q", self.tokens))

    def ends(self) -> list[int]:
        """Return `turn_ends` without `in_turns`, unless nothing would be left: the ids at which a text of the model is over."""
        return sorted(self.turn_ends - self.in_turns or self.turn_ends)

    def append(self, file: "TokenFile") -> None:
        """Append all documents of another token file with the same tokenizer. Raises TokenFileError if `file` is damaged."""
        if file.header["tokenizer"] != self.tokenizer or (file.loss_bits is None) != (self.loss is None):
            raise ValueError(f"{file.path} is of another kind than {self.path}")
        for first in range(0, file.header["tokens"], COPIED):
            part = file.tokens[first : first + COPIED]
            self._put(part.data)
            if self.loss is not None:
                self._put_loss(file.loss_flags(first, first + part.size), 0, 0)
        if self.loss is not None:
            for key in ("bytes", "first"):
                self.loss[key] += file.header["loss"][key]
        for first in range(1, file.header["documents"] + 1, COPIED):
            self._offsets.write((file.doc_offsets[first : first + COPIED] + self.tokens).astype("<i8").tobytes())
        for key in ("tokens", "documents", "source_bytes"):
            setattr(self, key, getattr(self, key) + file.header[key])
        self.turn_ends |= set(file.header["all_turn_ends"])
        self.in_turns |= set(file.header["in_turns"])
        self.largest_id = max(self.largest_id, file.header["largest_id"])
        self._begin, self._ended = self.tokens, False

    def close(self) -> dict[str, Any]:
        """Write the complete file to the disk, then rename it to `path`. Return the header."""
        header = self.seal()
        self.publish()
        return header

    def seal(self) -> dict[str, Any]:
        """Write the complete file to the disk, still under the temporary name. Return the header."""
        self._put(bytes(_align(self.tokens * self.dtype.itemsize)))
        if self.loss is not None:
            self._loss.write(np.packbits(self._loss_rest, bitorder="little").tobytes())
            self._put_file(self._loss)
            self._put(bytes(_align(loss_bytes(self.tokens))))
        self._put_file(self._offsets)
        if self._in_block:
            self._end_block()
        sums = np.asarray(self._sums, "<u4").tobytes()
        content = [self.dtype.str, self.tokens, self.documents, self.tokenizer["sha256"], self.loss]
        header = {
            "dtype": self.dtype.str,
            "tokens": self.tokens,
            "documents": self.documents,
            "source_bytes": self.source_bytes,
            "largest_id": self.largest_id,
            "loss": self.loss,
            "turn_ends": self.ends(),
            "all_turn_ends": sorted(self.turn_ends),
            "in_turns": sorted(self.in_turns),
            "tokenizer": self.tokenizer,
            "content_sha256": hashlib.sha256(json.dumps(content).encode() + sums).hexdigest(),
            "sources": self.sources,
            "made": self.made,
            "block_bytes": BLOCK,
            "checksums_crc32": zlib.crc32(sums),
        }
        encoded = json.dumps(header).encode()
        self._file.write(sums)
        header_offset = self._file.tell()
        self._file.write(encoded)
        self._file.seek(0)
        self._file.write(PREAMBLE.pack(MAGIC, VERSION, zlib.crc32(encoded), header_offset, len(encoded), b""))
        self._file.flush()
        os.fsync(self._file.fileno())
        return header

    def publish(self, keep: bool = False) -> None:
        """Rename the file from the temporary name to `path`, after `seal`.

        keep: if `path` exists, keep that file, which other processes may be reading, and delete this one.
        """
        try:
            if keep:
                os.link(self.partial, self.path)  # a link, unlike a rename, replaces no existing file
        except OSError:  # a file of that name exists, or the file system has no links
            keep = self.path.exists()
        if keep:
            self.partial.unlink()
        else:
            os.replace(self.partial, self.path)
        self._files.close()

    def abort(self) -> None:
        """Delete the temporary file, even if closing it fails because the disk is full."""
        try:
            self._files.close()
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
    """An open token file: its header, and its arrays, memory-mapped (`Column`). Made by `TokenFile.open`.

    Attributes: `tokens` (tokens,), uint16 or uint32; `doc_offsets` (documents + 1,), int64; `loss_bits` (ceil(tokens / 8),),
    uint8, None if every token counts as a target.
    """

    def __init__(self, path: Path, header: dict[str, Any], blocks: Blocks):
        self.path = path
        self.header = header
        self.blocks = blocks
        parts = layout(header)
        self.tokens = Column(blocks, header["dtype"], parts["tokens"].start, header["tokens"])
        self.doc_offsets = Column(blocks, "<i8", parts["documents"].start, header["documents"] + 1)
        self.loss_bits = header["loss"] and Column(blocks, np.uint8, parts["loss"].start, len(parts["loss"]))

    @classmethod
    def open(cls, path: Path | str) -> "TokenFile":
        """Read and check preamble, header, checksums and size. Raises TokenFileError or FileNotFoundError."""
        path = Path(path).expanduser()
        file = OpenFile(path)
        header = _header(file)
        at = layout(header)["checksums"]
        sums = file.read(at.start, at.stop)
        if zlib.crc32(sums) != header["checksums_crc32"]:
            where = f"the checksums of blocks (bytes {at.start:,} to {at.stop:,})"
            raise TokenFileError(f"{path}: {where} do not match their own checksum. {remedy(path)}")
        blocks = Blocks(file, PREAMBLE.size, at.start, header["block_bytes"], np.frombuffer(sums, "<u4"))
        return cls(path, header, blocks)

    @property
    def pairs(self) -> bool:
        """Return whether documents 2i and 2i + 1 are the chosen and the rejected member of a pair."""
        return bool(self.header["made"].get(PAIRS))

    def loss_flags(self, first: int, last: int) -> np.ndarray:
        """Return whether each of the tokens first..last-1 counts as a target: bool (last - first,)."""
        if self.loss_bits is None:
            return np.ones(last - first, bool)
        bits = np.unpackbits(self.loss_bits[first // 8 : loss_bytes(last)], bitorder="little")
        return bits[first % 8 : first % 8 + last - first].view(bool)


def layout(header: dict[str, Any]) -> dict[str, range]:
    """Return name -> range of bytes in the file, for tokens, loss, documents and checksums."""
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


def _header(file: OpenFile) -> dict[str, Any]:
    """Return the header, after checks of its checksum and of the file's size. Raises TokenFileError."""
    path, fix = file.path, remedy(file.path)
    preamble = file.read(0, min(file.size, PREAMBLE.size))
    if len(preamble) < PREAMBLE.size or not preamble.startswith(MAGIC):
        raise TokenFileError(f"{path}: not a token file (it does not begin with {MAGIC.decode()}). {fix}")
    _, version, crc, offset, length, zeros = PREAMBLE.unpack(preamble)
    if version != VERSION:
        raise TokenFileError(f"{path}: format version {version}; this program reads version {VERSION}. {fix}")
    if file.size != offset + length:
        raise TokenFileError(f"{path}: has {file.size:,} bytes, should have {offset + length:,}: cut off or added to. {fix}")
    encoded = file.read(offset, offset + length)
    if zlib.crc32(encoded) != crc or any(zeros):
        raise TokenFileError(
            f"{path}: the header (at byte {offset:,}) does not match its checksum, or the preamble is damaged. {fix}"
        )
    header = json.loads(encoded)
    expected = layout(header)["checksums"].stop
    if offset != expected:
        raise TokenFileError(f"{path}: the header says {expected:,} bytes of data, the file has {offset:,}. {fix}")
    return header


def verify(path: Path | str) -> list[str]:
    """Read the complete file. Return a line for each range of damaged blocks; without damage, the result of `contradictions`.

    If the file cannot be opened or read, the one line is the error.
    """
    path = Path(path).expanduser()
    try:
        file = TokenFile.open(path)
        if damaged := file.blocks.faults():
            return [f"{path}: {fault}" for fault in damaged]
        file.blocks.file.look()
        return [f"{path}: {fault}" for fault in contradictions(file)]
    except (TokenFileError, OSError) as e:
        return [str(e)]


def contradictions(file: TokenFile) -> Iterator[str]:
    """Yield the contradictions between a file's arrays and its header. Reads the complete file; raises TokenFileError."""
    header, offsets = file.header, file.doc_offsets
    tokens, vocab, eot = header["tokens"], header["tokenizer"]["vocab_size"], header["tokenizer"]["eot"]
    whole = offsets[0] == 0 and offsets[-1] == tokens
    if not whole:
        yield f"documents span {offsets[0]:,} to {offsets[-1]:,}, tokens 0 to {tokens:,}"
    for first in range(0, header["documents"], COPIED):
        bad = np.flatnonzero(np.diff(offsets[first : first + COPIED + 1]) <= 0)
        if bad.size:
            whole = False
            yield f"document {first + int(bad[0]):,} ends at or before its start"
            break
    if file.pairs and header["documents"] % 2:
        yield f"it holds pairs, and {header['documents']:,} documents: one is without the other"
    seen = counted = document = 0
    for first in range(0, tokens, COPIED):
        part = file.tokens[first : first + COPIED]
        last = first + len(part)
        seen = max(seen, largest := int(part.max()))
        if largest >= vocab:
            yield f"id {largest} among tokens {first:,} to {last:,}; the vocabulary has {vocab}"
        if header["loss"] is not None:
            counted += int(np.count_nonzero(file.loss_flags(first, last)))
        while whole and document < header["documents"]:
            ends = offsets[document + 1 : document + 1 + COPIED]
            here = ends[: np.searchsorted(ends, last, "right")]
            bad = np.flatnonzero(part[here - 1 - first] != eot)
            if bad.size:
                whole = False
                yield f"document {document + int(bad[0]):,} does not end with end-of-text"
            document += len(here)
            if len(here) < len(ends):
                break
    if seen != header["largest_id"]:
        yield f"the largest id is {seen}, the header says {header['largest_id']}"
    if header["loss"] is not None and counted != header["loss"]["tokens"]:
        yield f"{counted:,} tokens have the loss bit, the header says {header['loss']['tokens']:,}"
