"""The training loss: a token-weighted sum, normalised once, over the whole batch of a step.

A loss is a function `(hidden_BTD, head_VD, batch, spec) -> f32 ()`: the weighted SUM over the tokens it is given. One that does
not hand the head on to `cross_entropy` makes it an array by `kernels.dot.whole(head_VD, TABLE, placement, numerics)`. The step
divides by the total weight of all microbatches, so neither accumulation nor layout can change the result.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels.cross_entropy import chunked_cross_entropy
from jaxtrain.kernels.dot import Numerics
from jaxtrain.kernels.embedding import TABLE
from jaxtrain.models.layers import RESIDUAL
from jaxtrain.sharding import Placement, Weight, cotangent, frozen, is_whole, late, numbers, summed, ticket

Batch = dict[str, Any]  # arrays, or their shapes while nothing is allocated


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """What a loss needs to know of the run; static."""

    numerics: Numerics
    placement: Placement
    chunk: int
    logit_softcap: float
    z_loss: float = 0.0  # see `cross_entropy`

    def inside(self) -> "LossSpec":
        """The same on one pipeline stage's part of everything."""
        return dataclasses.replace(self, placement=self.placement.inside("stage"))


LossFunction = Callable[[jax.Array, Weight, Batch, LossSpec], jax.Array]


def cross_entropy(hidden_BTD: jax.Array, head_VD: Weight, batch: Batch, spec: LossSpec) -> jax.Array:
    """Sum over tokens of weight x (-log p(target) + z_loss log(Z)^2), in nats; the logits are never whole
    (kernels/cross_entropy.py).

    Z is the sum of the exponentials of a token's logits: the second term keeps them from drifting, and is that of PaLM
    (Chowdhery et al. 2022, arXiv:2204.02311, section 5).

    hidden_BTD: compute dtype, residual layout. head_VD: at rest (master dtype), or as the step holds it.
    """
    return _cross_entropy(hidden_BTD, head_VD, batch["targets"], batch["weights"], spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(x: jax.Array, head: Weight, targets: jax.Array, weights: jax.Array, spec: LossSpec) -> jax.Array:
    return _sharded(x, head, targets, weights, spec, gradients=False)[0]


def _forward(x, head, targets, weights, spec):
    loss, d_x, d_head = _sharded(x, head, targets, weights, spec, gradients=True)
    return loss, (d_x, d_head, ticket(head))


def _backward(spec, residuals, g):
    d_x, d_head, to = residuals
    return (g * d_x).astype(d_x.dtype), cotangent(to, None if frozen(to) else g * d_head), None, None


_cross_entropy.defvjp(_forward, _backward)


def _sharded(x, head, targets, weights, spec: LossSpec, gradients: bool):
    """One shard_map: gather the head, scan over chunks, reduce the head's gradient.

    Where one mesh axis splits both the residual stream's tokens and the vocabulary (tensor parallelism), tokens are gathered
    over it on the way in, and the partial gradients of hidden states reduce-scattered on the way out.
    """
    p, n, whole, to = spec.placement, spec.numerics, is_whole(head), ticket(head)
    head_axes = () if whole else p.mesh_axes("embed")  # the head's D is split over these
    vocab_axes = p.mesh_axes("vocab")
    gathered = tuple(a for a in p.mesh_axes("residual") if a in vocab_axes)
    kept = tuple(a for a in p.mesh_axes("residual") if a not in vocab_axes)
    token_axes = p.mesh_axes("batch") + kept
    tokens = P(p.mesh_axes("batch") or None, kept or None)

    def local(x_BTD, head_VD, targets_BT, weights_BT):
        # Turned before it is gathered: the split dimension comes first, so that the parts of all devices lie one after
        # another and the gathered head, eight times as large, need not be turned in memory.
        head_DV = head_VD.astype(n.compute).T
        if head_axes:
            head_DV = jax.lax.all_gather(head_DV, head_axes, axis=0, tiled=True)
        if gathered:
            x_BTD = jax.lax.all_gather(x_BTD, gathered, axis=1, tiled=True)
        loss, d_x, d_head = chunked_cross_entropy(
            x_BTD.reshape(-1, x_BTD.shape[-1]),
            head_DV,
            targets_BT.reshape(-1),
            weights_BT.reshape(-1),
            chunk=spec.chunk,
            softcap=spec.logit_softcap,
            z_loss=spec.z_loss,
            vocab_axes=vocab_axes,
            precision=n.precision,
            gradients=gradients,
            head_gradient=not frozen(to),
        )
        loss = jax.lax.psum(loss, token_axes) if token_axes else loss
        if d_x is None:
            return loss, jnp.zeros((), n.compute), jnp.zeros((), n.reduce)
        d_x_BTD = d_x.reshape(x_BTD.shape)
        if gathered:
            d_x_BTD = jax.lax.psum_scatter(d_x_BTD, gathered, scatter_dimension=1, tiled=True)
        # Afterwards, when there is less to sum: pipeline stages may be nodes apart.
        others = tuple(a for a in vocab_axes if a not in gathered)
        d_x_BTD = jax.lax.psum(d_x_BTD, others) if others else d_x_BTD
        if d_head is None:
            return loss, d_x_BTD, jnp.zeros((), n.reduce)
        # The layers' backward pass begins with d_x. Tied to it, the float32 sums are rounded before that and freed; the
        # compiler would keep them until the reduction, which it starts as late as it likes.
        d_x_BTD, d_head = jax.lax.optimization_barrier((d_x_BTD, d_head.astype(n.reduce)))
        return loss, d_x_BTD, jnp.swapaxes(summed(d_head, TABLE[::-1], token_axes, to, p), -1, -2)

    d_head_spec = P() if frozen(to) else p.home(TABLE, late(to)).spec
    return jax.shard_map(
        local,
        mesh=p.mesh,
        in_specs=(p.spec(RESIDUAL), (p.whole(TABLE) if whole else p.home(TABLE)).spec, tokens, tokens),
        out_specs=(P(), p.spec(RESIDUAL), d_head_spec) if gradients else (P(), P(), P()),
        # The replication checker cannot follow a sum that is reduced by hand over some axes only.
        check_vma=False,
    )(x, numbers(head), targets, weights)


LOSSES: dict[str, LossFunction] = {"cross_entropy": cross_entropy}


def loss_function(name: str) -> LossFunction:
    """By name, or a user's own as `package.module:name`."""
    if name in LOSSES:
        return LOSSES[name]
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
