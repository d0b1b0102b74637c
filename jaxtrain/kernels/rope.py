"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), with the two halves of a head as the rotated pairs.

The tables depend on positions alone, so they are made once a batch and shared by all layers.
"""

import math

import jax
import jax.numpy as jnp


def frequencies(head_dim: int, base: float) -> jax.Array:
    """Return the rotary frequency of each pair of dimensions, in radians per position, f32 (H/2,). H: head_dim."""
    return base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)


def llama3_scaling(freq: jax.Array, factor: float, low: float, high: float, original_len: int) -> jax.Array:
    """Return Llama 3.1's frequencies, with stretched long wavelengths.

    r = original_len / wavelength is the number of turns of a pair over the original context. Pairs with r < low turn `factor`
    times slower. Pairs with r > high are unchanged. Between low and high, the frequency is interpolated linearly in r.
    """
    turns = original_len * freq / (2 * math.pi)
    keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return freq * (keep + (1 - keep) / factor)


def linear_scaling(freq: jax.Array, factor: float) -> jax.Array:
    """Return frequencies divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""
    return freq / factor


def yarn_scaling(
    freq: jax.Array, base: float, factor: float, beta_fast: float, beta_slow: float, original_len: int, truncate: bool
) -> jax.Array:
    """Return YaRN's frequencies (Peng et al. 2023, arXiv:2309.00071), f32 (H/2,).

    Pair i makes original_len base^(-2 i / H) / 2 pi turns over the original context. Pairs with more than `beta_fast` turns are
    unchanged. Pairs with fewer than `beta_slow` turns turn `factor` times slower. Between these pairs, the frequency is
    interpolated linearly in i. With `truncate`, the first and the last i of the interpolation are rounded outwards to integers.
    """
    pairs = freq.shape[0]

    def pair_with(turns: float) -> float:
        return pairs * math.log(original_len / (2 * math.pi * turns)) / math.log(base)

    first, last = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    # Published models were trained with this upper bound, the width of a head and not the number of pairs.
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first if last != first else 1e-3
    slower = jnp.clip((jnp.arange(pairs, dtype=jnp.float32) - first) / width, 0.0, 1.0)
    return freq / factor * slower + freq * (1 - slower)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return 0.1 mscale log(factor) + 1, by which YaRN multiplies queries and keys; 1 if factor is at most 1.

    factor: the length of the extended context, as a multiple of the original context.
    mscale: 1 in YaRN; DeepSeek's models set `mscale` and `mscale_all_dim`.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def tables(positions_BT: jax.Array, freq: jax.Array, factor: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin of position times frequency, both multiplied by `factor`, each f32 (B, T, H/2)."""
    angles = positions_BT.astype(jnp.float32)[..., None] * freq[None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array, factor: float = 1.0) -> jax.Array:
    """Rotate each pair (x[i], x[i + R/2]) of the first R dimensions by its angle, and multiply all of x by `factor`, in f32.

    cos, sin: f32 (B, T, R/2), of the rotated dimensions. The result has the dtype of x.
    """
    x_f32, half = x_BTNH.astype(jnp.float32), cos.shape[-1]
    x_f32 = x_f32 if factor == 1.0 else x_f32 * factor
    a, b, *unrotated = jnp.split(x_f32, [half] if 2 * half == x_f32.shape[-1] else [half, 2 * half], axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, *unrotated], axis=-1).astype(x_BTNH.dtype)
