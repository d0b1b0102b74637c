"""A model with its weights, from a run, one of its checkpoints, or a Hugging Face folder: to compute with, not to train."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain import config, lora
from jaxtrain.checkpoint import locate
from jaxtrain.config import RunConfig
from jaxtrain.hf import folder as folders
from jaxtrain.hf.importing import run_of
from jaxtrain.hf.origin import is_hugging_face, open_origin
from jaxtrain.models.lora import is_adapter
from jaxtrain.models.module import Definition, Params, names, part
from jaxtrain.sharding import Placement, make_placement, replicated
from jaxtrain.train.definition import for_inference, make_definition
from jaxtrain.train.kernel import choose_kernel, context_of
from jaxtrain.train.state import TrainState, abstract_tensors, from_tensors


def run_at(path: str) -> tuple[RunConfig, int]:
    """The config of a run, a checkpoint or a Hugging Face folder, and its step (0 for the last).

    Raises CheckpointError, HuggingFaceError, or ConfigError where the stored config is not one of this version.
    """
    if is_hugging_face(path):
        opened = folders.open_folder(path)
        here = str(opened.path) if (opened.path / "tokenizer.json").is_file() else "byte"
        return run_of(opened, here, opened.dtype(opened.tensors)), 0
    checkpoints, step = locate(path)
    run, problems = config.resolve(checkpoints.meta(step)["config"])
    if problems:
        raise config.ConfigError(problems)
    return run, step


def read_params(path: str, run: RunConfig, definition: Definition, placement: Placement, base: str = "") -> Params:
    """The weights of a model, placed; of a run with adapters those of its base and the adapters. Raises as `run_at` does.

    base: where the base is now, if not where it was.
    """
    abstract = abstract_of(definition, placement)
    wanted = {name: a for name, a in abstract_tensors(abstract).items() if name.startswith("params.")}
    fresh = TrainState(jnp.zeros((), jnp.int32), {}, ())
    if not run.lora.rank:
        return from_tensors(abstract, open_origin(path).read(wanted), fresh).params
    checkpoints, step = locate(path)
    meta = checkpoints.meta(step)
    place = base or lora.base_path(meta)
    adapters = {name: a for name, a in wanted.items() if is_adapter(name)}
    tensors = checkpoints.restore(step, adapters, subset=True, cast=True)
    tensors |= lora.restore_base(place, {name: a for name, a in wanted.items() if name not in adapters})
    found = from_tensors(abstract, tensors, fresh).params
    beside = part(found, jax.tree.map(lambda name: not is_adapter(name), names(found)))
    lora.check_same(meta, place, lora.digest(beside))
    return found


def abstract_of(definition: Definition, placement: Placement) -> TrainState:
    """A state of weights alone, placed and not allocated."""
    params = jax.tree_util.tree_map_with_path(
        lambda path, a, axes: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=placement.sharding(axes, jax.tree_util.keystr(path), a.shape)
        ),
        definition.abstract,
        definition.axes,
    )
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(placement)), params, ())


def placed(run: RunConfig) -> tuple[Definition, Placement]:
    """The model of a run on the devices of this process, `alone`."""
    spread = alone(run, jax.local_devices())
    placement = make_placement(spread, jax.local_devices()[: spread.mesh.fsdp])
    kernel, _ = choose_kernel(spread, context_of(spread, placement), jax.local_devices()[0])
    return make_definition(spread, placement, kernel), placement


def alone(run: RunConfig, devices: Sequence[Any]) -> RunConfig:
    """Return the run with its weights sharded over these devices, where they divide, and all tokens on each."""
    count = len(devices) if run.model.d_model % len(devices) == 0 else 1
    # Each device has all tokens. With a part of every expert it computes a part of each token; with whole experts, all tokens
    # would travel to them from every device.
    rules = tuple((axis, config.EXPERT_AXIS if axis == "experts" else onto) for axis, onto in run.sharding.rules)
    split = dataclasses.replace(run.sharding, rules=rules)
    return dataclasses.replace(for_inference(run), mesh=config.Mesh(data=1, fsdp=count, tensor=1, seq=1), sharding=split)
