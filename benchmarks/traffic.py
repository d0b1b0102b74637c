"""Memory traffic of a step outside of matmuls and attention, part by part, with the least: docs/evidence/performance.md.

    python -m benchmarks.traffic --topology=h200:8 -- --config=FILE [--config.KEY=VALUE ...]

The least traffic assumes one kernel for each elementwise part of the model. The kernel reads its inputs once, and writes the
inputs of matmuls, attention and the residual stream once. No array is copied, filled or stacked.

A microbatch has n tokens on a device. D, F, N, K, H and V are as in shapes.py; F, N, K, V, and the n of norms are divided by
the tensor axis. An element of an activation has c bytes. A layer has P weights on a device. Norms, rotary, SwiGLU and weights
count in each layer and microbatch, loss and embedding in each microbatch, the optimizer once per step:

    norms         forward 2 x 4 n D c: reads the residual stream and a block's output, writes their sum and its norm.
                  Backward 2 x 5 n D c: reads the sum, its gradient and the norm's gradient; writes the sum's gradient, and
                  the norm's output for the weight's gradient. Another 3 n D c if the residual stream is not saved
    rotary        2 n (N + K) H c and the tables, 2 n H 4: forward, backward, and again for q and k if they are not saved
    SwiGLU        forward 3 n F c; backward 6 n F c: reads gate, up and the output's gradient, writes three arrays
    weights       6 P for each gather: reads float32, writes bfloat16. Gradients: reads the dtype on the wire, writes the
                  dtype of the sum; from the second microbatch on, reads the sum too
    loss          n V (4 + 4 + c) for logits in float32: one pass computes the maximum and the sum of exponentials, one
                  writes the gradient. The head's gradient: reads float32, writes the dtype on the wire
    embedding     reads and writes a row for each token; its gradient likewise, in float32
    optimizer     reads gradients once for their norm; then reads weight, moments and gradient, writes weight and moments

The counted traffic comes from the compiled program, by the named scope of each instruction. A kernel of several parts counts
for the part of its last operation. In a loop over layers, stacking saved activations counts with the weights.
"""

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Sequence

import jax
from rich.console import Console

from jaxtrain.config import hardware
from jaxtrain.config.numbers import number
from jaxtrain.data import loading
from jaxtrain.models.activations import saved_activations
from jaxtrain.models.module import select_leaves
from jaxtrain.plan import topology
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.make import read_plan
from jaxtrain.plan.result import KernelSummary
from jaxtrain.report.tables import Column, Section, Table, numbers, print_sections
from jaxtrain.runtime.startup import start_jax
from jaxtrain.step.compiler import local_bytes
from jaxtrain.step.program import Program

# Part -> pattern of its kernels' labels and sources; the first match counts.
PARTS: dict[str, str] = {
    "optimizer": r"^optimizer",
    "loss and head": r"^loss|\bloss\b",
    "embedding": r"\bembed",
    "norms": r"\bnorm\b|final_norm",
    "rotary": r"\brope\b",
    "SwiGLU": r"\bswiglu\b",
    "weights and stacks": r"\b(weight|gradient)\b|remat\.py",
}
OTHER = "copies and others"
OF_LAYERS = ("norms", "rotary", "SwiGLU", "weights and stacks")


@dataclasses.dataclass(frozen=True)
class Part:
    """The counted and the least gigabytes that each GPU reads and writes in one part of a step."""

    name: str
    counted_gb: float
    least_gb: float
    times: int = 0  # passes through a layer in a step; 0 for a part outside of layers


def parts(program: Program, kernels: Sequence[KernelSummary]) -> tuple[Part, ...]:
    """Return the traffic of each part of PARTS, and the other traffic as OTHER. kernels: `Plan.kernels` of the run's plan."""
    least = least_bytes(program)
    counted = dict.fromkeys((*least, OTHER), 0.0)
    for k in kernels:
        if k.kind == "memory":
            text = f"{k.op_name} {k.source}"
            name = next((part for part, pattern in PARTS.items() if re.search(pattern, text)), OTHER)
            counted[name] += k.gb
    times = program.run.model.num_layers * program.layout.batch[0]
    return tuple(Part(name, gb, least.get(name, 0.0) / 1e9, times if name in OF_LAYERS else 0) for name, gb in counted.items())


def ratio(found: Sequence[Part]) -> float:
    """Return the ratio of the counted traffic of all parts to their least traffic."""
    return sum(p.counted_gb for p in found) / sum(p.least_gb for p in found)


def least_bytes(program: Program) -> dict[str, float]:
    """Return part -> least bytes in a step, by the formulas of the module's docstring."""
    run = program.run
    m, p, numerics = run.model, program.placement, program.zero.numerics
    c, reduce, master = numerics.compute.itemsize, numerics.reduce.itemsize, numerics.params.itemsize
    grads, micro = numerics.sums.itemsize, program.layout.batch[0]
    tensor = p.size(p.mesh_axes("mlp"))
    n = run.train.global_batch // micro * run.data.seq_len / p.size(p.token_axes)  # tokens inside blocks
    narrow = n / tensor  # tokens between blocks: norms and residual stream
    D, F, H, V = m.d_model, m.d_ff / tensor, m.head_dim, m.vocab_size / p.size(p.mesh_axes("vocab"))
    heads = (m.num_heads + m.num_kv_heads) / p.size(p.mesh_axes("heads"))
    L, have = m.num_layers, saved_activations(run.remat)
    everything = run.remat.policy == "none"

    again = 0 if everything or "residual" in have else 3
    norms = (L * (2 * 4 + 2 * 5 + again) + 2 + 3) * narrow * D * c  # the last norm has no residual to add
    rotated = 2 + (0 if everything or {"q", "k"} <= have else 1)
    rotary = L * rotated * n * (2 * heads * H * c + 2 * 4 * H)
    swiglu = L * 9 * n * F * c
    layer, table = _weights(program)
    layer_learnt, table_learnt = _weights(program, learnt=True)
    gathers = 1 if run.sharding.gather != "layer" or not program.gathers_where_used else 2 - 1 / L
    weights = layer * L * (master + c) * gathers
    gradients = layer_learnt * L * (reduce + grads) + (layer_learnt * L + table_learnt) * grads * (1 - 1 / micro)
    gathered_table = V * D
    head = table_learnt / table  # trained fraction of embedding and head
    loss = n * V * (4 + 4 + c) + head * gathered_table * (4 + reduce) + table / 2 * (master + c + head * (reduce + grads))
    embedding = 2 * n * D * c + head * n * D * (c + 8) + table_learnt / 2 * grads
    update = (layer_learnt * L + table_learnt) * (2 * master + 2 * grads) + 2 * local_bytes(program.state.optimizer)
    per_microbatch = {
        "norms": norms,
        "rotary": rotary,
        "SwiGLU": swiglu,
        "weights and stacks": weights + gradients,
        "loss and head": loss,
        "embedding": embedding,
    }
    return {name: each * micro for name, each in per_microbatch.items()} | {"optimizer": update}


def _weights(program: Program, learnt: bool = False) -> tuple[float, float]:
    """Return (weights of a layer, weights of embedding and head) on a device. learnt: count only trained weights."""
    layer = other = 0.0
    params = select_leaves(program.state.params, program.trained) if learnt else program.state.params
    for path, a in jax.tree_util.tree_leaves_with_path(params):
        size = math.prod(a.sharding.shard_shape(a.shape))
        if "layers" in [getattr(k, "key", "") for k in path]:
            layer += size / a.shape[0]
        else:
            other += size
    return layer, other


def section(found: Sequence[Part]) -> Section:
    """Return the table of the parts, with the most traffic first."""
    found = sorted(found, key=lambda part: -part.counted_gb)

    def layer(values: Sequence[float]) -> list[str]:
        return [number(1e3 * v / p.times, 0) if p.times else "" for v, p in zip(values, found, strict=True)]

    moved, least = [p.counted_gb for p in found], [p.least_gb for p in found]
    columns = [
        Column("part", [p.name for p in found], total="all"),
        numbers("GB", moved),
        numbers("least GB", least),
        Column(
            "ratio",
            [f"{a / b:.2f}" if b else "-" for a, b in zip(moved, least, strict=True)],
            kind="number",
            total=f"{ratio(found):.2f}",
        ),
        Column("a layer, MB", layer(moved), kind="number"),
        Column("least MB", layer(least), kind="number"),
    ]
    return Section("Memory traffic of a step outside of matmuls and attention, each GPU", [Table("", columns)])


def main(argv: Sequence[str] | None = None) -> int:
    """Compile a config's step, print its traffic, and return the exit code."""
    args = parser().parse_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"
    start_jax(hardware.probe())
    loaded = loading.load_config(args.config)
    if loaded.problems:
        raise SystemExit("\n".join(map(str, loaded.problems)))
    machine = topology.parse_topology(args.topology)
    compiled = compile_step(loaded.run, machine)
    plan = read_plan(compiled, machine)
    print_sections([section(parts(compiled.program, plan.kernels))], Console())
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.traffic", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topology", default="h200:8", help="machine to compile for; default %(default)s")
    parser.add_argument("config", nargs="+", help="after --: --config=FILE and --config.KEY=VALUE, as for training")
    return parser


if __name__ == "__main__":
    sys.exit(main())
