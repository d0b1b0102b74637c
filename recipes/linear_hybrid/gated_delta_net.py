"""A hybrid of linear and full attention: three gated delta nets, then one layer of softmax attention, as in Qwen3-Next.

A gated delta net (Yang et al. 2024, arXiv:2412.06464) has a state, a matrix S, for each head. Each token multiplies S by a
decay, writes its value v at its key k, and reads S with its query q:

    S = decay S;    S = S + k (beta (v - S^T k))^T;    o = S^T q

with 0 < decay < 1 and 0 < beta < 1. `delta_rule` computes the tokens of a chunk together, and scans over chunks. S is zero
before the first token of each document.

Three things differ from Qwen3-Next. Feed-forward blocks have no experts, softmax attention has no output gate, and its rotary
embedding covers the whole head. The model trains and evaluates. It has no `decode`, so it writes no samples.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config import ConfigError, Model, Problem
from jaxtrain.kernels.attention import Rows
from jaxtrain.kernels.dot import dot, einsum
from jaxtrain.kernels.embedding import TABLE
from jaxtrain.models.attention import Kernel, Shared, share
from jaxtrain.models.flops import Flops, attention, projections
from jaxtrain.models.layers import Context, Embed, RMSNorm
from jaxtrain.models.module import normal, param, stack
from jaxtrain.models.remat import Kind, Plan
from jaxtrain.models.structure import Structure
from jaxtrain.models.transformer import Block, Carry

EXACT = jax.lax.Precision.HIGHEST  # float32 matmuls: TF32 would add rounding errors in each block of an inverse

# ---- The recurrence


def delta_rule(
    q_BTNK: jax.Array,
    k_BTNK: jax.Array,
    v_BTNV: jax.Array,
    log_decay_BTN: jax.Array,
    beta_BTN: jax.Array,
    segments_BT: jax.Array,
    chunk: int,
    precision: jax.lax.Precision = EXACT,
) -> jax.Array:
    """Return the outputs o of the gated delta rule, (B, T, N, V), with a state in the dtype of the arguments.

    In a chunk that begins with the state S, let g_i be the sum of log decays from the chunk's start to token i. Token i writes
    k_i u_i^T, with

        u_i + beta_i sum_{j<i} exp(g_i - g_j) (k_i . k_j) u_j = beta_i (v_i - exp(g_i) S^T k_i)

    over the tokens j of its own document. This triangular system is solved for all chunks at once: u = U - W S. The scan over
    chunks has only the matmuls with S or u. exp(g_i) is 0 where the document of i begins in this chunk.

    Args:
      log_decay_BTN: logarithm of each token's decay, at most 0.
      segments_BT: document of each token. The tokens of a document are neighbours.
      chunk: tokens that are computed together.
    """
    B, T, N, _ = q_BTNK.shape
    padding = -T % chunk

    def chunks(x: jax.Array) -> jax.Array:
        """Reshape (B, T, N, ...) to (chunks, B, N, C, ...)."""
        x = jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)))
        x = x.reshape(B, -1, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 3) if x.ndim > 3 else jnp.moveaxis(x, 1, 0)

    def product(eqn: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(eqn, x, y, precision=precision)

    q, k, v, beta = (chunks(x) for x in (q_BTNK, k_BTNK, v_BTNV, beta_BTN))
    g = chunks(log_decay_BTN)
    segments = chunks(segments_BT)[:, :, None]  # (chunks, B, 1, C), as g without heads
    before = jnp.concatenate([jnp.full_like(segments[:1, ..., -1:], -1), segments[:-1, ..., -1:]])

    def decay(log: jax.Array, where: jax.Array) -> jax.Array:
        return jnp.exp(jnp.where(where, log, -jnp.inf))

    # Sums of log decays from token j to token i. Differences of sums from the first token would lose digits, and so would their
    # gradients.
    later = jnp.tril(jnp.ones((chunk, chunk), bool), -1)[None, None, None]
    sums = jnp.cumsum(jnp.where(later, g[..., :, None], 0.0), -2)
    alike = (later | jnp.eye(chunk, dtype=bool)[None, None, None]) & (segments[..., :, None] == segments[..., None, :])
    between = decay(sums, alike)
    from_state, to_state = decay(jnp.cumsum(g, -1), segments == before), between[..., -1, :]
    kept = from_state[..., -1:]
    system = jnp.tril(beta[..., None] * between * product("...iK,...jK->...ij", k, k), -1)
    right = beta[..., None] * jnp.concatenate([from_state[..., None] * k, v], -1)
    w, u = jnp.split(product("...ij,...jK->...iK", inverse(system), right), [k.shape[-1]], axis=-1)
    scores = between * product("...iK,...jK->...ij", q, k)
    read, write = from_state[..., None] * q, to_state[..., None] * k

    def one(state: jax.Array, of_chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        w, u, scores, read, write, kept = of_chunk
        u = u - product("BNCK,BNKV->BNCV", w, state)
        o = product("BNCK,BNKV->BNCV", read, state) + product("BNij,BNjV->BNiV", scores, u)
        return kept[..., None] * state + product("BNCK,BNCV->BNKV", write, u), o

    state = jnp.zeros((B, N, k.shape[-1], v.shape[-1]), v.dtype)
    o = jax.lax.scan(one, state, (w, u, scores, read, write, kept))[1]
    return jnp.moveaxis(o, (0, 3), (1, 2)).reshape(B, -1, N, v.shape[-1])[:, :T]


@jax.custom_vjp
def inverse(below: jax.Array) -> jax.Array:
    """Return the inverse of I + `below`, (..., C, C). `below` is strictly lower triangular.

    Diagonal blocks of one row are inverted first, then blocks of two, four and more rows. The inverse of [[a, 0], [c, b]] is
    [[a^-1, 0], [-b^-1 c a^-1, b^-1]], so only matmuls are needed. They are faster than cuBLAS's solver for many small
    triangular systems.
    """
    size, block = below.shape[-1], 1
    row, column = jnp.arange(size)[:, None], jnp.arange(size)[None]
    found = jnp.broadcast_to(jnp.eye(size, dtype=below.dtype), below.shape)
    while block < size:
        lower = (row // (2 * block) == column // (2 * block)) & (row // block > column // block)
        c = jnp.where(jnp.broadcast_to(lower, below.shape), below, 0.0)
        found -= c if block == 1 else jnp.matmul(jnp.matmul(found, c, precision=EXACT), found, precision=EXACT)
        block *= 2
    return found


def _inverse_fwd(below: jax.Array) -> tuple[jax.Array, jax.Array]:
    found = inverse(below)
    return found, found


def _inverse_bwd(found: jax.Array, d_found: jax.Array) -> tuple[jax.Array]:
    turned = jnp.swapaxes(found, -1, -2)
    return (-jnp.tril(jnp.matmul(jnp.matmul(turned, d_found, precision=EXACT), turned, precision=EXACT), -1),)


inverse.defvjp(_inverse_fwd, _inverse_bwd)


def short_convolution(x_BTNH: jax.Array, taps_NHW: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """Return silu of each channel's causal convolution over tokens of the same document, in float32, (B, T, N, H)."""
    x_BTNH, width, y_BTNH = x_BTNH.astype(jnp.float32), taps_NHW.shape[-1], 0.0
    for back in range(width):
        shifted = jnp.pad(x_BTNH, ((0, 0), (back, 0), (0, 0), (0, 0)))[:, : x_BTNH.shape[1]]
        segments = jnp.pad(segments_BT, ((0, 0), (back, 0)), constant_values=-1)[:, : x_BTNH.shape[1]]
        seen = (segments == segments_BT)[..., None, None]
        y_BTNH += jnp.where(seen, shifted, 0.0) * taps_NHW[None, None, ..., width - 1 - back].astype(jnp.float32)
    return jax.nn.silu(y_BTNH)


# ---- The layers


class Tokens(NamedTuple):
    """The arrays of a batch that all layers share."""

    attention: Shared
    segments_BT: jax.Array  # of all tokens of a sequence, also those on other devices


def log_uniform(low: float, high: float) -> Any:
    """Return an initializer whose values are log-uniform between `low` and `high`."""
    return lambda key, shape, dtype: jnp.exp(jax.random.uniform(key, shape, jnp.float32, math.log(low), math.log(high))).astype(
        dtype
    )


class GatedDeltaNet(nnx.Module):
    """The delta rule on convolved projections, with a gate on its output."""

    def __init__(self, family: "Family", model: Model, kernel: Kernel, out_std: float, ctx: Context, rngs: nnx.Rngs):
        D, std, f, numerics = model.d_model, model.init_std, family, ctx.numerics
        of_heads = {"q": (f.key_heads, f.key_dim), "k": (f.key_heads, f.key_dim), "v": (f.value_heads, f.value_dim)}
        for name, (count, width) in of_heads.items():
            weight = param(rngs, (D, count, width), ("embed", "heads", "head_dim"), normal(std), numerics.params, dot=True)
            taps = param(
                rngs, (count, width, f.taps), ("heads", "head_dim", None), normal(f.taps**-0.5), numerics.params, exact=True
            )
            setattr(self, f"w{name}", weight)
            setattr(self, f"taps_{name}", taps)
        out = (D, f.value_heads, f.value_dim), ("embed", "heads", "head_dim")
        self.wz = param(rngs, *out, normal(std), numerics.params, dot=True)
        self.wo = param(rngs, *out, normal(out_std), numerics.params, dot=True)
        self.wa = param(rngs, (D, f.value_heads), ("embed", "heads"), normal(std), numerics.params)
        self.wb = param(rngs, (D, f.value_heads), ("embed", "heads"), normal(std), numerics.params)
        # A token's log decay is -rate softplus(a + shift), between -0.001 and -1.6 where a is 0.
        vector = (f.value_heads,), ("heads",)
        rate, step = log_uniform(1.0, 16.0), log_uniform(0.001, 0.1)
        self.log_rate = param(rngs, *vector, lambda *a: jnp.log(rate(*a)), numerics.vectors, exact=True)
        self.shift = param(rngs, *vector, lambda *a: jnp.log(jnp.expm1(step(*a))), numerics.vectors, exact=True)
        self.norm = RMSNorm(f.value_dim, "head_dim", model.norm_eps, ctx, rngs)
        self.family, self.kernel, self.ctx = family, kernel, ctx

    def __call__(self, x_BTD: jax.Array, shared: Tokens, kind: Kind, cache: Any) -> tuple[jax.Array, Any]:
        """Return (B, T, D): this device's term of the output, which is a sum over the devices that shard the heads.

        If mesh.seq shards the sequence, each device along it computes some of the heads for all tokens (Ulysses).
        """
        n, split, segments_BT = self.ctx.numerics, self.kernel.split, shared.segments_BT
        q, k, v, z = (
            checkpoint_name(dot("BTD,DNH->BTNH", x_BTD, getattr(self, f"w{name}").get_value(), n), name) for name in "qkvz"
        )
        ab_BTN2 = jnp.stack([einsum("BTD,DN->BTN", x_BTD, w[...], numerics=n) for w in (self.wa, self.wb)], -1)
        q, k, v = split.shard_heads(q, k, jnp.concatenate([v, ab_BTN2], -1))
        v, a_BTN, b_BTN = v[..., :-2], v[..., -2].astype(jnp.float32), v[..., -1].astype(jnp.float32)
        q, k, v = (
            short_convolution(x, split.local_heads(getattr(self, f"taps_{name}")[...]), segments_BT)
            for name, x in zip("qkv", (q, k, v), strict=True)
        )
        of_values = self.family.value_heads // self.family.key_heads
        q, k = (jnp.repeat(unit(x), of_values, axis=2) for x in (q, k))
        rate_N, shift_N = (split.local_heads(x[...]).astype(jnp.float32)[None, None] for x in (self.log_rate, self.shift))
        log_decay_BTN = -jnp.exp(rate_N) * jax.nn.softplus(a_BTN + shift_N)
        with jax.named_scope("delta_rule"):
            scale = self.family.key_dim**-0.5
            how = segments_BT, self.family.chunk, n.precision
            o = delta_rule(scale * q, k, v, log_decay_BTN, jax.nn.sigmoid(b_BTN), *how)
        o = checkpoint_name(split.shard_tokens(o.astype(n.compute)), "attention_out")
        o = (self.norm(o) * jax.nn.silu(z.astype(jnp.float32))).astype(n.compute)
        return dot("BTNH,DNH->BTD", o, self.wo.get_value(), n), cache


def unit(x: jax.Array) -> jax.Array:
    """Return vectors, on the last axis, scaled to length 1."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


class DeltaBlock(Block):
    """A transformer block (jaxtrain/models/transformer.py) with a gated delta net in place of attention."""

    def __init__(self, family: "Family", model: Model, kernel: Kernel, ctx: Context, rngs: nnx.Rngs):
        super().__init__(model, kernel, ctx, rngs)
        self.attention = GatedDeltaNet(family, model, kernel, model.init_std / math.sqrt(2 * model.num_layers), ctx, rngs)


class Period(nnx.Module):
    """One element of the layer stack: several delta blocks, then a block of softmax attention."""

    def __init__(self, family: "Family", model: Model, kernel: Kernel, ctx: Context, rngs: nnx.Rngs):
        self.count = family.linear_layers
        for i in range(self.count):
            setattr(self, f"linear_{i}", DeltaBlock(family, model, kernel, ctx, rngs))
        self.full = Block(model, kernel, ctx, rngs)


class Hybrid(nnx.Module):
    """The model from tokens to final hidden states. `head_VD` maps hidden states to logits."""

    uses_plan_run = True

    def __init__(self, family: "Family", model: Model, kernel: Kernel, remat: Plan, ctx: Context, rngs: nnx.Rngs):
        ctx = dataclasses.replace(ctx, structure=Structure(norm_offset=True))
        self.periods = model.num_layers // (family.linear_layers + 1)
        self.embed = Embed(model.vocab_size, model.d_model, model.init_std, ctx, rngs)
        self.layers = stack(lambda r: Period(family, model, kernel, ctx, r), self.periods, rngs)
        self.final_norm = RMSNorm(model.d_model, "embed", model.norm_eps, ctx, rngs)
        if not model.tied_head:
            self.head = param(rngs, (model.vocab_size, model.d_model), TABLE, normal(model.init_std), ctx.numerics.params)
        self.model, self.kernel, self.remat, self.ctx = model, kernel, remat, ctx

    @property
    def head_VD(self) -> Any:
        """Return the output head before its gather: this device's shard, or a `zero.ComputeCopy`."""
        return (self.embed.embedding if self.model.tied_head else self.head).get_value()

    def __call__(self, tokens_BT: jax.Array, segments_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Return hidden states after the final norm, (B, T, D) in the residual layout."""
        rows = Rows(segments_BT, positions_BT, segments_BT, positions_BT)
        shared = Tokens(share(self.model, self.kernel, rows), self.kernel.split.gather(segments_BT))
        with jax.named_scope("embed"):
            carry = self.embed(tokens_BT), ()
        with jax.named_scope("layers"):
            x_BTD, _ = self.remat.run(self.period, carry, self.layers, shared, (0,) * self.periods)
        with jax.named_scope("final_norm"):
            return self.ctx.zero.gather_module(self.final_norm)(x_BTD)

    def period(self, carry: Carry, period: Period, shared: Tokens, kind: Kind) -> Carry:
        """Run the layers of one period. Each layer's weights are gathered here, inside the period's `jax.checkpoint`."""
        for i in range(period.count):
            carry, _ = self.ctx.zero.gather_module(getattr(period, f"linear_{i}"))(carry, shared, kind, None)
        return self.ctx.zero.gather_module(period.full)(carry, shared.attention, kind, None)[0]


# ---- The family


@dataclasses.dataclass(frozen=True)
class Family:
    """Sizes of the gated delta nets. All other sizes are keys of the config's `model` section."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4  # tokens in a convolution's window
    linear_layers: int = 3  # before each layer of softmax attention
    chunk: int = 64

    def build(self, model: Model, kernel: Kernel, remat: Plan, ctx: Context, rngs: nnx.Rngs) -> Hybrid:
        """Return the model of a config. Raise ConfigError for settings that the model does not support."""
        if problems := list(self._problems(model, kernel, ctx)):
            raise ConfigError(problems)
        return Hybrid(self, model, kernel, remat, ctx, rngs)

    def flops(self, model: Model, seq_len: int) -> Flops:
        """Return the FLOPs per token of a forward pass.

        The delta rule counts by its definition: 6 FLOPs for each element of S. `delta_rule` computes more FLOPs, because of its
        chunks. A plan's HFU counts the FLOPs of the compiled program.
        """
        D, N, V = model.d_model, self.value_heads, self.value_dim
        weights = D * (2 * self.key_heads * self.key_dim + 3 * N * V + 2 * N)
        delta = 2 * weights + 6 * N * self.key_dim * V
        full = 2 * sum(into * out for into, out in projections(model).values())
        periods = model.num_layers // (self.linear_layers + 1)
        linear = periods * (self.linear_layers * delta + full) + model.num_layers * 6 * D * model.d_ff
        linear += 2 * D * model.vocab_size
        return Flops(linear, linear) + attention(model, seq_len) * periods

    def _problems(self, model: Model, kernel: Kernel, ctx: Context) -> Iterable[Problem]:
        period, p = self.linear_layers + 1, ctx.placement
        if model.num_layers % period:
            rule = f"is no multiple of {period}: {self.linear_layers} linear layers and one of softmax attention repeat"
            yield Problem("model.num_layers", model.num_layers, rule, f"Set {-(-model.num_layers // period) * period}.")
        if model.num_experts:
            yield Problem("model.num_experts", model.num_experts, "this model has no experts", "Set 0.")
        if len(kernel.specs) > 1:
            rule = "softmax layers of this model are all alike"
            yield Problem("model.attention_pattern", model.attention_pattern, rule, "Set ''.")
        context = kernel.split.context
        if context.ring > 1:
            rule = f"a delta net needs all tokens of a sequence on a device, and a ring has {context.ring} places"
            yield Problem("parallel.context", "ring", rule, "Set parallel.context=ulysses, or mesh.seq=1.")
            return
        ranks = p.size(p.mesh_axes("heads")) * context.ulysses
        if self.key_heads % ranks:
            rule = f"{self.key_heads} key heads of the delta nets do not divide over {ranks} devices (tensor x seq)"
            yield Problem("mesh", dict(p.mesh.shape), rule, "Set mesh.tensor=1 and mesh.seq=1.")


small = Family(key_heads=4, value_heads=8, key_dim=16, value_dim=16, chunk=16)
qwen3_next = Family(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
