"""Runs on different numbers of processes have equal losses, and each resumes another's checkpoint with the same data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from faults import Faults
from test_dpo import pairs_file

FILES = (("train.tok", 120, 0), ("held_out.tok", 40, 1))  # (name, pairs, seed)
SHAPES = {"1 x 8": (1, 8), "2 x 4": (2, 4), "4 x 2": (4, 2)}  # processes x devices


def train(faults: Faults, workdir: Path, shape: str, steps: int) -> None:
    number, devices = SHAPES[shape]
    if number == 1:
        assert faults.in_process(workdir, train__steps=steps) == 0
        return
    ends = [child.end(timeout=300) for child in faults.processes(workdir, number, devices, train__steps=steps)]
    assert [code for code, _ in ends] == [0] * number, ends
    assert runs.receipt(workdir)["mesh"]["fsdp"] == 8, "processes of one host are one node"


def by_step(workdir: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return {(kind, step): line} of train and eval lines."""
    return {(line["kind"], line["step"]): line for line in runs.exact(workdir)}


def furthest(a: dict[tuple[str, int], dict[str, Any]], b: dict[tuple[str, int], dict[str, Any]]) -> float:
    """Return the largest relative difference of a loss between `a` and `b`. `b` may have an eval line more per attempt."""
    assert a.keys() <= b.keys() and all(kind == "eval" for kind, _ in b.keys() - a.keys())
    assert all(a[key].get("tokens") == b[key].get("tokens") for key in a)
    return max(abs(a[key]["loss"] - b[key]["loss"]) / a[key]["loss"] for key in a)


@pytest.mark.long
def test_processes_come_and_go(tmp_path: Path) -> None:
    more: dict[str, Any] = {"data__source": "stdlib", "eval__every_steps": 4, "eval__sequences": 8}
    more["optimizer__warmup_steps"] = 1  # a part of three steps needs a short warm-up
    faults = Faults(tmp_path, **more)
    train(faults, tmp_path / "one", "1 x 8", 12)
    for steps, shape in zip((4, 8, 12), ("4 x 2", "2 x 4", "1 x 8"), strict=True):  # each resumes from the one before
        train(faults, tmp_path / "moved", shape, steps)
    first = by_step(tmp_path / "one")
    worst = furthest(first, by_step(tmp_path / "moved"))
    assert worst < 1e-5, "sums over devices may differ in their last bits, the data may not"
    # With other data the losses would differ much more, as those of neighbouring steps do.
    gaps = np.diff([line["loss"] for (kind, _), line in first.items() if kind == "train"])
    assert np.abs(gaps).min() > 100 * worst


def test_references_are_the_same_on_other_processes(tmp_path: Path) -> None:
    """Two processes compute the same DPO references as one. Their run resumes on one process and reuses the references."""
    train_file, held_out = (pairs_file(tmp_path / name, count, seed) for name, count, seed in FILES)
    more = {"data__source": train_file, "data__eval_source": held_out, "loss__name": "dpo", "optimizer__warmup_steps": 1}
    faults = Faults(tmp_path, eval__every_steps=4, eval__sequences=8, **more)
    train(faults, tmp_path / "one", "1 x 8", 8)
    train(faults, tmp_path / "moved", "2 x 4", 4)
    train(faults, tmp_path / "moved", "1 x 8", 8)
    stored, other = (sorted((tmp_path / name / "reference").glob("*.npz")) for name in ("one", "moved"))
    assert len(stored) == 2
    for path, moved in zip(stored, other, strict=True):
        with np.load(path) as ours, np.load(moved) as theirs:
            assert path.name == moved.name and str(ours["about"]) == str(theirs["about"])
            np.testing.assert_allclose(ours["log_probs"], theirs["log_probs"], rtol=1e-6)
    assert furthest(by_step(tmp_path / "one"), by_step(tmp_path / "moved")) < 1e-5
    assert "to compute" not in (tmp_path / "moved" / "log.txt").read_text().split("resuming from step 4")[1]


def test_a_growing_batch_is_the_same_on_other_processes(tmp_path: Path) -> None:
    """Two processes take their rows of steps of several batches, and one process goes on within the ramp."""
    ramp = {"train__batch_ramp": "8:2,16:5", "train__global_batch": 32, "train__grad_accum": 2, "optimizer__warmup_steps": 1}
    faults = Faults(tmp_path, data__source="stdlib", eval__every_steps=4, eval__sequences=16, **ramp)
    train(faults, tmp_path / "one", "1 x 8", 8)
    train(faults, tmp_path / "moved", "2 x 4", 4)
    train(faults, tmp_path / "moved", "1 x 8", 8)
    assert furthest(by_step(tmp_path / "one"), by_step(tmp_path / "moved")) < 1e-5
