"""How the train step is compiled: XLA's options on GPUs, each with its reason. Training, benchmarks and plans compile here.

Options go to the compiler with the program and not through XLA_FLAGS, so that the executable, its cache key and the receipt
all know them.
"""

import dataclasses
import math
from typing import Any

import jax

from jaxtrain import hardware
from jaxtrain.step import Program

# XLA plans schedules for this part of a card's memory (GetSchedulerMemoryLimit in its gpu_hlo_schedule.cc): what it adds
# for overlap, and what it would compute twice to save memory, both follow from it.
XLA_SHARE = 0.8
SLOP = "xla_gpu_memory_limit_slop_factor"


@dataclasses.dataclass(frozen=True)
class Card:
    """The memory of one GPU, and the part of it that a run gives to JAX."""

    memory_gib: float
    usable_gib: float


def card(memory_gib: float, fraction: float = 0.0) -> Card:
    """A card of this size under `train.memory_fraction` (0: all but the reserve)."""
    return Card(memory_gib, memory_gib * hardware.memory_fraction(memory_gib, fraction))


def card_of(device: Any, configured: float = 0.0) -> Card | None:
    """That of a GPU that is present, from what its allocator was given: a driver's own figure is half a percent higher.

    None for a device that is no GPU.
    """
    if device.platform != "gpu":
        return None
    usable = device.memory_stats()["bytes_limit"] / 2**30
    return Card(usable / hardware.memory_fraction(hardware.probe().memory_gib, configured), usable)


def local_bytes(tree: Any) -> int:
    """Bytes of one device's shards of these arrays."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


# Attention kernels that are a loop themselves.
LOOPS = ("chunked",)
# Passes that are switched off.
WITHOUT = (
    # What the backward pass computes again is said by remat.policy. XLA's own pass works from an estimate that does not know of
    # memory shared in loops, and where it finds too little it gathers weights a second time.
    "rematerialization",
    # It makes one GEMM of the query, key and value projections, and copies three weights side by side for it at every use.
    "dot-merger",
    # Copies between a stack and a layer would run on a stream of their own, for which the scheduler reckons 5 ms each: it then
    # starts gathers behind them, too late.
    "dynamic-slice-copy-fusion-async-wrapper",
)


# XLA starts a microbatch's first collective during the one before, and computes again whatever that needs. With a gather of
# weights it needs nothing. Where the first collective is one of activations, over the tensor axis, it needs the forward pass.
EARLY = "collective-pipeliner-backward"


def options(program: Program, card: Card | None) -> dict[str, str | bool]:
    """XLA's options for a program on GPUs with this much memory; none on CPU, where `card` is None."""
    if card is None:
        return {}
    held = local_bytes((program.state, program.batch)) / 2**30
    microbatches, tensor = program.batch["tokens"].shape[0], program.placement.size("tensor")
    without = (*WITHOUT, EARLY) if microbatches > 1 and tensor > 1 and not program.gathers else WITHOUT
    chosen: dict[str, str | bool] = {
        # GEMMs by cuBLAS. XLA sets aside what may become a Triton GEMM before it fuses the rest, and then leaves SwiGLU's
        # backward pass in three kernels instead of one.
        "xla_gpu_enable_triton_gemm": False,
        # XLA would write a GEMM's result straight into the stack that is kept for the backward pass, and run the same GEMM a
        # second time for whoever else reads it: a tenth of a step that keeps gate, up and queries.
        "xla_gpu_enable_dynamic_slice_fusion": False,
        "xla_disable_hlo_passes": ",".join(without),
    }
    # XLA unrolls loops that hold collectives, innermost first, and (jaxlib 0.11.2) aborts where one to unroll, inside that over
    # microbatches, holds another loop: "Call graph must have been flattened". That is the loop over layers around chunked
    # attention; and the one over microbatches itself, around the loss, where too few layers leave no loop over them.
    nested = program.attention in LOOPS or (microbatches > 1 and program.layer_trips < 2)
    if not nested:
        # Collectives of the next layer start during this one, and loops are unrolled twice for it; without, the last
        # reduction of a layer and the first gathers of the next wait for each other.
        chosen["optimization_level"] = "O1"
    if program.context.ring > 1:
        # Going backward, a ring sends gradients beside the keys; one at a time, only one of the two would have a kernel to
        # hide behind.
        chosen["xla_gpu_experimental_parallel_collective_overlap_limit"] = "2"
    # XLA's limit is held + slop% of (its share - held). Where its share is less than what is held, no slop can mend that.
    spare = XLA_SHARE * card.memory_gib - held
    if spare > 0:
        chosen[SLOP] = str(max(1, math.floor(100 * (card.usable_gib - held) / spare)))
    return chosen


def compile_train(
    program: Program, card: Card | None = None, extra: dict[str, str | bool] | None = None
) -> jax.stages.Compiled:
    """The train step, compiled for the program's devices. `card`: their memory, None on CPU. `extra`: options such as dumps."""
    chosen = options(program, card) | (extra or {})
    return program.train_step.lower(program.state, program.batch).compile(compiler_options=chosen or None)
