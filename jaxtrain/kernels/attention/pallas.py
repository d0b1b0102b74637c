"""Flash attention (Dao 2023, arXiv:2307.08691) in Pallas: packed documents, windows, grouped queries, soft cap, bf16 and f32.

Three kernels: forward, gradients of queries, gradients of keys and values. Each program of the first two holds a tile of
queries and goes over the tiles of keys that it sees, and of the third holds a tile of keys and goes over those of queries that
see it, of all heads of the group, so that the sum over a group needs no memory. Tiles that hold nothing are not visited
(tiles.py), and tiles that the mask leaves whole are computed without it.

For GPUs it is compiled by Pallas' Triton backend; on CPU Pallas interprets it, which is for tests. Tile sizes follow from
what the assembler makes of them, and were not tuned on a GPU (docs/attention.md).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxtrain.kernels.attention import Hardware, Rows, Spec
from jaxtrain.kernels.attention.pallas_kernels import FORWARD, KERNELS, KEYS, QUERIES, Static, Tile, width
from jaxtrain.kernels.attention.tiles import NEVER, count, padded, visits

LONGEST = 128  # tokens of the longest tile of any kernel; a multiple of all others
LARGEST = 256  # head_dim; above, a tile's accumulator does not fit the registers
PREFIX = "jaxtrain_attention_"  # of the kernels' names


# (bytes of an element, head_dim rounded up) -> tiles of each kernel. Of those tried, the largest that the assembler fits into
# the registers and into shared memory: benchmarks/attention_tiles.py shows what each takes.
TILES: dict[tuple[int, int], dict[str, Tile]] = {
    (2, 64): {FORWARD: Tile(128, 64, 4, 2), QUERIES: Tile(128, 64, 8, 2), KEYS: Tile(32, 128, 8, 2)},
    (2, 128): {FORWARD: Tile(128, 64, 8, 2), QUERIES: Tile(128, 32, 8, 2), KEYS: Tile(64, 64, 8, 2)},
    (2, 256): {FORWARD: Tile(64, 32, 8, 2), QUERIES: Tile(64, 32, 8, 2), KEYS: Tile(32, 64, 8, 2)},
    (4, 64): {FORWARD: Tile(64, 32, 8, 2), QUERIES: Tile(64, 32, 8, 2), KEYS: Tile(32, 64, 8, 2)},
    (4, 128): {FORWARD: Tile(32, 16, 8, 2), QUERIES: Tile(32, 16, 8, 2), KEYS: Tile(32, 32, 8, 2)},
    (4, 256): {FORWARD: Tile(32, 16, 8, 1), QUERIES: Tile(32, 16, 8, 1), KEYS: Tile(16, 32, 8, 1)},
}
# GPUs whose programs have 163 or 227 KiB of shared memory, not 99: the data-center ones.
ROOMY = ((8, 0), (9, 0), (10, 0), (10, 3))


def tiles(dtype: str, head_dim: int) -> dict[str, Tile]:
    """Of each kernel, for this type ("f32" or "bf16")."""
    return TILES[2 if dtype == "bf16" else 4, max(64, width(head_dim))]


class Prepared(NamedTuple):
    """Rows, filled up to whole tiles, and what each tile must visit. Keys that nobody sees are of segment NEVER."""

    rows: Rows
    forward: jax.Array  # by tiles of queries, (B, tiles, 4)
    queries: jax.Array  # by tiles of queries
    keys: jax.Array  # by tiles of keys


def unsupported(spec: Spec, hardware: Hardware) -> str | None:
    """Why it cannot do this, or None. On CPU it can, interpreted, but is not worth taking (`choose`)."""
    if spec.cached:
        return "is not used with a key/value cache"
    gpu, capability = hardware.platform == "gpu", hardware.compute_capability
    if gpu and capability < (8, 0):
        return "needs compute capability 8.0 or newer"
    if spec.head_dim > LARGEST or spec.head_dim % 8:
        return f"needs a head_dim that is a multiple of 8 and at most {LARGEST}, not {spec.head_dim}"
    if gpu and spec.head_dim > 128 and capability not in ROOMY:
        of = ".".join(map(str, capability))
        return f"needs more shared memory for head_dim = {spec.head_dim} than compute capability {of} has"
    return None


def prepare(rows: Rows, spec: Spec) -> Prepared:
    """What each tile must visit, once a batch."""
    if not spec.packed:
        rows = rows._replace(q_segments=jnp.ones_like(rows.q_segments), kv_segments=jnp.ones_like(rows.kv_segments))
    filled = Rows(
        padded(rows.q_segments, LONGEST, 0),
        padded(rows.q_positions, LONGEST, 0),
        padded(jnp.where(rows.kv_segments > 0, rows.kv_segments, NEVER), LONGEST, NEVER),
        padded(rows.kv_positions, LONGEST, 0),
    )
    of = tiles(spec.dtype, spec.head_dim)
    forward, queries = (visits(rows, spec, of[name].queries, of[name].keys) for name in (FORWARD, QUERIES))
    return Prepared(filled, forward, queries, visits(rows, spec, of[KEYS].queries, of[KEYS].keys, by_keys=True))


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, prepared: Prepared, spec: Spec) -> jax.Array:
    """See the package's docstring; softmax in f32."""
    return _flash(q_BTNH, k_BSKH, v_BSKH, prepared, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _flash(q: jax.Array, k: jax.Array, v: jax.Array, prepared: Prepared, spec: Spec) -> jax.Array:
    return _forward(q, k, v, prepared, spec)[0]


def _flash_fwd(q, k, v, prepared, spec):
    out, lse = _forward(q, k, v, prepared, spec)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, prepared, out, lse)


def _flash_bwd(spec, residuals, do):
    q, k, v, prepared, out, lse = residuals
    return *_backward(q, k, v, out, lse, do, prepared, spec), None


_flash.defvjp(_flash_fwd, _flash_bwd)


# ---- Blocks: see the package's docstring


def describe_block(rows: Rows, spec: Spec, diagonal: bool) -> Prepared:
    """As for whole rows: a block is rows of queries and rows of keys."""
    return prepare(rows, spec)


def block_forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, described: Prepared, spec: Spec, diagonal: bool
) -> tuple[jax.Array, jax.Array]:
    """See the package's docstring; the output in f32."""
    return _forward(q_BTNH, k_BSKH, v_BSKH, described, spec, diagonal, jnp.float32)


def block_backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    do_BTNH: jax.Array,
    described: Prepared,
    spec: Spec,
    diagonal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the package's docstring; the gradients in f32."""
    return _backward(q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT, do_BTNH, described, spec, diagonal, jnp.float32)


# ---- Calls of the kernels


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, prepared: Prepared, spec: Spec, causal: bool = True, dtype: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Output in `dtype` (default: that of q), log-sum-exp in f32 (B, N, T). causal: the keys are those of the queries."""
    B, T, N, _ = q.shape
    shapes = [_like(q, q.shape, dtype or q.dtype), _like(q, (B, N, T), jnp.float32)]
    out, lse = _call(FORWARD, prepared.forward, prepared.rows, (q, k, v), shapes, N, spec, causal)
    return out, lse


def _backward(
    q, k, v, out, lse, do, prepared: Prepared, spec: Spec, causal: bool = True, dtype: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v in `dtype` (default: that of q)."""
    delta_BTN = (do.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    operands = (q, k, v, do, lse, jnp.swapaxes(delta_BTN, 1, 2))
    dtype, rows = dtype or q.dtype, prepared.rows
    (dq,) = _call(QUERIES, prepared.queries, rows, operands, [_like(q, q.shape, dtype)], q.shape[2], spec, causal)
    shapes = [_like(k, k.shape, dtype), _like(k, v.shape, dtype)]
    dk, dv = _call(KEYS, prepared.keys, rows, operands, shapes, k.shape[2], spec, causal)
    return dq, dk, dv


def _like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An output that varies over the mesh as x does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _call(
    kernel: str,
    visits: jax.Array,
    rows: Rows,
    operands: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    heads: int,
    spec: Spec,
    causal: bool,
) -> Sequence[jax.Array]:
    """One program for each tile (of those in `visits`), row, and head of `heads`: of queries, or of keys and their group.

    operands: q, k, ... and outputs: (B, T or S, N or K, H), or a number for each query and head, (B, N, T).
    """
    (_, T, N, _), (_, S, K, _) = operands[0].shape, operands[1].shape
    tile = tiles(spec.dtype, spec.head_dim)[kernel]
    # Profiles show the name, and plans read from it what is computed (plan/program/op_cost.py).
    mask = (f"window{spec.window}" if spec.window else "causal") if causal else "all"

    def whole_rows(x: Any) -> pl.BlockSpec:
        """All tokens of a row, and the heads that a program works on."""
        numbers = len(x.shape) == 3
        tokens, of = (x.shape[2], x.shape[1]) if numbers else x.shape[1:3]
        tokens = count(tokens, LONGEST) * LONGEST
        each = None if of <= heads else of // heads  # heads of x for each program
        shared = max(1, heads // of)  # programs that share a head of x
        if numbers:
            return pl.BlockSpec((None, each, tokens), lambda tile, row, head: (row, head // shared, 0))
        return pl.BlockSpec((None, tokens, each, width(x.shape[3])), lambda tile, row, head: (row, 0, head // shared, 0))

    call = functools.partial(
        pl.pallas_call,
        functools.partial(KERNELS[kernel], static=Static(spec, tile, T, S, N // K)),
        outputs,
        grid=(visits.shape[1], visits.shape[0], heads),
        in_specs=[
            pl.BlockSpec((None, *visits.shape[1:]), lambda tile, row, head: (row, 0, 0)),
            *(pl.BlockSpec((None, x.shape[1]), lambda tile, row, head: (row, 0)) for x in rows),
            *map(whole_rows, operands),
        ],
        out_specs=[*map(whole_rows, outputs)],
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        name=f"{PREFIX}{kernel}_{mask}",
    )
    return jax.lax.platform_dependent(visits, *rows, *operands, cpu=call(interpret=True), default=call(interpret=False))
