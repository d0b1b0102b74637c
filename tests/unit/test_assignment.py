"""The reader of XLA's buffer assignment, on hand-made assignments. test_plan_memory.py compares it with XLA's own totals.

cuDNN's workspace by formula equals the sizes that cuDNN reports, and is part of the heap while its call runs.
"""

import pytest
from cudnn_answers import ANSWERS, near, sequences

from jaxtrain.kernels.attention import cudnn
from jaxtrain.plan.program import assignment, hlo

GAP = 5  # bytes of the heap's allocation that no value uses


def proto(events, sizes, heap=0, argument=0, colors=None, instructions=None):
    """Return HloProto bytes with one heap: its values by id with these sizes, and its events (kind, value, shared value).

    Value N is the result of instruction `iN` unless `instructions` names another.
    """
    made = assignment._hlo_proto()()
    computation = made.module.computations.add(id=1)
    named = {i: (instructions or {}).get(i, i) for i in sizes}
    for i in dict.fromkeys(named.values()):
        computation.instructions.add(name=f"i{i}", opcode="add", id=i)
    for i, size in sizes.items():
        value = made.assignment.values.add(id=i, size=size, color=(colors or {}).get(i, 0))
        value.defined_at.instruction_id = named[i]
    for color in sorted(set((colors or {0: 0}).values())):
        trace = made.assignment.traces.add()
        for kind, value, *shares in events:
            if (colors or {}).get(value, 0) == color:
                at = f"i{named[value]}"
                trace.events.add(kind=kind, value=value, instruction=at, shares=shares[0] if shares else 0)
    if heap:
        allocation = made.assignment.allocations.add(size=heap)
        for i in sizes:
            allocation.assigned.add(value=i)
    if argument:
        value = made.assignment.values.add(id=99, size=argument)
        value.defined_at.instruction_id = computation.instructions[0].id
        made.assignment.allocations.add(size=argument, is_parameter=True).assigned.add(value=99)
    made.assignment.allocations.add(size=4, is_thread_local=True)
    return made.SerializeToString()


def peak_bytes(read: assignment.Assignment) -> int:
    """Return the most bytes alive at once on the device."""
    return sum(a.size for a in read.outside) + max(held for held, _ in assignment.replay(read))


A, F, S = assignment.ALLOCATE, assignment.FREE, assignment.SHARE


@pytest.mark.parametrize(
    ("events", "sizes", "around", "peak"),
    [
        # Value 2 shares the memory of value 1, and is alive longer.
        ([(A, 1), (S, 2, 1), (F, 1), (A, 3), (F, 2), (F, 3)], {1: 100, 2: 100, 3: 10}, {"heap": 128, "argument": 1000}, 1110),
        # Freed memory is used again.
        ([(A, 1), (F, 1), (A, 3), (S, 2, 1), (F, 2), (F, 3)], {1: 100, 2: 100, 3: 10}, {}, 110),
        # Value 3 shares with value 2 the memory that value 2 shares with value 1: one piece of memory.
        ([(A, 1), (S, 2, 1), (F, 1), (S, 3, 2), (F, 2), (A, 4), (F, 3), (F, 4)], {1: 100, 2: 100, 3: 100, 4: 7}, {}, 107),
        # Value 2 is smaller than the memory that it shares. When it ends, all of that memory is free.
        ([(A, 1), (S, 2, 1), (F, 1), (F, 2), (A, 3), (F, 3)], {1: 100, 2: 60, 3: 95}, {}, 100),
        # Host memory does not count.
        ([(A, 1), (A, 2), (F, 1), (F, 2)], {1: 100, 2: 7}, {"colors": {1: assignment.HOST, 2: 0}}, 7),
    ],
)
def test_peak(events, sizes, around, peak):
    """Memory stays allocated until its last value ends. Scalars of a reduction's function are not in device memory."""
    read = assignment.read_assignment(proto(events, sizes, **around))
    assert peak_bytes(read) == peak
    assert read.allocated == around.get("heap", 0) + around.get("argument", 0)


def test_two_heaps_on_the_device_are_refused():
    with pytest.raises(hlo.HloError, match=r"\[0, 1\]"):
        assignment.read_assignment(proto([(A, 1), (A, 2)], {1: 100, 2: 7}, colors={1: 1, 2: 0}))


@pytest.mark.parametrize("event", [(3, 1), (S, 1, 9)])
def test_an_event_that_is_not_understood_is_refused(event):
    with pytest.raises(hlo.HloError, match=f"kind {event[0]}, value 1"):
        assignment.read_assignment(proto([event], {1: 100}))


# ---- cuDNN's workspace


@pytest.mark.parametrize("name", ANSWERS)
def test_the_formula_gives_what_cudnn_answered(name):
    case, answer = ANSWERS[name]
    sizes = (case[key] for key in ("T", "S", "N", "K", "H"))
    counted = cudnn.workspace_bytes(sequences(case), *sizes, deterministic=case.get("deterministic", False))
    assert near(case, answer, counted)


ONE_AFTER_ANOTHER = [(A, 1), (F, 1), (A, 2), (F, 2), (A, 3), (F, 3)]


@pytest.mark.parametrize(("taken", "peak"), [(10, 100), (59, 100), (75, 115)])
def test_workspace_is_held_during_its_call_alone(taken, peak):
    """The workspace is alive only while its call runs, beside a result of 40 bytes. At another time a value of 100 bytes is
    alive. Allocated memory exceeds the peak by GAP, with and without a workspace at the peak.
    """
    read = assignment.read_assignment(proto(ONE_AFTER_ANOTHER, {1: 100, 2: 40, 3: 70}, heap=100 + GAP), {"i2": taken})
    held = [alive for alive, _ in assignment.replay(read)]
    assert max(held) == peak and held.count(40 + taken) == 1
    assert read.allocated == peak + GAP


def test_results_that_share_memory_are_there_before_the_workspace():
    """Values 2 and 3 are results of the same call, so both are alive before its workspace is."""
    events = [(A, 1), (F, 1), (A, 2), (A, 3), (F, 2), (F, 3)]
    read = assignment.read_assignment(proto(events, {1: 100, 2: 40, 3: 30}, instructions={3: 2}), {"i2": 200})
    held = [alive for alive, _ in assignment.replay(read)]
    assert max(held) == 40 + 30 + 200 and held[-1] == 0
