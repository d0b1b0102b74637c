"""The train state: how it is stored on devices, and what its tensors are called outside.

Only this file knows how the master weights are stored and that layers are stacked. Checkpoints see `to_tensors`: one named
array per layer and tensor, the same names whatever the layout in memory was.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.models.module import Definition, Params
from jaxtrain.sharding import Placement, replicated

Tensors = dict[str, Any]  # name -> jax.Array, or jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step changes: arrays, or their shapes while nothing is allocated."""

    step: Any  # int32 (): optimizer steps taken
    params: Params  # master weights
    optimizer: Any  # optax state: moments split like their parameters


jax.tree_util.register_dataclass(TrainState, ["step", "params", "optimizer"], [])


def weights(state: TrainState) -> Params:
    """The parameters that the forward pass reads and the gradient is taken of."""
    return state.params


def abstract_state(definition: Definition, tx: optax.GradientTransformation, placement: Placement) -> TrainState:
    """Shapes, dtypes and shardings of a state that nobody has allocated yet. Moments are split like their parameters."""

    def place(path: Any, a: jax.ShapeDtypeStruct, axes: Any) -> jax.ShapeDtypeStruct:
        name = ".".join(str(k.key) for k in path)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placement.sharding(axes, name, a.shape))

    params = jax.tree_util.tree_map_with_path(place, definition.abstract, definition.axes)
    whole = replicated(placement)
    optimizer = optax.tree_map_params(
        tx,
        lambda a, p: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=p.sharding if a.shape == p.shape else whole),
        jax.eval_shape(tx.init, definition.abstract),
        params,
        transform_non_params=lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole),
    )
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=whole), params, optimizer)


def shardings(abstract: Any) -> Any:
    """The sharding of every leaf."""
    return jax.tree.map(lambda a: a.sharding, abstract)


def create_state(definition: Definition, tx: optax.GradientTransformation, abstract: TrainState, seed: int) -> TrainState:
    """A fresh state, each device making only its own part. The numbers depend on the seed and not on the mesh."""

    def create(key: jax.Array) -> TrainState:
        params = definition.init(key)
        return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))

    return jax.jit(create, out_shardings=shardings(abstract))(jax.random.key(seed))


def _name(path: Any) -> str:
    """Dotted names of attributes and dict keys. Positions in tuples say nothing to a reader and are left out."""
    parts = [str(getattr(k, "name", None) or getattr(k, "key", "")) for k in path]
    return ".".join(p for p in parts if p)


def _is_stacked(path: Any) -> bool:
    return any(getattr(k, "key", None) == "layers" for k in path)


def _layer_name(name: str, layer: int) -> str:
    return name.replace(".layers.", f".layers.{layer}.", 1)


def _layer_sharding(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, P(*sharding.spec[1:]), memory_kind=sharding.memory_kind)


def abstract_tensors(abstract: TrainState) -> Tensors:
    """Name -> shape, dtype and sharding of every tensor of a state, layers apart."""
    out: Tensors = {}
    for path, a in jax.tree_util.tree_leaves_with_path(abstract):
        name = _name(path)
        if _is_stacked(path):
            one = jax.ShapeDtypeStruct(a.shape[1:], a.dtype, sharding=_layer_sharding(a.sharding))
            named = {_layer_name(name, i): one for i in range(a.shape[0])}
        else:
            named = {name: a}
        clash = named.keys() & out.keys()
        if clash:
            raise ValueError(
                f"two tensors of the train state are called {min(clash)}: give the optimizer's fields distinct names"
            )
        out.update(named)
    return out


def _spread(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """A sharding in which no two devices hold the same part, as far as the shape divides: replicas share the work of a copy."""
    mesh = sharding.mesh
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    parts: list[tuple[str, ...]] = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]
    used = {axis for part in parts for axis in part}
    for axis in (a for a, size in mesh.shape.items() if size > 1 and a not in used):
        for dim, size in enumerate(shape):
            if size % math.prod(mesh.shape[a] for a in (*parts[dim], axis)) == 0:
                parts[dim] = (*parts[dim], axis)
                break
    return NamedSharding(mesh, P(*(part or None for part in parts)))


def _to_host(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """On GPUs copies go straight to host memory: a second state would not fit on the device."""
    on_gpu = next(iter(sharding.device_set)).platform == "gpu"
    return jax.device_put(x, jax.memory.Space.Host) if on_gpu else x


@functools.cache
def copy_layer(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Jitted `(w, i) -> copy of layer i` of an array of this shape, stacked on axis 0; on GPUs in host memory.

    One layer a call: a single call for all of them would hold the whole stack a second time on its way.
    """
    one = _spread(_layer_sharding(sharding), shape[1:])

    def layer(w: jax.Array, i: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_index_in_dim(w, i, keepdims=False)
        return _to_host(jax.lax.with_sharding_constraint(part, one), sharding)

    return jax.jit(layer)


@functools.cache
def copy(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Jitted copy of an array; on GPUs in host memory."""
    one = _spread(sharding, shape)
    return jax.jit(lambda w: _to_host(jax.lax.with_sharding_constraint(jnp.copy(w), one), sharding))


@functools.cache
def _stack(sharding: NamedSharding) -> Any:
    return jax.jit(lambda parts: jnp.stack(parts), out_shardings=sharding)


def to_tensors(state: TrainState) -> Tensors:
    """Copies of a state's tensors by name. They stay good when the state is donated to the next step."""
    out: Tensors = {}
    for path, a in jax.tree_util.tree_leaves_with_path(state):
        name = _name(path)
        if _is_stacked(path):
            layer = copy_layer(a.shape, a.sharding)
            out.update({_layer_name(name, i): layer(a, i) for i in range(a.shape[0])})
        else:
            out[name] = copy(a.shape, a.sharding)(a)
    return out


def to_host(state: TrainState, prefix: str) -> dict[str, np.ndarray]:
    """Host copies of the tensors whose names begin with `prefix`, by the rest of their names. Compiles nothing."""
    out: dict[str, np.ndarray] = {}
    for path, a in jax.tree_util.tree_leaves_with_path(state):
        name = _name(path)
        if not name.startswith(prefix):
            continue
        whole = np.array(a)  # a copy: the state may be donated
        if _is_stacked(path):
            out.update({_layer_name(name, i).removeprefix(prefix): layer for i, layer in enumerate(whole)})
        else:
            out[name.removeprefix(prefix)] = whole
    return out


def from_tensors(abstract: TrainState, tensors: Tensors, fresh: TrainState | None = None) -> TrainState:
    """The state made of these tensors, in the layout of `abstract`; what they do not name is taken from `fresh`.

    Empties `tensors` as it goes, to hold memory once.
    """
    others = {_name(path): a for path, a in jax.tree_util.tree_leaves_with_path(fresh)}

    def make(path: Any, a: jax.ShapeDtypeStruct) -> jax.Array:
        name = _name(path)
        names = [_layer_name(name, i) for i in range(a.shape[0])] if _is_stacked(path) else [name]
        if names[0] not in tensors and name in others:
            return others[name]
        parts = [tensors.pop(n) for n in names]
        return _stack(a.sharding)(parts) if _is_stacked(path) else parts[0]

    return jax.tree_util.tree_map_with_path(make, abstract)


def without_params(state: TrainState) -> TrainState:
    """The rest of a state, for one whose parameters are to come from elsewhere; frees theirs."""
    return TrainState(state.step, {}, state.optimizer)
