"""Frozen weights in 8 or 4 bits: e4m3 with a scale for each output, NF4 of QLoRA, and MXFP4.

    fp8    e4m3 (largest 448) times a float32 for each output: 8 bits a weight.
    nf4    16 quantiles of the normal distribution times a number for each 64 inputs (Dettmers et al. 2023, arXiv:2305.14314).
           These numbers are in 8 bits themselves ("double quantisation"): 4.13 bits a weight.
    mxfp4  e2m1 (largest 6) times a power of two for each 32 inputs (OCP Microscaling Formats v1.0): 4.25 bits a weight.

A weight is a stack of matrices (..., R, C) of any number of leading dimensions, each matrix for itself. Its inputs, which a
matmul contracts, are the rows or the columns. Hugging Face's matrices are (outputs, inputs).

Parts of a weight, by name:

    bits    uint8, (..., R, C) in fp8; in 4 bits two weights a byte, which are neighbours among the inputs.
    scale   fp8: float32 (..., outputs). 4 bits: uint8, in the shape of the weight with blocks in place of inputs.
    second  nf4: float32 (..., blocks / 256, rounded up), the scales of the scales.
    offset  nf4: float32 (...), the mean of the blocks' largest magnitudes.

NF4 follows bitsandbytes (0.50.2), whose bits these are: the block's largest magnitude becomes 1, by multiplication with its
reciprocal; a number in the middle between two values gets the lower one; the first of two weights is in a byte's high half.
The largest magnitudes less their mean are rounded to its signed 8-bit map, in blocks of 256 in the order of the matrix
(outputs, inputs). MXFP4 follows the published GPT-OSS: the first of two weights is in a byte's low half. Numbers that were
MXFP4 before, with any scales, are represented exactly.

A weight that is not finite does not become a finite one: it becomes NaN or infinite and so does its output (fp8), its block
(mxfp4), or its whole matrix (nf4). Magnitudes below 2^-124 may become 0.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.kernels.fp8 import E4M3, SMALLEST, from_bits, to_bits

FORMATS = ("fp8", "nf4", "mxfp4")
BLOCK = {"nf4": 64, "mxfp4": 32}  # inputs that share a scale
SECOND = 256  # blocks of NF4 that share a scale of their scales

# Quantiles of the normal distribution, from appendix E of the paper.
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
# E2M1; the highest of the four bits is the sign.
MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
MXFP4 = np.concatenate([MAGNITUDES, -MAGNITUDES])
FIRST = {"nf4": 4, "mxfp4": 0}  # the lowest bit of the first of the two weights in a byte
BIAS = 127  # of the exponents of float32 and of E8M0
NAN = 255  # in E8M0


def _dynamic_map() -> np.ndarray:
    """Return the 256 values of bitsandbytes' signed map, float32, ascending.

    Decade i has the middles of 2^i equal parts of [0.1, 1] x 10^(i - 6), on both sides of 0. The ends of the parts are those of
    torch.linspace, to the last bit: counted from 0.1 in the lower half, from 1 in the upper half, and rounded once.
    """
    f32, positive = np.float32, []
    for i in range(7):
        k, parts = np.arange(2**i + 1), 2**i
        step = np.float64((f32(1) - f32(0.1)) / f32(parts))
        ends = np.where(k < (parts + 1) // 2, np.float64(f32(0.1)) + step * k, 1 - step * (parts - k)).astype(f32)
        positive.append(f32(10.0 ** (i - 6)) * ((ends[:-1] + ends[1:]) / f32(2)))
    values = np.concatenate(positive)
    return np.concatenate([-values[::-1], np.zeros(1, f32), values, np.ones(1, f32)])


DYNAMIC = _dynamic_map()


def _axis(inputs_first: bool) -> int:
    """Return the axis of the inputs, which is the axis within a block too, after `_split`."""
    return -2 if inputs_first else -1


def _split(x: jax.Array, size: int, inputs_first: bool) -> jax.Array:
    """Return (..., R, C) with its inputs cut into blocks: (..., R / size, size, C) or (..., R, C / size, size)."""
    *leading, rows, columns = x.shape
    return x.reshape(*leading, *((rows // size, size, columns) if inputs_first else (rows, columns // size, size)))


def shapes(R: int, C: int, fmt: str, inputs_first: bool) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
    """Return the shape and dtype of each part of a matrix (R, C), without leading dimensions.

    Raises ValueError if the inputs are not whole blocks.
    """
    byte, f32 = jnp.dtype("uint8"), jnp.dtype("float32")
    inputs, outputs = (R, C) if inputs_first else (C, R)
    if fmt == "fp8":
        return {"bits": ((R, C), byte), "scale": ((outputs,), f32)}
    if inputs % BLOCK[fmt]:
        raise ValueError(f"{fmt}: {inputs} inputs are not a multiple of {BLOCK[fmt]}")

    def fewer(by: int) -> tuple[int, int]:
        return (R // by, C) if inputs_first else (R, C // by)

    parts = {"bits": (fewer(2), byte), "scale": (fewer(BLOCK[fmt]), byte)}
    if fmt == "nf4":
        blocks = outputs * inputs // BLOCK[fmt]
        parts |= {"second": ((-(-blocks // SECOND),), f32), "offset": ((), f32)}
    return parts


def encode(w: jax.Array, fmt: str, inputs_first: bool) -> dict[str, jax.Array]:
    """Return the parts of a whole weight (..., R, C)."""
    shapes(*w.shape[-2:], fmt, inputs_first)
    axis = _axis(inputs_first)
    w = w.astype(jnp.float32)
    if fmt == "fp8":
        amax = jnp.max(jnp.abs(w), axis=axis)
        scale = jnp.where(amax == 0, 1.0, jnp.maximum(_divided(amax, float(jnp.finfo(E4M3).max)), SMALLEST))
        return {"bits": to_bits((w / jnp.expand_dims(scale, axis)).astype(E4M3)), "scale": scale}
    blocks = _split(w, BLOCK[fmt], inputs_first)
    amax = jnp.max(jnp.abs(blocks), axis=axis)
    if fmt == "nf4":
        codes = _nearest(blocks * jnp.expand_dims(_reciprocal(amax), axis), NF4)
        scales = _second_level(amax, inputs_first)
    else:
        scale = _exponent(amax)
        codes = _nearest_e2m1(blocks * _power_of_two(2 * BIAS - jnp.expand_dims(scale, axis)))
        scales = {"scale": scale.astype(jnp.uint8)}
    pairs = _split(codes.reshape(w.shape), 2, inputs_first)
    first, second = (jax.lax.index_in_dim(pairs, i, pairs.ndim + axis, keepdims=False) for i in (0, 1))
    return {"bits": (first << FIRST[fmt]) | (second << (4 - FIRST[fmt])), **scales}


def decode(
    parts: dict[str, jax.Array],
    fmt: str,
    inputs_first: bool,
    dtype: jnp.dtype,
    start: tuple[jax.Array | int, jax.Array | int] = (0, 0),
    whole: tuple[int, int] | None = None,
) -> jax.Array:
    """Return the weight (..., R, C), computed in float32 and rounded once to `dtype`.

    Args:
      parts: of the whole matrix or of a shard of it, with whole blocks. `second` and `offset` are always the whole matrix's.
      start: the shard's first row and column in the whole matrix.
      whole: (R, C) of the whole matrix. None: `parts` is whole.
    """
    axis = _axis(inputs_first)
    if fmt == "fp8":
        return (from_bits(parts["bits"], E4M3).astype(jnp.float32) * jnp.expand_dims(parts["scale"], axis)).astype(dtype)
    bits = jnp.expand_dims(parts["bits"], axis if inputs_first else parts["bits"].ndim)
    shift = np.array([FIRST[fmt], 4 - FIRST[fmt]], np.uint8).reshape(
        (1,) * (bits.ndim - 2) + ((2, 1) if inputs_first else (1, 2))
    )
    *leading, rows, columns = parts["bits"].shape
    shape = (*leading, *((2 * rows, columns) if inputs_first else (rows, 2 * columns)))
    codes = _split(((bits >> shift) & 15).reshape(shape), BLOCK[fmt], inputs_first)
    if fmt == "nf4":
        scale = _first_level(parts, inputs_first, start, whole or shape[-2:])
    else:
        scale = _power_of_two(parts["scale"].astype(jnp.int32))
    values = _look_up({"nf4": NF4, "mxfp4": MXFP4}[fmt], codes) * jnp.expand_dims(scale, axis)
    return values.reshape(shape).astype(dtype)


def error(w: jax.Array, parts: dict[str, jax.Array], fmt: str, inputs_first: bool) -> jax.Array:
    """Return the root-mean-square error of a whole weight relative to its root mean square, f32 (); 0 for a weight of zeros."""

    def mean_square(x: jax.Array) -> jax.Array:
        for _ in range(x.ndim):  # one axis after another: a float32 sum of all of a weight's squares would lose digits
            x = jnp.mean(x * x if x.ndim == w.ndim else x, axis=-1)
        return x

    w = w.astype(jnp.float32)
    off, of = mean_square(decode(parts, fmt, inputs_first, jnp.dtype("float32")) - w), mean_square(w)
    return jnp.sqrt(off / jnp.where(of == 0, 1, of))


def _look_up(values: np.ndarray, codes: jax.Array) -> jax.Array:
    return jnp.asarray(values).at[codes].get(mode="promise_in_bounds")


def _divided(x: jax.Array, by: float) -> jax.Array:
    """Return x / by. XLA would multiply by the rounded reciprocal of a scalar."""
    return x / jax.lax.optimization_barrier(jnp.full_like(x, by))


def _reciprocal(amax: jax.Array) -> jax.Array:
    return 1 / jnp.maximum(amax, SMALLEST)


def _nearest(x: jax.Array, values: np.ndarray) -> jax.Array:
    """Return the codes of the nearest of ascending values, uint8; the lower one's in the middle between two."""
    code = jnp.zeros(x.shape, jnp.uint8)
    for middle in (values[:-1] + values[1:]) / 2:
        code += (x > middle).astype(jnp.uint8)
    return code


# ---- MXFP4


def _exponent(amax: jax.Array) -> jax.Array:
    """Return the exponents of blocks as E8M0, int32: of the largest magnitude's power of two, less that of e2m1's 4."""
    exponent = (jax.lax.bitcast_convert_type(amax, jnp.int32) >> 23) & 255
    return jnp.where(exponent == 255, NAN, jnp.maximum(exponent - 2, 0))


def _power_of_two(e8m0: jax.Array) -> jax.Array:
    """Return 2^(e8m0 - 127), f32; NaN of 255, and 0 of 0, whose power of two is not a normal number."""
    bits = jnp.where(e8m0 == NAN, 0x7FC00000, e8m0 << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _nearest_e2m1(x: jax.Array) -> jax.Array:
    """Return the codes of x in e2m1, rounded to nearest even, uint8. Magnitudes above 6 become 6."""
    magnitude, code = jnp.abs(x), jnp.zeros(x.shape, jnp.uint8)
    for i, middle in enumerate((MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2):
        above = magnitude >= middle if i % 2 else magnitude > middle  # the even one of the codes i and i + 1
        code += above.astype(jnp.uint8)
    return code + 8 * jnp.signbit(x).astype(jnp.uint8)


# ---- The scales of NF4


def _mean(x: jax.Array) -> jax.Array:
    """Return the mean over the last axis, f32, in an order that is the same on all devices, and exact but for two roundings.

    Sums of pairs carry their rounding errors along.
    """
    count = x.shape[-1]
    high = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 2 ** (count - 1).bit_length() - count)])
    low = jnp.zeros_like(high)
    while high.shape[-1] > 1:
        (a, b), (low_a, low_b) = jnp.split(high, 2, axis=-1), jnp.split(low, 2, axis=-1)
        high = a + b
        of_b = high - a
        low = (low_a + low_b) + ((a - (high - of_b)) + (b - of_b))
    return _divided((high + low)[..., 0], count)


def _second_level(amax: jax.Array, inputs_first: bool) -> dict[str, jax.Array]:
    """Return `scale`, `second` and `offset` of the blocks' largest magnitudes."""
    theirs = amax.mT if inputs_first else amax
    flat = theirs.reshape(*theirs.shape[:-2], -1)
    offset = _mean(flat)
    rest = [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % SECOND)]
    x = jnp.pad(flat - offset[..., None], rest).reshape(*flat.shape[:-1], -1, SECOND)
    second = jnp.max(jnp.abs(x), axis=-1)
    middles = (DYNAMIC[:-1] + DYNAMIC[1:]) / 2
    above = (x * _reciprocal(second)[..., None])[..., None] > middles.reshape((1,) * x.ndim + (-1,))
    codes = jnp.sum(above, axis=-1, dtype=jnp.int32).astype(jnp.uint8)
    codes = codes.reshape(*flat.shape[:-1], -1)[..., : flat.shape[-1]].reshape(theirs.shape)
    return {"scale": codes.mT if inputs_first else codes, "second": second, "offset": offset}


def _first_level(
    parts: dict[str, jax.Array], inputs_first: bool, start: tuple[jax.Array | int, jax.Array | int], whole: tuple[int, ...]
) -> jax.Array:
    """Return the scales of the blocks, f32, in the shape of `scale`."""
    rows, columns = parts["scale"].shape[-2:]
    inputs = _axis(inputs_first)
    first = [at // BLOCK["nf4"] if axis == inputs else at for axis, at in zip((-2, -1), start, strict=True)]
    row, column = first[0] + jnp.arange(rows)[:, None], first[1] + jnp.arange(columns)[None, :]
    output, block = (column, row) if inputs_first else (row, column)
    place = output * (whole[inputs] // BLOCK["nf4"]) + block  # in the order of the matrix (outputs, inputs)
    second = parts["second"].at[..., place.astype(jnp.uint32) // SECOND].get(mode="promise_in_bounds")
    return _look_up(DYNAMIC, parts["scale"]) * second + parts["offset"][..., None, None]
