"""Text, JSON lines and Parquet as documents, streamed, with every bad line named; and where a file may be cut for processes."""

import bz2
import codecs
import gzip
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from jaxtrain.data import datasets_input
from jaxtrain.data.rows import Piece, Rows
from jaxtrain.data.template import RowError

FORMATS = ("auto", "text", "jsonl", "parquet")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
PIECE_BYTES = 4 << 20  # longer text files are encoded in pieces, cut after a line
BATCH_ROWS = 1024  # Parquet rows decoded at once


class PrepareError(ValueError):
    """The command or its input is wrong; the message names the file or option."""


@dataclass(frozen=True)
class Cut:
    """A part of one input that one process reads: all of it, the lines that start in bytes begin..end, or row groups."""

    path: str
    kind: str  # text | jsonl | parquet | dataset
    size: int  # bytes of the part, for progress: exact but for row groups, which are taken for equal ones
    begin: int = 0
    end: int = -1  # -1: to the end


@dataclass
class Input:
    """A part being read: where it stands and how many lines of it were bad."""

    cut: Cut
    rows: Rows
    report: Callable[[str], None]
    done: int = 0  # bytes of the part read
    bad: int = 0

    @property
    def path(self) -> Path:
        return Path(self.cut.path)

    def reject(self, line: int, reason: str) -> None:
        self.bad += 1
        self.report(f"{self.cut.path}:{line}: {reason}")


def detect_format(path: Path) -> str:
    """text | jsonl | parquet, by the file's name. Raises PrepareError for names that say it is neither."""
    name = path.name.lower()
    for packed in COMPRESSED:
        name = name.removesuffix(packed)
    suffix = Path(name).suffix
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix in (".parquet", ".pq"):
        if name != path.name.lower():
            raise PrepareError(f"{path}: a Parquet file is compressed inside; unpack it first.")
        return "parquet"
    if suffix in (".json", ".csv", ".tsv", ".arrow"):
        raise PrepareError(
            f"{path}: {suffix} can mean several things. Give --format=jsonl for one JSON object a line, or --format=text for "
            "one document a file."
        )
    if suffix == ".tok":
        raise PrepareError(f"{path}: is already a token file. Choose an --input that leaves it out.")
    if suffix in (".zip", ".tar", ".tgz", ".7z"):
        raise PrepareError(
            f"{path}: {suffix} files are not read. Unpack it to .txt, .jsonl or .parquet ({', '.join(COMPRESSED)} are read as "
            "they are)."
        )
    return "text"


class _Zstandard(io.RawIOBase):
    """A .zst file unpacked. The package's own reader takes a file that was cut off for whole."""

    def __init__(self, raw: BinaryIO):
        import zstandard

        self._raw = raw
        self._error = zstandard.ZstdError
        self._new = lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self._frame = self._new()
        self._begun = False
        self._input = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._input or self._raw.read(1 << 18)
            self._input = b""
            if not data:
                if self._begun:
                    raise EOFError("the last zstandard frame is cut off")
                return 0
            self._begun = True
            try:
                self._ready = self._frame.decompress(data)
            except self._error as e:
                raise OSError(str(e)) from e
            if self._frame.eof:
                self._input, self._frame, self._begun = self._frame.unused_data, self._new(), False
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def open_binary(path: Path, raw: BinaryIO) -> BinaryIO:
    """The file unpacked, where its name says that it is compressed."""
    match path.suffix.lower():
        case ".gz":
            return cast(BinaryIO, gzip.open(raw))
        case ".bz2":
            return cast(BinaryIO, bz2.open(raw))
        case ".xz":
            return cast(BinaryIO, lzma.open(raw))
        case ".zst":
            return cast(BinaryIO, io.BufferedReader(_Zstandard(raw), 1 << 18))
    return raw


def read_text(source: Input) -> Iterator[Piece]:
    """The file is one document. A part of it is in memory at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with source.path.open("rb") as raw, open_binary(source.path, raw) as f:
        line, started = 1, False
        data = f.read(PIECE_BYTES)
        while data:
            data += f.readline(PIECE_BYTES)
            following = f.read(PIECE_BYTES)
            try:
                text = decoder.decode(data, final=not following)
            except UnicodeDecodeError as e:
                reason = f"not UTF-8 ({e.reason}, byte {e.object[e.start]:#04x})"
                source.reject(line + e.object.count(b"\n", 0, e.start), reason)
                if started:  # what went before it stays, where bad lines are skipped
                    yield Piece("", 0)
                return
            yield Piece(text, len(text.encode()), end=not following)
            started = True
            line += data.count(b"\n")
            data = following
            source.done = raw.tell()


def read_jsonl(source: Input) -> Iterator[Piece]:
    """Every line is a JSON object that makes a document; blank lines are skipped."""
    begin, end = source.cut.begin, source.cut.end
    with source.path.open("rb") as raw, open_binary(source.path, raw) as f:
        if begin:  # to the first line that starts in the part: the byte before it ends a line, or is within one
            f.seek(begin - 1)
            begin += len(f.readline()) - 1
        at, before = begin, -1  # lines of the file before the part: counted where a bad one is to be named
        for number, line in enumerate(f, 1):
            if 0 <= end <= at:
                return
            at += len(line)
            source.done = at - begin if source.cut.end >= 0 else raw.tell()
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode())
                if isinstance(record, dict):
                    piece = source.rows.piece(record)
                    if piece is not None:
                        yield piece
                    continue
                reason = f"is a JSON {type(record).__name__}, not an object"
            except UnicodeDecodeError as e:
                reason = f"not UTF-8 ({e.reason}, column {e.start + 1})"
            except json.JSONDecodeError as e:
                reason = f"not JSON ({e.msg}, column {e.colno})"
            except RecursionError:
                reason = "not JSON that can be read (nested too deeply)"
            except RowError as e:
                reason = str(e)
            before = _count_lines(source.path, begin) if before < 0 else before
            source.reject(before + number, reason)


def _count_lines(path: Path, end: int) -> int:
    """Lines that end in the first `end` bytes."""
    count = 0
    with path.open("rb") as f:
        while end > 0 and (data := f.read(min(end, 1 << 22))):
            count += data.count(b"\n")
            end -= len(data)
    return count


def read_parquet(source: Input) -> Iterator[Piece]:
    """Every row is a document; the rows of a row group that are decoded at once are in memory."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            try:
                columns = source.rows.columns(file.schema_arrow.names)
            except RowError as e:
                raise PrepareError(f"{source.path}: {e}") from e
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
            last = len(sizes) if source.cut.end < 0 else source.cut.end
            groups = range(source.cut.begin, last)
            number, rows = sum(sizes[: groups.start]), max(1, sum(sizes[groups.start : groups.stop]))
            first = number
            for batch in file.iter_batches(BATCH_ROWS, row_groups=list(groups), columns=columns, use_threads=False):
                for i in range(batch.num_rows):
                    number += 1
                    try:
                        row = {name: batch.column(name)[i].as_py() for name in columns}
                        piece = source.rows.piece(row)
                    except UnicodeDecodeError as e:
                        source.reject(number, f"not UTF-8 ({e.reason})")
                    except RowError as e:
                        source.reject(number, str(e))
                    else:
                        if piece is not None:
                            yield piece
                source.done = source.cut.size * (number - first) // rows
    except pyarrow.ArrowException as e:
        raise PrepareError(f"{source.path}: not readable as Parquet ({e})") from e


def read_dataset(source: Input) -> Iterator[Piece]:
    """Rows of one part of a data set by name."""
    try:
        for number, row in datasets_input.rows(source.cut.path, source.cut.begin, source.cut.end, source.rows.columns):
            try:
                piece = source.rows.piece(row)
            except RowError as e:
                source.reject(number, f"{e} (row {number} of part {source.cut.begin + 1})")
            else:
                if piece is not None:
                    yield piece
    except datasets_input.DatasetError as e:
        raise PrepareError(str(e)) from e


def read(source: Input) -> Iterator[Piece]:
    """The documents of a part of any kind. Raises PrepareError where it cannot be read to its end."""
    try:
        yield from READERS[source.cut.kind](source)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as e:
        raise PrepareError(f"{source.cut.path}: cannot be read to its end ({e})") from e


READERS: dict[str, Callable[[Input], Iterator[Piece]]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "dataset": read_dataset,
}


def cut_file(path: Path, kind: str, part_bytes: int) -> list[Cut]:
    """The parts that processes may read at once, in order, each of about `part_bytes` or less where the file can be cut.

    A text file is one document, and a compressed file has no other beginning: these are one part each.
    """
    size = path.stat().st_size
    whole = Cut(str(path), kind, size)
    if size <= part_bytes or kind == "text" or path.suffix.lower() in COMPRESSED:
        return [whole]
    if kind == "jsonl":
        borders = [*range(0, size, part_bytes), size]
        return [Cut(str(path), kind, b - a, a, b) for a, b in itertools.pairwise(borders)]
    import pyarrow
    import pyarrow.parquet

    try:
        groups = pyarrow.parquet.read_metadata(path).num_row_groups
    except (pyarrow.ArrowException, OSError) as e:
        raise PrepareError(f"{path}: not readable as Parquet ({e})") from e
    parts = max(1, min(groups, -(-size // part_bytes)))
    borders = [groups * i // parts for i in range(parts + 1)]
    return [Cut(str(path), kind, size * (b - a) // max(1, groups), a, b) for a, b in itertools.pairwise(borders)]
