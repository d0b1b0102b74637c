"""The command line of plans: `python -m jaxtrain.plan --config=FILE --topology=h200:8`. See a run before paying for it."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rich.console

from jaxtrain import hardware, launch
from jaxtrain.config import ConfigError, Problem, RunConfig
from jaxtrain.hardware import Devices
from jaxtrain.launch import Loaded
from jaxtrain.startup import start_jax
from jaxtrain.validate import validate_step

INTERRUPTED = 130
WIDTH = 118  # of the report where the output is not a terminal

HELP = """\
Will it fit, how fast will it be, and what moves? Compiles the train step for a machine that need not be there.

  python -m jaxtrain.plan --config=FILE[:variant] [--config.KEY=VALUE ...] --topology=CHIP:GPUS[xNODES] [options]

  --config, --config.KEY   as for training
  --topology=h200:8        the machine: 8 H200s in one node; h100:8x16 is 16 nodes of 8. On a machine with GPUs, the default
                           is that machine. Chips: {chips}
  --json=FILE              everything the plan found, for programs
  --html=FILE              one page with pictures
  --hlo=FILE               the scheduled program that all of it was read from
  --why                    take back each choice that saves memory, and say what the step would need without it
  --no-fit                 where the step does not fit, do not look for what would make it fit
  --shardings[=FILTER]     instead: how every array is split, without compiling; as --shardings=mlp or kind=parameter
  --search                 instead: find the layout with the least step time among those that fit
  --budget=SECONDS         of --search, --what-fits and of the search for what would fit; 0: no limit
  --jobs=N                 compiles at a time; default: as many as cores
  --cache=DIR              plans of earlier searches; default {cache}; '' keeps none
  --golden[=write]         instead: compare the shipped configs with the plans kept in tests/golden, or renew those
  --published[=FILE.md]    instead: plan runs whose step times were published, and compare
  --what-fits[=FILE.md]    instead: well-known models on 1 to 128 GPUs
  --calibrate              instead: measure the GPUs of this machine; plans for them then use what was measured
  --help                   this text

  python -m jaxtrain.plan --config=configs/llama3_8b.py --topology=h200:8
  python -m jaxtrain.plan --config=configs/llama3_70b.py:gpus=64 --topology=h200:8x8 --html=plan.html
  python -m jaxtrain.plan --config=configs/llama3_8b.py --topology=h200:8 --search --budget=600

Nothing is run, and no GPU, driver or CUDA library is needed, but for --calibrate.
Exit codes: 0 planned, whether it fits or not; 2 the command or config is wrong; 1 the step could not be compiled or read, or a
golden plan differs; 130 Ctrl-C.
"""

CACHE = "~/.cache/jaxtrain/plans"
OPTIONS = {"topology": "", "json": "", "html": "", "hlo": "", "budget": "0", "jobs": "0", "cache": CACHE}
SWITCHES = dict.fromkeys(("why", "no-fit", "search", "calibrate"), "yes") | {
    "shardings": "all",
    "golden": "compare",
    "published": "show",
    "what-fits": "show",
}
INSTEAD = ("shardings", "search", "golden", "published", "what-fits", "calibrate")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(HELP.format(chips=", ".join(_chips()), cache=CACHE), end="")
        return 0
    loaded = launch.load(argv, OPTIONS, SWITCHES)
    problems = [*loaded.problems, *_options(loaded.options)]
    here = not loaded.options["topology"]
    asked = next((name for name in INSTEAD if loaded.options[name]), "")
    needs_config = asked in ("", "shardings", "search")
    found = hardware.probe()
    if here and needs_config and found.kind != "gpu":
        rule = "no machine is named, and this one has no GPU to plan for"
        problems.append(Problem("--topology", None, rule, "Name one, as --topology=h200:8."))
    if problems:
        return launch.report(problems)
    # Imported from here on: everything above must answer in a moment. A described machine needs the compiler only, which a
    # GPU that is present and busy must not be asked for.
    describe_only = not here or not (needs_config or asked == "calibrate")
    if describe_only:
        os.environ["JAX_PLATFORMS"] = "cpu"
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPUs may be busy, and little is run on them
    start_jax(hardware.probe())
    console = rich.console.Console()
    if not console.is_terminal:
        console = rich.console.Console(width=WIDTH)
    try:
        return run(loaded, asked, console)
    except KeyboardInterrupt:
        print("\nCtrl-C: stopped.", file=sys.stderr)
        return INTERRUPTED


def _chips() -> list[str]:
    specs = Path(__file__).parent / "specs"
    return sorted(p.stem for p in specs.glob("*.txtpb"))


def _options(options: dict[str, str]) -> list[Problem]:
    problems = []
    for name in ("budget", "jobs"):
        text = options[name]
        if not text.isdecimal():
            problems.append(Problem(f"--{name}", text, "must be a whole number, 0 or more", f"For example --{name}=600."))
    asked = [f"--{name}" for name in INSTEAD if options[name]]
    if len(asked) > 1:
        problems.append(Problem(" ".join(asked), None, "each of these replaces the plan", "Give one of them."))
    if asked:
        others = [f"--{name}" for name in ("html", "hlo", "why") if options[name]]
        if options["json"] and asked != ["--search"]:
            others.append("--json")
        if others:
            problems.append(Problem(" ".join(others), None, f"belongs to a plan, and {asked[0]} makes none", "Leave it out."))
    if options["golden"] not in ("", "compare", "write"):
        problems.append(Problem("--golden", options["golden"], "no such action", "Write --golden or --golden=write."))
    for name in ("why", "no-fit", "search", "calibrate"):
        if options[name] not in ("", "yes"):
            problems.append(Problem(f"--{name}", options[name], "takes no value", f"Write --{name}."))
    for name in ("json", "html", "hlo"):
        folder = Path(options[name]).expanduser().absolute().parent
        if options[name] and not folder.is_dir():
            problems.append(Problem(f"--{name}", options[name], f"there is no folder {folder}", "Make it, or name another."))
    return problems


def run(loaded: Loaded, asked: str, console: rich.console.Console) -> int:
    """Everything after the command line has been read and JAX started."""
    import jax

    from jaxtrain.kernels.attention import Unsupported
    from jaxtrain.plan import topology as machines
    from jaxtrain.plan.assignment import AssignmentError
    from jaxtrain.plan.cache import Cache
    from jaxtrain.plan.calibrate import CalibrationError
    from jaxtrain.plan.hlo import HloError
    from jaxtrain.sharding import LayoutError

    options = loaded.options
    cache = Cache(options["cache"]) if options["cache"] else None
    jobs, budget = int(options["jobs"]), float(options["budget"])
    try:
        if asked == "calibrate":
            from jaxtrain.plan import calibrate

            calibrate.run(console=console)
            return 0
        if asked == "golden":
            from jaxtrain.plan import golden

            return golden.run(console, write=options["golden"] == "write", jobs=jobs, cache=cache)
        if asked in ("published", "what-fits"):
            from jaxtrain.plan import published, what_fits

            out = None if options[asked] == "show" else Path(options[asked])
            if asked == "published":
                return published.run(console, out, cache=cache, jobs=jobs)
            return what_fits.run(console, out, cache=cache, jobs=jobs, budget_s=budget)
        topology = machines.parse(options["topology"]) if options["topology"] else machines.here()
        described = Devices(
            "gpu", topology.device_kind, topology.total, topology.memory_gib, f"--topology={topology.name}", topology.gpu.sm
        )
        check: Callable[[RunConfig], list[Problem]] = lambda run: validate_step(run, described)  # noqa: E731
        if problems := check(loaded.run):
            return launch.report(problems)
        if asked == "shardings":
            from jaxtrain.plan.shardings import print_table

            print_table(loaded.run, topology, "" if options["shardings"] == "all" else options["shardings"], console)
            return 0
        if asked == "search":
            return _search(loaded, topology, check, cache, jobs, budget, console)
        return _plan(loaded, topology, check, cache, jobs, budget, console)
    except ConfigError as error:
        return launch.report(error.problems)
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
    loaded: Loaded, topology: Any, check: Any, cache: Any, jobs: int, budget: float, console: rich.console.Console
) -> int:
    from jaxtrain.plan import fit, fit_report, page, report
    from jaxtrain.plan.compile import compile_step
    from jaxtrain.plan.make import read_plan
    from jaxtrain.plan.published import ratio_range
    from jaxtrain.plan.result import to_json

    run, options = loaded.run, loaded.options
    busy = console.status(f"compiling the train step for {topology.name} ...")
    with busy if console.is_terminal else contextlib.nullcontext():
        compiled = compile_step(run, topology)
        plan = read_plan(compiled, run, topology, name=_name(loaded), overrides=_overrides(loaded))
    if options["hlo"]:
        Path(options["hlo"]).expanduser().write_text(compiled.text)
    del compiled
    settings = {"check": check, "cache": cache, "jobs": jobs, "budget_s": budget}
    if not plan.fits and not options["no-fit"]:
        with fit_report.live(console) as progress:
            advice = fit.advise(run, plan, topology, **settings, on_progress=progress)
        plan = fit_report.with_hints(plan, advice)
        fit_report.show_advice(advice, console)
    report.text(plan, console, published=ratio_range(), steps=run.train.steps)
    if options["why"]:
        with fit_report.live(console) as progress:
            reasons = fit.why(run, plan, topology, **settings, on_progress=progress)
        plan = fit_report.with_hints(plan, reasons)
        fit_report.show_reasons(reasons, console)
    if options["json"]:
        Path(options["json"]).expanduser().write_text(json.dumps(to_json(plan), indent=1) + "\n")
    if options["html"]:
        Path(options["html"]).expanduser().write_text(page.html(plan, ratio_range(), steps=run.train.steps))
    return 0


def _search(
    loaded: Loaded, topology: Any, check: Any, cache: Any, jobs: int, budget: float, console: rich.console.Console
) -> int:
    from jaxtrain.plan import search_report
    from jaxtrain.plan.search import search

    with search_report.live(console) as progress:
        found = search(loaded.run, _name(loaded), topology, budget, check=check, jobs=jobs, cache=cache, on_progress=progress)
    search_report.show(found, console)
    if loaded.options["json"]:
        tree = search_report.to_json(found)
        Path(loaded.options["json"]).expanduser().write_text(json.dumps(tree, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
