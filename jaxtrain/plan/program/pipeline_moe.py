"""Figures of a plan about pipeline stages and experts: bubble, capacity, and communication."""

from collections.abc import Sequence

from jaxtrain.config.layout import Arrangement, Layout
from jaxtrain.models import flops
from jaxtrain.plan import result
from jaxtrain.plan.result import Collective, Memory
from jaxtrain.step import auto_remat
from jaxtrain.step.program import Program
from jaxtrain.step.stages import Schedule, schedule_of

STAGE, EXPERT = "stage", "expert"
SMALL = 0.5  # times the bytes of the largest permutation: smaller permutations send no activations


def pipeline_figures(layout: Layout, collectives: Sequence[Collective], memory: Memory) -> result.PipelineFigures | None:
    """Return the figures of a pipeline; None if it has one stage. collectives: every collective of a step."""
    schedule = schedule_of(layout)
    if schedule.stages == 1:
        return None
    stage_collectives = [c for c in collectives if STAGE in c.axes]
    permutes = [c for c in stage_collectives if c.kind == "collective-permute"]
    return result.PipelineFigures(
        schedule=schedule.name,
        stages=schedule.stages,
        groups=schedule.groups,
        microbatches=schedule.microbatches,
        layers=stage_layers(layout.stages),
        bubble=schedule.bubble,
        idle=_idle(schedule, permutes),
        in_flight=schedule.in_flight,
        saved_gib=memory.by_class.get("saved activations", 0.0),
        permute_gib=sum(c.wire_gib for c in permutes),
        reduce_gib=sum(c.wire_gib for c in stage_collectives if c.kind != "collective-permute"),
        network_gib=sum(c.network_gib for c in stage_collectives),
        ms=sum(c.ms for c in stage_collectives),
        exposed_ms=sum(c.exposed_ms for c in stage_collectives),
    )


def stage_layers(arrangement: Arrangement) -> tuple[str, ...]:
    """Return the layers of each stage: "0-9", or "0-4 10-14" for two virtual stages."""
    out = []
    for stage in range(arrangement.stages):
        first = stage * arrangement.groups * arrangement.per_group
        groups = (
            arrangement.order[at : at + arrangement.per_group]
            for at in range(first, first + arrangement.groups * arrangement.per_group, arrangement.per_group)
        )
        runs = [[layer for layer in group if layer is not None] for group in groups]
        out.append(" ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs if r))
    return tuple(out)


def _idle(schedule: Schedule, permutes: Sequence[Collective]) -> float:
    """Return the fraction of passes through a stage that have no microbatch.

    After each pass, forward or backward, a stage sends activations or gradients to a neighbour once. The program has the count
    of these sends. A microbatch needs one send per virtual stage and direction; all other sends are of idle passes.
    """
    largest = max((c.wire_gib / c.count for c in permutes), default=0.0)
    passes = sum(c.count for c in permutes if c.wire_gib / c.count > SMALL * largest)
    return 1 - 2 * schedule.units / passes if passes else 0.0


def expert_figures(program: Program, collectives: Sequence[Collective], load: float = 1.0) -> result.Experts | None:
    """Return the figures of a model's experts; None for a dense model. load: the busiest expert's load over an even load."""
    run, placement = program.run, program.placement
    model = run.model
    if not model.num_experts:
        return None
    ranks = placement.size(placement.compute_axes("experts"))
    shards = placement.size(placement.token_axes)
    tokens = run.tokens_per_step / run.train.grad_accum / shards
    exchanged = [c for c in collectives if EXPERT in c.axes and c.kind == "all-to-all" and "/experts/" in c.op_name]
    passes = model.stacked_layers / placement.size(STAGE) * run.train.grad_accum
    return result.Experts(
        experts=model.num_experts,
        per_token=model.experts_per_token,
        devices=ranks,
        rows=tokens * flops.expert_rows(model, run.moe, run.mesh),
        room=tokens * auto_remat.expert_room(model, run.moe, ranks),
        capacity=run.moe.capacity_factor,
        layer_gib=sum(c.wire_gib for c in exchanged) / passes,
        layer_exposed_ms=sum(c.exposed_ms for c in exchanged) / passes,
        exposed_ms=sum(c.exposed_ms for c in exchanged),
        load=load,
        rounds=auto_remat.expert_rounds(model, run.moe, ranks, load),
    )
