"""Small builders that the numerics tests share: a tiny config, batches through the real pipeline, compiled steps, oracles.

Configs are frozen and hashable, so everything here is cached by them: a step that two tests need is compiled once.
"""

import dataclasses
import functools
import math
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain import config
from jaxtrain.config import RunConfig
from jaxtrain.data import pipeline, tokenizer
from jaxtrain.data.tokenfile import TokenWriter
from jaxtrain.kernels.embedding import TABLE
from jaxtrain.models.families import llama
from jaxtrain.models.transformer import build_as
from jaxtrain.optim.optimizer import adamw
from jaxtrain.parity import compare
from jaxtrain.shapes import BATCH_KEYS
from jaxtrain.sharding import all_reduce
from jaxtrain.train import loss
from jaxtrain.train.program import Program, build
from jaxtrain.train.state import abstract_tensors, create_state, from_tensors, to_tensors

# Every head count divides by 4, so that the same model runs on every mesh; queries are grouped 2 to a key.
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
    "loss.chunk": 48,  # does not divide the tokens of a device
    "optimizer.lr": 1e-3,
    "optimizer.lr_min": 1e-4,
    "optimizer.warmup_steps": 3,
}


def few(cases: Iterable[Any], *often: Any) -> list[Any]:
    """Cases of a parametrized test: these `often`, and in a campaign every one."""
    cases = list(cases)
    assert all(case in cases for case in often), often
    return [pytest.param(case, marks=() if case in often else pytest.mark.more) for case in cases]


def tiny(overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A config of a model that compiles in seconds, on one device unless the mesh says more."""
    tree = config.default_config()
    for key, value in {**TINY, **(overrides or {})}.items():
        *sections, name = key.split(".")
        functools.reduce(lambda section, part: section[part], sections, tree)[name] = value
    run, problems = config.resolve(tree)
    if problems:
        raise config.ConfigError(problems)
    return run


def devices_of(run: RunConfig) -> list[Any]:
    """As many of the fake devices as the mesh has."""
    return jax.devices()[: math.prod(dataclasses.astuple(run.mesh))]


@functools.cache
def program(run: RunConfig) -> Program:
    """The run's program on fake devices."""
    return build(run, devices_of(run))


@functools.cache
def train_step(run: RunConfig) -> jax.stages.Compiled:
    """The compiled train step."""
    return compiled(program(run))


@functools.cache
def lowered(run: RunConfig) -> str:
    """What XLA is given to compile for a train step."""
    made = program(run)
    return made.train_step.lower(made.state, made.batch).as_text()


@functools.cache
def batches(data: config.Data, global_batch: int, split: str = "train") -> pipeline.Batches:
    """The run's data, through the real pipeline. Sources: synthetic and files."""
    source = data.source if split == "train" else data.eval_source
    return pipeline.open_source(data, source, split=split, global_batch=global_batch, data_dir=".")


def host_batch(run: RunConfig, step: int) -> dict[str, np.ndarray]:
    """The rows of one step."""
    return batches(run.data, run.train.global_batch).batch(step)


@functools.cache
def _initial_state(run: RunConfig) -> Any:
    made = program(run)
    return create_state(made.definition, made.tx, made.state, run.train.seed, made.trained)


def fresh_state(run: RunConfig) -> Any:
    """Initial state on the mesh, to be donated. Data and batch size play no part in it: runs that differ there share it."""
    plain = dataclasses.replace(
        run, data=tiny().data, train=dataclasses.replace(tiny().train, seed=run.train.seed, freeze=run.train.freeze)
    )
    return jax.tree.map(jnp.copy, _initial_state(plain))


@functools.cache
def initial_tensors(run: RunConfig) -> dict[str, np.ndarray]:
    """Every tensor of the initial state, by its name in checkpoints."""
    return {k: np.asarray(v) for k, v in to_tensors(fresh_state(run)).items()}


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a few steps gave."""

    loss: np.ndarray
    grad_norm: np.ndarray
    lr: np.ndarray
    tensors: dict[str, np.ndarray]
    taken: compare.Trained  # to be compared


@functools.cache
def train(run: RunConfig, steps: int) -> Trained:
    """`steps` steps of the run from its initial state."""
    made, rates = program(run), []

    def step(state: Any, batch: loss.Batch) -> tuple[Any, Any]:
        state, values = train_step(run)(state, batch)
        rates.append(values["lr"])
        return state, values

    taken, state = compare.take_steps(made, step, fresh_state(run), lambda i: host_batch(run, i), steps)
    tensors = {k: np.asarray(v) for k, v in to_tensors(state).items()}
    return Trained(taken.loss, taken.grad_norm, np.array([float(lr) for lr in rates]), tensors, taken)


def compiled(made: Program) -> jax.stages.Compiled:
    """The compiled train step of a program."""
    return made.train_step.lower(made.state, made.batch).compile()


def first_steps(run: RunConfig, steps: int = 3) -> compare.Trained:
    """The first steps of a run, to be compared, compiled anew.

    They begin with the weights of one device: what other meshes begin with has a test of its own.
    """
    made = build(run, devices_of(run))
    whole = dataclasses.replace(
        run,
        **{name: getattr(tiny(), name) for name in ("mesh", "sharding", "attention", "remat", "data")},
        train=dataclasses.replace(tiny().train, seed=run.train.seed, freeze=run.train.freeze),
    )
    homes = {name: a.sharding for name, a in abstract_tensors(made.state).items()}
    state = from_tensors(made.state, jax.device_put(initial_tensors(whole), homes))
    step = compiled(made)
    assert_state_stays_sharded(made, step)
    return compare.take_steps(made, step, state, lambda i: host_batch(run, i), steps)[0]


def assert_state_stays_sharded(made: Program, step: jax.stages.Compiled) -> None:
    """A step leaves parameters and moments sharded as the program says."""
    after, _ = step.output_shardings
    pairs = zip(jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(made.state), strict=True)
    for (path, sharding), a in pairs:
        assert sharding.is_equivalent_to(a.sharding, len(a.shape)), jax.tree_util.keystr(path)


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
    """A token file of real text in short documents: each line of a few standard library modules is one."""
    byte = tokenizer.ByteTokenizer()
    library = Path(sysconfig.get_path("stdlib"))
    with TokenWriter(path, tokenizer.info(byte)) as writer:
        for module in sorted(library.glob("*.py"))[:modules]:
            for line in filter(str.strip, module.read_text(encoding="utf-8").splitlines()):
                writer.write(byte.encode(line), len(line.encode()))
                writer.end_document()
    return path


# ---- A user's own parts, named in configs as helpers:NAME


class WiderFamily:
    """The llama model with a feed-forward block twice as wide."""

    @staticmethod
    def build(model: config.Model, *args: Any) -> Any:
        return build_as(llama.STRUCTURE, dataclasses.replace(model, d_ff=2 * model.d_ff), *args)


def _family(run: Callable[..., Any]) -> Any:
    """Return the llama model whose layers are run by `run(plan, body, x, layers, shared, kinds)`, and which says that
    remat.Plan.run alone runs them, whole and once."""

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
TwiceFamily = _family(
    lambda plan, body, x, layers, shared, kinds: plan.run(body, plan.run(body, x, layers, shared, kinds), layers, shared, kinds)
)
LoopedFamily = _family(
    lambda plan, body, x, layers, shared, kinds: jax.lax.fori_loop(
        0, 2, lambda _, x: plan.run(body, x, layers, shared, kinds), x
    )
)
TiedFamily = _family(
    lambda plan, body, x, layers, shared, kinds: plan.run(
        body, x, jax.tree.map(lambda w: w[np.arange(len(kinds)) // 2], layers), shared, kinds
    )
)
SquashedFamily = _family(
    lambda plan, body, x, layers, shared, kinds: plan.run(body, x, jax.tree.map(jnp.tanh, layers), shared, kinds)
)
HalfFamily = _family(
    lambda plan, body, x, layers, shared, kinds: plan.run(body, x, jax.tree.map(lambda w: w[:1], layers), shared, kinds[:1])
)


def half_loss(hidden: jax.Array, head: jax.Array, batch: loss.Batch, spec: loss.LossSpec) -> jax.Array:
    """Half of the cross entropy."""
    return 0.5 * loss.cross_entropy(hidden, head, batch, spec)


def whole_logits_loss(hidden: jax.Array, head: Any, batch: loss.Batch, spec: loss.LossSpec) -> jax.Array:
    """Cross entropy as one would write it, with all logits at once."""
    logits_BTV = jnp.einsum("BTD,VD->BTV", hidden, spec.whole_head(head), precision=spec.numerics.precision)
    picked_BT = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV.astype(jnp.float32)), batch["targets"][..., None], -1)[..., 0]
    return -jnp.sum(batch["weights"] * picked_BT)


def slower_adamw(optimizer: config.Optimizer, dtypes: config.Dtypes, axes: Any) -> Any:
    """AdamW with a longer memory."""
    return adamw(dataclasses.replace(optimizer, beta1=0.99), dtypes, axes)
