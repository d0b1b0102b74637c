"""Cross entropy over a large vocabulary, in chunks of tokens, with its gradients computed in the same pass.

The logits of a batch (B x T x V) are never in memory at once: a scan takes C tokens at a time, computes their logits and loss,
and keeps the gradients of hidden states and head. The head is gathered once before the scan and its gradient reduced once after
it. The backward pass only multiplies these gradients by the incoming gradient of the loss.

The function runs inside a shard_map: each device holds its own tokens and a shard of the vocabulary. `vocab_axes` names the
mesh axes that shard the vocabulary. Softmax over the shards is as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053,
section 3).
"""

import jax
import jax.numpy as jnp


def chunked_cross_entropy(
    x_nD: jax.Array,
    head_DV: jax.Array,
    targets_n: jax.Array,
    weights_n: jax.Array,
    *,
    chunk: int,
    softcap: float,
    z_loss: float,
    vocab_axes: tuple[str, ...],
    precision: jax.lax.Precision,
    gradients: bool,
    head_gradient: bool = True,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Return the weighted sum of -log p(target) + z_loss log(Z)^2 over this device's n tokens, and the sum's gradients.

    Z is the sum of the exponentials of a token's logits.

    Args:
      x_nD: hidden states, compute dtype.
      head_DV: this device's shard of the head, unsharded in D, compute dtype.
      targets_n: int32 ids in the global vocabulary.
      weights_n: f32; 0 drops a token.
      chunk: tokens whose logits exist at one time.
      softcap: logits become c tanh(l / c), with c = softcap; 0: off.
      z_loss: coefficient of log(Z)^2; 0: off.
      vocab_axes: mesh axes that shard the vocabulary; () if the vocabulary is not sharded.
      gradients: also compute d_x.
      head_gradient: also compute d_head, if `gradients`.

    Returns:
      (loss f32 (), d_x (n, D) in x's dtype, d_head f32 (D, V), losses f32 (n,)). d_x and d_head are this device's terms: the
      caller sums d_x over vocab_axes, and d_head over the axes that shard the tokens. If not computed, they are None.
      losses: -log p(target) of each token, without its weight; None with `gradients`.
    """
    n, D = x_nD.shape
    V = head_DV.shape[1]
    chunk = min(chunk, n)
    count = -(-n // chunk)

    def chunks(a: jax.Array) -> jax.Array:
        padded = jnp.pad(a, [(0, count * chunk - n)] + [(0, 0)] * (a.ndim - 1))
        return padded.reshape(count, chunk, *a.shape[1:])

    first = V * jax.lax.axis_index(vocab_axes) if vocab_axes else 0

    def sum_vocab(a: jax.Array) -> jax.Array:
        return jax.lax.psum(a, vocab_axes) if vocab_axes else a

    def body(carry, item):
        loss, d_head = carry
        x_CD, targets_C, weights_C = item
        raw_CV = jnp.einsum("CD,DV->CV", x_CD, head_DV, precision=precision, preferred_element_type=jnp.float32)
        squashed_CV = jnp.tanh(raw_CV / softcap) if softcap else None
        logits_CV = raw_CV if squashed_CV is None else softcap * squashed_CV
        top_C = logits_CV.max(-1)
        top_C = jax.lax.pmax(top_C, vocab_axes) if vocab_axes else top_C
        exp_CV = jnp.exp(logits_CV - top_C[:, None])
        sum_C = sum_vocab(exp_CV.sum(-1))
        is_target_CV = jnp.arange(V)[None, :] == (targets_C - first)[:, None]
        target_C = sum_vocab(jnp.where(is_target_CV, logits_CV, 0.0).sum(-1))
        log_z_C = jnp.log(sum_C) + top_C
        loss_C = log_z_C - target_C
        loss += jnp.sum(weights_C * (loss_C + z_loss * log_z_C**2 if z_loss else loss_C))
        if not gradients:
            return (loss, d_head), loss_C
        softmax_CV = exp_CV / sum_C[:, None]
        if z_loss:
            softmax_CV *= (1 + 2 * z_loss * log_z_C)[:, None]
        d_CV = weights_C[:, None] * (softmax_CV - is_target_CV)
        if squashed_CV is not None:
            d_CV *= 1 - squashed_CV**2
        d_CV = d_CV.astype(x_CD.dtype)
        d_x_CD = jnp.einsum("CV,DV->CD", d_CV, head_DV, precision=precision, preferred_element_type=x_CD.dtype)
        if head_gradient:
            d_head += jnp.einsum("CV,CD->DV", d_CV, x_CD, precision=precision, preferred_element_type=jnp.float32)
        return (loss, d_head), d_x_CD

    start = (jnp.zeros((), jnp.float32), jnp.zeros((D, V), jnp.float32) if gradients and head_gradient else None)
    (loss, d_head), chunk_outputs = jax.lax.scan(body, start, (chunks(x_nD), chunks(targets_n), chunks(weights_n)))
    token_outputs = chunk_outputs.reshape(count * chunk, *chunk_outputs.shape[2:])[:n]
    return (loss, token_outputs, d_head, None) if gradients else (loss, None, None, token_outputs)
