"""Read text, JSON lines, Parquet and data sets as streams of documents, and report every bad line. Cut files into parts."""

import bz2
import codecs
import collections
import functools
import gzip
import io
import itertools
import lzma
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from jaxtrain.config import installed
from jaxtrain.data.chat_template import Conversation, RowError
from jaxtrain.data.rows import COLUMNS, Piece, Rows, json_type, load_json, parse_question

FORMATS = ("auto", "text", "jsonl", "parquet")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
UNSUPPORTED = (".csv", ".tsv", ".json", ".arrow", ".zip", ".tar", ".tgz", ".7z")  # suffixes of files that hold no plain text
PIECE_BYTES = 4 << 20  # longer text files are encoded in pieces, cut after a line
MAX_SHOWN = 20  # bad lines, and notes on what is not used, that are shown one by one; further ones are counted
MAX_NOTES = 100  # different notes on the rows of a part; rows may have keys that no other row has
BATCH_ROWS = 1024  # Parquet rows decoded at once
UNREAD = ...  # the value of a table's column that is not fetched: rows.py notes that it is not read
DATASET = "hf:"  # begins the name of a data set
DATASET_FORM = "hf:DATASET[:CONFIG][:SPLIT]; the split is train where none is given, hf:DATASET::SPLIT leaves the config open"


class PrepareError(ValueError):
    """An error: the command or its input is wrong. The message names the wrong option or file."""


@dataclass(frozen=True)
class Cut:
    """A part of an input for one process, by `kind`.

    text: the complete file. jsonl: bytes begin..end-1, complete lines. parquet: row groups. dataset: one of its files.
    """

    path: str
    kind: str  # text | jsonl | parquet | dataset
    size: int  # bytes of the part, for progress: exact except for row groups, which are assumed to be equal
    begin: int = 0  # the first byte, row group or file
    end: int = -1  # after the last byte, row group or file; -1: to the end of the input


@dataclass
class Report:
    """What was found in the rows of an input.

    Attributes:
      bad: number of bad lines.
      lines: (location, line, reason) of the first MAX_SHOWN bad lines.
      notes: what is not used -> number of rows.
    """

    bad: int = 0
    lines: list[tuple[str, int, str]] = field(default_factory=list)
    notes: collections.Counter[str] = field(default_factory=collections.Counter)

    def reject(self, cut: Cut, line: int, error: Exception) -> None:
        """Count a bad line. line: its number in the part."""
        self.bad += 1
        if len(self.lines) < MAX_SHOWN:
            location = f"{cut.path} part {cut.begin + 1}" if cut.kind == "dataset" else cut.path
            lines_above = lines_before(cut.path, cut.begin) if cut.kind == "jsonl" else 0
            self.lines.append((location, lines_above + line, reason(error)))

    def note(self, *notes: str) -> None:
        """Count what is not used of a row."""
        for note in notes:
            is_listed = note in self.notes or len(self.notes) < MAX_NOTES
            self.notes[note if is_listed else "further keys that are not read"] += 1


@functools.lru_cache(maxsize=1)
def lines_before(path: str, end: int) -> int:
    """Return the number of lines in the first `end` bytes of a file. They are counted only for a bad line behind them."""
    count = 0
    with open(path, "rb") as f:
        while end > 0 and (data := f.read(min(end, 1 << 22))):
            count += data.count(b"\n")
            end -= len(data)
    return count


def reason(error: Exception) -> str:
    """Return why a row or a file cannot be read, in one line."""
    match error:
        case RowError():
            return str(error)
        case UnicodeDecodeError():
            return f"not UTF-8 ({error.reason}, byte {error.object[error.start]:#04x})"
        case UnicodeEncodeError():
            return "half a surrogate pair"
    return f"cannot be read ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"


def read_pieces(cut: Cut, rows: Rows, report: Report) -> Iterator[Piece]:
    """Yield the pieces of all documents in a part of an input. Raises PrepareError if the part cannot be read to its end."""
    for line, row, changed in read_rows(cut, rows.columns):
        try:
            if isinstance(row, Exception):
                raise row
            pieces = [row] if isinstance(row, Piece) else rows.pieces(row)
        except Exception as e:  # of any library that reads or writes a row: the other rows are read all the same
            report.reject(cut, line, e)
        else:
            report.note(*changed, *(pieces[0].notes if pieces else ["left out, since there is no text"]))
            yield from pieces


ChooseColumns = Callable[
    [list[str]], list[str]
]  # from the columns of a table to those to read; raises RowError if it has no document
RowResult = tuple[int, dict[str, Any] | Piece | Exception, tuple[str, ...]]  # line in the part, row or why it is bad, notes


def read_rows(cut: Cut, columns: ChooseColumns) -> Iterator[RowResult]:
    """Yield the rows of a part of an input. Raises PrepareError if it cannot be read to its end."""
    readers = {"text": read_text, "jsonl": read_jsonl, "parquet": read_parquet, "dataset": read_dataset}
    try:
        yield from readers[cut.kind](cut, columns)
    except PrepareError:
        raise
    except Exception as e:  # of the disk, the network, and any library that decompresses or decodes
        raise PrepareError(f"{cut.path}: {reason(e)}") from e


def read_questions(path: Path) -> Iterator[tuple[int, Conversation, str]]:
    """Yield (line, conversation, reference answer or "") of each row of a file: JSON lines or Parquet.

    Raises PrepareError for a row that is no conversation, or if the file cannot be read.
    """
    if not path.is_file():
        raise PrepareError(f"--input = {path}: {'is a folder' if path.is_dir() else 'no such file'}")
    kind = detect_format(path)
    if kind == "text":
        rule = "conversations are rows of JSON lines (.jsonl) or Parquet, and this is a text file"
        raise PrepareError(f"--input = {path}: {rule}. Fix: give --prompt=TEXT for a single question")
    for line, row, _ in read_rows(Cut(str(path), kind, 0), lambda names: [name for name in names if name in COLUMNS]):
        try:
            if not isinstance(row, dict):
                raise cast(Exception, row)
            yield line, *parse_question(row)
        except Exception as e:
            raise PrepareError(f"{path}:{line}: {reason(e)}") from e


# ---- Files


def detect_format(path: Path) -> str:
    """Return text, jsonl or parquet, by the file's suffix. Raises PrepareError for files that are not read."""
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
    if suffix == ".tok":
        raise PrepareError(f"{path}: it is already a token file. Fix: choose an --input that leaves it out")
    if suffix in UNSUPPORTED:
        fix = "unpack it or write it as text, JSON lines (.jsonl) or Parquet, or give --format=jsonl if each line is an object"
        raise PrepareError(f"{path}: {suffix} files are not read. Fix: {fix}")
    return "text"


def open_binary(path: str) -> BinaryIO:
    """Open a file for reading, and decompress it if its suffix is in COMPRESSED."""
    match Path(path).suffix.lower():
        case ".gz":
            return cast(BinaryIO, gzip.open(path))
        case ".bz2":
            return cast(BinaryIO, bz2.open(path))
        case ".xz":
            return cast(BinaryIO, lzma.open(path))
        case ".zst":
            import pyarrow

            return cast(BinaryIO, io.BufferedReader(cast(Any, pyarrow.CompressedInputStream(path, "zstd")), 1 << 18))
    return open(path, "rb")


def read_text(cut: Cut, _: ChooseColumns) -> Iterator[RowResult]:
    """Yield the file as one document, in pieces of PIECE_BYTES, each extended by the rest of its last line."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # a byte order mark is no text
    with open_binary(cut.path) as f:
        line, started = 1, False
        data = f.read(PIECE_BYTES)
        while data:
            data += f.readline(PIECE_BYTES)
            following = f.read(PIECE_BYTES)
            try:
                text = decoder.decode(data, final=not following)
            except UnicodeDecodeError as e:
                yield line + e.object.count(b"\n", 0, e.start), e, ()
                if started:  # the earlier text stays if bad lines are skipped
                    yield line, Piece("", 0), ()
                return
            yield line, Piece(text, len(text.encode()), end=not following), ()
            started = True
            line += data.count(b"\n")
            data = following


def read_jsonl(cut: Cut, _: ChooseColumns) -> Iterator[RowResult]:
    """Yield each line of the part that is not blank."""
    with open_binary(cut.path) as f:
        at = cut.begin
        if at:
            f.seek(at)
        for number, line in enumerate(f, 1):
            if line.strip():
                yield number, _parse_row(line), ()
            at += len(line)
            if 0 <= cut.end <= at:
                return


def _parse_row(line: bytes) -> dict[str, Any] | Exception:
    try:
        record = load_json(line.decode("utf-8-sig"))  # files that were joined may have several byte order marks
    except UnicodeDecodeError as e:
        return e
    except RowError as e:
        return RowError(f"not JSON ({e})")
    return record if isinstance(record, dict) else RowError(f"is {json_type(record)}, not an object")


def table_row(cells: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a row of a table without the nulls in its structs, and notes on them. Arrow adds such nulls, so that all rows have
    the same fields.
    """
    dropped: set[str] = set()

    def drop_nulls(value: Any, within: str) -> Any:
        if isinstance(value, dict):
            values = {key: drop_nulls(x, key if key == "arguments" else within) for key, x in value.items() if x is not None}
            if within in ("arguments", "tools") and len(values) < len(value):
                dropped.add(within)
            return values
        return [drop_nulls(x, within) for x in value] if isinstance(value, list) else value

    row = {name: drop_nulls(cell, name) for name, cell in cells.items()}
    return row, tuple(f"nulls of {name}, which tables add to rows, read as absent" for name in sorted(dropped))


def read_parquet(cut: Cut, columns: ChooseColumns) -> Iterator[RowResult]:
    """Yield each row of the part, with its number in the file."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(cut.path) as file:
        names = file.schema_arrow.names
        read_columns = columns(names)
        unread_columns = {name: UNREAD for name in names if name not in read_columns}
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        groups = range(len(sizes))[cut.begin : len(sizes) if cut.end < 0 else cut.end]
        number = sum(sizes[: cut.begin])
        for batch in file.iter_batches(BATCH_ROWS, row_groups=list(groups), columns=read_columns, use_threads=False):
            for i in range(batch.num_rows):
                number += 1
                try:
                    row, notes = table_row(
                        {name: batch.column(name)[i].as_py(maps_as_pydicts="strict") for name in read_columns}
                    )
                except Exception as e:  # such as a date that Python cannot represent
                    yield number, e, ()
                else:
                    yield number, row | unread_columns, notes


def cut_file(path: Path, kind: str, shard_bytes: int) -> list[Cut]:
    """Return the parts of a file, in order, each of about `shard_bytes` or less. Processes can read them at the same time.

    A text file is one part, because it is one document. A compressed file is one part, because it can only be read from its
    beginning.
    """
    size = path.stat().st_size
    if size <= shard_bytes or kind == "text" or path.suffix.lower() in COMPRESSED:
        return [Cut(str(path), kind, size)]
    if kind == "jsonl":
        return [Cut(str(path), kind, b - a, a, b) for a, b in itertools.pairwise(line_borders(path, size, shard_bytes))]
    import pyarrow.parquet

    try:
        groups = pyarrow.parquet.read_metadata(path).num_row_groups
    except (pyarrow.ArrowException, OSError) as e:
        raise PrepareError(f"{path}: not readable as Parquet ({e})") from e
    count = max(1, min(groups, -(-size // shard_bytes)))
    borders = [groups * i // count for i in range(count + 1)]
    return [Cut(str(path), kind, size * (b - a) // max(1, groups), a, b) for a, b in itertools.pairwise(borders)]


def line_borders(path: Path, size: int, shard_bytes: int) -> list[int]:
    """Return 0, ends of lines about `shard_bytes` apart, and the file's size."""
    borders = [0]
    with path.open("rb") as f:
        while borders[-1] + shard_bytes < size:
            f.seek(borders[-1] + shard_bytes - 1)
            f.readline()
            borders.append(f.tell())
    return borders if borders[-1] == size else [*borders, size]


# ---- Data sets by name, through the `datasets` package where it is installed


def dataset_name(spec: str) -> tuple[str, str | None, str]:
    """Return (name or folder, config, split) of hf:DATASET[:CONFIG][:SPLIT]. Raises PrepareError for another form."""
    folder = spec.removeprefix(DATASET)
    name, *suffixes = [folder] if os.path.isdir(os.path.expanduser(folder)) else folder.split(":")
    if not name or len(suffixes) > 2:
        raise PrepareError(f"--input={spec}: is written {DATASET_FORM}")
    config, split = [*suffixes, "", ""][:2]
    return name, config or None, split or "train"


def open_dataset(spec: str) -> Any:
    """Open a data set for streaming: a row is fetched when it is read. Raises PrepareError."""
    name, config, split = dataset_name(spec)
    try:
        import datasets
    except ImportError as e:
        rule = "needs the package `datasets`, which is not installed"
        raise PrepareError(f"--input={spec}: {rule}. {installed.install_remedy('hf-datasets')}") from e
    try:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as e:  # no network, no such name, config or split, gated: many classes, one remedy
        raise PrepareError(
            f"--input={spec}: {reason(e)}. Check name, config and split (it is written {DATASET_FORM}) "
            "and the network; or fetch its files with `hf download --repo-type=dataset` elsewhere and give these."
        ) from e


def cut_dataset(spec: str) -> tuple[int, str]:
    """Return (number of a data set's files, a text that changes with its contents). A part is a file. Raises PrepareError."""
    data = open_dataset(spec)
    import datasets

    name, config, split = dataset_name(spec)
    builder = datasets.load_dataset_builder(name, config)
    files = getattr(builder.config, "data_files", None) or {}
    origin = getattr(files.get(split), "origin_metadata", "") if hasattr(files, "get") else ""
    return data.num_shards, repr((builder.config.name, getattr(builder, "hash", ""), origin))


def read_dataset(cut: Cut, columns: ChooseColumns) -> Iterator[RowResult]:
    """Yield each row of a file of a data set, with its number in the file."""
    data, unread_columns = open_dataset(cut.path), {}
    if (names := data.column_names) is not None:
        read_columns = columns(names)
        data, unread_columns = data.select_columns(read_columns), {name: UNREAD for name in names if name not in read_columns}
    for number, cells in enumerate(data.shard(data.num_shards, cut.begin), 1):
        row, notes = table_row(cells)
        yield number, row | unread_columns, notes
