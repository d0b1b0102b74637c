"""Memory of a compiled train step on one device: its peak by class, its timeline, and saved activations.

XLA's buffer assignment (assignment.py) has the values in memory at every point of the schedule. `classify` assigns a class to
each value, from the names of the program's arguments and operations and the shapes of weights and saved activations.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from jaxtrain.models.remat import SLOTS
from jaxtrain.plan.program import hlo
from jaxtrain.plan.program.assignment import BACKWARD, Assignment, Value, Workspace, replay
from jaxtrain.plan.program.collectives import is_collective
from jaxtrain.plan.program.roofline import phase_of, scope_of
from jaxtrain.plan.result import Buffer, Memory, MemoryClass
from jaxtrain.step.compiler import CardMemory
from jaxtrain.step.program import Program

GIB = 2**30
POINTS = 400  # largest number of points of the timeline
LISTED = 1 << 20  # bytes; smaller buffers have no line in the list of arrays
FLOATS = ("bf16", "f16", "f32", "f64", "f8")


# ---- Saved activations


@dataclasses.dataclass(frozen=True)
class SavedActivation:
    """An activation that is saved for the backward pass."""

    name: str
    dtype: Any
    dims: tuple[int, ...]  # shape of a device's shard; a stack over layers is (L, ...)
    stacked: bool  # stacked by a scan over layers
    recomputed: bool  # saved by a forward pass that the backward pass repeats for one group of layers
    offloaded: bool  # saved in host memory


WEIGHT = "weight"  # the model's name of a gathered weight
RECOMPUTED = "one group of layers, computed again"
_SAME_VALUE = ("reduce_precision", "device_put", "optimization_barrier", "convert_element_type", "copy", "sharding_constraint")


def loop_activations(program: Program) -> tuple[SavedActivation, ...]:
    """Return the activations that the train step saves; in a step with a loop over layers, only those that the loop saves.

    Names come from the jaxpr. An activation without a `checkpoint_name` is named after the operation that computes it. The
    input of a layer is named "layer input". A gathered weight is named "weight".
    """
    activations = saved_activations(program)
    # With a loop over layers, the backward pass of the last layer follows at once, so that layer's activations are soon freed.
    stacked = tuple(k for k in activations if k.stacked)
    return stacked or activations


def saved_activations(program: Program) -> tuple[SavedActivation, ...]:
    """Return all saved activations: those that a loop over layers saves, and those of layers outside of the loop."""
    return tuple(_find_saved(jax.make_jaxpr(program.train_step)(program.state, program.batch).jaxpr, "", False))


def _find_saved(jaxpr: Any, scope: str, recomputed: bool) -> Iterator[SavedActivation]:
    for eqn in jaxpr.eqns:
        path = f"{scope}/{eqn.source_info.name_stack}"
        repeated = recomputed or "rematted_computation" in path or eqn.primitive.name == "remat2"
        bodies: Any = jaxprs_in_params(eqn.params)
        for body in bodies:
            if eqn.primitive.name == "remat2":
                yield from _unrolled_activations(jaxpr, eqn)
            # Scans of the loss run over tokens, those of optimizer and ZeRO over weights. A reverse scan stacks gradients.
            elsewhere = _ELSEWHERE.search(path)
            if eqn.primitive.name == "scan" and not elsewhere and not eqn.params["reverse"]:
                for inner, outer in zip(body.outvars, eqn.outvars, strict=True):
                    if outer.aval.ndim == inner.aval.ndim + 1:  # a stacked output; a carry has the same shape inside the loop
                        host = outer.aval.memory_space == jax.memory.Space.Host
                        name = _activation_name(body, inner)
                        yield SavedActivation(name, outer.aval.dtype, outer.aval.shape, True, repeated, host)
            yield from _find_saved(body, path, repeated)
        if eqn.primitive.name == "dynamic_update_slice" and path.endswith(f"/{SLOTS}"):
            yield _slot_activation(jaxpr, eqn)


_ELSEWHERE = re.compile(r"\(loss\)|/optimizer|/(gather|reduce)$")
_ENTERS = re.compile(r"select_n|.*mlp\)/add")  # the input of a group's first layer, and of its other layers


def _producer(jaxpr: Any, var: Any) -> Any:
    """Return the operation that computes a variable; None for an input of the jaxpr."""
    return next((eqn for eqn in jaxpr.eqns if any(v is var for v in eqn.outvars)), None)


def _slot_activation(jaxpr: Any, update: Any) -> SavedActivation:
    """Return the activation that `update` writes into a buffer with a slot per layer or, in a pipeline, per microbatch."""
    eqn = _producer(jaxpr, update.invars[1])  # adds the dimension of slots; None if it is outside of the loop
    name, aval = _activation_name(jaxpr, eqn.invars[0] if eqn is not None else update.invars[1]), update.outvars[0].aval
    return SavedActivation("layer input" if _ENTERS.fullmatch(name) else name, aval.dtype, aval.shape, True, False, False)


def _unrolled_activations(jaxpr: Any, remat: Any) -> Iterator[SavedActivation]:
    """Yield the activations that a layer outside of loops saves. remat: the layer's remat2 operation in the backward pass."""
    producers = {id(v): eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for var in remat.invars:
        producer = producers.get(id(var))
        stack = str(producer.source_info.name_stack) if producer is not None else ""
        if "jvp(layers)" in stack and "transpose(" not in stack:
            host = var.aval.memory_space == jax.memory.Space.Host
            yield SavedActivation(_activation_name(jaxpr, var), var.aval.dtype, var.aval.shape, False, False, host)


def _activation_name(jaxpr: Any, var: Any) -> str:
    """Return the name of an activation, traced back through copies, conversions of dtype, and scans."""
    eqn = _producer(jaxpr, var)
    if eqn is None:
        return "layer input" if any(v is var for v in jaxpr.invars) else "constant"
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    if eqn.primitive.name in _SAME_VALUE:
        return _activation_name(jaxpr, eqn.invars[0])
    scan = eqn.primitive.name == "scan"
    body = next((b for b in jaxprs_in_params(eqn.params) if scan or len(b.outvars) == len(eqn.outvars)), None)
    if body is not None:
        name = _activation_name(body, next(i for i, o in zip(body.outvars, eqn.outvars, strict=True) if o is var))
        if scan or name not in ("layer input", "constant"):
            return name
    scope = [level for level in str(eqn.source_info.name_stack).split("/") if level and "rematted" not in level]
    return "/".join([*scope[-2:], eqn.primitive.name])


# ---- Classes of buffers


@dataclasses.dataclass(frozen=True)
class BufferFacts:
    """The shapes of weights and the names of saved activations, by which `classify` recognises values."""

    module: hlo.Module
    weights: frozenset[tuple[int, ...]]  # `_plain` shapes of weights: gathered or sharded, stacked or of one layer
    shards: frozenset[tuple[int, ...]]  # `_plain` dimensions of sharded parameters, all layers stacked
    # Names of saved activations, by (stacked, again, dtype, `_plain` local dimensions).
    saved: dict[tuple[bool, bool, str, tuple[int, ...]], tuple[str, ...]]


def buffer_facts(program: Program, module: hlo.Module) -> BufferFacts:
    """Return the shapes of a program's weights, and its saved activations. module: the HLO of its compiled train step."""
    weights: set[tuple[int, ...]] = set()
    shards: set[tuple[int, ...]] = set()
    for a in jax.tree.leaves(program.state.params):
        shard = a.sharding.shard_shape(a.shape)
        shards.add(_plain(shard))
        for dims in itertools.product(*zip(a.shape, shard, strict=True)):
            weights |= {_plain(dims), _plain(dims[1:])}  # of stacked layers, and of one layer
    saved = {}
    for k in loop_activations(program):
        if not k.offloaded:
            key = k.stacked, k.recomputed, str(k.dtype).replace("float", "f"), _plain(k.dims)  # only floats are looked up
            name = RECOMPUTED if k.recomputed and k.name != WEIGHT else k.name
            saved[key] = tuple(dict.fromkeys((*saved.get(key, ()), name)))
    return BufferFacts(module, frozenset(weights - {()}), frozenset(shards), saved)


def _plain(dims: Iterable[int]) -> tuple[int, ...]:
    """Return dimensions sorted and without 1s, since XLA transposes arrays and drops dimensions of 1."""
    return tuple(sorted(d for d in dims if d != 1))


_MOVES = frozenset(
    ("bitcast", "copy", "transpose", "reshape", "convert", "slice", "dynamic-slice", "parameter", "constant", "copy-start")
) | {"copy-done", "optimization-barrier"}
_GATHERS = ("all-gather", "all-gather-start", "all-gather-done")


def _array_at(instruction: hlo.Instruction, index: Sequence[int]) -> hlo.Shape | None:
    """Return the array at an index of an instruction's result; None for a tuple."""
    node: hlo.Type = instruction.type
    for i in index:
        node = node[i] if isinstance(node, tuple) else node
    return node if isinstance(node, hlo.Shape) else None


def _origins(facts: BufferFacts, name: str, index: tuple[int, ...]) -> list[hlo.Instruction]:
    """Return the instructions that made an array's contents, traced back through copies, conversions and loops."""
    module = facts.module
    origins: dict[str, hlo.Instruction] = {}
    todo, visited = [(name, index)], set()
    while todo:
        name, index = key = todo.pop()
        if key in visited:
            continue
        visited.add(key)
        owner = module.owners[name]
        i = owner.by_name[name]
        if i.opcode == "get-tuple-element":
            todo.append((i.operands[0], (int(i.attributes["index"]), *index)))
        elif i.opcode == "tuple" and index:
            todo.append((i.operands[index[0]], index[1:]))
        elif i.opcode == "while":
            todo.append((module.computations[i.attributes["body"].removeprefix("%")].root.name, index))
        elif i.opcode == "parameter" and owner is not module.entry and module.callers.get(owner.name):
            for caller in module.callers[owner.name]:
                if caller.opcode == "while":
                    todo += [(caller.operands[0], index), (caller.name, index)]
                else:
                    todo.append((caller.operands[i.parameter_number or 0], index))
        elif i.opcode == "copy-start":
            todo.append((i.operands[0], ()))
        elif i.opcode in _MOVES and i.operands:
            todo.append((i.operands[0], index))
        elif i.opcode == "fusion" and all(f.opcode in _MOVES for f in module.computations[i.called[0]].instructions):
            data = [o for o in i.operands if (s := _array_at(owner.by_name[o], ())) is None or s.dims]  # without loop counters
            todo += [(o, index if isinstance(owner.by_name[o].type, tuple) else ()) for o in data]
        else:
            origins[name] = i
    return list(origins.values())


def _op_names(module: hlo.Module, instruction: hlo.Instruction) -> list[str]:
    """Return the op_name of an instruction; for a fusion without an op_name, those of the instructions inside it."""
    inside = (f for c in instruction.called if instruction.opcode == "fusion" for f in module.computations[c].instructions)
    return [instruction.op_name] if instruction.op_name else list(dict.fromkeys(f.op_name for f in inside if f.op_name))


def argument_class(op_name: str) -> str:
    """Return the class of an argument from its path, such as state.params['head'] or state.optimizer[0].mu['head']."""
    if op_name.startswith("state.params"):
        return "parameters"
    moment = re.match(r"state\.optimizer.*?\.(mu|nu)\b", op_name)
    if moment:
        return {"mu": "first moment", "nu": "second moment"}[moment[1]]
    if op_name.startswith("state.ema"):
        return "average of weights"
    if op_name.startswith("state"):
        return "other optimizer state"
    return "batch" if op_name.startswith("batch") else "other arguments"


STATE = ("parameters", "first moment", "second moment", "average of weights", "other optimizer state")
_FILLS = frozenset(("broadcast", "constant", "bitcast", "copy", "tuple"))
_EINSUM = re.compile(r"->([A-Z]+)/dot_general")
_REDUCED = re.compile(r"reduce.scatter|all-reduce|psum|dynamic_update_slice|dynamic_slice|scatter-add|\bwhile$")
# ZeRO stages that keep gathered weights for the whole step, and sum unsharded gradients over microbatches or after the last.
_GATHERED_ONCE = re.compile(r"^(jit\(train_step\)/gather/\S* ?)+$")
_SUMMED = re.compile(r"jit\(train_step\)/(reduce/.*|while/body/(eval_jaxpr/)?add)")
_TOKENS = set("BTC")  # dimensions of a batch in an einsum: sequences, tokens, tokens of a chunk


def _is_fill(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    """Return whether an instruction fills an array with one constant."""
    if instruction.opcode != "fusion":
        return instruction.opcode == "broadcast"
    return all(f.opcode in _FILLS for f in module.computations[instruction.called[0]].instructions)


def _saved_class(names: tuple[str, ...]) -> tuple[str, str]:
    """Return (class, name) of a saved array. names: names of all saved arrays of its shape, since only the shape is known."""
    return ("gathered weights", "") if names == (WEIGHT,) else ("saved activations", ", ".join(names))


WORKSPACE = "cuDNN workspace"


def classify(facts: BufferFacts, value: Value) -> tuple[str, str]:
    """Return (class, name of the saved activation or "") of a value in the heap.

    A value of uncertain class counts as "temporaries", since users choose settings by the sizes of the other classes.
    """
    producer = facts.module.instruction(value.instruction)
    shape = _array_at(producer, value.index)
    if producer.target == BACKWARD and shape is not None and shape.dtype == "u8":
        return WORKSPACE, ""
    if shape is None or not shape.dtype.startswith(FLOATS):
        return "temporaries", ""
    dims = _plain(shape.dims)
    origins = _origins(facts, value.instruction, value.index)
    op_names = [name for i in (producer, *origins) for name in _op_names(facts.module, i)]
    text = " ".join(op_names)
    arguments = {argument_class(i.op_name) for i in origins if i.parameter_number is not None}
    if arguments and len(origins) == sum(i.parameter_number is not None for i in origins):
        argument = min(arguments)
        return (f"copies of {argument}" if argument in STATE else "temporaries"), ""
    if any(i.opcode in _GATHERS for i in origins):
        return ("gathered weights" if dims in facts.weights else "logits and loss" if "(loss)" in text else "temporaries"), ""
    if dims in facts.weights and _GATHERED_ONCE.search(text):
        return "gathered weights", ""
    if dims in facts.weights and any(map(_SUMMED.fullmatch, op_names)):
        return "gradients", ""
    backward = "transpose(" in text
    names = facts.saved.get((True, backward, shape.dtype, dims), ()) if "(loss)" not in text else ()
    if names and (not backward or "rematted_computation" in text):
        if all(_is_fill(facts.module, i) for i in origins):
            # XLA can move the zero-filled stack of a microbatch out of the loop over microbatches. Then it is always allocated.
            return ("temporaries", "") if backward else ("saved activations", f"{', '.join(names)}: zeros to begin with")
        if any("dynamic_update_slice" in name or i.opcode == "while" for i in origins for name in _op_names(facts.module, i)):
            return _saved_class(names)
    names = facts.saved.get((False, False, shape.dtype, dims), ())
    if names and "jvp(layers)" in text and not backward:
        return _saved_class(names)
    einsum = next((match[1] for match in map(_EINSUM.search, op_names) if match), "")
    # An activation can have the shape of a weight. A shape identifies a gradient only if it is a shard's or in a reduction.
    reduced = dims in facts.shards or (
        dims in facts.weights and _REDUCED.search(" ".join((text, *(i.opcode for i in origins))))
    )
    if (backward or "(loss)" in text) and (not _TOKENS.intersection(einsum) if einsum else reduced):
        return "gradients", ""
    if dims in facts.shards and "jvp(" not in text and "(optimizer)" not in text and "/optimizer/" not in text:
        return "gradients", ""  # summed over microbatches: sharded like a parameter, outside of every phase
    return ("logits and loss" if "(loss)" in text else "temporaries"), ""


def writer_scope(facts: BufferFacts, value: Value) -> str:
    """Return the pass and the part of the model whose operation wrote a value, such as "backward mlp".

    A collective's results are "collectives", values of operations without a scope "no scope".
    """
    producer = facts.module.instruction(value.instruction)
    if is_collective(facts.module, producer):
        return "collectives"
    origins = (producer, *_origins(facts, value.instruction, value.index))
    name = next((name for i in origins for name in _op_names(facts.module, i) if scope_of(name)), "")
    return f"{phase_of(name)} {scope_of(name)}".strip() if name else "no scope"


# ---- Peak


_PHASES = (  # the first match counts: an op_name can contain several of these
    ("(loss)", "loss"),
    ("transpose(jvp(embed", "backward embed"),
    ("transpose(", "backward layers"),
    ("jvp(embed", "embed"),
    ("jvp(", "forward layers"),
    ("/optimizer/", "optimizer"),
)
# Instructions that mark a phase. Broadcasts, gathers and conversions run anywhere, long before their results are needed.
_MARKS = re.compile(r"dot_general|dot_product|embed\)+/.*(gather|add|scatter)|/optimizer/")


def memory_phase(op_name: str) -> str:
    """Return the phase of the step that an instruction with this op_name belongs to; "" if the op_name has no phase."""
    return next((phase for marker, phase in _PHASES if marker in op_name), "") if _MARKS.search(op_name) else ""


def _thin(points: Sequence[tuple[float, str]]) -> list[int]:
    """Return the indices of at most POINTS points: the highest point of each range of equal length."""
    ranges = itertools.batched(range(len(points)), max(1, math.ceil(len(points) / POINTS)))
    return [max(indices, key=lambda i: points[i][0]) for indices in ranges]


def step_memory(assignment: Assignment, program: Program, module: hlo.Module, card: CardMemory, workspace: Workspace) -> Memory:
    """Return the memory of a step on one device.

    `peak_gib` is the peak of XLA's buffer assignment, with cuDNN's workspace and without host memory. `by_class` sums to it,
    and `temporaries` to the class of this name.
    Arguments plus temporaries are the allocated memory: the peak plus fragmentation.

    Args:
      assignment, module, workspace: read from the program's compiled step.
      card: memory of the GPU.
    """
    facts = buffer_facts(program, module)
    kind_of = functools.cache(lambda value: classify(facts, assignment.values[value]))
    parameters = {i.parameter_number: i for i in module.entry.parameters}
    outside = [
        (a.kind if a.parameter is None else argument_class(parameters[a.parameter].op_name), a) for a in assignment.outside
    ]
    base = collections.Counter[str]()
    for kind, a in outside:
        base[kind] += a.size

    timeline, phase = [], "embed"  # before the first layer: the embedding, and early gathers
    for event, (live_bytes, _) in zip(assignment.heap, replay(assignment), strict=True):
        phase = next(filter(None, map(memory_phase, _op_names(module, module.instruction(event.instruction)))), phase)
        timeline.append(((base.total() + live_bytes) / GIB, phase))
    points = dict.fromkeys(_thin(timeline), base)  # event -> bytes of each class
    top = max(points, key=lambda index: timeline[index][0])
    peak_arrays = [(a.size, kind, "", assignment.values[a.value]) for kind, a in outside]
    for index, (_, alive) in enumerate(replay(assignment)):
        if index not in points:
            continue
        points[index] = base.copy()
        for buffer, values in alive.items():
            size, last = assignment.values[buffer].size, next(reversed(values))  # the value that was written last
            kind, name = kind_of(last)
            points[index][kind] += size
            if index == top:
                peak_arrays.append((size, kind, name, assignment.values[last]))
    saved = collections.Counter[str]()
    temporaries = collections.Counter[str]()
    for size, kind, name, value in peak_arrays:
        if kind == "saved activations":
            saved[name] += size
        if kind == "temporaries":
            temporaries[writer_scope(facts, value)] += size
    largest = sorted((array for array in peak_arrays if array[0] >= LISTED), key=lambda array: -array[0])
    peak, at_peak = points[top], assignment.heap[top].instruction
    over_time = [
        MemoryClass(kind, tuple(p[kind] / GIB for p in points.values())) for kind in dict.fromkeys(chain(*points.values()))
    ]
    arguments = sum(a.size for a in assignment.outside if a.parameter is not None)
    return Memory(
        hbm_gib=card.memory_gib,
        reserve_gib=card.memory_gib - card.usable_gib,
        usable_gib=card.usable_gib,
        peak_gib=peak.total() / GIB,
        arguments_gib=arguments / GIB,
        temp_gib=(assignment.allocated - arguments) / GIB,
        host_gib=assignment.on_host / GIB,
        by_class={kind: size / GIB for kind, size in peak.most_common()},
        saved={name: size / GIB for name, size in saved.most_common()},
        peak_at=next(iter(_op_names(module, module.instruction(at_peak))), at_peak),
        timeline=tuple(timeline[index] for index in points),
        over_time=tuple(sorted(over_time, key=lambda c: -max(c.gib))),
        largest=tuple(_buffer(facts, size, kind, value) for size, kind, _, value in largest),
        workspace_gib=workspace.largest / GIB,
        workspace_by=workspace.by,
        temporaries={name: size / GIB for name, size in temporaries.most_common()},
    )


def _buffer(facts: BufferFacts, size: int, kind: str, value: Value) -> Buffer:
    """Return an entry for the list of the largest arrays at the peak. size: bytes. kind: class of memory."""
    module = facts.module
    producer = module.instruction(value.instruction)
    shape = _array_at(producer, value.index)
    text = f"{shape.dtype}[{','.join(map(str, shape.dims))}]" if shape else "tuple"
    if kind == WORKSPACE:
        text = f"u8[{size}]"  # without cuDNN the program has u8[0] here
    instructions = [producer, *_origins(facts, value.instruction, value.index)]  # a loop's result has no name of its own
    instructions += [
        f for i in instructions if i.opcode == "fusion" for c in i.called for f in module.computations[c].instructions
    ]
    source = next((i.source for i in instructions if i.source), "")
    return Buffer(size / GIB, kind, text, source, next((i.op_name for i in instructions if i.op_name), ""), value.instruction)
