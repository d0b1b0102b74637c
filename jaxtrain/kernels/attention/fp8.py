"""Attention with a forward pass in e4m3, for Hopper; another kernel computes the backward pass.

    q8, k8, v8   queries, keys and values divided by scales and rounded to e4m3; a scale for each row and head (kernels/fp8.py)
    s  = q8 k8^T scale_q scale_k / sqrt(H)           f32
    p  = exp(s - largest s of the query)             f32, and its sum over keys in f32
    o  = round(256 p) v8 scale_v / (256 sum of p)    256 p in e4m3; summed by tensor cores in a tile of keys, in f32 over tiles

The backward pass is that of the kernel that attention.impl chooses, in bf16. Its inputs are q, k, v before rounding, and the
output and log-sum-exp of the e4m3 forward pass. So the backward pass computes the weights exp(s - lse) with scores from bf16 q
and k. The sum of a query's weights then differs from 1 by the error of lse.

The kernel is in pallas_kernels.py. On CPU, XLA computes with the same rounding, and with all T x S scores in memory.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels.attention import EMPTY_LSE, EMULATED, Rows, Spec, pallas, reference
from jaxtrain.kernels.attention.pallas_kernels import FORWARD_FP8, SHIFT
from jaxtrain.kernels.fp8 import E4M3, amax_scale, quantize


class PreparedFp8(NamedTuple):
    """The descriptions of the batch for the kernels of the forward and of the backward pass."""

    forward: Any  # pallas.Prepared without tiles of the backward pass; emulated: Rows
    backward: Any  # the result of `base.describe_block`


@dataclasses.dataclass(frozen=True)
class Forward8:
    """An implementation of attention (see the package's docstring) with its forward pass in e4m3.

    base: the module of the implementation that computes the backward pass.
    """

    base: Any

    def prepare(self, rows: Rows, spec: Spec) -> PreparedFp8:
        """Return the descriptions of the batch for the kernels of the forward and of the backward pass."""
        return self.describe_block(rows, spec, diagonal=True)

    def attention(
        self, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, prepared: PreparedFp8, spec: Spec
    ) -> jax.Array:
        """Return the output in the dtype of q, (B, T, N, H)."""
        return _attention(q_BTNH, k_BSKH, v_BSKH, prepared, self, spec)

    def describe_block(self, rows: Rows, spec: Spec, diagonal: bool) -> PreparedFp8:
        """Return the descriptions of a block for the kernels of the forward and of the backward pass."""
        forward = rows if spec.fp8 == EMULATED else pallas.prepare_forward(rows, spec, FORWARD_FP8)
        return PreparedFp8(forward, self.base.describe_block(rows, spec, diagonal))

    def block_forward(
        self, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, described: PreparedFp8, spec: Spec, diagonal: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return the block's output and log-sum-exp, both f32, computed in e4m3."""
        return _forward(q_BTNH, k_BSKH, v_BSKH, described.forward, spec, diagonal, jnp.dtype(jnp.float32))

    def block_backward(
        self,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array,
        out_BTNH: jax.Array,
        lse_BNT: jax.Array,
        do_BTNH: jax.Array,
        described: PreparedFp8,
        spec: Spec,
        diagonal: bool,
    ) -> tuple[jax.Array, ...]:
        """Return the gradients of q, k and v, computed by `base`."""
        operands = q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT, do_BTNH
        return self.base.block_backward(*operands, described.backward, spec, diagonal)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, prepared: PreparedFp8, kernel: Forward8, spec: Spec) -> jax.Array:
    return _forward(q, k, v, prepared.forward, spec, True, q.dtype)[0]


def _attention_fwd(q, k, v, prepared, kernel, spec):
    out, lse = _forward(q, k, v, prepared.forward, spec, True, q.dtype)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, prepared, out, lse)


def _attention_bwd(kernel, spec, residuals, do):
    q, k, v, prepared, out, lse = residuals
    gradients = kernel.block_backward(q, k, v, out, lse, do, prepared, spec, True)
    return *(g.astype(q.dtype) for g in gradients), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _quantize(x_BTNH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return x in e4m3, and its scales (B, N), powers of two."""
    scale_BN = amax_scale(jnp.max(jnp.abs(x_BTNH), axis=(1, 3)), E4M3)
    return quantize(x_BTNH, scale_BN[:, None, :, None], E4M3), scale_BN


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, prepared: Any, spec: Spec, causal: bool, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Return the output in `dtype` and the log-sum-exp in f32, (B, N, T)."""
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = map(_quantize, (q, k, v))
    group = q.shape[2] // k.shape[2]
    scales_BN2 = jnp.stack([q_scale * jnp.repeat(k_scale, group, 1), jnp.repeat(v_scale, group, 1)], axis=-1)
    if spec.fp8 == EMULATED:
        return _emulate(q8, k8, v8, scales_BN2, prepared, spec, dtype)
    return pallas.forward_fp8(q8, k8, v8, scales_BN2, prepared, spec, causal, dtype)


def _emulate(q8, k8, v8, scales_BN2, rows: Rows, spec: Spec, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Return the output and log-sum-exp of `pallas.forward_fp8`, with sums in another order."""
    (B, T, N, H), K = q8.shape, k8.shape[2]
    factor, v_scale = (scales_BN2[..., i].reshape(B, K, N // K, 1) for i in range(2))
    q, k, v = (x.astype(jnp.float32) for x in (q8.reshape(B, T, K, N // K, H), k8, v8))
    exact = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    scores = exact("BTKGH,BSKH->BKGTS", q, k) * (factor[..., None] * H**-0.5)
    scores = spec.softcap * jnp.tanh(scores / spec.softcap) if spec.softcap else scores
    mask = reference.visible(rows, spec)[:, None, None]
    top = jnp.where(mask, scores, EMPTY_LSE).max(-1, keepdims=True)
    p = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0.0)), 0.0)
    total = p.sum(-1)
    p8 = (p * 2.0**SHIFT).astype(E4M3).astype(jnp.float32)
    has_keys, total = total > 0, jnp.where(total > 0, total, 1.0)
    out = exact("BKGTS,BSKH->BKGTH", p8, v) * (v_scale * 2.0**-SHIFT / total)[..., None]
    lse = jnp.where(has_keys, top[..., 0] + jnp.log(total), EMPTY_LSE)
    return jnp.moveaxis(out, 3, 1).reshape(B, T, N, H).astype(dtype), lse.reshape(B, N, T)
