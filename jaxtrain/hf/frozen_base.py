"""Read the frozen base of adapters onto devices: as it is, or in fewer bits (`lora.base`).

Weights are read some at a time, and each is encoded and freed before the next ones are read. So neither the devices nor the
host ever hold the model in bfloat16.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.hf import encoded
from jaxtrain.hf.importing import Origin, open_origin
from jaxtrain.hf.lora import Digest, missing_base_error
from jaxtrain.hf.names import PREFIX
from jaxtrain.models.hugging_face import HuggingFaceError
from jaxtrain.models.module import Definition
from jaxtrain.models.stored import StoredWeight
from jaxtrain.sharding import Placement
from jaxtrain.step.state import Tensors, split_layer

AT_ONCE = 1 << 26  # least bytes of weights, over all devices, that are read before they are encoded


@dataclasses.dataclass(frozen=True)
class BaseWeight:
    """A weight to read, and the arrays to store of it."""

    name: str  # in checkpoints
    plain: jax.ShapeDtypeStruct  # as it is read
    arrays: Tensors  # name -> array to store, which is `plain` itself without `stored`
    stored: StoredWeight | None  # how one layer's weight is stored


@dataclasses.dataclass(frozen=True)
class Base:
    """The frozen weights of a run with adapters.

    Attributes:
        tensors: by their names in checkpoints.
        digest: of the weights before they were encoded, by this run or by the import that it reads (lora.Digest).
        errors: of each weight that was encoded now, the root mean square of its error relative to that of the weight.
    """

    tensors: Tensors
    digest: str
    errors: dict[str, float]

    def report(self, base: str) -> str:
        """Return a line about the errors; "" if no weight was encoded. base: lora.base."""
        if not self.errors:
            return ""
        worst = max(self.errors, key=self.errors.__getitem__)
        mean = sum(self.errors.values()) / len(self.errors)
        most = f"{self.errors[worst]:.2%} of {worst.removeprefix(PREFIX)}"
        return f"base in {base}: {len(self.errors)} matrices, relative error {mean:.2%} in the mean, at most {most}"


def weights_to_read(wanted: Tensors, source: Origin, definition: Definition, placement: Placement) -> list[BaseWeight]:
    """Return the weights from which the wanted tensors of a base are made, in their order.

    Weights in fewer bits are read in their stored dtype, and sharded over experts or outputs, so that no block is split.
    """
    out: dict[str, BaseWeight] = {}
    for name, a in wanted.items():
        weight = name.rpartition(".")[0]
        stacked_name, layer = split_layer(weight, definition.period)
        stored = definition.stored.get(stacked_name.removeprefix(PREFIX))
        if stored is None:
            out[name] = BaseWeight(name, a, {name: a}, None)
        elif weight in out:
            out[weight].arrays[name] = a
        else:
            skip = int(layer is not None)
            shape, axes = stored.shape[skip:], stored.axes[skip:]
            source_tensor = source.stored.get(weight)
            dtype = source_tensor.dtype if source_tensor else jnp.dtype(jnp.bfloat16)
            layer_stored = dataclasses.replace(stored, shape=shape, axes=axes)
            plain = jax.ShapeDtypeStruct(shape, dtype, sharding=layer_stored.whole_blocks(placement))
            out[weight] = BaseWeight(weight, plain, {name: a}, layer_stored)
    return list(out.values())


def read_base(source: Origin, wanted: Tensors, definition: Definition, placement: Placement) -> Base:
    """Return the wanted weights of a base, named as in checkpoints, in the wanted dtypes or bits.

    wanted: the whole base. Raises CheckpointError or HuggingFaceError if the source has other tensors.
    """
    form, digest = encoded.low_bits_format(source.meta), Digest(definition.period)
    tensors: Tensors = {}
    errors: dict[str, float] = {}
    todo = weights_to_read(wanted, source, definition, placement)
    has_bits = [weight for weight in todo if weight.stored and weight.stored.format == form]
    if has_bits:
        tensors |= source.read_stored({name: a for weight in has_bits for name, a in weight.arrays.items()})
    for batch in _batches([weight for weight in todo if not weight.stored or weight.stored.format != form]):
        loaded = source.read({weight.name: weight.plain for weight in batch})
        for weight in batch:
            x = loaded.pop(weight.name)
            digest.add(weight.name, x)
            if weight.stored is None:
                tensors[weight.name] = x
                continue
            full_names = {name.rpartition(".")[2]: name for name in weight.arrays}
            layouts = tuple((suffix, weight.arrays[name].sharding) for suffix, name in full_names.items())
            arrays, error = _encoder(weight.stored, x.sharding, layouts)(x)
            # One program at a time: several at once would hold their temporary arrays, and on CPUs their collectives deadlock.
            errors[weight.name] = float(error)
            tensors |= {full_names[suffix]: array for suffix, array in arrays.items()}
    return Base(tensors, encoded.recorded_digest(source.meta) or digest.hex(), errors)


def base_digest(source: Origin, wanted: Tensors, definition: Definition, placement: Placement) -> str:
    """Return the digest of a base, by which checkpoints of adapters name it, without keeping the weights.

    wanted: as in `read_base`. Raises as `read_base` does.
    """
    if recorded := encoded.recorded_digest(source.meta):
        return recorded
    digest = Digest(definition.period)
    for batch in _batches(weights_to_read(wanted, source, definition, placement), every=True):
        for name, x in source.read({weight.name: weight.plain for weight in batch}).items():
            digest.add(name, x)
    return digest.hex()


def restore_base(path: str, wanted: Tensors, definition: Definition, placement: Placement) -> Base:
    """Return `read_base` of the base in `path`. Raises CheckpointError, which names it, if it is missing or does not fit."""
    try:
        source = open_origin(path)
    except (CheckpointError, HuggingFaceError) as error:
        raise missing_base_error(path, error) from error
    try:
        return read_base(source, wanted, definition, placement)
    except (CheckpointError, HuggingFaceError) as error:
        raise CheckpointError(f"the base of these adapters: {error}") from error


def _batches(weights: list[BaseWeight], every: bool = False) -> Iterator[list[BaseWeight]]:
    """Yield the weights in batches of at least AT_ONCE bytes; unless `every`, those that keep their dtype all at once."""
    unencoded = [weight for weight in weights if weight.stored is None and not every]
    if unencoded:
        yield unencoded
    batch: list[BaseWeight] = []
    for weight in (weight for weight in weights if every or weight.stored is not None):
        batch.append(weight)
        if sum(math.prod(w.plain.shape) * w.plain.dtype.itemsize for w in batch) >= AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


@functools.cache
def _encoder(stored: StoredWeight, home: NamedSharding, layouts: tuple[tuple[str, NamedSharding], ...]) -> Any:
    """Return the jitted function from a weight, one layer of it, to (its arrays by name, the relative error).

    home: the sharding of the weight. layouts: the sharding of each array. For experts, the error is the mean of theirs. They
    are encoded one after the other, because float32 arrays of all experts would need several times the memory of their layer.
    """

    def encode(w: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        arrays = stored.encode(w)
        return arrays, stored.error(w, arrays)

    def encode_experts(w_E: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        return jax.lax.map(encode, w_E)

    if stored.experts:
        axes = P(*home.spec[:1])
        encode_shards = jax.shard_map(encode_experts, mesh=home.mesh, in_specs=axes, out_specs=(axes, axes), check_vma=False)

        def encode_weight(w: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
            arrays, errors_E = encode_shards(w)
            return arrays, jnp.mean(errors_E)

    else:
        encode_weight = encode
    return jax.jit(encode_weight, out_shardings=(dict(layouts), None))
