"""Frozen weights in 8 or 4 bits: e4m3 with a scale for each output, NF4 of QLoRA, and MXFP4.

    fp8    e4m3 (largest 448) times a float32 for each output, the largest magnitude times 1/448: 8 bits a weight.
    nf4    16 quantiles of the normal distribution times a number for each 64 inputs (Dettmers et al. 2023, arXiv:2305.14314).
           These numbers are in 8 bits themselves ("double quantization"): 4.13 bits a weight.
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
(outputs, inputs), each to the nearest value as on GPUs. (On a CPU, bitsandbytes looks a few of them up one value beside.)
MXFP4 follows the published GPT-OSS: the first of two weights is in a byte's low half. Numbers that were MXFP4 before, with any
scales, are represented exactly if they are normal numbers of bfloat16.

A weight that is not finite does not become a finite one: it becomes NaN or infinite and so does its output (fp8), its block
(mxfp4), or its whole matrix (nf4). Magnitudes below 2^-124 may become 0.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.kernels.fp8 import E4M3, SMALLEST, from_bits, quantize, to_bits

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
        k, intervals = np.arange(2**i + 1), 2**i
        step = np.float64((f32(1) - f32(0.1)) / f32(intervals))
        ends = np.where(k < (intervals + 1) // 2, np.float64(f32(0.1)) + step * k, 1 - step * (intervals - k)).astype(f32)
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

    arrays = {"bits": (fewer(2), byte), "scale": (fewer(BLOCK[fmt]), byte)}
    if fmt == "nf4":
        blocks = outputs * inputs // BLOCK[fmt]
        arrays |= {"second": ((-(-blocks // SECOND),), f32), "offset": ((), f32)}
    return arrays


def encode(w: jax.Array, fmt: str, inputs_first: bool) -> dict[str, jax.Array]:
    """Return the parts of a whole weight (..., R, C). It takes twice the memory of a bfloat16 weight beside the weight.

    Raises ValueError if the inputs are not whole blocks. A GPU's division is not rounded to nearest, so there a few numbers in
    a million, next to the middle between two values, become the other one.
    """
    shapes(w.shape[-2], w.shape[-1], fmt, inputs_first)
    axis = _axis(inputs_first)
    w = w.astype(jnp.float32)
    if fmt == "fp8":
        amax = _largest(w, axis)
        scale = jnp.where(amax == 0, 1.0, jnp.maximum(amax * (1 / float(jnp.finfo(E4M3).max)), SMALLEST))
        return {"bits": to_bits(quantize(w, jnp.expand_dims(scale, axis), E4M3)), "scale": scale}
    blocks = _split(w, BLOCK[fmt], inputs_first)
    amax = _largest(blocks, axis)
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
    arrays: dict[str, jax.Array],
    fmt: str,
    inputs_first: bool,
    dtype: jnp.dtype,
    start: tuple[jax.Array | int, jax.Array | int] = (0, 0),
    global_shape: tuple[int, int] | None = None,
) -> jax.Array:
    """Return the weight (..., R, C), computed in float32 and rounded once to `dtype`.

    Args:
      arrays: of the whole matrix or of a shard of it, with whole blocks. `second` and `offset` are always the whole matrix's.
      start: the shard's first row and column in the whole matrix.
      global_shape: (R, C) of the whole matrix. None: `arrays` is whole.
    """
    axis = _axis(inputs_first)
    if fmt == "fp8":
        return (from_bits(arrays["bits"], E4M3).astype(jnp.float32) * jnp.expand_dims(arrays["scale"], axis)).astype(dtype)
    *leading, rows, columns = arrays["bits"].shape
    pair = (1,) * (len(leading) + 1) + ((2, 1) if inputs_first else (1, 2))
    shift = np.array([FIRST[fmt], 4 - FIRST[fmt]], np.uint8).reshape(pair)
    shape = (*leading, *((2 * rows, columns) if inputs_first else (rows, 2 * columns)))
    codes = ((jnp.expand_dims(arrays["bits"], axis) >> shift) & 15).reshape(shape)
    if fmt == "nf4":
        scale = _first_level(arrays, inputs_first, start, global_shape or shape[-2:])
    else:
        scale = _power_of_two(arrays["scale"].astype(jnp.int32))
    values = _look_up({"nf4": NF4, "mxfp4": MXFP4}[fmt], _split(codes, BLOCK[fmt], inputs_first))
    return (values * jnp.expand_dims(scale, axis)).reshape(shape).astype(dtype)


def relative_error(w: jax.Array, arrays: dict[str, jax.Array], fmt: str, inputs_first: bool) -> jax.Array:
    """Return the root-mean-square error of a whole weight relative to its root mean square, f32 (); 0 for a weight of zeros."""

    def mean_square(x: jax.Array) -> jax.Array:
        x = x * x
        for _ in range(x.ndim):  # one axis after another: a float32 sum of all of a weight's squares would lose digits
            x = jnp.mean(x, axis=-1)
        return x

    w = w.astype(jnp.float32)
    error_ms, weight_ms = mean_square(decode(arrays, fmt, inputs_first, jnp.dtype("float32")) - w), mean_square(w)
    return jnp.sqrt(error_ms / jnp.where(weight_ms == 0, 1, weight_ms))


def _look_up(values: np.ndarray, codes: jax.Array) -> jax.Array:
    return jnp.asarray(values).at[codes].get(mode="promise_in_bounds")


def _largest(x: jax.Array, axis: int) -> jax.Array:
    """Return the largest magnitude over an axis. The result of a NaN is a NaN: a float32 `max` on a CPU may pass over it."""
    magnitudes = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF  # ordered as the numbers, and NaN above infinity
    return jax.lax.bitcast_convert_type(jnp.max(magnitudes, axis=axis), jnp.float32)


def _reciprocal(amax: jax.Array) -> jax.Array:
    return 1 / jnp.maximum(amax, SMALLEST)


def _nearest(x: jax.Array, values: np.ndarray) -> jax.Array:
    """Return the codes of the nearest of ascending values, uint8; the lower one's in the middle between two."""
    middles = (values[:-1] + values[1:]) / 2
    if len(values) > 16:  # a few comparisons take less time than a search, many take more
        return jnp.searchsorted(jnp.asarray(middles), x, method="scan_unrolled").astype(jnp.uint8)
    code = jnp.zeros(x.shape, jnp.uint8)
    for middle in middles:
        code += (x > middle).astype(jnp.uint8)
    return code


# ---- MXFP4


def _exponent(amax: jax.Array) -> jax.Array:
    """Return the exponents of blocks as E8M0, int32: of the largest magnitude's power of two, less that of e2m1's 4.

    They are at least 1, because 2^-127 is not a normal number of float32.
    """
    exponent = (jax.lax.bitcast_convert_type(amax, jnp.int32) >> 23) & 255
    return jnp.where(exponent == 255, NAN, jnp.maximum(exponent - 2, 1))


def _power_of_two(e8m0: jax.Array) -> jax.Array:
    """Return 2^(e8m0 - 127), f32; NaN of 255, and 0 of 0."""
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
        b_rounded = high - a
        low = (low_a + low_b) + ((a - (high - b_rounded)) + (b - b_rounded))
    total = (high + low)[..., 0]
    return total / jnp.where(jnp.isnan(total), total, count)  # of a constant, XLA would take the rounded reciprocal


def _second_level(amax: jax.Array, inputs_first: bool) -> dict[str, jax.Array]:
    """Return `scale`, `second` and `offset` of the blocks' largest magnitudes."""
    outputs_first = amax.mT if inputs_first else amax
    flat = outputs_first.reshape(*outputs_first.shape[:-2], -1)
    offset = _mean(flat)
    padding = [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % SECOND)]
    x = jnp.pad(flat - offset[..., None], padding).reshape(*flat.shape[:-1], -1, SECOND)
    second = _largest(x, -1)
    codes = _nearest(x * _reciprocal(second)[..., None], DYNAMIC)
    codes = codes.reshape(*flat.shape[:-1], -1)[..., : flat.shape[-1]].reshape(outputs_first.shape)
    return {"scale": codes.mT if inputs_first else codes, "second": second, "offset": offset}


def _first_level(
    arrays: dict[str, jax.Array],
    inputs_first: bool,
    start: tuple[jax.Array | int, jax.Array | int],
    global_shape: tuple[int, ...],
) -> jax.Array:
    """Return the scales of the blocks, f32, in the shape of `scale`."""
    rows, columns = arrays["scale"].shape[-2:]
    inputs, uint32 = _axis(inputs_first), jnp.uint32  # of an unsigned index XLA knows that it is not from the end
    first = [jnp.asarray(at, uint32) // (BLOCK["nf4"] if i == inputs else 1) for i, at in zip((-2, -1), start, strict=True)]
    row, column = first[0] + jnp.arange(rows, dtype=uint32)[:, None], first[1] + jnp.arange(columns, dtype=uint32)[None]
    output, block = (column, row) if inputs_first else (row, column)
    index = output * uint32(global_shape[inputs] // BLOCK["nf4"]) + block  # in the order of the matrix (outputs, inputs)
    second = arrays["second"].at[..., index // SECOND].get(mode="promise_in_bounds")
    return _look_up(DYNAMIC, arrays["scale"]) * second + arrays["offset"][..., None, None]
