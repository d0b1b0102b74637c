"""Grouped matmuls of rows, sorted by expert, with the weights of experts: one signature, one table of implementations.

support.py has the limits of `pallas`, and chooses the implementation.

    times(rows, w_EDF, sizes_E, contract, precision)    each row times the weight of its expert, contracted over "D" or "F"
    outer(rows_RD, rows_RF, sizes_E, out, precision)    for each expert the sum of its rows' outer products: (E, D, F)

The first sizes_E[0] rows belong to expert 0, the next sizes_E[1] rows to expert 1. Rows after the last expert's rows are
padding with any values: their results are zero, and no sum includes them. Sums are in float32 and rounded once: to the dtype of
the rows, or to `out`. Forward and backward passes need only these two functions. For rows x of (R, D), `times(x, w, "D")` is
the result, and `times(dy, w, "F")` and `outer(x, dy)` are the gradients. For rows of (R, F), "D" and "F" are exchanged.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = {
    "pallas": "jaxtrain.kernels.experts.pallas",
    "ragged": "jaxtrain.kernels.experts.ragged",
    "even": "jaxtrain.kernels.experts.even",
}


def _with(impl: str, function: str) -> Any:
    return getattr(importlib.import_module(IMPLEMENTATIONS[impl]), function)


def times(
    impl: str, rows: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, contract: str, precision: jax.lax.Precision
) -> jax.Array:
    """Return each row times its expert's weight, in the dtype of the rows.

    The result is (R, F) for rows (R, D) and `contract` "D", or (R, D) for rows (R, F) and "F".
    """
    return _with(impl, "times")(rows, w_EDF, sizes_E, contract=contract, precision=precision)


def outer(
    impl: str, rows_RD: jax.Array, rows_RF: jax.Array, sizes_E: jax.Array, out: jnp.dtype, precision: jax.lax.Precision
) -> jax.Array:
    """Return each expert's sum of outer products, (E, D, F) in `out`; zeros for an expert without rows."""
    return _with(impl, "outer")(rows_RD, rows_RF, sizes_E, out=out, precision=precision)
