"""A run as its folder tells it: read whole, changed in nothing, while it trains or long after. No jax here."""

import dataclasses
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain import goodput, metrics, samples
from jaxtrain.progress import duration
from jaxtrain.receipt import format as receipts
from jaxtrain.report.columns import Columns, columns

FILES = ("receipt.json", "metrics.jsonl", "config.json")  # any of them makes a folder a run
ALIVE = ("metrics.jsonl", "log.txt", goodput.FILE, "receipt.json")  # written to while a run goes on
# Without a word for longer, a run that wrote no end is taken for dead. Its ledger is touched every second; the other files may
# stand still for minutes, while a large model compiles.
QUIET_S = {True: 60.0, False: 900.0}
ALERT = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S* (?:WARNING|ERROR|CRITICAL) ")
MEANING = {
    1: "an error",
    2: "refused: the config or the command is wrong",
    3: "preflight found a fault",
    75: "asked to leave, or a peer died: start it again",
    76: "diverged beyond its budget",
    124: "the watchdog ended a hang",
    130: "Ctrl-C, state saved",
}


class RunError(ValueError):
    """A folder that cannot be reported on."""


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a page shows of one run."""

    folder: Path
    name: str
    train: Columns
    evals: dict[str, Columns]  # by held-out set, "" where there is one without a name
    gpu: list[dict[str, Any]]  # lines of kind "gpu", of all processes, in order of time
    opened: receipts.Run  # as the commands of receipts read it
    config: dict[str, Any]  # as resolved; empty where there is none
    ledger: list[dict[str, Any]]  # of goodput
    alerts: list[str]  # warnings and errors of the log, oldest first
    samples: list[samples.Sample]  # of the last step that has any
    silent_s: float | None  # since the last sign of life
    notes: list[str]  # what is missing or could not be read, in sentences

    @property
    def receipt(self) -> dict[str, Any]:
        """Empty where there is none."""
        return self.opened.receipt

    @property
    def steps(self) -> int | None:
        """That the config asks for."""
        return self.config.get("train", {}).get("steps")

    @property
    def devices(self) -> int | None:
        return self.receipt.get("devices", {}).get("count")

    @property
    def tokens_per_step(self) -> int | None:
        """Of its global batch; None for a run without a config. Not from its lines: they count skipped data too."""
        batch, length = (self.config.get(part, {}).get(key) for part, key in (("train", "global_batch"), ("data", "seq_len")))
        return batch * length if batch and length else None

    @property
    def ended(self) -> bool:
        return self.receipt.get("ended") is not None

    @property
    def alive(self) -> bool:
        """As far as its files tell: no end is written, and the last word is not long ago."""
        return not self.ended and self.silent_s is not None and self.silent_s < QUIET_S[bool(self.ledger)]

    def goodput(self) -> goodput.Goodput | None:
        """Where the wall time went; None where the run kept no ledger."""
        return goodput.summarise(self.ledger) if self.ledger else None


def check(folder: str | Path) -> Path:
    """The folder, if it is one of a run. Raises RunError where it is not."""
    at = Path(folder).expanduser()
    if not at.is_dir():
        raise RunError(f"{folder}: no such folder. Name a run's folder, such as runs/NAME.")
    if not any((at / file).exists() for file in FILES):
        raise RunError(f"{folder}: not a run's folder: none of {', '.join(FILES)} is there. Name one such as runs/NAME.")
    return at


def read(folder: str | Path, name: str = "") -> Run:
    """A run's folder. Raises RunError where it is none, ReceiptError for a damaged metrics.jsonl, MetricsError for one of
    another process, OSError as files do."""
    at = check(folder)
    notes: list[str] = []
    name = name or at.resolve().name
    whole = receipts.Run(name, at, _receipt(at / receipts.NAME, notes))
    lines = whole.lines
    train = columns(line for line in lines if line["kind"] == "train")
    sets = dict.fromkeys(line.get("set", "") for line in lines if line["kind"] == "eval")
    evals = {s: columns(x for x in lines if x["kind"] == "eval" and x.get("set", "") == s) for s in sets}
    gpu = [line for line in lines if line["kind"] == "gpu"]
    for path in sorted(at.glob("metrics.*.jsonl")):
        if re.fullmatch(r"metrics\.\d+\.jsonl", path.name):  # those set aside have other names
            gpu += [line for line in metrics.read(path) if line["kind"] == "gpu"]
    gpu.sort(key=lambda line: line["time_unix"])
    if not train.steps:
        notes.append("No step has been written to metrics.jsonl yet: there are no curves.")
    ledger = _ledger(at / goodput.FILE, notes)
    config = _json(at / "config.json", notes)
    written = list(samples.read((at / "samples.txt").read_bytes().decode())) if (at / "samples.txt").exists() else []
    last = max((s.step for s in written), default=None)
    return Run(
        folder=at,
        name=name,
        train=train,
        evals=evals,
        gpu=gpu,
        opened=whole,
        config=config,
        ledger=ledger,
        alerts=alerts(at),
        samples=[s for s in written if s.step == last],
        silent_s=silence(at),
        notes=notes,
    )


def read_all(folders: Sequence[str | Path]) -> list[Run]:
    """Several runs, with names that tell them apart. Raises as `read`, and RunError where one is named twice."""
    paths = [Path(f).expanduser().resolve() for f in folders]
    twice = [str(f) for i, f in enumerate(folders) if paths[i] in paths[:i]]
    if twice:
        raise RunError(f"{twice[0]}: named twice. Name each run once.")
    short = [path.name for path in paths]
    names = [s if short.count(s) == 1 else f"{path.parent.name}/{s}" for path, s in zip(paths, short, strict=True)]
    return [read(folder, name) for folder, name in zip(folders, names, strict=True)]


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        notes.append(f"There is no {path.name}.")
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        notes.append(f"{path.name} cannot be read ({error}) and is left out.")
        return {}


def _ledger(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        found = goodput.read(path)
    except ValueError as error:
        notes.append(f"Where the wall time went is left out: {error}.")
        return []
    if not found:
        notes.append(f"There is no {path.name}: where the wall time went is not known.")
    return found


def _receipt(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        notes.append("There is no receipt.json: what ran, and how it ended, is not known.")
        return {}
    try:
        return receipts.load(path)
    except receipts.ReceiptError as error:
        notes.append(f"The receipt is left out: {error}")
        return {}


def alerts(folder: Path) -> list[str]:
    """The warnings and errors of a run's logs, each with its time, in order of time; the lines behind one belong to it."""
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


def silence(folder: Path, now: float | None = None) -> float | None:
    """Seconds since a run wrote anything; None where it has written nothing."""
    times = [(folder / name).stat().st_mtime for name in ALIVE if (folder / name).exists()]
    return max(0.0, (time.time() if now is None else now) - max(times)) if times else None


def last_words(run: Run, slow: bool = False) -> Run:
    """The run as its folder has it now, but for its lines of metrics: how it stands; with `slow` also its ledger and log."""
    notes: list[str] = []
    fresh = receipts.Run(run.name, run.folder, _receipt(run.folder / receipts.NAME, notes))
    new: dict[str, Any] = {"opened": fresh, "silent_s": silence(run.folder)}
    if slow:
        new |= {"ledger": _ledger(run.folder / goodput.FILE, notes), "alerts": alerts(run.folder)}
    return dataclasses.replace(run, **new)


def verdict(run: Run, done: int | None = None) -> tuple[str, str]:
    """(CSS class, words): how the run stands. done: its newest step, where that is known better than when it was read."""
    if done is None:
        done = run.train.steps[-1] if run.train.steps else 0
    at = f"step {done:,}" + (f" of {run.steps:,}" if run.steps else "")
    r = run.receipt
    if run.ended:
        code, reason = r.get("exit_code"), r.get("reason")
        if code == 0:
            return "yes", f"done: {reason}"
        means = f" ({MEANING[code]})" if code in MEANING else ""
        return "no", f"ended at {at} with exit code {code}{means}: {reason}"
    if run.silent_s is None or not r:
        return "", f"{at}; how it ended is not known"
    if run.alive:
        return "", f"running: {at}, last sign of life {duration(run.silent_s)} ago"
    return "no", f"died at {at}: no end was written, and nothing since {duration(run.silent_s)}. Killed, or it hangs"
