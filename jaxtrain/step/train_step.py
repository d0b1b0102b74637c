"""The train step, a pure function: gradients of a batch, their norm, the guard's verdict, the update.

The gradients are already reduced over devices and sharded like the weights (gradients.py). program.py builds the step's
functions from a config.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxtrain.models.module import Params, replace_leaves, select_leaves
from jaxtrain.optim.update import Update
from jaxtrain.step import guard
from jaxtrain.step.balance import Balance
from jaxtrain.step.gradients import EXPERTS, Report
from jaxtrain.step.loss import Batch
from jaxtrain.step.state import TrainState, weights

Metrics = dict[str, jax.Array]


def make_train_step(
    gradients: Callable[[Params, Batch], tuple[Report, Params]],
    update: Update,
    schedule: optax.Schedule,
    *,
    trained: Params,
    clip_norm: float,
    spike_sigmas: float = 0.0,
    balance: Balance | None = None,
    ema_decay: float = 0.0,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return a pure function `(state, batch) -> (state, metrics)`, to be jitted with explicit shardings.

    A step is skipped if its loss or gradient norm is not finite, or a spike (guard.judge). A skipped step changes neither
    weights nor optimizer state, but counts as a step. The step after a skipped step is held: it changes nothing, so that the
    loop can react first.

    Metrics, f32 (): `loss` (nats per token, or the mean over pairs, before the update; with z-loss, without the experts'
    auxiliary losses), `grad_norm` (global, before clipping), `lr`; i32 (): `verdict` (guard.TAKEN, ...). Models with experts
    add shapes.EXPERT_METRICS, and a loss adds its own metrics (loss.TrainingLoss.reports).

    Args:
      gradients: returns the report of a batch and the gradients of all trained parameters, sharded like the parameters.
      update: the update of weights and optimizer state (optim/update.py).
      schedule: learning rate by step.
      trained: the parameters that are trained. Others are unchanged, except biases of routers.
      clip_norm: largest global norm of the gradients; 0: no clipping.
      spike_sigmas: as `sigmas` of guard.judge; 0: only values that are not finite are skipped.
      balance: the load balancing of experts; None for a model without experts.
      ema_decay: decay of the averages of the trained parameters; 0: there are none.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        (value, report), grads = gradients(weights(state), batch)
        with jax.named_scope("optimizer"):
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))
            scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30)) if clip_norm else None
            lr = jnp.asarray(schedule(state.step), jnp.float32)
            verdict, guard_state = guard.judge(state.guard, value, norm, spike_sigmas)
            old = select_leaves(state.params, trained)
            params, optimizer = update(grads, state.optimizer, old, scale, lr, verdict == guard.TAKEN, state.step)
            params = replace_leaves(state.params, params)
            params = balance.update_router_bias(params, report[EXPERTS], verdict == guard.TAKEN) if balance else params
            taken = verdict == guard.TAKEN
            ema = update_average(state.ema, select_leaves(params, trained), ema_decay, taken) if ema_decay else ()
            done = state.step + (verdict != guard.HELD)
        new = TrainState(done.astype(jnp.int32), params, optimizer, guard_state, ema, state.layers)
        metrics = {"loss": value, "grad_norm": norm, "lr": lr, "verdict": verdict}
        metrics |= {name: x for name, x in report.items() if name != EXPERTS}
        return new, metrics | balance.metrics(report[EXPERTS]) if balance else metrics

    return train_step


def update_average(ema: Params, params: Params, decay: float, taken: jax.Array) -> Params:
    """Return decay x ema + (1 - decay) x params of each parameter, in float32; `ema` unless `taken`, bool ().

    It is computed as ema + (1 - decay) x (params - ema). In float32, decay and 1 - decay do not add up to 1: with 0.9999, the
    average of constant weights would approach 0.9998 times the weights.
    """

    def move(average: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.where(taken, average + (1 - decay) * (weight.astype(average.dtype) - average), average)

    return jax.tree.map(move, ema, params)
