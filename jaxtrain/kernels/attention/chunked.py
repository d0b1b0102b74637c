"""Attention in XLA, with the scores of one block of queries in memory at a time, forward and backward.

`auto` uses this kernel for long sequences that neither cuDNN nor the Pallas kernel supports, such as on CPU. Each block's
scores are recomputed in the backward pass, so memory is O(block x S) and not O(T x S).
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels.attention import Rows, Spec, reference
from jaxtrain.kernels.attention.reference import masked_attention, visible

BLOCK = 256  # queries at a time


def prepare(rows: Rows, spec: Spec) -> Rows:
    """Return the rows: `visible` computes the mask from their segments and positions."""
    return rows


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, prepared: Rows, spec: Spec) -> jax.Array:
    """Implement `attention` of the package. T is padded to a multiple of BLOCK; the added queries have no visible keys."""
    T, dtype = q_BTNH.shape[1], k_BSKH.dtype
    # Keys and values are float32 outside the scan, so that the blocks' gradients are summed in float32.
    k_f32, v_f32 = k_BSKH.astype(jnp.float32), v_BSKH.astype(jnp.float32)

    @jax.checkpoint
    def attend_block(q, segments, positions):
        rows = Rows(segments, positions, prepared.kv_segments, prepared.kv_positions)
        return masked_attention(q, k_f32.astype(dtype), v_f32.astype(dtype), visible(rows, spec), spec)

    _, out = jax.lax.scan(
        lambda carry, item: (carry, attend_block(*item)),
        None,
        (_blocks(q_BTNH), _blocks(prepared.q_segments), _blocks(prepared.q_positions)),
    )
    return checkpoint_name(_join_blocks(out, T), "attention_out")


def _blocks(x: jax.Array) -> jax.Array:
    """Return (B, T, ...) as (blocks, B, queries of a block, ...), padded with zeros."""
    B, T = x.shape[:2]
    block = min(BLOCK, T)
    count = -(-T // block)
    padded = jnp.pad(x, [(0, 0), (0, count * block - T)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(padded.reshape(B, count, block, *x.shape[2:]), 1, 0)


def _join_blocks(x: jax.Array, T: int) -> jax.Array:
    """Invert `_blocks`: return (B, T, ...) without the padding."""
    count, B, block = x.shape[:3]
    return jnp.moveaxis(x, 0, 1).reshape(B, count * block, *x.shape[3:])[:, :T]


def describe_block(rows: Rows, spec: Spec, diagonal: bool) -> Rows:
    """Return the rows: `visible` computes the mask from their segments and positions."""
    return rows


def block_forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, described: Rows, spec: Spec, diagonal: bool
) -> tuple[jax.Array, jax.Array]:
    """Implement `block_forward` of the package."""

    def forward_block(q, segments, positions):
        rows = Rows(segments, positions, described.kv_segments, described.kv_positions)
        out, lse_BNT = reference.block_forward(q, k_BSKH, v_BSKH, rows, spec, diagonal)
        return out, jnp.swapaxes(lse_BNT, 1, 2)

    T = q_BTNH.shape[1]
    _, (out, lse) = jax.lax.scan(
        lambda carry, item: (carry, forward_block(*item)),
        None,
        (_blocks(q_BTNH), _blocks(described.q_segments), _blocks(described.q_positions)),
    )
    return _join_blocks(out, T), jnp.swapaxes(_join_blocks(lse, T), 1, 2)


def block_backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    do_BTNH: jax.Array,
    described: Rows,
    spec: Spec,
    diagonal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Implement `block_backward` of the package."""

    def body(carry, item):
        q, out, lse, do, segments, positions = item
        rows = Rows(segments, positions, described.kv_segments, described.kv_positions)
        lse_BNT = jnp.swapaxes(lse, 1, 2)
        dq, dk, dv = reference.block_backward(q, k_BSKH, v_BSKH, out, lse_BNT, do, rows, spec, diagonal)
        return (carry[0] + dk, carry[1] + dv), dq

    arrays = (q_BTNH, out_BTNH, jnp.swapaxes(lse_BNT, 1, 2), do_BTNH, described.q_segments, described.q_positions)
    zeros = (jnp.zeros(k_BSKH.shape, jnp.float32), jnp.zeros(v_BSKH.shape, jnp.float32))
    (dk, dv), dq = jax.lax.scan(body, zeros, tuple(_blocks(x) for x in arrays))
    return _join_blocks(dq, q_BTNH.shape[1]), dk, dv
