"""The command line of parity: does every layout take the same steps? `python -m jaxtrain.parity --config=FILE --meshes=...`."""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console

from jaxtrain import environment, hardware, launch
from jaxtrain.commands import spelled
from jaxtrain.config import ConfigError, Problem, RunConfig
from jaxtrain.launch import Loaded
from jaxtrain.parity import layouts as named
from jaxtrain.parity.layouts import Layout
from jaxtrain.startup import set_environment, start_jax

INTERRUPTED = 130
WIDTH = 118  # of the table where the output is not a terminal

HELP = """\
Does every layout take the same steps? Trains the same few on each, from the same seed and data, and compares them.

  python -m jaxtrain.parity --config=FILE[:variant] [--config.KEY=VALUE ...] [--meshes=LAYOUT,LAYOUT,...] [options]

  --config, --config.KEY   as for training; mesh.* is what --meshes says
  --meshes=LAYOUT,...      axes with their sizes joined by x, and further keys, each after a slash:
                           fsdp8, fsdp4xtensor2, data2xfsdp2xseq2, fsdp8/sharding.zero=1, seq8/parallel.context=ulysses
                           `one` is a single device. The first is what the others are compared with. Keys: sharding.*,
                           attention.*, parallel.*, remat.*, dtypes.*, compiler.*, pipeline.*, moe.impl, moe.buffer,
                           train.grad_accum, train.accumulate, loss.chunk.
                           Default, of which what the config cannot be is left out: {default};
                           with several microbatches also {stages}; with experts
                           {experts}; with both {both}
  --steps=3                steps to train
  --dtype=f32|bf16|fp8     f32: every type float32; bf16, fp8: that precision. Default: as the config says
  --topology=h200:8        also plan the config on each layout for that machine: step time, and memory that a GPU takes
  --json=FILE              everything that was found, for programs
  --help                   this text

  python -m jaxtrain.parity --config=configs/tiny.py --meshes=one,fsdp8,fsdp4xtensor2
  python -m jaxtrain.parity --config=configs/llama3_8b.py --config.model.num_layers=2 --config.model.d_model=512 \\
      --config.model.d_ff=1024 --config.model.vocab_size=4096 --config.data.source=synthetic --config.data.seq_len=256 \\
      --config.train.grad_accum=1 --meshes=one,fsdp8,fsdp4xtensor2/sharding.zero=1 --topology=h200:8

Runs on the GPUs of this machine where they are enough, else on CPU devices, as many as the largest layout needs. A model of
billions of parameters is for the GPUs; on a CPU compare a smaller one: whether layouts agree does not depend on its size.

Compared are loss and gradient norm of every step, every tensor's first gradient, and how far the weights moved. Bounds: in
float32 1e-5, and for weights 1e-3 of the way. In bfloat16 the reference is trained in float32 too, and a layout may be off by
sqrt(2 + log2 n) times the reference's distance from that: what splitting sums over n devices and microbatches adds to rounding.
The m weights of a tensor may be 1 + 3 / sqrt(m) times further off: by as much two norms of m errors differ.

Exit codes: 0 all agree; 1 one does not, or could not be run; 2 the command or config is wrong, nothing was started; 130 Ctrl-C.
"""

OPTIONS = {"meshes": "", "steps": "3", "dtype": "", "topology": "", "json": ""}
DTYPES = {"": (), "f32": named.FLOAT32, "bf16": ("precision=bf16", "fp8.exclude="), "fp8": ("precision=fp8",)}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        text = HELP.format(default=named.DEFAULT, stages=named.STAGES, experts=named.EXPERTS, both=named.BOTH)
        print(spelled(text), end="")
        return 0
    loaded = launch.load(argv, OPTIONS)
    layouts, wrong = named.parse(loaded.options["meshes"] or named.default(loaded.run))
    runs, left_out, problems = _runs(loaded, layouts)
    problems = [*_own_problems(loaded), *_options(loaded), *wrong, *problems]
    if problems:
        return launch.report(problems)
    _prepare(runs)
    console = rich.console.Console()
    if not console.is_terminal:
        console = rich.console.Console(width=WIDTH)
    for line in left_out:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    try:
        return run(loaded, runs, console)
    except ConfigError as error:
        return launch.report(error.problems)
    except KeyboardInterrupt:
        print("\nCtrl-C: stopped.", file=sys.stderr)
        return INTERRUPTED


def _own_problems(loaded: Loaded) -> list[Problem]:
    """Of the command line itself; those of the config come with each layout."""
    return [p for p in loaded.problems if p.key.startswith(("--", "argument"))]


def _options(loaded: Loaded) -> list[Problem]:
    options, problems = loaded.options, []
    steps = options["steps"]
    if not steps.isdecimal() or int(steps) < 1:
        problems.append(Problem("--steps", steps, "must be a whole number, 1 or more", "For example --steps=3."))
    if options["dtype"] not in DTYPES:
        problems.append(Problem("--dtype", options["dtype"], "no such type", "Write f32, bf16 or fp8, or leave it out."))
    if options["json"]:
        path = Path(options["json"]).expanduser().absolute()
        if path.is_dir() or not path.parent.is_dir():
            rule = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            problems.append(Problem("--json", options["json"], rule, "Name another file."))
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            problems.append(Problem("--json", options["json"], "may not be written here", "Name another file."))
    for key, _ in loaded.launch.overrides:
        if key.startswith("mesh."):
            problems.append(Problem(f"--config.{key}", None, "--meshes says what the mesh is", "Leave it out."))
    return problems


def _command(loaded: Loaded) -> list[str]:
    """Config file and overrides, as they stood on the command line."""
    at = loaded.launch
    file = f"{at.config_file}:{at.variant}" if at.variant else at.config_file
    return [f"--config={file}", *(f"--config.{key}={value}" for key, value in at.overrides)]


Runs = list[tuple[Layout, RunConfig, RunConfig]]  # as compared, and as the config would train it


def _runs(loaded: Loaded, layouts: list[Layout]) -> tuple[Runs, list[str], list[Problem]]:
    """(layouts with their configs, lines on default layouts that the config cannot be, all problems)."""
    argv, more = _command(loaded), DTYPES.get(loaded.options["dtype"], ())
    found = [(layout, *named.load(layout, argv, *more)) for layout in layouts]
    left_out = []
    if not loaded.options["meshes"]:
        fine = [item for item in found if not item[2]]
        if len(fine) > 1:
            left_out = [f"left out: {layout.name}: {wrong[0]}" for layout, _, wrong in found if wrong]
            found = fine
    problems = named.together([(layout.name, wrong) for layout, _, wrong in found])
    if found and not problems:
        run = found[0][1]
        problems = [
            *named.check_moments([run for _, run, _ in found]),
            *named.check_experts([run for _, run, _ in found]),
            *named.check_data(run),
            *named.check_size(run, [layout for layout, _, _ in found]),
        ]
    if not problems and loaded.options["topology"]:
        problems = _topology_problems(loaded.options["topology"])
    return [(layout, run, named.load(layout, argv)[0]) for layout, run, _ in found], left_out, problems


def _topology_problems(text: str) -> list[Problem]:
    # Imports jax, and starts nothing.
    from jaxtrain.plan import topology

    try:
        topology.parse(text)
    except topology.TopologyError as error:
        return [Problem("--topology", None, str(error).rstrip("."), "")]
    return []


def _prepare(runs: Runs) -> None:
    """Sets the environment that JAX reads when it starts, and starts it."""
    most = max(layout.devices for layout, _, _ in runs)
    found = named.devices(most)
    if found.kind == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        if hardware.probe().count < most:
            os.environ["JAX_NUM_CPU_DEVICES"] = str(most)
        # Half the time of compiling; what makes code fast on a CPU is not what is compared.
        flags = os.environ.get("XLA_FLAGS", "")
        if "xla_backend_optimization_level" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()
    else:
        set_environment(environment.overlay(runs[0][1], found, os.environ)[0])
    start_jax(found)


def run(loaded: Loaded, runs: Runs, console: rich.console.Console) -> int:
    """Everything after the command line has been read and JAX started."""
    import jax

    from jaxtrain.parity import compare, report

    topology, steps = loaded.options["topology"], int(loaded.options["steps"])
    exact = yardstick = None
    (reference, first, _), *_ = runs
    types = (
        "float32" if all(compare.is_float32(run) for _, run, _ in runs) else f"{first.precision} with its yardstick, float32"
    )
    total, done = len(runs) + (types != "float32"), 0

    def attempt(name: str, layout: Layout, run: RunConfig) -> tuple[Any, str, float]:
        """(what the layout gave, why it gave nothing, seconds)."""
        nonlocal done
        done += 1
        began = time.perf_counter()
        busy = console.status(f"{done} of {total}: {name}: compiling, then {steps} steps ...")
        try:
            with busy if console.is_terminal else contextlib.nullcontext():
                trained = compare.train(run, jax.devices()[: layout.devices], steps)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError, MemoryError) as error:
            return None, _first_line(error), time.perf_counter() - began
        seconds = time.perf_counter() - began
        if not console.is_terminal:
            console.print(f"{done} of {total}: {name}: {seconds:.1f} s", markup=False, highlight=False)
        return trained, "", seconds

    base, failed, seconds = attempt(reference.name, reference, first)
    if base and types != "float32":
        exact, failed, _ = attempt(f"{reference.name} in float32", reference, named.in_float32(first))
    if failed or not base:
        print(f"{reference.name}, which the others are compared with, could not be run: {failed}", file=sys.stderr)
        return 1
    if exact:
        yardstick = compare.compare(exact, base, compare.bounds(base, exact, 1, _tokens(first)))
    rows = [report.Row(reference, base, seconds=seconds)]
    for layout, run, _ in runs[1:]:
        trained, failed, seconds = attempt(layout.name, layout, run)
        if not trained:
            rows.append(report.Row(layout, failed=failed, seconds=seconds))
            continue
        allowed = compare.bounds(base, exact, layout.devices * run.train.grad_accum, _tokens(run))
        comparison = compare.compare(trained, base, allowed)
        curves = dataclasses.replace(trained, start={}, gradients={}, weights={})  # the rest is large
        rows.append(report.Row(layout, curves, comparison, allowed, seconds=seconds))
    if topology:
        rows = [_with_plan(row, run, topology, console) for row, (_, _, run) in zip(rows, runs, strict=True)]

    devices = f"{max(layout.devices for layout, _, _ in runs)} {jax.devices()[0].device_kind} devices"
    name, *overrides = _command(loaded)
    overrides = tuple(o.removeprefix("--config.") for o in overrides)
    result = report.Result(name.removeprefix("--config="), overrides, steps, types, devices, tuple(rows), yardstick, topology)
    report.show(result, console)
    if loaded.options["json"]:
        Path(loaded.options["json"]).expanduser().write_text(json.dumps(report.to_json(result), indent=1) + "\n")
    return 0 if result.agrees else 1


def _tokens(run: RunConfig) -> int:
    return run.train.global_batch * run.data.seq_len


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}"


def _with_plan(row: Any, run: RunConfig, topology: str, console: rich.console.Console) -> Any:
    """The row with its planned step time and memory, or the reason why there is none."""
    import jax

    from jaxtrain.plan import topology as machines
    from jaxtrain.plan.make import make_plan
    from jaxtrain.plan.search.space import training_check

    machine = machines.parse(topology)
    if wrong := training_check(machine, f"--topology={topology}")(run):
        return dataclasses.replace(row, not_planned=wrong[0].rule)
    busy = console.status(f"{row.layout.name}: planning for {topology} ...")
    try:
        with busy if console.is_terminal else contextlib.nullcontext():
            plan = make_plan(run, machine)
    except (ValueError, RuntimeError, jax.errors.JaxRuntimeError, MemoryError) as error:
        return dataclasses.replace(row, not_planned=_first_line(error))
    return dataclasses.replace(row, planned=(plan.time.step_ms, plan.memory.taken_gib))


if __name__ == "__main__":
    sys.exit(main())
