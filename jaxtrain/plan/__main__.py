"""The command line of plans: `python -m jaxtrain.plan --config=FILE --topology=h200:8`. See a run before paying for it."""

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console

from jaxtrain import hardware, launch
from jaxtrain.command_line import INTERRUPTED, Command, Option, Parsed, make_console, run_command
from jaxtrain.config import ConfigError, Problem
from jaxtrain.launch import Loaded
from jaxtrain.plan import cudnn_library
from jaxtrain.plan.search import FOLDER, MOST
from jaxtrain.startup import start_jax

PLAN, SEARCH = ("",), ("", "search")  # modes of options


def _chips() -> str:
    return ", ".join(sorted(path.stem for path in (Path(__file__).parent / "specs").glob("*.txtpb")))


def _check_load(text: str) -> str:
    with contextlib.suppress(ValueError):
        if 1 <= float(text) < math.inf:
            return ""
    return "must be a number from 1, which is an even load"


def _check_cache(text: str) -> str:
    folder = Path(text).expanduser().absolute()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if above.is_dir() and os.access(above, os.W_OK):
        return ""
    return f"{above} is {'not writable' if above.is_dir() else 'not a folder'}"


COMMAND = Command(
    "plan",
    "Compile the train step for a machine that need not be there: does it fit, how fast is it, and what does it communicate?",
    (
        Option(
            "topology",
            "the machine: h200:8 is 8 H200s in one node, h100:8x16 is 16 nodes of 8. On a machine with GPUs, the default is "
            f"that machine. Chips: {_chips()}. Runs over several nodes were tried on CPUs alone",
            "CHIP:GPUS[xNODES]",
            modes=(*SEARCH, "shardings"),
        ),
        Option("json", "write the whole plan, for programs", "FILE", writes=True, modes=SEARCH),
        Option("html", "write one page with pictures", "FILE", writes=True, modes=PLAN),
        Option("hlo", "write the scheduled HLO that the plan was read from", "FILE", writes=True, modes=PLAN),
        Option("why", "plan it without each setting that saves memory, one at a time", modes=PLAN),
        Option(
            "traffic",
            "bytes of memory traffic outside of GEMMs and attention, part by part, beside the least possible",
            modes=PLAN,
        ),
        Option(
            "cudnn",
            "source of the workspace of cuDNN's attention: formula; library: cuDNN itself, if the extra plan-cudnn is "
            "installed; auto: library, or formula without it",
            "SOURCE",
            default="auto",
            choices=("auto", "formula", "library"),
            example="formula",
            modes=PLAN,
        ),
        Option(
            "experts-load",
            "tokens of the busiest expert of each layer, over its even share; default 1.0",
            "L",
            default="1.0",
            check=_check_load,
            example="1.5",
            modes=PLAN,
        ),
        Option("no-fit", "compile also what cannot fit by formula, and do not search for settings that fit", modes=PLAN),
        Option(
            "shardings",
            "instead: the sharding of every array, without compiling; as --shardings=mlp or kind=parameter",
            "FILTER",
            bare="all",
        ),
        Option(
            "search",
            "instead: find the fastest layout that fits, by formula at once and then compiled; of those equal within 5%, the "
            "one least on links",
        ),
        Option(
            "budget",
            "limit of --search, --why and of the search for settings that fit; 0: none",
            "SECONDS",
            default="0",
            least=0,
            example="100",
            modes=SEARCH,
        ),
        Option(
            "most",
            f"plans of a --search, those in its cache included; default {MOST}",
            "N",
            default=str(MOST),
            least=1,
            modes=("search",),
        ),
        Option("jobs", "compilations at a time; default: one for each core", "N", default="0", least=0, modes=SEARCH),
        Option(
            "cache",
            f"folder of finished plans; default {FOLDER}; none: keep none",
            "DIR",
            default=FOLDER,
            check=_check_cache,
            example="none",
            modes=SEARCH,
        ),
        Option("calibrate", "instead: measure the GPUs of this machine. Plans for them then use the measured rates"),
    ),
    config=True,
    modes=("shardings", "search", "calibrate"),
    examples=(
        "--config=configs/llama3_8b.py --topology=h200:8",
        "--config=configs/llama3_70b.py:gpus=64 --topology=h200:8x8 --html=plan.html",
        "--config=configs/llama3_8b.py --topology=h200:8 --search --budget=600",
    ),
    notes="Nothing is run, and no GPU, driver or CUDA library is needed, but for --calibrate.\n\n"
    "Exit codes: 0 planned, whether it fits or not; 2 the command or config is wrong; 1 no step could be compiled or read, or "
    "a file not written; 130 Ctrl-C, after printing the plans so far.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_command(COMMAND, argv, _act, check=_check)


def _check(parsed: Parsed) -> list[Problem]:
    """Return the problems that need the config or the machine, before anything is imported or compiled."""
    options, loaded, problems = parsed.options, parsed.config, []
    if parsed.mode == "calibrate" and (loaded.launch.overrides or "config" in parsed.given):
        problems.append(Problem("--config", None, "--calibrate does not use it", "Leave it out."))
    load, m = options["experts-load"], loaded.run.model
    if "experts-load" in parsed.given and loaded.file_read and not _check_load(load):
        if not m.num_experts:
            problems.append(Problem("--experts-load", load, "the model has no experts", "Leave it out."))
        elif float(load) > (most := m.num_experts / m.experts_per_token):
            rule = f"an expert that every token chooses draws {most:g} even shares, and none can draw more"
            problems.append(Problem("--experts-load", load, rule, f"For example --experts-load={min(1.5, most):g}."))
    if not options["topology"]:
        found = hardware.probe()
        if parsed.mode != "calibrate" and found.kind != "gpu":
            rule = "no machine is named, and this one has no GPU to plan for"
            problems.append(Problem("--topology", None, rule, "Name one, as --topology=h200:8."))
        elif found.problem:
            problems.append(found.problem)
    return problems


def _act(parsed: Parsed) -> int:
    cudnn = None
    if parsed.mode == "" and parsed.options["topology"]:
        cudnn = _load_cudnn(parsed.options["cudnn"])
    # JAX is imported from here on. A described machine needs the compiler alone, and must not start the GPUs of this one.
    if parsed.options["topology"]:
        os.environ["JAX_PLATFORMS"] = "cpu"
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPUs may be busy, and little is run on them
    start_jax(hardware.probe())
    return run(parsed, make_console(), cudnn)


def _load_cudnn(source: str) -> cudnn_library.Library | None:
    """Return cuDNN if it computes the workspace. Before JAX starts: XLA looks for its libraries once. Raises ConfigError."""
    if source == "formula":
        return None
    try:
        return cudnn_library.load()
    except cudnn_library.LibraryError as error:
        if source == "auto":
            return None
        raise ConfigError([Problem("--cudnn", source, str(error), "Write --cudnn=formula.")]) from error


def run(parsed: Parsed, console: rich.console.Console, cudnn: cudnn_library.Library | None = None) -> int:
    """Plan, search, print shardings or calibrate, and return the exit code. JAX has started."""
    import jax

    from jaxtrain.kernels.attention import Unsupported
    from jaxtrain.plan import topology as machines
    from jaxtrain.plan.calibrate import CalibrationError
    from jaxtrain.plan.program.assignment import AssignmentError
    from jaxtrain.plan.program.hlo import HloError
    from jaxtrain.plan.search.cache import Cache
    from jaxtrain.plan.search.space import training_check
    from jaxtrain.sharding import LayoutError

    options, loaded = parsed.options, parsed.config
    cache = None if options["cache"] == "none" else Cache(options["cache"])
    jobs, budget = int(options["jobs"]), float(options["budget"])
    try:
        if parsed.mode == "calibrate":
            from jaxtrain.plan import calibrate

            calibrate.run(console=console)
            return 0
        topology = machines.parse(options["topology"]) if options["topology"] else machines.here()
        check = training_check(topology, f"--topology={topology.name}")
        if not parsed.mode and _refused(parsed, topology, console):
            return 0
        if problems := check(loaded.run):
            return launch.report(problems)
        if parsed.mode == "shardings":
            from jaxtrain.plan.shardings import print_table

            print_table(loaded.run, topology, "" if options["shardings"] == "all" else options["shardings"], console)
            return 0
        if parsed.mode == "search":
            machines.devices(machines.parse(topology.name))  # other processes compile for it, by its name
            return _search(parsed, topology, check, cache, jobs, budget, console)
        return _plan(parsed, topology, check, cache, jobs, budget, console, cudnn)
    except ConfigError:
        raise
    except (LayoutError, Unsupported, machines.TopologyError, CalibrationError, ValueError) as error:
        if isinstance(error, HloError | AssignmentError):
            return _failed(f"the compiled program cannot be read: {error}")
        return launch.report([Problem("cannot plan", None, str(error).rstrip("."), "")])
    except (jax.errors.JaxRuntimeError, RuntimeError, MemoryError) as error:
        return _failed(f"the train step could not be compiled: {type(error).__name__}: {error}")


def _failed(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


def _name(loaded: Loaded) -> str:
    """The config as it stands on the command line."""
    at = loaded.launch
    return f"{at.config_file}:{at.variant}" if at.variant else at.config_file


def _overrides(loaded: Loaded) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in loaded.launch.overrides)


def _plan(
    parsed: Parsed,
    topology: Any,
    check: Any,
    cache: Any,
    jobs: int,
    budget: float,
    console: rich.console.Console,
    cudnn: cudnn_library.Library | None,
) -> int:
    from jaxtrain.page.sections import print_sections
    from jaxtrain.plan.compile import compile_step
    from jaxtrain.plan.make import read_plan
    from jaxtrain.plan.program import traffic
    from jaxtrain.plan.report import page, search_report, sections, terminal
    from jaxtrain.plan.result import to_json
    from jaxtrain.plan.search.search import search
    from jaxtrain.plan.topology import CHIPS

    loaded, options = parsed.config, parsed.options
    run = loaded.run
    busy = console.status(f"compiling the train step for {topology.name} ...")
    with busy if console.is_terminal else contextlib.nullcontext():
        compiled = compile_step(run, topology, cudnn)
        how = {"name": _name(loaded), "overrides": _overrides(loaded)}
        plan = even = read_plan(compiled, run, topology, **how)
        if (load := float(options["experts-load"])) > 1:  # the searches below assume an even load
            plan = read_plan(compiled, run, topology, **how, experts_load=load)
    if options["hlo"]:
        Path(options["hlo"]).expanduser().write_text(compiled.text)
    moved = traffic.parts(compiled.run, compiled.program, plan.kernels) if options["traffic"] else ()
    del compiled
    terminal.print_plan(plan, console, steps=run.train.steps)
    if moved:
        print_sections([sections.traffic_section(moved)], console)

    interrupted = False
    if topology.chip not in CHIPS:
        if (not plan.fits and not options["no-fit"]) or options["why"]:
            console.print(
                f"\nnothing more is compiled: {topology.chip} has no description in jaxtrain/plan/specs", markup=False
            )
    elif not plan.fits and not options["no-fit"]:
        settings = {"check": check, "cache": cache, "jobs": jobs, "budget_s": budget, "own": even}
        with search_report.watch(console) as progress:
            found = search(run, _name(loaded), topology, "fit", **settings, on_progress=progress)
        search_report.show(found, console)
        plan = dataclasses.replace(plan, hints=(*plan.hints, *search_report.hints(found)))
        interrupted = found.ended == "interrupted"
    elif options["why"] and plan.fits:
        lines, interrupted = _why(loaded, even, topology, check, cache, jobs, budget, console)
        plan = dataclasses.replace(plan, hints=(*plan.hints, *lines))
    if options["why"] and not plan.fits:
        console.print("\n--why needs a plan that fits. This one does not.")
    if options["json"]:
        Path(options["json"]).expanduser().write_text(json.dumps(to_json(plan), indent=1) + "\n")
    if options["html"]:
        Path(options["html"]).expanduser().write_text(page.html(plan, steps=run.train.steps))
    return INTERRUPTED if interrupted else 0


def _refused(parsed: Parsed, topology: Any, console: rich.console.Console) -> bool:
    """Print that a config cannot fit by formula, and what would. Return False if it may fit, or if its program is asked for."""
    from jaxtrain.plan.report import search_report
    from jaxtrain.plan.search.search import refuse

    options, loaded = parsed.options, parsed.config
    if any(options[name] for name in ("no-fit", "hlo", "html", "traffic")):
        return False
    why = refuse(loaded.run, topology)
    if why is None:
        return False
    lines = search_report.show_refusal(why, _name(loaded), _overrides(loaded), topology, console)
    if options["json"]:
        tree = {"config": _name(loaded), "topology": topology.name, "fits": False, "compiled": False}
        tree |= {"least_gib": why.least_gib, "state_gib": why.state_gib, "usable_gib": why.usable_gib, "hints": lines}
        Path(options["json"]).expanduser().write_text(json.dumps(tree, indent=1) + "\n")
    return True


def _why(
    loaded: Loaded, plan: Any, topology: Any, check: Any, cache: Any, jobs: int, budget: float, console: rich.console.Console
) -> tuple[tuple[str, ...], bool]:
    """Plan a config without each of its savings. Return what to add to its hints, and whether Ctrl-C ended it."""
    from jaxtrain.plan.report import search_report
    from jaxtrain.plan.search.parallel import Outcome, Request, plan_many
    from jaxtrain.plan.search.search import savings
    from jaxtrain.plan.search.space import changes, with_overrides

    found, outcomes, interrupted = savings(loaded.run, check), {}, False
    requests = {
        choice: Request(with_overrides(loaded.run, o), topology, _name(loaded), changes(loaded.run, o), plan.rates)
        for choice, o in found.items()
    }
    try:
        plan_many(requests, jobs=jobs, budget_s=budget, cache=cache, on_done=outcomes.__setitem__)
    except KeyboardInterrupt:
        interrupted = True
        outcomes = dict.fromkeys(found, Outcome(None, "stopped", "interrupted")) | outcomes
    return search_report.show_savings(plan, found, outcomes, loaded.run, console), interrupted


def _search(
    parsed: Parsed, topology: Any, check: Any, cache: Any, jobs: int, budget: float, console: rich.console.Console
) -> int:
    from jaxtrain.plan.report import search_report
    from jaxtrain.plan.search.search import search

    loaded, options = parsed.config, parsed.options
    with search_report.watch(console) as progress:
        found = search(
            loaded.run,
            _name(loaded),
            topology,
            budget_s=budget,
            most=int(options["most"]),
            check=check,
            cache=cache,
            jobs=jobs,
            on_ranked=lambda ranked: search_report.show_ranked(ranked, console),
            on_progress=progress,
        )
    search_report.show(found, console)
    if options["json"]:
        tree = search_report.to_json(found)
        Path(options["json"]).expanduser().write_text(json.dumps(tree, indent=1) + "\n")
    if found.ended == "interrupted":
        return INTERRUPTED
    return 0 if found.best else 1


if __name__ == "__main__":
    sys.exit(main())
