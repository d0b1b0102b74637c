"""The classic mistakes of sharded programs, found in the compiled step and said in words.

Each warning names what was found, what it costs, where it comes from, and what usually mends it.
"""

import math
from collections.abc import Iterator, Sequence

import jax

from jaxtrain.config import RunConfig
from jaxtrain.kernels.dot import DTYPES
from jaxtrain.plan.collectives import Found
from jaxtrain.plan.hlo import Computation, Instruction, Module
from jaxtrain.plan.result import Collective
from jaxtrain.sharding import left_whole
from jaxtrain.state import abstract_tensors
from jaxtrain.step import Program

LARGE = 1 << 20  # bytes of one launch below which a collective is bookkeeping
EXPOSED = 0.01  # of the step: waiting for one collective longer than this deserves a line
GATHERS, REDUCTIONS = ("all-gather",), ("reduce-scatter", "all-reduce")
# Operations that leave a value what it is, or round it.
SAME_VALUE = ("bitcast", "convert", "copy", "transpose", "reshape", "get-tuple-element", "opt-barrier", "optimization-barrier")


def warnings(
    run: RunConfig, program: Program, module: Module, found: Sequence[Found], moved: Sequence[Collective], step_ms: float
) -> tuple[str, ...]:
    """All that is suspicious in a compiled step, costliest first within each kind."""
    large = sorted((f for f in found if f.wire_bytes > LARGE), key=lambda f: -f.wire_bytes * f.count)
    return (
        *_wide(run, large),
        *_could_be_outside(module, large),
        *_resharding(module, large),
        *_whole(program),
        *_waits(moved, step_ms),
    )


def _where(f: Found) -> str:
    return f.source or f.op_name or f.instruction


def _cost(f: Found) -> str:
    return f"{f.count} a step, {f.count * f.wire_bytes / 1e9:.2f} GB on the wire a GPU"


def _wide(run: RunConfig, found: Sequence[Found]) -> Iterator[str]:
    """float32 on the wire where the config asks for less."""
    for f in found:
        if "f32" not in f.dtype.split("+"):
            continue
        if f.kind in GATHERS and DTYPES[run.precision].itemsize < 4:
            yield (
                f"float32 all-gather over {f.axis} ({_cost(f)}) from {_where(f)}: precision is {run.precision}, so half of it "
                "would do. Cast before the gather, as Placement.gather does."
            )
        if f.kind in REDUCTIONS and DTYPES[run.dtypes.reduce].itemsize < 4:
            yield (
                f"float32 {f.kind} over {f.axis} ({_cost(f)}) from {_where(f)}: dtypes.reduce is {run.dtypes.reduce}. Cast "
                "before the reduction."
            )


def _could_be_outside(module: Module, found: Sequence[Found]) -> Iterator[str]:
    """Gathers inside a loop of something that the loop does not change."""
    for f in found:
        if f.kind not in GATHERS or not f.loops:
            continue
        owner = module.owners[f.instruction]
        gather = owner.by_name[f.instruction]
        if all(_invariant(module, owner, owner.by_name[o]) for o in gather.operands):
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
        if i.opcode == "get-tuple-element" and body.by_name[i.operands[0]].opcode == "parameter":
            if not _passed_through(body, int(i.attributes["index"])):
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
    for f in found:
        if f.kind not in ("all-to-all", "collective-permute"):
            continue
        if _by_partitioner(module, f):
            yield (
                f"{f.kind} over {f.axis} that nobody asked for ({_cost(f)}) near {_where(f)}: two layouts do not agree there. "
                "Pin one of them with Placement.constrain, or change sharding.rules."
            )


def _by_partitioner(module: Module, f: Found) -> bool:
    launch = module.owners[f.instruction].by_name[f.instruction]
    inner = [i for name in launch.called for i in module.computations[name].instructions]
    return any('is_spmd_generated="true"' in i.attributes.get("frontend_attributes", "") for i in (launch, *inner))


def _whole(program: Program) -> Iterator[str]:
    """State that every device holds in full, or that is split less than its parameter."""
    for name in left_whole(abstract_tensors(program.state)):
        yield f"not split over any device, every one holds all of it: {name}. See sharding.rules."
    split = {a.shape: _shards(a) for a in jax.tree.leaves(program.state.params)}
    for path, a in jax.tree_util.tree_leaves_with_path(program.state.optimizer):
        wanted = split.get(a.shape, 1)
        if _shards(a) < wanted and not a.sharding.is_fully_replicated:
            name = jax.tree_util.keystr(path)
            yield f"optimizer{name} is split {_shards(a)} ways and its parameter {wanted} ways: pin its layout in state.py."


def _shards(a: jax.ShapeDtypeStruct) -> int:
    return math.prod(a.shape) // max(1, math.prod(a.sharding.shard_shape(a.shape))) if a.sharding else 1


def _waits(moved: Sequence[Collective], step_ms: float) -> Iterator[str]:
    """Collectives that the schedule does not hide."""
    for c in sorted(moved, key=lambda c: -c.exposed_ms):
        if c.exposed_ms > EXPOSED * step_ms:
            share = c.exposed_ms / step_ms
            yield (
                f"{c.kind} over {c.axis} is waited for {c.exposed_ms:.1f} ms a step ({share:.0%}), {c.source or c.op_name}: "
                "a larger microbatch gives it more to hide behind, another mesh makes it smaller."
            )
