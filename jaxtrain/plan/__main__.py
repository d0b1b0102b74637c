"""The command line of plans: `python -m jaxtrain.plan --config=FILE --topology=h200:8`. See a run before paying for it."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rich.console

from jaxtrain import hardware, launch
from jaxtrain.commands import spelled
from jaxtrain.config import ConfigError, Problem
from jaxtrain.launch import Loaded
from jaxtrain.plan import cudnn_library
from jaxtrain.plan.search import FOLDER, MOST
from jaxtrain.startup import start_jax

INTERRUPTED = 130
WIDTH = 118  # of the report where the output is not a terminal

HELP = """\
Will it fit, how fast will it be, and what moves? Compiles the train step for a machine that need not be there.

  python -m jaxtrain.plan --config=FILE[:variant] [--config.KEY=VALUE ...] --topology=CHIP:GPUS[xNODES] [options]

  --config, --config.KEY   as for training
  --topology=h200:8        the machine: 8 H200s in one node; h100:8x16 is 16 nodes of 8. On a machine with GPUs, the default
                           is that machine. Chips: {chips}
                           Runs over several nodes were tried on CPUs alone
  --json=FILE              everything the plan found, for programs
  --html=FILE              one page with pictures
  --hlo=FILE               the scheduled program that all of it was read from
  --why                    take back each choice that saves memory, and say what the step would need without it
  --traffic                bytes moved outside of GEMMs and attention, part by part, beside the least that could be
  --cudnn=auto             who tells the workspace of cuDNN's attention: formula; library, cuDNN itself, where the extra
                           plan-cudnn is installed; auto is library where it can be had and formula elsewhere
  --experts-load=L         the busiest expert of each layer draws L times its even share; default 1.0
  --no-fit                 where the step does not fit, do not look for what would make it fit
  --shardings[=FILTER]     instead: how every array is sharded, without compiling; as --shardings=mlp or kind=parameter
  --search                 instead: find the fastest layout that fits; of those equal within 5%, the one least on links
  --budget=SECONDS         of --search, --why and of the search for what would fit; 0: no limit
  --most=N                 plans of a --search, those it finds in its cache included; default {most}
  --jobs=N                 compiles at a time; default: as many as cores
  --cache=DIR              plans of earlier searches; default {cache}; '' keeps none
  --calibrate              instead: measure the GPUs of this machine; plans for them then use what was measured
  --help                   this text

  python -m jaxtrain.plan --config=configs/llama3_8b.py --topology=h200:8
  python -m jaxtrain.plan --config=configs/llama3_70b.py:gpus=64 --topology=h200:8x8 --html=plan.html
  python -m jaxtrain.plan --config=configs/llama3_8b.py --topology=h200:8 --search --budget=600

Nothing is run, and no GPU, driver or CUDA library is needed, but for --calibrate.
Exit codes: 0 planned, whether it fits or not; 2 the command or config is wrong; 1 no step could be compiled or read, or a file
not written; 130 Ctrl-C, after what was known by then.
"""

OPTIONS = {"topology": "", "json": "", "html": "", "hlo": "", "budget": "0", "most": str(MOST), "jobs": "0", "cache": FOLDER}
OPTIONS |= {"cudnn": "auto", "experts-load": "1.0"}
SWITCHES = dict.fromkeys(("why", "traffic", "no-fit", "search", "calibrate"), "yes") | {"shardings": "all"}
INSTEAD = ("shardings", "search", "calibrate")
# Option -> what it belongs to; "" is the plan of a config.
BELONGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("config", "topology"), ("", "shardings", "search")),
    **dict.fromkeys(("html", "hlo", "why", "traffic", "no-fit", "cudnn", "experts-load"), ("",)),
    "json": ("", "search"),
    "budget": ("", "search"),
    "most": ("search",),
    **dict.fromkeys(("jobs", "cache"), ("", "search")),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(spelled(HELP.format(chips=", ".join(_chips()), cache=FOLDER, most=MOST)), end="")
        return 0
    loaded = launch.load(argv, OPTIONS, SWITCHES)
    options = loaded.options
    problems = [*loaded.problems, *_options(loaded)]
    here = not options["topology"]
    asked = next((name for name in INSTEAD if options[name]), "")
    needs_config = asked != "calibrate"
    found = hardware.probe()
    if here and needs_config and found.kind != "gpu":
        rule = "no machine is named, and this one has no GPU to plan for"
        problems.append(Problem("--topology", None, rule, "Name one, as --topology=h200:8."))
    elif here and found.problem:
        problems.append(found.problem)
    cudnn = None
    if not asked and not here and not problems:
        cudnn, problem = _cudnn(options["cudnn"])
        problems += problem
    if problems:
        return launch.report(problems)
    # Imported from here on: everything above must answer in a moment. A described machine needs the compiler only, which a
    # GPU that is present and busy must not be asked for.
    if not here:
        os.environ["JAX_PLATFORMS"] = "cpu"
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPUs may be busy, and little is run on them
    start_jax(hardware.probe())
    console = rich.console.Console()
    if not console.is_terminal:
        console = rich.console.Console(width=WIDTH)
    try:
        return run(loaded, asked, console, cudnn)
    except KeyboardInterrupt:
        print("\nCtrl-C: stopped.", file=sys.stderr)
        return INTERRUPTED


def _cudnn(who: str) -> tuple[cudnn_library.Library | None, list[Problem]]:
    """cuDNN where it is to tell the workspace, and what is wrong. Before JAX starts: XLA looks for its libraries once."""
    if who == "formula":
        return None, []
    try:
        return cudnn_library.load(), []
    except cudnn_library.LibraryError as error:
        problem = Problem("--cudnn", "library", str(error), "Write --cudnn=formula.")
        return None, [problem] if who == "library" else []


def _chips() -> list[str]:
    specs = Path(__file__).parent / "specs"
    return sorted(p.stem for p in specs.glob("*.txtpb"))


def _options(loaded: Loaded) -> list[Problem]:
    """What is wrong with the options, before anything is imported or compiled."""
    options, problems = loaded.options, []
    given = {arg[2:].partition("=")[0] for arg in loaded.launch.argv if arg.startswith("--")}
    for name, least in (("budget", 0), ("jobs", 0), ("most", 1)):
        text = options[name]
        if not text.isdecimal() or int(text) < least:
            problems.append(
                Problem(f"--{name}", text, f"must be a whole number, {least} or more", f"For example --{name}=100.")
            )
    load = options["experts-load"]
    if load and not _is_load(load):
        rule = "must be a number from 1, which is an even load"
        problems.append(Problem("--experts-load", load, rule, "For example --experts-load=1.5."))
    elif load and "experts-load" in given and loaded.file_read:
        m = loaded.run.model
        if not m.num_experts:
            problems.append(Problem("--experts-load", load, "the model has no experts", "Leave it out."))
        elif float(load) > (most := m.num_experts / m.experts_per_token):
            rule = f"an expert that every token chooses draws {most:g} even shares, and none can draw more"
            problems.append(Problem("--experts-load", load, rule, f"For example --experts-load={min(1.5, most):g}."))
    for name in (*OPTIONS, *SWITCHES):
        if name in given and not options[name] and name != "cache":
            problems.append(Problem(f"--{name}", "", "has no value", f"Write --{name} alone." if name in SWITCHES else ""))
    asked = [name for name in INSTEAD if options[name]]
    if len(asked) > 1:
        written = " ".join(f"--{name}" for name in asked)
        problems.append(Problem(written, None, "each of these replaces the plan", "Give one of them."))
    action = asked[0] if asked else ""
    others = [name for name, actions in BELONGS.items() if name in given and action not in actions]
    others += ["config.KEY"] if loaded.launch.overrides and action not in BELONGS["config"] else []
    if others and len(asked) < 2:
        written = " ".join(f"--{name}" for name in others)
        who = f"--{action}" if action else "the plan of one layout"
        problems.append(Problem(written, None, f"{who} has no use for it", "Leave it out."))
    if options["cudnn"] not in ("", "auto", "formula", "library"):
        rule = "must be auto, formula or library"
        problems.append(Problem("--cudnn", options["cudnn"], rule, "Write --cudnn=formula."))
    for name in ("why", "traffic", "no-fit", "search", "calibrate"):
        if options[name] not in ("", "yes"):
            problems.append(Problem(f"--{name}", options[name], "takes no value", f"Write --{name}."))
    for name in ("json", "html", "hlo"):
        if options[name] and (why := _unwritable(Path(options[name]))):
            problems.append(Problem(f"--{name}", options[name], why, "Name another file."))
    cache = Path(options["cache"]).expanduser().absolute()
    above = next(p for p in (cache, *cache.parents) if p.exists())
    if options["cache"] and not (above.is_dir() and os.access(above, os.W_OK)):
        rule = f"{above} is {'not writable' if above.is_dir() else 'not a folder'}"
        problems.append(Problem("--cache", options["cache"], rule, "Name another, or '' to keep no plans."))
    return problems


def _is_load(text: str) -> bool:
    try:
        return 1 <= float(text) < math.inf
    except ValueError:
        return False


def _unwritable(path: Path) -> str:
    """Why a file cannot be written there; "" where it can. To be known before minutes of compiling, not after."""
    path = path.expanduser().absolute()
    if path.is_dir():
        return "is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "may not be written here"


def run(loaded: Loaded, asked: str, console: rich.console.Console, cudnn: cudnn_library.Library | None = None) -> int:
    """Everything after the command line has been read and JAX started."""
    import jax

    from jaxtrain.kernels.attention import Unsupported
    from jaxtrain.plan import topology as machines
    from jaxtrain.plan.calibrate import CalibrationError
    from jaxtrain.plan.program.assignment import AssignmentError
    from jaxtrain.plan.program.hlo import HloError
    from jaxtrain.plan.search.cache import Cache
    from jaxtrain.plan.search.space import training_check
    from jaxtrain.sharding import LayoutError

    options = loaded.options
    cache = Cache(options["cache"]) if options["cache"] else None
    jobs, budget = int(options["jobs"]), float(options["budget"])
    try:
        if asked == "calibrate":
            from jaxtrain.plan import calibrate

            calibrate.run(console=console)
            return 0
        topology = machines.parse(options["topology"]) if options["topology"] else machines.here()
        check = training_check(topology, f"--topology={topology.name}")
        if problems := check(loaded.run):
            return launch.report(problems)
        if asked == "shardings":
            from jaxtrain.plan.shardings import print_table

            print_table(loaded.run, topology, "" if options["shardings"] == "all" else options["shardings"], console)
            return 0
        if asked == "search":
            machines.devices(machines.parse(topology.name))  # other processes compile for it, by its name
            return _search(loaded, topology, check, cache, jobs, budget, console)
        return _plan(loaded, topology, check, cache, jobs, budget, console, cudnn)
    except ConfigError as error:
        return launch.report(error.problems)
    except (LayoutError, Unsupported, machines.TopologyError, CalibrationError, ValueError) as error:
        if isinstance(error, HloError | AssignmentError):
            return _failed(f"the compiled program cannot be read: {error}")
        return launch.report([Problem("cannot plan", None, str(error).rstrip("."), "")])
    except OSError as error:
        return _failed(str(error))
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
    loaded: Loaded,
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
    from jaxtrain.plan.report import fit_report, page, sections, terminal
    from jaxtrain.plan.result import to_json
    from jaxtrain.plan.search import fit
    from jaxtrain.plan.topology import CHIPS

    run, options = loaded.run, loaded.options
    busy = console.status(f"compiling the train step for {topology.name} ...")
    with busy if console.is_terminal else contextlib.nullcontext():
        compiled = compile_step(run, topology, cudnn)
        how = {"name": _name(loaded), "overrides": _overrides(loaded)}
        plan = even = read_plan(compiled, run, topology, **how)
        if (load := float(options["experts-load"])) > 1:  # what is looked for below supposes an even load, and so is compared
            plan = read_plan(compiled, run, topology, **how, experts_load=load)
    if options["hlo"]:
        Path(options["hlo"]).expanduser().write_text(compiled.text)
    moved = traffic.parts(compiled.run, compiled.program, plan.kernels) if options["traffic"] else ()
    del compiled
    terminal.print_plan(plan, console, steps=run.train.steps)
    if moved:
        print_sections([sections.traffic_section(moved)], console)

    settings = {"check": check, "cache": cache, "jobs": jobs, "budget_s": budget}
    interrupted = False

    def heard(show: Callable[[fit.Progress], None]) -> Callable[[fit.Progress], None]:
        def changed(progress: fit.Progress) -> None:
            nonlocal interrupted
            interrupted = progress.interrupted
            show(progress)

        return changed

    looked_for = "" if plan.fits or options["no-fit"] else "what would make it fit"
    looked_for = looked_for or ("what its choices are good for" if options["why"] and plan.fits else "")
    if looked_for and topology.chip not in CHIPS:
        console.print(
            f"\n{looked_for} is not looked for: {topology.chip} has no description in jaxtrain/plan/specs", markup=False
        )
    elif looked_for and not plan.fits:
        with fit_report.watch(console) as progress:
            advice = fit.advise(run, even, topology, **settings, on_progress=heard(progress))
        plan = fit_report.with_hints(plan, advice)
        fit_report.show_advice(advice, console)
    elif looked_for:
        with fit_report.watch(console) as progress:
            reasons = fit.why(run, even, topology, **settings, on_progress=heard(progress))
        plan = fit_report.with_hints(plan, reasons)
        fit_report.show_reasons(reasons, console)
    if options["why"] and not plan.fits:
        console.print(
            "\n--why asks what each choice that saves memory is needed for: of a plan that fits, and this one does not"
        )
    if options["json"]:
        Path(options["json"]).expanduser().write_text(json.dumps(to_json(plan), indent=1) + "\n")
    if options["html"]:
        Path(options["html"]).expanduser().write_text(page.html(plan, steps=run.train.steps))
    return INTERRUPTED if interrupted else 0


def _search(
    loaded: Loaded, topology: Any, check: Any, cache: Any, jobs: int, budget: float, console: rich.console.Console
) -> int:
    from jaxtrain.plan.report import search_report
    from jaxtrain.plan.search.best import search

    with search_report.watch(console) as progress:
        how = {"check": check, "jobs": jobs, "cache": cache, "most": int(loaded.options["most"]), "on_progress": progress}
        found = search(loaded.run, _name(loaded), topology, budget, **how)
    search_report.show(found, console)
    if loaded.options["json"]:
        tree = search_report.to_json(found)
        Path(loaded.options["json"]).expanduser().write_text(json.dumps(tree, indent=1) + "\n")
    if found.ended == "interrupted":
        return INTERRUPTED
    return 0 if any(c.plan for c in found.tried) else 1


if __name__ == "__main__":
    sys.exit(main())
