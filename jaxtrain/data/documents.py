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
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from jaxtrain.config import installed
from jaxtrain.data.chat_template import Conversation, RowError
from jaxtrain.data.rows import KNOWN_COLUMNS, PAIR_COLUMNS, Piece, Rows, TextRows, kind_of, load_json, question, unread

FORMATS = ("auto", "text", "jsonl", "parquet")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
PIECE_BYTES = 4 << 20  # longer text files are encoded in pieces, cut after a line
MOST_NOTES = 100  # different notes on the rows of a part; rows may have keys that no other row has
BATCH_ROWS = 1024  # Parquet rows decoded at once
DATASET = "hf:"  # begins the name of a data set
DATASET_FORM = "hf:DATASET[:CONFIG][:SPLIT]; the split is train where none is given, hf:DATASET::SPLIT leaves the config open"
TO_PARQUET = "import pyarrow.csv as c, pyarrow.parquet as p; p.write_table(c.read_csv('{{0}}'{}), '{{1}}.parquet')"
TO_LINES = "import json; [print(json.dumps(x)) for x in json.load(open('{0}', 'rb'))]"
OTHER_FORMATS = {  # suffix of a file that is not read -> remedy; {0} is the file's path, {1} the path without suffix
    ".csv": f'python -c "{TO_PARQUET.format("")}"',
    ".tsv": f'python -c "{TO_PARQUET.format(", parse_options=c.ParseOptions(delimiter='\\t')")}"',
    ".json": "give --format=jsonl if each line is an object; of one list, make such a file: "
    f'python -c "{TO_LINES}" > {{1}}.jsonl',
    ".arrow": "write it as Parquet, or give the folder of its data set: --input=hf:FOLDER",
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z"), "unpack it to .txt, .jsonl or .parquet; .gz .bz2 .xz .zst may stay"),
    ".tok": "choose an --input that leaves it out, it is already a token file",
}


class PrepareError(ValueError):
    """An error: the command or its input is wrong. The message names the wrong option or file."""


@dataclass(frozen=True)
class Cut:
    """A part of an input for one process, by `kind`.

    text: the complete file. jsonl: the lines that start in bytes begin..end-1. parquet: row groups. dataset: one of its files.
    """

    path: str
    kind: str  # text | jsonl | parquet | dataset
    size: int  # bytes of the part, for progress: exact except for row groups, which are assumed to be equal
    begin: int = 0  # the first byte, row group or file
    end: int = -1  # after the last byte, row group or file; -1: to the end of the input


@dataclass
class Input:
    """A part that is being read, with counts of the bytes and bad lines so far."""

    cut: Cut
    rows: Rows
    report: Callable[[str], None]
    done: int = 0  # bytes of the part that were read
    bad: int = 0  # number of bad lines
    others: tuple[str, ...] = ()  # notes on columns of a table that are not read
    changed: tuple[str, ...] = ()  # notes on the values of the present row
    first: int = 0  # the byte of a file of JSON lines at which the part begins
    notes: collections.Counter[str] = field(default_factory=collections.Counter)  # what is not used -> number of rows

    @property
    def path(self) -> Path:
        return Path(self.cut.path)

    @functools.cached_property
    def lines_before(self) -> int:
        """Return the number of lines of the file before the part. They are counted when the first bad line is reported."""
        count, left = 0, self.first
        with self.path.open("rb") as f:
            while left > 0 and (data := f.read(min(left, 1 << 22))):
                count += data.count(b"\n")
                left -= len(data)
        return count

    def select(self, names: list[str]) -> list[str]:
        """Return the columns of a table to read. Raises RowError if there is no document in its columns."""
        found = self.rows.columns(names)
        self.others = unread(name for name in names if name not in found)
        return found

    def note(self, *notes: str) -> None:
        """Count what is not used of a row."""
        for note in notes:
            known = note in self.notes or len(self.notes) < MOST_NOTES
            self.notes[note if known else "further keys that are not read"] += 1

    def reject(self, line: int, reason: str) -> None:
        self.bad += 1
        if self.first:
            line += self.lines_before
        part = f" part {self.cut.begin + 1}" if self.cut.kind == "dataset" else ""
        self.report(f"{self.cut.path}{part}:{line}: {reason}")


def read(source: Input) -> Iterator[Piece]:
    """Yield the pieces of all documents in a part of an input. Raises PrepareError if the part cannot be read to its end."""
    try:
        if source.cut.kind == "text":
            yield from read_text(source)
            return
        for number, row in ROWS[source.cut.kind](source):
            try:
                if isinstance(row, RowError):
                    raise row
                piece = source.rows.piece(row)
            except RowError as e:
                source.reject(number, str(e))
            except Exception as e:  # of any library that reads or writes a row: the other rows are read all the same
                source.reject(number, unreadable(e))
            else:
                source.note(*source.others)
                if piece is None:
                    source.note("left out, since there is no text")
                else:
                    source.note(*source.changed, *piece.notes)
                    yield piece
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as e:
        raise PrepareError(f"{source.cut.path}: cannot be read to its end ({e})") from e


def unreadable(e: Exception) -> str:
    return f"cannot be read ({type(e).__name__}: {next(iter(str(e).splitlines()), '')})"


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
    source = Input(Cut(str(path), kind, path.stat().st_size), _Questions(), print)
    for number, row in ROWS[kind](source):
        try:
            if isinstance(row, RowError):
                raise row
            yield number, *question(row)
        except RowError as e:
            raise PrepareError(f"{path}:{number}: {e}") from e
        except Exception as e:
            raise PrepareError(f"{path}:{number}: {unreadable(e)}") from e


class _Questions(TextRows):
    """The rows of a table of conversations, with or without answers."""

    def __init__(self):
        super().__init__([], "")

    def columns(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in (*PAIR_COLUMNS, *KNOWN_COLUMNS)]


# ---- Files


def detect_format(path: Path) -> str:
    """Return text, jsonl or parquet, by the file's suffix. Raises PrepareError for the suffixes in OTHER_FORMATS."""
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
    if fix := OTHER_FORMATS.get(suffix):
        raise PrepareError(f"{path}: {suffix} files are not read. Fix: {fix.format(path, path.with_suffix(''))}")
    return "text"


def open_binary(path: Path, raw: BinaryIO) -> BinaryIO:
    """Return the file `raw`, or a file that decompresses `raw` if the suffix of `path` is in COMPRESSED."""
    match path.suffix.lower():
        case ".gz":
            return cast(BinaryIO, gzip.open(raw))
        case ".bz2":
            return cast(BinaryIO, bz2.open(raw))
        case ".xz":
            return cast(BinaryIO, lzma.open(raw))
        case ".zst":
            import pyarrow

            return cast(BinaryIO, io.BufferedReader(cast(Any, pyarrow.CompressedInputStream(raw, "zstd")), 1 << 18))
    return raw


def read_text(source: Input) -> Iterator[Piece]:
    """Yield the file as one document, in pieces of PIECE_BYTES, each extended by the rest of its last line."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # a byte order mark is no text
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
                if started:  # the earlier text stays if bad lines are skipped
                    yield Piece("", 0)
                return
            yield Piece(text, len(text.encode()), end=not following)
            started = True
            line += data.count(b"\n")
            data = following
            source.done = raw.tell()


Row = dict[str, Any] | RowError


def read_jsonl(source: Input) -> Iterator[tuple[int, Row]]:
    """Yield (number of the line, row) of each line that is not blank. The first line of the part has the number 1."""
    begin, end = source.cut.begin, source.cut.end
    with source.path.open("rb") as raw, open_binary(source.path, raw) as f:
        if begin:  # skip to the first line that starts in the part: the byte before `begin` ends a line, or is within a line
            f.seek(begin - 1)
            begin += len(f.readline()) - 1
        at = source.first = begin
        for number, line in enumerate(f, 1):
            if 0 <= end <= at:
                return
            at += len(line)
            source.done = at - begin if f is raw else raw.tell()
            if line.strip():
                yield number, _row(line)


def _row(line: bytes) -> Row:
    try:
        record = load_json(line.decode("utf-8-sig"))  # files that were joined may have several byte order marks
    except UnicodeDecodeError as e:
        return RowError(f"not UTF-8 ({e.reason}, column {e.start + 1})")
    except RowError as e:
        return RowError(f"not JSON ({e})")
    return record if isinstance(record, dict) else RowError(f"is {kind_of(record)}, not an object")


def plain_row(cells: dict[str, Any], source: Input) -> dict[str, Any]:
    """Return a row of a table without the nulls in its structs: Arrow adds them, so that all rows have the same fields."""
    dropped: set[str] = set()

    def without(value: Any, within: str) -> Any:
        if isinstance(value, dict):
            kept = {key: without(x, key if key == "arguments" else within) for key, x in value.items() if x is not None}
            if within in ("arguments", "tools") and len(kept) < len(value):
                dropped.add(within)
            return kept
        return [without(x, within) for x in value] if isinstance(value, list) else value

    row = {name: without(cell, name) for name, cell in cells.items()}
    source.changed = tuple(f"nulls of {name}, which tables add to rows, read as absent" for name in sorted(dropped))
    return row


def read_parquet(source: Input) -> Iterator[tuple[int, Row]]:
    """Yield (number of the row, row) of each row of the part. The first row of the file has the number 1."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            try:
                columns = source.select(file.schema_arrow.names)
            except RowError as e:
                raise PrepareError(f"{source.path}: {e}") from e
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
            groups = range(source.cut.begin, len(sizes) if source.cut.end < 0 else source.cut.end)
            first = number = sum(sizes[: groups.start])
            rows = max(1, sum(sizes[groups.start : groups.stop]))
            for batch in file.iter_batches(BATCH_ROWS, row_groups=list(groups), columns=columns, use_threads=False):
                for i in range(batch.num_rows):
                    number += 1
                    try:
                        cells = {name: batch.column(name)[i].as_py(maps_as_pydicts="strict") for name in columns}
                        row: Row = plain_row(cells, source)
                    except UnicodeDecodeError as e:
                        row = RowError(f"not UTF-8 ({e.reason})")
                    except Exception as e:  # such as a date that Python cannot represent
                        row = RowError(unreadable(e))
                    yield number, row
                source.done = source.cut.size * (number - first) // rows
    except pyarrow.ArrowException as e:
        raise PrepareError(f"{source.path}: not readable as Parquet ({e})") from e


def cut_file(path: Path, kind: str, part_bytes: int) -> list[Cut]:
    """Return the parts of a file, in order, each of about `part_bytes` or less. Processes can read them at the same time.

    A text file is one part, because it is one document. A compressed file is one part, because it can only be read from its
    beginning.
    """
    size = path.stat().st_size
    if size <= part_bytes or kind == "text" or path.suffix.lower() in COMPRESSED:
        return [Cut(str(path), kind, size)]
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


# ---- Data sets by name, through the `datasets` package where it is installed


def dataset_name(spec: str) -> tuple[str, str | None, str]:
    """Return (name or folder, config, split) of hf:DATASET[:CONFIG][:SPLIT]. Raises PrepareError for another form."""
    folder = spec.removeprefix(DATASET)
    name, *rest = [folder] if os.path.isdir(os.path.expanduser(folder)) else folder.split(":")
    if not name or len(rest) > 2:
        raise PrepareError(f"--input={spec}: is written {DATASET_FORM}")
    config, split = [*rest, "", ""][:2]
    return name, config or None, split or "train"


def open_dataset(spec: str, columns: Callable[[list[str]], list[str]]) -> Any:
    """Open a data set for streaming: a row is fetched when it is read. Raises PrepareError.

    columns: returns the columns to read of all; it raises RowError if there is no document in them.
    """
    name, config, split = dataset_name(spec)
    try:
        import datasets
    except ImportError as e:
        rule = "needs the package `datasets`, which is not installed"
        raise PrepareError(f"--input={spec}: {rule}. {installed.remedy('hf-datasets')}") from e
    try:
        data = datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as e:  # no network, no such name, config or split, gated: many classes, one remedy
        raise PrepareError(
            f"--input={spec}: cannot be opened ({_reason(e)}). Check name, config and split (it is written {DATASET_FORM}) "
            "and the network; or fetch its files with `hf download --repo-type=dataset` elsewhere and give these."
        ) from e
    try:
        return data if data.column_names is None else data.select_columns(columns(data.column_names))
    except RowError as e:
        raise PrepareError(f"--input={spec}: {e}") from e


def _reason(e: Exception) -> str:
    return f"{type(e).__name__}: {next(iter(str(e).splitlines()), '')}"


def cut_dataset(spec: str, rows: Rows) -> tuple[int, str]:
    """Return (number of a data set's files, a text that changes with its contents). A part is a file. Raises PrepareError."""
    count = open_dataset(spec, rows.columns).num_shards
    import datasets

    name, config, split = dataset_name(spec)
    builder = datasets.load_dataset_builder(name, config)
    files = getattr(builder.config, "data_files", None) or {}
    origin = getattr(files.get(split), "origin_metadata", "") if hasattr(files, "get") else ""
    return count, repr((builder.config.name, getattr(builder, "hash", ""), origin))


def read_dataset(source: Input) -> Iterator[tuple[int, Row]]:
    """Yield (number of the row, row) of each row of a part of a data set. The first row of the part has the number 1."""
    spec, part = source.cut.path, source.cut.begin
    data = open_dataset(spec, source.select)
    try:
        for number, row in enumerate(data.shard(data.num_shards, part), 1):
            yield number, plain_row(row, source)
    except Exception as e:
        raise PrepareError(f"--input={spec}: part {part + 1} cannot be read to its end ({_reason(e)})") from e


ROWS = {"jsonl": read_jsonl, "parquet": read_parquet, "dataset": read_dataset}
