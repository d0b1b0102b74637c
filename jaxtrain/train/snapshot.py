"""Copies of the state for its saves. A save delays the loop at most by the time of the copies.

The programs for copies and digests are compiled in another thread during the first steps. So the first save is as fast as later
saves, except for the digests of arrays in host memory. On GPUs, copies go to pinned host memory a layer at a time, since copies
of several layers may not fit on the device. XLA keeps the host memory from save to save. Pinning it takes seconds to minutes,
so `reserve` starts it during compilation, long before the first save. On CPUs, allocating memory takes several times as long as
the copy, because the operating system clears new memory at its first use. So one program makes all copies in the memory of the
previous save's copies, and the loop does not wait for it.
"""

import concurrent.futures
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import digests
from jaxtrain.step import stacks, state
from jaxtrain.step.state import Tensors, TrainState


class Snapshot(NamedTuple):
    """Copies of a state's tensors by name, and digests of the state itself."""

    tensors: Tensors
    sums: Callable[[], dict[str, np.ndarray]]  # waits for them: uint32 (3,) by name (digests.digest_sums)
    began: float  # when copying began, by time.perf_counter()


class Leaf(NamedTuple):
    """The properties of an array of a state that its copies depend on."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding
    order: tuple[int | None, ...]  # the layer in each slot of axis 0 (state.NamedLeaf). Each layer is copied separately.

    @property
    def stacked(self) -> bool:
        return bool(self.order)

    @property
    def slots(self) -> list[int]:
        """Return the slots that hold a layer."""
        return [slot for slot, layer in enumerate(self.order) if layer is not None]

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)


class Snapshots:
    """Copies of one run's states. abstract: shapes, dtypes and shardings of the arrays in its checkpoints."""

    def __init__(self, abstract: TrainState):
        named_leaves = state.named_leaves(abstract)
        self._leaves = tuple(Leaf(n.array.shape, n.array.dtype, n.array.sharding, n.order) for n in named_leaves)
        self._names = [name for n in named_leaves for name in n.tensor_names if name is not None]
        on_cpus = all(d.platform == "cpu" for d in abstract.step.sharding.device_set)
        self._keeps = on_cpus and all(leaf.sharding.memory_kind != stacks.ON_HOST for leaf in self._leaves)
        self._last_copies: list[jax.Array] = []  # the copies of the last save; before the first save, memory for its copies
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._reserved: concurrent.futures.Future[None] | None = None
        self._prepared: concurrent.futures.Future[None] | None = None

    def reserve(self) -> None:
        """Begin to allocate the host memory of the copies, in another thread. A failure is left for the first `take` to raise.

        Does nothing on CPUs, where `prepare` allocates.
        """
        if not self._keeps and self._reserved is None and self._prepared is None:
            self._reserved = self._worker.submit(allocate, self._leaves)

    def prepare(self) -> concurrent.futures.Future[None]:
        """Begin to compile the programs, and on CPUs to allocate the copies, in another thread.

        Without this call, the first `take` does both, and waits.
        """
        if self._prepared is None:
            self._prepared = self._worker.submit(self._get_ready)
            self._worker.shutdown(wait=False)
        return self._prepared

    @property
    def ready(self) -> bool:
        """Return whether allocation and preparation are done, or were not begun."""
        return all(each is None or each.done() for each in (self._reserved, self._prepared))

    def _get_ready(self) -> None:
        if self._keeps:
            make, _ = compile_together(self._leaves)
            self._last_copies = make()
        else:
            compile_by_layer(self._leaves)

    def take(self, current: TrainState) -> Snapshot:
        """Begin to copy a state, and return the copies.

        The copies stay valid after the state is donated to the next step, until the next call of `take`. Before that call,
        readers of the copies must be done, or `forget` must be called.
        """
        # After success or failure: a full disk or too little memory may be temporary, and missing parts are made now.
        concurrent.futures.wait([self.prepare()])
        began = time.perf_counter()
        if not self._keeps:
            summed, copying = compile_by_layer(self._leaves)
            results = state.to_digests(current, summed)
            tensors: Tensors = {}
            for leaf, named_leaf in zip(self._leaves, state.named_leaves(current), strict=True):
                if leaf.stacked:
                    tensors |= {name: copying[leaf](named_leaf.array, np.int32(slot)) for slot, name in named_leaf.slot_names}
                else:
                    tensors[named_leaf.name] = copying[leaf](named_leaf.array)
            return Snapshot(tensors, lambda: state.digests_by_name(results), began)
        make, copy = compile_together(self._leaves)
        memory, self._last_copies = self._last_copies or make(), []
        self._last_copies, sums = copy([named_leaf.array for named_leaf in state.named_leaves(current)], memory)
        tensors = {name: _alias(x) for name, x in zip(self._names, self._last_copies, strict=True)}
        return Snapshot(tensors, lambda: dict(zip(self._names, np.asarray(sums), strict=True)), began)

    def forget(self) -> None:
        """Give the next copies new memory, because the previous copies may still be read."""
        self._last_copies = []


def copies(leaves: tuple[Leaf, ...]) -> list[jax.ShapeDtypeStruct]:
    """List shape, dtype and sharding of every copy, in the order of leaves and slots; on GPUs in pinned host memory."""
    abstract_copies = []
    for leaf in leaves:
        sharding = stacks.copy_sharding(leaf.shape, leaf.sharding, leaf.stacked)
        if next(iter(sharding.device_set)).platform == "gpu":
            sharding = sharding.with_memory_kind(stacks.ON_HOST)
        shape, count = (leaf.shape[1:], len(leaf.slots)) if leaf.stacked else (leaf.shape, 1)
        abstract_copies += [jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)] * count
    return abstract_copies


def allocate(leaves: tuple[Leaf, ...]) -> None:
    """Make XLA allocate the host memory of all copies once. XLA keeps this memory for the saves that follow.

    No device computes and no device memory is used: the zeros are made on the host.
    """
    buffers = [jax.make_array_from_callback(a.shape, a.sharding, functools.partial(_zeros, a)) for a in copies(leaves)]
    jax.block_until_ready(buffers)  # all copies exist at the same time, as in a save


def _zeros(a: jax.ShapeDtypeStruct, index: tuple[slice, ...] | None) -> np.ndarray:
    """Return zeros for a shard of `a`. index: the slices of the shard in `a`; None: all of `a`."""
    index = (slice(None),) * len(a.shape) if index is None else index
    return np.zeros([len(range(*dim_slice.indices(size))) for dim_slice, size in zip(index, a.shape, strict=True)], a.dtype)


@functools.lru_cache(maxsize=8)
def compile_together(leaves: tuple[Leaf, ...]) -> tuple[Any, Any]:
    """Return compiled functions: () -> memory for copies; (arrays, memory) -> (copies, their digests, uint32 (copies, 3))."""
    abstract_copies = copies(leaves)

    def copy(arrays: list[jax.Array], memory: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        del memory  # its buffers are donated to the copies
        out: list[jax.Array] = []
        sums: list[jax.Array] = []
        for array, leaf, digest in zip(arrays, leaves, summed(*arrays), strict=True):
            if leaf.stacked:
                out += [stacks.layer_at(array, slot, leaf.sharding) for slot in leaf.slots]
                sums += [digest[slot] for slot in leaf.slots]
            else:
                out.append(jnp.copy(array))
                sums.append(digest)
        return out, jnp.stack(sums)

    abstract = [leaf.abstract for leaf in leaves]
    summed = digests.digest_program(abstract, [leaf.stacked for leaf in leaves])
    shardings = [a.sharding for a in abstract_copies]
    memory = jax.jit(lambda: [jnp.zeros(a.shape, a.dtype) for a in abstract_copies], out_shardings=shardings)
    copying = jax.jit(
        copy, donate_argnums=1, keep_unused=True, out_shardings=(shardings, NamedSharding(shardings[0].mesh, P()))
    )
    return memory.lower().compile(), copying.lower(abstract, abstract_copies).compile()


@functools.lru_cache(maxsize=8)
def compile_by_layer(leaves: tuple[Leaf, ...]) -> tuple[Any, dict[Leaf, Any]]:
    """Return compiled functions: digests of all arrays in device memory (digest_program); array[, slot] -> copy, by leaf."""
    device_leaves = [leaf for leaf in leaves if leaf.sharding.memory_kind != stacks.ON_HOST]
    arrays = [leaf.abstract for leaf in device_leaves]
    summed = digests.digest_program(arrays, [leaf.stacked for leaf in device_leaves]).lower(*arrays).compile()
    layer, copying = jax.ShapeDtypeStruct((), jnp.int32), {}
    for leaf in dict.fromkeys(leaves):
        if leaf.stacked:
            copying[leaf] = stacks.copy_layer(leaf.shape, leaf.sharding).lower(leaf.abstract, layer).compile()
        else:
            copying[leaf] = stacks.copy_array(leaf.shape, leaf.sharding).lower(leaf.abstract).compile()
    return summed, copying


def _alias(x: jax.Array) -> jax.Array:
    """Return the same array as another object.

    A reader of an array may cache its host values in the array object, as Orbax does. On CPUs, these values share the array's
    memory, which then cannot be donated as long as the object exists.
    """
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [shard.data for shard in x.addressable_shards])
