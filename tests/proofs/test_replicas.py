"""If a replica of the state has other bits than the others, the error names its device."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.corruption import Corrupted, Verifier, compare_matmuls
from jaxtrain.train.state import TrainState


def test_a_replica_that_differs_is_named() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    w = np.arange(64, dtype=np.float32).reshape(16, 4)
    parts = [w[4 * (i % 4) : 4 * (i % 4) + 4].copy() for i in range(8)]
    good = state_of(w, sharding, parts)
    verifier = Verifier(good, mesh, print)
    before = verifier.by_device(good)
    verifier._replicas(before, 7)
    parts = [part.copy() for part in parts]  # on CPUs a device array may share the memory of the NumPy array
    parts[5].view(np.uint32)[1, 2] ^= 1 << 9
    bad = state_of(w, sharding, parts)
    with pytest.raises(Corrupted, match=r"after step 7, params\['w'\] on one of device 1 .*device 5 .* differs"):
        verifier._replicas(verifier.by_device(bad), 7)
    with pytest.raises(Corrupted, match=r"on device 5 \(.*\) alone"):
        verifier._compare(before, verifier.by_device(bad), 7)
    assert compare_matmuls() == "all agree on a test matmul"


def state_of(w: np.ndarray, sharding: NamedSharding, parts: list[np.ndarray]) -> TrainState:
    devices: Any = sharding.mesh.devices
    here = [jax.device_put(part, device) for part, device in zip(parts, devices.flat, strict=True)]
    whole = jax.make_array_from_single_device_arrays(w.shape, sharding, here)
    step = jax.device_put(np.int32(7), NamedSharding(sharding.mesh, PartitionSpec()))
    return TrainState(step, {"w": whole}, ())
