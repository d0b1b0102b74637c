"""The best legal layout of a config on a machine: compiled, not guessed.

Of all legal layouts (space.py), what a formula (bound.py) shows to be too big, or slower than the best plan so far, is not
compiled. Of the others the most promising comes first: its bound, times how far the plans made so far lie above theirs, those
that share more settings with it counting more. The search ends when no bound is below the best plan, when `most` plans are
made, or when the budget is spent; what was left out, and how good it could have been, is reported.

Every layout keeps the config's global batch, so that step times compare as times per token do.
"""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxtrain.config import RunConfig
from jaxtrain.plan import topology as machines
from jaxtrain.plan.rates import rates_for
from jaxtrain.plan.result import Plan, Rates
from jaxtrain.plan.search import MOST
from jaxtrain.plan.search.bound import Bound, bound
from jaxtrain.plan.search.cache import Cache
from jaxtrain.plan.search.parallel import MAKE, TIMEOUT_S, Outcome, Pool, Request, from_cache, keep
from jaxtrain.plan.search.space import (
    KNOBS,
    Check,
    Overrides,
    changes,
    legal_layouts,
    naive_layouts,
    own_layout,
    training_check,
    with_overrides,
)
from jaxtrain.plan.topology import Topology

# How far plans are taken to lie above their bounds before any is made, in time and in memory. Those of Llama 3 8B on 8 H200s
# came out 5 to 16% above in time and 24 to 77% in memory, fsdp alone and one or two sequences a GPU.
FIRST_GUESS = (1.08, 1.5)
# Of a step: plans that differ by less are equal. Planned over published time of the six XLA runs in planned_vs_published.md has
# a standard deviation of 6% around its mean, and layouts of one model on one machine share a part of that error.
ERROR = 0.05
OWN = "the config's own"  # layout, by name
LIKENESS = 8.0  # a plan that shares one more setting with a layout says so much more about it

TOO_BIG = "needs more memory than there is, by its bound"
BIGGER = "a smaller microbatch of the same layout does not fit"
TOO_SLOW = "cannot be faster than the best, by its bound"


@dataclasses.dataclass
class Candidate:
    """A layout, and what became of it."""

    overrides: Overrides
    run: RunConfig
    bound: Bound
    name: str = ""  # of a layout that everybody knows
    outcome: Outcome | None = None
    verdict: str = ""  # best | equal | front | slower | too big | failed
    reason: str = ""
    equal: bool = False  # it fits, and its step is no more than ERROR longer than the fastest
    link_share: float = 0.0  # where it fits: time during which a link is busy, hidden or not, over the fastest step's

    @property
    def plan(self) -> Plan | None:
        return self.outcome.plan if self.outcome else None


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search found.

    `front`: no layout that fits is both faster and smaller than one of these; fastest first. `best`: of those that are equal to
    the fastest, within ERROR, the first by `preference`.
    """

    name: str
    topology: Topology
    run: RunConfig
    best: Candidate | None
    front: tuple[Candidate, ...]
    tried: tuple[Candidate, ...]  # planned or failed, in the order of the table
    layouts: int  # legal ones
    refused: tuple[tuple[Overrides, str], ...]
    cut: Mapping[str, int]  # why layouts were not compiled -> how many
    left: int  # neither compiled nor cut
    could_be: float  # of those, the best bound over the best plan's time; 1 where there are none
    ended: str  # complete | most | budget | interrupted
    usable_gib: float
    seconds: float
    warnings: tuple[str, ...]


class Progress:
    """Where a search stands."""

    def __init__(self, usable_gib: float, most: int):
        self.usable_gib, self.most = usable_gib, most
        self.running: dict[int, Candidate] = {}
        self.finished: list[Candidate] = []
        self.best: Candidate | None = None
        self._too_big: list[dict[str, Any]] = []  # settings of plans that do not fit

    def note(self, candidate: Candidate) -> None:
        self.finished.append(candidate)
        plan = candidate.plan
        if plan and not plan.fits:
            self._too_big.append(dict(candidate.overrides))
        elif plan and (self.best is None or not self.best.plan or _order(plan) < _order(self.best.plan)):
            self.best = candidate

    def cut(self, candidate: Candidate, slack: Sequence[float]) -> str:
        """Why a layout need not be planned; "" where it must be."""
        if candidate.bound.memory_gib * slack[1] > self.usable_gib:
            return TOO_BIG
        if self.best and self.best.plan and candidate.bound.step_s * slack[0] * 1e3 >= self.best.plan.time.step_ms:
            return TOO_SLOW
        mine = dict(candidate.overrides)
        accum = mine.pop("train.grad_accum")
        # Without accumulation there is no second set of gradients, so that a whole batch at once may take less.
        if accum > 1 and any(accum < other["train.grad_accum"] and mine.items() <= other.items() for other in self._too_big):
            return BIGGER
        return ""


def _order(plan: Plan) -> tuple[float, float]:
    return plan.time.step_ms, plan.memory.taken_gib


class _Ranking:
    """What the plans made so far say about layouts that are not planned yet."""

    def __init__(self, todo: Sequence[Candidate]):
        self._sums = {id(c): [1e-3, *(1e-3 * math.log(guess) for guess in FIRST_GUESS)] for c in todo}
        self._settings = {id(c): self._of(c) for c in todo}
        self.slack = [1.0, 1.0]  # below 1: a plan was better than its bound, in time or in memory, and by how much

    @staticmethod
    def _of(candidate: Candidate) -> list[list[Any]]:
        values = dict(candidate.overrides)
        return [[values[key] for key in knob.keys] for knob in KNOBS]

    def learn(self, candidate: Candidate, plan: Plan) -> None:
        if not candidate.bound.step_s:
            return
        ratios = plan.time.step_ms / 1e3 / candidate.bound.step_s, plan.memory.taken_gib / candidate.bound.memory_gib
        self.slack = [min(old, new) for old, new in zip(self.slack, ratios, strict=True)]
        settings = self._settings[id(candidate)]
        for ident, sums in self._sums.items():
            shared = sum(a == b for a, b in zip(settings, self._settings[ident], strict=True))
            weight = LIKENESS**shared
            sums[0] += weight
            sums[1] += weight * math.log(ratios[0])
            sums[2] += weight * math.log(ratios[1])

    def warnings(self) -> tuple[str, ...]:
        """Where a plan was better than the bound that ought to lie below it: what was cut may then have been worth a try."""
        names = "time", "memory"
        return tuple(
            f"a plan took {1 - slack:.1%} less {what} than its bound: the bound is wrong there. Layouts were cut by a bound "
            "that much lower from then on; please report it with the config"
            for what, slack in zip(names, self.slack, strict=True)
            if slack < 1
        )

    def promise(self, candidate: Candidate, usable_gib: float) -> float:
        """The step time it will likely have; one that will likely not fit stands back by as much as it is too big."""
        weight, in_time, in_memory = self._sums[id(candidate)]
        peak = candidate.bound.memory_gib * math.exp(in_memory / weight)
        return candidate.bound.step_s * math.exp(in_time / weight) * max(1.0, peak / usable_gib)


def search(
    run: RunConfig,
    name: str,
    topology: Topology,
    budget_s: float = 0.0,
    *,
    check: Check | None = None,
    rates: Rates | None = None,
    plan_one: str = MAKE,
    jobs: int = 0,
    cache: Cache | None = None,
    most: int = MOST,
    timeout_s: float = TIMEOUT_S,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> SearchResult:
    """The layout with the least planned step time among those that fit.

    Args:
      run: the config; its model, data, batch and dtypes stay as they are.
      name: what the config is called.
      topology: the machine; one that `topology.parse` knows, since each plan is made in a process of its own.
      budget_s: seconds after which running compiles are stopped and the best so far is the result; 0: no limit.
      check: what is wrong with a config; None: what training on this machine would refuse.
      rates: what the GPU reaches; None: what rates.py says of it.
      plan_one: "package.module:function" of (run, topology, rates=...) -> Plan.
      jobs: compiles at a time; 0: as many as cores.
      cache: plans of earlier searches; None: none are read or kept.
      most: plans made at most, those from the cache included.
      timeout_s: of one compile.
      on_progress: called after every change.

    Raises TopologyError for a machine that cannot be described to another process, ValueError where its rates are unknown.
    """
    began = time.monotonic()
    deadline = began + (budget_s or math.inf)
    machines.parse(topology.name)
    rates = rates or rates_for(topology.gpu, run.precision)
    usable = topology.usable_gib(run.train.memory_fraction)
    layouts, refused = legal_layouts(run, topology, rates, check or training_check(topology))
    naive = {overrides: label for label, overrides in naive_layouts(run, topology, layouts).items()}
    own = own_layout(run, topology)
    candidates = []
    for overrides in layouts:
        changed = with_overrides(run, overrides)
        label = " = ".join(filter(None, (OWN if overrides == own else "", naive.get(overrides, ""))))
        candidates.append(Candidate(overrides, changed, bound(changed, topology, rates), label))

    def request(c: Candidate) -> Request:
        return Request(c.run, topology, name, changes(run, c.overrides), rates)

    ranking = _Ranking(candidates)
    todo = {id(c): c for c in candidates}
    progress = Progress(usable, most)

    def settle(candidate: Candidate, outcome: Outcome) -> None:
        candidate.outcome = outcome
        if outcome.plan:
            ranking.learn(candidate, outcome.plan)
        progress.note(candidate)
        on_progress(progress)

    for c in candidates:
        if known := from_cache(cache, request(c), plan_one):
            del todo[id(c)]
            settle(c, known)
    first = [c for c in candidates if c.name and id(c) in todo]  # to compare with, whether they fit or not
    ended = "complete"
    with Pool(jobs, plan_one=plan_one, timeout_s=timeout_s) as pool:
        try:
            while True:
                if time.monotonic() >= deadline:
                    ended = "budget"
                    break
                while pool.room and len(progress.finished) + len(pool.running) < most:
                    following = first.pop(0) if first else _next(todo.values(), progress, ranking)
                    if following is None:
                        break
                    del todo[id(following)]
                    pool.start(id(following), request(following))
                    progress.running[id(following)] = following
                    on_progress(progress)
                if not pool.running:
                    break
                for ident, outcome in pool.wait(min(1.0, deadline - time.monotonic())):
                    c = progress.running.pop(ident)
                    settle(c, keep(cache, request(c), outcome, plan_one))
                on_progress(progress)
        except KeyboardInterrupt:
            ended = "interrupted"
        for ident in pool.running:
            todo[ident] = progress.running.pop(ident)
    seconds = time.monotonic() - began
    warnings = ranking.warnings()
    left, cut = [], Counter()
    for c in todo.values():
        why = progress.cut(c, ranking.slack)
        left += [c] * (not why)
        cut[why] += bool(why)
    if left and ended == "complete":
        ended = "most"
    front = _judge(progress)
    could_be = 1.0
    if progress.best and progress.best.plan and left:
        could_be = min(c.bound.step_s for c in left) * 1e3 / progress.best.plan.time.step_ms
    tried = tuple(sorted(progress.finished, key=_row))
    return SearchResult(
        name=name,
        topology=topology,
        run=run,
        best=next((c for c in tried if c.verdict == "best"), None),
        front=front,
        tried=tried,
        layouts=len(candidates),
        refused=tuple(refused),
        cut=+cut,
        left=len(left),
        could_be=could_be,
        ended=ended,
        usable_gib=usable,
        seconds=seconds,
        warnings=warnings,
    )


def _next(todo: Iterable[Candidate], progress: Progress, ranking: _Ranking) -> Candidate | None:
    """The most promising layout that is not cut."""
    open_ = (c for c in todo if not progress.cut(c, ranking.slack))
    return min(open_, key=lambda c: (ranking.promise(c, progress.usable_gib), c.bound.memory_gib), default=None)


VERDICTS = ("best", "equal", "front", "slower", "too big", "failed")


def axes(candidate: Candidate) -> int:
    """Mesh axes that split anything."""
    return sum(key.startswith("mesh.") and size > 1 for key, size in candidate.overrides)


def preference(candidate: Candidate) -> tuple[float, ...]:
    """Return the sort key of plans whose times are equal: least time on links, fewest mesh axes, shortest step.

    Times on links count in whole percent of the fastest step, the same for all: a longer step must not look like less traffic.
    """
    plan = candidate.plan
    return (round(candidate.link_share, 2), axes(candidate), *_order(plan)) if plan else ()


def _row(candidate: Candidate) -> tuple[float, ...]:
    """Position in the table."""
    group = VERDICTS.index(candidate.verdict)
    if candidate.equal:
        return (group, *preference(candidate))
    return (group, *(_order(candidate.plan) if candidate.plan else ()))


def _judge(progress: Progress) -> tuple[Candidate, ...]:
    """Gives every layout that was tried its verdict and its reason. Returns the front."""
    fitting = [(c, c.plan) for c in progress.finished if c.plan and c.plan.fits]
    fitting.sort(key=lambda item: _order(item[1]))
    front: list[Candidate] = []
    for c in progress.finished:
        if c.outcome and not c.plan:
            c.verdict, c.reason = "failed", f"{c.outcome.kind}: {c.outcome.reason}"
        elif c.plan and not c.plan.fits:
            c.verdict, c.reason = "too big", f"{c.plan.memory.taken_gib - c.plan.memory.usable_gib:.1f} GiB too big"
    smallest = math.inf
    for c, plan in fitting:
        more = plan.time.step_ms / fitting[0][1].time.step_ms - 1
        c.equal = more <= ERROR
        c.link_share = plan.time.communication_ms / fitting[0][1].time.step_ms
        behind = f"{more:.1%} slower"
        if not front:
            c.verdict, c.reason = "front", "fastest that fits"
        elif plan.memory.taken_gib < smallest:
            c.verdict, c.reason = "front", f"{behind}, smaller than all that are faster"
        else:
            c.verdict, c.reason = "slower", f"{behind}, and not smaller"
            continue
        front.append(c)
        smallest = plan.memory.taken_gib
    equal = sorted(((c, plan) for c, plan in fitting if c.equal), key=lambda item: preference(item[0]))
    for n, (c, _) in enumerate(equal):
        c.verdict = "equal" if n else "best"
        if len(equal) > 1:
            count = axes(c)
            among = f"{c.link_share:.0%} of the fastest step on links, {count} mesh {'axis' if count == 1 else 'axes'}"
            c.reason += f"; equal within {ERROR:.0%}: {among}"
    return tuple(front)
