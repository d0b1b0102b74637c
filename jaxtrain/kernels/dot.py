"""Where every matmul of a layer happens: one function that a precision can replace.

`dot` takes the weight as it rests (split, master dtype) and gathers it itself, in the forward pass and again in the backward
pass. So a gathered weight never outlives its GEMMs, whatever the remat policy saves, and the master dtype never
reaches the wire.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxtrain.sharding import Axes, Placement, scatter

DTYPES = {"f32": jnp.dtype("float32"), "bf16": jnp.dtype("bfloat16")}


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Which type is used where."""

    compute: jnp.dtype  # activations, gathered weights
    reduce: jnp.dtype  # weight gradients on the wire
    params: jnp.dtype  # master weights

    @property
    def precision(self) -> jax.lax.Precision:
        """float32 means float32: GPUs would otherwise round the inputs of a float32 GEMM to TF32."""
        return jax.lax.Precision.HIGHEST if self.compute == jnp.float32 else jax.lax.Precision.DEFAULT


def einsum(eqn: str, *operands: jax.Array, numerics: Numerics, out: jnp.dtype | None = None) -> jax.Array:
    """An einsum that accumulates in float32 and rounds once, to `out` (default: the compute dtype)."""
    return jnp.einsum(
        eqn, *operands, precision=numerics.precision, preferred_element_type=out if out is not None else numerics.compute
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def dot(x: jax.Array, w: jax.Array, eqn: str, axes: Axes, placement: Placement, numerics: Numerics) -> jax.Array:
    """`einsum(eqn, x, w)` with w gathered in the compute dtype.

    Args:
      x: activations, compute dtype.
      w: the weight at rest: master dtype, split as `axes` says.
      eqn: such as "BTD,DNH->BTNH"; every letter of w is in x or in the result.
      axes: logical axes of w.

    Returns the result in the compute dtype. The weight's gradient is computed in `numerics.reduce`, summed over the batch
    axes in that type, and returned in the layout and dtype of w.
    """
    return einsum(eqn, x, _use(w, axes, placement, numerics), numerics=numerics)


def _use(w: jax.Array, axes: Axes, placement: Placement, numerics: Numerics) -> jax.Array:
    return placement.gather(w, axes, numerics.compute, numerics.reduce)


def _dot_fwd(x, w, eqn, axes, placement, numerics):
    return dot(x, w, eqn, axes, placement, numerics), (x, w)


def _dot_bwd(eqn, axes, placement, numerics, residuals, dy):
    x, w = residuals
    inputs, y = eqn.split("->")
    xs, ws = inputs.split(",")
    dx = einsum(f"{y},{ws}->{xs}", dy, _use(w, axes, placement, numerics), numerics=numerics)
    dw = einsum(f"{xs},{y}->{ws}", x, dy, numerics=numerics, out=numerics.reduce)
    return dx, scatter(dw, placement.sharding(axes), w.dtype)


dot.defvjp(_dot_fwd, _dot_bwd)
