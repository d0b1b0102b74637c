"""A NaN in a gradient or a parameter, or a loss spike: the step is skipped, and a replay finds the cause.

tests/proofs/test_divergence.py has a NaN in the batch.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from faults import Faults

# Name -> (settings, the bad step, words of the replay's line that name the cause).
KINDS: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "gradient": (
        {
            "data__source": "sources:marked_behind",
            "loss__name": "sources:bad_gradient",
            "mesh__stage": 2,
            "train__grad_accum": 2,
        },
        4,
        ("backward pass", "in microbatch 1"),
    ),
    "parameter": (
        {
            "optimizer__name": "sources:breaking",
            "optimizer__clip_norm": 0,
            "optimizer__lr": 1e-4,
            "train__max_skipped_steps": 3,
        },
        7,
        ("parameter params.layers.1.mlp.gate, 1 values",),
    ),
    "spike": (
        {
            "data__source": "sources:marked",
            "loss__name": "sources:spiky",
            "train__loss_spike_sigma": 8.0,
            "train__steps": 44,
        },
        42,
        ("largest gradients",),
    ),
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("divergence"), train__steps=10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_step_is_skipped_and_kept_for_a_replay(faults, kind, tmp_path, capsys):
    settings, step, cause = KINDS[kind]
    workdir = tmp_path / "run"
    code = faults.in_process(workdir, **settings)
    if kind == "parameter":  # every later step is bad too, so skipping does not help
        assert code == 76
        assert runs.steps(workdir) == [5], "nothing is saved from the bad step on"
    else:
        assert code == 0
        assert [line["skipped_steps"] for line in runs.lines(workdir)][-1] == 1
        assert all(np.isfinite(x).all() for x in runs.tensors(workdir).values())

    bundle = workdir / "replay" / f"step-{step}"
    record = json.loads((bundle / "bundle.json").read_text())
    assert (record["step"], record["batches"]) == (step, [step - 1]) and record["state_digest"]
    capsys.readouterr()
    assert faults.replay(bundle) == 0
    said = capsys.readouterr().out
    assert "same bits" in said and said.count("now: the same") == 2 and all(word in said for word in cause), said


def test_updates_that_blow_up_end_the_run(tmp_path: Path) -> None:
    how = {"optimizer__name": "sources:exploding", "optimizer__warmup_steps": 0, "train__steps": 24}
    assert runs.train(runs.small(), tmp_path / "run", **how) == 76
    assert runs.steps(tmp_path / "run") == []
