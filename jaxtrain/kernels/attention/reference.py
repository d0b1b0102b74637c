"""Attention by definition, in XLA: all T x S scores in float32. Does everything; the others are checked against it."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels.attention import Hardware, Rows, Spec


def unsupported(spec: Spec, hardware: Hardware) -> str | None:
    """None: it can do everything."""
    return None


def prepare(rows: Rows, spec: Spec) -> Rows:
    """The mask follows from the rows themselves."""
    return rows


def visible(rows: Rows, spec: Spec) -> jax.Array:
    """Which keys each query sees: bool (B, T, S)."""
    q_position, kv_position = rows.q_positions[:, :, None], rows.kv_positions[:, None, :]
    mask = (rows.q_segments[:, :, None] == rows.kv_segments[:, None, :]) & (rows.kv_segments[:, None, :] > 0)
    mask &= q_position >= kv_position
    if spec.window:
        mask &= q_position - kv_position < spec.window
    return mask


def masked_attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array, spec: Spec) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v over the visible keys, scores and sums in float32; a query that sees nothing gives 0."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    precision = jax.lax.Precision.HIGHEST if q_BTNH.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, precision=precision, preferred_element_type=jnp.float32)
    scores *= H**-0.5
    if spec.softcap:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    mask = mask_BTS[:, None, None]
    scores = jnp.where(mask, scores, -1e30)
    weights = jnp.where(mask, jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))), 0.0)
    weights /= jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    out = jnp.einsum(
        "BKGTS,BSKH->BTKGH", weights.astype(v_BSKH.dtype), v_BSKH, precision=precision, preferred_element_type=jnp.float32
    )
    return out.reshape(B, T, N, H).astype(q_BTNH.dtype)


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, prepared: Rows, spec: Spec) -> jax.Array:
    """See the package's docstring."""
    return checkpoint_name(masked_attention(q_BTNH, k_BSKH, v_BSKH, visible(prepared, spec), spec), "attention_out")
