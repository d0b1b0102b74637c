"""What the forward pass keeps for the backward pass, and how layers are grouped under checkpoints.

The tensors that can be kept, and which of them each policy keeps, stand in jaxtrain/activations.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.activations import KEPT, parse_tensors
from jaxtrain.config import Remat

# Gathered weights (kernels/dot.py). Kept by no policy, not even `none`, or every layer's would be held at once; unless
# sharding.gather = forward asks for that, and then by all.
WEIGHT = ("weight",)


def anything_but_weights(primitive: Any, *avals: Any, **params: Any) -> bool:
    """The policy `none`. To refuse the name alone is not enough: what the name was given to would be kept in its place.

    Inside the rules of `dot` and `rms_norm` a gather is itself one operation, a custom_vjp_call, and nothing else is.
    """
    return primitive.name != "custom_vjp_call" and not (primitive.name == "name" and params["name"] in WEIGHT)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A remat policy, ready for use. Hashable."""

    policy: str
    keep: tuple[str, ...]
    offload: tuple[str, ...]
    every: int
    keep_weights: bool = False  # from the forward pass to the backward pass, gathered

    def checkpoint(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """`body` with only what the policy says kept for its backward pass."""
        policies = jax.checkpoint_policies
        weights = WEIGHT if self.keep_weights else ()
        if self.policy == "none":
            policy = policies.everything_saveable if self.keep_weights else anything_but_weights
        elif self.policy == "dots":
            # By operation and not by name: with qk-norm, what the backward pass needs is the GEMM's output, not the named q.
            policy = policies.save_from_both_policies(
                policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(*weights)
            )
        elif self.offload:
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[*self.keep, *weights],
                names_which_can_be_offloaded=list(self.offload),
                offload_src="device",
                offload_dst="pinned_host",
            )
        else:
            policy = policies.save_only_these_names(*self.keep, *weights)
        # Scan bodies are compiled apart, so XLA cannot merge the recomputation with the original.
        return jax.checkpoint(body, policy=policy, prevent_cse=False)

    def scan(self, body: Callable[[jax.Array, Any], jax.Array], x: jax.Array, layers: Any, num_layers: int) -> jax.Array:
        """Run `body(x, layer)` over layers stacked on axis 0, `every` layers under each checkpoint.

        A remainder of num_layers / every forms a last, smaller group.
        """

        def run(x: jax.Array, group: Any) -> jax.Array:
            # Unrolled: gathers of the group's next layer start during this one. A loop inside the loop that XLA itself unrolls
            # makes it (jaxlib 0.11.2) abort in some layouts: "Call graph must have been flattened".
            return jax.lax.scan(lambda x, layer: (body(x, layer), None), x, group, unroll=True)[0]

        if self.every == 1 or self.policy == "none":
            step = self.checkpoint(body)
            return jax.lax.scan(lambda x, layer: (step(x, layer), None), x, layers)[0]
        step = self.checkpoint(run)
        whole = num_layers // self.every
        groups = jax.tree.map(lambda w: w[: whole * self.every].reshape(whole, self.every, *w.shape[1:]), layers)
        x, _ = jax.lax.scan(lambda x, group: (step(x, group), None), x, groups)
        if num_layers % self.every:
            x = step(x, jax.tree.map(lambda w: w[whole * self.every :], layers))
        return x


def make_plan(remat: Remat, gather: str) -> Plan:
    """From the config's `remat` section and `sharding.gather`; validate.py has checked names and actions."""
    keep_weights = gather == "forward"
    if remat.policy != "custom":
        return Plan(remat.policy, KEPT[remat.policy], (), remat.every, keep_weights)
    places, _ = parse_tensors(remat.tensors)
    keep = tuple(name for name, place in places.items() if place == "keep")
    offload = tuple(name for name, place in places.items() if place == "offload")
    return Plan(remat.policy, keep, offload, remat.every, keep_weights)
