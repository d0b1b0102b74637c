"""Warnings about a compiled train step, each with its cost, its line of Python or setting, and a fix.

`program_warnings` finds avoidable work in a program: collectives in float32, gathers that a loop repeats, resharding,
replicated state, exposed communication. `config_warnings` finds settings that are too small, or on the wrong axis.
`fp8_matmuls` finds matmuls that the compiler left in 16 bits.
"""

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.config.layout import Layout, StepDtypes
from jaxtrain.config.numbers import GB_PER_GIB
from jaxtrain.config.schema import MESH_AXES, Remat, Sharding, Train
from jaxtrain.config.shapes import without_layer_key
from jaxtrain.kernels.numerics import DTYPES
from jaxtrain.models import activations
from jaxtrain.models.lora import is_adapter
from jaxtrain.models.precision import EXPERTS, has_uneven_experts
from jaxtrain.plan.program.collectives import CollectiveOp
from jaxtrain.plan.program.hlo import Computation, Instruction, Module, walk
from jaxtrain.plan.program.op_cost import GEMM_CALLS, is_expert_matmul, is_fp8_matmul
from jaxtrain.plan.program.roofline import Roofline, op_label
from jaxtrain.plan.result import Collective, Matmuls, Memory, Rates
from jaxtrain.sharding import Placement, large_replicated_arrays, node_of
from jaxtrain.step.definition import fp8_weights
from jaxtrain.step.program import Program
from jaxtrain.step.stages import IDLE, schedule_of
from jaxtrain.step.state import abstract_tensors

LARGE = 1 << 20  # bytes; smaller launches and arrays cause no warning
EXPOSED = 0.02  # of the step; less exposed communication causes no warning
SLACK = 1.25  # over the tokens that would overlap all communication, since no schedule is perfect
MAX_NAMES = 4  # names in one warning; more are only counted
# Operations directly in the loop over microbatches. Those of inner loops have another "/while/body".
MICROBATCH = re.compile(r"jit\(train_step\)/(shard_map/)?while/body/(?!.*/while/body)")
LAYER = re.compile(r"\.layers\.(\d+)\.")
SAME_VALUE = ("bitcast", "convert", "copy", "transpose", "reshape")  # opcodes that leave a value unchanged, or round it
CONTEXT = "kernels/context_parallel"  # folder of the rings over mesh.seq
# Sources of matmuls without a weight of a layer: attention and the loss.
NO_WEIGHT = ("kernels/attention", CONTEXT, "kernels/cross_entropy")


# ---- Mistakes of the program


def program_warnings(
    program: Program, module: Module, ops: Collection[CollectiveOp], collectives: Sequence[Collective], step_ms: float
) -> tuple[str, ...]:
    """Return the warnings about a compiled program.

    Float32 collectives, repeated gathers and resharding have a warning for each line of Python, most bytes first. Replicated
    state and exposed communication have one warning each.

    Args:
      module: the compiled program of `program`.
      ops: its collectives, each with the bytes of one launch.
      collectives: its collectives, each summed over a step.
      step_ms: step time of the roofline.
    """
    run = program.run
    large = [op for op in ops if op.wire_bytes > LARGE]
    return (
        *_float32(run.precision, program.layout.dtypes, large),
        *_invariant_gathers(module, large, microbatch_loops(run.train.grad_accum, ops)),
        *_resharding(module, large),
        *(_replicated(program) if run.sharding.zero else ()),
        *_exposed(collectives, step_ms),
    )


def microbatch_loops(microbatches: int, ops: Collection[CollectiveOp]) -> frozenset[str]:
    """Return the names of the loops over microbatches; none without accumulation.

    The compiler may leave a loop without an op_name. So the loop is recognised by its collectives outside of inner loops.
    """
    if microbatches == 1:
        return frozenset()
    return frozenset(op.loops[0] for op in ops if len(op.loops) == 1 and MICROBATCH.match(op.op_name))


def _line(op: CollectiveOp) -> str:
    return op.source or op.op_name or op.instruction


def _cost(op: CollectiveOp) -> str:
    return f"{op.count} a step, {op.count * op.wire_bytes / 1e9:.2f} GB on the wire a GPU"


def _by_line(ops: Sequence[CollectiveOp]) -> list[CollectiveOp]:
    """Return collectives, merged by kind, dtype, axis and line of Python (unrolled loops repeat them), most bytes first."""
    groups: dict[tuple[str, ...], list[CollectiveOp]] = defaultdict(list)
    for op in ops:
        groups[op.kind, op.dtype, op.axis, _line(op)].append(op)
    merged = []
    for group in groups.values():
        count = sum(op.count for op in group)
        each = sum(op.count * op.wire_bytes for op in group) / max(1, count)
        merged.append(dataclasses.replace(group[0], count=count, wire_bytes=each))
    return sorted(merged, key=lambda op: -op.count * op.wire_bytes)


def _float32(precision: str, dtypes: StepDtypes, ops: Sequence[CollectiveOp]) -> Iterator[str]:
    """Yield a warning for each float32 gather if `precision` is not f32, and float32 reduction if `dtypes.reduce` is not."""
    for op in _by_line([op for op in ops if "f32" in op.dtype.split("+") and op.f32 * op.wire_bytes > LARGE]):
        start = f"float32 {op.kind} over {op.axis} ({_cost(op)}) from {_line(op)}: "
        if op.kind == "all-gather" and dtypes.compute != "f32":
            yield f"{start}precision is {precision}. Fix: cast before the gather, as Placement.gather does."
        # A ring sums gradients of keys and values in float32, as attention on one device does.
        if op.kind in ("reduce-scatter", "all-reduce") and dtypes.reduce != "f32" and CONTEXT not in op.source:
            yield f"{start}dtypes.reduce is {dtypes.reduce}. Fix: cast before the reduction."


def _invariant_gathers(module: Module, ops: Sequence[CollectiveOp], microbatches: frozenset[str]) -> Iterator[str]:
    """Yield a warning for each gather inside a loop of a value that does not change in the loop.

    The loop over microbatches is left out: ZeRO shards weights to avoid holding gathered weights throughout that loop.
    """
    outside = []
    for op in ops:
        if op.kind == "all-gather" and op.loops and op.loops[-1] not in microbatches:
            body = module.owners[op.instruction]
            if all(_is_invariant(body, body.by_name[o]) for o in body.by_name[op.instruction].operands):
                outside.append(op)
    for op in _by_line(outside):
        yield (
            f"all-gather over {op.axis} of an array that does not change in the loop around it ({_cost(op)}) from {_line(op)}. "
            "Fix: gather it once, before the loop."
        )


def _is_invariant(body: Computation, value: Instruction) -> bool:
    """Return whether a value is the same in every iteration of the loop with this body."""
    todo, visited = [value], set()
    while todo:
        i = todo.pop()
        if i.name in visited:
            continue
        visited.add(i.name)
        if i.opcode == "get-tuple-element":
            source, index = body.by_name[i.operands[0]], int(i.attributes["index"])
            while source.opcode == "opt-barrier":
                source = body.by_name[source.operands[0]]
            if source.opcode == "tuple":
                todo.append(body.by_name[source.operands[index]])
            elif source.opcode != "parameter" or not _passed_through(body, index):
                return False
        elif i.opcode in SAME_VALUE or i.opcode in ("fusion", "constant"):
            # If a fusion slices by iteration, the loop's counter, which changes, is one of its operands.
            todo += [body.by_name[o] for o in i.operands]
        else:
            return False
    return True


def _passed_through(body: Computation, index: int) -> bool:
    """Return whether a loop with this body leaves element `index` of its state unchanged."""
    root = body.root
    if root.opcode != "tuple":
        return False
    last = body.by_name[root.operands[index]]
    while last.opcode in ("bitcast", "copy"):
        last = body.by_name[last.operands[0]]
    if last.opcode != "get-tuple-element" or body.by_name[last.operands[0]].opcode != "parameter":
        return False
    return int(last.attributes["index"]) == index


def _resharding(module: Module, ops: Sequence[CollectiveOp]) -> Iterator[str]:
    """Yield a warning for each collective that the partitioner inserted because two shardings in the program differ."""

    def by_partitioner(op: CollectiveOp) -> bool:
        launch = module.instruction(op.instruction)
        inner = [i for name in launch.called for i in module.computations[name].instructions]
        return any('is_spmd_generated="true"' in i.attributes.get("frontend_attributes", "") for i in (launch, *inner))

    for op in _by_line([op for op in ops if op.kind in ("all-to-all", "collective-permute") and by_partitioner(op)]):
        yield (
            f"{op.kind} over {op.axis} that the compiler inserted ({_cost(op)}) near {_line(op)}: two shardings do not agree. "
            "Fix: change sharding.rules, or call Placement.constrain on one of the two."
        )


def _replicated(program: Program) -> Iterator[str]:
    """Yield a warning about replicated state. An array of several layers is named once, with their number."""
    # One of an adapter's two matrices has no dimension that is sharded over the batch's axes. It is small.
    tensors = {name: a for name, a in abstract_tensors(program.state).items() if not is_adapter(name)}
    sizes = {name: math.prod(a.shape) * a.dtype.itemsize for name, a in tensors.items()}  # bytes
    names = sorted((line.split(" ")[0] for line in large_replicated_arrays(tensors, LARGE)), key=lambda name: -sizes[name])
    if not names:
        return
    layers: Counter[str] = Counter()
    for name in names:
        short = LAYER.sub(".layers.*.", name)
        layers[short] += short != name
    shown = [f"{name} ({count} layers)" if count else name for name, count in layers.items()]
    more = [f"{len(shown) - MAX_NAMES} more"] if len(shown) > MAX_NAMES else []
    gib = sum(sizes[name] for name in names) / 2**30
    yield (
        f"replicated, every GPU holds all of it ({gib:.2f} GiB): {', '.join(shown[:MAX_NAMES] + more)}. "
        "Fix: shard one of the parameter's dimensions by sharding.rules; its moments follow."
    )


def _exposed(collectives: Sequence[Collective], step_ms: float) -> Iterator[str]:
    """Yield one warning with the lines of Python whose collectives are exposed longest."""
    exposed: dict[str, float] = defaultdict(float)
    for c in collectives:
        exposed[f"{c.kind} over {c.axis} ({c.source or c.op_name})"] += c.exposed_ms
    longest = sorted(((ms, name) for name, ms in exposed.items() if ms > EXPOSED * step_ms), reverse=True)
    if longest:
        listed = "; ".join(f"{name} {ms:.3g} ms" for ms, name in longest[:MAX_NAMES])
        more = f"; {len(longest) - MAX_NAMES} more" if len(longest) > MAX_NAMES else ""
        total = sum(ms for ms, _ in longest)
        yield (
            f"exposed communication, {total:.3g} ms a step ({total / step_ms:.0%}): {listed}{more}. Fix: a larger microbatch "
            "(a lower train.grad_accum, or a higher train.global_batch) overlaps more of it; another mesh sends less."
        )


# ---- FP8


def fp8_matmuls(program: Program, module: Module) -> Matmuls | None:
    """Return the number of matmuls per layer and microbatch, by precision; None unless precision=fp8.

    If the compiler does not recognise the pattern of an FP8 matmul, the matmul runs in 16 bits, at half the speed.
    """
    run = program.run
    if run.precision != "fp8":
        return None
    total, num_fp8 = 0, 0
    wide: Counter[str] = Counter()
    for i, computation, times, _ in walk(module, fusions=True):
        matmul = i.opcode == "dot" or i.target in GEMM_CALLS or is_expert_matmul(i)
        if not matmul or op_label(i.op_name).startswith("loss") or any(path in i.source for path in NO_WEIGHT):
            continue
        total += times
        if is_fp8_matmul(computation, i):
            num_fp8 += times
        else:
            wide[f"{op_label(i.op_name) or i.name} ({i.source})"] += times
    layer_runs = run.model.num_layers * run.train.grad_accum
    return Matmuls(total / layer_runs, num_fp8 / layer_runs, tuple(f"{name}, {n:,} a step" for name, n in wide.most_common()))


def fp8_warnings(program: Program, matmuls: Matmuls | None) -> Iterator[str]:
    """Yield a warning if fewer matmuls run in FP8 than precision=fp8 implies. matmuls: `fp8_matmuls` of the step."""
    if matmuls is None:
        return
    run = program.run
    in_fp8 = fp8_weights(run.precision, run.fp8.exclude, program.definition)
    weights = map(jax.tree_util.tree_leaves_with_path, (in_fp8, program.trained))
    paired = [(path, trains) for (path, eight), (_, trains) in zip(*weights, strict=True) if eight]
    trained = [trains for _, trains in paired]
    # Forward, gradient of x, gradient of a trained weight. The first layer's x has none if nothing before it is trained.
    expected = sum(2 + trains for trains in trained)
    if has_uneven_experts(run.model, run.moe, run.mesh):
        expected -= sum(trains for path, trains in paired if without_layer_key(".".join(key.key for key in path)) in EXPERTS)
    least = expected - trained.count(False) / run.model.num_layers
    if matmuls.eight < least:
        yield (
            f"precision is fp8, but of the {expected} matmuls of a layer that should be in FP8 only {matmuls.eight:g} are. "
            f"Wider: {matmuls.some_wide or 'none'}. Fix: write them as the model's own layers do, or set precision=bf16."
        )


# ---- Mistakes of the config


def config_warnings(
    program: Program, collectives: Sequence[Collective], memory: Memory, timing: Roofline, rates: Rates
) -> tuple[str, ...]:
    """Return the warnings about a config on this machine, from its plan.

    collectives: the program's collectives, each summed over a step.
    """
    run, placement = program.run, program.placement
    return (
        *_across_nodes(placement.mesh, collectives, timing),
        *_few_rows(program, collectives, timing, rates),
        *_once_a_step(run.sharding, run.train, placement, collectives, timing),
        *_bubble(program.layout, run.train.global_batch),
        *_saved_activations(run.remat, memory),
    )


def _moves_weights(collective: Collective) -> bool:
    """Return whether a collective communicates weights or gradients, and not keys and values of a ring over the same axes."""
    return collective.kind in ("all-gather", "reduce-scatter", "all-reduce") and CONTEXT not in collective.source


def _share(ms: float, timing: Roofline) -> str:
    return f"{ms:.1f} ms a step ({ms / timing.step_ms:.0%})"


def _across_nodes(mesh: Mesh, collectives: Sequence[Collective], timing: Roofline) -> Iterator[str]:
    """Yield a warning for each of the axes tensor, seq and expert that spans nodes: they communicate in every layer."""
    nodes = np.vectorize(node_of)(mesh.devices)
    node = int(np.unique(nodes, return_counts=True)[1].max())
    for axis, fix in (
        ("tensor", "set mesh.tensor={} or less, and leave the rest to mesh.fsdp."),
        ("seq", "set mesh.seq={} or less if the sequence fits; parallel.context=ring overlaps the most of it."),
        ("expert", "set mesh.expert={} or less, and leave the rest to mesh.fsdp: a GPU then holds more experts."),
    ):
        if mesh.shape.get(axis, 1) == 1:
            continue
        index = mesh.axis_names.index(axis)
        groups = np.moveaxis(nodes, index, -1)
        if (groups == groups[..., :1]).all():
            continue
        crossing = [c for c in collectives if c.axes == {axis} and c.network_gib]
        sent, exposed = sum(c.network_gib for c in crossing) * GB_PER_GIB, sum(c.exposed_ms for c in crossing)
        within = max(1, node // math.prod(mesh.shape[a] for a in mesh.axis_names[index + 1 :]))
        yield (
            f"{axis} groups of {mesh.shape[axis]} reach across nodes of {node} GPUs: each GPU sends {sent:.2f} GB a step over "
            f"the network, and {_share(exposed, timing)} of that are exposed. Fix: {fix.format(within)}"
        )


def _few_rows(program: Program, collectives: Sequence[Collective], timing: Roofline, rates: Rates) -> Iterator[str]:
    """Yield a warning if microbatches are too small to overlap the communication of weights, or the reads of weights."""
    run, placement = program.run, program.placement
    shards = placement.size(placement.mesh_axes("batch"))
    rows = run.tokens_per_step / run.train.grad_accum / placement.size(placement.token_axes)  # tokens of a microbatch on a GPU
    arithmetic = timing.gemm_ms + timing.attention_ms + timing.memory_ms
    weights = [c for c in collectives if c.axes <= set(placement.mesh_axes("embed")) and _moves_weights(c)]
    communication, exposed = sum(c.ms for c in weights), sum(c.exposed_ms for c in weights)
    often = run.sharding.zero >= 2 and run.sharding.gather != "step"  # for each microbatch
    if often and communication > arithmetic > 0 and exposed > EXPOSED * timing.step_ms:
        enough = SLACK * rows * communication / arithmetic
        yield (
            f"a microbatch gives each GPU {rows:,.0f} tokens, too few to overlap the communication of weights: that takes "
            f"{communication:.0f} ms a step, all computation {arithmetic:.0f} ms, and {_share(exposed, timing)} are exposed. "
            f"About {math.ceil(enough / 256) * 256:,} tokens are enough. Fix: {_grow_batch(run.train, shards, rows, enough)}"
        )
    # FP8 halves both a weight's bytes and its matmul's time, so the balance stays that of 16 bits.
    balance = rates.gemm_tflops / rates.memory_tb_s * DTYPES[run.compute].itemsize / 2
    idle = timing.gemm_ms - timing.gemm_least_ms
    if rows < balance and idle > EXPOSED * timing.step_ms:
        yield (
            f"a microbatch gives each GPU {rows:,.0f} tokens, and below {balance:,.0f} a matmul takes longer to read its "
            f"weights than to compute: that costs {_share(idle, timing)}. Fix: {_grow_batch(run.train, shards, rows, balance)}"
        )


def _grow_batch(train: Train, shards: int, rows: float, enough: float) -> str:
    """Return the fix that gives each GPU `enough` tokens a microbatch instead of `rows`. shards: those of the batch."""
    batch, accum = train.global_batch, train.grad_accum
    fewer = [a for a in range(1, accum) if batch % (a * shards) == 0 and rows * accum / a >= enough]
    if fewer:
        return f"set train.grad_accum={max(fewer)}."
    also = " and train.grad_accum=1" if accum > 1 else ""
    return f"set train.global_batch to about {math.ceil(batch * enough / (rows * accum))}{also}, or use fewer GPUs."


def _once_a_step(
    sharding: Sharding, train: Train, placement: Placement, collectives: Sequence[Collective], timing: Roofline
) -> Iterator[str]:
    """Yield a warning if communication that runs once per step is exposed, because the step has too few microbatches."""
    weights = set(placement.mesh_axes("embed"))
    replicas = set(placement.token_axes) - weights
    once = sharding.zero == 1 or (sharding.zero == 3 and sharding.gather == "step")
    for axes, work, option in (
        (replicas, "gradients are summed", "a smaller mesh.data leaves less to sum"),
        (weights if once else set(), "weights are gathered and gradients reduced", "sharding.gather=layer can overlap it"),
    ):
        exposed = sum(c.exposed_ms for c in collectives if c.axes <= axes and _moves_weights(c))
        if exposed <= EXPOSED * timing.step_ms:
            continue
        times = 2 ** math.ceil(math.log2(exposed * (1 / EXPOSED - 1) / (timing.step_ms - exposed)))
        more = f"set train.grad_accum={train.grad_accum * times} and train.global_batch={train.global_batch * times}"
        yield (
            f"{work} over {'+'.join(a for a in MESH_AXES if a in axes)} once a step, and {_share(exposed, timing)} of that are "
            f"exposed: train.grad_accum={train.grad_accum} is too few microbatches. Fix: {more} for {EXPOSED:.0%}; {option}."
        )


def _bubble(layout: Layout, global_batch: int) -> Iterator[str]:
    """Yield a warning if a pipeline has too few microbatches, so that its bubble is too large."""
    accum, stages, groups = layout.batch[0], layout.stages.stages, layout.stages.groups
    bubble = schedule_of(layout).bubble
    if bubble <= IDLE:
        return
    enough = math.ceil((stages - 1) * (1 / IDLE - 1) / groups / stages) * stages
    more = global_batch * enough // accum
    several = next((v for v in (2, 4) if v > groups and v * stages <= layout.stages.layers), 0)
    interleaved = f"set pipeline.schedule=interleaved pipeline.groups={several}, or " if several and accum % stages == 0 else ""
    yield (
        f"the bubble of {stages} stages is {bubble:.0%} of the step: train.grad_accum={accum} is too few microbatches. Fix: "
        f"{interleaved}set train.grad_accum={enough}, of train.global_batch={more} or in smaller microbatches, for {IDLE:.0%}."
    )


def _saved_activations(remat: Remat, memory: Memory) -> Iterator[str]:
    """Yield a warning about saved activations if the step does not fit and another remat policy saves at least 1 GiB less."""
    excess_gib = memory.taken_gib - memory.usable_gib
    if excess_gib <= 0 or remat.policy == "full":
        return
    total = sum(memory.saved.values())
    less = {policy: total - _saved_gib(policy, memory) for policy in ("dots", "attention", "full")}
    policy = next((p for p in less if less[p] > excess_gib), "full")
    if less[policy] < 1.0:
        return
    largest = sorted(memory.saved.items(), key=lambda item: -item[1])
    listed = "; ".join(f"{name} {gib:.1f}" for name, gib in largest[:MAX_NAMES])
    enough = "" if less[policy] > excess_gib else ", which is not enough alone: take a smaller microbatch too"
    yield (
        f"the step is {excess_gib:.1f} GiB too big, and remat.policy={remat.policy} saves {total:.1f} "
        f"GiB of activations for the backward pass ({listed}). Fix: set remat.policy={policy} remat.tensors='': about "
        f"{less[policy]:.0f} GiB less{enough}."
    )


def _saved_gib(policy: str, memory: Memory) -> float:
    """Return the GiB of the plan's saved activations that `policy` also saves.

    A key of `memory.saved` may list several activations: each counts as an equal part of its GiB.
    """
    names = {"layer input", *activations.SAVED[policy]}
    total = 0.0
    for group, gib in memory.saved.items():
        each = group.partition(":")[0].split(", ")
        total += gib * sum(name in names for name in each) / len(each)
    return total
