"""The training loss: a sum over all tokens of a step's global batch, divided once by their total weight.

A loss is a function `(hidden_BTD, head_VD, batch, spec) -> f32 ()`. It returns this device's share of the weighted SUM over all
tokens, from the device's tokens of the residual stream. A loss from outside the package gets the head by
`spec.whole_head(head_VD)`. The step divides by the total weight of all microbatches, and by the number of devices with the same
tokens (gradients.py).

LOSSES has the losses of this package. A loss in LOSSES may have another denominator than the weight of the tokens, and may
return further sums by name, which the step reports. A loss from outside the package returns only its sum.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config import own_parts
from jaxtrain.config.schema import NO_SETTINGS, Own
from jaxtrain.config.shapes import REWARD_METRICS
from jaxtrain.kernels.cross_entropy import chunked_cross_entropy
from jaxtrain.kernels.embedding import TABLE
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.models.zero import Zero
from jaxtrain.sharding import Placement, all_gather, all_reduce, to_residual

Batch = dict[str, Any]  # arrays, or their shapes while nothing is allocated


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """The settings of a run that a loss uses, without arrays."""

    numerics: Numerics
    placement: Placement
    zero: Zero  # gathers the head
    chunk: int
    logit_softcap: float
    z_loss: float = 0.0  # see `cross_entropy`
    head_gradient: bool = True  # False where the head is frozen
    documents: int = 0  # for a loss of pairs: most documents in a row
    beta: float = 0.1  # see `dpo`
    label_smoothing: float = 0.0
    own: Own = NO_SETTINGS  # settings of a user's own loss

    def whole_head(self, head_VD: Any) -> jax.Array:
        """Return the head, gathered over all devices, (V, D) in the compute dtype."""
        return all_gather(self.zero.gather_weight(head_VD, TABLE), self.placement.mesh_axes("vocab"), 0)


Sums = dict[str, jax.Array]  # f32 () each
LossFunction = Callable[[jax.Array, Any, Batch, LossSpec], jax.Array | tuple[jax.Array, Sums]]


def cross_entropy(hidden_BTD: jax.Array, head_VD: Any, batch: Batch, spec: LossSpec) -> jax.Array:
    """Return the sum over tokens of weight x (-log p(target) + z_loss log(Z)^2), in nats, f32 ().

    The logits of all tokens never exist at once (kernels/cross_entropy.py). Z is the sum of the exponentials of a token's
    logits. The second term is PaLM's z-loss, which keeps logits from drifting (Chowdhery et al. 2022, arXiv:2204.02311, section
    5).

    With tensor parallelism, the tensor axis shards both the tokens of the residual stream and the vocabulary. Then each device
    gathers the tokens along this axis, and computes the logits of all these tokens for its shard of the vocabulary.

    Args:
      hidden_BTD: final hidden states in the compute dtype, this device's tokens of the residual stream.
      head_VD: this device's shard of the head; the loss gathers it.
      batch: targets and weights of the same tokens, (B, T).
    """
    x_nD, head_DV, targets_BT, weights_BT, shared = _gather_inputs(hidden_BTD, head_VD, batch, spec)
    loss: Any = _cross_entropy(x_nD, head_DV, targets_BT.reshape(-1), weights_BT.reshape(-1), spec)
    return loss / spec.placement.size(shared)


def _gather_inputs(hidden_BTD: jax.Array, head_VD: Any, batch: Batch, spec: LossSpec) -> Any:
    """Return (x_nD, head_DV, targets_BT, weights_BT, mesh axes along which devices now have the same tokens)."""
    placement = spec.placement
    shared = tuple(a for a in placement.sequence_parallel_axes if a in placement.mesh_axes("vocab"))
    x_BTD, targets_BT, weights_BT = (all_gather(a, shared, 1) for a in (hidden_BTD, batch["targets"], batch["weights"]))
    # Transposed before it is gathered: with the sharded dimension first, the all-gather appends shards, and the gathered
    # head needs no transposition.
    head_DV = spec.zero.gather_weight(jax.tree.map(jnp.transpose, head_VD), TABLE[::-1])
    return x_BTD.reshape(-1, x_BTD.shape[-1]), head_DV, targets_BT, weights_BT, shared


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(
    x_nD: jax.Array, head_DV: jax.Array, targets_n: jax.Array, weights_n: jax.Array, spec: LossSpec
) -> jax.Array:
    """Return the summed loss of n tokens, f32 ().

    Devices that shard the vocabulary have the same tokens and return the same loss.
    """
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
    loss, d_x, d_head, _ = _chunked(x_nD, head_DV, targets_n, weights_n, spec, gradients=True)
    # The barrier ties the float32 sums of d_head to d_x, with which the layers' backward pass begins. So they are rounded and
    # freed before it. Without the barrier, the compiler would keep them until it starts the reduction.
    d_x, d_head = jax.lax.optimization_barrier((d_x, None if d_head is None else d_head.astype(head_DV.dtype)))
    return loss, (d_x, d_head)


def _backward(spec: LossSpec, residuals, grad):
    # All devices of a sharded vocabulary return the same loss, and `grad` is divided by their number. Each device has the
    # gradients of its own shard only, so the division is undone.
    d_x, d_head = residuals
    grad *= spec.placement.size(spec.placement.mesh_axes("vocab"))
    return (grad * d_x).astype(d_x.dtype), None if d_head is None else (grad * d_head).astype(d_head.dtype), None, None


_cross_entropy.defvjp(_forward, _backward)


def dpo(hidden_BTD: jax.Array, head_VD: Any, batch: Batch, spec: LossSpec) -> tuple[jax.Array, Sums]:
    """Return the sum over pairs of the DPO loss, f32 (), and the sums of REWARD_METRICS over pairs.

    The loss L of a pair (Rafailov et al. 2023, arXiv:2305.18290, equation 7; its label smoothing eps is from Mitchell 2023, "A
    note on DPO with noisy preferences") is

        L(m) = -(1 - eps) log sigmoid(m) - eps log sigmoid(-m)
        m = beta ((log p(chosen) - log ref(chosen)) - (log p(rejected) - log ref(rejected)))

    where log p of a completion is the sum of its tokens' log-probabilities, and ref is the model that training began with.

    The gradient goes through the fused cross entropy. So the logits of all tokens never exist at once, and shardings are
    those of `cross_entropy`.
    L depends on the weights through the tokens' log-probabilities l_t alone, so dL = sum_t (dL/dl_t) dl_t with

        dL/dl_t = beta L'(m) on chosen tokens, -beta L'(m) on rejected tokens
        L'(m) = -(1 - eps) sigmoid(-m) + eps sigmoid(m)

    A first pass without gradients computes l_t, L and dL/dl_t. Then sum_t w_t (-l_t), the weighted cross entropy with the
    constants w_t = -dL/dl_t, has exactly the gradient of L. The cross entropy is added to L and its value subtracted, so only
    its gradient remains. The first pass costs one more forward matmul with the head.

    Args: as for `cross_entropy`. The batch also has segments, positions and reference log-probabilities (shapes.py).
    """
    gathered = _gather_inputs(hidden_BTD, head_VD, batch, spec)
    x_nD, head_DV, targets_BT, weights_BT, shared = gathered
    log_probs_BM, tokens = _document_log_probs(gathered, batch, spec)
    references_BM, present_BM = (_document_sums(a, tokens, spec, shared) for a in (tokens["reference"], tokens["first"]))
    rewards_BM = spec.beta * (log_probs_BM - references_BM)
    chosen_BP, rejected_BP, present_BP = rewards_BM[:, ::2], rewards_BM[:, 1::2], present_BM[:, ::2] > 0
    margin_BP, eps = chosen_BP - rejected_BP, spec.label_smoothing
    losses_BP = -(1 - eps) * jax.nn.log_sigmoid(margin_BP) - eps * jax.nn.log_sigmoid(-margin_BP)
    slope_BP = -(1 - eps) * jax.nn.sigmoid(-margin_BP) + eps * jax.nn.sigmoid(margin_BP)

    document_constants_BM = -spec.beta * jnp.stack([slope_BP, -slope_BP], -1).reshape(rewards_BM.shape)
    segment_constants_BM = jnp.pad(document_constants_BM, ((0, 0), (1, 0)))  # segment 0 is padding
    constants_BT = weights_BT * jnp.take_along_axis(segment_constants_BM, tokens["segments"], axis=1)
    entropy: Any = _cross_entropy(x_nD, head_DV, targets_BT.reshape(-1), constants_BT.reshape(-1), spec)
    entropy /= spec.placement.size(shared)

    reported = (chosen_BP, rejected_BP, margin_BP > 0, margin_BP)
    num_replicas = spec.placement.size(spec.placement.mesh_axes("residual"))  # number of devices with the same pairs
    value, *sums = (jnp.sum(jnp.where(present_BP, a, 0.0)) / num_replicas for a in (losses_BP, *reported))
    return value + (entropy - jax.lax.stop_gradient(entropy)), dict(zip(REWARD_METRICS, sums, strict=True))


def document_log_probs(hidden_BTD: jax.Array, head_VD: Any, batch: Batch, spec: LossSpec) -> jax.Array:
    """Return the weighted log-probability of each document, f32 (B, M), for the M documents that a row may have.

    All devices that share a sequence return the same values.
    """
    return _document_log_probs(_gather_inputs(hidden_BTD, head_VD, batch, spec), batch, spec)[0]


def _document_log_probs(gathered: Any, batch: Batch, spec: LossSpec) -> tuple[jax.Array, Batch]:
    """Return (log-probabilities of documents, f32 (B, M); name -> other array of the gathered tokens, (B, T)).

    The other arrays are `segments`, `positions`, `reference` if the batch has it, and `first` (1 at a document's first token).
    The result has no gradient.
    """
    x_nD, head_DV, targets_BT, weights_BT, shared = gathered
    x_nD, head_DV = (jax.lax.stop_gradient(a) for a in (x_nD, head_DV))
    operands = x_nD, head_DV, targets_BT.reshape(-1), weights_BT.reshape(-1)
    losses_n: Any = _chunked(*operands, spec, gradients=False)[3]
    log_probs_BT = -losses_n.reshape(targets_BT.shape)
    # Gathered tokens are all tokens that a block has, as in `batch`. Without a gather, they are those of the residual stream.
    tokens = {k: batch[k] if shared else to_residual(batch[k], (), spec.placement) for k in ("segments", "positions")}
    if "reference" in batch:
        tokens["reference"] = batch["reference"] if shared else to_residual(batch["reference"], (), spec.placement)
    tokens["first"] = jnp.asarray(tokens["positions"] == 0, jnp.float32)
    return _document_sums(weights_BT * log_probs_BT, tokens, spec, shared), tokens


def _document_sums(values_BT: jax.Array, tokens: Batch, spec: LossSpec, shared: tuple[str, ...]) -> jax.Array:
    """Return the sum of each document's values over all devices that share a sequence, f32 (B, M)."""
    number_M = jnp.arange(1, 2 * (spec.documents // 2) + 1)
    # Segments are compared with every number. On GPUs, a scatter-add would sum in another order each time.
    in_document_BTM = tokens["segments"][..., None] == number_M[None, None]
    sums_BM = jnp.sum(jnp.where(in_document_BTM, values_BT[..., None], 0.0), axis=1)
    return all_reduce(sums_BM, tuple(a for a in spec.placement.mesh_axes("residual") if a not in shared))


def token_weight(batch: Batch) -> jax.Array:
    """Return the total weight of the tokens in this device's shard of a batch, f32 ()."""
    return batch["weights"].sum()


def count_pairs(batch: Batch) -> jax.Array:
    """Return the number of pairs in this device's shard of a batch, f32 (): the chosen documents that begin in the shard."""
    return jnp.sum((batch["positions"] == 0) & (batch["segments"] % 2 == 1), dtype=jnp.float32)


@dataclasses.dataclass(frozen=True)
class TrainingLoss:
    """A loss function, the denominator of its sums, and the names of the sums that it reports.

    Attributes:
      function: returns this device's share of the summed loss; if `reports` has names, also the other sums by name.
      count: returns this device's share of the denominator of all sums, f32 ().
      reports: names of the other sums.
    """

    function: LossFunction
    count: Callable[[Batch], jax.Array] = token_weight
    reports: tuple[str, ...] = ()


CROSS_ENTROPY = "cross_entropy"  # a sum that the evaluation of a user's own loss reports
LOSSES = {"cross_entropy": TrainingLoss(cross_entropy), "dpo": TrainingLoss(dpo, count_pairs, REWARD_METRICS)}


def find_loss(name: str) -> TrainingLoss:
    """Return the loss with this name in LOSSES, or a user's own loss function, `package.module:name`."""
    return LOSSES[name] if name in LOSSES else _with_check(name, own_parts.load_part("loss.name", name))


@functools.cache  # the losses of two programs of a run are equal
def _with_check(name: str, function: LossFunction) -> TrainingLoss:
    """Return a user's own loss function, which raises WrongPart if it does not return one float32."""

    def checked_loss(hidden_BTD: jax.Array, head_VD: Any, batch: Batch, spec: LossSpec) -> jax.Array:
        with own_parts.calling("loss.name", name, "name(hidden_BTD, head_VD, batch, spec)"):
            loss: Any = function(hidden_BTD, head_VD, batch, spec)
        if getattr(loss, "shape", None) != () or loss.dtype != jnp.float32:
            returned = f"{loss.dtype} {list(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
            rule = f"returns {returned}, not the weighted sum of the loss over all tokens, float32 []"
            raise own_parts.WrongPart("loss.name", name, rule, "For example (batch['weights'] * losses_BT).sum().")
        return loss

    return TrainingLoss(checked_loss)


def with_cross_entropy(loss: TrainingLoss) -> TrainingLoss:
    """Return a user's own loss that also reports the plain cross entropy of the same tokens: only its exponential is a
    perplexity. A loss in LOSSES is returned unchanged."""
    if loss in LOSSES.values():
        return loss

    def loss_and_cross_entropy(hidden_BTD: jax.Array, head_VD: Any, batch: Batch, spec: LossSpec) -> tuple[jax.Array, Sums]:
        value: Any = loss.function(hidden_BTD, head_VD, batch, spec)
        plain = dataclasses.replace(spec, z_loss=0.0)
        return value, {CROSS_ENTROPY: cross_entropy(hidden_BTD, head_VD, batch, plain)}

    return TrainingLoss(loss_and_cross_entropy, loss.count, (CROSS_ENTROPY,))
