"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, offset: float = 0.0, factor: float = 1.0) -> jax.Array:
    """Return x / sqrt(mean(x^2) + eps) * (offset + scale) * factor over the last axis, in the dtype of `x`.

    Args:
      x: activations (..., D).
      scale: (D,), in any dtype.
      offset: 1 if the parameter is the scale minus 1, as in Gemma.
    """
    x32 = x.astype(jnp.float32)
    normal = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    weight = offset + scale
    return (normal * (weight if factor == 1.0 else weight * factor)).astype(x.dtype)


def joint_rms_norm(
    x_BTNH: jax.Array, scale_NH: jax.Array, eps: float, total: int, add: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Return `rms_norm` over all heads of a token together, in the dtype of `x_BTNH`.

    Args:
      x_BTNH: activations of this device's heads.
      total: numbers of a token on all devices.
      add: sums over the devices that shard the heads.
    """
    x32 = x_BTNH.astype(jnp.float32)
    square_BT11 = add(jnp.sum(x32 * x32, (-2, -1), keepdims=True)) / total
    return (x32 * jax.lax.rsqrt(square_BT11 + eps) * scale_NH.astype(jnp.float32)[None, None]).astype(x_BTNH.dtype)
