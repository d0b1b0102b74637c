"""Time limits of a run: minutes after its launch, restarts included, or the end of a Slurm job."""

import math
from pathlib import Path

import helpers
import jax
import numpy as np
import pytest
from fakes import Clock, Turns

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.runtime import timelimit
from jaxtrain.runtime.timelimit import TimeLimit, forbid_restart, launch_time, limit_s
from jaxtrain.runtime.variables import LAUNCHED, NOTE
from jaxtrain.train.initial_state import drop_used_step


def test_minutes_count_from_the_launch() -> None:
    assert limit_s("", {}) == (math.inf, [])
    assert limit_s("10", {}, age=30.0) == (570.0, [])
    assert limit_s("10", {LAUNCHED: "1000"}, now=1090.0, age=30.0) == (510.0, []), "attempts before this one count"
    assert limit_s("auto", {"SLURM_JOB_END_TIME": "5000"}, now=4000.0) == (1000.0, [])
    assert launch_time({}) is None and launch_time({LAUNCHED: "1000"}) == 1000.0


@pytest.mark.parametrize("text", ["0", "-3", "soon", "inf", "nan", "auto"])
def test_what_is_no_limit(text: str) -> None:
    seconds, (problem,) = limit_s(text, {"SLURM_JOB_END_TIME": "tomorrow"} if text == "auto" else {})
    assert seconds == math.inf and problem.key == "train.max_minutes" and problem.value == text and problem.remedy


@pytest.mark.parametrize(
    ("seconds", "save_s", "before_s"),
    [
        (3600, 10, 80),  # a minute and two saves
        (100, 3600, 25),  # saves take longer than the whole limit: the run stops when a quarter is left
        (-5, 0, 0),  # the limit ended before this attempt started
    ],
)
def test_a_run_is_asked_in_time_for_a_save(
    seconds: float, save_s: float, before_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = Clock(), []
    monkeypatch.setattr(timelimit, "time", clock)
    limit = TimeLimit(seconds, lambda: save_s, asked.append)
    monkeypatch.setattr(limit, "_over", Turns(clock, *[lambda: None] * 4000))
    limit._wait()
    assert asked == [f"time limit, {before_s} s before it"]
    assert clock.now - 1000 == max(seconds - before_s, 1), "it looks every second"


@pytest.mark.parametrize("seconds", [math.inf, 3600])
def test_a_run_that_ends_before_its_limit_is_not_asked(seconds: float) -> None:
    with TimeLimit(seconds, lambda: 0, lambda why: pytest.fail(why)):
        pass


def test_the_launcher_hears_of_it(tmp_path: Path) -> None:
    note = tmp_path / "note"
    forbid_restart("SIGTERM", {NOTE: str(note)})
    assert not note.exists()
    forbid_restart("time limit, 60 s before it", {})
    forbid_restart("time limit, 60 s before it", {NOTE: str(note)})
    assert "train.max_minutes" in note.read_text()


def test_a_launch_goes_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With checkpoint.step=2 the first attempt restores step 2. Its restart continues from the steps saved since."""
    run = helpers.tiny({"checkpoint.step": 2})
    store = Checkpoints(tmp_path)
    for step in (2, 4):
        store.save(step, {"params.w": jax.device_put(np.ones(3, np.float32))}, {})
        store.wait()
    written = store.meta(4)["time_unix"]
    assert drop_used_step(run, store) is run, "no launcher"
    monkeypatch.setenv(LAUNCHED, str(math.ceil(written) + 5))
    assert drop_used_step(run, store) is run, "step 4 is of another launch"
    monkeypatch.setenv(LAUNCHED, str(int(written) - 5))
    assert drop_used_step(run, store).checkpoint.step == -1
    (tmp_path / "4" / "meta.json").write_text("{")
    assert drop_used_step(run, store) is run, "nothing is known of a damaged step"
    store.close()
