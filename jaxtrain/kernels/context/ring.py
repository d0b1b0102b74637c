"""Attention to keys that are spread over a ring of places (Liu et al. 2023, arXiv:2310.01889), causal work in equal parts.

A place holds an early chunk a and a late chunk b of each row (jaxtrain/context.py). With its own keys it computes three blocks:
a and b on the diagonal, and b against a. With the two chunks of any other place it computes two more, one chunk against one:
b against the other's early chunk, always; and either a against it, where the other place comes before, or b against the
other's late chunk, where it comes after. All other blocks are empty under the causal mask and are not computed. So every
place has the same shapes and the same work, and both blocks run as one call with twice the rows.

Results of blocks are merged by their log-sum-exps in float32. The gradient is written out: with the merged log-sum-exp, each
block's part of it follows from that block alone, where differentiating the merge would need the gradient of log-sum-exps, which
flash kernels do not give. Going backward, gradients of keys and values travel with them, in float32, until they are home.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels.attention import NOTHING, Rows, Spec, implementation
from jaxtrain.kernels.context.split import Split, halves

Pair = tuple[jax.Array, jax.Array]  # (early, late) chunk


class Described(NamedTuple):
    """What the kernel needs to know of each block; all arrays have rows first."""

    diagonal: Any  # rows of a, then rows of b
    behind: Any  # b against a
    others: tuple[Any, ...]  # against each other place, by distance: rows of the first block, then of the second


def describe(rows: Rows, spec: Spec, kernel: str, split: Split) -> Described:
    """From the rows of this place's tokens. Those of other places are gathered here, once for all layers."""
    block = functools.partial(implementation(kernel).describe_block, spec=spec)
    own = (rows.q_segments, rows.q_positions)
    (a_segments, b_segments), (a_positions, b_positions) = halves(own[0]), halves(own[1])
    early, late = (a_segments, a_positions), (b_segments, b_positions)
    both = tuple(jnp.concatenate(pair, axis=0) for pair in zip(early, late, strict=True))
    everyone = [jax.lax.all_gather(x, split.axis, axis_index_groups=split.rings) for x in own]
    others = []
    for distance in range(1, split.context.ring):
        theirs = [_of(x, distance, split) for x in everyone]
        blocks = [_blocks(x, halves(y), distance, split) for x, y in zip((halves(own[0]), halves(own[1])), theirs, strict=True)]
        (q_segments, kv_segments), (q_positions, kv_positions) = blocks
        others.append(block(Rows(q_segments, q_positions, kv_segments, kv_positions), diagonal=False))
    return Described(block(Rows(*both, *both), diagonal=True), block(Rows(*late, *early), diagonal=False), tuple(others))


def _of(everyone: jax.Array, distance: int, split: Split) -> jax.Array:
    """The part, of an array gathered over the places, of the place at this distance before."""
    place = (split.place - distance) % split.context.ring
    return jax.lax.dynamic_index_in_dim(everyone, place, axis=0, keepdims=False)


def _earlier(distance: int, split: Split) -> jax.Array:
    """Whether the place at this distance comes before in the text, and not around the ring."""
    return split.place >= distance


def _blocks(mine: Pair, theirs: Pair, distance: int, split: Split) -> Pair:
    """(queries, keys) of the two blocks with another place, rows of the second after those of the first."""
    earlier = _earlier(distance, split)
    queries = jnp.concatenate([mine[1], jnp.where(earlier, mine[0], mine[1])], axis=0)
    return queries, _keys(theirs, distance, split)


def _keys(theirs: Pair, distance: int, split: Split) -> jax.Array:
    return jnp.concatenate([theirs[0], jnp.where(_earlier(distance, split), theirs[0], theirs[1])], axis=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, described: Described, spec: Spec, kernel: str, split: Split
) -> jax.Array:
    """(B, 2 C, N, H) of this place's two chunks against all that they see, in q's dtype."""
    return _forward(q, k, v, described, spec, kernel, split)[0]


def merge(out: jax.Array, lse: jax.Array, other: jax.Array, other_lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two outputs for the same queries, each normalised over its own keys, as one over both; all f32.

    out: (B, T, N, H). lse: (B, N, T), log of the sum that out was divided by.
    """
    both = jnp.logaddexp(lse, other_lse)
    share, rest = (jnp.swapaxes(jnp.exp(x - both), 1, 2)[..., None] for x in (lse, other_lse))
    return out * share + other.astype(jnp.float32) * rest, both


def _forward(q, k, v, described, spec, kernel, split):
    block = functools.partial(implementation(kernel).block_forward, spec=spec)
    rows = q.shape[0]
    mine, keys, values = halves(q), halves(k), halves(v)
    out, lse = block(*(jnp.concatenate(x, axis=0) for x in (mine, keys, values)), described.diagonal, diagonal=True)
    early = out[:rows].astype(jnp.float32), lse[:rows]
    late = out[rows:].astype(jnp.float32), lse[rows:]
    late = merge(*late, *block(mine[1], keys[0], values[0], described.behind, diagonal=False))
    for distance, (their_k, their_v) in _travelling(k, v, split):
        queries, its_keys = _blocks(mine, halves(their_k), distance, split)
        its_values = _keys(halves(their_v), distance, split)
        out, lse = block(queries, its_keys, its_values, described.others[distance - 1], diagonal=False)
        earlier = _earlier(distance, split)
        late = merge(*late, out[:rows], lse[:rows])
        early = merge(*early, out[rows:], jnp.where(earlier, lse[rows:], NOTHING))
        late = merge(*late, out[rows:], jnp.where(earlier, NOTHING, lse[rows:]))
    out = jnp.concatenate([early[0], late[0]], axis=1).astype(q.dtype)
    return out, jnp.concatenate([early[1], late[1]], axis=2)


def _travelling(k: jax.Array, v: jax.Array, split: Split):
    """(distance, (k, v)) of each other place: gathered at once, or passed on around the ring one step ahead of their use."""
    if split.context.gathered:
        everyone = [jax.lax.all_gather(x, split.axis, axis_index_groups=split.rings) for x in (k, v)]
        for distance in range(1, split.context.ring):
            yield distance, tuple(_of(x, distance, split) for x in everyone)
    else:
        for distance in range(1, split.context.ring):
            k, v = split.around(k), split.around(v)
            yield distance, (k, v)


def _attention_fwd(q, k, v, described, spec, kernel, split):
    out, lse = _forward(q, k, v, described, spec, kernel, split)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, described, out, lse)


def _attention_bwd(spec, kernel, split, residuals, do):
    q, k, v, described, out, lse = residuals
    block = functools.partial(implementation(kernel).block_backward, spec=spec)
    rows, chunk = q.shape[0], q.shape[1] // 2
    mine, outs, dos = halves(q), halves(out), halves(do)
    lses = lse[:, :, :chunk], lse[:, :, chunk:]

    def both(pair: Pair) -> jax.Array:
        return jnp.concatenate(pair, axis=0)

    def chunks(x: jax.Array) -> list[jax.Array]:
        x = x.astype(jnp.float32)
        return [x[:rows], x[rows:]]

    keys, values = halves(k), halves(v)
    parts = block(both(mine), both(keys), both(values), both(outs), both(lses), both(dos), described.diagonal, diagonal=True)
    dq, dk, dv = (chunks(x) for x in parts)
    parts = block(mine[1], keys[0], values[0], outs[1], lses[1], dos[1], described.behind, diagonal=False)
    dq[1], dk[0], dv[0] = (x + y.astype(jnp.float32) for x, y in zip((dq[1], dk[0], dv[0]), parts, strict=True))
    home = [jnp.concatenate(x, axis=1) for x in (dk, dv)]  # gradients of the keys and values at hand

    by_place = [home]
    for distance, (their_k, their_v) in _travelling(k, v, split):
        earlier = _earlier(distance, split)
        its_keys, its_values = (_keys(halves(x), distance, split) for x in (their_k, their_v))

        def queries(pair: Pair, earlier: jax.Array = earlier) -> jax.Array:
            return jnp.concatenate([pair[1], jnp.where(earlier, pair[0], pair[1])], axis=0)

        parts = block(
            queries(mine),
            its_keys,
            its_values,
            queries(outs),
            queries(lses),
            queries(dos),
            described.others[distance - 1],
            diagonal=False,
        )
        first, second = chunks(parts[0])
        dq[0] = dq[0] + jnp.where(earlier, second, 0.0)
        dq[1] = dq[1] + first + jnp.where(earlier, 0.0, second)
        theirs = []
        for x in parts[1:]:
            first, second = chunks(x)
            theirs.append(jnp.concatenate([first + jnp.where(earlier, second, 0.0), jnp.where(earlier, 0.0, second)], axis=1))
        if split.context.gathered:
            by_place.append(theirs)
        else:
            home = [split.around(x) + y for x, y in zip(home, theirs, strict=True)]
    if split.context.gathered:
        home = [_returned([parts[i] for parts in by_place], split) for i in (0, 1)]
    else:
        home = [split.around(x) for x in home]
    dq = jnp.concatenate(dq, axis=1).astype(q.dtype)
    return dq, home[0].astype(k.dtype), home[1].astype(v.dtype), None


def _returned(by_distance: list[jax.Array], split: Split) -> jax.Array:
    """Gradients of all places' keys, by the distance of the place, added up where the keys are from."""
    r = split.context.ring
    by_place = jnp.take(jnp.stack(by_distance), (split.place - jnp.arange(r)) % r, axis=0)
    return jax.lax.psum_scatter(by_place, split.axis, scatter_dimension=0, axis_index_groups=split.rings)


attention.defvjp(_attention_fwd, _attention_bwd)
