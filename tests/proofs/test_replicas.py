"""If a replica of the state has other bits than the others, the error names its device."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.step.state import TrainState
from jaxtrain.train.corruption import Corrupted, Verifier


def test_a_replica_that_differs_is_named() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    w = np.arange(64, dtype=np.float32).reshape(16, 4)

    def state_of(flipped: bool) -> TrainState:
        parts = [w[4 * (i % 4) : 4 * (i % 4) + 4].copy() for i in range(8)]  # a device array may share a NumPy array's memory
        if flipped:
            parts[5].view(np.uint32)[1, 2] ^= 1 << 9
        here = [jax.device_put(part, device) for part, device in zip(parts, mesh.devices.flat, strict=True)]
        whole = jax.make_array_from_single_device_arrays(w.shape, sharding, here)
        step = jax.device_put(np.int32(7), NamedSharding(mesh, PartitionSpec()))
        return TrainState(step, {"w": whole}, ())

    def steps(*flipped: bool) -> Any:
        results = iter(flipped)
        return Verifier(state_of(False), mesh, print).run_twice(
            lambda s, b: (state_of(next(results)), {}), state_of(False), {}, 7
        )

    steps(False, False)
    with pytest.raises(Corrupted, match=r"params\['w'\].*device 5"):
        steps(True, True)
    with pytest.raises(Corrupted, match="on device 5"):
        steps(False, True)
