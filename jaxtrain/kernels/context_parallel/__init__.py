"""Attention over a sequence that is sharded over devices, with the kernels of kernels/attention: Ulysses, ring, window halos.

Inside a shard_map that is manual over the whole mesh, each device calls these functions with its own tokens:

    prepare(rows, spec, kernel, split) -> pytree               once a batch; axis 0 of its arrays is the batch
    attention(q, k, v, prepared, spec, kernel, split, sinks) -> o     (B, T, N, H), for the device's own tokens

A ring rank has two chunks of each sequence (config/context.py). The devices of a Ulysses group shard the chunks of one ring
rank. split.py gathers the tokens of a group, each rank with some of the heads. ring.py merges blocks of keys from all ring
ranks. window.py fetches the tokens within a sliding window.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.kernels.attention import Rows, Spec, sinks
from jaxtrain.kernels.context_parallel import ring, window
from jaxtrain.kernels.context_parallel.split import Split

EQUAL_WIDTHS = ("pallas",)  # kernels that need values as wide as keys


def prepare(rows: Rows, spec: Spec, kernel: str, split: Split) -> Any:
    """Return this device's description of the batch, from the rows of its own tokens. kernel: the kernel's name."""
    gathered = Rows(*(split.gather(x) for x in rows))
    if split.context.ring == 1:
        return sinks.prepare(gathered, spec, kernel)
    if spec.slides(gathered.q_segments.shape[1] * split.context.ring):
        return window.prepare(gathered, spec, kernel, split)
    return ring.describe(gathered, spec, kernel, split)


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
    """Return attention of this device's queries to all visible keys, with the head size of v.

    Values narrower than keys are padded with zeros for the kernels in EQUAL_WIDTHS, and in a ring, which sends keys and values
    as one array. sinks_N: the sinks of the heads in q; None unless `spec.sinks`.
    """
    q, k, v = split.shard_heads(q, k, v)
    sinks_N = None if sinks_N is None else split.local_heads(sinks_N)
    width = v.shape[-1]
    if width < k.shape[-1] and (split.context.ring > 1 or kernel in EQUAL_WIDTHS):
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[-1] - width)))
    out: jax.Array
    if split.context.ring == 1:
        out = sinks.attention(q, k, v, sinks_N, prepared, spec, kernel)
    elif spec.slides(q.shape[1] * split.context.ring):
        out = window.attention(q, k, v, sinks_N, prepared, spec, kernel, split)
    else:
        out = ring.attention(q, k, v, sinks_N, prepared, spec, kernel, split)
    return split.shard_tokens(out[..., :width] if out.shape[-1] > width else out)
