"""Copy one layer of an array with layers stacked on axis 0, and build such a stack from layers, for any sharding.

state.py decides which layer is in which slot of a stack. If a stack is sharded over pipeline stages, a layer is on the devices
of one stage only. A sum of its bits, as integers, sends it to all stages: the other stages add zeros. So -0.0 and NaN are
preserved, and no device ever holds more than its own shard of a stack.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint.digests import WORDS, mesh_axes

ON_HOST = "pinned_host"


def on_device(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return the array in device memory, because XLA cannot compute on host memory; for use inside jit."""
    return jax.device_put(x, jax.memory.Space.Device) if sharding.memory_kind == ON_HOST else x


def _to_host(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return the array, on GPUs in host memory; for use inside jit. A second state would not fit on the device."""
    on_gpu = next(iter(sharding.device_set)).platform == "gpu"
    return jax.device_put(x, jax.memory.Space.Host) if on_gpu else x


# ---- Sharding of one layer


def _stages(sharding: NamedSharding) -> tuple[str, ...]:
    """Return the mesh axes that shard the stack."""
    return mesh_axes(sharding, 1)[0]


def _shared_dim(shape: tuple[int, ...], sharding: NamedSharding) -> int | None:
    """Return the first dimension of a layer that the stages can shard; None if they divide no dimension.

    shape, sharding: of the stack.
    """
    over, *parts = mesh_axes(sharding, len(shape))
    for dim, (size, axes) in enumerate(zip(shape[1:], parts, strict=True)):
        if over and size % math.prod(sharding.mesh.shape[a] for a in (*axes, *over)) == 0:
            return dim
    return None


def layer_sharding(shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of one layer of a stack: as in the stack, and over the stages if they divide a dimension."""
    over, *parts = mesh_axes(sharding, len(shape))
    dim = _shared_dim(shape, sharding)
    if dim is not None:
        parts[dim] = (*parts[dim], *over)
    spec = P(*(axes if len(axes) > 1 else (axes[0] if axes else None) for axes in parts))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _spread(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding, extended by its replica axes if they divide a dimension: each replica then copies one shard."""
    mesh, parts = sharding.mesh, mesh_axes(sharding, len(shape))
    used = {axis for part in parts for axis in part}
    for axis in (a for a, size in mesh.shape.items() if size > 1 and a not in used):
        for dim, size in enumerate(shape):
            if size % math.prod(mesh.shape[a] for a in (*parts[dim], axis)) == 0:
                parts[dim] = (*parts[dim], axis)
                break
    return NamedSharding(mesh, P(*(part or None for part in parts)))


def copy_sharding(shape: tuple[int, ...], sharding: NamedSharding, stacked: bool) -> NamedSharding:
    """Return the sharding of the copy of an array, or of the copy of each layer if the array is a stack.

    The sharding has the default memory kind. On GPUs, the caller puts the copies into host memory.
    """
    return _spread(layer_sharding(shape, sharding), shape[1:]) if stacked else _spread(sharding, shape)


# ---- One layer of a stack


def layer_at(w: jax.Array, place: Any, sharding: NamedSharding) -> jax.Array:
    """Return the layer in a slot of a stack, sharded as by `layer_sharding`; for use inside jit. sharding: the stack's."""
    over = _stages(sharding)
    if not over:
        return on_device(jax.lax.dynamic_index_in_dim(w, place, keepdims=False), sharding)
    dim = _shared_dim(w.shape, sharding)

    def local(w: jax.Array, place: jax.Array) -> jax.Array:
        mine, at = place // w.shape[0] == jax.lax.axis_index(over), place % w.shape[0]
        bits = jax.lax.bitcast_convert_type(jax.lax.dynamic_index_in_dim(w, at, keepdims=False), WORDS[w.dtype.itemsize])
        bits = added(jnp.where(mine, bits, jnp.zeros_like(bits)))
        return jax.lax.bitcast_convert_type(bits, w.dtype)

    def added(bits: jax.Array) -> jax.Array:
        if dim is None:
            return jax.lax.psum(bits, over)
        return jax.lax.psum_scatter(bits, over, scatter_dimension=dim, tiled=True)

    out = layer_sharding(w.shape, sharding).spec
    taken = jax.shard_map(local, mesh=sharding.mesh, in_specs=(sharding.spec, P()), out_specs=out, check_vma=False)
    return taken(w, jnp.asarray(place, jnp.int32))


@functools.cache
def copy_layer(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Return the jitted `(w, place) -> copy of the layer` for arrays of this shape, stacked on axis 0; on GPUs in host memory.

    It copies one layer per call: a single call for all layers would need memory for a second stack.
    """
    one = copy_sharding(shape, sharding, stacked=True)

    def layer(w: jax.Array, place: jax.Array) -> jax.Array:
        return _to_host(jax.lax.with_sharding_constraint(layer_at(w, place, sharding), one), sharding)

    return jax.jit(layer)


@functools.cache
def copy(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Return the jitted w -> copy of w for arrays of this shape and sharding. On GPUs the copy is in host memory."""
    one = copy_sharding(shape, sharding, stacked=False)
    return jax.jit(lambda w: _to_host(jax.lax.with_sharding_constraint(jnp.copy(on_device(w, sharding)), one), sharding))


def copy_to_device(a: jax.Array, place: int) -> jax.Array:
    """Return one layer, in device memory, of a stack in host memory. place: the layer's slot."""
    return _taking(a.shape, a.sharding)(a, place)


@functools.cache
def _taking(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    out = layer_sharding(shape, sharding).with_memory_kind("device")
    return jax.jit(lambda w, place: layer_at(w, place, sharding), out_shardings=out)


# ---- A stack of layers


def place_layers(x: jax.Array, order: Sequence[int | None]) -> jax.Array:
    """Return a stack of consecutive layers with each in its slot and zeros in empty slots; for use inside jit.

    order: the layer of each slot, None for an empty slot.
    """
    if tuple(order) == tuple(range(x.shape[0])):
        return x
    placed = jnp.take(x, jnp.asarray([layer or 0 for layer in order]), axis=0)
    filled = jnp.asarray([layer is not None for layer in order]).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(filled, placed, jnp.zeros_like(placed))


@functools.cache
def _stacking(order: tuple[int | None, ...], shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Return the jitted function that maps the list of layers, layer 0 first, to the stack."""
    over, dim = _stages(sharding), _shared_dim(shape, sharding)

    def stacked(layers: list[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.zeros_like(layers[0]) if layer is None else layers[layer] for layer in order])

    def local(layers: list[jax.Array]) -> jax.Array:
        parts = stacked(layers)
        if dim is not None:  # every stage has a shard of every layer, and gets all shards of its own layers
            return jax.lax.all_to_all(parts, over, split_axis=0, concat_axis=dim + 1, tiled=True)
        count = len(order) // math.prod(sharding.mesh.shape[a] for a in over)
        return jax.lax.dynamic_slice_in_dim(parts, jax.lax.axis_index(over) * count, count)

    if not over:
        return jax.jit(stacked, out_shardings=sharding)
    one = layer_sharding(shape, sharding).spec
    return jax.jit(
        jax.shard_map(local, mesh=sharding.mesh, in_specs=(one,), out_specs=sharding.spec, check_vma=False),
        out_shardings=sharding,
    )


@functools.cache
def _putting(sharding: NamedSharding) -> Any:
    def put(w: jax.Array, part: jax.Array, place: jax.Array) -> jax.Array:
        part = jax.device_put(on_device(part, sharding), jax.memory.Space.Host)
        return jax.lax.dynamic_update_index_in_dim(w, part, place, 0)

    return jax.jit(put, out_shardings=sharding, donate_argnums=0)


def stack(layers: list[jax.Array], order: tuple[int | None, ...], a: jax.ShapeDtypeStruct) -> jax.Array:
    """Return the list of layers, layer 0 first, as one array with the shape, dtype and sharding of `a`, each layer in its slot.

    A stack in host memory is filled layer by layer, since the device may have no memory for all layers.
    """
    if a.sharding.memory_kind != ON_HOST:
        return _stacking(order, a.shape, a.sharding)(layers)
    whole = jax.jit(lambda: jnp.zeros(a.shape, a.dtype), out_shardings=a.sharding)()
    for place, layer in enumerate(order):
        if layer is not None:
            whole = _putting(a.sharding)(whole, layers[layer], place)
    return whole
