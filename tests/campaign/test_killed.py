"""Runs in real processes that are killed and stopped, at chosen and random moments, equal uninterrupted runs, bit for bit."""

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import runs
from faults import Faults, dice, same, saving, steps_written
from pages import Read

from jaxtrain.metrics import goodput
from jaxtrain.report import run_page
from jaxtrain.report.run import read_run

# While the file "eval" or "save" exists, held-out data does not come, or nothing of a checkpoint reaches the disk. While the
# file "data" exists, the batches from its number on do not come.
OWN = """
import os
import threading
import time
from pathlib import Path

from jaxtrain.data.batches import open_source

HERE = Path(__file__).parent


def wait(name, step=0):
    while True:
        try:
            if step < int((HERE / name).read_text() or 0):
                return
        except FileNotFoundError:
            return
        (HERE / f"{name}.waits").touch()
        time.sleep(0.01)


def sync(handle, usual=os.fsync):
    if threading.current_thread().name.startswith("checkpoint"):
        wait("save")
    usual(handle)


class Source:
    def __init__(self, batches, split):
        self.batches, self.split = batches, split

    def __getattr__(self, name):
        return getattr(self.batches, name)

    def batch(self, step, rows=None):
        wait("eval" if self.split == "validation" else "data", step)
        return self.batches.batch(step, rows)


def source(data, split, global_batch, own):
    os.fsync = sync
    return Source(open_source(data, "synthetic", split=split, global_batch=global_batch, data_dir=""), split)
"""
STEPS = 24
TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
# (where the run is when the signal comes, the first batch that does not come, the signal)
ENDS = [("start", 3, KILL), ("save", 0, KILL), ("data", 8, TERM), ("eval", 0, INT), ("a random step", 0, KILL)]
CODES = {TERM: 75, INT: 130, KILL: -KILL}


class Recording(NamedTuple):
    """An uninterrupted run, and one that must equal it although it was ended as in ENDS before it could finish."""

    whole: Path
    hunted: Path
    codes: list[int]
    reached: list[tuple[int, int]]  # at each end: the newest step in metrics.jsonl at the signal, and the newest checkpoint
    wall_s: float
    downs_s: float  # between attempts, by the test's clock


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    own: dict[str, Any] = {"data__source": "own:source", "eval__every_steps": 6, "train__steps": STEPS}
    faults = Faults(tmp_path_factory.mktemp("with spaces"), OWN, **own, log__peak_tflops=0.1, checkpoint__keep=3)
    whole, hunted = faults.folder / "whole", faults.folder / "hunted"
    code, said = faults.start(whole).end()
    assert code == 0, said
    codes, reached, downs_s, began, ended = [], [], 0.0, time.time(), None
    for where, batch, number in ENDS:
        gate, waits = faults.folder / where, faults.folder / f"{where}.waits"
        gate = faults.folder / "data" if where == "start" else gate
        at = steps_written(hunted) + dice("killed").randint(2, 4)
        moments: dict[str, Callable[[], bool]] = {
            "start": lambda: steps_written(hunted) >= 1,
            "a random step": lambda at=at: steps_written(hunted) >= at,
        }
        gate.write_text(str(batch))
        if where not in moments:
            waits.unlink(missing_ok=True)
        elif where != "start":
            gate.unlink()
        child = faults.start(hunted)
        downs_s += time.time() - ended if ended else 0.0
        child.until(moments.get(where, waits.exists))
        before = steps_written(hunted)
        assert where != "save" or saving(hunted)
        child.process.send_signal(number)
        codes.append(child.end()[0])
        ended = time.time()
        gate.unlink(missing_ok=True)
        reached.append((before, max(runs.steps(hunted), default=0)))
    child = faults.start(hunted)
    downs_s += time.time() - ended
    child.until(lambda: "\ngoodput" in child.said)  # this line comes when the ledger is closed
    wall_s = time.time() - began
    codes.append(child.end()[0])
    return Recording(whole, hunted, codes, reached, wall_s, downs_s)


@pytest.mark.long
def test_each_attempt_ends_with_its_code_and_the_next_resumes(recording: Recording) -> None:
    """No step that was logged before a request to stop is lost."""
    assert recording.codes == [*(CODES[number] for _, _, number in ENDS), 0]
    receipt = runs.receipt(recording.hunted)
    attempts = [*receipt["attempts"], receipt]
    assert [a["exit_code"] for a in attempts] == [None if code < 0 else code for code in recording.codes]
    assert [a["resumed_from_step"] for a in attempts[1:]] == [saved or None for _, saved in recording.reached]
    assert recording.reached[0][1] == 0, "killed before the first checkpoint"
    for (where, _, number), (before, saved) in zip(ENDS, recording.reached, strict=True):
        assert number == KILL or saved >= before > 0, where


def test_metrics_weights_and_moments_are_those_of_an_uninterrupted_run(recording: Recording) -> None:
    """Each line is there once, in order. Lines of an attempt without a checkpoint are set aside."""
    assert runs.exact(recording.hunted) == runs.exact(recording.whole)
    assert len(list(recording.hunted.glob("metrics.set_aside-*.jsonl"))) == [saved for _, saved in recording.reached].count(0)
    assert same(runs.tensors(recording.hunted, STEPS), runs.tensors(recording.whole, STEPS))


def test_the_parts_are_the_wall_time(recording: Recording):
    """The times of all causes in the ledger add up to the wall time by the test's own clock, and the page has them."""
    found = goodput.summarise(goodput.read_ledger(recording.hunted / goodput.FILE))
    assert sum(found.seconds.values()) == pytest.approx(recording.wall_s, rel=0.01)
    assert found.attempts == len(ENDS) + 1 and found.steps == STEPS and found.steps_repeated >= 1
    assert (
        min(found.seconds[name] for name in ("step", "startup", "compile", "restore", "data", "save", "eval", "repeated")) > 0
    )
    assert found.seconds["down"] + found.seconds["stopped"] >= recording.downs_s - 0.5
    told = runs.receipt(recording.hunted)["goodput"]
    assert told["attempts"] == found.attempts and math.isclose(sum(told["parts_s"].values()), told["wall_s"], abs_tol=0.02)
    words = " ".join(Read(run_page.run_html([read_run(recording.hunted)])).words)
    assert all(f"{seconds:,.1f}" in words for seconds in found.seconds.values() if seconds)


def test_a_time_limit_before_the_first_step_leaves_in_time(tmp_path: Path) -> None:
    child = Faults(tmp_path).start(tmp_path / "run", train__steps=100_000, train__max_minutes="0.1")
    code, said = child.end()
    assert code == 75 and runs.receipt(tmp_path / "run")["reason"].startswith("time limit"), said
