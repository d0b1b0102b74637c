"""The reader of XLA's buffer assignment, on assignments made by hand. test_plan_memory.py holds it against XLA's count."""

import pytest

from jaxtrain.plan.program import assignment


def proto(events, sizes, heap=0, argument=0, colors=None):
    """HloProto bytes: values by id with these sizes, one heap's events (kind, value, shared value)."""
    made = assignment._hlo_proto()()
    computation = made.module.computations.add(id=1)
    for i, size in sizes.items():
        computation.instructions.add(name=f"i{i}", opcode="add", id=i)
        value = made.assignment.values.add(id=i, size=size, color=(colors or {}).get(i, 0))
        value.defined_at.instruction_id = i
    for color in sorted(set((colors or {0: 0}).values())):
        trace = made.assignment.traces.add()
        for kind, value, *shares in events:
            if (colors or {}).get(value, 0) == color:
                trace.events.add(kind=kind, value=value, instruction=f"i{value}", shares=shares[0] if shares else 0)
    if heap:
        allocation = made.assignment.allocations.add(size=heap)
        for i in sizes:
            allocation.assigned.add(value=i)
    if argument:
        made.assignment.allocations.add(size=argument, is_parameter=True)
    return made.SerializeToString()


def peak_bytes(read: assignment.Assignment) -> int:
    """The most bytes alive at once on the device."""
    lasting = sum(a.size for a, _ in assignment.outside(read))
    return lasting + max(held for held, _ in assignment.replay(read, assignment.device_heap(read)))


A, F, S = assignment.ALLOCATE, assignment.FREE, assignment.SHARE


@pytest.mark.parametrize(
    ("events", "sizes", "around", "peak"),
    [
        # Value 2 lives in the memory of value 1 and outlives it.
        ([(A, 1), (S, 2, 1), (F, 1), (A, 3), (F, 2), (F, 3)], {1: 100, 2: 100, 3: 10}, {"heap": 128, "argument": 1000}, 1110),
        # Memory that was free is taken again.
        ([(A, 1), (F, 1), (A, 3), (S, 2, 1), (F, 2), (F, 3)], {1: 100, 2: 100, 3: 10}, {}, 110),
        # Value 3 takes over from value 2 what that has of value 1: one piece of memory.
        ([(A, 1), (S, 2, 1), (F, 1), (S, 3, 2), (F, 2), (A, 4), (F, 3), (F, 4)], {1: 100, 2: 100, 3: 100, 4: 7}, {}, 107),
        # Value 2 is smaller than the memory it shares; its end frees all of it.
        ([(A, 1), (S, 2, 1), (F, 1), (F, 2), (A, 3), (F, 3)], {1: 100, 2: 60, 3: 95}, {}, 100),
        # Host memory is not the device's.
        ([(A, 1), (A, 2), (F, 1), (F, 2)], {1: 100, 2: 7}, {"colors": {1: assignment.HOST, 2: 0}}, 7),
    ],
)
def test_peak(events, sizes, around, peak):
    """Memory is held until its last user ends. Scalars of a reduction's function take none of the device's."""
    made = assignment._hlo_proto().FromString(proto(events, sizes, **around))
    made.assignment.allocations.add(size=4, is_thread_local=True)
    assert peak_bytes(assignment.read(made.SerializeToString())) == peak


def test_two_heaps_on_the_device_are_refused():
    read = assignment.read(proto([(0, 1), (0, 2)], {1: 100, 2: 7}, colors={1: 1, 2: 0}))
    with pytest.raises(assignment.AssignmentError, match=r"2 heaps on the device \(memory spaces \[0, 1\]\)"):
        peak_bytes(read)


def test_an_event_that_is_not_understood_is_refused():
    with pytest.raises(assignment.AssignmentError, match=r"cannot read the event at 'i1' \(kind 3, value 1\)"):
        assignment.read(proto([(3, 1)], {1: 100}))
    with pytest.raises(assignment.AssignmentError, match="kind 2, value 1"):
        assignment.read(proto([(assignment.SHARE, 1, 9)], {1: 100}))
