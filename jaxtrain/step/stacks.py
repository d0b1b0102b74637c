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


def to_device(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return the array in device memory, because XLA cannot compute on host memory; for use inside jit."""
    return jax.device_put(x, jax.memory.Space.Device) if sharding.memory_kind == ON_HOST else x


def _to_host(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return the array, on GPUs in host memory; for use inside jit. A second state would not fit on the device."""
    on_gpu = next(iter(sharding.device_set)).platform == "gpu"
    return jax.device_put(x, jax.memory.Space.Host) if on_gpu else x


# ---- Sharding of one layer


def _stack_axes(sharding: NamedSharding) -> tuple[str, ...]:
    return mesh_axes(sharding, 1)[0]


def _shared_dim(shape: tuple[int, ...], sharding: NamedSharding) -> int | None:
    """Return the first dimension of a layer that the stages can shard; None if they divide no dimension.

    shape, sharding: of the stack.
    """
    stage_axes, *dim_axes = mesh_axes(sharding, len(shape))
    for dim, (size, axes) in enumerate(zip(shape[1:], dim_axes, strict=True)):
        if stage_axes and size % math.prod(sharding.mesh.shape[a] for a in (*axes, *stage_axes)) == 0:
            return dim
    return None


def layer_sharding(shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of one layer of a stack: as in the stack, and over the stages if they divide a dimension."""
    stage_axes, *dim_axes = mesh_axes(sharding, len(shape))
    dim = _shared_dim(shape, sharding)
    if dim is not None:
        dim_axes[dim] = (*dim_axes[dim], *stage_axes)
    spec = P(*(axes if len(axes) > 1 else (axes[0] if axes else None) for axes in dim_axes))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _spread_sharding(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding, extended by its replica axes if they divide a dimension: each replica then copies one shard."""
    mesh, dim_axes = sharding.mesh, mesh_axes(sharding, len(shape))
    used = {axis for axes in dim_axes for axis in axes}
    for axis in (a for a, size in mesh.shape.items() if size > 1 and a not in used):
        for dim, size in enumerate(shape):
            if size % math.prod(mesh.shape[a] for a in (*dim_axes[dim], axis)) == 0:
                dim_axes[dim] = (*dim_axes[dim], axis)
                break
    return NamedSharding(mesh, P(*(axes or None for axes in dim_axes)))


def copy_sharding(shape: tuple[int, ...], sharding: NamedSharding, stacked: bool) -> NamedSharding:
    """Return the sharding of the copy of an array, or of the copy of each layer if the array is a stack.

    The sharding has the default memory kind. On GPUs, the caller puts the copies into host memory.
    """
    return _spread_sharding(layer_sharding(shape, sharding), shape[1:]) if stacked else _spread_sharding(sharding, shape)


# ---- One layer of a stack


def layer_at(array: jax.Array, slot: Any, sharding: NamedSharding) -> jax.Array:
    """Return the layer in a slot of a stack, sharded as by `layer_sharding`; for use inside jit. sharding: the stack's."""
    stage_axes = _stack_axes(sharding)
    if not stage_axes:
        return to_device(jax.lax.dynamic_index_in_dim(array, slot, keepdims=False), sharding)
    dim = _shared_dim(array.shape, sharding)

    def local(array: jax.Array, slot: jax.Array) -> jax.Array:
        is_local, local_slot = slot // array.shape[0] == jax.lax.axis_index(stage_axes), slot % array.shape[0]
        bits = jax.lax.bitcast_convert_type(
            jax.lax.dynamic_index_in_dim(array, local_slot, keepdims=False), WORDS[array.dtype.itemsize]
        )
        bits = sum_stages(jnp.where(is_local, bits, jnp.zeros_like(bits)))
        return jax.lax.bitcast_convert_type(bits, array.dtype)

    def sum_stages(bits: jax.Array) -> jax.Array:
        if dim is None:
            return jax.lax.psum(bits, stage_axes)
        return jax.lax.psum_scatter(bits, stage_axes, scatter_dimension=dim, tiled=True)

    out_spec = layer_sharding(array.shape, sharding).spec
    take_layer = jax.shard_map(local, mesh=sharding.mesh, in_specs=(sharding.spec, P()), out_specs=out_spec, check_vma=False)
    return take_layer(array, jnp.asarray(slot, jnp.int32))


@functools.cache
def copy_layer(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Return the jitted `(array, slot) -> copy of layer` for arrays of this shape, stacked on axis 0; on GPUs in host memory.

    It copies one layer per call: a single call for all layers would need memory for a second stack.
    """
    out_sharding = copy_sharding(shape, sharding, stacked=True)

    def copy_slot(array: jax.Array, slot: jax.Array) -> jax.Array:
        return _to_host(jax.lax.with_sharding_constraint(layer_at(array, slot, sharding), out_sharding), sharding)

    return jax.jit(copy_slot)


@functools.cache
def copy_array(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Return the jitted w -> copy of w for arrays of this shape and sharding. On GPUs the copy is in host memory."""
    out_sharding = copy_sharding(shape, sharding, stacked=False)
    return jax.jit(
        lambda w: _to_host(jax.lax.with_sharding_constraint(jnp.copy(to_device(w, sharding)), out_sharding), sharding)
    )


def copy_to_device(a: jax.Array, slot: int) -> jax.Array:
    """Return one layer, in device memory, of a stack in host memory. slot: the layer's slot."""
    return _jitted_take(a.shape, a.sharding)(a, slot)


@functools.cache
def _jitted_take(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    out = layer_sharding(shape, sharding).with_memory_kind("device")
    return jax.jit(lambda w, slot: layer_at(w, slot, sharding), out_shardings=out)


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
def _jitted_stack(order: tuple[int | None, ...], shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Return the jitted function that maps the list of layers, layer 0 first, to the stack."""
    stage_axes, dim = _stack_axes(sharding), _shared_dim(shape, sharding)

    def stack_in_order(layers: list[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.zeros_like(layers[0]) if layer is None else layers[layer] for layer in order])

    def local(layers: list[jax.Array]) -> jax.Array:
        slots = stack_in_order(layers)
        if dim is not None:  # every stage has a shard of every layer, and gets all shards of its own layers
            return jax.lax.all_to_all(slots, stage_axes, split_axis=0, concat_axis=dim + 1, tiled=True)
        count = len(order) // math.prod(sharding.mesh.shape[a] for a in stage_axes)
        return jax.lax.dynamic_slice_in_dim(slots, jax.lax.axis_index(stage_axes) * count, count)

    if not stage_axes:
        return jax.jit(stack_in_order, out_shardings=sharding)
    layer_spec = layer_sharding(shape, sharding).spec
    return jax.jit(
        jax.shard_map(local, mesh=sharding.mesh, in_specs=(layer_spec,), out_specs=sharding.spec, check_vma=False),
        out_shardings=sharding,
    )


@functools.cache
def _jitted_put(sharding: NamedSharding) -> Any:
    def put(array: jax.Array, layer: jax.Array, slot: jax.Array) -> jax.Array:
        layer = jax.device_put(to_device(layer, sharding), jax.memory.Space.Host)
        return jax.lax.dynamic_update_index_in_dim(array, layer, slot, 0)

    return jax.jit(put, out_shardings=sharding, donate_argnums=0)


def stack_layers(layers: list[jax.Array], order: tuple[int | None, ...], abstract: jax.ShapeDtypeStruct) -> jax.Array:
    """Return the list of layers, layer 0 first, as one array, each layer in its slot.

    The array has the shape, dtype and sharding of `abstract`. A stack in host memory is filled layer by layer, since the device
    may have no memory for all layers.
    """
    if abstract.sharding.memory_kind != ON_HOST:
        return _jitted_stack(order, abstract.shape, abstract.sharding)(layers)
    result = jax.jit(lambda: jnp.zeros(abstract.shape, abstract.dtype), out_shardings=abstract.sharding)()
    for slot, layer in enumerate(order):
        if layer is not None:
            result = _jitted_put(abstract.sharding)(result, layers[layer], slot)
    return result
