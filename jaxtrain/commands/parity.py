"""Check that all layouts take the same steps: `python -m jaxtrain parity --config=FILE --meshes=...`."""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import rich.console

from jaxtrain.commands.command import Command, Parsed, run_command
from jaxtrain.config import environment, hardware, own_parts
from jaxtrain.config.command_line import Option, make_console
from jaxtrain.config.durations import duration
from jaxtrain.config.schema import Problem, RunConfig
from jaxtrain.metrics.files import write_output
from jaxtrain.runtime.startup import set_environment, start_jax
from jaxtrain.runtime.words import first_line
from jaxtrain.train import parity_layouts as named
from jaxtrain.train.parity_layouts import Layout

DTYPES = {"": (), "f32": named.FLOAT32, "bf16": ("precision=bf16", "fp8.exclude="), "fp8": ("precision=fp8",)}


COMMAND = Command(
    "parity",
    "Train the same few steps on several layouts, from the same seed and data, and compare them.",
    (
        Option(
            "meshes",
            "axes with their sizes joined by x, and further keys, each after a slash: fsdp8, fsdp4xtensor2, data2xfsdp2xseq2, "
            "fsdp8/sharding.zero=1, seq8/parallel.context=ulysses. `one` is a single device. Every layout is compared with the "
            "first. Keys: sharding.*, attention.*, parallel.*, remat.*, dtypes.*, compiler.*, pipeline.*, moe.impl, "
            "moe.buffer, train.grad_accum, train.accumulate, loss.chunk. Default, without those that the config excludes: "
            f"{named.DEFAULT}; with several microbatches also {named.STAGES}; with experts {named.EXPERTS}; with both "
            f"{named.BOTH}",
            "LAYOUT,...",
            modes=("",),
        ),
        Option("steps", "steps to train; default 3", "N", "3", least=1, modes=("",)),
        Option(
            "dtype",
            "f32: every type float32; bf16, fp8: that precision. Default: as the config says",
            "DTYPE",
            choices=(*filter(None, DTYPES),),
            modes=("",),
        ),
        Option(
            "known-issues",
            "instead: check for three bugs that were reported against trainers: attention across packed documents, wrong "
            "gradients in combined layouts, data that depends on the number of processes. A few minutes on a laptop",
        ),
        Option("json", "all results, for programs", "FILE", writes=True),
    ),
    config=True,
    modes=("known-issues",),
    examples=(
        "--config=configs/tiny.py --meshes=one,fsdp8,fsdp4xtensor2",
        "--config=configs/llama3_8b.py --config.model.num_layers=2 --config.model.d_model=512 --config.model.d_ff=1024 "
        "--config.model.vocab_size=4096 --config.data.source=synthetic --config.data.seq_len=256 --config.train.grad_accum=1 "
        "--meshes=one,fsdp8,fsdp4xtensor2/sharding.zero=1 --dtype=bf16",
        "--known-issues",
    ),
    notes="Uses the GPUs of this node if there are enough for the largest layout, else CPU devices. On a CPU compare a small "
    "model: whether layouts agree does not depend on its size.\n\n"
    "Every layout is compared with the first: loss and gradient norm of every step, the first gradient of every tensor, and "
    "its update, which is its weights after the last step minus its initial weights. In float32 the relative bound is 1e-5, "
    "and 1e-3 for updates. In bfloat16 and FP8 the first layout is also trained in float32. The bound is sqrt(2 + log2 n) "
    "times the difference between these two, where n is devices times microbatches: jaxtrain/train/parity.py derives it.\n\n"
    "Exit codes: 0 all layouts agree; 1 a layout does not agree, or could not be run; 2 the command or config is wrong, "
    "nothing was started; 130 Ctrl-C.",
)

Runs = list[tuple[Layout, RunConfig]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    found: list[Any] = []

    def check(parsed: Parsed) -> list[Problem]:
        layouts, wrong = named.parse(meshes_of(parsed))
        runs, left_out, problems = load_runs(parsed, layouts)
        found[:] = [runs, left_out]
        known = {str(p) for p in parsed.problems}  # problems of the config, which each layout has too
        return [*find_problems(parsed), *wrong, *(p for p in problems if str(p) not in known)]

    def act(parsed: Parsed) -> int:
        runs, left_out = found
        start_devices(runs)
        console = make_console()
        for line in left_out:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return run_known_issues(parsed, runs, console) if parsed.mode else run(parsed, runs, console)

    return run_command(COMMAND, argv, act, check=check)


def meshes_of(parsed: Parsed) -> str:
    """Return the layouts to compare: those of --known-issues if that is given, else --meshes if given, else the defaults."""
    if parsed.mode:
        from jaxtrain.train import parity_known_issues

        return parity_known_issues.COMBINED
    return parsed.options["meshes"] or named.default(parsed.config.run)


def find_problems(parsed: Parsed) -> list[Problem]:
    """Return the problem of --meshes with only one layout, and of every --config.mesh.*, since --meshes sets the mesh."""
    layouts, wrong = named.parse(meshes_of(parsed))
    if "meshes" in parsed.given and not wrong and len(set(layouts)) == 1:
        rule = "is one layout, with nothing to compare it with"
        return [Problem("--meshes", parsed.options["meshes"], rule, "For example --meshes=one,fsdp2.")]
    keys = [key for key, _ in parsed.config.launch.overrides if key.startswith("mesh.")]
    return [Problem(f"--config.{key}", None, "--meshes sets the mesh", "Leave it out.") for key in keys]


def config_argv(parsed: Parsed) -> list[str]:
    """Return the config arguments of a command line.

    --known-issues without --config gets a small model, and synthetic data with many documents in a sequence.
    """
    argv = parsed.config.launch.config_argv
    if not parsed.mode or "config" in parsed.given:
        return argv
    small = ("data.source=synthetic", "data.eval_source=", "model.num_layers=2")
    return [argv[0], *(f"--config.{o}" for o in small), *argv[1:]]


def load_runs(parsed: Parsed, layouts: list[Layout]) -> tuple[Runs, list[str], list[Problem]]:
    """Return (layout, config) of each layout; a line for each default layout left out as invalid; problems of the others."""
    argv = config_argv(parsed)
    more = named.FLOAT32 if parsed.mode else DTYPES.get(parsed.options["dtype"], ())
    found = [(layout, *named.load(layout, argv, *more)) for layout in layouts]
    left_out = []
    if not parsed.options["meshes"]:
        fine = [item for item in found if not item[2]]
        if len(fine) > 1:
            left_out = [f"left out: {layout.name}: {wrong[0]}" for layout, _, wrong in found if wrong]
            found = fine
    problems = named.together([(layout.name, wrong) for layout, _, wrong in found])
    if found and not problems:
        problems = named.find_problems([run for _, run, _ in found], [layout for layout, _, _ in found])
    return [(layout, run) for layout, run, _ in found], left_out, problems


def start_devices(runs: Runs) -> None:
    """Set the environment that JAX reads when it starts, and start JAX."""
    most = max(layout.devices for layout, _ in runs)
    found = named.devices(most)
    if found.kind == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        if hardware.probe().count < most:
            os.environ["JAX_NUM_CPU_DEVICES"] = str(most)
        # This halves the compile time. The speed of the compiled code does not matter here.
        flags = os.environ.get("XLA_FLAGS", "")
        if "xla_backend_optimization_level" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()
    else:
        set_environment(environment.overlay(runs[0][1], found, os.environ)[0])
    start_jax(found)


def run(parsed: Parsed, runs: Runs, console: rich.console.Console) -> int:
    """Train on every layout, and print a comparison with the first. Return 0 if all agree, else 1. JAX must be started."""
    from jaxtrain.train import parity_report

    rows, yardstick, types, failed = compare_layouts(runs, int(parsed.options["steps"]), console)
    if failed:
        print(f"error: {failed}", file=sys.stderr)
        return 1
    name, *overrides = config_argv(parsed)
    overrides = tuple(o.removeprefix("--config.") for o in overrides)
    steps, config = int(parsed.options["steps"]), name.removeprefix("--config=")
    result = parity_report.Result(config, overrides, steps, types, devices_text(runs), tuple(rows), yardstick)
    parity_report.show(result, console)
    write_json(parsed, parity_report.to_json(result))
    return 0 if result.agrees else 1


def compare_layouts(runs: Runs, steps: int, console: rich.console.Console) -> tuple[list[Any], Any, str, str]:
    """Train `steps` steps on every layout, and compare them with the first.

    Returns:
      The rows of the report; the comparison of the first layout with its own steps in float32 (None if all runs are float32);
      the precision; and the reason why the first layout could not run, or "".
    """
    import jax

    from jaxtrain.train import parity, parity_report

    exact = yardstick = None
    (reference, first), *others = runs
    in_float32 = all(parity.is_float32(run) for _, run in runs)
    types = "float32" if in_float32 else first.precision
    total, done = len(runs) + (not in_float32), 0

    def attempt(name: str, layout: Layout, run: RunConfig) -> tuple[Any, str, float]:
        """Return (steps of a layout, or None after an error; the error, or ""; the time in seconds)."""
        nonlocal done
        done += 1
        began = time.perf_counter()
        busy = console.status(f"{done} of {total}: {name}: compiling, then {steps} steps ...")
        try:
            with busy if console.is_terminal else contextlib.nullcontext():
                trained = parity.train(run, jax.devices()[: layout.devices], steps)
        except Exception as error:
            own = own_parts.problem_of(error)
            if own and layout is reference:  # it would be the same on all layouts
                raise
            if not own and not isinstance(error, (ValueError, NotImplementedError, jax.errors.JaxRuntimeError, MemoryError)):
                raise
            return None, str(own or f"{type(error).__name__}: {first_line(error)}"), time.perf_counter() - began
        seconds = time.perf_counter() - began
        if not console.is_terminal:
            console.print(f"{done} of {total}: {name}: {duration(seconds)}", markup=False, highlight=False)
        return trained, "", seconds

    base, failed, seconds = attempt(reference.name, reference, first)
    if base and not in_float32:
        exact, failed, _ = attempt(f"{reference.name} in float32", reference, named.in_float32(first))
    if failed or not base:
        return [], None, types, f"the first layout, {reference.name}, could not be run: {failed}"
    tokens = first.train.global_batch * first.data.seq_len
    if exact:
        yardstick = parity.compare(exact, base, parity.bounds(base, exact, 1, tokens))
    rows = [parity_report.Row(reference, base, seconds=seconds)]
    for layout, run in others:
        trained, failed, seconds = attempt(layout.name, layout, run)
        if not trained:
            rows.append(parity_report.Row(layout, failed=failed, seconds=seconds))
            continue
        allowed = parity.bounds(base, exact, layout.devices * run.train.grad_accum, tokens)
        comparison = parity.compare(trained, base, allowed)
        curves = dataclasses.replace(trained, start={}, gradients={}, weights={})  # the other fields are large
        rows.append(parity_report.Row(layout, curves, comparison, allowed, seconds=seconds))
    return rows, yardstick, types, ""


def run_known_issues(parsed: Parsed, runs: Runs, console: rich.console.Console) -> int:
    """Run the checks of known_issues.py, and print each verdict. Return 0 if all are ok, else 1. JAX must be started."""
    from jaxtrain.train import parity_known_issues, parity_report

    def print_line(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def gradients() -> parity_known_issues.Check:
        rows, _, _, failed = compare_layouts(runs, 2, console)
        if failed:
            raise ValueError(failed)
        return parity_known_issues.check_gradients(rows)

    straddling = [(layout, run) for layout, run in runs if layout.name in parity_known_issues.STRADDLING.split(",")]
    checks = {
        "attention stays within a packed document": lambda: parity_known_issues.check_documents(straddling),
        "gradients of combined layouts equal those of one device": gradients,
        "training does not depend on the number of processes": lambda: parity_known_issues.check_processes(config_argv(parsed)),
    }
    done = []
    for claim, act in checks.items():
        began = time.perf_counter()
        found = act()
        print_line(f"{'ok' if found.ok else 'WRONG'}: {claim}", "green" if found.ok else "bold red")
        print_line(f"    {found.where}: relative difference {found.figure:.1e}, bound {found.bound:.0e}")
        facts = {"claim": claim, **dataclasses.asdict(found), "ok": found.ok, "seconds": round(time.perf_counter() - began, 1)}
        done.append(facts | {"figure": found.figure if found.figure == found.figure else None})  # JSON has no NaN
    write_json(parsed, {"format": parity_report.FORMAT, "devices": devices_text(runs), "known_issues": done})
    return 0 if all(c["ok"] for c in done) else 1


def devices_text(runs: Runs) -> str:
    """Return the number of devices of the largest layout, and their kind, as text."""
    import jax

    return f"{max(layout.devices for layout, _ in runs)} {jax.devices()[0].device_kind} devices"


def write_json(parsed: Parsed, tree: dict[str, Any]) -> None:
    """Write the results `tree` to the file of --json, if that is given."""
    if parsed.options["json"]:
        write_output(parsed.options["json"], json.dumps(tree, indent=1) + "\n")
