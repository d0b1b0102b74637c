"""Conversion of a checkpoint's moments between 8-bit blocks and float32 or bfloat16."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxtrain.checkpoint.stacks import on_device
from jaxtrain.optim.quantized import SIGNED, Blocks, axis_of, decode, encode, scales_of
from jaxtrain.step.state import Tensors, dividing

_CODES, _SCALES = ".codes", ".scales"


def stored_tensors(wanted: Tensors, stored: Mapping[str, Any]) -> Tensors:
    """Return the tensors to read from a checkpoint that has the tensors `stored`. `converted` turns them into `wanted`."""
    out: Tensors = {}
    for name, a in wanted.items():
        base = name.removesuffix(_CODES).removesuffix(_SCALES)
        if name not in stored and base != name and base in stored:
            if name.endswith(_CODES):
                out[base] = jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=a.sharding)
        elif name not in stored and name + _CODES in stored:
            out[name + _CODES] = jax.ShapeDtypeStruct(a.shape, jnp.uint8, sharding=a.sharding)
            shape = stored[name + _SCALES].shape
            out[name + _SCALES] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=dividing(a.sharding, shape))
        else:
            out[name] = a
    return out


def _signed(name: str) -> bool:
    return SIGNED[next(part for part in name.split(".") if part in SIGNED)]


def converted(tensors: Tensors, wanted: Tensors) -> Tensors:
    """Return the wanted tensors, converted from those of `stored_tensors`. Removes tensors from `tensors` as they are used."""
    out: Tensors = {}
    for name, a in wanted.items():
        base = name.removesuffix(_CODES).removesuffix(_SCALES)
        if name in tensors:
            out[name] = tensors.pop(name)
        elif name + _CODES in tensors:
            blocks = Blocks(tensors.pop(name + _CODES), tensors.pop(name + _SCALES))
            out[name] = _decoding(a.sharding, a.dtype, _signed(name))(blocks)
        elif name.endswith(_CODES):
            scales = wanted[base + _SCALES]
            made = _encoding(a.sharding, scales.sharding, axis_of(a.shape, scales.shape), _signed(name))(tensors.pop(base))
            out[name], out[base + _SCALES] = made.codes, made.scales
    return out


@functools.cache
def _decoding(sharding: NamedSharding, dtype: Any, signed: bool) -> Any:
    def convert(b: Blocks) -> jax.Array:
        return decode(jax.tree.map(lambda x: on_device(x, sharding), b), signed).astype(dtype)

    return jax.jit(convert, out_shardings=sharding)


@functools.cache
def _encoding(codes: NamedSharding, scales: NamedSharding, axis: int, signed: bool) -> Any:
    def convert(x: jax.Array) -> Blocks:
        x = on_device(x, codes)
        return encode(x, scales_of(x, axis), axis, signed)

    return jax.jit(convert, out_shardings=Blocks(codes, scales))
