"""Replay of a failed step from its saved state and batch: `python -m jaxtrain.main --replay=BUNDLE`.

    replay/step-7/bundle.json     the config, the failure, digests of the state, versions, devices, the command
    replay/step-7/batch.npz       the batch as it came from the data pipeline
    replay/step-7/checkpoints/7/  the weights that the step was computed from, NaN and infinities included

The guard holds the state until the bundle is written (jaxtrain/step/guard.py), so the bundle has the weights before the failed
step. Loss and gradient depend only on weights and batch, so moments are stored only as digests.
"""

import dataclasses
import importlib.metadata
import json
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint import CheckpointError, Checkpoints, digests, files
from jaxtrain.config import schema
from jaxtrain.config.command_line import FAILED
from jaxtrain.config.commands import to_run_sh
from jaxtrain.config.schema import ConfigError, Problem, RunConfig
from jaxtrain.config.shapes import STACK
from jaxtrain.metrics.files import write_atomic
from jaxtrain.metrics.receipt import device_facts
from jaxtrain.models.module import select_leaves
from jaxtrain.runtime.distributed import Peers
from jaxtrain.runtime.startup import set_compile_cache
from jaxtrain.step import compiler, guard, state
from jaxtrain.step.batch import place_batch, rows_here
from jaxtrain.step.program import Program, build_program
from jaxtrain.step.state import TrainState
from jaxtrain.train.divergence import SkippedStep, describe_batches, finite_or_text

FORMAT = 2
BUNDLE, BATCH = "bundle.json", "batch.npz"
FIGURES = ("loss", "grad_norm", "verdict")


class ReplayError(RuntimeError):
    """A bundle that cannot be written or read. The message has the remedy."""


def weights_alone(current: TrainState) -> TrainState:
    """Return the part of a state that a bundle stores: the step and the weights, without moments."""
    return TrainState(current.step, current.params, (), layers=current.layers)


def write_bundle(
    folder: Path,
    config: Mapping[str, Any],
    current: TrainState,
    skip: SkippedStep,
    batch: Mapping[str, np.ndarray],
    options: Mapping[str, Any],
    argv: tuple[str, ...],
    peers: Peers,
) -> str:
    """Write the bundle of a skipped step; every process of the run calls it. Return a line for the log.

    config: of the compiled step. current: the state that the guard holds. batch: all rows of the batch. options: XLA's
    options of the compiled step. Raises ReplayError if the bundle cannot be written. Its folder then has no bundle.json.
    """
    store = Checkpoints(folder / "checkpoints", peers=peers, finite=False)
    sums = state.digests_by_name(state.to_digests(current))
    tensor_digests = [(name, digests.to_hex(x)) for name, x in sums.items() if name.startswith(("params.", "optimizer."))]
    tensors = state.to_tensors(weights_alone(current))
    try:
        store.save_now(
            skip.step, tensors, {"config": config, "loss": finite_or_text(skip.loss), "data": {"tokens": skip.tokens[0]}}
        )
        if peers.process_index == 0:
            np.savez(folder / BATCH, **dict(batch))  # pyright: ignore[reportArgumentType]
            record = {
                "format": FORMAT,
                **{k: finite_or_text(v) if isinstance(v, float) else v for k, v in dataclasses.asdict(skip).items()},
                "state_digest": digests.combine_digests(tensor_digests),
                "weights_digest": digests.combine_digests((n, d) for n, d in tensor_digests if n.startswith("params.")),
                "not_finite": {name: digests.not_finite(x) for name, x in sums.items() if digests.not_finite(x)},
                "guard": {name: np.asarray(x).tolist() for name, x in current.guard.items()},
                "config": config,
                "compiler_options": compiler.remove_run_options(options),
                "command": list(argv),
                "devices": device_facts(jax.devices()),
                "versions": {n: importlib.metadata.version(n) for n in ("jax", "jaxlib", "flax", "optax")},
            }
            if (autotune_file := compiler.autotune_path(options)) and autotune_file.exists():
                shutil.copy(autotune_file, folder / compiler.AUTOTUNED)
            write_atomic(folder / BUNDLE, files.to_sealed_json(record))
    except (CheckpointError, OSError) as error:
        raise ReplayError(f"step {skip.step} cannot be stored for a replay: {error}") from error
    return to_run_sh(f"kept for a replay: python -m jaxtrain.main --replay={shlex.quote(str(folder))}")


def read_bundle(folder: Path) -> dict[str, Any]:
    """Return bundle.json. Raises ReplayError if it cannot be read, or has another format."""
    path = folder / BUNDLE
    try:
        record = files.unseal(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ReplayError(f"{path} cannot be read ({error}).") from error
    if record.get("format") != FORMAT:
        raise ReplayError(f"{path}: format {record.get('format')}, and this jaxtrain reads {FORMAT}.")
    return record


def report(folder: Path, run: RunConfig) -> int:
    """Repeat the step of a bundle, and print the result. Return 0 if it fails in the same way again, 1 if not.

    Raises ConfigError if the step cannot be repeated.
    """
    set_compile_cache(run.paths.cache)
    try:
        return 0 if replay(folder, run, print) else FAILED
    except (ReplayError, CheckpointError) as error:
        raise ConfigError([Problem("--replay", str(folder), str(error).rstrip("."), "")]) from error


def replay(folder: Path, run: RunConfig, say: Callable[[str], None]) -> bool:
    """Repeat the step of a bundle on the present devices, and find the origin of its first bad value.

    run: the bundle's config with overrides. Returns whether the step failed again in the same way. Raises ReplayError,
    CheckpointError or ConfigError if the step cannot be repeated.
    """
    record = read_bundle(folder)
    program = build_program(run, jax.devices())
    with np.load(folder / BATCH) as stored:
        rows = {name: stored[name] for name in stored.files}
    wanted = program.batch["tokens"].shape
    if rows["tokens"].shape != (wanted[0] * wanted[1], wanted[2]):
        raise ReplayError(
            f"{folder / BATCH} holds {rows['tokens'].shape}, and this config's batch is {wanted}: restore the original config."
        )
    batch = place_batch(rows, program.batch, program.context, rows_here(program.batch))
    say(f"step {record['step']} of {folder}: data {describe_batches(record['batches'])}")
    current = _state(folder, record, program)
    sums = state.digests_by_name(state.to_digests(weights_alone(current)))
    del sums["step"]
    same = digests.combine_digests((name, digests.to_hex(x)) for name, x in sums.items()) == record["weights_digest"]
    say(f"weights: {'the same bits as then' if same else 'OTHER bits than then'} (digest {record['weights_digest']})")
    params = current.params
    params_copy = jax.tree.map(jnp.copy, params)  # the step donates its state
    _, values = compiler.compile_train(program, _options(folder, record, program, say))(current, batch)
    now = {name: float(values[name]) for name in FIGURES}
    then = {name: float(record[name]) for name in FIGURES}
    for name in ("loss", "grad_norm"):
        equal = now[name] == then[name] or (now[name] != now[name] and then[name] != then[name])
        say(f"{name}: {then[name]!r} then, {now[name]!r} now: {'the same' if equal else 'different'}")
    reproduced = now["verdict"] == then["verdict"]
    verdict = guard.NAMES[int(now["verdict"])]
    say(f"{verdict} again" if reproduced else f"{guard.NAMES[int(then['verdict'])]} then, {verdict} now: not reproduced")
    say(first_bad(program, params_copy, batch, sums))
    return reproduced


def _options(folder: Path, record: Mapping[str, Any], program: Program, say: Callable[[str], None]) -> dict[str, str | bool]:
    """Return XLA's options of the bundle's step, with the kernels that XLA chose by autotuning.

    If the config, or the kind or number of devices, differs from the bundle's, return the options chosen for this step and GPU.
    """
    facts = device_facts(jax.devices())
    same_devices = all(facts[name] == record["devices"][name] for name in ("kind", "count"))
    if same_devices and json.loads(json.dumps(schema.to_dict(program.run))) == record["config"]:
        autotune_file = folder / compiler.AUTOTUNED
        return record["compiler_options"] | ({compiler.LOAD: str(autotune_file)} if autotune_file.exists() else {})
    say("compiled for this config and these devices: last bits may differ")
    return compiler.choose_options(program, compiler.card_of(jax.local_devices()[0], program.run.train.memory_fraction)).options


def _state(folder: Path, record: Mapping[str, Any], program: Program) -> TrainState:
    """Return the state before the bad step, with newly initialised moments."""
    abstract = weights_alone(program.state)
    store = Checkpoints(folder / "checkpoints", finite=False)
    tensors = store.restore(record["step"], state.abstract_tensors(abstract))
    params = state.from_tensors(abstract, tensors).params
    optimizer = jax.jit(program.tx.init, out_shardings=state.shardings(program.state.optimizer))(
        select_leaves(params, program.trained)
    )
    guard_values = {n: np.asarray(x, program.state.guard[n].dtype) for n, x in record["guard"].items()}
    guard_state = jax.device_put(guard_values | {"held": np.int32(0)}, state.shardings(program.state.guard))
    done = jax.device_put(np.int32(record["step"] - 1), program.state.step.sharding)
    return state.begin_average(TrainState(done, params, optimizer, guard_state, layers=abstract.layers), program.state)


# ---- Origin of the bad value


def first_bad(program: Program, params: Any, batch: Any, sums: Mapping[str, np.ndarray]) -> str:
    """Return one line about the first array, in the order of computation, with a value that is infinite or NaN.

    sums: the parameters' digests. A bisection finds the first bad layer. Each of its iterations runs the first n layers with
    the model's own final norm and head, and plain cross entropy: a bad value of these layers makes the loss bad.
    """
    bad_names = _sort_names(name for name, x in sums.items() if digests.not_finite(x))
    if bad_names:
        return (
            f"first: parameter {bad_names[0]}, {digests.not_finite(sums[bad_names[0]]):,} values that are not finite"
            f"{_more_text(bad_names)}"
        )
    weights = jax.device_get(batch["weights"]) if batch["weights"].is_fully_addressable else None
    if weights is not None and not np.isfinite(weights).all():
        rows = np.unique(np.argwhere(~np.isfinite(weights))[:, :2], axis=0).tolist()
        return f"first: the batch: weights of tokens that are not finite, in (microbatch, row) {', '.join(map(str, rows[:8]))}"
    for micro in range(batch["tokens"].shape[0]):
        microbatch = {
            name: jax.device_put(x[micro : micro + 1], program.eval_batch[name].sharding) for name, x in batch.items()
        }
        if origin := _in_layers(program, params, microbatch) or _in_loss(program, params, microbatch):
            return f"first: {origin}, in microbatch {micro}" if batch["tokens"].shape[0] > 1 else f"first: {origin}"
    return _in_gradients(program, params, batch)


def _loss(program: Program, params: Any, microbatch: Any) -> jax.Array:
    total, weight, _ = program.eval_step(params, {name: microbatch[name] for name in program.eval_batch})
    return total / jnp.where(weight > 0, weight, 1.0)


def _tensors(program: Program, tree: Any) -> state.Tensors:
    """Return name -> array for a tree with the structure of a program's parameters. Each layer is a separate array."""
    done = jax.device_put(np.int32(0), program.state.step.sharding)
    return state.to_tensors(TrainState(done, tree, (), layers=program.state.layers))


def _in_layers(program: Program, params: Any, microbatch: Any) -> str:
    """Return words for the first layer whose output is not finite; '' if there is none, or the model has no stack of layers."""
    if STACK not in params:
        return ""
    tensors = _tensors(program, params)
    run = dataclasses.replace(program.run, loss=schema.Loss(chunk=program.run.loss.chunk))  # plain cross entropy

    def is_bad(layers: int) -> bool:
        model = dataclasses.replace(run.model, num_layers=layers)
        short_program = build_program(dataclasses.replace(run, model=model), jax.devices())
        abstract = weights_alone(short_program.state)
        layer_tensors = {
            name: jax.device_put(tensors[name], a.sharding) for name, a in state.abstract_tensors(abstract).items()
        }
        return not np.isfinite(float(_loss(short_program, state.from_tensors(abstract, layer_tensors).params, microbatch)))

    first = run.model.dense_layers  # first layer of the stack
    low, high = first, run.model.num_layers
    if not is_bad(high):
        return ""
    period = run.model.period
    while high - low > period:
        middle = low + (high - low) // (2 * period) * period
        low, high = (low, middle) if is_bad(middle) else (middle, high)
    layers = f"layer {high - 1}" if period == 1 else f"layers {low} to {high - 1}"
    return f"the forward pass of {layers}" + (" (or what is before it)" if low == first else "")


def _in_loss(program: Program, params: Any, microbatch: Any) -> str:
    loss = float(_loss(program, params, microbatch))
    return "" if np.isfinite(loss) else f"the loss ({loss}), after hidden states that are finite in every layer"


def _gradients(program: Program, params: Any, batch: Any) -> dict[str, np.ndarray]:
    """Return name of a parameter -> f32 (2,): number of its gradient's values that are not finite, and the gradient's norm.

    Each layer of a stack has its own entries.
    """
    _, grads = program.gradients(params, batch)
    return {name: np.asarray(_measure(g)) for name, g in _tensors(program, grads).items() if name != "step"}


@jax.jit
def _measure(gradient: jax.Array) -> jax.Array:
    gradient = gradient.astype(jnp.float32)
    return jnp.stack([jnp.sum(~jnp.isfinite(gradient)).astype(jnp.float32), jnp.sqrt(jnp.sum(gradient * gradient))])


def _in_gradients(program: Program, params: Any, batch: Any) -> str:
    """Return one line: the first gradient that is not finite, and its microbatch. If all are finite: the largest gradients."""
    measures = _gradients(program, params, batch)
    bad_names = _sort_names((name for name, x in measures.items() if x[0]), backward=True)
    if not bad_names:
        norms = {name: float(x[1]) for name, x in measures.items()}
        top = sorted(norms, key=norms.__getitem__, reverse=True)[:3]
        return "every value is finite: the largest gradients are those of " + ", ".join(f"{n} ({norms[n]:.3g})" for n in top)
    count = batch["tokens"].shape[0]
    for micro in range(count if count > 1 else 0):
        # The microbatch is repeated A times, because a pipeline's schedule needs A microbatches.
        repeated = {n: jax.device_put(jnp.broadcast_to(x[micro : micro + 1], x.shape), x.sharding) for n, x in batch.items()}
        micro_measures = _gradients(program, params, repeated)
        if micro_names := _sort_names((name for name, x in micro_measures.items() if x[0]), backward=True):
            return f"first: {_gradient_text(micro_names)}, in microbatch {micro}"
    return f"first: {_gradient_text(bad_names)}" + (", of all microbatches together and of none alone" if count > 1 else "")


def _gradient_text(names: list[str]) -> str:
    return f"the gradient of {names[0]} in the backward pass, after a loss that is finite{_more_text(names)}"


def _sort_names(names: Any, backward: bool = False) -> list[str]:
    """Return names of parameters in the order of the forward pass: embedding, layers by number, other parameters.

    backward: whether to reverse the order.
    """

    def sort_key(name: str) -> tuple[int, int, str]:
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer:
            return 1, int(layer[1]), name
        return (0 if "embed" in name else 2), 0, name

    return sorted(names, key=sort_key, reverse=backward)


def _more_text(names: list[str]) -> str:
    return f"; {len(names) - 1} other tensors have some too" if len(names) > 1 else ""
