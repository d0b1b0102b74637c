"""Read and replay XLA's buffer assignment of a compiled program: the values in memory on one device, and when.

XLA assigns memory before a program runs. Arguments, constants and results have an allocation each. Everything else is in one
heap, sized by a simulation of the schedule: a trace of buffers that are allocated and freed. The most bytes alive in that
trace, with everything outside the heap, are XLA's peak (`memory_analysis().peak_memory_in_bytes`), byte for byte.

The heap is a little larger than the bytes alive at any time: it has gaps into which the next buffer does not fit. At run time
it is allocated at once. The allocated memory of a step is arguments + heap, which is the peak and the heap's gaps.

On GPUs the assignment is not part of the executable. It is in the dump of the module after optimization (compiler options
xla_dump_to and xla_dump_hlo_as_proto, file `*after_optimizations.hlo.pb`).
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf import message

from jaxtrain.plan.program.protos import message_class

HOST = 5  # XLA's color of pinned host memory; all others are on the device


class AssignmentError(ValueError):
    """The buffer assignment cannot be read."""


# ---- The fields of XLA's protocol buffers that are read

_SCHEMA: dict[str, dict[str, tuple[int, Any]]] = {
    "Hlo": {"module": (1, "Module"), "assignment": (3, "Assignment")},
    "Module": {"computations": (3, ["Computation"])},
    "Computation": {"instructions": (2, ["Instruction"]), "id": (5, int)},
    "Instruction": {"name": (1, str), "opcode": (2, str), "id": (35, int), "called": (38, [int])},
    "Assignment": {"values": (1, ["Value"]), "allocations": (3, ["Allocation"]), "traces": (4, ["Trace"])},
    "Value": {"id": (1, int), "size": (2, int), "defined_at": (3, "Location"), "color": (4, int)},
    "Location": {"shape_index": (3, [int]), "instruction_id": (4, int)},
    "Allocation": {
        "size": (2, int),
        "is_thread_local": (3, bool),
        "is_parameter": (5, bool),
        "parameter_number": (6, int),
        "is_live_out": (7, bool),
        "color": (8, int),
        "assigned": (9, ["Assigned"]),
        "is_constant": (12, bool),
    },
    "Assigned": {"value": (1, int)},
    "Trace": {"events": (1, ["Event"])},
    "Event": {"kind": (1, int), "value": (2, int), "instruction": (4, str), "shares": (5, int)},
}
ALLOCATE, FREE, SHARE = 0, 1, 2  # kinds of events


@functools.cache
def _hlo_proto() -> Any:
    return message_class("assignment", _SCHEMA, "Hlo")


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """An array of the program that has memory."""

    id: int
    size: int  # bytes
    instruction: str  # that makes it
    index: tuple[int, ...]  # into that instruction's result
    color: int


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that the program allocates at once."""

    size: int  # bytes
    parameter: int | None  # number of the entry's parameter here, results that alias its memory included
    is_live_out: bool
    is_constant: bool
    is_thread_local: bool  # of a reduction's scalar function; never in device memory
    color: int
    values: tuple[int, ...]  # ids


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A value's memory begins (ALLOCATE, or SHARE with another value's) or ends (FREE) at an instruction."""

    kind: int
    value: int
    instruction: str
    shares: int  # id of the value whose memory it is; SHARE only


@dataclasses.dataclass(frozen=True)
class Assignment:
    """XLA's buffer assignment of one module."""

    values: dict[int, Value]
    allocations: tuple[Allocation, ...]
    heaps: tuple[tuple[Event, ...], ...]  # in the order of the schedule; the bodies of loops once


def read(proto: bytes) -> Assignment:
    """Return the buffer assignment in a serialized HloProto.

    Raises AssignmentError for bytes that are no whole HloProto, have no assignment, or contradict themselves.
    """
    try:
        whole = _hlo_proto().FromString(proto)
    except message.DecodeError as error:
        raise AssignmentError(f"{len(proto)} bytes are no whole HloProto ({error}): dump the module again") from error
    if not whole.assignment.values:
        raise AssignmentError(
            f"the HloProto of {len(proto)} bytes holds no buffer assignment: read the file *after_optimizations.hlo.pb, dumped "
            "with xla_dump_hlo_as_proto"
        )
    names = _names(whole.module)
    in_text = {i.name: names[i.id][0] for c in whole.module.computations for i in c.instructions}
    values = {}
    for v in whole.assignment.values:
        at = v.defined_at
        if at.instruction_id not in names:
            raise AssignmentError(f"value {v.id}: instruction {at.instruction_id} is not in the module")
        name, start = names[at.instruction_id]
        values[v.id] = Value(v.id, v.size, name, (*start, *at.shape_index), v.color)

    def event(e: Any) -> Event:
        known = e.kind in (ALLOCATE, FREE, SHARE) and e.value in values and (e.kind != SHARE or e.shares in values)
        if not known or e.instruction not in in_text:
            raise AssignmentError(f"heap trace: cannot read the event at {e.instruction!r} (kind {e.kind}, value {e.value})")
        return Event(e.kind, e.value, in_text[e.instruction], e.shares)

    allocations = tuple(
        Allocation(
            a.size,
            a.parameter_number if a.is_parameter else None,
            a.is_live_out,
            a.is_constant,
            a.is_thread_local,
            a.color,
            tuple(x.value for x in a.assigned),
        )
        for a in whole.assignment.allocations
    )
    heaps = tuple(tuple(event(e) for e in t.events) for t in whole.assignment.traces if t.events)
    return Assignment(values, allocations, heaps)


def _names(module: Any) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Return instruction id -> its name and the index of its result there, as HLO text has them.

    An asynchronous call (async-start) is one instruction in the text, with its results at index 1. In the assignment it is an
    instruction within a computation of its own.
    """
    started = {
        c: i.name for made in module.computations for i in made.instructions if i.opcode == "async-start" for c in i.called
    }
    names: dict[int, tuple[str, tuple[int, ...]]] = {}
    for made in module.computations:
        alone = sum(i.opcode != "parameter" for i in made.instructions) == 1
        for i in made.instructions:
            names[i.id] = (started[made.id], (1,)) if made.id in started and alone else (i.name, ())
    return names


# ---- Replay


def device_heap(assignment: Assignment) -> tuple[Event, ...]:
    """Return the events of the device's heap. Raises AssignmentError if the device has several heaps."""
    found = [h for h in assignment.heaps if assignment.values[h[0].value].color != HOST]
    if len(found) > 1:
        colors = sorted({assignment.values[h[0].value].color for h in found})
        raise AssignmentError(
            f"the module has {len(found)} heaps on the device (memory spaces {colors}); one is understood. "
            "Compile without options that place collectives' buffers in a memory space of their own."
        )
    return found[0] if found else ()


def replay(assignment: Assignment, heap: Sequence[Event]) -> Iterator[tuple[int, dict[int, dict[int, None]]]]:
    """Yield after each event: bytes alive, and the values alive in each buffer, by the value that it was allocated for.

    A buffer is free when the last value that shares it ends. A value can share a buffer that was free for a while: it is then
    allocated again. Yields the same dict each time.
    """
    owner: dict[int, int] = {}
    alive: dict[int, dict[int, None]] = {}
    held = 0
    for e in heap:
        if e.kind == FREE:
            at = owner[e.value]
            del alive[at][e.value]
            if not alive[at]:
                del alive[at]
                held -= assignment.values[at].size
        else:
            at = owner.get(e.shares, e.shares) if e.kind == SHARE else e.value
            owner[e.value] = at
            if at not in alive:
                alive[at] = {}
                held += assignment.values[at].size
            alive[at][e.value] = None
        yield held, alive


def outside(assignment: Assignment) -> list[tuple[Allocation, str]]:
    """Return the allocations on the device outside of the heap, with their class. The caller classifies a parameter's."""
    heap = {e.value for h in assignment.heaps for e in h}
    found = []
    for a in assignment.allocations:
        if a.color == HOST or a.is_thread_local or not heap.isdisjoint(a.values):
            continue
        found.append((a, "constants" if a.is_constant else "outputs" if a.is_live_out else "temporaries"))
    return found


def host_bytes(assignment: Assignment) -> int:
    """Return the bytes of pinned host memory of one device: offloaded activations and moments."""
    return sum(a.size for a in assignment.allocations if a.color == HOST)
