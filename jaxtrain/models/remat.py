"""What the forward pass keeps for the backward pass, and how layers are grouped under checkpoints.

The tensors that can be kept, and which of them each policy keeps, stand in jaxtrain/activations.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.activations import KEPT, parse_tensors
from jaxtrain.config import Remat
from jaxtrain.sharding import Held

Body = Callable[[jax.Array, Any, Any], jax.Array]  # (x, layer, what all layers share) -> x

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
    waits: bool = False  # what is computed again waits for the gradient that needs it
    last_apart: bool = False  # the last layer keeps its weights, since its backward pass comes next

    def checkpoint(self, body: Callable[..., Any], in_loop: bool = True) -> Callable[..., Any]:
        """`body` with only what the policy says kept for its backward pass. `in_loop`: it will be the body of a loop."""
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
        # Scan bodies are compiled apart, so XLA cannot merge the recomputation with the original. Elsewhere it would.
        return jax.checkpoint(body, policy=policy, prevent_cse=not in_loop)

    def apart(self, num_layers: int) -> bool:
        """Whether the last layer is run outside of the loop over the others."""
        # Of what `dots` keeps, XLA would merge the last layer's attention with its repetition.
        return self.last_apart and num_layers > 1 and self.every_layer and self.policy != "dots"

    @property
    def every_layer(self) -> bool:
        """Whether each layer stands under a checkpoint of its own."""
        return self.every == 1 or self.policy == "none"

    def trips(self, num_layers: int) -> int:
        """How often the loop over layers goes round."""
        return num_layers - self.apart(num_layers) if self.every_layer else num_layers // self.every

    def scan(self, body: Body, x: jax.Array, layers: Any, shared: Any, num_layers: int) -> jax.Array:
        """Run `body(x, layer, shared)` over layers stacked on axis 0, `every` layers under each checkpoint.

        A remainder of num_layers / every forms a last, smaller group. Nothing is learnt through `shared`: it has no gradient.
        """
        if self.apart(num_layers):
            # Its backward pass comes at once: nothing of it need go to the host and back.
            last = dataclasses.replace(self, keep_weights=True, keep=(*self.keep, *self.offload), offload=())
            bodies = self.checkpoint(body), last.checkpoint(body, in_loop=False)
            return scan_last_apart(*bodies, x, layers, shared, num_layers, self.waits)

        def run(x: jax.Array, group: Any) -> jax.Array:
            # Unrolled: gathers of the group's next layer start during this one. A loop inside the loop that XLA itself unrolls
            # makes it (jaxlib 0.11.2) abort in some layouts: "Call graph must have been flattened".
            return jax.lax.scan(lambda x, layer: (body(x, layer, shared), None), x, group, unroll=True)[0]

        if self.every_layer:
            step = self.checkpoint(lambda x, layer: body(x, layer, shared))
            return jax.lax.scan(lambda x, layer: (step(x, layer), None), x, layers)[0]
        step = self.checkpoint(run)
        whole = num_layers // self.every
        groups = jax.tree.map(lambda w: w[: whole * self.every].reshape(whole, self.every, *w.shape[1:]), layers)
        x, _ = jax.lax.scan(lambda x, group: (step(x, group), None), x, groups)
        if num_layers % self.every:
            x = step(x, jax.tree.map(lambda w: w[whole * self.every :], layers))
        return x


def scan_last_apart(step: Body, last: Body, x: jax.Array, layers: Any, shared: Any, num_layers: int, waits: bool) -> jax.Array:
    """`step` over all layers but the last, and `last` over that one, all of them parts of one stack.

    Slices of the stack would be copies of it. So loops run over the layers' numbers, forward and backward; the backward loop
    carries the gradients of the whole stack and puts each layer's in its place. Loops count in their carry: XLA starts a
    gather an iteration early only where the layer it takes follows from the loop's own counter.
    """
    leaves, tree = jax.tree.flatten(layers)
    weights = jax.tree.leaves(layers, is_leaf=lambda w: isinstance(w, Held))
    # Of a held weight, the gradient is that of its slot alone.
    learnt = [kind for w in weights for kind in ((False, True) if isinstance(w, Held) else (True,))]

    def at(leaves: list[jax.Array], i: jax.Array) -> list[jax.Array]:
        return [jax.lax.dynamic_index_in_dim(w, i, keepdims=False, allow_negative_indices=False) for w in leaves]

    def put(grads: list[jax.Array], parts: list[jax.Array], i: jax.Array) -> list[jax.Array]:
        kept = [dw for dw, learns in zip(parts, learnt, strict=True) if learns]
        return [
            jax.lax.dynamic_update_index_in_dim(g, dw, i, 0, allow_negative_indices=False)
            for g, dw in zip(grads, kept, strict=True)
        ]

    def differentiate(f: Body, x: jax.Array, leaves: list[jax.Array], shared: Any, i: jax.Array) -> tuple[jax.Array, Any]:
        """The layer's result, and its backward pass without the arguments that are there anyhow."""
        return jax.vjp(
            lambda x, layer, shared: f(x, jax.tree.unflatten(tree, layer), shared),
            *(x, at(leaves, i), shared),
            saveable_args=(True, False, False),
            in_nzs=(True, learnt, False),
        )

    def backward(vjp: Any, leaves: list[jax.Array], shared: Any, i: jax.Array, dy: jax.Array) -> tuple[jax.Array, Any]:
        dx, d_layer, _ = vjp.replace(args_res=(vjp.args_res[0], at(leaves, i), shared))(dy)
        return dx, d_layer

    @jax.custom_vjp
    def run(x: jax.Array, leaves: list[jax.Array], shared: Any) -> jax.Array:
        layers = jax.tree.unflatten(tree, leaves)
        return jax.lax.scan(lambda x, layer: (step(x, layer, shared), None), x, layers)[0]

    def forward(x, leaves, shared):
        def one(carry, _):
            x, i = carry
            y, vjp = differentiate(step, x, leaves, shared, i)
            return (y, i + 1), vjp

        (x, i), vjps = jax.lax.scan(one, (x, jnp.int32(0)), None, length=num_layers - 1)
        y, vjp = differentiate(last, x, leaves, shared, i)
        return y, (vjps, vjp, leaves, shared)

    def back(residuals, dy):
        vjps, vjp, leaves, shared = residuals
        end = jnp.int32(num_layers - 1)
        dx, d_layer = backward(vjp, leaves, shared, end, dy)
        grads = put([jnp.zeros_like(w) for w, learns in zip(leaves, learnt, strict=True) if learns], d_layer, end)

        def one(carry, _):
            dy, grads, count = carry
            i = num_layers - 2 - count
            # The compiler unrolls this loop, and would compute again for two layers at a time and hold both. So what was kept
            # is looked up by a number that is there no sooner than the gradient. Weights do not wait: they are gathered ahead.
            dy, then = jax.lax.optimization_barrier((dy, i)) if waits else (dy, i)
            vjp = jax.tree.unflatten(kind, at(kept, then))
            dx, d_layer = backward(vjp, leaves, shared, i, dy)
            return (dx, put(grads, d_layer, i), count + 1), None

        kept, kind = jax.tree.flatten(vjps)
        (dx, grads, _), _ = jax.lax.scan(one, (dx, grads, jnp.int32(0)), None, length=num_layers - 1)
        made = iter(grads)
        return dx, [next(made) if learns else None for learns in learnt], None

    run.defvjp(forward, back)
    return run(x, leaves, shared)


def make_plan(remat: Remat, gather: str, gathers: bool, waits: bool) -> Plan:
    """From the config's `remat` section and `sharding.gather`; validate.py has checked names and actions.

    `gathers`: layers gather their weights as they use them, on this mesh. `waits`: see Plan.
    """
    more = (gather == "forward", waits, gathers and gather == "layer")
    if remat.policy != "custom":
        return Plan(remat.policy, KEPT[remat.policy], (), remat.every, *more)
    places, _ = parse_tensors(remat.tensors)
    keep = tuple(name for name, place in places.items() if place == "keep")
    offload = tuple(name for name, place in places.items() if place == "offload")
    return Plan(remat.policy, keep, offload, remat.every, *more)
