"""Attention by definition, in XLA: all T x S scores in float32. Supports every spec; tests compare other kernels with it."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels.attention import EMPTY_LSE, Rows, Spec


def prepare(rows: Rows, spec: Spec) -> Rows:
    """Return the rows: `visible` computes the mask from their segments and positions."""
    return rows


def visible(rows: Rows, spec: Spec) -> jax.Array:
    """Return whether each query attends to each key, bool (B, T, S)."""
    q_position, kv_position = rows.q_positions[:, :, None], rows.kv_positions[:, None, :]
    mask = (rows.q_segments[:, :, None] == rows.kv_segments[:, None, :]) & (rows.kv_segments[:, None, :] > 0)
    mask &= q_position >= kv_position
    if spec.window:
        mask &= q_position - kv_position < spec.window
    return mask


def _precision(x: jax.Array) -> jax.lax.Precision:
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def _scores(q_BTNH: jax.Array, k_BSKH: jax.Array, spec: Spec) -> jax.Array:
    """Return q k^T / sqrt(H) with the soft cap, f32 (B, K, G, T, S). G: the query heads of a key/value head."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, precision=_precision(q_BTNH), preferred_element_type=jnp.float32)
    scores *= H**-0.5
    return spec.softcap * jnp.tanh(scores / spec.softcap) if spec.softcap else scores


def _weigh_values(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array, spec: Spec
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the output, f32 (B, T, N, H), and for each query its largest score and sum of exp(score - largest).

    The largest score and the sum have shape (B, K, G, T, 1).
    """
    mask = mask_BTS[:, None, None]
    scores = jnp.where(mask, _scores(q_BTNH, k_BSKH, spec), EMPTY_LSE)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - top), 0.0)
    sums = weights.sum(-1, keepdims=True)
    weights /= jnp.maximum(sums, 1e-30)
    out = jnp.einsum(
        "BKGTS,BSKH->BTKGH",
        weights.astype(v_BSKH.dtype),
        v_BSKH,
        precision=_precision(q_BTNH),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(*q_BTNH.shape[:3], -1), top, sums


def masked_attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array, spec: Spec) -> jax.Array:
    """Return attention to the visible keys, (B, T, N, H) in q's dtype, with scores and softmax in float32.

    The result is 0 for a query without visible keys.
    """
    return _weigh_values(q_BTNH, k_BSKH, v_BSKH, mask_BTS, spec)[0].astype(q_BTNH.dtype)


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, prepared: Rows, spec: Spec) -> jax.Array:
    """Implement `attention` of the package."""
    return checkpoint_name(masked_attention(q_BTNH, k_BSKH, v_BSKH, visible(prepared, spec), spec), "attention_out")


def describe_block(rows: Rows, spec: Spec, diagonal: bool) -> Rows:
    """Return the rows: `visible` computes the mask from their segments and positions."""
    return rows


def block_forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, described: Rows, spec: Spec, diagonal: bool
) -> tuple[jax.Array, jax.Array]:
    """Implement `block_forward` of the package."""
    out, top, sums = _weigh_values(q_BTNH, k_BSKH, v_BSKH, visible(described, spec), spec)
    lse = jnp.where(sums > 0, top + jnp.log(jnp.maximum(sums, 1e-30)), EMPTY_LSE)
    B, T, N, _ = q_BTNH.shape
    return out, lse.reshape(B, N, T)


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
    """Implement `block_backward` of the package: dv = p^T do, ds = p (do v^T - sum(do out)), with p = exp(scores - lse)."""
    B, T, N, H = q_BTNH.shape
    K, dtype = k_BSKH.shape[2], q_BTNH.dtype
    grouped = (B, T, K, N // K, -1)

    def einsum(eqn: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(eqn, a, b, precision=_precision(q_BTNH), preferred_element_type=jnp.float32)

    mask = visible(described, spec)[:, None, None]
    scores = _scores(q_BTNH, k_BSKH, spec)
    p = jnp.where(mask, jnp.exp(scores - lse_BNT.reshape(B, K, N // K, T, 1)), 0.0)
    do = do_BTNH.reshape(grouped)
    do_out = do.astype(jnp.float32) * out_BTNH.reshape(grouped).astype(jnp.float32)
    ds = p * (einsum("BTKGH,BSKH->BKGTS", do, v_BSKH) - jnp.moveaxis(do_out.sum(-1), 1, -1)[..., None])
    if spec.softcap:
        ds *= 1 - (scores / spec.softcap) ** 2
    ds = (ds * H**-0.5).astype(dtype)
    dq = einsum("BKGTS,BSKH->BTKGH", ds, k_BSKH).reshape(B, T, N, H)
    dk = einsum("BKGTS,BTKGH->BSKH", ds, q_BTNH.reshape(grouped))
    dv = einsum("BKGTS,BTKGH->BSKH", p.astype(dtype), do)
    return dq, dk, dv
