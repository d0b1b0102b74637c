"""A feed-forward block of experts: a router chooses a few experts for each token; a shared expert processes all tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.schema import Model
from jaxtrain.kernels.experts import feed_forward as kernel
from jaxtrain.kernels.experts.routing import COLUMNS, route
from jaxtrain.models.layers import GATED, Context, GatedLinear
from jaxtrain.models.lora import Adapters
from jaxtrain.models.module import constant, normal, param
from jaxtrain.sharding import all_reduce, device_index

ROUTER = ("embed", None)
DROPPED = COLUMNS.index("dropped")


class ExpertsMLP(nnx.Module):
    """A feed-forward block of experts (Shazeer et al. 2017, arXiv:1701.06538).

    The result is the sum of share_e down_e(f(gate_e(x), up_e(x))) over the chosen experts e, plus shared(x) if the model has a
    shared expert, whose output may have a gate. share_e is the factor that the router computes for expert e. The router
    computes in float32, and its weight and `router_bias` are never rounded to the compute dtype.
    """

    def __init__(self, model: Model, std: float, out_std: float, ctx: Context, rngs: nnx.Rngs):
        E, D, F, dtype = model.num_experts, model.d_model, model.d_ff, ctx.numerics.params
        # The router is stored like master weights also with adapters, where other weights have the compute dtype.
        self.router = param(rngs, (D, E), ROUTER, normal(std), ctx.lora.params, exact=True)
        if model.router_bias:
            self.router_bias = param(rngs, (E,), (None,), constant(0.0), jnp.dtype(jnp.float32), exact=True)
        if model.router_logit_bias:
            self.router_logit_bias = param(rngs, (E,), (None,), constant(0.0), ctx.numerics.vectors)
        self.gate = param(rngs, (E, D, F), kernel.AXES, normal(std), dtype, dot=True)
        self.up = param(rngs, (E, D, F), kernel.AXES, normal(std), dtype, dot=True)
        self.down = param(rngs, (E, D, F), kernel.AXES, normal(out_std), dtype, dot=True)
        if model.expert_bias:
            hidden, out = ("experts", "mlp"), ("experts", "expert_embed")
            self.gate_bias = param(rngs, (E, F), hidden, constant(0.0), ctx.numerics.vectors)
            self.up_bias = param(rngs, (E, F), hidden, constant(0.0), ctx.numerics.vectors)
            self.down_bias = param(rngs, (E, D), out, constant(0.0), ctx.numerics.vectors)
        if model.shared_d_ff:
            self.shared = GatedLinear(D, model.shared_d_ff, std, out_std, ctx, rngs)
        if model.shared_gate:
            self.shared_gate = param(rngs, (D,), ("embed",), normal(std), ctx.numerics.vectors)
        self.lora = Adapters(self, kernel.WEIGHTS, ctx, rngs, experts=True)
        self.model, self.ctx = model, ctx
        self.spec = kernel.ExpertsSpec(
            E,
            GATED[ctx.structure.activation],
            ctx.moe.impl,
            ctx.moe.capacity_factor,
            ctx.placement,
            ctx.numerics,
            ctx.lora.scale,
        )

    def _biases(self) -> kernel.Biases | None:
        """Return the experts' biases. If devices shard F, `down_bias` is 0 except on one device, because outputs are summed."""
        if not self.model.expert_bias:
            return None
        first = device_index(self.ctx.placement.mesh_axes("mlp")) == 0
        down_ED = self.down_bias[...]
        return kernel.Biases(self.gate_bias[...], self.up_bias[...], jnp.where(first, down_ED, jnp.zeros_like(down_ED)))

    def __call__(self, x_BTD: jax.Array, real_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Map (B, T, D) to (B, T, D), a partial sum over the devices that shard F. Also return the layer's statistics.

        real_BT: bool, False for padding, which goes to no expert.
        """
        model, placement, k = self.model, self.ctx.placement, self.model.experts_per_token
        with jax.named_scope("router"):
            x32_BTD, precision = x_BTD.astype(jnp.float32), jax.lax.Precision.HIGHEST
            logits_BTE = jnp.einsum("BTD,DE->BTE", x32_BTD, self.router[...], precision=precision)
            if model.router_logit_bias:
                logits_BTE += self.router_logit_bias[...][None, None].astype(jnp.float32)
            bias_E = self.router_bias[...] if model.router_bias else None
            options: dict[str, Any] = {
                "k": k,
                "router": model.router,
                "renormalize": model.renormalize,
                "over": placement.token_axes,
            }
            options |= {"scaling": model.routed_scaling, "groups": model.router_groups, "kept_groups": model.groups_per_token}
            if self.ctx.moe.sequence_balance_loss:
                options["sequence"] = tuple(a for a in placement.token_axes if a in placement.mesh_axes("sequence"))
            routed = route(logits_BTE, bias_E, real_BT, **options)
        with jax.named_scope("experts"):
            weights = self.gate.get_value(), self.up.get_value(), self.down.get_value(), self._biases()
            adapters = {name: kernel.AdapterPair(*pair) for name, pair in self.lora.pairs().items()}
            inputs = x_BTD, routed.share_BTk, routed.chosen_BTk, kernel.Weights(*weights, adapters)
            outputs: Any = kernel.feed_forward(*inputs, self.spec)
            y_BTD, dropped = outputs
        choices, dropped = all_reduce((real_BT.sum() * k, dropped), placement.token_axes)
        dropped = jax.lax.stop_gradient(dropped) / jnp.maximum(choices, 1)
        statistics = routed.statistics.at[DROPPED].set(dropped)
        return y_BTD + self._shared_expert(x_BTD) if model.shared_d_ff else y_BTD, statistics

    def _shared_expert(self, x_BTD: jax.Array) -> jax.Array:
        """Return the output of the shared expert, (B, T, D), a partial sum over the devices that shard F."""
        y_BTD = self.shared(x_BTD)
        if not self.model.shared_gate:
            return y_BTD
        with jax.named_scope("shared_gate"):
            gate_BT1 = jnp.sum(
                x_BTD.astype(jnp.float32) * self.shared_gate[...].astype(jnp.float32)[None, None], -1, keepdims=True
            )
            return (y_BTD.astype(jnp.float32) * jax.nn.sigmoid(gate_BT1)).astype(y_BTD.dtype)


Statistics = Any  # router statistics of all layers so far, f32 (layers, 5 + experts); () for a model without experts


def no_statistics(model: Model, layers: int = 0) -> Statistics:
    """Return the statistics before the first layer, all 0. layers: number of rows; 0: one for each layer of the stack."""
    if not model.num_experts:
        return ()
    return jnp.zeros((layers or model.stacked_layers, len(COLUMNS) + model.num_experts), jnp.float32)


def with_row(statistics: Statistics, row: jax.Array) -> Statistics:
    """Return statistics without the first row, and with the next layer's row (5 + E,) at the end.

    After all layers, row i is that of layer i.
    """
    return jnp.concatenate([statistics[1:], row[None]])
