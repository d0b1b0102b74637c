"""`python -m jaxtrain.checkpoint list|verify DIR`: what a run saved, and whether it is intact. Touches no device."""

import argparse
import datetime
import os
import sys

from jaxtrain.checkpoint import CheckpointError, Checkpoints, files, folder_in, place
from jaxtrain.commands import spelled

DAMAGED = 1


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0 all is well, 1 something is damaged, 2 there is nothing to look at."""
    name = spelled("python -m jaxtrain.checkpoint")
    parser = argparse.ArgumentParser(prog=name, description="List or verify the checkpoints of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    about = {
        "list": "every step: when, how large, its loss, and whether it is complete",
        "verify": "read every file of every step, and compare it with the digests from when it was written",
    }
    for name, text in about.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("dir", help="a run's folder or its checkpoints folder")
        if name == "verify":
            command.add_argument("--step", type=int, help="only this one")
    args = parser.parse_args(argv)
    try:
        return _list(args.dir) if args.command == "list" else _verify(args.dir, args.step)
    except CheckpointError as e:
        print(e, file=sys.stderr)
        return 2


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
    raise SystemExit(main())
