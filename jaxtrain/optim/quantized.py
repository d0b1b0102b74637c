"""Store Adam's moments in 8 bits, by the block-wise dynamic quantization of Dettmers et al. 2022 (arXiv:2110.02861).

A block of values shares one float32 scale, its largest magnitude. The scaled values in [-1, 1] are rounded to the nearest of
the 256 values of a map. The map's values are spread over seven decades, evenly within each decade. In the paper's format, the
number of a byte's leading zeros is the decade, and the bits after its first 1 are a linear fraction. The signed map uses one
bit for the sign, and the unsigned map one more bit for the fraction.

Codes are indices into the map in ascending order, as bitsandbytes stores them. They are computed by comparisons and one
multiplication, not by a search, and decoded by a look-up. XLA fuses encoding and decoding with the optimizer's update.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.optim.moments import block_size

DECADES = 7
SIGNED = {"mu": True, "nu": False}  # by optax's names of the moments
ZERO_CODE = 127  # code of 0 in the signed map; in the unsigned map, the code of 0 is 0


@dataclasses.dataclass(frozen=True)
class Blocks:
    """An array in 8-bit blocks. Codes and scales are sharded like the array."""

    codes: Any  # uint8, in the array's shape
    scales: Any  # float32, in the array's shape except for one dimension, which counts blocks


jax.tree_util.register_dataclass(Blocks, ["codes", "scales"], [])


def is_blocks(x: object) -> bool:
    """Return whether x is an array in blocks, for `is_leaf`."""
    return isinstance(x, Blocks)


def code_map(signed: bool) -> np.ndarray:
    """Return the 256 values of the signed or the unsigned map, f64 (256,), ascending, by the paper's definition.

    Decade e (0 is the largest) has the middles of equal parts of [0.1, 1] x 10^-e. The signed map has 2^(6 - e) parts on each
    side of 0, and the unsigned map 2^(7 - e) parts on the positive side. 0 and 1 are values too; -1 is not.
    """
    top = DECADES - 1 if signed else DECADES
    positive = [
        10.0**-e * (0.1 + 0.9 * (r + 0.5) / parts)
        for e in reversed(range(DECADES))
        for parts in (2 ** (top - e),)
        for r in range(parts)
    ]
    negative = [-x for x in reversed(positive)] if signed else []
    return np.array([*negative, 0.0, *positive, 1.0])


def _decades(signed: bool) -> list[tuple[int, float]]:
    """Return (number of positive values, upper end: a power of ten) of each decade, the smallest decade first.

    The k-th positive value is in the decade of n values with n <= k < 2 n. k starts from 1 if signed, and from 2 otherwise.
    """
    first = 1 if signed else 2
    return [(first << d, 10.0 ** (d + 1 - DECADES)) for d in range(DECADES)]


def _nearest(x: jax.Array, signed: bool) -> jax.Array:
    """Return the code of the nearest value of the map, int32, for x in [-1, 1]."""
    abs_x = jnp.abs(x)
    values = code_map(signed)
    positive = values[ZERO_CODE + 1 :] if signed else values[1:]
    slope, first = jnp.zeros_like(abs_x), jnp.zeros_like(abs_x)
    below, at = 0.0, 0
    for count, power in _decades(signed):
        over = abs_x >= np.float32((below + positive[at]) / 2)  # nearer to this decade's first value than to the value below
        slope, first = jnp.where(over, np.float32(count / (0.9 * power)), slope), jnp.where(over, np.float32(count), first)
        at += count
        below = positive[at - 1]
    # Parts of a decade are equal: k = count + floor((abs_x / power - 0.1) / 0.9 x count). A value above all parts, up to the
    # middle between two decades, belongs to the last part.
    k = jnp.minimum(jnp.floor(abs_x * slope + first * np.float32(8 / 9)), jnp.maximum(2 * first - 1, 0)).astype(jnp.int32)
    if signed:
        is_one = x >= np.float32((1 + below) / 2)
        return jnp.where(is_one, 255, ZERO_CODE + jnp.where(x < 0, -k, k))
    return jnp.where(abs_x >= np.float32((1 + below) / 2), 255, jnp.maximum(k - 1, 0))


def _value(code: jax.Array, signed: bool) -> jax.Array:
    """Return the map's value of a code, float32, by a look-up.

    If decoding took as much arithmetic as encoding, XLA would keep the decoded moments in float32.
    """
    return jnp.asarray(code_map(signed).astype(np.float32)).at[code].get(mode="promise_in_bounds")


def _split_blocks(x: jax.Array, axis: int) -> jax.Array:
    """Return x as (..., blocks, values of a block, ...): dimension `axis` is cut into two."""
    size = block_size(x.shape[axis])
    return x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])


def block_scales(x: jax.Array, axis: int) -> jax.Array:
    """Return the largest magnitude of each block along dimension `axis`, in x's shape with that dimension counting blocks."""
    return jnp.max(jnp.abs(_split_blocks(x, axis)), axis=axis + 1)


def encode(x: jax.Array, scales: jax.Array, axis: int, signed: bool) -> Blocks:
    """Return an f32 array in blocks along dimension `axis`, rounded to nearest as published. scales: from `block_scales`.

    The unsigned map is for second moments. In the unsigned map only 0 becomes 0: a value below the smallest positive value of
    the map, 3.3e-7 of the block's largest, is rounded up. If a second moment became 0 while its first moment did not, the
    update would be m / eps as soon as the gradient vanishes. A number that is not finite makes its whole block NaN.
    """
    split, largest = _split_blocks(x, axis), jnp.expand_dims(scales, axis + 1)
    codes = _nearest(split / jnp.where(largest == 0, 1, largest), signed)
    if not signed:
        codes = jnp.where(split > 0, jnp.maximum(codes, 1), codes)
    return Blocks(codes.astype(jnp.uint8).reshape(x.shape), scales)


def encoded_axis(codes: tuple[int, ...], scales: tuple[int, ...]) -> int:
    """Return the dimension that is cut into blocks, from the shapes of codes and scales."""
    return next(d for d, (n, blocks) in enumerate(zip(codes, scales, strict=True)) if n != blocks)


def decode(blocks: Blocks, signed: bool) -> jax.Array:
    """Return the array that was encoded in these blocks, f32. signed: as in `encode`."""
    axis = encoded_axis(blocks.codes.shape, blocks.scales.shape)
    values = _value(_split_blocks(blocks.codes, axis), signed) * jnp.expand_dims(blocks.scales, axis + 1)
    return values.reshape(blocks.codes.shape)
