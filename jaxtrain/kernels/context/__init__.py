"""Attention over a sequence that is split over devices: the same kernels, and the ways for keys to meet queries.

Inside a shard_map that is manual over the whole mesh each device calls, with its own tokens,

    prepare(rows, spec, kernel, split) -> pytree               once a batch; arrays with rows of the batch first
    attention(q, k, v, prepared, spec, kernel, split, sinks) -> o     (B, T, N, H) of its own tokens to the same

Its tokens are what jaxtrain/context.py says: the two chunks of its place in the ring one after the other, or its part of them
where a Ulysses group divides them. heads.py brings the tokens of a group together, each rank with a part of the heads; ring.py
merges blocks of keys from all places; window.py fetches what a sliding window can reach.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.kernels.attention import Rows, Spec, sinks
from jaxtrain.kernels.context import heads, ring, window
from jaxtrain.kernels.context.split import Split

EQUAL_WIDTHS = ("pallas",)  # kernels whose values are as wide as their keys


def prepare(rows: Rows, spec: Spec, kernel: str, split: Split) -> Any:
    """What this device needs to know of the batch, from the rows of its own tokens; `kernel`: by name."""
    whole = Rows(*(heads.gather(x, split) for x in rows))
    if split.context.ring == 1:
        return sinks.prepare(whole, spec, kernel)
    if window.applies(spec, whole.q_segments.shape[1], split):
        return window.prepare(whole, spec, kernel, split)
    return ring.describe(whole, spec, kernel, split)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prepared: Any,
    spec: Spec,
    kernel: str,
    split: Split,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Return attention of this device's queries to all that they see, as wide as v.

    Values that are narrower than keys are filled up with zeros for kernels that ask for it, and around a ring, which sends keys
    and values as one array. sinks_N: where spec.sinks, of this device's heads.
    """
    q, k, v = heads.trade(q, k, v, split)
    sinks_N = None if sinks_N is None else heads.own(sinks_N, split)
    width = v.shape[-1]
    if width < k.shape[-1] and (split.context.ring > 1 or kernel in EQUAL_WIDTHS):
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[-1] - width)))
    o: jax.Array
    if split.context.ring == 1:
        o = sinks.attention(q, k, v, sinks_N, prepared, spec, kernel)
    elif window.applies(spec, q.shape[1], split):
        o = window.attention(q, k, v, sinks_N, prepared, spec, kernel, split)
    else:
        o = ring.attention(q, k, v, sinks_N, prepared, spec, kernel, split)
    return heads.back(o[..., :width] if o.shape[-1] > width else o, split)
