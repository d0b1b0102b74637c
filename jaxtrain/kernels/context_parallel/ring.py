"""Attention to keys that are sharded over a ring of ranks (Liu et al. 2023, arXiv:2310.01889), with balanced causal work.

A ring rank holds an early chunk a and a late chunk b of each sequence (config/context.py). With its own keys it computes
three blocks: a and b on the diagonal, and b against a. With the chunks of each other rank it computes two blocks. The first is
b against that rank's early chunk. The second is a against that early chunk if the rank is earlier, or else b against that
rank's late chunk. All other blocks are empty under the causal mask. So every rank has the same shapes and the same work, and
both blocks run as one call with twice the rows.

Results of blocks are merged by their log-sum-exps in float32. The backward rule is explicit: with the merged log-sum-exp, each
block's term of the gradient follows from that block alone. Differentiating the merge would need the gradient of log-sum-exps,
which flash kernels lack. In the backward pass, gradients of keys and values go around the ring with the keys and values, in
float32, and end on the rank that owns the keys. If `Context.gathered`, keys and values are all-gathered instead, and their
gradients reduce-scattered (`_reduce_scatter`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels.attention import EMPTY_LSE, Rows, Spec, implementation, sinks
from jaxtrain.kernels.context_parallel.split import Split, halves

Pair = tuple[jax.Array, jax.Array]  # (early, late) chunk
BlockOutput = tuple[jax.Array, jax.Array]  # output (B, T, N, H), and log-sum-exp (B, N, T)


class RingBlocks(NamedTuple):
    """The kernel's description of each block; axis 0 of all arrays is the batch."""

    diagonal: Any  # rows of a, then rows of b
    behind: Any  # b against a
    other_ranks: tuple[Any, ...]  # for each other rank, by distance: rows of the first block, then of the second


def describe(rows: Rows, spec: Spec, kernel: str, split: Split) -> RingBlocks:
    """Return the description of this rank's blocks, for all layers. Segments and positions are gathered over the ring."""
    block = functools.partial(implementation(kernel, spec).describe_block, spec=spec)
    ids = (rows.q_segments, rows.q_positions)
    local = [halves(x) for x in ids]
    gathered = [jax.lax.all_gather(x, split.axis, axis_index_groups=split.rings) for x in ids]
    other_blocks = []
    for distance in range(1, split.context.ring):
        earlier = _is_earlier(distance, split)
        queries = [_block_queries(x, earlier) for x in local]
        keys = [_block_keys(halves(_select_shard(x, distance, split)), earlier) for x in gathered]
        other_blocks.append(block(Rows(*queries, *keys), diagonal=False))
    diagonal_ids, (early, late) = [_join_chunks(x) for x in local], zip(*local, strict=True)
    return RingBlocks(
        block(Rows(*diagonal_ids, *diagonal_ids), diagonal=True),
        block(Rows(*late, *early), diagonal=False),
        tuple(other_blocks),
    )


def _select_shard(gathered: jax.Array, distance: int, split: Split) -> jax.Array:
    """Return the shard of the rank that is `distance` ranks before this rank, from an array gathered over the ring."""
    rank = (split.ring_rank - distance) % split.context.ring
    return jax.lax.dynamic_index_in_dim(gathered, rank, axis=0, keepdims=False)


def _is_earlier(distance: int, split: Split) -> jax.Array:
    """Return whether the ring rank that is `distance` ranks earlier, cyclically, has a lower index than this rank, bool ()."""
    return split.ring_rank >= distance


def _join_chunks(pair: Pair) -> jax.Array:
    return jnp.concatenate(pair, axis=0)


def _block_queries(pair: Pair, earlier: jax.Array) -> jax.Array:
    """Return the queries of the two blocks with another rank (module docstring), joined along the batch.

    earlier: the result of `_is_earlier` for the other rank.
    """
    return jnp.concatenate([pair[1], jnp.where(earlier, pair[0], pair[1])], axis=0)


def _block_keys(pair: Pair, earlier: jax.Array) -> jax.Array:
    """Return the keys of the two blocks with another rank (module docstring), joined along the batch.

    earlier: the result of `_is_earlier` for the other rank.
    """
    return jnp.concatenate([pair[0], jnp.where(earlier, pair[0], pair[1])], axis=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks_N: jax.Array | None,
    described: RingBlocks,
    spec: Spec,
    kernel: str,
    split: Split,
) -> jax.Array:
    """Return attention (B, 2 C, N, H) of this rank's two chunks to all visible keys, in q's dtype."""
    return _forward(q, k, v, sinks_N, described, spec, kernel, split)[0]


def merge(first: BlockOutput, second: BlockOutput) -> BlockOutput:
    """Merge two outputs for the same queries over different keys into the output over all of these keys; f32."""
    (out, lse), (other_out, other_lse) = first, second
    merged_lse = jnp.logaddexp(lse, other_lse)
    weight, other_weight = (jnp.swapaxes(jnp.exp(x - merged_lse), 1, 2)[..., None] for x in (lse, other_lse))
    return out * weight + other_out.astype(jnp.float32) * other_weight, merged_lse


State = tuple[Any, ...]
Step = Callable[[State, int, Any, jax.Array], State]


def _run_ring(step: Step, local: Any, kv: jax.Array, split: Split) -> State:
    """Return the state after `step(state, distance, mine, kv)` for this rank's `kv` (distance 0), then for each other rank's.

    XLA's scheduler assumes that an attention kernel takes almost no time, and would not overlap communication with it. So a
    barrier ties each send to the block that overlaps with it: the send starts with the block, and later blocks wait for the
    send. The barrier includes `local`, because XLA would otherwise compute every step's arrays from `local` before the first
    step.
    """
    ring_size = split.context.ring
    gathered = jax.lax.all_gather(kv, split.axis, axis_index_groups=split.rings) if split.context.gathered else None
    state: State = ()
    for distance in range(ring_size):
        last = distance == ring_size - 1
        next_kv = kv if gathered is not None or last else split.ring_shift(kv)
        state = step(state, distance, local, kv)
        if last:
            return state
        state, local, next_kv, gathered = jax.lax.optimization_barrier((state, local, next_kv, gathered))
        kv = next_kv if gathered is None else _select_shard(gathered, distance + 1, split)
    return state


def _forward(q, k, v, sinks_N, described, spec, kernel, split):
    block: Callable[..., Any] = functools.partial(implementation(kernel, spec).block_forward, spec=spec)
    rows = q.shape[0]

    def step(state: State, distance: int, local: Pair, kv: jax.Array) -> State:
        keys, values = (halves(x) for x in jnp.split(kv, 2, axis=2))
        if distance == 0:
            out, lse = block(_join_chunks(local), _join_chunks(keys), _join_chunks(values), described.diagonal, diagonal=True)
            early, late = (out[:rows].astype(jnp.float32), lse[:rows]), (out[rows:].astype(jnp.float32), lse[rows:])
            return early, merge(late, block(local[1], keys[0], values[0], described.behind, diagonal=False))
        early, late = state
        earlier = _is_earlier(distance, split)
        out, lse = block(
            _block_queries(local, earlier),
            _block_keys(keys, earlier),
            _block_keys(values, earlier),
            described.other_ranks[distance - 1],
            diagonal=False,
        )
        late = merge(late, (out[:rows], lse[:rows]))
        early = merge(early, (out[rows:], jnp.where(earlier, lse[rows:], EMPTY_LSE)))
        return early, merge(late, (out[rows:], jnp.where(earlier, EMPTY_LSE, lse[rows:])))

    early, late = _run_ring(step, halves(q), jnp.concatenate([k, v], axis=2), split)
    out, lse = jnp.concatenate([early[0], late[0]], axis=1), jnp.concatenate([early[1], late[1]], axis=2)
    out, lse = (out, lse) if sinks_N is None else sinks.add_sinks(out, lse, sinks_N)
    return out.astype(q.dtype), lse


def _attention_fwd(q, k, v, sinks_N, described, spec, kernel, split):
    out, lse = _forward(q, k, v, sinks_N, described, spec, kernel, split)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, sinks_N, described, out, lse)


def _attention_bwd(spec, kernel, split, residuals, do):
    q, k, v, sinks_N, described, out, lse = residuals
    block: Callable[..., Any] = functools.partial(implementation(kernel, spec).block_backward, spec=spec)
    rows, chunk = q.shape[0], q.shape[1] // 2
    local = halves(q), halves(out), (lse[:, :, :chunk], lse[:, :, chunk:]), halves(do)

    def split_rows(x: jax.Array) -> Pair:
        x = x.astype(jnp.float32)
        return x[:rows], x[rows:]

    def block_gradients(
        queries: Sequence[jax.Array], keys: jax.Array, values: jax.Array, description: Any, diagonal: bool
    ) -> tuple[Pair, Pair]:
        """Return the gradient of the queries, and one array of the gradients of keys and values, joined along the heads.

        Args:
            queries: q, output, log-sum-exp, and the output's gradient.
            description: the kernel's description of the block (an entry of `RingBlocks`).

        Returns:
            Both arrays, each as a pair, f32. On the diagonal: (rows of a, rows of b). For b against a: (all rows, no rows). For
            another rank: (rows of the first block, rows of the second block).
        """
        q, out, lse, do = queries
        dq, dk, dv = block(q, keys, values, out, lse, do, description, diagonal=diagonal)
        return split_rows(dq), split_rows(jnp.concatenate([dk, dv], axis=2))

    def step(state: State, distance: int, local: Sequence[Pair], kv: jax.Array) -> State:
        keys, values = (halves(x) for x in jnp.split(kv, 2, axis=2))
        if distance == 0:
            (early, late), (near, far) = block_gradients(
                [_join_chunks(x) for x in local], _join_chunks(keys), _join_chunks(values), described.diagonal, True
            )
            (behind, _), (before, _) = block_gradients([x[1] for x in local], keys[0], values[0], described.behind, False)
            return early, late + behind, [jnp.concatenate([near + before, far], axis=1)]
        early, late, kv_grads = state
        earlier = _is_earlier(distance, split)
        sent = kv_grads if split.context.gathered else [split.ring_shift(kv_grads[0])]
        (first, second), (near, far) = block_gradients(
            [_block_queries(x, earlier) for x in local],
            _block_keys(keys, earlier),
            _block_keys(values, earlier),
            described.other_ranks[distance - 1],
            False,
        )
        first, second, near, far, sent = jax.lax.optimization_barrier((first, second, near, far, sent))
        kv_grad = jnp.concatenate([near + jnp.where(earlier, far, 0.0), jnp.where(earlier, 0.0, far)], axis=1)
        kv_grads = [*sent, kv_grad] if split.context.gathered else [sent[0] + kv_grad]
        return early + jnp.where(earlier, second, 0.0), late + first + jnp.where(earlier, 0.0, second), kv_grads

    early, late, kv_grads = _run_ring(step, local, jnp.concatenate([k, v], axis=2), split)
    d_kv = _reduce_scatter(kv_grads, split) if split.context.gathered else split.ring_shift(kv_grads[0])
    dk, dv = jnp.split(d_kv, 2, axis=2)
    dq = jnp.concatenate([early, late], axis=1).astype(q.dtype)
    d_sinks = None if sinks_N is None else sinks.sinks_gradient(sinks_N, out, lse, do)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), d_sinks, None


def _reduce_scatter(by_distance: list[jax.Array], split: Split) -> jax.Array:
    """Reduce-scatter gradients of keys and values to the ranks that own the keys.

    by_distance: item d is this rank's term of the gradients for the keys of the rank d ranks before this rank.
    """
    ring_size = split.context.ring
    by_rank = jnp.take(jnp.stack(by_distance), (split.ring_rank - jnp.arange(ring_size)) % ring_size, axis=0)
    return jax.lax.psum_scatter(by_rank, split.axis, scatter_dimension=0, axis_index_groups=split.rings)


attention.defvjp(_attention_fwd, _attention_bwd)
