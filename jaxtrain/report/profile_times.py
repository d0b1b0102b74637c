"""The time of a step from the events of a trace, by kind, part, operation and device.

Each nanosecond of a step counts once on each device. All operations that compute or copy inside the device in this nanosecond
have equal shares of it. If none runs, the time is exposed communication if a collective runs, else an exposed host copy if a
host copy runs, else idle. At all other times, collectives and host copies are overlapped. Operations inside loops and calls
count, but loops and calls themselves do not.

A step lasts from the end of the previous step to its own end, so gaps between steps count. The first step of a trace begins
with its first operation if the trace has no event of the previous step.
"""

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxtrain.config import hardware
from jaxtrain.metrics.profiling import HLO_TEXT
from jaxtrain.plan.program.hlo import HloError, Module
from jaxtrain.plan.rates import rates_for
from jaxtrain.plan.result import Rates
from jaxtrain.report import profile_program as programs
from jaxtrain.report import profile_trace as traces
from jaxtrain.report.profile_program import CONTROL, KINDS, LINKS, NO_SCOPE, Operation, PlannedStep, TracedProgram
from jaxtrain.report.profile_trace import Trace, TraceError, TraceEvent
from jaxtrain.report.run import RunFolder

NS_PER_MS = 1e6


@dataclasses.dataclass(frozen=True)
class Op(Operation):
    """One operation of a step, summed over its launches. Figures are means over devices and steps."""

    count: float = 0.0  # launches
    ms: float = 0.0  # share of the step's time, divided among concurrent operations; for LINKS only exposed time
    ran_ms: float = 0.0  # time from start to end, summed over launches
    overlapped_ms: float = 0.0  # time of LINKS that is not exposed
    gflop: float | None = None  # from the program's HLO; None if unknown
    gb: float | None = None  # device memory traffic; for communication, bytes on the wire
    planned_ms: float | None = None  # at the rates that plans use for this GPU


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """The time of a step from a trace."""

    name: str  # name of the run, or of the trace file
    trace: str  # path of the trace
    device_kind: str
    steps: tuple[int, ...]
    step_ms: float  # mean over steps and devices
    step_range_ms: tuple[float, float]  # shortest and longest
    by_kind: dict[str, float]  # ms of a step; sums to step_ms
    overlapped: dict[str, float]  # ms of LINKS that are not exposed
    by_part: dict[str, dict[str, float]]  # "part, pass" -> kind -> ms
    by_device: dict[int, dict[str, float]]  # device -> kind -> ms of its step
    named: float  # fraction of the busy and exposed time in operations with a part
    ops: tuple[Op, ...]  # longest first
    untraced_ms: float | None  # median step of the same run without the profiler
    planned: PlannedStep | None
    no_plan: str  # reason why `planned` is None
    notes: tuple[str, ...]
    format: int = 3


def program_of(trace: Trace, run: RunFolder | None) -> tuple[TracedProgram | None, str]:
    """Return (program of a trace from the HLO text in the trace's folder, or None; the reason for None)."""
    text = trace.path.with_name(HLO_TEXT)
    reason = f"there is no file {HLO_TEXT} in the folder of the trace"
    if text.is_file():
        receipt = run.receipt if run else {}
        devices = receipt.get("devices") or {"count": 1, "process_count": 1}
        gpus = devices["count"] // devices["process_count"]
        try:
            return programs.read_program(text.read_text(encoding="utf-8"), receipt.get("mesh") or {}, gpus), ""
        except HloError as error:
            reason = f"{text} cannot be read: {error}"
    return None, f"Time is sorted by the names of kernels alone: {reason}."


def rates_of(run: RunFolder | None, platform: str) -> tuple[Rates | None, str]:
    """Return (rates with which plans time the traced GPU, or None; the reason for None)."""
    if platform == "cpu":
        return None, "no plan for a CPU"
    if run is None or not run.receipt:
        return None, "no plan: the receipt of the run names the GPU, and this trace is in no run's folder"
    device_kind = ", ".join(run.receipt["devices"]["kind"])
    gpu = hardware.lookup(device_kind)
    if gpu is None:
        return None, f"no plan: {device_kind} is not in jaxtrain/config/hardware.py"
    try:
        return rates_for(gpu, run.config["precision"]), ""
    except ValueError as error:
        return None, f"no plan: {error}"


# ---- Steps


class Window(NamedTuple):
    """Start and end of a step on one device, in ns."""

    step: int
    start: float
    end: float


def windows(trace: Trace, module: Module | None) -> dict[int, list[Window]]:
    """Return the complete steps of each device that has any.

    Raises:
        TraceError: no device has a complete step.
    """
    by_device = {}
    for device, device_events in trace.devices.items():
        events = [e for e in device_events if e.program == trace.main_program]
        ends = _ends(events, len(trace.steps), module)
        # The trace can have the end of an earlier step, which is the start of the first.
        count = len(trace.steps) or len(ends)
        starts = [events[0].start, *ends][-count - 1 : -1] if ends else []
        numbers = trace.steps or range(count)
        if steps := [Window(*step) for step in zip(numbers, starts, ends[-count:], strict=False)]:
            by_device[device] = steps
    if not by_device:
        raise TraceError(f"{trace.path}: this trace has no complete step. Fix: raise profile.steps, and trace again.")
    return by_device


def _ends(events: Sequence[TraceEvent], marked: int, module: Module | None) -> list[float]:
    """Return the end of each step of one device.

    On a CPU, events have the id of their execution of the program. On a GPU, the last operation that runs once in a step ends
    the step.

    Args:
        events: of the main program.
        marked: steps that the training loop marked; 0 if unknown.
    """
    if events and events[0].run >= 0:
        run_ends: dict[int, float] = {}
        for e in events:
            run_ends[e.run] = max(e.end, run_ends.get(e.run, e.end))
        return sorted(run_ends.values())
    counts = Counter(e.op for e in events if e.op)
    if module:  # in scheduled order, without operations of loops
        counts = {i.name: counts[i.name] for i in module.entry.instructions if i.name in counts}
    times = marked or max(Counter(counts.values()).items(), key=lambda item: item[1], default=(0, 0))[0]
    once = [op for op, count in counts.items() if times and count in (times, times + 1)]  # an incomplete step has one more
    if not once:
        return []
    last = once[-1] if module else max(once, key=lambda op: max(e.end for e in events if e.op == op))
    return sorted(e.end for e in events if e.op == last)


# ---- Time

# Sums over all steps, by operation: share of the steps' time, overlapped time, time from start to end (all ns); launches;
# FLOPs, bytes and planned seconds of the launches, NaN if unknown.
TIME, OVERLAPPED = 0, 1
type Sums = dict[Operation, np.ndarray]


def operation_of(event: TraceEvent, main: int, operations: Mapping[str, Operation]) -> Operation | None:
    """Return the operation of an event; None for a loop or a call. main: id of the main program. operations: in it."""
    if event.program == main and event.op in operations:
        return operations[event.op]
    if event.op.split(".")[0] in CONTROL:
        return None
    operation = programs.kernel_operation(event.kernel)
    return operation if event.program in (main, -1) else dataclasses.replace(operation, part="other programs")


def divide_time(
    events: Iterable[tuple[TraceEvent, Operation]], steps: Sequence[Window], work: Mapping[tuple[int, str], Sequence[float]]
) -> Sums:
    """Return `Sums` over one device's steps: operation -> its times, launches, FLOPs, bytes and planned seconds.

    Args:
        events: (event, operation) pairs, ordered by start.
        steps: the steps, in order and without gaps.
        work: (program, instruction) -> FLOPs, bytes and planned seconds of a launch.
    """
    sums: Sums = defaultdict(lambda: np.zeros(7))
    first, last = steps[0].start, steps[-1].end
    points: list[tuple[float, int, Operation]] = []
    for event, operation in events:
        if event.end > first and event.start < last:
            sums[operation] += (0.0, 0.0, event.end - event.start, 1, *work.get((event.program, event.op), (math.nan,) * 3))
            if event.end > event.start:
                points += [(max(event.start, first), 1, operation), (min(event.end, last), -1, operation)]
    computing: Counter[Operation] = Counter()
    links: Counter[Operation] = Counter()
    previous = first
    for time, change, operation in sorted(points, key=lambda p: p[:2]):
        exposed = {} if computing else {op: n for op, n in links.items() if op.kind == "communication"} or links
        shared = computing or exposed
        for op, n in shared.items():
            sums[op][TIME] += (time - previous) * n / sum(shared.values())
        for op in links.keys() - exposed.keys():
            sums[op][OVERLAPPED] += time - previous
        previous = time
        running = links if operation.kind in LINKS else computing
        running[operation] += change
        if not running[operation]:
            del running[operation]
    return dict(sums)


def measure_steps(path: Path, run: RunFolder | None) -> StepTimes:
    """Return the time of a step from a trace. run: the run of the trace; None if it is unknown.

    Raises:
        TraceError: the trace cannot be read, or has no complete step.
    """
    trace = traces.read_trace(path)
    rates, no_plan = rates_of(run, trace.platform)
    program, no_program = program_of(trace, run)
    notes = [no_program] if no_program else []
    if run and trace.steps[0] < run.ramp.end:
        notes.append(f"train.batch_ramp: the batch of step {trace.steps[0] + 1} is smaller than train.global_batch")
    if program and program.unknown:
        notes.append(f"{len(program.unknown)} operations have unknown work; the first: {program.unknown[0]}")
    planned = None
    try:
        planned = programs.plan_step(program, rates) if program and rates else None
    except HloError as error:
        rates, no_plan = None, f"no plan: {error}"

    main, operations = trace.main_program, program.operations if program else {}
    work = {
        (main, name): (w.flops, w.bytes, w.seconds(rates) if rates else math.nan)
        for name, w in (program.costs if program else {}).items()
    }
    steps = windows(trace, program.module if program else None)
    divided = {
        device: divide_time(
            [(e, o) for e in trace.devices[device] if (o := operation_of(e, main, operations))], device_steps, work
        )
        for device, device_steps in sorted(steps.items())
    }
    all_steps = [w for device_steps in steps.values() for w in device_steps]
    lengths = [(w.end - w.start) / NS_PER_MS for w in all_steps]
    sums: Sums = defaultdict(lambda: np.zeros(7))
    for device_sums in divided.values():
        for operation, row in device_sums.items():
            sums[operation] += row
    ops = sorted((_op(o, row / len(all_steps)) for o, row in sums.items()), key=lambda op: -(op.ms + op.overlapped_ms))
    by_kind, overlapped = _by_kind(sums, all_steps), dict.fromkeys(LINKS, 0.0)
    by_part: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for op in ops:
        if op.ms:
            by_part[op.part_and_phase][op.kind_of_time] += op.ms
        if op.kind in LINKS:
            overlapped[op.kind] += op.overlapped_ms
    step_ms = statistics.fmean(lengths)
    busy_ms = step_ms - by_kind["idle"]
    times = [t for t in run.train["step_time_s"] if t is not None] if run else []
    return StepTimes(
        name=run.name if run else path.name,
        trace=str(path),
        device_kind=", ".join(run.receipt["devices"]["kind"]) if run and run.receipt else trace.platform,
        steps=tuple(sorted({w.step for device_steps in steps.values() for w in device_steps})),
        step_ms=step_ms,
        step_range_ms=(min(lengths), max(lengths)),
        by_kind=by_kind,
        overlapped=overlapped,
        by_part={part: dict(kinds) for part, kinds in sorted(by_part.items(), key=lambda item: -sum(item[1].values()))},
        by_device={device: _by_kind(sums, steps[device]) for device, sums in divided.items()},
        named=1 - sum(by_part[NO_SCOPE].values()) / busy_ms if busy_ms else 0.0,
        ops=tuple(ops),
        untraced_ms=statistics.median(times) * 1e3 if times else None,
        planned=planned,
        no_plan="" if planned else no_plan or no_program,
        notes=(*notes, *_caveats(trace.platform, len(steps))),
    )


def _op(operation: Operation, row: np.ndarray) -> Op:
    time, overlapped, ran_ns, count, flops, moved_bytes, seconds = row.tolist()
    gflop, gb, planned_ms = (None if math.isnan(v) else v for v in (flops / 1e9, moved_bytes / 1e9, seconds * 1e3))
    ms = {"ms": time / NS_PER_MS, "ran_ms": ran_ns / NS_PER_MS, "overlapped_ms": overlapped / NS_PER_MS}
    return Op(**vars(operation), **ms, count=count, gflop=gflop, gb=gb, planned_ms=planned_ms)


def _by_kind(sums: Sums, steps: Sequence[Window]) -> dict[str, float]:
    """Return kind -> ms of the mean of these steps, idle time included."""
    by_kind = dict.fromkeys(KINDS, 0.0)
    for operation, row in sums.items():
        by_kind[operation.kind_of_time] += float(row[TIME]) / NS_PER_MS / len(steps)
    return by_kind | {"idle": sum(w.end - w.start for w in steps) / NS_PER_MS / len(steps) - sum(by_kind.values())}


def _caveats(platform: str, devices: int) -> list[str]:
    if platform == "gpu":
        return [
            "XLA launches each kernel by itself while a profiler records, without command buffers (CUDA graphs). A traced step "
            "takes longer than one without, and gaps between short kernels are longer."
        ]
    out = ["On a CPU, waiting for a core counts as time of the operation: XLA, the data and other programs share the cores."]
    shared = f"{devices} devices of one host share its cores, so a collective waits for the computation of other devices."
    return [*out, shared] if devices > 1 else out
