"""Check that all layouts take the same steps: `python -m jaxtrain parity --config=FILE --meshes=...`."""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import rich.console

from jaxtrain.commands.command import run_command
from jaxtrain.config.command_line import Args, Parser, make_console, output_file, whole
from jaxtrain.config.schema import Problem
from jaxtrain.metrics.files import write_output
from jaxtrain.train import parity_layouts as named
from jaxtrain.train.parity_layouts import Layout
from jaxtrain.train.parity_runs import Runs, compare_layouts, devices_text, start_devices

DTYPES = {"": (), "f32": named.FLOAT32, "bf16": ("precision=bf16", "fp8.exclude="), "fp8": ("precision=fp8",)}


def parser() -> Parser:
    """Return the parser of the command line."""
    p = Parser(
        "parity",
        "Train the same few steps on several layouts, from the same seed and data, and compare them.",
        config=True,
        modes=("known-issues",),
        examples=(
            "--config=configs/tiny.py --meshes=one,fsdp8,fsdp4xtensor2",
            "--config=configs/llama3_8b.py --config.model.num_layers=2 --config.model.d_model=512 --config.model.d_ff=1024 "
            "--config.model.vocab_size=4096 --config.data.source=synthetic --config.data.seq_len=256 "
            "--config.train.grad_accum=1 "
            "--meshes=one,fsdp8,fsdp4xtensor2/sharding.zero=1 --dtype=bf16",
            "--known-issues",
        ),
        notes="Uses the GPUs of this node if there are enough for the largest layout, else CPU devices. On a CPU "
        "compare a small "
        "model: whether layouts agree does not depend on its size.\n\n"
        "Every layout is compared with the first: loss and gradient norm of every step, the first gradient of "
        "every tensor, and "
        "its update, which is its weights after the last step minus its initial weights. In float32 the "
        "relative bound is 1e-5, "
        "and 1e-3 for updates. In bfloat16 and FP8 the first layout is also trained in float32. The bound is sqrt(2 + log2 n) "
        "times the difference between these two, where n is devices times microbatches: "
        "jaxtrain/train/parity.py derives it.\n\n"
        "Exit codes: 0 all layouts agree; 1 a layout does not agree, or could not be run; 2 the command or config is wrong, "
        "nothing was started; 130 Ctrl-C.",
    )
    p.option(
        "meshes",
        "axes with their sizes joined by x, and further keys, each after a slash: fsdp8, fsdp4xtensor2, data2xfsdp2xseq2, "
        "fsdp8/sharding.zero=1, seq8/parallel.context=ulysses. `one` is a single device. Every layout is compared with the "
        "first. Keys: sharding.*, attention.*, parallel.*, remat.*, dtypes.*, compiler.*, pipeline.*, moe.impl, "
        "moe.buffer, train.grad_accum, train.accumulate, loss.chunk. Default, without those that the config excludes: "
        f"{named.DEFAULT}; with several microbatches also {named.STAGES}; with experts {named.EXPERTS}; with both "
        f"{named.BOTH}",
        "LAYOUT,...",
        modes=("",),
    )
    p.option("steps", "steps to train; default 3", "N", 3, type=whole(1), modes=("",))
    p.option(
        "dtype",
        "f32: every type float32; bf16, fp8: that precision. Default: as the config says",
        "DTYPE",
        choices=(*filter(None, DTYPES),),
        modes=("",),
    )
    p.option(
        "known-issues",
        "instead: check for three bugs that were reported against trainers: attention across packed documents, wrong "
        "gradients in combined layouts, data that depends on the number of processes. A few minutes on a laptop",
    )
    p.option("json", "all results, for programs", "FILE", type=output_file)
    return p


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    found: list[Any] = []

    def check(args: Args) -> list[Problem]:
        layouts, wrong = named.parse(meshes_of(args))
        runs, left_out, problems = load_runs(args, layouts)
        found[:] = [runs, left_out]
        known = {str(p) for p in args.problems}  # problems of the config, which each layout has too
        return [*find_problems(args), *wrong, *(p for p in problems if str(p) not in known)]

    def act(args: Args) -> int:
        runs, left_out = found
        start_devices(runs)
        console = make_console()
        for line in left_out:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return run_known_issues(args, runs, console) if args.mode else run(args, runs, console)

    return run_command(parser(), argv, act, check=check)


def meshes_of(args: Args) -> str:
    """Return the layouts to compare: those of --known-issues if that is given, else --meshes if given, else the defaults."""
    if args.mode:
        from jaxtrain.train import parity_known_issues

        return parity_known_issues.COMBINED
    return args.meshes or named.default(args.loaded.run)


def find_problems(args: Args) -> list[Problem]:
    """Return the problem of --meshes with only one layout, and of every --config.mesh.*, since --meshes sets the mesh."""
    layouts, wrong = named.parse(meshes_of(args))
    if "meshes" in args.given and not wrong and len(set(layouts)) == 1:
        rule = "is one layout, with nothing to compare it with"
        return [Problem("--meshes", args.meshes, rule, "For example --meshes=one,fsdp2.")]
    keys = [key for key, _ in args.loaded.launch.overrides if key.startswith("mesh.")]
    return [Problem(f"--config.{key}", None, "--meshes sets the mesh", "Leave it out.") for key in keys]


def config_argv(args: Args) -> list[str]:
    """Return the config arguments of a command line.

    --known-issues without --config gets a small model, and synthetic data with many documents in a sequence.
    """
    argv = args.loaded.launch.config_argv
    if not args.mode or args.line.file is not None:
        return argv
    small = ("data.source=synthetic", "data.eval_source=", "model.num_layers=2")
    return [argv[0], *(f"--config.{o}" for o in small), *argv[1:]]


def load_runs(args: Args, layouts: list[Layout]) -> tuple[Runs, list[str], list[Problem]]:
    """Return (layout, config) of each layout; a line for each default layout left out as invalid; problems of the others."""
    argv = config_argv(args)
    more = named.FLOAT32 if args.mode else DTYPES.get(args.dtype, ())
    found = [(layout, *named.load(layout, argv, *more)) for layout in layouts]
    left_out = []
    if not args.meshes:
        fine = [item for item in found if not item[2]]
        if len(fine) > 1:
            left_out = [f"left out: {layout.name}: {wrong[0]}" for layout, _, wrong in found if wrong]
            found = fine
    problems = named.together([(layout.name, wrong) for layout, _, wrong in found])
    if found and not problems:
        problems = named.find_problems([run for _, run, _ in found], [layout for layout, _, _ in found])
    return [(layout, run) for layout, run, _ in found], left_out, problems


def run(args: Args, runs: Runs, console: rich.console.Console) -> int:
    """Train on every layout, and print a comparison with the first. Return 0 if all agree, else 1. JAX must be started."""
    from jaxtrain.train import parity_report

    rows, yardstick, types, failed = compare_layouts(runs, args.steps, console)
    if failed:
        print(f"error: {failed}", file=sys.stderr)
        return 1
    name, *overrides = config_argv(args)
    overrides = tuple(o.removeprefix("--config.") for o in overrides)
    steps, config = args.steps, name.removeprefix("--config=")
    result = parity_report.Result(config, overrides, steps, types, devices_text(runs), tuple(rows), yardstick)
    parity_report.show(result, console)
    write_json(args, parity_report.to_json(result))
    return 0 if result.agrees else 1


def run_known_issues(args: Args, runs: Runs, console: rich.console.Console) -> int:
    """Run the checks of parity_known_issues.py, and print each verdict. Return 0 if all are ok, else 1. JAX must be started."""
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
        "training does not depend on the number of processes": lambda: parity_known_issues.check_processes(config_argv(args)),
    }
    done = []
    for claim, act in checks.items():
        began = time.perf_counter()
        found = act()
        print_line(f"{'ok' if found.ok else 'WRONG'}: {claim}", "green" if found.ok else "bold red")
        print_line(f"    {found.where}: relative difference {found.figure:.1e}, bound {found.bound:.0e}")
        facts = {"claim": claim, **dataclasses.asdict(found), "ok": found.ok, "seconds": round(time.perf_counter() - began, 1)}
        done.append(facts | {"figure": found.figure if found.figure == found.figure else None})  # JSON has no NaN
    write_json(args, {"format": parity_report.FORMAT, "devices": devices_text(runs), "known_issues": done})
    return 0 if all(c["ok"] for c in done) else 1


def write_json(args: Args, tree: dict[str, Any]) -> None:
    """Write the results `tree` to the file of --json, if that is given."""
    if args.json:
        write_output(args.json, json.dumps(tree, indent=1) + "\n")
