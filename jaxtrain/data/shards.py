"""Shards: parts of the input that processes turn into small token files, so that a run that was cut off goes on.

    NAME.tok.partial/manifest.json     inputs (path, size, time of change), options and tokenizer of the run
    NAME.tok.partial/DIGEST/000007.tok, 000007.val.tok, 000007.json      a finished shard; the JSON is written last

How the input is cut depends on nothing but the input and `--shard-mb`, so the shards in their order are the same whatever the
number of processes and whichever of them is done first.
"""

import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.readers import Cut, Input, PrepareError, read
from jaxtrain.data.rows import ChatRows, Piece, Rows, TextRows
from jaxtrain.data.template import load_template
from jaxtrain.data.tokenfile import TokenFile, TokenFileError, TokenWriter, open_locked

BATCH_BYTES = 4 << 20  # text encoded at once
SHOWN = 20  # bad lines shown one by one; further ones are counted
Shard = tuple[Cut, ...]
Progress = Callable[[int, int], None]  # bytes of the shard's input that are read, tokens made of them


class WorkerDied(RuntimeError):
    """A process ended without a word: out of memory, or killed."""


@dataclass(frozen=True)
class Job:
    """What every shard is made with. Equal jobs and equal cuts give equal shards."""

    tokenizer: str
    eot: str
    text_keys: tuple[str, ...]
    separator: str
    validation: float
    chat: bool
    chat_template: str  # a file; "": the tokenizer's own
    loss: str
    date: str

    def load(self) -> tuple[tokenizers.Tokenizer, Rows]:
        """The tokenizer, and how rows become documents. Raises TokenizerError."""
        tok = tokenizers.load_tokenizer(self.tokenizer, self.eot)
        if not self.chat:
            return tok, TextRows(list(self.text_keys), self.separator)
        file = Path(self.chat_template) if self.chat_template else None
        return tok, ChatRows(load_template(self.tokenizer, tok, file, self.date), self.loss)


def group(cuts: list[Cut], shard_bytes: int) -> list[Shard]:
    """Small inputs together, up to about `shard_bytes`."""
    shards: list[list[Cut]] = []
    size = 0
    for cut in cuts:
        if not shards or size + cut.size > shard_bytes or cut.kind == "dataset":
            shards.append([])
            size = 0
        shards[-1].append(cut)
        size += cut.size
    return [tuple(shard) for shard in shards]


def in_validation(piece: Piece, fraction: float) -> bool:
    """By the text itself (a long file's first part): the same document is on the same side in every run and order."""
    digest = hashlib.blake2b(piece.text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


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


def encode(tok: tokenizers.Tokenizer, batch: list[Piece]) -> Iterator[tuple[np.ndarray, np.ndarray | None, int]]:
    """(ids, loss flags or None, bytes of text that count) of each piece."""
    if batch[0].parts is None:
        yield from ((ids, None, 0) for ids in tok.encode_batch([piece.text for piece in batch]))
        return
    texts = [part for piece in batch for part in piece.parts or () if part.control < 0]
    encoded = iter(tok.encode_places([part.text for part in texts], [part.place for part in texts]))
    for piece in batch:
        parts = piece.parts or ()
        ids = [np.asarray([part.control]) if part.control >= 0 else next(encoded) for part in parts]
        flags = [np.full(len(i), part.loss) for i, part in zip(ids, parts, strict=True)]
        counted = sum(len(part.text.encode()) for part in parts if part.loss and part.control < 0)
        yield np.concatenate(ids or [np.empty(0, np.int64)]), np.concatenate(flags or [np.empty(0, bool)]), counted


def turn_is_open(piece: Piece) -> bool:
    """Whether end-of-text is what ends the last turn: its text counts, and no control token has ended it."""
    return bool(piece.parts) and piece.parts[-1].loss and piece.parts[-1].control < 0


def names(folder: Path, number: int, job: Job) -> list[Path]:
    """The token files of a shard."""
    return [folder / f"{number:06}.tok", folder / f"{number:06}.val.tok"][: 2 if job.validation else 1]


def make_shard(job: Job, folder: Path, number: int, shard: Shard, skip_bad_lines: bool, progress: Progress) -> dict[str, Any]:
    """Writes a shard. Returns what its JSON says: `files` (content hashes), `tokens`, `bad` ([path, count] each), and `lines`
    ([path, reason] each) of the first bad lines.

    Without `skip_bad_lines` it stops after the first file with bad lines, and is not marked as finished.
    """
    tok, rows = job.load()
    lines: list[tuple[str, str]] = []
    bad: list[tuple[str, int]] = []
    done = 0
    own = f".{os.getpid()}"  # a process that outlived a run that was killed writes under another name
    writers = [TokenWriter(path, tokenizers.info(tok), suffix=own, loss=job.chat) for path in names(folder, number, job)]
    try:
        for cut in shard:
            source = Input(cut, rows, lambda line, path=cut.path: lines.append((path, line)) if len(lines) < SHOWN else None)
            writer = None  # of the document that is being written
            for batch in batches_of(read(source)):
                if source.bad and not skip_bad_lines:
                    continue  # nothing will be written: only look for further bad lines
                for piece, (ids, flags, counted) in zip(batch, encode(tok, batch), strict=True):
                    if writer is None:
                        writer = writers[1 if job.validation and in_validation(piece, job.validation) else 0]
                        if not job.chat:  # a template writes its own
                            writer.write(list(tok.bos), 0)
                    writer.write(ids, piece.num_bytes, flags, counted)
                    if piece.end:
                        # of a conversation, end-of-text is what a template may have written already
                        count = job.loss == "all" or turn_is_open(piece)
                        writer.end_document(loss=job.chat and count, once=job.chat)
                        writer = None
                progress(done + min(source.done, cut.size), sum(w.tokens for w in writers))
            done += cut.size
            if source.bad:
                bad.append((cut.path, source.bad))
                if not skip_bad_lines:
                    break
        finished = skip_bad_lines or not bad
        result = {"tokens": sum(w.tokens for w in writers), "bad": bad, "lines": lines, "files": []}
        if finished:
            result["files"] = [writer.close()["content_sha256"] for writer in writers]
            part = folder / f"{number:06}.json{own}"
            part.write_text(json.dumps(result))
            part.replace(folder / f"{number:06}.json")
    finally:
        for writer in writers:
            if not writer.closed:
                writer.abort()
    return result


class Folder:
    """NAME.tok.partial, of one run at a time."""

    def __init__(self, path: Path, manifest: dict[str, Any], say: Callable[[str], None]):
        """Takes the folder, and throws away what a run left in it that is not this one. Raises TokenFileError."""
        self.path = path
        text = json.dumps(manifest, indent=1, sort_keys=True)
        self.shards = path / hashlib.sha256(text.encode()).hexdigest()[:16]
        if path.exists() and not path.is_dir():
            raise TokenFileError(f"{path}: is a file, and the folder of an unfinished run would be there. Remove it.")
        path.mkdir(parents=True, exist_ok=True)
        self._lock = open_locked(path / "lock")
        kept = path / "manifest.json"
        if kept.exists() and (found := kept.read_text()) != text:
            say(f"{path} was left by a run with other {differing(found, manifest)}; starting afresh")
        for old in path.iterdir():
            if old.is_dir() and old != self.shards:
                shutil.rmtree(old, ignore_errors=True)  # a process that outlived its run may still write there, in vain
        self.shards.mkdir(exist_ok=True)
        for old in self.shards.iterdir():
            if old.suffix not in (".tok", ".json"):  # of a shard that was not finished
                old.unlink(missing_ok=True)
        part = path / "manifest.json.new"
        part.write_text(text)
        part.replace(kept)

    def finished(self, number: int, job: Job, skip_bad_lines: bool) -> dict[str, Any] | None:
        """The result of a shard that an earlier run finished, with its files as it left them."""
        result = self.shards / f"{number:06}.json"
        try:
            found = json.loads(result.read_text())
            files = [TokenFile.open(path).header["content_sha256"] for path in names(self.shards, number, job)]
        except (OSError, ValueError):
            return None
        return found if files == found["files"] and (skip_bad_lines or not found["bad"]) else None

    def forget(self, number: int) -> None:
        """A shard that is not what it was: the next run makes it again."""
        (self.shards / f"{number:06}.json").unlink(missing_ok=True)

    def discard(self) -> None:
        """Nothing of it is worth keeping."""
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if kind is None or not any(self.shards.glob("*.json")):
            self.discard()
        self._lock.close()


def differing(found: str, manifest: dict[str, Any]) -> str:
    """The keys in which a manifest differs from a stored one."""
    try:
        old = json.loads(found)
    except ValueError:
        return "options"
    new = json.loads(json.dumps(manifest))
    return ", ".join(sorted(k for k in {*old, *new} if old.get(k) != new.get(k))).replace("_", "-")


def describe(job: Job) -> dict[str, Any]:
    """A job as the manifest holds it: files by their hashes."""
    tok, rows = job.load()
    described = {**asdict(job), "tokenizer": tokenizers.info(tok), "chat_template": ""}
    if isinstance(rows, ChatRows):
        described |= {"chat_template": rows.template.sha256, "date": job.date if rows.template.dated else ""}
    else:
        described |= {"date": "", "loss": ""}
    return json.loads(json.dumps(described))


def _serve(pipe: Any, job: Job, folder: Path, skip_bad_lines: bool) -> None:
    """A process: makes the shards it is told to, until its pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are what the cores do
    try:
        while True:
            number, shard = pipe.recv()
            try:
                result = make_shard(
                    job, folder, number, shard, skip_bad_lines, lambda done, tokens: pipe.send(("progress", done, tokens))
                )
                pipe.send(("done", result))
            except BrokenPipeError:
                raise
            except (PrepareError, tokenizers.TokenizerError, TokenFileError, OSError) as e:
                pipe.send(("error", e))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is done, or gone


def make_shards(
    job: Job,
    folder: Path,
    shards: dict[int, Shard],
    processes: int,
    skip_bad_lines: bool,
    update: Callable[[int, int, int], None],
) -> Iterator[tuple[int, dict[str, Any] | Exception]]:
    """(number, its result, or why there is none) of each shard, as they are finished.

    `update(number, bytes done, tokens)` is told how far each is. After the first failure no further shard is begun. The
    processes end with the iterator. Raises WorkerDied.
    """
    if processes == 1 or len(shards) == 1:
        for number, shard in shards.items():
            try:
                yield (
                    number,
                    make_shard(
                        job, folder, number, shard, skip_bad_lines, lambda done, tokens, n=number: update(n, done, tokens)
                    ),
                )
            except (PrepareError, tokenizers.TokenizerError, TokenFileError, OSError) as e:
                yield number, e
        return
    context = multiprocessing.get_context("spawn")  # the parent has threads of the tokenizers package
    waiting = list(reversed(shards.items()))
    working: dict[Any, tuple[Any, int]] = {}  # pipe -> (process, shard)
    running: list[Any] = []
    try:
        for _ in range(min(processes, len(shards))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, job, folder, skip_bad_lines), daemon=True)
            process.start()
            theirs.close()  # so that its end is seen as the end of the pipe
            running.append(process)
            number, shard = waiting.pop()
            ours.send((number, shard))
            working[ours] = (process, number)
        while working:
            ready: list[Any] = multiprocessing.connection.wait(list(working))
            for pipe in ready:
                process, number = working[pipe]
                try:
                    kind, *what = pipe.recv()
                except (EOFError, ConnectionResetError) as e:
                    process.join()
                    raise WorkerDied(_obituary(process.exitcode, shards[number])) from e
                if kind == "progress":
                    update(number, *what)
                    continue
                del working[pipe]
                if kind == "error":
                    waiting.clear()
                if waiting:
                    following, shard = waiting.pop()
                    pipe.send((following, shard))
                    working[pipe] = (process, following)
                else:
                    pipe.close()
                yield number, what[0]
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.join()


def _obituary(code: int | None, shard: Shard) -> str:
    how = f"was ended by signal {-code} ({signal.Signals(-code).name})" if code and code < 0 else f"ended with exit code {code}"
    files = ", ".join(dict.fromkeys(cut.path for cut in shard[:3]))
    why = " Signal 9 without your doing means that memory ran out: give fewer --processes." if code == -signal.SIGKILL else ""
    return f"a process {how} while it read {files}.{why}"
