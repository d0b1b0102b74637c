"""Which experts a token goes to, and what the router is told about its choices.

Everything is computed in float32: whether two scores are equal decides where a token goes. A choice that was made once is
remembered under the name CHOICE, which all remat policies keep: computed again, rounding could make another one, and what was
kept of the first would belong to other tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.sharding import all_reduce

CHOICE = "expert_choice"
COLUMNS = ("balance_loss", "z_loss", "entropy", "dropped")  # of a layer's statistics, before the load of each expert


class Routed(NamedTuple):
    """What becomes of each token."""

    chosen_BTk: jax.Array  # int32; of padding the number of experts, which is nobody
    share_BTk: jax.Array  # f32: by what each chosen expert's output is multiplied
    statistics: jax.Array  # f32 (4 + E,): COLUMNS with no token dropped, then the share of all choices that fell on each expert


def route(
    logits_BTE: jax.Array,
    bias_E: jax.Array | None,
    real_BT: jax.Array,
    *,
    k: int,
    router: str,
    renormalize: bool,
    over: tuple[str, ...],
) -> Routed:
    """The k experts of each token.

    Args:
      logits_BTE: f32, of the router.
      bias_E: added to the scores for the choice alone (Wang et al. 2024, arXiv:2408.15664).
      real_BT: bool, False for padding: it goes nowhere and counts nowhere.
      router: "softmax" (scores of a token sum to 1) or "sigmoid" (each score by itself).
      renormalize: the scores of the chosen are divided by their sum.
      over: mesh axes along which devices hold other tokens.

    The statistics are means over the real tokens of all devices. The load-balancing loss is E sum_e f_e P_e (Fedus et al.
    2021, arXiv:2101.03961, equation 4, there for k = 1): f_e is the share of the choices that fell on expert e, P_e the mean
    score, as a share of the token's scores. It is 1 where loads are even, and E / k at most. The z-loss is the mean of
    log(sum exp(logits))^2 (Zoph et al. 2022, arXiv:2202.08906, equation 5). The entropy is that of the shares, in nats.
    """
    E = logits_BTE.shape[-1]
    scores_BTE = jax.nn.softmax(logits_BTE) if router == "softmax" else jax.nn.sigmoid(logits_BTE)
    ranked_BTE = jax.lax.stop_gradient(scores_BTE if bias_E is None else scores_BTE + bias_E[None, None])
    best_BTk = jax.lax.top_k(ranked_BTE, k)[1]
    chosen_BTk = checkpoint_name(jnp.where(real_BT[:, :, None], best_BTk, E), CHOICE)
    is_chosen_BTkE = chosen_BTk[..., None] == jnp.arange(E)[None, None, None]
    # As a sum, whose gradient is one too; that of a look-up would be added up in memory.
    share_BTk = jnp.sum(jnp.where(is_chosen_BTkE, scores_BTE[:, :, None], 0.0), -1)
    if renormalize:
        share_BTk = _of_sum(share_BTk)

    real_BT1 = real_BT[:, :, None].astype(jnp.float32)
    tokens_in_all = jnp.maximum(all_reduce(real_BT1.sum(), over), 1.0)

    def mean(x_BTn: jax.Array) -> jax.Array:
        return all_reduce(jnp.sum(x_BTn * real_BT1, axis=(0, 1)), over) / tokens_in_all

    load_E = mean(jnp.sum(is_chosen_BTkE, axis=2).astype(jnp.float32)) / k
    part_BTE = scores_BTE if router == "softmax" else _of_sum(scores_BTE)
    balance = E * jnp.sum(jax.lax.stop_gradient(load_E) * mean(part_BTE))
    z = mean(jax.nn.logsumexp(logits_BTE, axis=-1, keepdims=True) ** 2)[0]
    surprise_BTE = -part_BTE * jnp.log(jnp.maximum(part_BTE, jnp.finfo(jnp.float32).tiny))
    entropy = jax.lax.stop_gradient(mean(surprise_BTE).sum())
    head = jnp.stack([balance, z, entropy, jnp.zeros((), jnp.float32)])
    return Routed(chosen_BTk, share_BTk, jnp.concatenate([head, load_E]))


def _of_sum(scores: jax.Array) -> jax.Array:
    """Scores as parts of their sum; those that are all 0, as sigmoids can be, stay so."""
    total = scores.sum(-1, keepdims=True)
    return scores / jnp.where(total > 0, total, 1.0)
