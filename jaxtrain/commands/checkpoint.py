"""`python -m jaxtrain checkpoint`: list the checkpoints of a run, verify their files, or average their weights."""

import datetime
import functools
import math
import os
from collections.abc import Sequence

from jaxtrain.checkpoint import HELD_OUT, CheckpointError, Checkpoints, files, folder_in
from jaxtrain.commands.command import run_command
from jaxtrain.config import hardware
from jaxtrain.config.command_line import Args, Invalid, Parser, at_least, path_text
from jaxtrain.metrics.progress import progress_bar

DAMAGED = 1
MOST_WEIGHT = 1e9


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser(
        "checkpoint",
        "List the checkpoints of a run, verify their files, or average weights. Checkpoints are on a disk, at gs:// or at s3://.",
        examples=("list runs/tiny", "verify runs/tiny --step=100", "average runs/a runs/b --out=runs/averaged --weights=1,3"),
        notes="Exit codes: 0 all is well; 1 verify found damage, or the disk failed; 2 the command is wrong, there is no "
        "checkpoint, or the checkpoints cannot be averaged: nothing was written.",
    )
    verify = "read every file of every step, and compare it with the digests from when it was written"
    for name, text in (("list", "the steps, with time, size, loss and state"), ("verify", verify)):
        cli.command(name, text).argument("folder", "a run's folder, or its checkpoints folder", "DIR")
    cli.commands["verify"].option("step", "only this step", "N", type=at_least(0))
    average = cli.command("average", "the average of weights, to a checkpoint that training, sampling and hf export start from")
    average.argument("checkpoints", "two or more runs, or checkpoints of runs, of one model", "CKPT", several=True)
    average.option("out", "the folder to write, as a run's folder", "DIR", type=path_text, required=True)
    text = "a number for each, in their order: their ratios count, and one may be negative. Default: all are equal"
    average.option("weights", text, "W,W", (), type=parse_numbers, example="1,3")
    average.option("ema", "average the averages of the weights (train.ema_decay), not the weights of the last steps")
    return cli


def parse_numbers(text: str) -> tuple[float, ...]:
    """Return the numbers of a text such as 1,2.5,-1."""
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        values = (math.nan,)
    if not all(abs(number) <= MOST_WEIGHT for number in values):  # NaN is not
        raise Invalid(f"must be numbers of at most {MOST_WEIGHT:g} with commas between them")
    return values


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    acts = {"list": _list, "verify": _verify, "average": _average}
    # The errors of a model, a layout and a config are ValueErrors.
    return run_command(parser(), argv, lambda args: acts[args.command](args), errors=(CheckpointError, ValueError))


def _open_checkpoints(path: str) -> tuple[Checkpoints, dict[int, str]]:
    checkpoints = Checkpoints(folder_in(path))
    states = checkpoints.states()
    if not states:
        raise CheckpointError(f"{checkpoints.directory}: no checkpoints there. Name a run's folder or its checkpoints folder.")
    return checkpoints, states


def _list(args: Args) -> int:
    from rich.console import Console
    from rich.table import Table

    checkpoints, states = _open_checkpoints(args.folder)
    table = Table(title=os.fspath(checkpoints.directory), title_justify="left")
    for name in ("step", "saved", "GiB", "loss", "held-out"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for step, state in sorted(states.items()):
        saved = size = loss = held_out = "-"
        if state == "complete":
            try:
                meta = checkpoints.meta(step)
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
    checkpoints, states = _open_checkpoints(args.folder)
    if "step" in args.explicit and args.step not in states:
        raise CheckpointError(
            f"step {args.step} in {checkpoints.directory}: no such checkpoint. There are: {checkpoints.listing()}."
        )
    steps = [step for step in sorted(states) if step == args.step or "step" not in args.explicit]
    sizes = [checkpoints.storage.files(checkpoints.directory / str(step)) for step in steps]
    total = sum(size for step_sizes in sizes for name, size in step_sizes.items() if name != files.NAME)
    damaged = False
    with progress_bar(total) as progress:
        for step in steps:
            if states[step] == "unfinished":
                print(f"step {step}: unfinished: its save was cut off, and it is never restored")
                continue
            verdict = checkpoints.verify(step, lambda n, step=step: progress(f"step {step}", n))
            problems, note = verdict.problems, f"good ({verdict.bytes / 2**30:.3f} GiB read)"
            if not verdict.proved:
                reason = "without integrity.json, so its files cannot be checked; a restore checks its arrays"
                problems, note = (*problems, reason) if problems else (), f"complete, but {reason}"
            damaged |= bool(problems)
            print(f"step {step}: {'DAMAGED' if problems else note}", *(f"  {problem}" for problem in problems), sep="\n")
    return DAMAGED if damaged else 0


def _average(args: Args) -> int:
    from jaxtrain.runtime.startup import start_jax

    start_jax(hardware.probe())
    from jaxtrain.train.average import average

    average(args.checkpoints, args.out, weights=args.weights, ema=args.ema, say=functools.partial(print, flush=True))
    return 0
