"""Experts' matmuls in 8 bits, with the types, scales and sums of kernels/fp8.py.

If every expert of a device has the same number of rows, the matmuls are those of even.py. XLA turns each into one batched FP8
call. For uneven rows, `times_uneven` multiplies in 8 bits by a Pallas kernel on Hopper. On CPU, it multiplies the same
rounded numbers in bfloat16. Gradients of weights from uneven rows stay in bfloat16 (`outer`). They are sums over rows,
and WGMMA needs the summed dimension contiguous for 8-bit numbers. So both operands would need transposed copies. In such a copy
an expert's rows may begin at any index, but the layout of shared memory needs a multiple of 128.
"""

import jax
import jax.numpy as jnp

from jaxtrain.kernels import fp8
from jaxtrain.kernels.experts import grouped_matmul


def times(rows: jax.Array, w: fp8.Float8, contract: str, gradient: bool) -> jax.Array:
    """Return `times` of grouped_matmul.py for experts with equal numbers of rows.

    gradient: the rows are a gradient, so they are rounded to e5m2, and products are summed in float32.
    """
    w8_EDF = fp8.from_bits(w.bits, fp8.E4M3)
    rows8, scale = _rounded(rows, gradient, w8_EDF.shape[0])
    columns_last = w8_EDF if contract == "F" else jnp.swapaxes(w8_EDF, 1, 2)
    y = fp8.multiply(rows8, scale, columns_last, w.scale, rows.dtype, fp8.FULL if gradient else fp8.FAST)
    return y.reshape(rows.shape[0], -1)


def times_uneven(impl: str, rows: jax.Array, w: fp8.Float8, sizes_E: jax.Array, contract: str, gradient: bool) -> jax.Array:
    """Return `times` of grouped_matmul.py for experts with unequal numbers of rows: (R, F) for `contract` "D", (R, D) for "F".

    Args:
      impl: an implementation of grouped_matmul.py.
      gradient: as in `times`.
    """
    dtype, sums = (fp8.E5M2, fp8.FULL) if gradient else (fp8.E4M3, fp8.FAST)
    used = jnp.arange(rows.shape[0])[:, None] < sizes_E.sum()
    rows = jnp.where(used, rows, jnp.zeros_like(rows))  # unused rows may have any values, and would change the scale
    scale = fp8.scale_of(jnp.max(jnp.abs(rows)), dtype)
    rows8, w8_EDF = fp8.rounded(rows, scale, dtype), fp8.from_bits(w.bits, fp8.E4M3)
    if impl == "pallas":
        from jaxtrain.kernels.experts import pallas

        contracted_last = jnp.swapaxes(w8_EDF, 1, 2) if contract == "D" else w8_EDF
        return pallas.times8(rows8, contracted_last, scale * w.scale.reshape(()), sizes_E, rows.dtype, sums)
    a, b = (
        numbers.astype(jnp.bfloat16) * by.reshape(()).astype(jnp.bfloat16)
        for numbers, by in ((rows8, scale), (w8_EDF, w.scale))
    )
    return grouped_matmul.times(impl, a, b, sizes_E, contract, sums).astype(rows.dtype)


def outer(rows_RD: jax.Array, rows_RF: jax.Array, experts: int, out: jnp.dtype, gradient: str) -> jax.Array:
    """Return `outer` of grouped_matmul.py for experts with equal numbers of rows.

    gradient: "D" if rows_RD are the gradient, "F" if rows_RF are. The gradient is rounded to e5m2, the other rows to e4m3.
    """
    (a, a_scale), (b, b_scale) = (
        _rounded(rows, gradient == width, experts) for rows, width in ((rows_RD, "D"), (rows_RF, "F"))
    )
    return fp8.multiply(jnp.swapaxes(a, 1, 2), a_scale, jnp.swapaxes(b, 1, 2), b_scale, out)


def _rounded(rows: jax.Array, gradient: bool, experts: int) -> tuple[jax.Array, jax.Array]:
    """Return the rows as (E, R / E, ...), in e5m2 if `gradient`, else in e4m3, and one scale for all of the device's rows."""
    dtype = fp8.E5M2 if gradient else fp8.E4M3
    scale = fp8.scale_of(jnp.max(jnp.abs(rows)), dtype)
    return fp8.rounded(rows, scale, dtype).reshape(experts, -1, rows.shape[-1]), scale
