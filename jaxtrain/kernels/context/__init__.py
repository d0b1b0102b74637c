"""Attention over a sequence that is split over devices: the same kernels, and the ways for keys to meet queries.

Inside a shard_map that is manual over the whole mesh each device calls, with its own tokens,

    prepare(rows, spec, kernel, split) -> pytree               once a batch; arrays with rows of the batch first
    attention(q, k, v, prepared, spec, kernel, split) -> o     (B, T, N, H) of its own tokens to the same

Its tokens are what jaxtrain/context.py says: the two chunks of its place in the ring one after the other, or its part of them
where a Ulysses group divides them. heads.py brings the tokens of a group together, each rank with a part of the heads; ring.py
merges blocks of keys from all places; window.py fetches what a sliding window can reach.
"""

from typing import Any

import jax

from jaxtrain.kernels.attention import Rows, Spec, implementation
from jaxtrain.kernels.context import heads, ring, window
from jaxtrain.kernels.context.split import Split


def prepare(rows: Rows, spec: Spec, kernel: str, split: Split) -> Any:
    """What this device needs to know of the batch, from the rows of its own tokens; `kernel`: by name."""
    whole = Rows(*(heads.gather(x, split) for x in rows))
    if split.context.ring == 1:
        return implementation(kernel).prepare(whole, spec)
    if window.applies(spec, whole.q_segments.shape[1], split):
        return window.prepare(whole, spec, kernel, split)
    return ring.describe(whole, spec, kernel, split)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, prepared: Any, spec: Spec, kernel: str, split: Split) -> jax.Array:
    """Attention of this device's queries to all that they see."""
    q, k, v = heads.trade(q, k, v, split)
    o: jax.Array
    if split.context.ring == 1:
        o = implementation(kernel).attention(q, k, v, prepared, spec)
    elif window.applies(spec, q.shape[1], split):
        o = window.attention(q, k, v, prepared, spec, kernel, split)
    else:
        o = ring.attention(q, k, v, prepared, spec, kernel, split)
    return heads.back(o, split)
