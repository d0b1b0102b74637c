"""A pre-norm decoder: embedding, a stack of blocks, final norm, head. Families differ by `Structure`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config.schema import DELTA, Model
from jaxtrain.config.shapes import layer_key
from jaxtrain.kernels.attention import Rows
from jaxtrain.kernels.dot import dot
from jaxtrain.kernels.embedding import TABLE
from jaxtrain.models import delta_net
from jaxtrain.models.attention import Attention, Kernel, Shared, cached_arrays, element_kinds, layer_kinds, shared_arrays
from jaxtrain.models.delta_net import GatedDeltaNet
from jaxtrain.models.latent_attention import LatentAttention
from jaxtrain.models.layers import Context, Embed, GatedLinear, RMSNorm
from jaxtrain.models.module import normal, param, stack
from jaxtrain.models.moe import ExpertsMLP, Statistics, no_statistics, with_row
from jaxtrain.models.remat import Kind, RematPlan
from jaxtrain.models.structure import Structure
from jaxtrain.sharding import Placement, all_gather, to_block, to_residual


@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens so far, for sampling."""

    # Of the stack: (L, B, S, K, H) each; with latent attention, latents and rotated keys. With delta nets, the arrays of each
    # layer of a period (delta_net.cached_arrays).
    kv: tuple[Any, ...]
    dense: tuple[tuple[jax.Array, jax.Array], ...]  # of each dense layer before the stack, (B, S, K, H)
    segments_BS: jax.Array  # 0 for tokens that are not written yet
    positions_BS: jax.Array
    length: jax.Array  # int32 (): tokens written, the same in every row


jax.tree_util.register_dataclass(KVCache, ["kv", "dense", "segments_BS", "positions_BS", "length"], [])


def empty_cache(model: Model, placement: Placement, batch: int, length: int, dtype: jnp.dtype, slots: int = 0) -> KVCache:
    """Return an empty cache for `length` tokens in each of `batch` rows.

    slots: slots of the stack of layers, with a pipeline's empty ones; 0: the length of the stack.
    """
    arrays, _ = cached_arrays(model, placement)

    def empty(*layers: int) -> Any:
        return tuple(jnp.zeros((*layers, batch, length, *token_shape), dtype) for token_shape in arrays)

    def empty_delta(elements: int) -> Any:
        state, *inputs = delta_net.cached_arrays(model)
        convolved = (jnp.zeros((elements, batch, *shape), dtype) for shape in inputs)
        return (jnp.zeros((elements, batch, *state), jnp.float32), *convolved)

    elements = slots or model.stack_length
    letters = model.kinds[: model.period]
    kv = tuple(empty_delta(elements) if letter == DELTA else empty(elements) for letter in letters)
    # All arrays are separate, because the cache is donated, and no buffer can be donated twice.
    segments_BS, positions_BS = jnp.zeros((batch, length), jnp.int32), jnp.zeros((batch, length), jnp.int32)
    dense = tuple(empty() for _ in range(model.dense_layers))
    return KVCache(kv if model.period > 1 else kv[0], dense, segments_BS, positions_BS, jnp.zeros((), jnp.int32))


Carry = tuple[jax.Array, Statistics]  # of the loop over layers: the residual stream, and the routers' statistics


class Block(nnx.Module):
    """A layer: x + attention(norm(x)), then x + mlp(norm(x)).

    With norm_placement=post it is x + norm(attention(x)), then x + norm(mlp(x)). With sandwich both are normalised.

    dense: the feed-forward block has no experts, even in a model with experts. delta: a gated delta net, `self.delta`, is in
    place of `self.attention`.
    """

    def __init__(self, model: Model, kernel: Kernel, ctx: Context, rngs: nnx.Rngs, dense: bool = False, delta: bool = False):
        std, out_std = model.init_std, model.init_std / math.sqrt(2 * model.num_layers)
        if model.norm_placement != "post":
            self.attention_norm = RMSNorm(model.d_model, "embed", model.norm_eps, ctx, rngs)
        if delta:
            self.delta = GatedDeltaNet(model, kernel, std, out_std, ctx, rngs)
        else:
            attention = LatentAttention if model.kv_lora_rank else Attention
            self.attention = attention(model, kernel, std, out_std, ctx, rngs)
        if model.norm_placement != "post":
            self.mlp_norm = RMSNorm(model.d_model, "embed", model.norm_eps, ctx, rngs)
        if model.num_experts and not dense:
            self.mlp = ExpertsMLP(model, std, out_std, ctx, rngs)
        else:
            width = model.dense_d_ff if dense else model.d_ff
            self.mlp = GatedLinear(model.d_model, width, std, out_std, ctx, rngs, model.mlp_bias)
        if model.norm_placement != "pre":
            self.attention_post_norm = RMSNorm(model.d_model, "embed", model.norm_eps, ctx, rngs)
            self.mlp_post_norm = RMSNorm(model.d_model, "embed", model.norm_eps, ctx, rngs)
        self.norms, self.attention_out_bias, self.ctx = model.norm_placement, model.attention_out_bias, ctx
        self.residual_multiplier = model.residual_multiplier

    def __call__(self, carry: Carry, shared: Shared, kind: Kind, cache: Any) -> tuple[Carry, Any]:
        """Return the residual stream and the statistics after this layer, and the cache.

        Norms and sums compute with the tokens of the residual layout. Attention and the feed-forward block each gather the
        tokens of all tensor-parallel devices, and their outputs, partial sums, are reduce-scattered (Korthikanti et al. 2022,
        arXiv:2205.05198).

        kind: which of the model's kinds of layers this is (`models.attention.layer_kinds`).
        """
        x_BTD, statistics = carry
        x_BTD, cache = self.attend(x_BTD, shared, kind, cache)
        return self.feed_forward((x_BTD, statistics), shared), cache

    def attend(self, x_BTD: jax.Array, shared: Shared, kind: Kind, cache: Any) -> tuple[jax.Array, Any]:
        """Return the residual stream after attention, and the cache."""
        placement = self.ctx.placement
        with jax.named_scope("attention"):
            h_BTD = x_BTD if self.norms == "post" else checkpoint_name(self.attention_norm(x_BTD), "attention_norm")
            h_BTD = to_block(h_BTD, placement)
            attention = self.delta if hasattr(self, "delta") else self.attention
            y_BTD, cache = attention(h_BTD, shared, kind, cache)
            y_BTD = to_residual(y_BTD, placement.mesh_axes("heads"), placement)
            if isinstance(attention, Attention) and self.attention_out_bias:  # once, not in each term of the sum
                y_BTD = (y_BTD.astype(jnp.float32) + attention.bo[...][None, None].astype(jnp.float32)).astype(y_BTD.dtype)
            y_BTD = checkpoint_name(y_BTD, "attention_proj")
            y_BTD = y_BTD if self.norms == "pre" else self.attention_post_norm(y_BTD)
            return checkpoint_name(x_BTD + times(y_BTD, self.residual_multiplier), "residual"), cache

    def feed_forward(self, carry: Carry, shared: Shared) -> Carry:
        """Return the residual stream and the statistics after the feed-forward block."""
        placement, (x_BTD, statistics) = self.ctx.placement, carry
        with jax.named_scope("mlp"):
            h_BTD = x_BTD if self.norms == "post" else checkpoint_name(self.mlp_norm(x_BTD), "mlp_norm")
            h_BTD = to_block(h_BTD, placement)
            if isinstance(self.mlp, ExpertsMLP):
                y_BTD, row = self.mlp(h_BTD, shared.real_BT)
                statistics = with_row(statistics, row)
            else:
                y_BTD = self.mlp(h_BTD)
            y_BTD = checkpoint_name(to_residual(y_BTD, placement.mesh_axes("mlp"), placement), "mlp_down")
            y_BTD = y_BTD if self.norms == "pre" else self.mlp_post_norm(y_BTD)
            return x_BTD + times(y_BTD, self.residual_multiplier), statistics


def times(x: jax.Array, factor: float) -> jax.Array:
    """Return x times a constant, which is rounded to the dtype of x first, as in the code that trained these models."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


class Period(nnx.Module):
    """One element of a stack with delta nets: the layers of one repetition of model.attention_pattern."""

    def __init__(self, model: Model, kernel: Kernel, ctx: Context, rngs: nnx.Rngs):
        self.kinds, self.count = layer_kinds(model)[: model.period], model.period
        for i, letter in enumerate(model.attention_pattern):
            setattr(self, layer_key(i, model.period), Block(model, kernel, ctx, rngs, delta=letter == DELTA))

    @property
    def layers(self) -> list[tuple[Block, int]]:
        """Return the layers in order, each with its kind."""
        return [(getattr(self, layer_key(i, self.count)), kind) for i, kind in enumerate(self.kinds)]


class DenseLayers(nnx.Module):
    """The first layers of a model with experts, which have dense feed-forward blocks. They are not stacked.

    In a pipeline these layers belong to no stage, like the embedding: all stages compute them for each microbatch that enters
    the pipeline. This takes as long as if only the first stage computed them, because the other stages would wait.
    """

    def __init__(self, model: Model, kernel: Kernel, ctx: Context, rngs: nnx.Rngs):
        self.count = model.dense_layers
        for i in range(self.count):
            setattr(self, str(i), Block(model, kernel, ctx, rngs, dense=True))

    @property
    def blocks(self) -> list[Block]:
        """Return the dense layers in order."""
        return [getattr(self, str(i)) for i in range(self.count)]


class MtpModule(nnx.Module):
    """Module k of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): at token i it predicts token i + k + 1.

        h_k = norm(block(norm(emb(token i+k)) embed_proj + norm(h_k-1) hidden_proj))

    embed_proj and hidden_proj are the two halves of the paper's M_k. h_0 are the model's hidden states after the final norm.
    Embedding and head are shared with the model.
    """

    def __init__(self, model: Model, kernel: Kernel, ctx: Context, rngs: nnx.Rngs):
        D, init, dtype = model.d_model, normal(model.init_std), ctx.numerics.params
        self.embed_norm = RMSNorm(D, "embed", model.norm_eps, ctx, rngs)
        self.hidden_norm = RMSNorm(D, "embed", model.norm_eps, ctx, rngs)
        self.embed_proj = param(rngs, (D, D), ("embed", None), init, dtype, dot=True)
        self.hidden_proj = param(rngs, (D, D), ("embed", None), init, dtype, dot=True)
        self.block = Block(model, kernel, ctx, rngs)
        self.norm = RMSNorm(D, "embed", model.norm_eps, ctx, rngs)
        self.ctx = ctx

    def __call__(self, carry: Carry, hidden_BTD: jax.Array, shared: Shared) -> Carry:
        """Return the block's output, before the last norm, and the statistics of its experts.

        Args:
          carry: embeddings of the tokens k positions later, in the residual layout, and empty statistics.
          hidden_BTD: h_k-1, in the residual layout.
        """
        (x_BTD, statistics), numerics = carry, self.ctx.numerics
        with jax.named_scope("mtp_proj"):
            x_BTD = dot("BTD,DF->BTF", self.embed_norm(x_BTD), self.embed_proj.get_value(), numerics)
            x_BTD += dot("BTD,DF->BTF", self.hidden_norm(hidden_BTD), self.hidden_proj.get_value(), numerics)
        return self.block((x_BTD, statistics), shared, 0, None)[0]


class MtpModules(nnx.Module):
    """The modules of multi-token prediction, in order. They are not stacked, because models have one or a few."""

    def __init__(self, model: Model, kernel: Kernel, ctx: Context, rngs: nnx.Rngs):
        self.count = model.mtp_layers
        for i in range(self.count):
            setattr(self, str(i), MtpModule(model, kernel, ctx, rngs))

    @property
    def modules(self) -> list[MtpModule]:
        """Return modules 1, 2, ... of multi-token prediction."""
        return [getattr(self, str(i)) for i in range(self.count)]


class Transformer(nnx.Module):
    """A decoder that maps tokens to final hidden states. `head_VD` maps hidden states to logits."""

    def __init__(self, model: Model, kernel: Kernel, remat: RematPlan, ctx: Context, rngs: nnx.Rngs):
        self.embed = Embed(model.vocab_size, model.d_model, model.init_std, ctx, rngs)
        if model.dense_layers:
            self.dense_layers = DenseLayers(model, kernel, ctx, rngs)
        element = Period if model.period > 1 else Block
        self.layers = stack(lambda r: element(model, kernel, ctx, r), model.stack_length, rngs)
        self.final_norm = RMSNorm(model.d_model, "embed", model.norm_eps, ctx, rngs)
        if not model.tied_head:
            shape = (model.vocab_size, model.d_model)
            self.head = param(rngs, shape, TABLE, normal(model.init_std), ctx.numerics.params)
        if model.mtp_layers:
            self.mtp = MtpModules(model, kernel, ctx, rngs)
        self.model, self.kernel, self.remat, self.ctx = model, kernel, remat, ctx

    @property
    def uses_plan_run(self) -> bool:
        """Whether `RematPlan.run` runs the stack of layers: once, with all layers and unchanged weights (`Definition`)."""
        return True

    @property
    def staged(self) -> bool:
        """Return whether the model can be split into pipeline stages.

        It cannot if a subclass overrides `__call__` or `hidden_and_statistics`, or if its `remat` is no `RematPlan`.
        """
        cls = type(self)
        calls = cls.__call__, cls.hidden_and_statistics
        return calls == (Transformer.__call__, Transformer.hidden_and_statistics) and isinstance(self.remat, RematPlan)

    @property
    def head_VD(self) -> Any:
        """Return the output head, sharded; the loss gathers it."""
        return (self.embed.embedding if self.model.tied_head else self.head).get_value()

    def __call__(self, tokens_BT: jax.Array, segments_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Return hidden states after the final norm, (B, T, D) in the residual layout.

        Attention masks follow from segments and positions alone, so tokens of a row may come in any order the kernel allows.
        """
        return self.hidden_and_statistics(tokens_BT, segments_BT, positions_BT)[0]

    def hidden_and_statistics(
        self, tokens_BT: jax.Array, segments_BT: jax.Array, positions_BT: jax.Array
    ) -> tuple[jax.Array, Statistics]:
        """Return the result of `__call__`, and the routers' statistics of all layers (kernels/experts/routing.py)."""
        shared = self.share(segments_BT, positions_BT)
        carry = self.enter(tokens_BT, shared)
        with jax.named_scope("layers"):
            carry = self.remat.run(self.layer, carry, self.layers, shared, element_kinds(self.model))
        return self.final_hidden(carry)

    def mtp_hidden(
        self, hidden_BTD: jax.Array, tokens: Sequence[jax.Array], segments_BT: jax.Array, positions_BT: jax.Array
    ) -> tuple[list[jax.Array], list[Statistics]]:
        """Return the hidden states and the router's statistics of each module of multi-token prediction.

        Args:
          hidden_BTD: the model's hidden states after its final norm.
          tokens: for each module k, the tokens k positions later, (B, T). At the last k positions of a document, the later
            token belongs to another document. Attention is causal, so only these positions depend on the later token, and
            their loss weights are 0.
        """
        shared, run = self.share(segments_BT, positions_BT), self.remat.checkpoint(self.mtp_layer, in_loop=False)
        hidden, statistics = [], []
        with jax.named_scope("mtp"):
            for module, tokens_BT in zip(self.mtp.modules, tokens, strict=True):
                carry = run(self.embed_tokens(tokens_BT, 1), module, hidden_BTD, shared)
                hidden_BTD, router_statistics = self.final_hidden(carry, module.norm)
                hidden.append(hidden_BTD)
                statistics.append(router_statistics)
        return hidden, statistics

    def mtp_layer(self, carry: Carry, module: MtpModule, hidden_BTD: jax.Array, shared: Shared) -> Carry:
        """Run one module of multi-token prediction, except its last norm. The weights are gathered inside the checkpoint."""
        return self.ctx.zero.gather_module(module)(carry, hidden_BTD, shared)

    def share(self, segments_BT: jax.Array, positions_BT: jax.Array) -> Shared:
        """Return the arrays of a batch that all layers share: rotary tables, and the kernel's description of the batch."""
        with jax.named_scope("attention"):
            rows = Rows(segments_BT, positions_BT, segments_BT, positions_BT)
            return shared_arrays(self.model, self.kernel, rows)

    def enter(self, tokens_BT: jax.Array, shared: Shared) -> Carry:
        """Return the input of the stack of layers: the output of the dense layers; the embeddings if there are none."""
        carry = self.embed_tokens(tokens_BT)
        if self.model.dense_layers:
            run = self.remat.checkpoint(self.layer, in_loop=False)
            with jax.named_scope("dense_layers"):
                for block in self.dense_layers.blocks:
                    carry = run(carry, block, shared, 0)
        return carry

    def enter_with_cache(self, tokens_BT: jax.Array, shared: Shared, cache: KVCache) -> tuple[Carry, KVCache]:
        """Return the result of `enter`, and the cache with the new keys and values of the dense layers."""
        carry, dense = self.embed_tokens(tokens_BT), []
        for block, kv in zip(self.dense_layers.blocks if self.model.dense_layers else (), cache.dense, strict=True):
            carry, kv = self.layer_with_cache(carry, block, shared, 0, kv)
            dense.append(kv)
        return carry, dataclasses.replace(cache, dense=tuple(dense))

    def embed_tokens(self, tokens_BT: jax.Array, layers: int = 0) -> Carry:
        """Return the embeddings, (B, T, D) in the residual layout, and empty statistics. layers: as in `no_statistics`."""
        with jax.named_scope("embed"):
            factor = math.sqrt(self.model.d_model) if self.ctx.structure.scaled_embedding else 1.0
            x_BTD = times(self.embed(tokens_BT), factor * self.model.embedding_multiplier)
            return x_BTD, no_statistics(self.model, layers)

    def layer(self, carry: Carry, block: Block, shared: Shared, kind: Kind) -> Carry:
        """Run one layer. Its weights are gathered here, inside the checkpoint, so that they are freed after the layer."""
        return self.ctx.zero.gather_module(block)(carry, shared, kind, None)[0]

    def layer_with_cache(self, carry: Carry, block: Block, shared: Shared, kind: Kind, kv: Any) -> tuple[Carry, Any]:
        """Run one layer over cached keys and values."""
        return self.ctx.zero.gather_module(block)(carry, shared, kind, kv)

    def element_with_cache(
        self, carry: Carry, element: Block | Period, shared: Shared, kind: Kind, kv: Any
    ) -> tuple[Carry, Any]:
        """Run one element of the stack over its cached arrays."""
        if not isinstance(element, Period):  # a family's own block need not be a Block
            return self.layer_with_cache(carry, element, shared, kind, kv)
        cached = []
        for (block, layer_kind), old in zip(element.layers, kv, strict=True):
            carry, new = self.layer_with_cache(carry, block, shared, layer_kind, old)
            cached.append(new)
        return carry, tuple(cached)

    def final_hidden(self, carry: Carry, norm: RMSNorm | None = None) -> tuple[jax.Array, Statistics]:
        """Return the last layer's output after `norm`, and the statistics of all layers. norm: None for the final norm.

        The output includes the factor of the logits.
        """
        x_BTD, statistics = carry
        with jax.named_scope("final_norm"):
            return self.ctx.zero.gather_module(norm or self.final_norm)(x_BTD, self.model.logit_multiplier), statistics

    def decode(self, tokens_BT: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Append T tokens to the document in each row of the cache. Return the new tokens' hidden states, and the cache."""
        shared, cache = self.append(tokens_BT, cache)
        kinds = element_kinds(self.model)
        one_kind = len(set(kinds)) == 1

        def body(carry: Carry, layer: tuple[Block | Period, Any, jax.Array]) -> tuple[Carry, Any]:
            element, kv, kind = layer
            return self.element_with_cache(carry, element, shared, kinds[0] if one_kind else kind, kv)

        carry, cache = self.enter_with_cache(tokens_BT, shared, cache)
        carry, kv = jax.lax.scan(body, carry, (self.layers, cache.kv, jnp.asarray(kinds, jnp.int32)))
        return self.final_hidden(carry)[0], dataclasses.replace(cache, kv=kv)

    def append(self, tokens_BT: jax.Array, cache: KVCache) -> tuple[Shared, KVCache]:
        """Return the shared arrays of T new tokens, and the cache with the segments and positions of the new tokens."""
        B, T = tokens_BT.shape
        positions_BT = jnp.broadcast_to(cache.length + jnp.arange(T, dtype=jnp.int32), (B, T))
        segments_BT = jnp.ones_like(positions_BT)

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new, cache.length, axis=1)

        kv_segments, kv_positions = write(cache.segments_BS, segments_BT), write(cache.positions_BS, positions_BT)
        rows = Rows(segments_BT, positions_BT, kv_segments, kv_positions)
        shared = shared_arrays(self.model, self.kernel, rows, cache.length)
        return shared, KVCache(cache.kv, cache.dense, kv_segments, kv_positions, cache.length + T)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return the logits, f32 (B, T, V), on every device, for sampling and checks.

        Training never has the logits of a whole batch in memory (step/loss.py).
        """
        head_VD = self.ctx.zero.gather_weight(self.head_VD, TABLE)
        precision = self.ctx.numerics.precision
        logits = jnp.einsum("BTD,VD->BTV", x_BTD, head_VD, precision=precision, preferred_element_type=jnp.float32)
        logits = all_gather(logits, self.ctx.placement.mesh_axes("vocab"), 2)
        cap = self.model.logit_softcap
        return cap * jnp.tanh(logits / cap) if cap else logits


def build_as(structure: Structure, model: Model, kernel: Kernel, remat: RematPlan, ctx: Context, rngs: nnx.Rngs) -> Transformer:
    """Return the model of a family with this structure."""
    return Transformer(model, kernel, remat, dataclasses.replace(ctx, structure=structure), rngs)
