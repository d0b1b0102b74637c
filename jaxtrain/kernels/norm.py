"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """Return x / sqrt(mean(x^2) + eps) * (offset + scale) over the last axis, in the dtype of `x`.

    Args:
      x: activations (..., D).
      scale: (D,), in any dtype.
      offset: 1 if the parameter is the scale minus 1, as in Gemma.
    """
    x32 = x.astype(jnp.float32)
    normal = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return (normal * (offset + scale)).astype(x.dtype)
