"""The work of `python -m jaxtrain plan`: plan a config, or search for settings that are faster or that fit, and print it."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxtrain.config.command_line import FAILED, INTERRUPTED, Args
from jaxtrain.config.schema import RunConfig
from jaxtrain.data import pipeline
from jaxtrain.metrics.files import write_output
from jaxtrain.plan import result
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.cudnn_library import Library
from jaxtrain.plan.make import read_plan
from jaxtrain.plan.program import traffic
from jaxtrain.plan.search import SearchResult, refuse, savings, search
from jaxtrain.plan.search_cache import Cache
from jaxtrain.plan.search_parallel import Outcome, Request, plan_many
from jaxtrain.plan.search_space import Check, changes, with_overrides
from jaxtrain.plan.topology import CHIPS, Topology
from jaxtrain.report import layer_schedule, plan_page, plan_sections, search_page
from jaxtrain.report.plan import print_plan
from jaxtrain.report.tables import print_sections


@dataclasses.dataclass(frozen=True)
class Job:
    """A command line of a plan, and the machine to plan for.

    Attributes:
        check: function of a config that returns the problems of training it on the machine.
        cache: earlier plans; None keeps none.
    """

    args: Args
    topology: Topology
    check: Check
    cache: Cache | None
    console: Console

    @property
    def run(self) -> RunConfig:
        return self.args.loaded.run

    @property
    def name(self) -> str:
        """Return the config file, and its variant if there is one, as on the command line."""
        at = self.args.loaded.launch
        return f"{at.config_file}:{at.variant}" if at.variant else at.config_file

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(f"{key}={value}" for key, value in self.args.loaded.launch.overrides)

    def search(self, **objective: Any) -> SearchResult:
        """Search, print the result, and return it. objective: further arguments of `search`."""
        limits: dict[str, Any] = {
            "jobs": self.args.jobs,
            "budget_s": self.args.budget,
            "cache": self.cache,
            "check": self.check,
        }
        with search_page.watch(self.console) as progress:
            found = search(
                self.run,
                self.name,
                self.topology,
                **limits,
                **objective,
                on_ranked=lambda ranked: search_page.show_ranked(ranked, self.console),
                on_progress=progress,
            )
        search_page.show(found, self.console)
        return found

    def write_json(self, tree: Mapping[str, Any]) -> None:
        """Write `tree` to the file of --json, if one is given."""
        if self.args.json:
            write_output(self.args.json, json.dumps(tree, indent=1) + "\n")


def plan(job: Job, cudnn: Library | None) -> int:
    """Plan the layout of the config, print the plan, write the files of --json, --html and --hlo, and return the exit code.

    If the plan does not fit, search for settings that fit, unless --no-fit is given or the chip has no file in specs/.
    """
    run, args, topology, console = job.run, job.args, job.topology, job.console
    busy = console.status(f"compiling the train step for {topology.name} ...")
    with busy if console.is_terminal else contextlib.nullcontext():
        compiled = compile_step(run, topology, cudnn)
        label: dict[str, Any] = {"name": job.name, "overrides": job.overrides}
        planned = even = read_plan(compiled, topology, **label)
        if args.experts_load > 1:  # the searches below assume an even load
            planned = read_plan(compiled, topology, **label, experts_load=args.experts_load)
    if args.hlo:
        write_output(args.hlo, compiled.text)
    moved = traffic.parts(compiled.program, planned.kernels) if args.traffic else ()
    # of a device through a layer, per step
    passes = run.train.grad_accum * run.model.num_layers / planned.mesh.get("stage", 1)
    layer = layer_schedule.read(compiled.module, planned.mesh, topology, planned.rates, passes) if args.html else {}
    del compiled
    epochs = pipeline.epochs(run.data, Path(run.paths.data), run.train.steps * run.tokens_per_step)
    words = "" if epochs is None else f"{pipeline.epochs_in_words(epochs)} of {run.data.source}"
    length: dict[str, Any] = {"steps": run.train.steps, "epochs": words}
    print_plan(planned, console, **length)
    if moved:
        print_sections([plan_sections.traffic_section(moved)], console)

    interrupted = False
    if topology.chip not in CHIPS:
        if (not planned.fits and not args.no_fit) or args.why:
            more = f"nothing more is compiled: {topology.chip} has no description in jaxtrain/plan/specs"
            console.print(f"\n{more}", markup=False)
    elif not planned.fits and not args.no_fit:
        found = job.search(objective="fit", own=even)
        planned = dataclasses.replace(planned, hints=(*planned.hints, *search_page.hints(found)))
        interrupted = found.ended == "interrupted"
    elif args.why and planned.fits:
        lines, interrupted = plan_without_savings(job, even)
        planned = dataclasses.replace(planned, hints=(*planned.hints, *lines))
    if args.why and not planned.fits:
        console.print("\n--why needs a plan that fits. This one does not.")
    job.write_json(result.to_json(planned))
    if args.html:
        write_output(args.html, plan_page.html(planned, **length, layer=layer))
    if written := [*filter(None, (args.json, args.html, args.hlo))]:
        console.print(f"\nwritten: {', '.join(written)}", markup=False, highlight=False, soft_wrap=True)
    return INTERRUPTED if interrupted else 0


def refused(job: Job) -> bool:
    """Return whether the config cannot fit by formula. If so, print the refusal, and settings that probably fit.

    With --hlo, --html, --traffic or --no-fit, which need the compiled program, return False.
    """
    if any((job.args.no_fit, job.args.hlo, job.args.html, job.args.traffic)):
        return False
    why = refuse(job.run, job.topology)
    if why is None:
        return False
    lines = search_page.show_refusal(why, job.name, job.overrides, job.topology, job.console)
    tree = {"config": job.name, "topology": job.topology.name, "fits": False, "compiled": False}
    tree |= {"least_gib": why.least_gib, "state_gib": why.state_gib, "usable_gib": why.usable_gib, "hints": lines}
    job.write_json(tree)
    return True


def plan_without_savings(job: Job, planned: result.Plan) -> tuple[tuple[str, ...], bool]:
    """For each setting of the config that saves memory (`savings`), plan the config without the setting.

    Return a hint for each setting, and whether Ctrl-C interrupted the planning. planned: the plan of the config itself.
    """
    run, args = job.run, job.args
    found, outcomes, interrupted = savings(run, job.check), {}, False
    requests = {
        choice: Request(with_overrides(run, o), job.topology, job.name, changes(run, o), planned.rates)
        for choice, o in found.items()
    }
    try:
        plan_many(requests, jobs=args.jobs, budget_s=args.budget, cache=job.cache, on_done=outcomes.__setitem__)
    except KeyboardInterrupt:
        interrupted = True
        outcomes = dict.fromkeys(found, Outcome(None, "stopped", "interrupted")) | outcomes
    return search_page.show_savings(planned, found, outcomes, run, job.console), interrupted


def search_layouts(job: Job) -> int:
    """Search for the fastest layout that fits, print and write the result, and return the exit code."""
    found = job.search(most=job.args.most)
    if found.best is None and (why := refuse(job.run, job.topology)):
        search_page.show_refusal(why, job.name, job.overrides, job.topology, job.console)
    job.write_json(search_page.to_json(found))
    if found.ended == "interrupted":
        return INTERRUPTED
    failed = bool(found.tried) and all(c.verdict == "failed" for c in found.tried)
    return FAILED if failed or found.best is None else 0
