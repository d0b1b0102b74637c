"""Make a plan: compile the train step, read its program, estimate its time, and collect warnings."""

import dataclasses
import itertools
from collections import Counter

from jaxtrain.config import installed
from jaxtrain.config.layout import Arrangement
from jaxtrain.config.schema import RunConfig
from jaxtrain.models.attention import kind_shares
from jaxtrain.plan.compile import CompiledStep, compile_step, no_garbage_collection
from jaxtrain.plan.program import buffers, collectives, hlo, pipeline_moe, roofline, warnings
from jaxtrain.plan.rates import expected_ms, rates_for, run_kind
from jaxtrain.plan.result import Plan, Rates, StepFlops, Time
from jaxtrain.plan.topology import Topology
from jaxtrain.step import auto_remat
from jaxtrain.step.model_flops import model_flops
from jaxtrain.step.program import Program
from jaxtrain.step.stages import schedule_of


def make_plan(
    run: RunConfig,
    topology: Topology,
    *,
    rates: Rates | None = None,
    name: str = "",
    overrides: tuple[str, ...] = (),
    experts_load: float = 1.0,
) -> Plan:
    """Return the plan of a run on a machine.

    Args:
      run: a config that training accepts (`validate.validate_step`).
      rates: rates of the machine's GPUs; None: a calibration if there is one, else published kernel rates.
      name, overrides: name and overrides of the config, shown in the plan.
      experts_load: load of the busiest expert of each layer, as a multiple of an even load; 1 or more.

    Raises ConfigError, RuntimeError (see `compile_step`), and HloError for a program that cannot be read.
    """
    options = {"rates": rates, "name": name, "overrides": overrides, "experts_load": experts_load}
    return read_plan(compile_step(run, topology), topology, **options)


@no_garbage_collection()
def read_plan(
    compiled: CompiledStep,
    topology: Topology,
    *,
    rates: Rates | None = None,
    name: str = "",
    overrides: tuple[str, ...] = (),
    experts_load: float = 1.0,
) -> Plan:
    """Return the plan of a compiled step. For the other arguments see `make_plan`."""
    program = compiled.program
    run = program.run
    remat_words = auto_remat.describe_choice(run.model, run.remat) if compiled.auto else ""
    rates = rates or rates_for(topology.gpu, run.precision)
    ranks = program.placement.size(program.placement.compute_axes("experts"))
    rounds = auto_remat.expert_rounds(run.model, run.moe, ranks, experts_load) if run.model.num_experts else 1
    module = dataclasses.replace(compiled.module, further_rounds=rounds - 1, kind_shares=kind_shares(run.model))
    mesh = dict(program.placement.mesh.shape)

    memory = buffers.step_memory(compiled.assigned, program, module, compiled.card, compiled.workspace)
    collective_ops = collectives.read_collectives(module, mesh, topology.gpus)
    filled = auto_remat.expert_fill(run.model, run.moe, ranks, experts_load)
    timing = roofline.predict(module, rates, collective_ops, filled=filled)
    step_collectives = tuple(sorted((c for c in timing.collectives if c.wire_gib), key=lambda c: -c.wire_gib))

    tokens = run.train.global_batch * run.data.seq_len
    matmuls = warnings.fp8_matmuls(program, module)
    return Plan(
        config=name,
        overrides=overrides,
        topology=topology.name,
        chip=topology.device_kind,
        mesh=mesh,
        attention=program.kernel.name,
        fits=memory.taken_gib <= memory.usable_gib,
        memory=memory,
        flops=_flops(program, topology, timing),
        collectives=step_collectives,
        time=_time(program, topology, tokens, timing, rates),
        kernels=timing.kernels,
        rates=rates,
        tokens_per_step=tokens,
        compile_s=compiled.seconds,
        trip_counts=_trip_counts(module),
        host_waits=_host_waits(module),
        warnings=(
            *compiled.chosen.warnings(),
            *filter(None, [model_flops(run).note]),
            *warnings.config_warnings(program, step_collectives, memory, timing, rates),
            *warnings.program_warnings(program, module, collective_ops.values(), step_collectives, timing.step_ms),
            *warnings.fp8_warnings(program, matmuls),
        ),
        versions=installed.versions(),
        options=compiled.chosen.options,
        kept=remat_words,
        matmuls=matmuls,
        pipeline=pipeline_moe.pipeline_figures(program.layout, step_collectives, memory),
        experts=pipeline_moe.expert_figures(program, step_collectives, experts_load),
        kind=run_kind(run, topology.gpu, topology.total, program.kernel.name),
    )


def _flops(program: Program, topology: Topology, timing: roofline.Roofline) -> StepFlops:
    analytic = model_flops(program.run)
    per_token = analytic.training
    by_rank = program.context.size > 1 and analytic.by_formula
    return StepFlops(
        per_token_causal=per_token.causal,
        per_token_full=per_token.full,
        hardware_per_step=timing.flops,
        expected_per_step=roofline.expected_flops(program),
        attention_per_step=timing.flops - timing.gemm_flops,
        attention_by_rank=roofline.attention_by_rank(program) if by_rank else (),
    )


def _time(program: Program, topology: Topology, tokens: int, timing: roofline.Roofline, rates: Rates) -> Time:
    # In the bubble a stage runs the same kernels, and their results are discarded.
    run, layout = program.run, program.layout
    with_bubble = roofline.expected_flops(program)
    without_bubble = roofline.expected_flops(program, dataclasses.replace(layout, stages=Arrangement(layout.stages.layers)))
    useful = without_bubble / with_bubble if with_bubble else 1 - schedule_of(layout).bubble
    step_s = timing.step_ms / 1e3
    per_token = model_flops(run).training
    # FLOPs of one GPU at its peak during a step. Under fp8 the peak is that of bfloat16, since its steps have matmuls in both.
    peak_flops = topology.gpu.peak(run.compute) * 1e12 * step_s
    gpu_tokens = tokens / topology.total
    mfu = per_token.causal * gpu_tokens / peak_flops
    expected = expected_ms(timing.step_ms, run_kind(run, topology.gpu, topology.total, program.kernel.name), rates)
    return Time(
        gemm_ms=timing.gemm_ms,
        attention_ms=timing.attention_ms,
        memory_ms=timing.memory_ms,
        compute_ms=timing.gemm_ms + timing.attention_ms + timing.memory_ms,
        communication_ms=timing.communication_ms,
        exposed_ms=timing.exposed_ms,
        host_exposed_ms=timing.host_exposed_ms,
        step_ms=timing.step_ms,
        tokens_per_s=tokens / step_s,
        tokens_per_s_per_device=gpu_tokens / step_s,
        mfu_causal=mfu,
        mfu_full=per_token.full * gpu_tokens / peak_flops,
        hfu=useful * timing.flops / peak_flops,
        bound_by=timing.bound_by,
        mfu_fp8_peak=mfu * topology.gpu.bf16 / topology.gpu.fp8 if run.precision == "fp8" else None,
        expected_step_ms=expected,
        expected_tokens_per_s_per_device=(gpu_tokens * 1e3 / expected[1], gpu_tokens * 1e3 / expected[0]) if expected else None,
    )


def _name(i: hlo.Instruction) -> str:
    return roofline.op_label(i.op_name) or i.name


def _trip_counts(module: hlo.Module) -> dict[str, int]:
    """Return name of a loop -> its trip count. Loops of equal names are numbered."""
    out: dict[str, int] = {}
    for i, _, _, _ in hlo.walk(module):
        if i.opcode == "while":
            names = itertools.chain([_name(i)], (f"{_name(i)} ({n})" for n in itertools.count(2)))
            out[next(name for name in names if name not in out)] = hlo.trip_count(module, i)
    return out


def _host_waits(module: hlo.Module) -> dict[str, int]:
    """Return name of a loop or conditional -> times per step that the host waits for its predicate or branch index."""
    out: Counter[str] = Counter()
    for i, times in hlo.host_waits(module):
        out[_name(i)] += times
    return dict(out)
