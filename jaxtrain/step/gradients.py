"""Compute the gradients of a step: the sum over its microbatches, which run one after another or on pipeline stages.

All functions of this module compute with local shards, inside the shard_map around loss and gradients (program.py).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config.own_parts import WrongPart, calling
from jaxtrain.config.shapes import MTP_KEYS, MTP_METRICS, STACK
from jaxtrain.models.module import Definition, Params, select_leaves
from jaxtrain.models.moe import Statistics
from jaxtrain.models.zero import Zero
from jaxtrain.sharding import Placement, all_reduce, to_residual
from jaxtrain.step.balance import Balance
from jaxtrain.step.loss import Batch, LossSpec, Sums, TrainingLoss, document_log_probs
from jaxtrain.step.pipeline import PipelineModel, add_gradients

EXPERTS = "experts"
# The loss of a batch, and the other metrics of its loss (Objective.reports), with the statistics of its experts under EXPERTS.
# Each microbatch is weighted by its fraction of the loss's denominator.
Report = tuple[jax.Array, Sums]


@dataclasses.dataclass(frozen=True)
class Objective:
    """The function of a microbatch that a step minimises: the loss and its auxiliary losses. Hashable, without arrays."""

    placement: Placement
    loss: TrainingLoss
    spec: LossSpec
    balance: Balance | None = None  # the auxiliary losses of experts, which are added to `loss`
    mtp_layers: int = 0  # modules of multi-token prediction
    mtp_weight: float = 0.0  # factor of the mean of the modules' losses
    family: str = ""  # a model.family from outside the package; "": a shipped one
    width: int = 0  # of the hidden states of that family, model.d_model

    @property
    def reports(self) -> tuple[str, ...]:
        """Return the names of the sums that a step reports in addition to the loss and the experts' statistics."""
        return (*self.loss.reports, *(MTP_METRICS if self.mtp_layers else ()))

    @property
    def zero_report(self) -> Report:
        """Return a report of zeros."""
        zero = jnp.zeros((), jnp.float32)
        return zero, dict.fromkeys(self.reports, zero) | ({EXPERTS: self.balance.zeros} if self.balance else {})

    def loss_and_report(
        self, model: Any, micro: Batch, total: jax.Array, mtp_totals: Sequence[jax.Array]
    ) -> tuple[jax.Array, Report]:
        """Run the model on a microbatch. Return this device's share of the objective and of the report, as `__call__` does.

        Here the objective includes the losses of multi-token prediction, which `__call__` leaves out.

        Args:
          total: the result of `total_count` for the batch.
          mtp_totals: the result of `mtp_counts` for the batch.
        """
        rows = micro["tokens"], micro["segments"], micro["positions"]
        with calling("model.family", self.family, "model(tokens_BT, segments_BT, positions_BT)"):
            hidden, statistics = model.hidden_and_statistics(*rows) if self.balance else (model(*rows), ())
        if self.family:
            self._check_hidden(hidden, micro)
        if not self.mtp_layers:
            return self(hidden, statistics, model.head_VD, micro, total)
        # Module k reads the token k positions later: the target of module k - 1.
        later = [micro["targets"], *(micro[f"targets_{k}"] for k in range(1, self.mtp_layers))]
        mtp_hidden, mtp_statistics = model.mtp_hidden(hidden, later, *rows[1:])
        if self.balance:
            all_statistics: Any = (statistics, *mtp_statistics)
            statistics = jnp.concatenate(all_statistics)
        value, (loss, sums) = self(hidden, statistics, model.head_VD, micro, total)
        mtp_loss = self._mtp_loss(mtp_hidden, model.head_VD, micro, mtp_totals)
        return value + self.mtp_weight * mtp_loss, (loss, sums | dict.fromkeys(MTP_METRICS, mtp_loss))

    def _check_hidden(self, hidden: Any, micro: Batch) -> None:
        """Raise WrongPart if a family from outside the package returns anything but the hidden states of the tokens."""
        rows, tokens = to_residual(micro["tokens"], (), self.placement).shape
        expected = rows, tokens, self.width
        if getattr(hidden, "shape", None) != expected:
            returned = list(hidden.shape) if hasattr(hidden, "shape") else type(hidden).__name__
            rule = f"its model returns {returned} for tokens {[rows, tokens]}, not hidden states {list(expected)}"
            raise WrongPart("model.family", self.family, rule, "Return (B, T, D), the input of the head.")

    def _mtp_loss(self, mtp_hidden: Sequence[jax.Array], head_VD: Any, micro: Batch, totals: Sequence[jax.Array]) -> jax.Array:
        """Return this device's share of the loss of multi-token prediction, f32 (): the mean over the modules.

        A module's loss is the mean over the tokens that have a target.
        """
        placement, spec = self.placement, dataclasses.replace(self.spec, z_loss=0.0)
        num_replicas = placement.size(placement.replica_axes(("batch", "residual")))
        value = jnp.zeros((), jnp.float32)
        with jax.named_scope("mtp"), jax.named_scope("loss"):
            for k, (hidden_BTD, total) in enumerate(zip(mtp_hidden, totals, strict=True), start=1):
                module_batch = {key: to_residual(micro[f"{key}_{k}"], (), placement) for key in MTP_KEYS}
                loss: Any = self.loss.function(hidden_BTD, head_VD, micro | module_batch, spec)
                value += loss / total / num_replicas / self.mtp_layers
        return value

    def __call__(
        self, hidden_BTD: jax.Array, statistics: Statistics, head_VD: Any, micro: Batch, total: jax.Array
    ) -> tuple[jax.Array, Report]:
        """Return this device's share of the objective of a microbatch, and of the report.

        The shares of all devices sum to the objective. Devices with the same tokens compute the same loss, and divide it by
        the number of these devices.

        Args:
          total: the loss's denominator over all microbatches (`total_count`).
        """
        placement = self.placement
        residual_batch = {k: to_residual(micro[k], (), placement) for k in ("targets", "weights")}
        with jax.named_scope("loss"):
            result: Any = self.loss.function(hidden_BTD, head_VD, micro | residual_batch, self.spec)
            num_replicas = placement.size(placement.replica_axes(("batch", "residual")))
            loss_and_sums = result if self.loss.reports else (result, {})
            value, sums = jax.tree.map(lambda x: x / total / num_replicas, loss_and_sums)
            if self.balance is None:
                return value, (value, sums)
            # Statistics are over all devices' tokens.
            share = all_reduce(self.loss.count(micro), placement.token_axes) / total / placement.mesh.size
            return value + share * self.balance.penalty(statistics), (value, sums | {EXPERTS: share * statistics})


def total_count(batch: Batch, objective: Objective) -> jax.Array:
    """Return the denominator of a batch's summed losses over all devices, f32 (). A denominator of 0 is replaced by 1."""
    return _divisor(objective.loss.count(batch), objective)


def mtp_counts(batch: Batch, objective: Objective) -> list[jax.Array]:
    """Return the total weight of the targets of each module of multi-token prediction, f32 (). 0 is replaced by 1."""
    return [_divisor(batch[f"weights_{k + 1}"].sum(), objective) for k in range(objective.mtp_layers)]


def _divisor(count: jax.Array, objective: Objective) -> jax.Array:
    total = all_reduce(count, objective.placement.token_axes)
    # A batch without targets has no gradient, and must not divide by zero. A positive total below 1 is kept.
    return jnp.where(total > 0, total, 1.0)


def make_gradients(
    definition: Definition,
    zero: Zero,
    objective: Objective,
    trained: Params,
    in_fp8: Params,
    *,
    adds: bool,
    pipe: PipelineModel | None = None,
) -> Callable[[Params, Batch], tuple[Report, Params]]:
    """Return a function from (master weights, batch) to (the batch's report, the gradient of the objective).

    The batch's arrays are (A, B, T): A microbatches. Frozen parameters (all but `trained`) have no gradient.

    Args:
      in_fp8: the weights that are multiplied in FP8.
      adds: the backward pass of each layer in the stack adds its gradients to their sum over earlier microbatches.
      pipe: the pipeline, if layers are on stages.
    """
    placement = objective.placement
    trained_axes = select_leaves(definition.axes, trained)

    def gradients(params: Params, batch: Batch) -> tuple[Report, Params]:
        total, mtp_totals = total_count(batch, objective), mtp_counts(batch, objective)
        with jax.named_scope("gather"):
            base, copies = zero.step_weights(params, definition, in_fp8)
        trained_weights = select_leaves(base, trained)
        # RematPlan.run computes the gradients of the stack, autodiff computes all others.
        stack = {name: w for name, w in trained_weights.items() if definition.uses_plan_run and name == STACK}
        unstacked = {name: w for name, w in trained_weights.items() if name not in stack}

        def loss_fn(unstacked: Params, into: Params, micro: Batch) -> tuple[jax.Array, Report]:
            model = definition.bind(zero.microbatch_weights(base, copies, unstacked, into, adds))
            return objective.loss_and_report(model, micro, total, mtp_totals)

        differentiate = jax.value_and_grad(loss_fn, (0, 1), has_aux=True)

        def accumulate(carry: tuple[Report, Params], micro: Batch) -> tuple[tuple[Report, Params], None]:
            if batch["tokens"].shape[0] == 2:
                # XLA unrolls a loop of two iterations, and would run the second forward pass before the first backward pass
                # ends: both would hold their saved activations.
                micro, carry = jax.lax.optimization_barrier((micro, carry))
            report, sums = carry
            into = {name: sums[name] for name in stack} if adds else zero.gradient_buffers(stack)
            (_, micro_report), (grads, stack_grads) = differentiate(unstacked, into, micro)
            with jax.named_scope("accumulate"):
                report = jax.tree.map(jnp.add, report, micro_report)
                if adds:
                    sums = stack_grads | add_gradients({name: sums[name] for name in grads}, grads)
                else:
                    sums = add_gradients(sums, grads | stack_grads)
            return (report, sums), None

        if pipe:
            report, grads = pipe.gradients(objective, zero, base, copies, trained_weights, batch, total)
        elif batch["tokens"].shape[0] == 1:
            micro = jax.tree.map(lambda x: x[0], batch)
            (_, report), (grads, stack_grads) = differentiate(unstacked, zero.gradient_buffers(stack), micro)
            grads |= stack_grads
        else:
            report, grads = jax.lax.scan(accumulate, (objective.zero_report, zero.zero_sums(trained_weights)), batch)[0]
        with jax.named_scope("reduce"):
            return all_reduce(report, placement.all_axes), zero.reduce_gradients(grads, trained_axes)

    return gradients


def make_loss(
    definition: Definition, zero: Zero, objective: Objective, in_fp8: Params, pipe: PipelineModel | None = None
) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array, Sums]]:
    """Return a function from (master weights, batch of one microbatch, (1, B, T)) to the sums of the loss over all devices.

    The sums are the summed loss, its denominator, and a dict of the other sums that the loss reports, by name.
    """
    placement = objective.placement

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, Sums]:
        micro, hidden, head_VD = _forward(params, batch, definition, zero, in_fp8, pipe)
        _, report = objective(hidden, (), head_VD, micro, jnp.ones((), jnp.float32))
        value, sums = all_reduce(report, placement.all_axes)
        return value, all_reduce(objective.loss.count(micro), placement.token_axes), sums

    return loss


def make_log_probs(
    definition: Definition, zero: Zero, objective: Objective, in_fp8: Params, pipe: PipelineModel | None = None
) -> Callable[[Params, Batch], jax.Array]:
    """Return a function from (master weights, batch of one microbatch, (1, B, T)) to log-probabilities of documents.

    The function's result is (1, B, M), for the M documents that a row may have.
    """

    def log_probs(params: Params, batch: Batch) -> jax.Array:
        micro, hidden, head_VD = _forward(params, batch, definition, zero, in_fp8, pipe)
        residual_batch = {k: to_residual(micro[k], (), objective.placement) for k in ("targets", "weights")}
        return document_log_probs(hidden, head_VD, micro | residual_batch, objective.spec)[None]

    return log_probs


def _forward(
    params: Params, batch: Batch, definition: Definition, zero: Zero, in_fp8: Params, pipe: PipelineModel | None
) -> tuple[Batch, jax.Array, Any]:
    """Return (microbatch, final hidden states, head) of a batch with one microbatch. Arrays of the microbatch are (B, T)."""
    micro = jax.tree.map(lambda x: x[0], batch)
    base, copies = zero.step_weights(params, definition, in_fp8)
    model = definition.bind(zero.microbatch_weights(base, copies, {}))
    rows = micro["tokens"], micro["segments"], micro["positions"]
    hidden = pipe.hidden(model, micro) if pipe else model(*rows)
    return micro, hidden, model.head_VD
