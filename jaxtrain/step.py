"""The train step: one pure function, and what it takes to compile it. No files, no loop, no metrics writers."""

import dataclasses
import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain import auto_remat, guard, precision, windows
from jaxtrain.activations import kept
from jaxtrain.balance import Balance, is_bias
from jaxtrain.config import Compiler, ConfigError, Problem, Remat, RunConfig, parts_of
from jaxtrain.context import Context, make_context
from jaxtrain.gradients import Gradients, make_gradients
from jaxtrain.kernels import attention
from jaxtrain.kernels.context import window
from jaxtrain.kernels.context.split import Split
from jaxtrain.kernels.dot import DTYPES, Numerics
from jaxtrain.kernels.experts import grouped
from jaxtrain.loss import Batch, LossFunction, LossSpec, loss_function
from jaxtrain.models import family, layers
from jaxtrain.models.attention import Kernel, layer_kinds
from jaxtrain.models.lora import Lora, is_adapter
from jaxtrain.models.module import Definition, Params, filled, names, part
from jaxtrain.models.remat import Plan, make_plan
from jaxtrain.models.transformer import Transformer
from jaxtrain.optimizer import check_groups, make_optimizer, make_schedule
from jaxtrain.pipeline import STAGE, Pipeline
from jaxtrain.rounding import Rounding
from jaxtrain.shapes import BATCH_KEYS, EXPERT_METRICS
from jaxtrain.sharding import Axes, Placement, make_placement, replicated
from jaxtrain.stages import Arrangement, Schedule, arrangement
from jaxtrain.state import TrainState, abstract_state, shardings, weights
from jaxtrain.update import STACK, Update, at_once, streamed
from jaxtrain.zero import Stage, stage

MICROBATCHES: Axes = (None, "batch", "sequence")  # (A, B, T)
Metrics = dict[str, jax.Array]


def make_train_step(
    gradients: Gradients,
    update: Update,
    schedule: optax.Schedule,
    *,
    trained: Params,
    clip_norm: float,
    spike: float = 0.0,
    balance: Balance | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A pure function `(state, batch) -> (state, metrics)`, to be jitted by the caller with explicit shardings.

    gradients: of all that is learnt (`make_gradients`). Parameters that `trained` leaves out leave the step as they came.

    A loss or gradient that is not finite, or further out than `spike` (see guard.judge), changes neither weights nor optimizer
    state; the step counts, and the one after it is held.

    Metrics, f32 (): `loss` (nats per token, before the update), `grad_norm` (global, before clipping), `lr`; i32 (): `verdict`
    (guard.TAKEN and its like); of a model with experts shapes.EXPERT_METRICS. `loss` is without what is minimised beside it.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        (value, statistics), grads = gradients(weights(state), batch)
        with jax.named_scope("optimizer"):
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))
            scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30)) if clip_norm else None
            lr = jnp.asarray(schedule(state.step), jnp.float32)
            verdict, guarded = guard.judge(state.guard, value, norm, spike)
            old = part(state.params, trained)
            params, optimizer = update(grads, state.optimizer, old, scale, lr, verdict == guard.TAKEN, state.step)
            params = filled(state.params, params)
            params = balance.moved(params, statistics, verdict == guard.TAKEN) if balance else params
            done = state.step + (verdict != guard.HELD)
        new = TrainState(done.astype(jnp.int32), params, optimizer, guarded, state.layers)
        metrics = {"loss": value, "grad_norm": norm, "lr": lr, "verdict": verdict}
        return new, metrics | balance.metrics(statistics) if balance else metrics

    return train_step


def make_eval_step(
    definition: Definition, loss: LossFunction, spec: LossSpec, held: Stage, pipe: Pipeline | None = None
) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """`(params, batch) -> (sum of weighted losses, sum of weights)`, both f32 (); the batch's arrays are (1, B, T)."""

    def lose(model: Transformer, x: Any, micro: Batch) -> jax.Array:
        return loss(model.leave(x)[0], model.head_VD, micro, spec.inside())

    def eval_step(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        micro = jax.tree.map(lambda x: x[0], batch)
        weights = held.rounded(params, definition.axes)
        if pipe:
            return pipe.loss(lose, held, weights, params, micro), micro["weights"].sum()
        model = definition.bind(held.at_rest(weights, params))
        hidden = model(micro["tokens"], micro["segments"], micro["positions"])
        return loss(hidden, model.head_VD, micro, spec), micro["weights"].sum()

    return eval_step


@dataclasses.dataclass(frozen=True)
class Program:
    """A run's whole computation, before anything is allocated."""

    placement: Placement
    definition: Definition
    tx: optax.GradientTransformation
    state: TrainState  # abstract, with shardings
    batch: Batch  # abstract, with shardings: (A, B, T)
    eval_batch: Batch  # likewise: (1, B, T)
    train_step: Any  # jitted; call .lower(state, batch).compile()
    eval_step: Any  # jitted
    gradients: Any  # jitted: what a train step minimises, differentiated; for those who look into a step
    offload: bool  # moments rest in host memory
    gathers: bool  # weights are gathered in each microbatch
    layer_trips: int  # of the loop over layers; 0 where there is none
    compiler: Compiler  # what the config says of XLA's options
    deterministic: bool  # the same bits each time are asked for
    context: Context  # how the devices of a sequence share it, and the order in which they hold its tokens
    attention: str  # the chosen kernel
    attention_reason: str
    trained: Params  # which parameters are learnt
    adapters: bool  # those are low-rank adapters, which are saved alone
    experts: bool  # layers have experts
    rounds: bool  # a layer's tokens may take several rounds to their experts: a loop within the layer

    def saved(self, state: TrainState) -> TrainState:
        """Of a state, abstract or not, what a checkpoint of this run holds."""
        return dataclasses.replace(state, params=part(state.params, self.trained)) if self.adapters else state

    def base(self, state: TrainState) -> TrainState:
        """Of a state, abstract or not, what adapters stand beside; without them, all parameters."""
        frozen = jax.tree.map(lambda learns: not (learns and self.adapters), self.trained)
        return TrainState(state.step, part(state.params, frozen), (), layers=state.layers)


def rows_here(abstract: Batch) -> list[int] | None:
    """The rows of a batch, of its (A x B, T), that devices of this process hold; None where they are all."""
    shape, sharding = abstract["tokens"].shape, abstract["tokens"].sharding
    if sharding is None or len(sharding.addressable_devices) == len(sharding.device_set):
        return None
    held = set()
    for micro, rows, _ in sharding.addressable_devices_indices_map(shape).values():
        held |= {a * shape[1] + b for a in range(*micro.indices(shape[0])) for b in range(*rows.indices(shape[1]))}
    return sorted(held)


def place_batch(host: dict[str, np.ndarray], abstract: Batch, context: Context, rows: Sequence[int] | None = None) -> Batch:
    """The batch's door: rows from the host, (A x B, T), onto the devices as (A, B, T) microbatches.

    The order of tokens along a row is decided here and nowhere else, for all arrays alike: behind this door the model sees
    segments and positions only, and the attention kernels know which chunks of the row they hold (jaxtrain/context.py).

    rows: which rows of the batch `host` has, where it has not all (rows_here).
    """
    order = list(context.chunks)

    def ordered(x: np.ndarray) -> np.ndarray:
        return x if len(order) == 1 else x.reshape(x.shape[0], len(order), -1)[:, order].reshape(x.shape)

    if rows is None:
        return {k: jax.device_put(ordered(host[k]).reshape(a.shape), a.sharding) for k, a in abstract.items()}
    place = {row: i for i, row in enumerate(rows)}

    def put(x: np.ndarray, a: jax.ShapeDtypeStruct) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            micro, within = (range(*i.indices(n)) for i, n in zip(index, a.shape[:2], strict=False))
            wanted = [place[m * a.shape[1] + b] for m in micro for b in within]
            return x[wanted].reshape(len(micro), len(within), -1)[:, :, index[2]]

        return jax.make_array_from_callback(a.shape, a.sharding, part)

    return {k: put(ordered(host[k]), a) for k, a in abstract.items()}


def hardware_of(device: Any) -> attention.Hardware:
    """What attention kernels need to know of a device, present or only described."""
    if device.platform == "cpu":
        return attention.Hardware("cpu")
    major, _, minor = str(device.compute_capability).partition(".")
    return attention.Hardware("gpu", (int(major), int(minor or 0)))


def numerics_of(run: RunConfig) -> Numerics:
    """Which type is used where, from the config.

    What adapters stand beside rests in the compute dtype: it would be rounded to that wherever it is used, nothing is ever
    added to it, and no checkpoint holds it. A router alone is used as it rests, and
    rests in dtypes.params there too.

    Scales of norms, and biases, are float32 whatever dtypes.params: they are few, and near 1 bfloat16 has no numbers as close
    together as their updates are small.
    """
    compute = DTYPES[run.compute]
    if run.lora.rank:
        return Numerics(compute, DTYPES[run.dtypes.reduce], compute, compute)
    return Numerics(compute, DTYPES[run.dtypes.reduce], DTYPES[run.dtypes.params])


def eight_bit_weights(run: RunConfig, definition: Definition) -> Params:
    """Which parameters are held in 8 bits: under `precision=fp8` those of linear layers and experts, but for `fp8.exclude`.

    Raises ConfigError for names in fp8.exclude that the model does not have.
    """
    paths = jax.tree_util.tree_flatten_with_path(definition.dots)[0]
    names = [".".join(key.key for key in path) for path, dot in paths if dot]
    chosen, problems = precision.eight_bit(run, names)
    if problems:
        raise ConfigError(problems)
    return jax.tree_util.tree_map_with_path(lambda path, _: ".".join(key.key for key in path) in chosen, definition.dots)


def trained_parameters(run: RunConfig, definition: Definition) -> Params:
    """Which parameters are learnt: adapters alone where there are any, otherwise all but those that `train.freeze` names.

    Raises ConfigError for a pattern that no parameter has, where none is left, and for a model without the adapters asked for.
    """
    called = names(definition.abstract)
    known = jax.tree.leaves(called)
    if run.lora.rank:
        adapted = {name.rpartition(".")[2].removesuffix("_a") for name in known if is_adapter(name) and name.endswith("_a")}
        gone = [target for target in lora_of(run).targets if target not in adapted]
        if gone:
            rule = f"the {run.model.family} model gives no adapter to {', '.join(gone)}"
            remedy = (
                f"It has: {', '.join(sorted(adapted))}." if adapted else "Give it models.lora.Adapters, or set lora.rank to 0."
            )
            raise ConfigError([Problem("lora.targets", run.lora.targets, rule, remedy)])
        return jax.tree.map(is_adapter, called)
    patterns = parts_of(run.train.freeze)
    every = f"The parameters are: {', '.join(known)}."
    unmatched = [p for p in patterns if not fnmatch.filter(known, p)]
    if unmatched:
        rule = f"no parameter is called {', '.join(unmatched)}"
        raise ConfigError([Problem("train.freeze", run.train.freeze, rule, every)])
    trained = jax.tree.map(lambda name: not is_bias(name) and not _matches(name, patterns), called)
    if not any(jax.tree.leaves(trained)):
        raise ConfigError([Problem("train.freeze", run.train.freeze, "leaves nothing to train", every)])
    return trained


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) for p in patterns)


def balance_of(run: RunConfig, definition: Definition, lying: Arrangement | None) -> Balance:
    """How a step keeps experts evenly loaded. Biases of frozen layers, or of those that adapters stand beside, do not move."""
    frozen = ["*"] if run.lora.rank else parts_of(run.train.freeze)
    moves = jax.tree.map(lambda name: is_bias(name) and not _matches(name, frozen), names(definition.abstract))
    lying = lying or Arrangement(run.model.num_layers)
    return Balance(run.experts, run.model.num_experts, lying.turns, lying.order, moves)


def lora_of(run: RunConfig) -> Lora:
    """The adapters that a config asks for."""
    return Lora(run.lora.rank, run.lora.alpha, parts_of(run.lora.targets), DTYPES[run.dtypes.params])


def adds_layers(run: RunConfig, definition: Definition) -> bool:
    """Whether gradients of layers are added to those of earlier microbatches one by one, in the backward pass.

    Raises ConfigError where that is asked for and cannot be: `validate` says so earlier, but of a model of one's own.
    """
    if run.train.grad_accum == 1:
        return False
    if run.train.accumulate == "layer" and not definition.adds_layers:
        rule = f"the {run.model.family} model does not add gradients layer by layer, as this config has it"
        raise ConfigError([Problem("train.accumulate", "layer", rule, "Set microbatch.")])
    # In a loop the sum keeps XLA from moving a layer's reduce-scatters into the next iteration, where they would hide.
    return definition.adds_layers and (
        run.compiler.unroll if run.train.accumulate == "auto" else run.train.accumulate == "layer"
    )


def gathers_in_use(run: RunConfig, placement: Placement) -> bool:
    """Whether weights that rest split are gathered wherever they are used, and not once a step."""
    split = any(a in placement.batch_axes for a in placement.mesh_axes("embed"))
    return split and run.sharding.zero == 3 and run.sharding.gather != "step"


def remat_plan(run: RunConfig, placement: Placement) -> Plan:
    """What layers keep for their backward pass, on this mesh."""
    # Over a tensor axis XLA would turn all that layers keep in memory, to look it up by a number it does not know.
    waits = placement.size("tensor") == 1
    return make_plan(run.remat, run.sharding.gather, gathers_in_use(run, placement), waits, run.compiler.unroll)


def pipeline(run: RunConfig, placement: Placement, kernel: Kernel, lying: Arrangement) -> Pipeline:
    """A config's model on pipeline stages. Raises ConfigError for a model of one's own that cannot be cut into stages."""
    inside = make_definition(run, placement.inside(STAGE), kernel)
    if not inside.staged:
        rule = f"the {run.model.family} model does not say that its layers can be run apart from what is before and behind them"
        remedy = "Make it a models.transformer.Transformer with the __call__ and the remat of that, or set 1."
        raise ConfigError([Problem("mesh.stage", lying.stages, rule, remedy)])
    schedule = Schedule(run.pipeline.schedule, lying.stages, lying.groups, run.train.grad_accum)
    return Pipeline(placement, inside, lying, schedule, layer_kinds(run.model))


def dropless(run: RunConfig) -> RunConfig:
    """The run with experts that take all tokens, for all that is no training: whom a capacity drops depends on what else is in
    the batch, and no other program drops anything."""
    return dataclasses.replace(run, experts=dataclasses.replace(run.experts, capacity=0.0))


def make_definition(run: RunConfig, placement: Placement, kernel: Kernel) -> Definition:
    """The model of a config, placed."""
    module, plan = family(run.model.family), remat_plan(run, placement)
    lying = arrangement(run, placement.size(STAGE))
    places = lying.places if lying else run.model.num_layers
    ctx = layers.Context(numerics_of(run), placement, lora=lora_of(run), experts=run.experts, places=places)
    return Definition(lambda rngs: module.build(run.model, kernel, plan, ctx, rngs))


def attention_specs(run: RunConfig) -> tuple[attention.Spec, ...]:
    """What training asks of the attention kernel, for each kind of layer (`models.attention.layer_kinds`)."""
    m, packed = run.model, run.data.packing == "documents"
    segments = run.data.most_documents if packed else 1
    return tuple(
        attention.Spec(
            m.head_dim,
            run.compute,
            packed,
            segments,
            windows.window(m, kind),
            m.attention_softcap,
            deterministic=run.train.deterministic,
        )
        for kind in dict.fromkeys(windows.kinds(m))
    )


def context_of(run: RunConfig, placement: Placement) -> Context:
    """How a run's sequences are divided over the seq axis."""
    tensor = placement.size(placement.mesh_axes("heads"))
    kv_heads = max(1, run.model.num_kv_heads // tensor)
    ranks = placement.size(placement.mesh_axes("sequence"))
    a = run.attention
    return make_context(a.context, a.ulysses, ranks, run.model.num_heads // tensor, kv_heads)


def choose_kernel(run: RunConfig, context: Context, device: Any) -> tuple[Kernel, str]:
    """The attention kernel for training on devices like this one, and why it was chosen."""
    split, specs = Split(context), attention_specs(run)
    places = run.data.seq_len // context.ring

    def asked(spec: attention.Spec) -> tuple[attention.Spec, int]:
        if context.ring == 1:
            return spec, run.data.seq_len
        # A place of the ring computes a chunk at a time against a chunk.
        if not window.applies(spec, places, split):
            return spec, places // 2
        return window.inner_spec(spec), places // 2 + window.halo_tokens(spec, places // 2, split)

    name, reason = attention.choose(run.attention.impl, [asked(spec) for spec in specs], hardware_of(device))
    return Kernel(name, specs, split), reason


def less_kept(run: RunConfig, program: Program, taken_gib: float, usable_gib: float) -> RunConfig | None:
    """With remat.policy=auto, the run with a choice that should fit where the present one takes too much; None where it fits.

    `run` has remat.policy=auto, or what this returned for it. Raises nothing where no choice is small enough: what then
    computes everything again is tried, and refused like any step that is too big.
    """
    excess = taken_gib - (1 - auto_remat.MARGIN) * usable_gib
    if excess <= 0 or not kept(run.remat):
        return None
    p = program.placement
    split = ("batch", "sequence", "residual", "heads", "kv_heads", "mlp", "layers")
    axes = {axis: p.size(p.mesh_axes(axis)) for axis in split} | {"experts": p.size(p.in_use("experts"))}
    packed = program.attention == "cudnn" and run.data.packing == "documents"
    remat = auto_remat.smaller(run, excess, axes, packed) or Remat("full")
    return dataclasses.replace(run, remat=remat)


def build(run: RunConfig, devices: Sequence[Any]) -> Program:
    """Everything that follows from a config and a set of devices, real or described. Allocates nothing.

    Raises LayoutError or Unsupported where the config asks for a layout or a kernel that cannot be, ConfigError for what a
    model of one's own does not have.
    """
    placement = make_placement(run, devices)
    context = context_of(run, placement)
    kernel, reason = choose_kernel(run, context, devices[0])
    if run.model.num_experts:
        grouped.check(run.experts.impl, hardware_of(devices[0]))
    definition = make_definition(run, placement, kernel)
    trained = trained_parameters(run, definition)
    learnt = part(definition.axes, trained)
    check_groups(run.optimizer, learnt)
    how = (run.optimizer, run.dtypes, learnt, placement, numerics_of(run))
    tx = make_optimizer(*how)
    offload = run.optimizer.offload == "moments"
    if offload and STACK not in learnt:
        has = "trains" if run.train.freeze else "has"
        rule = f"moments are streamed layer by layer, and model.family = {run.model.family} {has} no parameters under {STACK!r}"
        raise ConfigError([Problem("optimizer.offload", "moments", rule, "Set none, or stack the layers under that name.")])
    lying = arrangement(run, placement.size("stage"))
    state = abstract_state(definition, tx, placement, offload, trained, lying)
    pipe = pipeline(run, placement, kernel, lying) if lying else None

    shape = (run.train.grad_accum, run.train.global_batch // run.train.grad_accum, run.data.seq_len)
    sharding = placement.sharding(MICROBATCHES, "batch", shape)

    def abstract_batch(shape: tuple[int, ...]) -> Batch:
        return {k: jax.ShapeDtypeStruct(shape, jnp.dtype(d), sharding=sharding) for k, d in BATCH_KEYS.items()}

    batch = abstract_batch(shape)

    loss_spec = LossSpec(numerics_of(run), placement, run.loss.chunk, run.model.logit_softcap, run.loss.z_loss)
    loss = loss_function(run.loss.name)
    eight = eight_bit_weights(run, definition)
    # A pipeline adds all gradients up itself.
    grads, adds = DTYPES[run.dtypes.grads], not pipe and adds_layers(run, definition)
    held = stage(run, placement, numerics_of(run), grads, eight=eight, exact=definition.exact, trained=trained, adds=adds)
    balance = balance_of(run, definition, lying) if run.model.num_experts else None
    rounding = Rounding(run.train.seed, lying.order if lying else None)
    metrics = ("loss", "grad_norm", "lr", "verdict", *(EXPERT_METRICS if balance else ()))
    gradients = make_gradients(definition, loss, loss_spec, held=held, pipe=pipe, balance=balance)
    train_step = make_train_step(
        gradients,
        streamed(*how, rounding) if offload else at_once(tx, rounding),
        make_schedule(run.optimizer, run.train.steps),
        trained=trained,
        clip_norm=run.optimizer.clip_norm,
        spike=run.train.spike,
        balance=balance,
    )
    whole = replicated(placement)
    return Program(
        placement,
        definition,
        tx,
        state,
        batch,
        abstract_batch((1, *shape[1:])),
        jax.jit(
            train_step,
            in_shardings=(shardings(state), shardings(batch)),
            out_shardings=(shardings(state), dict.fromkeys(metrics, whole)),
            donate_argnums=0,
            # What a kernel does not read of a batch stays an argument: who looks at the compiled step finds all of them.
            keep_unused=True,
        ),
        jax.jit(
            make_eval_step(definition, loss, dataclasses.replace(loss_spec, z_loss=0.0), held, pipe),
            in_shardings=(shardings(state.params), shardings(batch)),
            out_shardings=(whole, whole),
        ),
        jax.jit(gradients),
        offload,
        gathers_in_use(run, placement),
        remat_plan(run, placement).trips(lying.per_group if lying else run.model.num_layers),
        run.compiler,
        run.train.deterministic,
        context,
        kernel.name,
        reason,
        trained,
        run.lora.rank > 0,
        bool(run.model.num_experts),
        bool(run.model.num_experts) and not run.experts.capacity and placement.size(placement.in_use("experts")) > 1,
    )
