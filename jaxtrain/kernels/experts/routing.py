"""The choice of experts for each token, and the router's losses and statistics.

Everything is computed in float32: small differences of scores decide the choice. All remat policies save the choice, under the
name CHOICE. A recomputed choice could differ by rounding, and the activations saved for the original choice would belong to
other tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.sharding import all_reduce

CHOICE = "expert_choice"
# Columns of a layer's statistics, before the load of each expert.
COLUMNS = ("balance_loss", "sequence_balance_loss", "z_loss", "entropy", "dropped")


class Routed(NamedTuple):
    """The experts of each token, and the statistics of a layer's router."""

    chosen_BTk: jax.Array  # int32; E for padding, which is no expert
    share_BTk: jax.Array  # f32: the factor of each chosen expert's output
    statistics: jax.Array  # f32 (5 + E,): COLUMNS, with 0 for "dropped", then each expert's share of all choices


def route(
    logits_BTE: jax.Array,
    bias_E: jax.Array | None,
    real_BT: jax.Array,
    *,
    k: int,
    router: str,
    renormalize: bool,
    over: tuple[str, ...],
    scaling: float = 1.0,
    groups: int = 1,
    kept_groups: int = 1,
    sequence: tuple[str, ...] | None = None,
) -> Routed:
    """Return the k experts of each token, the router's weights of these experts, and the router's statistics.

    Args:
      logits_BTE: f32, of the router.
      bias_E: added to the scores for the choice alone (Wang et al. 2024, arXiv:2408.15664).
      real_BT: bool, False for padding. Padding gets no expert and counts in no statistic.
      router: "softmax" (over a token's logits) or "sigmoid" (of each logit): the function that returns the scores.
      renormalize: the scores of the chosen experts are divided by their sum.
      over: mesh axes that shard the tokens.
      scaling: multiplies the weight (`share_BTk`) of each chosen expert, renormalised or not.
      groups: number of groups of consecutive experts. Each token goes to experts of the `kept_groups` best groups. A group's
        score is the sum of its two best experts' scores, biases included (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
      sequence: the axes of `over` that shard tokens of the same sequences. None: the sequence-wise loss is not computed, and
        is reported as 0.

    The statistics are means over the real tokens of all devices. For them, sigmoid scores of a token are divided by their sum.
    The load-balancing loss is E sum_e f_e P_e (Fedus et al. 2021, arXiv:2101.03961, equation 4, there for k = 1): f_e is the
    fraction of the choices that are expert e, P_e the mean score of expert e. The loss is 1 for even loads, and E / k at most.
    The sequence-wise loss is the mean of each sequence's own load-balancing loss (arXiv:2412.19437, equations 17 to 20). The
    z-loss is the mean of log(sum exp(logits))^2 (Zoph et al. 2022, arXiv:2202.08906, equation 5). The entropy is the mean
    entropy of a token's scores, in nats.
    """
    E = logits_BTE.shape[-1]
    scores_BTE = jax.nn.softmax(logits_BTE) if router == "softmax" else jax.nn.sigmoid(logits_BTE)
    ranked_BTE = jax.lax.stop_gradient(scores_BTE if bias_E is None else scores_BTE + bias_E[None, None])
    best_BTk = jax.lax.top_k(_mask_groups(ranked_BTE, groups, kept_groups), k)[1]
    chosen_BTk = checkpoint_name(jnp.where(real_BT[:, :, None], best_BTk, E), CHOICE)
    is_chosen_BTkE = chosen_BTk[..., None] == jnp.arange(E)[None, None, None]
    # A sum selects the scores, because its gradient is a sum too. The gradient of a look-up would be a scatter-add in memory.
    share_BTk = jnp.sum(jnp.where(is_chosen_BTkE, scores_BTE[:, :, None], 0.0), -1)
    if renormalize:
        share_BTk = _normalize_scores(share_BTk)
    share_BTk = share_BTk * scaling if scaling != 1 else share_BTk

    real_BT1 = real_BT[:, :, None].astype(jnp.float32)
    total_tokens = jnp.maximum(all_reduce(real_BT1.sum(), over), 1.0)

    def mean(x_BTn: jax.Array) -> jax.Array:
        return all_reduce(jnp.sum(x_BTn * real_BT1, axis=(0, 1)), over) / total_tokens

    count_BTE = jnp.sum(is_chosen_BTkE, axis=2).astype(jnp.float32)
    load_E = mean(count_BTE) / k
    prob_BTE = scores_BTE if router == "softmax" else _normalize_scores(scores_BTE)
    balance = E * jnp.sum(jax.lax.stop_gradient(load_E) * mean(prob_BTE))
    sequence_balance = jnp.zeros((), jnp.float32)
    if sequence is not None:
        tokens_B1 = all_reduce(real_BT1.sum(1), sequence)
        load_BE, score_BE = (
            all_reduce(jnp.sum(x * real_BT1, axis=1), sequence) / jnp.maximum(tokens_B1, 1.0) for x in (count_BTE, prob_BTE)
        )
        losses_B = E / k * jnp.sum(jax.lax.stop_gradient(load_BE) * score_BE, -1)
        rows = all_reduce(jnp.sum(tokens_B1 > 0, dtype=jnp.float32), over)
        sequence_balance = all_reduce(losses_B.sum(), over) / jnp.maximum(rows, 1.0)
    z_loss = mean(jax.nn.logsumexp(logits_BTE, axis=-1, keepdims=True) ** 2)[0]
    surprise_BTE = -prob_BTE * jnp.log(jnp.maximum(prob_BTE, jnp.finfo(jnp.float32).tiny))
    entropy = jax.lax.stop_gradient(mean(surprise_BTE).sum())
    head = jnp.stack([balance, sequence_balance, z_loss, entropy, jnp.zeros((), jnp.float32)])
    return Routed(chosen_BTk, share_BTk, jnp.concatenate([head, load_E]))


def _mask_groups(ranked_BTE: jax.Array, groups: int, num_kept: int) -> jax.Array:
    """Return the scores, with -inf in all groups of experts except the `num_kept` best groups of each token."""
    if groups == num_kept:
        return ranked_BTE
    *tokens, E = ranked_BTE.shape
    grouped = ranked_BTE.reshape(*tokens, groups, E // groups)
    best = jax.lax.top_k(jax.lax.top_k(grouped, min(2, E // groups))[0].sum(-1), num_kept)[1]
    is_kept = jnp.any(best[..., None] == jnp.arange(groups)[None, None, None], axis=-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(ranked_BTE.shape)


def _normalize_scores(scores: jax.Array) -> jax.Array:
    """Return scores divided by their sum. Scores that are all 0, as sigmoids can be, stay 0."""
    total = scores.sum(-1, keepdims=True)
    return scores / jnp.where(total > 0, total, 1.0)
