"""Products of rows, sorted by expert, with the weights of experts: one signature, one table of who computes them.

    times(rows, w_EDF, sizes_E, contract, precision)    each row times the weight of its expert, over "D" or "F"
    outer(rows_RD, rows_RF, sizes_E, out, precision)    for each expert the sum over its rows of their outer products: (E, D, F)

The first sizes[0] rows belong to expert 0, the next sizes[1] to expert 1; rows beyond the last are nobody's: products of them
are zero, and no sum counts them, whatever they hold. Sums are in float32 and rounded once: to the type of the rows, or to
`out`. These three products are all that forward and backward passes need: for rows x of (R, D), `times(x, w, "D")` is the
product, `times(dy, w, "F")` and `outer(x, dy)` are its gradients, and for rows of (R, F) the other way round.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.kernels.attention import Hardware, Unsupported

IMPLEMENTATIONS = {
    "pallas": "jaxtrain.kernels.experts.pallas",
    "ragged": "jaxtrain.kernels.experts.ragged",
    "even": "jaxtrain.kernels.experts.even",
}


def check(impl: str, hardware: Hardware) -> None:
    """Raises Unsupported where devices like this cannot do what `experts.impl` asks for."""
    old = hardware.platform == "gpu" and hardware.compute_capability < (8, 0)
    if impl in ("auto", "pallas") and old:
        of = ".".join(map(str, hardware.compute_capability))
        raise Unsupported(
            f"experts.impl = {impl!r}: the Pallas kernel needs compute capability 8.0 or newer, and this is {of}. "
            "Set experts.impl=ragged, which multiplies every row by every expert's weight there."
        )


def _with(impl: str, function: str) -> Any:
    return getattr(importlib.import_module(IMPLEMENTATIONS[impl]), function)


def _run(impl: str, function: str, *arrays: jax.Array, **static: Any) -> jax.Array:
    if impl != "auto":
        return _with(impl, function)(*arrays, **static)
    # The choice is that of the device which the program is compiled for.
    cpu, gpu = (functools.partial(_with(name, function), **static) for name in ("ragged", "pallas"))
    return jax.lax.platform_dependent(*arrays, cpu=cpu, default=gpu)


def times(
    impl: str, rows: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, contract: str, precision: jax.lax.Precision
) -> jax.Array:
    """(R, F) of rows (R, D) where `contract` is "D", (R, D) of rows (R, F) where it is "F"; in the type of the rows."""
    return _run(impl, "times", rows, w_EDF, sizes_E, contract=contract, precision=precision)


def outer(
    impl: str, rows_RD: jax.Array, rows_RF: jax.Array, sizes_E: jax.Array, out: jnp.dtype, precision: jax.lax.Precision
) -> jax.Array:
    """(E, D, F) in `out`; zeros for an expert without rows."""
    return _run(impl, "outer", rows_RD, rows_RF, sizes_E, out=out, precision=precision)
