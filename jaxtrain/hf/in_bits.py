"""`hf import --dtype=nf4`: a Hugging Face folder as a checkpoint whose matrices are in fewer bits."""

import dataclasses
from typing import Any

from jaxtrain.config.schema import ConfigError, Lora
from jaxtrain.hf import encoded
from jaxtrain.hf.folder import HfFolder
from jaxtrain.hf.frozen_base import read_base, weights_to_read
from jaxtrain.hf.importing import Progress, origin_of
from jaxtrain.hf.model import abstract_state, place_model
from jaxtrain.hf.names import PREFIX
from jaxtrain.models.lora import is_adapter
from jaxtrain.models.rules import base_problems
from jaxtrain.step.state import Tensors, abstract_tensors


class InBits:
    """The tensors of a folder as a run with this `lora.base` stores them, over the devices of this process.

    Attributes:
        format: of low_bits.FORMATS.
        tensors: shape, dtype and sharding of each, by its name in checkpoints.
    """

    def __init__(self, folder: HfFolder, form: str):
        """Args: form: of low_bits.FORMATS. Raises ConfigError if the model has no matrix for it, or uneven blocks."""
        self._folder, self.format = folder, form
        run = folder.run(folder.dtype)
        if problems := base_problems(form, run.model, {}):
            raise ConfigError([dataclasses.replace(problem, key="--dtype") for problem in problems])
        # The frozen base of any adapters.
        run = dataclasses.replace(run, lora=Lora(rank=1, targets="wo", base=form))
        self._definition, self._placement = place_model(run)
        everything = abstract_tensors(abstract_state(self._definition, self._placement))
        self.tensors: Tensors = {n: a for n, a in everything.items() if n.startswith(PREFIX) and not is_adapter(n)}

    def read(self, progress: Progress) -> tuple[Tensors, dict[str, Any], list[str]]:
        """Return (tensors, entries of meta.json, a line of errors for each layer). progress: as in `importing.load_tensors`."""
        source = origin_of(self._folder, progress)
        base = read_base(source, self.tensors, self._definition, self._placement)
        weights = weights_to_read(self.tensors, source, self._definition, self._placement)
        stored = {weight.name: weight.stored for weight in weights if weight.stored}
        record = encoded.low_bits_record(stored, self._folder.dtype, base.digest)
        by_layer: dict[str, list[str]] = {}
        for name, error in base.errors.items():
            stack, layer, weight = name.removeprefix(PREFIX).split(".", 2)
            by_layer.setdefault(f"{stack}.{layer}", []).append(f"{weight} {error:.2%}")
        return base.tensors, record, [f"  {layer}: {', '.join(by_layer[layer])}" for layer in by_layer]
