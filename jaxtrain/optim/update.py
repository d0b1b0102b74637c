"""Update weights and optimizer state in a step: all at once, or layer by layer if the moments are in host memory.

Layer by layer, a loop copies one layer's moments to the device, updates the moments and the layer's weights, and copies the
moments back. XLA overlaps copies in both directions with the arithmetic of the layer's other tensors. The device holds the
moments of one layer at a time. Moments of parameters outside the stack of layers are copied all at once.

The update starts after the whole backward pass, because gradients are clipped by their global norm.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config import schema
from jaxtrain.config.shapes import STACK
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.models.module import Params
from jaxtrain.optim.optimizer import make_optimizer
from jaxtrain.optim.rounding import Rounding
from jaxtrain.sharding import Placement

# (gradients, optimizer state, parameters, factor of the gradients or None, learning rate, taken: bool (), False to change
# nothing, step: int32 ()) -> (parameters, optimizer state)
Update = Callable[[Params, Any, Params, jax.Array | None, jax.Array, jax.Array, jax.Array], tuple[Params, Any]]
DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host


def make_update(tx: optax.GradientTransformation, rounding: Rounding) -> Callable[..., tuple[Params, Any]]:
    """Return an `Update` of all given parameters at once, on the device.

    The returned function has one more argument, layer: int32 (), the index of a layer, with which the streamed update calls it
    for each layer; None for all layers.
    """

    def update(
        grads: Params,
        state: Any,
        params: Params,
        scale: jax.Array | None,
        lr: jax.Array,
        taken: jax.Array,
        step: jax.Array,
        layer: jax.Array | None = None,
    ) -> tuple[Params, Any]:
        if scale is not None:
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        updates, new = tx.update(grads, state, params)
        new_params = rounding.round_params(jax.tree.map(lambda p, u: p - lr * u, params, updates), params, step, layer)
        # `taken` selects element by element, in the kernels that write the results: a conditional would allocate old and new.
        return (
            jax.tree.map(lambda p, new: jnp.where(taken, new, p), params, new_params),
            jax.tree.map(lambda n, old: jnp.where(taken, n, old), new, state),
        )

    return update


def make_streamed_update(
    optimizer: schema.Optimizer,
    dtypes: schema.Dtypes,
    axes: Params,
    placement: Placement,
    numerics: Numerics,
    rounding: Rounding,
) -> Update:
    """Return an `Update` that runs layer by layer, with the moments in host memory.

    axes: dict of the parameters' logical axes. Its entry STACK has the parameters that are stacked by layers.
    """
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    layer_axes = {STACK: jax.tree.map(lambda a: a[1:], axes[STACK], is_leaf=is_axes)}
    unstacked_axes = {name: a for name, a in axes.items() if name != STACK}
    update_layer, update_unstacked = (
        make_update(make_optimizer(optimizer, dtypes, a, placement, numerics), rounding) for a in (layer_axes, unstacked_axes)
    )

    def map_moments(change: Callable[..., Any], state: Any, *states: Any) -> Any:
        """Return `state` with `change` applied to each dict of moments (by parameter), and to the same dict of `states`."""
        names = (axes.keys(), layer_axes.keys(), unstacked_axes.keys())
        is_moment = lambda x: isinstance(x, dict) and x.keys() in names  # noqa: E731
        return jax.tree.map(lambda x, *o: change(x, *o) if is_moment(x) else x, state, *states, is_leaf=is_moment)

    def move(tree: Any, space: Any) -> Any:
        return jax.tree.map(lambda x: jax.device_put(x, space), tree)

    def update(
        grads: Params,
        state: Any,
        params: Params,
        scale: jax.Array | None,
        lr: jax.Array,
        taken: jax.Array,
        step: jax.Array,
    ) -> tuple[Params, Any]:
        def select(tree: Params, names: Any) -> Params:
            return {name: tree[name] for name in names}

        # Without the barrier, XLA's kernels would read host memory themselves, and wait for it.
        unstacked = map_moments(lambda m: jax.lax.optimization_barrier(move(select(m, unstacked_axes), DEVICE)), state)
        new_params, unstacked = update_unstacked(
            select(grads, unstacked_axes), unstacked, select(params, unstacked_axes), scale, lr, taken, step
        )
        unstacked = map_moments(lambda m: move(m, HOST), unstacked)

        def body(i: jax.Array, carry: tuple[Params, Any]) -> tuple[Params, Any]:
            params, stacked = carry

            def take_layer(tree: Any) -> Any:
                return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)

            def put_layer(tree: Any, layer_tree: Any) -> Any:
                return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, i, 0), tree, layer_tree)

            layer_state = map_moments(lambda m: move(take_layer(m), DEVICE), stacked)
            new_params, layer_state = update_layer(
                take_layer(select(grads, layer_axes)), layer_state, take_layer(params), scale, lr, taken, step, i
            )
            # The count of steps is unchanged: each layer is at the same step.
            return put_layer(params, new_params), map_moments(lambda m, y: put_layer(m, move(y, HOST)), stacked, layer_state)

        stacked = map_moments(lambda m: move(select(m, layer_axes), HOST), state)
        num_layers = jax.tree.leaves(params[STACK])[0].shape[0]
        new_layers, stacked = jax.lax.fori_loop(0, num_layers, body, (select(params, layer_axes), stacked))
        return new_params | new_layers, map_moments(lambda m, other: m | other, unstacked, stacked)

    return update
