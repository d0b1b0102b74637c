"""Emulate in jnp the two JAX primitives of cuDNN attention that jaxtrain binds, to test the code around them without a GPU.

Lengths and offsets go through jax's own conversion to the kernel's arguments. Values that the kernel leaves undefined are NaN.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused

Kinds = fused.MaskType


def _documents(q, k, operands, mask_type):
    """Return (first query, number of queries, first key, number of keys) of each document, counted over all sequences."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    if mask_type in (Kinds.CAUSAL, Kinds.NO_MASK):
        return jnp.arange(B) * T, jnp.full((B,), T), jnp.arange(B) * S, jnp.full((B,), S)
    _, q_lengths, kv_lengths, q_offsets, kv_offsets, _, _ = operands
    if q_offsets.shape[1] < 3:
        raise ValueError("with one document a row the primitive would ignore offsets")
    told = [x.ravel() for x in fused._fix_seqlen_offsets(q_lengths, kv_lengths, q_offsets, kv_offsets, q, k)]
    number = told[0].shape[0]
    return told[2][:number] // (N * H), told[0], told[3][:number] // (K * H), told[1]


def _places(starts, lengths, number):
    """Return each token's position in each document, and whether the document contains it: two arrays (documents, tokens)."""
    at = jnp.arange(number)[None] - starts[:, None]
    return at, (at >= 0) & (at < lengths[:, None])


def _visible(q, k, operands, mask_type, window):
    q_starts, q_lengths, kv_starts, kv_lengths = _documents(q, k, operands, mask_type)
    q_at, q_in = _places(q_starts, q_lengths, q.shape[0] * q.shape[1])
    kv_at, kv_in = _places(kv_starts, kv_lengths, k.shape[0] * k.shape[1])
    seen = q_in[:, :, None] & kv_in[:, None, :]
    if mask_type in (Kinds.CAUSAL, Kinds.PADDING_CAUSAL):
        distance = q_at[:, :, None] - kv_at[:, None, :]
        seen &= (distance >= 0) & (distance < (window or q.shape[1] + k.shape[1]))
    return seen.any(axis=0), q_starts, q_lengths, q_in, kv_in


def _flat(x, heads=None):
    """Return x (B, T, K, H) as float32 (B T, heads, H). Each of the K heads is repeated heads / K times; None: heads = K."""
    x = x.reshape(-1, *x.shape[2:]).astype(jnp.float32)
    return x if heads is None else jnp.repeat(x, heads // x.shape[1], axis=1)


def _einsum(eqn, a, b):
    return jnp.einsum(eqn, a, b, precision=jax.lax.Precision.HIGHEST)


def forward(q, k, v, *operands, scale, mask_type, sliding_window_length, is_training, **_):
    B, T, N, _ = q.shape
    seen, starts, lengths, q_in, _ = _visible(q, k, operands, mask_type, sliding_window_length)
    scores = jnp.where(seen[None], scale * _einsum("tnh,snh->nts", _flat(q), _flat(k, N)), -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    defined = q_in.any(axis=0)
    p = jnp.where(defined[None, :, None], jnp.exp(scores - lse[:, :, None]), jnp.nan)
    out = _einsum("nts,snh->tnh", p, _flat(v, N)).reshape(q.shape).astype(q.dtype)
    at = jnp.clip(starts[:, None] + jnp.arange(T)[None], 0, B * T - 1)
    stats = jnp.where((jnp.arange(T)[None] < lengths[:, None])[:, None], jnp.moveaxis(lse[:, at], 0, 1), jnp.nan)
    return (out, stats) if is_training else (out,)


def backward(q, k, v, *rest, scale, mask_type, sliding_window_length, **_):
    operands, (stats, out, do) = rest[:7], rest[7:]
    N = q.shape[2]
    seen, starts, _, q_in, kv_in = _visible(q, k, operands, mask_type, sliding_window_length)
    document = jnp.argmax(q_in, axis=0)
    at = jnp.clip(jnp.arange(q_in.shape[1]) - starts[document], 0, stats.shape[2] - 1)
    lse = stats[document[None], jnp.arange(N)[:, None], at[None]]
    defined = q_in.any(axis=0)
    scores = scale * _einsum("tnh,snh->nts", _flat(q), _flat(k, N))
    p = jnp.where(seen[None], jnp.exp(scores - lse[:, :, None]), 0.0)
    share = jnp.where(defined[:, None], (_flat(do) * _flat(out)).sum(-1), 0.0).T
    ds = scale * p * (_einsum("tnh,snh->nts", _flat(do), _flat(v, N)) - share[:, :, None])

    def of_keys(x):
        grouped = x.reshape(-1, k.shape[2], N // k.shape[2], x.shape[-1]).sum(2)
        return jnp.where(kv_in.any(axis=0)[:, None, None], grouped, jnp.nan).reshape(k.shape).astype(k.dtype)

    dq = jnp.where(defined[:, None, None], _einsum("nts,snh->tnh", ds, _flat(k, N)), jnp.nan)
    dk, dv = of_keys(_einsum("nts,tnh->snh", ds, _flat(q))), of_keys(_einsum("nts,tnh->snh", p, _flat(do)))
    return dq.reshape(q.shape).astype(q.dtype), dk, dv


MODULE = SimpleNamespace(
    _dot_product_attention_fwd_p_wrapper=SimpleNamespace(bind=forward),
    _dot_product_attention_bwd_p_wrapper=SimpleNamespace(bind=backward),
    MaskType=Kinds,
    AttentionLayout=fused.AttentionLayout,
)
