"""Slow steps are reported with their parts, and Python's garbage collector runs when the loop calls it."""

import gc
import re
import threading
from typing import Any

import pytest

from jaxtrain.train.timing import GarbageCollector, Patience, SlowSteps


def note(slow_steps: SlowSteps, step: int, wall_s: float, **spent: Any) -> list[str]:
    """Return the numbers of the line for a step, in the line's order; none if there is no line."""
    line = slow_steps.note(step, wall_s, **{"data_s": 0.0, "save_s": 0.0, "gc_s": 0.0, "eval_s": 0.0} | spent)
    return re.findall(r"\d+\.?\d*", line or "")


def usual(steps: int = 16, wall_s: float = 0.52) -> SlowSteps:
    slow_steps = SlowSteps()
    assert not any(note(slow_steps, step, wall_s) for step in range(1, steps + 1))
    return slow_steps


@pytest.mark.parametrize(
    ("spent", "parts"),
    [
        ({"data_s": 2.80, "save_s": 0.05}, ["2.80", "0.56", "0.05"]),  # data, device, save
        ({"data_s": 0.02, "save_s": 0.028, "gc_s": 1.0}, ["2.36", "1.00"]),  # parts of 1% or more
        ({"save_s": 0.02, "saving": 500}, ["3.39", "500"]),
        ({"data_s": 3.5}, ["3.50"]),  # parts that overlap leave no negative remainder
    ],
)
def test_a_slow_step_is_told_with_its_largest_parts_first(spent: dict[str, Any], parts: list[str]):
    assert note(usual(), 1200, 3.41, **spent) == ["1200", "3.41", "0.52", *parts]


@pytest.mark.parametrize(
    "usually, wall_s, slow",
    [(0.52, 1.04, False), (0.52, 1.05, True), (0.01, 0.25, False), (0.01, 0.27, True), (10.0, 19.0, False)],
)
def test_what_is_slow(usually: float, wall_s: float, slow: bool):
    assert bool(note(usual(wall_s=usually), 20, wall_s)) is slow
    assert not note(usual(15, usually), 16, 100.0), "too few steps to compare with"


def test_steps_with_evaluation_are_neither_compared_nor_a_measure():
    slow_steps = usual()
    assert not any(note(slow_steps, step, 100.0, eval_s=99.0) for step in range(17, 117))
    assert note(slow_steps, 117, 2.0)[:3] == ["117", "2.00", "0.52"]


def test_a_run_that_became_slower_is_reported_once():
    slow_steps = usual(64)
    told = [numbers for step in range(65, 265) if (numbers := note(slow_steps, step, 5.0))]
    assert told[0][:3] == ["65", "5.00", "0.52"]
    slower = ["5.00", "98", "0.52"]  # the steps' time now, since which step, and at the start
    assert told[-1] == slower and told.count(slower) == 1
    assert not any(note(slow_steps, step, 0.52) for step in range(265, 365)), "as fast as before"
    assert len([step for step in range(365, 465) if note(slow_steps, step, 5.0)[::2] == ["5.00", "0.52"]]) == 1


def test_lines_are_rare_and_say_what_they_left_out():
    slow_steps = usual(64)
    assert note(slow_steps, 100, 3.0)
    assert not any(note(slow_steps, step, 3.0) for step in (101, 105, 119))
    assert note(slow_steps, 120, 3.0)[-2:] == ["3", "100"], "three more since step 100"


def test_the_collector_runs_only_when_called(monkeypatch: pytest.MonkeyPatch):
    """The loop collects young objects after every fiftieth step. Afterwards the collector is on or off as before."""
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(gc, "collect", lambda *generation: calls.append(generation) or 0)
    assert gc.isenabled()
    with GarbageCollector() as collector:
        assert not gc.isenabled() and gc.get_freeze_count() > 1000
        assert [collector.step(done) for done in range(1, 50)] == [0.0] * 49
        assert calls == [()]
        assert collector.step(50) > 0 and calls == [(), (1,)]
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.disable()
    try:
        with pytest.raises(KeyError), GarbageCollector():
            raise KeyError
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_slow_start_is_told_after_a_while_again_later_and_never_after_its_end(monkeypatch: pytest.MonkeyPatch):
    told: list[float] = []
    twice = threading.Event()

    def tell(seconds: float) -> None:
        told.append(seconds)
        if len(told) == 2:
            twice.set()

    monkeypatch.setattr(Patience, "FIRST_S", 0.01)
    monkeypatch.setattr(Patience, "AGAIN_S", 0.05)
    with Patience(tell) as patience:
        patience.begin()  # a second call changes nothing
        assert twice.wait(30)
    count = len(told)
    assert 0.01 <= told[0] <= told[1] - 0.05 and not patience._thread.is_alive()
    monkeypatch.setattr(Patience, "FIRST_S", 60.0)
    with Patience(tell):
        pass
    assert len(told) == count
