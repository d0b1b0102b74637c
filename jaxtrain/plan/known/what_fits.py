"""What fits: well-known models on one GPU to 16 nodes. Each cell is a compiled plan, or the reason why there can be none.

    python -m jaxtrain.plan --what-fits [--budget=SECONDS]         as tables on the terminal
    python -m jaxtrain.plan --what-fits=docs/what_fits.md          and as that page

A cell is pruned before it is compiled, where the state alone or the formulas of search/bound.py need more than a GPU gives.
Else the fastest layout by those formulas that should fit is compiled, and where it does not fit, a smaller one, TRIES times at
most.
On several nodes two ways to split the state are tried, over all GPUs and within each node, and the faster that fits is shown.
Moments are float32; bfloat16 only where nothing fits with them. All cells go in rounds through the pool and the cache of plans,
so that a run that was cut off goes on where it was.
"""

import dataclasses
import datetime
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain import flops, installed
from jaxtrain.config import ConfigError, RunConfig, default_config, resolve
from jaxtrain.page.numbers import percent, rough
from jaxtrain.page.sections import markdown_table
from jaxtrain.plan import topology as machines
from jaxtrain.plan.known.well_known import SHAPES, Shape
from jaxtrain.plan.rates import rates_for
from jaxtrain.plan.report.live import live
from jaxtrain.plan.report.sections import describe_remat, mesh, span
from jaxtrain.plan.result import Plan, Rates
from jaxtrain.plan.search.bound import BYTES, bound
from jaxtrain.plan.search.cache import Cache
from jaxtrain.plan.search.parallel import Outcome, Request, plan_many
from jaxtrain.plan.search.space import changes, meshes, remat_policies, training_check, with_overrides
from jaxtrain.plan.topology import Topology

MODELS = ("llama2_7b", "llama2_13b", "llama_30b", "llama2_70b", "llama_175b", "llama_180b", "llama3_405b")
MACHINES = ("h200:1", "h200:2", "h200:4", "h200:8", "h200:8x2", "h200:8x4", "h200:8x16")
MOMENTS = ("f32", "bf16")  # in this order
TRIES = 3  # compiles of one way to split a model over a machine
# By how much a plan needs more than its bound, beside the state, which the bound knows exactly. Corrected by what is compiled.
ABOVE_BOUND = 1.3
ROUGHLY = 1.1  # guesses after a plan that was too big are taken to be off by less than this
BEHIND = 1.1  # a way to split that is so much slower than another, by their bounds, is not compiled
NOT_REACHED = "not planned: budget"


@dataclasses.dataclass(frozen=True)
class Layout:
    """One layout of a model on a machine, with its bounds."""

    run: RunConfig
    overrides: tuple[str, ...]
    step_s: float
    memory_gib: float


@dataclasses.dataclass
class Track:
    """One way to split a model over a machine, and what became of it."""

    moments: str
    layouts: list[Layout]  # not tried yet; fastest first by their bounds
    state_gib: float
    usable_gib: float
    above: float = ABOVE_BOUND
    tries: int = 0
    plan: Plan | None = None  # that fits
    run: RunConfig | None = None  # of that plan
    smallest: Plan | None = None  # that does not fit
    reason: str = ""

    def guess(self, layout: Layout) -> float:
        """The peak that a plan of the layout will likely have. GiB."""
        return self.state_gib + self.above * (layout.memory_gib - self.state_gib)

    def following(self) -> Layout | None:
        """What to compile next; None where this track is at its end."""
        if self.plan or self.reason or self.tries >= TRIES or not self.layouts:
            return None
        fitting = [layout for layout in self.layouts if self.guess(layout) <= self.usable_gib]
        if fitting:
            return fitting[0]
        smallest = min(self.layouts, key=lambda layout: layout.memory_gib)
        # Nothing is given up by a guess alone, nor by one that is narrow and was never put to the test.
        most = {0: math.inf, 1: ROUGHLY * self.usable_gib}.get(self.tries, 0.0)
        return smallest if smallest.memory_gib <= self.usable_gib and self.guess(smallest) <= most else None

    def settle(self, layout: Layout, outcome: Outcome) -> None:
        self.tries += 1
        self.layouts.remove(layout)
        plan = outcome.plan
        if plan is None:
            self.reason = NOT_REACHED if outcome.kind == "stopped" else f"{outcome.kind}: {outcome.reason}"
        elif plan.fits:
            self.plan, self.run = plan, layout.run
        else:
            if self.smallest is None or plan.memory.taken_gib < self.smallest.memory.taken_gib:
                self.smallest = plan
            if layout.memory_gib > self.state_gib:
                self.above = max(self.above, (plan.memory.taken_gib - self.state_gib) / (layout.memory_gib - self.state_gib))


class Cell:
    """A model on a machine."""

    def __init__(self, shape: Shape, machine: str):
        self.shape, self.topology = shape, machines.parse(machine)
        self.usable_gib = self.topology.usable_gib()
        self.tracks: list[Track] = []
        self.least_gib = 0.0  # of all layouts, with the moments opened last
        self._left = list(MOMENTS)

    def _open(self, moments: str) -> None:
        """Adds the tracks that could fit with such moments, if any."""
        found = layouts(self.shape, self.topology, moments, rates_for(self.topology.gpu, "bf16"))
        self.least_gib = min(layout.memory_gib for layout in found)
        state = state_gib(self.shape, self.topology, moments)
        opened = []
        for replicas in sorted({1, self.topology.nodes}):
            mine = [o for o in found if o.run.mesh.data == replicas and o.memory_gib <= self.usable_gib]
            if mine:
                opened.append(Track(moments, mine, replicas * state, self.usable_gib))
        first = [(track.following(), track) for track in opened]
        fastest = min((layout.step_s for layout, _ in first if layout), default=0.0)
        self.tracks += [track for layout, track in first if layout and layout.step_s <= BEHIND * fastest]

    def todo(self) -> list[tuple[Track, Layout]]:
        """What to compile next; nothing where this cell is at its end."""
        while True:
            found = [(track, following) for track in self.tracks if (following := track.following())]
            if found or not self._left or any(t.plan or t.reason for t in self.tracks):
                return found
            self._open(self._left.pop(0))

    @property
    def best(self) -> Track | None:
        """The fastest that fits."""
        fitting = [(t.plan.time.step_ms, i) for i, t in enumerate(self.tracks) if t.plan]
        return self.tracks[min(fitting)[1]] if fitting else None

    @property
    def why_not(self) -> str:
        """Why there is no plan."""
        reasons = [t.reason for t in self.tracks if t.reason]
        if reasons:
            return reasons[0]
        usable = f"{self.usable_gib:.0f} GiB usable"
        state = state_gib(self.shape, self.topology, MOMENTS[-1])
        if state > self.usable_gib:
            return f"does not fit: state alone {amount(state)} a GPU, {usable}"
        sizes = [t.smallest.memory.taken_gib for t in self.tracks if t.smallest]
        if sizes:
            return f"does not fit: compiled, {amount(min(sizes))} a GPU, {usable}"
        return f"does not fit: at least {amount(self.least_gib)} a GPU by formula, {usable}"


def amount(gib: float) -> str:
    return f"{gib / 1024:.1f} TiB" if gib >= 1024 else f"{gib:.0f} GiB"


def state_gib(shape: Shape, topology: Topology, moments: str) -> float:
    """Weights in float32 and two moments, split over all GPUs: no layout holds less of them on a GPU."""
    each = 4 + 2 * BYTES[moments]
    return parameters(shape) * each / topology.total / 2**30


def parameters(shape: Shape) -> int:
    return flops.parameters(base(shape, machines.parse("h200:1"), "f32").model)["total"]


def base(shape: Shape, topology: Topology, moments: str) -> RunConfig:
    """The run that every layout changes: one sequence a GPU, in one microbatch."""
    config = default_config()
    config.model.update(shape.model)
    config.data.seq_len = shape.seq_len
    config.train.update(global_batch=topology.total, grad_accum=1)
    config.dtypes.update(m=moments, v=moments)
    run, problems = resolve(config)
    if problems:
        raise ConfigError(problems)
    return run


def layouts(shape: Shape, topology: Topology, moments: str, rates: Rates) -> list[Layout]:
    """Legal layouts, fastest first by their bounds; of those as fast, smallest first.

    Tensor groups stay inside a node, and replicas of the state are whole nodes: the search (`--search`) looks further.
    """
    run, check = base(shape, topology, moments), training_check(topology)
    policies = list(remat_policies(run, topology, rates))
    found = []
    for split in meshes(run, topology, rates):
        if split["mesh.tensor"] > topology.gpus or split["mesh.data"] not in (1, topology.nodes):
            continue
        if check(with_overrides(run, split.items())):
            continue
        for policy in policies:
            overrides = (*split.items(), *policy.items())
            changed = with_overrides(run, overrides)
            least = bound(changed, topology, rates)
            found.append(Layout(changed, changes(run, overrides), float(f"{least.step_s:.3g}"), least.memory_gib))
    return sorted(found, key=lambda layout: (layout.step_s, layout.memory_gib))


def plan_cells(
    cells: Sequence[Cell], *, cache: Cache | None, jobs: int, budget_s: float, on_done: Any = lambda cell: None, **how: Any
) -> None:
    """Compiles what the cells ask for, in rounds, until none asks or the budget is spent."""
    deadline = time.monotonic() + budget_s
    while asked := {(i, j): pair for i, cell in enumerate(cells) for j, pair in enumerate(cell.todo())}:
        left = max(deadline - time.monotonic(), 0.01) if budget_s else 0.0
        requests = {
            ident: Request(layout.run, cells[ident[0]].topology, cells[ident[0]].shape.name, layout.overrides)
            for ident, (_, layout) in asked.items()
        }

        def done(ident: tuple[int, int], outcome: Outcome, asked: Any = asked) -> None:
            track, layout = asked[ident]
            track.settle(layout, outcome)
            on_done(cells[ident[0]])

        plan_many(requests, jobs=jobs, budget_s=left, cache=cache, on_done=done, **how)


# ---- as text

HEADINGS = ("GPUs", "layout", "moments", "weights", "moments GiB", "gradients", "activations", "peak", "4 x bf16", "16 B",
            "expected tokens/s/GPU", "roofline", "MFU", "scaling")  # fmt: skip


def row(cell: Cell, first: Cell | None) -> list[str]:
    """A cell under HEADINGS; `first`: the smallest machine on which this model fits."""
    count, total = parameters(cell.shape), cell.topology.total
    rules = [f"{count * each / total / 2**30:.1f}" for each in (8, 16)]
    best = cell.best
    if best is None or best.plan is None or best.run is None:
        return [cell.topology.name, cell.why_not, *("-",) * 6, *rules, *("-",) * 4]
    plan, held = best.plan, best.plan.memory.by_class
    sizes = (
        held.get("parameters", 0.0),
        held.get("first moment", 0.0) + held.get("second moment", 0.0),
        held.get("gradients", 0.0),
        held.get("saved activations", 0.0),
        plan.memory.peak_gib,
    )
    speed = plan.time.tokens_per_s_per_device
    scaling = "-"
    if first and first.best and first.best.plan:
        scaling = percent(speed / first.best.plan.time.tokens_per_s_per_device)
    policy = describe_remat(best.run)
    policy = policy if policy.startswith("keep") else f"remat {policy}"
    return [
        cell.topology.name,
        f"{mesh(plan)}; {policy}",
        best.moments,
        *(f"{size:.1f}" for size in sizes),
        *rules,
        span(plan.time.expected_tokens_per_s_per_device),
        rough(speed, 4),
        percent(plan.time.mfu_causal),
        scaling,
    ]


def tables(cells: Sequence[Cell]) -> list[tuple[str, list[list[str]]]]:
    """(title, rows under HEADINGS) of each model, in the order of the cells."""
    out = []
    for shape in {cell.shape.name: cell.shape for cell in cells}.values():
        mine = [cell for cell in cells if cell.shape.name == shape.name]
        first = next((cell for cell in mine if cell.best), None)
        m = base(shape, mine[0].topology, "f32").model
        title = (
            f"{shape.name}: {parameters(shape) / 1e9:.1f} B parameters, {m.num_layers} layers of {m.d_model}, "
            f"{m.num_heads} heads ({m.num_kv_heads} for keys and values) of {m.head_dim}, feed-forward {m.d_ff}, "
            f"vocabulary {m.vocab_size:,}; sequences of {shape.seq_len} ({shape.source})"
        )
        out.append((title, [row(cell, first) for cell in mine]))
    return out


def markdown(cells: Sequence[Cell], command: str) -> str:
    """docs/what_fits.md."""
    plans = [cell.best.plan for cell in cells if cell.best and cell.best.plan]
    versions = plans[0].versions if plans else installed.versions()
    source = plans[0].rates.source if plans else rates_for(cells[0].topology.gpu, "bf16").source
    reserve = cells[0].topology.memory_gib - cells[0].usable_gib
    out = [
        "# What fits",
        "",
        "Well-known models on H200s, from one GPU to 16 nodes of 8: the train step compiled by XLA for that machine, its peak",
        "by XLA's buffer assignment, its speed by the meter of `./run.sh plan`. **Planned, not measured:**",
        "[planned_vs_published.md](planned_vs_published.md) says how far such plans are from measured runs. Beside each peak",
        "stand the two usual rules of thumb, divided over the GPUs: four times the weights in bfloat16 (`4 x bf16`), and 16",
        "bytes a parameter (`16 B`).",
        "",
        "- Full-parameter training: float32 weights, bfloat16 compute, gradients reduced in bfloat16, AdamW. Moments are",
        "  float32, or bfloat16 where nothing fits with float32. Documents are packed, attention is cuDNN's, nothing is",
        "  offloaded to the host.",
        "- One sequence a GPU in a single microbatch: 4096 tokens for Llama 2 and the llama-shaped models, 8192 for Llama 3.",
        "  With accumulation (`train.grad_accum`) the sum of gradients comes on top, and a microbatch's own unless they are",
        "  added layer by layer (`train.accumulate`).",
        f"- A GPU gives {cells[0].usable_gib:.1f} GiB to the program; {reserve:.1f} GiB stay with NCCL and the CUDA context.",
        f"- The layout is the fastest of a few that were compiled, up to {TRIES} for each way to split the state, in the order",
        "  of the formulas of jaxtrain/plan/search/bound.py: good, not the best of all. `--search` looks through all, for one",
        "  config and one machine.",
        f"- Rates: {source}. Memory columns are GiB on each GPU at the peak; what they leave of the peak is",
        "  gathered weights, the loss and temporaries. MFU is causal.",
        "- Expected: by published runs of the same kind ([planned_vs_published.md](planned_vs_published.md)), and `-` where",
        "  none is comparable. Roofline: tokens/s/GPU by the meter; MFU and scaling are of it.",
        "- Scaling is tokens/s/GPU over that of the smallest machine in the table on which the model fits. It can be above",
        "  100%: more GPUs share the optimizer's pass over the state, which is long beside so short a step, and make room to",
        "  keep activations that are computed again where memory is tight.",
    ]
    for title, rows in tables(cells):
        name, _, about = title.partition(": ")
        out += ["", f"## {name}", "", f"{about}.", "", *markdown_table(HEADINGS, rows)]
    versions_text = ", ".join(f"{name} {version}" for name, version in versions.items())
    out += ["", "## How this page was made", "", "```text", command, "```", ""]
    out += [f"On {datetime.date.today().isoformat()}, with {versions_text}."]
    return "\n".join(out) + "\n"


def show(cells: Sequence[Cell], console: Console) -> None:
    """The tables, for a terminal: layouts, and why there is none, stand below each, since they are long."""
    at = HEADINGS.index("layout")
    for title, rows in tables(cells):
        console.print(Text(title, style="bold"))
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in (*HEADINGS[:at], *HEADINGS[at + 1 :]):
            table.add_column(heading, justify="left" if heading in ("GPUs", "moments") else "right")
        for line in rows:
            table.add_row(*line[:at], *line[at + 1 :])
        console.print(table)
        for line in rows:
            console.print(Text(f"{line[0]:<10} {line[at]}", style="dim"))
        console.print()


def run(
    console: Console,
    out: Path | None = None,
    *,
    cache: Cache | None = None,
    jobs: int = 0,
    budget_s: float = 0.0,
    models: Sequence[str] = MODELS,
    topologies: Sequence[str] = MACHINES,
    **how: Any,
) -> int:
    """Plans the table, prints it, and writes it to `out` if that is given. Returns the exit code.

    `models` (of SHAPES) and `topologies` say what is in it; `how` goes on to `plan_many`.
    """
    cells = [Cell(SHAPES[model], machine) for model in models for machine in topologies]
    with live(console) as show_progress:
        show_progress(0, sum(len(cell.todo()) for cell in cells))

        def done(cell: Cell) -> None:
            settled = sum(track.tries for c in cells for track in c.tracks)
            waiting = sum(len(c.todo()) for c in cells)
            last = f"{cell.shape.name} on {cell.topology.name}: " + (
                mesh(best.plan) if (best := cell.best) and best.plan else "no"
            )
            show_progress(settled, settled + waiting, f"last: {last}", [f"{settled} of {settled + waiting}: {last}"])

        plan_cells(cells, cache=cache, jobs=jobs, budget_s=budget_s, on_done=done, **how)
    show(cells, console)
    if out is not None:
        budget = f" --budget={budget_s:.0f}" if budget_s else ""
        out.expanduser().write_text(markdown(cells, f"./run.sh plan --what-fits={out}{budget}"), encoding="utf-8")
        console.print(f"wrote {out}")
    return 0 if any(cell.best for cell in cells) or not any(track.reason for cell in cells for track in cell.tracks) else 1
