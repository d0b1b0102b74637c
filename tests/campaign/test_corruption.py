"""Hardware that computes wrong results: a step that gives other bits when it is repeated ends the run."""

from pathlib import Path

import pytest
import runs
from faults import Faults, same

# A loss with noise from outside the program, as a faulty unit would add it.
OWN = """
import jax
import jax.numpy as jnp
import numpy as np
from jaxtrain.step.loss import cross_entropy

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
    for name, more in {"twice": {"train__sdc_check_every": 3, "train__deterministic": "true"}, "once": {}}.items():
        assert faults.in_process(tmp_path / name, mesh__data=2, mesh__fsdp=4, **more) == 0
    said = capsys.readouterr().out
    assert said.count("same bits on 8 devices") == 2 and "step 6 repeated" in said
    assert same(runs.tensors(tmp_path / "twice"), runs.tensors(tmp_path / "once"))


def test_a_step_that_does_not_repeat_itself_ends_the_run(faults: Faults, tmp_path: Path) -> None:
    code, said = faults.start(tmp_path / "run", loss__name="own:noisy", train__sdc_check_every=6, paths__cache="").end()
    assert code == 1, said
    assert runs.receipt(tmp_path / "run")["reason"].startswith("step 6 gave other bits")
    assert runs.steps(tmp_path / "run") == [5]
