"""The sharding of every array of a train step: a row for each parameter, moment, gradient, gathered weight and activation.

Nothing is allocated and nothing is compiled. Parameters and moments come from the abstract state of the run. Activations come
from the traced step: inside its shard_map each array has the shape of a device's shard. The trace lacks the global layout of
these shards, which comes from the logical axes of jaxtrain/models/activations.py.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config.shapes import STACK
from jaxtrain.models.activations import AXES
from jaxtrain.models.module import select_leaves
from jaxtrain.plan.program.buffers import WEIGHT, saved_activations
from jaxtrain.sharding import Axes
from jaxtrain.step.batch import MICROBATCHES
from jaxtrain.step.definition import fp8_weights
from jaxtrain.step.program import Program
from jaxtrain.step.state import dotted_name

LAYER_INPUT = "layer_input"
EMBEDDING, HEAD = "embed.embedding", "head"


@dataclasses.dataclass(frozen=True)
class ShardingRow:
    """One array of a train step or of a pytree, and its shards.

    Attributes:
        kind: parameter | counter | moment | gradient | gathered | activation | batch; array for one of a pytree. "gathered": a
            weight in use, in the compute dtype, replicated over the axes that shard the batch. "activation": an activation of
            one layer and one microbatch.
        shape: global shape; None: unknown, as is the layout of the devices' shards.
        local_shape: shape of a device's shard.
        axes: logical axis of each dimension, if they are known.
        copies: arrays of this shape in memory at the same time, such as one for each layer that saves the activation.
        saved: keep | offload | recompute for activations; keep for saved gathered weights; offload for moments in host memory;
            else "".
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None
    local_shape: tuple[int, ...]
    dtype: str
    bytes_per_device: int  # of one copy
    axes: Axes | None
    sharding: NamedSharding | None = dataclasses.field(repr=False)
    copies: int = 1
    saved: str = ""

    @property
    def mesh_axes(self) -> tuple[tuple[str, ...], ...] | None:
        """Return the mesh axes that shard each dimension; None if the global layout is unknown."""
        if self.sharding is None:
            return None
        dims = [(over,) if isinstance(over, str) else tuple(over or ()) for over in self.sharding.spec]
        return (*dims, *[()] * (len(self.local_shape) - len(dims)))

    @property
    def total_bytes(self) -> int | None:
        """Return the bytes of the global array without replicas; None if its shape is unknown."""
        return None if self.shape is None else self.bytes_per_device * math.prod(self.shape) // math.prod(self.local_shape)

    @property
    def replicas(self) -> int | None:
        """Return the number of devices that hold the same shard; None if the global layout is unknown."""
        if self.sharding is None or self.total_bytes is None:
            return None
        return self.sharding.mesh.size * self.bytes_per_device // self.total_bytes

    @property
    def device_bytes(self) -> int:
        """Return the bytes of all copies on one device; 0 if the array is in host memory."""
        return 0 if self.saved == "offload" else self.bytes_per_device * self.copies

    @property
    def type(self) -> str:
        """Return dtype, global shape and mesh axes, such as f32[32, 4096@fsdp, 14336@tensor]."""
        if self.shape is None or self.mesh_axes is None:
            return f"{self.dtype}[?]"
        dims = (f"{n}@{'+'.join(over)}" if over else str(n) for n, over in zip(self.shape, self.mesh_axes, strict=True))
        return f"{self.dtype}[{', '.join(dims)}]"


def step_rows(program: Program) -> tuple[ShardingRow, ...]:
    """Return the row of every array of a train step. The devices need not be present."""
    named_arrays = _named_activations(program)
    saved = _saved_activations(program, named_arrays)
    batch = (array_row(name, "batch", a, MICROBATCHES) for name, a in program.batch.items())
    return (*_state_rows(program), *_gathered_rows(program, saved), *_activation_rows(program, named_arrays, saved), *batch)


def array_row(name: str, kind: str, array: Any, axes: Axes | None = None, copies: int = 1, saved: str = "") -> ShardingRow:
    """Return the row of an array.

    Args:
        array: global shape, dtype and sharding. Without a sharding, the shape is that of a device's shard.
    """
    shape, local = (array.shape, array.sharding.shard_shape(array.shape)) if array.sharding else (None, array.shape)
    dtype = str(array.dtype).replace("float", "f").replace("uint", "u").replace("int", "i")  # bf16, f32, u8, i32
    return ShardingRow(
        name, kind, shape, local, dtype, math.prod(local) * array.dtype.itemsize, axes, array.sharding, copies, saved
    )


def _leaves(tree: Any, **options: Any) -> dict[str, Any]:
    """Return dotted name -> leaf of a pytree."""
    return {dotted_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, **options)}


def _axes(program: Program) -> dict[str, Axes]:
    """Return the logical axes of every parameter, by its dotted name."""
    return _leaves(program.definition.axes, is_leaf=lambda x: isinstance(x, tuple))


def _state_rows(program: Program) -> Iterator[ShardingRow]:
    """Yield the rows of parameters, moments, counters, averages and gradients."""
    axes, params = _axes(program), _leaves(program.state.params)
    for name, a in params.items():
        yield array_row(name, "parameter", a, axes[name])
    for name, a in _leaves(program.state.optimizer).items():
        base_name = name.removesuffix(".codes").removesuffix(".scales")  # arrays of 8-bit moments
        param_name = next((p for p in params if base_name.endswith("." + p) and a.ndim == params[p].ndim), None)
        saved = "offload" if program.offload and a.shape else ""
        yield array_row(name, "moment" if a.shape else "counter", a, axes[param_name] if param_name else None, saved=saved)
    for name, a in _leaves(program.state.ema).items():
        yield array_row(name, "average", a, axes[name])
    # Gradients leave the step's shard_map sharded like their parameter, in the dtype in which they are summed.
    for name, a in _leaves(select_leaves(program.state.params, program.trained)).items():
        yield array_row(name, "gradient", a.update(dtype=program.zero.numerics.sums), axes[name])


def _gathered_rows(program: Program, saved: "SavedCounts") -> Iterator[ShardingRow]:
    """Yield the rows of gathered weights, by the same rules as the step (jaxtrain/models/zero.py)."""
    placement, zero, numerics = program.placement, program.zero, program.zero.numerics
    params, all_axes, exact = _leaves(program.state.params), _axes(program), _leaves(program.definition.exact)
    fp8 = _leaves(fp8_weights(program.run.precision, program.run.fp8.exclude, program.definition))
    rows = []

    def gathered_sharding(axes: Axes) -> NamedSharding:
        return NamedSharding(placement.mesh, P(*(placement.compute_axes(axis) or None for axis in axes)))

    for name, a in params.items():
        if name == EMBEDDING and HEAD in params and not zero.reduce_once:
            continue  # the lookup sends rows of the sharded embedding and gathers nothing
        per_layer = all_axes[name][0] == "layers" and not zero.gather_once
        axes, shape = (all_axes[name][1:], a.shape[1:]) if per_layer else (all_axes[name], a.shape)
        dtype = jnp.dtype("uint8") if fp8[name] else a.dtype if exact[name] else numerics.compute
        rows.append(array_row(name, "gathered", jax.ShapeDtypeStruct(shape, dtype, sharding=gathered_sharding(axes)), axes))
    for name, weight in program.definition.stored.items():
        skip = int(weight.axes[0] == "layers")
        decoded = jax.ShapeDtypeStruct(weight.shape[skip:], numerics.compute, sharding=gathered_sharding(weight.axes[skip:]))
        rows.append(array_row(name, "gathered", decoded, weight.axes[skip:]))
    # Saved gathered weights have no names, so their copies are divided among the weights of that shape.
    same_shape = collections.Counter(row.local_shape for row in rows if row.name.startswith(f"{STACK}."))
    for row in rows:
        saved_count = sum(count for (name, shape, *_), count in saved.items() if (name, shape) == (WEIGHT, row.local_shape))
        copies = saved_count // same_shape[row.local_shape] if row.name.startswith(f"{STACK}.") else 1
        yield dataclasses.replace(row, copies=copies, saved="keep") if copies > 1 else row


NamedArrays = dict[tuple[str, tuple[int, ...]], Any]  # (name, shape on a device) -> dtype
SavedCounts = dict[tuple[str, tuple[int, ...], Any, str], int]  # (name, shape on a device, dtype, keep | offload) -> copies


def _named_activations(program: Program) -> NamedArrays:
    """Return the arrays that the model names by `checkpoint_name`, in the order of the traced step."""
    named_arrays: NamedArrays = {}

    def walk(jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            for body in jaxprs_in_params(eqn.params):
                walk(body)
            if eqn.primitive.name == "name" and eqn.params["name"] != WEIGHT:
                aval: Any = eqn.outvars[0].aval
                named_arrays.setdefault((eqn.params["name"], aval.shape), aval.dtype)

    walk(program.train_step.trace(program.state, program.batch).jaxpr.jaxpr)
    return named_arrays


def _saved_activations(program: Program, named_arrays: NamedArrays) -> SavedCounts:
    """Return (name, local shape, dtype, keep | offload) -> number of such saved activations in memory at the same time."""
    counts = collections.Counter(k for k in saved_activations(program) if not k.recomputed and 0 not in k.dims)
    # A layer's input has the shape of the residual stream. Other saved arrays can have the name "layer input" too.
    stream = next((shape for name, shape in named_arrays if name == "residual"), None)
    # A loop over layers saves a layer's input once. A pipeline saves it in each of its phases, in the same buffers.
    entry = next((k for k in counts if k.stacked and k.name == "layer input" and stream in (None, k.dims[1:])), None)
    copies: collections.Counter[tuple[str, tuple[int, ...], Any, str]] = collections.Counter()
    for k, count in counts.items():
        if k.stacked and entry is not None and k.dims[0] != entry.dims[0]:
            continue  # saved by a loop within a layer
        if k.stacked:
            count = k.dims[0] * count // (counts[entry] if entry is not None else 1)
        local = k.dims[1:] if k.stacked else k.dims
        name = "select_n" if k.name == "layer input" else k.name.removeprefix("jvp(layers)/")
        # The input of a layer outside of a loop is the sum that the previous layer returns.
        if stream in (None, local) and (k.name == "layer input" or k.name.endswith("mlp)/add")):
            name = LAYER_INPUT
        copies[name, local, k.dtype, "offload" if k.offloaded else "keep"] += count
    if entry is None:  # the first layer's input is the output of the embedding
        copies.update({key: 1 for key in copies if key[0] == LAYER_INPUT})
    return copies


def _activation_rows(program: Program, named_arrays: NamedArrays, saved: SavedCounts) -> list[ShardingRow]:
    """Return the rows of activations in the order of the model. Activations without a name are last.

    The global layout is unknown for the tokens of a device's experts and for arrays without a name. It is also unknown for
    outputs of Ulysses attention, since their shards are heads instead of tokens.
    """

    def make_row(name: str, local: tuple[int, ...], dtype: Any, copies: int, storage: str) -> ShardingRow:
        axes, exchanged = AXES.get(name, ()), program.context.ulysses > 1 and name in ("attention_out", "attention_lse")
        if len(axes) != len(local) or exchanged:
            return array_row(name, "activation", jax.ShapeDtypeStruct(local, dtype), None, copies, storage)
        shape = tuple(n * placement.size(placement.mesh_axes(axis)) for n, axis in zip(local, axes, strict=True))
        return array_row(
            name,
            "activation",
            jax.ShapeDtypeStruct(shape, dtype, sharding=placement.sharding(axes, name)),
            axes,
            copies,
            storage,
        )

    placement = program.placement
    # A saved array can have another dtype than the named array, since later operations can convert it before it is saved.
    rows = [make_row(name, local, dtype, n, storage) for (name, local, dtype, storage), n in saved.items() if name != WEIGHT]
    names = {(name, local) for name, local, *_ in saved}
    rows += [make_row(*key, dtype, 1, "recompute") for key, dtype in named_arrays.items() if key not in names]
    order = [*AXES]
    # If some layers offload an array and the last layer keeps it on the device, the row of the kept array is second.
    return sorted(rows, key=lambda r: (order.index(r.name) if r.name in order else len(order), r.saved != "offload"))
