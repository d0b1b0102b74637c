"""The command line of plans: `python -m jaxtrain plan --config=FILE --topology=h200:8`."""

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.commands.command import run_command
from jaxtrain.config import hardware, own_parts
from jaxtrain.config.command_line import FAILED, INTERRUPTED, Args, Invalid, Parser, make_console, output_file, whole
from jaxtrain.config.launch import Loaded
from jaxtrain.config.schema import ConfigError, Problem, RunConfig
from jaxtrain.metrics.files import write_output
from jaxtrain.plan import FOLDER, MOST, cudnn_library
from jaxtrain.runtime.startup import start_jax

if TYPE_CHECKING:
    from rich.console import Console

    from jaxtrain.plan.search_cache import Cache
    from jaxtrain.plan.search_space import Check
    from jaxtrain.plan.topology import Topology


def _load(text: str) -> float:
    """Return the number of --experts-load."""
    try:
        if 1 <= float(text) < math.inf:
            return float(text)
    except ValueError:
        pass
    raise Invalid("must be a number from 1, which is an even load")


def _folder(text: str) -> str:
    """Return the folder of --cache, after a check that it can be written."""
    try:
        folder = Path(text).expanduser().absolute()
        above = next(p for p in (folder, *folder.parents) if p.exists())
    except (OSError, RuntimeError) as error:  # the path is too long, or its ~user does not exist
        raise Invalid(f"cannot be a folder ({error})") from error
    if text and not (above.is_dir() and os.access(above, os.W_OK)):
        raise Invalid(f"{above} is {'not writable' if above.is_dir() else 'not a folder'}")
    return text


ONE = ("",)  # the plan of one layout


def parser() -> Parser:
    """Return the parser of the command line."""
    p = Parser(
        "plan",
        "Plan memory, step time and communication: compile the train step of a config for a machine that need "
        "not be present. Nothing is run, and no GPU, driver or CUDA library is needed, except by --calibrate.",
        config=True,
        modes=("shardings", "search", "calibrate"),
        examples=(
            "--config=configs/llama3_8b.py --topology=h200:8",
            "--config=configs/llama3_70b.py:gpus=64 --topology=h200:8x8 --html=plan.html",
            "--config=configs/llama3_8b.py --topology=h200:8 --search --budget=600",
        ),
        notes="Exit codes: 0 planned, whether it fits or not; 2 the command or config is wrong; 1 no step could be compiled or "
        "read, or a file not written; 130 Ctrl-C, after the results so far.",
    )
    p.option(
        "topology",
        "the machine: h200:8 is one node of 8 H200s, h100:8x16 are 16 nodes of 8; default the GPUs of this machine. Chips: "
        + ", ".join(sorted(p.stem for p in (Path(__file__).parents[1] / "plan" / "specs").glob("*.txtpb"))),
        "CHIP:GPUS[xNODES]",
        example="h200:8",
        modes=("", "shardings", "search"),
    )
    p.option("json", "all results of the plan, as JSON", "FILE", type=output_file, modes=("", "search"))
    p.option("html", "the plan as one page", "FILE", type=output_file, modes=ONE)
    p.option("hlo", "the scheduled program behind all figures", "FILE", type=output_file, modes=ONE)
    p.option("why", "plan it without each setting that saves memory, one at a time", modes=ONE)
    p.option("traffic", "memory traffic outside of matmuls and attention, with the least possible", modes=ONE)
    p.option(
        "cudnn",
        "source of the workspace of cuDNN's attention: formula, or cuDNN's library, if the extra plan-cudnn is installed; "
        "auto prefers the library",
        "auto|formula|library",
        "auto",
        choices=("auto", "formula", "library"),
        example="formula",
        modes=ONE,
    )
    p.option(
        "experts-load",
        "load of the busiest expert of each layer over an even load; default 1.0",
        "L",
        1.0,
        type=_load,
        example="1.5",
        modes=ONE,
    )
    p.option("no-fit", "compile also a step that cannot fit by formula, and do not search settings that would fit", modes=ONE)
    p.option(
        "shardings",
        "instead: the sharding of every array, without compiling; --shardings=mlp and --shardings=kind=parameter filter",
        "FILTER",
        const="all",
    )
    p.option(
        "search",
        "instead: find the fastest layout that fits, by formula at once, then compiled; of layouts equal within 5%, the "
        "one with the least communication",
    )
    p.option(
        "budget",
        "seconds of --search, of --why and of the search for settings that fit; 0: no limit",
        "SECONDS",
        0,
        type=whole(0),
        example="100",
        modes=("", "search"),
    )
    p.option(
        "most",
        f"plans of a --search, with those in its cache; default {MOST}",
        "N",
        MOST,
        type=whole(1),
        modes=("search",),
    )
    p.option(
        "jobs", "compiles at a time; default: the number of cores", "N", 0, type=whole(1), example="4", modes=("", "search")
    )
    p.option(
        "cache",
        f"folder of earlier plans; default {FOLDER}; '' keeps none",
        "DIR",
        FOLDER,
        type=_folder,
        may_be_empty=True,
        modes=("", "search"),
    )
    p.option("calibrate", "instead: measure the GPUs of this machine; plans for them use these rates from then on")
    return p


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    return run_command(parser(), argv, _act, check=_check)


def _check(args: Args) -> list[Problem]:
    """Return the problems of the command line that can be found before JAX is imported."""
    problems = []
    here, found = not args.topology, hardware.probe()
    if args.mode == "calibrate":
        given = ["--config"] * (args.line.file is not None) + [f"--config.{key}" for key, _ in args.line.overrides]
        if given:
            problems.append(Problem(given[0], None, "--calibrate does not use it", "Leave it out."))
        return [*problems, *([found.problem] if found.problem else [])]
    written: dict[Path, str] = {}
    for name in ("json", "html", "hlo"):
        file = getattr(args, name)
        if file and (other := written.setdefault(Path(file).expanduser().absolute(), name)) != name:
            problems.append(Problem(f"--{name}", file, f"--{other} writes this file", "Name another file."))
    m, load = args.loaded.run.model, args.experts_load
    if "experts-load" in args.given and args.loaded.file_read and load:
        if not m.num_experts:
            problems.append(Problem("--experts-load", load, "the model has no experts", "Leave it out."))
        elif load > (most := m.num_experts / m.experts_per_token):
            rule = f"an expert that every token chooses has {most:g} times an even load, the maximum"
            problems.append(Problem("--experts-load", load, rule, f"For example --experts-load={min(1.5, most):g}."))
    if here and found.kind != "gpu" and "topology" not in args.given and not args.strays:
        rule = "no machine is named, and this one has no GPU to plan for"
        problems.append(Problem("--topology", None, rule, "Name one, as --topology=h200:8."))
    elif here and found.problem:
        problems.append(found.problem)
    return problems


@dataclasses.dataclass(frozen=True)
class Job:
    """A parsed command line of a plan, and the machine to plan for.

    Attributes:
        check: function of a config that returns the problems of training it on the machine.
        jobs: number of compiles that run at the same time; 0: the number of cores.
        budget_s: seconds for all compiles of --search, --why, or the search for settings that fit; 0: no limit.
    """

    args: Args
    topology: "Topology"
    check: "Check"
    cache: "Cache | None"
    jobs: int
    budget_s: float
    console: "Console"

    @property
    def loaded(self) -> Loaded:
        return self.args.loaded

    @property
    def name(self) -> str:
        """Return the config file, and its variant if there is one, as on the command line."""
        at = self.loaded.launch
        return f"{at.config_file}:{at.variant}" if at.variant else at.config_file

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(f"{key}={value}" for key, value in self.loaded.launch.overrides)

    def write_json(self, tree: dict[str, Any]) -> None:
        """Write `tree` to the file of --json, if one is given."""
        if self.args.json:
            write_output(self.args.json, json.dumps(tree, indent=1) + "\n")


def _act(args: Args) -> int:
    """Start JAX, run the parsed command, and return its exit code."""
    here = not args.topology
    cudnn = None
    if not args.mode and not here:  # before JAX starts: XLA searches for its libraries only once
        cudnn = _load_cudnn(args.cudnn)
    # A described machine needs only the compiler, and must not allocate memory of a present GPU that may be busy.
    if not here:
        os.environ["JAX_PLATFORMS"] = "cpu"
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPUs may be busy, and little runs on them
    start_jax(hardware.probe())
    import jax

    from jaxtrain.kernels.attention import Unsupported
    from jaxtrain.node.calibrate import CalibrationError
    from jaxtrain.node.calibrate import run as calibrate
    from jaxtrain.plan import topology as machines
    from jaxtrain.plan.program.assignment import AssignmentError
    from jaxtrain.plan.program.hlo import HloError
    from jaxtrain.sharding import LayoutError

    try:
        if args.mode == "calibrate":
            calibrate(console=make_console())
            return 0
        with own_parts.refusing():
            return _run(args, cudnn)
    except ConfigError:
        raise
    except (HloError, AssignmentError) as error:
        return _fail(f"the compiled program cannot be read: {error}")
    except machines.TopologyError as error:
        topology = args.topology
        rule = str(error).removeprefix(f"topology {topology!r}: ").rstrip(".")
        raise ConfigError([Problem("--topology", topology, rule, "For example --topology=h200:8.")]) from error
    except (LayoutError, Unsupported, CalibrationError, ValueError) as error:
        raise ConfigError([Problem("cannot plan", None, str(error).rstrip("."), "")]) from error
    except (jax.errors.JaxRuntimeError, RuntimeError, MemoryError) as error:
        return _fail(f"the train step could not be compiled: {type(error).__name__}: {error}")


def _run(args: Args, cudnn: cudnn_library.Library | None) -> int:
    """Run the selected mode (any mode except --calibrate), and return the exit code."""
    from jaxtrain.plan import topology as machines
    from jaxtrain.plan.search_cache import Cache
    from jaxtrain.plan.search_space import training_check

    run = args.loaded.run
    topology = machines.parse(args.topology) if args.topology else machines.here()
    if other_size := args.loaded.launch.other_size(topology.total):
        print(other_size, file=sys.stderr)
    for note in args.loaded.launch.notes:
        if note.startswith("train.epochs"):
            print(note, file=sys.stderr)
    check = training_check(topology, f"--topology={topology.name}")
    cache = Cache(args.cache) if args.cache else None
    job = Job(args, topology, check, cache, args.jobs, args.budget, make_console())
    if not args.mode and _refused(job):
        return 0
    if problems := check(run):
        raise ConfigError(list(problems))
    if args.mode == "shardings":
        from jaxtrain.report.shardings import print_shardings

        print_shardings(run, topology, "" if args.shardings == "all" else args.shardings, job.console)
        return 0
    if args.mode == "search":
        machines.devices(machines.parse(topology.name))  # fail early: other processes compile by its name
        return _search(job)
    return _plan(job, cudnn)


def _load_cudnn(source: str) -> cudnn_library.Library | None:
    """Return cuDNN's library for --cudnn=`source`; None if a formula is to compute workspaces.

    If the library cannot be loaded, "auto" returns None and "library" raises ConfigError.
    """
    if source == "formula":
        return None
    try:
        return cudnn_library.load()
    except cudnn_library.LibraryError as error:
        if source == "auto":
            return None
        raise ConfigError([Problem("--cudnn", "library", str(error), "Write --cudnn=formula.")]) from error


def _fail(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return FAILED


def _plan(job: Job, cudnn: cudnn_library.Library | None) -> int:
    """Plan the layout of the config, print the plan, write the files of --json, --html and --hlo, and return the exit code.

    If the plan does not fit, search for settings that fit, unless --no-fit is given or the chip has no file in specs/.
    """
    from jaxtrain.plan.compile import compile_step
    from jaxtrain.plan.make import read_plan
    from jaxtrain.plan.program import traffic
    from jaxtrain.plan.result import to_json
    from jaxtrain.plan.search import search
    from jaxtrain.plan.topology import CHIPS
    from jaxtrain.report import layer_schedule, plan_page, plan_sections, search_page
    from jaxtrain.report.plan import print_plan
    from jaxtrain.report.sections import print_sections

    run, args, topology, console = job.loaded.run, job.args, job.topology, job.console
    busy = console.status(f"compiling the train step for {topology.name} ...")
    with busy if console.is_terminal else contextlib.nullcontext():
        compiled = compile_step(run, topology, cudnn)
        how = {"name": job.name, "overrides": job.overrides}
        plan = even = read_plan(compiled, run, topology, **how)
        if args.experts_load > 1:  # the searches below assume an even load
            plan = read_plan(compiled, run, topology, **how, experts_load=args.experts_load)
    if args.hlo:
        write_output(args.hlo, compiled.text)
    moved = traffic.parts(compiled.run, compiled.program, plan.kernels) if args.traffic else ()
    passes = run.train.grad_accum * run.model.num_layers / plan.mesh.get("stage", 1)  # of a device through a layer, per step
    lanes = layer_schedule.read(compiled.module, plan.mesh, topology, plan.rates, passes) if args.html else {}
    del compiled
    length: dict[str, Any] = {"steps": run.train.steps, "epochs": _epochs(run)}
    print_plan(plan, console, **length)
    if moved:
        print_sections([plan_sections.traffic_section(moved)], console)

    interrupted = False
    if topology.chip not in CHIPS:
        if (not plan.fits and not args.no_fit) or args.why:
            console.print(
                f"\nnothing more is compiled: {topology.chip} has no description in jaxtrain/plan/specs", markup=False
            )
    elif not plan.fits and not args.no_fit:
        settings = {"check": job.check, "cache": job.cache, "jobs": job.jobs, "budget_s": job.budget_s, "own": even}
        with search_page.watch(console) as progress:
            found = search(
                run,
                job.name,
                topology,
                "fit",
                **settings,
                on_ranked=lambda ranked: search_page.show_ranked(ranked, console),
                on_progress=progress,
            )
        search_page.show(found, console)
        plan = dataclasses.replace(plan, hints=(*plan.hints, *search_page.hints(found)))
        interrupted = found.ended == "interrupted"
    elif args.why and plan.fits:
        lines, interrupted = _why(job, even)
        plan = dataclasses.replace(plan, hints=(*plan.hints, *lines))
    if args.why and not plan.fits:
        console.print("\n--why needs a plan that fits. This one does not.")
    job.write_json(to_json(plan))
    if args.html:
        write_output(args.html, plan_page.html(plan, **length, lanes=lanes))
    if written := [*filter(None, (args.json, args.html, args.hlo))]:
        console.print(f"\nwritten: {', '.join(written)}", markup=False, highlight=False, soft_wrap=True)
    return INTERRUPTED if interrupted else 0


def _epochs(run: RunConfig) -> str:
    """Return the epochs of the config's steps in words, as '3 epochs of data/chat.tok'; "" if the data is not here."""
    from jaxtrain.data import pipeline

    number = pipeline.epochs(run)
    return "" if number is None else f"{pipeline.epochs_in_words(number)} of {run.data.source}"


def _refused(job: Job) -> bool:
    """Return whether the config cannot fit by formula. If so, print the refusal, and settings that probably fit.

    With --hlo, --html, --traffic or --no-fit, which need the compiled program, return False.
    """
    from jaxtrain.plan.search import refuse
    from jaxtrain.report import search_page

    if any((job.args.no_fit, job.args.hlo, job.args.html, job.args.traffic)):
        return False
    why = refuse(job.loaded.run, job.topology)
    if why is None:
        return False
    lines = search_page.show_refusal(why, job.name, job.overrides, job.topology, job.console)
    tree = {"config": job.name, "topology": job.topology.name, "fits": False, "compiled": False}
    tree |= {"least_gib": why.least_gib, "state_gib": why.state_gib, "usable_gib": why.usable_gib, "hints": lines}
    job.write_json(tree)
    return True


def _why(job: Job, plan: Any) -> tuple[tuple[str, ...], bool]:
    """For each setting of the config that saves memory (`savings`), plan the config without the setting.

    Return a hint for each setting, and whether Ctrl-C interrupted the planning. plan: the plan of the config itself.
    """
    from jaxtrain.plan.search import savings
    from jaxtrain.plan.search_parallel import Outcome, Request, plan_many
    from jaxtrain.plan.search_space import changes, with_overrides
    from jaxtrain.report import search_page

    run = job.loaded.run
    found, outcomes, interrupted = savings(run, job.check), {}, False
    requests = {
        choice: Request(with_overrides(run, o), job.topology, job.name, changes(run, o), plan.rates)
        for choice, o in found.items()
    }
    try:
        plan_many(requests, jobs=job.jobs, budget_s=job.budget_s, cache=job.cache, on_done=outcomes.__setitem__)
    except KeyboardInterrupt:
        interrupted = True
        outcomes = dict.fromkeys(found, Outcome(None, "stopped", "interrupted")) | outcomes
    return search_page.show_savings(plan, found, outcomes, run, job.console), interrupted


def _search(job: Job) -> int:
    """Search for the fastest layout that fits, print and write the result, and return the exit code."""
    from jaxtrain.plan.search import refuse, search
    from jaxtrain.report import search_page

    with search_page.watch(job.console) as progress:
        found = search(
            job.loaded.run,
            job.name,
            job.topology,
            budget_s=job.budget_s,
            most=job.args.most,
            check=job.check,
            cache=job.cache,
            jobs=job.jobs,
            on_ranked=lambda ranked: search_page.show_ranked(ranked, job.console),
            on_progress=progress,
        )
    search_page.show(found, job.console)
    if found.best is None and (why := refuse(job.loaded.run, job.topology)):
        search_page.show_refusal(why, job.name, job.overrides, job.topology, job.console)
    job.write_json(search_page.to_json(found))
    if found.ended == "interrupted":
        return INTERRUPTED
    failed = bool(found.tried) and all(c.verdict == "failed" for c in found.tried)
    return FAILED if failed or found.best is None else 0
