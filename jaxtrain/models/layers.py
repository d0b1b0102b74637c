"""The small parts of a transformer: norm, embedding, feed-forward."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config import Experts
from jaxtrain.kernels.dot import Numerics, dot
from jaxtrain.kernels.embedding import TABLE, embed
from jaxtrain.kernels.norm import rms_norm
from jaxtrain.models.lora import Adapters, Lora
from jaxtrain.models.module import constant, normal, param
from jaxtrain.models.structure import Structure
from jaxtrain.sharding import Axes, Placement

# Layouts of activations, by logical axis.
RESIDUAL: Axes = ("batch", "residual", None)  # (B, T, D) between blocks
WIDE: Axes = ("batch", "sequence", None)  # (B, T, D) inside blocks: tokens whole over the tensor axis


@dataclasses.dataclass(frozen=True)
class Context:
    """What every layer needs to know of the run, and of its family."""

    numerics: Numerics
    placement: Placement
    structure: Structure = Structure()
    lora: Lora = Lora()
    experts: Experts = Experts()
    places: int = 0  # layers that follow each other, with a pipeline's empty places; 0: those of the model


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a learnt scale, of activations in the layout `x_axes`."""

    def __init__(self, dim: int, axis: str | None, x_axes: Axes, eps: float, ctx: Context, rngs: nnx.Rngs):
        self.offset = float(ctx.structure.norm_offset)
        self.scale = param(rngs, (dim,), (axis,), constant(1.0 - self.offset), ctx.numerics.vectors)
        self.axis, self.x_axes, self.eps, self.ctx = axis, x_axes, eps, ctx

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("norm"):
            p, n = self.ctx.placement, self.ctx.numerics
            return rms_norm(x, self.scale[...], self.eps, self.x_axes, self.axis, p, n, self.offset)


class Embed(nnx.Module):
    """Token embedding; its (V, D) table also serves as the output head when tied."""

    def __init__(self, vocab_size: int, d_model: int, std: float, ctx: Context, rngs: nnx.Rngs):
        self.embedding = param(rngs, (vocab_size, d_model), TABLE, normal(std), ctx.numerics.params)
        self.ctx = ctx

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Rows of the table, (B, T, D) in the residual layout."""
        return embed(self.embedding[...], tokens_BT, RESIDUAL, self.ctx.placement, self.ctx.numerics)


NONLINEARITIES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class GatedLinear(nnx.Module):
    """down(f(gate(x)) * up(x)): SwiGLU where f is silu, GeGLU where it is gelu (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, d_model: int, d_ff: int, std: float, out_std: float, ctx: Context, rngs: nnx.Rngs):
        dtype = ctx.numerics.params
        self.gate = param(rngs, (d_model, d_ff), ("embed", "mlp"), normal(std), dtype, dot=True)
        self.up = param(rngs, (d_model, d_ff), ("embed", "mlp"), normal(std), dtype, dot=True)
        self.down = param(rngs, (d_model, d_ff), ("embed", "mlp"), normal(out_std), dtype, dot=True)
        self.lora = Adapters(self, ("gate", "up", "down"), ctx, rngs)
        self.ctx = ctx

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """(B, T, D) in the wide layout to (B, T, D), a partial sum over the tensor axis until it is resharded."""
        p, n = self.ctx.placement, self.ctx.numerics
        hidden = ("batch", "sequence", "mlp")
        gate_BTF: jax.Array = dot(x_BTD, self.gate[...], "BTD,DF->BTF", ("embed", "mlp"), p, n)
        gate_BTF = checkpoint_name(self.lora("gate", x_BTD, gate_BTF, ("embed", "mlp")), "mlp_gate")
        up_BTF: jax.Array = dot(x_BTD, self.up[...], "BTD,DF->BTF", ("embed", "mlp"), p, n)
        up_BTF = checkpoint_name(self.lora("up", x_BTD, up_BTF, ("embed", "mlp")), "mlp_up")
        with jax.named_scope("swiglu"):
            h_BTF = p.constrain(NONLINEARITIES[self.ctx.structure.activation](gate_BTF) * up_BTF, *hidden)
        y_BTD: jax.Array = dot(h_BTF, self.down[...], "BTF,DF->BTD", ("embed", "mlp"), p, n)
        return self.lora("down", h_BTF, y_BTD, ("embed", "mlp"))
