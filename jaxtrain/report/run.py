"""The files of a run's folder, and the state of the run. Imports no jax."""

import dataclasses
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.durations import duration
from jaxtrain.config.ramp import Ramp, parse_ramp
from jaxtrain.metrics import files as metrics
from jaxtrain.metrics import goodput
from jaxtrain.metrics import receipt as receipts
from jaxtrain.metrics import samples as sample_files
from jaxtrain.metrics.goodput import Goodput
from jaxtrain.report.tables import data_frame

PAGE = "report.html"  # a run's own page, in its folder
KINDS = ("train", "eval", "source", "gpu")  # of lines of metrics.jsonl
FILES = ("receipt.json", "metrics.jsonl", "config.json")  # a folder with any of these files is a run
WRITTEN = ("metrics.jsonl", "log.txt", goodput.FILE, "receipt.json")  # files that a run writes while it trains
# Whether a run has a goodput ledger -> seconds without a write after which it counts as ended. The ledger is written every
# second. Other files can stay unchanged for minutes while a large model compiles.
QUIET_S = {True: 60.0, False: 900.0}
ENTRY = re.compile(r"^(?=\d{4}-\d\d-\d\d )", re.MULTILINE)  # the beginning of a log entry
ALERT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S* (?:WARNING|ERROR|CRITICAL) ")
EXIT_CODES = {
    1: "an error",
    2: "refused: the config or the command is wrong",
    3: "preflight found a fault",
    75: "asked to stop, or a process was lost: start it again",
    76: "diverged too often",
    124: "the watchdog ended a hang",
    130: "Ctrl-C, state saved",
}


class RunError(ValueError):
    """A report cannot be made: a folder is no run's folder or is given twice, or there are too many runs."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Lines of metrics.jsonl of one kind as columns. A value that is missing in a line is None."""

    steps: list[int]
    values: dict[str, list[Any]]

    def __getitem__(self, key: str) -> list[Any]:
        return self.values.get(key) or [None] * len(self.steps)


def columns(lines: Iterable[Mapping[str, Any]]) -> Columns:
    """Return lines of metrics.jsonl as columns. lines: of one kind, in order."""
    lines = list(lines)
    keys = dict.fromkeys(key for line in lines for key in line)
    return Columns([line["step"] for line in lines], {key: [line.get(key) for line in lines] for key in keys})


@dataclasses.dataclass(frozen=True)
class RunFolder(receipts.RunRecord):
    """The files of a run's folder. The receipt is {} if there is none.

    Attributes:
        config: the resolved config; {} without config.json.
        ledger: lines of goodput.jsonl.
        notes: a sentence for each file that is missing or cannot be read.
    """

    folder: Path
    config: dict[str, Any]
    ledger: list[dict[str, Any]]
    notes: list[str]

    @cached_property
    def train(self) -> Columns:
        """Return the train lines of metrics.jsonl."""
        return columns(line for line in self.lines if line["kind"] == "train")

    def to_pandas(self, kind: str = "train") -> Any:
        """Return the lines of one kind as a pandas.DataFrame. Needs pandas.

        Args:
            kind: train | eval | source | gpu (of all processes).

        Raises:
            ValueError: there is no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"kind = {kind!r}: no such lines. Fix: {', '.join(KINDS[:-1])} or {KINDS[-1]}.")
        return data_frame(self.gpu if kind == "gpu" else [line for line in self.lines if line["kind"] == kind])

    @cached_property
    def evals(self) -> dict[str, Columns]:
        """Return name of a held-out set -> its eval lines. The name is "" for a set without a name."""
        by_set: dict[str, list[dict[str, Any]]] = {}
        for line in (line for line in self.lines if line["kind"] == "eval"):
            by_set.setdefault(line.get("set", ""), []).append(line)
        return {name: columns(lines) for name, lines in by_set.items()}

    @cached_property
    def gpu(self) -> list[dict[str, Any]]:
        """Return the lines of kind "gpu" of all processes, ordered by time. Raises MetricsError for a damaged file."""
        paths = sorted(self.folder.glob("metrics.*.jsonl"))
        files = [path for path in paths if re.fullmatch(r"metrics\.\d+\.jsonl", path.name)]  # moved files have other names
        lines = (line for line in itertools.chain(self.lines, *map(metrics.read_metrics, files)) if line["kind"] == "gpu")
        return sorted(lines, key=lambda line: line["time_unix"])

    @cached_property
    def alerts(self) -> list[str]:
        """Return the warnings and errors of all logs, ordered by time, each with its continuation lines."""
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(self.folder.glob("log*.txt"))]
        entries = [entry.rstrip("\n") for text in texts for entry in ENTRY.split(text)]
        return sorted((entry for entry in entries if ALERT.match(entry)), key=lambda entry: entry[:24])

    @cached_property
    def samples(self) -> list[sample_files.TextSample]:
        """Return the generated samples of the last step with samples."""
        path = self.folder / "samples.txt"
        all_samples = list(sample_files.parse_samples(path.read_bytes().decode())) if path.exists() else []
        return [s for s in all_samples if s.step == all_samples[-1].step]

    @cached_property
    def wall_time(self) -> Goodput | None:
        """Return the wall time by cause; None without a ledger."""
        return goodput.summarise(self.ledger) if self.ledger else None

    @property
    def steps(self) -> int | None:
        """Return train.steps of the config; None without config.json."""
        return self.config.get("train", {}).get("steps")

    @property
    def last_step(self) -> int:
        """Return the newest step of the train lines; 0 without lines."""
        return self.train.steps[-1] if self.train.steps else 0

    @property
    def tokens_per_step(self) -> int | None:
        """Return the tokens of a step of train.global_batch, from the config."""
        batch, length = (
            self.config.get(section, {}).get(key) for section, key in (("train", "global_batch"), ("data", "seq_len"))
        )
        return batch * length if batch and length else None

    @property
    def tokens_in_all(self) -> int | None:
        """Return the tokens of all steps from the config, since tokens in metrics.jsonl include skipped batches."""
        return self.ramp.before(self.steps) * self.config["data"]["seq_len"] if self.steps and self.tokens_per_step else None

    @property
    def ramp(self) -> Ramp:
        """Return the sequences of each step; one each without config.json."""
        train = self.config.get("train", {})
        return parse_ramp(train.get("batch_ramp", ""), train.get("global_batch", 1))[0]

    @property
    def devices(self) -> int:
        """Return the number of devices; 1 if the receipt has none."""
        return (self.receipt.get("devices") or {}).get("count", 1)

    @cached_property
    def silent_s(self) -> float | None:
        """Return the seconds since the last write to a file of WRITTEN; None without such a file."""
        times = [path.stat().st_mtime for file in WRITTEN if (path := self.folder / file).exists()]
        return max(0.0, time.time() - max(times)) if times else None

    @property
    def alive(self) -> bool:
        """Return whether the run probably still trains: its receipt has no end, and a file of WRITTEN is recent (QUIET_S)."""
        ended = self.receipt.get("ended") is not None
        return not ended and self.silent_s is not None and self.silent_s < QUIET_S[bool(self.ledger)]

    def positions(self, steps: Sequence[int], times: Sequence[float] | None = None) -> list[list[float]]:
        """Return the positions of steps on each x axis: step, tokens, seconds since the start of the run.

        Between two train lines, tokens and time grow evenly. times: Unix seconds of each step, if they are known.
        """
        train_steps, tokens, moments = self.train.steps, self.train["tokens"], self.train["time_unix"]
        start = self.ledger[0]["time"] if self.ledger else moments[0] if train_steps else times[0] if times else 0.0
        if times is None:
            times = list(np.interp(steps, [0, *train_steps], [start, *moments]))
        seconds = [max(0.0, float(t) - start) for t in times]
        return [list(steps), np.interp(steps, [0, *train_steps], [0, *tokens]).round().tolist(), seconds]


def verdict(run: RunFolder) -> tuple[str, str]:
    """Return (CSS class, text) for the state of a run: done, ended with an error, running, killed, or unknown."""
    progress = f"step {run.last_step:,}" + (f" of {run.steps:,}" if run.steps else "")
    if run.receipt.get("ended") is not None:
        code, reason = run.receipt.get("exit_code"), run.receipt.get("reason")
        if code == 0:
            return "yes", f"done: {reason}"
        means = f"{EXIT_CODES[code]}: " if code in EXIT_CODES else ""
        return "no", f"{means}{reason}; exit code {code}, last logged {progress}"
    if run.silent_s is None or not run.receipt:
        return "", f"{progress}; how it ended is not known"
    if run.alive:
        return "", f"running: {progress}, last write {duration(run.silent_s)} ago"
    return "no", f"killed or hanging at {progress}: the receipt has no end, last write {duration(run.silent_s)} ago"


def read_run[R: RunFolder](folder: str | Path, name: str = "", kind: type[R] = RunFolder) -> R:
    """Return the run in a folder, as an object of class `kind`.

    Raises:
        RunError: the folder is not a run's folder.
        ReceiptError: metrics.jsonl is damaged.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise RunError(f"RUN = {folder}: no such folder. Fix: name a run's folder, such as runs/tiny.")
    if not any((root / file).exists() for file in FILES):
        raise RunError(
            f"RUN = {folder}: not a run's folder, it has none of {', '.join(FILES)}. Fix: name one such as runs/tiny."
        )
    notes: list[str] = []

    def load_file(file: str, parse: Callable[[Path], Any], empty: Any, effect: str) -> Any:
        try:
            if (root / file).exists():
                return parse(root / file)
            notes.append(f"There is no {file}: {effect}.")
        except ValueError as error:  # ReceiptError is a ValueError too
            notes.append(f"{file} is left out, because it cannot be read: {error}")
        return empty

    run = kind(
        name or root.resolve().name,
        root,
        load_file(receipts.NAME, receipts.load_receipt, {}, "the page has no receipt"),
        load_file(
            "config.json", lambda path: json.loads(path.read_text(encoding="utf-8")), {}, "the number of steps is not known"
        ),
        load_file(goodput.FILE, goodput.read_ledger, [], "the page has no goodput"),
        notes,
    )
    if not run.train.steps:
        notes.append("metrics.jsonl has no step yet.")
    return run


def read_runs(folders: Sequence[str | Path]) -> list[RunFolder]:
    """Return several runs with distinct names. Raises the errors of `read_run`, and RunError if a folder is given twice."""
    paths = [Path(f).expanduser().resolve() for f in folders]
    twice = [str(f) for i, f in enumerate(folders) if paths[i] in paths[:i]]
    if twice:
        raise RunError(f"RUN = {twice[0]}: named twice. Fix: name each run once.")
    short = [path.name for path in paths]
    names = [s if short.count(s) == 1 else f"{path.parent.name}/{s}" for path, s in zip(paths, short, strict=True)]
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
