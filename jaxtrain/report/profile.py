"""The time of a step from the events of a trace, by kind, part, operation and device, and the comparison of two traces.

Each nanosecond of a step counts once on each device. All operations that compute or copy inside the device in this nanosecond
have equal shares of it. If none runs, the time is exposed communication if a collective runs, else an exposed host copy if a
host copy runs, else idle. At all other times, collectives and host copies are overlapped. Operations inside loops and calls
count, but loops and calls themselves do not.

A step lasts from the end of the previous step to its own end, so gaps between steps count. The first step of a trace begins
with its first operation if the trace has no event of the previous step.
"""

import dataclasses
import gzip
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.config import hardware
from jaxtrain.metrics import files
from jaxtrain.metrics.profiling import HLO_TEXT
from jaxtrain.plan.program.hlo import HloError, Module
from jaxtrain.plan.rates import rates_for
from jaxtrain.plan.result import Rates
from jaxtrain.report import profile_program as programs
from jaxtrain.report import profile_trace as traces
from jaxtrain.report.profile_page import Device, Op, Profile
from jaxtrain.report.profile_program import CONTROL, KINDS, LINKS, NO_SCOPE, Operation, Program
from jaxtrain.report.profile_trace import Event, Trace, TraceError
from jaxtrain.report.timeline import Stretch

NS_PER_MS = 1e6


# ---- The run around a trace


@dataclasses.dataclass(frozen=True)
class Run:
    """Facts about the traced run. If the trace is not in a run's folder, all fields but `name` have their defaults."""

    name: str
    device_kind: str = ""
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    gpus: int = 1  # GPUs of a node
    precision: str = ""
    untraced_ms: float | None = None


def run_around(target: Path) -> Run:
    """Return the run in the nearest folder, from `target` upwards, that has a config and a receipt.

    Without such a folder, return a run that has only a name.
    """
    start = target.resolve()
    for folder in (start, *start.parents):
        if (folder / "config.json").is_file() and (folder / "receipt.json").is_file():
            receipt = json.loads((folder / "receipt.json").read_text(encoding="utf-8"))
            devices = receipt["devices"]
            lines = files.read(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else ()
            times = [line["step_time_s"] for line in lines if line["kind"] == "train" and line["step_time_s"] is not None]
            return Run(
                folder.name,
                ", ".join(devices["kind"]),
                receipt["mesh"],
                devices["count"] // devices["process_count"],
                json.loads((folder / "config.json").read_text(encoding="utf-8"))["precision"],
                statistics.median(times) * 1e3 if times else None,
            )
    return Run(target.name)


def program_of(trace: Trace, run: Run) -> tuple[Program | None, str]:
    """Return (program of a trace from the HLO text in the trace's folder, or None; the reason for None)."""
    text = trace.path.with_name(HLO_TEXT)
    reason = f"there is no file {HLO_TEXT} in the folder of the trace"
    if text.is_file():
        try:
            return programs.read(text.read_text(encoding="utf-8"), run.mesh, run.gpus), ""
        except HloError as error:
            reason = f"{text} cannot be read: {error}"
    return None, f"Time is sorted by the names of kernels alone: {reason}."


def rates_of(run: Run, device_kind: str) -> tuple[Rates | None, str]:
    """Return (rates with which plans time the traced GPU, or None; the reason for None)."""
    if device_kind == "cpu":
        return None, "no plan for a CPU"
    if not run.device_kind:
        return None, "no plan: the receipt of the run names the GPU, and this trace is in no run's folder"
    gpu = hardware.lookup(device_kind)
    if gpu is None:
        return None, f"no plan: {device_kind} is not in jaxtrain/config/hardware.py"
    try:
        return rates_for(gpu, run.precision), ""
    except ValueError as error:
        return None, f"no plan: {error}"


# ---- Steps


class Window(NamedTuple):
    """Start and end of a step on one device, in ns."""

    step: int
    start: float
    end: float


def windows(trace: Trace, module: Module | None) -> dict[int, tuple[Window, ...]]:
    """Return the complete steps of each device.

    Raises:
        TraceError: the trace has no complete step.
    """
    divide = _cut_at_executions if trace.platform == "cpu" else _cut_at_last_operation
    main = trace.main_program
    found = {n: divide([e for e in events if e.program == main], trace.steps, module) for n, events in trace.devices.items()}
    if not any(found.values()):
        raise TraceError(f"{trace.path}: this trace has no complete step. Fix: raise profile.steps, and trace again.")
    return {device: steps for device, steps in found.items() if steps}


def _cut_at_executions(events: Sequence[Event], marked: Sequence[int], module: Module | None) -> tuple[Window, ...]:
    """Return the steps of a CPU device: the last len(marked) executions of the program, or all if `marked` is empty.

    `marked` has their step numbers. The trace can have the end of an earlier execution: it is the start of the first step.
    """
    starts, ends = {}, {}
    for e in events:
        starts[e.run] = min(e.start, starts.get(e.run, e.start))
        ends[e.run] = max(e.end, ends.get(e.run, e.end))
    order = sorted(starts, key=lambda run: starts[run])
    count = len(marked) or len(order)
    found, previous = [], [ends[run] for run in order[:-count]]
    for number, run in zip(marked or range(count), order[-count:], strict=False):
        found.append(Window(number, previous[-1] if previous else starts[run], ends[run]))
        previous.append(ends[run])
    return tuple(found)


def _cut_at_last_operation(events: Sequence[Event], marked: Sequence[int], module: Module | None) -> tuple[Window, ...]:
    """Return the steps of a GPU, whose events have no execution id. The last operation that runs once in a step ends it."""
    counts = Counter(e.op for e in events if e.op)
    if module:  # in scheduled order, without operations of loops
        counts = {i.name: counts[i.name] for i in module.entry.instructions if i.name in counts}
    times = len(marked) or max(Counter(counts.values()).items(), key=lambda item: item[1], default=(0, 0))[0]
    once = [op for op, count in counts.items() if times and count in (times, times + 1)]  # an incomplete step has one more
    if not once:
        return ()
    last = once[-1] if module else max(once, key=lambda op: max(e.end for e in events if e.op == op))
    ends = sorted(e.end for e in events if e.op == last)
    starts = [events[0].start, *ends][-times - 1 : -1]
    return tuple(Window(n, *ab) for n, ab in zip(marked or range(times), zip(starts, ends[-times:], strict=True), strict=True))


# ---- Time

# Sums over all steps, by operation: share of the steps' time, overlapped time, time from start to end (all ns); launches;
# FLOPs, bytes and planned seconds of the launches, NaN if unknown.
TIME, OVERLAPPED = 0, 1
type Sums = dict[Operation, np.ndarray]


def operation_of(event: Event, main: int, known: Mapping[str, Operation]) -> Operation | None:
    """Return the operation of an event; None for a loop or a call. main: id of the main program. known: operations in it."""
    if event.program == main and event.op in known:
        return known[event.op]
    if event.op.split(".")[0] in CONTROL:
        return None
    found = programs.by_kernel(event.kernel)
    return found if event.program in (main, -1) else found._replace(part="other programs")


def operations_of(trace: Trace, program: Program | None) -> dict[int, list[tuple[Event, Operation]]]:
    """Return device -> its (event, operation) pairs, ordered by start.

    A CPU has threads instead of streams. So each event of a CPU gets the first free lane, "CPU lane 1" and up, as its stream.
    """
    main, known = trace.main_program, program.operations if program else {}
    found = {}
    for device, events in trace.devices.items():
        with_operation = [(e, o) for e in events if (o := operation_of(e, main, known))]
        free_at: list[float] = []
        for n, (e, o) in enumerate(with_operation if trace.platform == "cpu" else ()):
            lane = next((i for i, time in enumerate(free_at) if time <= e.start), len(free_at))
            free_at[lane : lane + 1] = [e.end]
            with_operation[n] = e._replace(stream=f"CPU lane {lane + 1}"), o
        found[device] = with_operation
    return found


def divide_time(
    events: Iterable[tuple[Event, Operation]], steps: Sequence[Window], work: Mapping[tuple[int, str], Sequence[float]]
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
    for e, operation in events:
        if e.end > first and e.start < last:
            sums[operation] += (0.0, 0.0, e.end - e.start, 1, *work.get((e.program, e.op), (math.nan,) * 3))
            if e.end > e.start:
                points += [(max(e.start, first), 1, operation), (min(e.end, last), -1, operation)]
    computing: Counter[Operation] = Counter()
    links: Counter[Operation] = Counter()
    now = first
    for time, change, operation in sorted(points, key=lambda p: p[:2]):
        exposed = {} if computing else {o: n for o, n in links.items() if o.kind == "communication"} or links
        shared = computing or exposed
        for o, n in shared.items():
            sums[o][TIME] += (time - now) * n / sum(shared.values())
        for o in links.keys() - exposed.keys():
            sums[o][OVERLAPPED] += time - now
        now = time
        running = links if operation.kind in LINKS else computing
        running[operation] += change
        if not running[operation]:
            del running[operation]
    return dict(sums)


def profile(path: Path, run: Run) -> Profile:
    """Return the time of a step from a trace.

    Raises:
        TraceError: the trace cannot be read, or has no complete step.
    """
    trace = traces.read(path)
    device_kind = run.device_kind or trace.platform
    rates, no_plan = rates_of(run, device_kind)
    program, no_program = program_of(trace, run)
    notes = [no_program] if no_program else []
    if program and program.unknown:
        notes.append(f"{len(program.unknown)} operations have unknown work; the first: {program.unknown[0]}")
    planned = None
    try:
        planned = programs.plan(program, rates) if program and rates else None
    except HloError as error:
        rates, no_plan = None, f"no plan: {error}"

    main = trace.main_program
    work = {
        (main, name): (w.flops, w.bytes, w.seconds(rates) if rates else math.nan)
        for name, w in (program.work if program else {}).items()
    }
    steps = windows(trace, program.module if program else None)
    events = operations_of(trace, program)
    divided = {device: divide_time(events[device], steps[device], work) for device in sorted(steps)}
    devices = tuple(_device(device, sums, steps[device]) for device, sums in divided.items())
    busiest = max(devices, key=lambda d: d.busy_ms).device
    lengths = [(w.end - w.start) / NS_PER_MS for found in steps.values() for w in found]
    step_ms = statistics.fmean(lengths)
    sums: Sums = defaultdict(lambda: np.zeros(7))
    for of_device in divided.values():
        for operation, row in of_device.items():
            sums[operation] += row / len(lengths)
    ops = sorted((_op(operation, row) for operation, row in sums.items()), key=lambda op: -(op.ms + op.overlapped_ms))
    by_kind, overlapped = dict.fromkeys(KINDS, 0.0), dict.fromkeys(LINKS, 0.0)
    by_part: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for op in ops:
        kind = f"exposed {op.kind}" if op.kind in LINKS else op.kind
        by_kind[kind] += op.ms
        if op.ms:
            by_part[", ".join(filter(None, (op.part, op.phase)))][kind] += op.ms
        if op.kind in LINKS:
            overlapped[op.kind] += op.overlapped_ms
    ran = sum(by_kind.values())
    by_kind["idle"] = step_ms - ran
    return Profile(
        name=run.name,
        trace=str(path),
        device_kind=device_kind,
        steps=tuple(sorted({w.step for found in steps.values() for w in found})),
        step_ms=step_ms,
        step_range_ms=(min(lengths), max(lengths)),
        by_kind=by_kind,
        overlapped=overlapped,
        by_part={part: dict(kinds) for part, kinds in sorted(by_part.items(), key=lambda item: -sum(item[1].values()))},
        named=1 - sum(by_part[NO_SCOPE].values()) / ran if ran else 0.0,
        ops=tuple(ops),
        devices=devices,
        lanes=_lanes(busiest, events[busiest], steps[busiest]),
        untraced_ms=run.untraced_ms,
        planned=planned,
        no_plan="" if planned else no_plan,
        notes=(*notes, *_caveats(trace.platform, len(steps))),
    )


def _op(operation: Operation, row: np.ndarray) -> Op:
    time, overlapped, ran, count, flops, moved, seconds = row.tolist()
    gflop, gb, planned_ms = (None if math.isnan(v) else v for v in (flops / 1e9, moved / 1e9, seconds * 1e3))
    return Op(*operation, count, time / NS_PER_MS, ran / NS_PER_MS, overlapped / NS_PER_MS, gflop, gb, planned_ms)


def _device(device: int, sums: Sums, steps: Sequence[Window]) -> Device:
    per = NS_PER_MS * len(steps)
    step_ms = sum(w.end - w.start for w in steps) / per
    exposed = float(sum(row[TIME] for o, row in sums.items() if o.kind in LINKS)) / per
    busy = float(sum(row[TIME] for o, row in sums.items() if o.kind not in LINKS)) / per
    return Device(device, step_ms, busy, exposed, step_ms - busy - exposed)


def _lanes(device: int, events: Iterable[tuple[Event, Operation]], steps: Sequence[Window]) -> dict[str, tuple[Stretch, ...]]:
    """Return the timeline of the median step of a device: a lane of events for each stream."""
    window = sorted(steps, key=lambda w: w.end - w.start)[(len(steps) - 1) // 2]
    lanes: dict[str, list[Stretch]] = defaultdict(list)
    for e, o in events:
        start, end = max(e.start, window.start) - window.start, min(e.end, window.end) - window.start
        if end > start:
            lanes[e.stream].append(Stretch(start / NS_PER_MS, end / NS_PER_MS, o.kind, o.part, o.label))
    title = f"step {window.step}, device {device}"
    return {f"{title}: {name}": tuple(lanes[name]) for name in sorted(lanes, key=lambda name: (len(name), name))}


def _caveats(platform: str, devices: int) -> list[str]:
    if platform == "gpu":
        return [
            "XLA launches each kernel by itself while a profiler records, without command buffers (CUDA graphs). A traced step "
            "takes longer than one without, and gaps between short kernels are longer."
        ]
    out = ["On a CPU, waiting for a core counts as time of the operation: XLA, the data and other programs share the cores."]
    shared = f"{devices} devices of one host share its cores, so a collective waits for the computation of other devices."
    return [*out, shared] if devices > 1 else out


def write_perfetto(trace: Trace, run: Run, path: Path) -> None:
    """Write a trace as JSON that ui.perfetto.dev opens: a process for each device, a thread for each stream.

    Args:
        run: the run of the trace.
        path: the output file, compressed if its name ends in .gz.
    """
    program, _ = program_of(trace, run)
    written = []
    for device, events in operations_of(trace, program).items():
        streams = sorted({e.stream for e, _ in events}, key=lambda name: (len(name), name))
        names = [("process_name", 0, f"{trace.platform} {device}"), *(("thread_name", *item) for item in enumerate(streams))]
        written += [{"ph": "M", "pid": device, "tid": n, "name": what, "args": {"name": name}} for what, n, name in names]
        for e, o in events:
            shown = {"ph": "X", "pid": device, "tid": streams.index(e.stream), "name": o.label, "cat": o.kind}
            shown |= {"ts": e.start / 1e3, "dur": (e.end - e.start) / 1e3}  # us
            origin = {"part": o.part, "pass": o.phase, "source": o.source, "instruction": e.op, "kernel": e.kernel}
            written.append(shown | {"args": origin})
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": written}).encode()
    files.write_output(path, gzip.compress(text) if path.suffix == ".gz" else text)


# ---- Two traces


def diff(before: Profile, after: Profile) -> dict[str, Any]:
    """Compare two profiles. Operations are matched by label, kind and source file, since the names in the HLO change.

    Returns:
        "before" and "after": the paths of the traces. "changes": "step", "kind", "part" or "operation" -> changes, largest
        first, each with "name", "before_ms" and "after_ms".
    """

    def times(found: Profile) -> dict[str, dict[str, float]]:
        ops: dict[str, float] = defaultdict(float)
        for op in found.ops:
            file = op.source.rpartition(":")[0]  # without the line number, which an edit above it changes
            ops[f"{op.label} ({op.kind}, {file or op.part})"] += op.ms
        parts = {part: sum(kinds.values()) for part, kinds in found.by_part.items()}
        return {"step": {"step": found.step_ms}, "kind": found.by_kind, "part": parts, "operation": ops}

    changes = {}
    for (what, old), new in zip(times(before).items(), times(after).values(), strict=True):
        pairs = {name: (old.get(name, 0.0), new.get(name, 0.0)) for name in dict.fromkeys((*old, *new))}
        order = sorted(
            (name for name, pair in pairs.items() if any(pair)), key=lambda name: -abs(pairs[name][1] - pairs[name][0])
        )
        changes[what] = [{"name": name, "before_ms": pairs[name][0], "after_ms": pairs[name][1]} for name in order]
    return {"before": before.trace, "after": after.trace, "changes": changes}
