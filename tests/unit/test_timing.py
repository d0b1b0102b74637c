"""Slow steps are reported with their causes, hooks are due when they say, and the garbage collector is off in the loop."""

import gc
import re

import pytest

from jaxtrain.train.loop import every_steps
from jaxtrain.train.timing import SlowSteps, collector_off


def note(slow_steps: SlowSteps, step: int, wall_s: float, saving: int | None = None, **causes: float) -> list[str]:
    """Return the numbers of the line for a step, in the line's order; none if there is no line."""
    line = slow_steps.note(step, causes | {"step": wall_s - sum(causes.values())}, saving)
    return re.findall(r"\d+\.?\d*", line or "")


def usual(steps: int = 16, wall_s: float = 0.52) -> SlowSteps:
    slow_steps = SlowSteps()
    assert not any(note(slow_steps, step, wall_s) for step in range(1, steps + 1))
    return slow_steps


@pytest.mark.parametrize(
    ("causes", "saving", "parts"),
    [
        ({"data": 2.80, "save": 0.05}, None, ["2.80", "0.56", "0.05"]),  # data, step, save
        ({"data": 0.02, "save": 0.028, "compile": 1.0}, None, ["2.36", "1.00"]),  # causes of 1% or more
        ({"save": 0.02}, 500, ["3.39", "500"]),
    ],
)
def test_a_slow_step_is_told_with_its_largest_causes_first(causes: dict[str, float], saving: int | None, parts: list[str]):
    assert note(usual(), 1200, 3.41, saving, **causes) == ["1200", "3.41", "0.52", *parts]


@pytest.mark.parametrize(
    "usually, wall_s, slow",
    [(0.52, 1.04, False), (0.52, 1.05, True), (0.01, 0.25, False), (0.01, 0.27, True), (10.0, 19.0, False)],
)
def test_what_is_slow(usually: float, wall_s: float, slow: bool):
    assert bool(note(usual(wall_s=usually), 20, wall_s)) is slow
    assert not note(usual(15, usually), 16, 100.0), "too few steps to compare with"


def test_steps_with_evaluation_are_neither_compared_nor_a_measure():
    slow_steps = usual()
    assert not any(note(slow_steps, step, 100.0, eval=99.0) for step in range(17, 117))
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


def test_the_collector_is_off_within_the_block_and_as_before_after_it():
    assert gc.isenabled()
    with collector_off():
        assert not gc.isenabled() and gc.get_freeze_count() > 1000
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.disable()
    try:
        with pytest.raises(KeyError), collector_off():
            raise KeyError
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_hook_is_due_after_every_so_many_steps():
    done: list[int] = []
    hook = every_steps(3, done.append, uses_state=False)
    for step in range(1, 10):
        if hook.due(step):
            hook.work(step)
    assert done == [3, 6, 9]
