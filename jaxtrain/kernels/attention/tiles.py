"""The tiles of the (queries, keys) square that a flash kernel visits, from the segments and positions of each tile.

Tokens have an order: by document, then by position. Under causal and window masks a query attends to an interval of this order.
So a tile of queries attends only to keys between the start of its first query's interval and the end of its last query's
interval. A tile of keys outside of this range is empty: no query of the tile attends to it. The range follows from the first
and the last token of each tile alone. So it is correct for tokens in any order along the row. Training packs rows in order.
Then empty tiles are visited only at the corners of the mask.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.kernels.attention import Rows, Spec

MOST = 2**30  # larger than all segments and positions
NEVER = -1  # segment of a key that no query attends to


class Ends(NamedTuple):
    """The first and the last token of each tile, padding ignored, in the order of the module's docstring; int32 (B, tiles)."""

    first_segment: jax.Array
    first_position: jax.Array
    last_segment: jax.Array
    last_position: jax.Array
    one_document: jax.Array  # bool: all tokens of the tile belong to one document, without padding


def num_tiles(tokens: int, tile: int) -> int:
    """Return the number of tiles for `tokens` tokens."""
    return -(-tokens // tile)


def pad_to_tiles(x_BT: jax.Array, tile: int, value: int) -> jax.Array:
    """Return an array with axis 1 padded with `value` to whole tiles."""
    T = x_BT.shape[1]
    return jnp.pad(x_BT, ((0, 0), (0, num_tiles(T, tile) * tile - T)), constant_values=value)


def ends(segments_BT: jax.Array, positions_BT: jax.Array, tile: int) -> Ends:
    """Return the first and last tokens of tiles of `tile` tokens; the last tile is padded."""
    B = segments_BT.shape[0]
    segments, positions = (pad_to_tiles(x, tile, 0).reshape(B, -1, tile) for x in (segments_BT, positions_BT))
    real = segments > 0
    first = jnp.where(real, segments, MOST).min(-1)
    last = jnp.where(real, segments, -1).max(-1)
    return Ends(
        first,
        jnp.where(segments == first[..., None], positions, MOST).min(-1),
        last,
        jnp.where(segments == last[..., None], positions, -1).max(-1),
        real.all(-1) & (first == last),
    )


def visits(rows: Rows, spec: Spec, q_tile: int, kv_tile: int, by_keys: bool = False) -> jax.Array:
    """Return the tiles of keys to visit for each tile of queries, int32 (B, tiles, 4).

    The last axis is (start, full_start, full_stop, stop). Tiles outside of start:stop are empty; tiles in full_start:full_stop
    need no mask.

    Args:
      q_tile, kv_tile: tokens of a tile of queries and of keys.
      by_keys: return the tiles of queries to visit for each tile of keys instead.
    """
    q, kv = (
        Ends(*(jnp.expand_dims(x, axis) for x in ends(segments, positions, tile)))
        for segments, positions, tile, axis in (
            (rows.q_segments, rows.q_positions, q_tile, 2),
            (rows.kv_segments, rows.kv_positions, kv_tile, 1),
        )
    )

    def before(segment, position, other_segment, other_position):
        """Return whether the first token precedes the other token or equals it, in the order of the module's docstring."""
        return (segment < other_segment) | ((segment == other_segment) & (position <= other_position))

    reach = q.first_position - (spec.window - 1 if spec.window else MOST)
    nonempty = before(kv.first_segment, kv.first_position, q.last_segment, q.last_position)
    nonempty &= before(q.first_segment, reach, kv.last_segment, kv.last_position)
    full = q.one_document & kv.one_document & (q.first_segment == kv.first_segment) & (kv.last_position <= q.first_position)
    if spec.window:
        full &= q.last_position - kv.first_position < spec.window
    return _spans(jnp.swapaxes(nonempty, 1, 2), jnp.swapaxes(full, 1, 2)) if by_keys else _spans(nonempty, full)


def _spans(nonempty: jax.Array, full: jax.Array) -> jax.Array:
    """Return (start, full_start, full_stop, stop): the range of True in `nonempty`, and the first run of True in `full`.

    The last axis of `nonempty` and of `full` counts the tiles that a program could visit.
    """
    total = nonempty.shape[-1]
    index = jnp.arange(total, dtype=jnp.int32)[None, None]
    stop = jnp.where(nonempty, index + 1, 0).max(-1)
    start = jnp.minimum(jnp.where(nonempty, index, total).min(-1), stop)
    full_start = jnp.where(full, index, total).min(-1)
    full_stop = jnp.where(~full & (index > full_start[..., None]), index, total).min(-1)
    return jnp.stack([start, jnp.minimum(full_start, stop), jnp.minimum(full_stop, stop), stop], axis=-1)
