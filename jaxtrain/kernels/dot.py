"""Where every matmul of a layer happens: one function that a precision can replace.

`dot` takes the weight as it rests (split, master dtype), gathers it in the compute dtype and names the gathered copy
"weight". No remat policy keeps that name, so a gathered weight never outlives its layer, and the backward pass gathers it
once, for the recomputation and the gradient of the input together.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

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
    return einsum(eqn, x, use(w, axes, placement, numerics), numerics=numerics)


def use(w: jax.Array, axes: Axes, placement: Placement, numerics: Numerics) -> jax.Array:
    """A weight, gathered in the compute dtype, under the name that no remat policy keeps."""
    return checkpoint_name(placement.gather(w, axes, numerics.compute, numerics.reduce), "weight")


def _dot_fwd(x, w, eqn, axes, placement, numerics):
    gathered = use(w, axes, placement, numerics)
    # An empty array carries the master dtype to the backward rule: residuals may not be dtypes.
    return einsum(eqn, x, gathered, numerics=numerics), (x, gathered, jnp.zeros((0,), w.dtype))


def _dot_bwd(eqn, axes, placement, numerics, residuals, dy):
    x, gathered, like = residuals
    inputs, y = eqn.split("->")
    xs, ws = inputs.split(",")
    dx = einsum(f"{y},{ws}->{xs}", dy, gathered, numerics=numerics)
    dw = einsum(f"{xs},{y}->{ws}", x, dy, numerics=numerics, out=numerics.reduce)
    return dx, scatter(dw, placement.sharding(axes), like.dtype)


dot.defvjp(_dot_fwd, _dot_bwd)
