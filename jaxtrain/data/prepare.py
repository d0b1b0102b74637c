"""Convert corpora to token files, in parallel processes.

The input is divided into parts, and a process turns each part into a small token file. An interrupted run continues from the
finished parts, which are joined at the end. The division depends on the input and `--shard-mb` alone, so every number of
processes gives the same file.

    NAME.tok.partial/000007.tok, 000007.val.tok      a finished part

The header of a part has what was found in its rows, and a hash of the inputs (path, size, modification time), the options and
the tokenizer. A part with another hash is made again.
"""

import collections
import contextlib
import datetime
import errno
import glob
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.config import stores
from jaxtrain.config.counts import short_count
from jaxtrain.config.durations import duration
from jaxtrain.config.numbers import plural
from jaxtrain.data import documents
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.chat_template import LOSSES, ChatTemplate, load_template
from jaxtrain.data.documents import Cut, PrepareError, Report
from jaxtrain.data.rows import ChatRows, Piece, PreferenceRows, Rows, TextRows
from jaxtrain.data.tokenfile import PAIRS, TokenFile, TokenFileError, TokenWriter, open_locked, validation_share

SHARD_MB = 64  # MB of input in a part
BATCH_BYTES = 4 << 20  # text encoded at once
LINE_SECONDS = 10.0  # between two lines of progress
Shard = tuple[Cut, ...]
Say = Callable[[str], None]


class PrepareFailed(RuntimeError):
    """An error of the machine: the disk failed, or a process ended without a result, as when memory ran out."""


@dataclass(frozen=True)
class PrepareJob:
    """The input and options of a token file. Equal jobs and equal shards of the input give equal files.

    Attributes:
      text_key: a column, or several with commas between. `separator` joins their texts.
      validation: fraction of the documents that are written to NAME.val.tok instead of NAME.tok.
      chat: rows are conversations, or pairs of conversations with `preference`. A template writes them as text.
      chat_template: a name in chat_template.BUILTIN_TEMPLATES, or a file; "": the tokenizer's own template.
      loss: the tokens of conversations that count in the loss (chat_template.LOSSES).
      preference: rows are pairs, whose members are documents 2i (chosen) and 2i + 1 (rejected).
      date: today's date, for templates that use it.
    """

    tokenizer: str = "byte"
    eot: str = ""
    text_key: str = "text"
    separator: str = "\n\n"
    validation: float = 0.0
    chat: bool = False
    chat_template: str = ""
    loss: str = LOSSES[0]
    preference: bool = False
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())

    @property
    def flags(self) -> bool:
        """Return whether the token file has a loss bit for each token."""
        return self.chat or self.preference

    def load(self) -> tuple[tokenizers.Tokenizer, Rows]:
        """Return the tokenizer, and the object that converts rows to documents. Raises TokenizerError."""
        tok = tokenizers.load_tokenizer(self.tokenizer, self.eot)
        if tok.eot is None:
            looked = f"looked for {', '.join(tokenizers.EOT_NAMES)}, and for an eos in the files beside it"
            rule = f"no token is known to end a document ({looked}). Name one with --eot=TOKEN."
            raise tokenizers.TokenizerError(f"tokenizer {self.tokenizer!r}: {rule}")
        if not self.flags:
            return tok, TextRows(self.text_key.split(","), self.separator)
        template = None
        if self.chat:
            template = load_template(self.tokenizer, tok, self.chat_template, self.date)
        return tok, PreferenceRows(template, tok.bos) if self.preference or not template else ChatRows(template, self.loss)

    def options(self) -> dict[str, Any]:
        """Return the options of the command that are not its defaults, without --tokenizer and --validation."""
        defaults = PrepareJob(date=self.date)
        keys = ("eot", "text_key", "separator", "chat", "preference", "chat_template", "loss")
        return {key: value for key in keys if (value := getattr(self, key)) != getattr(defaults, key)}

    def check(self) -> None:
        """Raise PrepareError for an option that is wrong for any input."""
        if not 0 <= self.validation < 1:
            raise PrepareError(f"--validation={self.validation}: is a fraction of the documents, at least 0 and less than 1")
        if self.loss not in LOSSES:
            raise PrepareError(f"--loss={self.loss}: is one of {', '.join(LOSSES)}")
        if not self.chat and (self.chat_template or self.loss != LOSSES[0]):
            raise PrepareError("--chat-template and --loss say how conversations are written: give --chat too")
        if self.preference and self.loss != LOSSES[0]:
            raise PrepareError(f"--loss={self.loss}: of pairs the completions count, and nothing else. Leave --loss out.")
        if not all(self.text_key.split(",")):
            raise PrepareError(f"--text-key={self.text_key}: names a column, or several with commas between")


def prepare_corpus(
    inputs: list[str],
    output: Path,
    *,
    format: str = "auto",
    skip_bad_lines: bool = False,
    force: bool = False,
    processes: int = 1,
    shard_mb: float = SHARD_MB,
    say: Say = lambda line: print(line, file=sys.stderr, flush=True),
    **options: Any,
) -> list[dict[str, Any]]:
    """Write `output` (NAME.tok), and NAME.val.tok if `validation` > 0. Return the headers of the written files.

    After an error neither file is written. Bad lines in the input are an error if `skip_bad_lines` is False.

    Args:
      inputs: globs, or data sets hf:DATASET.
      format: one of documents.FORMATS.
      force: replace existing outputs.
      processes: number of processes; 0: the number of cores.
      shard_mb: MB of input in a part. Finished parts of an interrupted run are reused.
      say: called with each line of text for the user, except those of `progress`.
      options: fields of `PrepareJob`.

    Raises:
      PrepareError, TokenizerError, TokenFileError: errors that the user can fix.
      PrepareFailed: the disk is full, or a process ended without a result.
    """
    job = PrepareJob(**options)
    outputs = [output, validation_path(output)] if job.validation else [output]
    if problem := stores.path_problem(str(output)):
        raise PrepareError(f"--output={output}: {problem[0]}. Fix: {problem[1]}")
    if output.suffix != ".tok":
        raise PrepareError(f"--output={output}: the name of a token file ends in .tok")
    if processes < 0:
        raise PrepareError(f"--processes={processes}: is a count of processes, 0 for as many as there are cores")
    if not 0 < shard_mb * 1e6 < math.inf:
        raise PrepareError(f"--shard-mb={shard_mb}: must be a finite number above 0")
    job.check()
    for path in outputs:
        if path.exists() and not force:
            raise PrepareError(f"--output={output}: {path} exists. Choose another name, or replace it with --force.")
    tok, rows = job.load()
    if lost := tokenizers.find_missing_tokens(job.tokenizer):
        more = len(lost) - documents.MAX_SHOWN
        shown = ", ".join(lost[: documents.MAX_SHOWN]) + f" and {more} more" * (more > 0)
        say(f"tokenizer {job.tokenizer}: read as characters, since tokenizer.json lacks them: {shown}")
    template: ChatTemplate | None = getattr(rows, "template", None)
    if template:
        say(template.describe(job.loss))
        for name in template.unnamed:
            text = template.tokens.get(name, "")
            say(f"chat template {template.name}: {name} is {text!r}, which is no control token of the tokenizer")
    shard_bytes = max(1, int(shard_mb * 1e6))
    cuts, state = cut_inputs(inputs, format, shard_bytes, job)
    shards = group_cuts(cuts, shard_bytes)
    sha256 = template.sha256 if template else ""
    dated = template is not None and template.dated
    description = asdict(job) | {
        "chat_template": sha256,
        "date": dated and job.date,
        "tokenizer": tokenizers.tokenizer_info(tok),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    recipe: dict[str, Any] = {"options": job.options() | ({} if format == "auto" else {"format": format})}
    if template:
        template_fields = {"name": template.name, "template": template.source, "tokens": template.tokens}
        recipe["chat"] = {"loss": job.loss, "template_sha256": sha256, **template_fields}
    recipe |= {PAIRS: True} if job.preference else {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(name_disk_errors(output))
        folder = stack.enter_context(shards_folder(output))
        digest = hashlib.sha256(json.dumps([description, state, shard_bytes, format]).encode()).hexdigest()
        tasks = []
        for number, shard in enumerate(shards):
            files = [folder / f"{number:06}{ending}" for ending in (".tok", ".val.tok")[: len(outputs)]]
            tasks.append(Task(job, files, [digest, number], shard, skip_bad_lines))
        if bad := make_all_shards(tasks, folder, processes or len(os.sched_getaffinity(0)), say):
            say(f"{count_lines(bad)} left out")
        if changed := [path for path, size, time_ns in state if os.path.isfile(path) and time_ns != os.stat(path).st_mtime_ns]:
            raise PrepareError(f"--input={changed[0]}: has changed while it was read. Fix: give the same command again")
        info = tokenizers.tokenizer_info(tok)
        writers = [
            stack.enter_context(TokenWriter(path, info, suffix=".merging", sources=inputs, loss=job.flags, recipe=recipe))
            for path in outputs
        ]
        for task in tasks:
            for writer, path in zip(writers, task.files, strict=True):
                try:
                    writer.append(TokenFile.open(path))
                except TokenFileError as e:
                    path.unlink()
                    hint = "It is a part of this run's result: the same command makes that part again."
                    raise TokenFileError(f"{e} {hint}") from e
        for writer in writers:
            reason = ""
            if not writer.documents:
                help = "Is there any text in the input?"
                if count := sum(each.documents for each in writers):
                    help = f"Fix: --validation={validation_share(count)}" if count > 1 else "Fix: leave --validation out"
                reason = f"would hold none of {plural(count, 'document')}; nothing was written. {help}"
            elif writer.loss is not None and not writer.loss["tokens"]:
                reason = "no token counts in the loss; nothing was written: its completions are empty."
                if template:
                    reason = f"no token counts in the loss; nothing was written: the chat template {template.name} marks no "
                    reason += "answers, or writes none. Fix: give another one with --chat-template=FILE."
            if reason:
                for path in folder.glob("*.tok"):
                    path.unlink()
                raise PrepareError(f"{writer.path}: {reason}")
        if job.flags and not writers[0].ends():
            say(
                "no token that ends an answer counts in the loss, so the model does not learn to end. "
                "Fix: put the end of a turn into the template's {% generation %} block"
            )
        headers = [writer.seal() for writer in writers]
        for writer in writers:
            writer.publish()
    return headers


@contextlib.contextmanager
def name_disk_errors(output: Path) -> Iterator[None]:
    """Raise PrepareFailed, which names the output, for an error of its disk that names no file."""
    try:
        yield
    except OSError as e:
        if e.filename is not None and e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        fix = "Fix: free some space there and give the same command again, or name another disk with --output"
        raise PrepareFailed(f"--output = {output}: its disk cannot be written to ({e.strerror}). {fix}") from e


def validation_path(output: Path) -> Path:
    return output.with_name(output.name.removesuffix(".tok") + ".val.tok")


# ---- The input, and its parts


def find_inputs(patterns: list[str]) -> list[Path]:
    """Return the files that match the globs, sorted. Raises PrepareError for a pattern without a match."""
    paths: dict[Path, None] = {}
    for pattern in patterns:
        literal = Path(pattern).expanduser()  # its name may contain [ or *
        matches = [literal] if literal.is_file() else [Path(p) for p in sorted(glob.glob(str(literal), recursive=True))]
        matches = [path for path in matches if path.exists()]  # glob returns the folder of FOLDER/** also if there is none
        files = [p for p in matches if p.is_file()]
        if not files:
            reason = f"is a folder; give --input='{pattern.rstrip('/')}/**/*'" if matches else _unmatched(literal)
            if matches and not matches[0].is_dir():
                reason = "is a pipe, and its rows are read in parts. Fix: write them to a file first"
            raise PrepareError(f"--input={pattern}: {reason}")
        paths.update(dict.fromkeys(files))
    return list(paths)


def _unmatched(pattern: Path) -> str:
    missing = [folder for folder in pattern.parents if not (set(str(folder)) & set("*?[") or folder.exists())]
    reason = f"matches no file, since there is no folder {missing[-1]}" if missing else "matches no file"
    return f"{reason}. Fix: name files that are there, as --input='FOLDER/**/*.jsonl'"


def find_formats(pattern: str, format: str) -> dict[Path, str]:
    """Return path -> format of the files that match a glob.

    Raises PrepareError, also for a glob that matches rows together with other files than .txt, as the README of a data set.
    """
    kinds = {path: documents.detect_format(path) if format == "auto" else format for path in find_inputs([pattern])}
    rows = [path for path, kind in kinds.items() if kind != "text"]
    text_files = [path for path, kind in kinds.items() if kind == "text" and not file_suffix(path).lower().startswith(".txt")]
    if rows and text_files:
        globs = list(dict.fromkeys(f"{glob.escape(str(path.parent))}/*{file_suffix(path)}" for path in rows))
        matched = {Path(path) for each in globs for path in glob.glob(each)}  # no name that begins with a dot
        names = globs if matched == {*rows} else rows
        fix = " ".join(f"--input='{name}'" for name in names)
        rule = f"{text_files[0].name} would be a document beside the rows of {rows[0].name}"
        raise PrepareError(f"--input={pattern}: {rule}. Fix: {fix}")
    return kinds


def file_suffix(path: Path) -> str:
    """Return the suffix of a file, with that of its compression, as .jsonl.gz."""
    return "".join(path.suffixes[-2:] if path.suffix.lower() in documents.COMPRESSED else path.suffixes[-1:])


def cut_inputs(patterns: list[str], format: str, shard_bytes: int, job: PrepareJob) -> tuple[list[Cut], list[list[Any]]]:
    """Return the parts of all inputs, and the state of each input. Raises PrepareError.

    The state of a file is [path, bytes, modification time in ns]. For a data set: [name, number of parts, description of the
    contents].
    """
    cuts: list[Cut] = []
    state: list[list[Any]] = []
    by_name = [p for p in patterns if p.startswith(documents.DATASET)]
    kinds = {path: kind for p in patterns if p not in by_name for path, kind in find_formats(p, format).items()}
    for path, kind in kinds.items():
        if kind == "text" and job.flags:
            option = "--preference" if job.preference else "--chat"
            rule = f"{option} reads rows of JSON lines, Parquet or a data set, and this is a text file"
            raise PrepareError(f"--input={path}: {rule}. Fix: leave {option} out, or give --format=jsonl")
        stat = path.stat()
        state.append([str(path), stat.st_size, stat.st_mtime_ns])
        cuts += documents.cut_file(path, kind, shard_bytes)
    for name in by_name:
        count, content = documents.cut_dataset(name)
        state.append([name, count, content])
        cuts += [Cut(name, "dataset", 0, i, i + 1) for i in range(count)]
    return cuts, state


def group_cuts(cuts: list[Cut], shard_bytes: int) -> list[Shard]:
    """Return the cuts in shards, small cuts joined up to `shard_bytes`. Each file of a data set is a shard by itself."""
    shards: list[list[Cut]] = []
    size = 0
    for cut in cuts:
        if not shards or size + cut.size > shard_bytes or cut.kind == "dataset":
            shards.append([])
            size = 0
        shards[-1].append(cut)
        size += cut.size
    return [tuple(shard) for shard in shards]


# ---- Finished parts


@contextlib.contextmanager
def shards_folder(output: Path) -> Iterator[Path]:
    """Yield the folder for the finished shards of an output, locked for this process. After an error they are kept.

    Raises TokenFileError if another process writes the parts.
    """
    folder = output.with_name(output.name + ".partial")
    folder.mkdir(parents=True, exist_ok=True)
    lock = open_locked(folder / "lock")
    try:
        yield folder
        shutil.rmtree(folder)
    except BaseException:
        if not any(folder.glob("*.tok")):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        lock.close()


class Task(NamedTuple):
    """A part to make.

    Attributes:
      files: its token files. The first one is written last.
      identity: a hash of the command and the number of the part, which the files record.
    """

    job: PrepareJob
    files: list[Path]
    identity: list[Any]
    shard: Shard
    skip_bad_lines: bool

    @property
    def size(self) -> int:
        return sum(cut.size for cut in self.shard)

    def load_report(self) -> Report | None:
        """Return what an earlier run has found in the shard; None: it is missing or changed."""
        try:
            files = [TokenFile.open(path) for path in self.files]
            recipes = [file.header["made"] for file in files]
            for file in files:
                file.check()
        except (OSError, TokenFileError):
            return None
        if any(recipe.get("part") != self.identity for recipe in recipes):
            return None
        return Report(recipes[0]["bad"], recipes[0]["lines"], collections.Counter(recipes[0]["notes"]))


# ---- One part


def in_validation(piece: Piece, fraction: float) -> bool:
    """Return whether a document belongs to validation, by a hash of its text. For a long file, pass its first piece.

    So the result is the same in every run, for any order of the documents. fraction: fraction of the documents, 0 to 1.
    """
    digest = hashlib.blake2b(piece.text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def batch_pieces(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces in lists of about BATCH_BYTES."""
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


def encode_pieces(tok: tokenizers.Tokenizer, batch: list[Piece]) -> Iterator[tuple[np.ndarray, np.ndarray | None, int]]:
    """Yield (ids, loss flags or None, bytes of the text that counts in the loss) of each piece."""
    if batch[0].chunks is None:
        yield from ((ids, None, 0) for ids in tok.encode_batch([piece.text for piece in batch]))
        return
    texts = [chunk for piece in batch for chunk in piece.chunks or () if chunk.control < 0]
    encoded = iter(tok.encode_batch([chunk.text for chunk in texts], [chunk.position for chunk in texts]))
    for piece in batch:
        chunks = piece.chunks or ()
        ids = [np.asarray([chunk.control]) if chunk.control >= 0 else next(encoded) for chunk in chunks]
        flags = [np.full(len(i), chunk.loss) for i, chunk in zip(ids, chunks, strict=True)]
        loss_bytes = sum(len(chunk.text.encode()) for chunk in chunks if chunk.loss and chunk.control < 0)
        yield np.concatenate(ids or [np.empty(0, np.int64)]), np.concatenate(flags or [np.empty(0, bool)]), loss_bytes


def first_token_bytes(tok: tokenizers.Tokenizer, piece: Piece, ids: np.ndarray) -> int:
    """Return the bytes of text of the first token of a document without the tokenizer's own first tokens.

    piece: the first of the document. ids: its tokens.
    """
    if not len(ids) or (piece.chunks and piece.chunks[0].control >= 0):
        return 0
    return tok.first_bytes(piece.chunks[0].text if piece.chunks else piece.text, int(ids[0]))


def make_control_finder(tok: tokenizers.Tokenizer) -> Callable[[Piece], list[str]]:
    """Return a function from a document to the control tokens whose text is among its text, where it is read as characters."""
    try:
        texts = [token.text for token in tok.control_tokens()]
    except tokenizers.TokenizerError:  # some are read as whole words only, so text may hold them as they are
        texts = []
    starts = {text[:2] for text in texts}

    def find(piece: Piece) -> list[str]:
        plain = [piece.text] if piece.chunks is None else [chunk.text for chunk in piece.chunks if chunk.control < 0]
        candidates = [text for text in plain if any(start in text for start in starts)]
        return [text for text in texts if any(text in x for x in candidates)] if candidates else []

    return find


def make_shard(task: Task, counters: Any) -> Report:
    """Write the token files of a shard, with what was found in their headers. Return what was found.

    If there are bad lines that are not to be skipped, no file is written. counters: bytes read and tokens made so far, by all
    parts; this part is added.
    """
    job = task.job
    tok, rows = job.load()
    find_control = make_control_finder(tok)
    report = Report()
    with contextlib.ExitStack() as stack:
        suffix = f".{os.getpid()}"  # no other process writes under this name
        info = tokenizers.tokenizer_info(tok)
        writers = [stack.enter_context(TokenWriter(path, info, suffix=suffix, loss=job.flags)) for path in task.files]
        for cut in task.shard:
            writer = None  # of the document that is being written
            for batch in batch_pieces(documents.read_pieces(cut, rows, report)):
                tokens_before = sum(w.tokens for w in writers)
                for piece, (ids, flags, loss_bytes) in zip(batch, encode_pieces(tok, batch), strict=True):
                    for text in find_control(piece):
                        report.notes[f"text read as characters, not as a control token: {text}"] += 1
                    first_bytes = 0
                    if writer is None:
                        first_bytes = first_token_bytes(tok, piece, ids)
                        writer = writers[1 if job.validation and in_validation(piece, job.validation) else 0]
                        if not job.flags:  # otherwise the parts of the document include these ids
                            writer.write(list(tok.bos), 0)
                    writer.write(ids, piece.num_bytes, flags, loss_bytes, first_bytes)
                    loss_chunks = [chunk for chunk in piece.chunks or () if chunk.loss]
                    writer.turn_ends |= {chunk.control for chunk in loss_chunks if chunk.turn == "end"}
                    writer.in_turns |= {chunk.control for chunk in loss_chunks if chunk.turn == "inside"}
                    if piece.end:
                        # End-of-text counts if it ends a turn that no control token has ended. The template of a conversation
                        # may have written it already.
                        ended = piece.chunks and piece.chunks[-1].control >= 0 and job.loss != "all"
                        eot_counts = bool(piece.chunks) and piece.chunks[-1].loss and not ended
                        writer.end_document(loss=eot_counts, once=job.flags)
                        writer = None
                add_progress(counters, 0, sum(w.tokens for w in writers) - tokens_before)
            add_progress(counters, cut.size, 0)
        if report.bad and not task.skip_bad_lines:
            for writer in writers:
                writer.abort()
            return report
        for writer in reversed(writers):  # the first file makes the part a finished one
            writer.recipe = {"part": task.identity, **vars(report)}
            writer.close()
    return report


# ---- All parts


def add_progress(counters: Any, size: int, tokens: int) -> None:
    with contextlib.nullcontext() if isinstance(counters, list) else counters.get_lock():
        counters[0] += size
        counters[1] += tokens


@contextlib.contextmanager
def progress(counters: Any, total: int, bytes_before: int) -> Iterator[None]:
    """Print a line every LINE_SECONDS with bytes read and tokens made.

    Args:
      counters: bytes read and tokens made in this run, which change.
      total: bytes of the input, 0 if unknown.
      bytes_before: bytes that an earlier run has read.
    """
    ended, started = threading.Event(), time.monotonic()

    def print_progress() -> None:
        while not ended.wait(LINE_SECONDS):
            (done, tokens), seconds = counters, time.monotonic() - started
            of_total = f" of {total / 1e6:,.0f}" if total else ""
            time_left = f", {duration((total - bytes_before - done) * seconds / done)} left" if total and done else ""
            rate = f"{short_count(tokens)} tokens, {short_count(tokens / seconds)} tokens/s"
            print(f"prepare: {(bytes_before + done) / 1e6:,.0f}{of_total} MB, {rate}{time_left}", file=sys.stderr, flush=True)

    threading.Thread(target=print_progress, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def make_all_shards(tasks: list[Task], folder: Path, processes: int, say: Say) -> int:
    """Make the parts that an earlier run did not finish, and delete files of other runs. Return the number of bad lines.

    Calls `say` with the first MAX_SHOWN bad lines, and with what of the rows is not used. Raises PrepareError after the first
    part with bad lines that are not to be skipped.
    """
    results = [task.load_report() for task in tasks]
    unfinished = [task for task, result in zip(tasks, results, strict=True) if result is None]
    finished_files = {path for task, result in zip(tasks, results, strict=True) if result for path in task.files}
    stale_files = [path for path in folder.iterdir() if path not in finished_files and path.name != "lock"]
    for path in stale_files:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if finished_files:
        say(f"{folder}: {len(tasks) - len(unfinished)} of {len(tasks)} parts are finished; continuing")
    elif any(path.suffix == ".tok" for path in stale_files):
        say(f"{folder} has no intact part of these inputs and options; starting again")
    processes = min(processes, len(unfinished))
    counters = SPAWN.Array("q", 2) if processes > 1 else [0, 0]
    total_size = sum(task.size for task in tasks)
    total = Report()
    try:
        with (
            progress(counters, total_size, total_size - sum(task.size for task in unfinished)),
            contextlib.closing(make_shards(unfinished, processes, counters)) as new_results,
        ):
            for earlier in results:
                result = earlier or next(new_results)
                total.bad += result.bad
                total.notes.update(result.notes)
                shown = result.lines[: documents.MAX_SHOWN - len(total.lines)]
                total.lines += shown
                for line in describe_lines(shown):
                    say(line)
                if total.bad and not tasks[0].skip_bad_lines:
                    more = f" (the first {documents.MAX_SHOWN} are shown)" if total.bad > documents.MAX_SHOWN else ""
                    fix = "Repair the file, or leave such lines out with --skip-bad-lines."
                    raise PrepareError(f"{count_lines(total.bad)} in this part of the input{more}; nothing was written. {fix}")
    except BaseException:
        if count := sum(task.files[0].exists() for task in tasks):
            note = f"{count} of {len(tasks)} parts are finished and kept in {folder}"
            say(f"{note}; the same command goes on from there")
        raise
    for line in describe_notes(total.notes):
        say(line)
    return total.bad


def describe_lines(lines: Sequence[tuple[str, int, str]]) -> list[str]:
    """Return bad lines with their reasons. Lines of one place with the same reason are one entry."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for location, number, reason in lines:
        numbers.setdefault((location, reason), []).append(str(number))
    return [f"{location}:{', '.join(line_numbers)}: {reason}" for (location, reason), line_numbers in numbers.items()]


def describe_notes(notes: collections.Counter[str]) -> list[str]:
    """Return lines with the numbers of rows and what of them is not used."""
    lines = [f"{count:,} row{'s' * (count > 1)}: {note}" for note, count in notes.most_common(documents.MAX_SHOWN)]
    more = len(notes) - documents.MAX_SHOWN
    return lines + [f"... and {more} more notes on rows"] * (more > 0)


def count_lines(bad: int) -> str:
    return f"{bad} bad line{'s' if bad > 1 else ''}"


SPAWN = multiprocessing.get_context("spawn")  # the parent has threads of the tokenizers package


def make_shards(tasks: list[Task], processes: int, counters: Any) -> Generator[Report]:
    """Yield the results of `make_shard` in the order of the tasks. Up to `processes` parts are made at a time.

    The processes end when the iterator ends or is closed. Raises the exceptions of `make_shard`, and PrepareFailed.
    """
    if processes <= 1:
        for task in tasks:
            yield make_shard(task, counters)
        return
    closed, open_end = SPAWN.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, SPAWN, _begin_worker, (counters, closed))
    try:
        # Ctrl-C is for this process alone: workers inherit the mask, and end when the pipe is closed.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = [pool.submit(_run_task, task) for task in tasks]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for future in futures:
            yield future.result()
    except BrokenProcessPool as e:
        raise PrepareFailed(
            "a process was ended from outside, most often because memory ran out. Fix: give fewer --processes; the same "
            "command continues from the finished parts."
        ) from e
    finally:
        open_end.close()
        pool.shutdown(cancel_futures=True)


_counters: Any = None  # in a worker: bytes read and tokens made by all processes, shared with the parent


def _begin_worker(counters: Any, closed: Any) -> None:
    """Set up a worker: it shares `counters`, uses one core, and ends when its parent ends or closes the pipe."""
    global _counters
    _counters = counters
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers use the cores

    def exit_with_parent() -> None:
        with contextlib.suppress(EOFError):
            closed.recv()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _run_task(task: Task) -> Report:
    return make_shard(task, _counters)
