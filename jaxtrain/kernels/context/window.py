"""A sliding window over a sequence in chunks: each chunk is given the tokens before it that its window reaches, no more.

Chunk and halo together are a piece of the row as it stood, so the plain kernel does the rest: documents, window, gradients.
The halo's own queries are rows of zeros, whose output is dropped. In zigzag order the chunk before is at a neighbour's.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.kernels.attention import Rows, Spec, sinks
from jaxtrain.kernels.context.split import Split, halves

ALIGNED = 128  # tokens; kernels work in tiles of so many


def applies(spec: Spec, tokens: int, split: Split) -> bool:
    """Whether the window is shorter than a row. `tokens`: of one place, both chunks."""
    return 0 < spec.window < tokens * split.context.ring


def inner_spec(spec: Spec) -> Spec:
    """What the plain kernel is asked for. What lies before the first chunk counts as one document more."""
    return dataclasses.replace(spec, packed=True, max_segments=spec.max_segments + 1)


def prepare(rows: Rows, spec: Spec, kernel: str, split: Split) -> Any:
    """What the kernel needs to know of both chunks with their halos; rows of the early chunk first, then of the late one."""
    # Shifted by one, since zeros are what arrives from before the first chunk.
    segments = _with_halo(rows.q_segments + 1, spec, split)
    segments = jnp.where(segments == 0, spec.max_segments + 1, segments - 1)
    positions = _with_halo(rows.q_positions, spec, split)
    return sinks.prepare(Rows(segments, positions, segments, positions), inner_spec(spec), kernel)


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
    """Return attention (B, 2 C, N, H) of this place's two chunks."""
    chunk = q.shape[1] // 2
    halo = halo_tokens(spec, chunk, split)
    both = jnp.concatenate(halves(q), axis=0)
    padded = jnp.pad(both, ((0, 0), (halo, 0), (0, 0), (0, 0)))
    keys, values = _with_halo(k, spec, split), _with_halo(v, spec, split)
    o = sinks.attention(padded, keys, values, sinks_N, prepared, inner_spec(spec), kernel)[:, halo:]
    return jnp.concatenate(jnp.split(o, 2, axis=0), axis=1)


def halo_tokens(spec: Spec, chunk: int, split: Split) -> int:
    """Tokens before a chunk that are fetched: those in the window's reach, rounded up to whole tiles where chunks are."""
    step = math.gcd(chunk, ALIGNED)
    return min(-(-(spec.window - 1) // step) * step, (2 * split.context.ring - 1) * chunk)


def _with_halo(x: jax.Array, spec: Spec, split: Split) -> jax.Array:
    """(B, 2 C, ...) as (2 B, halo + C, ...): early chunks with what stands before them, then late ones."""
    chunk = x.shape[1] // 2
    halo = halo_tokens(spec, chunk, split)
    early, late = halves(x)
    pieces = [jnp.concatenate([early, late], axis=0)]
    for _ in range(-(-halo // chunk)):
        early, late = _before(early, late, split)
        pieces.insert(0, jnp.concatenate([early, late], axis=0))
    row = jnp.concatenate(pieces, axis=1)
    return row[:, row.shape[1] - halo - chunk :]


def _before(early: jax.Array, late: jax.Array, split: Split) -> tuple[jax.Array, jax.Array]:
    """What the places before have, along the row: 0, 1, ... r-1 by their early chunks, then back to 0 by their late ones."""
    earlier = jnp.where(split.place == 0, 0, split.around(early))
    return earlier, jnp.where(split.place == split.context.ring - 1, early, split.around(late, by=-1))
