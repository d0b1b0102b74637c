"""Corpora to token files: text, JSON lines and Parquet, streamed, with every bad line named."""

import codecs
import glob
import gzip
import hashlib
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import rich.progress

from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.tokenfile import TokenWriter

FORMATS = ("auto", "text", "jsonl", "parquet")
BATCH_BYTES = 4 << 20  # text encoded at once
PIECE_BYTES = 4 << 20  # longer text files are encoded in pieces, cut after a line
BATCH_ROWS = 1024  # Parquet rows decoded at once
SHOWN = 20  # bad lines shown one by one; further ones are counted


class PrepareError(ValueError):
    """The command or its input is wrong; the message names the file or option."""


@dataclass(frozen=True)
class Piece:
    """Text of a document, and whether the document ends with it."""

    text: str
    num_bytes: int
    end: bool = True


@dataclass
class Input:
    """One input file being read: where it stands and how many lines of it were bad."""

    path: Path
    text_key: str
    report: Callable[[str], None]
    done: int = 0  # bytes of the file read
    bad: int = 0

    def reject(self, line: int, reason: str) -> None:
        self.bad += 1
        self.report(f"{self.path}:{line}: {reason}")


def detect_format(path: Path) -> str:
    """text | jsonl | parquet, by the file's name. Raises PrepareError for names that say it is neither."""
    name = path.name.lower().removesuffix(".gz")
    suffix = Path(name).suffix
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix in (".parquet", ".pq"):
        return "parquet"
    if suffix in (".json", ".csv", ".tsv", ".arrow"):
        raise PrepareError(
            f"{path}: {suffix} can mean several things. Give --format=jsonl for one JSON object a line, or --format=text for "
            "one document a file."
        )
    if suffix == ".tok":
        raise PrepareError(f"{path}: is already a token file. Choose an --input that leaves it out.")
    if suffix in (".zst", ".xz", ".bz2", ".zip", ".tar"):
        raise PrepareError(
            f"{path}: {suffix} files are not read. Unpack it to .txt, .jsonl or .parquet (.gz is read as it is)."
        )
    return "text"


def open_binary(path: Path, raw: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.open(raw)) if path.suffix.lower() == ".gz" else raw


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
    """Every line is a JSON object whose `text_key` is a document; blank lines are skipped."""
    with source.path.open("rb") as raw, open_binary(source.path, raw) as f:
        for number, line in enumerate(f, 1):
            source.done = raw.tell()
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode())
            except UnicodeDecodeError as e:
                source.reject(number, f"not UTF-8 ({e.reason}, column {e.start + 1})")
                continue
            except json.JSONDecodeError as e:
                source.reject(number, f"not JSON ({e.msg}, column {e.colno})")
                continue
            if not isinstance(record, dict):
                source.reject(number, f"is a JSON {type(record).__name__}, not an object")
            elif source.text_key not in record:
                source.reject(number, f"no key {source.text_key!r} (has: {', '.join(map(repr, list(record)[:8]))})")
            else:
                yield from checked(source, number, record[source.text_key])


def read_parquet(source: Input) -> Iterator[Piece]:
    """Every row is a document, in the column `text_key`; a row group at most is in memory."""
    import pyarrow
    import pyarrow.parquet

    size = source.path.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            if source.text_key not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise PrepareError(
                    f"{source.path}: no column {source.text_key!r}; it has {names}. Name one with --text-key=NAME."
                )
            number, rows = 0, file.metadata.num_rows
            for batch in file.iter_batches(BATCH_ROWS, columns=[source.text_key]):
                for scalar in batch.column(0):
                    number += 1
                    try:
                        value = scalar.as_py()
                    except UnicodeDecodeError as e:
                        source.reject(number, f"not UTF-8 ({e.reason})")
                        continue
                    yield from checked(source, number, value)
                source.done = size * number // max(1, rows)
    except pyarrow.ArrowException as e:
        raise PrepareError(f"{source.path}: not readable as Parquet ({e})") from e


def checked(source: Input, line: int, value: Any) -> Iterator[Piece]:
    """A value from a file as a document, where it is text; empty text makes none."""
    if not isinstance(value, str):
        source.reject(line, f"{source.text_key!r} is {type(value).__name__}, not text")
        return
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError as e:
        source.reject(line, f"{source.text_key!r} has half a surrogate pair at character {e.start + 1}")
        return
    if num_bytes:
        yield Piece(value, num_bytes)


def read(source: Input, kind: str) -> Iterator[Piece]:
    """The documents of a file of any kind. Raises PrepareError where it cannot be read to its end."""
    try:
        yield from READERS[kind](source)
    except (OSError, EOFError, zlib.error) as e:
        raise PrepareError(f"{source.path}: cannot be read to its end ({e})") from e


READERS: dict[str, Callable[[Input], Iterator[Piece]]] = {"text": read_text, "jsonl": read_jsonl, "parquet": read_parquet}


def find_inputs(patterns: list[str]) -> list[Path]:
    """Sorted files that match the globs. Raises PrepareError for a pattern without a match."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = [Path(p) for p in sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))]
        files = [p for p in matches if p.is_file()]
        if not files:
            why = f"is a folder; give --input='{pattern.rstrip('/')}/**/*'" if matches else "matches no file"
            raise PrepareError(f"--input={pattern}: {why}")
        found.update(dict.fromkeys(files))
    return list(found)


def validation_path(output: Path) -> Path:
    return output.with_name(output.name.removesuffix(".tok") + ".val.tok")


def in_validation(piece: Piece, fraction: float) -> bool:
    """By the text itself (a long file's first part): the same document is on the same side in every run and order."""
    digest = hashlib.blake2b(piece.text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


class Progress:
    """Bytes read of all, as a live bar on a terminal, else a line every ten seconds."""

    def __init__(self, total: int):
        self.total = total
        self.started = self.last = time.monotonic()
        self.bar = None
        if sys.stderr.isatty():
            columns = (
                rich.progress.TextColumn("prepare"),
                rich.progress.BarColumn(),
                rich.progress.DownloadColumn(),
                rich.progress.TransferSpeedColumn(),
                rich.progress.TimeRemainingColumn(),
                rich.progress.TextColumn("{task.fields[tokens]}"),
            )
            self.bar = rich.progress.Progress(*columns, console=rich.console.Console(stderr=True))
            self.task = self.bar.add_task("prepare", total=total, tokens="")

    def context(self) -> AbstractContextManager[Any]:
        return self.bar or nullcontext()

    def update(self, done: int, tokens: int) -> None:
        if self.bar:
            self.bar.update(self.task, completed=done, tokens=f"{tokens / 1e6:,.1f} M tokens")
        elif time.monotonic() - self.last > 10:
            self.last = time.monotonic()
            rate = done / (self.last - self.started) / 1e6
            print(
                f"prepare: {done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB, {tokens / 1e6:,.1f} M tokens, {rate:,.1f} MB/s",
                file=sys.stderr,
                flush=True,
            )


def batches_of(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lists of about BATCH_BYTES."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.num_bytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def prepare(
    inputs: list[str],
    output: Path,
    *,
    tokenizer: str = "byte",
    eot: str = "",
    text_key: str = "text",
    format: str = "auto",
    validation: float = 0.0,
    skip_bad_lines: bool = False,
    force: bool = False,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> list[dict[str, Any]]:
    """Writes `output` (and NAME.val.tok with `validation` > 0), both or neither. Returns their headers.

    Raises PrepareError, TokenizerError or TokenFileError for what the user can put right. Bad lines are named through `say`;
    unless they are skipped, the file they are in is read to its end to name the others, and nothing is written.
    """
    if output.suffix != ".tok":
        raise PrepareError(f"--output={output}: the name of a token file ends in .tok")
    if not 0 <= validation < 1:
        raise PrepareError(f"--validation={validation}: is a fraction of the documents, at least 0 and less than 1")
    outputs = [output, validation_path(output)] if validation else [output]
    for path in outputs:
        if path.exists() and not force:
            raise PrepareError(f"--output={output}: {path} exists. Choose another name, or replace it with --force.")
    files = find_inputs(inputs)
    formats = [detect_format(path) if format == "auto" else format for path in files]
    tok = tokenizers.load_tokenizer(tokenizer, eot)
    output.parent.mkdir(parents=True, exist_ok=True)
    progress = Progress(sum(path.stat().st_size for path in files))
    shown = 0

    def report(line: str) -> None:
        nonlocal shown
        shown += 1
        if shown <= SHOWN:
            say(line)

    done = bad = 0
    with ExitStack() as stack:
        left = [p for p in (path.with_name(path.name + ".partial") for path in outputs) if p.exists()]
        writers = [stack.enter_context(TokenWriter(path, tokenizers.info(tok), sources=inputs)) for path in outputs]
        for partial in left:
            say(f"{partial} was left by a run that was cut off; starting again from the first file")
        stack.enter_context(progress.context())
        for path, kind in zip(files, formats, strict=True):
            source = Input(path, text_key, report)
            writer = None  # of the document that is being written
            for batch in batches_of(read(source, kind)):
                if source.bad and not skip_bad_lines:
                    continue  # nothing will be written: only look for further bad lines
                for piece, ids in zip(batch, tok.encode_batch([p.text for p in batch]), strict=True):
                    if writer is None:
                        writer = writers[1 if validation and in_validation(piece, validation) else 0]
                    writer.write(ids, piece.num_bytes)
                    if piece.end:
                        writer.end_document()
                        writer = None
                progress.update(done + source.done, sum(w.tokens for w in writers))
            done += path.stat().st_size
            bad += source.bad
            if bad and not skip_bad_lines:
                raise PrepareError(
                    f"{count_lines(bad)} in {path}{shown_of(bad)}; nothing was written. Mend the file, or leave such lines out "
                    "with --skip-bad-lines."
                )
        if bad:
            say(f"{count_lines(bad)} left out{shown_of(bad)}")
        for writer in writers:
            if not writer.documents:
                why = "Change --validation." if len(writers) > 1 else "Is there any text in the input?"
                raise PrepareError(f"{writer.path}: would hold no document; nothing was written. {why}")
        headers = [writer.seal() for writer in writers]
        for writer in writers:
            writer.publish()
    return headers


def count_lines(bad: int) -> str:
    return f"{bad} bad line{'s' if bad > 1 else ''}"


def shown_of(bad: int) -> str:
    return f" (the first {SHOWN} are shown)" if bad > SHOWN else ""
