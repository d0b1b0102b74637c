"""Grouped matmuls: rows, sorted by expert, times the weights of experts, in the compute dtype or in FP8.

The first sizes_E[0] rows belong to expert 0, the next sizes_E[1] rows to expert 1. Rows after the last expert's rows are
padding with any values: their results are zero, and no sum includes them. Sums are in float32 and rounded once: to the dtype of
the rows, or to `out`. Forward and backward passes need only two functions. For rows x of (R, D), `times(x, w, "D")` is the
result, and `times(dy, w, "F")` and `outer(x, dy)` are the gradients. For rows of (R, F), "D" and "F" are exchanged.

There are three implementations (support.py chooses, and has the limits of `pallas`):

    even     plain batched matmuls, for equal numbers of rows; an expert's unused rows must be zeros
    pallas   kernels for Hopper (pallas.py)
    ragged   `jax.lax.ragged_dot_general`, on CPU, on other GPUs, and in float32. For CUDA, XLA of jax 0.11.2 multiplies every
             row by the weight of every expert.

FP8 has the types, scales and sums of kernels/fp8.py. XLA turns each matmul of `even` into one batched FP8 call, and `pallas`
multiplies in 8 bits. On CPU, `ragged` multiplies the same rounded numbers in bfloat16. Gradients of weights from uneven rows
stay in bfloat16. They are sums over rows, and WGMMA needs the summed dimension contiguous for 8-bit numbers. So both operands
would need transposed copies. In such a copy an expert's rows may begin at any index, but the layout of shared memory needs a
multiple of 128.
"""

import jax
import jax.numpy as jnp

from jaxtrain.kernels import fp8
from jaxtrain.kernels.dot import Weight

_CONTRACTED = {"D": 1, "F": 2}  # dimension of the weights


def times(
    impl: str,
    rows: jax.Array,
    w_EDF: Weight,
    sizes_E: jax.Array,
    contract: str,
    precision: jax.lax.Precision,
    gradient: bool = False,
) -> jax.Array:
    """Return each row times its expert's weight, in the dtype of the rows.

    The result is (R, F) for rows (R, D) and `contract` "D", or (R, D) for rows (R, F) and "F".

    Args:
      w_EDF: a `Float8` is multiplied in 8 bits.
      gradient: in 8 bits, the rows are a gradient: they are rounded to e5m2, and products are summed in float32.
    """
    if isinstance(w_EDF, fp8.Float8):
        return _times8(impl, rows, w_EDF, sizes_E, contract, gradient)
    if impl == "pallas":
        from jaxtrain.kernels.experts import pallas

        return pallas.times(rows, w_EDF, sizes_E, contract, precision)
    if impl == "even":
        eqn = "ERD,EDF->ERF" if contract == "D" else "ERF,EDF->ERD"
        rows_E = rows.reshape(w_EDF.shape[0], -1, rows.shape[-1])
        y = jnp.einsum(eqn, rows_E, w_EDF, precision=precision, preferred_element_type=rows.dtype)
        return y.reshape(rows.shape[0], -1)
    dims = jax.lax.RaggedDotDimensionNumbers((((1,), (_CONTRACTED[contract],)), ((), ())), [0], [0])
    return _ragged(rows, w_EDF, sizes_E, dims, rows.dtype, precision)


def outer(
    impl: str,
    rows_RD: jax.Array,
    rows_RF: jax.Array,
    sizes_E: jax.Array,
    out: jnp.dtype,
    precision: jax.lax.Precision,
    gradient8: str = "",
) -> jax.Array:
    """Return each expert's sum of its rows' outer products, (E, D, F) in `out`; zeros for an expert without rows.

    gradient8: "D" or "F": `even` multiplies in 8 bits. rows_RD or rows_RF are a gradient, which is rounded to e5m2, and the
      other rows to e4m3. "": in the dtype of the rows.
    """
    if impl == "pallas":
        from jaxtrain.kernels.experts import pallas

        return pallas.outer(rows_RD, rows_RF, sizes_E, out, precision)
    E = sizes_E.shape[0]
    if impl == "even" and gradient8:
        (a, a_scale), (b, b_scale) = (_quantize_rows(x, gradient8 == width, E) for x, width in ((rows_RD, "D"), (rows_RF, "F")))
        return fp8.multiply(jnp.swapaxes(a, 1, 2), a_scale, jnp.swapaxes(b, 1, 2), b_scale, out)
    if impl == "even":
        a, b = (rows.reshape(E, -1, rows.shape[-1]) for rows in (rows_RD, rows_RF))
        return jnp.einsum("ERD,ERF->EDF", a, b, precision=precision, preferred_element_type=out)
    dims = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return _ragged(rows_RD, rows_RF, sizes_E, dims, out, precision)


def _ragged(a, b, sizes_E, dims, out, precision):
    y = jax.lax.ragged_dot_general(a, b, sizes_E, dims, precision=precision, preferred_element_type=jnp.float32)
    return y.astype(out)


def _times8(impl: str, rows: jax.Array, w: fp8.Float8, sizes_E: jax.Array, contract: str, gradient: bool) -> jax.Array:
    dtype, sums = (fp8.E5M2, fp8.FULL) if gradient else (fp8.E4M3, fp8.FAST)
    if impl == "even":
        w8_EDF = fp8.from_bits(w.bits, fp8.E4M3)
        rows8, scale = _quantize_rows(rows, gradient, w8_EDF.shape[0])
        columns_last = w8_EDF if contract == "F" else jnp.swapaxes(w8_EDF, 1, 2)
        return fp8.multiply(rows8, scale, columns_last, w.scale, rows.dtype, sums).reshape(rows.shape[0], -1)
    used = jnp.arange(rows.shape[0])[:, None] < sizes_E.sum()
    rows = jnp.where(used, rows, jnp.zeros_like(rows))  # unused rows may have any values, and would change the scale
    scale = fp8.amax_scale(jnp.max(jnp.abs(rows)), dtype)
    rows8, w8_EDF = fp8.quantize(rows, scale, dtype), fp8.from_bits(w.bits, fp8.E4M3)
    if impl == "pallas":
        from jaxtrain.kernels.experts import pallas

        contracted_last = jnp.swapaxes(w8_EDF, 1, 2) if contract == "D" else w8_EDF
        return pallas.times8(rows8, contracted_last, scale * w.scale.reshape(()), sizes_E, rows.dtype, sums)
    a, b = (
        numbers.astype(jnp.bfloat16) * by.reshape(()).astype(jnp.bfloat16)
        for numbers, by in ((rows8, scale), (w8_EDF, w.scale))
    )
    return times(impl, a, b, sizes_E, contract, sums).astype(rows.dtype)


def _quantize_rows(rows: jax.Array, gradient: bool, experts: int) -> tuple[jax.Array, jax.Array]:
    """Return the rows as (E, R / E, ...), in e5m2 if `gradient`, else in e4m3, and one scale for all of the device's rows."""
    dtype = fp8.E5M2 if gradient else fp8.E4M3
    scale = fp8.amax_scale(jnp.max(jnp.abs(rows)), dtype)
    return fp8.quantize(rows, scale, dtype).reshape(experts, -1, rows.shape[-1]), scale
