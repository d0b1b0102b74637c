"""Where weights come from that a run does not begin at random: another run of jaxtrain, or a Hugging Face folder."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from jaxtrain.checkpoint import Checkpoints, locate
from jaxtrain.config import Problem
from jaxtrain.hf import folder as folders
from jaxtrain.hf.folder import Folder
from jaxtrain.hf.loading import load, matched
from jaxtrain.hf.names import PREFIX, Matched
from jaxtrain.models import FAMILIES, family
from jaxtrain.train.state import Tensors


class Origin(Protocol):
    """What can be read of either."""

    @property
    def name(self) -> str:
        """As a log line has it."""
        ...

    @property
    def path(self) -> str:
        """Where this very one is found again."""
        ...

    @property
    def adapters(self) -> bool:
        """Whether it holds adapters alone (jaxtrain/lora.py)."""
        ...

    @property
    def model(self) -> Mapping[str, Any]:
        """Its config's section `model`."""
        ...

    @property
    def seq_len(self) -> int:
        """Tokens of the longest sequences that it is made for; 0 where it does not say."""
        ...

    @property
    def stored(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by the names of checkpoints. Nothing is read."""
        ...

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Tensors:
        """Some of its tensors, converted and placed."""
        ...


@dataclasses.dataclass(frozen=True)
class Run:
    """A step of another run."""

    checkpoints: Checkpoints
    step: int

    @property
    def name(self) -> str:
        return f"step {self.step} of {self.checkpoints.directory}"

    @property
    def path(self) -> str:
        return str(self.checkpoints.directory / str(self.step))

    @property
    def adapters(self) -> bool:
        return "base" in self.checkpoints.meta(self.step)

    @property
    def model(self) -> Mapping[str, Any]:
        return self.checkpoints.meta(self.step)["config"]["model"]

    @property
    def seq_len(self) -> int:
        return self.checkpoints.meta(self.step)["config"]["data"]["seq_len"]

    @property
    def stored(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        return self.checkpoints.stored(self.step)

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Tensors:
        return self.checkpoints.restore(self.step, wanted, subset=True, cast=True)


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """A folder of theirs."""

    folder: Folder
    found: Matched

    @property
    def name(self) -> str:
        return str(self.folder.path)

    @property
    def path(self) -> str:
        return str(self.folder.path.absolute())

    @property
    def adapters(self) -> bool:
        return False

    @property
    def model(self) -> Mapping[str, Any]:
        return dataclasses.asdict(self.folder.model)

    @property
    def seq_len(self) -> int:
        return self.folder.seq_len

    @property
    def stored(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        return {
            ours: jax.ShapeDtypeStruct(entry.shape, np.result_type(*(self.folder.tensors[x].dtype for x in entry.theirs)))
            for ours, entry in self.found.used.items()
            if ours.startswith(PREFIX)
        }

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Tensors:
        return load(self.folder, self.found, wanted, lambda name, size: None)


def is_hugging_face(path: str) -> bool:
    """A folder of theirs, or hf:NAME of one in the hub's cache."""
    return path.startswith("hf:") or folders.is_folder(path)


def open_origin(path: str) -> Origin:
    """Raises CheckpointError or HuggingFaceError for what cannot be read, or does not fit together."""
    if is_hugging_face(path):
        opened = folders.open_folder(path)
        return HuggingFace(opened, matched(opened))
    return Run(*locate(path))


def structure_problem(key: str, there: str, here: str) -> list[Problem]:
    """That a family computes otherwise, though its tensors may have the same names and shapes.

    there, here: model.family of the origin and of the run.
    """
    if there == here or not {there, here} <= FAMILIES.keys() or family(there).STRUCTURE == family(here).STRUCTURE:
        return []
    rule = f"its weights are those of model.family = {there}, which computes otherwise: {family(there).STRUCTURE}"
    return [Problem(key, here, rule, f"Set model.family to {there}.")]
