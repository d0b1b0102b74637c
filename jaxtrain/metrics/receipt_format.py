"""Read receipt.json, and the results of the run that it describes."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtrain.metrics import files, goodput
from jaxtrain.metrics import receipt_figures as figures

NAME = "receipt.json"
FORMAT = 3
FIRST = ("command", "config", "overrides", "mesh", "attention", "data")  # most important fields, which are shown first
# Fields that are not shown: they are long, or have a separate table or file (config.json).
HIDDEN = ("attempts", "format", "resolved", "ranks", "devices.processes", "source.patch", "source.files", "changed")
FIX = "Fix: name a run's folder (--workdir of training), such as runs/tiny."


class ReceiptError(ValueError):
    """An error: a receipt, or a file next to it, cannot be read."""


def now() -> str:
    """Return the local time to the second, with its UTC offset, as ISO 8601 text."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def load(path: Path) -> dict[str, Any]:
    """Return the receipt in a file. Raises ReceiptError if the file is not a receipt, or has another FORMAT."""
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
        version, attempts = receipt["format"], receipt["attempts"]
        if version == FORMAT and not isinstance(attempts, list):
            raise TypeError("attempts is no list")
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "Fix: move it away, and the run writes a new one." if path.name == NAME else FIX
        raise ReceiptError(f"{path}: not a receipt ({error!r}). {fix}") from error
    if version != FORMAT:
        fix = "Fix: use the version that wrote it"
        fix += ", or move the file away: the run continues, and writes a new one." if path.name == NAME else "."
        raise ReceiptError(f"{path}: format {version!r}, this jaxtrain reads {FORMAT}. {fix}")
    return receipt


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of all values in nested JSON except nulls.

    A list becomes one text with its items and their counts, most frequent first: "7 x 700.0, 500.0". A list of objects becomes
    one such text for each key of the objects.
    """
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        keys = dict.fromkeys(key for item in value for key in item)
        value = {key: [item[key] for item in value if item.get(key) is not None] for key in keys}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            # The key of a held-out set without a name is "".
            yield from flatten(inner, ".".join(filter(None, (path, str(key)))))
    elif isinstance(value, list):
        counted = sorted(Counter(map(str, value)).items(), key=lambda pair: (-pair[1], pair[0]))
        if counted:
            yield path, ", ".join(f"{count} x {item}" if count > 1 else item for item, count in counted)
    elif value is not None:
        yield path, value


@dataclasses.dataclass(frozen=True)
class Run:
    """A run, read from its receipt.

    Attributes:
      folder: the run's folder; None if the receipt is a single file.
      receipt: the receipt; {} if the folder has no receipt.
    """

    name: str
    folder: Path | None
    receipt: dict[str, Any]

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Return all attempts, oldest first; [{}] without a receipt. Attempts before the newest may have only a summary."""
        return sorted([*self.receipt.get("attempts", ()), self.receipt], key=lambda one: one.get("attempt", 0))

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl; [] without that file. Raises ReceiptError if it cannot be read."""
        path = self.folder / "metrics.jsonl" if self.folder else None
        try:
            return list(files.read(path)) if path and path.exists() else []
        except (OSError, files.MetricsError) as error:
            raise ReceiptError(str(error)) from error

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Return the figures of the newest attempt from the receipt; if the run has not ended, from metrics.jsonl."""
        if "speed" in self.receipt or not self.lines:
            return {name: self.receipt.get(name) for name in figures.NAMES}
        return figures.of_run(self.lines, self.receipt)

    @cached_property
    def losses(self) -> dict[int, float]:
        """Return step -> training loss, from metrics.jsonl; without that file, from the receipt, which has only a few steps."""
        if self.lines:
            return {line["step"]: line["loss"] for line in self.lines if line["kind"] == "train"}
        return {int(step): float(loss) for step, loss in (self.figures["loss_at"] or {}).items()}

    @cached_property
    def goodput(self) -> dict[str, Any] | None:
        """Return the goodput from the receipt; if the run has not ended, from its ledger; None if neither has it."""
        if "goodput" in self.receipt or not self.folder:
            return self.receipt.get("goodput")
        try:
            ledger = goodput.read(self.folder / goodput.FILE)
        except ValueError as error:
            raise ReceiptError(str(error)) from error
        return goodput.summarise(ledger).record() if ledger else None

    @property
    def end(self) -> str:
        """Return exit code and reason of the newest attempt that trained, as text."""
        code = self.receipt.get("exit_code")
        return "killed, or still running" if code is None else f"{code}: {self.receipt['reason']}"


def open_run(target: str | Path) -> Run:
    """Return the run of a folder or of a receipt file. Raises ReceiptError if `target` is neither."""
    path = Path(target).expanduser()
    file = path / NAME if path.is_dir() else path
    if not file.exists():
        raise ReceiptError(f"{path}: {f'no {NAME} in this folder' if path.is_dir() else 'no such file or folder'}. {FIX}")
    receipt = load(file)
    return Run(file.resolve().parent.name, file.parent, receipt) if file.name == NAME else Run(file.name, None, receipt)


def find_runs(targets: list[str]) -> list[Path]:
    """Return a path for each run: the targets that are run folders or receipts, and the runs in all other targets, by name.

    Raises:
      ReceiptError: a target does not exist, or is a folder without runs.
    """
    out: list[Path] = []
    for path in (Path(target).expanduser() for target in targets):
        if not path.exists():
            raise ReceiptError(f"{path}: no such file or folder. {FIX}")
        folder = path.is_dir() and not (path / NAME).exists()
        inside = sorted(p.parent for p in path.glob(f"*/{NAME}")) if folder else [path]
        if not inside:
            raise ReceiptError(f"{path}: no {NAME} in this folder or in one below it. Fix: name runs, or a folder of runs.")
        out += inside
    return out


def rows(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, value as text) of the fields that `show` prints: those of FIRST first, without HIDDEN fields."""
    receipt = run.receipt | {k: v for k, v in run.figures.items() if v is not None} | {"goodput": run.goodput}
    source = receipt.get("source") or {}
    shown = {name: receipt[name] for name in (*FIRST, *receipt) if name in receipt}
    for path, value in flatten(shown):
        if not any(path == name or path.startswith(f"{name}.") for name in HIDDEN):
            if isinstance(value, float) and not path.startswith("loss_at"):
                value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
            yield path, str(value)
    if source.get("patch"):
        yield "source.patch", f"{len(source['patch'])} characters in receipt.json"
