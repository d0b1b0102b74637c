"""What makes a config fit that does not: compiled, not guessed.

First come knobs that cost nothing but time: smaller microbatches, shorter chunks of the loss, less kept for the backward pass,
weights split further. Storage types change the numbers that training computes and come after them, one more at a time, that
of the weights themselves last. Among settings that change equally many types, those with fewer knobs turned are compiled
first, by the step time that formulas (bound.py) and the plans made so far let expect. What cannot fit by its formula is not
compiled.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxtrain.config import RunConfig
from jaxtrain.page.numbers import percent, rough, size
from jaxtrain.plan import topology as machines
from jaxtrain.plan.result import Plan, Rates
from jaxtrain.plan.search.bound import mesh_sizes
from jaxtrain.plan.search.cache import Cache
from jaxtrain.plan.search.knobs import Candidate, Expected, Saving, candidate, combinations, savings, split_over
from jaxtrain.plan.search.parallel import MAKE, TIMEOUT_S, Outcome, Request, cores, plan_many
from jaxtrain.plan.search.space import Check, Overrides, changes, with_overrides
from jaxtrain.plan.topology import CHIPS, Topology

MOST = 12  # plans made
FURTHER = 4  # of them after the first that fits, in search of a faster one
SHOWN = 3  # ways that fit, the fastest first
MOST_GPUS = 4096  # that are suggested
SAME_TIME = 0.005  # of a step: a smaller difference is not told


@dataclasses.dataclass(frozen=True)
class Advice:
    """One way to make a config fit, or why there is none. `changes` go behind the config's own overrides."""

    text: str
    changes: tuple[str, ...] = ()
    fits: bool | None = None  # None: not compiled
    plan: Plan | None = None


@dataclasses.dataclass(frozen=True)
class Reason:
    """What becomes of a plan without one of its choices."""

    text: str
    choice: str
    instead: tuple[str, ...]  # what was planned in its place: "dtypes.m=f32"
    needed: bool | None  # for memory; None: not planned
    plan: Plan | None = None


@dataclasses.dataclass
class Progress:
    """How far it is. `finished`: (what was changed, what came of it)."""

    most: int
    done: str = ""  # what was done with what is named: "without "
    interrupted: bool = False
    finished: list[tuple[str, Outcome]] = dataclasses.field(default_factory=list)
    running: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Making:
    """How plans are made, as `parallel.plan_many` takes it, and who hears of it. Ends at `deadline`, of time.monotonic()."""

    options: dict[str, Any]
    deadline: float
    on_progress: Callable[[Progress], None]

    def plans(
        self, requests: dict[str, Request], progress: Progress, on_done: Callable[[str, Outcome], None] = lambda *_: None
    ) -> None:
        """Makes them, by what was changed in each; `progress` and `on_done` hear of each as it comes in."""
        running = list(requests)

        def done(label: str, outcome: Outcome) -> None:
            running.remove(label)
            progress.finished.append((label, outcome))
            progress.running = tuple(running)
            on_done(label, outcome)
            self.on_progress(progress)

        progress.running = tuple(running)
        self.on_progress(progress)
        left = self.deadline - time.monotonic()
        # To plan_many a budget of 0 is none.
        plan_many(requests, budget_s=0.0 if left == math.inf else max(left, 1e-3), on_done=done, **self.options)


def _making(
    on_progress: Callable[[Progress], None], budget_s: float, jobs: int, cache: Cache | None, plan_one: str, timeout_s: float
) -> _Making:
    options = {"jobs": jobs, "cache": cache, "plan_one": plan_one, "timeout_s": timeout_s}
    return _Making(options, time.monotonic() + (budget_s or math.inf), on_progress)


def _request(run: RunConfig, overrides: Overrides, plan: Plan, topology: Topology, rates: Rates) -> Request:
    """The plan's config with some keys changed; the new plan will name the overrides of both."""
    keys = {key for key, _ in overrides}
    own = [o for o in plan.overrides if o.removeprefix("--config.").partition("=")[0] not in keys]
    return Request(with_overrides(run, overrides), topology, plan.config, (*own, *changes(run, overrides)), rates)


def _written(changed: Iterable[str]) -> str:
    """Overrides in a line; an empty value shows as ''."""
    return " ".join(f"{change}''" if change.endswith("=") else change for change in changed)


def figures(plan: Plan) -> str:
    """Its peak and its step time: the expected one, without a comparable published run the roofline."""
    by, times = ("expected", expected) if (expected := plan.time.expected_step_ms) else ("roofline", (plan.time.step_ms,))
    scale, unit = (1e3, "s") if times[0] >= 1e3 else (1, "ms")
    return f"{size(plan.memory.taken_gib)}, {by} {' to '.join(rough(ms / scale) for ms in times)} {unit} a step"


# ---- a plan that does not fit


def advise(
    run: RunConfig,
    plan: Plan,
    topology: Topology,
    *,
    check: Check,
    cache: Cache | None = None,
    rates: Rates | None = None,
    budget_s: float = 0.0,
    jobs: int = 0,
    plan_one: str = MAKE,
    timeout_s: float = TIMEOUT_S,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Advice, ...]:
    """What makes a config fit that does not: the fastest way found comes first. () for a plan that fits.

    Args:
      run, plan, topology: the config, what was planned of it, and the machine, one that `topology.parse` knows.
      check: what training would refuse in a config on this machine.
      cache: plans made before; None: none are read or kept.
      rates: None: the plan's own.
      budget_s: seconds after which compiles under way are stopped; 0: no limit.
      jobs: compiles at a time; 0: as many as cores.
      plan_one: "package.module:function" of (run, topology, rates=...) -> Plan.
      timeout_s: of one compile.
      on_progress: called after every change.

    Ctrl-C ends it as the budget does; `on_progress` hears of it. Raises TopologyError for a machine that cannot be described
    to another process.
    """
    if plan.fits:
        return ()
    machines.parse(topology.name)
    rates, usable = rates or plan.rates, plan.memory.usable_gib
    make = _making(on_progress, budget_s, jobs, cache, plan_one, timeout_s)
    expected, progress = Expected(), Progress(MOST)
    expected.learn(candidate(run, (), topology, rates), plan)
    known: dict[str, Candidate] = {}
    fitting: list[tuple[Candidate, Plan]] = []

    def heard(label: str, outcome: Outcome) -> None:
        if outcome.plan:
            expected.learn(known[label], outcome.plan)
            fitting.extend([(known[label], outcome.plan)] * outcome.plan.fits)

    def batch(todo: list[Candidate], room: int) -> dict[str, Request]:
        """The next to be compiled, taken out of `todo`."""
        best_s = min((p.time.step_ms / 1e3 for _, p in fitting), default=math.inf)
        found: dict[str, Request] = {}
        while len(found) < room and (c := expected.next(todo, usable, best_s)):
            todo.remove(c)
            if not check(c.run):
                label = _written(changes(run, c.overrides))
                known[label], found[label] = c, _request(run, c.overrides, plan, topology, rates)
        return found

    ended, most, first_fit = "", MOST, 0
    try:
        for group in combinations(run, topology, rates, check):
            todo = [c for c in group if c.least_gib <= usable]
            while not ended and (following := batch(todo, min(jobs or cores(), most - len(known)))):
                make.plans(following, progress, heard)
                if fitting and not first_fit:
                    first_fit, most = len(known), min(MOST, len(known) + FURTHER)
                if time.monotonic() >= make.deadline:
                    ended = f" within {budget_s:g} s"
            if len(known) >= MOST:
                ended = ended or f" in {MOST} attempts"
            if fitting or ended:
                break
    except KeyboardInterrupt:
        ended, progress.interrupted = " before it was interrupted", True
        on_progress(progress)
    more = _more_gpus(run, topology, rates, expected, usable)
    if fitting:
        best_ms = min(p.time.step_ms for _, p in fitting)
        ordered = sorted(fitting, key=lambda item: _cost(*item, best_ms))
        return (*(_that_fits(run, plan, c, p) for c, p in ordered[:SHOWN]), *more)
    return (*_none_fits(run, plan, progress, known, ended), *_state(run, plan, topology, rates), *more)


def _cost(c: Candidate, made: Plan, best_ms: float) -> tuple[float, ...]:
    """Order of what fits: by step time, and where that is the same, by what it does to accuracy."""
    return (made.time.step_ms / best_ms - 1) // SAME_TIME, c.rank, c.knobs, made.memory.taken_gib


def _that_fits(run: RunConfig, plan: Plan, c: Candidate, made: Plan) -> Advice:
    changed = changes(run, c.overrides)
    more = made.time.step_ms / plan.time.step_ms - 1
    against = f", {percent(abs(more))} {'longer' if more > 0 else 'shorter'} than as it is" if abs(more) >= SAME_TIME else ""
    costs = "".join(f"; {text}" for key, _ in c.overrides if (text := _loses(c.run, key)))
    return Advice(f"{_written(changed)}: {figures(made)}{against} (compiled){costs}", changed, True, made)


def _loses(run: RunConfig, key: str) -> str:
    """What storing 16 bits costs in accuracy."""
    if key == "dtypes.params":
        return "weights but norms and biases are rounded to 8 bits each step, up or down by chance"
    if key == "dtypes.m":
        return "the first moment is rounded to 8 bits each step"
    if key == "dtypes.v":
        return "the second moment is rounded to 8 bits each step"
    if key == "dtypes.grads":
        return f"gradients are rounded to 8 bits at each of {run.train.grad_accum} additions"
    return ""


def _none_fits(run: RunConfig, plan: Plan, progress: Progress, known: dict[str, Candidate], ended: str) -> Iterator[Advice]:
    made = [(label, o.plan) for label, o in progress.finished if o.plan]
    if made:
        label, smallest = min(made, key=lambda item: item[1].memory.taken_gib)
        text = f"nothing was found that fits{ended}: the smallest, {label}, takes {figures(smallest)} (compiled), "
        text += f"{size(plan.memory.usable_gib)} are usable"
        yield Advice(text, changes(run, known[label].overrides), False, smallest)
    elif known or ended:
        yield Advice(f"nothing was found that fits{ended}: no plan was made")
    else:
        yield Advice("nothing fits, whatever the knobs: so say formulas alone, and nothing was compiled")
    for label, o in progress.finished:
        if o.plan is None and o.kind != "stopped":
            yield Advice(f"{label}: {o.kind}: {o.reason}")


def _state(run: RunConfig, plan: Plan, topology: Topology, rates: Rates) -> Iterator[Advice]:
    """What cannot be computed again."""
    text = f"the state and the batch alone take {size(plan.memory.arguments_gib)} on each GPU, as configured"
    sizes = mesh_sizes(run, topology)
    shared = topology.total // (sizes["stage"] * sizes["expert"] * sizes["seq"])
    split = candidate(run, split_over(run, shared, sizes["tensor"]), topology, rates)
    if split.state_gib:
        least = math.ceil(split.state_gib * topology.total / plan.memory.usable_gib)
        text += f"; split evenly, the state alone fills {least} GPUs with {size(plan.memory.usable_gib)} each"
    yield Advice(text)


def _more_gpus(run: RunConfig, topology: Topology, rates: Rates, expected: Expected, usable: float) -> Iterator[Advice]:
    """The next larger machine that holds the config as it is, by formula."""
    total = topology.total
    while 2 * total <= MOST_GPUS:
        total *= 2
        node = topology.gpus if topology.nodes > 1 else min(total, CHIPS[topology.chip][0])
        if total % node:
            return
        machine = machines.parse(f"{topology.chip}:{node}x{total // node}")
        c = candidate(run, _spread(run, topology, total), machine, rates)
        gib = expected.of(c)[0]
        if 0 < gib <= usable:
            changed = changes(run, c.overrides)
            how = f" with {' '.join(changed)}" if changed else ""
            yield Advice(f"{total} GPUs, {machine.name}{how}: about {size(gib)} on each (by formula, not compiled)", changed)
            return


def _spread(run: RunConfig, topology: Topology, total: int) -> Overrides:
    """The run on more GPUs: weights split over all of them, the batch the same where it divides."""
    sizes = mesh_sizes(run, topology)
    shared = total // (sizes["stage"] * sizes["expert"] * sizes["seq"])
    shards = shared // sizes["tensor"] * sizes["expert"]
    batch, accum = run.train.global_batch, run.train.grad_accum
    while accum > 1 and batch % (accum * shards):
        accum -= 1
    if batch % (accum * shards):
        batch = math.ceil(batch / shards) * shards
    split = split_over(run, shared, sizes["tensor"])
    return (*split, ("train.global_batch", batch), ("train.grad_accum", accum))


# ---- a plan that fits


def why(
    run: RunConfig,
    plan: Plan,
    topology: Topology,
    *,
    check: Check,
    cache: Cache | None = None,
    rates: Rates | None = None,
    budget_s: float = 0.0,
    jobs: int = 0,
    plan_one: str = MAKE,
    timeout_s: float = TIMEOUT_S,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Reason, ...]:
    """What each choice that saves memory is good for, in a plan that fits: the plan without it; and, of those that it fits
    without one at a time, the plan without any.

    Arguments, Ctrl-C and TopologyError as for `fit.advise`. Raises ValueError for a plan that does not fit: no choice in it
    was enough.
    """
    if not plan.fits:
        raise ValueError("the plan does not fit, so that no choice in it is enough: fit.advise says what would be")
    machines.parse(topology.name)
    rates = rates or plan.rates
    found = savings(run, topology, rates, check)
    progress = Progress(len(found), "without ")
    make = _making(on_progress, budget_s, jobs, cache, plan_one, timeout_s)

    def reasons(some: Sequence[Saving]) -> list[Reason]:
        requests = {s.choice: _request(run, s.instead, plan, topology, rates) for s in some}
        try:
            make.plans(requests, progress)
        except KeyboardInterrupt:  # what is planned by then is in `progress`
            progress.interrupted = True
            on_progress(progress)
        outcomes = {choice: Outcome(None, "stopped", "interrupted") for choice in requests} | dict(progress.finished)
        return [_reason(run, s, outcomes[s.choice], plan) for s in some]

    alone = reasons(found)
    spare = [s for s, reason in zip(found, alone, strict=True) if reason.needed is False]
    if len(spare) < 2 or progress.interrupted:
        return tuple(alone)
    progress.most += 1
    names = f"{', '.join(s.choice for s in spare[:-1])} and {spare[-1].choice}"
    together = Saving(names, tuple(pair for s in spare for pair in s.instead), "without all of them")
    return (*alone, *reasons([together]))


def _reason(run: RunConfig, saving: Saving, outcome: Outcome, plan: Plan) -> Reason:
    instead = changes(run, saving.instead)
    made = outcome.plan
    if made is None:
        text = f"{saving.choice}: {saving.without} there is no plan ({outcome.kind}): {outcome.reason}"
        return Reason(text, saving.choice, instead, None)
    text = f"{saving.choice}: {saving.without} {size(made.memory.taken_gib)}, "
    if not made.fits:
        return Reason(f"{text}does not fit", saving.choice, instead, True, made)
    more = made.time.step_ms / plan.time.step_ms - 1
    speed = f"be {percent(abs(more))} {'slower' if more > 0 else 'faster'}" if abs(more) >= SAME_TIME else "be as fast"
    return Reason(f"{text}would fit too and {speed}: not needed for memory", saving.choice, instead, False, made)
