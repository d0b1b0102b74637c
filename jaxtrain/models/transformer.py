"""A pre-norm decoder: embedding, a scanned stack of blocks, final norm, head. No family names here."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config import Model
from jaxtrain.kernels.attention import Rows
from jaxtrain.kernels.dot import use
from jaxtrain.kernels.embedding import TABLE
from jaxtrain.models.attention import Attention, Kernel, Shared, kv_copies, layer_kinds, share
from jaxtrain.models.layer_loop import Kind
from jaxtrain.models.layers import RESIDUAL, WIDE, Context, Embed, GatedLinear, RMSNorm
from jaxtrain.models.module import normal, param, stack
from jaxtrain.models.moe import ExpertsMLP, Statistics, no_statistics, with_row
from jaxtrain.models.remat import Plan
from jaxtrain.models.structure import Structure
from jaxtrain.sharding import Placement, Weight


@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far, for sampling."""

    kv: tuple[jax.Array, jax.Array]  # each (L, B, S, K, H)
    segments_BS: jax.Array  # 0 where nothing is written yet
    positions_BS: jax.Array
    length: jax.Array  # int32 (): tokens written, the same in every row


jax.tree_util.register_dataclass(Cache, ["kv", "segments_BS", "positions_BS", "length"], [])


def empty_cache(model: Model, placement: Placement, batch: int, length: int, dtype: jnp.dtype, places: int = 0) -> Cache:
    """Room for `length` tokens in each of `batch` rows. places: of the stack of layers, if not as many as there are layers."""
    heads = model.num_kv_heads * kv_copies(model, placement)
    shape = (places or model.num_layers, batch, length, heads, model.head_dim)
    # Separate arrays throughout: the cache is donated, and no buffer can be donated twice.
    segments_BS, positions_BS = jnp.zeros((batch, length), jnp.int32), jnp.zeros((batch, length), jnp.int32)
    return Cache((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)), segments_BS, positions_BS, jnp.zeros((), jnp.int32))


Carry = tuple[jax.Array, Statistics]  # what goes from layer to layer: the residual stream, and what its experts report


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with post_norms what is added is normalised too."""

    def __init__(self, model: Model, kernel: Kernel, ctx: Context, rngs: nnx.Rngs):
        std, out_std = model.init_std, model.init_std / math.sqrt(2 * model.num_layers)
        self.attention_norm = RMSNorm(model.d_model, "embed", RESIDUAL, model.norm_eps, ctx, rngs)
        self.attention = Attention(model, kernel, std, out_std, ctx, rngs)
        self.mlp_norm = RMSNorm(model.d_model, "embed", RESIDUAL, model.norm_eps, ctx, rngs)
        if model.num_experts:
            self.mlp = ExpertsMLP(model, std, out_std, ctx, rngs)
        else:
            self.mlp = GatedLinear(model.d_model, model.d_ff, std, out_std, ctx, rngs)
        if model.post_norms:
            self.attention_post_norm = RMSNorm(model.d_model, "embed", RESIDUAL, model.norm_eps, ctx, rngs)
            self.mlp_post_norm = RMSNorm(model.d_model, "embed", RESIDUAL, model.norm_eps, ctx, rngs)
        self.post_norms, self.ctx = model.post_norms, ctx

    def __call__(self, carry: Carry, shared: Shared, kind: Kind, cache: Any) -> tuple[Carry, Any]:
        """The residual stream stays in the residual layout; each half of the block widens it and returns a partial sum.

        kind: which of the model's kinds of layers this is (`models.attention.layer_kinds`).
        """
        p, (x_BTD, statistics) = self.ctx.placement, carry
        with jax.named_scope("attention"):
            h = checkpoint_name(self.attention_norm(x_BTD), "attention_norm")
            y, cache = self.attention(p.widen(h, RESIDUAL, WIDE), shared, kind, cache)
            y = checkpoint_name(p.narrow(y, WIDE, RESIDUAL), "attention_proj")
            y = self.attention_post_norm(y) if self.post_norms else y
            x_BTD = checkpoint_name(x_BTD + y, "residual")
        with jax.named_scope("mlp"):
            h = checkpoint_name(self.mlp_norm(x_BTD), "mlp_norm")
            h = p.widen(h, RESIDUAL, WIDE)
            if isinstance(self.mlp, ExpertsMLP):
                y, row = self.mlp(h, shared.real_BT)
                statistics = with_row(statistics, row)
            else:
                y = p.narrow(self.mlp(h), WIDE, RESIDUAL)
            y = checkpoint_name(y, "mlp_down")
            return (x_BTD + (self.mlp_post_norm(y) if self.post_norms else y), statistics), cache


class Transformer(nnx.Module):
    """Tokens to final hidden states; `head_VD` turns those into logits."""

    def __init__(self, model: Model, kernel: Kernel, remat: Plan, ctx: Context, rngs: nnx.Rngs):
        self.embed = Embed(model.vocab_size, model.d_model, model.init_std, ctx, rngs)
        self.layers = stack(lambda r: Block(model, kernel, ctx, r), model.num_layers, rngs)
        self.final_norm = RMSNorm(model.d_model, "embed", RESIDUAL, model.norm_eps, ctx, rngs)
        if not model.tied_head:
            shape = (model.vocab_size, model.d_model)
            self.head = param(rngs, shape, TABLE, normal(model.init_std), ctx.numerics.params)
        self.model, self.kernel, self.remat, self.ctx = model, kernel, remat, ctx

    @property
    def adds_layers(self) -> bool:
        """Whether gradients of `layers` are added to the sum of the microbatches so far, where they come with it."""
        return self.remat.adds(self.model.num_layers)

    @property
    def staged(self) -> bool:
        """Whether a pipeline, which calls the parts and not the whole, computes what the whole does."""
        own = type(self)
        calls = own.__call__, own.hidden_and_statistics
        return calls == (Transformer.__call__, Transformer.hidden_and_statistics) and isinstance(self.remat, Plan)

    @property
    def head_VD(self) -> Weight:
        """The output head at rest (master dtype, split like the embedding), or as the step holds it."""
        return (self.embed.embedding if self.model.tied_head else self.head)[...]

    def __call__(self, tokens_BT: jax.Array, segments_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Hidden states after the final norm, (B, T, D) in the residual layout. The order of tokens in a row is free as far as
        the kernel allows: only segments and positions say who sees whom."""
        return self.hidden_and_statistics(tokens_BT, segments_BT, positions_BT)[0]

    def hidden_and_statistics(
        self, tokens_BT: jax.Array, segments_BT: jax.Array, positions_BT: jax.Array
    ) -> tuple[jax.Array, Statistics]:
        """The same, and what the layers' experts report (kernels/experts/routing.py)."""
        shared, carry = self.share(segments_BT, positions_BT), self.enter(tokens_BT)
        with jax.named_scope("layers"):
            carry = self.remat.run(self.layer, carry, self.layers, shared, layer_kinds(self.model))
        return self.leave(carry)

    def share(self, segments_BT: jax.Array, positions_BT: jax.Array) -> Shared:
        """What all layers share of a batch."""
        with jax.named_scope("attention"):
            rows = Rows(segments_BT, positions_BT, segments_BT, positions_BT)
            return share(self.model, self.kernel, self.ctx.placement, rows)

    def enter(self, tokens_BT: jax.Array) -> Carry:
        """What the first layer takes: (B, T, D) in the residual layout, and the statistics of no layer."""
        with jax.named_scope("embed"):
            x_BTD = self.embed(tokens_BT)
            if self.ctx.structure.scaled_embedding:
                # The factor is rounded to the type of activations first, as where such models were trained.
                x_BTD = x_BTD * jnp.asarray(math.sqrt(self.model.d_model), x_BTD.dtype)
            return x_BTD, no_statistics(self.model, self.ctx)

    @staticmethod
    def layer(carry: Carry, block: Block, shared: Shared, kind: Kind) -> Carry:
        """One layer, of those stacked in `layers`."""
        return block(carry, shared, kind, None)[0]

    def leave(self, carry: Carry) -> tuple[jax.Array, Statistics]:
        """What the last layer gives, after the final norm, which is what the head takes; and the statistics of all layers."""
        x_BTD, statistics = carry
        with jax.named_scope("final_norm"):
            return self.final_norm(x_BTD), statistics

    def decode(self, tokens_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Append T tokens of one document to every row of the cache. Returns their hidden states and the cache."""
        shared, cache = self.append(tokens_BT, cache)
        kinds = layer_kinds(self.model)
        alike = len(set(kinds)) == 1

        def body(carry: Carry, layer: tuple[Block, Any, jax.Array]) -> tuple[Carry, Any]:
            block, kv, kind = layer
            return block(carry, shared, kinds[0] if alike else kind, kv)

        carry, kv = jax.lax.scan(body, self.enter(tokens_BT), (self.layers, cache.kv, jnp.asarray(kinds, jnp.int32)))
        return self.leave(carry)[0], dataclasses.replace(cache, kv=kv)

    def append(self, tokens_BT: jax.Array, cache: Cache) -> tuple[Shared, Cache]:
        """What all layers share of T tokens behind those of the cache, and the cache with what is known of them so far."""
        B, T = tokens_BT.shape
        positions_BT = jnp.broadcast_to(cache.length + jnp.arange(T, dtype=jnp.int32), (B, T))
        segments_BT = jnp.ones_like(positions_BT)

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new, cache.length, axis=1)

        kv_segments, kv_positions = write(cache.segments_BS, segments_BT), write(cache.positions_BS, positions_BT)
        rows = Rows(segments_BT, positions_BT, kv_segments, kv_positions)
        shared = share(self.model, self.kernel, self.ctx.placement, rows, cache.length)
        return shared, Cache(cache.kv, kv_segments, kv_positions, cache.length + T)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """f32 (B, T, V), of a pipeline stage for its part of the vocabulary. For sampling and checks: training never holds the
        logits of a whole batch (loss.py)."""
        n = self.ctx.numerics
        head_VD = use(self.head_VD, TABLE, self.ctx.placement, n)
        logits = jnp.einsum("BTD,VD->BTV", x_BTD, head_VD, precision=n.precision, preferred_element_type=jnp.float32)
        cap = self.model.logit_softcap
        return cap * jnp.tanh(logits / cap) if cap else logits


def build_as(structure: Structure, model: Model, kernel: Kernel, remat: Plan, ctx: Context, rngs: nnx.Rngs) -> Transformer:
    """A model of a family with this structure."""
    return Transformer(model, kernel, remat, dataclasses.replace(ctx, structure=structure), rngs)
