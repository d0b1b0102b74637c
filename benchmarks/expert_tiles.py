"""Registers and shared memory of the Pallas grouped matmuls on Hopper, by NVIDIA's assembler. No GPU is needed.

    .venv/bin/python -m benchmarks.expert_tiles

The table has a row for each grouped matmul; two are in FP8. The columns are the tile's
rows x columns, its contracted size and stages, then as in benchmarks/attention_tiles.py. The last column is the bytes of
temporaries of the compiled program, which pads the rows to a multiple of 8 and other sizes to a multiple of 64.
"""

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.attention_tiles import FACTS, taken
from jaxtrain.kernels import fp8
from jaxtrain.kernels.experts import pallas
from jaxtrain.plan import topology

PRECISION = jax.lax.Precision.DEFAULT


def products(R: int, D: int, F: int, E: int) -> dict[str, tuple[Any, list[tuple[tuple[int, ...], Any]]]]:
    """Return kernel -> (grouped matmul, (shape, dtype) of each argument), for R rows, E experts, and matrices of D x F."""
    x, h, w, sizes = ((R, D), jnp.bfloat16), ((R, F), jnp.bfloat16), ((E, D, F), jnp.bfloat16), ((E,), jnp.int32)
    scale, w8 = ((), jnp.float32), ((E, F, D), jnp.float8_e4m3fn)
    eight = functools.partial(pallas.times8, out=jnp.dtype(jnp.bfloat16))
    return {
        "times_D": (functools.partial(pallas.times, contract="D", precision=PRECISION), [x, w, sizes]),
        "times_F": (functools.partial(pallas.times, contract="F", precision=PRECISION), [h, w, sizes]),
        "outer_R": (functools.partial(pallas.outer, out=jnp.dtype(jnp.bfloat16), precision=PRECISION), [x, h, sizes]),
        pallas.FAST: (functools.partial(eight, sums=fp8.FAST), [((R, D), jnp.float8_e4m3fn), w8, scale, sizes]),
        pallas.FULL: (functools.partial(eight, sums=fp8.FULL), [((R, D), jnp.float8_e5m2), w8, scale, sizes]),
    }


def compile_into(folder: Path, chip: str, f: Any, shapes: Sequence[tuple[tuple[int, ...], Any]]) -> int:
    """Compile a grouped matmul for the GPU type `chip`, and dump the compiler's files into `folder`.

    Returns: bytes of temporaries of the program.
    """
    mesh = Mesh(np.array(topology.devices(topology.parse_topology(f"{chip}:1"))), ("device",))
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P())) for shape, dtype in shapes]
    manual = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    with mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=str(folder)):
        executable: Any = manual.lower(*arguments).compile()
    return executable.memory_analysis().temp_size_in_bytes


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.expert_tiles", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chip", default="h200", help="h100 or h200 (default: %(default)s)")
    for name, size in (("rows", 16384), ("d-model", 4096), ("d-ff", 14336), ("experts", 8)):
        parser.add_argument(f"--{name}", type=int, default=size, help="%(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    args = parser().parse_args(argv)
    print("| kernel | tile | contracted | stages | registers | spilled | shared | wgmma | serialized | temporaries |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---|---:|")
    for kernel, (f, shapes) in products(args.rows, args.d_model, args.d_ff, args.experts).items():
        with tempfile.TemporaryDirectory() as folder:
            temporaries = compile_into(Path(folder), args.chip, f, shapes)
            found = taken(Path(folder), pallas.PREFIX)[kernel]
        tile = pallas.TILES[kernel if kernel in pallas.TILES else kernel.partition("_")[0]]
        facts = " | ".join(str(found[x]) for x in FACTS)
        size = f"{tile.rows} x {tile.columns} | {tile.contracted} | {tile.stages}"
        print(f"| {kernel} | {size} | {facts} | {temporaries} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
