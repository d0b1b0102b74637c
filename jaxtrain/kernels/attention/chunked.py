"""Attention in blocks of queries, in XLA: at no time more than a block's scores, forward or backward.

For GPUs that cuDNN's packed kernels do not serve, and for long sequences on CPU. Each block's scores are recomputed in the
backward pass, so memory is O(block x S) and not O(T x S).
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels.attention import Hardware, Rows, Spec
from jaxtrain.kernels.attention.reference import masked_attention, visible

BLOCK = 256  # queries at a time


def unsupported(spec: Spec, hardware: Hardware) -> str | None:
    """None: it can do everything the reference can."""
    return None


def prepare(rows: Rows, spec: Spec) -> Rows:
    """The mask follows from the rows themselves."""
    return rows


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, prepared: Rows, spec: Spec) -> jax.Array:
    """See the package's docstring. T is padded to a multiple of the block with queries that see nothing."""
    T = q_BTNH.shape[1]
    block = min(BLOCK, T)
    count = -(-T // block)

    def blocks(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, 0), (0, count * block - T)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(x.shape[0], count, block, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(q, segments, positions):
        rows = Rows(segments, positions, prepared.kv_segments, prepared.kv_positions)
        return masked_attention(q, k_BSKH, v_BSKH, visible(rows, spec), spec)

    _, out = jax.lax.scan(
        lambda carry, item: (carry, one(*item)),
        None,
        (blocks(q_BTNH), blocks(prepared.q_segments), blocks(prepared.q_positions)),
    )
    o_BTNH = jnp.moveaxis(out, 0, 1).reshape(q_BTNH.shape[0], count * block, *q_BTNH.shape[2:])[:, :T]
    return checkpoint_name(o_BTNH, "attention_out")
