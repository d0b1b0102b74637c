"""The search: order settings by the formula of search_bound.py, then compile them in that order.

The config's own setting is compiled first, as the baseline. Objective "speed" searches for the fastest layout that fits.
Objective "fit" searches for the cheapest change that makes a config fit. Changes that cost only time rank before narrower
dtypes of the state, and few changes before many. A setting is not compiled if its lower bound of memory exceeds the usable
memory. `rank` takes seconds and compiles nothing.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from jaxtrain.config.schema import ConfigError, Problem, RunConfig, declared
from jaxtrain.plan import MOST
from jaxtrain.plan import topology as machines
from jaxtrain.plan.rates import rates_for
from jaxtrain.plan.result import Plan, Rates
from jaxtrain.plan.search_bound import ABOVE, Bound, bound, least_state_gib, no_formula
from jaxtrain.plan.search_cache import Cache
from jaxtrain.plan.search_parallel import MAKE, TIMEOUT_S, Outcome, Request, plan_each
from jaxtrain.plan.search_space import (
    Check,
    Overrides,
    changes,
    fastest_space,
    fitting_space,
    split_over,
    training_check,
    with_overrides,
)
from jaxtrain.plan.topology import CHIPS, Topology, layout_of

Objective = Literal["speed", "fit"]
SHOWN = 10  # number of best settings by formula in the report
MOST_FOR_FIT = 12  # largest number of plans of a search with objective "fit"
MOST_GPUS = 4096  # of the largest machine that is suggested
# Step times that differ by less count as equal. The ratio of planned to published step time of six XLA runs has a standard
# deviation of 6% (docs/evidence/planned_vs_published.md). Layouts of one model share a part of that error.
ERROR = 0.05


@dataclasses.dataclass(eq=False)
class Candidate:
    """A setting, its figures by formula, and its plan after it is compiled.

    Attributes:
        changes: overrides of the config, such as "mesh.fsdp=8"; () for the config's own setting.
        rank: 0 if the setting costs only time; higher if it stores more of the state in narrower dtypes.
        verdict: best | equal | slower | too big | failed; "" before the setting is compiled.
    """

    run: RunConfig
    bound: Bound
    changes: tuple[str, ...] = ()
    rank: int = 0
    outcome: Outcome | None = None
    verdict: str = ""
    reason: str = ""

    @property
    def plan(self) -> Plan | None:
        return self.outcome.plan if self.outcome else None

    @property
    def fits(self) -> bool:
        """Return whether the setting is compiled and fits."""
        return self.plan is not None and self.plan.fits


@dataclasses.dataclass
class SearchResult:
    """The state of a search, and the reason why it ended.

    Attributes:
        candidates: settings whose lower bound of memory fits, best first by formula. Each is checked before it is shown or
            compiled.
        no_formula: the setting for which the run has no formula (bound.no_formula). Then all settings are candidates, those
            with the cheapest changes or the fewest mesh axes first; "" if there is a formula.
        too_big: number of settings whose lower bound of memory does not fit.
        shown: the first SHOWN legal candidates.
        tried: compiled settings; best first after the search.
        running: settings that are being compiled.
        ended: complete (no better setting is left) | found (a setting fits) | most (number of plans) | budget | interrupted.
    """

    name: str
    topology: Topology
    run: RunConfig
    objective: Objective
    usable_gib: float
    most: int
    candidates: list[Candidate]
    no_formula: str = ""
    too_big: int = 0
    shown: tuple[Candidate, ...] = ()
    tried: list[Candidate] = dataclasses.field(default_factory=list)
    running: list[Candidate] = dataclasses.field(default_factory=list)
    ended: str = ""
    seconds: float = 0.0

    def sort(self, some: list[Candidate], above: float = ABOVE) -> None:
        """Sort settings by formula: settings that probably fit first, then by cheapest change ("fit") or step time ("speed").

        Step times that differ by less than ERROR count as equal. Of these layouts, one with fewer mesh axes ranks higher.

        Args:
            above: ratio of a plan's memory to its lower bound, both without weights and moments.
        """
        fastest = min((c.bound.step_s for c in some if c.bound.step_s), default=1.0)

        def key(c: Candidate) -> tuple[float, ...]:
            likely = c.bound.state_gib + (c.bound.likely_gib - c.bound.state_gib) * above / ABOVE
            if self.objective == "fit":
                return likely > self.usable_gib, c.rank, len(c.changes), c.bound.step_s
            slower = math.log(max(1.0, c.bound.step_s / fastest)) // math.log(1 + ERROR)
            axes = sum(size > 1 for size in layout_of(c.run, self.topology).sizes.values())
            return likely > self.usable_gib, slower, axes, c.bound.step_s, likely, len(c.changes)

        some.sort(key=key)

    @property
    def best(self) -> Candidate | None:
        """Return the best compiled setting that fits; else the first that probably fits by formula; else None."""
        compiled = next((c for c in self.tried if c.fits), None)
        if self.no_formula:
            return compiled
        return compiled or next((c for c in self.shown if c.outcome is None and c.bound.likely_gib <= self.usable_gib), None)


def rank(
    run: RunConfig, name: str, topology: Topology, objective: Objective, check: Check, rates: Rates, most: int = MOST
) -> SearchResult:
    """Order all settings by formula; compile nothing. After Ctrl-C, return the settings that have been evaluated."""
    usable = topology.usable_gib(run.train.memory_fraction)
    found = SearchResult(name, topology, run, objective, usable, most, [], no_formula(run.model.family, run.lora, run.train))
    try:
        if objective == "fit":
            settings = fitting_space(run, topology, check)
        else:
            settings = ((0, overrides) for overrides in fastest_space(run, topology, check))
        for group, overrides in settings:
            changed = changes(run, overrides, topology)
            if changed or not overrides:
                other = with_overrides(run, overrides)
                c = Candidate(other, bound(other, topology, rates), changed, group)
                found.too_big += c.bound.memory_gib > usable
                found.candidates += [c] * (c.bound.memory_gib <= usable)
    except KeyboardInterrupt:
        found.ended = "interrupted"
    found.sort(found.candidates)
    legal = (c for c in found.candidates if not check(c.run))
    found.shown = tuple(itertools.islice(legal, SHOWN))
    return found


def search(
    run: RunConfig,
    name: str,
    topology: Topology,
    objective: Objective = "speed",
    *,
    budget_s: float = 0.0,
    most: int = 0,
    check: Check | None = None,
    rates: Rates | None = None,
    own: Plan | None = None,
    plan_one: str = MAKE,
    jobs: int = 0,
    cache: Cache | None = None,
    timeout_s: float = TIMEOUT_S,
    on_ranked: Callable[[SearchResult], None] = lambda found: None,
    on_progress: Callable[[SearchResult], None] = lambda found: None,
) -> SearchResult:
    """Search for the best setting of a config on a machine. No setting changes the global batch.

    Args:
        name: label of the config in plans.
        topology: a machine whose name `topology.parse` accepts, since other processes compile for it by name.
        budget_s: seconds after which running compiles are ended; 0: no limit.
        most: largest number of plans; 0: MOST_FOR_FIT if the objective is "fit", else MOST.
        check: returns the problems of training a config; None: `training_check`.
        rates: rates of the GPU; None: `rates_for` this GPU.
        own: the plan of the config itself, if it is made already.
        plan_one: "package.module:function" of (run, topology, rates=...) -> Plan.
        jobs: number of compiles that run at the same time; 0: the number of cores.
        on_ranked: called once, before anything is compiled.
        on_progress: called after each start and end of a compile.

    Raises:
        ConfigError: the first setting is refused for a key that no other setting changes.
        TopologyError: the machine has no description.
    """
    began = time.monotonic()
    machines.parse(topology.name)
    check, rates = check or training_check(topology), rates or rates_for(topology.gpu, run.precision)
    found = rank(run, name, topology, objective, check, rates, most or (MOST_FOR_FIT if objective == "fit" else MOST))
    on_ranked(found)
    # The config's own setting is compiled first, as the baseline.
    todo = sorted(found.candidates, key=lambda c: bool(c.changes))
    above = ABOVE
    if own and not own.fits:
        above = _above(bound(run, topology, rates), own)
        found.sort(todo, above)

    def following() -> tuple[Candidate, Request] | None:
        while todo and not found.ended and len(found.tried) + len(found.running) < found.most and not _is_enough(found, todo):
            c = todo.pop(0)
            if not check(c.run):
                found.running.append(c)
                on_progress(found)
                return c, Request(c.run, topology, name, c.changes, rates)
        return None

    try:
        how = {"jobs": jobs, "cache": cache, "plan_one": plan_one, "timeout_s": timeout_s}
        with contextlib.closing(plan_each(following, deadline=began + (budget_s or math.inf), **how)) as outcomes:
            for c, outcome in outcomes:
                c.outcome = outcome
                found.running.remove(c)
                found.tried.append(c)
                if len(found.tried) == 1 and not own and _is_of_every_setting(outcome.problems, found):
                    raise ConfigError(list(outcome.problems))
                if outcome.plan and not outcome.plan.fits and c.run.remat.policy != "auto":
                    above = max(above, _above(c.bound, outcome.plan))
                    found.sort(todo, above)
                on_progress(found)
        found.ended = found.ended or ("most" if len(found.tried) >= found.most else "complete")
    except TimeoutError:
        found.ended = "budget"
    except KeyboardInterrupt:
        found.ended = "interrupted"
    if objective == "fit" and found.ended in ("complete", "most") and any(c.fits for c in found.tried):
        found.ended = "found"
    found.running.clear()
    _judge(found)
    found.seconds = time.monotonic() - began
    return found


def _is_of_every_setting(problems: Sequence[Problem], found: SearchResult) -> bool:
    """Return whether there are problems, all of keys of the config that no setting of the search changes."""
    changed = {change.partition("=")[0] for c in found.candidates for change in c.changes}
    return bool(problems) and all(p.key in declared() and p.key not in changed for p in problems)


def _above(least: Bound, plan: Plan) -> float:
    """Return the ratio of a plan's memory to its lower bound, both without weights and moments."""
    rest = least.memory_gib - least.state_gib
    return (plan.memory.taken_gib - least.state_gib) / rest if rest > 0 else ABOVE


def _is_enough(found: SearchResult, todo: list[Candidate]) -> bool:
    """Return whether the search can end: for "fit", if a setting fits; for "speed", if no layout of `todo` can be faster.

    A layout's time is at least its time by formula, times the lowest ratio so far of planned time to time by formula.
    """
    fitting = [c.plan.time.step_ms for c in found.tried if c.plan and c.plan.fits]
    if found.objective == "fit" or not fitting:
        return bool(fitting)
    ratios = [c.plan.time.step_ms / c.bound.step_s for c in found.tried if c.plan and c.bound.step_s]
    return min(c.bound.step_s for c in todo) * min(ratios, default=0.0) >= min(fitting)


def _judge(found: SearchResult) -> None:
    """Set the verdict and the reason of each compiled setting, and sort the settings: best first."""
    fastest = min((c.plan.time.step_ms for c in found.tried if c.plan and c.plan.fits), default=0.0)
    order: dict[Candidate, tuple[float, ...]] = {}
    for c in found.tried:
        plan = c.plan
        if plan is None:
            order[c], c.verdict, c.reason = (2,), "failed", f"{c.outcome.kind}: {c.outcome.reason}" if c.outcome else ""
            continue
        if not plan.fits:
            order[c], c.verdict, c.reason = (1,), "too big", f"by {plan.memory.taken_gib - plan.memory.usable_gib:.1f} GiB"
            continue
        step_ms, links = plan.time.step_ms, plan.time.communication_ms / fastest
        more = step_ms / fastest - 1
        axes = sum(size > 1 for size in plan.mesh.values())
        order[c] = (0, 0, round(links, 2), axes, step_ms) if more <= ERROR else (0, 1, step_ms)
        if found.objective == "fit":
            order[c] = 0, c.rank, step_ms
        c.verdict = "equal" if more <= ERROR else "slower"
        c.reason = f"{f'{more:.1%} slower than the fastest, ' if more else ''}links are busy {links:.0%} of the fastest step"
    found.tried.sort(key=order.__getitem__)
    if found.best and found.best.fits:
        found.best.verdict = "best"


# ---- configs that cannot fit


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A config that cannot fit on its machine, by formula.

    Attributes:
        least_gib: lower bound of the memory that the config needs on each GPU.
        fix: a setting that probably fits on this machine, or None.
        larger: the next larger machine on which the config probably fits, and its overrides there; or None.
    """

    least_gib: float
    state_gib: float
    usable_gib: float
    fix: Candidate | None
    larger: tuple[Topology, Candidate] | None


def refuse(run: RunConfig, topology: Topology) -> Refusal | None:
    """Return the reason why a config cannot fit, and settings that probably fit; None if the config may fit.

    A config that training on this machine would reject is refused only if its weights and moments are too big for every mesh.
    The call takes about a second.
    """
    usable, check = topology.usable_gib(run.train.memory_fraction), training_check(topology)
    legal, state = not check(run), least_state_gib(run, topology)
    if not legal and state <= usable:
        return None
    rates = rates_for(topology.gpu, run.precision)
    least = bound(run, topology, rates) if legal else Bound(0.0, state, state)
    if least.memory_gib <= usable:
        return None
    fix = rank(run, "", topology, "fit", check, rates).best if legal else None
    return Refusal(least.memory_gib, least.state_gib, usable, fix, larger_machine(run, topology, rates))


def larger_machine(run: RunConfig, topology: Topology, rates: Rates) -> tuple[Topology, Candidate] | None:
    """Return the next larger machine on which a config probably fits, and the config's overrides there.

    The config is tried unchanged first, then with weights sharded over all GPUs.
    """
    total = topology.total
    while topology.chip in CHIPS and 2 * total <= MOST_GPUS:
        most = CHIPS[topology.chip][0]
        total = 2 * total if 2 * total <= most or total % most == 0 else most * -(-total // most)
        node = topology.gpus if topology.nodes > 1 else min(total, CHIPS[topology.chip][0])
        if total % node:
            return None
        machine = machines.parse(f"{topology.chip}:{node}x{total // node}")
        check, usable = training_check(machine), machine.usable_gib(run.train.memory_fraction)
        for overrides in _spreads(run, machine):
            other = with_overrides(run, overrides)
            if not check(other) and 0 < (c := bound(other, machine, rates)).likely_gib <= usable:
                return machine, Candidate(other, c, changes(run, overrides))
    return None


def _spreads(run: RunConfig, machine: Topology) -> Iterator[Overrides]:
    """Yield a run's own setting, then weights sharded over all GPUs, with a global batch that the shards divide."""
    yield ()
    try:
        sizes = layout_of(run, machine).sizes
    except ConfigError:
        return
    shared = machine.total // (sizes["stage"] * sizes["expert"] * sizes["seq"])
    shards = max(1, shared // sizes["tensor"] * sizes["expert"])
    batch, accum = run.train.global_batch, run.train.grad_accum
    while accum > 1 and batch % (accum * shards):
        accum -= 1
    if batch % (accum * shards):
        batch = math.ceil(batch / shards) * shards
    yield *split_over(run.mesh.fsdp, shared, sizes["tensor"]), ("train.global_batch", batch), ("train.grad_accum", accum)


# ---- settings that save memory


def savings(run: RunConfig, check: Check) -> dict[str, Overrides]:
    """Return setting of the config that saves memory -> overrides that undo it."""
    r, t, m = run.remat, run.train, run.mesh
    everything = (("remat.policy", "none"), ("remat.tensors", ""), ("remat.every", 1))
    more = everything if r.policy == "auto" else (("remat.policy", "auto"), *everything[1:])
    found: dict[str, Overrides] = {} if r.policy == "none" else {f"remat.policy={r.policy}": more}
    stored = dataclasses.asdict(run.dtypes)
    found |= {f"dtypes.{k}={stored[k]}": ((f"dtypes.{k}", "f32"),) for k in ("m", "v", "grads", "params") if stored[k] != "f32"}
    if run.optimizer.offload != "none":
        found[f"optimizer.offload={run.optimizer.offload}"] = (("optimizer.offload", "none"),)
    if run.loss.chunk < type(run.loss)().chunk:
        found[f"loss.chunk={run.loss.chunk}"] = (("loss.chunk", type(run.loss)().chunk),)
    for axis, size in (("tensor", m.tensor), ("stage", m.stage)):
        if size > 1:
            found[f"mesh.{axis}={size}"] = (("mesh.fsdp", m.fsdp if m.fsdp == -1 else m.fsdp * size), (f"mesh.{axis}", 1))
    if run.moe.capacity_factor and run.model.num_experts:
        found[f"moe.capacity_factor={run.moe.capacity_factor:g}"] = (("moe.capacity_factor", 0.0),)
    fewer: Iterable[Overrides] = ((("train.grad_accum", n),) for n in range(t.grad_accum - 1, 0, -1))
    fewer = (o for o in fewer if t.global_batch % o[0][1] == 0 and not check(with_overrides(run, o)))
    if larger := next(iter(fewer), None):
        found[f"train.grad_accum={t.grad_accum}"] = larger
    return {choice: instead for choice, instead in found.items() if not check(with_overrides(run, instead))}
