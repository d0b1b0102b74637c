"""XLA's own buffer assignment of a compiled program, read and replayed: what is in memory on one device, and when.

XLA gives memory out before a program runs. Arguments, constants and results have an allocation each. All else lives in one
heap, as large as a simulation of the schedule found necessary: a trace of buffers that come and go. The most bytes alive in
that trace, with everything outside the heap, are XLA's peak (`memory_analysis().peak_memory_in_bytes`), byte for byte.

The heap itself is a little larger than what is alive at any time, because free space is in pieces that the next buffer does not
fit into. At run time it is allocated whole: a device gives the step arguments + heap, which is the peak and the heap's gaps.

On GPUs the assignment is not handed out with the compiled program; it stands in the dump of the module after optimization
(compiler options xla_dump_to and xla_dump_hlo_as_proto, file `*after_optimizations.hlo.pb`).
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf import message

from jaxtrain.plan.program.protos import message_class

HOST = 5  # XLA's color of pinned host memory; all others are on the device


class AssignmentError(ValueError):
    """The buffer assignment cannot be read, or says something that this reader does not understand."""


# ---- The protocol buffers of XLA, as far as they are read

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
    index: tuple[int, ...]  # which part of that instruction's result
    color: int


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """A piece of memory that the program is given as a whole."""

    size: int  # bytes
    parameter: int | None  # number of the entry's parameter that lives here, results that take over its memory included
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
    """The buffer assignment in a serialized HloProto.

    Raises AssignmentError for bytes that are no whole HloProto, that hold no assignment, or whose parts contradict each other.
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
    """Instruction id -> its name and the index of its result there, as HLO text has them.

    What runs beside the program (async-start) is in the text one instruction with its results at index 1, and in the assignment
    an instruction within a computation of its own.
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


# ---- What is alive when


def device_heap(assignment: Assignment) -> tuple[Event, ...]:
    """What comes and goes in device memory. Raises AssignmentError where the device has several heaps."""
    found = [h for h in assignment.heaps if assignment.values[h[0].value].color != HOST]
    if len(found) > 1:
        colors = sorted({assignment.values[h[0].value].color for h in found})
        raise AssignmentError(
            f"the module has {len(found)} heaps on the device (memory spaces {colors}); one is understood. "
            "Compile without options that place collectives' buffers in a memory space of their own."
        )
    return found[0] if found else ()


def replay(assignment: Assignment, heap: Sequence[Event]) -> Iterator[tuple[int, dict[int, dict[int, None]]]]:
    """After each event: bytes alive, and the values alive in each piece of memory, by the value that it was first given to.

    Memory is free when the last value that shares it ends. A value can share memory that was free for a while: it is then
    taken again. Yields the same dict each time.
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
    """Allocations on the device that last for the whole step, and what they are. A parameter's is named by the caller."""
    heap = {e.value for h in assignment.heaps for e in h}
    found = []
    for a in assignment.allocations:
        if a.color == HOST or a.is_thread_local or not heap.isdisjoint(a.values):
            continue
        found.append((a, "constants" if a.is_constant else "outputs" if a.is_live_out else "temporaries"))
    return found


def host_bytes(assignment: Assignment) -> int:
    """Pinned host memory of one device: offloaded activations, and moments that rest there."""
    return sum(a.size for a in assignment.allocations if a.color == HOST)
