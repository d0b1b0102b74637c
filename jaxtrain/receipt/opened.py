"""A receipt as the commands look at it: of a run's folder, with what stands beside it, or of a file alone."""

import dataclasses
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtrain import goodput, metrics
from jaxtrain.receipt import figures, stored
from jaxtrain.receipt.stored import NAME as NAME
from jaxtrain.receipt.stored import ReceiptError

VERDICT = "golden.json"  # of the last check against a golden run


@dataclasses.dataclass(frozen=True)
class Run:
    """A run by its receipt. `folder` holds its other files; None for a receipt that stands alone."""

    name: str
    path: Path
    folder: Path | None
    receipt: dict[str, Any]

    @cached_property
    def attempts(self) -> list[dict[str, Any]]:
        """Oldest first, the newest last, each whole."""
        return stored.attempts(self.receipt)

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl; none where there is no such file. Raises ReceiptError where it cannot be read."""
        path = self.folder / "metrics.jsonl" if self.folder else None
        try:
            return list(metrics.read(path)) if path and path.exists() else []
        except (OSError, metrics.MetricsError) as error:
            raise ReceiptError(str(error)) from error

    @cached_property
    def figures(self) -> dict[str, Any]:
        """speed, memory, throttled, loss_at: as the receipt has them; of a run that was killed, or runs, from metrics.jsonl."""
        if "speed" in self.receipt or not self.lines:
            names = ("speed", "memory", "throttled", "loss_at", "measured_over_planned")
            return {name: self.receipt.get(name) for name in names}
        return figures.of_run(self.lines, self.receipt)

    @property
    def told(self) -> dict[str, Any]:
        """The newest attempt, with its figures."""
        return self.receipt | self.figures

    @cached_property
    def losses(self) -> dict[int, Any]:
        """Training loss by step: every line's where there is a metrics.jsonl, else those that the receipt keeps."""
        if self.lines:
            return {line["step"]: line["loss"] for line in self.lines if line["kind"] == "train"}
        # figures.loss_at wrote what JSON has no number for as a word.
        return {int(step): float(loss) for step, loss in (self.figures["loss_at"] or {}).items()}

    @cached_property
    def goodput(self) -> dict[str, Any] | None:
        """As the receipt has it, or from the ledger of a run that was killed, or runs still; None where nothing tells."""
        if "goodput" in self.receipt or not self.folder:
            return self.receipt.get("goodput")
        try:
            ledger = goodput.read(self.folder / goodput.FILE)
        except ValueError as error:
            raise ReceiptError(str(error)) from error
        return goodput.summarise(ledger).record() if ledger else None

    @cached_property
    def resolved(self) -> dict[str, Any] | None:
        """The config: as the receipt has it, else config.json beside it; None where neither is there."""
        if "resolved" in self.receipt:
            return self.receipt["resolved"]
        path = self.folder / "config.json" if self.folder else None
        try:
            return json.loads(path.read_text()) if path and path.exists() else None
        except ValueError as error:
            raise ReceiptError(f"{path}: not a config ({error}). Move it away.") from error

    @cached_property
    def checked(self) -> dict[str, Any] | None:
        """What the last `check` against a golden run came to; None where there was none. A file that cannot be read is told as
        {"error": ...}: what it says explains nothing of the run."""
        path = self.folder / VERDICT if self.folder else None
        try:
            found = json.loads(path.read_text()) if path and path.exists() else None
        except (OSError, ValueError) as error:
            return {"error": f"{path} cannot be read: {error}"}
        return found if found and "checks" in found else None  # a golden receipt may have been given the same name

    @property
    def end(self) -> str:
        """How the newest attempt ended, in a word and a reason."""
        if self.receipt.get("exit_code") is None:
            return "no end: killed, or still running"
        return f"{self.receipt['exit_code']}: {self.receipt['reason']}"

    @property
    def notes(self) -> list[str]:
        """What a reader should know of this receipt."""
        out = []
        if self.receipt["format"] < stored.FORMAT:
            out.append(
                f"{self.name}: written by an earlier jaxtrain (format {self.receipt['format']}), which kept no digests of the "
                "source, no changes that were not committed, and nothing of the GPUs but their names"
            )
        if self.receipt.get("exit_code") is None:
            out.append(f"{self.name}: {self.end}; its figures are those of metrics.jsonl so far")
        if said := self.receipt.get("no_figures"):
            out.append(f"{self.name}: not all figures of its end are here, because of {said}")
        source = source_of(self.receipt)
        if source.get("error"):
            out.append(f"{self.name}: git could not tell the commit: {source['error']}")
        if source.get("patch_cut"):
            out.append(f"{self.name}: {source['patch_cut']:,} characters of its patch were not kept")
        return out


def source_of(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """`source` of an attempt; format 1 had the commit under `git`."""
    return attempt.get("source") or attempt.get("git") or {}


def open_run(target: str | Path) -> Run:
    """A run's folder, or a receipt file. Raises ReceiptError where it is neither."""
    path = Path(target).expanduser()
    file = path / NAME if path.is_dir() else path
    if not file.exists():
        what = f"{path}: there is no {NAME} in this folder" if path.is_dir() else f"{path}: there is no such file or folder"
        raise ReceiptError(f"{what}. Name a run's folder (--workdir of training), or a receipt file.")
    try:
        receipt = stored.load(file)
    except OSError as error:
        raise ReceiptError(f"{file}: cannot be read ({error})") from error
    in_folder = file.name == NAME
    return Run(file.resolve().parent.name if in_folder else file.name, file, file.parent if in_folder else None, receipt)


def runs_in(targets: list[str]) -> list[Path]:
    """The targets, and for a folder of runs (runs/) those in it, by name. Raises ReceiptError for one that holds none."""
    out: list[Path] = []
    for target in targets:
        path = Path(target).expanduser()
        inside = [] if not path.is_dir() or (path / NAME).exists() else sorted(p.parent for p in path.glob(f"*/{NAME}"))
        if path.is_dir() and not (path / NAME).exists() and not inside:
            raise ReceiptError(f"{path}: no {NAME} in this folder or in one below it. Name runs, or a folder of them.")
        out += inside or [path]
    return out
