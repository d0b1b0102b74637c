"""Plan well-known models on 1 to 128 GPUs: docs/evidence/what_fits.md.

    python -m benchmarks.what_fits [--write]

A cell is one model on one machine. It has the fastest of a few compiled layouts, or the reason why none fits. A layout is not
compiled if its lower bound of memory (search_bound.py) exceeds a GPU's usable memory. On several nodes two ways to shard the
state are compared: over all GPUs, and within each node. Moments are float32, or bfloat16 if no layout fits with float32.
"""

import concurrent.futures
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import studies
from benchmarks.studies import MODELS, Model
from jaxtrain.config.numbers import percent, rough
from jaxtrain.config.schema import ConfigError, RunConfig, default_config, resolve
from jaxtrain.models import flops
from jaxtrain.plan import topology as machines
from jaxtrain.plan.rates import rates_for
from jaxtrain.plan.result import Plan
from jaxtrain.plan.search_bound import BYTES, bound
from jaxtrain.plan.search_parallel import Outcome, Request, cores, plan_many
from jaxtrain.plan.search_space import changes, meshes, remat_policies, training_check, with_overrides
from jaxtrain.plan.topology import Topology
from jaxtrain.report.plan_sections import describe_remat, mesh, span
from jaxtrain.report.tables import markdown_table

PAGE = "docs/evidence/what_fits.md"
COMMAND = "python -m benchmarks.what_fits --write"
ROWS = ("llama2_7b", "llama2_13b", "llama_30b", "llama2_70b", "llama_175b", "llama_180b", "llama3_405b")
MACHINES = ("h200:1", "h200:2", "h200:4", "h200:8", "h200:8x2", "h200:8x4", "h200:8x16")
MOMENTS = ("f32", "bf16")  # dtypes of moments, tried in this order
TRIES = 3  # most compilations of one way to shard a model over a machine
# Estimated memory of a plan over its lower bound, both without the state. Compiled plans correct it.
ABOVE_BOUND = 1.3
ROUGHLY = 1.1  # tolerated error of the estimate after one plan that was too big
BEHIND = 1.1  # a way to shard is not compiled if it is slower than the fastest by this factor, by their bounds


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout of a model on a machine, with the lower bounds of its step time and memory (search_bound.py)."""

    run: RunConfig
    overrides: tuple[str, ...]
    step_s: float
    memory_gib: float


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model on a machine: its plan, or the reason why it has none."""

    model: Model
    topology: Topology
    plan: Plan | None = None
    run: RunConfig | None = None  # run of the plan
    why_not: str = ""


def base(model: Model, topology: Topology, moments: str) -> RunConfig:
    """Return the run that every layout changes: one sequence per GPU, in one microbatch."""
    config = default_config()
    config.model.update(model.keys)
    config.data.seq_len = model.seq_len
    config.train.update(global_batch=topology.total, grad_accum=1)
    config.dtypes.update(m=moments, v=moments)
    run, problems = resolve(config)
    if problems:
        raise ConfigError(problems)
    return run


def parameters(model: Model) -> int:
    """Return the number of parameters of a model."""
    return flops.parameters(base(model, machines.parse("h200:1"), "f32").model)["total"]


def state_gib(model: Model, topology: Topology, moments: str) -> float:
    """Return GiB of float32 weights and two moments per GPU, sharded over all GPUs: the minimum of every layout."""
    return parameters(model) * (4 + 2 * BYTES[moments]) / topology.total / 2**30


def layouts(model: Model, topology: Topology, moments: str) -> list[Layout]:
    """Return the legal layouts, sorted by the lower bound of step time, then by that of memory.

    Tensor groups stay inside a node. All GPUs shard one state, or each node has a replica. `plan --search` tries more.
    """
    rates = rates_for(topology.gpu, "bf16")
    run, check = base(model, topology, moments), training_check(topology)
    policies = list(remat_policies())
    found = []
    for axes in meshes(run, topology):
        if dict(axes)["mesh.data"] not in (1, topology.nodes):
            continue
        if check(with_overrides(run, axes)):
            continue
        for policy in policies:
            overrides = (*axes, *policy)
            changed = with_overrides(run, overrides)
            least = bound(changed, topology, rates)
            found.append(Layout(changed, changes(run, overrides), float(f"{least.step_s:.3g}"), least.memory_gib))
    return sorted(found, key=lambda layout: (layout.step_s, layout.memory_gib))


class Attempts:
    """Compilations of the layouts that shard the state in one way.

    left: layouts to compile. state: GiB of the state on each GPU. usable: GiB that a GPU has for a plan.
    """

    def __init__(self, left: list[Layout], state: float, usable: float):
        self.left, self.state, self.usable = left, state, usable  # GiB
        self.above, self.tries = ABOVE_BOUND, 0
        self.sizes: list[float] = []  # GiB of the plans that did not fit

    def estimate(self, layout: Layout) -> float:
        """Return the GiB that a plan of the layout probably needs."""
        return self.state + self.above * (layout.memory_gib - self.state)

    def next_layout(self) -> Layout | None:
        """Return the next layout to compile: the fastest that probably fits, else the smallest.

        Return None after TRIES compilations, or if no layout is likely to fit.
        """
        if self.tries >= TRIES or not self.left:
            return None
        for layout in self.left:
            if self.estimate(layout) <= self.usable:
                return layout
        smallest = min(self.left, key=lambda layout: layout.memory_gib)
        # Before the first plan, the estimate excludes nothing. After one plan it excludes only layouts that are far too big.
        most = {0: math.inf, 1: ROUGHLY * self.usable}.get(self.tries, 0.0)
        return smallest if smallest.memory_gib <= self.usable and self.estimate(smallest) <= most else None

    def compile(self, make: Callable[[Layout], Outcome]) -> tuple[Plan | None, Layout | None, str]:
        """Compile until a plan fits or a compilation fails. Return (plan or None, its layout, reason of the failure or "")."""
        while layout := self.next_layout():
            outcome = make(layout)
            self.tries += 1
            self.left.remove(layout)
            if outcome.plan is None:
                return None, None, f"{outcome.kind}: {outcome.reason}"
            if outcome.plan.fits:
                return outcome.plan, layout, ""
            taken = outcome.plan.memory.taken_gib
            self.sizes.append(taken)
            if layout.memory_gib > self.state:
                self.above = max(self.above, (taken - self.state) / (layout.memory_gib - self.state))
        return None, None, ""


def fill(model: Model, topology: Topology, make: Callable[[Layout], Outcome]) -> Cell:
    """Return the cell of a model on a machine. make: compiles a layout."""
    usable = topology.usable_gib()
    sizes, least, reason = [], math.inf, ""
    for moments in MOMENTS:
        found = layouts(model, topology, moments)
        least = min(layout.memory_gib for layout in found)
        attempts = []
        for replicas in sorted({1, topology.nodes}):
            mine = [o for o in found if o.run.mesh.data == replicas and o.memory_gib <= usable]
            attempts.append(Attempts(mine, replicas * state_gib(model, topology, moments), usable))
        first = [(layout.step_s, a) for a in attempts if (layout := a.next_layout())]
        fastest = min((step_s for step_s, _ in first), default=0.0)
        plans = []
        for a in [a for step_s, a in first if step_s <= BEHIND * fastest]:
            plan, layout, failure = a.compile(make)
            sizes += a.sizes
            reason = reason or failure
            if plan and layout:
                plans.append((plan.time.step_ms, len(plans), plan, layout.run))
        if plans:
            return Cell(model, topology, *min(plans)[2:])
        if reason:
            break
    return Cell(model, topology, why_not=reason or _why_not(state_gib(model, topology, MOMENTS[-1]), sizes, least, usable))


def _why_not(state: float, sizes: Sequence[float], least: float, usable: float) -> str:
    """Return the reason why no layout fits, from GiB a GPU: state, compiled plans, smallest lower bound, usable memory."""
    if state > usable:
        needs = f"state alone {amount(state)}"
    else:
        needs = f"compiled, {amount(min(sizes))}" if sizes else f"at least {amount(least)}"
    by_formula = " by formula" if needs.startswith("at least") else ""
    return f"does not fit: {needs} a GPU{by_formula}, {usable:.0f} GiB usable"


def amount(gib: float) -> str:
    """Return GiB or TiB as text."""
    return f"{gib / 1024:.1f} TiB" if gib >= 1024 else f"{gib:.0f} GiB"


def fill_all(models: Sequence[Model], topologies: Sequence[str], jobs: int = 0, **how: Any) -> list[Cell]:
    """Return all cells, model by model. how: further arguments of `plan_many`."""

    def one(pair: tuple[Model, str]) -> Cell:
        model, topology = pair[0], machines.parse(pair[1])

        def make(layout: Layout) -> Outcome:
            request = Request(layout.run, topology, model.name, layout.overrides)
            return plan_many({0: request}, jobs=1, **how)[0]

        cell = fill(model, topology, make)
        print(f"{model.name} on {topology.name}: {mesh(cell.plan) if cell.plan else cell.why_not}", flush=True)
        return cell

    with concurrent.futures.ThreadPoolExecutor(jobs or cores()) as pool:
        return list(pool.map(one, [(model, topology) for model in models for topology in topologies]))


# ---- The page

HEADINGS = ("GPUs", "layout", "moments", "weights", "moments GiB", "gradients", "activations", "peak", "4 x bf16", "16 B",
            "expected tokens/s/GPU", "roofline", "MFU", "scaling")  # fmt: skip


def cells(cell: Cell, first: Plan | None) -> list[str]:
    """Return the cells of a row under HEADINGS. first: plan for the smallest machine on which this model fits."""
    rules = [f"{parameters(cell.model) * each / cell.topology.total / 2**30:.1f}" for each in (8, 16)]
    if cell.plan is None or cell.run is None:
        return [cell.topology.name, cell.why_not, *("-",) * 6, *rules, *("-",) * 4]
    held, time = cell.plan.memory.by_class, cell.plan.time
    moments = held.get("first moment", 0.0) + held.get("second moment", 0.0)
    others = (held.get(kind, 0.0) for kind in ("gradients", "saved activations"))
    sizes = [f"{size:.1f}" for size in (held.get("parameters", 0.0), moments, *others, cell.plan.memory.peak_gib)]
    saved = cell.plan.kept.partition(" keeps ")[2].replace(",", "")  # chosen by remat.policy=auto
    speed, policy = time.tokens_per_s_per_device, f"keep {saved}" if saved else describe_remat(cell.run.remat)
    speeds = [span(time.expected_tokens_per_s_per_device), rough(speed, 4), percent(time.mfu_causal)]
    scaling = percent(speed / first.time.tokens_per_s_per_device) if first else "-"
    layout = f"{mesh(cell.plan)}; {policy if policy.startswith('keep') else f'remat {policy}'}"
    return [cell.topology.name, layout, cell.run.dtypes.m, *sizes, *rules, *speeds, scaling]


def section(found: Sequence[Cell]) -> list[str]:
    """Return the lines about one model, from its cells."""
    model, m = found[0].model, base(found[0].model, found[0].topology, "f32").model
    first = next((cell.plan for cell in found if cell.plan), None)
    return [
        "",
        f"## {model.name}",
        "",
        f"{parameters(model) / 1e9:.1f} B parameters, {m.num_layers} layers of {m.d_model}, {m.num_heads} heads "
        f"({m.num_kv_heads} for keys and values) of {m.head_dim}, feed-forward {m.d_ff}, vocabulary {m.vocab_size:,}; "
        f"sequences of {model.seq_len} ({model.source}).",
        "",
        *markdown_table(HEADINGS, [cells(cell, first) for cell in found]),
    ]


def page(found: Sequence[Cell]) -> list[str]:
    """Return the generated lines of the page."""
    by_model: dict[str, list[Cell]] = {}
    for cell in found:
        by_model.setdefault(cell.model.name, []).append(cell)
    return [*(line for mine in by_model.values() for line in section(mine)), *studies.footer(COMMAND)]


def main(argv: Sequence[str] | None = None) -> int:
    """Plan the table, and print or write the page. Return the exit code."""
    args = parser().parse_args(argv)
    found = fill_all([MODELS[name] for name in ROWS], MACHINES, **studies.start(args))
    studies.publish(PAGE, page(found), args.write)
    return 0


def parser() -> Any:
    """Return the parser of the command line."""
    return studies.make_parser("what_fits", __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
