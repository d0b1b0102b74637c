"""Pipeline schedules: which layers a stage has, and in which tick it runs each microbatch. The tests use no arrays."""

import pytest

from jaxtrain.config.layout import Arrangement
from jaxtrain.step.stages import SCHEDULES, Schedule

CASES = [
    *[(name, stages, 1, m) for name in ("1f1b", "gpipe") for stages in (2, 3) for m in (1, 2, 4, 17)],
    *[("interleaved", stages, groups, stages * runs) for stages in (2, 4) for groups in (2, 3) for runs in (1, 3)],
]
every_schedule = pytest.mark.parametrize("case", CASES, ids=str)


def test_layers_are_stacked_group_by_group():
    assert Arrangement(8, 4).order == (0, 1, 2, 3, 4, 5, 6, 7)
    assert Arrangement(6, 4).order == (0, 1, 2, 3, 4, None, 5, None)
    # Groups of layers: 01 23 45 67. Stage 0 holds the first and the third.
    assert Arrangement(8, 2, 2).order == (0, 1, 4, 5, 2, 3, 6, 7)
    assert Arrangement(6, 2, 2).order == (0, 1, 4, None, 2, 3, 5, None)


@pytest.mark.parametrize("layers", [4, 5, 7, 8, 32])
@pytest.mark.parametrize(("stages", "groups"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_a_microbatch_passes_every_layer_once_and_in_order(layers: int, stages: int, groups: int):
    stack = Arrangement(layers, stages, groups)
    assert stack.slots == len(stack.order) == stages * groups * stack.per_group
    held = [stack.order[s * groups * stack.per_group :][: groups * stack.per_group] for s in range(stages)]
    path = [held[s][g * stack.per_group :][: stack.per_group] for g in range(groups) for s in range(stages)]
    passed = [layer for group in path for layer in group]
    assert [layer for layer in passed if layer is not None] == list(range(layers))
    filled = [sum(layer is not None for layer in group) for group in path]
    assert max(filled) - min(filled) <= 1


def done_by(s: Schedule) -> tuple[dict[tuple[int, int, int], int], dict[tuple[int, int, int], int]]:
    """Return {(stage, virtual stage, microbatch): tick} of forward and of backward passes. Fails if a pass runs twice."""
    forward, backward = {}, {}
    for stage in range(s.stages):
        for u in range(s.units):
            assert (stage, *s.forward_unit(u)) not in forward
            forward[stage, *s.forward_unit(u)] = u + stage
            assert (stage, *s.backward_unit(u)) not in backward
            backward[stage, *s.backward_unit(u)] = u + s.wait + s.stages - 1 - stage
    return forward, backward


@every_schedule
def test_every_unit_is_done_once_and_after_what_it_needs(case: tuple[str, int, int, int]):
    s = Schedule(*case)
    forward, backward = done_by(s)
    every = {(stage, g, m) for stage in range(s.stages) for g in range(s.groups) for m in range(s.microbatches)}
    assert forward.keys() == backward.keys() == every
    for stage, g, m in every:
        before = (stage - 1, g, m) if stage else (s.stages - 1, g - 1, m)
        if before in every:
            assert forward[before] < forward[stage, g, m]
            assert backward[stage, g, m] < backward[before]
        assert forward[stage, g, m] < backward[stage, g, m]  # a tick's forward and backward half are independent
    assert {*forward.values()} == {*range(s.forward_ticks)}
    assert {*backward.values()} == {*range(s.wait, s.ticks)}
    # A tick with one half takes half of the time, but a tick in which some stage does both takes all of it.
    took = sum((t < s.forward_ticks) + (t >= s.wait) for t in range(s.ticks))
    assert took == 2 * (s.units + s.stages - 1)
    assert s.bubble == pytest.approx((took - 2 * s.units) / took)


@every_schedule
def test_no_slot_is_used_twice_at_a_time(case: tuple[str, int, int, int]):
    """There are as many slots as passes wait at once on the first stage, or one more for discarded results."""
    s = Schedule(*case)
    forward, backward = done_by(s)
    by_forward, by_backward, count = s.slots
    slot = {s.forward_unit(u): by_forward[u] for u in range(s.units)}
    assert all(by_backward[w] == slot[s.backward_unit(w)] for w in range(s.units))
    assert {*by_forward} == set(range(count))
    for stage in range(s.stages):
        for i in range(count):
            held = sorted((forward[stage, *unit], backward[stage, *unit]) for unit, at in slot.items() if at == i)
            # A stage without a unit in a tick still writes into a slot.
            held += [(u + stage, u + stage) for u in range(s.units, s.forward_ticks) if by_forward[u] == i]
            held.sort()
            assert all(end < begin for (_, end), (begin, _) in zip(held, held[1:], strict=False))
    first = [(forward[0, g, m], backward[0, g, m]) for g in range(s.groups) for m in range(s.microbatches)]
    most = max(sum(begin <= t <= end for begin, end in first) for t in range(s.ticks))
    assert most <= count <= most + 1


@every_schedule
def test_the_loops_of_a_step_are_its_ticks(case: tuple[str, int, int, int]):
    s = Schedule(*case)
    run = [phase.shift(i * s.stages * s.groups) for count, phases in s.rounds for i in range(count) for phase in phases]
    assert [t for phase in run for t in phase.ticks] == list(range(s.ticks))
    for phase in run:
        for t in phase.ticks:
            assert (phase.forward, phase.backward) == (t < s.forward_ticks, t >= s.wait)
    # Ticks of the last stage's units of its last group, and of the first stage's units of its first group.
    leave = [u + s.stages - 1 for u in range(s.units) if s.forward_unit(u)[0] == s.groups - 1]
    enter = [w + s.wait + s.stages - 1 for w in range(s.units) if s.backward_unit(w)[0] == 0]
    assert [t for phase in run if phase.leaves for t in phase.ticks] == leave
    ends = {t for phase in run if phase.ends for t in phase.ticks}
    assert ends >= {*enter} | {u - 1 for u in range(1, s.units) if s.forward_unit(u)[0] == 0}


def test_in_flight_microbatches_are_bounded_by_the_stages():
    assert {case[0] for case in CASES} == set(SCHEDULES)
    for stages in (2, 4, 8):
        assert Schedule("1f1b", stages, 1, 64).in_flight == Schedule("1f1b", stages, 1, 512).in_flight == 2 * stages
        assert Schedule("gpipe", stages, 1, 64).in_flight >= 64
        for groups in (2, 3):
            few, many = (Schedule("interleaved", stages, groups, runs * stages) for runs in (8, 64))
            assert few.slots[2] == many.slots[2] == (groups + 1) * stages
    # With more groups fewer microbatches are in flight, down to the number of stages.
    assert [Schedule("interleaved", 8, groups, 128).in_flight for groups in (2, 4, 8)] == [12, 10, 9]
