"""The matmuls of a layer: an einsum of this device's shards, in the compute dtype or in FP8."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.kernels import fp8
from jaxtrain.kernels.fp8 import Float8
from jaxtrain.kernels.numerics import Numerics

Weight = jax.Array | Float8  # gathered


def dot(eqn: str, x: jax.Array, w: Weight, numerics: Numerics) -> jax.Array:
    """Return `einsum(eqn, x, w)` of local shards, in the dtype of `x`.

    If devices hold different shards of a contracted dimension, the result is a partial sum.

    Args:
      eqn: such as "BTD,DNH->BTNH": tokens first, then the contracted dimensions of `x`.
      x: activations.
      w: a gathered weight. A `Float8` is multiplied in 8 bits (kernels/fp8.py).
    """
    if isinstance(w, Float8):
        return fp8.dot(eqn, x, w)
    xs, ws, ys = eqn.replace("->", ",").split(",")
    token_dims = sum(c not in ws for c in xs)  # dimensions of tokens
    contracted, axis = xs[token_dims:], ws.index(xs[token_dims:])
    if xs[:token_dims] + ws.replace(contracted, "") != ys:
        raise ValueError(
            f"{eqn}: the result must have the tokens of x, then the dimensions of w that are not contracted, in order"
        )
    # Tokens are flattened, because XLA's CPU compiler accumulates some gradients in bfloat16 for matmuls with more dimensions.
    x_nk = x.reshape(-1, math.prod(x.shape[token_dims:]))
    w = w.reshape(*w.shape[:axis], -1, *w.shape[axis + len(contracted) :])
    with jax.named_scope(eqn):
        y = jax.lax.dot_general(
            x_nk, w, (((1,), (axis,)), ((), ())), precision=numerics.precision, preferred_element_type=x.dtype
        )
    return y.reshape(*x.shape[:token_dims], *y.shape[1:])


def einsum(eqn: str, *operands: Any, numerics: Numerics) -> jax.Array:
    """Return `jnp.einsum(eqn, *operands)`, with the result in the compute dtype."""
    return jnp.einsum(eqn, *operands, precision=numerics.precision, preferred_element_type=numerics.compute)
