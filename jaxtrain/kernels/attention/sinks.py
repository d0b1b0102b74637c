"""Attention sinks (Xiao et al. 2023, arXiv:2309.17453; learnt as in GPT-OSS): a logit of each head in softmax's denominator.

A sink changes only the normaliser. From a kernel's out and lse:

    lse' = log(exp(lse) + exp(sink))        out' = out exp(lse - lse')

Every kernel returns out and lse, and its backward rule of a block takes the output and log-sum-exp over all keys of a query. So
out' and lse' give the exact gradients of queries, keys and values. The sink's gradient is -sum(exp(sink - lse') dout . out').
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels.attention import Rows, Spec, implementation


def prepare(rows: Rows, spec: Spec, kernel: str) -> Any:
    """Return the kernel's description of the rows, for `attention`. kernel: the kernel's name."""
    if spec.sinks:
        return implementation(kernel, spec).describe_block(rows, spec, True)
    return implementation(kernel, spec).prepare(rows, spec)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks_N: jax.Array | None, prepared: Any, spec: Spec, kernel: str
) -> jax.Array:
    """Return attention (B, T, N, H) of rows that are not sharded over devices. sinks_N: None unless `spec.sinks`."""
    out: jax.Array
    if sinks_N is None:
        out = implementation(kernel, spec).attention(q, k, v, prepared, spec)
    else:
        out = _with_sinks(q, k, v, sinks_N, prepared, spec, kernel)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _with_sinks(q, k, v, sinks_N, described, spec, kernel):
    return _forward(q, k, v, sinks_N, described, spec, kernel)[0]


def _forward(q, k, v, sinks_N, described, spec, kernel):
    out, lse = implementation(kernel, spec).block_forward(q, k, v, described, spec, True)
    out, lse = add_sinks(out, lse, sinks_N)
    return out.astype(q.dtype), lse


def _forward_residuals(q, k, v, sinks_N, described, spec, kernel):
    out, lse = _forward(q, k, v, sinks_N, described, spec, kernel)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, sinks_N, described, out, lse)


def _backward(spec, kernel, residuals, do):
    q, k, v, sinks_N, described, out, lse = residuals
    dq, dk, dv = implementation(kernel, spec).block_backward(q, k, v, out, lse, do, described, spec, True)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), sinks_gradient(sinks_N, out, lse, do), None


_with_sinks.defvjp(_forward_residuals, _backward)


def add_sinks(out_BTNH: jax.Array, lse_BNT: jax.Array, sinks_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return out' and lse' of the module's docstring, both f32."""
    with_sink = jnp.logaddexp(lse_BNT, sinks_N.astype(jnp.float32)[None, :, None])
    share_BTN1 = jnp.swapaxes(jnp.exp(lse_BNT - with_sink), 1, 2)[..., None]
    return out_BTNH.astype(jnp.float32) * share_BTN1, with_sink


def sinks_gradient(sinks_N: jax.Array, out_BTNH: jax.Array, lse_BNT: jax.Array, do_BTNH: jax.Array) -> jax.Array:
    """Return the sinks' gradient (N,), summed over this device's tokens. out_BTNH, lse_BNT: as returned by `add_sinks`."""
    do_out_BTN = jnp.sum(do_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32), axis=-1)
    weight_BNT = jnp.exp(sinks_N.astype(jnp.float32)[None, :, None] - lse_BNT)
    return -jnp.sum(weight_BNT * jnp.swapaxes(do_out_BTN, 1, 2), axis=(0, 2)).astype(sinks_N.dtype)
