"""Weights and logits of a model, from a run, one of its checkpoints, or a Hugging Face folder."""

import dataclasses
import functools
import tokenize
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.config import schema
from jaxtrain.config.schema import RunConfig
from jaxtrain.hf import lora
from jaxtrain.hf.frozen_base import restore_base
from jaxtrain.hf.importing import Origin
from jaxtrain.hf.names import PREFIX
from jaxtrain.models import FAMILIES
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.models.lora import is_adapter
from jaxtrain.models.module import Definition, Params
from jaxtrain.models.zero import make_zero
from jaxtrain.sharding import Placement, make_placement, replicated
from jaxtrain.step.definition import for_inference, make_definition
from jaxtrain.step.kernel import choose_kernel
from jaxtrain.step.state import TrainState, abstract_tensors, from_tensors

SHOWN = 6  # tensors named one by one
Logits = Callable[[np.ndarray, np.ndarray], np.ndarray]


def read_params(source: Origin, run: RunConfig, definition: Definition, placement: Placement, base: str = "") -> Params:
    """Return the weights of a model, sharded by `placement`. A run with adapters has the weights of base and adapters.

    Args:
        source: the weights, not read yet.
        run: the run's config.
        definition: the model's definition.
        placement: the placement of the model's parameters.
        base: the folder of the adapters' base, if it was moved; "": its path in the checkpoint.

    Raises:
        CheckpointError, HuggingFaceError: the weights cannot be read, or `base` is given for a model without adapters.
    """
    if base and not run.lora.rank:
        raise HuggingFaceError(f"--base={base}: {source.name} is of a run without adapters. Leave it out.")
    abstract = abstract_state(definition, placement)
    wanted = {name: a for name, a in abstract_tensors(abstract).items() if name.startswith(PREFIX)}
    fresh = TrainState(jnp.zeros((), jnp.int32), {}, ())
    if not run.lora.rank:
        check_tensors(source, wanted, run.model)
        return from_tensors(abstract, source.read(wanted), fresh).params
    base_path = base or lora.base_path(source.meta)
    adapters = {name: a for name, a in wanted.items() if is_adapter(name)}
    base_weights = restore_base(base_path, {k: a for k, a in wanted.items() if k not in adapters}, definition, placement)
    lora.check_base_digest(source.meta, base_path, base_weights.digest)
    return from_tensors(abstract, source.read(adapters) | base_weights.tensors, fresh).params


def check_tensors(source: Origin, wanted: Mapping[str, Any], model: schema.Model) -> None:
    """Raise HuggingFaceError unless the tensors of a model are those that its family builds, with their shapes.

    wanted: the tensors that the family builds, by the names of checkpoints.
    """
    stored = {name.removeprefix(PREFIX): a for name, a in source.stored.items() if name.startswith(PREFIX)}
    built = {name.removeprefix(PREFIX): a for name, a in wanted.items() if name.startswith(PREFIX)}
    problems = [f"{name} is missing" for name in built.keys() - stored.keys()]
    problems += [f"{name} is not in the model" for name in stored.keys() - built.keys()]
    for name in built.keys() & stored.keys():
        if (stored_shape := list(stored[name].shape)) != (built_shape := list(built[name].shape)):
            problems.append(f"{name} is {stored_shape}, and {built_shape} in the model")
    if problems:
        shown = "; ".join(sorted(problems)[:SHOWN]) + f"; and {len(problems) - SHOWN} more" * (len(problems) > SHOWN)
        rule = f"its tensors are not those that model.family = {model.family!r} builds"
        raise HuggingFaceError(f"{source.name}: {rule}: {shown}.")


def check_built(source: Origin) -> None:
    """Raise HuggingFaceError unless a folder has all tensors of its model, and no others. Allocates no arrays.

    `matched` has compared the tensors of a shipped family already.
    """
    run = source.run()
    if run.model.family not in FAMILIES or (source.folder and source.folder.raw):
        check_tensors(source, abstract_tensors(abstract_state(*place_model(run))), run.model)


def abstract_state(definition: Definition, placement: Placement) -> TrainState:
    """Return shapes, dtypes and shardings of a train state that has only weights."""
    params = jax.tree_util.tree_map_with_path(
        lambda path, a, axes: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=placement.sharding(axes, jax.tree_util.keystr(path), a.shape)
        ),
        definition.abstract,
        definition.axes,
    )
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(placement)), params, ())


def place_model(run: RunConfig) -> tuple[Definition, Placement]:
    """Return (definition, placement) of a run's model.

    Its weights are sharded over the devices of this process by `shard_for_inference`.
    """
    devices = jax.local_devices()
    sharded_run = shard_for_inference(run, devices)
    placement = make_placement(sharded_run, devices[: sharded_run.mesh.fsdp])
    placement = dataclasses.replace(placement, tokens_replicated=True)  # one sequence is too short to shard
    kernel, _ = choose_kernel(sharded_run, placement.layout.context, devices[0])
    return make_definition(sharded_run, make_zero(sharded_run.sharding, placement), kernel), placement


def shard_for_inference(run: RunConfig, devices: Sequence[Any]) -> RunConfig:
    """Return the run with weights sharded over these devices, or on one device if d_model is no multiple of their number.

    Every device gets all tokens.
    """
    count = len(devices) if run.model.d_model % len(devices) == 0 else 1
    # Every device has all tokens, and with these rules a shard of every expert, so it computes a partial sum for each token. If
    # each expert were on one device, every device would send all tokens to the experts.
    rules = tuple((axis, schema.EXPERT_AXIS if axis == "experts" else onto) for axis, onto in run.sharding.rules)
    split = dataclasses.replace(run.sharding, rules=rules)
    return dataclasses.replace(for_inference(run), mesh=schema.Mesh(data=1, fsdp=count, tensor=1, seq=1), sharding=split)


# ---- Logits


def read_tokens(path: Path, segments: Path | None, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (token ids, document numbers), int32 (B, T) each, from .npy files of integers (B, T) or (T,).

    segments: the file of document numbers; None: each row is one document. Raises HuggingFaceError.
    """

    def read_rows(path: Path) -> np.ndarray:
        try:
            with path.open("rb") as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
        except (OSError, ValueError, tokenize.TokenError) as error:  # the last one: of a damaged header
            reason = error.strerror if isinstance(error, OSError) else error
            raise HuggingFaceError(f"{path}: cannot be read as .npy: {reason}.") from error
        if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.integer) or array.size == 0:
            raise HuggingFaceError(f"{path}: is {array.dtype} of shape {list(array.shape)}; integers [B, T] or [T] are needed.")
        return np.atleast_2d(array).astype(np.int64)

    tokens_BT = read_rows(path)
    if tokens_BT.min() < 0 or tokens_BT.max() >= vocab:
        worst = tokens_BT.min() if tokens_BT.min() < 0 else tokens_BT.max()
        raise HuggingFaceError(f"{path}: has the id {worst}, and the model's vocabulary has {vocab}.")
    segments_BT = np.ones_like(tokens_BT) if segments is None else read_rows(segments)
    if segments_BT.shape != tokens_BT.shape:
        raise HuggingFaceError(f"{segments}: is {list(segments_BT.shape)}, the tokens are {list(tokens_BT.shape)}.")
    return tokens_BT.astype(np.int32), segments_BT.astype(np.int32)


def segment_positions(segments_BT: np.ndarray) -> np.ndarray:
    """Return the position of each token in its segment, from 0, int32 (B, T)."""
    index = np.broadcast_to(np.arange(segments_BT.shape[1]), segments_BT.shape)
    starts = np.concatenate([np.ones_like(segments_BT[:, :1]), np.diff(segments_BT, axis=1) != 0], axis=1)
    return (index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)).astype(np.int32)


def with_precision(run: RunConfig, precision: str) -> RunConfig:
    """Return the run with this precision of the arithmetic, f32 | bf16; for f32, weights and gradients are f32 too."""
    dtypes = dataclasses.replace(run.dtypes, params="f32", grads="f32", reduce="f32") if precision == "f32" else run.dtypes
    return dataclasses.replace(run, precision=precision, dtypes=dtypes)


def with_row_length(run: RunConfig, T: int, documents: int) -> RunConfig:
    """Return the run with rows of T tokens in up to this many documents, which determine the attention kernel."""
    data = dataclasses.replace(run.data, seq_len=T, packing="documents", max_segments=documents)
    return dataclasses.replace(run, data=data)


def logits_program(definition: Definition, placement: Placement) -> Callable[..., jax.Array]:
    """Return the compiled function from (weights, tokens, segments, positions) to logits."""

    def forward(params: Any, tokens_BT: jax.Array, segments_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        model = definition.bind(params)
        return model.logits(model(tokens_BT, segments_BT, positions_BT))

    return jax.jit(placement.shard_map(forward, (definition.specs(placement), P(), P(), P()), P()))


def logits_function(source: Origin, precision: str = "f32", base: str = "", run: RunConfig | None = None) -> Logits:
    """Return a function from (tokens, segments), each int32 (B, T), to the logits of a model, f32 (B, T, V).

    Args:
        source: the weights. They are read at the function's first call.
        precision: precision of the arithmetic, f32 | bf16. For f32 the weights are also read in f32, without rounding.
        base: the folder of the adapters' base, if it was moved; "": its path in the checkpoint.
        run: the run's config; None: the config stored with the weights.
    """
    run = with_precision(run or source.run(), precision)
    params: list[Params] = []

    @functools.lru_cache(1)
    def compile_forward(T: int, documents: int) -> Any:
        definition, placement = place_model(with_row_length(run, T, documents))
        if not params:
            params.append(read_params(source, run, definition, placement, base))
        return logits_program(definition, placement)

    def compute_logits(tokens_BT: np.ndarray, segments_BT: np.ndarray) -> np.ndarray:
        forward = compile_forward(tokens_BT.shape[1], max(1, int(segments_BT.max())))
        arrays = tokens_BT, segments_BT, segment_positions(segments_BT)
        # Rows are computed one by one: the logits of all rows would be many times the size of the model.
        rows = (np.asarray(forward(params[0], *(jnp.asarray(x[i : i + 1]) for x in arrays))) for i in range(len(tokens_BT)))
        return np.concatenate(list(rows))

    return compute_logits
