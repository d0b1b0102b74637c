"""The command line of benchmarks: `python -m jaxtrain bench --config=FILE`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.commands.command import Command, Parsed, run_command
from jaxtrain.config.command_line import Option, make_console
from jaxtrain.config.schema import ConfigError, Problem
from jaxtrain.node import kernels, node_suite, train_step
from jaxtrain.node.train_step import DATA, TRACED_STEPS
from jaxtrain.report import bench
from jaxtrain.step.validate_places import writable

STEPS = ("", "sweep")  # modes that time train steps


def unknown_names(known: Sequence[str]) -> Callable[[str], str]:
    """Return a function that checks a comma-separated list. It returns an error for the first unknown name, or ""."""

    def check(text: str) -> str:
        wrong = [name for name in text.split(",") if name not in known]
        return f"{wrong[0]!r} is not one of {', '.join(known)}" if wrong else ""

    return check


COMMAND = Command(
    "bench",
    "Measure the devices of this machine: train steps by the program of training, kernels, or a complete node.",
    (
        Option("steps", "timed steps; default 20", "N", "20", least=1, modes=STEPS),
        Option("warmup", "steps before them; default 5", "N", "5", least=1, modes=STEPS),
        Option(
            "data",
            "synthetic tokens (default), or those of the config",
            "KIND",
            "synthetic",
            choices=(*DATA,),
            modes=STEPS,
        ),
        Option(
            "devices", "the first N devices; on a CPU, N of them. Default: all", "N", "0", least=1, example="2", modes=STEPS
        ),
        Option(
            "limit",
            "seconds of a case, with compilation; no step begins after that. 0: no limit",
            "S",
            "0",
            least=0,
            modes=STEPS,
        ),
        Option(
            "trace",
            f"with --out: also a trace of {TRACED_STEPS} more steps, in DIR/traces/CASE. All steps run without CUDA graphs, "
            "whose kernels a trace does not name",
            modes=STEPS,
        ),
        Option(
            "sweep",
            "every combination of these values, as 'remat.policy=full,none;mesh.fsdp=4,8'. A case that is impossible or does "
            "not fit is a row with the reason",
            "'KEY=V,V;...'",
        ),
        Option(
            "kernels",
            "instead: kernels and the lower bound of their time, by FLOPs and bytes at the data sheet's rates: "
            + ",".join(kernels.KINDS),
            "LIST",
            bare=",".join(kernels.KINDS),
            check=unknown_names(kernels.KINDS),
            example="gemm",
        ),
        Option(
            "suite",
            "instead: check and measure this node, in at most 30 minutes, into one folder to send in",
            "node",
            choices=("node",),
        ),
        Option(
            "parts",
            f"parts of the suite: {','.join(node_suite.PARTS)}",
            "LIST",
            modes=("suite",),
            check=unknown_names([*node_suite.PARTS]),
            example="preflight",
        ),
        Option("smoke", "the suite in tiny shapes, as always on a CPU", modes=("suite",)),
        Option("json", "all results, for programs", "FILE", writes=True),
        Option("out", "results.md, results.json, receipt.json and the output of every case", "DIR"),
    ),
    config=True,
    modes=("suite", "kernels", "sweep"),
    examples=(
        "--config=configs/llama3_8b.py --config.train.global_batch=32 --config.train.grad_accum=4",
        "--config=configs/llama3_8b.py:half --devices=1 --sweep='remat.policy=full,none'",
        "--kernels --out=runs/kernels",
        "--suite=node",
    ),
    notes="Every case runs in a process of its own. Exit codes: 0 measured, at least one case of a sweep; 1 nothing could be "
    "measured, or a check of the suite failed; 2 the command or config is wrong, nothing was started; 130 Ctrl-C, finished "
    "results are kept.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_command(COMMAND, argv, run, check=find_problems)


def find_problems(parsed: Parsed) -> list[Problem]:
    """Return the problems of options that do not fit together, and of --out. JAX is not started."""
    options, found = parsed.options, []
    if options["trace"] and not options["out"]:
        found.append(Problem("--trace", None, "there is no folder for it", "Add --out=DIR."))
    if parsed.mode in ("suite", "kernels") and (parsed.config.launch.overrides or "config" in parsed.given):
        found.append(Problem("--config", None, f"--{parsed.mode} does not use it", "Leave it out."))
    if options["out"]:
        found += writable("--out", Path(options["out"]).expanduser())
    return found


def run(parsed: Parsed) -> int:
    """Run a checked command line and return its exit code.

    Raises ConfigError if JAX cannot start the GPUs, if --sweep is malformed, or if the config or every combination of --sweep
    has problems.
    """
    options, console = parsed.options, make_console(bench.WIDTH)
    if parsed.mode in ("suite", "kernels") and (problems := train_step.gpu_problems()):
        raise ConfigError(problems)
    if parsed.mode == "suite":
        return node_suite.run(options["out"], options["json"], options["parts"], bool(options["smoke"]), console)
    if parsed.mode == "kernels":
        folder = bench.Folder(options["out"], options["json"], "kernels")
        return folder.run(lambda: kernels.run(options["kernels"].split(","), folder, console), "a kernel failed")
    count, launched = int(options["devices"]), parsed.config.launch
    request: dict[str, Any] = {"devices": count, "steps": int(options["steps"]), "warmup": int(options["warmup"])}
    request |= {"limit_s": int(options["limit"]) or None, "trace": bool(options["trace"])}
    base = [*launched.config_argv, *DATA[options["data"]]]
    cases, wrong = train_step.make_cases(base, launched.name, options["sweep"])
    refused = {} if wrong else train_step.refusals(cases, count)
    if len(refused) == len(cases):  # no case is possible: the command is wrong
        wrong += [p for problems in refused.values() for p in problems]
    if wrong := wrong or train_step.gpu_problems():
        raise ConfigError(wrong)
    folder = bench.Folder(options["out"], options["json"], parsed.mode or "steps")
    return folder.run(lambda: train_step.run_cases(cases, refused, request, folder, console), "no case was measured")
