"""The optimizer and its schedule, from optax.

An optimizer here is an `optax.GradientTransformation` that returns a direction; the step multiplies it by -lr(step). So the
learning rate has no state of its own: it follows from the step, and a resumed or restarted run cannot lose it.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain import config
from jaxtrain.kernels.dot import DTYPES
from jaxtrain.moments import INT8, block_axis
from jaxtrain.quantized import SIGNED, Blocks, decode, encode, is_blocks, scales_of


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


def stored_moments(m: str, v: str, axes: Any, beta1: float, beta2: float, eps: float) -> optax.GradientTransformation:
    """optax's Adam with each moment stored in a type of its own: f32, bf16, or int8 for 8-bit blocks (jaxtrain/quantized.py).

    The update itself is computed in float32, from the new moments before they are rounded. `axes`: logical axes of the
    parameters, which decide what goes into blocks; with int8, the rest is stored in float32.
    """
    adam = optax.scale_by_adam(b1=beta1, b2=beta2, eps=eps)

    kinds = {"mu": m, "nu": v}

    def along(path: Any, x: jax.Array) -> int | None:
        """The dimension that has blocks."""
        return block_axis(functools.reduce(lambda tree, key: tree[key.key], path, axes), x.shape)

    def scales(name: str, moment: Any) -> Any:
        def one(path: Any, x: jax.Array) -> jax.Array | None:
            axis = along(path, x)
            return None if axis is None else scales_of(x, axis)

        return jax.tree_util.tree_map_with_path(one, moment) if kinds[name] == INT8 else None

    def stored(name: str, moment: Any, scales: Any) -> Any:
        if kinds[name] != INT8:
            return jax.tree.map(lambda x: x.astype(DTYPES[kinds[name]]), moment)

        def one(path: Any, x: jax.Array, scales: jax.Array | None) -> jax.Array | Blocks:
            axis = along(path, x)
            return x if axis is None or scales is None else encode(x, scales, axis, SIGNED[name])

        return jax.tree_util.tree_map_with_path(one, moment, scales)

    def loaded(name: str, moment: Any) -> Any:
        one = lambda x: decode(x, SIGNED[name]) if is_blocks(x) else x.astype(jnp.float32)  # noqa: E731
        return jax.tree.map(one, moment, is_leaf=is_blocks)

    def init(params: Any) -> optax.ScaleByAdamState:
        s: Any = adam.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
        return optax.ScaleByAdamState(s.count, stored("mu", s.mu, scales("mu", s.mu)), stored("nu", s.nu, scales("nu", s.nu)))

    def exact(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        state = optax.ScaleByAdamState(state.count, loaded("mu", state.mu), loaded("nu", state.nu))
        return adam.update(jax.tree.map(lambda g: g.astype(jnp.float32), grads), state, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mu_scales = nu_scales = None
        if INT8 in (m, v):
            # A block's scale must be known before its codes. XLA would keep the new moments for that in float32, four times the
            # gradients; so they are computed twice, and behind the barrier it does not see that they are the same.
            s: Any = exact(updates, state, params)[1]
            mu_scales, nu_scales = scales("mu", s.mu), scales("nu", s.nu)
            updates, state = jax.lax.optimization_barrier((updates, state))
        updates, s = exact(updates, state, params)
        return updates, optax.ScaleByAdamState(s.count, stored("mu", s.mu, mu_scales), stored("nu", s.nu, nu_scales))

    return optax.GradientTransformation(init, update)


def adamw(optimizer: config.Optimizer, dtypes: config.Dtypes, axes: Any) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), decay on matrices only."""
    o = optimizer
    return optax.chain(
        stored_moments(dtypes.m, dtypes.v, axes, o.beta1, o.beta2, o.eps),
        optax.add_decayed_weights(o.weight_decay, mask=decayed(axes)),
    )


OPTIMIZERS = {"adamw": adamw}


def make_optimizer(optimizer: config.Optimizer, dtypes: config.Dtypes, axes: Any) -> optax.GradientTransformation:
    """By name, or a user's own as `package.module:name`, called with the same arguments."""
    if optimizer.name in OPTIMIZERS:
        return OPTIMIZERS[optimizer.name](optimizer, dtypes, axes)
    module, _, attribute = optimizer.name.partition(":")
    return getattr(importlib.import_module(module), attribute)(optimizer, dtypes, axes)
