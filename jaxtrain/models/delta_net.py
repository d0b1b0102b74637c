"""The gated delta net, a layer of linear attention (Yang et al. 2024, arXiv:2412.06464), as in Qwen3-Next."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config.schema import Model
from jaxtrain.kernels.delta_rule import delta_rule, last_inputs, short_convolution
from jaxtrain.kernels.dot import dot, einsum
from jaxtrain.models.attention import Kernel, Shared
from jaxtrain.models.layers import Context, RMSNorm
from jaxtrain.models.module import Initializer, normal, param
from jaxtrain.models.remat import Kind
from jaxtrain.models.structure import Structure

EPS = 1e-6  # added to the square of the length of queries and keys


class GatedDeltaNet(nnx.Module):
    """The delta rule on convolved projections, with a gate on its normalised output.

    A key head serves linear_value_heads / linear_key_heads neighbouring value heads.
    """

    def __init__(self, model: Model, kernel: Kernel, std: float, out_std: float, ctx: Context, rngs: nnx.Rngs):
        m, D, numerics = model, model.d_model, ctx.numerics
        keys, values = (m.linear_key_heads, m.linear_key_dim), (m.linear_value_heads, m.linear_value_dim)
        for name, heads in (("q", keys), ("k", keys), ("v", values)):
            weight = param(rngs, (D, *heads), ("embed", "heads", "head_dim"), normal(std), numerics.params, dot=True)
            taps = (*heads, m.linear_conv), ("heads", "head_dim", None)
            setattr(self, f"w{name}", weight)
            setattr(self, f"taps_{name}", param(rngs, *taps, normal(m.linear_conv**-0.5), numerics.vectors, exact=True))
        out = (D, *values), ("embed", "heads", "head_dim")
        self.wz = param(rngs, *out, normal(std), numerics.params, dot=True)
        self.wo = param(rngs, *out, normal(out_std), numerics.params, dot=True)
        for_heads = (D, m.linear_value_heads), ("embed", "heads")
        self.wa = param(rngs, *for_heads, normal(std), numerics.params)
        self.wb = param(rngs, *for_heads, normal(std), numerics.params)
        # A token's log decay is -rate softplus(a + shift), between -0.001 and -1.6 where a is 0.
        vector, exact = ((m.linear_value_heads,), ("heads",)), jnp.dtype(jnp.float32)
        rate, step = log_uniform(1.0, 16.0), log_uniform(0.001, 0.1)
        self.log_rate = param(rngs, *vector, lambda *a: jnp.log(rate(*a)), exact, exact=True)
        self.shift = param(rngs, *vector, lambda *a: jnp.log(jnp.expm1(step(*a))), exact, exact=True)
        # This norm multiplies by its scale also in families whose other norms multiply by 1 + scale.
        plain = dataclasses.replace(ctx, structure=Structure())
        self.norm = RMSNorm(m.linear_value_dim, "head_dim", m.norm_eps, plain, rngs)
        self.model, self.kernel, self.ctx = model, kernel, ctx

    def __call__(self, x_BTD: jax.Array, shared: Shared, kind: Kind, cache: Any) -> tuple[jax.Array, Any]:
        """Map (B, T, D) to (B, T, D), a partial sum over the devices that shard the heads. Also return the cache.

        If mesh.seq shards the sequence, each device along it computes some of the heads for all tokens (Ulysses).

        cache: None, or this layer's (state, last inputs of the convolutions of q, k and v) (`cached_arrays`).
        """
        numerics, model, split, segments_BT = self.ctx.numerics, self.model, self.kernel.split, shared.segments_BT
        q, k, v, z = (
            checkpoint_name(dot("BTD,DNH->BTNH", x_BTD, getattr(self, f"w{name}").get_value(), numerics), activation)
            for name, activation in (("q", "q"), ("k", "k"), ("v", "v"), ("z", "attention_gate"))
        )
        ab_BTN2 = jnp.stack([einsum("BTD,DN->BTN", x_BTD, w[...], numerics=numerics) for w in (self.wa, self.wb)], -1)
        q, k, v = split.shard_heads(q, k, jnp.concatenate([v, ab_BTN2], -1))
        v, a_BTN, b_BTN = v[..., :-2], v[..., -2].astype(jnp.float32), v[..., -1].astype(jnp.float32)
        state, *before = cache or (None,) * 4
        inputs = () if cache is None else [last_inputs(x, old) for x, old in zip((q, k, v), cache[1:], strict=True)]
        q, k, v = (
            short_convolution(x, split.local_heads(getattr(self, f"taps_{name}")[...]), segments_BT, old)
            for name, x, old in zip("qkv", (q, k, v), before, strict=True)
        )
        q, k = (jnp.repeat(unit(x), model.linear_value_heads // model.linear_key_heads, axis=2) for x in (q, k))
        rate_N, shift_N = (split.local_heads(x[...]).astype(jnp.float32)[None, None] for x in (self.log_rate, self.shift))
        log_decay_BTN = -jnp.exp(rate_N) * jax.nn.softplus(a_BTN + shift_N)
        with jax.named_scope("delta_rule"):
            args = model.linear_key_dim**-0.5 * q, k, v, log_decay_BTN, jax.nn.sigmoid(b_BTN), segments_BT, state
            out, state = delta_rule(*args, precision=numerics.precision)
        out = checkpoint_name(split.shard_tokens(out.astype(numerics.compute)), "attention_out")
        out = (self.norm(out) * jax.nn.silu(z.astype(jnp.float32))).astype(numerics.compute)
        return dot("BTNH,DNH->BTD", out, self.wo.get_value(), numerics), (state, *inputs) if cache else None


def cached_arrays(model: Model) -> tuple[tuple[int, ...], ...]:
    """Return the shapes, for one sequence, of the arrays that a delta net caches.

    They are its state, (heads, K, V) in float32, and for q, k and v the last inputs of the convolution, (W - 1, heads, width).
    """
    m = model
    keys, values = (m.linear_key_heads, m.linear_key_dim), (m.linear_value_heads, m.linear_value_dim)
    state = m.linear_value_heads, m.linear_key_dim, m.linear_value_dim
    return (state, *((m.linear_conv - 1, *heads) for heads in (keys, keys, values)))


def unit(x: jax.Array) -> jax.Array:
    """Return vectors, on the last axis, scaled to length 1."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPS)


def log_uniform(low: float, high: float) -> Initializer:
    """Return an initializer whose values are log-uniform between `low` and `high`."""

    def initial(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jnp.exp(jax.random.uniform(key, shape, jnp.float32, math.log(low), math.log(high))).astype(dtype)

    return initial
