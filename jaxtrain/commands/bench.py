"""The command line of benchmarks: `python -m jaxtrain bench --config=FILE`."""

import contextlib
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxtrain.commands.command import run_command
from jaxtrain.config.command_line import Args, Invalid, Parser, at_least, make_console, output_file, path_text
from jaxtrain.config.schema import ConfigError, Problem
from jaxtrain.data import loading
from jaxtrain.node import kernels, suite, train_step
from jaxtrain.node.train_step import DATA, TRACED_STEPS
from jaxtrain.report import bench
from jaxtrain.step.validate_places import check_writable

STEP_MODES = ("", "sweep")  # modes that time train steps


def name_list(choices: Sequence[str]) -> Callable[[str], str]:
    """Return a type of options: comma-separated lists of known names."""

    def parse_names(text: str) -> str:
        if unknown := [name for name in text.split(",") if name not in choices]:
            raise Invalid(f"{unknown[0]!r} is not one of {', '.join(choices)}")
        return text

    return parse_names


def parser() -> Parser:
    """Return the parser of the command line."""
    kinds, parts = ",".join(kernels.KINDS), [part.name for part in suite.PARTS]
    cli = Parser(
        "bench",
        "Measure the devices of this machine: train steps by the program of training, kernels, or a complete node.",
        config=True,
        modes=("suite", "kernels", "sweep"),
        examples=(
            "--config=configs/llama3_8b.py --config.train.global_batch=32 --config.train.grad_accum=4",
            "--config=configs/llama3_8b.py:half --devices=1 --sweep='remat.policy=full,none'",
            "--kernels --out=runs/kernels",
            "--suite=node",
        ),
        notes="Every case runs in a process of its own. Exit codes: 0 measured, at least one case of a sweep; 1 nothing could "
        "be measured, or a check of the suite failed; 2 the command or config is wrong, nothing was started; 130 Ctrl-C, "
        "finished results are kept.",
    )
    cli.option("steps", "timed steps; default 20", "N", 20, type=at_least(1), modes=STEP_MODES)
    cli.option("warmup", "steps before them; default 5", "N", 5, type=at_least(1), modes=STEP_MODES)
    cli.option(
        "data", "synthetic tokens (default), or those of the config", "KIND", "synthetic", choices=(*DATA,), modes=STEP_MODES
    )
    devices = "the first N devices; on a CPU, N of them. Default: all"
    cli.option("devices", devices, "N", 0, type=at_least(1), example="2", modes=STEP_MODES)
    limit = "seconds of a case, with compilation; no step begins after that. 0: no limit"
    cli.option("limit", limit, "S", 0, type=at_least(0), modes=STEP_MODES)
    cli.option(
        "trace",
        f"with --out: also a trace of {TRACED_STEPS} more steps, in DIR/traces/CASE. All steps run without CUDA graphs, "
        "whose kernels a trace does not name",
        modes=STEP_MODES,
    )
    cli.option(
        "sweep",
        "every combination of these values, as 'remat.policy=full,none;mesh.fsdp=4,8'. A case that is impossible or does "
        "not fit is a row with the reason",
        "'KEY=V,V;...'",
    )
    bounds = f"instead: kernels and the lower bound of their time, by FLOPs and bytes at the data sheet's rates: {kinds}"
    cli.option("kernels", bounds, "LIST", const=kinds, type=name_list(kernels.KINDS), example="gemm")
    node = "instead: check and measure this node, in at most 30 minutes, into one folder to send in"
    cli.option("suite", node, "node", choices=("node",))
    listed = f"parts of the suite: {','.join(parts)}"
    cli.option("parts", listed, "LIST", modes=("suite",), type=name_list(parts), example="preflight")
    cli.option("smoke", "the suite in tiny shapes, as always on a CPU", modes=("suite",))
    cli.option("json", "all results, for programs", "FILE", type=output_file)
    cli.option("out", "results.md, results.json, receipt.json and the output of every case", "DIR", type=path_text)
    return cli


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    return run_command(parser(), argv, run_bench, check=find_problems)


def find_problems(args: Args) -> list[Problem]:
    """Return the problems of options that do not fit together, and of --out. JAX is not started."""
    problems = []
    if args.trace and not args.out:
        problems.append(Problem("--trace", None, "there is no folder for it", "Add --out=DIR."))
    if args.mode in ("suite", "kernels") and (args.line.overrides or args.line.file is not None):
        problems.append(Problem("--config", None, f"--{args.mode} does not use it", "Leave it out."))
    if args.mode == "sweep":
        problems += train_step.make_cases((), "", args.sweep)[1]
    return problems + (check_writable("--out", Path(args.out).expanduser()) if args.out else [])


def run_bench(args: Args) -> int:
    """Run a checked command line and return its exit code.

    Raises ConfigError if the GPUs cannot be used, or if the config or every combination of --sweep has problems.
    """
    console = make_console(bench.WIDTH)
    with contextlib.suppress(ValueError):  # in a thread. SIGTERM, as of a time limit, keeps finished results as Ctrl-C does
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.mode in ("suite", "kernels") and (problems := train_step.gpu_problems()):
        raise ConfigError(problems)
    if args.mode == "suite":
        return suite.run_suite(args.out, args.json, args.parts, args.smoke, console)
    if args.mode == "kernels":
        folder = bench.BenchFolder(args.out, args.json, "kernels")
        return folder.run(lambda: kernels.time_kernels(args.kernels.split(","), folder, console), "a kernel failed")
    if note := args.loaded.run.ramp.note:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    launched = args.loaded.launch
    cases, _ = train_step.make_cases([*launched.config_argv, *DATA[args.data]], launched.name, args.sweep)
    problems = {name: train_step.find_problems(loading.load_config(argv), args.devices) for name, argv in cases.items()}
    fatal = (
        [p for case_problems in problems.values() for p in case_problems]
        if all(problems.values())
        else train_step.gpu_problems()
    )
    if fatal:  # no case is possible
        raise ConfigError(fatal)
    request = {"devices": args.devices, "steps": args.steps, "warmup": args.warmup, "trace": args.trace}
    request["limit_s"] = args.limit or None
    folder = bench.BenchFolder(args.out, args.json, args.mode or "steps")
    return folder.run(lambda: train_step.run_cases(cases, problems, request, folder, console), "no case was measured")
