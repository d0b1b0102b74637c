"""Checkpoints whose frozen matrices are stored in fewer bits (`hf import --dtype=nf4`): their record in meta.json, and reading.

Under the record `low_bits`, a weight params.layers.0.attention.wq has the tensors params.layers.0.attention.wq.bits and so on.
A run with that `lora.base` reads these tensors as they are. For all others, such a weight is one tensor, which is decoded.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels.numerics import DTYPES
from jaxtrain.models.stored import LEADING, StoredWeight
from jaxtrain.step.state import Tensors

RECORD = "low_bits"  # key of meta.json


def low_bits_record(weights: Mapping[str, StoredWeight], dtype: str, digest: str) -> dict[str, Any]:
    """Return the entry of meta.json.

    Args:
        weights: how each weight is stored, of one layer each, by name in checkpoints.
        dtype: dtype of the weights that were encoded, f32 | bf16.
        digest: the digest of the model before (lora.Digest).
    """
    entries = {
        name: {"shape": list(weight.shape), "experts": "experts" in weight.axes, "inputs_first": weight.inputs_first}
        for name, weight in weights.items()
    }
    return {RECORD: {"format": next(iter(weights.values())).format, "dtype": dtype, "digest": digest, "weights": entries}}


def low_bits_format(meta: Mapping[str, Any]) -> str:
    """Return the format of a checkpoint's matrices, of low_bits.FORMATS; "" if they are stored in a dtype."""
    return meta[RECORD]["format"] if RECORD in meta else ""


def recorded_digest(meta: Mapping[str, Any]) -> str:
    """Return the digest of a checkpoint's weights before they were encoded; "" if they are stored in a dtype."""
    return meta[RECORD]["digest"] if RECORD in meta else ""


def encoded_weights(meta: Mapping[str, Any]) -> dict[str, StoredWeight]:
    """Return how each weight in fewer bits is stored, by its name in checkpoints."""
    out = {}
    for name, entry in meta.get(RECORD, {}).get("weights", {}).items():
        axes = (LEADING[1],) * entry["experts"]
        shape = tuple(entry["shape"])
        out[name] = StoredWeight(
            low_bits_format(meta), shape, (*axes, *[None] * (len(shape) - len(axes))), entry["inputs_first"]
        )
    return out


def decoded_shapes(meta: Mapping[str, Any], stored: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of a checkpoint's tensors, with each weight in fewer bits as one. stored: as in the file."""
    weights = encoded_weights(meta)
    array_names = {f"{name}.{suffix}" for name, weight in weights.items() for suffix in weight.abstract}
    plain = {name: a for name, a in stored.items() if name not in array_names}
    return plain | {name: jax.ShapeDtypeStruct(weight.shape, DTYPES[meta[RECORD]["dtype"]]) for name, weight in weights.items()}


def decoding_reader(read: Callable[[Tensors], Tensors], weights: Mapping[str, StoredWeight]) -> Callable[[Tensors], Tensors]:
    """Return a function that reads tensors by the names of `decoded_shapes`. read: reads those of the checkpoint."""

    def read_decoded(wanted: Tensors) -> Tensors:
        out = read({name: a for name, a in wanted.items() if name not in weights})
        for name, a in wanted.items():
            if name in weights:  # one after the other, because the arrays of each are on every device
                weight, replicated = weights[name], a.sharding
                if isinstance(replicated, NamedSharding):
                    replicated = NamedSharding(replicated.mesh, P())
                arrays = {suffix: x.update(sharding=replicated) for suffix, x in weight.abstract.items()}
                tensors = read({f"{name}.{suffix}": x for suffix, x in arrays.items()})
                out[name] = _decoder(weight, a.dtype, a.sharding)({suffix: tensors[f"{name}.{suffix}"] for suffix in arrays})
        return out

    return read_decoded


@functools.cache
def _decoder(weight: StoredWeight, dtype: jnp.dtype, sharding: Any) -> Any:
    return jax.jit(lambda arrays: weight.decode(arrays, dtype), out_shardings=sharding)
