"""A model with its weights, from a run, one of its checkpoints, or a Hugging Face folder: to compute with, not to train."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain import config
from jaxtrain.checkpoint import locate
from jaxtrain.config import RunConfig
from jaxtrain.hf import folder as folders
from jaxtrain.hf.importing import run_of
from jaxtrain.hf.origin import is_hugging_face, open_origin
from jaxtrain.models.module import Definition, Params
from jaxtrain.sharding import Placement, replicated
from jaxtrain.state import TrainState, abstract_tensors, from_tensors


def run_at(path: str) -> tuple[RunConfig, int]:
    """The config of a run, a checkpoint or a Hugging Face folder, and its step (0 for the last).

    Raises CheckpointError, HuggingFaceError, or ConfigError where the stored config is not one of this version.
    """
    if is_hugging_face(path):
        opened = folders.open_folder(path)
        here = str(opened.path) if (opened.path / "tokenizer.json").is_file() else "byte"
        return run_of(opened, here, opened.dtype), 0
    checkpoints, step = locate(path)
    run, problems = config.resolve(checkpoints.meta(step)["config"])
    if problems:
        raise config.ConfigError(problems)
    return run, step


def read_params(path: str, definition: Definition, placement: Placement) -> Params:
    """The weights of a model, placed. Raises as `run_at` does."""
    whole = replicated(placement)
    params = jax.tree_util.tree_map_with_path(
        lambda path, a, axes: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=placement.sharding(axes, jax.tree_util.keystr(path), a.shape)
        ),
        definition.abstract,
        definition.axes,
    )
    abstract = TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=whole), params, ())
    wanted = {name: a for name, a in abstract_tensors(abstract).items() if name.startswith("params.")}
    tensors = open_origin(path).read(wanted)
    fresh = TrainState(jnp.zeros((), jnp.int32), {}, ())
    return from_tensors(abstract, tensors, fresh).params


def alone(run: RunConfig, devices: Sequence[Any]) -> RunConfig:
    """The run with its weights split over these devices, where they divide, and everything else on each."""
    count = len(devices) if run.model.d_model % len(devices) == 0 else 1
    return dataclasses.replace(run, mesh=config.Mesh(data=1, fsdp=count, tensor=1, seq=1))
