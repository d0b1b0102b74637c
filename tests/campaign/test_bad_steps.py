"""A NaN in the batch, a gradient or a parameter, or a loss spike: the step is skipped, and a replay finds the cause."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from faults import Faults, Figures

KINDS: dict[str, dict[str, Any]] = {
    "batch": {"data__source": "sources:poisoned"},
    "gradient": {"data__source": "sources:marked_early", "loss__name": "sources:bad_gradient"},
    "gradient on stages": {
        "data__source": "sources:marked_behind",
        "loss__name": "sources:bad_gradient",
        "mesh__stage": 2,
        "train__grad_accum": 2,
    },
    "parameter": {
        "optimizer__name": "sources:breaking",
        "optimizer__clip_norm": 0,
        "optimizer__lr": 1e-4,
        "train__max_skipped_steps": 3,
    },
    "spike": {
        "data__source": "sources:marked",
        "loss__name": "sources:spiky",
        "train__loss_spike_sigma": 8.0,
        "train__steps": 44,
    },
}
# Causes that the replay must report.
FIRST = {
    "batch": "first: the batch: weights of tokens that are not finite, in (microbatch, row) [0, 0], [0, 1]",
    "gradient": "in the backward pass, after a loss that is finite",
    "gradient on stages": ", in microbatch 1",
    "parameter": "first: parameter params.layers.1.mlp.gate, 1 values that are not finite",
    "spike": "every value is finite: the largest gradients are those of params.",
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("divergence"), train__steps=12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_step_is_skipped_and_kept_for_a_replay(
    faults: Faults, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], figures: Figures
) -> None:
    workdir, step = tmp_path / "run", 42 if kind == "spike" else 7
    code = faults.in_process(workdir, **KINDS[kind])
    said = capsys.readouterr().out
    if kind == "parameter":  # every later step is bad too, so skipping does not help
        assert code == 76 and "3 steps in a row were skipped" in said
        assert runs.steps(workdir) == [5], "nothing is saved from the bad step on"
    else:
        assert code == 0, said
        assert [line["skipped_steps"] for line in runs.lines(workdir)][-1] == 1
        assert all(np.isfinite(x).all() for x in runs.tensors(workdir).values())
    assert f"step {step}: loss" in said and ("spike" if kind == "spike" else "not finite") in said
    assert f"Data: batch {step - 1} (windows " in said

    bundle = workdir / "replay" / f"step-{step}"
    record = json.loads((bundle / "bundle.json").read_text())
    assert record["step"] == step and record["state_digest"] and record["config"]["train"]["steps"]
    assert faults.replay(bundle) == 0
    said = capsys.readouterr().out
    assert "weights: the same bits as then" in said
    assert said.count("now: the same") == 2, said
    assert f"{'spike' if kind == 'spike' else 'not finite'} again" in said
    assert FIRST[kind] in said, said
    figures.add(f"divergence: {kind}", exit_code=code, replay=said.strip().splitlines()[-1])


def test_a_learning_rate_that_blows_up_ends_the_run(tmp_path: Path) -> None:
    how = {"optimizer__groups": "*:lr=1e30", "optimizer__lr_min": 0, "optimizer__warmup_steps": 0}
    assert runs.train(runs.small(), tmp_path / "run", **how) == 76
    assert runs.steps(tmp_path / "run") == []
    assert list(runs.losses(tmp_path / "run")) == list(range(1, 10))
