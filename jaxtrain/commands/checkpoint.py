"""`python -m jaxtrain checkpoint list|verify DIR`: list the checkpoints of a run, or verify their files. Uses no device."""

import datetime
import os
from collections.abc import Sequence

from jaxtrain.checkpoint import HELD_OUT, CheckpointError, Checkpoints, files, folder_in
from jaxtrain.commands.command import run_command
from jaxtrain.config.command_line import Args, Parser, whole
from jaxtrain.metrics.progress import progress_bar

DAMAGED = 1


def parser() -> Parser:
    """Return the parser of the command line."""
    p = Parser(
        "checkpoint",
        "List the checkpoints of a run, or verify their files. DIR is on a disk, at gs:// or at s3://.",
        examples=("list runs/tiny", "verify runs/tiny --step=100"),
        notes="Exit codes: 0 all is well; 1 something is damaged; 2 the command is wrong, or there is no checkpoint.",
    )
    verify = "read every file of every step, and compare it with the digests from when it was written"
    for name, text in (("list", "the steps, with time, size, loss and state"), ("verify", verify)):
        p.command(name, text).argument("folder", "a run's folder, or its checkpoints folder", "DIR")
    p.commands["verify"].option("step", "only this step", "N", type=whole(0))
    return p


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    return run_command(
        parser(), argv, lambda args: (_list if args.command == "list" else _verify)(args), errors=(CheckpointError,)
    )


def _opened(path: str) -> tuple[Checkpoints, dict[int, str]]:
    found = Checkpoints(folder_in(path))
    states = found.states()
    if not states:
        raise CheckpointError(f"{found.directory}: no checkpoints there. Name a run's folder or its checkpoints folder.")
    return found, states


def _list(args: Args) -> int:
    from rich.console import Console
    from rich.table import Table

    found, states = _opened(args.folder)
    table = Table(title=os.fspath(found.directory), title_justify="left")
    for name in ("step", "saved", "GiB", "loss", "held-out"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for step, state in sorted(states.items()):
        saved = size = loss = held_out = "-"
        if state == "complete":
            try:
                meta = found.meta(step)
            except CheckpointError as e:
                state = f"damaged: {e}"
            else:
                saved = datetime.datetime.fromtimestamp(meta["time_unix"]).strftime("%Y-%m-%d %H:%M:%S")
                size = f"{meta['bytes'] / 2**30:.3f}"
                loss, held_out = (f"{x:.4f}" if isinstance(x := meta.get(k), float) else "-" for k in ("loss", HELD_OUT))
        table.add_row(str(step), saved, size, loss, held_out, state)
    Console().print(table)
    return 0


def _verify(args: Args) -> int:
    found, states = _opened(args.folder)
    if "step" in args.given and args.step not in states:
        raise CheckpointError(f"step {args.step} in {found.directory}: no such checkpoint. There are: {found.listing()}.")
    steps = [step for step in sorted(states) if step == args.step or "step" not in args.given]
    sizes = [found.storage.files(found.directory / str(step)) for step in steps]
    total = sum(size for of_step in sizes for name, size in of_step.items() if name != files.NAME)
    damaged = False
    with progress_bar(total) as progress:
        for step in steps:
            if states[step] == "unfinished":
                print(f"step {step}: unfinished: its save was cut off, and it is never restored")
                continue
            verdict = found.verify(step, lambda n, step=step: progress(f"step {step}", n))
            problems, note = verdict.problems, f"good ({verdict.bytes / 2**30:.3f} GiB read)"
            if not verdict.proved:
                what = "without integrity.json, so its files cannot be checked; a restore checks its arrays"
                problems, note = (*problems, what) if problems else (), f"complete, but {what}"
            damaged |= bool(problems)
            print(f"step {step}: {'DAMAGED' if problems else note}", *(f"  {problem}" for problem in problems), sep="\n")
    return DAMAGED if damaged else 0
