"""Registers and shared memory of the Pallas attention kernels on Hopper, by NVIDIA's assembler. No GPU is needed.

    .venv/bin/python -m benchmarks.attention_tiles

The table has a row for each head_dim and each of the four kernels. The forward kernel in e4m3 has rows up to a head_dim of 192.
The columns are the tile's queries x keys and stages, registers per thread at launch, spilled bytes, bytes of shared memory, the
number of WGMMA instructions, and whether the assembler serializes them. If a kernel needs more shared memory than an SM has,
its compilation fails. Ignore the warning that nvdisasm is missing.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels.attention import KERNEL, Rows, Spec, implementation, pallas
from jaxtrain.plan import topology

HEAD_DIMS = (64, 128, 192, 256)
SERIALIZED = "wgmma.mma_async instructions are serialized"  # the assembler's warning C7510
FACTS = ("registers", "spilled", "shared", "wgmma", "serialized")


def compile_into(folder: Path, chip: str, spec: Spec, T: int = 4096, N: int = 8, K: int = 2) -> None:
    """Compile attention's forward and backward kernels for the GPU type `chip`, and dump the compiler's files into `folder`.

    If spec.fp8 is set, the forward kernel is in e4m3.
    """
    mesh = Mesh(np.array(topology.devices(topology.parse_topology(f"{chip}:1"))), ("device",))
    whole = NamedSharding(mesh, P())
    q, k = (jax.ShapeDtypeStruct((2, T, heads, spec.head_dim), jnp.bfloat16, sharding=whole) for heads in (N, K))
    ids = jax.ShapeDtypeStruct((2, T), jnp.int32, sharding=whole)

    def both(q, k, v, do, segments, positions):
        module = implementation("pallas", spec)
        prepared = module.prepare(Rows(segments, positions, segments, positions), spec)
        o, back = jax.vjp(lambda q, k, v: module.attention(q, k, v, prepared, spec), q, k, v)
        return o, *back(do)

    manual = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    with mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=str(folder)):
        manual.lower(q, k, k, q, ids, ids).compile()


def taken(folder: Path, prefix: str) -> dict[str, dict[str, int | str]]:
    """Return kernel -> {name in FACTS: value}, from the compiler's files in `folder`. Kernel names are without `prefix`.

    Raises:
        ValueError: a file lacks one of FACTS, or a kernel's name has another prefix.
    """
    out: dict[str, dict[str, int | str]] = {}
    for file in folder.glob("*.ptxas"):
        printed, ptx = file.read_text(), file.with_suffix(".ptx").read_text()
        kernel = re.search(rf"{prefix}(\w+?)_mosaic", printed)
        spilled, registers = re.search(r"frame, (\d+) bytes spill", printed), re.search(r"Used (\d+) registers", printed)
        shared = re.search(r"smem_scratch_bytes=(\d+)", file.with_suffix(".resources.txt").read_text())
        if not (kernel and spilled and registers and shared):
            raise ValueError(f"{file.name}: the assembler printed no registers: {printed[:200]}")
        out[kernel[1]] = {
            "registers": int(registers[1]),
            "spilled": int(spilled[1]),
            "shared": int(shared[1]),
            "wgmma": ptx.count("wgmma.mma_async"),
            "serialized": "yes" if SERIALIZED in printed else "no",
        }
    return out


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.attention_tiles", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chip", default="h200", help="h100 or h200 (default: %(default)s)")
    parser.add_argument("--softcap", type=float, default=0.0, help="of scores; 0: off (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    args = parser().parse_args(argv)
    print("| head_dim | kernel | queries x keys | stages | registers | spilled | shared | wgmma | serialized |")
    print("|---:|---|---|---:|---:|---:|---:|---:|---|")
    for head_dim in HEAD_DIMS:
        found: dict[str, dict[str, int | str]] = {}
        for fp8 in ("", KERNEL) if pallas.FORWARD_FP8 in pallas.tiles(head_dim) else ("",):
            with tempfile.TemporaryDirectory() as folder:
                compile_into(Path(folder), args.chip, Spec(head_dim, "bf16", True, 8, softcap=args.softcap, fp8=fp8))
                found |= taken(Path(folder), pallas.PREFIX)
        for kernel, tile in pallas.tiles(head_dim).items():
            facts = " | ".join(str(found[f"{kernel}_causal"][x]) for x in FACTS)
            print(f"| {head_dim} | {kernel} | {tile.queries} x {tile.keys} | {tile.stages} | {facts} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
