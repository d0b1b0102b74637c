"""The work of `python -m jaxtrain plan`: plan a config, or search for a faster layout, and print it."""

import contextlib
import dataclasses
import json
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxtrain.config.command_line import FAILED, INTERRUPTED, Args, make_console
from jaxtrain.config.commands import to_run_sh
from jaxtrain.config.numbers import size
from jaxtrain.config.schema import ConfigError, RunConfig
from jaxtrain.data import opening
from jaxtrain.metrics.files import write_output
from jaxtrain.plan import result
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.cost import CostOptions, estimate_cost
from jaxtrain.plan.cudnn_library import CudnnLibrary
from jaxtrain.plan.diff import diff, read_plan_file
from jaxtrain.plan.fit import Check, least_memory, training_check
from jaxtrain.plan.make import read_plan
from jaxtrain.plan.search import SearchResult, search
from jaxtrain.plan.search_cache import PlanCache
from jaxtrain.plan.topology import CHIPS, Topology
from jaxtrain.report import layer_schedule, plan_page, search_page
from jaxtrain.report.plan import print_plan
from jaxtrain.report.plan_diff import print_diff
from jaxtrain.report.tables import say

NO_COST = "--tokens: a step that does not fit has no time, and its run no cost"


@dataclasses.dataclass(frozen=True)
class PlanJob:
    """A command line of a plan, and the machine to plan for.

    Attributes:
        check: function of a config that returns the problems of training it on the machine.
        cache: earlier plans; None keeps none.
    """

    args: Args
    topology: Topology
    check: Check
    cache: PlanCache | None
    console: Console

    @property
    def run(self) -> RunConfig:
        return self.args.loaded.run

    @property
    def name(self) -> str:
        """Return the config file, and its variant if there is one, as on the command line."""
        launch = self.args.loaded.launch
        return f"{launch.config_file}:{launch.variant}" if launch.variant else launch.config_file

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(f"{key}={value}" for key, value in self.args.loaded.launch.overrides)

    def search(self) -> SearchResult:
        """Search, print the result, and return it."""
        args = self.args
        options: dict[str, Any] = {"jobs": args.jobs, "budget_s": args.budget, "most": args.most, "cache": self.cache}
        options |= {"overrides": self.overrides, "check": self.check}
        with search_page.watch(self.console) as progress:
            search_result = search(self.run, self.name, self.topology, on_progress=progress, **options)
        search_page.show_search(search_result, self.console)
        return search_result

    def write_json(self, tree: Mapping[str, Any]) -> None:
        """Write `tree` to the file of --json, if one is given."""
        if self.args.json:
            write_output(self.args.json, json.dumps(tree, indent=1) + "\n")


def plan_layout(job: PlanJob, cudnn: CudnnLibrary | None) -> int:
    """Plan the layout of the config, print the plan, write the files of --json, --html and --hlo, and return the exit code."""
    run, args, topology, console = job.run, job.args, job.topology, job.console
    busy = console.status(f"compiling the train step for {topology.name} ...")
    with busy if console.is_terminal else contextlib.nullcontext():
        compiled = compile_step(run, topology, cudnn)
        label: dict[str, Any] = {"name": job.name, "overrides": job.overrides}
        planned = read_plan(compiled, topology, **label, experts_load=args.experts_load)
    if args.hlo:
        write_output(args.hlo, compiled.text)
    # Passes of a device through a layer, per step.
    passes = run.train.grad_accum * run.model.num_layers / planned.mesh.get("stage", 1)
    layer = layer_schedule.layer_events(compiled.module, planned.mesh, topology, planned.rates, passes) if args.html else {}
    cost_options = CostOptions(args.tokens, args.price_per_gpu_hour, args.failures_per_1000_gpu_days, args.storage_gb_s)
    counted = cost_options.tokens and planned.fits
    cost = estimate_cost(planned, run, topology, compiled.program.checkpoint_bytes, cost_options) if counted else None
    del compiled
    tokens = run.tokens_before(run.train.steps)
    epochs = opening.count_epochs(run.data, Path(run.paths.data), tokens)
    words = "" if epochs is None else f"{opening.epochs_in_words(epochs)} of {run.data.source}"
    length: dict[str, Any] = {"steps": run.train.steps, "tokens": tokens, "epochs": words, "cost": cost}
    print_plan(planned, console, **length)
    if not planned.fits:
        _print_search(job)
    if cost_options.tokens and not cost:
        say(console, f"\n{NO_COST}")
    job.write_json(result.to_json(planned) | ({"run": dataclasses.asdict(cost)} if cost else {}))
    if args.html:
        write_output(args.html, plan_page.plan_html(planned, **length, layer=layer))
    if written := [*filter(None, (args.json, args.html, args.hlo))]:
        console.print(f"\nwritten: {', '.join(written)}", markup=False, highlight=False, soft_wrap=True)
    return 0


def cannot_fit(job: PlanJob) -> bool:
    """Return whether the config cannot fit, and print its least memory if so.

    With --hlo or --html, which need the compiled program, return False.
    """
    if job.args.hlo or job.args.html:
        return False
    needs, usable = least_memory(job.run, job.topology), job.topology.usable_gib(job.run.train.memory_fraction)
    if needs.gib <= usable:
        return False
    shortage = f"needs at least {size(needs.gib)} on each GPU, {size(usable)} are usable"
    say(job.console, f"does not fit: {job.name} on {job.topology.name} {shortage}", "bold red")
    breakdown = f"weights and moments {size(needs.state_gib)}, gradients {size(needs.gradients_gib)}"
    breakdown += f", gathered weights {size(needs.gathered_gib)}, inputs of layers {size(needs.inputs_gib)}"
    say(job.console, f"{breakdown}; nothing was compiled")
    if job.args.tokens:
        say(job.console, NO_COST)
    _print_search(job)
    tree = {"config": job.name, "topology": job.topology.name, "fits": False, "compiled": False}
    job.write_json(tree | {"least_gib": needs.gib, "state_gib": needs.state_gib, "usable_gib": usable})
    return True


def _print_search(job: PlanJob) -> None:
    """Print the command that searches for a layout that fits, if the machine has a description."""
    if job.topology.chip not in CHIPS:
        return
    words = [f"--config={job.name}", *(f"--config.{o}" for o in job.overrides), f"--topology={job.topology.name}", "--search"]
    say(job.console, "\nto search for a layout that fits", "bold")
    job.console.print(Text(f"{to_run_sh('python -m jaxtrain plan')} {shlex.join(words)}"), soft_wrap=True)


def compare_plans(args: Args, topology: Topology | None, cudnn: CudnnLibrary | None) -> int:
    """Print and write what changed from plan A to plan B, and return the exit code: 1 if something changed.

    Raises ConfigError with the problems of both plans. topology: the machine for which configs are compiled.
    """
    plans, problems = {}, []
    for name, text in (("A", args.a), ("B", args.b)):
        try:
            if topology and name in args.configs:
                problems += training_check(topology, f"--topology={topology.name}")(args.configs[name].run)
            else:
                plans[name] = read_plan_file(name, text)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError([*dict.fromkeys(problems)])
    console = make_console()
    for name, loaded in args.configs.items():
        assert topology
        with console.status(f"compiling {name} for {topology.name} ...") if console.is_terminal else contextlib.nullcontext():
            compiled = compile_step(loaded.run, topology, cudnn)
            plans[name] = read_plan(compiled, topology, name=getattr(args, name.lower()))
    changes = diff(plans["A"], plans["B"])
    print_diff(changes, console, (args.a, args.b))
    if args.json:
        write_output(args.json, json.dumps(changes.to_json(), indent=1) + "\n")
    return 0 if changes.same else 1


def search_layouts(job: PlanJob) -> int:
    """Search for the fastest layout that fits, print and write the result, and return the exit code.

    SIGTERM ends the search as Ctrl-C does.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    search_result = job.search()
    job.write_json(search_page.to_json(search_result))
    if search_result.ended == "interrupted":
        return INTERRUPTED
    return 0 if search_result.best else FAILED
