"""The programs of a run, built from its config: the train step, the evaluation, and the abstract arrays that they take.

All arrays are abstract, with shapes and shardings: nothing is allocated. Devices may also be those of a topology without
hardware (jax.experimental.topologies).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from jaxtrain.config.context import Context
from jaxtrain.config.layout import Layout
from jaxtrain.config.schema import ConfigError, Model, Moe, Optimizer, Problem, RunConfig, Train, own_settings, split_items
from jaxtrain.config.shapes import EXPERT_METRICS, STACK, without_layer_key
from jaxtrain.kernels.attention import Hardware
from jaxtrain.kernels.experts import support
from jaxtrain.models.attention import Kernel, element_kinds
from jaxtrain.models.lora import is_adapter
from jaxtrain.models.module import Definition, Params, leaf_names, select_leaves
from jaxtrain.models.remat import make_remat_plan
from jaxtrain.models.zero import Zero, make_zero
from jaxtrain.optim.optimizer import check_groups, make_optimizer, make_schedule
from jaxtrain.optim.rounding import Rounding
from jaxtrain.optim.update import make_streamed_update, make_update
from jaxtrain.sharding import Placement, make_placement, replicated
from jaxtrain.step.balance import Balance, is_bias
from jaxtrain.step.batch import MICROBATCHES, abstract_batch
from jaxtrain.step.definition import fp8_weights, make_definition, matches, trained_parameters
from jaxtrain.step.gradients import Objective, make_gradients, make_log_probs, make_loss
from jaxtrain.step.kernel import choose_kernel
from jaxtrain.step.loss import Batch, LossSpec, find_loss, with_cross_entropy
from jaxtrain.step.pipeline import PipelineModel
from jaxtrain.step.stages import schedule_of
from jaxtrain.step.state import TrainState, abstract_state, abstract_tensors, shardings
from jaxtrain.step.train_step import make_train_step


@dataclasses.dataclass(frozen=True)
class Program:
    """The jitted functions of a run, not compiled yet, and their abstract arguments."""

    run: RunConfig
    placement: Placement
    zero: Zero
    definition: Definition
    kernel: Kernel  # attention
    kernel_reason: str  # the reason for the choice
    tx: optax.GradientTransformation
    trained: Params  # the trained parameters
    state: TrainState  # abstract
    batch: Batch  # abstract, (A, B, T)
    eval_batch: Batch  # abstract, (1, B, T)
    train_step: Any  # jitted: (state, batch) -> (state, metrics)
    # Jitted: (params, eval_batch) -> (sum of the loss, its denominator, other sums of the same denominator by name).
    eval_step: Any
    gradients: Any  # jitted: (params, batch) -> ((loss, other sums), gradients)
    log_probs: Any  # jitted: (params, eval_batch) -> log-probabilities of documents, (1, B, M), for losses of pairs

    @property
    def layout(self) -> Layout:
        """Return what follows from the config and the number of devices."""
        return self.placement.layout

    @property
    def context(self) -> Context:
        """Return the sharding of a sequence over devices, and the order of its tokens."""
        return self.layout.context

    @property
    def offload(self) -> bool:
        """Return whether moments are in host memory."""
        return self.run.optimizer.offload == "moments"

    @property
    def adapters(self) -> bool:
        """Return whether low-rank adapters are trained. If so, checkpoints have no parameters other than the adapters."""
        return self.run.lora.rank > 0

    @property
    def gathers_where_used(self) -> bool:
        """Return whether weights are gathered at each use, and not once per step."""
        sharding = self.run.sharding
        return bool(self.placement.gather_axes("embed")) and sharding.zero == 3 and sharding.gather != "step"

    @property
    def parameters(self) -> int:
        """Return the number of the model's parameters, without adapters."""
        weights = self.definition.weights
        named_weights = zip(jax.tree.leaves(leaf_names(weights)), jax.tree.leaves(weights), strict=True)
        return sum(math.prod(a.shape) for name, a in named_weights if not is_adapter(name))

    @property
    def layer_trips(self) -> int:
        """Return the number of iterations of the loop over layers; 0 if the layers are unrolled."""
        run, stages = self.run, self.layout.stages
        plan = make_remat_plan(run.remat, run.sharding.gather, not run.parallel.scan_layers)
        if stages.stages > 1:
            return plan.trips(stages.per_group)
        stacked = jax.tree.leaves(self.definition.abstract.get(STACK, {}))  # a layer of the stack may be several of the model's
        return plan.trips(stacked[0].shape[0]) if stacked else 0

    @property
    def dispatches_in_rounds(self) -> bool:
        """Return whether the dispatch of a layer's tokens may take several rounds: a loop within the layer."""
        split = self.placement.size(self.placement.compute_axes("experts")) > 1
        return bool(self.run.model.num_experts) and not self.run.moe.capacity_factor and split

    def saved_state(self, state: TrainState) -> TrainState:
        """Return the arrays of a state, abstract or not, that a checkpoint of this run has."""
        return dataclasses.replace(state, params=select_leaves(state.params, self.trained)) if self.adapters else state

    @property
    def checkpoint_bytes(self) -> int:
        """Return the size of the tensors in a checkpoint of this run, over all processes."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in abstract_tensors(self.saved_state(self.state)).values())

    def base_state(self, state: TrainState) -> TrainState:
        """Return a state, abstract or not, with only its step and its parameters, without the parameters of adapters."""
        frozen = jax.tree.map(lambda is_trained: not (is_trained and self.adapters), self.trained)
        return TrainState(state.step, select_leaves(state.params, frozen), (), layers=state.layers)


def make_balance(model: Model, moe: Moe, frozen: Sequence[str], layout: Layout, definition: Definition) -> Balance:
    """Return the settings of load balancing. frozen: patterns of names of parameters that do not change."""
    name_tree = jax.tree.map(without_layer_key, leaf_names(definition.abstract))
    bias_mask = jax.tree.map(lambda name: is_bias(name) and not matches(name, frozen), name_tree)
    return Balance(moe, model.num_experts, layout.stages.order, bias_mask, model.mtp_layers, model.period)


def adds_in_backward(train: Train, unrolled: bool, definition: Definition) -> bool:
    """Return whether the backward pass of each layer adds its gradient to the sum over earlier microbatches.

    unrolled: layers are not in a loop.

    Raises:
      ConfigError: train.accumulate = layer, and the model's layers are not run by RematPlan.run.
    """
    if train.grad_accum == 1:
        return False
    if train.accumulate == "layer" and not definition.uses_plan_run:
        rule = "the model does not add gradients layer by layer, as this config has it"
        raise ConfigError([Problem("train.accumulate", "layer", rule, "Set microbatch.")])
    # In a loop, adding in place prevents XLA from overlapping a layer's reduce-scatters with the next iteration.
    per_layer = unrolled if train.accumulate == "auto" else train.accumulate == "layer"
    return definition.uses_plan_run and per_layer


def make_pipeline(model: Model, placement: Placement, definition: Definition) -> PipelineModel | None:
    """Return the pipeline; None with one stage. Raise ConfigError for a model from outside that cannot run on stages."""
    layout = placement.layout
    if not layout.pipelined:
        return None
    if not definition.staged:
        rule = f"the {model.family} model does not declare that its layers can run separately from embedding and head"
        remedy = "Make it a models.transformer.Transformer with the __call__ and the remat of that, or set 1."
        raise ConfigError([Problem("mesh.stage", layout.stages.stages, rule, remedy)])
    return PipelineModel(placement, definition, layout.stages, schedule_of(layout), element_kinds(model))


def make_objective(run: RunConfig, zero: Zero, trained: Params, balance: Balance | None) -> Objective:
    """Return the objective of a train step."""
    head = "embed.embedding" if run.model.tied_head else "head"
    head_mask = jax.tree.map(lambda name, is_trained: is_trained and name == head, leaf_names(trained), trained)
    head_trained = any(jax.tree.leaves(head_mask))
    pair_settings = run.data.most_documents, run.loss.beta, run.loss.label_smoothing
    settings = run.loss.chunk, run.model.logit_softcap, run.loss.z_loss, head_trained
    spec = LossSpec(zero.numerics, zero.placement, zero, *settings, *pair_settings, own_settings(run.own))
    family = run.model.family if run.model.outside else ""
    mtp_settings = run.model.mtp_layers, run.loss.mtp_weight
    return Objective(zero.placement, find_loss(run.loss.name), spec, balance, *mtp_settings, family, run.model.d_model)


def check_offload(optimizer: Optimizer, family: str, trained: Params) -> None:
    """Raise ConfigError if optimizer.offload is set and no stacked layers are trained: only their moments can be streamed.

    trained: the parameters that are trained, by name.
    """
    if optimizer.offload == "moments" and STACK not in trained:
        rule = f"moments are streamed layer by layer, and model.family = {family} trains no parameters under {STACK!r}"
        raise ConfigError([Problem("optimizer.offload", "moments", rule, "Set none, or stack the layers under that name.")])


def build_program(run: RunConfig, devices: Sequence[Any]) -> Program:
    """Return the programs of a run on these devices, which may be devices of a topology without hardware.

    Raises:
      ConfigError: the layout is impossible, or the model or the kernels on these devices cannot run with a setting.
    """
    # The mesh, the dtypes, the attention kernel, the model.
    placement = make_placement(run, devices)
    layout, zero = placement.layout, make_zero(run.sharding, placement)
    kernel, kernel_reason = choose_kernel(run, layout.context, devices[0])
    if problems := support.matmul_problems(run.moe.impl, Hardware.from_device(devices[0]), run.compute == "f32"):
        raise ConfigError(problems)
    definition = make_definition(run, zero, kernel)
    pipe = make_pipeline(run.model, placement, definition)

    # The roles of parameters, and the optimizer.
    trained = trained_parameters(run.lora, run.train, definition)
    in_fp8 = fp8_weights(run.precision, run.fp8.exclude, definition)
    trained_axes = select_leaves(definition.axes, trained)
    check_groups(run.optimizer, trained_axes)
    check_offload(run.optimizer, run.model.family, trained_axes)
    offload = run.optimizer.offload == "moments"
    settings = (run.optimizer, run.dtypes, trained_axes, placement, zero.numerics)
    tx = make_optimizer(*settings, own_settings(run.own))
    rounding = Rounding(run.train.seed, layout.stages.order if pipe else None)
    update = make_streamed_update(*settings, rounding) if offload else make_update(tx, rounding)

    # The arrays.
    averages = run.train.ema_decay > 0
    state = abstract_state(definition, tx, placement, offload, trained, layout.stages if pipe else None, averages)
    batch = abstract_batch(placement, layout.batch, run.loss.is_pairwise, run.model.mtp_layers)
    eval_batch = abstract_batch(placement, (1, *layout.batch[1:]), run.loss.is_pairwise)

    # The shard_map around loss and gradients. Gradients leave it reduced, and sharded like the weights.
    frozen = ["*"] if run.lora.rank else split_items(run.train.freeze)  # with adapters the routers' biases are frozen too
    balance = make_balance(run.model, run.moe, frozen, layout, definition) if run.model.num_experts else None
    objective = make_objective(run, zero, trained, balance)
    adds = not pipe and adds_in_backward(run.train, not run.parallel.scan_layers, definition)
    local_gradients = make_gradients(definition, zero, objective, trained, in_fp8, adds=adds, pipe=pipe)
    param_specs = definition.specs(placement)
    in_specs = param_specs, placement.spec(MICROBATCHES)
    report_specs = jax.tree.map(lambda _: P(), jax.eval_shape(lambda: objective.zero_report))
    gradients = placement.shard_map(local_gradients, in_specs, (report_specs, select_leaves(param_specs, trained)))

    train_step = make_train_step(
        gradients,
        update,
        make_schedule(run.optimizer, run.train.steps),
        trained=trained,
        clip_norm=run.optimizer.clip_norm,
        spike_sigmas=run.train.loss_spike_sigma,
        balance=balance,
        ema_decay=run.train.ema_decay,
    )
    without_z = dataclasses.replace(objective.spec, z_loss=0.0)
    eval_loss = with_cross_entropy(objective.loss)
    eval_objective = dataclasses.replace(objective, loss=eval_loss, spec=without_z, balance=None, mtp_layers=0)
    sums = dict.fromkeys(eval_loss.reports, P())
    eval_step = placement.shard_map(make_loss(definition, zero, eval_objective, in_fp8, pipe), in_specs, (P(), P(), sums))
    document_spec = placement.spec((None, "batch", None))
    log_probs = placement.shard_map(make_log_probs(definition, zero, eval_objective, in_fp8, pipe), in_specs, document_spec)

    metrics = ("loss", "grad_norm", "lr", "verdict", *objective.reports, *(EXPERT_METRICS if balance else ()))
    unsharded = replicated(placement)
    in_shardings = shardings(state.params), shardings(eval_batch)
    return Program(
        run,
        placement,
        zero,
        definition,
        kernel,
        kernel_reason,
        tx,
        trained,
        state,
        batch,
        eval_batch,
        train_step=jax.jit(
            train_step,
            in_shardings=(shardings(state), shardings(batch)),
            out_shardings=(shardings(state), dict.fromkeys(metrics, unsharded)),
            donate_argnums=0,
            # Arrays of a batch that the kernel does not read stay arguments, so that plans find all of them.
            keep_unused=True,
        ),
        eval_step=jax.jit(eval_step, in_shardings=in_shardings, out_shardings=unsharded),
        gradients=jax.jit(gradients),
        log_probs=jax.jit(log_probs, in_shardings=in_shardings, out_shardings=unsharded),
    )
