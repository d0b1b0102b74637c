"""Hardware that computes wrong: a step that gives other bits the second time, and a replica that differs, end the run."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import runs
from faults import Faults, same
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.corruption import Corrupted, Verifier, probe
from jaxtrain.state import TrainState

# A step whose loss has noise from outside, as a faulty unit would give it.
OWN = """
import jax
import jax.numpy as jnp
import numpy as np
from jaxtrain.loss import cross_entropy

made = [0]


def noisy(hidden_BTD, head_VD, batch, spec):
    def noise(x):
        made[0] += 1
        return np.float32(1 + 1e-3 * (made[0] % 7))

    factor = jax.pure_callback(noise, jax.ShapeDtypeStruct((), jnp.float32), batch["weights"][0, 0])
    return cross_entropy(hidden_BTD, head_VD, batch, spec) * factor
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("corruption"), OWN, train__steps=8)


def test_steps_taken_twice_change_nothing(faults: Faults, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, more in {"twice": {"train__verify_every": 3, "train__deterministic": "true"}, "once": {}}.items():
        assert faults.in_process(tmp_path / name, mesh__data=2, mesh__fsdp=4, **more) == 0
    said = capsys.readouterr().out
    assert said.count("taken twice: the same bits on 8 devices; it cost ") == 2
    assert "step 6 taken twice" in said and "deterministic: nothing to do" in said
    assert same(runs.tensors(tmp_path / "twice"), runs.tensors(tmp_path / "once"))


def test_a_step_that_does_not_repeat_itself_ends_the_run(faults: Faults, tmp_path: Path) -> None:
    code, said = faults.start(tmp_path / "run", loss__name="own:noisy", train__verify_every=6, paths__cache="").end()
    assert code == 1, said
    assert "step 6 gave other bits when it was taken again" in said and "all agree about a test product" in said
    assert runs.steps(tmp_path / "run") == [5]


def test_a_replica_that_differs_is_named() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    w = np.arange(64, dtype=np.float32).reshape(16, 4)
    parts = [w[4 * (i % 4) : 4 * (i % 4) + 4].copy() for i in range(8)]
    good = state_of(w, sharding, parts)
    verifier = Verifier(good, mesh, print)
    before = verifier.by_device(good)
    verifier._replicas(before, 7)
    parts = [part.copy() for part in parts]  # on CPUs a device may hold the very memory of the array it was given
    parts[5].view(np.uint32)[1, 2] ^= 1 << 9
    bad = state_of(w, sharding, parts)
    with pytest.raises(Corrupted, match=r"after step 7, params\['w'\] on one of device 1 .*device 5 .* differs"):
        verifier._replicas(verifier.by_device(bad), 7)
    with pytest.raises(Corrupted, match=r"on device 5 \(.*\) alone"):
        verifier._compare(before, verifier.by_device(bad), 7)
    assert probe() == "all agree about a test product"


def state_of(w: np.ndarray, sharding: NamedSharding, parts: list[np.ndarray]) -> TrainState:
    devices: Any = sharding.mesh.devices
    here = [jax.device_put(part, device) for part, device in zip(parts, devices.flat, strict=True)]
    whole = jax.make_array_from_single_device_arrays(w.shape, sharding, here)
    step = jax.device_put(np.int32(7), NamedSharding(sharding.mesh, PartitionSpec()))
    return TrainState(step, {"w": whole}, ())
