"""What each layout moves, against what its textbook says: docs/collectives.md.

    python -m jaxtrain.plan --textbook                            as tables on the terminal
    python -m jaxtrain.plan --textbook=docs/collectives.md        and as that page

Each layout is compiled, and its collectives are added up by kind, mesh axis and purpose. Beside each stands the formula of the
method's paper, worked out for the same model; whatever no formula promises is shown as such.
"""

import dataclasses
import datetime
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxtrain import flops, launch
from jaxtrain.config import MESH_AXES, ConfigError, RunConfig, rules_in_use
from jaxtrain.page.numbers import GB_PER_GIB, number, size
from jaxtrain.page.sections import markdown_table
from jaxtrain.plan import topology as machines
from jaxtrain.plan.report.live import live
from jaxtrain.plan.result import Collective, Plan
from jaxtrain.plan.search.cache import Cache
from jaxtrain.plan.search.parallel import Outcome, Request, plan_many
from jaxtrain.train.auto_remat import expert_room

CONFIG = "configs/llama3_8b.py"
ROOT = Path(__file__).resolve().parents[3]
BF16, F32 = 2, 4  # bytes
WEIGHTS = re.compile(r"[/(]weights[/)]")  # in an op name: the scope in which a weight is gathered, also under jvp()
LARGE = 2**-10  # GiB of a launch; below it are sums of scalars, statistics of the loss, gradients of norms, token ids
TWO = ("train.grad_accum=2",)  # microbatches: what travels once a step and what once a microbatch part there
MOE = ("model.family=mixtral", "model.num_experts=8")
EXPERTS = (*TWO, "train.global_batch=16", *MOE, "mesh.expert=8", "parallel.scan_layers=true")
STAGES = (
    *("mesh.data=1", "mesh.fsdp=2", "mesh.stage=4", "sharding.zero=1", "train.grad_accum=8", "train.global_batch=16"),
    "parallel.scan_layers=true",
)
ONE_SEQUENCE = ("data.seq_len=65536", "train.global_batch=1", "train.grad_accum=1", "mesh.seq=8")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout that has a name, and the overrides of CONFIG that make it."""

    name: str
    paper: str
    machine: str
    overrides: tuple[str, ...]


ZERO = "ZeRO, arXiv 1910.02054"
LAYOUTS = (
    Layout("DDP, ZeRO-0", "PyTorch DDP, arXiv 2006.15704", "h200:8", (*TWO, "train.global_batch=16", "sharding.zero=0")),
    Layout("ZeRO-1", ZERO, "h200:8", (*TWO, "train.global_batch=16", "sharding.zero=1")),
    Layout("ZeRO-2", ZERO, "h200:8", (*TWO, "train.global_batch=16", "sharding.zero=2")),
    Layout("ZeRO-3, FSDP", ZERO, "h200:8", (*TWO, "train.global_batch=16")),
    Layout(
        "ZeRO-3, gather=forward",
        "PyTorch FSDP, SHARD_GRAD_OP, arXiv 2304.11277",
        "h200:8",
        (*TWO, "train.global_batch=16", "sharding.gather=forward"),
    ),
    Layout("ZeRO-3, gather=step", ZERO, "h200:8", (*TWO, "train.global_batch=16", "sharding.gather=step")),
    Layout(
        "HSDP, two groups of four",
        "PyTorch FSDP, HYBRID_SHARD, arXiv 2304.11277",
        "h200:8",
        (*TWO, "train.global_batch=16", "mesh.data=2", "mesh.fsdp=4"),
    ),
    Layout("HSDP over two nodes", "the same; the default on nodes", "h200:8x2", (*TWO, "train.global_batch=32")),
    Layout(
        "tensor parallel",
        "Megatron-LM with sequence parallelism, arXiv 2205.05198",
        "h200:8",
        ("train.grad_accum=1", "train.global_batch=1", "mesh.tensor=8"),
    ),
    Layout("context parallel, ring", "Ring Attention, arXiv 2310.01889", "h200:8", (*ONE_SEQUENCE, "parallel.context=ring")),
    Layout(
        "context parallel, Ulysses",
        "DeepSpeed Ulysses, arXiv 2309.14509",
        "h200:8",
        (*ONE_SEQUENCE, "parallel.context=ulysses"),
    ),
    Layout(
        "context parallel, gathered keys",
        "Llama 3, arXiv 2407.21783, section 3.3.2",
        "h200:8",
        (*ONE_SEQUENCE, "parallel.context=gather"),
    ),
    Layout("pipeline parallel, 1F1B", "PipeDream-Flush, arXiv 2006.09503", "h200:8", STAGES),
    Layout(
        "pipeline parallel, interleaved",
        "Megatron-LM, arXiv 2104.04473",
        "h200:8",
        (*STAGES, "pipeline.schedule=interleaved", "pipeline.groups=2"),
    ),
    Layout(
        "expert parallel",
        "GShard, arXiv 2006.16668",
        "h200:8",
        EXPERTS,
    ),
)


@dataclasses.dataclass(frozen=True)
class Term:
    """Something that a method moves. Bytes are those that each GPU sends in a step, by ring algorithms."""

    kind: str
    axis: str
    purpose: str  # weights | tokens | attention | stages | experts
    formula: str
    bytes: float


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives of one kind, over one mesh axis, for one purpose."""

    kind: str
    axis: str
    purpose: str
    dtypes: tuple[str, ...]
    count: int
    gb: float
    exposed_ms: float
    formula: str
    promised_gb: float

    @property
    def off(self) -> float:
        """The program over the formula, less one."""
        return self.gb / self.promised_gb - 1 if self.promised_gb else math.inf


def run_of(layout: Layout, more: Sequence[str] = ()) -> RunConfig:
    """The run of a layout; `more`: overrides of its own, for a small one. Raises ConfigError."""
    loaded = launch.load([f"--config={ROOT / CONFIG}", *(f"--config.{o}" for o in (*layout.overrides, *more))])
    if loaded.problems:
        raise ConfigError(loaded.problems)
    return loaded.run


def promised(run: RunConfig, sizes: dict[str, int]) -> list[Term]:
    """What a layout moves by the papers: weights over the axes that split them, gradients over their replicas, activations
    over tensor, keys and values over seq, tokens to their experts, activations from stage to stage. `sizes`: of the mesh axes,
    without those that are not in use. Gathers of experts' weights are not among them.

    Letters: A microbatches; W all weights in bfloat16, of which L those of the layers, H the head's and E the embedding's;
    l layers; X a microbatch's residual stream on one GPU before it is split over tensor, KV keys and values of a layer there
    in bfloat16, QO queries and outputs; v groups of layers on a stage; R the rows that a GPU's experts have room for; n GPUs of
    the axis.
    """
    m, accum = run.model, run.train.grad_accum
    sizes = dict.fromkeys(MESH_AXES, 1) | sizes
    rules = rules_in_use(run, sizes)
    split = [a for a in rules["embed"] if sizes[a] > 1]
    replicas = [a for a in (*rules["batch"], *rules["sequence"]) if sizes[a] > 1 and a not in split]
    count = flops.parameters(m)
    tensor, n = sizes["tensor"], math.prod(sizes[a] for a in split)
    parts = tensor * sizes["stage"]
    everything = BF16 * (count["total"] - count["experts"]) / parts
    head = BF16 * count["head"] / parts
    layers = BF16 * (count["attention"] + count["mlp"]) / parts + BF16 * 2 * m.d_model * m.num_layers / sizes["stage"]
    shards = math.prod(sizes[a] for a in ("data", "fsdp", "expert", "seq"))
    tokens = run.train.global_batch * run.data.seq_len / accum / shards
    stream = BF16 * tokens * m.d_model
    part, axis = (n - 1) / n, "+".join(split)
    terms = []
    if split:
        once = run.sharding.zero == 1 or run.sharding.gather == "step"
        if once:
            terms.append(Term("all-gather", axis, "weights", "(n-1)/n W", part * everything))
        elif run.sharding.zero == 2:
            terms.append(Term("all-gather", axis, "weights", "(n-1)/n (L + H)", part * (layers + head)))
        elif run.sharding.gather == "forward":
            terms.append(Term("all-gather", axis, "weights", "(n-1)/n A (L + H)", part * accum * (layers + head)))
        else:
            twice = layers * (1 - 1 / m.num_layers)  # the last layer's weights are still there when its backward pass begins
            gathered = part * accum * (layers + twice + head)
            terms.append(Term("all-gather", axis, "weights", "(n-1)/n A (2 L - L/l + H)", gathered))
        if once:
            terms.append(Term("reduce-scatter", axis, "weights", "(n-1)/n W", part * everything))
        else:
            terms.append(Term("reduce-scatter", axis, "weights", "(n-1)/n A (L + H)", part * accum * (layers + head)))
            terms.append(Term("all-to-all", axis, "tokens", "(n-1)/n 2 A X", part * accum * 2 * stream))
    if replicas:
        copies = math.prod(sizes[a] for a in replicas)
        shard = f" / {n}" if n > 1 else ""
        summed = 2 * (copies - 1) / copies * everything / n
        terms.append(Term("all-reduce", "+".join(replicas), "weights", f"2 (n-1)/n W{shard}", summed))
    if tensor > 1:
        part = (tensor - 1) / tensor
        once_each = accum * (4 * m.num_layers + 2) * part * stream
        regathered = accum * 2 * m.num_layers * part * stream
        terms.append(Term("all-gather", "tensor", "tokens", "(n-1)/n A (6 l + 2) X", once_each + regathered))
        terms.append(Term("reduce-scatter", "tensor", "tokens", "(n-1)/n A (4 l + 2) X", once_each))
    return [*terms, *_context(run, sizes, tokens), *_stages(run, sizes, stream / tensor), *_experts(run, sizes, tokens)]


def _stages(run: RunConfig, sizes: dict[str, int], stream: float) -> list[Term]:
    """Between neighbours the output of each group and its gradient, in every tick, also in those that have none; from one stage
    to all, with the vocabulary split over them: embedded tokens, states of the last layer, and the gradients of both."""
    n, accum = sizes["stage"], run.train.grad_accum
    if n == 1:
        return []
    ticks = accum * run.pipeline.groups + n - 1
    return [
        Term("collective-permute", "stage", "stages", "2 (A v + n - 1) X", 2 * ticks * stream),
        Term(
            "all-reduce", "stage", "stages", "2 (n-1)/n (4 A + 2 n - 1) X", 2 * (n - 1) / n * (4 * accum + 2 * n - 1) * stream
        ),
    ]


def _experts(run: RunConfig, sizes: dict[str, int], tokens: float) -> list[Term]:
    """There and back forward and backward, and there once more where remat does not keep what arrived."""
    n, m = sizes["expert"], run.model
    if n == 1 or not m.num_experts:
        return []
    rows = BF16 * tokens * expert_room(run, n) * m.d_model
    trips = 4 + (run.remat.policy != "none")
    sent = (n - 1) / n * run.train.grad_accum * m.num_layers / sizes["stage"] * trips * rows
    return [Term("all-to-all", "expert", "experts", f"(n-1)/n A l {trips} R", sent)]


def _context(run: RunConfig, sizes: dict[str, int], tokens: float) -> list[Term]:
    n, m = sizes["seq"], run.model
    if n == 1:
        return []
    each = run.train.grad_accum * m.num_layers
    kv = BF16 * 2 * tokens * m.num_kv_heads * m.head_dim / sizes["tensor"]
    qo = BF16 * 2 * tokens * m.num_heads * m.head_dim / sizes["tensor"]
    match run.parallel.context:
        case "ring":
            around = each * (2 * (n - 1) * kv + n * F32 / BF16 * kv)
            return [Term("collective-permute", "seq", "attention", "A l (2 (n-1) + 2 n) KV", around)]
        case "gather":
            back = each * (n - 1) * F32 / BF16 * kv
            return [
                Term("all-gather", "seq", "attention", "A l 2 (n-1) KV", each * 2 * (n - 1) * kv),
                Term("reduce-scatter", "seq", "attention", "A l 2 (n-1) KV", back),
            ]
        case _:
            traded = each * (n - 1) / n * 3 * (qo + kv)
            return [Term("all-to-all", "seq", "attention", "(n-1)/n A l 3 (QO + KV)", traded)]


def purpose(c: Collective) -> str:
    """What a collective is for."""
    # Where XLA has put several into one, the source line is that of any of them; the weights are the most of it.
    if "kernels/context" in c.source and not WEIGHTS.search(c.op_name):
        return "attention"
    if c.axis == "stage":
        return "stages"
    if "/experts/" in c.op_name:
        return "experts"
    return "tokens" if c.axis == "tensor" or c.kind == "all-to-all" else "weights"


def _large(c: Collective) -> bool:
    return c.wire_gib > LARGE * c.count


def compare(plan: Plan, terms: Sequence[Term]) -> list[Row]:
    """Every collective of a plan but the small ones, beside the terms that promise it. A term without a collective has a row,
    too, and so has a collective without a term."""
    found: dict[tuple[str, str, str], list[Collective]] = {}
    for c in plan.collectives:
        found.setdefault((c.kind, c.axis, purpose(c)), []).append(c)
    wanted = {(t.kind, t.axis, t.purpose): t for t in terms}
    rows = []
    for key in dict.fromkeys((*wanted, *found)):
        group, term = found.get(key, []), wanted.get(key)
        if term is None and not any(map(_large, group)):
            continue
        rows.append(
            Row(
                *key,
                dtypes=tuple(dict.fromkeys(d for c in group if _large(c) for d in c.dtype.split("+") if d != "s32")),
                count=sum(c.count for c in group),
                gb=sum(c.wire_gib for c in group) * GB_PER_GIB,
                exposed_ms=sum(c.exposed_ms for c in group),
                formula=term.formula if term else "none",
                promised_gb=term.bytes / 1e9 if term else 0.0,
            )
        )
    return rows


# ---- as text

HEADINGS = ("collective", "over", "n", "of", "type", "launches", "GB", "formula", "its GB", "off by", "waited for, ms")
MEMORY = ("parameters", "moments", "gradients", "gathered weights", "saved activations", "peak")


def cells(row: Row, sizes: dict[str, int]) -> list[str]:
    """A row under HEADINGS."""
    n = math.prod(sizes[a] for a in row.axis.partition("(")[0].split("+"))
    off = f"{row.off:+.1%}" if row.promised_gb else "-"
    places = 3
    return [
        *(row.kind, row.axis, str(n), row.purpose, "+".join(row.dtypes), f"{row.count:,}", number(row.gb, places)),
        *(row.formula, number(row.promised_gb, places), off, number(row.exposed_ms, 1)),
    ]


def held(plan: Plan) -> list[str]:
    """GiB at the peak, under MEMORY."""
    by = plan.memory.by_class
    moments = by.get("first moment", 0.0) + by.get("second moment", 0.0)
    kinds = (by.get(kind, 0.0) for kind in ("gradients", "gathered weights", "saved activations"))
    return [number(x, 1) for x in (by.get("parameters", 0.0), moments, *kinds, plan.memory.peak_gib)]


def markdown(plans: dict[str, Plan], command: str, date: str = "") -> str:
    """docs/collectives.md."""
    versions = ", ".join(f"{name} {version}" for name, version in next(iter(plans.values())).versions.items())
    out = [
        "# What each layout moves",
        "",
        f"`{CONFIG}` in the layouts that the literature names, each compiled for H200s that are only described.",
        "Every collective of a step, added up by kind and mesh axis, stands beside the formula of its paper.",
        "**Planned, not measured:** bytes are those of the program that XLA made, times are the meter's.",
        "",
        "- GB are what each GPU sends in a step by ring algorithms. There are 8192 tokens to a GPU in a microbatch (with",
        "  tensor=8 to the group that shares them); two microbatches in the data-parallel layouts and with experts, eight in",
        "  pipelines, one in the others.",
        "- A: microbatches. W: all weights in bfloat16; L: those of the layers; H: the head's; all on one stage, and without",
        "  experts'. l: layers. X: a microbatch's residual stream on one GPU (before tensor splits it), in bfloat16. KV: keys",
        "  and values of one layer there; QO: queries and outputs. R: the rows that a GPU's experts have room for, in",
        "  bfloat16. v: groups of layers on a stage. n: GPUs along the axis.",
        "- Expert parallel is a model of Mixtral's size, 8 experts as wide as the 8B's feed-forward block: 2 of them for each",
        "  token. They stay where they are; attention, router and tables are split over the same GPUs, as by ZeRO-3.",
        "- A pipeline sends in every tick, in those of its bubble too. Its embeddings and the states before the head go to all",
        "  stages (all-reduce): the vocabulary is split over them.",
        "- Memory is what is held where the step holds most, which is not always where the most activations are kept.",
        "- Left out: what moves less than a MiB at a time (sums of scalars, statistics of the loss, gradients of norms, token",
        "  ids). Anything else without a formula would stand here with `none`.",
        "- The last layer's weights are not gathered a second time (L/l): its backward pass follows its forward pass.",
        "- Where a table is split, its rows travel to the tokens (all-to-all) instead of the table to every GPU.",
        "- Gradients of keys and values travel in float32, twice the bytes of KV. Ulysses trades queries, keys, values and",
        "  the output a third time in the backward pass, since remat keeps them as they were before.",
        "",
        "| layout | machine | fits | roofline step, ms | waited for, ms | " + " | ".join(f"{m}, GiB" for m in MEMORY) + " |",
        "|---|---|---|---:|---:|" + "---:|" * len(MEMORY),
    ]
    mine = [layout for layout in LAYOUTS if layout.name in plans]
    for layout in mine:
        plan = plans[layout.name]
        fits = "yes" if plan.fits else f"no: {size(plan.memory.taken_gib)}"
        figures = (layout.name, layout.machine, fits, number(plan.time.step_ms, 0), number(plan.time.exposed_ms, 0))
        out.append("| " + " | ".join((*figures, *held(plan))) + " |")
    for layout in mine:
        plan = plans[layout.name]
        mesh = " ".join(f"{axis}={n}" for axis, n in plan.mesh.items() if n > 1)
        rows = compare(plan, promised(run_of(layout), plan.mesh))
        out += ["", f"## {layout.name}", "", f"{layout.paper}. Mesh {mesh}: `{' '.join(layout.overrides)}`.", ""]
        out += markdown_table(HEADINGS, [cells(row, plan.mesh) for row in rows])
    made = date or datetime.date.today().isoformat()
    return (
        "\n".join([*out, "", "## How this page was made", "", "```text", command, "```", "", f"On {made}, with {versions}."])
        + "\n"
    )


def show(plans: dict[str, Plan], console: Console) -> None:
    """The tables, for a terminal."""
    for layout in (x for x in LAYOUTS if x.name in plans):
        plan = plans[layout.name]
        table = Table(*HEADINGS, title=f"{layout.name}, {layout.machine}", title_justify="left", box=None, pad_edge=False)
        for row in compare(plan, promised(run_of(layout), plan.mesh)):
            table.add_row(*cells(row, plan.mesh))
        console.print(table)
        console.print(f"peak {size(plan.memory.peak_gib)}, step {number(plan.time.step_ms, 0)} ms\n", style="dim")


def run(console: Console, out: Path | None = None, *, cache: Cache | None = None, jobs: int = 0, **how: Any) -> int:
    """Plans every layout, prints the tables, and writes the page to `out` if that is given. Returns the exit code."""
    requests = {x.name: Request(run_of(x), machines.parse(x.machine), CONFIG, x.overrides) for x in LAYOUTS}
    finished: list[str] = []
    with live(console, "layouts") as show_progress:
        show_progress(0, len(requests))

        def done(name: str, outcome: Outcome) -> None:
            finished.append(name)
            show_progress(len(finished), len(requests), f"last: {name}", [f"{name}: {outcome.kind}"])

        outcomes = plan_many(requests, jobs=jobs, cache=cache, on_done=done, **how)
    plans = {name: o.plan for name, o in outcomes.items() if o.plan}
    show(plans, console)
    failed = {name: o for name, o in outcomes.items() if o.plan is None}
    for name, o in failed.items():
        console.print(f"{name}: {o.kind}: {o.reason}", markup=False, soft_wrap=True)
    if failed:
        return 1
    if out is not None:
        out.expanduser().write_text(markdown(plans, f"./run.sh plan --textbook={out}"), encoding="utf-8")
        console.print(f"wrote {out}")
    return 0
