"""The command line of plans: `python -m jaxtrain plan --config=FILE --topology=h200:8`."""

import dataclasses
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.commands.command import run_command
from jaxtrain.config import hardware, own_parts
from jaxtrain.config.command_line import FAILED, REFUSED, Args, Invalid, Parser, at_least, make_console, output_file, path_text
from jaxtrain.config.counts import read_count
from jaxtrain.config.schema import ConfigError, Problem
from jaxtrain.data import loading
from jaxtrain.plan import FOLDER, MOST, cudnn_library
from jaxtrain.runtime.startup import start_jax
from jaxtrain.step.validate_places import check_writable


def _load_factor(text: str) -> float:
    """Return the number of --experts-load."""
    try:
        if 1 <= float(text) < math.inf:
            return float(text)
    except ValueError:
        pass
    raise Invalid("must be a number from 1, which is an even load")


def _positive_number(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise Invalid("must be above 0")
    return value


def _token_count(text: str) -> int:
    try:
        return read_count(text)
    except ValueError as error:
        raise Invalid("must be a whole number of tokens, as 300B, 1.5T, 1e12 or 2_000_000") from error


PLAN_MODE = ("",)  # the plan of one layout
TOKEN_OPTIONS = ("price-per-gpu-hour", "failures-per-1000-gpu-days", "storage-gb-s")  # options that only --tokens uses


def parser() -> Parser:
    """Return the parser of the command line."""
    cli = Parser(
        "plan",
        "Plan memory, step time and communication: compile the train step of a config for a machine that need "
        "not be present. Nothing is run, and no GPU, driver or CUDA library is needed, except by --calibrate.",
        config=True,
        modes=("shardings", "search", "calibrate"),
        examples=(
            "--config=configs/llama3_8b.py --topology=h200:8",
            "--config=configs/llama3_70b.py:gpus=64 --topology=h200:8x8 --html=plan.html",
            "--config=configs/llama3_8b.py --topology=h200:8 --search --budget=600",
            "--config=configs/llama3_8b.py:gpus=64 --topology=h200:8x8 --tokens=15T --price-per-gpu-hour=2.5",
            "diff before.json after.json",
            "diff configs/llama3_8b.py configs/llama3_8b.py:long --topology=h200:8",
        ),
        notes="Exit codes: 0 planned, whether it fits or not; 2 the command or config is wrong; 1 no step could be compiled or "
        "read, or a file not written; 130 Ctrl-C, after the results so far. Of diff: 0 nothing changed; 1 something changed; 2 "
        "the command, a plan or a config is wrong, or no step could be compiled or read.",
    )
    cli.option(
        "topology",
        "the machine: h200:8 is one node of 8 H200s, h100:8x16 are 16 nodes of 8; default the GPUs of this machine. Chips: "
        + ", ".join(sorted(p.stem for p in (Path(__file__).parents[1] / "plan" / "specs").glob("*.txtpb"))),
        "CHIP:GPUS[xNODES]",
        example="h200:8",
        modes=("", "shardings", "search"),
    )
    cli.option(
        "tokens",
        "also the whole run of so many tokens: days, GPU hours, failures, and the interval of saves that loses least",
        "N",
        type=_token_count,
        example="15T",
        modes=PLAN_MODE,
    )
    cli.option(
        "price-per-gpu-hour",
        "in any currency: the money of --tokens",
        "X",
        type=_positive_number,
        example="2.5",
        modes=PLAN_MODE,
    )
    cli.option(
        "failures-per-1000-gpu-days",
        "unexpected ends of the run of --tokens; default 0.47, by Llama 3's report",
        "X",
        type=_positive_number,
        example="0.47",
        modes=PLAN_MODE,
    )
    cli.option(
        "storage-gb-s",
        "GB/s of all nodes together at which a save of --tokens reaches its storage, as the log of a run prints it; default 1 "
        "for each node",
        "X",
        type=_positive_number,
        example="8",
        modes=PLAN_MODE,
    )
    cli.option("json", "all results of the plan, as JSON", "FILE", type=output_file, modes=("", "search"))
    cli.option("html", "the plan as one page", "FILE", type=output_file, modes=PLAN_MODE)
    cli.option("hlo", "the scheduled program behind all figures", "FILE", type=output_file, modes=PLAN_MODE)
    cli.option(
        "cudnn",
        "source of the workspace of cuDNN's attention: formula, or cuDNN's library, if the extra plan-cudnn is installed; "
        "auto prefers the library",
        "auto|formula|library",
        "auto",
        choices=("auto", "formula", "library"),
        example="formula",
        modes=PLAN_MODE,
    )
    cli.option(
        "experts-load",
        "load of the busiest expert of each layer over an even load; default 1.0",
        "L",
        1.0,
        type=_load_factor,
        example="1.5",
        modes=PLAN_MODE,
    )
    cli.option(
        "shardings",
        "instead: the sharding of every array, without compiling; --shardings=mlp and --shardings=kind=parameter filter",
        "FILTER",
        const="all",
    )
    cli.option(
        "search",
        "instead: find the fastest layout that fits: a few are compiled, the most promising first",
    )
    cli.option(
        "budget",
        "seconds of --search; 0: no limit",
        "SECONDS",
        0,
        type=at_least(0),
        example="100",
        modes=("search",),
    )
    cli.option(
        "most",
        f"plans of a --search, with those in its cache; default {MOST}",
        "N",
        MOST,
        type=at_least(1),
        modes=("search",),
    )
    cli.option(
        "jobs", "compiles at a time; default: the number of cores", "N", 0, type=at_least(1), example="4", modes=("search",)
    )
    cli.option(
        "cache",
        f"folder of earlier plans; default {FOLDER}; '' keeps none",
        "DIR",
        FOLDER,
        type=path_text,
        may_be_empty=True,
        modes=("search",),
    )
    cli.option("calibrate", "instead: measure the GPUs of this machine; plans for them use these rates from then on")
    diff = cli.command("diff", "what changed between two plans: step time, memory, collectives, kernels, arrays and settings")
    diff.argument("a", "a file of plan --json, or a config", "A", type=path_text)
    diff.argument("b", "the plan to compare it with", "B", type=path_text)
    diff.option("topology", "the machine that configs are compiled for", "CHIP:GPUS[xNODES]", example="h200:8")
    diff.option("json", "the differences, as JSON", "FILE", type=output_file)
    return cli


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    return run_command(parser(), argv, _act, check=_find_problems)


def _find_diff_problems(args: Args) -> list[Problem]:
    """Return the problems of the configs of a diff, which are loaded, and of its topology."""
    args.configs, problems = {}, []
    for name in ("A", "B"):
        text = getattr(args, name.lower())
        if re.search(r"\.py(:|$)", text):
            loaded = args.configs[name] = loading.load_config([f"--config={text}"])
            problems += [dataclasses.replace(p, key=name if p.key == "--config" else p.key) for p in loaded.problems]
    if args.configs and "topology" not in args.explicit:
        rule = f"is missing, and {' and '.join(args.configs)} must be compiled for a machine"
        problems.append(Problem("--topology", None, rule, "Name one, as --topology=h200:8."))
    elif not args.configs and "topology" in args.explicit:
        problems.append(Problem("--topology", args.topology, "both plans are compiled, and do not use it", "Leave it out."))
    return problems


def _find_problems(args: Args) -> list[Problem]:
    """Return the problems of the command line that can be found before JAX is imported."""
    if args.command:
        return _find_diff_problems(args)
    problems = []
    is_local, host = not args.topology, hardware.probe()
    if args.mode == "calibrate":
        unused_args = ["--config"] * (args.line.file is not None) + [f"--config.{key}" for key, _ in args.line.overrides]
        if unused_args:
            problems.append(Problem(unused_args[0], None, "--calibrate does not use it", "Leave it out."))
        return [*problems, *([host.problem] if host.problem else [])]
    if not args.mode and "tokens" not in args.explicit:
        unused = [f"--{name}" for name in TOKEN_OPTIONS if name in args.explicit]
        problems += [Problem(key, None, "only --tokens uses it", "Add --tokens=1e12, or leave it out.") for key in unused]
    if args.cache and "cache" in args.explicit:
        problems += check_writable("--cache", Path(args.cache).expanduser())
    written: dict[Path, str] = {}
    for name in ("json", "html", "hlo"):
        file = getattr(args, name)
        if file and (other_option := written.setdefault(Path(file).expanduser().absolute(), name)) != name:
            problems.append(Problem(f"--{name}", file, f"--{other_option} writes this file", "Name another file."))
    model, load = args.loaded.run.model, args.experts_load
    if args.loaded.file_read and load > 1:
        if not model.num_experts:
            problems.append(Problem("--experts-load", load, "the model has no experts", "Leave it out."))
        elif load > (max_load := model.num_experts / model.experts_per_token):
            rule = f"an expert that every token chooses has {max_load:g} times an even load, the maximum"
            problems.append(Problem("--experts-load", load, rule, f"For example --experts-load={min(1.5, max_load):g}."))
    if is_local and host.kind != "gpu" and "topology" not in args.explicit and not args.strays:
        rule = "no machine is named, and this one has no GPU to plan for"
        problems.append(Problem("--topology", None, rule, "Name one, as --topology=h200:8."))
    elif is_local and host.problem:
        problems.append(host.problem)
    return problems


def _act(args: Args) -> int:
    """Start JAX, run the parsed command, and return its exit code."""
    is_local = not args.topology and not args.command
    cudnn = None
    if not args.mode and args.topology:  # before JAX starts: XLA searches for its libraries only once
        cudnn = _load_cudnn("auto" if args.command else args.cudnn)
    # A described machine needs only the compiler, and must not allocate memory of a present GPU that may be busy.
    if not is_local:
        os.environ["JAX_PLATFORMS"] = "cpu"
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPUs may be busy, and little runs on them
    start_jax(hardware.probe())
    import jax

    from jaxtrain.node.calibrate import CalibrationError, calibrate_gpus
    from jaxtrain.plan import topology as machines
    from jaxtrain.plan.program.hlo import HloError

    try:
        if args.mode == "calibrate":
            calibrate_gpus(console=make_console())
            return 0
        with own_parts.refusing():
            if not args.command:
                return _run_mode(args, cudnn)
            from jaxtrain.report import planning

            return planning.compare_plans(args, machines.parse_topology(args.topology) if args.topology else None, cudnn)
    except ConfigError:
        raise
    except HloError as error:
        return _fail(args, f"the compiled program cannot be read: {error}")
    except machines.TopologyError as error:
        topology = args.topology
        rule = str(error).removeprefix(f"topology {topology!r}: ").rstrip(".")
        raise ConfigError([Problem("--topology", topology, rule, "For example --topology=h200:8.")]) from error
    except (CalibrationError, ValueError) as error:
        raise ConfigError([Problem("cannot plan", None, str(error).rstrip("."), "")]) from error
    except (jax.errors.JaxRuntimeError, RuntimeError, MemoryError) as error:
        return _fail(args, f"the train step could not be compiled: {type(error).__name__}: {error}")


def _run_mode(args: Args, cudnn: cudnn_library.CudnnLibrary | None) -> int:
    """Run the selected mode (any mode except --calibrate), and return the exit code."""
    from jaxtrain.plan import topology as machines
    from jaxtrain.plan.fit import training_check
    from jaxtrain.plan.search_cache import PlanCache
    from jaxtrain.report import planning
    from jaxtrain.report.shardings import run_shardings

    run, launched = args.loaded.run, args.loaded.launch
    topology = machines.parse_topology(args.topology) if args.topology else machines.local_topology()
    notes = [
        launched.size_note(topology.total),
        run.ramp.note,
        *(note for note in launched.notes if note.startswith("train.epochs")),
    ]
    for note in filter(None, notes):
        print(note, file=sys.stderr)
    check = training_check(topology, f"--topology={topology.name}")
    job = planning.PlanJob(args, topology, check, PlanCache(args.cache) if args.cache else None, make_console())
    if args.mode == "search":
        machines.devices(machines.parse_topology(topology.name))  # fail early: other processes compile by its name
        return planning.search_layouts(job)
    if problems := check(run):
        raise ConfigError(list(problems))
    if args.mode == "shardings":
        name, _, kind = ("" if args.shardings == "all" else args.shardings).partition("kind=")
        table = run_shardings(run, topology).filter(name, kind)
        print(f"{table}\n\n{table.sums()}")
        return 0
    if planning.cannot_fit(job):
        return 0
    return planning.plan_layout(job, cudnn)


def _load_cudnn(source: str) -> cudnn_library.CudnnLibrary | None:
    """Return cuDNN's library for --cudnn=`source`; None if a formula is to compute workspaces.

    If the library cannot be loaded, "auto" returns None and "library" raises ConfigError.
    """
    if source == "formula":
        return None
    try:
        return cudnn_library.load_cudnn()
    except cudnn_library.LibraryError as error:
        if source == "auto":
            return None
        raise ConfigError([Problem("--cudnn", "library", str(error), "Write --cudnn=formula.")]) from error


def _fail(args: Args, why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return REFUSED if args.command else FAILED  # of a diff, 1 says that something changed
