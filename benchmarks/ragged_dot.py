"""Compare memory and FLOPs of jax.lax.ragged_dot, compiled by XLA, with experts' Pallas kernels. No GPU is needed.

    .venv/bin/python -m benchmarks.ragged_dot --chip=h200 --rows=16384 --experts=8

The grouped matmul multiplies rows (R, D), sorted by expert, by weights (E, D, F) in bfloat16. It and its two gradients are
compiled ahead of time for --chip. The table has each program's temporary memory, and the ratio of its FLOPs to the necessary
FLOPs: each row times the weight of its expert. benchmarks/expert_tiles.py has the Pallas kernels' registers and shared memory.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels.experts import pallas
from jaxtrain.plan import topology
from jaxtrain.plan.program import hlo
from jaxtrain.plan.program.op_cost import instruction_cost

OPTIONS = ("xla_gpu_experimental_use_ragged_dot_fusion", "xla_gpu_experimental_use_ragged_dot_grouped_gemm")
PRECISION = jax.lax.Precision.DEFAULT


def compiled(
    f: Callable[..., object], shapes: Sequence[tuple[tuple[int, ...], str]], chip: str, option: str
) -> tuple[float, float]:
    """Compile `f` for one GPU of this chip. Return (GiB of temporaries, FLOPs of matmuls).

    Args:
        shapes: (shape, dtype) of each argument.
        option: name of an XLA option to switch on; "" for none.
    """
    mesh = Mesh(np.array(topology.devices(topology.parse_topology(f"{chip}:1"))), ("device",))
    whole = NamedSharding(mesh, P())
    arguments = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=whole) for shape, dtype in shapes]
    by_hand = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    options = {"xla_gpu_experimental_enable_fusion_autotuner": False} | ({option: True} if option else {})
    executable: Any = by_hand.lower(*arguments).compile(compiler_options=options)
    module = hlo.parse_hlo(executable.as_text())
    done = (instruction_cost(module, where, i, {}) for i, where, _, _ in hlo.walk(module))
    return executable.memory_analysis().temp_size_in_bytes / 2**30, sum(w.flops for w in done if w)


def gradients(x_RD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, dy_RF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of `jax.lax.ragged_dot`, by JAX."""
    return jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes_E), x_RD, w_EDF)[1](dy_RF)


def by_pallas(x_RD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Return the grouped matmul by the Pallas kernel."""
    return pallas.times(x_RD, w_EDF, sizes_E, "D", PRECISION)


def gradients_by_pallas(x_RD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, dy_RF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of `by_pallas`, by the Pallas kernels."""
    return pallas.times(dy_RF, w_EDF, sizes_E, "F", PRECISION), pallas.outer(x_RD, dy_RF, sizes_E, w_EDF.dtype, PRECISION)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.ragged_dot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chip", default="h200", help="%(default)s")
    for name, size in (("rows", 16384), ("d-model", 4096), ("d-ff", 14336), ("experts", 8)):
        parser.add_argument(f"--{name}", type=int, default=size, help="%(default)s")
    parser.add_argument("--options", action="store_true", help="with XLA's own for ragged dots, each on")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    args = parser().parse_args(argv)
    R, D, F, E = args.rows, args.d_model, args.d_ff, args.experts
    forward = ((R, D), "bfloat16"), ((E, D, F), "bfloat16"), ((E,), "int32")
    backward = *forward, ((R, F), "bfloat16")
    programs = [("forward", jax.lax.ragged_dot, forward, 1), ("backward", gradients, backward, 2)]
    cases = [("ragged_dot", option, *program) for option in ("", *OPTIONS * args.options) for program in programs]
    cases += [("pallas", "", "forward", by_pallas, forward, 1), ("pallas", "", "backward", gradients_by_pallas, backward, 2)]
    print(f"{args.chip}, jax {jax.__version__}: {R} rows of {D}, {E} experts of {D} x {F}, bfloat16\n")
    print("| by | option of XLA | pass | temporaries GiB | FLOPs, times the rows' own |")
    print("|---|---|---|---:|---:|")
    for by, option, name, f, shapes, products in cases:
        gib, flops = compiled(f, shapes, args.chip, option)
        print(f"| {by} | {option} | {name} | {gib:.2f} | {flops / (2.0 * R * D * F * products):.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
