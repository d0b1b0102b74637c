"""Grouped-query attention: projections, rotary positions, and the call of the kernel, with or without a cache."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain import windows
from jaxtrain.config import Model
from jaxtrain.kernels import context, rope
from jaxtrain.kernels.attention import Rows, Spec, implementation
from jaxtrain.kernels.context.split import Split
from jaxtrain.kernels.dot import add_bias, dot
from jaxtrain.models.layer_loop import Kind
from jaxtrain.models.layers import Context, RMSNorm
from jaxtrain.models.lora import Adapters, as_it_is
from jaxtrain.models.module import constant, normal, param
from jaxtrain.sharding import Axes, Held, Placement, Scaled, Weight, is_whole

HEADS: Axes = ("batch", "sequence", "heads", None)
KV_HEADS: Axes = ("batch", "sequence", "kv_heads", None)


def kv_copies(model: Model, placement: Placement) -> int:
    """How many ranks hold each key/value head: several where there are more ranks than heads to divide over them."""
    return max(1, placement.size(placement.mesh_axes("kv_heads")) // model.num_kv_heads)


def layer_kinds(model: Model) -> tuple[int, ...]:
    """For each layer, which of the model's kinds of layers it is: an index into `Kernel.specs`."""
    letters = windows.kinds(model)
    known = list(dict.fromkeys(letters))
    return tuple(known.index(letter) for letter in letters)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The chosen attention kernel, what it was asked for, and how the sequence is split among devices."""

    name: str
    specs: tuple[Spec, ...]  # of each kind of layer; they differ in their windows
    split: Split = Split()

    def prepare(self, rows: Rows, placement: Placement) -> tuple[Any, ...]:
        """What the kernel wants to know of a batch, once for all layers of a kind. Arrays have rows of the batch first."""
        return tuple(self._prepare(rows, spec, placement) for spec in self.specs)

    def _prepare(self, rows: Rows, spec: Spec, placement: Placement) -> Any:
        if self.split.context.size == 1:
            return implementation(self.name).prepare(rows, spec)
        tokens = placement.spec(("batch", "sequence"))
        return jax.shard_map(
            lambda rows: context.prepare(rows, spec, self.name, self.split),
            mesh=placement.mesh,
            in_specs=(tokens,),
            out_specs=self._prepared(placement),
            check_vma=False,
        )(rows)

    def _prepared(self, placement: Placement) -> P:
        # Each device of a sequence has rows of its own, laid one after another.
        return P(placement.mesh_axes("batch") + placement.mesh_axes("sequence") or None)

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, prepared: tuple[Any, ...], kind: Kind, placement: Placement
    ) -> jax.Array:
        """Run it on each device's own sequences and heads, inside a shard_map that is manual over the whole mesh.

        kind: of the layer; where a loop runs layers of several kinds a number on the device, and all of them are compiled.
        """
        runs = [functools.partial(self._run, spec=spec, placement=placement) for spec in self.specs]
        if isinstance(kind, int):
            return runs[kind](q, k, v, prepared[kind])
        chosen = [lambda q, k, v, prepared, run=run, i=i: run(q, k, v, prepared[i]) for i, run in enumerate(runs)]
        return jax.lax.switch(kind, chosen, q, k, v, prepared)

    def _run(self, q: jax.Array, k: jax.Array, v: jax.Array, prepared: Any, spec: Spec, placement: Placement) -> jax.Array:
        q_spec, kv_spec = placement.spec(HEADS), placement.spec(KV_HEADS)

        def local(q, k, v, prepared):
            if self.split.context.size == 1:
                return implementation(self.name).attention(q, k, v, prepared, spec)
            return context.attention(q, k, v, prepared, spec, self.name, self.split)

        return jax.shard_map(
            local,
            mesh=placement.mesh,
            in_specs=(q_spec, kv_spec, kv_spec, self._prepared(placement)),
            out_specs=q_spec,
            # The replication checker knows no groups within an axis, and Pallas' interpreter pads arrays past it.
            check_vma=self.split.context.size == 1 and self.name != "pallas",
        )(q, k, v, prepared)


class Shared(NamedTuple):
    """What all layers share of a batch."""

    prepared: tuple[Any, ...]  # the kernel's view of documents, by kind of layer
    rotary: tuple[tuple[jax.Array, jax.Array], ...]  # tables of cos and sin, f32 (B, T, H/2); one pair, or one by kind of layer
    write_at: jax.Array  # where new keys go in the cache: int32 (); unused without a cache
    real_BT: Any  # bool, False for padding; None of a model that does not ask

    def where(self, valid: jax.Array) -> "Shared":
        """The same where `valid`, bool (); elsewhere as if all were padding, which goes to no expert and costs nothing."""
        return self if self.real_BT is None else self._replace(real_BT=self.real_BT & valid)


def _tables(shared: Shared, kind: Kind) -> tuple[jax.Array, jax.Array]:
    if len(shared.rotary) == 1:
        return shared.rotary[0]
    if isinstance(kind, int):
        return shared.rotary[kind]
    cos, sin = (jax.lax.select_n(kind, *of_kinds) for of_kinds in zip(*shared.rotary, strict=True))
    return cos, sin


class Attention(nnx.Module):
    """Causal self-attention within documents."""

    def __init__(self, model: Model, kernel: Kernel, std: float, out_std: float, ctx: Context, rngs: nnx.Rngs):
        D, N, K, H = model.d_model, model.num_heads, model.num_kv_heads, model.head_dim
        dtype = ctx.numerics.params
        self.wq = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), normal(std), dtype, dot=True)
        self.copies = kv_copies(model, ctx.placement)
        kv_heads = "kv_heads" if self.copies == 1 else None  # fewer than there are ranks cannot be split at rest
        self.wk = param(rngs, (D, K, H), ("embed", kv_heads, "head_dim"), normal(std), dtype, dot=True)
        self.wv = param(rngs, (D, K, H), ("embed", kv_heads, "head_dim"), normal(std), dtype, dot=True)
        self.wo = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), normal(out_std), dtype, dot=True)
        if model.qkv_bias:
            self.bq = param(rngs, (N, H), ("heads", "head_dim"), constant(0.0), ctx.numerics.vectors)
            self.bk = param(rngs, (K, H), (kv_heads, "head_dim"), constant(0.0), ctx.numerics.vectors)
            self.bv = param(rngs, (K, H), (kv_heads, "head_dim"), constant(0.0), ctx.numerics.vectors)
        if model.qk_norm:
            self.q_norm = RMSNorm(H, "head_dim", HEADS, model.norm_eps, ctx, rngs)
            self.k_norm = RMSNorm(H, "head_dim", KV_HEADS, model.norm_eps, ctx, rngs)
        self.lora = Adapters(self, ("wq", "wk", "wv", "wo"), ctx, rngs)
        self.model, self.kernel, self.ctx = model, kernel, ctx

    def _for_all(self, w: Weight, axes: Axes) -> Weight:
        """A key/value weight with each head repeated for the ranks that share it, of which each keeps its own."""
        if self.copies == 1:
            return w
        p = self.ctx.placement
        layout = p.whole(axes) if is_whole(w) else p.sharding(axes)

        def copied(x: Any) -> Any:
            if isinstance(x, Scaled):
                return Scaled(copied(x.value), x.scale)
            return jax.lax.with_sharding_constraint(jnp.repeat(x, self.copies, axis=-2), layout)

        if isinstance(w, Held):
            slot = w.slot if w.frozen else jnp.repeat(w.slot, self.copies, axis=-2)
            return dataclasses.replace(w, value=copied(w.value), slot=slot)
        return copied(w)

    def _project(self, x_BTD: jax.Array, name: str, b: nnx.Param | None, heads: str) -> jax.Array:
        p, n, w = self.ctx.placement, self.ctx.numerics, getattr(self, name)
        axes = ("embed", heads, "head_dim")
        of_kv = heads == "kv_heads"
        y: jax.Array = dot(x_BTD, self._for_all(w[...], axes) if of_kv else w[...], "BTD,DNH->BTNH", axes, p, n)
        y = self.lora(name, x_BTD, y, axes, self._for_all if of_kv else as_it_is)
        if b is None:
            return y
        return add_bias(y, self._for_all(b[...], axes[1:]) if of_kv else b[...], axes[1:], p, n)

    def __call__(self, x_BTD: jax.Array, shared: Shared, kind: Kind, cache: Any) -> tuple[jax.Array, Any]:
        """(B, T, D) in the wide layout to (B, T, D), a partial sum over the tensor axis until it is resharded.

        `cache` is None, or this layer's (k, v), each (B, S, K, H): new keys are written at `shared.write_at` and the queries
        see all of it. Returns the output and the cache.
        """
        p, n, bias = self.ctx.placement, self.ctx.numerics, self.model.qkv_bias
        q = self._project(x_BTD, "wq", self.bq if bias else None, "heads")
        k = self._project(x_BTD, "wk", self.bk if bias else None, "kv_heads")
        v = self._project(x_BTD, "wv", self.bv if bias else None, "kv_heads")
        if self.model.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        m = self.model
        # Kernels divide scores by the root of head_dim.
        scale = math.sqrt(m.head_dim / m.query_scale) if m.query_scale else 1.0
        with jax.named_scope("rope"):
            cos, sin = _tables(shared, kind)
            q = checkpoint_name(p.constrain(rope.rotate(q, cos, sin, scale), *HEADS), "q")
            k = checkpoint_name(p.constrain(rope.rotate(k, cos, sin), *KV_HEADS), "k")
        v = checkpoint_name(p.constrain(v, *KV_HEADS), "v")
        if cache is not None:
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), shared.write_at, axis=1)
                for old, new in zip(cache, (k, v), strict=True)
            )
            cache = (k, v)
        o_BTNH = self.kernel(q, k, v, shared.prepared, kind, p)
        axes = ("embed", "heads", "head_dim")
        y_BTD: jax.Array = dot(o_BTNH, self.wo[...], "BTNH,DNH->BTD", axes, p, n)
        return self.lora("wo", o_BTNH, y_BTD, axes), cache


def rotary_frequencies(model: Model) -> jax.Array:
    """f32 (H/2,), with the model's scaling applied."""
    freq = rope.frequencies(model.head_dim, model.rope_base)
    if model.rope_scaling == "llama3":
        freq = rope.llama3_scaling(freq, model.rope_factor, model.rope_low_freq, model.rope_high_freq, model.rope_original_len)
    elif model.rope_scaling == "linear":
        freq = rope.linear_scaling(freq, model.rope_factor)
    return freq


def _rotary(model: Model, positions_BT: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Tables for all layers, or for each kind of layer where they turn at different rates."""
    scaled = rotary_frequencies(model)
    if not model.local_rope_base:
        return (rope.tables(positions_BT, scaled),)
    local = rope.frequencies(model.head_dim, model.local_rope_base)
    known = dict.fromkeys(windows.kinds(model))
    return tuple(rope.tables(positions_BT, local if kind == windows.LOCAL else scaled) for kind in known)


def share(model: Model, kernel: Kernel, placement: Placement, rows: Rows, write_at: jax.Array | None = None) -> Shared:
    """Everything that depends on the batch alone, made once for all layers."""
    at = jnp.zeros((), jnp.int32) if write_at is None else write_at
    real_BT = rows.q_segments > 0 if model.num_experts else None
    return Shared(kernel.prepare(rows, placement), _rotary(model, rows.q_positions), at, real_BT)
