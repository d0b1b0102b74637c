"""SIGTERM in each phase: exit code 75, the state is saved, and the run resumes unchanged; on one process and on two."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import runs
from faults import Faults, Figures, same, saving, steps_written

# While a file exists, a source waits before a step, a step waits inside XLA, or held-out data does not come.
OWN = """
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtrain.data import pipeline
from jaxtrain.train.loss import cross_entropy

HERE = Path(__file__).parent


def wait(name):
    while (HERE / name).exists():
        (HERE / f"{name}.waits").touch()
        time.sleep(0.01)


class Source:
    def __init__(self, batches, split):
        self.batches, self.split = batches, split

    def __getattr__(self, name):
        return getattr(self.batches, name)

    def batch(self, step, rows=None):
        if self.split == "validation":
            wait("eval")
        elif step >= 7:
            wait("data")
        return self.batches.batch(step, rows)


def source(data, split, global_batch):
    return Source(pipeline.open_source(data, "synthetic", split=split, global_batch=global_batch, data_dir=""), split)


def loss(hidden_BTD, head_VD, batch, spec):
    def held(x):
        wait("step")
        return x

    nothing = jax.pure_callback(held, jax.ShapeDtypeStruct((), jnp.float32), batch["weights"][0, 0])
    return cross_entropy(hidden_BTD, head_VD, batch, spec) + jax.lax.stop_gradient(0 * nothing)
"""


TWO = 40  # steps of the runs with two processes


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    own: dict[str, Any] = {"data__source": "own:source", "loss__name": "own:loss", "eval__every_steps": 6, "train__steps": 14}
    return Faults(tmp_path_factory.mktemp("stop"), OWN, **own)


@pytest.fixture(scope="module")
def uninterrupted(faults: Faults) -> Path:
    code, said = faults.start(faults.folder / "whole").end()
    assert code == 0, said
    return faults.folder / "whole"


@pytest.fixture(scope="module")
def uninterrupted_two(faults: Faults) -> Path:
    """Train without a stop, by two processes with four devices each. Return the run's folder."""
    ends = [child.end() for child in faults.processes(faults.folder / "two", 2, 4, train__steps=TWO)]
    assert [code for code, _ in ends] == [0, 0], ends
    return faults.folder / "two"


def stopped_in(faults: Faults, phase: str, workdir: Path) -> tuple[int, str, int]:
    """Send SIGTERM to a run in this phase. Returns (exit code, output, newest step in metrics.jsonl at the signal)."""
    gate = faults.folder / phase
    if phase in ("data", "eval", "step"):
        gate.touch()
    options: dict[str, Any] = {"paths__cache": ""} if phase == "compile" else {}
    child = faults.start(workdir, **options)
    if phase == "compile":
        child.until(lambda: "compiling the train step" in child.said)
    elif phase == "save":
        child.until(lambda: saving(workdir))
    else:
        waits = gate.with_suffix(".waits")
        child.until(waits.exists)
        waits.unlink()
    before = steps_written(workdir)
    child.process.send_signal(signal.SIGTERM)
    if phase == "step":  # the signal is handled while the main thread waits in XLA
        child.until(lambda: "finishing this step" in child.said)
        gate.unlink()
    code, said = child.end()
    gate.unlink(missing_ok=True)
    return code, said, before


MORE = [pytest.param(phase, marks=pytest.mark.more) for phase in ("data", "step", "eval")]


@pytest.mark.parametrize("phase", ["compile", "save", *MORE])
def test_sigterm_in_each_phase(faults: Faults, uninterrupted: Path, phase: str, tmp_path: Path, figures: Figures) -> None:
    workdir = tmp_path / "run"
    code, said, before = stopped_in(faults, phase, workdir)
    assert code == 75, said
    assert "Traceback" not in said
    saved = max(runs.steps(workdir), default=0)
    assert runs.receipt(workdir)["exit_code"] == 75 and "SIGTERM" in runs.receipt(workdir)["reason"]
    if phase == "compile":
        assert saved == 0 and "there is nothing to save yet" in said
    else:
        assert saved >= before >= 0 and f"state saved at step {saved}" in said
    code, said = faults.start(workdir).end()
    assert code == 0, said
    assert same(runs.tensors(workdir), runs.tensors(uninterrupted))
    assert runs.exact(workdir) == runs.exact(uninterrupted), "an evaluation that was given up comes after all"
    figures.add(f"sigterm in {phase}", written_before=before, saved=saved)


@pytest.mark.more
def test_sigterm_to_either_of_two_processes(faults: Faults, uninterrupted_two: Path, whole: bool, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    for signalled in (0, 1) if whole else (1,):
        both = faults.processes(workdir, 2, 4, train__steps=TWO)
        target = 3 + 10 * signalled
        both[0].until(lambda at=target: steps_written(workdir) >= at)
        both[signalled].process.send_signal(signal.SIGTERM)
        ends = [child.end() for child in both]
        assert [code for code, _ in ends] == [75, 75], ends
        assert f"state saved at step {max(runs.steps(workdir))}" in ends[0][1]
        assert max(runs.steps(workdir)) == steps_written(workdir), "nothing that was told is lost"
    ends = [child.end() for child in faults.processes(workdir, 2, 4, train__steps=TWO)]
    assert [code for code, _ in ends] == [0, 0], ends
    assert same(runs.tensors(workdir), runs.tensors(uninterrupted_two))
    assert runs.exact(workdir) == runs.exact(uninterrupted_two)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.more), 1])
def test_one_of_two_processes_is_killed(
    faults: Faults, uninterrupted_two: Path, victim: int, tmp_path: Path, figures: Figures
) -> None:
    workdir = tmp_path / "run"
    both = faults.processes(workdir, 2, 4, train__steps=TWO)
    both[0].until(lambda: bool(runs.steps(workdir)) and steps_written(workdir) > 6)
    both[victim].process.kill()
    began = time.monotonic()
    code, said = both[1 - victim].end()
    took = time.monotonic() - began
    assert code == 75, said
    assert f"process {victim} (host " in said and "to be restarted" in said
    assert runs.receipt(workdir)["exit_code"] == (75 if victim else None)
    figures.add(f"process {victim} of 2 killed", seconds_until_the_other_left=round(took, 1))
    assert steps_written(workdir) < TWO
    ends = [child.end() for child in faults.processes(workdir, 2, 4, train__steps=TWO)]
    assert [code for code, _ in ends] == [0, 0], ends
    assert same(runs.tensors(workdir), runs.tensors(uninterrupted_two))
    assert runs.exact(workdir) == runs.exact(uninterrupted_two)


def test_a_time_limit_leaves_in_time(faults: Faults, tmp_path: Path) -> None:
    """A limit of two minutes ends a run after a saved step. Six seconds end it before the first step, with a message."""
    code, said = faults.start(tmp_path / "short", train__steps=100_000, train__max_minutes="0.1").end()
    assert code == 75 and re.search(r"^time limit, .*: stopping, there is nothing to save yet\.$", said, re.MULTILINE), said
    workdir = tmp_path / "run"
    code, said = faults.start(workdir, train__steps=100_000, train__max_minutes="2").end()
    assert code == 75, said
    assert "time limit" in said and max(runs.steps(workdir)) == steps_written(workdir)
