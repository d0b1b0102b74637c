"""Statistics of experts in a step: load-balancing losses, metrics, and the router's bias.

The statistics (kernels/experts/routing.py) have one row for each layer in a slot of the stack. Rows are in the order in which a
microbatch passes the layers (stages.py). A row has means over a microbatch's tokens without padding. A step sums the statistics
of its microbatches. Like the loss, the statistics of a microbatch are weighted by the microbatch's fraction of the batch's loss
weight.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config.schema import Moe
from jaxtrain.config.shapes import EXPERT_METRICS, LAYER_KEY, MTP
from jaxtrain.kernels.experts.routing import COLUMNS
from jaxtrain.models.module import Params, replace_leaves, select_leaves

BIAS = "router_bias"


def is_bias(name: str) -> bool:
    """Return whether a parameter, by its full name, is a router's bias, which is updated without a gradient."""
    return name.rpartition(".")[2] == BIAS


@dataclasses.dataclass(frozen=True)
class Balance:
    """The settings of load balancing of experts, without arrays. The methods take statistics of a microbatch or of a step."""

    moe: Moe
    num_experts: int
    order: tuple[int | None, ...]  # for each slot of the stack of layers, its element; None for an empty slot
    bias_mask: Params  # for each parameter, whether it is a router's bias that is updated
    mtp_layers: int = 0  # modules of multi-token prediction, whose rows follow those of the stack
    period: int = 1  # layers in each slot of the stack

    @property
    def zeros(self) -> jax.Array:
        """Return zeros in the shape of the statistics, f32."""
        return jnp.zeros((self._stacked_layers + self.mtp_layers, len(COLUMNS) + self.num_experts), jnp.float32)

    @property
    def _stacked_layers(self) -> int:
        """Return the number of layers in the stack. Row i of the statistics is that of layer i."""
        return self.period * sum(element is not None for element in self.order)

    def penalty(self, statistics: jax.Array) -> jax.Array:
        """Return the weighted sum of the experts' auxiliary losses of a microbatch, f32 (), each a mean over the layers."""
        means = statistics.mean(0)
        losses = self.moe.balance_loss * means[0] + self.moe.z_loss * means[2]
        return losses + self.moe.sequence_balance_loss * means[1] if self.moe.sequence_balance_loss else losses

    def metrics(self, statistics: jax.Array) -> dict[str, jax.Array]:
        """Return name in shapes.EXPERT_METRICS -> value of the metric, f32 (), from the statistics of a step."""
        loads_LE = statistics[:, len(COLUMNS) :]
        values = *statistics.mean(0)[: len(COLUMNS)], loads_LE.max() * self.num_experts
        return dict(zip(EXPERT_METRICS, values, strict=True))

    def update_router_bias(self, params: Params, statistics: jax.Array, taken: jax.Array) -> Params:
        """Return the parameters with the routers' biases moved toward even loads; unchanged for a skipped step.

        A bias moves by a fixed step: up for an expert with less than an even load, down for one with more (Wang et al. 2024,
        arXiv:2408.15664, algorithm 1).
        """
        if not any(jax.tree.leaves(self.bias_mask)):
            return params
        loads_LE = statistics[:, len(COLUMNS) :]
        step_LE = self.moe.bias_rate * jnp.sign(loads_LE.mean(1, keepdims=True) - loads_LE)
        empty = jnp.zeros_like(step_LE[0])

        def stack_steps(index: int) -> jax.Array:
            rows = [empty if i is None else step_LE[i * self.period + index] for i in self.order]
            return jnp.where(taken, jnp.stack(rows), 0.0)

        steps = [stack_steps(index) for index in range(self.period)]

        def move_bias(path: Any, bias: jax.Array) -> jax.Array:
            if path[0].key != MTP:
                within = LAYER_KEY.search(dotted(path))
                return bias + steps[int(within[1]) if within else 0].astype(bias.dtype)
            row = self._stacked_layers + int(path[1].key)  # of mtp.0.block.mlp.router_bias
            return bias + jnp.where(taken, step_LE[row], 0.0).astype(bias.dtype)

        return replace_leaves(params, jax.tree_util.tree_map_with_path(move_bias, select_leaves(params, self.bias_mask)))


def dotted(path: Any) -> str:
    """Return the dotted name of a parameter from its path."""
    return ".".join(str(k.key) for k in path)
