"""The training loss: a token-weighted sum, normalised once, over the whole batch of a step.

A loss is a function `(hidden_BTD, head_VD, batch, spec) -> f32 ()`: this device's share of the weighted SUM over all tokens,
given its tokens of the residual stream. A loss from outside the package gets the head by `spec.whole_head(head_VD)`. The step
divides by the total weight of all microbatches, and by the number of devices with the same tokens (gradients.py).
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.kernels.cross_entropy import chunked_cross_entropy
from jaxtrain.kernels.embedding import TABLE
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.sharding import Placement, all_gather
from jaxtrain.zero import Zero

Batch = dict[str, Any]  # arrays, or their shapes while nothing is allocated


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """The run, as far as a loss needs to know it. Static."""

    numerics: Numerics
    placement: Placement
    zero: Zero  # gathers the head
    chunk: int
    logit_softcap: float
    z_loss: float = 0.0  # see `cross_entropy`
    head_gradient: bool = True  # False where the head is frozen

    def whole_head(self, head_VD: Any) -> jax.Array:
        """Return the head, gathered over all devices, (V, D) in the compute dtype."""
        return all_gather(self.zero.gather_weight(head_VD, TABLE), self.placement.mesh_axes("vocab"), 0)


LossFunction = Callable[[jax.Array, Any, Batch, LossSpec], jax.Array]


def cross_entropy(hidden_BTD: jax.Array, head_VD: Any, batch: Batch, spec: LossSpec) -> jax.Array:
    """Return the sum over tokens of weight x (-log p(target) + z_loss log(Z)^2), in nats, f32 ().

    The logits of all tokens never exist at once (kernels/cross_entropy.py). Z is the sum of the exponentials of a token's
    logits: the second term keeps them from drifting, and is that of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5).

    Where devices shard both the tokens of the residual stream and the vocabulary (tensor parallelism), each gathers the tokens
    of all, and computes their logits for its slice of the vocabulary.

    Args:
      hidden_BTD: compute dtype, residual layout.
      head_VD: this device's shard; the loss gathers it.
      batch: targets and weights of the same tokens, (B, T).
    """
    p = spec.placement
    shared = tuple(a for a in p.sequence_parallel_axes if a in p.mesh_axes("vocab"))
    x_BTD, targets_BT, weights_BT = (all_gather(a, shared, 1) for a in (hidden_BTD, batch["targets"], batch["weights"]))
    # Transposed before it is gathered: with the sharded dimension first, the all-gather appends shards, and the gathered
    # head needs no transposition.
    head_DV = spec.zero.gather_weight(jax.tree.map(jnp.transpose, head_VD), TABLE[::-1])
    x_nD = x_BTD.reshape(-1, x_BTD.shape[-1])
    loss: Any = _cross_entropy(x_nD, head_DV, targets_BT.reshape(-1), weights_BT.reshape(-1), spec)
    return loss / p.size(shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(
    x_nD: jax.Array, head_DV: jax.Array, targets_n: jax.Array, weights_n: jax.Array, spec: LossSpec
) -> jax.Array:
    """The loss of these tokens. All devices that shard the vocabulary have the same tokens, and return the same loss."""
    return _chunked(x_nD, head_DV, targets_n, weights_n, spec, gradients=False)[0]


def _chunked(x_nD, head_DV, targets_n, weights_n, spec: LossSpec, gradients: bool):
    return chunked_cross_entropy(
        x_nD,
        head_DV,
        targets_n,
        weights_n,
        chunk=spec.chunk,
        softcap=spec.logit_softcap,
        z_loss=spec.z_loss,
        vocab_axes=spec.placement.mesh_axes("vocab"),
        precision=spec.numerics.precision,
        gradients=gradients,
        head_gradient=spec.head_gradient,
    )


def _forward(x_nD, head_DV, targets_n, weights_n, spec: LossSpec):
    loss, d_x, d_head = _chunked(x_nD, head_DV, targets_n, weights_n, spec, gradients=True)
    # The layers' backward pass begins with d_x. Tied to it, the float32 sums are rounded before that and freed; the compiler
    # would keep them until the reduction, which it starts as late as it likes.
    d_x, d_head = jax.lax.optimization_barrier((d_x, None if d_head is None else d_head.astype(head_DV.dtype)))
    return loss, (d_x, d_head)


def _backward(spec: LossSpec, residuals, g):
    # All devices of a sharded vocabulary return the same loss, and `g` is divided by their number. Each has the gradients of
    # its slice alone, so the division is undone.
    d_x, d_head = residuals
    g *= spec.placement.size(spec.placement.mesh_axes("vocab"))
    return (g * d_x).astype(d_x.dtype), None if d_head is None else (g * d_head).astype(d_head.dtype), None, None


_cross_entropy.defvjp(_forward, _backward)


LOSSES: dict[str, LossFunction] = {"cross_entropy": cross_entropy}


def loss_function(name: str) -> LossFunction:
    """By name, or a user's own as `package.module:name`."""
    if name in LOSSES:
        return LOSSES[name]
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
