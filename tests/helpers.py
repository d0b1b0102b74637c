"""Helpers of the numerics tests: a tiny config, batches from the real data pipeline, compiled steps, reference losses.

Configs are frozen and hashable, and the helpers cache by config: a step that two tests use is compiled once.
"""

import dataclasses
import functools
import math
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.config import schema
from jaxtrain.config.schema import RunConfig
from jaxtrain.config.shapes import BATCH_KEYS
from jaxtrain.data import tokenizer
from jaxtrain.data.batches import Batches, open_source
from jaxtrain.data.tokenfile import TokenWriter
from jaxtrain.kernels.embedding import TABLE
from jaxtrain.models import flops
from jaxtrain.models.families import llama
from jaxtrain.models.flops import Flops
from jaxtrain.models.layers import Context
from jaxtrain.models.module import param, stack
from jaxtrain.models.transformer import Block, build_as
from jaxtrain.optim.optimizer import adamw
from jaxtrain.sharding import all_reduce
from jaxtrain.step import loss
from jaxtrain.step.program import Program, build_program
from jaxtrain.step.state import NamedLeaf, TrainState, create_state, named_leaves, to_host
from jaxtrain.train import parity

# Every head count divides by 4, so that the model runs on every mesh. Two query heads share a key/value head.
TINY = {
    "precision": "f32",
    "model.num_layers": 4,
    "model.d_model": 64,
    "model.num_heads": 8,
    "model.num_kv_heads": 4,
    "model.d_ff": 96,
    "model.vocab_size": 264,
    "mesh.data": 1,
    "mesh.fsdp": 1,
    "data.source": "synthetic",
    "data.seq_len": 64,
    "train.steps": 20,
    "train.global_batch": 16,
    "loss.chunk": 48,  # does not divide a device's tokens
    "optimizer.lr": 1e-3,
    "optimizer.lr_min": 1e-4,
    "optimizer.warmup_steps": 3,
}


def few(cases: Iterable[Any], *often: Any) -> list[Any]:
    """Return the cases of a parametrized test: `often` in every run, all others only in a campaign."""
    cases = list(cases)
    assert all(case in cases for case in often), often
    return [pytest.param(case, marks=() if case in often else pytest.mark.more) for case in cases]


def tiny(overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the config of a model that compiles in seconds. It uses one device unless the overrides set a mesh."""
    tree = schema.default_config()
    for key, value in {**TINY, **(overrides or {})}.items():
        *sections, name = key.split(".")
        functools.reduce(lambda section, part: section[part], sections, tree)[name] = value
    run, problems = schema.resolve(tree)
    if problems:
        raise schema.ConfigError(problems)
    return run


def devices_of(run: RunConfig) -> list[Any]:
    """Return as many fake devices as the run's mesh has."""
    return jax.devices()[: math.prod(dataclasses.astuple(run.mesh))]


def training_flops(run: RunConfig) -> Flops:
    """Return the training FLOPs per token of a run, by formula."""
    return flops.training(run.model, run.data.seq_len, run.lora, run.train)


@functools.cache
def program(run: RunConfig) -> Program:
    """Return the run's program on fake devices."""
    return build_program(run, devices_of(run))


@functools.cache
def train_step(run: RunConfig) -> jax.stages.Compiled:
    """Return the compiled train step of a run."""
    return compiled(program(run))


@functools.cache
def lowered(run: RunConfig) -> str:
    """Return the StableHLO text of a run's train step, before XLA compiles it."""
    made = program(run)
    return made.train_step.lower(made.state, made.batch).as_text()


@functools.cache
def batches(data: schema.Data, global_batch: int, split: str = "train") -> Batches:
    """Return the run's batches from the real data pipeline. The source must be synthetic or a file."""
    source = data.source if split == "train" else data.eval_source
    return open_source(data, source, split=split, global_batch=global_batch, data_dir=".")


def host_batch(run: RunConfig, step: int) -> dict[str, np.ndarray]:
    """Return the batch of one step, as NumPy arrays of the global batch."""
    return batches(run.data, run.train.global_batch).batch(step)


@functools.cache
def _initial_state(run: RunConfig) -> Any:
    made = program(run)
    return create_state(made.definition, made.tx, made.state, run.train.seed, made.trained)


def fresh_state(run: RunConfig) -> Any:
    """Return a copy of the initial state, which a step may donate. The data, batch size and steps of a run do not change it."""
    kept = {name: getattr(run.train, name) for name in ("seed", "freeze", "ema_decay")}
    plain = dataclasses.replace(run, data=tiny().data, train=dataclasses.replace(tiny().train, **kept))
    return jax.tree.map(lambda a: jax.device_put(np.array(a), a.sharding), _initial_state(plain))


@functools.cache
def initial_tensors(run: RunConfig) -> dict[str, np.ndarray]:
    """Return every tensor of the initial state, by its name in checkpoints."""
    return to_host(fresh_state(run), "")


@dataclasses.dataclass(frozen=True)
class Trained:
    """The loss of each step, and the tensors after the last step."""

    loss: np.ndarray
    tensors: dict[str, np.ndarray]
    taken: parity.Trained  # the state after the last step, for comparisons


@functools.cache
def train(run: RunConfig, steps: int) -> Trained:
    """Train for `steps` steps from the run's initial state."""
    made, state = program(run), fresh_state(run)
    taken, state = parity.take_steps(made, train_step(run), state, lambda i: host_batch(run, i), steps)
    return Trained(taken.loss, to_host(state, ""), taken)


def compiled(made: Program) -> jax.stages.Compiled:
    """Return the compiled train step of a program."""
    return made.train_step.lower(made.state, made.batch).compile()


def start(made: Program) -> TrainState:
    """Return a state whose weights NumPy draws from their names, so that they are the same on every mesh. All else is zero.

    Nothing is compiled. test_stage_states.py compares the initial weights that meshes draw.
    """

    def value(leaf: NamedLeaf) -> jax.Array:
        whole = np.zeros(leaf.array.shape, leaf.array.dtype)
        for place, name in leaf.slot_names or [(..., leaf.name)] if leaf.name.startswith("params.") else []:
            drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(whole[place].shape)
            size = made.run.model.init_std if drawn.ndim > 1 else 0.1
            whole[place] = name.endswith(".scale") + size * drawn
        return jax.device_put(whole, leaf.array.sharding)

    return jax.tree.unflatten(jax.tree.structure(made.state), map(value, named_leaves(made.state)))


def first_steps(run: RunConfig, steps: int = 3) -> parity.Trained:
    """Compile a run's step without the cache of `train_step`, take its first steps from `start`, and return their results.

    The step must return parameters and moments with the program's shardings.
    """
    made = build_program(run, devices_of(run))
    step = compiled(made)
    after, _ = step.output_shardings
    for (path, sharding), a in zip(jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(made.state), strict=True):
        assert sharding.is_equivalent_to(a.sharding, len(a.shape)), jax.tree_util.keystr(path)
    return parity.take_steps(made, step, start(made), lambda i: host_batch(run, i), steps)[0]


def loss_and_gradients(function: loss.LossFunction, spec: loss.LossSpec) -> Callable[..., Any]:
    """Return a loss on the mesh, jitted: (hidden, head, batch) -> (sum, (gradient of hidden, gradient of the head))."""
    p, of_tokens = spec.placement, ("batch", "residual")
    layouts = p.spec((*of_tokens, None)), p.spec(TABLE)
    of_batch = {k: p.spec(of_tokens if k in ("targets", "weights") else ("batch", "sequence")) for k in BATCH_KEYS}

    def both(hidden: jax.Array, head: jax.Array, batch: loss.Batch) -> Any:
        def share(hidden: jax.Array, head: jax.Array) -> jax.Array:
            return function(hidden, head, batch, spec) / p.size(p.replica_axes(of_tokens))

        value, grads = jax.value_and_grad(share, (0, 1))(hidden, head)
        return all_reduce(value, p.all_axes), grads

    return jax.jit(p.shard_map(both, (*layouts, of_batch), (P(), layouts)))


def text_file(path: Path, modules: int = 12) -> Path:
    """Write a token file of real text in short documents: each line of a few standard library modules is a document."""
    byte = tokenizer.ByteTokenizer()
    library = Path(sysconfig.get_path("stdlib"))
    with TokenWriter(path, tokenizer.tokenizer_info(byte)) as writer:
        for module in sorted(library.glob("*.py"))[:modules]:
            for line in filter(str.strip, module.read_text(encoding="utf-8").splitlines()):
                writer.write(byte.encode(line), len(line.encode()))
                writer.end_document()
    return path


# ---- A user's own parts. Configs name them as helpers:NAME


class WiderFamily:
    """The llama model with a feed-forward block twice as wide."""

    @staticmethod
    def build(model: schema.Model, *args: Any) -> Any:
        return build_as(llama.STRUCTURE, dataclasses.replace(model, d_ff=2 * model.d_ff), *args)


class LoudBlock(Block):
    """A layer that is no identity if its weights are 0: it divides by one, and adds another."""

    def __init__(self, model: schema.Model, kernel: Any, ctx: Context, rngs: Any):
        super().__init__(model, kernel, ctx, rngs)
        ones = (model.d_model,), ("embed",), lambda *_: jnp.ones(model.d_model), jnp.float32
        self.divisor, self.shift = param(rngs, *ones), param(rngs, *ones)

    def __call__(self, *args: Any) -> Any:
        (x_BTD, statistics), cache = super().__call__(*args)
        divisor, shift = self.divisor[...][None, None], self.shift[...][None, None]
        return ((x_BTD / divisor + shift).astype(x_BTD.dtype), statistics), cache


class LoudFamily:
    """The llama model with layers of LoudBlock."""

    @staticmethod
    def build(model: schema.Model, kernel: Any, plan: Any, ctx: Context, rngs: Any) -> Any:
        made = build_as(llama.STRUCTURE, model, kernel, plan, ctx, rngs)
        made.layers = stack(lambda r: LoudBlock(model, kernel, made.ctx, r), model.num_layers, rngs)
        return made


def _family(run: Callable[..., Any]) -> Any:
    """Return the llama model whose layers `run(plan, body, x, layers, shared, kinds)` runs.

    A family must run its layers by one call of RematPlan.run, with all layers unchanged. The families below break this rule,
    for tests that such a family is refused.
    """

    @dataclasses.dataclass
    class Layers:
        plan: Any

        def run(self, *given: Any) -> Any:
            return run(self.plan, *given)

    class Family:
        @staticmethod
        def build(*args: Any) -> Any:
            made = build_as(llama.STRUCTURE, *args)
            made.remat = Layers(made.remat)
            return made

    return Family


OwnLoopFamily = _family(
    lambda plan, body, x, layers, shared, kinds: jax.lax.scan(lambda x, one: (body(x, one, shared, 0), None), x, layers)[0]
)
LoopedFamily = _family(
    lambda plan, body, x, layers, shared, kinds: jax.lax.fori_loop(
        0, 2, lambda _, x: plan.run(body, x, layers, shared, kinds), x
    )
)
TwiceFamily = _family(
    lambda plan, body, x, layers, shared, kinds: plan.run(body, plan.run(body, x, layers, shared, kinds), layers, shared, kinds)
)
SquashedFamily = _family(
    lambda plan, body, x, layers, shared, kinds: plan.run(body, x, jax.tree.map(jnp.tanh, layers), shared, kinds)
)
HalfFamily = _family(
    lambda plan, body, x, layers, shared, kinds: plan.run(body, x, jax.tree.map(lambda w: w[:1], layers), shared, kinds[:1])
)


def half_loss(hidden: jax.Array, head: jax.Array, batch: loss.Batch, spec: loss.LossSpec) -> jax.Array:
    """Return half of the cross entropy."""
    return 0.5 * loss.cross_entropy(hidden, head, batch, spec)


def whole_logits_loss(hidden: jax.Array, head: Any, batch: loss.Batch, spec: loss.LossSpec) -> jax.Array:
    """Return the cross entropy in its most direct form, with the logits of all tokens at once."""
    logits_BTV = jnp.einsum("BTD,VD->BTV", hidden, spec.whole_head(head), precision=spec.numerics.precision)
    picked_BT = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV.astype(jnp.float32)), batch["targets"][..., None], -1)[..., 0]
    return -jnp.sum(batch["weights"] * picked_BT)


def damaging(rows: slice) -> Any:
    """Return a maker of an optimizer: AdamW, whose updates of these rows of the embedding are NaN."""

    def make(optimizer: schema.Optimizer, dtypes: schema.Dtypes, axes: Any, own: Any) -> optax.GradientTransformation:
        tx = adamw(optimizer, dtypes, axes)

        def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            updates, state = tx.update(grads, state, params)
            return updates | {"embed": {"embedding": updates["embed"]["embedding"].at[rows].set(jnp.nan)}}, state

        return optax.GradientTransformation(tx.init, update)

    return make


nan_embedding = damaging(slice(None))
nan_unused_row = damaging(slice(-1, None))  # synthetic data has no such token, so the loss stays finite


def slower_adamw(optimizer: schema.Optimizer, dtypes: schema.Dtypes, axes: Any, own: Any) -> Any:
    """Return AdamW with beta1 = 0.99."""
    return adamw(dataclasses.replace(optimizer, beta1=0.99), dtypes, axes)
