"""Corpora to token files: text, JSON lines, Parquet and data sets by name, by as many processes as there are cores."""

import datetime
import glob
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import rich.progress

from jaxtrain.data import datasets_input, readers
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.readers import Cut, PrepareError
from jaxtrain.data.shards import SHOWN, Folder, Job, Shard, describe, group, make_shards, names
from jaxtrain.data.template import LOSSES
from jaxtrain.data.tokenfile import TokenFile, TokenFileError, TokenWriter

SHARD_MB = 64  # of input, in a shard


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


class Progress:
    """Bytes read of all, as a live bar on a terminal, else a line every ten seconds."""

    def __init__(self, total: int, already: int = 0):
        """`already`: bytes that an earlier run has read."""
        self.total = total
        self.already = already
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
            self.task = self.bar.add_task("prepare", total=total, completed=already, tokens="")

    def context(self) -> AbstractContextManager[Any]:
        return self.bar or nullcontext()

    def update(self, done: int, tokens: int) -> None:
        if self.bar:
            self.bar.update(self.task, completed=done, tokens=f"{tokens / 1e6:,.1f} M tokens")
        elif time.monotonic() - self.last > 10:
            self.last = time.monotonic()
            rate = (done - self.already) / (self.last - self.started) / 1e6
            print(
                f"prepare: {done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB, {tokens / 1e6:,.1f} M tokens, {rate:,.1f} MB/s",
                file=sys.stderr,
                flush=True,
            )


def cut_inputs(patterns: list[str], format: str, shard_bytes: int, job: Job) -> tuple[list[Cut], list[list[Any]]]:
    """All inputs in parts, and (path, bytes, time of change in ns) of each, or what stands for it. Raises PrepareError."""
    cuts: list[Cut] = []
    state: list[list[Any]] = []
    by_name = [p for p in patterns if p.startswith(datasets_input.PREFIX)]
    for path in find_inputs([p for p in patterns if p not in by_name]):
        kind = readers.detect_format(path) if format == "auto" else format
        found = path.stat()
        state.append([str(path), found.st_size, found.st_mtime_ns])
        cuts += readers.cut_file(path, kind, shard_bytes)
    for name in by_name:
        try:
            count, content = datasets_input.parts(name, job.load()[1].columns)
        except datasets_input.DatasetError as e:
            raise PrepareError(str(e)) from e
        state.append([name, count, content])
        cuts += [Cut(name, "dataset", 0, i, i + 1) for i in range(count)]
    return cuts, state


def check_options(job: Job, outputs: list[Path], force: bool, processes: int, shard_mb: float) -> None:
    """Raises PrepareError for what can be seen without reading anything."""
    if outputs[0].suffix != ".tok":
        raise PrepareError(f"--output={outputs[0]}: the name of a token file ends in .tok")
    if not 0 <= job.validation < 1:
        raise PrepareError(f"--validation={job.validation}: is a fraction of the documents, at least 0 and less than 1")
    if processes < 0:
        raise PrepareError(f"--processes={processes}: is a count of processes, 0 for as many as there are cores")
    if not shard_mb > 0:
        raise PrepareError(f"--shard-mb={shard_mb}: must be above 0")
    if job.loss not in LOSSES:
        raise PrepareError(f"--loss={job.loss}: is one of {', '.join(LOSSES)}")
    if not job.chat and (job.chat_template or job.loss != LOSSES[0]):
        raise PrepareError("--chat-template and --loss say how conversations are written: give --chat too")
    if not all(job.text_keys):
        raise PrepareError(f"--text-key={','.join(job.text_keys)}: names a column, or several with commas between")
    for path in outputs:
        if path.exists() and not force:
            raise PrepareError(f"--output={outputs[0]}: {path} exists. Choose another name, or replace it with --force.")


def prepare(
    inputs: list[str],
    output: Path,
    *,
    tokenizer: str = "byte",
    eot: str = "",
    text_key: str = "text",
    separator: str = "\n\n",
    format: str = "auto",
    chat: bool = False,
    chat_template: Path | str = "",
    loss: str = "assistant",
    validation: float = 0.0,
    skip_bad_lines: bool = False,
    force: bool = False,
    processes: int = 1,
    shard_mb: float = SHARD_MB,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> list[dict[str, Any]]:
    """Writes `output` (and NAME.val.tok with `validation` > 0), both or neither. Returns their headers.

    `text_key`: a column, or several with commas between, joined by `separator`. `chat`: rows are conversations, written by the
    tokenizer's chat template or the file `chat_template`; `loss` says which of their tokens count (template.LOSSES).
    `processes` 0: as many as there are cores; the result does not depend on it. Finished shards (`shard_mb` of input) of a run
    that was cut off are taken over.

    Raises PrepareError, TokenizerError or TokenFileError for what the user can put right, and WorkerDied. Bad lines are named
    through `say`; unless they are skipped, the file they are in is read to its end to name the others, and nothing is written.
    """
    job = Job(
        tokenizer=tokenizer,
        eot=eot,
        text_keys=tuple(text_key.split(",")),
        separator=separator,
        validation=validation,
        chat=chat,
        chat_template=str(chat_template),
        loss=loss,
        date=datetime.date.today().isoformat(),
    )
    outputs = [output, validation_path(output)] if validation else [output]
    check_options(job, outputs, force, processes, shard_mb)
    tok, _ = job.load()
    shard_bytes = max(1, int(shard_mb * 1e6))
    cuts, state = cut_inputs(inputs, format, shard_bytes, job)
    shards = group(cuts, shard_bytes)
    manifest = {**describe(job), "inputs": state, "shard_bytes": shard_bytes, "format": format, "version": 1}
    output.parent.mkdir(parents=True, exist_ok=True)
    made = {"chat": {"loss": loss, "template_sha256": manifest["chat_template"]}} if chat else {}
    with ExitStack() as stack:
        folder = stack.enter_context(Folder(output.with_name(output.name + ".partial"), manifest, say))
        try:
            results = _shards(job, folder, shards, processes or cores(), skip_bad_lines, say)
        except BaseException:
            if kept := len(list(folder.shards.glob("*.json"))):
                say(
                    f"{kept} of {len(shards)} parts are finished and kept in {folder.path}; the same command goes on from there"
                )
            raise
        if bad := sum(count for result in results for _, count in result["bad"]):
            say(f"{count_lines(bad)} left out{shown_of(bad)}")
        writers = [
            stack.enter_context(
                TokenWriter(path, tokenizers.info(tok), suffix=".merging", sources=inputs, loss=chat, made=made)
            )
            for path in outputs
        ]
        for number in range(len(shards)):
            for writer, path in zip(writers, names(folder.shards, number, job), strict=True):
                try:
                    writer.append(TokenFile.open(path))
                except TokenFileError as e:
                    folder.forget(number)
                    raise TokenFileError(
                        f"{e} It is a part of this run's result: the same command makes that part again."
                    ) from e
        for writer in writers:
            if not writer.documents:
                folder.discard()
                why = "Change --validation." if len(writers) > 1 else "Is there any text in the input?"
                raise PrepareError(f"{writer.path}: would hold no document; nothing was written. {why}")
        headers = [writer.seal() for writer in writers]
        for writer in writers:
            writer.publish()
    return headers


def cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0))


def _shards(
    job: Job, folder: Folder, shards: list[Shard], processes: int, skip_bad_lines: bool, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Makes the shards that are not there yet. Returns the results of all, in order; says bad lines in order."""
    found = {number: folder.finished(number, job, skip_bad_lines) for number in range(len(shards))}
    results: dict[int, Any] = {number: result for number, result in found.items() if result is not None}
    missing = {number: shard for number, shard in enumerate(shards) if number not in results}
    if results:
        say(f"{folder.path}: {len(results)} of {len(shards)} parts are finished; going on")
    sizes = [sum(cut.size for cut in shard) for shard in shards]
    at = {number: (sizes[number], result["tokens"]) for number, result in results.items()}
    progress = Progress(sum(sizes), sum(done for done, _ in at.values()))

    def update(number: int, done: int, tokens: int) -> None:
        at[number] = (done, tokens)
        progress.update(sum(d for d, _ in at.values()), sum(t for _, t in at.values()))

    shown = following = 0
    bad: dict[str, int] = {}

    def check() -> None:
        """Goes through results in the order of the input, as far as they are there; raises for what is wrong with it."""
        nonlocal shown, following
        while following < len(shards):
            # the file with the first bad line ends before this shard
            if bad and shards[following][0].path not in bad:
                _refuse(bad)
            if following not in results:
                return
            if isinstance(result := results[following], Exception):
                raise result
            if not skip_bad_lines:
                for path, count in result["bad"]:
                    if not bad or path in bad:
                        bad[path] = bad.get(path, 0) + count
            for path, line in result["lines"]:
                shown += skip_bad_lines or path in bad
                if shown <= SHOWN and (skip_bad_lines or path in bad):
                    say(line)
            following += 1
        if bad:
            _refuse(bad)

    with progress.context():
        check()
        if missing:
            for number, result in make_shards(job, folder.shards, missing, processes, skip_bad_lines, update):
                results[number] = result
                if not isinstance(result, Exception):
                    update(number, sizes[number], result["tokens"])
                check()
    return [results[number] for number in range(len(shards))]


def _refuse(bad: dict[str, int]) -> None:
    ((path, count),) = bad.items()
    raise PrepareError(
        f"{count_lines(count)} in {path}{shown_of(count)}; nothing was written. Mend the file, or leave such lines out "
        "with --skip-bad-lines."
    )


def count_lines(bad: int) -> str:
    return f"{bad} bad line{'s' if bad > 1 else ''}"


def shown_of(bad: int) -> str:
    return f" (the first {SHOWN} are shown)" if bad > SHOWN else ""
