"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), with the two halves of a head as the rotated pairs.

The tables depend on positions alone, so they are made once a batch and shared by all layers.
"""

import math

import jax
import jax.numpy as jnp


def frequencies(head_dim: int, base: float) -> jax.Array:
    """Angle per position of each pair, f32 (H/2,)."""
    return base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)


def llama3_scaling(freq: jax.Array, factor: float, low: float, high: float, original_len: int) -> jax.Array:
    """Llama 3.1's stretch of the long wavelengths.

    With r = original_len / wavelength, the number of turns a pair makes over the original context: pairs with r < low turn
    `factor` times slower, pairs with r > high are unchanged, and between the two the frequency is interpolated linearly in r.
    """
    turns = original_len * freq / (2 * math.pi)
    keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return freq * (keep + (1 - keep) / factor)


def linear_scaling(freq: jax.Array, factor: float) -> jax.Array:
    """All pairs turn `factor` times slower (Chen et al. 2023, arXiv:2306.15595)."""
    return freq / factor


def tables(positions_BT: jax.Array, freq: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every angle, each f32 (B, T, H/2)."""
    angles = positions_BT.astype(jnp.float32)[..., None] * freq[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array, factor: float = 1.0) -> jax.Array:
    """Rotate each pair (x[i], x[i + H/2]) by its angle, times `factor`; computed in f32, returned in x's dtype."""
    x_f32 = x_BTNH.astype(jnp.float32)
    a, b = jnp.split(x_f32 if factor == 1.0 else x_f32 * factor, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)
