"""Check that all layouts take the same steps: `python -m jaxtrain parity --config=FILE --meshes=...`."""

import json
import sys
from collections.abc import Sequence

from jaxtrain.commands.command import run_command
from jaxtrain.config.command_line import FAILED, Args, Parser, at_least, make_console, output_file
from jaxtrain.config.schema import Problem
from jaxtrain.metrics.files import write_output
from jaxtrain.train import parity_layouts
from jaxtrain.train.parity_runs import FirstLayoutFailed, Runs, compare_layouts, start_devices

DTYPES = {"": (), "f32": parity_layouts.FLOAT32, "bf16": ("precision=bf16", "fp8.exclude="), "fp8": ("precision=fp8",)}


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser(
        "parity",
        "Train the same few steps on several layouts, from the same seed and data, and compare them.",
        config=True,
        examples=(
            "--config=configs/tiny.py --meshes=one,fsdp8,fsdp4xtensor2",
            "--config=configs/llama3_8b.py --config.model.num_layers=2 --config.model.d_model=512 --config.model.d_ff=1024 "
            "--config.model.vocab_size=4096 --config.data.source=synthetic --config.data.seq_len=256 "
            "--config.train.grad_accum=1 "
            "--meshes=one,fsdp8,fsdp4xtensor2/sharding.zero=1 --dtype=bf16",
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
    cli.option(
        "meshes",
        "axes with their sizes joined by x, and further keys, each after a slash: fsdp8, fsdp4xtensor2, data2xfsdp2xseq2, "
        "fsdp8/sharding.zero=1, seq8/parallel.context=ulysses. `one` is a single device. Every layout is compared with the "
        f"first. Keys: {', '.join(parity_layouts.KEYS)}. Default, without those that the config excludes: "
        f"{parity_layouts.DEFAULT}; with several microbatches also {parity_layouts.STAGES}; with experts "
        f"{parity_layouts.EXPERTS}; with both {parity_layouts.BOTH}",
        "LAYOUT,...",
    )
    cli.option("steps", "steps to train; default 3", "N", 3, type=at_least(1))
    cli.option(
        "dtype",
        "f32: every type float32; bf16, fp8: that precision. Default: as the config says",
        "DTYPE",
        choices=(*filter(None, DTYPES),),
    )
    cli.option("json", "all results, for programs", "FILE", type=output_file)
    return cli


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    runs: Runs = []
    left_out: list[str] = []

    def find_all_problems(args: Args) -> list[Problem]:
        layouts, mesh_problems = parity_layouts.parse_layouts(mesh_names(args))
        extra_args, argv = DTYPES.get(args.dtype, ()), args.loaded.launch.config_argv
        runs[:], left_out[:], problems = parity_layouts.load_layouts(layouts, argv, extra_args, leave_out=not args.meshes)
        config_problems = {str(p) for p in args.problems}  # problems of the config, which each layout has too
        return [*find_problems(args), *mesh_problems, *(p for p in problems if str(p) not in config_problems)]

    return run_command(parser(), argv, lambda args: run_parity(args, runs, left_out), check=find_all_problems)


def mesh_names(args: Args) -> str:
    """Return the layouts to compare: --meshes if given, else the defaults."""
    return args.meshes or parity_layouts.default_layouts(args.loaded.run.train, args.loaded.run.model)


def find_problems(args: Args) -> list[Problem]:
    """Return the problem of --meshes with only one layout, and of every --config.mesh.*, since --meshes sets the mesh."""
    layouts, mesh_problems = parity_layouts.parse_layouts(mesh_names(args))
    if "meshes" in args.explicit and not mesh_problems and len(set(layouts)) == 1:
        rule = "is one layout, with nothing to compare it with"
        return [Problem("--meshes", args.meshes, rule, "For example --meshes=one,fsdp2.")]
    keys = [key for key, _ in args.loaded.launch.overrides if key.startswith("mesh.")]
    return [Problem(f"--config.{key}", None, "--meshes sets the mesh", "Leave it out.") for key in keys]


def run_parity(args: Args, runs: Runs, left_out: Sequence[str]) -> int:
    """Train on every layout, and print the comparison with the first. Return 0 if all agree, else 1."""
    start_devices(runs)
    from jaxtrain.train import parity_report

    console = make_console()
    for line in filter(None, (args.loaded.run.ramp.note, *left_out)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    config, *overrides = args.loaded.launch.config_argv
    names = config.removeprefix("--config="), [o.removeprefix("--config.") for o in overrides]
    try:
        result = compare_layouts(runs, args.steps, console, *names)
    except FirstLayoutFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    parity_report.print_result(result, console)
    if args.json:
        write_output(args.json, json.dumps(parity_report.to_json(result), indent=1) + "\n")
    return 0 if result.agrees else FAILED
