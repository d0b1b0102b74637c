"""What a compiled train step holds on one device, when, and of which kind: read from XLA's own buffer assignment.

XLA gives memory out before a program runs. Arguments, constants and results have an allocation each. All else lives in one
heap, as large as a simulation of the schedule found necessary: a trace of buffers that come and go. The most bytes alive in
that trace, with everything outside the heap, are XLA's peak (`memory_analysis().peak_memory_in_bytes`), byte for byte.

The heap itself is a little larger than what is alive at any time, because free space is in pieces that the next buffer does not
fit into. At run time it is allocated whole: a device gives the step arguments + heap, which is the peak + `fragmentation`.

On GPUs the assignment is not handed out with the compiled program; it stands in the dump of the module after optimization
(compiler options xla_dump_to and xla_dump_hlo_as_proto, file `*after_optimizations.hlo.pb`).
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from jaxtrain.plan import hlo
from jaxtrain.plan.result import Buffer, Memory
from jaxtrain.step import Program

HOST = 5  # XLA's color of pinned host memory; all others are on the device
GIB = 2**30
POINTS = 400  # of the timeline
LISTED = 1 << 20  # bytes from which a buffer gets its own line
FLOATS = ("bf16", "f16", "f32", "f64", "f8")


class AssignmentError(ValueError):
    """The buffer assignment cannot be read, or says something that this reader does not understand."""


# ---- The protocol buffers of XLA, as far as they are read: message -> field -> (number, type); a list where it is repeated.

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
def _message(name: str) -> Any:
    """The message class of one entry of the schema."""
    field = descriptor_pb2.FieldDescriptorProto
    types = {int: field.TYPE_INT64, bool: field.TYPE_BOOL, str: field.TYPE_STRING}
    file = descriptor_pb2.FileDescriptorProto(name="jaxtrain_buffers.proto", package="jaxtrain.buffers", syntax="proto3")
    for message_name, fields in _SCHEMA.items():
        made = file.message_type.add(name=message_name)
        for field_name, (number, kind) in fields.items():
            repeated, kind = isinstance(kind, list), kind[0] if isinstance(kind, list) else kind
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            part = made.field.add(name=field_name, number=number, label=label, type=types.get(kind, field.TYPE_MESSAGE))
            if kind not in types:
                part.type_name = f".jaxtrain.buffers.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"jaxtrain.buffers.{name}"))


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
        whole = _message("Hlo").FromString(proto)
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


def _device_heap(assignment: Assignment) -> tuple[Event, ...]:
    found = [h for h in assignment.heaps if assignment.values[h[0].value].color != HOST]
    if len(found) > 1:
        colors = sorted({assignment.values[h[0].value].color for h in found})
        raise AssignmentError(
            f"the module has {len(found)} heaps on the device (memory spaces {colors}); one is understood. "
            "Compile without options that place collectives' buffers in a memory space of their own."
        )
    return found[0] if found else ()


def _replay(assignment: Assignment, heap: Sequence[Event]) -> Iterator[tuple[int, dict[int, dict[int, None]]]]:
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


def _outside(assignment: Assignment) -> list[tuple[Allocation, str]]:
    """Allocations on the device that last for the whole step, and what they are. A parameter's is named by the caller."""
    heap = {e.value for h in assignment.heaps for e in h}
    found = []
    for a in assignment.allocations:
        if a.color == HOST or a.is_thread_local or not heap.isdisjoint(a.values):
            continue
        found.append((a, "constants" if a.is_constant else "outputs" if a.is_live_out else "temporaries"))
    return found


def peak_bytes(assignment: Assignment) -> int:
    """The most bytes alive at once on the device, as XLA counts them."""
    outside = sum(a.size for a, _ in _outside(assignment))
    return outside + max((held for held, _ in _replay(assignment, _device_heap(assignment))), default=0)


def fragmentation(assignment: Assignment) -> int:
    """Bytes of the device's heap that no buffer lives in even at the peak. The step needs them beside the peak."""
    heap = _device_heap(assignment)
    used = {e.value for e in heap}
    size = sum(a.size for a in assignment.allocations if not used.isdisjoint(a.values))
    return size - max((held for held, _ in _replay(assignment, heap)), default=0)


def host_bytes(assignment: Assignment) -> int:
    """Pinned host memory, offloaded activations that is, of one device."""
    return sum(a.size for a in assignment.allocations if a.color == HOST)


# ---- What the forward pass keeps


@dataclasses.dataclass(frozen=True)
class Kept:
    """An activation that a scan over layers stacks up for the backward pass."""

    name: str
    dtype: str
    dims: tuple[int, ...]  # (layers, ...) of all devices together
    again: bool  # kept by a forward pass that the backward pass repeats for one group of layers
    offloaded: bool  # to host memory


WEIGHT = "weight"  # what the model calls a gathered weight
AGAIN = "one group of layers, computed again"
_SAME_VALUE = ("reduce_precision", "device_put", "optimization_barrier", "convert_element_type", "copy", "sharding_constraint")


def kept_activations(program: Program) -> tuple[Kept, ...]:
    """What the train step keeps for its backward pass, read from the program before compilation, where names still stand.

    An activation without a `checkpoint_name` is called by the operation that makes it, what enters a layer "layer input",
    and a gathered weight, which only a repeated forward pass keeps, "weight".
    """
    return tuple(_kept(jax.make_jaxpr(program.train_step)(program.state, program.batch).jaxpr, "", False))


def _inside(eqn: Any) -> Iterator[Any]:
    """The programs that an operation runs."""
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                yield getattr(part, "jaxpr", part)


def _kept(jaxpr: Any, scope: str, again: bool) -> Iterator[Kept]:
    for eqn in jaxpr.eqns:
        here = f"{scope}/{eqn.source_info.name_stack}"
        repeated = again or "rematted_computation" in here or eqn.primitive.name == "remat2"
        for body in _inside(eqn):
            # The loss scans over tokens, not layers; the scan that runs backwards stacks gradients.
            if eqn.primitive.name == "scan" and "(loss)" not in here and not eqn.params["reverse"]:
                for inner, outer in zip(body.outvars, eqn.outvars, strict=True):
                    if outer.aval.ndim == inner.aval.ndim + 1:  # a carry has the shape that it has inside
                        host = outer.aval.memory_space == jax.memory.Space.Host
                        yield Kept(_activation(body, inner), _dtype(outer.aval.dtype), outer.aval.shape, repeated, host)
            yield from _kept(body, here, repeated)


def _dtype(dtype: Any) -> str:
    """As HLO calls it."""
    return (
        str(dtype)
        .replace("bfloat", "bf")
        .replace("float", "f")
        .replace("uint", "u")
        .replace("int", "s")
        .replace("bool", "pred")
    )


def _activation(jaxpr: Any, var: Any) -> str:
    """What a value is called, followed back through what does not change it."""
    eqn = next((e for e in jaxpr.eqns if any(v is var for v in e.outvars)), None)
    if eqn is None:
        return "layer input" if any(v is var for v in jaxpr.invars) else "constant"
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    if eqn.primitive.name in _SAME_VALUE:
        return _activation(jaxpr, eqn.invars[0])
    if eqn.primitive.name == "scan":
        body = next(_inside(eqn))
        return _activation(body, next(i for i, o in zip(body.outvars, eqn.outvars, strict=True) if o is var))
    body = next((b for b in _inside(eqn) if len(b.outvars) == len(eqn.outvars)), None)
    if body is not None:
        name = _activation(body, next(i for i, o in zip(body.outvars, eqn.outvars, strict=True) if o is var))
        if name not in ("layer input", "constant"):
            return name
    scope = [part for part in str(eqn.source_info.name_stack).split("/") if part and "rematted" not in part]
    return "/".join([*scope[-2:], eqn.primitive.name])


# ---- Which class a buffer belongs to


@dataclasses.dataclass(frozen=True)
class Facts:
    """What attribution goes by."""

    module: hlo.Module
    weights: frozenset[tuple[int, ...]]  # `_plain` dimensions that a weight, or its gradient, has on a device
    at_rest: frozenset[tuple[int, ...]]  # of those, what parameters have, all layers together
    kept: dict[tuple[bool, str, tuple[int, ...]], tuple[str, ...]]  # again, dtype, `_plain` dimensions on a device -> names
    callers: dict[str, list[hlo.Instruction]]  # of a computation


def facts(program: Program, module: hlo.Module) -> Facts:
    """Gathers them. `module`: the step's, after optimization."""
    weights: set[tuple[int, ...]] = set()
    for a in jax.tree.leaves(program.state.params):
        sizes = list(zip(a.shape, a.sharding.shard_shape(a.shape), strict=True))
        for dims in itertools.product(*(sorted(set(pair)) for pair in sizes)):
            weights |= {_plain(dims), _plain(dims[1:])}  # stacked, and one layer's
    kept = collections.defaultdict(list)
    for k in (k for k in kept_activations(program) if not k.offloaded):
        name = AGAIN if k.again and k.name != WEIGHT else k.name
        for dims in _on_a_device(k.dims, program, batch=k.name != WEIGHT):
            if name not in kept[k.again, k.dtype, dims]:
                kept[k.again, k.dtype, dims].append(name)
    callers = collections.defaultdict(list)
    for computation in module.computations.values():
        for i in computation.instructions:
            for called in i.called:
                callers[called].append(i)
    at_rest = {_plain(a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(program.state.params)}
    return Facts(
        module, frozenset(weights - {()}), frozenset(at_rest), {key: tuple(names) for key, names in kept.items()}, dict(callers)
    )


def _plain(dims: Iterable[int]) -> tuple[int, ...]:
    """Dimensions without order and without ones: XLA transposes and drops them as it likes."""
    return tuple(sorted(d for d in dims if d != 1))


def _on_a_device(dims: tuple[int, ...], program: Program, batch: bool) -> set[tuple[int, ...]]:
    """Every shape a device's part may have: its `batch` split, and each other mesh axis splitting one dimension or none."""
    placement = program.placement

    def split(parts: set[tuple[int, ...]], size: int) -> set[tuple[int, ...]]:
        return {(*d[:i], d[i] // size, *d[i + 1 :]) for d in parts for i in range(len(d)) if d[i] % size == 0}

    parts = split({dims}, placement.size(placement.batch_axes)) if batch else {dims}
    for axis in placement.mesh.axis_names:
        if axis not in placement.batch_axes:
            parts |= split(parts, placement.size(axis))
    return {_plain(d) for d in parts}


_MOVES = frozenset(
    ("bitcast", "copy", "transpose", "reshape", "convert", "slice", "dynamic-slice", "parameter", "constant", "copy-start")
) | {"copy-done", "optimization-barrier"}
_GATHERS = ("all-gather", "all-gather-start", "all-gather-done")


def _part(instruction: hlo.Instruction, index: Sequence[int]) -> hlo.Shape | None:
    """The array at an index of an instruction's result; None for a tuple."""
    found: hlo.Type = instruction.type
    for i in index:
        found = found[i] if isinstance(found, tuple) else found
    return found if isinstance(found, hlo.Shape) else None


def _origins(facts: Facts, name: str, index: tuple[int, ...]) -> list[hlo.Instruction]:
    """The instructions that made an array's contents: back through what only moves or converts it, and through loops."""
    module = facts.module
    found: dict[str, hlo.Instruction] = {}
    todo, seen = [(name, index)], set()
    while todo:
        name, index = at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        where = module.owners[name]
        i = where.by_name[name]
        if i.opcode == "get-tuple-element":
            todo.append((i.operands[0], (int(i.attributes["index"]), *index)))
        elif i.opcode == "tuple" and index:
            todo.append((i.operands[index[0]], index[1:]))
        elif i.opcode == "while":
            todo.append((module.computations[i.attributes["body"].removeprefix("%")].root.name, index))
        elif i.opcode == "parameter" and where is not module.entry and facts.callers.get(where.name):
            for caller in facts.callers[where.name]:
                if caller.opcode == "while":
                    todo += [(caller.operands[0], index), (caller.name, index)]
                else:
                    todo.append((caller.operands[i.parameter_number or 0], index))
        elif i.opcode == "copy-start":
            todo.append((i.operands[0], ()))
        elif i.opcode in _MOVES and i.operands:
            todo.append((i.operands[0], index))
        elif i.opcode == "fusion" and all(f.opcode in _MOVES for f in module.computations[i.called[0]].instructions):
            data = [o for o in i.operands if (s := _part(where.by_name[o], ())) is None or s.dims]  # without loop counters
            todo += [(o, index if isinstance(where.by_name[o].type, tuple) else ()) for o in data]
        else:
            found[name] = i
    return list(found.values())


def _op_names(module: hlo.Module, instruction: hlo.Instruction) -> list[str]:
    """Where an instruction came from; of a fusion without a name, where its parts did."""
    inside = (f for c in instruction.called if instruction.opcode == "fusion" for f in module.computations[c].instructions)
    return [instruction.op_name] if instruction.op_name else list(dict.fromkeys(f.op_name for f in inside if f.op_name))


def argument_class(op_name: str) -> str:
    """Class of an argument of the train step, from its path, as in state.params['head'] or state.optimizer[0].mu['head']."""
    if op_name.startswith("state.params"):
        return "parameters"
    moment = re.match(r"state\.optimizer.*?\.(mu|nu)\b", op_name)
    if moment:
        return {"mu": "first moment", "nu": "second moment"}[moment[1]]
    return (
        "batch"
        if op_name.startswith("batch")
        else "other optimizer state"
        if op_name.startswith("state")
        else "other arguments"
    )


STATE = ("parameters", "first moment", "second moment", "other optimizer state")
_FILLS = frozenset(("broadcast", "constant", "bitcast", "copy", "tuple"))
_EINSUM = re.compile(r"->([A-Z]+)/dot_general")
_REDUCED = re.compile(r"reduce.scatter|all-reduce|psum|dynamic_update_slice|dynamic_slice|scatter-add|\bwhile$")
_TOKENS = set("BTC")  # the dimensions along a batch: sequences, tokens, tokens of a chunk


def _is_fill(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    """Whether it makes an array of one number."""
    if instruction.opcode != "fusion":
        return instruction.opcode == "broadcast"
    return all(f.opcode in _FILLS for f in module.computations[instruction.called[0]].instructions)


def classify(facts: Facts, value: Value) -> tuple[str, str]:
    """(class, name of the kept activation or "") of a value in the heap.

    What cannot be told for certain is "temporaries": somebody will change a setting for what the other classes say.
    """
    made_by = facts.module.owners[value.instruction].by_name[value.instruction]
    shape = _part(made_by, value.index)
    if shape is None or not shape.dtype.startswith(FLOATS):
        return "temporaries", ""
    dims = _plain(shape.dims)
    origins = _origins(facts, value.instruction, value.index)
    text = " ".join(name for i in (made_by, *origins) for name in _op_names(facts.module, i))
    arguments = {argument_class(i.op_name) for i in origins if i.parameter_number is not None}
    if arguments and len(origins) == sum(i.parameter_number is not None for i in origins):
        held = min(arguments)
        return (f"copies of {held}" if held in STATE else "temporaries"), ""
    if any(i.opcode in _GATHERS for i in origins):
        return ("gathered weights" if dims in facts.weights else "logits and loss" if "(loss)" in text else "temporaries"), ""
    backward = "transpose(" in text
    names = facts.kept.get((backward, shape.dtype, dims), ()) if "(loss)" not in text else ()
    if names and (not backward or "rematted_computation" in text):
        if all(_is_fill(facts.module, i) for i in origins):
            # XLA can move the empty stack of a microbatch out of the loop over them, and then holds it all the time.
            return ("temporaries", "") if backward else ("saved activations", f"{', '.join(names)}: zeros to begin with")
        if any("dynamic_update_slice" in name or i.opcode == "while" for i in origins for name in _op_names(facts.module, i)):
            return ("gathered weights", "") if names == (WEIGHT,) else ("saved activations", ", ".join(names))
    einsum = next((m[1] for i in (made_by, *origins) for n in _op_names(facts.module, i) if (m := _EINSUM.search(n))), "")
    # Tokens can be as many as a weight has rows: a shape alone says nothing, unless it is a shard's or something reduced.
    reduced = dims in facts.at_rest or (
        dims in facts.weights and _REDUCED.search(" ".join((text, *(i.opcode for i in origins))))
    )
    if (backward or "(loss)" in text) and (not _TOKENS.intersection(einsum) if einsum else reduced):
        return "gradients", ""
    if dims in facts.at_rest and "jvp(" not in text and "(optimizer)" not in text and "/optimizer/" not in text:
        return "gradients", ""  # summed over microbatches: has the shape of a weight at rest, and no part in any other phase
    return ("logits and loss" if "(loss)" in text else "temporaries"), ""


# ---- The whole


_PHASES = (  # in this order: an op_name can hold several
    ("(loss)", "loss"),
    ("transpose(jvp(embed", "backward embed"),
    ("transpose(", "backward layers"),
    ("jvp(embed", "embed"),
    ("jvp(", "forward layers"),
    ("/optimizer/", "optimizer"),
)
# Instructions that show where a step is. Broadcasts, gathers and conversions run where they fit, long before they are needed.
_MARKS = re.compile(r"dot_general|dot_product|embed\)+/.*(gather|add|scatter)|/optimizer/")


def phase(op_name: str) -> str:
    """The part of a step that is running when this instruction does; "" where its name does not tell."""
    return next((phase for part, phase in _PHASES if part in op_name), "") if _MARKS.search(op_name) else ""


def _thin(points: Sequence[tuple[float, str]], most: int = POINTS) -> tuple[tuple[float, str], ...]:
    """At most so many points: of every stretch its highest."""
    stretch = max(1, math.ceil(len(points) / most))
    return tuple(max(points[i : i + stretch], key=lambda point: point[0]) for i in range(0, len(points), stretch))


def memory(
    assignment: Assignment,
    program: Program,
    module: hlo.Module,
    *,
    hbm_gib: float,
    reserve_gib: float,
    usable_gib: float,
    classes: Callable[[str], str] = argument_class,
) -> Memory:
    """What a step holds on one device.

    assignment, module: of the program's compiled step. `classes`: op_name of an argument -> its class. The peak is XLA's own
    (`peak_bytes`), and `by_class` adds up to it; offloaded activations are in host memory and counted apart. Arguments and
    temporaries are allocations: together they exceed the peak by the heap's `fragmentation`, and are what a device has to give.
    """
    heap = _device_heap(assignment)
    known = facts(program, module)
    by_class: dict[str, int] = collections.defaultdict(int)
    saved: dict[str, int] = collections.defaultdict(int)
    largest: list[Buffer] = []

    def hold(size: int, kind: str, value: Value) -> None:
        by_class[kind] += size
        if size >= LISTED:
            largest.append(_buffer(known, size, kind, value))

    parameters = {i.parameter_number: i for i in module.entry.parameters}
    outside = _outside(assignment)
    for a, kind in outside:
        if a.parameter is not None:
            kind = classes(parameters[a.parameter].op_name)
        hold(a.size, kind, assignment.values[a.values[0]])
    base = sum(a.size for a, _ in outside)

    timeline, now, peak_at, top = [], "embed", "", -1  # before the first layer: the embedding, and gathers ahead of need
    at_peak: dict[int, list[int]] = {}
    for event, (held, alive) in zip(heap, _replay(assignment, heap), strict=True):
        made_by = module.owners[event.instruction].by_name[event.instruction]
        names = _op_names(module, made_by)
        now = next(filter(None, map(phase, names)), now)
        timeline.append(((base + held) / GIB, now))
        if held > top:
            top, peak_at, at_peak = held, (names or [event.instruction])[0], {v: list(sharing) for v, sharing in alive.items()}
    for owner, sharing in at_peak.items():
        value = assignment.values[sharing[-1]]  # the one that was written last
        kind, name = classify(known, value)
        size = assignment.values[owner].size
        hold(size, kind, value)
        if kind == "saved activations":
            saved[name] += size
    arguments = sum(a.size for a, _ in outside if a.parameter is not None)
    total = sum(a.size for a in assignment.allocations if a.color != HOST and not a.is_thread_local)
    descending = sorted(by_class.items(), key=lambda item: -item[1])
    return Memory(
        hbm_gib=hbm_gib,
        reserve_gib=reserve_gib,
        usable_gib=usable_gib,
        peak_gib=sum(by_class.values()) / GIB,
        arguments_gib=arguments / GIB,
        temp_gib=(total - arguments) / GIB,
        host_gib=host_bytes(assignment) / GIB,
        by_class={kind: size / GIB for kind, size in descending},
        saved={name: size / GIB for name, size in sorted(saved.items(), key=lambda item: -item[1])},
        peak_at=peak_at,
        timeline=_thin(timeline),
        largest=tuple(sorted(largest, key=lambda b: -b.gib)),
    )


def _buffer(facts: Facts, size: int, kind: str, value: Value) -> Buffer:
    """One line of the list of what is held at the peak."""
    module = facts.module
    made_by = module.owners[value.instruction].by_name[value.instruction]
    shape = _part(made_by, value.index)
    text = f"{shape.dtype}[{','.join(map(str, shape.dims))}]" if shape else "tuple"
    found = [made_by, *_origins(facts, value.instruction, value.index)]  # a loop's result has no name of its own
    found += [f for i in found if i.opcode == "fusion" for c in i.called for f in module.computations[c].instructions]
    source = next((i.source for i in found if i.source), "")
    return Buffer(size / GIB, kind, text, source, next((i.op_name for i in found if i.op_name), ""), value.instruction)
