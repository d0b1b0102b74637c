"""cuDNN's flash attention, for causal, packed and sliding-window rows with grouped queries.

jax.nn.dot_product_attention offers neither packing nor a float32 logsumexp. So this module binds the underlying primitives,
which are in a private module of jax. tests/unit/test_attention.py detects a jax release that changes the primitives. Bind the
primitives inside a shard_map that is manual over the whole mesh, as in models/attention.py. In such a shard_map jax does not
use the primitive's partitioning callback, whose pointer would defeat the persistent compile cache.

The custom_vjp here names both residuals, "attention_out" and "attention_lse", so that a remat policy can save them and the
kernel need not run forward twice.

The backward kernel needs a workspace that grows with heads, tokens and documents (`workspace_bytes`). So the backward pass runs
in parts, one after another, by heads and by rows; their workspaces share the same memory.
"""

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config.schema import ConfigError, Problem
from jaxtrain.kernels.attention import EMPTY_LSE, Rows, Spec

# jax 0.12 added a parameter for user-written changes of the scores.
_takes_score_mod = "score_mod" in inspect.signature(fused._dot_product_attention_fwd_rule).parameters
NO_SCORE_MOD = {"score_mod": None} if _takes_score_mod else {}

WORKSPACE = 5 << 29  # bytes, 2.5 GiB: a backward pass is cut into parts with at most this workspace
TILE = 128  # queries of a thread block of the kernel
TILES = 256  # least number of tiles in a part, so that a part fills the 132 multiprocessors of an H100 or H200 about twice


class Packed(NamedTuple):
    """cuDNN's description of packed rows."""

    lengths_BM: jax.Array  # tokens of each document, and last of padding; -1: no such document
    offsets_BM: jax.Array  # (B, M + 1): where each document begins in its row; -1 elsewhere


def prepare(rows: Rows, spec: Spec) -> Packed | None:
    """Return lengths and offsets of the documents in each row. A document must be contiguous, and so must padding.

    Padding counts as one more document, because cuDNN leaves the outputs of tokens without a document undefined. Writing zeros
    to these outputs would be one more pass over queries, keys, values and output, forward and backward, in every layer.
    """
    if not spec.packed:
        return None
    lengths_BM, starts_BM = _documents(rows.q_segments, spec)
    exists_BM = lengths_BM > 0
    # The primitive moves the entries of all rows that are not -1 to the front and reads lengths and offsets in pairs. So their
    # numbers must be equal: a closing offset after the last document would shift the offsets of the next row.
    offsets_BM = _append_offset(jnp.where(exists_BM, starts_BM, -1))
    return Packed(jnp.where(exists_BM, lengths_BM, -1), offsets_BM)


def _documents(segments_BT: jax.Array, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Return lengths and starts of documents 1 to max_segments and of padding in each row, int32 (B, M); length 0 if absent."""
    number_M = jnp.append(jnp.arange(1, spec.max_segments + 1, dtype=segments_BT.dtype), 0)
    is_in_BTM = segments_BT[:, :, None] == number_M[None, None, :]
    return jnp.sum(is_in_BTM, axis=1, dtype=jnp.int32), jnp.argmax(is_in_BTM, axis=1).astype(jnp.int32)


def _append_offset(offsets_BM: jax.Array) -> jax.Array:
    """Append the unused last offset that the primitive needs."""
    return jnp.pad(offsets_BM, ((0, 0), (0, 1)), constant_values=-1)


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, prepared: Packed | None, spec: Spec) -> jax.Array:
    """Implement `attention` of the package; bf16 in and out, softmax in f32."""
    return _flash(q_BTNH, k_BSKH, v_BSKH, prepared, spec)


def _operands(q: jax.Array, queries: Packed | None, keys: Packed | None) -> tuple[jax.Array, ...]:
    """Return the primitive's operands after v: bias, lengths and offsets of queries and keys, page tables; empty if unused."""
    none = jnp.zeros(0, q.dtype)
    if queries is None or keys is None:
        return (none,) * 7
    B, T, N, H = q.shape
    if B * T * N * H >= 2**31:
        rule = f"{B} x {T} tokens x {N} x {H} elements on a device do not fit the 32-bit offsets of packed rows"
        raise ConfigError([Problem("attention.impl", "cudnn", rule, "Set train.grad_accum or mesh.seq higher.")])
    return (none, queries.lengths_BM, keys.lengths_BM, queries.offsets_BM, keys.offsets_BM, none, none)


def _static(q: jax.Array, spec: Spec, causal: bool = True) -> dict:
    kinds = fused.MaskType
    mask = (kinds.PADDING_CAUSAL if causal else kinds.PADDING) if spec.packed else (kinds.CAUSAL if causal else kinds.NO_MASK)
    return {
        "scale": q.shape[-1] ** -0.5,
        "seed": 42,  # of dropout, which is off
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, no gradient of a bias
        "mask_type": mask,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": (spec.window or None) if causal else None,
        **NO_SCORE_MOD,
    }


def _forward(q, k, v, packed, spec, training):
    return fused._dot_product_attention_fwd_p_wrapper.bind(
        q, k, v, *_operands(q, packed, packed), **_static(q, spec), is_training=training
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _flash(q: jax.Array, k: jax.Array, v: jax.Array, packed: Packed | None, spec: Spec) -> jax.Array:
    return _forward(q, k, v, packed, spec, training=False)[0]


def _flash_fwd(q, k, v, packed, spec):
    out, lse = _forward(q, k, v, packed, spec, training=True)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, packed, out, lse)


def _flash_bwd(spec, residuals, do):
    q, k, v, packed, out, stats = residuals

    def slice_stats(stats: jax.Array, rows: slice, heads: slice, documents: Packed | None) -> jax.Array:
        if packed is None or documents is None:
            return stats[rows, heads]
        # The primitive has moved existing entries to the front: entries of these rows come after those of all earlier rows.
        before = jnp.sum(packed.lengths_BM[: rows.start] != -1, dtype=jnp.int32) if rows.start else 0
        return jax.lax.dynamic_slice_in_dim(stats[:, heads], before, documents.lengths_BM.size)

    return *_backward(q, k, v, packed, packed, out, stats, do, slice_stats, spec), None


_flash.defvjp(_flash_fwd, _flash_bwd)


# ---- The backward pass in parts


def workspace_bytes(E: int, T: int, S: int, N: int, K: int, H: int, *, deterministic: bool = False) -> int:
    """Return the bytes of workspace of one backward call in bfloat16. A forward call needs almost none.

        E N T 4      for each query, the sum of output times gradient, in float32: softmax's gradient needs it
        E N T 4H     the gradient of queries, in float32: blocks of keys add to it in any order
        E N T 2S     instead of E N T 4H, if the result must be deterministic: the gradient of all scores, in bfloat16
        E N S 4H     if keys have fewer heads: gradients of keys and of values for each query head, in bfloat16

    The formula was derived from the workspace sizes of cuDNN 9.23 on Hopper (tests/unit/test_assignment.py). It leaves out a
    few KiB for alignment.

    Args:
      E: sequences that XLA passes to cuDNN. A packed row counts once per document, and once for padding, each time with the
          tokens of a whole row (FixDimsForRaggedOffset in XLA's cuda_dnn.cc).
      T, S: queries and keys of a row.
      N, K, H: query heads, key/value heads, head_dim.
    """
    summed = 2 * S if deterministic else 4 * H
    expanded = 4 * H * S if N != K else 0
    return E * N * (T * (summed + 4) + expanded)


def backward_chunk(
    B: int, T: int, S: int, N: int, K: int, H: int, documents: int = 1, *, deterministic: bool = False
) -> tuple[int, int]:
    """Return (rows, query heads) of each part of a backward pass.

    The backward pass is cut into as few parts as possible with a workspace of at most WORKSPACE each. If every cut has parts
    above WORKSPACE, the cut with the smallest workspace per part is returned. Each part has at least TILES tiles of queries,
    unless there is only one part. A part has all query heads of one or more key/value heads, or some query heads of one
    key/value head.

    Args:
      B: rows of the batch.
      T, S, N, K, H: as in `workspace_bytes`.
      documents: documents of a row, with padding as one more; 1 for rows that are not packed.
    """
    group = N // K
    heads = [N // chunks for chunks in range(1, K + 1) if K % chunks == 0]
    heads += [group // chunks for chunks in range(2, group + 1) if group % chunks == 0]
    rows = [B // chunks for chunks in range(1, B + 1) if B % chunks == 0]
    candidates = []
    for b in rows:
        for n in heads:
            if (b, n) != (B, N) and b * n * -(-T // TILE) < TILES:
                continue
            workspace = workspace_bytes(b * documents, T, S, n, max(1, n // group), H, deterministic=deterministic)
            candidates.append((max(workspace, WORKSPACE), (B // b) * (N // n), n < group, B // b, (b, n)))
    return min(candidates)[-1]


def _backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    queries: Packed | None,
    keys: Packed | None,
    out: jax.Array,
    stats: jax.Array,
    do: jax.Array,
    slice_stats: Callable[[jax.Array, slice, slice, Packed | None], jax.Array],
    spec: Spec,
    causal: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (dq, dk, dv), computed part after part (`backward_chunk`).

    slice_stats: returns the primitive's log-sum-exp operand for a part. Its arguments are `stats`, the part's rows, the part's
    query heads, and `queries` of those rows.
    """
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    documents = queries.lengths_BM.shape[1] if queries else 1
    rows, heads = backward_chunk(B, T, S, N, K, H, documents, deterministic=spec.deterministic)
    group = N // K
    operands, gradients = (q, k, v, out, stats, do), []
    for row, head in itertools.product(range(0, B, rows), range(0, N, heads)):
        if gradients:
            # Even the slices of a part wait until the previous part is done, so one workspace exists at a time. The description
            # of documents is small, and computed once for all parts with the same rows.
            operands, gradients[-1] = jax.lax.optimization_barrier((operands, gradients[-1]))
        q, k, v, out, stats, do = operands
        row_slice, head_slice = slice(row, row + rows), slice(head, head + heads)
        kv_heads = slice(head // group, (head + heads - 1) // group + 1)
        q_documents, kv_documents = (packed and Packed(*(x[row_slice] for x in packed)) for packed in (queries, keys))
        q_chunk = q[row_slice, :, head_slice]
        gradients.append(
            fused._dot_product_attention_bwd_p_wrapper.bind(
                q_chunk,
                k[row_slice, :, kv_heads],
                v[row_slice, :, kv_heads],
                *_operands(q_chunk, q_documents, kv_documents),
                slice_stats(stats, row_slice, head_slice, q_documents),
                out[row_slice, :, head_slice],
                do[row_slice, :, head_slice],
                **_static(q_chunk, spec, causal),
            )
        )

    def join_chunks(xs: list[jax.Array], count: int) -> jax.Array:
        """Concatenate the gradients of all parts. First sum, in f32, each `count` consecutive parts of one key/value head."""
        if count > 1:
            xs = [
                functools.reduce(jnp.add, (x.astype(jnp.float32) for x in same)).astype(xs[0].dtype)
                for same in itertools.batched(xs, count)
            ]
        across = len(xs) * rows // B
        return jnp.concatenate([jnp.concatenate(adjacent, axis=2) for adjacent in itertools.batched(xs, across)], axis=0)

    if len(gradients) == 1:
        return gradients[0]
    dq, dk, dv = (list(xs) for xs in zip(*gradients, strict=True))
    shared = max(1, group // heads)
    return join_chunks(dq, 1), join_chunks(dk, shared), join_chunks(dv, shared)


# ---- Blocks: see the package's docstring. The private primitives return a block's log-sum-exp in float32, and the backward
# primitive accepts the log-sum-exp of all blocks.


class PackedBlock(NamedTuple):
    """cuDNN's description of a block of packed rows.

    A document without tokens has length 0, and not -1 as in `prepare`. So entry i of the kernel's results per document belongs
    to document i.
    """

    queries: Packed
    keys: Packed


def describe_block(rows: Rows, spec: Spec, diagonal: bool) -> PackedBlock | None:
    """Return the description of a block.

    Without `diagonal`, all keys precede the queries. Then the queries attend to keys of one document at most: the last document
    of the keys, if it is also the first document of the queries. These keys and queries form one rectangle without a mask.
    """
    if not spec.packed:
        return None
    if diagonal:
        lengths_BM, starts_BM = _documents(rows.q_segments, spec)
        documents = Packed(lengths_BM, _append_offset(starts_BM))
        return PackedBlock(documents, documents)
    q_BT, kv_BS = rows.q_segments, rows.kv_segments
    same_document = (q_BT[:, 0] == kv_BS[:, -1]) & (q_BT[:, 0] > 0)
    queries = jnp.where(same_document, jnp.sum(q_BT == q_BT[:, :1], axis=1, dtype=jnp.int32), 0)
    keys = jnp.where(same_document, jnp.sum(kv_BS == kv_BS[:, -1:], axis=1, dtype=jnp.int32), 0)
    zero = jnp.zeros_like(queries)
    # With one entry per row, the primitive would ignore the offsets.
    return PackedBlock(
        Packed(jnp.stack([queries, zero], 1), _append_offset(jnp.stack([zero, zero], 1))),
        Packed(jnp.stack([keys, zero], 1), _append_offset(jnp.stack([kv_BS.shape[1] - keys, zero], 1))),
    )


def block_forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, described: PackedBlock | None, spec: Spec, diagonal: bool
) -> tuple[jax.Array, jax.Array]:
    """Implement `block_forward` of the package."""
    queries, keys = described or (None, None)
    out, stats = fused._dot_product_attention_fwd_p_wrapper.bind(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        *_operands(q_BTNH, queries, keys),
        **_static(q_BTNH, spec, diagonal),
        is_training=True,
    )
    if described is None:
        return out, stats
    lse_BNT = _per_token(stats, described.queries, q_BTNH.shape[1])
    inside_BT = _in_any_document(described.queries, q_BTNH.shape[1])
    out = jnp.where(inside_BT[:, :, None, None], out, 0)
    return out, jnp.where(inside_BT[:, None, :], lse_BNT, EMPTY_LSE)


def block_backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    do_BTNH: jax.Array,
    described: PackedBlock | None,
    spec: Spec,
    diagonal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Implement `block_backward` of the package."""
    queries, keys = described or (None, None)

    def slice_stats(lse: jax.Array, rows: slice, heads: slice, documents: Packed | None) -> jax.Array:
        return lse[rows, heads] if documents is None else _per_document(lse[rows, heads], documents)

    dq, dk, dv = _backward(
        q_BTNH, k_BSKH, v_BSKH, queries, keys, out_BTNH, lse_BNT, do_BTNH, slice_stats, spec, causal=diagonal
    )
    if described is None:
        return dq, dk, dv
    q_inside = _in_any_document(described.queries, q_BTNH.shape[1])[:, :, None, None]
    kv_inside = _in_any_document(described.keys, k_BSKH.shape[1])[:, :, None, None]
    return jnp.where(q_inside, dq, 0), jnp.where(kv_inside, dk, 0), jnp.where(kv_inside, dv, 0)


def _in_document(documents: Packed, T: int) -> jax.Array:
    """Return which token of a row is in which document, bool (B, M, T)."""
    at_BMT = jnp.arange(T)[None, None, :] - documents.offsets_BM[:, :-1, None]
    return (at_BMT >= 0) & (at_BMT < documents.lengths_BM[:, :, None])


def _in_any_document(documents: Packed, T: int) -> jax.Array:
    """Return which tokens of each row are in a document, bool (B, T). The kernel's results for other tokens are undefined."""
    return _in_document(documents, T).any(axis=1)


def _per_token(stats: jax.Array, documents: Packed, T: int) -> jax.Array:
    """Return the kernel's log-sum-exps (B x M, N, T), indexed from each document's first token, as (B, N, T)."""
    B, M = documents.lengths_BM.shape
    stats_BMNT = stats.reshape(B, M, -1, T)
    document_BT = jnp.argmax(_in_document(documents, T), axis=1)
    position_BT = jnp.arange(T)[None] - jnp.take_along_axis(documents.offsets_BM[:, :-1], document_BT, axis=1)
    rows_B11, heads_1N1 = jnp.arange(B)[:, None, None], jnp.arange(stats_BMNT.shape[2])[None, :, None]
    return stats_BMNT[rows_B11, document_BT[:, None, :], heads_1N1, jnp.clip(position_BT, 0, T - 1)[:, None, :]]


def _per_document(lse_BNT: jax.Array, documents: Packed) -> jax.Array:
    """Invert `_per_token`. The kernel does not read the entries after the end of a document, which have any value."""
    B, N, T = lse_BNT.shape
    at_BMT = jnp.clip(documents.offsets_BM[:, :-1, None] + jnp.arange(T)[None, None, :], 0, T - 1)
    stats_BMNT = jnp.take_along_axis(lse_BNT[:, None], at_BMT[:, :, None, :], axis=3)
    return stats_BMNT.reshape(-1, N, T)
