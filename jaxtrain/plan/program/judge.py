"""What is wrong with a compiled step: mistakes of sharded programs, found and said in words.

Each warning names what was found, what it costs, where it comes from, and what usually mends it.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

import jax

from jaxtrain.config import RunConfig
from jaxtrain.kernels.numerics import DTYPES
from jaxtrain.models.lora import is_adapter
from jaxtrain.plan.program.collectives import Found
from jaxtrain.plan.program.hlo import Computation, Instruction, Module
from jaxtrain.plan.result import Collective, Matmuls
from jaxtrain.sharding import large_replicated_arrays
from jaxtrain.train.definition import fp8_weights, trained_parameters
from jaxtrain.train.program import Program
from jaxtrain.train.state import abstract_tensors

LARGE = 1 << 20  # bytes of one launch below which a collective is bookkeeping
EXPOSED = 0.02  # of the step: waiting longer than this for the collectives of one line of Python deserves a warning
NAMED = 4  # arrays in one warning; the others are counted
GATHERS, REDUCTIONS = ("all-gather",), ("reduce-scatter", "all-reduce")
# What the loop over microbatches itself does, and no loop inside it; inside those, "/while/body" comes again.
MICROBATCH = re.compile(r"jit\(train_step\)/(shard_map/)?while/body/(?!.*/while/body)")
LAYER = re.compile(r"\.layers\.(\d+)\.")
# Operations that leave a value what it is, or round it.
SAME_VALUE = ("bitcast", "convert", "copy", "transpose", "reshape")


def warnings(
    run: RunConfig, program: Program, module: Module, found: Sequence[Found], moved: Sequence[Collective], step_ms: float
) -> tuple[str, ...]:
    """All that is suspicious in a compiled step, costliest first within each kind; one warning for each line of Python."""
    large = [f for f in found if f.wire_bytes > LARGE]
    return (
        *_wide(run, large),
        *_could_be_outside(module, large, microbatch_loops(run, found)),
        *_resharding(module, large),
        *(_whole(program) if run.sharding.zero else ()),
        *_waits(moved, step_ms),
    )


def stayed_wide(run: RunConfig, program: Program, products: Matmuls | None) -> Iterator[str]:
    """Matrix products of layers in bfloat16 though the config puts them in 8 bits."""
    weights = (jax.tree.leaves(f(run, program.definition)) for f in (fp8_weights, trained_parameters))
    learnt = [learns for eight, learns in zip(*weights, strict=True) if eight]
    # Forward, the gradient of x, and that of what is learnt. The first layer's x has none where nothing before it is learnt.
    asked = sum(2 + learns for learns in learnt)
    least = asked - learnt.count(False) / run.model.num_layers
    if products and products.eight < least:
        yield (
            f"precision is fp8, but of {asked} matrix products of a layer that should be in FP8 {products.eight:g} are. "
            f"Wider: {products.some_wide or 'none'}."
        )


def _where(f: Found) -> str:
    return f.source or f.op_name or f.instruction


def _cost(f: Found) -> str:
    return f"{f.count} a step, {f.count * f.wire_bytes / 1e9:.2f} GB on the wire a GPU"


def _by_line(found: Sequence[Found]) -> list[Found]:
    """Collectives of one kind from one line as one, costliest first: an unrolled loop shows each of its own several times."""
    groups: dict[tuple[str, ...], list[Found]] = {}
    for f in found:
        groups.setdefault((f.kind, f.dtype, f.axis, _where(f)), []).append(f)
    merged = []
    for group in groups.values():
        count = sum(f.count for f in group)
        merged.append(
            dataclasses.replace(group[0], count=count, wire_bytes=sum(f.count * f.wire_bytes for f in group) / max(1, count))
        )
    return sorted(merged, key=lambda f: -f.count * f.wire_bytes)


def microbatch_loops(run: RunConfig, found: Sequence[Found]) -> frozenset[str]:
    """Names of the loops over microbatches; none without accumulation.

    They are known by the collectives that run in them and in no loop of the model: the compiler may leave a loop itself
    without its name.
    """
    if run.train.grad_accum == 1:
        return frozenset()
    return frozenset(f.loops[0] for f in found if len(f.loops) == 1 and MICROBATCH.match(f.op_name))


def _wide(run: RunConfig, found: Sequence[Found]) -> Iterator[str]:
    """float32 on the wire where the config asks for less."""
    for f in _by_line([f for f in found if "f32" in f.dtype.split("+") and f.f32 * f.wire_bytes > LARGE]):
        if f.kind in GATHERS and DTYPES[run.compute].itemsize < 4:
            yield (
                f"float32 all-gather over {f.axis} ({_cost(f)}) from {_where(f)}: precision is {run.precision}, so half of it "
                "would do. Cast before the gather, as Placement.gather does."
            )
        # Gradients of keys and values add up in float32 over the places of a ring, as inside one device.
        if f.kind in REDUCTIONS and DTYPES[run.dtypes.reduce].itemsize < 4 and "kernels/context" not in f.source:
            yield (
                f"float32 {f.kind} over {f.axis} ({_cost(f)}) from {_where(f)}: dtypes.reduce is {run.dtypes.reduce}. Cast "
                "before the reduction."
            )


def _could_be_outside(module: Module, found: Sequence[Found], microbatches: frozenset[str]) -> Iterator[str]:
    """Gathers inside a loop of something that the loop does not change.

    The loop over microbatches is left out: weights whole for all of it are what splitting them is to avoid.
    """
    outside = []
    for f in found:
        if f.kind not in GATHERS or not f.loops or f.loops[-1] in microbatches:
            continue
        owner = module.owners[f.instruction]
        gather = owner.by_name[f.instruction]
        if all(_invariant(module, owner, owner.by_name[o]) for o in gather.operands):
            outside.append(f)
    for f in _by_line(outside):
        yield (
            f"all-gather over {f.axis} inside a loop of something that the loop does not change ({_cost(f)}) from "
            f"{_where(f)}: gather it once, before the loop."
        )


def _invariant(module: Module, body: Computation, value: Instruction) -> bool:
    """Whether a value is the same in every iteration of the loop whose body this is."""
    todo, seen = [value], set()
    while todo:
        i = todo.pop()
        if i.name in seen:
            continue
        seen.add(i.name)
        if i.opcode == "get-tuple-element":
            source, index = body.by_name[i.operands[0]], int(i.attributes["index"])
            while source.opcode == "opt-barrier":
                source = body.by_name[source.operands[0]]
            if source.opcode == "tuple":
                todo.append(body.by_name[source.operands[index]])
            elif source.opcode != "parameter" or not _passed_through(body, index):
                return False
        elif i.opcode in SAME_VALUE or i.opcode in ("fusion", "constant"):
            # A fusion that takes this iteration's slice has the loop's counter, which does change, among its operands.
            todo += [body.by_name[o] for o in i.operands]
        else:
            return False
    return True


def _passed_through(body: Computation, index: int) -> bool:
    """Whether a loop hands an element of its state on as it came."""
    root = body.root
    if root.opcode != "tuple":
        return False
    last = body.by_name[root.operands[index]]
    while last.opcode in ("bitcast", "copy"):
        last = body.by_name[last.operands[0]]
    if last.opcode != "get-tuple-element" or body.by_name[last.operands[0]].opcode != "parameter":
        return False
    return int(last.attributes["index"]) == index


def _resharding(module: Module, found: Sequence[Found]) -> Iterator[str]:
    """Moves between layouts that the partitioner made up, because two layouts in the program do not agree."""
    moves = [f for f in found if f.kind in ("all-to-all", "collective-permute") and _by_partitioner(module, f)]
    for f in _by_line(moves):
        yield (
            f"{f.kind} over {f.axis} that nobody asked for ({_cost(f)}) near {_where(f)}: two layouts do not agree there. "
            "Pin one of them with Placement.constrain, or change sharding.rules."
        )


def _by_partitioner(module: Module, f: Found) -> bool:
    launch = module.owners[f.instruction].by_name[f.instruction]
    inner = [i for name in launch.called for i in module.computations[name].instructions]
    return any('is_spmd_generated="true"' in i.attributes.get("frontend_attributes", "") for i in (launch, *inner))


def _whole(program: Program) -> Iterator[str]:
    """State that every device holds in full, or that is split less than its parameter. Layers are named together."""
    # Half of an adapter has no dimension that is split over the batch's axes, and is small.
    tensors = {name: a for name, a in abstract_tensors(program.state).items() if not is_adapter(name)}
    whole = [line.split(" ")[0] for line in large_replicated_arrays(tensors, LARGE)]
    if whole:
        yield (
            f"replicated, every GPU holds all of it ({_size(tensors, whole)}): {_named(tensors, whole)}. Split it: moments by "
            "state.py, like their parameters; parameters by sharding.rules."
        )
    split = {a.shape: _shards(a) for name, a in tensors.items() if name.startswith("params.")}
    less = [name for name, a in tensors.items() if _shards(a) < split.get(a.shape, 1) and name not in whole]
    less = [name for name in less if _bytes(tensors[name]) > LARGE]
    if less:
        yield (
            f"split less than the parameters of their shape ({_size(tensors, less)} on a GPU): {_named(tensors, less)}. Pin "
            "their layout in state.py."
        )


def _named(tensors: dict[str, jax.ShapeDtypeStruct], names: Sequence[str]) -> str:
    """Tensors by name, largest first, those of all layers as one: optimizer.mu.layers.*.mlp.gate (32 layers)."""
    layers: dict[str, int] = {}
    for name in sorted(names, key=lambda name: -_bytes(tensors[name])):
        short = LAYER.sub(".layers.*.", name)
        layers[short] = layers.get(short, 0) + (short != name)
    shown = [f"{name} ({count} layers)" if count else name for name, count in layers.items()]
    more = [f"{len(shown) - NAMED} more"] if len(shown) > NAMED else []
    return ", ".join(shown[:NAMED] + more)


def _bytes(a: jax.ShapeDtypeStruct) -> int:
    """On one device."""
    shape = a.sharding.shard_shape(a.shape) if a.sharding else a.shape
    return math.prod(shape) * a.dtype.itemsize


def _size(tensors: dict[str, jax.ShapeDtypeStruct], names: Sequence[str]) -> str:
    return f"{sum(_bytes(tensors[name]) for name in names) / 2**30:.2f} GiB"


def _shards(a: jax.ShapeDtypeStruct) -> int:
    return math.prod(a.shape) // max(1, math.prod(a.sharding.shard_shape(a.shape))) if a.sharding else 1


def _waits(moved: Sequence[Collective], step_ms: float) -> Iterator[str]:
    """Lines of Python whose collectives the schedule does not hide."""
    waited: dict[tuple[str, str, str], float] = {}
    for c in moved:
        key = c.kind, c.axis, c.source or c.op_name
        waited[key] = waited.get(key, 0.0) + c.exposed_ms
    for (kind, axis, where), ms in sorted(waited.items(), key=lambda item: -item[1]):
        if ms > EXPOSED * step_ms:
            yield (
                f"{kind} over {axis} is waited for {ms:.1f} ms a step ({ms / step_ms:.0%}), {where}: a larger microbatch gives "
                "it more to hide behind, another mesh makes it smaller."
            )
