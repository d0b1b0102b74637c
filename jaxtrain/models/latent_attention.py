"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values are projections of a narrow latent.

For a token's hidden state x, with R = kv_lora_rank and N heads:

    latent, k_rope = split(x wkv_down)                  R numbers, and a rotary key that all heads share
    k_nope, v      = split(norm(latent) wkv_up)         for each head
    q_nope, q_rope = split(norm(x wq_down) wq_up)       for each head; split(x wq) if q_lora_rank is 0
    score          = (q_nope k_nope + rotated(q_rope) rotated(k_rope)) scale

Training computes keys and values of all heads, with the kernels of grouped-query attention. Values may be narrower than keys.
Decoding caches only the latent and the rotated key, R + qk_rope_head_dim numbers a token. It applies wkv_up to queries and
outputs instead of keys and values (the paper's absorbed form). Attention then has one key head of R + qk_rope_head_dim numbers.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config.schema import Model
from jaxtrain.kernels import rope
from jaxtrain.kernels.dot import dot, einsum
from jaxtrain.models.attention import Kernel, Shared, rotary_tables, score_factor, update_cache
from jaxtrain.models.layers import Context, RMSNorm
from jaxtrain.models.lora import Adapters
from jaxtrain.models.module import normal, param
from jaxtrain.models.remat import Kind

DOWN = ("embed", None)
UP = ("embed", "heads", "head_dim")  # the latent is sharded like the model dimension of other weights
# In DeepSeek's and transformers' code, the norms of latents use this constant, and all other norms use norm_eps.
LATENT_NORM_EPS = 1e-6


class LatentAttention(nnx.Module):
    """Causal multi-head latent attention within documents."""

    def __init__(self, model: Model, kernel: Kernel, std: float, out_std: float, ctx: Context, rngs: nnx.Rngs):
        D, N, dtype = model.d_model, model.num_heads, ctx.numerics.params
        Q, R, W = model.q_lora_rank, model.kv_lora_rank, model.v_head_dim
        nope, rotary = model.qk_nope_head_dim, model.qk_rope_head_dim
        if Q:
            self.wq_down = param(rngs, (D, Q), DOWN, normal(std), dtype, dot=True)
            self.q_norm = RMSNorm(Q, None, LATENT_NORM_EPS, ctx, rngs)
            self.wq_up = param(rngs, (Q, N, nope + rotary), UP, normal(std), dtype, dot=True)
        else:
            self.wq = param(rngs, (D, N, nope + rotary), UP, normal(std), dtype, dot=True)
        self.wkv_down = param(rngs, (D, R + rotary), DOWN, normal(std), dtype, dot=True)
        self.kv_norm = RMSNorm(R, None, LATENT_NORM_EPS, ctx, rngs)
        self.wkv_up = param(rngs, (R, N, nope + W), UP, normal(std), dtype, dot=True)
        self.wo = param(rngs, (D, N, W), UP, normal(out_std), dtype, dot=True)
        weights = ("wq_down", "wq_up") if Q else ("wq",)
        self.lora = Adapters(self, (*weights, "wkv_down", "wkv_up", "wo"), ctx, rngs)
        self.model, self.kernel, self.ctx = model, kernel, ctx

    def _dot(self, eqn: str, x: jax.Array, name: str) -> jax.Array:
        return self.lora(name, x, dot(eqn, x, getattr(self, name).get_value(), self.ctx.numerics))

    def _queries(self, x_BTD: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the unrotated part (B, T, N, qk_nope_head_dim) and the rotated part (B, T, N, qk_rope_head_dim) of queries.

        Both parts are multiplied by the model's scale of scores times sqrt(head_dim), because kernels apply 1 / sqrt(head_dim).
        """
        model = self.model
        if model.q_lora_rank:
            latent_BTF = checkpoint_name(self._dot("BTD,DF->BTF", x_BTD, "wq_down"), "q_latent")
            q_BTNH = self._dot("BTF,FNH->BTNH", self.q_norm(latent_BTF), "wq_up")
        else:
            q_BTNH = self._dot("BTD,DNH->BTNH", x_BTD, "wq")
        # Kernels divide scores by the root of head_dim.
        scale = (model.attn_logit_scale * math.sqrt(model.head_dim) if model.attn_logit_scale else 1.0) * score_factor(model)
        nope, rotary = jnp.split(q_BTNH, [model.qk_nope_head_dim], axis=-1)
        nope = nope if scale == 1 else (nope.astype(jnp.float32) * scale).astype(nope.dtype)
        with jax.named_scope("rope"):
            return nope, rope.rotate(rotary, cos, sin, scale)

    def __call__(self, x_BTD: jax.Array, shared: Shared, kind: Kind, cache: Any) -> tuple[jax.Array, Any]:
        """Map (B, T, D) to (B, T, D), a partial sum over the devices that shard the heads. Also return the cache.

        cache: None, or this layer's (latents (B, S, 1, R), rotated keys (B, S, 1, qk_rope_head_dim)).
        """
        model, (cos, sin) = self.model, rotary_tables(shared, kind)
        joint_BTF = checkpoint_name(self._dot("BTD,DF->BTF", x_BTD, "wkv_down"), "kv_latent")
        latent_BTF, key_BTF = jnp.split(joint_BTF, [model.kv_lora_rank], axis=-1)
        latent_BTF = self.kv_norm(latent_BTF)
        with jax.named_scope("rope"):
            key_BT1H = rope.rotate(key_BTF[:, :, None], cos, sin)
        q_nope, q_rope = self._queries(x_BTD, cos, sin)
        if cache is not None:
            cache = update_cache(cache, (latent_BTF[:, :, None], key_BT1H), shared.write_at)
            o_BTNH = self._attend_absorbed(q_nope, q_rope, cache, shared, kind)
        else:
            kv_BTNH = self._dot("BTF,FNH->BTNH", latent_BTF, "wkv_up")
            k_nope, v = jnp.split(kv_BTNH, [model.qk_nope_head_dim], axis=-1)
            q = checkpoint_name(jnp.concatenate([q_nope, q_rope], -1), "q")
            key_BTNH = jnp.broadcast_to(key_BT1H, (*k_nope.shape[:3], key_BT1H.shape[-1]))
            k = checkpoint_name(jnp.concatenate([k_nope, key_BTNH], -1), "k")
            o_BTNH = self.kernel(q, k, checkpoint_name(v, "v"), shared.prepared, kind)
        return self._dot("BTNH,DNH->BTD", o_BTNH, "wo"), cache

    def _attend_absorbed(self, q_nope: jax.Array, q_rope: jax.Array, cache: Any, shared: Shared, kind: Kind) -> jax.Array:
        """Return the output of attention to the cache in the absorbed form, (B, T, N, v_head_dim)."""
        model, numerics = self.model, self.ctx.numerics
        k_up, v_up = jnp.split(self.lora.merge("wkv_up", self.wkv_up.get_value()), [model.qk_nope_head_dim], axis=-1)
        latents, keys = (a.astype(q_nope.dtype) for a in cache)
        q_BTNF = jnp.concatenate([einsum("BTNH,FNH->BTNF", q_nope, k_up, numerics=numerics), q_rope], -1)
        # Kernels divide scores by the root of the width of q_BTNF, but the model divides by the root of head_dim.
        widened = math.sqrt(q_BTNF.shape[-1] / model.head_dim)
        q_BTNF = (q_BTNF.astype(jnp.float32) * widened).astype(q_BTNF.dtype)
        o_BTNF = self.kernel(q_BTNF, jnp.concatenate([latents, keys], -1), latents, shared.prepared, kind)
        return einsum("BTNF,FNH->BTNH", o_BTNF, v_up, numerics=numerics)
