"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32.

The backward rule is written out for one reason: the gradient of the scale is a sum over all tokens, and left to itself the
compiler adds it up across devices in float32, once per layer. Here each device sums its own tokens in float32 and the
result is reduced like every other weight gradient, in the reduce dtype.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels.dot import Numerics, use
from jaxtrain.sharding import Axes, Placement, Weight, cotangent, late, summed, ticket


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6, 7))
def rms_norm(
    x: jax.Array,
    w: Weight,
    eps: float,
    x_axes: Axes,
    axis: str | None,
    placement: Placement,
    numerics: Numerics,
    offset: float = 0.0,
) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * (offset + w) over the last axis; the result has x's dtype.

    Args:
      x: activations in the layout `x_axes`, whole in the last axis.
      w: the scale at rest (master dtype, 1-D, split as the logical `axis` says), or as the step holds it.
      offset: 1 where the scale is learnt as its distance from 1, as in Gemma.
    """
    return _normalize(x, use(w, (axis,), placement, numerics), eps, offset)[0]


def _along_last(scale: jax.Array, ndim: int, offset: float) -> jax.Array:
    scale = scale.astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))
    return scale + offset if offset else scale


def _normalize(x: jax.Array, scale: jax.Array, eps: float, offset: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The result, and in f32 the normalised x and 1 / rms."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    normal = x32 * inverse
    return (normal * _along_last(scale, x.ndim, offset)).astype(x.dtype), normal, inverse


def _forward(x, w, eps, x_axes, axis, placement, numerics, offset):
    scale = use(w, (axis,), placement, numerics)
    return _normalize(x, scale, eps, offset)[0], (x, scale, ticket(w))


def _backward(eps, x_axes, axis, placement, numerics, offset, residuals, dy):
    x, scale, to = residuals
    tokens = tuple(a for x_axis in x_axes for a in placement.mesh_axes(x_axis))

    def local(x, scale, dy):
        _, normal, inverse = _normalize(x, scale, eps, offset)
        dy32 = dy.astype(jnp.float32)
        d_scale = jnp.sum(dy32 * normal, axis=tuple(range(x.ndim - 1))).astype(numerics.reduce)
        d_scale = summed(d_scale, (axis,), tokens, to, placement)
        d_normal = dy32 * _along_last(scale, x.ndim, offset)
        dx = inverse * (d_normal - normal * jnp.mean(d_normal * normal, axis=-1, keepdims=True))
        return dx.astype(x.dtype), d_scale

    dx, d_scale = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(placement.spec(x_axes), P(), placement.spec(x_axes)),
        out_specs=(placement.spec(x_axes), placement.home((axis,), late(to)).spec),
        # The replication checker cannot follow a sum that is reduced by hand over some axes only.
        check_vma=False,
    )(x, scale, dy)
    return dx, cotangent(to, d_scale)


rms_norm.defvjp(_forward, _backward)
