"""Slow steps are reported with their parts, and Python's garbage collector runs when the loop calls it."""

import gc
from typing import Any

import pytest

from jaxtrain.train.timing import GarbageCollector, SlowSteps


def note(slow_steps: SlowSteps, step: int, wall_s: float, **spent: Any) -> str | None:
    return slow_steps.note(step, wall_s, **{"data_s": 0.0, "save_s": 0.0, "gc_s": 0.0, "eval_s": 0.0} | spent)


def usual(steps: int = 16, wall_s: float = 0.52) -> SlowSteps:
    slow_steps = SlowSteps()
    assert not any(note(slow_steps, step, wall_s) for step in range(1, steps + 1))
    return slow_steps


@pytest.mark.parametrize(
    ("spent", "said"),
    [
        ({"data_s": 2.80, "save_s": 0.05}, "data 2.80 s, device and other causes 0.56 s, save 0.05 s"),
        (
            {"data_s": 0.02, "save_s": 0.028, "gc_s": 1.0},
            "device and other causes 2.36 s, Python's collector 1.00 s",
        ),  # 1% or more
        ({"save_s": 0.02, "saving": 500}, "device and other causes 3.39 s, while step 500 was being saved"),
        ({"data_s": 3.5}, "data 3.50 s"),  # parts that overlap leave no negative remainder
    ],
)
def test_a_slow_step_is_told_with_its_largest_parts_first(spent: dict[str, Any], said: str):
    assert note(usual(), 1200, 3.41, **spent) == f"step 1200 took 3.41 s, usually 0.52 s: {said}"


@pytest.mark.parametrize(
    "usually, wall_s, slow",
    [(0.52, 1.04, False), (0.52, 1.05, True), (0.01, 0.25, False), (0.01, 0.27, True), (10.0, 19.0, False)],
)
def test_what_is_slow(usually: float, wall_s: float, slow: bool):
    assert bool(note(usual(wall_s=usually), 20, wall_s)) is slow


def test_nothing_is_said_before_enough_is_known():
    assert note(usual(15), 16, 100.0) is None
    assert note(usual(16), 17, 100.0)


def test_steps_with_evaluation_are_neither_compared_nor_a_measure():
    slow_steps = usual()
    assert not any(note(slow_steps, step, 100.0, eval_s=99.0) for step in range(17, 117))
    said = note(slow_steps, 117, 2.0)
    assert said is not None and "usually 0.52 s" in said


def test_the_median_follows_the_run():
    slow_steps = usual(64)
    said = [note(slow_steps, step, 0.9) for step in range(65, 165)]
    assert not any(said), "below twice the median of the start"
    assert "usually 0.90 s" in (note(slow_steps, 165, 3.0) or "")


def test_a_run_that_became_slower_is_reported_once():
    slow_steps = usual(64)
    said = [line for step in range(65, 265) if (line := note(slow_steps, step, 5.0))]
    assert said[0].startswith("step 65 took 5.00 s, usually 0.52 s")
    assert said[-1] == "steps take 5.00 s around step 98, and took 0.52 s at the start of this run"
    assert sum("at the start of this run" in line for line in said) == 1
    assert not any(note(slow_steps, step, 0.52) for step in range(265, 365)), "as fast as before"
    again = [line for step in range(365, 465) if "at the start" in (line := note(slow_steps, step, 5.0) or "")]
    assert len(again) == 1


def test_lines_are_rare_and_say_what_they_left_out():
    slow_steps = usual(64)
    assert note(slow_steps, 100, 3.0)
    assert not any(note(slow_steps, step, 3.0) for step in (101, 105, 119))
    assert (note(slow_steps, 120, 3.0) or "").endswith(" (3 more slow since step 100)")
    assert not (note(slow_steps, 140, 3.0) or "more").endswith("more slow since step 120)")


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
