"""The gradients of a step: its microbatches' losses, differentiated one after another, or on pipeline stages, and added up."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.balance import Balance
from jaxtrain.loss import Batch, LossFunction, LossSpec
from jaxtrain.models.module import Definition, Params, part
from jaxtrain.models.moe import Statistics
from jaxtrain.models.transformer import Transformer
from jaxtrain.pipeline import Pipeline
from jaxtrain.sharding import Axes, Weight
from jaxtrain.zero import Stage

Told = tuple[jax.Array, Statistics]  # of a microbatch, by its share of the batch: the loss, and what its experts report
Gradients = Callable[[Params, Batch], tuple[Told, Params]]


def make_gradients(
    definition: Definition,
    loss: LossFunction,
    spec: LossSpec,
    *,
    held: Stage,
    pipe: Pipeline | None = None,
    balance: Balance | None = None,
) -> Gradients:
    """A pure function of the parameters and a batch: what the step is told (Told), and the gradient of what it minimises.

    The batch's arrays are (A, B, T): A microbatches, whose gradients are summed in the dtype that `held` says. The loss of each
    is divided by the weight of all, so the sum is exactly the loss of the whole batch.

    pipe: how microbatches pass through pipeline stages, where there are any. balance: of a model with experts, the losses that
    are minimised beside the first, which `Told` leaves out.

    Frozen parameters (`held.trained` says which) have no gradient.
    """
    axes = definition.axes
    learnt = part(axes, held.trained)  # axes of what has a gradient

    def objective(
        hidden: jax.Array, statistics: Statistics, head: Weight, micro: Batch, total: jax.Array, spec: LossSpec
    ) -> tuple[jax.Array, Told]:
        with jax.named_scope("loss"):
            value = loss(hidden, head, micro, spec) / total
            if balance is None:
                return value, (value, ())
            share = micro["weights"].sum() / total
            return value + share * balance.penalty(statistics), (value, share * statistics)

    def loss_of(params: Params, micro: Batch, total: jax.Array) -> tuple[jax.Array, Told]:
        model = definition.bind(params)
        rows = micro["tokens"], micro["segments"], micro["positions"]
        hidden, statistics = model.hidden_and_statistics(*rows) if balance else (model(*rows), ())
        return objective(hidden, statistics, model.head_VD, micro, total, spec)

    def lose(model: Transformer, x: Any, micro: Batch, total: jax.Array) -> tuple[jax.Array, Told]:
        hidden, statistics = model.leave(x)
        return objective(hidden, statistics, model.head_VD, micro, total, spec.inside())

    def gradients(params: Params, batch: Batch) -> tuple[Told, Params]:
        # A batch without targets has nothing to learn from, and must not divide by zero. Others may weigh less than 1 in all.
        with jax.named_scope("loss"):
            total = batch["weights"].sum()
            total = jnp.where(total > 0, total, 1.0)

        with jax.named_scope("gather"):
            held_weights = held.weights(params, axes)
        if pipe:
            told, grads = pipe.gradients(lose, held, held_weights, part(params, held.trained), batch, total)
            with jax.named_scope("reduce"):
                return told, held.settled(grads, learnt)

        def one(micro: Batch, sums: Params) -> tuple[Told, Params]:
            def of_slots(slots: Params) -> tuple[jax.Array, Told]:
                return loss_of(held.bound(held_weights, slots, axes), micro, total)

            (_, told), grads = jax.value_and_grad(of_slots, has_aux=True)(held.slots(masters, learnt, sums))
            return told, jax.tree.map(held.pinned, grads, learnt)

        masters = part(params, held.trained)
        if batch["tokens"].shape[0] == 1:
            told, grads = one(jax.tree.map(lambda x: x[0], batch), masters)  # there is no sum yet, and none is asked for
            with jax.named_scope("reduce"):
                return told, held.settled(grads, learnt)

        def added(before: jax.Array, made: jax.Array, of: Axes) -> jax.Array:
            return made if held.adds(of) else before + made

        def add(carry: tuple[Told, Params], micro: Batch) -> tuple[tuple[Told, Params], None]:
            before, sums = carry
            told, made = one(micro, sums)
            with jax.named_scope("accumulate"):
                return (jax.tree.map(jnp.add, before, told), jax.tree.map(added, sums, made, learnt)), None

        with jax.named_scope("accumulate"):
            zeros = jax.tree.map(held.zero, masters, learnt)
            nothing = jnp.zeros((), jnp.float32), balance.zeros if balance else ()
        told, grads = jax.lax.scan(add, (nothing, zeros), batch)[0]
        with jax.named_scope("reduce"):
            return told, held.settled(grads, learnt)

    return gradients
