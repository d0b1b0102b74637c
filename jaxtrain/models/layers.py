"""The norm, embedding and feed-forward modules of a transformer. They compute with the shards of one device, in a shard_map."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config.schema import NO_SETTINGS, Moe, Own
from jaxtrain.kernels import fp8
from jaxtrain.kernels.dot import dot
from jaxtrain.kernels.embedding import TABLE, embed
from jaxtrain.kernels.norm import joint_rms_norm, rms_norm
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.models.lora import Adapters, LoraSpec
from jaxtrain.models.module import constant, normal, param
from jaxtrain.models.structure import Structure
from jaxtrain.models.zero import ComputeCopy, Zero
from jaxtrain.sharding import Placement, all_reduce, device_index


@dataclasses.dataclass(frozen=True)
class Context:
    """The properties of the run and the model's family that layers need; static under jit."""

    numerics: Numerics
    placement: Placement
    zero: Zero  # gathers weights
    structure: Structure = Structure()
    lora: LoraSpec = LoraSpec()
    moe: Moe = Moe()
    own: Own = NO_SETTINGS  # settings of a user's own family


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a learnt scale."""

    def __init__(self, dim: int, axis: str | None, eps: float, ctx: Context, rngs: nnx.Rngs):
        self.offset = float(ctx.structure.norm_offset)
        self.scale = param(rngs, (dim,), (axis,), constant(1.0 - self.offset), ctx.numerics.vectors)
        self.eps = eps

    def __call__(self, x: jax.Array, factor: float = 1.0) -> jax.Array:
        """Return x, (..., dim), normalised over the last axis and scaled, times `factor`."""
        with jax.named_scope("norm"):
            return rms_norm(x, self.scale[...], self.eps, self.offset, factor)


class JointRMSNorm(nnx.Module):
    """Root-mean-square norm of all heads of a token together, with a learnt scale. The heads may be sharded.

    heads: the logical axis of the heads. copies: devices that hold the same head.
    """

    def __init__(self, count: int, dim: int, heads: str | None, copies: int, eps: float, ctx: Context, rngs: nnx.Rngs):
        self.scale = param(rngs, (count, dim), (heads, "head_dim"), constant(1.0), ctx.numerics.vectors)
        self.over = ctx.placement.mesh_axes("heads") if heads or copies > 1 else ()
        self.total, self.eps = count * dim * copies, eps

    def __call__(self, x_BTNH: jax.Array, shard: Callable[[jax.Array], jax.Array] = lambda scale: scale) -> jax.Array:
        """Return x, normalised and scaled. shard: returns this device's heads of the scale."""
        with jax.named_scope("norm"):
            return joint_rms_norm(x_BTNH, shard(self.scale[...]), self.eps, self.total, lambda x: all_reduce(x, self.over))


class Embed(nnx.Module):
    """Token embedding; its (V, D) table also serves as the output head when tied."""

    def __init__(self, vocab_size: int, d_model: int, std: float, ctx: Context, rngs: nnx.Rngs):
        self.embedding = param(rngs, (vocab_size, d_model), TABLE, normal(std), ctx.numerics.params)
        self.ctx = ctx

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Return the tokens' embeddings, (B, T, D) in the residual layout.

        The table is gathered for the look-up only with sharding.zero=1 or sharding.gather=step.
        """
        placement, table, zero = self.ctx.placement, self.embedding.get_value(), self.ctx.zero
        if zero.reduce_once:
            return embed(zero.gather_weight(table, TABLE), tokens_BT, placement, (), self.ctx.numerics.compute)
        table = table.master if isinstance(table, ComputeCopy) else table
        return embed(
            zero.local_weight(table, TABLE), tokens_BT, placement, placement.mesh_axes("embed"), self.ctx.numerics.compute
        )


def clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return GPT-OSS's activation, (up + 1) gate sigmoid(1.702 gate), with gate clamped to CLAMP and up to +-CLAMP."""
    gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
    return (up + 1) * gate * jax.nn.sigmoid(SIGMOID_GAIN * gate)


CLAMP, SIGMOID_GAIN = 7.0, 1.702
NONLINEARITIES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
# Structure.activation -> the function of the gate and the up projection in a feed-forward block (Shazeer 2020,
# arXiv:2002.05202).
GATED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": lambda gate, up: NONLINEARITIES["silu"](gate) * up,
    "gelu_tanh": lambda gate, up: NONLINEARITIES["gelu_tanh"](gate) * up,
    "clamped_swiglu": clamped_swiglu,
}


class GatedLinear(nnx.Module):
    """A gated feed-forward block, down(f(gate(x), up(x))), with f from GATED; each projection may have a bias."""

    def __init__(self, d_model: int, d_ff: int, std: float, out_std: float, ctx: Context, rngs: nnx.Rngs, bias: bool = False):
        dtype = ctx.numerics.params
        self.gate = param(rngs, (d_model, d_ff), ("embed", "mlp"), normal(std), dtype, dot=True)
        self.up = param(rngs, (d_model, d_ff), ("embed", "mlp"), normal(std), dtype, dot=True)
        self.down = param(rngs, (d_model, d_ff), ("embed", "mlp"), normal(out_std), dtype, dot=True)
        if bias:
            self.gate_bias = param(rngs, (d_ff,), ("mlp",), constant(0.0), ctx.numerics.vectors)
            self.up_bias = param(rngs, (d_ff,), ("mlp",), constant(0.0), ctx.numerics.vectors)
            self.down_bias = param(rngs, (d_model,), ("embed",), constant(0.0), ctx.numerics.vectors)
        self.lora = Adapters(self, ("gate", "up", "down"), ctx, rngs)
        self.ctx, self.bias = ctx, bias

    def _project(self, eqn: str, x: jax.Array, name: str) -> jax.Array:
        y = self.lora(name, x, dot(eqn, x, getattr(self, name).get_value(), self.ctx.numerics))
        if not self.bias:
            return y
        bias = getattr(self, f"{name}_bias")[...].astype(jnp.float32)
        if name == "down":  # outputs are summed over the devices that shard F
            bias = jnp.where(device_index(self.ctx.placement.mesh_axes("mlp")) == 0, bias, jnp.zeros_like(bias))
        return (y.astype(jnp.float32) + bias[None, None]).astype(y.dtype)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Map (B, T, D) to (B, T, D): a partial sum, to be summed over the devices that shard F."""
        weights = [getattr(self, name).get_value() for name in ("gate", "up", "down")]
        activation, plain = self.ctx.structure.activation, not self.lora.names and not self.bias
        if all(isinstance(w, fp8.Float8) for w in weights) and plain and activation in NONLINEARITIES:
            return fp8.gated_linear(x_BTD, weights[0], weights[1], weights[2], NONLINEARITIES[activation])
        gate_BTF = checkpoint_name(self._project("BTD,DF->BTF", x_BTD, "gate"), "mlp_gate")
        up_BTF = checkpoint_name(self._project("BTD,DF->BTF", x_BTD, "up"), "mlp_up")
        with jax.named_scope("swiglu"):
            h_BTF = GATED[activation](gate_BTF, up_BTF)
        return self._project("BTF,DF->BTD", h_BTF, "down")
