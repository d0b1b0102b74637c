"""Matmuls in 8-bit floating point: the three products of a linear layer, each of tensors that carry one scale each.

    y  = x  w      x and w in e4m3 (4 exponent and 3 mantissa bits, largest 448)
    dx = dy w'     dy in e5m2 (largest 57344): gradients need range more than digits
    dw = x' dy     the x of the forward pass

A tensor is divided by its scale, which brings its largest element into the type's top binade or the one below ("current
scaling", from the tensor itself and not from earlier steps: no state, nothing in checkpoints), and rounded to nearest. Formats
after Micikevicius et al. 2022 (arXiv:2209.05433).

Scales are powers of two. So scaling itself rounds nothing, and what an element is rounded to does not depend on the scale but
near zero, below about 2^-13 of the largest (2^-28 in e5m2): a device that sees other tokens beside it rounds it to the same.

Scales of activations and gradients belong to one device: no collective finds them, and each product is scaled before it is
summed over devices. A weight has one for each layer, over all of its shards, so that shards travel as they are.

Each product is written as two operands whose last axes are contracted, from 8-bit arrays times their scales. XLA makes one
cuBLASLt call of that (`__cublas$lt$matmul$f8`), which wants just this layout and takes the scales along. On CPU, where no such
call is, it multiplies the same rounded numbers in bfloat16 and adds them up in float32.

What outlives a product (weights at rest, what is kept for the backward pass) is held as uint8, bit by bit. For `jax.checkpoint`
rounds all floating-point numbers that it keeps to the exponent and mantissa bits of their type, by the rules of IEEE formats
(jax 0.11.2, `_insert_reduce_precision`): of e4m3 that makes NaN of all above 240, and zero of the subnormal.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.sharding import Axes, Held, Placement, Scaled, cotangent, late, local_spec, summed, ticket

E4M3, E5M2 = jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")
# Smaller scales are too near the subnormal numbers, which a GPU may take for zero. Such tensors are as good as zero.
SMALLEST = 2.0**-125


def scale_of(amax: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The scale of tensors whose largest magnitudes are `amax`, f32: a power of two, above amax / (largest of dtype).

    1 where amax is 0. NaN where it is infinite or NaN, so that all of the tensor becomes NaN: a conversion to 8 bits would
    make large finite numbers of infinities, and a run that diverged would go on.
    """
    ratio = amax.astype(jnp.float32) / float(jnp.finfo(dtype).max)
    exponent = jax.lax.bitcast_convert_type(ratio, jnp.uint32) & jnp.uint32(0x7F800000)
    above = 2 * jax.lax.bitcast_convert_type(exponent, jnp.float32)
    scale = jnp.where(amax > 0, jnp.maximum(above, SMALLEST), 1.0)
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan)


def rounded(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x / scale in `dtype`; `scale` broadcasts against x."""
    return (x.astype(jnp.float32) * (1 / scale)).astype(dtype)


def to_bits(x8: jax.Array) -> jax.Array:
    """8-bit floating point as uint8, bit by bit."""
    return jax.lax.bitcast_convert_type(x8, jnp.uint8)


def from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `to_bits`."""
    return jax.lax.bitcast_convert_type(bits, dtype)


def scaled(w: jax.Array, axes: Axes, placement: Placement) -> Scaled:
    """A weight at rest in e4m3, in the same layout; one scale for each layer of a stack."""
    first = int(axes[0] == "layers")
    amax = jnp.max(jnp.abs(w), axis=tuple(range(first, w.ndim)))
    scale = scale_of(amax, E4M3)
    value = to_bits(rounded(w, scale.reshape(scale.shape + (1,) * (w.ndim - first)), E4M3))
    return Scaled(jax.lax.with_sharding_constraint(value, placement.sharding(axes)), scale)


# One operation in the eyes of remat policies, which then keep no part of it (models/remat.py).
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(bits: jax.Array, axes: Axes, placement: Placement) -> jax.Array:
    """A weight's bits, ready for use; they travel as e4m3."""
    return to_bits(jax.lax.with_sharding_constraint(from_bits(bits, E4M3), placement.whole(axes)))


def _no_gradient(*_):
    raise TypeError("the bits of a weight have no gradient: that of a weight is computed by the rule of its product")


_gather.defvjp(_no_gradient, _no_gradient)


def use(w: Held, axes: Axes, placement: Placement) -> tuple[jax.Array, jax.Array]:
    """The bits of a weight, gathered, under the name that remat policies know them by; and its scale."""
    value = w.value.value
    gathered = value if w.whole else checkpoint_name(_gather(value, axes, placement), "weight")
    return gathered, w.value.scale


@dataclasses.dataclass(frozen=True)
class _Product:
    """An einsum of activations and a weight, as matrices on one device."""

    eqn: str
    axes: Axes
    placement: Placement

    @property
    def letters(self) -> tuple[str, str, str]:
        """Of x, of the weight, of the result."""
        inputs, y = self.eqn.split("->")
        xs, ws = inputs.split(",")
        return xs, ws, y

    @property
    def contracted_first(self) -> bool:
        """Whether the weight is (contracted, made), and not (made, contracted)."""
        xs, ws, y = self.letters
        contracted = "".join(c for c in xs if c in ws)
        made = "".join(c for c in y if c in ws)
        tokens = xs.removesuffix(contracted)
        if xs != tokens + contracted or y != tokens + made or ws not in (contracted + made, made + contracted):
            raise ValueError(
                f"{self.eqn}: an FP8 product is of (tokens, contracted) and a weight of (contracted, made) or reverse"
            )
        return ws.startswith(contracted)

    def spec(self, letters: str) -> P:
        return local_spec(letters, self.letters[1], self.axes, self.placement)

    @property
    def scale(self) -> P:
        """One number on each device."""
        return P(tuple(a for a in self.placement.mesh.axis_names if a not in self.placement.manual))

    def over(self, letters: str) -> tuple[str, ...]:
        """Mesh axes that split these letters of the weight in use: a product that contracts them is a partial sum."""
        p, logical = self.placement, dict(zip(self.letters[1], self.axes, strict=True))
        return tuple(a for c in letters if c in logical for a in p.mesh_axes(logical[c]) if a not in p.batch_axes)

    def matrix(self, w: jax.Array) -> jax.Array:
        """(K, N) or (N, K), as the weight is stored."""
        xs, ws, _ = self.letters
        rows = [n for c, n in zip(ws, w.shape, strict=True) if (c in xs) == self.contracted_first]
        return w.reshape(math.prod(rows), -1)

    def tokens(self, x: jax.Array) -> jax.Array:
        """(tokens, the rest)."""
        return x.reshape(math.prod(n for c, n in zip(self.letters[0], x.shape, strict=False) if c not in self.letters[1]), -1)


FAST, FULL = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST


def multiply(
    a_MK: jax.Array,
    a_scale: jax.Array,
    b_NK: jax.Array,
    b_scale: jax.Array,
    out: jnp.dtype,
    sums: jax.lax.Precision = FULL,
) -> jax.Array:
    """a b' (M, N) of 8-bit matrices and their scales, rounded once to `out`; of stacks of matrices one for each.

    sums: what XLA asks of cuBLASLt. FULL adds up in float32. FAST keeps some bits less in the tensor cores while it adds (on
    Hopper, where it is faster): enough forward, and too few for gradients, which are summed over thousands of tokens.
    """
    a, b = ((m.astype(jnp.bfloat16) * s.reshape(()).astype(jnp.bfloat16)) for m, s in ((a_MK, a_scale), (b_NK, b_scale)))
    stacked, last = tuple(range(a.ndim - 2)), a.ndim - 1
    return jax.lax.dot_general(a, b, (((last,), (last,)), (stacked, stacked)), precision=sums, preferred_element_type=out)


def _round(product: _Product, x: jax.Array, letters: str, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Activations or their gradient in 8 bits, and the scale on each device, (devices,)."""

    def local(x):
        scale = scale_of(jnp.max(jnp.abs(x)), dtype)
        return to_bits(rounded(x, scale, dtype)), scale[None]

    spec = product.spec(letters)
    outs = spec, product.scale
    return jax.shard_map(local, mesh=product.placement.mesh, in_specs=(spec,), out_specs=outs, check_vma=False)(x)


class Residuals(NamedTuple):
    """What the backward pass of a product finds."""

    x8: jax.Array
    x_scale: jax.Array
    w8: jax.Array
    w_scale: jax.Array
    to: Any  # `sharding.ticket` of the weight


def forward(x: jax.Array, w: Held, eqn: str, axes: Axes, placement: Placement) -> tuple[jax.Array, Residuals]:
    """`einsum(eqn, x, w)` in x's dtype, and residuals for `backward`.

    Args:
      x: activations; tokens first, then what is contracted.
      w: a held weight in 8 bits (`Scaled`).
      eqn, axes: as for `dot.dot`.
    """
    product = _Product(eqn, axes, placement)
    xs, ws, y = product.letters
    first, partial = product.contracted_first, product.over(xs)
    gathered, w_scale = use(w, axes, placement)
    x8, x_scale = _round(product, x, xs, E4M3)

    def local(x8, x_scale, w8, w_scale):
        x_MK, weight = product.tokens(from_bits(x8, E4M3)), product.matrix(from_bits(w8, E4M3))
        made = multiply(x_MK, x_scale, weight.T if first else weight, w_scale, x.dtype, FAST)
        shape = [n for c, n in zip(ws, w8.shape, strict=True) if c in y]
        made = made.reshape(*x8.shape[: len(y) - len(shape)], *shape)
        return jax.lax.psum(made, partial) if partial else made

    made = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(product.spec(xs), product.scale, product.spec(ws), P()),
        out_specs=product.spec(y),
        # The replication checker cannot follow scales, of which each device has its own.
        check_vma=False,
    )(x8, x_scale, gathered, w_scale)
    return made, Residuals(x8, x_scale, gathered, w_scale, ticket(w))


def backward(
    eqn: str, axes: Axes, placement: Placement, reduce: jnp.dtype, residuals: Residuals, dy: jax.Array
) -> tuple[jax.Array, Held]:
    """The gradients of x, in dy's dtype, and of the weight's slot, summed over the batch in `reduce`."""
    x8, x_scale, w8, w_scale, to = residuals
    product = _Product(eqn, axes, placement)
    xs, ws, y = product.letters
    first, partial = product.contracted_first, product.over(y)
    tokens = placement.mesh_axes("batch") + placement.mesh_axes("sequence")
    dy8, dy_scale = _round(product, dy, y, E5M2)

    def local(x8, x_scale, w8, w_scale, dy8, dy_scale):
        x_MK, dy_MN = product.tokens(from_bits(x8, E4M3)), product.tokens(from_bits(dy8, E5M2))
        weight = product.matrix(from_bits(w8, E4M3))
        dx = multiply(dy_MN, dy_scale, weight if first else weight.T, w_scale, dy.dtype)
        dx = dx.reshape(x8.shape)
        dx = jax.lax.psum(dx, partial) if partial else dx
        rows, columns = ((x_MK, x_scale), (dy_MN, dy_scale)) if first else ((dy_MN, dy_scale), (x_MK, x_scale))
        dw = multiply(rows[0].T, rows[1], columns[0].T, columns[1], reduce)
        return dx, summed(dw.reshape(w8.shape), axes, tokens, to, placement)

    dx, dw = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(product.spec(xs), product.scale, product.spec(ws), P(), product.spec(y), product.scale),
        out_specs=(product.spec(xs), placement.home(axes, late(to)).spec),
        check_vma=False,
    )(x8, x_scale, w8, w_scale, dy8, dy_scale)
    return dx, cotangent(to, dw)
