"""What the files of a run's folder contain. Nothing is written. No jax."""

import dataclasses
import json
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain import goodput, metrics, samples
from jaxtrain.goodput import Goodput
from jaxtrain.progress import duration
from jaxtrain.receipt import format as receipts

FILES = ("receipt.json", "metrics.jsonl", "config.json")  # a folder with any of them is a run
WRITTEN = ("metrics.jsonl", "log.txt", goodput.FILE, "receipt.json")  # files that a run writes while it trains
# Seconds without a write after which a run counts as dead. The ledger of goodput is touched every second; the other files can
# stay unchanged for minutes while a large model compiles.
QUIET_S = {True: 60.0, False: 900.0}
ALERT = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S* (?:WARNING|ERROR|CRITICAL) ")
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
    """A folder cannot be reported on."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Lines of metrics of one kind as columns; a value that a line lacks is None."""

    steps: list[int]
    values: dict[str, list[Any]]

    def __getitem__(self, key: str) -> list[Any]:
        return self.values.get(key) or [None] * len(self.steps)

    def known(self, key: str) -> list[float]:
        """Return the values that are numbers, in order."""
        return [v for v in self[key] if v is not None and v == v]


def columns(lines: Iterable[Mapping[str, Any]]) -> Columns:
    """Return lines of metrics.jsonl, all of one kind and in order, as columns."""
    lines = list(lines)
    keys = dict.fromkeys(key for line in lines for key in line)
    return Columns([line["step"] for line in lines], {key: [line.get(key) for line in lines] for key in keys})


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that a page shows of one run.

    Attributes:
        evals: held-out set -> its eval lines; "" is the set without a name.
        gpu: lines of kind "gpu" of all processes, by time.
        opened: the receipt, {} if there is none, and figures made from it and metrics.jsonl.
        config: the resolved config; {} if there is none.
        ledger: lines of goodput.jsonl.
        alerts: warnings and errors of the logs, oldest first.
        samples: texts of the last step that has any.
        silent_s: seconds since the run wrote anything; None if it wrote nothing.
        notes: a sentence for each file that is missing or cannot be read.
    """

    folder: Path
    name: str
    train: Columns
    evals: dict[str, Columns]
    gpu: list[dict[str, Any]]
    opened: receipts.Run
    config: dict[str, Any]
    ledger: list[dict[str, Any]]
    alerts: list[str]
    samples: list[samples.Sample]
    silent_s: float | None
    notes: list[str]

    @property
    def receipt(self) -> dict[str, Any]:
        return self.opened.receipt

    @property
    def steps(self) -> int | None:
        """Return train.steps of the config."""
        return self.config.get("train", {}).get("steps")

    @property
    def last_step(self) -> int:
        """Return the newest step of metrics.jsonl, or 0."""
        return self.train.steps[-1] if self.train.steps else 0

    @property
    def tokens_per_step(self) -> int | None:
        """Return the tokens of a global batch by the config. Tokens of metrics.jsonl include skipped batches."""
        batch, length = (self.config.get(part, {}).get(key) for part, key in (("train", "global_batch"), ("data", "seq_len")))
        return batch * length if batch and length else None

    @property
    def devices(self) -> str:
        """Return count and kind of the devices, or ""."""
        found = self.receipt.get("devices")
        return f"{found['count']} x {', '.join(found['kind'])}" if found else ""

    @property
    def ended(self) -> bool:
        return self.receipt.get("ended") is not None

    @property
    def alive(self) -> bool:
        """Return whether the receipt has no end and a file was written recently."""
        return not self.ended and self.silent_s is not None and self.silent_s < QUIET_S[bool(self.ledger)]

    def goodput(self) -> Goodput | None:
        """Return the causes of the wall time; None without a ledger."""
        return goodput.summarise(self.ledger) if self.ledger else None

    def figure(self, path: str) -> Any:
        """Return a figure of the newest attempt, such as "speed.mfu_causal"; None if it is not known."""
        found = self.goodput()
        value: Any = self.opened.figures | {"goodput": found.goodput if found else None}
        for name in path.split("."):
            value = value.get(name) if value else None
        return value

    def positions(self, steps: Sequence[int], times: Sequence[float] | None = None) -> list[Sequence[float]]:
        """Return the place of steps on each x axis: step, tokens, seconds since the start of the run.

        Args:
            times: seconds since 1970 of each step; None: those of the newest train line up to each step.
        """
        lines = [max(0, bisect_right(self.train.steps, step) - 1) for step in steps] if self.train.steps else []
        tokens = [self.train["tokens"][i] or 0 for i in lines] if lines else [0] * len(steps)
        times = times or ([self.train["time_unix"][i] for i in lines] if lines else [0.0] * len(steps))
        start = self.ledger[0]["time"] if self.ledger else self.train["time_unix"][0] if self.train.steps else times[0]
        return [list(steps), tokens, [max(0.0, t - start) for t in times]]


def read(folder: str | Path, name: str = "") -> Run:
    """Return the run in a folder.

    Raises:
        RunError: the folder is no run.
        ReceiptError: metrics.jsonl is damaged.
        MetricsError: a metrics file of another process is damaged.
        OSError: a file cannot be read.
    """
    at = Path(folder).expanduser()
    if not at.is_dir():
        raise RunError(f"RUN = {folder}: no such folder. Fix: name a run's folder, such as runs/tiny.")
    if not any((at / file).exists() for file in FILES):
        raise RunError(
            f"RUN = {folder}: not a run's folder, it has none of {', '.join(FILES)}. Fix: name one such as runs/tiny."
        )
    notes: list[str] = []
    name = name or at.resolve().name

    def load(file: str, parse: Callable[[Path], Any], empty: Any, missing: str) -> Any:
        path = at / file
        if not path.exists():
            notes.append(f"There is no {file}: {missing}.")
            return empty
        try:
            return parse(path)
        except ValueError as error:  # ReceiptError is one too
            notes.append(f"{file} is left out, because it cannot be read: {error}")
            return empty

    told = load(receipts.NAME, receipts.load, {}, "the page has no receipt")
    found = receipts.Run(name, at, told)
    train = columns(line for line in found.lines if line["kind"] == "train")
    sets = dict.fromkeys(line.get("set", "") for line in found.lines if line["kind"] == "eval")
    evals = {s: columns(x for x in found.lines if x["kind"] == "eval" and x.get("set", "") == s) for s in sets}
    gpu = [line for line in found.lines if line["kind"] == "gpu"]
    for path in sorted(at.glob("metrics.*.jsonl")):
        if re.fullmatch(r"metrics\.\d+\.jsonl", path.name):  # files set aside have other names
            gpu += [line for line in metrics.read(path) if line["kind"] == "gpu"]
    if not train.steps:
        notes.append("metrics.jsonl has no step yet.")
    texts = list(samples.read((at / "samples.txt").read_bytes().decode())) if (at / "samples.txt").exists() else []
    last = max((s.step for s in texts), default=None)
    times = [(at / file).stat().st_mtime for file in WRITTEN if (at / file).exists()]
    return Run(
        folder=at,
        name=name,
        train=train,
        evals=evals,
        gpu=sorted(gpu, key=lambda line: line["time_unix"]),
        opened=found,
        config=load("config.json", lambda path: json.loads(path.read_text()), {}, "the number of steps is not known"),
        ledger=load(goodput.FILE, goodput.read, [], "the page has no goodput"),
        alerts=alerts(at),
        samples=[s for s in texts if s.step == last],
        silent_s=max(0.0, time.time() - max(times)) if times else None,
        notes=notes,
    )


def read_all(folders: Sequence[str | Path]) -> list[Run]:
    """Return several runs with distinct names. Raises as `read` does, and RunError if a run is named twice."""
    paths = [Path(f).expanduser().resolve() for f in folders]
    twice = [str(f) for i, f in enumerate(folders) if paths[i] in paths[:i]]
    if twice:
        raise RunError(f"RUN = {twice[0]}: named twice. Fix: name each run once.")
    short = [path.name for path in paths]
    names = [s if short.count(s) == 1 else f"{path.parent.name}/{s}" for path, s in zip(paths, short, strict=True)]
    return [read(folder, name) for folder, name in zip(folders, names, strict=True)]


def alerts(folder: Path) -> list[str]:
    """Return the warnings and errors of a run's logs by time, each with the lines that follow it."""
    found: list[str] = []
    for path in sorted(folder.glob("log*.txt")):
        with open(path, encoding="utf-8", errors="replace") as file:
            inside = False
            for line in file:
                if ALERT.match(line):
                    found.append(line.rstrip("\n"))
                    inside = True
                elif re.match(r"^\d{4}-\d\d-\d\d ", line):
                    inside = False
                elif inside:
                    found[-1] += "\n" + line.rstrip("\n")
    return sorted(found, key=lambda text: text[:24])


def verdict(run: Run) -> tuple[str, str]:
    """Return (CSS class, text) of the state of a run."""
    at = f"step {run.last_step:,}" + (f" of {run.steps:,}" if run.steps else "")
    if run.ended:
        code, reason = run.receipt.get("exit_code"), run.receipt.get("reason")
        if code == 0:
            return "yes", f"done: {reason}"
        means = f" ({EXIT_CODES[code]})" if code in EXIT_CODES else ""
        return "no", f"ended at {at} with exit code {code}{means}: {reason}"
    if run.silent_s is None or not run.receipt:
        return "", f"{at}; how it ended is not known"
    if run.alive:
        return "", f"running: {at}, last write {duration(run.silent_s)} ago"
    return "no", f"killed or hanging at {at}: the receipt has no end, last write {duration(run.silent_s)} ago"
