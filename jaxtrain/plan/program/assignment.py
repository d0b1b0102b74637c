"""Read and replay XLA's buffer assignment: which values of a compiled program are in device memory at each instruction.

XLA assigns memory before a program runs. Arguments, constants and results have an allocation each. Everything else is in one
heap, sized by a simulation of the schedule: a trace of buffers that are allocated and freed. The largest sum of live bytes in
that trace, with everything outside the heap, is XLA's peak (`memory_analysis().peak_memory_in_bytes`), byte for byte.

The heap is a little larger than its largest sum of live bytes, because of fragmentation. At run time the heap is one
allocation. The allocated memory of a step is the heap and everything outside of it: the peak plus fragmentation.

On GPUs the assignment is not part of the executable. It is in the dump of the module after optimization (compiler options
xla_dump_to and xla_dump_hlo_as_proto, file `*after_optimizations.hlo.pb`).

If XLA compiled a program with cuDNN (on a GPU, or with `plan.cudnn_library`), the last result of each backward attention call
is its workspace, u8[bytes]. Without cuDNN that result is u8[0]. In that case a formula computes the workspace
(kernels.attention.cudnn.workspace_bytes), and `read_assignment` adds the workspace to the heap.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from jaxtrain.config import installed
from jaxtrain.kernels.attention.cudnn import workspace_bytes
from jaxtrain.plan.program import hlo

HOST = 5  # XLA's color of pinned host memory; all other colors are device memory


# ---- The fields of XLA's protocol buffers that are read

# Message -> field -> (number, type). A type in a list is a repeated field. All other fields are ignored.
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
    """Return a protobuf class for HloProto, built from _SCHEMA, since no installed package has that class."""
    file = descriptor_pb2.FileDescriptorProto(name="jaxtrain.proto", package="jaxtrain", syntax="proto3")
    for message_name, fields in _SCHEMA.items():
        message_type = file.message_type.add(name=message_name)
        for name, (number, kind) in fields.items():
            repeated, kind = isinstance(kind, list), kind[0] if isinstance(kind, list) else kind
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            field = message_type.field.add(name=name, number=number, label=label, type=_TYPES.get(kind, _FIELD.TYPE_MESSAGE))
            if kind not in _TYPES:
                field.type_name = f".jaxtrain.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("jaxtrain.Hlo"))


# ---- Assignment


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """An array of the program, with its size in memory."""

    size: int  # bytes
    instruction: str  # name of the instruction that computes it
    index: tuple[int, ...]  # position in that instruction's result


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of device memory outside of the heap."""

    size: int  # bytes
    parameter: int | None  # number of the entry computation's parameter; also of a result that aliases that parameter
    kind: str  # constants | outputs | temporaries; used only without a parameter
    value: int  # id of the first value in it


@dataclasses.dataclass(frozen=True, slots=True)
class HeapEvent:
    """At an instruction, a value gets memory (ALLOCATE), shares another value's memory (SHARE), or is freed (FREE)."""

    kind: int
    value: int
    instruction: str
    shares: int  # id of the value whose memory is shared; SHARE only


@dataclasses.dataclass(frozen=True)
class Assignment:
    """XLA's buffer assignment of one module."""

    values: dict[int, Value]  # by id
    heap: tuple[HeapEvent, ...]  # on the device, in the order of the schedule; a loop body occurs once
    outside: tuple[Allocation, ...]
    allocated: int  # bytes on the device, fragmentation included
    on_host: int  # bytes of pinned host memory of one device: offloaded activations and moments


def read_assignment(proto: bytes, workspace: Mapping[str, int] | None = None) -> Assignment:
    """Return the buffer assignment in a serialized HloProto.

    Args:
      workspace: instruction -> additional bytes while its call runs (`Workspace.unassigned`).

    Raises HloError if the bytes are not a complete HloProto, or the assignment is missing or contradictory. Also raises
    it if the device has several heaps, or a call with a workspace has no result in the heap.
    """
    try:
        hlo_proto = _hlo_proto().FromString(proto)
    except message.DecodeError as error:
        raise hlo.HloError(f"{len(proto)} bytes are no whole HloProto ({error}): dump the module again") from error
    if not hlo_proto.assignment.values:
        raise hlo.HloError(
            f"the HloProto of {len(proto)} bytes holds no buffer assignment: read the file *after_optimizations.hlo.pb, dumped "
            "with xla_dump_hlo_as_proto"
        )
    names = _names(hlo_proto.module)
    in_text = {i.name: names[i.id][0] for c in hlo_proto.module.computations for i in c.instructions}
    values, colors = {}, {}
    for v in hlo_proto.assignment.values:
        name, start = names[v.defined_at.instruction_id]
        values[v.id], colors[v.id] = Value(v.size, name, (*start, *v.defined_at.shape_index)), v.color

    def read_event(raw: Any) -> HeapEvent:
        valid = raw.kind in (ALLOCATE, FREE, SHARE) and raw.value in values and (raw.kind != SHARE or raw.shares in values)
        if not valid or raw.instruction not in in_text:
            raise hlo.HloError(f"heap trace: cannot read the event at {raw.instruction!r} (kind {raw.kind}, value {raw.value})")
        return HeapEvent(raw.kind, raw.value, in_text[raw.instruction], raw.shares)

    heaps = [tuple(map(read_event, t.events)) for t in hlo_proto.assignment.traces if t.events]
    heaps = [heap for heap in heaps if colors[heap[0].value] != HOST]
    if len(heaps) > 1:
        spaces = sorted({colors[heap[0].value] for heap in heaps})
        raise hlo.HloError(
            f"the module has {len(heaps)} heaps on the device (memory spaces {spaces}); one is understood. "
            "Compile without options that place collectives' buffers in a memory space of their own."
        )
    heap = heaps[0] if heaps else ()
    in_heap = {e.value for e in heap}
    # Thread-local allocations (scalars inside a reduction's function) are never in device memory.
    device = [a for a in hlo_proto.assignment.allocations if a.color != HOST and not a.is_thread_local]
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
    on_host = sum(a.size for a in hlo_proto.assignment.allocations if a.color == HOST)
    assignment = Assignment(values, heap, outside, sum(a.size for a in device), on_host)
    return _with_workspace(assignment, workspace) if workspace else assignment


def _names(module: Any) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Return instruction id -> (name of its instruction in the HLO text, index of its value in that instruction's result).

    An asynchronous call (async-start) is one instruction in the text, with its results at index 1. In the assignment such a
    call is an instruction within a separate computation.
    """
    started = {
        c: i.name
        for computation in module.computations
        for i in computation.instructions
        if i.opcode == "async-start"
        for c in i.called
    }
    names: dict[int, tuple[str, tuple[int, ...]]] = {}
    for computation in module.computations:
        alone = sum(i.opcode != "parameter" for i in computation.instructions) == 1
        for i in computation.instructions:
            names[i.id] = (started[computation.id], (1,)) if computation.id in started and alone else (i.name, ())
    return names


# ---- Replay


def replay(assignment: Assignment) -> Iterator[tuple[int, dict[int, dict[int, None]]]]:
    """Yield (live bytes, live values) after each event. Live values: first value of a buffer -> all live values in the buffer.

    A buffer is freed when the last value in it is freed. If a later value shares a freed buffer, the buffer is allocated again.
    The yielded dict is updated in place.
    """
    owner: dict[int, int] = {}
    alive: dict[int, dict[int, None]] = {}
    live_bytes = 0
    for event in assignment.heap:
        if event.kind == FREE:
            buffer = owner[event.value]
            del alive[buffer][event.value]
            if not alive[buffer]:
                del alive[buffer]
                live_bytes -= assignment.values[buffer].size
        else:
            buffer = owner.get(event.shares, event.shares) if event.kind == SHARE else event.value
            owner[event.value] = buffer
            if buffer not in alive:
                alive[buffer] = {}
                live_bytes += assignment.values[buffer].size
            alive[buffer][event.value] = None
        yield live_bytes, alive


# ---- Workspace of cuDNN's attention during its backward pass

BACKWARD = "__cudnn$fmhaSoftmaxBackward"
DETERMINISTIC = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")  # either is enough


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Workspace of cuDNN's backward attention calls on one device. Each call has a separate workspace while it runs."""

    bytes: Mapping[str, int]  # of each call, by the instruction's name
    by: str  # source of the bytes: "formula", or "cudnn 9.23.2" if the program has them

    @property
    def largest(self) -> int:
        """Return the largest workspace in bytes; 0 in a program without such calls."""
        return max(self.bytes.values(), default=0)

    @property
    def unassigned(self) -> Mapping[str, int]:
        """Return the workspaces that `read_assignment` must add to the heap: `bytes` if a formula computed them, else {}."""
        return self.bytes if self.by == "formula" else {}


def read_workspace(module: hlo.Module, options: Mapping[str, str | bool]) -> Workspace:
    """Return the workspace of a compiled program. Raises HloError for a call whose operands are not those of `_formula`.

    Args:
      options: compiler options. The workspace of a deterministic kernel has another size.
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
    """Return the workspace of a call in bytes.

    operands: queries (B, T, N, H), keys (B, S, K, H), values, softmax statistics (E, N, T); E as in `workspace_bytes`.
    """
    shapes = [o.dims for o in operands[:4] if isinstance(o, hlo.Shape)]
    if [len(dims) for dims in shapes] != [4, 4, 4, 3]:
        raise hlo.HloError(f"{call.name}: not queries, keys, values and statistics of softmax: {shapes}")
    (_, T, N, H), (_, S, K, _), _, (E, *_) = shapes
    return workspace_bytes(E, T, S, N, K, H, deterministic=deterministic)


def _with_workspace(assignment: Assignment, workspace: Mapping[str, int]) -> Assignment:
    """Return the assignment with the workspaces in its heap: each is allocated after its call's last result, then freed.

    Fragmentation is assumed to stay the same.
    """
    results = {e.instruction: at for at, e in enumerate(assignment.heap) if e.kind != FREE}  # instruction -> its last result
    if lost := workspace.keys() - results.keys():
        raise hlo.HloError(f"{min(lost)}: a call of cuDNN's backward pass with no result in the heap")
    calls = {results[name]: name for name in workspace}
    values, events = dict(assignment.values), []
    for at, event in enumerate(assignment.heap):
        events.append(event)
        if at in calls:
            value_id = max(values) + 1
            values[value_id] = Value(workspace[calls[at]], calls[at], (3,))
            events += [HeapEvent(kind, value_id, calls[at], 0) for kind in (ALLOCATE, FREE)]
    wider = dataclasses.replace(assignment, values=values, heap=tuple(events))
    before, after = (max(live_bytes for live_bytes, _ in replay(a)) for a in (assignment, wider))
    return dataclasses.replace(wider, allocated=assignment.allocated + after - before)
