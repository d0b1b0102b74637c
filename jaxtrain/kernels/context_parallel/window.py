"""A sliding window over a sequence in chunks: each chunk gets a halo, the tokens before it that its window reaches.

Halo and chunk together are a contiguous part of the sequence. So a kernel for one device handles documents, window and
gradients. The halo's queries are zeros, and their output is dropped. In zigzag order the previous chunk is on this rank or on a
neighbouring rank.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.kernels.attention import Rows, Spec, sinks
from jaxtrain.kernels.context_parallel.split import Split, halves


def prepare(rows: Rows, spec: Spec, kernel: str, split: Split) -> Any:
    """Return the kernel's description of both chunks with their halos: rows of the early chunk, then of the late chunk."""
    # Segments are shifted by one, because the halo before the first chunk is filled with zeros.
    segments = _add_halo(rows.q_segments + 1, spec, split)
    segments = jnp.where(segments == 0, spec.max_segments + 1, segments - 1)
    positions = _add_halo(rows.q_positions, spec, split)
    return sinks.prepare(Rows(segments, positions, segments, positions), spec.with_halo(), kernel)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks_N: jax.Array | None,
    prepared: Any,
    spec: Spec,
    kernel: str,
    split: Split,
) -> jax.Array:
    """Return attention (B, 2 C, N, H) of this rank's two chunks to the keys within the window."""
    chunk = q.shape[1] // 2
    halo = spec.halo(chunk, split.context.ring)
    chunks = jnp.concatenate(halves(q), axis=0)
    padded = jnp.pad(chunks, ((0, 0), (halo, 0), (0, 0), (0, 0)))
    keys, values = _add_halo(k, spec, split), _add_halo(v, spec, split)
    out = sinks.attention(padded, keys, values, sinks_N, prepared, spec.with_halo(), kernel)[:, halo:]
    return jnp.concatenate(jnp.split(out, 2, axis=0), axis=1)


def _add_halo(x: jax.Array, spec: Spec, split: Split) -> jax.Array:
    """Return (B, 2 C, ...) as (2 B, halo + C, ...): early chunks with the tokens before them, then late chunks with theirs."""
    chunk = x.shape[1] // 2
    halo = spec.halo(chunk, split.context.ring)
    early, late = halves(x)
    pieces = [jnp.concatenate([early, late], axis=0)]
    for _ in range(-(-halo // chunk)):
        early, late = _previous_chunks(early, late, split)
        pieces.insert(0, jnp.concatenate([early, late], axis=0))
    row = jnp.concatenate(pieces, axis=1)
    return row[:, row.shape[1] - halo - chunk :]


def _previous_chunks(early: jax.Array, late: jax.Array, split: Split) -> tuple[jax.Array, jax.Array]:
    """Return the chunk before each of this rank's chunks; zeros before the first chunk.

    A sequence consists of the early chunks of ring ranks 0 ... r-1, then of the late chunks of ring ranks r-1 ... 0.
    """
    earlier = jnp.where(split.ring_rank == 0, 0, split.ring_shift(early))
    return earlier, jnp.where(split.ring_rank == split.context.ring - 1, early, split.ring_shift(late, by=-1))
