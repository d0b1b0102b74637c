"""Grouped matmuls by `jax.lax.ragged_dot_general`: on CPU, on GPUs other than Hopper, and in float32.

For CUDA, XLA of jax 0.11.2 multiplies every row by the weight of every expert.
"""

import jax
import jax.numpy as jnp

_CONTRACTED = {"D": 1, "F": 2}


def times(rows: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, contract: str, precision: jax.lax.Precision) -> jax.Array:
    """Implement `times` of grouped_matmul.py."""
    dims = jax.lax.RaggedDotDimensionNumbers((((1,), (_CONTRACTED[contract],)), ((), ())), [0], [0])
    return _dot(rows, w_EDF, sizes_E, dims, rows.dtype, precision)


def outer(
    rows_RD: jax.Array, rows_RF: jax.Array, sizes_E: jax.Array, out: jnp.dtype, precision: jax.lax.Precision
) -> jax.Array:
    """Implement `outer` of grouped_matmul.py."""
    dims = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return _dot(rows_RD, rows_RF, sizes_E, dims, out, precision)


def _dot(a, b, sizes_E, dims, out, precision):
    y = jax.lax.ragged_dot_general(a, b, sizes_E, dims, precision=precision, preferred_element_type=jnp.float32)
    return y.astype(out)
