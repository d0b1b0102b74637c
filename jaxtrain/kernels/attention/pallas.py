"""Flash attention (Dao 2023, arXiv:2307.08691; Shah 2024, arXiv:2407.08608) in Pallas Mosaic GPU, for Hopper, in bf16: packed
documents, windows, grouped queries, soft cap.

There are three kernels: forward (in bf16 or e4m3), gradients of queries, gradients of keys and values. A program of the first
two kernels has a tile of queries and loops over the visible tiles of keys. A program of the third kernel has a tile of keys and
loops over the tiles of queries that attend to these keys. The loop includes all query heads of the key/value head, so the sum
over query heads stays in registers. Empty tiles are skipped (tiles.py). Tiles without masked pairs need no mask.

Tile sizes fit the registers and the shared memory of a Hopper GPU. They were not tuned by measurements
(docs/evidence/attention_kernels.md). On a CPU Pallas interprets the kernels if INTERPRET is set, for tests.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtrain.kernels.attention import Rows, Spec
from jaxtrain.kernels.attention.pallas_kernels import (
    BATCH,
    CHUNK,
    FORWARD,
    FORWARD_FP8,
    HEADS,
    KERNELS,
    KEYS,
    QUERIES,
    TILES,
    AttentionStatic,
    AttentionTile,
    swap_keys,
)
from jaxtrain.kernels.attention.tiles import NEVER, num_tiles, pad_to_tiles, visits
from jaxtrain.kernels.hopper import COMPUTING, GROUPS

LONGEST = 128  # tokens of the longest tile of any kernel; a multiple of all other tiles' tokens
PREFIX = "jaxtrain_attention_"  # of the kernels' names
# Parameters of the interpreter, for tests on a CPU; None: compile. Each warpgroup waits in a thread of XLA's CPU client. With
# two threads, one for each core or device, the interpreter hangs, so tests have eight devices.
INTERPRET: plgpu.InterpretGPUParams | None = None


# Padded head_dim -> tiles of each kernel. They are the largest tiles tried that the assembler fits into registers and shared
# memory, with at most a few bytes of register spills. benchmarks/attention_tiles.py shows the sizes.
SIZES: dict[int, dict[str, AttentionTile]] = {
    64: {
        FORWARD: AttentionTile(128, 128, 4),
        FORWARD_FP8: AttentionTile(128, 128, 4),
        QUERIES: AttentionTile(128, 64, 4),
        KEYS: AttentionTile(64, 128, 4),
    },
    128: {
        FORWARD: AttentionTile(128, 128, 2),
        FORWARD_FP8: AttentionTile(128, 128, 4),
        QUERIES: AttentionTile(128, 64, 2),
        KEYS: AttentionTile(64, 128, 2),
    },
    192: {
        FORWARD: AttentionTile(128, 64, 2),
        FORWARD_FP8: AttentionTile(128, 128, 2),
        QUERIES: AttentionTile(128, 64, 2),
        KEYS: AttentionTile(64, 64, 2),
    },
    256: {FORWARD: AttentionTile(128, 64, 2), QUERIES: AttentionTile(128, 32, 2), KEYS: AttentionTile(64, 64, 2)},
}


def width(head_dim: int) -> int:
    """Return head_dim padded to a multiple of CHUNK."""
    return num_tiles(head_dim, CHUNK) * CHUNK


def tiles(head_dim: int) -> dict[str, AttentionTile]:
    """Return the tile sizes of each kernel, by the kernel's name."""
    return SIZES[width(head_dim)]


class Prepared(NamedTuple):
    """Segments and positions, padded to whole tiles, and the tiles to visit for each tile. Padded keys have segment NEVER."""

    q_ids: jax.Array  # segments and positions of queries, (B, 2, T)
    kv_ids: jax.Array  # segments and positions of keys, (B, 2, S)
    forward: jax.Array  # for each tile of queries, the tiles of keys to visit (tiles.visits), (B, tiles, 4)
    queries: Any = None  # like `forward`, with the tiles of the kernel of queries' gradients; None without a backward pass
    keys: Any = None  # for each tile of keys, the tiles of queries to visit; None without a backward pass


def prepare(rows: Rows, spec: Spec) -> Prepared:
    """Return the batch's segments and positions, and the tiles to visit in each kernel."""
    forward, rows = prepare_forward(rows, spec, FORWARD), _documents(rows, spec)
    sizes = tiles(spec.head_dim)
    queries, keys = (
        visits(rows, spec, sizes[name].queries, sizes[name].keys, by_keys=name == KEYS) for name in (QUERIES, KEYS)
    )
    return forward._replace(queries=queries, keys=keys)


def prepare_forward(rows: Rows, spec: Spec, name: str) -> Prepared:
    """Return `Prepared` for a forward kernel alone. name: FORWARD or FORWARD_FP8."""
    rows, tile = _documents(rows, spec), tiles(spec.head_dim)[name]
    keys = jnp.where(rows.kv_segments > 0, rows.kv_segments, NEVER)
    return Prepared(
        jnp.stack([pad_to_tiles(rows.q_segments, LONGEST, 0), pad_to_tiles(rows.q_positions, LONGEST, 0)], 1),
        jnp.stack([pad_to_tiles(keys, LONGEST, NEVER), pad_to_tiles(rows.kv_positions, LONGEST, 0)], 1),
        visits(rows, spec, tile.queries, tile.keys),
    )


def _documents(rows: Rows, spec: Spec) -> Rows:
    """Return the rows. If `spec.packed` is False, every token gets segment 1."""
    if spec.packed:
        return rows
    return rows._replace(q_segments=jnp.ones_like(rows.q_segments), kv_segments=jnp.ones_like(rows.kv_segments))


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, prepared: Prepared, spec: Spec) -> jax.Array:
    """Implement `attention` of the package; softmax in f32."""
    return _flash(q_BTNH, k_BSKH, v_BSKH, prepared, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _flash(q: jax.Array, k: jax.Array, v: jax.Array, prepared: Prepared, spec: Spec) -> jax.Array:
    return block_forward(q, k, v, prepared, spec, True, q.dtype)[0]


def _flash_fwd(q, k, v, prepared, spec):
    out, lse = block_forward(q, k, v, prepared, spec, True, q.dtype)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, prepared, out, lse)


def _flash_bwd(spec, residuals, do):
    q, k, v, prepared, out, lse = residuals
    return *block_backward(q, k, v, out, lse, do, prepared, spec, True, q.dtype), None


_flash.defvjp(_flash_fwd, _flash_bwd)


# ---- Blocks: see the package's docstring. `diagonal` changes only the kernels' names: the mask follows from segments and
# positions.


def describe_block(rows: Rows, spec: Spec, diagonal: bool) -> Prepared:
    """Return the block's segments and positions, and the tiles to visit in each kernel."""
    return prepare(rows, spec)


def block_forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    described: Prepared,
    spec: Spec,
    diagonal: bool,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """Implement `block_forward` of the package; the output is in `dtype`."""
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    q, k, v = map(_pad, (q_BTNH, k_BSKH, v_BSKH))
    B, T_pad, N, _ = q.shape
    shapes = [jax.ShapeDtypeStruct(q.shape, dtype), jax.ShapeDtypeStruct((B, N, T_pad), jnp.float32)]
    out, lse = _call(FORWARD, described.forward, described, (q, k, v), shapes, N, spec, diagonal)
    return out[:, :T, :, :H], lse[:, :, :T]


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
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Implement `block_backward` of the package; the gradients are in `dtype`."""
    (_, T, _, H), S = q_BTNH.shape, k_BSKH.shape[1]
    delta_BTN = (do_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32)).sum(-1)
    q, k, v, do = map(_pad, (q_BTNH, k_BSKH, v_BSKH, do_BTNH))
    padding = (0, 0), (0, 0), (0, q.shape[1] - T)
    operands = (q, k, v, do, jnp.pad(lse_BNT, padding), jnp.pad(jnp.swapaxes(delta_BTN, 1, 2), padding))
    shapes = [jax.ShapeDtypeStruct(q.shape, dtype)]
    (dq,) = _call(QUERIES, described.queries, described, operands, shapes, q.shape[2], spec, diagonal)
    shapes = [jax.ShapeDtypeStruct(k.shape, dtype), jax.ShapeDtypeStruct(v.shape, dtype)]
    dk, dv = _call(KEYS, described.keys, described, operands, shapes, k.shape[2], spec, diagonal)
    return dq[:, :T, :, :H], dk[:, :S, :, :H], dv[:, :S, :, :H]


# ---- Calls of the kernels


def forward_fp8(
    q8: jax.Array,
    k8: jax.Array,
    v8: jax.Array,
    scales_BN2: jax.Array,
    prepared: Prepared,
    spec: Spec,
    causal: bool,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Return what `block_forward` returns, for arrays in e4m3 and their scales (`_forward_kernel`)."""
    T, H = q8.shape[1], q8.shape[3]
    q8, k8, v8 = map(_pad, (q8, k8, v8))
    B, T_pad, N, _ = q8.shape
    shapes = [jax.ShapeDtypeStruct(q8.shape, dtype), jax.ShapeDtypeStruct((B, N, T_pad), jnp.float32)]
    # Values have the keys' axis last: WGMMA reads 8-bit numbers only along the contracted dimension.
    operands = (q8, k8, jnp.transpose(swap_keys(v8, 1), (0, 2, 3, 1)), scales_BN2)
    out, lse = _call(FORWARD_FP8, prepared.forward, prepared, operands, shapes, N, spec, causal)
    return out[:, :T, :, :H], lse[:, :, :T]


def _pad(x_BTNH: jax.Array) -> jax.Array:
    """Return x padded with zeros: T to a multiple of LONGEST, H to a multiple of CHUNK."""
    T, H = x_BTNH.shape[1], x_BTNH.shape[3]
    return jnp.pad(x_BTNH, ((0, 0), (0, num_tiles(T, LONGEST) * LONGEST - T), (0, 0), (0, width(H) - H)))


def _call(
    name: str,
    visits: jax.Array,
    prepared: Prepared,
    operands: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    heads: int,
    spec: Spec,
    causal: bool,
) -> Sequence[jax.Array]:
    """Run one program for each tile, row of the batch, and head.

    Args:
      name: the kernel: FORWARD, FORWARD_FP8, QUERIES or KEYS.
      visits: for each tile, the ranges of tiles to visit and of unmasked tiles, (B, tiles, 4): see `tiles.visits`.
      operands: q, k and the kernel's other arrays: (B, T or S, N or K, H), or (B, N, T) with a number for each query and head.
      outputs: shapes and dtypes of the results.
      heads: query heads, or key/value heads for the kernel of keys' gradients.
      causal: keys and queries are of the same tokens; changes only the name.
    """
    (B, _, N, H), K = operands[0].shape, operands[1].shape[2]
    static = AttentionStatic(spec, tiles(spec.head_dim)[name], H, N // K, INTERPRET is not None, name == FORWARD_FP8)
    # Profiles show the kernel's name, and plan/program/op_cost.py reads the pass and the mask from the name.
    mask = (f"window{spec.window}" if spec.window else "causal") if causal else "all"
    kernel = KERNELS[name]
    call = plgpu.kernel(
        functools.partial(kernel.body, static=static),
        out_type=list(outputs),
        scratch_types=kernel.scratch(static),
        grid=(heads, visits.shape[1], B),
        grid_names=(HEADS, TILES, BATCH),
        num_threads=COMPUTING + 1,
        thread_name=GROUPS,
        kernel_name=f"{PREFIX}{name}_{mask}",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=INTERPRET,
    )
    return call(visits, prepared.q_ids, prepared.kv_ids, *operands)
