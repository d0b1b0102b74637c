"""Load a config: command line and file, the steps of its epochs, and a schedule that fits its length. Imports no jax."""

import dataclasses
import fractions
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from jaxtrain.config import launch
from jaxtrain.config.command_line import strays
from jaxtrain.config.declaration import SMALLEST
from jaxtrain.config.launch import LoadedConfig
from jaxtrain.config.ramp import parse_ramp
from jaxtrain.config.schema import (
    ConfigError,
    Optimizer,
    Problem,
    RunConfig,
    all_keys,
)

BY_EPOCHS = "train.epochs"  # the origin of train.steps that follow from it
AUTHORS = ("default", "file", BY_EPOCHS, "command line")  # origins of a value, in ascending rank


def load_config(argv: Sequence[str]) -> LoadedConfig:
    """Return the config of `--config=FILE[:variant] [--config.KEY=VALUE ...]`. Other words are problems; nothing is raised."""
    line = launch.split_command_line(argv)
    loaded = load_line(line)
    return dataclasses.replace(loaded, problems=[*loaded.problems, *strays(line.words, [], config=True)])


def load_line(line: launch.Line) -> LoadedConfig:
    """Return the config of a command line, with the steps of its epochs and a schedule that fits them. Nothing is raised."""
    loaded = launch.read_config(line)
    run, problems, authors = loaded.run, list(loaded.problems), dict(loaded.origins)
    notes: list[str] = []
    if run.train.epochs and authors["train.steps"] == "command line":
        if authors["train.epochs"] == "command line":
            rule = f"train.steps={run.train.steps} is given too, and only one of them can decide"
            problems.append(Problem("train.epochs", run.train.epochs, rule, "Set train.epochs=0, or leave out train.steps."))
        else:
            notes.append(
                f"train.epochs: {run.train.epochs:g} (file) -> 0, because of train.steps = {run.train.steps} (command line)"
            )
            run = dataclasses.replace(run, train=dataclasses.replace(run.train, epochs=0.0))
    run, epoch_problems, epoch_notes = resolve_epochs(run)
    problems += epoch_problems
    authors |= {"train.steps": BY_EPOCHS} if run.train.epochs and not epoch_notes else {}
    run, schedule_notes = fit_schedule(run, authors, loaded.file)
    requested = loaded.requested
    origins = {
        key: "derived" if key in requested and requested[key] != value else authors.get(key, "default")
        for key, value in run.flat.items()
    }
    problems = launch.add_own_hints(problems, run)
    launched = dataclasses.replace(loaded.launch, notes=(*notes, *epoch_notes, *schedule_notes))
    return dataclasses.replace(loaded, run=run, problems=problems, origins=origins, launch=launched)


def schedule_length(opt: Optimizer, steps: int) -> int:
    """Return the number of steps that the warm-up and the decay of a schedule need, in a run of `steps` steps."""
    if opt.schedule == "constant":
        return opt.warmup_steps
    decay = opt.decay_steps or (steps // 5 if opt.schedule == "wsd" else 0)
    return max(1, opt.warmup_steps) + decay  # the first step has the peak without a warm-up


def resolve_epochs(run: RunConfig) -> tuple[RunConfig, list[Problem], list[str]]:
    """Return the run with the train.steps of its train.epochs, the problems of train.epochs, and notes. Imports no jax.

    An epoch is what `Batches.epoch` counts as one, and the last step may go past the end of the last epoch. Without
    train.epochs, nothing changes. train.steps also stays if the data cannot be opened: a note says why, and `validate` reports
    the data.
    """
    epochs, data, steps = run.train.epochs, run.data, run.train.steps
    ramp_problem = parse_ramp(run.train.batch_ramp, run.train.global_batch)[1]
    sizes = {"train.epochs": epochs, "train.global_batch": run.train.global_batch, "data.seq_len": data.seq_len}
    sizes |= {"data.max_segments": data.max_segments, "data.seed": data.seed}
    if not epochs > 0 or ramp_problem or any(all_keys()[name].out_of_range(value) for name, value in sizes.items()):
        return run, [], []
    from jaxtrain.data import opening  # imports numpy, which --help must not wait for

    if data.source == "synthetic" or opening.is_custom(data.source):
        rule = f"data.source={data.source} has no known end, and only token files and stdlib have epochs"
        return run, [Problem("train.epochs", epochs, rule, f"Set train.epochs=0, and train.steps={steps} decides.")], []
    try:
        tokens = opening.tokens_per_epoch(data, run.paths.data)
    except ConfigError as error:
        missing_files = [str(p.value) for p in error.problems if p.rule == opening.NO_SUCH_FILE]
        reason = (
            f"{', '.join(missing_files)} {'is' if len(missing_files) == 1 else 'are'} not here"
            if missing_files
            else str(error.problems[0])
        )
        return run, [], [f"train.epochs={epochs:g}: its steps are not known ({reason}); train.steps={steps} counts instead"]
    # A fraction, because 0.1 x 1000 rows must not need a step more than 100 rows do.
    needed = max(1, run.ramp.steps_for(fractions.Fraction(str(epochs)) * tokens / data.seq_len))
    return dataclasses.replace(run, train=dataclasses.replace(run.train, steps=needed)), [], []


def resolve_with_epochs(
    config: ml_collections.ConfigDict | Mapping[str, Any],
) -> tuple[RunConfig, list[Problem], list[str]]:
    """Return (run, problems, notes) of a config without a command line: `resolve_config`, with the steps of train.epochs."""
    requested, problems = launch.resolve_config(config)
    run, epoch_problems, notes = resolve_epochs(requested)
    if run.train.steps != requested.train.steps:
        run, notes = fit_schedule(run, launch.origins_of(config) | {"train.steps": BY_EPOCHS}, requested)
    return run, launch.add_own_hints(problems + epoch_problems, run), notes


def _steps_of_file(file: RunConfig) -> tuple[int, str]:
    """Return (steps, their origin) of the run that a config file describes: its train.steps, else those of its epochs."""
    if file.train.steps != RunConfig().train.steps:
        return file.train.steps, "file"
    resolved, problems, notes = resolve_epochs(file)
    return (file.train.steps, "default") if not file.train.epochs or problems or notes else (resolved.train.steps, BY_EPOCHS)


def fit_schedule(run: RunConfig, authors: Mapping[str, str], file: RunConfig) -> tuple[RunConfig, list[str]]:
    """Shorten warm-up and decay with train.steps, lower optimizer.lr_min to fit optimizer.lr, and leave out empty samples.

    With `--config.train.steps=60`, a file that warms up for 50 of 700 steps warms up for 4: the same fraction of the run. A
    default has its fraction of the default train.steps, a length of a file with train.epochs that of the steps of its epochs.
    Warm-up and decay change only if their origin (AUTHORS) ranks below the origin of train.steps; of a constant schedule, whose
    rates do not depend on the length of the run, and of steps of the file itself, only if they are too long. lr_min changes
    only if its origin ranks below that of optimizer.lr, sample.every_steps (to 0, without sample.max_tokens) only if
    its origin ranks below that of sample.max_tokens. Otherwise `validate` reports the contradiction.

    Args:
        run: the resolved config.
        authors: dotted key -> its origin, one of AUTHORS; only that of train.steps may be BY_EPOCHS.
        file: the config of the file, without overrides.

    Returns:
        the config, and one line for each value that changed.
    """

    def ranks_below(key: str, other_key: str) -> bool:
        return AUTHORS.index(authors[key]) < AUTHORS.index(authors[other_key])

    opt, steps = run.optimizer, run.train.steps
    changes: dict[str, Any] = {}
    notes: list[str] = []
    decays = opt.schedule != "constant"
    lengths = {"warmup_steps": opt.warmup_steps, "decay_steps": opt.decay_steps if decays else 0}
    movable = {n: v for n, v in lengths.items() if v > 0 and ranks_below(f"optimizer.{n}", "train.steps")}
    default_run, steps_of_file = RunConfig(), _steps_of_file(file)

    def base_steps(name: str) -> tuple[int, str]:
        """Return (steps, their origin) of the run of which a length is a fraction."""
        if authors[f"optimizer.{name}"] == "default":
            return default_run.train.steps, "default"
        # Steps of epochs may be too few for the length, and give no fraction.
        return steps_of_file if movable[name] <= steps_of_file[0] else (file.train.steps, "default")

    bases = {n: base_steps(n) for n in movable}
    if schedule_length(opt, steps) <= steps:
        movable = {n: v for n, v in movable.items() if decays and authors["train.steps"] != "file" and steps < bases[n][0]}
    if steps > 0 and movable:
        fitted = {n: max(1, v * steps // max(steps, bases[n][0])) for n, v in movable.items()}
        room = steps - (schedule_length(opt, steps) - sum(movable.values()))
        if sum(fitted.values()) > room:
            fitted = {n: v * max(0, room) // sum(movable.values()) for n, v in movable.items()}
        changes |= fitted
        for n, v in fitted.items():
            author, (base, counted_by) = authors[f"optimizer.{n}"], bases[n]
            previous = f"{movable[n]}{f' ({author})' if author != counted_by else ''} of {base} steps ({counted_by})"
            notes.append(f"optimizer.{n}: {previous} -> {v} of train.steps = {steps} ({authors['train.steps']})")
    valid = not all_keys()["optimizer.lr"].out_of_range(opt.lr)
    if opt.schedule != "constant" and opt.lr_min > opt.lr and valid and ranks_below("optimizer.lr_min", "optimizer.lr"):
        author = authors["optimizer.lr_min"]
        peak = (default_run if author == "default" else file).optimizer.lr
        lowest = float(f"{opt.lr_min * opt.lr / max(opt.lr, peak):.6g}")
        changes["lr_min"] = min(opt.lr, lowest) if lowest >= SMALLEST else 0.0
        previous = f"{opt.lr_min:g} of a peak of {peak:g} ({author})"
        notes.append(f"optimizer.lr_min: {previous} -> {changes['lr_min']:g} of {opt.lr:g} ({authors['optimizer.lr']})")
    sample = run.sample
    if sample.every_steps and not sample.max_tokens and ranks_below("sample.every_steps", "sample.max_tokens"):
        notes.append(
            f"sample.every_steps: {sample.every_steps} ({authors['sample.every_steps']}) -> 0 of sample.max_tokens = 0"
        )
        sample = dataclasses.replace(sample, every_steps=0)
    return dataclasses.replace(run, optimizer=dataclasses.replace(opt, **changes), sample=sample), notes
