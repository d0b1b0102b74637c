"""Products of experts in 8 bits, where every expert of a device has the same number of rows: even.py's, with the types, scales
and sums of kernels/fp8.py. XLA makes one batched FP8 call of each.

Rows that are sorted by expert and uneven have no such products: Pallas' Triton backend (jax 0.11.2) compiles a product of 8-bit
tiles to one of float16, with which nothing is won.
"""

import jax
import jax.numpy as jnp

from jaxtrain.kernels import fp8


def times(rows: jax.Array, w: fp8.Float8, contract: str, gradient: bool) -> jax.Array:
    """See grouped.py. gradient: the rows are one, of the backward pass: rounded to e5m2, and summed in full."""
    w8_EDF = fp8.from_bits(w.bits, fp8.E4M3)
    rows8, scale = _rounded(rows, gradient, w8_EDF.shape[0])
    columns_last = w8_EDF if contract == "F" else jnp.swapaxes(w8_EDF, 1, 2)
    y = fp8.multiply(rows8, scale, columns_last, w.scale, rows.dtype, fp8.FULL if gradient else fp8.FAST)
    return y.reshape(rows.shape[0], -1)


def outer(rows_RD: jax.Array, rows_RF: jax.Array, experts: int, out: jnp.dtype, gradient: str) -> jax.Array:
    """See grouped.py. gradient: which of the two is one, "D" or "F"."""
    (a, a_scale), (b, b_scale) = (
        _rounded(rows, gradient == width, experts) for rows, width in ((rows_RD, "D"), (rows_RF, "F"))
    )
    return fp8.multiply(jnp.swapaxes(a, 1, 2), a_scale, jnp.swapaxes(b, 1, 2), b_scale, out)


def _rounded(rows: jax.Array, gradient: bool, experts: int) -> tuple[jax.Array, jax.Array]:
    """(E, R / E, ...) in 8 bits, and one scale for all of the device's rows."""
    dtype = fp8.E5M2 if gradient else fp8.E4M3
    scale = fp8.scale_of(jnp.max(jnp.abs(rows)), dtype)
    return fp8.rounded(rows, scale, dtype).reshape(experts, -1, rows.shape[-1]), scale
