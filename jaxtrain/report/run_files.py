"""The files of a run's folder, and the state of the run. Imports no jax."""

import dataclasses
import itertools
import re
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtrain.config.durations import duration
from jaxtrain.metrics import files as metrics
from jaxtrain.metrics import goodput
from jaxtrain.metrics import receipt as receipts
from jaxtrain.metrics import samples as sample_files
from jaxtrain.metrics.goodput import Goodput
from jaxtrain.report.sections import data_frame

PAGE = "report.html"  # a run's own page, in its folder
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
class Run(receipts.Run):
    """The files of a run's folder, as a page shows them. The receipt is {} if there is none.

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
        """Return the lines of metrics.jsonl of one kind ("train", "eval", "gpu") as a pandas.DataFrame. Needs pandas."""
        return data_frame([line for line in self.lines if line["kind"] == kind])

    @cached_property
    def evals(self) -> dict[str, Columns]:
        """Return name of a held-out set -> its eval lines. The name is "" for a set without a name."""
        found: dict[str, list[dict[str, Any]]] = {}
        for line in (line for line in self.lines if line["kind"] == "eval"):
            found.setdefault(line.get("set", ""), []).append(line)
        return {name: columns(lines) for name, lines in found.items()}

    @cached_property
    def gpu(self) -> list[dict[str, Any]]:
        """Return the lines of kind "gpu" of all processes, ordered by time. Raises MetricsError for a damaged file."""
        paths = sorted(self.folder.glob("metrics.*.jsonl"))
        others = [path for path in paths if re.fullmatch(r"metrics\.\d+\.jsonl", path.name)]  # moved files have other names
        found = (line for line in itertools.chain(self.lines, *map(metrics.read, others)) if line["kind"] == "gpu")
        return sorted(found, key=lambda line: line["time_unix"])

    @cached_property
    def alerts(self) -> list[str]:
        """Return the warnings and errors of all logs, ordered by time, each with its continuation lines."""
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(self.folder.glob("log*.txt"))]
        entries = [entry.rstrip("\n") for text in texts for entry in ENTRY.split(text)]
        return sorted((entry for entry in entries if ALERT.match(entry)), key=lambda entry: entry[:24])

    @cached_property
    def samples(self) -> list[sample_files.Sample]:
        """Return the generated samples of the last step with samples."""
        path = self.folder / "samples.txt"
        found = list(sample_files.read(path.read_bytes().decode())) if path.exists() else []
        return [s for s in found if s.step == found[-1].step]

    @cached_property
    def silent_s(self) -> float | None:
        """Return the seconds since the last write to a file of WRITTEN; None without such a file."""
        times = [path.stat().st_mtime for file in WRITTEN if (path := self.folder / file).exists()]
        return max(0.0, time.time() - max(times)) if times else None

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
        """Return the tokens of a global batch from the config, since tokens in metrics.jsonl include skipped batches."""
        batch, length = (self.config.get(part, {}).get(key) for part, key in (("train", "global_batch"), ("data", "seq_len")))
        return batch * length if batch and length else None

    @property
    def ended(self) -> bool:
        return self.receipt.get("ended") is not None

    @property
    def alive(self) -> bool:
        """Return whether the run probably still trains: its receipt has no end, and a file of WRITTEN is recent (QUIET_S)."""
        return not self.ended and self.silent_s is not None and self.silent_s < QUIET_S[bool(self.ledger)]

    def data_of(self, held_out: str | None = None) -> Any:
        """Return what identifies the training data, or a held-out set: equal for equal data; None if the receipt has none."""
        found = (self.receipt.get("eval_data") or {}).get(held_out) if held_out is not None else self.receipt.get("data")
        if not found:
            return None
        files = [(file["content_sha256"], file["weight"]) for file in found.get("files") or ()]
        return files or found.get("source"), (found.get("tokenizer") or {}).get("sha256")

    @cached_property
    def wall_time(self) -> Goodput | None:
        """Return the wall time by cause; None without a ledger."""
        return goodput.summarise(self.ledger) if self.ledger else None

    def figure(self, name: str) -> Any:
        """Return `goodput`, or a rate of the run by its name, such as mfu_causal; None if it is unknown."""
        return (self.rates | {"goodput": self.wall_time.goodput if self.wall_time else None}).get(name)

    def positions(self, steps: Sequence[int], times: Sequence[float] | None = None) -> list[Sequence[float]]:
        """Return the positions of steps on each x axis: step, tokens, seconds since the start of the run.

        Args:
            times: Unix seconds of each step; None: the time of the newest train line up to each step.

        Before the first train line, tokens and times grow evenly from the start of the run.
        """
        known = self.train.steps
        lines = [bisect_right(known, step) - 1 for step in steps] if known else []
        parts = [1.0 if i >= 0 else step / known[0] for i, step in zip(lines, steps, strict=False)]
        tokens = [round((self.train["tokens"][max(0, i)] or 0) * part) for i, part in zip(lines, parts, strict=True)]
        tokens = tokens or [0] * len(steps)
        first = self.train["time_unix"][0] if known else times[0] if times else 0.0
        start = self.ledger[0]["time"] if self.ledger else first
        if not times:
            moments = [self.train["time_unix"][max(0, i)] for i in lines]
            times = [start + (t - start) * part for t, part in zip(moments, parts, strict=True)] or [start] * len(steps)
        return [list(steps), tokens, [max(0.0, t - start) for t in times]]


def verdict(run: Run) -> tuple[str, str]:
    """Return (CSS class, text) for the state of a run: done, ended with an error, running, killed, or unknown."""
    at = f"step {run.last_step:,}" + (f" of {run.steps:,}" if run.steps else "")
    if run.ended:
        code, reason = run.receipt.get("exit_code"), run.receipt.get("reason")
        if code == 0:
            return "yes", f"done: {reason}"
        means = f"{EXIT_CODES[code]}: " if code in EXIT_CODES else ""
        return "no", f"{means}{reason}; exit code {code}, last logged {at}"
    if run.silent_s is None or not run.receipt:
        return "", f"{at}; how it ended is not known"
    if run.alive:
        return "", f"running: {at}, last write {duration(run.silent_s)} ago"
    return "no", f"killed or hanging at {at}: the receipt has no end, last write {duration(run.silent_s)} ago"
