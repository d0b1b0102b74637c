"""Registers, shared memory and tensor cores of the Pallas attention kernels, by NVIDIA's assembler. No GPU is needed.

    .venv/bin/python -m benchmarks.attention_tiles --chips h200 a100

For each chip, type and head_dim, and each of the three kernels: registers of a thread, spilled bytes, bytes of shared memory,
and the tensor core instructions. A kernel that does not fit is an error of the compiler.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels.attention import Rows, Spec, pallas
from jaxtrain.plan import topology

HEAD_DIMS = (64, 128, 256)
DUMP = {"xla_gpu_dump_llvmir": True, "xla_dump_emitter_re": "ptx", "xla_gpu_experimental_enable_fusion_autotuner": False}
NAME = re.compile(rf"{pallas.PREFIX}(\w+)")


def assembler() -> Path:
    """Return ptxas of the plan extra. Raises FileNotFoundError where it is not installed."""
    for folder in map(Path, sys.path):
        for found in folder.glob("nvidia/*/bin/ptxas"):
            return found
    raise FileNotFoundError("ptxas: not installed. Install the plan extra: pip install jaxtrain[plan]")


def compile_into(folder: Path, chip: str, spec: Spec, T: int = 4096, N: int = 8, K: int = 2) -> None:
    """Compile forward and backward for a described chip, and dump what the compiler makes."""
    mesh = Mesh(np.array(topology.devices(topology.parse(f"{chip}:1"))), ("device",))
    whole = NamedSharding(mesh, P())
    dtype = jnp.float32 if spec.dtype == "f32" else jnp.bfloat16
    q, k = (jax.ShapeDtypeStruct((2, T, heads, spec.head_dim), dtype, sharding=whole) for heads in (N, K))
    ids = jax.ShapeDtypeStruct((2, T), jnp.int32, sharding=whole)

    def both(q, k, v, do, segments, positions):
        prepared = pallas.prepare(Rows(segments, positions, segments, positions), spec)
        o, back = jax.vjp(lambda q, k, v: pallas.attention(q, k, v, prepared, spec), q, k, v)
        return o, *back(do)

    manual = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=P()))
    manual.lower(q, k, k, q, ids, ids).compile(compiler_options={"xla_dump_to": str(folder), **DUMP})


def taken(folder: Path, name: re.Pattern[str] = NAME) -> dict[str, dict[str, int | str]]:
    """Return registers, memory and tensor cores of each kernel, from the dumps.

    Args:
        name: pattern of the kernels' names; its group names them in the table.
    """
    out: dict[str, dict[str, int | str]] = {}
    for file in folder.glob("*.ptx"):
        text = file.read_text()
        entry, target = re.search(rf"\.entry {name.pattern}", text), re.search(r"\.target (\w+)", text)
        if not entry or not target:
            continue
        command = [assembler(), "-v", f"--gpu-name={target[1]}", file, "-o", "/dev/null"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        spilled, registers = re.search(r"(\d+) bytes spill stores", printed), re.search(r"Used (\d+) registers", printed)
        if not spilled or not registers:
            raise ValueError(f"{file.name}: ptxas printed no registers: {printed[:200]}")
        cores = "wgmma" if "wgmma.mma_async" in text else "mma" if re.search(r"\bmma\.sync", text) else "none"
        out[entry[1]] = {"registers": int(registers[1]), "spilled": int(spilled[1]), "tensor cores": cores}
    for file in folder.glob("*.thunk_sequence.txt"):
        for line in file.read_text().splitlines():
            kernel, shared = name.search(line), re.search(r"shared_memory: (\d+)", line)
            if kernel and shared:
                out[kernel[1]]["shared"] = int(shared[1])
    return out


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.attention_tiles", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chips", nargs="+", default=["h200", "a100"], help="%(default)s")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "f32"], help="%(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    args = parser().parse_args(argv)
    print("| chip | type | head_dim | kernel | queries x keys | warps | stages | registers | spilled | shared | tensor cores |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for chip in args.chips:
        for dtype in args.dtypes:
            for head_dim in HEAD_DIMS:
                with tempfile.TemporaryDirectory() as folder:
                    compile_into(Path(folder), chip, Spec(head_dim, dtype, True, 8))
                    found = taken(Path(folder))
                for kernel, tile in pallas.tiles(dtype, head_dim).items():
                    one = found[f"{kernel}_causal"]
                    facts = " | ".join(str(one[x]) for x in ("registers", "spilled", "shared", "tensor cores"))
                    size = f"{tile.queries} x {tile.keys} | {tile.warps} | {tile.stages}"
                    print(f"| {chip} | {dtype} | {head_dim} | {kernel} | {size} | {facts} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
