"""Ulysses (Jacobs et al. 2023, arXiv:2309.14509): all-to-alls gather tokens and shard heads; the inverse follows attention."""

import jax
import jax.numpy as jnp

from jaxtrain.kernels.context_parallel.split import Split


def gather(x_BT: jax.Array, split: Split) -> jax.Array:
    """Return the tokens of a Ulysses group in rank order, from this rank's tokens (B, T)."""
    if split.context.ulysses == 1:
        return x_BT
    return jax.lax.all_gather(x_BT, split.axis, axis=1, tiled=True, axis_index_groups=split.groups)


def shard_heads(q: jax.Array, k: jax.Array, v: jax.Array, split: Split) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return this rank's share of the heads for all tokens of its Ulysses group, from all heads of its own tokens.

    If there are fewer key/value heads than ranks in the group, the key/value heads are repeated first. So each rank receives
    the key/value head of its query heads.
    """
    u = split.context.ulysses
    if u == 1:
        return q, k, v
    repeats = max(1, u // k.shape[2])
    if repeats > 1:
        k, v = jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2)
    return _to_heads(q, split), _to_heads(k, split), _to_heads(v, split)


def _to_heads(x: jax.Array, split: Split) -> jax.Array:
    return jax.lax.all_to_all(x, split.axis, split_axis=2, concat_axis=1, tiled=True, axis_index_groups=split.groups)


def local_heads(x_N: jax.Array, split: Split) -> jax.Array:
    """Return the elements of x_N for the heads that this rank has after `shard_heads`. x_N: one number for each head."""
    u = split.context.ulysses
    if u == 1:
        return x_N
    count = x_N.shape[0] // u
    return jax.lax.dynamic_slice_in_dim(x_N, jax.lax.axis_index(split.axis) % u * count, count)


def shard_tokens(o: jax.Array, split: Split) -> jax.Array:
    """Invert `shard_heads`: return all heads of this rank's own tokens. o: the output of attention."""
    if split.context.ulysses == 1:
        return o
    return jax.lax.all_to_all(o, split.axis, split_axis=1, concat_axis=2, tiled=True, axis_index_groups=split.groups)
