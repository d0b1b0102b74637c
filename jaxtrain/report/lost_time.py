"""Why a step takes longer than its matmuls: measured causes in one list, longest first. Imports no jax.

Causes come from a trace (`profile_times`), from the lines of metrics.jsonl and from the goodput ledger. No time counts under
two causes: "slow kernels" is without the part of low clocks and without recomputation, and "waiting for the host" is without
the wait for data. Saves and evaluations are between steps: their time is divided by the steps of the run, and their share is of
the wall time.
"""

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from jaxtrain.config.numbers import number, percent, plural, rough
from jaxtrain.report.run import RunFolder
from jaxtrain.report.tables import Column, Listing, Section, Table, numbers

if TYPE_CHECKING:
    from jaxtrain.report.profile_times import Op, StepTimes

LEAST = 1e-3  # of a step; shorter causes are left out
LISTED = 3  # longest collectives that are named
CLOCKED = ("matmul", "attention")  # kinds whose speed is that of the SM clock
# Mesh axis -> settings that change the communication over this axis.
AXES = {
    "fsdp": "mesh.fsdp, sharding.zero, sharding.gather, parallel.scan_layers",
    "data": "mesh.data, train.grad_accum, dtypes.reduce",
    "tensor": "mesh.tensor",
    "seq": "mesh.seq, parallel.context",
    "expert": "mesh.expert, moe.impl",
    "stage": "mesh.stage, pipeline.schedule",
}


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause of lost time."""

    cause: str
    seconds: float  # of a step
    evidence: str
    setting: str  # keys of the config that change it
    of_wall_time: float | None = None  # share of the run's wall time, of a cause that is between steps


@dataclasses.dataclass(frozen=True)
class LostTime:
    """Causes of lost time, longest first, and a sentence for each cause that was not measured."""

    step_s: float  # traced; without a trace the median of the run; 0 without both
    rows: tuple[Cause, ...] = ()
    missing: tuple[str, ...] = ()


def lost_time(profile: "StepTimes | None", run: RunFolder | None) -> LostTime:
    """Return the causes of lost time.

    Args:
        profile: of a trace of the run; None without a trace.
        run: None if the trace is in no run's folder.
    """
    step_times = [t for t in run.train["step_time_s"] if t is not None] if run else []
    step_s = profile.step_ms / 1e3 if profile else statistics.median(step_times) if step_times else 0.0
    if not step_s:
        return LostTime(0.0, (), ("Nothing yet: metrics.jsonl has no time of a step.",))
    clock: Cause | str = "Clocks, data, saves: this trace is in no run's folder. Fix: name that folder."
    if run:
        clock = _clock(profile, run, step_s)
    causes: list[Cause | str] = [clock, *_waits(profile, run)]
    causes += _trace_causes(profile, clock.seconds if isinstance(clock, Cause) else 0.0)
    causes += _run_causes(run, step_s) if run else ()
    rows = [each for each in causes if isinstance(each, Cause) and each.seconds >= LEAST * step_s]
    missing = [each for each in causes if isinstance(each, str)]
    return LostTime(step_s, tuple(sorted(rows, key=lambda row: -row.seconds)), tuple(missing))


# Each of these functions gives causes, and a sentence for each cause that was not measured.


def _trace_causes(profile: "StepTimes | None", clock_s: float) -> Iterator[Cause | str]:
    """Yield exposed communication and host copies, slow kernels and recomputation. clock_s: time that low clocks cost."""
    if profile is None:
        yield "Communication, host copies, kernels, waits for the host: no trace. Fix: start with --config.profile.start=10."
        return
    for link, keys in (("communication", ""), ("host copies", "optimizer.offload, remat.tensors")):
        if longest := _sums((op.collective or op.label, op.ms) for op in profile.ops if op.kind == link):
            axis_keys = [keys for axis, keys in AXES.items() if axis in longest[0][0].partition(" over ")[2]]
            evidence = ", ".join(f"{name} {_ms(ms / 1e3)}" for name, ms in longest[:LISTED])
            evidence += f"; {_ms(profile.overlapped[link] / 1e3)} more are overlapped"
            seconds = profile.by_kind[f"exposed {link}"] / 1e3
            if profile.planned:
                evidence += f"; planned {_ms(profile.planned.by_kind.get(f'exposed {link}', 0.0) / 1e3)}"
            yield Cause(f"exposed {link}", seconds, evidence, keys or ", ".join((*axis_keys, "compiler.options")))
    slow = sorted((op for op in profile.ops if _slow_ms(op)), key=_slow_ms, reverse=True)
    if slow and profile.planned:
        seconds = sum(map(_slow_ms, slow)) / 1e3
        evidence = (
            f"{plural(len(slow), 'operation')} slower than {profile.planned.rates}; the worst is {slow[0].label}: "
            f"{_ms(slow[0].ms / 1e3)}, planned {_ms((slow[0].planned_ms or 0.0) / 1e3)}"
        )
        by_clock = min(clock_s, sum(_slow_ms(op) for op in slow if op.kind in CLOCKED) / 1e3)
        evidence += f"; {_ms(by_clock)} of it by the clocks is not counted here" if by_clock else ""
        yield Cause("slow kernels", seconds - by_clock, evidence, "attention.impl, loss.chunk, compiler.options")
    if profile.planned is None:
        yield f"Slow kernels: {profile.no_plan}."
    if recomputed := _sums((op.part, op.ms) for op in profile.ops if op.phase == "recompute"):
        evidence = f"the backward pass repeats the forward pass; most of it {recomputed[0][0]}: {_ms(recomputed[0][1] / 1e3)}"
        yield Cause("recomputation", sum(ms for _, ms in recomputed) / 1e3, evidence, "remat.policy, remat.tensors")


def _sums(pairs: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return (name, sum of its values), largest first."""
    sums: dict[str, float] = defaultdict(float)
    for name, value in pairs:
        sums[name] += value
    return sorted(sums.items(), key=lambda item: -item[1])


def _ms(seconds: float) -> str:
    return f"{rough(seconds * 1e3)} ms"


def _slow_ms(op: "Op") -> float:
    """Return the time of an operation beyond its plan; 0 for recomputation and communication, which are other causes."""
    excluded = op.planned_ms is None or op.phase == "recompute" or op.kind in ("communication", "host copies")
    return 0.0 if excluded else max(0.0, op.ms - (op.planned_ms or 0.0))


def _clock(profile: "StepTimes | None", run: RunFolder, step_s: float) -> Cause | str:
    """Return the time of matmuls and attention that the GPUs' clocks below their maximum cost; the reason if it is unknown."""
    seen_gpus, lines = set(), []
    for line in (line for line in run.gpu if line.get("sm_clock_mhz")):
        gpu = line["process"], line["gpu"]
        lines += [line] if gpu in seen_gpus else []  # the first line of a GPU has the start of the run, while it is idle
        seen_gpus.add(gpu)
    if not lines:
        return "GPU clocks: metrics.jsonl has too few lines on GPUs; a run writes them every 10 s, on NVIDIA GPUs."
    gpus = (run.receipt.get("hardware") or {}).get("gpus") or ()
    max_clock = max((gpu["max_sm_clock_mhz"] for gpu in gpus if gpu.get("max_sm_clock_mhz")), default=None)
    if max_clock is None:
        return "GPU clocks: the receipt has no max_sm_clock_mhz, which NVML gives."
    if profile:
        ops = (op for op in profile.ops if op.kind in CLOCKED and op.phase != "recompute")
        busy_s, busy_work = sum(op.ms for op in ops) / 1e3, "matmuls and attention"
    else:
        busy_s, busy_work = step_s * statistics.fmean(line.get("utilization") or 0.0 for line in lines), "GPU time"
    clock = statistics.fmean(line["sm_clock_mhz"] for line in lines)
    reasons = Counter(r for line in lines for r in (line.get("throttle_reasons") or "").split("+") if r)
    watts, limits = ([line[key] for line in lines if line.get(key)] for key in ("power_w", "power_limit_w"))
    evidence = [f"{number(clock, 0)} of {number(max_clock, 0)} MHz in {_ms(busy_s)} of {busy_work}"]
    if watts and limits:
        evidence.append(f"{number(statistics.fmean(watts), 0)} W of {number(statistics.fmean(limits), 0)} W")
    if reasons:
        evidence.append(f"throttled by {', '.join(reason for reason, _ in reasons.most_common())}")
    setting = "none: power limit (nvidia-smi --power-limit), cooling"
    return Cause("GPU clocks", busy_s * max(0.0, 1 - clock / max_clock), "; ".join(evidence), setting)


def _waits(profile: "StepTimes | None", run: RunFolder | None) -> Iterator[Cause | str]:
    """Yield waiting for data and waiting for the host, which share the idle time of a trace."""
    data_waits = [wait for wait in run.train["data_wait_s"] if wait is not None] if run else []
    wait = data = statistics.fmean(data_waits) if data_waits else 0.0
    bound = "at most, since the loop is a step ahead of the GPUs"
    if profile:
        idle = profile.by_kind["idle"] / 1e3
        data = min(wait, idle)
        event = _between_steps(profile.steps, run)
        bound = f"the GPUs were idle for {_ms(idle)}"
        evidence = f"idle {_ms(idle)}, {_ms(data)} of it for data; a trace has longer gaps between kernels than training"
        keys = "parallel.scan_layers, log.every_steps, compiler.options"
        if event:
            yield f"Waiting for the host: the traced steps have {event} between them. Fix: trace other steps, by profile.start."
        else:
            yield Cause("waiting for the host", idle - data, evidence, keys)
    if data_waits:
        evidence = f"data_wait_s {_ms(wait)}, mean of {plural(len(data_waits), 'line')}; {bound}"
        yield Cause("waiting for data", data, evidence, "data.source (token files on a local disk), data.packing")
    elif run:
        yield "Waiting for data: no line has data_wait_s yet; the first steps, and those of saves and traces, do not count."


def _between_steps(steps: Sequence[int], run: RunFolder | None) -> str:
    """Return "a save" or "an evaluation" if the config has one between the traced steps: a trace counts it as idle."""
    for section, event in (("checkpoint", "a save"), ("eval", "an evaluation")):
        every = (run.config if run else {}).get(section, {}).get("every_steps", 0)
        if every and any((step + 1) % every == 0 for step in steps[:-1]):
            return event
    return ""


def _run_causes(run: RunFolder, step_s: float) -> Iterator[Cause | str]:
    """Yield saves and evaluations from the goodput ledger, and the bubble of a pipeline by its formula."""
    spent = run.wall_time
    if spent is None or not spent.steps:
        yield "Saves and evaluations: goodput.jsonl has no step yet."
    else:
        for cause, name, keys in (
            ("save", "saves", "checkpoint.every_steps"),
            ("eval", "evaluations", "eval.every_steps, eval.sequences, sample.every_steps"),
        ):
            evidence = f"{number(spent.seconds[cause])} s in {plural(spent.steps, 'step')}, during which no step ran"
            yield Cause(name, spent.seconds[cause] / spent.steps, evidence, keys, spent.seconds[cause] / spent.wanted_s)
    stages = (run.receipt.get("mesh") or {}).get("stage", 1)
    if stages > 1:
        accum, groups = run.config["train"]["grad_accum"], run.config["pipeline"]["groups"]
        bubble = (stages - 1) / (groups * accum + stages - 1)
        evidence = f"{percent(bubble)} of the step by formula, with {stages} stages and {accum} microbatches"
        yield Cause("pipeline bubble", step_s * bubble, evidence, "train.grad_accum, mesh.stage, pipeline.groups")


def share(row: Cause, step_s: float) -> str:
    """Return the share of a cause in words: of the step, or of the wall time."""
    return (
        f"{percent(row.seconds / step_s)} of a step" if row.of_wall_time is None else f"{percent(row.of_wall_time)} of all time"
    )


def lost_time_section(lost: LostTime) -> Section:
    """Return the section of a report with the causes of lost time."""
    rows = lost.rows
    seconds = [row.seconds for row in rows]
    columns = [
        Column("cause", [row.cause for row in rows]),
        numbers("ms of a step", [1e3 * s for s in seconds], total=False),
        Column("share", [share(row, lost.step_s) for row in rows], seconds),
        Column("settings", [row.setting for row in rows], kind="path"),
        Column("evidence", [row.evidence for row in rows], kind="path"),
    ]
    table = [Table(f"Longest first, of a step of {_ms(lost.step_s)}", columns)] if rows else []
    return Section("Lost time", [*table, Listing(lost.missing)])
