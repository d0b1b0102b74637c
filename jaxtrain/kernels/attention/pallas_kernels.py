"""What one program of each flash attention kernel does, in Pallas; pallas.py calls them.

Of arrays with heads a program is given its own row and head, of the others its row; which tile is its own follows from its
number. Arrays are whole rows: a program loads from them tile by tile.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxtrain.kernels.attention import NOTHING, Spec

LOG2E = math.log2(math.e)
FORWARD, QUERIES, KEYS = "forward", "backward_q", "backward_kv"  # the kernels

Belonging = tuple[jax.Array, jax.Array]  # segments and positions of the tokens of a tile


class Tile(NamedTuple):
    """Of one kernel: tokens of a tile, warps of a program, and how many tiles are on their way to it at a time."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is compiled for."""

    spec: Spec
    tile: Tile
    T: int
    S: int
    group: int

    @property
    def scale(self) -> float:
        """Of scores."""
        return self.spec.head_dim**-0.5


def width(head_dim: int) -> int:
    """Of a tile. Triton wants a power of two, and 16 numbers at least to sum over."""
    return max(16, pl.next_power_of_2(head_dim))


def _load(ref: Any, tile: Any, tokens: int, whole: int, static: Static, head: Any = None) -> jax.Array:
    """A tile (tokens, H) of an array of `whole` tokens; zeros beyond its end and beyond head_dim."""
    rows = pl.ds(tile * tokens, tokens)
    inside = _inside(tile, tokens, whole, static)
    at = ref.at[rows, :] if head is None else ref.at[rows, head, :]
    return triton.load(at) if inside is None else triton.load(at, mask=inside, other=0.0)


def _load_numbers(ref: Any, tile: Any, tokens: int, whole: int, head: Any = None) -> jax.Array:
    """One number a token, of an array of `whole` tokens; zeros beyond its end."""
    rows = pl.ds(tile * tokens, tokens)
    at = ref.at[rows] if head is None else ref.at[head, rows]
    return triton.load(at) if whole % tokens == 0 else triton.load(at, mask=_within(tile, tokens, whole), other=0.0)


def _store(ref: Any, value: jax.Array, tile: Any, tokens: int, whole: int, static: Static) -> None:
    inside = _inside(tile, tokens, whole, static)
    triton.store(ref.at[pl.ds(tile * tokens, tokens), :], value.astype(ref.dtype), mask=inside)


def _within(tile: Any, tokens: int, whole: int) -> jax.Array:
    return tile * tokens + jnp.arange(tokens) < whole


def _inside(tile: Any, tokens: int, whole: int, static: Static) -> jax.Array | None:
    """Which places of a tile (tokens, H) are in the array; None: all."""
    H, out = static.spec.head_dim, None
    shape = tokens, width(H)
    if width(H) != H:
        out = jnp.broadcast_to((jnp.arange(width(H)) < H)[None, :], shape)
    if whole % tokens:
        rows = jnp.broadcast_to(_within(tile, tokens, whole)[:, None], shape)
        out = rows if out is None else out & rows
    return out


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """A product in f32; float32 operands stay float32, where a GPU would round them to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _scores(a: jax.Array, b: jax.Array, visible: jax.Array | None, static: Static) -> tuple[jax.Array, jax.Array | None]:
    """a b^T as scores times log2(e), -inf where masked; and what the soft cap leaves of their gradient, None for all."""
    scores, slope, cap = _dot(a, b, (1, 1)), None, static.spec.softcap
    if cap:
        squashed = jnp.tanh(scores * (static.scale / cap))
        scores, slope = squashed * (cap * LOG2E), 1 - squashed * squashed
    else:
        scores *= static.scale * LOG2E
    return scores if visible is None else jnp.where(visible, scores, -jnp.inf), slope


def _visible(of_queries: Belonging, of_keys: Belonging, spec: Spec, turned: bool = False) -> jax.Array:
    """bool (queries, keys), turned: (keys, queries), from the segments and positions of each."""
    q_axis, kv_axis = (0, 1) if turned else (1, 0)
    (q_segments, q_positions), (kv_segments, kv_positions) = (
        [jnp.expand_dims(x, axis) for x in of] for of, axis in ((of_queries, q_axis), (of_keys, kv_axis))
    )
    distance = q_positions - kv_positions
    seen = (q_segments == kv_segments) & (distance >= 0)
    return seen & (distance < spec.window) if spec.window else seen


def _belonging(segments: Any, positions: Any, tile: Any, tokens: int) -> Belonging:
    rows = pl.ds(tile * tokens, tokens)
    return triton.load(segments.at[rows]), triton.load(positions.at[rows])


def _visit(visits: Any, mine: Any, body: Callable[[Any, Any, bool], Any], carry: Any) -> Any:
    """`body(tile, carry, masked)` over the tiles to visit: those that need a mask, then those that do not."""
    start, full_start, full_stop, stop = (visits[mine, i] for i in range(4))
    ahead = full_start - start

    def with_mask(i, carry):
        return body(jnp.where(i < ahead, start + i, full_stop + i - ahead), carry, True)

    carry = jax.lax.fori_loop(0, ahead + stop - full_stop, with_mask, carry)
    return jax.lax.fori_loop(full_start, full_stop, lambda i, carry: body(i, carry, False), carry)


def _last_first() -> jax.Array:
    """The tile of queries of this program. The last ones see most, and what takes long should start early."""
    return pl.num_programs(0) - 1 - pl.program_id(0)


def _forward_kernel(
    visits, q_segments, q_positions, kv_segments, kv_positions, q_ref, k_ref, v_ref, out_ref, lse_ref, *, static
):
    """The running largest score (in log2) and sum of each query are kept, and what is summed so far is scaled to them."""
    mine, (queries, keys, *_), H = _last_first(), static.tile, width(static.spec.head_dim)
    q = _load(q_ref, mine, queries, static.T, static)
    of_queries = _belonging(q_segments, q_positions, mine, queries)

    def body(j, carry, masked):
        out, top, total = carry
        k = _load(k_ref, j, keys, static.S, static)
        seen = _visible(of_queries, _belonging(kv_segments, kv_positions, j, keys), static.spec) if masked else None
        scores, _ = _scores(q, k, seen, static)
        new_top = jnp.maximum(top, scores.max(1))
        p = jnp.exp2(scores - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        v = _load(v_ref, j, keys, static.S, static)
        return out * shrink[:, None] + _dot(p.astype(v.dtype), v, (1, 0)), new_top, total * shrink + p.sum(1)

    # Scores that are masked are -inf, and this is finite: so the weight of a masked one is 0 from the first tile on.
    start = jnp.zeros((queries, H), jnp.float32), jnp.full((queries,), NOTHING, jnp.float32), jnp.zeros((queries,), jnp.float32)
    out, top, total = _visit(visits, mine, body, start)
    sees = total > 0
    total = jnp.where(sees, total, 1.0)
    _store(out_ref, out / total[:, None], mine, queries, static.T, static)
    lse = jnp.where(sees, top / LOG2E + jnp.log(total), NOTHING)
    within = None if static.T % queries == 0 else _within(mine, queries, static.T)
    triton.store(lse_ref.at[pl.ds(mine * queries, queries)], lse, mask=within)


Factors = tuple[jax.Array, jax.Array]


def _weights_and_gradient(
    of_scores: Factors, of_weights: Factors, lse: jax.Array, delta: jax.Array, seen: jax.Array | None, static: Static
) -> tuple[jax.Array, jax.Array]:
    """p = exp(s - lse), and ds = p (dp - delta) without the scale of s; f32, (queries, keys) or (keys, queries).

    of_scores, of_weights: the factors of s and dp, q and k, do and v, in the order of the result's axes.
    """
    scores, slope = _scores(*of_scores, seen, static)
    p = jnp.exp2(scores - lse * LOG2E)
    ds = p * (_dot(*of_weights, (1, 1)) - delta)
    return p, ds if slope is None else ds * slope


def _queries_kernel(
    visits,
    q_segments,
    q_positions,
    kv_segments,
    kv_positions,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    dq_ref,
    *,
    static,
):
    """dq = ds k."""
    mine, (queries, keys, *_) = _last_first(), static.tile
    q, do = (_load(ref, mine, queries, static.T, static) for ref in (q_ref, do_ref))
    lse, delta = (_load_numbers(ref, mine, queries, static.T) for ref in (lse_ref, delta_ref))
    of_queries = _belonging(q_segments, q_positions, mine, queries)

    def body(j, dq, masked):
        k, v = (_load(ref, j, keys, static.S, static) for ref in (k_ref, v_ref))
        seen = _visible(of_queries, _belonging(kv_segments, kv_positions, j, keys), static.spec) if masked else None
        _, ds = _weights_and_gradient((q, k), (do, v), lse[:, None], delta[:, None], seen, static)
        return dq + _dot(ds.astype(k.dtype), k, (1, 0))

    dq = _visit(visits, mine, body, jnp.zeros(q.shape, jnp.float32))
    _store(dq_ref, dq * static.scale, mine, queries, static.T, static)


def _keys_kernel(
    visits,
    q_segments,
    q_positions,
    kv_segments,
    kv_positions,
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    dk_ref,
    dv_ref,
    *,
    static,
):
    """dk = ds^T q and dv = p^T do, summed over the heads of the group.

    Scores are made as (keys, queries), so that a tensor core takes p^T and ds^T from the registers they are in.
    """
    mine, (queries, keys, *_) = pl.program_id(0), static.tile
    k, v = (_load(ref, mine, keys, static.S, static) for ref in (k_ref, v_ref))
    of_keys = _belonging(kv_segments, kv_positions, mine, keys)

    def one_head(head, carry):
        def body(i, carry, masked):
            dk, dv = carry
            q, do = (_load(ref, i, queries, static.T, static, head) for ref in (q_ref, do_ref))
            lse, delta = (_load_numbers(ref, i, queries, static.T, head) for ref in (lse_ref, delta_ref))
            seen = None
            if masked:
                seen = _visible(_belonging(q_segments, q_positions, i, queries), of_keys, static.spec, turned=True)
            p, ds = _weights_and_gradient((k, q), (v, do), lse[None, :], delta[None, :], seen, static)
            return dk + _dot(ds.astype(q.dtype), q, (1, 0)), dv + _dot(p.astype(do.dtype), do, (1, 0))

        return _visit(visits, mine, body, carry)

    zeros = jnp.zeros(k.shape, jnp.float32)
    carry = (zeros, zeros)
    dk, dv = jax.lax.fori_loop(0, static.group, one_head, carry) if static.group > 1 else one_head(None, carry)
    _store(dk_ref, dk * static.scale, mine, keys, static.S, static)
    _store(dv_ref, dv, mine, keys, static.S, static)


KERNELS: dict[str, Callable[..., None]] = {FORWARD: _forward_kernel, QUERIES: _queries_kernel, KEYS: _keys_kernel}
