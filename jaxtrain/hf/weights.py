"""The weights of a model as arrays on the host, by jaxtrain's names: those of a run, a checkpoint or a Hugging Face folder."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.config.shapes import MTP
from jaxtrain.hf import lora
from jaxtrain.hf.importing import Origin, open_origin
from jaxtrain.hf.model import place_model, read_params
from jaxtrain.hf.names import PREFIX
from jaxtrain.kernels.numerics import DTYPES
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.models.lora import A, B, adapter_name
from jaxtrain.step.state import TrainState, named_leaves, split_layer

AT_ONCE = 1 << 26  # least bytes of a checkpoint that are read at a time
Read = Callable[[Sequence[str]], Iterator[tuple[str, np.ndarray]]]


def open_weights(
    source: Origin, base: str = "", as_float32: bool = False, say: Callable[[str], None] | None = None
) -> tuple[dict[str, jax.ShapeDtypeStruct], Read]:
    """Return (shapes and dtypes as stored, reader) of a model's weights, by their names in checkpoints.

    Nothing is read yet: the reader yields (name, array) of the tensors that it is asked for. Adapters are merged into their
    base, on the devices of this process, which may give more bits than are stored.

    Args:
        source: the weights' run, checkpoint or folder.
        base: the folder of the adapters' base, if it was moved; "": its path in the checkpoint.
        as_float32: read base and adapters in float32, although all of the base is bfloat16.
        say: as in `Origin.announce`, for the base of adapters.

    Raises:
        CheckpointError, HuggingFaceError: the weights cannot be read, or `base` is given for a model without adapters.
    """
    run = source.run()
    if not run.lora.rank:
        if base:
            raise HuggingFaceError(f"--base={base}: {source.name} is of a run without adapters. Leave it out.")
        return _parameters(source), functools.partial(_read_stored, source)
    base_path = base or lora.base_path(source.meta)
    try:
        base_origin = open_origin(base_path)
        # Adapters are trained without the base's modules of multi-token prediction.
        stored = {name: a for name, a in _parameters(base_origin).items() if not name.startswith(f"{PREFIX}{MTP}.")}
    except (CheckpointError, HuggingFaceError) as error:
        raise lora.missing_base_error(base_path, error) from error
    base_origin.announce(say)
    as_float32 = as_float32 or any(a.dtype != jnp.bfloat16 for a in stored.values())
    return stored, _merged_reader(source, base, as_float32)


def _parameters(source: Origin) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: a for name, a in source.stored.items() if name.startswith(PREFIX)}


def _read_stored(source: Origin, wanted: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array in its stored dtype) of all wanted tensors. Each batch but the last has at least AT_ONCE bytes."""
    try:
        host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        host = SingleDeviceSharding(jax.local_devices()[0])
    batch: list[str] = []
    for name in wanted:
        batch.append(name)
        batch_bytes = sum(math.prod(source.stored[n].shape) * source.stored[n].dtype.itemsize for n in batch)
        if batch_bytes >= AT_ONCE or name is wanted[-1]:
            tensors = source.read({n: source.stored[n].update(sharding=host) for n in batch})
            for n in batch:
                yield n, np.asarray(tensors.pop(n))
            batch = []


def _merged_reader(source: Origin, base: str, as_float32: bool) -> Read:
    """Return a reader of a run's weights with its adapters merged into the base.

    Base and adapters must fit into device memory. as_float32: read both in float32.
    """
    run = source.run()

    run_to_read = dataclasses.replace(run, precision="f32") if as_float32 else run
    definition, placement = place_model(run_to_read)

    @functools.cache
    def arrays_by_name() -> dict[str, tuple[Any, Any]]:
        params = read_params(source, run_to_read, definition, placement, base)
        leaves = named_leaves(TrainState(jnp.zeros((), jnp.int32), params, ()))
        out = {name: (leaf.array, index) for leaf in leaves for index, name in leaf.slot_names}
        return out | {leaf.name: (leaf.array, None) for leaf in leaves if not leaf.stacked}

    def array(name: str) -> jax.Array:
        x, index = arrays_by_name()[name]
        return x if index is None else x[index]

    def value(name: str) -> np.ndarray | None:
        """Return a weight or a matrix of an adapter; None if there is none."""
        stored = definition.stored.get(split_layer(name, definition.period)[0].removeprefix(PREFIX))
        if stored is None:
            return np.asarray(array(name)) if name in arrays_by_name() else None
        arrays = {suffix: array(f"{name}.{suffix}") for suffix in stored.abstract}
        return np.asarray(stored.decode(arrays, DTYPES[run_to_read.compute]))

    def read(wanted: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        for name in wanted:
            names = [name, *(adapter_name(name, half) for half in (A, B))]
            tensors = {each: x for each in names if (x := value(each)) is not None}
            for _, x in lora.merge_adapters(tensors, run.lora.scale):
                yield name, np.asarray(x)

    return read
