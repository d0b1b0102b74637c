"""Grouped-query attention: projections, rotary embedding, and the call of the kernel, with or without a cache."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config.schema import DELTA, LOCAL, UNROTATED, Model
from jaxtrain.kernels import context_parallel, rope
from jaxtrain.kernels.attention import Rows, Spec
from jaxtrain.kernels.context_parallel.split import Split
from jaxtrain.kernels.dot import dot
from jaxtrain.kernels.fp8 import Float8
from jaxtrain.models import windows
from jaxtrain.models.layers import Context, JointRMSNorm, RMSNorm
from jaxtrain.models.lora import Adapters
from jaxtrain.models.module import constant, normal, param
from jaxtrain.models.remat import Kind
from jaxtrain.sharding import Placement, device_index

KIND_SWITCH = "attention_kind"  # scope of a switch over the kinds of layers; the plan weights its branches by `kind_shares`


def kv_copies(model: Model, placement: Placement) -> int:
    """Return the number of devices that share a key/value head: above 1 if there are fewer such heads than tensor ranks."""
    return max(1, placement.size(placement.mesh_axes("kv_heads")) // model.num_kv_heads)


def kind_shares(model: Model) -> tuple[float, ...]:
    """Return, for each kind of layer, its fraction of the stack's layers; a kind is an index into `Kernel.specs`."""
    kinds = layer_kinds(model)
    return tuple(kinds.count(kind) / len(kinds) for kind in range(max(kinds) + 1))


def layer_kinds(model: Model) -> tuple[int, ...]:
    """Return the kind of each layer of the stack, an index into `Kernel.specs`; 0 for a delta net, which uses none.

    Dense layers before the stack have kind 0.
    """
    letters = model.kinds[model.dense_layers :]
    kinds = [kind for kind, _ in windows.layers_by_kind(model)]
    return tuple(0 if letter == DELTA else kinds.index(letter) for letter in letters)


def element_kinds(model: Model) -> tuple[int, ...]:
    """Return the kind of each element of the stack: that of its layer; 0 for a period, whose layers have their own kinds."""
    return layer_kinds(model) if model.period == 1 else (0,) * model.stack_length


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The attention kernel of a model: its name, its specs, and the sharding of the sequence over devices."""

    name: str
    specs: tuple[Spec, ...]  # of each kind of layer; kinds differ in their windows
    split: Split = Split()

    def prepare(self, rows: Rows) -> tuple[Any, ...]:
        """Return the kernel's description of a batch for each kind of layer; all layers of a kind share it."""
        return tuple(context_parallel.prepare(rows, spec, self.name, self.split) for spec in self.specs)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        prepared: tuple[Any, ...],
        kind: Kind,
        sinks_N: jax.Array | None = None,
    ) -> jax.Array:
        """Return the attention output of this device's queries, (B, T, N, H).

        Args:
          q: (B, T, N, H). k, v: (B, S, K, H).
          prepared: the result of `prepare`.
          kind: the layer's kind; an array in a loop over layers of several kinds, which compiles the kernels of all kinds.
          sinks_N: the sinks of this device's heads; None without model.attention_sinks.
        """

        def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array, prepared: Any, sinks_N: jax.Array | None) -> jax.Array:
            return context_parallel.attention(q, k, v, prepared[i], self.specs[i], self.name, self.split, sinks_N)

        if isinstance(kind, int) or len(set(self.specs)) == 1:  # kinds may differ in their rotary embeddings alone
            return attend(kind if isinstance(kind, int) else 0, q, k, v, prepared, sinks_N)
        with jax.named_scope(KIND_SWITCH):
            return jax.lax.switch(
                kind, [functools.partial(attend, i) for i in range(len(self.specs))], q, k, v, prepared, sinks_N
            )


class Shared(NamedTuple):
    """The arrays of a batch that all layers share."""

    prepared: tuple[Any, ...]  # the kernel's description of the batch, by kind of layer
    rotary: tuple[tuple[jax.Array, jax.Array], ...]  # (cos, sin), f32 (B, T, H/2) each: one pair, or a pair by kind of layer
    write_at: jax.Array  # where new keys go in the cache: int32 (); unused without a cache
    real_BT: Any  # bool, False for padding; None if the model does not use it
    segments_BT: Any = None  # of all tokens of a sequence, also those on other devices; None without delta nets

    def with_valid(self, valid: jax.Array | bool) -> "Shared":
        """Return a copy. If `valid`, bool (), is False, its `real_BT` is False, so that no expert processes the tokens."""
        return self if self.real_BT is None else self._replace(real_BT=self.real_BT & valid)


def rotary_tables(shared: Shared, kind: Kind) -> tuple[jax.Array, jax.Array]:
    """Return the rotary tables of a kind of layer."""
    if len(shared.rotary) == 1:
        return shared.rotary[0]
    if isinstance(kind, int):
        return shared.rotary[kind]
    cos, sin = (jax.lax.select_n(kind, *by_kind) for by_kind in zip(*shared.rotary, strict=True))
    return cos, sin


def update_cache(cache: Any, new: Any, at: jax.Array) -> Any:
    """Return a layer's cached arrays, (B, S, ...) each, with the arrays `new` of T tokens written from index `at` on."""
    return tuple(
        jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), at, axis=1) for old, x in zip(cache, new, strict=True)
    )


class Attention(nnx.Module):
    """Causal grouped-query attention within documents."""

    def __init__(self, model: Model, kernel: Kernel, std: float, out_std: float, ctx: Context, rngs: nnx.Rngs):
        D, N, K, H = model.d_model, model.num_heads, model.num_kv_heads, model.head_dim
        dtype = ctx.numerics.params
        self.copies = kv_copies(model, ctx.placement)
        kv_heads = "kv_heads" if self.copies == 1 else None  # fewer heads than ranks cannot be sharded
        self.wq = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), normal(std), dtype, dot=True)
        self.wk = param(rngs, (D, K, H), ("embed", kv_heads, "head_dim"), normal(std), dtype, dot=True)
        self.wv = param(rngs, (D, K, H), ("embed", kv_heads, "head_dim"), normal(std), dtype, dot=True)
        self.wo = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), normal(out_std), dtype, dot=True)
        if model.qkv_bias:
            self.bq = param(rngs, (N, H), ("heads", "head_dim"), constant(0.0), ctx.numerics.vectors)
            self.bk = param(rngs, (K, H), (kv_heads, "head_dim"), constant(0.0), ctx.numerics.vectors)
            self.bv = param(rngs, (K, H), (kv_heads, "head_dim"), constant(0.0), ctx.numerics.vectors)
        if model.attention_out_bias:
            self.bo = param(rngs, (D,), ("embed",), constant(0.0), ctx.numerics.vectors)
        if model.attention_sinks:
            self.sinks = param(rngs, (N,), ("heads",), normal(std), ctx.numerics.vectors)
        if model.attention_gate:
            self.wg = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), normal(std), dtype, dot=True)
        if model.qk_norm_joint:
            self.q_norm = JointRMSNorm(N, H, "heads", 1, model.norm_eps, ctx, rngs)
            self.k_norm = JointRMSNorm(K, H, kv_heads, self.copies, model.norm_eps, ctx, rngs)
        elif model.qk_norm:
            self.q_norm = RMSNorm(H, "head_dim", model.norm_eps, ctx, rngs)
            self.k_norm = RMSNorm(H, "head_dim", model.norm_eps, ctx, rngs)
        self.lora = Adapters(self, ("wq", "wk", "wv", *("wg",) * model.attention_gate, "wo"), ctx, rngs)
        self.model, self.kernel, self.ctx = model, kernel, ctx

    def _local_head(self, w: Any) -> Any:
        """Return w (..., K, H); if several devices share a key/value head, return only this device's head, (..., 1, H)."""
        if self.copies == 1:
            return w
        if isinstance(w, Float8):
            return Float8(self._local_head(w.bits), w.scale, self._local_head(w.gradient))
        head = device_index(self.ctx.placement.mesh_axes("kv_heads")) // self.copies
        return jax.lax.dynamic_slice_in_dim(w, head, 1, axis=w.ndim - 2)

    def _project(self, x_BTD: jax.Array, name: str, bias: nnx.Param | None) -> jax.Array:
        shard = self._local_head if name in ("wk", "wv") else lambda w: w
        y = dot("BTD,DNH->BTNH", x_BTD, shard(getattr(self, name).get_value()), self.ctx.numerics)
        y = self.lora(name, x_BTD, y, shard)
        if bias is None:
            return y
        return (y.astype(jnp.float32) + shard(bias[...])[None, None].astype(jnp.float32)).astype(y.dtype)

    def __call__(self, x_BTD: jax.Array, shared: Shared, kind: Kind, cache: Any) -> tuple[jax.Array, Any]:
        """Map (B, T, D) to (B, T, D), a partial sum over the devices that shard the heads. Also return the cache.

        cache: None, or this layer's (k, v), each (B, S, K, H). New keys and values are written at `shared.write_at`, and the
        queries attend to all keys of the cache.
        """
        numerics, model, bias = self.ctx.numerics, self.model, self.model.qkv_bias
        q = self._project(x_BTD, "wq", self.bq if bias else None)
        k = self._project(x_BTD, "wk", self.bk if bias else None)
        v = self._project(x_BTD, "wv", self.bv if bias else None)
        if model.qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k, self._local_head) if isinstance(self.k_norm, JointRMSNorm) else self.k_norm(k)
        # Kernels divide scores by the root of head_dim.
        scale = model.attn_logit_scale * math.sqrt(model.head_dim) if model.attn_logit_scale else 1.0
        with jax.named_scope("rope"):
            cos, sin = rotary_tables(shared, kind)
            q = checkpoint_name(rope.rotate(q, cos, sin, scale), "q")
            k = checkpoint_name(rope.rotate(k, cos, sin), "k")
        v = checkpoint_name(v, "v")
        if cache is not None:
            cache = k, v = update_cache(cache, (k, v), shared.write_at)
        o_BTNH = self.kernel(q, k, v, shared.prepared, kind, self.sinks[...] if model.attention_sinks else None)
        if model.attention_gate:
            gate_BTNH = self.lora("wg", x_BTD, dot("BTD,DNH->BTNH", x_BTD, self.wg.get_value(), numerics))
            gate_BTNH = checkpoint_name(gate_BTNH, "attention_gate")
            o_BTNH = (o_BTNH.astype(jnp.float32) * jax.nn.sigmoid(gate_BTNH.astype(jnp.float32))).astype(o_BTNH.dtype)
        y_BTD = self.lora("wo", o_BTNH, dot("BTNH,DNH->BTD", o_BTNH, self.wo.get_value(), numerics))
        return y_BTD, cache


def rotary_frequencies(model: Model) -> jax.Array:
    """Return the angle per position of each pair of a head's rotated dimensions, with model.rope_scaling, f32 (pairs,)."""
    m, freq = model, rope.frequencies(model.rotary_dim, model.rope_base)
    if m.rope_scaling == "llama3":
        return rope.llama3_scaling(freq, m.rope_factor, m.rope_low_freq, m.rope_high_freq, m.rope_original_len)
    if m.rope_scaling == "linear":
        return rope.linear_scaling(freq, m.rope_factor)
    if m.rope_scaling == "yarn":
        betas = m.rope_beta_fast, m.rope_beta_slow
        return rope.yarn_scaling(freq, m.rope_base, m.rope_factor, *betas, m.rope_original_len, m.rope_truncate)
    return freq


def rotary_factor(model: Model) -> float:
    """Return YaRN's factor of the rotary tables, and so of rotated queries and of rotated keys; 1 without YaRN."""
    m = model
    if m.rope_scaling != "yarn":
        return 1.0
    if m.rope_attention_factor:
        return m.rope_attention_factor
    if m.rope_mscale and m.rope_mscale_all_dim:
        return rope.yarn_mscale(m.rope_factor, m.rope_mscale) / rope.yarn_mscale(m.rope_factor, m.rope_mscale_all_dim)
    return rope.yarn_mscale(m.rope_factor)


def score_factor(model: Model) -> float:
    """Return DeepSeek's factor of attention scores, `rope.yarn_mscale` squared; 1 without YaRN or rope_mscale_all_dim.

    Only multi-head latent attention multiplies scores by this factor. Its heads have dimensions that are not rotated, to which
    the factor of the rotary tables does not apply.
    """
    if model.rope_scaling != "yarn" or not model.rope_mscale_all_dim:
        return 1.0
    return rope.yarn_mscale(model.rope_factor, model.rope_mscale_all_dim) ** 2


def _make_rotary(model: Model, positions_BT: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Return the rotary tables for all layers, or for each kind of layer if their frequencies differ."""
    scaled = rope.tables(positions_BT, rotary_frequencies(model), rotary_factor(model))
    if not model.local_rope_base and UNROTATED not in model.kinds:
        return (scaled,)
    local = scaled
    if model.local_rope_base:
        local = rope.tables(positions_BT, rope.frequencies(model.rotary_dim, model.local_rope_base))
    tables = {LOCAL: local}
    if UNROTATED in model.kinds:
        tables[UNROTATED] = jnp.ones_like(scaled[0]), jnp.zeros_like(scaled[1])
    return tuple(tables.get(kind, scaled) for kind, _ in windows.layers_by_kind(model))


def cached_arrays(model: Model, placement: Placement) -> tuple[tuple[tuple[int, int], ...], str | None]:
    """Return (heads, width) of each of the two arrays that a layer caches for a token, and the logical axis of their heads.

    The arrays are keys and values; with multi-head latent attention, latents and rotated keys.
    """
    if model.kv_lora_rank:
        return ((1, model.kv_lora_rank), (1, model.qk_rope_head_dim)), None
    return ((model.num_kv_heads * kv_copies(model, placement), model.head_dim),) * 2, "kv_heads"


def shared_arrays(model: Model, kernel: Kernel, rows: Rows, write_at: jax.Array | None = None) -> Shared:
    """Return the arrays that all layers share. write_at: the cache index of the first new token; None without a cache."""
    at = jnp.zeros((), jnp.int32) if write_at is None else write_at
    real_BT = rows.q_segments > 0 if model.num_experts else None
    segments_BT = kernel.split.gather(rows.q_segments) if model.period > 1 else None
    return Shared(kernel.prepare(rows), _make_rotary(model, rows.q_positions), at, real_BT, segments_BT)
