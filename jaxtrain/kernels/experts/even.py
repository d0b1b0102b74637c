"""Grouped matmuls for experts with equal numbers of rows, as plain batched matmuls."""

import jax
import jax.numpy as jnp


def times(rows: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, contract: str, precision: jax.lax.Precision) -> jax.Array:
    """Implement `times` of grouped_matmul.py. Unused rows of an expert must be zeros."""
    eqn = "ERD,EDF->ERF" if contract == "D" else "ERF,EDF->ERD"
    rows_E = rows.reshape(w_EDF.shape[0], -1, rows.shape[-1])
    y = jnp.einsum(eqn, rows_E, w_EDF, precision=precision, preferred_element_type=rows.dtype)
    return y.reshape(rows.shape[0], -1)


def outer(
    rows_RD: jax.Array, rows_RF: jax.Array, sizes_E: jax.Array, out: jnp.dtype, precision: jax.lax.Precision
) -> jax.Array:
    """Implement `outer` of grouped_matmul.py."""
    a, b = (rows.reshape(sizes_E.shape[0], -1, rows.shape[-1]) for rows in (rows_RD, rows_RF))
    return jnp.einsum("ERD,ERF->EDF", a, b, precision=precision, preferred_element_type=out)
