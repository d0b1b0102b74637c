"""The memory that a run needs at least, counted without a compile.

These are bytes of arrays that a step holds, with the shapes and shardings of `step.program.build`: exact, but without saved
activations, temporaries and workspaces.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax

from jaxtrain.config import hardware
from jaxtrain.config.schema import Problem, RunConfig
from jaxtrain.config.shapes import STACK
from jaxtrain.models import flops
from jaxtrain.models.module import Params, leaf_names, select_leaves
from jaxtrain.models.stored import StoredWeight
from jaxtrain.plan import topology as machines
from jaxtrain.plan.topology import Topology
from jaxtrain.sharding import Axes
from jaxtrain.step import auto_remat
from jaxtrain.step.compiler import local_bytes
from jaxtrain.step.program import Program, build_program
from jaxtrain.step.stages import schedule_of
from jaxtrain.step.validate import validate_step

Check = Callable[[RunConfig], Sequence[Problem]]

# The memory of a step beyond `LeastMemory.gib`, roughly, over that of its saved activations: only the order of layouts
# depends on it.
BESIDE_SAVED = 1.25
BITS = "uint8"  # the dtype of weights in fewer bits


@dataclasses.dataclass(frozen=True)
class LeastMemory:
    """The least memory of a run on each GPU, and the work that the rest of the memory makes it repeat.

    Attributes:
        state_gib: weights, moments that are not offloaded, and the batch.
        gradients_gib: sums of gradients over several microbatches. Those of one microbatch count if they are clipped, since
            their norm is needed before the update.
        gathered_gib: gathered weights: all if they are gathered once a step, those of layers with sharding.gather=forward, else
            the largest one.
        inputs_gib: inputs of the layers, which every remat policy saves; 0 for a family from outside, and with offloading.
        gib: all of this. The gradients of one microbatch are complete only when its weights and activations are no longer
            needed, so the larger of both counts.
        repeated: FLOPs that the layout adds to a step's, as a fraction: recomputation by remat.policy=auto, which saves as many
            activations as probably fit beside `gib`, and the pipeline's bubble; inf if `gib` does not fit.
    """

    state_gib: float
    gradients_gib: float
    gathered_gib: float
    inputs_gib: float
    gib: float
    repeated: float


def least_memory(run: RunConfig, topology: Topology) -> LeastMemory:
    """Return the least memory of a run on a machine. Raises ConfigError if training refuses the run (see `build_program`)."""
    program = build_program(run, machines.devices(topology))
    params, zero = program.state.params, program.zero
    state = local_bytes((params, program.state.ema, program.batch, () if program.offload else program.state.optimizer))
    sharding, axes = run.sharding, program.definition.axes
    gathered = jax.tree.map(lambda a, dims: _gathered_size(program, a, dims), params, axes)
    trained_params = select_leaves(params, program.trained)
    if run.train.grad_accum > 1:
        summed = select_leaves(gathered, program.trained) if zero.reduce_once else jax.tree.map(_shard_size, trained_params)
        gradients = sum(jax.tree.leaves(summed)) * zero.numerics.sums.itemsize
    else:
        clipped = run.optimizer.clip_norm > 0
        gradients = sum(map(_shard_size, jax.tree.leaves(trained_params))) * zero.numerics.reduce.itemsize * clipped
    width = 1 if run.precision == "fp8" else zero.numerics.compute.itemsize
    used = dict(zip(jax.tree.leaves(leaf_names(params)), _params_with_axes(params, axes), strict=True))
    if zero.gather_once:
        in_use = sum(_gathered_size(program, a, dims) * (1 if a.dtype == BITS else width) for a, dims in used.values())
    else:
        stored = program.definition.stored  # weights in fewer bits, which the layer that uses them decodes
        used = {name: pair for name, pair in used.items() if name.rpartition(".")[0] not in stored}
        used |= {name: (weight, weight.axes) for name, weight in stored.items()}
        if (sharding.zero, sharding.gather) == (3, "forward"):
            in_use = sum(_gathered_size(program, *pair) for name, pair in used.items() if name.startswith(f"{STACK}.")) * width
        else:
            in_use = max(_gathered_size(program, *pair, one_layer=True) for pair in used.values()) * width
    saved = auto_remat.Activations(run.model, run.moe, program.layout, program.placement.activation_shards)
    has_inputs = not run.model.outside and "=offload" not in run.remat.tensors
    # Inputs of layers have the shape of the residual stream.
    inputs = saved.saved_bytes(("residual",)) / run.remat.every if has_inputs else 0.0
    while_used = in_use + inputs
    total = state + (gradients + while_used if run.train.grad_accum > 1 else max(gradients, while_used))
    spare = topology.usable_gib(run.train.memory_fraction) * 2**30 - total
    return LeastMemory(
        *(n / 2**30 for n in (state, gradients, in_use, inputs, total)), repeated=_repeated_work(program, saved, spare)
    )


def _shard_size(a: jax.ShapeDtypeStruct) -> int:
    """Return the elements of a device's shard."""
    return math.prod(a.sharding.shard_shape(a.shape))


def _gathered_size(program: Program, a: jax.ShapeDtypeStruct | StoredWeight, axes: Axes, one_layer: bool = False) -> int:
    """Return the elements of a gathered weight on a device: of all layers, or of `one_layer`."""
    placement = program.placement
    skip = int(one_layer and axes[:1] == ("layers",))
    return math.prod(
        n // placement.size(placement.compute_axes(axis)) for n, axis in zip(a.shape[skip:], axes[skip:], strict=True)
    )


def _params_with_axes(params: Params, axes: Params) -> Iterator[tuple[jax.ShapeDtypeStruct, Axes]]:
    return zip(jax.tree.leaves(params), jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple)), strict=True)


def _repeated_work(program: Program, saved: auto_remat.Activations, spare: float) -> float:
    """Return `LeastMemory.repeated` of a program with `spare` bytes for further activations."""
    run, bubble = program.run, schedule_of(program.layout).bubble
    if run.model.outside:  # it names its own activations
        return 1 / (1 - bubble) - 1
    remat = saved.least_recompute(spare / BESIDE_SAVED)
    if remat is None:
        return math.inf
    length = run.data.seq_len
    recomputed = flops.recompute(run.model, remat, length).causal / flops.per_token(run.model, length).causal
    return (1 + recomputed) / (1 - bubble) - 1


def training_check(topology: Topology, source: str = "") -> Check:
    """Return a function that returns the problems of training a run on this machine. source: the machine's name in errors."""
    machine_name = source or topology.name
    devices = hardware.Devices(
        "gpu", topology.device_kind, topology.total, topology.memory_gib, machine_name, topology.gpu.sm, topology.gpus
    )
    return lambda run: validate_step(run, devices, fits=False)
