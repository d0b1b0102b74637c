"""The compiled program of a trace or a dump: kind, part and work of its operations, its peak memory, its planned step.

The part of an operation is the `jax.named_scope` that it was traced under, in the step, in the models, or in a model of your own.
Operations that the compiler adds have no scope. A fusion takes the scope of the operations in it. Any other takes that of its
users, else that of its operands.
"""

import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import message

from jaxtrain.plan.program import assignment, collectives, hlo, roofline
from jaxtrain.plan.program.assignment import Assignment, AssignmentError
from jaxtrain.plan.program.collectives import Found
from jaxtrain.plan.program.hlo import Computation, HloError, Instruction, Module
from jaxtrain.plan.program.protos import message_class
from jaxtrain.plan.program.work import FREE, FUSIONS, Work, is_collective
from jaxtrain.plan.result import Rates

# Kinds of time. They add up to the step.
KINDS = ("matmul", "attention", "memory-bound", "copies", "exposed communication", "exposed host copies", "idle")
LINKS = ("communication", "host copies")  # kinds that run beside computation: overlapped, else exposed
NO_SCOPE = "no scope"
CONTROL = ("while", "conditional", "call")  # the time of these is that of the operations in them
ONCE = ("optimizer", "gather", "reduce", "accumulate")  # parts outside of forward and backward
GIB = 2**30
LARGEST = 12  # arrays listed at the peak
MOST = 10_000  # stretches in a lane of a timeline

_KIND_OF_WORK = {
    "gemm": "matmul",
    "attention": "attention",
    "memory": "memory-bound",
    "": "memory-bound",
    "communication": "communication",
    "host": "host copies",
}
_COPIES = frozenset(("copy", "transpose", "bitcast", "reshape", "copy-start", "parameter", "tuple"))
# Kernels that the trace names no operation for, by their own names.
_KERNELS = (
    (re.compile(r"nccl", re.I), "communication"),
    (re.compile(r"memcpyH2D|memcpyD2H", re.I), "host copies"),
    (re.compile(r"memcpy|memset", re.I), "copies"),
    (re.compile(r"fmha|flash|attention|sdpa", re.I), "attention"),
    (re.compile(r"gemm|cutlass|cublas|nvjet|xmma", re.I), "matmul"),
)


@dataclasses.dataclass(frozen=True)
class Operation:
    """Kind, origin and work of one operation of a program."""

    kind: str  # one of KINDS without "exposed", or of LINKS
    part: str
    phase: str  # forward | backward | recompute | "" (once a step)
    label: str  # named scopes, and the operation in them
    source: str  # file:line
    work: Work | None = None  # of one launch; None if unknown


class Stretch(NamedTuple):
    """A piece of a timeline. Times are ms since the step began."""

    start: float
    end: float
    kind: str  # one of KINDS or LINKS
    part: str
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One step on one device."""

    title: str
    ms: float
    lanes: dict[str, tuple[Stretch, ...]]


@dataclasses.dataclass(frozen=True)
class Planned:
    """The traced program as a plan times it, at the rates of its GPU."""

    step_ms: float
    by_kind: dict[str, float]  # ms; sums to step_ms
    by_part: dict[str, float]  # ms; sums to step_ms
    rates: str
    timeline: Timeline


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """Memory of one device at the peak, by XLA's buffer assignment."""

    peak_gib: float
    arguments_gib: float
    by_part: dict[str, float]  # GiB; sums to peak_gib
    largest: tuple[tuple[float, str, str, str], ...]  # GiB, part, shape, source


@dataclasses.dataclass(frozen=True)
class Summary:
    """Work of a program in a step on one device, and its peak memory."""

    name: str
    by_part: dict[str, dict[str, tuple[int, float, float]]]  # part -> kind -> launches, GFLOP, GB
    unread: tuple[str, ...]  # operations whose work is unknown, and why
    memory: PeakMemory | None  # None without a buffer assignment


# ---- Reading


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program."""

    module: Module
    operations: dict[str, Operation]  # by instruction
    wires: dict[str, Found]  # bytes that collectives send, by instruction
    unread: tuple[str, ...]
    assignment: Assignment | None


@functools.cache
def _hlo_proto() -> Any:
    return message_class("hlo", {"Hlo": {"module": (1, bytes)}}, "Hlo")


def read_proto(proto: bytes, mesh: Mapping[str, int], gpus: int) -> Program:
    """Return the program of a serialized HloProto; see `read_text`.

    Raises:
        HloError: the bytes are no HloProto, or their program cannot be read.
    """
    from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

    try:
        module = _hlo_proto().FromString(proto).module
    except message.DecodeError as error:
        raise HloError(f"{len(proto)} bytes are no whole HloProto ({error})") from error
    text = _hlo.HloModule.from_serialized_hlo_module_proto(module).to_string()
    devices = math.prod(mesh.values())
    if devices > 1:  # the proto does not hold the number of partitions
        text = text.replace(", is_scheduled=true", f", is_scheduled=true, num_partitions={devices}", 1)
    try:
        buffers = assignment.read(proto)
    except AssignmentError:
        buffers = None  # Summary.memory is then None, and the report gives the reason
    return read_text(text, mesh, gpus, buffers)


def read_text(text: str, mesh: Mapping[str, int], gpus: int, buffers: Assignment | None = None) -> Program:
    """Return the program of a compiled module's text.

    Args:
        text: HLO.
        mesh: axis -> size.
        gpus: GPUs of a node.
        buffers: XLA's buffer assignment.

    Raises:
        HloError: the program cannot be read.
    """
    module = hlo.parse(text)
    unread = []
    try:
        wires = collectives.by_instruction(collectives.read(module, dict(mesh), gpus))
    except (HloError, ValueError) as error:
        wires = {}
        unread.append(f"bytes of collectives: {error}")
    inner = {c for made in module.computations.values() for i in made.instructions if i.opcode in FUSIONS for c in i.called}
    operations = {}
    for where in (c for c in module.computations.values() if c.name not in inner):
        users: dict[str, list[Instruction]] = defaultdict(list)
        for i in where.instructions:
            for operand in i.operands:
                users[operand].append(i)
        for i in where.instructions:
            # The start of an asynchronous operation stands for it.
            if i.opcode in FREE or i.opcode in CONTROL or i.opcode.endswith(("-done", "-update")):
                continue
            try:
                work = roofline.cost(module, where, i, wires)
            except HloError as error:
                work = None
                unread.append(str(error))
            name, source = _scope(module, where, users, i)
            part = part_of(name) or NO_SCOPE
            phase = phase_of(name) if part != NO_SCOPE else ""
            label = roofline.label(name) or re.sub(r"[.\d]+$", "", i.name)
            operations[i.name] = Operation(_kind(module, i, work), part, phase, label, i.source or source, work)
    return Program(module, operations, wires, tuple(unread), buffers)


def part_of(op_name: str) -> str:
    """Return the part of an operation's scope, as `mlp`, `loss`, or `layers` for the loop over layers; "" without a scope."""
    last = op_name.rsplit("/", 1)[-1]
    found = [p for p in roofline.path(op_name) if "->" not in p]  # an einsum's own text is a scope too
    if found and found[-1] in (last, last.rstrip(")")) or "/(" in op_name:
        found = found[:-1]  # the last name is the operation's
    inner = [p for p in found if p != roofline.STACK]
    return (inner or found or [""])[0]


def phase_of(op_name: str) -> str:
    """Return the pass of an operation; "" outside of the passes."""
    if part_of(op_name) in ONCE:
        return ""
    op_name = roofline.first(op_name)
    if "rematted_computation" in op_name:
        return "recompute"
    return "backward" if "transpose(" in op_name else "forward"


def by_kernel(kernel: str) -> Operation:
    """Return the operation of a kernel that the trace names none for, by the kernel's name."""
    kind = next((kind for pattern, kind in _KERNELS if pattern.search(kernel)), "memory-bound")
    return Operation(kind, "data" if kind == "host copies" else NO_SCOPE, "", kernel[:120], "")


def _kind(module: Module, i: Instruction, work: Work | None) -> str:
    if is_collective(module, i):
        return "communication"
    kind = _KIND_OF_WORK[work.kind] if work else by_kernel(i.attributes.get("custom_call_target", i.name)).kind
    inside = [j for c in i.called for j in module.computations[c].instructions] if i.opcode in FUSIONS else [i]
    return "copies" if kind == "memory-bound" and all(j.opcode in _COPIES for j in inside) else kind


def _scope(module: Module, where: Computation, users: Mapping[str, list[Instruction]], i: Instruction) -> tuple[str, str]:
    """Return (op_name with a scope, source) of an instruction, else of its nearest user, else of its nearest operand."""
    for neighbours in (lambda j: users.get(j.name, ()), lambda j: [where.by_name[o] for o in j.operands]):
        for j in _nearest_first(i, neighbours):
            if part_of(j.op_name):
                return j.op_name, j.source
            # Of the operations in a fusion, a matmul comes first, then the last one.
            inside = [k for c in j.called for k in module.computations[c].instructions if part_of(k.op_name)]
            if inside and j.opcode in FUSIONS:
                chosen = max(reversed(inside), key=lambda k: k.opcode in ("dot", "custom-call"))
                return chosen.op_name, chosen.source
    return "", i.source


def _nearest_first(i: Instruction, neighbours: Callable[[Instruction], Iterable[Instruction]]) -> list[Instruction]:
    reached = {i.name: i}
    order = [i]
    for j in order:  # grows while it is read
        for k in neighbours(j):
            if k.name not in reached:
                reached[k.name] = k
                order.append(k)
    return order


# ---- Work, memory and time


def summarize(program: Program) -> Summary:
    """Return work and peak memory of a step on one device.

    Raises:
        HloError: the trip count of a loop is unknown.
    """
    sums: dict[str, dict[str, tuple[int, float, float]]] = defaultdict(dict)
    for i, _, times, _ in hlo.walk(program.module):
        if operation := program.operations.get(i.name):
            work = operation.work or Work()
            launches, gflop, gb = sums[operation.part].get(operation.kind, (0, 0.0, 0.0))
            cell = (launches + times, gflop + work.flops * times / 1e9, gb + work.bytes * times / 1e9)
            sums[operation.part][operation.kind] = cell
    return Summary(program.module.name, dict(sums), program.unread, peak_memory(program))


def peak_memory(program: Program) -> PeakMemory | None:
    """Return the memory at the peak by the part that made it; None without a buffer assignment."""
    if (buffers := program.assignment) is None:
        return None
    parameters = {i.parameter_number: i for i in program.module.entry.parameters}
    arrays: list[tuple[float, str, str, str]] = []
    arguments = 0
    for allocation, kind in assignment.outside(buffers):
        name = buffers.values[allocation.values[0]].instruction
        if allocation.parameter is not None:
            arguments += allocation.size
            name = parameters[allocation.parameter].op_name or name
            classes = {"optimizer": "optimizer state", "params": "parameters", "batch": "batch"}
            kind = next((kind for text, kind in classes.items() if text in name), "other arguments")
        arrays.append((allocation.size / GIB, kind, name, ""))
    most, at_peak = -1, {}
    for size, alive in assignment.replay(buffers, assignment.device_heap(buffers)):
        if size > most:
            most, at_peak = size, {owner: list(sharing)[-1] for owner, sharing in alive.items()}
    for owner, last in at_peak.items():
        value = buffers.values[last]
        made_by = program.operations.get(value.instruction) or _passed_on(program, value.instruction)
        part = f"{made_by.part}, {made_by.phase}" if made_by.phase else made_by.part
        shape = _shape(program.module, value) or value.instruction
        arrays.append((buffers.values[owner].size / GIB, part, shape, made_by.source))
    by_part: dict[str, float] = defaultdict(float)
    for gib, part, *_ in arrays:
        by_part[part] += gib
    ordered = dict(sorted(by_part.items(), key=lambda item: -item[1]))
    return PeakMemory(sum(by_part.values()), arguments / GIB, ordered, tuple(sorted(arrays, key=lambda a: -a[0])[:LARGEST]))


def _passed_on(program: Program, name: str) -> Operation:
    """Return the operation of an array that a loop or a tuple passes on: by its own scope, else by that of the loop."""
    if owner := program.module.owners.get(name):
        i = owner.by_name[name]
        callers = [j for c in program.module.computations.values() for j in c.instructions if owner.name in j.called]
        for op_name in (i.op_name, *(j.op_name for j in callers)):
            if part := part_of(op_name):
                return Operation("memory-bound", part, phase_of(op_name), roofline.label(op_name), i.source)
    return Operation("memory-bound", NO_SCOPE, "", name, "")


def _shape(module: Module, value: assignment.Value) -> str:
    owner = module.owners.get(value.instruction)
    kind = owner.by_name[value.instruction].type if owner else ()
    for n in value.index:
        if not isinstance(kind, tuple) or n >= len(kind):
            return ""
        kind = kind[n]
    return "" if isinstance(kind, tuple) else f"{kind.dtype}[{','.join(map(str, kind.dims))}]"


def plan(program: Program, rates: Rates) -> Planned:
    """Return the step of a scheduled program at a GPU's rates.

    Raises:
        HloError: an operation cannot be timed.
    """
    lanes: dict[str, list[Stretch]] = {"planned: device": [], "planned: links": []}
    by_kind: dict[str, float] = defaultdict(float)
    by_part: dict[str, float] = defaultdict(float)

    def record(name: str, work: str, start: float, end: float) -> None:
        operation = program.operations.get(name) or by_kernel(name)
        waits = work.startswith(roofline.EXPOSED)
        kind = _KIND_OF_WORK[work.removeprefix(roofline.EXPOSED)]
        if kind == "memory-bound" and operation.kind == "copies":
            kind = "copies"
        shown = Stretch(start * 1e3, end * 1e3, f"exposed {kind}" if waits else kind, operation.part, operation.label)
        if kind in LINKS and not waits:
            lanes["planned: links"].append(shown)
            return
        lanes["planned: device"].append(shown)
        by_kind[shown.kind] += shown.end - shown.start
        by_part[shown.part] += shown.end - shown.start

    timed = roofline.predict(program.module, rates, program.wires, record)
    drawn = Timeline("planned", timed.step_ms, {name: merge(lane) for name, lane in lanes.items() if lane})
    return Planned(timed.step_ms, dict(by_kind), dict(by_part), rates.source, drawn)


def merge(lane: Iterable[Stretch], most: int = MOST) -> tuple[Stretch, ...]:
    """Return a lane with at most `most` stretches.

    Equal neighbours become one. If more than `most` are left, time is cut into equal pieces, and each shows the stretch that
    took most of it, or nothing if most of it is empty.
    """
    joined = _joined(lane)
    if len(joined) <= most:
        return tuple(joined)
    width = joined[-1].end / most
    taken: dict[int, dict[tuple[str, str, str], float]] = defaultdict(lambda: defaultdict(float))
    for s in joined:
        for piece in range(int(s.start / width), int(s.end / width) + 1):
            taken[piece][s[2:]] += max(0.0, min(s.end, (piece + 1) * width) - max(s.start, piece * width))
    shown = []
    for piece, shares in sorted(taken.items()):
        if sum(shares.values()) >= width / 2:
            shown.append(Stretch(piece * width, (piece + 1) * width, *max(shares, key=lambda key: shares[key])))
    return tuple(_joined(shown))


def _joined(lane: Iterable[Stretch]) -> list[Stretch]:
    out: list[Stretch] = []
    for s in lane:
        if out and out[-1][2:] == s[2:] and s.start - out[-1].end < 1e-6:
            s = out.pop()._replace(end=s.end)
        out.append(s)
    return out
