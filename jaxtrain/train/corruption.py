"""Silent data corruption: a repeated step must give the same bits, and replicas must agree.

Both checks compare digests of each device's shards (checkpoint/digests.py). Repeating a step needs a deterministic program: on
GPUs, train.deterministic.
"""

import collections
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import digests
from jaxtrain.step import state
from jaxtrain.step.stacks import ON_HOST
from jaxtrain.step.state import TrainState

PROBE = 512  # rows and columns of the matrices that each device multiplies after a mismatch


class Corrupted(RuntimeError):
    """The same computation gave different bits, or replicas differ. The message names the devices that differ."""


class Verifier:
    """Runs steps twice and compares the results.

    abstract: shapes, dtypes and shardings of the state. mesh: its mesh. say: writes a line to the log.
    """

    def __init__(self, abstract: TrainState, mesh: jax.sharding.Mesh, say: Callable[[str], None]):
        self._abstract, self._mesh, self._say = abstract, mesh, say
        self._names, leaves = zip(*_leaves(abstract), strict=True)
        self._specs = [a.sharding.spec for a in leaves]
        local = jax.shard_map(
            lambda *xs: jnp.stack([digests.digest_sums(x)[:2] for x in xs])[None],
            mesh=mesh,
            in_specs=tuple(self._specs),
            out_specs=P(mesh.axis_names),
            check_vma=False,
        )
        self._digests = jax.jit(local, out_shardings=NamedSharding(mesh, P()))

    def by_device(self, current: TrainState) -> np.ndarray:
        """Return the first two sums of the digest of each device's shard of each tensor, u32 (devices, tensors, 2)."""
        return np.asarray(self._digests(*(x for _, x in _leaves(current))))

    def run_twice(self, train_step: Any, current: TrainState, batch: Any, done: int) -> tuple[TrainState, Any]:
        """Return the result of `train_step(current, batch)` after two executions gave the same bits. `current` is donated.

        During the first execution, a copy of the state is in host memory, so devices need no more memory than for one step.
        done: number of the step, for messages.
        Raises Corrupted if the two results differ, or if replicas of a shard differ after the step.
        """
        jax.block_until_ready(current)
        began = time.perf_counter()
        copies = state.to_tensors(current)
        jax.block_until_ready(copies)
        copied = time.perf_counter()
        first = self.by_device(train_step(current, batch)[0])
        once = time.perf_counter()
        shardings = {name: a.sharding for name, a in state.abstract_tensors(self._abstract).items()}
        restored = state.from_tensors(self._abstract, {name: jax.device_put(x, shardings[name]) for name, x in copies.items()})
        del copies
        result, values = train_step(restored, batch)
        second = self.by_device(result)
        self._compare(first, second, done)
        self._check_replicas(second, done)
        extra = time.perf_counter() - began - (once - copied)
        self._say(f"step {done} repeated: the same bits on {self._mesh.size} devices; it cost {extra:.2f} s more than one step")
        return result, values

    def _compare(self, first: np.ndarray, second: np.ndarray, done: int) -> None:
        mismatch = (first != second).any(axis=2)
        if not mismatch.any():
            return
        device_indices = np.flatnonzero(mismatch.any(axis=1))
        names = [self._names[i] for i in np.flatnonzero(mismatch.any(axis=0))]
        devices = [self._mesh.devices.flat[i] for i in device_indices]
        if len(devices) < self._mesh.size:
            device_text = f"on {_list_devices(devices)} alone"
        else:
            device_text = f"on all devices, as sums over devices spread it; each by itself: {compare_matmuls()}"
        raise Corrupted(
            f"step {done} gave other bits when it was repeated, {device_text} ({len(names)} tensors, among them {names[0]}). "
            "Nothing is saved from here. Take the device out of service (docs/checkpoints.md)."
        )

    def _check_replicas(self, sums: np.ndarray, done: int) -> None:
        coordinates = np.indices(self._mesh.devices.shape).reshape(self._mesh.devices.ndim, -1)
        for i, (name, spec) in enumerate(zip(self._names, self._specs, strict=True)):
            used = {a for entry in spec if entry for a in ((entry,) if isinstance(entry, str) else entry)}
            axes = [d for d, axis in enumerate(self._mesh.axis_names) if axis in used]
            groups = collections.defaultdict(list)
            for device in range(self._mesh.size):
                groups[tuple(coordinates[axes, device].tolist())].append(device)
            for group in groups.values():
                bits = [tuple(sums[device, i].tolist()) for device in group]
                usual, times = collections.Counter(bits).most_common(1)[0]
                odd = [self._mesh.devices.flat[d] for d, b in zip(group, bits, strict=True) if b != usual]
                if odd:
                    device_text = (
                        _list_devices(odd)
                        if times > len(group) / 2
                        else f"one of {_list_devices([self._mesh.devices.flat[d] for d in group])}"
                    )
                    raise Corrupted(
                        f"after step {done}, {name} on {device_text} differs from the same numbers on the other devices. "
                        "Nothing is saved from here. Take the device out of service."
                    )


def _leaves(tree: TrainState) -> list[tuple[str, Any]]:
    """Return (name, array) of every array in device memory. XLA cannot compute on arrays in host memory."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(p).lstrip("."), x) for p, x in leaves if x.sharding.memory_kind != ON_HOST]


def compare_matmuls() -> str:
    """Return a sentence: whether all devices of this process compute the same bits of one matmul."""
    key = jax.random.key(0)
    product = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: jnp.tanh(y @ x), x))
    results = {}
    for device in jax.local_devices():
        x = jax.device_put(jax.random.normal(key, (PROBE, PROBE)) / math.sqrt(PROBE), device)
        results[device] = digests.to_hex(jax.jit(digests.digest_sums)(product(x)))
    usual = collections.Counter(results.values()).most_common(1)[0][0]
    odd = [device for device, bits in results.items() if bits != usual]
    return f"{_list_devices(odd)} computes other results than the others" if odd else "all agree on a test matmul"


def _list_devices(devices: list[Any]) -> str:
    return ", ".join(f"device {d.id} ({d.device_kind}, process {d.process_index})" for d in devices)
