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

from jaxtrain import digests, guard
from jaxtrain.models.module import Definition, Params, part
from jaxtrain.quantized import Blocks, is_blocks
from jaxtrain.sharding import LayoutError, Placement, replicated

Tensors = dict[str, Any]  # name -> jax.Array, or jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step changes: arrays, or their shapes while nothing is allocated."""

    step: Any  # int32 (): optimizer steps taken
    params: Params  # master weights
    optimizer: Any  # optax state: moments split like their parameters
    guard: Any = ()  # which steps are taken (jaxtrain/guard.py); on every device


jax.tree_util.register_dataclass(TrainState, ["step", "params", "optimizer", "guard"], [])


def weights(state: TrainState) -> Params:
    """The parameters that the forward pass reads and the gradient is taken of."""
    return state.params


def abstract_state(
    definition: Definition,
    tx: optax.GradientTransformation,
    placement: Placement,
    offload: bool = False,
    trained: Params | None = None,
) -> TrainState:
    """Shapes, dtypes and shardings of a state that nobody has allocated yet. Moments are split like their parameters.

    trained: which parameters are learnt and so have moments; None: all.
    offload: moments rest in pinned host memory. Devices that are only described have none, and jax then drops the memory's
    kind from a sharding without a word: `compiler.compile_train` puts it back.
    """

    def place(path: Any, a: jax.ShapeDtypeStruct, axes: Any) -> jax.ShapeDtypeStruct:
        name = ".".join(str(k.key) for k in path)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placement.sharding(axes, name, a.shape))

    params = jax.tree_util.tree_map_with_path(place, definition.abstract, definition.axes)
    whole = replicated(placement)

    def moment(a: Any, p: jax.ShapeDtypeStruct) -> Any:
        if isinstance(a, optax.MaskedNode):
            return a
        if is_blocks(a) and dividing(p.sharding, a.scales.shape).spec != p.sharding.spec:
            raise LayoutError(
                f"moments of a parameter {p.shape}: a block of 8-bit values would lie on two devices, split as "
                f"{p.sharding.spec}; set dtypes.m and dtypes.v to bf16, or a smaller mesh.tensor"
            )
        home = p.sharding.with_memory_kind(ON_HOST) if offload else p.sharding
        if is_blocks(a):
            return Blocks(_like(a.codes, home), _like(a.scales, home))
        return _like(a, home if a.shape == p.shape else whole)

    every = jax.tree.map(lambda _: True, definition.abstract) if trained is None else trained
    optimizer = optax.tree_map_params(
        tx,
        moment,
        jax.eval_shape(tx.init, part(definition.abstract, every)),
        part(params, every),
        transform_non_params=lambda a: _like(a, whole),
        is_leaf=lambda x: is_blocks(x) or isinstance(x, optax.MaskedNode),
    )
    guarded = jax.tree.map(lambda a: _like(a, whole), jax.eval_shape(guard.fresh))
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=whole), params, optimizer, guarded)


def _like(a: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def shardings(abstract: Any) -> Any:
    """The sharding of every leaf."""
    return jax.tree.map(lambda a: a.sharding, abstract)


def create_state(
    definition: Definition,
    tx: optax.GradientTransformation,
    abstract: TrainState,
    seed: int,
    trained: Params | None = None,
    only: Params | None = None,
) -> TrainState:
    """A fresh state, each device making only its own part. The numbers depend on the seed and not on the mesh.

    trained: which parameters are learnt; None: all. only: which parameters to make, those among them; None: all.
    """

    def chosen(tree: Params, choice: Params | None) -> Params:
        return tree if choice is None else part(tree, choice)

    layouts = shardings(chosen(abstract.params, only))
    params = jax.jit(lambda key: chosen(definition.init(key), only), out_shardings=layouts)(jax.random.key(seed))
    learnt = chosen(params, trained)
    leaves, tree = jax.tree.flatten(shardings(abstract.optimizer))
    if any(sharding.memory_kind == ON_HOST for sharding in leaves):
        # One at a time: on its way to the host each is on the device, where there may be no room for all.
        made = [
            jax.jit(lambda params, i=i: jax.tree.leaves(tx.init(params))[i], out_shardings=sharding)(learnt)
            for i, sharding in enumerate(leaves)
        ]
        optimizer = jax.tree.unflatten(tree, made)
    else:
        optimizer = jax.jit(tx.init, out_shardings=shardings(abstract.optimizer))(learnt)
    step = jax.device_put(jnp.zeros((), jnp.int32), abstract.step.sharding)
    return TrainState(step, params, optimizer, jax.jit(guard.fresh, out_shardings=shardings(abstract.guard))())


def _name(path: Any) -> str:
    """Dotted names of attributes and dict keys. Positions in tuples say nothing to a reader and are left out."""
    parts = [str(getattr(k, "name", None) or getattr(k, "key", "")) for k in path]
    return ".".join(p for p in parts if p)


def is_moment(path: Any) -> bool:
    """Whether a leaf of a TrainState, by its path, is one of the optimizer's for a parameter: a moment, and no counter."""
    return getattr(path[0], "name", "") == "optimizer" and any(isinstance(k, jax.tree_util.DictKey) for k in path)


def _is_stacked(path: Any) -> bool:
    return any(getattr(k, "key", None) == "layers" for k in path)


def layer_name(name: str, layer: int) -> str:
    """What one layer of a stacked array is called."""
    return name.replace(".layers.", f".layers.{layer}.", 1)


def named_leaves(state: TrainState) -> list[tuple[str, bool, Any]]:
    """Each array of a state, or its shape: its name, whether layers are stacked on its axis 0, and itself."""
    return [(_name(path), _is_stacked(path), a) for path, a in jax.tree_util.tree_leaves_with_path(state)]


def _layer_sharding(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, P(*sharding.spec[1:]), memory_kind=sharding.memory_kind)


def abstract_tensors(abstract: TrainState) -> Tensors:
    """Name -> shape, dtype and sharding of every tensor of a state, layers apart."""
    out: Tensors = {}
    for name, stacked, a in named_leaves(abstract):
        if stacked:
            one = jax.ShapeDtypeStruct(a.shape[1:], a.dtype, sharding=_layer_sharding(a.sharding))
            named = {layer_name(name, i): one for i in range(a.shape[0])}
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


ON_HOST = "pinned_host"


def on_device(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """XLA computes on nothing that is in host memory."""
    return jax.device_put(x, jax.memory.Space.Device) if sharding.memory_kind == ON_HOST else x


def _to_host(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """On GPUs copies go straight to host memory: a second state would not fit on the device."""
    on_gpu = next(iter(sharding.device_set)).platform == "gpu"
    return jax.device_put(x, jax.memory.Space.Host) if on_gpu else x


def home_of_copy(shape: tuple[int, ...], sharding: NamedSharding, stacked: bool) -> NamedSharding:
    """How the copy of an array, or of each of its layers, is split; on GPUs it is so in host memory."""
    return _spread(_layer_sharding(sharding), shape[1:]) if stacked else _spread(sharding, shape)


@functools.cache
def copy_layer(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Jitted `(w, i) -> copy of layer i` of an array of this shape, stacked on axis 0; on GPUs in host memory.

    One layer a call: a single call for all of them would hold the whole stack a second time on its way.
    """
    one = home_of_copy(shape, sharding, stacked=True)

    def layer(w: jax.Array, i: jax.Array) -> jax.Array:
        part = on_device(jax.lax.dynamic_index_in_dim(w, i, keepdims=False), sharding)
        return _to_host(jax.lax.with_sharding_constraint(part, one), sharding)

    return jax.jit(layer)


@functools.cache
def copy(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Jitted copy of an array; on GPUs in host memory."""
    one = home_of_copy(shape, sharding, stacked=False)
    return jax.jit(lambda w: _to_host(jax.lax.with_sharding_constraint(jnp.copy(on_device(w, sharding)), one), sharding))


@functools.cache
def _stacking(sharding: NamedSharding) -> Any:
    return jax.jit(lambda parts: jnp.stack(parts), out_shardings=sharding)


@functools.cache
def _putting(sharding: NamedSharding) -> Any:
    def put(w: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
        part = jax.device_put(on_device(part, sharding), jax.memory.Space.Host)
        return jax.lax.dynamic_update_index_in_dim(w, part, i, 0)

    return jax.jit(put, out_shardings=sharding, donate_argnums=0)


def _stack(parts: list[jax.Array], a: jax.ShapeDtypeStruct) -> jax.Array:
    """Layers as one array; in host memory one after the other, since the device may have no room for all."""
    if a.sharding.memory_kind != ON_HOST:
        return _stacking(a.sharding)(parts)
    whole = jax.jit(lambda: jnp.zeros(a.shape, a.dtype), out_shardings=a.sharding)()
    for i, layer in enumerate(parts):
        whole = _putting(a.sharding)(whole, layer, i)
    return whole


def to_tensors(state: TrainState) -> Tensors:
    """Copies of a state's tensors by name. They stay good when the state is donated to the next step."""
    out: Tensors = {}
    for name, stacked, a in named_leaves(state):
        if stacked:
            layer = copy_layer(a.shape, a.sharding)
            out.update({layer_name(name, i): layer(a, i) for i in range(a.shape[0])})
        else:
            out[name] = copy(a.shape, a.sharding)(a)
    return out


def to_digests(state: TrainState, compiled: Any = None) -> list[tuple[list[str], Any]]:
    """The digests of what `to_tensors` makes, taken of the state itself and on their way: names, and uint32 (names, 3),
    or (3,) of one.

    `digests_by_name` waits for them. compiled: digests.program of the arrays in device memory.
    """
    found = named_leaves(state)
    out: list[tuple[list[str], Any]] = []
    here = [item for item in found if item[2].sharding.memory_kind != ON_HOST]
    arrays = [a for _, _, a in here]
    made = compiled(*arrays) if compiled else digests.of_layers(arrays, [stacked for _, stacked, _ in here])
    for (name, stacked, a), digest in zip(here, made, strict=True):
        out.append(([layer_name(name, i) for i in range(a.shape[0])], digest) if stacked else ([name], digest))
    for name, stacked, a in found:
        if a.sharding.memory_kind != ON_HOST:
            continue
        for i in range(a.shape[0] if stacked else 1):  # one at a time: the device may have no room for all
            part, where = (copy_to_device(a, i), layer_name(name, i)) if stacked else (a, name)
            out.append(([where], digests.of_many({where: part})[where]))
    return out


def digests_by_name(made: list[tuple[list[str], Any]]) -> dict[str, np.ndarray]:
    """uint32 (3,) of each tensor, from what `to_digests` gave."""
    return {name: digest for names, found in made for name, digest in zip(names, np.asarray(found).reshape(-1, 3), strict=True)}


def copy_to_device(a: jax.Array, layer: int) -> jax.Array:
    """A layer of a stack in host memory, in device memory."""
    return _taking(a.sharding)(a, layer)


@functools.cache
def _taking(sharding: NamedSharding) -> Any:
    def take(w: jax.Array, i: jax.Array) -> jax.Array:
        return on_device(jax.lax.dynamic_index_in_dim(w, i, keepdims=False), sharding)

    return jax.jit(take, out_shardings=_layer_sharding(sharding).with_memory_kind("device"))


def to_host(state: TrainState, prefix: str) -> dict[str, np.ndarray]:
    """Host copies of the tensors whose names begin with `prefix`, by the rest of their names. Compiles nothing."""
    out: dict[str, np.ndarray] = {}
    for name, stacked, a in named_leaves(state):
        if not name.startswith(prefix):
            continue
        whole = np.array(a)  # a copy: the state may be donated
        if stacked:
            out.update({layer_name(name, i).removeprefix(prefix): layer for i, layer in enumerate(whole)})
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
        names = [layer_name(name, i) for i in range(a.shape[0])] if _is_stacked(path) else [name]
        if names[0] not in tensors and name in others:
            return others[name]
        parts = [tensors.pop(n) for n in names]
        return _stack(parts, a) if _is_stacked(path) else parts[0]

    return jax.tree_util.tree_map_with_path(make, abstract)


def dividing(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Split like `sharding` where that is even, whole elsewhere."""
    parts = [
        axes
        if axes and size % math.prod(sharding.mesh.shape[a] for a in (axes if isinstance(axes, tuple) else (axes,))) == 0
        else None
        for size, axes in zip(shape, [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))], strict=True)
    ]
    return NamedSharding(sharding.mesh, P(*parts), memory_kind=sharding.memory_kind)


def without_params(state: TrainState) -> TrainState:
    """The rest of a state, for one whose parameters are to come from elsewhere; frees theirs."""
    return dataclasses.replace(state, params={})
