"""The search for the fastest layout that fits, with at most eight compiles.

`meshes` lists the layouts that training accepts. Those whose least memory (plan/fit.py) does not fit are left out. The others
are ordered by the work that they repeat (recomputation, a pipeline's bubble) and roughly by communication. Compiled are the
config's own layout, the first of each kind (the axes it uses besides data and fsdp), and then neighbours of the fastest:
microbatches, ZeRO stages, and meshes in which an axis has half of the devices, and another twice as many. Plans decide which
is the fastest.

If nothing fits with the config's dtypes of the state, narrower ones are tried (STORAGE).
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxtrain.config import schema
from jaxtrain.config.context import METHODS
from jaxtrain.config.schema import ConfigError, Problem, RunConfig
from jaxtrain.plan import MOST
from jaxtrain.plan import topology as machines
from jaxtrain.plan.fit import Check, LeastMemory, least_memory, training_check
from jaxtrain.plan.rates import rates_for
from jaxtrain.plan.result import Plan, Rates
from jaxtrain.plan.search_cache import PlanCache
from jaxtrain.plan.search_parallel import MAKE, TIMEOUT_S, PlanOutcome, Request, plan_many
from jaxtrain.plan.topology import Topology, layout_of

Overrides = tuple[tuple[str, Any], ...]

LONG = 32_768  # tokens; from this length on, meshes with mesh.seq are tried
# A compile may take so many times as long as the longest of the same search, and at least so many seconds. Where the step of 8B
# barely fits, XLA was not done in 15 minutes.
PATIENCE, LEAST_S = 5, 120
ROUND = 2  # layouts that are compiled before the next ones are chosen
ENOUGH = 16_384  # tokens of a microbatch on a device: larger ones make matmuls no faster, and compiles slower
# What twice the size of an axis, or of the nodes of an fsdp group, adds to a step, as a fraction. It orders the layouts, and
# plans decide. In plans of 70B, tensor=2 costs 26% on 64 GPUs, and an fsdp group of 128 nodes 15% more than one of 64.
COST = {"tensor": 0.1, "seq": 0.05, "stage": 0.01, "nodes": 0.005, "expert": -0.01}
ZEROS = ((3, "layer"), (3, "forward"), (2, "layer"), (1, "layer"))  # (sharding.zero, sharding.gather)
SCHEDULES = (("interleaved", 2), ("interleaved", 4), ("1f1b", 1))  # (pipeline.schedule, pipeline.groups)
# Storage dtypes of the state, tried in this order. Later ones round more.
MOMENTS = (("dtypes.m", "bf16"), ("dtypes.v", "bf16"))
STORAGE: tuple[Overrides, ...] = (
    (),
    MOMENTS,
    (("dtypes.m", "int8"), ("dtypes.v", "int8")),
    (*MOMENTS, ("dtypes.grads", "bf16"), ("dtypes.params", "bf16")),
)
WIDTH = {"f32": 4, "bf16": 2, "int8": 1}  # bytes


@dataclasses.dataclass(frozen=True)
class LayoutChoice:
    """A layout: sizes of the mesh axes, and what belongs to them. rows: sequences of each shard of a microbatch."""

    data: int
    fsdp: int
    expert: int = 1
    tensor: int = 1
    seq: int = 1
    stage: int = 1
    context: str = METHODS[0]
    schedule: tuple[str, int] = SCHEDULES[0]
    zero: tuple[int, str] = ZEROS[0]
    rows: int = 1
    stored: Overrides = ()

    @property
    def kind(self) -> tuple[str, ...]:
        """Return the axes that the layout uses besides data and fsdp."""
        return tuple(axis for axis in ("stage", "seq", "tensor", "expert") if getattr(self, axis) > 1)

    def cost(self, node: int) -> float:
        """Return roughly what the communication of the mesh adds to a step, as a fraction. node: GPUs of a node."""
        nodes = -(-self.fsdp * self.expert * self.tensor * self.seq // node)
        sizes = {axis: getattr(self, axis) for axis in COST if axis != "nodes"} | {"nodes": nodes}
        return sum(COST[axis] * math.log2(size) for axis, size in sizes.items())

    def overrides(self, run: RunConfig) -> Overrides | None:
        """Return the layout as overrides of a run; None if the run's batch does not divide."""
        accum, remainder = divmod(run.train.global_batch, self.data * self.fsdp * self.expert * self.rows)
        # With fewer microbatches than stages, a pipeline is idle for about half of the step.
        if remainder or accum < self.stage:
            return None
        axes = tuple((f"mesh.{axis}", getattr(self, axis)) for axis in ("data", "fsdp", "expert", "tensor", "seq", "stage"))
        out = (*axes, ("train.grad_accum", accum), ("sharding.zero", self.zero[0]), ("sharding.gather", self.zero[1]))
        out += (("remat.policy", "auto"), ("remat.tensors", ""), ("remat.every", 1))
        out += (("parallel.context", self.context),) * (self.seq > 1)
        if self.stage > 1:
            out += ("pipeline.schedule", self.schedule[0]), ("pipeline.groups", self.schedule[1])
        return (*out, *self.stored)

    def neighbours(self) -> Iterator["LayoutChoice"]:
        """Yield the layouts that differ in one respect."""
        for zero in ZEROS if self.fsdp * self.expert * self.seq > 1 else ():
            yield dataclasses.replace(self, zero=zero)
        yield dataclasses.replace(self, rows=self.rows * 2)
        yield dataclasses.replace(self, rows=self.rows // 2) if self.rows > 1 else self
        axes = ("data", "fsdp", "expert", "tensor", *(axis for axis in ("seq", "stage") if getattr(self, axis) > 1))
        for a, b in itertools.permutations(axes, 2):
            if getattr(self, b) % 2 == 0:
                yield dataclasses.replace(self, **{a: getattr(self, a) * 2, b: getattr(self, b) // 2})
        for schedule in SCHEDULES if self.stage > 1 else ():
            yield dataclasses.replace(self, schedule=schedule)
        for context in METHODS if self.seq > 1 else ():
            yield dataclasses.replace(self, context=context)


@dataclasses.dataclass(eq=False)
class Candidate:
    """A layout of a config, and its plan after it is compiled.

    Attributes:
        changes: overrides of the config, such as "mesh.fsdp=8"; () for the config's own layout.
    """

    run: RunConfig
    choice: LayoutChoice
    changes: tuple[str, ...]
    least: LeastMemory
    outcome: PlanOutcome | None = None

    @property
    def plan(self) -> Plan | None:
        return self.outcome.plan if self.outcome else None

    @property
    def fits(self) -> bool:
        """Return whether the layout is compiled and fits."""
        return self.plan is not None and self.plan.fits

    @property
    def rank(self) -> tuple[float, ...]:
        """Return the key that sorts compiled layouts: what fits by step time, what is too big by memory, what failed."""
        if self.plan is None:
            return (2,)
        return (0, self.plan.time.step_ms) if self.plan.fits else (1, self.plan.memory.taken_gib)


@dataclasses.dataclass
class SearchResult:
    """The state of a search, and the reason why it ended.

    Attributes:
        own_problems: the reasons why training refuses the config's own layout.
        stored: narrower dtypes of the state that are tried; () for the config's.
        listed: number of meshes with these dtypes that may fit. too_big: number of those that cannot.
        least_gib: the least memory of any layout.
        tried: compiled layouts; best first after the search.
        running: layouts that are being compiled.
        ended: complete (no neighbour of the best is left) | most (number of plans) | budget | interrupted.
    """

    name: str
    topology: Topology
    run: RunConfig
    usable_gib: float
    most: int
    own_problems: tuple[Problem, ...] = ()
    stored: Overrides = ()
    listed: int = 0
    too_big: int = 0
    least_gib: float = math.inf
    tried: list[Candidate] = dataclasses.field(default_factory=list)
    running: list[Candidate] = dataclasses.field(default_factory=list)
    ended: str = ""
    seconds: float = 0.0

    @property
    def is_full(self) -> bool:
        """Return whether as many layouts were compiled as may be."""
        return len(self.tried) >= self.most

    @property
    def best(self) -> Candidate | None:
        """Return the fastest compiled layout that fits, or None."""
        return min((c for c in self.tried if c.fits), key=lambda c: c.rank, default=None)


def search(
    run: RunConfig,
    name: str,
    topology: Topology,
    *,
    overrides: tuple[str, ...] = (),
    budget_s: float = 0.0,
    most: int = MOST,
    check: Check | None = None,
    rates: Rates | None = None,
    plan_one: str = MAKE,
    jobs: int = 0,
    cache: PlanCache | None = None,
    timeout_s: float = TIMEOUT_S,
    on_progress: Callable[[SearchResult], None] = lambda result: None,
) -> SearchResult:
    """Search for the fastest layout of a config on a machine. No layout changes the global batch.

    Args:
        name, overrides: config and its overrides, as labels of plans.
        topology: a machine whose name `parse_topology` accepts, since other processes compile for it by name.
        budget_s: seconds after which running compiles are ended; 0: no limit.
        most: largest number of plans.
        check: returns the problems of training a config; None: `training_check`.
        rates: rates of the GPU; None: `rates_for` this GPU.
        plan_one: "package.module:function" of (run, topology, rates=...) -> Plan.
        jobs: number of compiles that run at the same time; 0: the number of cores.
        on_progress: called when the layouts are listed, and after each start and end of a compile.

    Raises:
        ConfigError: training refuses every layout, for a key that the search does not change.
        TopologyError: the machine has no description.
    """
    began = time.monotonic()
    machines.parse_topology(topology.name)
    check, rates = check or training_check(topology), rates or rates_for(topology.gpu, run.precision)
    result = SearchResult(name, topology, run, topology.usable_gib(run.train.memory_fraction), most)
    result.own_problems = tuple(check(run))
    space = Space(run, topology, check, result)
    options = {"jobs": jobs, "cache": cache, "plan_one": plan_one}

    def compile_batch(batch: list[Candidate]) -> None:
        batch = batch[: most - len(result.tried)]
        if not batch:
            return
        remaining_s = began + budget_s - time.monotonic() if budget_s else 0.0
        if remaining_s < 0:
            raise TimeoutError
        requests = {c: Request(c.run, topology, name, (*overrides, *c.changes), rates) for c in batch}

        def note_start(candidate: Candidate) -> None:
            result.running.append(candidate)
            on_progress(result)

        def note_end(candidate: Candidate, outcome: PlanOutcome) -> None:
            result.running = [other for other in result.running if other is not candidate]
            candidate.outcome = outcome
            if outcome.kind != "stopped":
                result.tried.append(candidate)
            on_progress(result)

        longest = max((c.plan.compile_s for c in result.tried if c.plan), default=math.inf)
        limit = min(timeout_s, max(LEAST_S, PATIENCE * longest))
        outcomes = plan_many(requests, budget_s=remaining_s, timeout_s=limit, on_start=note_start, on_done=note_end, **options)
        if all(outcome.problems and _is_of_every_layout(outcome.problems) for outcome in outcomes.values()):
            raise ConfigError([p for outcome in outcomes.values() for p in outcome.problems][:1])
        if any(outcome.kind == "stopped" for outcome in outcomes.values()):
            raise TimeoutError

    try:
        config_layouts = [] if result.own_problems else [*filter(None, [space.config_layout()])]
        for stored in space.storage():
            result.stored, result.running = stored, []
            layouts = space.list_layouts(stored)
            on_progress(result)
            compile_batch([*config_layouts, *space.first_of_each_kind(layouts, max(1, most // 2 - len(config_layouts)))])
            config_layouts = []
            while (
                not any(c.plan for c in result.tried) and (todo := [c for c in layouts if not c.outcome]) and not result.is_full
            ):
                compile_batch(todo[:ROUND])  # all failed
            if not result.best:
                compile_batch(space.smallest(layouts))
            if result.best or result.is_full:
                break
        while result.best and not result.is_full and (neighbours := space.neighbours(result.best)):
            compile_batch(neighbours[:ROUND])
        result.ended = "most" if result.is_full else "complete"
    except TimeoutError:
        result.ended = "budget"
    except KeyboardInterrupt:
        result.ended = "interrupted"
    if not result.tried and not result.listed and result.own_problems and not result.too_big:
        raise ConfigError(list(result.own_problems))
    result.running.clear()
    result.tried.sort(key=lambda c: c.rank)
    result.seconds = time.monotonic() - began
    return result


class Space:
    """The layouts of a run on a machine, each judged once."""

    def __init__(self, run: RunConfig, topology: Topology, check: Check, result: SearchResult):
        self.run, self.topology, self.check, self.result = run, topology, check, result
        self._candidates: dict[tuple[str, ...], Candidate | None] = {}
        self._too_big = 0

    def config_layout(self) -> Candidate | None:
        """Return the config's own layout, which is legal; None if its least memory does not fit."""
        run, sizes = self.run, layout_of(self.run, self.topology).sizes
        rows = run.train.global_batch // run.train.grad_accum // (sizes["data"] * sizes["fsdp"] * sizes["expert"])
        zero, schedule = (run.sharding.zero, run.sharding.gather), (run.pipeline.schedule, run.pipeline.groups)
        axes: dict[str, Any] = sizes
        choice = LayoutChoice(**axes, context=run.parallel.context, schedule=schedule, zero=zero, rows=rows)
        candidate = self._candidates[()] = self._candidate_that_fits(run, choice, ())
        return candidate

    def storage(self) -> Iterator[Overrides]:
        """Yield the config's dtypes of the state, as (), and then narrower ones."""
        flat = self.run.flat
        yield ()
        for stored in STORAGE[1:]:
            if narrower := tuple((key, dtype) for key, dtype in stored if WIDTH[dtype] < WIDTH[flat[key]]):
                yield narrower

    def list_layouts(self, stored: Overrides) -> list[Candidate]:
        """Return all layouts with one sequence for each shard, sorted."""
        choices = (dataclasses.replace(c, stored=stored) for c in meshes(self.run, self.topology))
        before = self._too_big
        config_layout = None if stored else self._candidates.get(())
        layouts = sorted(dict.fromkeys(filter(None, [config_layout, *map(self._candidate, choices)])), key=self._sort_key)
        self.result.listed, self.result.too_big = len(layouts), self._too_big - before
        return layouts

    def first_of_each_kind(self, layouts: list[Candidate], most: int) -> list[Candidate]:
        """Return the first layout of each kind, with as many sequences of a microbatch as add no recomputation."""
        first: dict[tuple[str, ...], Candidate] = {}
        for c in layouts:
            first.setdefault(c.choice.kind, c)
        return [c for c in map(self._widen_microbatch, first.values()) if c.changes][:most]

    def neighbours(self, best: Candidate) -> list[Candidate]:
        """Return layouts near the best one that were not compiled, sorted.

        First the meshes of other compiled layouts of its kind with its microbatches, then its neighbours: other kinds last, and
        before them other ZeRO stages.
        """
        base = best.choice
        settings = {"rows": base.rows, "zero": base.zero, "schedule": base.schedule, "stored": base.stored}
        same_kind = [c.choice for c in self.result.tried if c.choice.kind == base.kind]
        crossed = [dataclasses.replace(choice, **settings) for choice in same_kind]
        neighbours = dict.fromkeys(c for c in map(self._candidate, (*crossed, *base.neighbours())) if c and not c.outcome)

        def sort_key(c: Candidate) -> tuple[Any, ...]:
            return c.choice.kind != base.kind, c.choice not in crossed, c.choice.zero != base.zero, self._sort_key(c)

        return sorted(neighbours, key=sort_key)

    def smallest(self, layouts: list[Candidate]) -> list[Candidate]:
        """Return the layout with the least memory, if it was not compiled."""
        return [c for c in sorted(layouts, key=lambda c: c.least.gib)[:1] if not c.outcome]

    def _widen_microbatch(self, candidate: Candidate) -> Candidate:
        while 2 * candidate.choice.rows * self.run.data.seq_len <= ENOUGH:
            wider = self._candidate(dataclasses.replace(candidate.choice, rows=2 * candidate.choice.rows))
            if not wider or not wider.changes or wider.least.repeated > candidate.least.repeated:
                break
            candidate = wider
        return candidate

    def _candidate(self, choice: LayoutChoice) -> Candidate | None:
        """Return the candidate of a layout; None if training refuses it, or its least memory does not fit."""
        overrides = choice.overrides(self.run)
        if overrides is None or choice.tensor > self.topology.gpus:
            return None
        changed = changes(self.run, overrides, None if self.result.own_problems else self.topology)
        if changed not in self._candidates:
            self._candidates[changed] = self._make_candidate(choice, overrides, changed)
        return self._candidates[changed]

    def _make_candidate(self, choice: LayoutChoice, overrides: Overrides, changed: tuple[str, ...]) -> Candidate | None:
        run = with_overrides(self.run, overrides)
        if self.check(run):
            return None
        return self._candidate_that_fits(run, choice, changed)

    def _candidate_that_fits(self, run: RunConfig, choice: LayoutChoice, changed: tuple[str, ...]) -> Candidate | None:
        try:
            memory = least_memory(run, self.topology)
        except ConfigError:  # a rule that only `build_program` knows
            return None
        self.result.least_gib = min(self.result.least_gib, memory.gib)
        if math.isinf(memory.repeated):
            self._too_big += 1
            return None
        return Candidate(run, choice, changed, memory)

    def _sort_key(self, c: Candidate) -> tuple[float, ...]:
        return c.least.repeated + c.choice.cost(self.topology.gpus), -c.choice.rows, -c.choice.fsdp


def meshes(run: RunConfig, topology: Topology) -> Iterator[LayoutChoice]:
    """Yield the meshes of the GPUs, with axes of powers of two.

    A tensor group is inside a node. mesh.expert is above 1 only for models with experts, and inside a node or as in the
    config. mesh.seq is above 1 only for sequences from LONG tokens, if the config sets it, or if a step has fewer sequences
    than nodes. A stage is one or more whole nodes; if the config sets mesh.stage, any number of GPUs. An fsdp group is one or
    more whole nodes; or weights are replicated.
    """
    node, total = topology.gpus, topology.total
    if run.mesh.seq != 1 or run.data.seq_len >= LONG:
        seqs = _powers(total)
    else:
        seqs = [n for n in _powers(total) if topology.nodes <= run.train.global_batch * n][:1]
    experts = {*_powers(run.model.num_experts, node), run.mesh.expert} if run.model.num_experts else {1}
    for stage in _powers(total if run.mesh.stage != 1 else topology.nodes):
        for expert, seq, tensor in itertools.product(sorted(experts), seqs, _powers(node)):
            shards, remainder = divmod(total, stage * expert * seq * tensor)
            inside = max(1, node // (expert * seq * tensor))
            widths = {inside * n for n in _powers(topology.nodes)} | {1, shards}
            for fsdp in sorted(width for width in widths if not remainder and shards and shards % width == 0):
                zero = (1, "layer") if stage > 1 else ZEROS[0]
                yield LayoutChoice(shards // fsdp, fsdp, expert, tensor, seq, stage, run.parallel.context, zero=zero)


def _powers(n: int, most: int = 2**20) -> tuple[int, ...]:
    """Return the powers of two that divide n, up to `most`."""
    return tuple(2**k for k in range(n.bit_length()) if n % 2**k == 0 and 2**k <= most)


def with_overrides(run: RunConfig, overrides: Iterable[tuple[str, Any]]) -> RunConfig:
    """Return the run with these overrides. Raises ConfigError for an unknown key or a value of a wrong type."""
    # A search makes hundreds of runs, so only changed sections are converted to dicts and back.
    tree: dict[str, Any] = {schema.public_name(f.name): getattr(run, f.name) for f in dataclasses.fields(run)}
    for key, value in overrides:
        *sections, name = key.split(".")
        subtree = tree
        for section in sections:
            if dataclasses.is_dataclass(subtree[section]):
                subtree[section] = schema.to_dict(subtree[section])
            elif isinstance(subtree[section], tuple):  # config.OWN
                subtree[section] = dict(subtree[section])
            subtree = subtree[section]
        subtree[name] = value
    changed, problems = schema.from_dict(tree)
    if problems:
        raise ConfigError(problems)
    return changed


def changes(run: RunConfig, overrides: Overrides, topology: Topology | None = None) -> tuple[str, ...]:
    """Return the overrides that change the run, such as "mesh.fsdp=8". topology: replaces mesh axes of -1 by their size."""
    flat = run.flat
    if topology:
        flat = flat | {f"mesh.{axis}": size for axis, size in layout_of(run, topology).sizes.items()}
    return tuple(f"{key}={value}" for key, value in overrides if flat[key] != value)


def _is_of_every_layout(problems: Iterable[Problem]) -> bool:
    """Return whether no problem is of a key that the search changes."""
    searched = ("mesh", "remat.", "sharding.", "pipeline.", "dtypes.", "parallel.", "train.grad", "train.global")
    return not any(p.key.startswith(searched) for p in problems)
