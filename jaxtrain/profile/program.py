"""The compiled program of a trace or a dump: what it does in a step by kind and part, what it holds, what a plan says of it."""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import message

from jaxtrain.plan.program import assignment, collectives, hlo, roofline
from jaxtrain.plan.program.assignment import Assignment, AssignmentError
from jaxtrain.plan.program.collectives import Found
from jaxtrain.plan.program.hlo import HloError, Module
from jaxtrain.plan.program.protos import message_class
from jaxtrain.plan.result import Rates
from jaxtrain.profile import parts
from jaxtrain.profile.measure import thinned
from jaxtrain.profile.parts import NO_SCOPE, Origin
from jaxtrain.profile.result import Held, Planned, Program, Stretch, Timeline
from jaxtrain.profile.trace import TraceError

GIB = 2**30
LISTED = 12  # arrays of what is held at the peak
_PLANNED_KIND = {
    "gemm": "GEMM",
    "attention": "attention",
    "memory": "elementwise",
    "": "elementwise",
    roofline.EXPOSED + "communication": "exposed collectives",
    roofline.EXPOSED + "host": "exposed host copies",
}
_LINK_KIND = {"communication": "collectives", "host": "host copies"}


@dataclasses.dataclass(frozen=True)
class Read:
    """A program, read once."""

    module: Module
    origins: dict[str, Origin]
    wires: dict[str, Found]
    unread: tuple[str, ...]
    assignment: Assignment | None


@functools.cache
def _hlo_proto() -> Any:
    return message_class("hlo", {"Hlo": {"module": (1, bytes)}}, "Hlo")


def read_proto(proto: bytes, mesh: Mapping[str, int], gpus: int) -> Read:
    """Of a serialized HloProto. `mesh`: axis -> size; `gpus`: of a node. Raises TraceError for bytes that are none."""
    from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

    try:
        module = _hlo_proto().FromString(proto).module
    except message.DecodeError as error:
        raise TraceError(f"{len(proto)} bytes are no whole HloProto ({error})") from error
    text = _hlo.HloModule.from_serialized_hlo_module_proto(module).to_string()
    devices = math.prod(mesh.values())
    if devices > 1:  # the number of partitions is no part of the proto
        text = text.replace(", is_scheduled=true", f", is_scheduled=true, num_partitions={devices}", 1)
    try:
        held = assignment.read(proto)
    except AssignmentError:
        held = None  # a program may travel without one; `Program.held` is None then, and the reports say so
    return read_text(text, mesh, gpus, held)


def read_text(text: str, mesh: Mapping[str, int], gpus: int, held: Assignment | None = None) -> Read:
    """Of a compiled program's text. Raises HloError for one that cannot be read."""
    module = hlo.parse(text)
    try:
        wires = collectives.by_instruction(collectives.read(module, dict(mesh), gpus))
        apart = ()
    except (HloError, ValueError) as error:
        wires, apart = {}, (f"what collectives send: {error}",)
    known, unread = parts.origins(module, wires)
    return Read(module, known, wires, (*apart, *unread), held)


def summary(read: Read) -> Program:
    """Launches, FLOPs and bytes of a step on one device, by part and kind. Raises HloError for a loop of unknown length."""
    sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0.0, 0.0]))
    for i, _, times, _ in hlo.walk(read.module):
        if (origin := read.origins.get(i.name)) is None:
            continue
        cell = sums[origin.part][origin.kind]
        cell[0] += times
        if origin.work:
            cell[1] += origin.work.flops * times / 1e9
            cell[2] += origin.work.bytes * times / 1e9
    table = {part: {kind: (int(n), f, b) for kind, (n, f, b) in kinds.items()} for part, kinds in sums.items()}
    return Program(read.module.name, table, read.unread, held(read))


def held(read: Read) -> Held | None:
    """What is in device memory at the peak, by the part that made it; None where the program has no buffer assignment."""
    if read.assignment is None:
        return None
    found, module = read.assignment, read.module
    parameters = {i.parameter_number: i for i in module.entry.parameters}
    by_part: dict[str, float] = defaultdict(float)
    largest: list[tuple[float, str, str, str]] = []

    def hold(size: int, part: str, value: assignment.Value | None, shape: str, source: str) -> None:
        by_part[part] += size / GIB
        largest.append((size / GIB, part, shape or (value.instruction if value else ""), source))

    arguments = 0
    for allocation, kind in assignment.outside(found):
        value = found.values[allocation.values[0]]
        if allocation.parameter is not None:
            argument = parameters[allocation.parameter]
            arguments += allocation.size
            hold(allocation.size, _argument(argument.op_name), value, argument.op_name, "")
        else:
            hold(allocation.size, kind, value, "", "")
    heap = assignment.device_heap(found)
    top, at_peak = -1, {}
    for held_bytes, alive in assignment.replay(found, heap):
        if held_bytes > top:
            top, at_peak = held_bytes, {owner: list(sharing)[-1] for owner, sharing in alive.items()}
    for owner, last in at_peak.items():
        value = found.values[last]
        origin = read.origins.get(value.instruction) or _maker(read, value)
        part = f"{origin.part}, {origin.phase}" if origin and origin.phase else origin.part if origin else NO_SCOPE
        hold(found.values[owner].size, part, value, _shape(module, value), origin.source if origin else "")
    ordered = sorted(by_part.items(), key=lambda item: -item[1])
    return Held(sum(by_part.values()), arguments / GIB, dict(ordered), tuple(sorted(largest, key=lambda a: -a[0])[:LISTED]))


def _argument(op_name: str) -> str:
    """`state.optimizer[...]` is optimizer state, and so on."""
    for text, name in (("optimizer", "optimizer state"), ("params", "parameters"), ("batch", "batch")):
        if text in op_name:
            return name
    return "other arguments"


def _maker(read: Read, value: assignment.Value) -> Origin | None:
    """Of what a loop or a tuple passes on: where its name says it belongs; of a loop's state, where the loop does."""
    owner = read.module.owners.get(value.instruction)
    if owner is None:
        return None
    i = owner.by_name[value.instruction]
    callers = [j for c in read.module.computations.values() for j in c.instructions if owner.name in j.called]
    for name in (i.op_name, *(j.op_name for j in callers)):
        if part := parts.part_of(name):
            return Origin("elementwise", part, parts.phase_of(name), roofline.label(name), i.source)
    return None


def _shape(module: Module, value: assignment.Value) -> str:
    owner = module.owners.get(value.instruction)
    kind = owner.by_name[value.instruction].type if owner else ()
    for n in value.index:
        if not isinstance(kind, tuple) or n >= len(kind):
            return ""
        kind = kind[n]
    return "" if isinstance(kind, tuple) else f"{kind.dtype}[{','.join(map(str, kind.dims))}]"


def plan(read: Read, rates: Rates) -> Planned:
    """The step of a scheduled program at a GPU's rates, as it would run. Raises HloError where it cannot be timed."""
    lane: list[Stretch] = []
    links: list[Stretch] = []
    by_kind: dict[str, float] = defaultdict(float)
    by_part: dict[str, float] = defaultdict(float)

    def heard(name: str, kind: str, start: float, end: float) -> None:
        origin = read.origins.get(name)
        part = origin.part if origin else NO_SCOPE
        if kind in _LINK_KIND:
            links.append(Stretch(start * 1e3, end * 1e3, _LINK_KIND[kind], part))
            return
        shown = _PLANNED_KIND[kind]
        if shown == "elementwise" and origin and origin.kind == "copies":
            shown = "copies"
        by_kind[shown] += (end - start) * 1e3
        by_part[part] += (end - start) * 1e3
        lane.append(Stretch(start * 1e3, end * 1e3, shown, part))

    timed = roofline.predict(read.module, rates, read.wires, heard)
    drawn = Timeline("planned", timed.step_ms, thinned(lane), thinned(links) if links else ())
    return Planned(timed.step_ms, dict(by_kind), dict(by_part), rates.source, drawn)


def dump(path: Path, mesh: Mapping[str, int], gpus: int) -> Read:
    """Of a file: HLO text (profile.dump_hlo, plan --hlo) or an HloProto of XLA's own dump (`*.hlo.pb`)."""
    if path.suffix == ".pb":
        return read_proto(path.read_bytes(), mesh, gpus)
    return read_text(path.read_text(), mesh, gpus)
