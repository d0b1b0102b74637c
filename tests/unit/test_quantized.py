"""Moments in 8-bit blocks: the published code maps and errors, which arrays become blocks, and Adam's updates with them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.optim.moments import block_axis, block_size
from jaxtrain.optim.optimizer import adam_with_dtypes
from jaxtrain.optim.quantized import Blocks, block_scales, code_map, decode, encode


def in_blocks(x: Any, signed: bool, axis: int = -1) -> Blocks:
    x = jnp.asarray(x, jnp.float32)
    axis %= x.ndim
    return encode(x, block_scales(x, axis), axis, signed)


# ---- The quantizer


@pytest.mark.parametrize("signed", [True, False])
def test_code_map_is_the_published_one(signed):
    """The bits of a code are a sign (signed only), zeros that count decades, a one, and a linear fraction."""
    values = [0.0, 1.0]
    for byte in range(256):
        bits = f"{byte:08b}"[1:] if signed else f"{byte:08b}"  # unsigned: the sign's bit extends the fraction
        zeros = len(bits) - len(bits.lstrip("0"))
        fraction = bits[zeros + 1 :]
        if zeros > 6:  # the two codes without a fraction are those of 0 and 1
            continue
        at = (int(fraction, 2) if fraction else 0) + 0.5
        magnitude = 10.0**-zeros * (0.1 + 0.9 * at / 2 ** len(fraction))
        values.append(-magnitude if signed and byte >= 128 else magnitude)
    np.testing.assert_allclose(code_map(signed), sorted(values), rtol=1e-12)
    assert len(values) == 256
    assert code_map(signed)[127 if signed else 0] == 0


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_nearest_values(signed):
    rng = np.random.default_rng(0)
    x = np.where(rng.random((64, 255)) < 0.5, rng.random((64, 255)), 10 ** rng.uniform(-8, 0, (64, 255)))
    x = x * rng.choice([-1, 1], x.shape) if signed else x
    x = np.concatenate([x, np.ones((64, 1))], 1).astype(np.float32)  # the scale of each block is 1
    values, blocks = code_map(signed), in_blocks(x, signed)
    found = values[np.asarray(blocks.codes)]
    rounded_up = (x > 0) & (x < values[1] / 2) & (not signed)
    nearest = np.where(rounded_up, abs(x - values[1]), np.abs(x[..., None].astype(float) - values).min(-1))
    np.testing.assert_allclose(np.abs(found - x), nearest, atol=1e-7)
    np.testing.assert_allclose(decode(blocks, signed), found, rtol=1e-6)


def test_blocks_of_zeros_and_of_what_is_no_number():
    blocks = np.ones((3, 256), np.float32)
    blocks[0], blocks[1, 3] = 0, np.nan
    found = np.asarray(decode(in_blocks(blocks, True), True))
    assert (found[0] == 0).all() and np.isnan(found[1]).all() and (found[2] == 1).all()


def test_what_goes_into_blocks():
    assert [block_size(n) for n in (28672, 128, 96, 24, 1)] == [256, 128, 32, 0, 0]
    found = {
        (("layers", "embed", "mlp"), (80, 8192, 28672)): 2,
        (("layers", "mlp", "embed"), (80, 28672, 8192)): 1,  # fsdp shards embed
        (("layers", "embed", "heads", "head_dim"), (80, 8192, 64, 128)): 3,
        (("layers", "heads", "head_dim", "embed"), (80, 64, 128, 8192)): 2,
        (("layers", "embed", "heads", "head_dim"), (2, 64, 32, 8)): 2,  # the head dimension is too small
        (("vocab", "embed"), (128256, 8192)): None,
        (("layers", "embed"), (80, 8192)): None,
        (("layers", "embed", "mlp"), (80, 32, 96)): None,  # 3072 elements a layer are too few
    }
    assert {case: block_axis(*case) for case in found} == found


def toy_steps(m: str, v: str, grads: list[np.ndarray], eps: float = 1e-8) -> list[np.ndarray]:
    """Return Adam's updates of one (16, 256) matrix, with moments of the dtypes `m` and `v`."""
    tx = adam_with_dtypes(m, v, {"w": ("embed", "mlp")}, 0.9, 0.95, eps)
    p, step = {"w": jnp.zeros((16, 256))}, jax.jit(tx.update)
    s, found = tx.init(p), []
    for g in grads:
        updated: Any = step({"w": jnp.asarray(g, jnp.float32)}, s, p)
        found.append(np.asarray(updated[0]["w"]))
        s = updated[1]
    return found


def test_updates_follow_those_of_float32():
    rng = np.random.default_rng(0)
    # The gradients are on both sides of 1, where a first moment and a second moment have the same size.
    grads = [rng.standard_normal((16, 256)) * 10 ** rng.uniform(-2, 2, (16, 1)) for _ in range(8)]
    exact, found = toy_steps("f32", "f32", grads), toy_steps("int8", "int8", grads)
    np.testing.assert_allclose(found[0], exact[0], rtol=1e-6)  # the first step reads moments that are exactly 0
    off = np.abs(found[-1] - exact[-1]).mean() / np.abs(exact[-1]).mean()
    assert 0 < off < 0.05


def test_a_second_moment_never_vanishes_before_the_first():
    """A block has small gradients beside a large one, then zeros. If v rounded to the nearest code, 0, the update would be m /
    eps.
    """
    first = np.full((16, 256), 1e-4)
    first[:, 0] = 1.0
    updates = toy_steps("int8", "int8", [first, np.zeros((16, 256))])
    nearest = np.abs(1e-8 - code_map(False)).argmin()  # relative to the block's largest value of v
    assert nearest == 0  # the premise of this test
    assert np.abs(updates[1]).max() < 1.0
    assert (np.abs(updates[1][:, 1:]) > 0).all()  # the first moment is still there
