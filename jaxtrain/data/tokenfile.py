"""Token files (`NAME.tok`): tokens of documents, with a header and a checksum.

    bytes 0..63    preamble: magic, format version, crc32, offset and length of the header; zeros
    tokens         uint16 or uint32, little-endian; each document begins with the tokenizer's own first token, if there is one
                   (with --chat: as the template writes the document), and ends with the end-of-text id
    padding        to a multiple of 8
    loss           in files made with --chat or --preference: one bit a token, lowest bit first, set if the token counts as
                   a target; padding to a multiple of 8
    documents      int64 offsets into the tokens: the start of each document, then the end of the last document
    header         JSON: counts, tokenizer, sources, the crc32 of all bytes between preamble and header, and `content_sha256`,
                   a hash of this checksum, the counts and the tokenizer, by which runs know the file

The header comes last because the counts are complete only after the last document. The preamble is written after the header,
and then the file gets its name. So a file that was cut off is never read as complete.

A file is read with pread. If the disk fails or the file was cut off, pread returns an error, whereas a memory map would end
the process with SIGBUS. Only the offsets are memory-mapped, after they were read once.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import mmap
import os
import struct
import tempfile
import weakref
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from jaxtrain.config.commands import to_run_sh

MAGIC = b"jaxtrtok"
VERSION = 10
PAIRS = "pairs"  # key in `made` of the header: documents 2i and 2i + 1 are the chosen and the rejected member of a pair
PREAMBLE = struct.Struct("<8sIIQQ32s")  # magic, version, crc32 of the header, header offset, header length, zeros
COPY_SIZE = 1 << 18  # tokens, documents or bytes copied or compared at a time; a multiple of 8
CHECKED_BYTES = 1 << 30  # a run compares a smaller file with its checksum when it opens the file


class TokenFileError(ValueError):
    """An error: a file is no token file, or is damaged, cut off, or changed while it is read. The message names the file."""


def remedy(path: Path) -> str:
    """Return the sentence of an error message that explains how to replace the unusable file `path`."""
    if path.name.startswith("stdlib-"):  # stdlib.py made it
        return "Delete it: the next run with data.source=stdlib makes it again."
    return to_run_sh(
        "Copy it again from an intact copy, or repeat the python -m jaxtrain data prepare that made it, with --force"
    )


def loss_bytes(tokens: int) -> int:
    """Return the size in bytes of the loss bits of `tokens` tokens, without the padding to a multiple of 8 bytes."""
    return -(-tokens // 8)


def validation_share(documents: int) -> float:
    """Return a share for --validation of which so many documents most likely give some."""
    return next((share for share in (0.001, 0.02, 0.2) if share * documents > 20), 0.5)


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
      tokenizer: the result of `tokenizer_info`.
      sources: names of the inputs, for the header.
      loss: whether the file has loss bits. If True, every `write` needs loss flags.
      recipe: options that made the file, for the header.

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
        recipe: dict[str, Any] | None = None,
    ):
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + suffix)
        self.tokenizer = tokenizer
        self.sources = sources or []
        self.recipe = recipe or {}
        self.dtype = np.dtype("<u2" if tokenizer["vocab_size"] <= 1 << 16 else "<u4")
        self.tokens = self.documents = self.source_bytes = self.first_bytes = self.largest_id = 0
        self.loss = {"tokens": 0, "bytes": 0, "first": 0} if loss else None
        self.turn_ends: set[int] = set()
        self.in_turns: set[int] = set()
        self._crc32 = 0  # of the bytes after the preamble
        self._begin, self._ended = 0, False  # of the current document: its first token, and whether its last is end-of-text
        self._end_counts = False  # whether its last token counts in the loss
        self._files = contextlib.ExitStack()
        self._file: BinaryIO = self._files.enter_context(open_locked(self.partial))
        # Loss flags and offsets come after the tokens, so until the end they are in temporary files without a name.
        unnamed = functools.partial(tempfile.TemporaryFile, dir=self.path.parent)
        self._flags, self._offsets = (self._files.enter_context(unnamed()) for _ in range(2))
        self._file.write(bytes(PREAMBLE.size))
        self._offsets.write(struct.pack("<q", 0))

    def _put(self, data: bytes | memoryview) -> None:
        """Append bytes to the file and to its checksum."""
        self._file.write(data)
        self._crc32 = zlib.crc32(data, self._crc32)

    def _pad(self) -> None:
        self._put(bytes(-self._file.tell() % 8))

    def write(
        self,
        ids: np.ndarray | list[int],
        source_bytes: int,
        loss: np.ndarray | None = None,
        loss_bytes: int = 0,
        first_bytes: int = 0,
    ) -> None:
        """Append tokens to the current document.

        Args:
          ids: token ids, (N,).
          source_bytes: bytes of the text that the ids encode.
          loss: bool (N,), whether each token counts as a target. None if and only if the file has no loss bits.
          loss_bytes: bytes of the text of the tokens that count as targets.
          first_bytes: bytes of the text of the first of the ids. The header has their sum over first tokens of documents, which
            are no target unless documents are predicted across (data.packing=none); with loss bits, only of those that count.
        """
        id_array = np.asarray(ids)
        if (loss is None) != (self.loss is None) or (loss is not None and loss.shape != id_array.shape):
            raise ValueError(
                f"{self.path}: a file with loss bits needs loss flags for every token, and no other file takes any"
            )
        if id_array.size:
            largest = int(id_array.max())
            if id_array.min() < 0 or largest >= self.tokenizer["vocab_size"]:
                raise TokenFileError(
                    f"{self.path}: id {largest} is outside the vocabulary of {self.tokenizer['vocab_size']} tokens"
                )
            self.largest_id = max(self.largest_id, largest)
            self._ended = int(id_array[-1]) == self.tokenizer["eot"]
            self._end_counts = loss is not None and bool(loss[-1])
        first = id_array.size and self.tokens == self._begin and (loss is None or loss[0])
        self.first_bytes += first_bytes if first else 0
        if self.loss is not None and loss is not None:
            for key, count in (("tokens", np.count_nonzero(loss)), ("bytes", loss_bytes), ("first", first)):
                self.loss[key] += int(count)
            self._flags.write(loss.astype(bool).tobytes())
        self._put(np.ascontiguousarray(id_array, self.dtype).data)
        self.tokens += id_array.size
        self.source_bytes += source_bytes

    def end_document(self, loss: bool = False, once: bool = False) -> None:
        """End the current document with the end-of-text id. If `once` and the document ends with this id already, add none.

        loss: whether the added end-of-text token counts as a target, in a file with loss bits.
        """
        if not (once and self._ended):
            self.write([self.tokenizer["eot"]], 0, None if self.loss is None else np.asarray([loss]))
        if self._end_counts:
            self.turn_ends.add(self.tokenizer["eot"])
        self.documents += 1
        self._begin, self._ended = self.tokens, False
        self._offsets.write(struct.pack("<q", self.tokens))

    def ends(self) -> list[int]:
        """Return `turn_ends` without `in_turns`, unless nothing would be left: the ids at which a text of the model is over."""
        return sorted(self.turn_ends - self.in_turns or self.turn_ends)

    def append(self, file: "TokenFile") -> None:
        """Append all documents of another token file with the same tokenizer. Raises TokenFileError if `file` is damaged."""
        header = file.header
        if header["tokenizer"] != self.tokenizer or (file.loss_bits is None) != (self.loss is None):
            raise ValueError(f"{file.path} is of another kind than {self.path}")
        file.check()
        for first in range(0, header["tokens"], COPY_SIZE):
            self._put(file.tokens[first : first + COPY_SIZE].data)
        if self.loss is not None:
            for first in range(0, header["tokens"], COPY_SIZE):
                self._flags.write(file.loss_flags(first, min(first + COPY_SIZE, header["tokens"])).tobytes())
            for key, count in header["loss"].items():
                self.loss[key] += count
        for first in range(1, header["documents"] + 1, COPY_SIZE):
            self._offsets.write((file.doc_offsets[first : first + COPY_SIZE] + self.tokens).astype("<i8").tobytes())
        for key in ("tokens", "documents", "source_bytes", "first_bytes"):
            setattr(self, key, getattr(self, key) + header[key])
        self.turn_ends |= set(header["all_turn_ends"])
        self.in_turns |= set(header["in_turns"])
        self.largest_id = max(self.largest_id, header["largest_id"])
        self._begin, self._ended = self.tokens, False

    def close(self) -> dict[str, Any]:
        """Write the complete file to the disk, then rename it to `path`. Return the header."""
        header = self.seal()
        self.publish()
        return header

    def seal(self) -> dict[str, Any]:
        """Write the complete file to the disk, still under the temporary name. Return the header."""
        self._pad()
        self._flags.seek(0)
        while flags := self._flags.read(COPY_SIZE):
            self._put(np.packbits(np.frombuffer(flags, bool), bitorder="little").data)
        self._pad()
        self._offsets.seek(0)
        while offsets := self._offsets.read(COPY_SIZE):
            self._put(offsets)
        header = {
            "dtype": self.dtype.str,
            "tokens": self.tokens,
            "documents": self.documents,
            "source_bytes": self.source_bytes,
            "first_bytes": self.first_bytes,
            "largest_id": self.largest_id,
            "loss": self.loss,
            "turn_ends": self.ends(),
            "all_turn_ends": sorted(self.turn_ends),
            "in_turns": sorted(self.in_turns),
            "tokenizer": self.tokenizer,
            "sources": self.sources,
            "made": self.recipe,
            "crc32": self._crc32,
        }
        content = [*(header[key] for key in ("dtype", "tokens", "documents", "loss", "crc32")), self.tokenizer["sha256"]]
        header["content_sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        encoded = json.dumps(header).encode()
        offset = self._file.tell()
        self._file.write(encoded)
        self._file.seek(0)
        self._file.write(PREAMBLE.pack(MAGIC, VERSION, zlib.crc32(encoded), offset, len(encoded), b""))
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


class OpenFile:
    """A file open for reading, with the size in bytes and the modification time that it had when it was opened."""

    def __init__(self, path: Path):
        self.path = path
        if path.is_dir():
            raise TokenFileError(f"{path}: is a folder, and no token file")
        self.fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.fd).atexit = False  # a thread may still be reading
        stat = os.fstat(self.fd)
        self.size, self._mtime_ns = stat.st_size, stat.st_mtime_ns

    def read(self, start: int, out: np.ndarray) -> np.ndarray:
        """Fill the contiguous array `out` with the bytes of the file from `start` on, and return it. Raises TokenFileError."""
        bytes_read, reason = 0, "the file ends there"
        try:
            count = bytes_read = os.preadv(self.fd, [out], start)
            # On a network file system, or beyond 2 GiB, a call may read less than asked for.
            while count and bytes_read < out.nbytes:
                count = os.preadv(self.fd, [out.view(np.uint8)[bytes_read:]], start + bytes_read)
                bytes_read += count
        except OSError as e:
            reason = e.strerror
        if bytes_read < out.nbytes:
            self.check_unchanged()
            fix = "Check its file system and its disk. A run that is started again resumes from its last checkpoint."
            raise TokenFileError(
                f"{self.path}: bytes {start + bytes_read:,} to {start + out.nbytes:,} cannot be read ({reason}). {fix}"
            )
        return out

    def check_unchanged(self) -> None:
        """Raise TokenFileError if another program has changed the file since it was opened.

        Deleting the file, or renaming another file to its name, is no change: the open file keeps its contents.
        """
        stat = os.fstat(self.fd)
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self._mtime_ns):
            change = "written to" if stat.st_size == self.size else f"{self.size:,} bytes, now {stat.st_size:,}"
            raise TokenFileError(
                f"{self.path}: has changed while it was being read ({change}). Put the former file back, and start the run "
                "again: it resumes from its last checkpoint."
            )


class FileColumn:
    """One array of a token file, of `size` elements from byte `begin` to `end`. It stays on the disk: slicing reads."""

    def __init__(self, file: OpenFile, dtype: Any, begin: int, size: int):
        self.file, self.dtype, self.begin, self.size = file, np.dtype(dtype), begin, size
        end = begin + size * self.dtype.itemsize
        self.end = end + -end % 8  # with the padding

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: slice) -> np.ndarray:
        first, last, step = key.indices(self.size)
        if step != 1:
            raise IndexError(f"{self.file.path}: is read in slices of step 1, not {step}")
        return self.read(first, np.empty(max(0, last - first), self.dtype))

    def read(self, first: int, out: np.ndarray) -> np.ndarray:
        """Fill `out` with the elements from number `first` on, and return it. Raises TokenFileError."""
        return self.file.read(self.begin + first * self.dtype.itemsize, out)

    @functools.cached_property
    def mapped(self) -> np.ndarray:
        """The array, memory-mapped. It is read once before, since an error of the disk in a memory map ends the process."""
        for first in range(0, self.size, COPY_SIZE):
            self[first : first + COPY_SIZE]
        mapped = mmap.mmap(self.file.fd, self.end, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_RANDOM)  # without this, the kernel reads megabytes around every page
        return np.frombuffer(mapped, self.dtype, self.size, self.begin)


class TokenFile:
    """An open token file, made by `TokenFile.open`. Reading raises TokenFileError if the disk fails.

    Attributes: `tokens` (tokens,), uint16 or uint32; `loss_bits` (ceil(tokens / 8),), uint8, None if every token counts as a
    target.
    """

    def __init__(self, file: OpenFile, header: dict[str, Any]):
        self.opened = file
        self.path = file.path
        self.header = header
        self.tokens = FileColumn(file, header["dtype"], PREAMBLE.size, header["tokens"])
        loss = FileColumn(file, np.uint8, self.tokens.end, loss_bytes(header["tokens"]) if header["loss"] else 0)
        self.loss_bits = loss if header["loss"] else None
        self._offsets = FileColumn(file, "<i8", loss.end, header["documents"] + 1)

    @classmethod
    def open(cls, path: Path | str) -> "TokenFile":
        """Read and check preamble, header and size. Raises TokenFileError or FileNotFoundError."""
        path = Path(path).expanduser()
        file = OpenFile(path)
        preamble = file.read(0, np.empty(min(PREAMBLE.size, file.size), np.uint8))
        magic, version, crc, offset, length, zeros = PREAMBLE.unpack(preamble.tobytes().ljust(PREAMBLE.size))
        if magic != MAGIC or file.size < PREAMBLE.size:
            fault = f"not a token file (it does not begin with {MAGIC.decode()})"
        elif version != VERSION:
            fault = f"format version {version}; this program reads version {VERSION}"
        elif file.size != offset + length:
            fault = f"has {file.size:,} bytes, should have {offset + length:,}: cut off or added to"
        elif zlib.crc32(encoded := file.read(offset, np.empty(length, np.uint8)).tobytes()) != crc or any(zeros):
            fault = f"the header (at byte {offset:,}) does not match its checksum, or the preamble is damaged"
        else:
            return cls(file, json.loads(encoded))
        raise TokenFileError(f"{path}: {fault}. {remedy(path)}")

    def check(self) -> None:
        """Read the complete file and compare it with its checksum. Raises TokenFileError if it differs."""
        crc32, end = 0, self._offsets.end
        for first in range(PREAMBLE.size, end, COPY_SIZE):
            crc32 = zlib.crc32(self.opened.read(first, np.empty(min(COPY_SIZE, end - first), np.uint8)), crc32)
        self.opened.check_unchanged()
        if crc32 != self.header["crc32"]:
            raise TokenFileError(f"{self.path}: does not match its checksum. {remedy(self.path)}")

    @property
    def doc_offsets(self) -> np.ndarray:
        """The start of each document in the tokens, then the end of the last document: (documents + 1,), int64."""
        return self._offsets.mapped

    @property
    def pairs(self) -> bool:
        """Return whether documents 2i and 2i + 1 are the chosen and the rejected member of a pair."""
        return bool(self.header["made"].get(PAIRS))

    def loss_flags(self, first: int, last: int) -> np.ndarray:
        """Return whether each of the tokens first..last-1 counts as a target: bool (last - first,)."""
        if self.loss_bits is None:
            return np.ones(last - first, bool)
        bits = np.unpackbits(self.loss_bits.mapped[first // 8 : loss_bytes(last)], bitorder="little")
        return bits[first % 8 : first % 8 + last - first].view(bool)


def verify_file(path: Path | str) -> str:
    """Read the complete file. Return what is wrong with it; "" if nothing is."""
    try:
        TokenFile.open(path).check()
    except (TokenFileError, OSError) as e:
        return str(e)
    return ""
