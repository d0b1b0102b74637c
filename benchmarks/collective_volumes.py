"""Compare the bytes that each layout communicates with the formula of its paper: docs/evidence/collectives.md.

    python -m benchmarks.collective_volumes [--write]

Each layout is compiled. Its collectives are summed by kind, mesh axis and purpose. Each sum is compared with the formula of the
paper for the same model. A large collective without a formula has a row too.
"""

import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import studies
from jaxtrain.config import launch
from jaxtrain.config.layout import rules_in_use
from jaxtrain.config.numbers import GB_PER_GIB, number, size
from jaxtrain.config.schema import MESH_AXES, ConfigError, Model, RunConfig
from jaxtrain.data import loading
from jaxtrain.models import flops
from jaxtrain.plan import topology as machines
from jaxtrain.plan.result import Collective, Plan
from jaxtrain.plan.search_parallel import Request
from jaxtrain.report.tables import markdown_table
from jaxtrain.step.auto_remat import expert_room

PAGE = "docs/evidence/collectives.md"
COMMAND = "python -m benchmarks.collective_volumes --write"
CONFIG = "configs/llama3_8b.py"
BF16, F32 = 2, 4  # bytes
WEIGHTS = re.compile(r"[/(]weights[/)]")  # the scope of a weight's gather in an op_name, also under jvp()
LARGE = 2**-10  # GiB of a launch. Smaller launches are scalars, loss statistics, gradients of norms, and token ids

TWO = "train.grad_accum=2"  # two microbatches, since some collectives run per step and others per microbatch
SIXTEEN = f"{TWO} train.global_batch=16"
EXPERTS = f"{SIXTEEN} model.family=mixtral model.num_experts=8 mesh.expert=8 parallel.scan_layers=true"
STAGES = (
    "mesh.data=1 mesh.fsdp=2 mesh.stage=4 sharding.zero=1 train.grad_accum=8 train.global_batch=16 parallel.scan_layers=true"
)
ONE_SEQUENCE = "data.seq_len=65536 train.global_batch=1 train.grad_accum=1 mesh.seq=8"
ZERO, FSDP = "ZeRO, arXiv 1910.02054", "PyTorch FSDP, {}, arXiv 2304.11277"


@dataclasses.dataclass(frozen=True)
class Layout:
    """A named layout of a paper, and the overrides of CONFIG for it."""

    name: str
    paper: str
    settings: str  # KEY=VALUE, separated by spaces
    machine: str = "h200:8"

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return the overrides, one KEY=VALUE string each."""
        return tuple(self.settings.split())


LAYOUTS = (
    Layout("DDP, ZeRO-0", "PyTorch DDP, arXiv 2006.15704", f"{SIXTEEN} sharding.zero=0"),
    Layout("ZeRO-1", ZERO, f"{SIXTEEN} sharding.zero=1"),
    Layout("ZeRO-2", ZERO, f"{SIXTEEN} sharding.zero=2"),
    Layout("ZeRO-3, FSDP", ZERO, SIXTEEN),
    Layout("ZeRO-3, gather=forward", FSDP.format("SHARD_GRAD_OP"), f"{SIXTEEN} sharding.gather=forward"),
    Layout("ZeRO-3, gather=step", ZERO, f"{SIXTEEN} sharding.gather=step"),
    Layout("HSDP, two groups of four", FSDP.format("HYBRID_SHARD"), f"{SIXTEEN} mesh.data=2 mesh.fsdp=4"),
    Layout("HSDP over two nodes", "the same; the default on nodes", f"{TWO} train.global_batch=32", "h200:8x2"),
    Layout(
        "tensor parallel",
        "Megatron-LM with sequence parallelism, arXiv 2205.05198",
        "train.grad_accum=1 train.global_batch=1 mesh.tensor=8",
    ),
    Layout("context parallel, ring", "Ring Attention, arXiv 2310.01889", f"{ONE_SEQUENCE} parallel.context=ring"),
    Layout("context parallel, Ulysses", "DeepSpeed Ulysses, arXiv 2309.14509", f"{ONE_SEQUENCE} parallel.context=ulysses"),
    Layout(
        "context parallel, gathered keys",
        "Llama 3, arXiv 2407.21783, section 3.3.2",
        f"{ONE_SEQUENCE} parallel.context=gather",
    ),
    Layout("pipeline parallel, 1F1B", "PipeDream-Flush, arXiv 2006.09503", STAGES),
    Layout(
        "pipeline parallel, interleaved",
        "Megatron-LM, arXiv 2104.04473",
        f"{STAGES} pipeline.schedule=interleaved pipeline.groups=2",
    ),
    Layout("expert parallel", "GShard, arXiv 2006.16668", EXPERTS),
)


@dataclasses.dataclass(frozen=True)
class Term:
    """Collectives of one kind, mesh axis and purpose in a paper's method. bytes: sent by each GPU in a step, with rings."""

    kind: str
    axis: str
    purpose: str  # weights | tokens | attention | stages | experts
    formula: str
    bytes: float


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives of a compiled step with one kind, mesh axis and purpose, and the paper's formula ("none" without one)."""

    kind: str
    axis: str
    purpose: str
    dtypes: tuple[str, ...]
    count: int
    gb: float
    exposed_ms: float
    formula: str
    formula_gb: float

    @property
    def off(self) -> float:
        """Return the relative difference of the program's bytes from the formula's."""
        return self.gb / self.formula_gb - 1 if self.formula_gb else math.inf


def run_of(layout: Layout) -> RunConfig:
    """Return CONFIG with the overrides of a layout. Raises ConfigError if an override is wrong."""
    loaded = loading.load_config([f"--config={launch.REPO / CONFIG}", *(f"--config.{o}" for o in layout.overrides)])
    if loaded.problems:
        raise ConfigError(loaded.problems)
    return loaded.run


def terms_of(run: RunConfig, mesh: Mapping[str, int]) -> list[Term]:
    """Return the collectives of a layout by the papers' formulas.

    Weights are gathered over the axes that shard them. Gradients are reduced over these axes and over the axes that replicate
    weights. Activations are communicated over tensor and stage, keys and values over seq, routed tokens over expert. With
    ZeRO-2 and ZeRO-3, token embeddings are exchanged over the axes that shard weights. Gathers of experts' weights are left
    out.

    Letters of the formulas: A microbatches; l layers; v virtual stages of a stage; n GPUs of the axis. Bytes in bfloat16: W all
    weights, L weights of the layers, H weights of the head; X the residual stream of a microbatch on one GPU before tensor
    shards it; KV keys and values, QO queries and outputs, of a layer for the same tokens as X; R the rows of a GPU's expert
    buffers in a layer and microbatch, at their capacity.

    Args:
        mesh: size of each axis in use.
    """
    m, accum = run.model, run.train.grad_accum
    sizes = dict.fromkeys(MESH_AXES, 1) | dict(mesh)
    rules = rules_in_use(run.sharding, m.num_experts, sizes)
    shards = [a for a in rules["embed"] if sizes[a] > 1]
    replicas = [a for a in (*rules["batch"], *rules["sequence"]) if sizes[a] > 1 and a not in shards]
    count, tensor = flops.parameters(m), sizes["tensor"]
    parts = tensor * sizes["stage"]
    everything = BF16 * (count["total"] - count["experts"]) / parts
    head = BF16 * count["head"] / parts
    layers = BF16 * (count["attention"] + count["mlp"]) / parts + BF16 * 2 * m.d_model * m.num_layers / sizes["stage"]
    tokens = run.train.global_batch * run.data.seq_len / accum / math.prod(sizes[a] for a in ("data", "fsdp", "expert", "seq"))
    stream = BF16 * tokens * m.d_model
    terms = []
    n, axis = math.prod(sizes[a] for a in shards), "+".join(shards)
    if shards:
        part = (n - 1) / n
        once = run.sharding.zero == 1 or run.sharding.gather == "step"
        if once:
            formula, gathered = "(n-1)/n W", everything
        elif run.sharding.zero == 2:
            formula, gathered = "(n-1)/n (L + H)", layers + head
        elif run.sharding.gather == "forward":
            formula, gathered = "(n-1)/n A (L + H)", accum * (layers + head)
        else:
            twice = layers * (1 - 1 / m.num_layers)  # the last layer's weights are still in memory for its backward pass
            formula, gathered = "(n-1)/n A (2 L - L/l + H)", accum * (layers + twice + head)
        terms.append(Term("all-gather", axis, "weights", formula, part * gathered))
        if once:
            terms.append(Term("reduce-scatter", axis, "weights", "(n-1)/n W", part * everything))
        else:
            terms.append(Term("reduce-scatter", axis, "weights", "(n-1)/n A (L + H)", part * accum * (layers + head)))
            terms.append(Term("all-to-all", axis, "tokens", "(n-1)/n 2 A X", part * accum * 2 * stream))
    if replicas:
        copies = math.prod(sizes[a] for a in replicas)
        reduced = 2 * (copies - 1) / copies * everything / n
        terms.append(Term("all-reduce", "+".join(replicas), "weights", f"2 (n-1)/n W{f' / {n}' if n > 1 else ''}", reduced))
    if tensor > 1:
        each = (tensor - 1) / tensor * accum * stream
        gathers, scatters = each * (6 * m.num_layers + 2), each * (4 * m.num_layers + 2)
        terms.append(Term("all-gather", "tensor", "tokens", "(n-1)/n A (6 l + 2) X", gathers))
        terms.append(Term("reduce-scatter", "tensor", "tokens", "(n-1)/n A (4 l + 2) X", scatters))
    if (n := sizes["seq"]) > 1:
        terms += _context_terms(run.parallel.context, n, m, accum * m.num_layers, BF16 * 2 * tokens * m.head_dim / tensor)
    if (n := sizes["stage"]) > 1:
        # Between neighbours: the output of each virtual stage and its gradient, also in the bubble. To all stages: embedded
        # tokens, outputs of the last layer, and the gradients of both, since the vocabulary is sharded over stages.
        sent, shared = 2 * (accum * run.pipeline.groups + n - 1), 2 * (n - 1) / n * (4 * accum + 2 * n - 1)
        terms.append(Term("collective-permute", "stage", "stages", "2 (A v + n - 1) X", sent * stream / tensor))
        terms.append(Term("all-reduce", "stage", "stages", "2 (n-1)/n (4 A + 2 n - 1) X", shared * stream / tensor))
    if (n := sizes["expert"]) > 1 and m.num_experts:
        # Dispatch and combine, forward and backward, and a third dispatch if remat does not save the dispatched tokens.
        trips = 4 + (run.remat.policy != "none")
        sent = (
            (n - 1) / n * accum * m.num_layers / sizes["stage"] * trips * BF16 * tokens * expert_room(m, run.moe, n) * m.d_model
        )
        terms.append(Term("all-to-all", "expert", "experts", f"(n-1)/n A l {trips} R", sent))
    return terms


def _context_terms(context: str, n: int, m: Model, layers: int, each: float) -> list[Term]:
    """Return the collectives of attention over mesh.seq, for a value of parallel.context.

    Args:
        n: size of mesh.seq.
        layers: number of layers times number of microbatches.
        each: bytes of one head's keys and values for a microbatch on one GPU. Its queries and outputs have as many bytes.
    """
    kv, qo = layers * each * m.num_kv_heads, layers * each * m.num_heads
    if context == "ring":
        around = 2 * (n - 1) * kv + n * F32 / BF16 * kv
        return [Term("collective-permute", "seq", "attention", "A l (2 (n-1) + 2 n) KV", around)]
    if context == "gather":
        back = (n - 1) * F32 / BF16 * kv
        return [
            Term("all-gather", "seq", "attention", "A l 2 (n-1) KV", 2 * (n - 1) * kv),
            Term("reduce-scatter", "seq", "attention", "A l 2 (n-1) KV", back),
        ]
    return [Term("all-to-all", "seq", "attention", "(n-1)/n A l 3 (QO + KV)", (n - 1) / n * 3 * (qo + kv))]


def purpose(c: Collective) -> str:
    """Return the purpose of a collective, one of the values that `Term.purpose` lists."""
    # If XLA merged several collectives, the source line is that of any of them. Most of the bytes are weights.
    if "kernels/context_parallel" in c.source and not WEIGHTS.search(c.op_name):
        return "attention"
    if c.axis == "stage":
        return "stages"
    if "/experts/" in c.op_name:
        return "experts"
    return "tokens" if c.axis == "tensor" or c.kind == "all-to-all" else "weights"


def compare(plan: Plan, terms: Sequence[Term]) -> list[Row]:
    """Return a row for each kind, mesh axis and purpose, with the plan's collectives and the paper's term.

    A term has a row even if the plan has no such collective. Collectives without a term have a row only if one of them sends
    more than LARGE in a launch.
    """

    def is_large(c: Collective) -> bool:
        return c.wire_gib > LARGE * c.count

    found: dict[tuple[str, str, str], list[Collective]] = {}
    for c in plan.collectives:
        found.setdefault((c.kind, c.axis, purpose(c)), []).append(c)
    of_papers = {(t.kind, t.axis, t.purpose): t for t in terms}
    rows = []
    for key in dict.fromkeys((*of_papers, *found)):
        group, term = found.get(key, []), of_papers.get(key)
        if term is None and not any(map(is_large, group)):
            continue
        dtypes = dict.fromkeys(d for c in group if is_large(c) for d in c.dtype.split("+") if d != "s32")
        gb, exposed_ms = sum(c.wire_gib for c in group) * GB_PER_GIB, sum(c.exposed_ms for c in group)
        formula, formula_gb = (term.formula, term.bytes / 1e9) if term else ("none", 0.0)
        rows.append(Row(*key, tuple(dtypes), sum(c.count for c in group), gb, exposed_ms, formula, formula_gb))
    return rows


# ---- The page

HEADINGS = ("collective", "over", "n", "of", "type", "launches", "GB", "formula", "its GB", "off by", "exposed, ms")
MEMORY = ("parameters", "moments", "gradients", "gathered weights", "saved activations", "peak")


def cells(row: Row, mesh: Mapping[str, int]) -> list[str]:
    """Return the cells of a row under HEADINGS."""
    n = math.prod(mesh[a] for a in row.axis.partition("(")[0].split("+"))
    off = f"{row.off:+.1%}" if row.formula_gb else "-"
    sizes = number(row.gb, 3), row.formula, number(row.formula_gb, 3), off, number(row.exposed_ms, 1)
    return [row.kind, row.axis, str(n), row.purpose, "+".join(row.dtypes), f"{row.count:,}", *sizes]


def summary(layout: Layout, plan: Plan) -> list[str]:
    """Return a layout's cells in the first table: machine, whether the plan fits, times, and GiB at the peak by MEMORY."""
    held = {kind: plan.memory.by_class.get(kind, 0.0) for kind in MEMORY} | {"peak": plan.memory.peak_gib}
    held["moments"] = sum(plan.memory.by_class.get(f"{which} moment", 0.0) for which in ("first", "second"))
    fits = "yes" if plan.fits else f"no: {size(plan.memory.taken_gib)}"
    times = number(plan.time.step_ms, 0), number(plan.time.exposed_ms, 0)
    return [layout.name, layout.machine, fits, *times, *(number(held[kind], 1) for kind in MEMORY)]


def page(plans: Mapping[str, Plan]) -> list[str]:
    """Return the generated lines of the page."""
    mine = [(layout, plans[layout.name]) for layout in LAYOUTS if layout.name in plans]
    headings = ("layout", "machine", "fits", "roofline step, ms", "exposed, ms", *(f"{kind}, GiB" for kind in MEMORY))
    out = ["", *markdown_table(headings, [summary(layout, plan) for layout, plan in mine])]
    for layout, plan in mine:
        mesh = " ".join(f"{axis}={n}" for axis, n in plan.mesh.items() if n > 1)
        rows = compare(plan, terms_of(run_of(layout), plan.mesh))
        out += ["", f"## {layout.name}", "", f"{layout.paper}. Mesh {mesh}: `{layout.settings}`.", ""]
        out += markdown_table(HEADINGS, [cells(row, plan.mesh) for row in rows])
    return [*out, *studies.footer(COMMAND, mine[0][1].versions)]


def main(argv: Sequence[str] | None = None) -> int:
    """Plan every layout, and print or write the page. Return the exit code."""
    args = parser().parse_args(argv)
    how = studies.start(args)
    requests = {x.name: Request(run_of(x), machines.parse_topology(x.machine), CONFIG, x.overrides) for x in LAYOUTS}
    studies.publish(PAGE, page(studies.plan_all(requests, **how)), args.write)
    return 0


def parser() -> Any:
    """Return the parser of the command line."""
    return studies.make_parser("collective_volumes", __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
