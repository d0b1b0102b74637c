"""The train state: its storage on devices, and the names of its tensors in checkpoints.

Checkpoints do not depend on the stacking of layers or on their order in a stack: `to_tensors` returns one named array per layer
and tensor, with the same names for every layout in memory.
"""

import dataclasses
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import digests
from jaxtrain.config.layout import Arrangement
from jaxtrain.config.schema import ConfigError, Problem
from jaxtrain.config.shapes import LAYER_KEY, layer_key, without_layer_key
from jaxtrain.models.module import Definition, Params, is_stacked, replace_leaves, select_leaves
from jaxtrain.optim.quantized import Blocks, is_blocks
from jaxtrain.sharding import Placement, replicated
from jaxtrain.step import guard, stacks
from jaxtrain.step.stacks import ON_HOST

Tensors = dict[str, Any]  # name -> jax.Array, or jax.ShapeDtypeStruct
EMA = "ema."  # prefix of the average of the weights among the tensors of a state


@dataclasses.dataclass(frozen=True)
class TrainState:
    """All arrays that a step changes, or their shapes while nothing is allocated."""

    step: Any  # int32 (): steps done, skipped steps included
    params: Params  # master weights
    optimizer: Any  # optax state: moments sharded like their parameters
    guard: Any = ()  # the statistics for skipping steps (jaxtrain/step/guard.py); on every device
    ema: Any = ()  # float32 averages of the trained weights over the steps, sharded like them; () with train.ema_decay=0
    # The order of layers in their stacks, whose empty slots hold zeros. None: layer i in slot i, and no empty slots.
    layers: Arrangement | None = None


jax.tree_util.register_dataclass(TrainState, ["step", "params", "optimizer", "guard", "ema"], ["layers"])


def weights(state: TrainState) -> Params:
    """Return the master weights of a state, from which a step computes its loss."""
    return state.params


def eval_weights(state: TrainState) -> Params:
    """Return the weights of a state, abstract or not, for evaluations and samples: the averages, and weights without one."""
    return replace_leaves(state.params, state.ema) if state.ema else state.params


def begin_average(state: TrainState, abstract: TrainState) -> TrainState:
    """Return a state whose average begins at its weights, if `abstract` has an average; else the state as it is."""
    if not abstract.ema:
        return state

    def copy_weights(params: Params) -> Params:
        # The averages are new arrays, because the step donates them and the weights.
        return jax.tree.map(lambda e, w: jnp.copy(w).astype(e.dtype), abstract.ema, params)

    trained_params = select_leaves(state.params, jax.tree.map(lambda _: True, abstract.ema))
    return dataclasses.replace(state, ema=jax.jit(copy_weights, out_shardings=shardings(abstract.ema))(trained_params))


def abstract_state(
    definition: Definition,
    tx: optax.GradientTransformation,
    placement: Placement,
    offload: bool = False,
    trained: Params | None = None,
    layers: Arrangement | None = None,
    average: bool = False,
) -> TrainState:
    """Return a state of shapes, dtypes and shardings, without arrays. Moments are sharded like their parameters.

    trained: the parameters that have moments; None: all.
    offload: moments are in pinned host memory. Devices of a topology without hardware have no host memory, and jax then
    silently drops the memory kind from a sharding; `compiler.compile_train` restores it.
    layers: the arrangement of layers on pipeline stages; None without stages.
    average: the trained parameters have averages, on the devices.
    """
    abstract = jax.eval_shape(lambda params: _place_layers(params, layers), definition.abstract)

    def shard_param(path: Any, a: jax.ShapeDtypeStruct, axes: Any) -> jax.ShapeDtypeStruct:
        name = ".".join(str(k.key) for k in path)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placement.sharding(axes, name, a.shape))

    params = jax.tree_util.tree_map_with_path(shard_param, abstract, definition.axes)
    unsharded = replicated(placement)

    def shard_moment(moment: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        if isinstance(moment, optax.MaskedNode):
            return moment
        if is_blocks(moment) and divisible_sharding(leaf.sharding, moment.scales.shape).spec != leaf.sharding.spec:
            rule = (
                f"a block of 8-bit moments of a parameter {leaf.shape} would lie on two devices, split as {leaf.sharding.spec}"
            )
            remedy = "Set dtypes.m and dtypes.v to bf16, or a smaller mesh.tensor."
            raise ConfigError([Problem("mesh", None, rule, remedy)])
        sharding = leaf.sharding.with_memory_kind(ON_HOST) if offload else leaf.sharding
        if is_blocks(moment):
            return Blocks(_like(moment.codes, sharding), _like(moment.scales, sharding))
        return _like(moment, sharding if moment.shape == leaf.shape else unsharded)

    mask = jax.tree.map(lambda _: True, abstract) if trained is None else trained
    optimizer = optax.tree_map_params(
        tx,
        shard_moment,
        jax.eval_shape(tx.init, select_leaves(abstract, mask)),
        select_leaves(params, mask),
        transform_non_params=lambda a: _like(a, unsharded),
        is_leaf=lambda x: is_blocks(x) or isinstance(x, optax.MaskedNode),
    )
    guard_state = jax.tree.map(lambda a: _like(a, unsharded), jax.eval_shape(guard.init_guard))
    ema = jax.tree.map(lambda p: p.update(dtype=jnp.float32), select_leaves(params, mask)) if average else ()
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=unsharded), params, optimizer, guard_state, ema, layers)


def _place_layers(params: Params, layers: Arrangement | None) -> Params:
    if layers is None:
        return params
    return jax.tree_util.tree_map_with_path(
        lambda path, x: stacks.place_layers(x, layers.order) if is_stacked(path) else x, params
    )


def _like(a: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def shardings(abstract: Any) -> Any:
    """Return the tree with the sharding of each leaf."""
    return jax.tree.map(lambda a: a.sharding, abstract)


def create_state(
    definition: Definition,
    tx: optax.GradientTransformation,
    abstract: TrainState,
    seed: int,
    trained: Params | None = None,
    only: Params | None = None,
) -> TrainState:
    """Return the state of step 0. Each device creates only its own shards. Initial weights depend on the seed, not on the mesh.

    trained: the parameters that have moments; None: all. only: the parameters to create; None: all.
    """

    def select(tree: Params, choice: Params | None) -> Params:
        return tree if choice is None else select_leaves(tree, choice)

    layouts = shardings(select(abstract.params, only))

    def init_params(key: jax.Array) -> Params:
        return _place_layers(select(definition.init(key), only), abstract.layers)

    params = jax.jit(init_params, out_shardings=layouts)(jax.random.key(seed))
    trained_params = select(params, trained)
    leaves, tree = jax.tree.flatten(shardings(abstract.optimizer))
    if any(sharding.memory_kind == ON_HOST for sharding in leaves):
        # One at a time: on its way to the host each is on the device, which may have no memory for all.
        moments = [
            jax.jit(lambda params, i=i: jax.tree.leaves(tx.init(params))[i], out_shardings=sharding)(trained_params)
            for i, sharding in enumerate(leaves)
        ]
        optimizer = jax.tree.unflatten(tree, moments)
    else:
        optimizer = jax.jit(tx.init, out_shardings=shardings(abstract.optimizer))(trained_params)
    step = jax.device_put(jnp.zeros((), jnp.int32), abstract.step.sharding)
    guard_state = jax.jit(guard.init_guard, out_shardings=shardings(abstract.guard))()
    return begin_average(TrainState(step, params, optimizer, guard_state, layers=abstract.layers), abstract)


def dotted_name(path: Any) -> str:
    """Return the dotted name of a leaf from its path: attributes and dict keys, without positions in tuples."""
    keys = [str(getattr(k, "name", None) or getattr(k, "key", "")) for k in path]
    return ".".join(p for p in keys if p)


def is_moment(path: Any) -> bool:
    """Return whether a leaf of a TrainState, by its path, is a moment of a parameter, not a counter."""
    return getattr(path[0], "name", "") == "optimizer" and any(isinstance(k, jax.tree_util.DictKey) for k in path)


def layer_name(name: str, element: int) -> str:
    """Return the name of a stacked array in one element of the stack. It has the number of the model's layer."""
    within = LAYER_KEY.search(name)
    layer = element * int(within[2]) + int(within[1]) if within else element
    return without_layer_key(name).replace(".layers.", f".layers.{layer}.", 1)


def split_layer(name: str, period: int) -> tuple[str, int | None]:
    """Invert `layer_name`: return (name of the stacked array, element); element: None for an array without layers.

    period: layers in each element of the stack.
    """
    match = re.match(r"(.*?\.layers)\.(\d+)\.", name)
    if not match:
        return name, None
    element, index = divmod(int(match[2]), period)
    within = f".{layer_key(index, period)}" if period > 1 else ""
    return match[1] + within + name[match.end() - 1 :], element


class NamedLeaf(NamedTuple):
    """An array of a state, or its shape, with its name and the order of its layers."""

    name: str
    order: tuple[int | None, ...]  # the layer in each slot of axis 0, None for an empty slot; () without layers
    array: Any

    @property
    def stacked(self) -> bool:
        """Return whether layers are stacked on axis 0."""
        return bool(self.order)

    @property
    def slot_names(self) -> list[tuple[int, str]]:
        """Return (slot, name of the tensor) for each layer of a stack."""
        return [(slot, layer_name(self.name, layer)) for slot, layer in enumerate(self.order) if layer is not None]

    @property
    def tensor_names(self) -> list[str | None]:
        """Return the name of the tensor in each slot of a stack, None for an empty slot; for an unstacked array, its name."""
        return [None if layer is None else layer_name(self.name, layer) for layer in self.order] or [self.name]


def named_leaves(state: TrainState) -> list[NamedLeaf]:
    """Return the `NamedLeaf` of each array of a state."""
    return [_leaf(state, path, a) for path, a in jax.tree_util.tree_leaves_with_path(state)]


def _leaf(state: TrainState, path: Any, a: Any) -> NamedLeaf:
    order = () if not is_stacked(path) else state.layers.order if state.layers else tuple(range(a.shape[0]))
    return NamedLeaf(dotted_name(path), order, a)


def abstract_tensors(abstract: TrainState) -> Tensors:
    """Return name -> shape, dtype and sharding of every tensor of a state. Each layer of a stack has its own tensors."""
    out: Tensors = {}
    for leaf in named_leaves(abstract):
        array = leaf.array
        if leaf.stacked:
            sharding = stacks.layer_sharding(array.shape, array.sharding)
            layer = jax.ShapeDtypeStruct(array.shape[1:], array.dtype, sharding=sharding)
            tensors = {name: layer for _, name in leaf.slot_names}
        else:
            tensors = {leaf.name: array}
        clash = tensors.keys() & out.keys()
        if clash:
            raise ValueError(
                f"two tensors of the train state are called {min(clash)}: give the optimizer's fields distinct names"
            )
        out.update(tensors)
    return out


def to_tensors(state: TrainState) -> Tensors:
    """Return copies of a state's tensors by name. They stay valid when the state is donated to the next step."""
    out: Tensors = {}
    for leaf in named_leaves(state):
        array = leaf.array
        if leaf.stacked:
            layer = stacks.copy_layer(array.shape, array.sharding)
            out |= {name: layer(array, slot) for slot, name in leaf.slot_names}
        else:
            out[leaf.name] = stacks.copy_array(array.shape, array.sharding)(array)
    return out


def to_digests(state: TrainState, compiled: Any = None) -> list[tuple[list[str | None], Any]]:
    """Begin to compute the digests of a state's tensors. Return (names, digests) of each array of the state.

    The digests of a stack are uint32 (slots, 3); an unstacked array has one, (3,). An empty slot has a digest too, with name
    None. The layers of a stack in host memory have separate entries, (3,) each. `digests_by_name` waits for the digests.
    compiled: the compiled program of digest_program for the arrays in device memory; None: compile it now.
    """
    leaves = named_leaves(state)
    out: list[tuple[list[str | None], Any]] = []
    device_leaves = [leaf for leaf in leaves if leaf.array.sharding.memory_kind != ON_HOST]
    arrays = [leaf.array for leaf in device_leaves]
    results = compiled(*arrays) if compiled else digests.digest_layers(arrays, [leaf.stacked for leaf in device_leaves])
    out += [(leaf.tensor_names, digest) for leaf, digest in zip(device_leaves, results, strict=True)]
    for leaf in (leaf for leaf in leaves if leaf.array.sharding.memory_kind == ON_HOST):
        for slot, name in leaf.slot_names or [(0, leaf.name)]:  # one at a time: the device may have no memory for all
            array = stacks.copy_to_device(leaf.array, slot) if leaf.stacked else leaf.array
            out.append(([name], digests.digest_arrays({name: array})[name]))
    return out


def digests_by_name(entries: list[tuple[list[str | None], Any]]) -> dict[str, np.ndarray]:
    """Return the digest of each tensor, uint32 (3,), from the result of `to_digests`."""
    rows = ((names, np.asarray(values).reshape(-1, 3)) for names, values in entries)
    return {name: digest for names, values in rows for name, digest in zip(names, values, strict=True) if name is not None}


def to_host(state: TrainState, prefix: str) -> dict[str, np.ndarray]:
    """Return name without `prefix` -> host copy, for the tensors whose names begin with `prefix`. Compiles nothing."""
    out: dict[str, np.ndarray] = {}
    for leaf in named_leaves(state):
        if not leaf.name.startswith(prefix):
            continue
        array = np.array(leaf.array)  # a copy: the state may be donated
        if leaf.stacked:
            out |= {name.removeprefix(prefix): array[slot] for slot, name in leaf.slot_names}
        else:
            out[leaf.name.removeprefix(prefix)] = array
    return out


def from_tensors(abstract: TrainState, tensors: Tensors, fresh: TrainState | None = None) -> TrainState:
    """Return a state with these tensors, in the layout of `abstract`. Arrays without tensors are taken from `fresh`.

    Each tensor is removed from `tensors` when it is used, so it is in memory once.
    """
    fresh_leaves = {dotted_name(path): a for path, a in jax.tree_util.tree_leaves_with_path(fresh)}

    def make_leaf(path: Any, target: jax.ShapeDtypeStruct) -> jax.Array:
        leaf = _leaf(abstract, path, target)
        names = [layer_name(leaf.name, layer) for layer in range(len(leaf.slot_names))] if leaf.stacked else [leaf.name]
        if names[0] not in tensors and leaf.name in fresh_leaves:
            return fresh_leaves[leaf.name]
        layers = [tensors.pop(name) for name in names]
        return stacks.stack_layers(layers, leaf.order, target) if leaf.stacked else layers[0]

    return jax.tree_util.tree_map_with_path(make_leaf, abstract)


def divisible_sharding(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Return `sharding` for an array of this shape: a dimension that its mesh axes do not divide evenly is replicated."""
    dim_axes = [
        axes
        if axes and size % math.prod(sharding.mesh.shape[a] for a in (axes if isinstance(axes, tuple) else (axes,))) == 0
        else None
        for size, axes in zip(shape, [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))], strict=True)
    ]
    return NamedSharding(sharding.mesh, P(*dim_axes), memory_kind=sharding.memory_kind)


def without_params(state: TrainState) -> TrainState:
    """Return a state without parameters and averages, to free their memory before the parameters of init.from are read."""
    return dataclasses.replace(state, params={}, ema=())
