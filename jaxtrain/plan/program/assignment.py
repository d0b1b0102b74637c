"""Read and replay XLA's buffer assignment of a compiled program: the values in memory on one device, and when.

XLA assigns memory before a program runs. Arguments, constants and results have an allocation each. Everything else is in one
heap, sized by a simulation of the schedule: a trace of buffers that are allocated and freed. The largest sum of live bytes in
that trace, with everything outside the heap, is XLA's peak (`memory_analysis().peak_memory_in_bytes`), byte for byte.

The heap is a little larger than the live bytes at any time: it has gaps into which the next buffer does not fit. At run time
it is allocated at once. The allocated memory of a step is arguments + heap, which is the peak and the heap's gaps.

On GPUs the assignment is not part of the executable. It is in the dump of the module after optimization (compiler options
xla_dump_to and xla_dump_hlo_as_proto, file `*after_optimizations.hlo.pb`).

A program that XLA compiled with cuDNN (on a GPU, or with `plan.cudnn_library`) has the workspace of each backward call of
attention as the call's last result, u8[bytes]. Without cuDNN that result is u8[0]. A formula then gives the workspace
(kernels.attention.cudnn.workspace_bytes), and the heap gets it.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from jaxtrain import installed
from jaxtrain.kernels.attention.cudnn import workspace_bytes
from jaxtrain.plan.program import hlo

HOST = 5  # XLA's color of pinned host memory; all others are on the device


class AssignmentError(ValueError):
    """The buffer assignment cannot be read."""


# ---- The fields of XLA's protocol buffers that are read

# Message -> field -> (number, type); a type in a list is repeated. Fields that are left out stay unread.
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


_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {int: _FIELD.TYPE_INT64, bool: _FIELD.TYPE_BOOL, str: _FIELD.TYPE_STRING}


@functools.cache
def _hlo_proto() -> Any:
    """Return the class of HloProto, made from _SCHEMA: no package ships one."""
    file = descriptor_pb2.FileDescriptorProto(name="jaxtrain.proto", package="jaxtrain", syntax="proto3")
    for message_name, fields in _SCHEMA.items():
        made = file.message_type.add(name=message_name)
        for name, (number, kind) in fields.items():
            repeated, kind = isinstance(kind, list), kind[0] if isinstance(kind, list) else kind
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            field = made.field.add(name=name, number=number, label=label, type=_TYPES.get(kind, _FIELD.TYPE_MESSAGE))
            if kind not in _TYPES:
                field.type_name = f".jaxtrain.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("jaxtrain.Hlo"))


# ---- Assignment


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """An array of the program that has memory."""

    size: int  # bytes
    instruction: str  # that computes it
    index: tuple[int, ...]  # into that instruction's result


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """Memory on the device outside of the heap."""

    size: int  # bytes
    parameter: int | None  # number of the entry's parameter, also for results that alias its memory
    kind: str  # without a parameter: constants | outputs | temporaries
    value: int  # id of the first value there


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

    values: dict[int, Value]  # by id
    heap: tuple[Event, ...]  # of the device, in the order of the schedule; the bodies of loops once
    outside: tuple[Allocation, ...]
    allocated: int  # bytes on the device, the heap's gaps included
    on_host: int  # bytes of pinned host memory of one device: offloaded activations and moments


def read(proto: bytes, workspace: Mapping[str, int] | None = None) -> Assignment:
    """Return the buffer assignment in a serialized HloProto.

    Args:
      workspace: additional bytes of calls while they run, by instruction (`Workspace.missing`).

    Raises AssignmentError for bytes that are no complete HloProto, have no assignment or a contradictory one, or have several
    heaps on the device. Also for a call with workspace and no result in the heap.
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
    values, colors = {}, {}
    for v in whole.assignment.values:
        at = v.defined_at
        if at.instruction_id not in names:
            raise AssignmentError(f"value {v.id}: instruction {at.instruction_id} is not in the module")
        name, start = names[at.instruction_id]
        values[v.id], colors[v.id] = Value(v.size, name, (*start, *at.shape_index)), v.color

    def event(e: Any) -> Event:
        known = e.kind in (ALLOCATE, FREE, SHARE) and e.value in values and (e.kind != SHARE or e.shares in values)
        if not known or e.instruction not in in_text:
            raise AssignmentError(f"heap trace: cannot read the event at {e.instruction!r} (kind {e.kind}, value {e.value})")
        return Event(e.kind, e.value, in_text[e.instruction], e.shares)

    heaps = [tuple(map(event, t.events)) for t in whole.assignment.traces if t.events]
    heaps = [heap for heap in heaps if colors[heap[0].value] != HOST]
    if len(heaps) > 1:
        spaces = sorted({colors[heap[0].value] for heap in heaps})
        raise AssignmentError(
            f"the module has {len(heaps)} heaps on the device (memory spaces {spaces}); one is understood. "
            "Compile without options that place collectives' buffers in a memory space of their own."
        )
    heap = heaps[0] if heaps else ()
    in_heap = {e.value for e in heap}
    # Scalars of a reduction's function are never in device memory.
    device = [a for a in whole.assignment.allocations if a.color != HOST and not a.is_thread_local]
    outside = tuple(
        Allocation(
            a.size,
            a.parameter_number if a.is_parameter else None,
            "constants" if a.is_constant else "outputs" if a.is_live_out else "temporaries",
            a.assigned[0].value,
        )
        for a in device
        if in_heap.isdisjoint(x.value for x in a.assigned)
    )
    on_host = sum(a.size for a in whole.assignment.allocations if a.color == HOST)
    found = Assignment(values, heap, outside, sum(a.size for a in device), on_host)
    return _with_workspace(found, workspace) if workspace else found


def _names(module: Any) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Return instruction id -> its name and the index of its result, as in HLO text.

    An asynchronous call (async-start) is one instruction in the text, with its results at index 1. In the assignment it is an
    instruction within a separate computation.
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


def replay(assignment: Assignment) -> Iterator[tuple[int, dict[int, dict[int, None]]]]:
    """Yield after each event: live bytes, and the live values in each buffer, by the value that it was allocated for.

    A buffer is free when the last value that shares it ends. A value can share a free buffer, which is then allocated again.
    Yields the same dict each time.
    """
    owner: dict[int, int] = {}
    alive: dict[int, dict[int, None]] = {}
    held = 0
    for e in assignment.heap:
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


# ---- Workspace of cuDNN's attention during its backward pass

BACKWARD = "__cudnn$fmhaSoftmaxBackward"
DETERMINISTIC = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")  # each asks cuDNN for such a kernel


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Workspace of cuDNN's backward calls on one device. Each call has its own while it runs."""

    bytes: Mapping[str, int]  # of each call, by the instruction's name
    by: str  # "formula", or "cudnn 9.23.2" if the program has it

    @property
    def largest(self) -> int:
        """Return the largest workspace in bytes; 0 in a program without such calls."""
        return max(self.bytes.values(), default=0)

    @property
    def missing(self) -> Mapping[str, int]:
        """Return the workspaces that the program itself does not contain."""
        return self.bytes if self.by == "formula" else {}


def read_workspace(module: hlo.Module, options: Mapping[str, str | bool]) -> Workspace:
    """Return the workspace of a compiled program. Raises HloError for a call whose operands have unknown shapes.

    Args:
      options: the compiler's. Deterministic kernels have another workspace.
    """
    deterministic = any(options.get(name) in (True, "true") for name in DETERMINISTIC)
    in_program, by_formula = {}, {}
    for computation in module.computations.values():
        for i in computation.instructions:
            if i.target == BACKWARD:
                in_program[i.name] = hlo.leaves(i.type)[-1].bytes
                by_formula[i.name] = _formula(i, [computation.by_name[o].type for o in i.operands], deterministic)
    if any(in_program.values()):
        version = installed.version("nvidia-cudnn-cu12") or installed.version("nvidia-cudnn-cu13") or ""
        return Workspace(in_program, f"cudnn {'.'.join(version.split('.')[:3])}".strip())
    return Workspace(by_formula, "formula")


def _formula(call: hlo.Instruction, operands: list[hlo.Type], deterministic: bool) -> int:
    """Return the bytes by the shapes of queries and keys, (B, T, N, H), and of softmax's statistics, (E, N, T)."""
    shapes = [o.dims for o in operands[:4] if isinstance(o, hlo.Shape)]
    if [len(dims) for dims in shapes] != [4, 4, 4, 3]:
        raise hlo.HloError(f"{call.name}: not queries, keys, values and statistics of softmax: {shapes}")
    (_, T, N, H), (_, S, K, _), _, (E, *_) = shapes
    return workspace_bytes(E, T, S, N, K, H, deterministic=deterministic)


def _with_workspace(assignment: Assignment, workspace: Mapping[str, int]) -> Assignment:
    """Return the assignment with workspaces in its heap, each from the call's last result on, while the call runs.

    The heap's gaps are assumed to stay as they are.
    """
    results = {e.instruction: at for at, e in enumerate(assignment.heap) if e.kind != FREE}  # the last of each instruction
    if lost := workspace.keys() - results.keys():
        raise AssignmentError(f"{min(lost)}: a call of cuDNN's backward pass with no result in the heap")
    calls = {results[name]: name for name in workspace}
    values, events = dict(assignment.values), []
    for at, event in enumerate(assignment.heap):
        events.append(event)
        if at in calls:
            new = max(values) + 1
            values[new] = Value(workspace[calls[at]], calls[at], (3,))
            events += [Event(kind, new, calls[at], 0) for kind in (ALLOCATE, FREE)]
    wider = dataclasses.replace(assignment, values=values, heap=tuple(events))
    before, after = (max(held for held, _ in replay(a)) for a in (assignment, wider))
    return dataclasses.replace(wider, allocated=assignment.allocated + after - before)
