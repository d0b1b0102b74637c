"""What the forward pass keeps for the backward pass, and how layers are grouped under checkpoints.

The tensors that can be kept, and which of them each policy keeps, stand in jaxtrain/activations.py. How layers follow each
other in the program, as a loop or one by one, stands in layer_loop.py.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.activations import KEPT, parse_tensors
from jaxtrain.config import Remat
from jaxtrain.kernels.experts.routing import CHOICE
from jaxtrain.models.layer_loop import Body, loop, loop_last_apart, one_by_one

# Gathered weights (kernels/dot.py). Kept by no policy, not even `none`, or every layer's would be held at once; unless
# sharding.gather = forward asks for that, and then by all.
WEIGHT = ("weight",)
# Kept by all: where tokens go must be the same in the backward pass, and takes k numbers a token.
ALWAYS = (CHOICE,)


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
    waits: bool = False  # what is computed again waits for the gradient that needs it
    last_apart: bool = False  # the last layer keeps its weights, since its backward pass comes next
    unroll: bool = False  # layers stand one by one in the program; no loop

    def checkpoint(self, body: Callable[..., Any], in_loop: bool = True) -> Callable[..., Any]:
        """`body` with only what the policy says kept for its backward pass. `in_loop`: it will be the body of a loop.

        Arguments that are plain numbers stay so.
        """
        policies = jax.checkpoint_policies
        names = (*ALWAYS, *WEIGHT) if self.keep_weights else ALWAYS
        if self.policy == "none":
            policy = policies.everything_saveable if self.keep_weights else anything_but_weights
        elif self.policy == "dots":
            # By operation and not by name: with qk-norm, what the backward pass needs is the GEMM's output, not the named q.
            policy = policies.save_from_both_policies(
                policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(*names)
            )
        elif self.offload:
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[*self.keep, *names],
                names_which_can_be_offloaded=list(self.offload),
                offload_src="device",
                offload_dst="pinned_host",
            )
        else:
            policy = policies.save_only_these_names(*self.keep, *names)
        # Scan bodies are compiled apart, so XLA cannot merge the recomputation with the original. Elsewhere it would.

        def checkpointed(*args: Any) -> Any:
            static = tuple(i for i, arg in enumerate(args) if isinstance(arg, int))
            return jax.checkpoint(body, policy=policy, prevent_cse=not in_loop, static_argnums=static)(*args)

        return checkpointed

    def apart(self, num_layers: int) -> bool:
        """Whether the last layer is run outside of the loop over the others."""
        # Of what `dots` keeps, XLA would merge the last layer's attention with its repetition.
        return self.last_apart and num_layers > 1 and self.every_layer and self.policy != "dots"

    def adds(self, num_layers: int) -> bool:
        """Whether the gradients of the layers are added, one by one, to a sum that is there (`Held.sum`)."""
        return self.unroll or self.apart(num_layers)

    @property
    def every_layer(self) -> bool:
        """Whether each layer stands under a checkpoint of its own."""
        return self.every == 1 or self.policy == "none"

    def trips(self, num_layers: int) -> int:
        """How often the loop over layers goes round; 0 where there is none."""
        if self.unroll:
            return 0
        return num_layers - self.apart(num_layers) if self.every_layer else num_layers // self.every

    def run(self, body: Body, x: Any, layers: Any, shared: Any, kinds: Sequence[int]) -> Any:
        """`body(x, layer, shared, kind)` for each of the layers stacked on axis 0, `every` layers under each checkpoint.

        kinds: of each layer, a number that the body knows what to do with; the same for all that are alike.

        A remainder of num_layers / every forms a last, smaller group. Nothing is learnt through `shared`: it has no gradient.
        """
        num_layers = len(kinds)
        apart = self.apart(num_layers)
        # Its backward pass comes at once: nothing of it need go to the host and back.
        at_once = dataclasses.replace(self, keep_weights=True, keep=(*self.keep, *self.offload), offload=())
        last = (at_once if apart else self).checkpoint
        if self.unroll:
            every = 1 if self.every_layer else self.every
            return one_by_one(body, self.checkpoint, last, x, layers, shared, kinds, every)
        if apart:
            bodies = self.checkpoint(body), last(body, in_loop=False)
            return loop_last_apart(*bodies, x, layers, shared, kinds, self.waits)

        if self.every_layer:
            return loop(self.checkpoint(lambda x, layer, kind: body(x, layer, shared, kind)), x, layers, kinds)

        def one(x: Any, layer: tuple[Any, Any]) -> tuple[Any, None]:
            return body(x, layer[0], shared, kinds[0] if alike else layer[1]), None

        def several(x: Any, group: Any) -> Any:
            # Unrolled: gathers of the group's next layer start during this one. A loop inside the loop that XLA itself unrolls
            # makes it (jaxlib 0.11.2) abort in some layouts: "Call graph must have been flattened".
            return jax.lax.scan(one, x, group, unroll=True)[0]

        alike = len(set(kinds)) == 1
        each = (layers, None if alike else jnp.asarray(kinds, jnp.int32))
        step = self.checkpoint(several)
        whole = num_layers // self.every
        groups = jax.tree.map(lambda w: w[: whole * self.every].reshape(whole, self.every, *w.shape[1:]), each)
        x, _ = jax.lax.scan(lambda x, group: (step(x, group), None), x, groups)
        if num_layers % self.every:
            x = step(x, jax.tree.map(lambda w: w[whole * self.every :], each))
        return x


def make_plan(remat: Remat, gather: str, gathers: bool, waits: bool, unroll: bool) -> Plan:
    """From the config's `remat` section and `sharding.gather`; `validate` has checked names and actions.

    `gathers`: layers gather their weights as they use them, on this mesh. `waits`, `unroll`: see Plan.
    """
    more = (gather == "forward", waits, gathers and gather == "layer", unroll)
    if remat.policy != "custom":
        return Plan(remat.policy, KEPT[remat.policy], (), remat.every, *more)
    places, _ = parse_tensors(remat.tensors)
    keep = tuple(name for name, place in places.items() if place == "keep")
    offload = tuple(name for name, place in places.items() if place == "offload")
    return Plan(remat.policy, keep, offload, remat.every, *more)
