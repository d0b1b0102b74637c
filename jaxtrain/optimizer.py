"""The optimizer and its schedule, from optax.

An optimizer here is an `optax.GradientTransformation` that returns a direction; the step multiplies it by -lr(step). So the
learning rate has no state of its own: it follows from the step, and a resumed or restarted run cannot lose it.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain import config
from jaxtrain.kernels.dot import DTYPES


def make_schedule(optimizer: config.Optimizer, steps: int) -> optax.Schedule:
    """Learning rate as a function of the step being taken, from 0.

    Linear warm-up from lr / warmup_steps to lr; then `constant`, `cosine` or `linear` down to lr_min over decay_steps, or
    `wsd`: lr until the last decay_steps, which go linearly to lr_min (Hu et al. 2024, arXiv:2404.06395).
    """
    o = optimizer
    after = steps - o.warmup_steps
    if o.schedule == "wsd":
        decay = o.decay_steps or max(1, steps // 5)
        tail = optax.join_schedules(
            [optax.constant_schedule(o.lr), optax.linear_schedule(o.lr, o.lr_min, decay)], [max(0, after - decay)]
        )
    else:
        decay = max(1, o.decay_steps or after)
        tail = {
            "constant": lambda: optax.constant_schedule(o.lr),
            "cosine": lambda: optax.cosine_decay_schedule(o.lr, decay, alpha=o.lr_min / o.lr if o.lr else 0.0),
            "linear": lambda: optax.linear_schedule(o.lr, o.lr_min, decay),
        }[o.schedule]()
    if not o.warmup_steps:
        return tail
    # Step 0 takes 1/warmup_steps of lr, not 0: a step that changes nothing is a step wasted.
    warmup = optax.linear_schedule(o.lr / o.warmup_steps, o.lr, max(1, o.warmup_steps - 1))
    return optax.join_schedules([warmup, tail], [o.warmup_steps])


def decayed(axes: Any) -> Any:
    """Which parameters weight decay applies to, decided by what they are: matrices, not norms and not biases.

    `axes` is a tree of logical axes; the stacked layer axis does not count as a dimension, nor do the heads of a bias.
    """

    def is_matrix(path: Any, a: tuple[str | None, ...]) -> bool:
        name = str(path[-1].key)
        return name not in ("scale", "bq", "bk", "bv") and len([x for x in a if x != "layers"]) >= 2

    return jax.tree_util.tree_map_with_path(is_matrix, axes, is_leaf=lambda x: isinstance(x, tuple))


def stored_moments(m: jnp.dtype, v: jnp.dtype, beta1: float, beta2: float, eps: float) -> optax.GradientTransformation:
    """optax's Adam with each moment stored in a type of its own; the update itself is computed in float32."""
    adam = optax.scale_by_adam(b1=beta1, b2=beta2, eps=eps)

    def cast(state: Any, mu: Any, nu: Any) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(
            state.count, jax.tree.map(lambda x: x.astype(mu), state.mu), jax.tree.map(lambda x: x.astype(nu), state.nu)
        )

    def init(params: Any) -> optax.ScaleByAdamState:
        return cast(adam.init(params), m, v)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        updates, state = adam.update(grads, cast(state, jnp.float32, jnp.float32), params)
        return updates, cast(state, m, v)

    return optax.GradientTransformation(init, update)


def adamw(optimizer: config.Optimizer, dtypes: config.Dtypes, axes: Any) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), decay on matrices only."""
    o = optimizer
    return optax.chain(
        stored_moments(DTYPES[dtypes.m], DTYPES[dtypes.v], o.beta1, o.beta2, o.eps),
        optax.add_decayed_weights(o.weight_decay, mask=decayed(axes)),
    )


OPTIMIZERS = {"adamw": adamw}


def make_optimizer(optimizer: config.Optimizer, dtypes: config.Dtypes, axes: Any) -> optax.GradientTransformation:
    """By name, or a user's own as `package.module:name`, called with the same arguments."""
    if optimizer.name in OPTIMIZERS:
        return OPTIMIZERS[optimizer.name](optimizer, dtypes, axes)
    module, _, attribute = optimizer.name.partition(":")
    return getattr(importlib.import_module(module), attribute)(optimizer, dtypes, axes)
