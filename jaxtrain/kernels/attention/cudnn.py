"""cuDNN's flash attention, for causal, packed and sliding-window rows with grouped queries.

jax.nn.dot_product_attention offers neither packing nor a float32 logsumexp, so this binds the primitives beneath it, in a
private module of jax; tests/test_attention.py fails with a plain message when a jax release changes them. They
must run inside a shard_map that is manual over the whole mesh (models/attention.py sees to it): there the
primitive's partitioning callback, whose pointer would defeat the persistent compile cache, is not used.

The custom_vjp here names both residuals, "attention_out" and "attention_lse", so that a remat policy can save them and the
kernel need not run forward twice.
"""

import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels.attention import Hardware, Rows, Spec, Unsupported

# jax 0.12 added a parameter for user-written changes of the scores.
_takes_score_mod = "score_mod" in inspect.signature(fused._dot_product_attention_fwd_rule).parameters
NO_SCORE_MOD = {"score_mod": None} if _takes_score_mod else {}


class Packed(NamedTuple):
    """cuDNN's description of packed rows."""

    lengths_BM: jax.Array  # tokens of each document, of padding last; -1: no such document
    offsets_BM: jax.Array  # (B, M + 1): where each document begins in its row; -1 elsewhere


def unsupported(spec: Spec, hardware: Hardware) -> str | None:
    """Why cuDNN cannot do this, or None. Limits: cuDNN 9's flash attention on Ampere and Hopper."""
    if hardware.platform != "gpu":
        return "needs an NVIDIA GPU"
    if spec.cached:
        return "is not used with a key/value cache"
    if hardware.compute_capability < (8, 0):
        return "needs compute capability 8.0 or newer"
    if spec.packed and hardware.compute_capability < (9, 0):
        return "needs compute capability 9.0 (Hopper) or newer for packed documents"
    if spec.dtype != "bf16":
        return f"needs bf16, not {spec.dtype}"
    largest = 256 if hardware.compute_capability >= (9, 0) else 128
    if spec.head_dim > largest or spec.head_dim % 8:
        return f"needs a head_dim that is a multiple of 8 and at most {largest}, not {spec.head_dim}"
    if spec.softcap:
        return "has no soft cap on scores"
    return None


def prepare(rows: Rows, spec: Spec) -> Packed | None:
    """Lengths and offsets of the documents in each row. Documents must be contiguous, numbered from 1, padding last.

    Padding counts as one more document. cuDNN leaves what belongs to none undefined, and to put zeros there would be one more
    pass over queries, keys, values and output, forward and backward, in every layer.
    """
    if not spec.packed:
        return None
    segments_BT = rows.q_segments
    number_M = jnp.append(jnp.arange(1, spec.max_segments + 1, dtype=segments_BT.dtype), 0)
    lengths_BM = jnp.sum(segments_BT[:, :, None] == number_M[None, None, :], axis=1, dtype=jnp.int32)
    ends_BM = jnp.cumsum(lengths_BM, axis=1, dtype=jnp.int32)
    exists_BM = lengths_BM > 0
    # The primitive moves all rows' entries that are not -1 to the front and reads lengths and offsets pairwise, so there must
    # be as many of one as of the other: a closing offset after the last document would shift those of the next row.
    starts_BM = jnp.where(exists_BM, ends_BM - lengths_BM, -1)
    offsets_BM = jnp.pad(starts_BM, ((0, 0), (0, 1)), constant_values=-1)
    return Packed(jnp.where(exists_BM, lengths_BM, -1), offsets_BM)


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, prepared: Packed | None, spec: Spec) -> jax.Array:
    """See the package's docstring; bf16 in and out, softmax in f32."""
    if prepared is None:
        return _flash(q_BTNH, k_BSKH, v_BSKH, None, spec)
    B, T, N, H = q_BTNH.shape
    if B * T * N * H >= 2**31:
        raise Unsupported(
            f"attention.impl = 'cudnn': {B} x {T} tokens x {N} x {H} elements on a device do not fit the 32-bit offsets of "
            "packed rows. Set train.grad_accum higher."
        )
    return _flash(q_BTNH, k_BSKH, v_BSKH, prepared, spec)


def _operands(q: jax.Array, packed: Packed | None) -> tuple[jax.Array, ...]:
    """The primitive's further operands: bias, lengths and offsets of queries and keys, page tables; empty where unused."""
    none = jnp.zeros(0, q.dtype)
    if packed is None:
        return (none,) * 7
    lengths, offsets = packed.lengths_BM, packed.offsets_BM
    return (none, lengths, lengths, offsets, offsets, none, none)


def _static(q: jax.Array, packed: Packed | None, spec: Spec) -> dict:
    mask = fused.MaskType.CAUSAL if packed is None else fused.MaskType.PADDING_CAUSAL
    return {
        "scale": q.shape[-1] ** -0.5,
        "seed": 42,  # of dropout, which is off
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, no gradient of a bias
        "mask_type": mask,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": spec.window or None,
        **NO_SCORE_MOD,
    }


def _forward(q, k, v, packed, spec, training):
    return fused._dot_product_attention_fwd_p_wrapper.bind(
        q, k, v, *_operands(q, packed), **_static(q, packed, spec), is_training=training
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _flash(q: jax.Array, k: jax.Array, v: jax.Array, packed: Packed | None, spec: Spec) -> jax.Array:
    return _forward(q, k, v, packed, spec, training=False)[0]


def _flash_fwd(q, k, v, packed, spec):
    out, lse = _forward(q, k, v, packed, spec, training=True)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, packed, out, lse)


def _flash_bwd(spec, residuals, do):
    q, k, v, packed, out, lse = residuals
    dq, dk, dv = fused._dot_product_attention_bwd_p_wrapper.bind(
        q, k, v, *_operands(q, packed), lse, out, do, **_static(q, packed, spec)
    )
    return dq, dk, dv, None


_flash.defvjp(_flash_fwd, _flash_bwd)
