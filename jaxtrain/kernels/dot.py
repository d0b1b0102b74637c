"""Where every matmul of a layer happens: one function that a precision can replace.

`dot` takes the weight as it rests (split, master dtype), gathers it in the compute dtype and names the gathered copy
"weight". No remat policy keeps that name, so a gathered weight never outlives its layer, and the backward pass gathers it
once, for the recomputation and the gradient of the input together.

Where a step holds a weight in another way (sharding.Held), `dot` takes that in the weight's place.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels import fp8
from jaxtrain.sharding import (
    Axes,
    Placement,
    Weight,
    cotangent,
    frozen,
    in_eight,
    is_whole,
    late,
    local_spec,
    numbers,
    scatter,
    slot_dtype,
    summed,
    ticket,
)

DTYPES = {"f32": jnp.dtype("float32"), "bf16": jnp.dtype("bfloat16")}


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Which type is used where."""

    compute: jnp.dtype  # activations, gathered weights
    reduce: jnp.dtype  # weight gradients on the wire
    params: jnp.dtype  # master weights
    vectors: jnp.dtype = DTYPES["f32"]  # of them, scales of norms and biases

    @property
    def precision(self) -> jax.lax.Precision:
        """float32 means float32: GPUs would otherwise round the inputs of a float32 GEMM to TF32."""
        return jax.lax.Precision.HIGHEST if self.compute == jnp.float32 else jax.lax.Precision.DEFAULT


def einsum(eqn: str, *operands: jax.Array, numerics: Numerics, out: jnp.dtype | None = None) -> jax.Array:
    """An einsum that accumulates in float32 and rounds once, to `out` (default: the compute dtype)."""
    out = out if out is not None else numerics.compute
    # cuBLAS has no product of float32 operands with a narrower result.
    made = jnp.dtype(jnp.float32) if numerics.compute == jnp.float32 else out
    return jnp.einsum(eqn, *operands, precision=numerics.precision, preferred_element_type=made).astype(out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def dot(x: jax.Array, w: Weight, eqn: str, axes: Axes, placement: Placement, numerics: Numerics) -> jax.Array:
    """`einsum(eqn, x, w)` with w gathered in the compute dtype.

    Args:
      x: activations, compute dtype.
      w: the weight at rest (master dtype, split as `axes` says), or as the step holds it.
      eqn: such as "BTD,DNH->BTNH"; every letter of w is in x or in the result.
      axes: logical axes of w.

    Returns the result in the compute dtype; a weight that the step holds in 8 bits is multiplied in 8 bits (kernels/fp8.py).
    The weight's gradient is computed in `numerics.reduce`, summed over the batch axes in that type, and returned in the layout
    and dtype of w, or of its slot. A frozen weight has none.
    """
    return _dot_fwd(x, w, eqn, axes, placement, numerics)[0]


def use(w: Weight, axes: Axes, placement: Placement, numerics: Numerics) -> jax.Array:
    """A weight, gathered in the compute dtype, under the name that remat policies know it by."""
    if is_whole(w):
        return numbers(w)
    with jax.named_scope("weight"):
        return checkpoint_name(placement.gather(numbers(w), axes, numerics.compute, numerics.reduce), "weight")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def whole(w: Weight, axes: Axes, placement: Placement, numerics: Numerics) -> jax.Array:
    """A weight, gathered in the compute dtype: for a loss or a layer of one's own, which multiplies by it as it likes.

    w: at rest, or as the step holds it. Its gradient is summed at once, in `numerics.reduce`, and goes where the step wants it.

    Of a table that is split by vocabulary over pipeline stages it has all parts. Each stage then computes the same with it, and
    takes its own part of the gradient.
    """
    return _whole_fwd(w, axes, placement, numerics)[0]


def _whole_fwd(w, axes, placement, numerics):
    made = use(w, axes, placement, numerics)
    for dim, axis in _apart(axes, placement):
        made = _joined(made, dim, axis, axes, placement)
    return made, ticket(w)


def _apart(axes: Axes, placement: Placement) -> list[tuple[int, str]]:
    """Dimensions of a weight that a shard_map around all this has taken apart, and their mesh axes: the first of each rule."""
    split = [(dim, placement.mesh_axes(axis)[:1]) for dim, axis in enumerate(axes)]
    return [(dim, first[0]) for dim, first in split if first and first[0] in placement.manual]


def _joined(w: jax.Array, dim: int, axis: str, axes: Axes, placement: Placement) -> jax.Array:
    """The parts of a dimension on all devices of a mesh axis, one after another."""
    spec = placement.whole(axes).spec

    def local(w: jax.Array) -> jax.Array:
        return jax.lax.all_gather(w, axis, axis=dim)

    outs = P(*spec[:dim], None, *spec[dim:])
    parts = jax.shard_map(local, mesh=placement.mesh, in_specs=spec, out_specs=outs, check_vma=False)(w)
    return parts.reshape(*w.shape[:dim], -1, *w.shape[dim + 1 :])


def _whole_bwd(axes, placement, numerics, to, dw):
    if frozen(to):
        return (cotangent(to, None),)
    dw = dw.astype(numerics.reduce)
    for dim, axis in _apart(axes, placement):
        size = dw.shape[dim] // placement.size(axis)
        dw = jax.lax.dynamic_slice_in_dim(dw, jax.lax.axis_index(axis) * size, size, axis=dim)
    if not late(to):
        return (cotangent(to, scatter(dw, placement.sharding(axes), slot_dtype(to))),)
    # One part for each device whose parts are to be summed later: all of them alike.
    parts = placement.size(late(to))
    dw = jnp.broadcast_to(dw[None] / parts, (parts, *dw.shape))
    return (cotangent(to, jax.lax.with_sharding_constraint(dw, placement.home(axes, late(to)))),)


whole.defvjp(_whole_fwd, _whole_bwd)


def _dot_fwd(x, w, eqn, axes, placement, numerics):
    if in_eight(w):
        return fp8.forward(x, w, eqn, axes, placement)
    gathered = use(w, axes, placement, numerics)
    to = ticket(w)
    # A frozen weight's gradient is what x would be kept for.
    return einsum(eqn, x, gathered, numerics=numerics), (None if frozen(to) else x, gathered, to)


def _dot_bwd(eqn, axes, placement, numerics, residuals, dy):
    if isinstance(residuals, fp8.Residuals):
        return fp8.backward(eqn, axes, placement, numerics.reduce, residuals, dy)
    x, gathered, to = residuals
    inputs, y = eqn.split("->")
    xs, ws = inputs.split(",")
    dx = einsum(f"{y},{ws}->{xs}", dy, gathered, numerics=numerics)
    if frozen(to):
        return dx, cotangent(to, None)
    if late(to):
        return dx, cotangent(to, _unsummed(eqn, x, dy, axes, to, placement, numerics))
    dw = einsum(f"{xs},{y}->{ws}", x, dy, numerics=numerics, out=numerics.reduce)
    with jax.named_scope("gradient"):
        return dx, cotangent(to, scatter(dw, placement.sharding(axes), slot_dtype(to)))


dot.defvjp(_dot_fwd, _dot_bwd)


def _unsummed(eqn, x, dy, axes, to, placement, numerics):
    """The weight's gradient where some axes are to be summed later. By hand: a partitioner could only sum over all of them."""
    inputs, y = eqn.split("->")
    xs, ws = inputs.split(",")
    tokens = placement.mesh_axes("batch") + placement.mesh_axes("sequence")

    def local(x, dy):
        dw = einsum(f"{xs},{y}->{ws}", x, dy, numerics=numerics, out=numerics.reduce)
        return summed(dw, axes, tokens, to, placement)

    return jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(local_spec(xs, ws, axes, placement), local_spec(y, ws, axes, placement)),
        out_specs=placement.home(axes, late(to)).spec,
        # The replication checker cannot follow sums that are reduced by hand over some axes only.
        check_vma=False,
    )(x, dy)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def add_bias(y: jax.Array, b: Weight, axes: Axes, placement: Placement, numerics: Numerics) -> jax.Array:
    """y + b, added in float32; the result has y's dtype.

    Args:
      y: (B, T, ...) activations, split like b over all but B and T.
      b: the bias at rest, or as the step holds it; its axes are the last of y.

    The bias's gradient is a sum over all tokens: in float32 on each device, and in `numerics.reduce` between them.
    """
    bias = use(b, axes, placement, numerics)[None, None]
    return (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(y.dtype)


def _add_bias_fwd(y, b, axes, placement, numerics):
    return add_bias(y, b, axes, placement, numerics), ticket(b)


def _add_bias_bwd(axes, placement, numerics, to, dy):
    tokens = placement.mesh_axes("batch") + placement.mesh_axes("sequence")

    def local(dy):
        db = jnp.sum(dy.astype(jnp.float32), axis=(0, 1))
        return summed(db.astype(numerics.reduce), axes, tokens, to, placement)

    db = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=placement.spec(("batch", "sequence", *axes)),
        out_specs=placement.home(axes, late(to)).spec,
        check_vma=False,
    )(dy)
    return dy, cotangent(to, db)


add_bias.defvjp(_add_bias_fwd, _add_bias_bwd)
