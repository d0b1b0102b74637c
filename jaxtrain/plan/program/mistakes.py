"""The classic mistakes of a layout, found in its plan: what was found, what it costs, what to set.

judge.py finds what is wrong with a program; here the program does what the config asks, and the config asks for too little of
something, or for it in the wrong place.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from jax.sharding import Mesh

from jaxtrain import activations
from jaxtrain.config import MESH_AXES, RunConfig
from jaxtrain.kernels.numerics import DTYPES
from jaxtrain.plan.program.roofline import Roofline
from jaxtrain.plan.result import Collective, Memory, Rates
from jaxtrain.sharding import node_of
from jaxtrain.train.stages import IDLE, Schedule

EXPOSED = 0.02  # of the step: waiting for less than this is no mistake
SLACK = 1.25  # no schedule hides all that it could
GB = 2**30 / 1e9  # of a GiB
NAMED = 4  # activations in one warning


def mistakes(
    run: RunConfig, mesh: Mesh, moved: Sequence[Collective], memory: Memory, timed: Roofline, rates: Rates
) -> tuple[str, ...]:
    """All that a config could do better on this machine, by its plan.

    `mesh`: of the compiled step, whose devices know their node. `moved`: every collective, over a whole step.
    """
    return (
        *_across_nodes(run, mesh, moved, timed),
        *_few_rows(run, mesh, moved, timed, rates),
        *_once_a_step(run, mesh, moved, timed),
        *_idle_stages(run, mesh),
        *_no_remat(run, memory),
    )


def _axes(c: Collective) -> set[str]:
    """The mesh axes of a collective, also of one over a part of them: "fsdp(2 of 4)"."""
    return {*c.axis.partition("(")[0].split("+")}


def _of_weights(c: Collective) -> bool:
    """And not of tokens, or of keys and values, which travel over the same axes."""
    return c.kind in ("all-gather", "reduce-scatter", "all-reduce") and "kernels/context" not in c.source


def _share(ms: float, timed: Roofline) -> str:
    return f"{ms:.1f} ms a step ({ms / timed.step_ms:.0%})"


def _split(run: RunConfig, mesh: Mesh, *logical: str) -> set[str]:
    """Mesh axes, of size above 1, that split these logical axes."""
    rules = dict(run.sharding.rules)
    return {a for name in logical for a in rules[name].split("+") if mesh.shape.get(a, 1) > 1}


def _size(mesh: Mesh, axes: set[str]) -> int:
    return math.prod(mesh.shape[a] for a in axes)


def _across_nodes(run: RunConfig, mesh: Mesh, moved: Sequence[Collective], timed: Roofline) -> Iterator[str]:
    """Groups over an axis that talks in every layer, of GPUs in different nodes."""
    nodes = np.vectorize(node_of)(mesh.devices)
    node = int(np.unique(nodes, return_counts=True)[1].max())
    for axis in ("tensor", "seq", "expert"):
        if mesh.shape.get(axis, 1) == 1:
            continue
        groups = np.moveaxis(nodes, mesh.axis_names.index(axis), -1)
        if (groups == groups[..., :1]).all():
            continue
        crossing = [c for c in moved if _axes(c) == {axis} and c.network_gib]
        sent, waited = sum(c.network_gib for c in crossing) * GB, sum(c.exposed_ms for c in crossing)
        inside = mesh.axis_names[mesh.axis_names.index(axis) + 1 :]  # of neighbours nearer to each other
        within = max(1, node // math.prod(mesh.shape[a] for a in inside))
        remedy = {
            "tensor": f"Set mesh.tensor={within} or less, and leave the rest to mesh.fsdp.",
            "seq": f"Set mesh.seq={within} or less if the sequence fits; parallel.context=ring hides the most of it.",
            "expert": f"Set mesh.expert={within} or less, and leave the rest to mesh.fsdp: a GPU then holds more experts.",
        }
        yield (
            f"{axis} groups of {mesh.shape[axis]} reach across nodes of {node} GPUs: each GPU sends {sent:.2f} GB a step over "
            f"the network, and waits {_share(waited, timed)} for it. {remedy[axis]}"
        )


def _few_rows(run: RunConfig, mesh: Mesh, moved: Sequence[Collective], timed: Roofline, rates: Rates) -> Iterator[str]:
    """Microbatches too small for their weights: to travel, or to be read from memory."""
    tokens, accum = run.train.global_batch * run.data.seq_len, run.train.grad_accum
    parts = _size(mesh, _split(run, mesh, "batch"))
    rows = tokens / accum / parts / _size(mesh, _split(run, mesh, "sequence"))
    arithmetic = timed.gemm_ms + timed.attention_ms + timed.memory_ms
    weights = [c for c in moved if _axes(c) <= _split(run, mesh, "embed") and _of_weights(c)]
    travel, waited = sum(c.ms for c in weights), sum(c.exposed_ms for c in weights)
    often = run.sharding.zero >= 2 and run.sharding.gather != "step"  # once for each microbatch, and not once a step
    if often and travel > arithmetic > 0 and waited > EXPOSED * timed.step_ms:
        enough = SLACK * rows * travel / arithmetic
        yield (
            f"a microbatch gives each GPU {rows:,.0f} rows, too few to hide the weights that it needs: they travel for "
            f"{travel:.0f} ms a step, all arithmetic takes {arithmetic:.0f} ms, and {_share(waited, timed)} are waited for. "
            f"About {math.ceil(enough / 256) * 256:,} rows would do. {_larger(run, parts, rows, enough)}"
        )
    # In 8 bits both halve: the bytes of a weight, and the time to multiply by it.
    balance = rates.gemm_tflops / rates.memory_tb_s * DTYPES[run.compute].itemsize / 2
    idle = timed.gemm_ms - timed.gemm_least_ms
    if rows < balance and idle > EXPOSED * timed.step_ms:
        yield (
            f"a microbatch gives each GPU {rows:,.0f} rows, and below {balance:,.0f} a matrix product takes longer to read its "
            f"weights than to compute: {_share(idle, timed)} are lost to that. {_larger(run, parts, rows, balance)}"
        )


def _larger(run: RunConfig, parts: int, rows: float, enough: float) -> str:
    """What gives a GPU so many rows of one microbatch, of which there are `rows`, the batch being split in `parts`."""
    batch, accum = run.train.global_batch, run.train.grad_accum
    fewer = [a for a in range(1, accum) if batch % (a * parts) == 0 and rows * accum / a >= enough]
    if fewer:
        return f"Set train.grad_accum={max(fewer)}."
    also = " and train.grad_accum=1" if accum > 1 else ""
    return f"Set train.global_batch to about {math.ceil(batch * enough / (rows * accum))}{also}, or use fewer GPUs."


def _once_a_step(run: RunConfig, mesh: Mesh, moved: Sequence[Collective], timed: Roofline) -> Iterator[str]:
    """What travels once a step, however many microbatches it has, and is not hidden: too little work for one step."""
    weights = _split(run, mesh, "embed") if run.sharding.zero else set()
    replicas = _split(run, mesh, "batch", "sequence") - weights
    held = run.sharding.zero == 1 or (run.sharding.zero == 3 and run.sharding.gather == "step")
    for axes, what, other in (
        (replicas, "gradients are summed", "a smaller mesh.data leaves less to sum"),
        (weights if held else set(), "weights are gathered and gradients reduced", "sharding.gather=layer can hide it"),
    ):
        waited = sum(c.exposed_ms for c in moved if _axes(c) <= axes and _of_weights(c))
        if waited <= EXPOSED * timed.step_ms:
            continue
        times = 2 ** math.ceil(math.log2(waited * (1 / EXPOSED - 1) / (timed.step_ms - waited)))
        more = f"Set train.grad_accum={run.train.grad_accum * times} and train.global_batch={run.train.global_batch * times}"
        yield (
            f"{what} over {'+'.join(a for a in MESH_AXES if a in axes)} once a step, and {_share(waited, timed)} of that are "
            f"waited for: train.grad_accum={run.train.grad_accum} is too few microbatches. {more} for {EXPOSED:.0%}; {other}."
        )


def _idle_stages(run: RunConfig, mesh: Mesh) -> Iterator[str]:
    """Stages that wait for others at the beginning and at the end of a step, for too few microbatches."""
    stages, accum = mesh.shape.get("stage", 1), run.train.grad_accum
    groups = run.pipeline.groups
    idle = Schedule(run.pipeline.schedule, stages, groups if stages > 1 else 1, accum).bubble
    if idle <= IDLE:
        return
    enough = math.ceil((stages - 1) * (1 / IDLE - 1) / groups / stages) * stages
    more = run.train.global_batch * enough // accum
    several = next((v for v in (2, 4) if v > groups and v * stages <= run.model.num_layers), 0)
    also = (
        f"pipeline.schedule=interleaved pipeline.groups={several} shortens its ticks; "
        if several and accum % stages == 0
        else ""
    )
    yield (
        f"{stages} stages have nothing to do for {idle:.0%} of the step: train.grad_accum={accum} is too few microbatches. "
        f"{also}train.grad_accum={enough}, of train.global_batch={more} or in smaller microbatches, leaves {IDLE:.0%}."
    )


def _no_remat(run: RunConfig, memory: Memory) -> Iterator[str]:
    """Activations kept by a step that does not fit, when a policy would compute them again."""
    missing = memory.taken_gib - memory.usable_gib
    if missing <= 0 or run.remat.policy == "full":
        return
    saved = {policy: sum(memory.saved.values()) - _kept(policy, memory) for policy in ("dots", "attention", "full")}
    policy = next((p for p in saved if saved[p] > missing), "full")
    if saved[policy] < 1.0:
        return
    held = sorted(memory.saved.items(), key=lambda item: -item[1])
    listed = "; ".join(f"{name} {gib:.1f}" for name, gib in held[:NAMED])
    enough = "" if saved[policy] > missing else ", which is not enough alone: take a smaller microbatch too"
    yield (
        f"the step is {missing:.1f} GiB too big, and remat.policy={run.remat.policy} keeps {sum(memory.saved.values()):.1f} "
        f"GiB of activations for the backward pass ({listed}). Set remat.policy={policy} remat.tensors='': about "
        f"{saved[policy]:.0f} GiB less{enough}."
    )


def _kept(policy: str, memory: Memory) -> float:
    """GiB of the saved activations that a policy would keep too. Those of one shape are counted together, and alike."""
    names = {"layer input", *activations.KEPT[policy]}
    total = 0.0
    for group, gib in memory.saved.items():
        each = group.partition(":")[0].split(", ")
        total += gib * sum(name in names for name in each) / len(each)
    return total
