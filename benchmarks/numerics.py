"""Losses of the same run in several precisions, or with moments in several dtypes.

    python -m benchmarks.numerics --of=precision --config=configs/tiny.py --config.train.steps=300 --seeds=2
    python -m benchmarks.numerics --of=moments --config=configs/tiny.py --config.train.steps=300 --seeds=2

Each row trains on one device, once for each of `--seeds` initial weights. The table has the training loss over the last 20
steps and the held-out loss after the last step, as means over the seeds. Beside each loss are its relative difference from the
first row, and the largest such difference of a seed. The column *at any time* is the largest difference of a mean of 20 steps
anywhere in the run. The last two rows repeat the first row with optimizer.eps 1% and 2% larger, to show differences by chance.
On a CPU, FP8 matmuls are emulated: rounded as on a GPU, summed in float32. Both commands take minutes on a CPU;
docs/evidence/fp8_training.md and docs/evidence/moments.md have their tables.
"""

import dataclasses
import sys
from collections.abc import Iterator

import jax
import numpy as np

from jaxtrain.commands.command import run_command
from jaxtrain.config.command_line import Args, Parser, at_least
from jaxtrain.config.schema import Fp8, RunConfig
from jaxtrain.data.batches import resolve_max_segments
from jaxtrain.step.batch import place_batch
from jaxtrain.step.program import build_program
from jaxtrain.step.state import create_state
from jaxtrain.train import evaluate
from jaxtrain.train.initial_state import open_data

WINDOW = 20  # steps over which the training loss is averaged
EPS = (1.01, 1.02)  # factors of optimizer.eps, whose effect is chance


def in_precision(run: RunConfig, precision: str, exclude: str = "") -> RunConfig:
    """Return the run in another precision. Gradients are reduced in float32 for f32, else in bfloat16. exclude: fp8.exclude."""
    dtypes = dataclasses.replace(run.dtypes, reduce="f32" if precision == "f32" else "bf16")
    return dataclasses.replace(run, precision=precision, fp8=Fp8(exclude), dtypes=dtypes)


def with_moments(run: RunConfig, m: str, v: str) -> RunConfig:
    """Return the run with its moments stored in these dtypes."""
    return dataclasses.replace(run, dtypes=dataclasses.replace(run.dtypes, m=m, v=v))


def with_eps(run: RunConfig, times: float) -> RunConfig:
    """Return the run with optimizer.eps multiplied by `times`."""
    return dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, eps=times * run.optimizer.eps))


def variants(run: RunConfig, of: str) -> dict[str, RunConfig]:
    """Return name of a row -> its run. All rows are compared with the first row. of: "precision" or "moments"."""
    if of == "precision":
        first = {"bf16": in_precision(run, "bf16")}
        others = {
            "fp8": in_precision(run, "fp8"),
            "fp8, wo and down in bf16": in_precision(run, "fp8", "wo,down"),
            "f32": in_precision(run, "f32"),
        }
    else:
        first = {"m f32, v f32": with_moments(run, "f32", "f32")}
        stored = (("int8", "int8"), ("bf16", "bf16"), ("int8", "f32"), ("f32", "int8"))
        others = {f"m {m}, v {v}": with_moments(run, m, v) for m, v in stored}
    ((name, base),) = first.items()
    return first | others | {f"{name}, eps {times:g} x": with_eps(base, times) for times in EPS}


def losses(run: RunConfig) -> tuple[np.ndarray, float]:
    """Train a run on the first device. Return (training loss of each step, held-out loss after the last step)."""
    train, sets = open_data(run)
    (held_out,) = sets.values()
    run = resolve_max_segments(run, train, held_out)
    program = build_program(run, jax.devices()[:1])
    state = create_state(program.definition, program.tx, program.state, run.train.seed, program.trained)
    seen = []
    for i in range(run.train.steps):
        state, values = program.train_step(state, place_batch(train.batch(i), program.batch, program.context))
        seen.append(values["loss"])
    how = (program.eval_batch, program.context, run.eval.sequences)
    loss = evaluate.evaluate(program.eval_step, state.params, held_out, *how)["loss"]
    return np.array([float(x) for x in seen]), loss


def rows(run: RunConfig, of: str, seeds: int) -> Iterator[str]:
    """Train the variants with every seed, and yield the lines of the Markdown table."""
    base: list[tuple[np.ndarray, float]] = []
    window = np.ones(WINDOW) / WINDOW
    for name, one in variants(run, of).items():
        if not base:
            against = f"against {name} | furthest seed"
            yield f"| {of} | training loss | {against} | at any time | held-out loss | {against} |"
            yield "|---|---:|---:|---:|---:|---:|---:|---:|"
        trains = [dataclasses.replace(one.train, seed=seed) for seed in range(seeds)]
        measured = [losses(dataclasses.replace(one, train=train)) for train in trains]
        base = base or measured
        train = np.array([np.convolve(loss, window, "valid") for loss, _ in measured])
        held_out = np.array([loss for _, loss in measured])
        first = np.array([np.convolve(loss, window, "valid") for loss, _ in base])
        first_held_out = np.array([loss for _, loss in base])
        off, off_held_out = train / first - 1, held_out / first_held_out - 1
        worst, ever, worst_held_out = (max(x.ravel(), key=abs) for x in (off[:, -1], off, off_held_out))
        mean, mean_held_out = train[:, -1].mean(), held_out.mean()
        in_training = f"{mean:.4f} | {mean / first[:, -1].mean() - 1:+.2%} | {worst:+.2%} | {ever:+.2%}"
        yield (
            f"| {name} | {in_training} | {mean_held_out:.4f} | {mean_held_out / first_held_out.mean() - 1:+.2%} | "
            f"{worst_held_out:+.2%} |"
        )


def parser() -> Parser:
    """Return the parser of the command line."""
    p = Parser("benchmarks.numerics", "Print how far the losses of other dtypes are from those of the first row.", config=True)
    p.option("of", "the table", "TABLE", "precision", choices=("precision", "moments"))
    p.option("seeds", "runs of each row", "N", 1, type=at_least(1))
    return p


def show(args: Args) -> int:
    """Print the table."""
    for line in rows(args.loaded.run, args.of, args.seeds):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(parser(), sys.argv[1:], show))
