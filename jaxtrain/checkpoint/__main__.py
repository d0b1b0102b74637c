"""`python -m jaxtrain.checkpoint list|verify DIR`: the checkpoints of a run, and whether they are intact. Uses no device."""

import datetime
import os
import sys
from collections.abc import Sequence

from jaxtrain.checkpoint import CheckpointError, Checkpoints, files, folder_in, place
from jaxtrain.command_line import Command, Option, Parsed, run_command
from jaxtrain.config import Problem

DAMAGED = 1
ACTIONS = ("list", "verify")
COMMAND = Command(
    "checkpoint",
    "List the checkpoints of a run, with time, size and loss; or verify them: read every file of every step, and compare it "
    "with the digests from when it was written. DIR is a run's folder or its checkpoints folder.",
    (Option("step", "verify: only this step", "N", least=0),),
    arguments=("list|verify DIR", "an action and a folder, such as verify runs/tiny"),
    examples=("list runs/tiny", "verify runs/tiny --step=100"),
    notes="Exit codes: 0 all is well; 1 something is damaged; 2 the command is wrong, or there is no checkpoint.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_command(COMMAND, argv, _act, check=_check, errors=(CheckpointError,))


def _check(parsed: Parsed) -> list[Problem]:
    action, *folders = parsed.arguments or ("",)
    if not action:
        return []
    if action not in ACTIONS:
        return [Problem("action", action, f"must be one of {', '.join(ACTIONS)}", "For example verify runs/tiny.")]
    if not folders:
        return [Problem(action, None, "names no folder", f"For example {action} runs/tiny.")]
    if parsed.options["step"] and action != "verify":
        return [Problem("--step", None, f"{action} does not use it", "Leave it out.")]
    return []


def _act(parsed: Parsed) -> int:
    action, folder = parsed.arguments
    step = parsed.options["step"]
    return _list(folder) if action == "list" else _verify(folder, int(step) if step else None)


def _opened(path: str) -> tuple[Checkpoints, dict[int, str]]:
    found = Checkpoints(folder_in(path))
    states = found.states()
    if not states:
        raise CheckpointError(f"{found.directory}: no checkpoints there. Name a run's folder or its checkpoints folder.")
    return found, states


def _list(path: str) -> int:
    from rich.console import Console
    from rich.table import Table

    found, states = _opened(path)
    table = Table(title=os.fspath(found.directory), title_justify="left")
    for name in ("step", "saved", "GiB", "loss"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for step, state in sorted(states.items()):
        saved = size = loss = "-"
        if state == "complete":
            try:
                meta = found.meta(step)
            except CheckpointError as e:
                state = f"damaged: {e}"
            else:
                saved = datetime.datetime.fromtimestamp(meta["time_unix"]).strftime("%Y-%m-%d %H:%M:%S")
                size = f"{meta['bytes'] / 2**30:.3f}"
                loss = f"{meta['loss']:.4f}" if isinstance(meta.get("loss"), float) else "-"
        table.add_row(str(step), saved, size, loss, state)
    Console().print(table)
    return 0


def _verify(path: str, only: int | None) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    found, states = _opened(path)
    if only is not None and only not in states:
        raise CheckpointError(f"step {only} in {found.directory}: no such checkpoint. There are: {found.listing()}.")
    steps = [step for step in sorted(states) if only in (None, step)]
    folders = {step: found.directory / str(step) for step in steps}
    total = sum(
        size for step in steps for name, size in place.at(folders[step]).files(folders[step]).items() if name != files.NAME
    )
    out, damaged = Console(soft_wrap=True), 0
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("", total=total)
        for step in steps:
            problems, note = _problems(found, step, states[step], lambda n: bar.advance(task, n))
            damaged += bool(problems)
            bar.console.print(f"step {step}: {'DAMAGED' if problems else note}", highlight=False)
            for problem in problems:
                bar.console.print(f"  {problem}", highlight=False, markup=False)
    return DAMAGED if damaged else 0


def _problems(found: Checkpoints, step: int, state: str, told) -> tuple[list[str], str]:  # noqa: ANN001
    """What is wrong with a step, and what to call it where nothing is."""
    if state == "unfinished":
        return [], "unfinished: its save was cut off, and it is never restored"
    problems = []
    try:
        found.meta(step)
    except CheckpointError as error:
        problems.append(str(error))
    verdict = files.check(found.directory / str(step), told)
    problems += verdict.problems
    if not verdict.proved:
        what = "no integrity.json, so its files prove nothing; a restore checks its arrays"
        return ([*problems, what] if problems else []), f"complete, but {what}"
    return problems, f"good ({verdict.bytes / 2**30:.3f} GiB read)"


if __name__ == "__main__":
    sys.exit(main())
