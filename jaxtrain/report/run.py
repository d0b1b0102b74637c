"""Read runs, without importing jax. A run writes its report."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.metrics import goodput
from jaxtrain.metrics import receipt as receipts
from jaxtrain.metrics.files import write_atomic
from jaxtrain.report import run_files, run_page
from jaxtrain.report.run_files import FILES, PAGE, RunError


class Run(run_files.Run):
    """A run as the Python API returns it: its files, its report, and the profile of its newest trace."""

    def profile(self) -> Any:
        """Return the jaxtrain.report.profile.Profile of the run's newest trace. Raises TraceError if there is no trace."""
        from jaxtrain.report import profile, profile_trace

        return profile.profile(profile_trace.find(self.folder)[-1], self)

    def write_report(self, html: str | Path = "") -> Path:
        """Write the HTML report, by default report.html in the run's folder. Return the path of the page."""
        target = Path(html).expanduser() if html else self.folder / PAGE
        write_atomic(target, run_page.html([self], target))
        return target


def read(folder: str | Path, name: str = "") -> Run:
    """Return the run in a folder.

    Raises:
        RunError: the folder is not a run's folder.
        ReceiptError: metrics.jsonl is damaged.
    """
    at = Path(folder).expanduser()
    if not at.is_dir():
        raise RunError(f"RUN = {folder}: no such folder. Fix: name a run's folder, such as runs/tiny.")
    if not any((at / file).exists() for file in FILES):
        raise RunError(
            f"RUN = {folder}: not a run's folder, it has none of {', '.join(FILES)}. Fix: name one such as runs/tiny."
        )
    notes: list[str] = []

    def load(file: str, parse: Callable[[Path], Any], empty: Any, missing: str) -> Any:
        try:
            if (at / file).exists():
                return parse(at / file)
            notes.append(f"There is no {file}: {missing}.")
        except ValueError as error:  # ReceiptError is a ValueError too
            notes.append(f"{file} is left out, because it cannot be read: {error}")
        return empty

    run = Run(
        name or at.resolve().name,
        at,
        load(receipts.NAME, receipts.load, {}, "the page has no receipt"),
        load("config.json", lambda path: json.loads(path.read_text(encoding="utf-8")), {}, "the number of steps is not known"),
        load(goodput.FILE, goodput.read, [], "the page has no goodput"),
        notes,
    )
    if not run.train.steps:
        notes.append("metrics.jsonl has no step yet.")
    return run


def read_all(folders: Sequence[str | Path]) -> list[Run]:
    """Return several runs with distinct names. Raises the errors of `read`, and RunError if a folder is given twice."""
    paths = [Path(f).expanduser().resolve() for f in folders]
    twice = [str(f) for i, f in enumerate(folders) if paths[i] in paths[:i]]
    if twice:
        raise RunError(f"RUN = {twice[0]}: named twice. Fix: name each run once.")
    short = [path.name for path in paths]
    names = [s if short.count(s) == 1 else f"{path.parent.name}/{s}" for path, s in zip(paths, short, strict=True)]
    return [read(folder, name) for folder, name in zip(folders, names, strict=True)]
