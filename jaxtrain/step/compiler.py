"""Compile the train step for training, benchmarks and plans, with XLA's options for GPUs and the reason for each option.

Options are passed with the program and not through XLA_FLAGS, so they are part of the executable, its cache key and the
receipt.
"""

import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jaxlib.mlir import ir

from jaxtrain.config import hardware
from jaxtrain.config.schema import ConfigError, Problem, parse_options
from jaxtrain.runtime.startup import cuda_hint
from jaxtrain.step import state
from jaxtrain.step.program import Program


class KernelNotBuilt(RuntimeError):
    """A kernel of the step could not be compiled, because a part of CUDA is missing."""


# XLA plans schedules for this fraction of a card's memory (GetSchedulerMemoryLimit in its gpu_hlo_schedule.cc). Both the memory
# it adds for overlap and its recomputation to save memory depend on it.
XLA_SHARE = 0.8
SLOP = "xla_gpu_memory_limit_slop_factor"
IN_FLIGHT = "xla_gpu_experimental_parallel_collective_overlap_limit"  # concurrent collectives


@dataclasses.dataclass(frozen=True)
class CardMemory:
    """The memory of one GPU, and the part of this memory that JAX may allocate, in GiB."""

    memory_gib: float
    usable_gib: float


def make_card(memory_gib: float, fraction: float = 0.0) -> CardMemory:
    """Return the `CardMemory` of a GPU with `memory_gib` of memory.

    fraction: `train.memory_fraction`; 0: all but the reserve (hardware.memory_fraction).
    """
    return CardMemory(memory_gib, memory_gib * hardware.memory_fraction(memory_gib, fraction))


def card_of(device: Any, configured: float = 0.0) -> CardMemory | None:
    """Return the `CardMemory` of a GPU of this process; None for a CPU.

    Both figures of the card are derived from the limit of JAX's allocator. The memory size that the driver reports is half a
    percent larger.

    configured: `train.memory_fraction`.
    """
    if device.platform != "gpu":
        return None
    usable = device.memory_stats()["bytes_limit"] / 2**30
    return CardMemory(usable / hardware.memory_fraction(hardware.probe().memory_gib, configured), usable)


def local_bytes(tree: Any) -> int:
    """Return the bytes of one device's shards of these arrays."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def device_arguments(program: Program) -> Any:
    """Return the arguments of a train step that are in device memory."""
    state = program.state
    return (state.step, state.params, state.guard, state.ema, program.batch) if program.offload else (state, program.batch)


# Attention kernels that XLA compiles to a loop.
LOOPS = ("chunked",)
# Passes that are switched off.
DISABLED_PASSES = (
    # remat.policy decides on recomputation. The estimate of XLA's own pass ignores memory that loops share. If the estimate is
    # too large, the pass gathers weights a second time.
    "rematerialization",
    # This pass merges the query, key and value projections into one matmul. For that, it copies three weights into one array at
    # every use.
    "dot-merger",
    # With this pass, copies between a stack and a layer run on their own stream. The scheduler assumes 5 ms for each copy, and
    # starts later gathers too late.
    "dynamic-slice-copy-fusion-async-wrapper",
    # If layers are unrolled and their weights are not gathered, this pass converts a whole stack of 8-bit weights to bfloat16
    # at once. The matmuls of its slices are then no FP8 calls.
    "slice-sinker",
)


# This pass starts a microbatch's first collective during the previous microbatch, and recomputes the inputs of the collective.
# A gather of weights has no inputs to recompute. If the first collective is of activations, over the tensor axis, XLA
# recomputes the forward pass.
EARLY = "collective-pipeliner-backward"


# The oldest GPUs for which these options were chosen, by their compiled steps, as compute capability times ten: Hopper.
EVIDENCE = 90


@dataclasses.dataclass(frozen=True)
class XlaOptions:
    """XLA's options for a program, the origin of the options, and the options that are left out."""

    options: dict[str, str | bool]
    why: str  # origin of the options, for the log; "" without a choice
    dropped: tuple[str, ...]  # names that this version of XLA does not have

    def warnings(self) -> list[str]:
        """Return a warning for each option in `dropped`."""
        version = importlib.metadata.version("jaxlib")
        return [f"XLA option {name} is left out: jaxlib {version} has none of that name" for name in self.dropped]


def choose_options(program: Program, card: CardMemory | None) -> XlaOptions:
    """Return XLA's options for a program. card: the memory of each GPU; None on CPUs, where only the config's options apply.

    An option that this XLA does not have is left out and listed in `dropped`. Raises ConfigError if such an option is needed
    for deterministic steps, and for a value in `compiler.options` that XLA does not accept.
    """
    user_options, _ = parse_options(program.run.compiler.options)
    options, why = _defaults(program, card) if card else ({}, "")
    if card and program.run.train.deterministic:
        options |= hardware.REPEATABLE
        why += ", and options for deterministic steps"
    options |= user_options
    dropped = tuple(name for name, value in options.items() if not _has_option(name, value))
    needed = [name for name in dropped if name in hardware.REPEATABLE]
    if needed:
        rule = f"this version of XLA has no option {needed[0]}, which deterministic steps need"
        raise ConfigError([Problem("train.deterministic", True, rule, "Set it to false, or install another jaxlib.")])
    if user_options:
        why = f"{why}{', and ' if why else ''}{program.run.compiler.options} (compiler.options)"
    return XlaOptions({name: value for name, value in options.items() if name not in dropped}, why, dropped)


TIMEOUT = "xla_gpu_execution_terminate_timeout"  # after this time XLA ends the process, in case the watchdog does not
TRACKING = "xla_gpu_execution_progress_tracking"  # so many first and last pending thunks are in XLA's message then
# The kinds of kernels in CUDA graphs; "" for none. A trace does not distinguish the kernels of a graph, and XLA's own
# workaround (no graphs while a profiler runs) leaves xprof's table of operations empty (xprof #2544, #3070).
GRAPHS = "xla_gpu_enable_command_buffer"
AUTOTUNED = "autotuned.txt"  # in a run's folder: XLA's autotuning results, for the next attempt to use
LOAD, DUMP = "xla_gpu_load_autotune_results_from", "xla_gpu_dump_autotune_results_to"


def add_run_options(
    chosen: XlaOptions, gpu: bool, step_s: float, repeatable: bool, workdir: Path, traced: bool = False
) -> XlaOptions:
    """Return `chosen` with the options of one run added: CUDA graphs, timeout, autotuning results in `workdir`.

    step_s: the watchdog's budget for a step, in seconds; 0: none. repeatable: train.deterministic. traced: the run will take a
    trace (profile.start is ahead), so CUDA graphs are off unless compiler.options sets them.
    """
    added: dict[str, str | bool] = {}
    if gpu and traced and GRAPHS not in chosen.options:
        added[GRAPHS] = ""
    if gpu and step_s:
        added |= {TIMEOUT: f"{math.ceil(1.5 * step_s)}s"} | ({} if TRACKING in chosen.options else {TRACKING: "8"})
    if gpu and repeatable:
        path = workdir / AUTOTUNED
        added[LOAD if path.exists() else DUMP] = str(path)
    # Requested without a file: the run's folder may not exist yet, and is not needed for the answer.
    unknown = [name for name, value in added.items() if not _has_option(name, value if name in (TIMEOUT, TRACKING) else "")]
    options = chosen.options | {name: value for name, value in added.items() if name not in unknown}
    return dataclasses.replace(chosen, options=options, dropped=(*chosen.dropped, *unknown))


def options_for_size(options: dict[str, str | bool], size: int) -> dict[str, str | bool]:
    """Return the run's options for a step of `size` sequences (train.batch_ramp): it has its own autotuning results."""
    path = autotune_path(options)
    if path is None:
        return options
    size_path = path.with_stem(f"{path.stem}_{size}")
    return {k: v for k, v in options.items() if k not in (LOAD, DUMP)} | {LOAD if size_path.exists() else DUMP: str(size_path)}


def remove_run_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the program itself, without those that `add_run_options` added for its folder and watchdog."""
    return {name: value for name, value in options.items() if name not in (TIMEOUT, TRACKING, LOAD, DUMP)}


def autotune_path(options: Mapping[str, Any]) -> Path | None:
    """Return the file of XLA's autotuning results that an option names; None if no option does."""
    path = options.get(LOAD) or options.get(DUMP)
    return Path(path) if path else None


@functools.cache
def _has_option(name: str, value: str | bool) -> bool:
    """Return whether XLA has an option of this name, by compiling a trivial program with it."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if "No such compile option" in str(error):
            return False
        rule = str(error).partition("\n")[0].removeprefix("INVALID_ARGUMENT: ").rstrip(".")
        raise ConfigError(
            [Problem("compiler.options", f"{name}={value}", rule, "Correct the value, or leave it out.")]
        ) from None
    return True


def _defaults(program: Program, card: CardMemory) -> tuple[dict[str, str | bool], str]:
    """Return jaxtrain's own options for this program, and their origin for the log."""
    kind = program.placement.mesh.devices.flat[0].device_kind
    gpu = hardware.lookup(kind)
    if gpu is None:
        return {}, f"XLA's own, since {kind!r} is not in jaxtrain/config/hardware.py"
    argument_gib = local_bytes(device_arguments(program)) / 2**30
    chosen: dict[str, str | bool] = {
        # Matmuls by cuBLAS. XLA separates candidates for Triton matmuls before it fuses other operations, and then leaves
        # SwiGLU's backward pass in three kernels instead of one.
        "xla_gpu_enable_triton_gemm": False,
        # XLA would write a matmul's result straight into the stack of saved activations, and run the same matmul a second time
        # for other readers: a tenth of a step that saves gate, up and queries.
        "xla_gpu_enable_dynamic_slice_fusion": False,
        "xla_disable_hlo_passes": ",".join(_disabled_passes(program)),
    }
    # XLA's limit is argument_gib + slop% of remaining_gib. If remaining_gib is negative, no slop helps.
    remaining_gib = XLA_SHARE * card.memory_gib - argument_gib
    if remaining_gib > 0:
        chosen[SLOP] = str(max(1, math.floor(100 * (card.usable_gib - argument_gib) / remaining_gib)))
    if gpu.sm < EVIDENCE:
        return chosen, f"jaxtrain's, without those chosen for GPUs newer than {gpu.name}"
    # Collectives of the next layer start during this one, and loops are unrolled twice for it. Otherwise the last reduction of
    # a layer and the first gathers of the next wait for each other.
    if not _has_nested_loops(program):
        chosen["optimization_level"] = "O1"
    if program.run.model.num_experts and program.placement.gather_axes("experts", "expert_embed"):
        # A layer of experts has six large gathers and reductions. The kernels that could overlap them are Pallas' and cuDNN's,
        # for which XLA's scheduler assumes 10 us each. If one collective ran at a time, half of them would be exposed.
        chosen[IN_FLIGHT] = "8"
    elif program.context.ring > 1:
        # In the backward pass, a ring sends gradients and keys. If one collective ran at a time, one of the two would be
        # exposed.
        chosen[IN_FLIGHT] = "2"
    elif program.gathers_where_used and program.placement.crosses_nodes(program.placement.gather_axes("embed")):
        # A layer's gradients are reduced while the previous layer gathers its weights. If one collective runs at a time, the
        # reduction is exposed if gathers take long, as over a network: 2.1 of 2.2 s in the plan of Llama 3 70B on 64 GPUs.
        chosen[IN_FLIGHT] = "2"
    return chosen, "jaxtrain's (jaxtrain/step/compiler.py)"


def _disabled_passes(program: Program) -> tuple[str, ...]:
    microbatches, tensor = program.batch["tokens"].shape[0], program.placement.size("tensor")
    return (*DISABLED_PASSES, EARLY) if microbatches > 1 and tensor > 1 and not program.gathers_where_used else DISABLED_PASSES


def _has_nested_loops(program: Program) -> bool:
    """Return whether O1 could make XLA abort.

    O1 unrolls loops with collectives, innermost first. XLA (jaxlib 0.11.2) aborts with "Call graph must have been flattened" if
    such a loop is inside the loop over microbatches and contains another loop. This happens in three cases: (1) The loop over
    layers contains chunked attention, the rounds of expert dispatch, or the chunks of delta nets. (2) Without a loop over
    layers, the loop over microbatches contains the loop over chunks of the loss. O1 has little effect in case 2: collectives of
    unrolled layers overlap without O1. (3) In a stage with several groups, the loop over ticks contains the loop over layers,
    and is inside the loop over rounds (stages.Schedule.rounds).
    """
    microbatches, looped = program.batch["tokens"].shape[0], program.layer_trips > 1
    interleaved = program.state.layers is not None and program.state.layers.groups > 1
    inner_loop = program.dispatches_in_rounds or program.run.model.delta_layers > 0
    return program.kernel.name in LOOPS or interleaved or (inner_loop and looped) or (microbatches > 1 and not looped)


def compile_train(
    program: Program, options: dict[str, str | bool], extra: dict[str, str | bool] | None = None
) -> jax.stages.Compiled:
    """Return the train step, compiled for the program's devices.

    options: XLA's options from `choose_options`. extra: further options of XLA, for example for dumps.

    Raises KernelNotBuilt if a part of CUDA is missing.
    """
    lowered = program.train_step.lower(program.state, program.batch)
    if program.offload and not program.placement.mesh.devices.flat[0].addressable_memories():
        _mark_host_memory(lowered, program)
    try:
        return lowered.compile(compiler_options=options | (extra or {}) or None)
    except jax.errors.JaxRuntimeError as error:
        if not (cause := cuda_hint(str(error))):
            raise
        raise KernelNotBuilt(f"{str(error).splitlines()[0].rstrip('. ')}. {cause}") from error


def _mark_host_memory(lowered: jax.stages.Lowered, program: Program) -> None:
    """Mark the moments among a lowered step's arguments as host memory, as jax does for devices with host memory.

    Devices of a topology (jax.experimental.topologies) have no memories, so no sharding can have a memory kind (see
    `state.abstract_state`). The compiler needs only the attribute mhlo.memory_kind of each argument. The program itself
    determines the memory of its results.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path((program.state, program.batch))]
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        main = next(f.operation for f in module.body.operations if str(f.operation.attributes["sym_name"]) == '"main"')
        arguments = []
        for path, argument in zip(paths, main.attributes["arg_attrs"], strict=True):
            attributes = {a.name: a.attr for a in ir.DictAttr(argument)}
            if state.is_moment(path[1:]):
                attributes["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
            arguments.append(ir.DictAttr.get(attributes))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(arguments)
