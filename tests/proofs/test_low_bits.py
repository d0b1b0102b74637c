"""Weights in 8 and 4 bits, against the formats' definitions in NumPy; shards, stacks, and the program that decodes them."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxtrain.hf.mxfp4 import unpack_mxfp4
from jaxtrain.kernels import low_bits
from jaxtrain.optim.quantized import code_map
from jaxtrain.plan import topology

FORMATS = low_bits.FORMATS
SIDES = {"inputs last": False, "inputs first": True}
R, C = 256, 384
NF4 = (  # of the paper's appendix E, in a decimal notation that float32 rounds to the same numbers
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

encode = jax.jit(low_bits.encode, static_argnums=(1, 2))
decode = jax.jit(low_bits.decode, static_argnums=(1, 2, 3, 5))
sides = pytest.mark.parametrize("first", SIDES.values(), ids=SIDES.keys())
formats = pytest.mark.parametrize("fmt", FORMATS)


def weight(*shape: int, seed: int = 0, dtype=jnp.bfloat16) -> jax.Array:
    """Return numbers whose scale varies from row to row and column to column, with zeros and a block of zeros."""
    rng = np.random.default_rng(seed)
    w = 0.02 * rng.standard_normal(shape) * np.exp(rng.standard_normal((shape[-2], 1)) + rng.standard_normal(shape[-1]) / 4)
    w[..., :2, :64] = 0
    return jnp.asarray(w, dtype)


def laid(w: np.ndarray | jax.Array, first: bool):
    """Return (outputs, inputs) as a weight of which the inputs are the rows, or not."""
    return w.swapaxes(-1, -2) if first else w


def nibbles(bits: np.ndarray, high_first: bool) -> np.ndarray:
    """Return the codes of bytes (outputs, inputs / 2) as (outputs, inputs)."""
    pair = (bits >> 4, bits & 15)
    return np.stack(pair if high_first else pair[::-1], -1).reshape(len(bits), -1)


def held(w: jax.Array, fmt: str, first: bool) -> dict[str, np.ndarray]:
    """Return the parts of a matrix (outputs, inputs), each as of such a matrix, of a weight in the layout `first`."""
    parts = {k: np.asarray(v) for k, v in encode(laid(w, first), fmt, first).items()}
    return {k: laid(v, first) if v.ndim == 2 else v for k, v in parts.items()}


@formats
@sides
def test_parts_have_the_shapes_that_are_told(fmt, first):
    for leading in ((), (3,), (2, 3)):
        parts = encode(weight(*leading, R, C), fmt, first)
        told = low_bits.shapes(R, C, fmt, first)
        assert {k: (v.shape, v.dtype) for k, v in parts.items()} == {k: (leading + s, d) for k, (s, d) in told.items()}
        assert decode(parts, fmt, first, jnp.bfloat16).shape == (*leading, R, C)
    kept = sum(np.prod(shape) * dtype.itemsize for shape, dtype in low_bits.shapes(4096, 14336, fmt, first).values())
    assert 8 * kept / (4096 * 14336) == pytest.approx({"fp8": 8.0, "nf4": 4.127, "mxfp4": 4.25}[fmt], abs=0.01)


@sides
def test_inputs_that_are_not_whole_blocks_are_an_error(first):
    for fmt, size in low_bits.BLOCK.items():
        for made in (low_bits.shapes, lambda *args: low_bits.encode(jnp.zeros(args[:2]), *args[2:])):
            with pytest.raises(ValueError):
                made(*laid(np.zeros((7, size + 16)), first).shape, fmt, first)
        assert low_bits.shapes(*laid(np.zeros((7, 3 * size)), first).shape, fmt, first)


# ---- Numbers


@sides
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
def test_e4m3(first, dtype):
    """Each output has the scale max x 1/448, and each number is rounded to the nearest, to even."""
    w = weight(R, C, dtype=dtype).at[5].set(0)
    parts, exact = held(w, "fp8", first), np.asarray(w, np.float32)
    amax = abs(exact).max(1)
    scale = np.where(amax == 0, np.float32(1), amax * np.float32(1 / 448))
    assert np.array_equal(parts["scale"], scale)
    scaled = exact * (np.float32(1) / scale)[:, None]
    assert np.array_equal(parts["bits"], scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    values = parts["bits"].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale[:, None]
    got = laid(decode(encode(laid(w, first), "fp8", first), "fp8", first, jnp.float32), first)
    assert np.array_equal(got, values)
    # In the middle between two numbers, and next to it. The largest is 448, so the scale is 1.
    numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middle = (numbers[1:] + numbers[:-1]) / 2
    row = np.concatenate([numbers, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))])
    rows = jnp.asarray([row, -row])
    assert np.array_equal(held(rows, "fp8", first)["bits"], np.asarray(rows).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@sides
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
@pytest.mark.parametrize("shape", ((R, C), (100, 192), (3, 64)), ids=str)  # with the last 256 blocks whole, and not
def test_nf4(first, dtype, shape):
    """Each number is the nearest quantile times the block's largest; those are the nearest of their 8-bit map."""
    w = weight(*shape, seed=1, dtype=dtype)
    parts = held(w, "nf4", first)
    blocks = np.asarray(w, np.float32).reshape(shape[0], -1, 64)
    amax = abs(blocks).max(-1)
    scaled = blocks * (np.float32(1) / np.maximum(amax, np.float32(1e-37)))[..., None]
    codes = abs(scaled[..., None] - np.float64(np.array(NF4, np.float32))).argmin(-1)
    assert np.array_equal(nibbles(parts["bits"], high_first=True), codes.reshape(shape))
    # The scales, in the order of the matrix (outputs, inputs), whatever the weight's layout.
    offset = np.float64(amax).mean()
    assert parts["offset"] == pytest.approx(offset, rel=1.2e-7)
    flat = (amax - parts["offset"]).reshape(-1)
    padded = np.concatenate([flat, np.zeros(-len(flat) % 256, np.float32)]).reshape(-1, 256)
    second = abs(padded).max(1)
    assert np.array_equal(parts["second"], second)
    x = np.float64(padded / second[:, None]).reshape(-1)[: len(flat)]
    off = abs(code_map(signed=True)[parts["scale"].reshape(-1)] - x)
    nearest = abs(code_map(signed=True) - x[:, None]).min(1)
    assert (off <= nearest + 2e-7).all() and len({*parts["scale"].reshape(-1).tolist()}) > 1
    scales = code_map(signed=True)[parts["scale"]] * second.repeat(256)[: len(flat)].reshape(amax.shape) + offset
    want = np.array(NF4)[codes] * scales[..., None]
    got = laid(decode(encode(laid(w, first), "nf4", first), "nf4", first, jnp.float32), first)
    assert np.allclose(got, want.reshape(shape), rtol=1e-6, atol=1e-7 * amax.max())


@sides
def test_nf4_in_the_middle_between_two_quantiles(first):
    """The lower one is taken in the middle, and in a weight below it."""
    values = np.array(NF4, np.float32)
    middle = (values[1:] + values[:-1]) / 2
    for numbers, codes in (
        (values, range(16)),
        (middle, range(15)),
        (np.nextafter(middle, np.float32(2)), range(1, 16)),
        (np.nextafter(middle, np.float32(-2)), range(15)),
    ):
        row = np.zeros((1, 64), np.float32)
        row[0, : len(numbers)], row[0, -1] = numbers, 1.0
        found = nibbles(held(jnp.asarray(row), "nf4", first)["bits"], high_first=True)
        assert found[0, : len(numbers)].tolist() == list(codes)


def nearest_e2m1(x: np.ndarray) -> np.ndarray:
    """Return the nearest numbers of e2m1, f64: of two, that with an even code."""
    off = abs(abs(x)[..., None] - np.array(E2M1))
    tied = off == off.min(-1, keepdims=True)
    code = np.where(tied[..., ::2].any(-1), 2 * tied[..., ::2].argmax(-1), tied.argmax(-1))
    return np.copysign(np.array(E2M1)[code], x)


@sides
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
def test_mxfp4(first, dtype):
    """Scales and numbers are those of the specification: 2^(floor(log2(max)) - 2), to nearest even, and at most 6."""
    w = np.array(weight(R, C, seed=2, dtype=jnp.float32))
    w[0, :32], w[0, 32:64] = 7.9 / 4 * 2.0**-9, -(2.0**-20)  # above the largest number, and a power of two
    w[1, :32] = (2.0**-7) * np.tile([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -4.0], 4)  # in the middle between two
    w[1, 32:64] = np.nextafter(w[1, :32], np.float32(9))
    w = jnp.asarray(w, dtype)
    exact = np.asarray(w, np.float64).reshape(R, -1, 32)
    amax = abs(exact).max(-1)
    power = np.floor(np.log2(np.where(amax == 0, 2.0**-125, amax))) - 2
    want = nearest_e2m1(exact * 2.0 ** -power[..., None]) * 2.0 ** power[..., None]
    parts = held(w, "mxfp4", first)
    assert np.array_equal(parts["scale"][amax > 0], power[amax > 0] + 127)
    codes = nibbles(parts["bits"], high_first=False).reshape(R, -1, 32)
    assert np.array_equal(np.array([*E2M1, *(-x for x in E2M1)])[codes], want * 2.0 ** -power[..., None])
    for out in (jnp.float32, jnp.bfloat16):
        got = laid(decode(encode(laid(w, first), "mxfp4", first), "mxfp4", first, out), first)
        assert got.dtype == out and np.array_equal(np.asarray(got, np.float64), want.reshape(R, C))


def test_numbers_that_were_mxfp4_stay_what_they_are():
    """GPT-OSS as published, with scales of any size, is the same after a bfloat16 weight was made of it: also where a block's
    largest number is small.
    """
    rng = np.random.default_rng(3)
    experts, outputs, count = 3, 64, 24
    codes = rng.integers(0, 16, (experts, outputs, count, 32), np.uint8)
    for i, most in enumerate((0, 1, 2, 3, 4, 5, 6)):  # these blocks have no larger number
        codes[:, i::16] = (codes[:, i::16] & 8) | np.minimum(codes[:, i::16] & 7, most)
    blocks = codes[..., ::2] | (codes[..., 1::2] << 4)
    scales = rng.integers(3, 252, (experts, outputs, count), np.uint8)
    w = unpack_mxfp4(blocks, scales)  # (experts, inputs, outputs)
    assert np.isfinite(w.astype(np.float32)).all()
    for first in (True, False):
        there = jnp.asarray(w if first else w.swapaxes(-1, -2))
        parts = encode(there, "mxfp4", first)
        back = decode(parts, "mxfp4", first, jnp.bfloat16)
        assert np.array_equal(np.asarray(back).view(np.uint16), np.asarray(there).view(np.uint16))  # with the signs of zeros
    # The parts have the bytes of the published tensors, and decode those.
    published = {"bits": jnp.asarray(blocks.reshape(experts, outputs, -1)), "scale": jnp.asarray(scales)}
    assert {k: v.shape for k, v in published.items()} == {k: v.shape for k, v in parts.items()}
    assert np.array_equal(decode(published, "mxfp4", False, jnp.bfloat16), w.swapaxes(-1, -2))


@formats
@sides
def test_what_is_not_finite_does_not_become_finite(fmt, first):
    for bad in (np.nan, np.inf, -np.inf):
        w = weight(2, R, C)
        w = w.at[1, 70, 100].set(bad)
        back = np.asarray(decode(encode(w, fmt, first), fmt, first, jnp.float32))
        assert np.isfinite(back[0]).all() and not np.isfinite(back[1, 70, 100])
        whole = {"fp8": back[1, :, 100] if first else back[1, 70], "nf4": back[1]}
        block = back[1, 64:96, 100] if first else back[1, 70, 96:128]
        assert not np.isfinite(whole.get(fmt, block)).any()


@formats
@sides
def test_error(fmt, first):
    """The errors of normally distributed weights, relative to their root mean square."""
    w = jnp.asarray(np.random.default_rng(4).standard_normal((2, 512, 1024)), jnp.bfloat16)
    parts = encode(w, fmt, first)
    off = np.asarray(decode(parts, fmt, first, jnp.float32), np.float64) - np.asarray(w, np.float64)
    told = low_bits.relative_error(w, parts, fmt, first)
    assert told == pytest.approx(np.sqrt((off**2).mean() / (np.asarray(w, np.float64) ** 2).mean()), rel=1e-5)
    assert told == pytest.approx({"fp8": 0.0264, "nf4": 0.0921, "mxfp4": 0.1143}[fmt], rel=0.02)
    zeros = jnp.zeros((64, 64))
    assert low_bits.relative_error(zeros, encode(zeros, fmt, first), fmt, first) == 0


# ---- Shards and stacks


@formats
@sides
def test_a_shard_is_its_part_of_the_whole(fmt, first):
    w = weight(2, 512, 768, seed=5)
    parts = encode(w, fmt, first)
    whole = np.asarray(decode(parts, fmt, first, jnp.bfloat16))
    for rows, columns in (
        (slice(128, 320), slice(0, 768)),
        (slice(0, 512), slice(192, 640)),
        (slice(448, 512), slice(64, 128)),
    ):

        def cut(x, rows=rows, columns=columns):
            tall, wide = 512 // x.shape[-2], 768 // x.shape[-1]
            return x[..., rows.start // tall : rows.stop // tall, columns.start // wide : columns.stop // wide]

        scale = parts["scale"][..., columns if first else rows] if fmt == "fp8" else cut(parts["scale"])
        shard = parts | {"bits": cut(parts["bits"]), "scale": scale}
        for start in ((rows.start, columns.start), (jnp.int32(rows.start), jnp.int32(columns.start))):
            got = low_bits.decode(shard, fmt, first, jnp.bfloat16, start, (512, 768))
            assert np.array_equal(got, whole[..., rows, columns])
        got = decode(shard, fmt, first, jnp.float32, (rows.start, columns.start), (512, 768))
        assert np.allclose(got, decode(parts, fmt, first, jnp.float32)[..., rows, columns], rtol=3e-7, atol=0)


@formats
@sides
def test_each_matrix_of_a_stack_is_for_itself(fmt, first):
    w = weight(2, 3, R, C, seed=6) * jnp.exp(jnp.arange(6.0)).reshape(2, 3, 1, 1)
    parts, mapped = encode(w, fmt, first), jax.vmap(lambda x: low_bits.encode(x, fmt, first))(w)
    whole = decode(parts, fmt, first, jnp.bfloat16)
    for i, j in np.ndindex(2, 3):
        one = encode(w[i, j], fmt, first)
        for name in one:
            assert np.array_equal(parts[name][i, j], one[name]) and np.array_equal(mapped[name][i, j], one[name]), name
        assert np.array_equal(whole[i, j], decode(one, fmt, first, jnp.bfloat16))


@formats
def test_the_layout_does_not_change_the_numbers(fmt):
    w = weight(R, C, seed=7)
    last, first = held(w, fmt, False), held(w, fmt, True)
    assert all(np.array_equal(last[name], first[name]) for name in last)
    values = [laid(decode(encode(laid(w, side), fmt, side), fmt, side, jnp.bfloat16), side) for side in (False, True)]
    assert np.array_equal(*values)


# ---- Programs


def compiled(function, parts, *others):
    """Return a function, compiled for an H200. parts: as of `low_bits.shapes`. others: (shape, dtype) of further arguments."""
    place = jax.sharding.SingleDeviceSharding(topology.devices(topology.parse_topology("h200:1"))[0])

    def array(of):
        return jax.ShapeDtypeStruct(*of, sharding=place)

    return jax.jit(function).lower({k: array(of) for k, of in parts.items()}, *map(array, others)).compile()


@formats
@sides
def test_one_kernel_decodes_a_weight(fmt, first):
    """One kernel reads the bits and writes the weight, for a matmul in bfloat16 too. No float32 array has the weight's size."""
    shape = laid(np.empty((7168, 4096), np.uint8), first).shape
    parts = low_bits.shapes(*shape, fmt, first)
    made = compiled(lambda parts: low_bits.decode(parts, fmt, first, jnp.bfloat16), parts)
    entry = made.as_text().split("\nENTRY")[1]
    writes = [line for line in entry.splitlines() if re.search(r"= (bf16|f32|u8)\[[\d,]+\]\S* fusion\(", line)]
    assert sum("= bf16" in line for line in writes) == 1
    assert made.memory_analysis().temp_size_in_bytes <= shape[0] * shape[1] // 8

    def layer(parts, x):
        w = low_bits.decode(parts, fmt, first, jnp.bfloat16)
        return x @ (w if first else w.T)

    made = compiled(layer, parts, ((4096, 4096), jnp.bfloat16))
    assert made.memory_analysis().temp_size_in_bytes <= 2.2 * shape[0] * shape[1]  # the weight in bfloat16


@formats
@sides
def test_encoding_needs_little_memory(fmt, first):
    """Beside a weight in bfloat16, encoding needs about twice its memory."""
    w = jax.ShapeDtypeStruct(laid(np.empty((2048, 4096), np.uint8), first).shape, jnp.bfloat16)
    assert encode.lower(w, fmt, first).compile().memory_analysis().temp_size_in_bytes <= 2.3 * w.size * 2
