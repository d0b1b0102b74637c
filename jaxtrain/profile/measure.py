"""From the events of a trace to the time of a step: by kind, by part, by operation, by device; and two traces compared.

Each nanosecond of a step counts once on each device. While operations compute or copy, it is theirs in equal shares. While only
communication runs, it is exposed communication; else an exposed copy to or from the host; else idle. Communication and host
copies beside computation are overlapped. Loops and calls are no operations: the operations in them are.

A step lasts from the end of the previous step to its own end, so gaps between steps count. The first step of a trace begins
with its first operation if nothing of the previous step was recorded.
"""

import dataclasses
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxtrain import hardware, metrics
from jaxtrain.plan.program.hlo import HloError, Module
from jaxtrain.plan.rates import rates_for
from jaxtrain.plan.result import Rates
from jaxtrain.profile import program as programs
from jaxtrain.profile import trace as traces
from jaxtrain.profile.program import CONTROL, KINDS, LINKS, NO_SCOPE, Operation, Planned, Program, Stretch, Summary, Timeline
from jaxtrain.profile.trace import Event, Trace, TraceError
from jaxtrain.profiling import HLO_TEXT

FORMAT = 2
NS_PER_MS = 1e6
DUMPS = (".hlo.txt", ".hlo", ".hlo.pb")


@dataclasses.dataclass(frozen=True)
class Op:
    """Operations of one kind and origin, over a step, as the mean of devices and steps."""

    kind: str  # one of KINDS without "exposed", or of LINKS
    part: str
    phase: str  # forward | backward | recompute | "" (once a step)
    label: str  # named scopes, and the operation in them
    source: str  # file:line
    count: float  # launches
    ms: float  # time of the step: shared with what runs at the same time, and only exposed for LINKS
    ran_ms: float  # from start to end, summed over launches
    overlapped_ms: float  # of LINKS: beside computation
    gflop: float | None  # by the program; None if unknown
    gb: float | None  # of device memory; for communication, on the wire
    planned_ms: float | None  # at the plan's rates of this GPU


@dataclasses.dataclass(frozen=True)
class Device:
    """The mean step of one device, ms."""

    device: int
    step_ms: float
    busy_ms: float  # computation, and copies inside the device
    exposed_ms: float  # communication and host copies
    idle_ms: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """The time of a step, by a trace; `--json` writes it."""

    name: str  # of the run, or of the file
    trace: str  # path
    device_kind: str
    steps: tuple[int, ...]
    step_ms: float  # mean over steps and devices
    step_range_ms: tuple[float, float]  # shortest and longest
    by_kind: dict[str, float]  # ms of a step; sums to step_ms
    overlapped: dict[str, float]  # ms of LINKS beside computation
    by_part: dict[str, dict[str, float]]  # "part, pass" -> kind -> ms
    named: float  # fraction of the busy and exposed time that belongs to a part
    ops: tuple[Op, ...]  # longest first
    devices: tuple[Device, ...]
    timeline: Timeline  # median step of the device that computes longest
    untraced_ms: float | None  # median step of the same run without the profiler
    planned: Planned | None
    no_plan: str  # why `planned` is None
    program: Summary | None
    notes: tuple[str, ...]
    format: int = FORMAT


# ---- The run around a trace


@dataclasses.dataclass(frozen=True)
class Run:
    """Facts of the run that a trace or a dump belongs to; empty without a run's folder around it."""

    name: str
    device_kind: str = ""
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    gpus: int = 1  # of a node
    precision: str = ""
    untraced_ms: float | None = None


def run_around(target: Path) -> Run:
    """Return the run of the nearest folder, from a target upwards, that has a config and a receipt."""
    start = target.resolve()
    for folder in (start, *start.parents):
        if (folder / "config.json").is_file() and (folder / "receipt.json").is_file():
            receipt = json.loads((folder / "receipt.json").read_text())
            devices = receipt["devices"]
            lines = metrics.read(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else ()
            times = [line["step_time_s"] for line in lines if line["kind"] == "train" and line["step_time_s"] is not None]
            return Run(
                folder.name,
                ", ".join(devices["kind"]),
                receipt["mesh"],
                devices["count"] // devices["process_count"],
                json.loads((folder / "config.json").read_text())["precision"],
                statistics.median(times) * 1e3 if times else None,
            )
    return Run(target.name)


def dump_in(target: Path) -> Path | None:
    """Return the dump that a target is, or that of a run without a trace."""
    if target.is_file() and target.name.endswith(DUMPS):
        return target
    found = [*target.glob(f"profile/{HLO_TEXT}"), *target.glob(HLO_TEXT)]
    return found[0] if found and not any(target.rglob("*.xplane.pb")) else None


def read_dump(path: Path, run: Run) -> Program:
    """Return the program of HLO text, or of an HloProto (`*.hlo.pb`).

    Raises:
        HloError: it cannot be read.
    """
    if path.suffix == ".pb":
        return programs.read_proto(path.read_bytes(), run.mesh, run.gpus)
    return programs.read_text(path.read_text(), run.mesh, run.gpus)


def program_of(trace: Trace, run: Run) -> tuple[Program | None, str]:
    """Return (program of a trace, or None; the reason for None).

    The trace has its memory too. A program from the compile cache is not in the trace, but in the text beside it.
    """
    text = trace.path.with_name(HLO_TEXT)
    reason = f"neither the trace nor a file {HLO_TEXT} beside it holds the program"
    try:
        if proto := trace.programs.get(trace.main_program):
            return programs.read_proto(proto, run.mesh, run.gpus), ""
        if text.is_file():
            return read_dump(text, run), ""
    except HloError as error:
        reason = f"the program cannot be read: {error}"
    return None, f"Time is sorted by the names of kernels alone: {reason}."


def rates_of(run: Run, device_kind: str) -> tuple[Rates | None, str]:
    """Return (rates of the traced GPU, or None; the reason for None)."""
    if device_kind == "cpu":
        return None, "no plan for a CPU"
    if not run.device_kind:
        return None, "no plan: the receipt of the run names the GPU, and this trace is in no run's folder"
    gpu = hardware.lookup(device_kind)
    if gpu is None:
        return None, f"no plan: {device_kind} is not in jaxtrain/hardware.py"
    try:
        return rates_for(gpu, run.precision), ""
    except ValueError as error:
        return None, f"no plan: {error}"


# ---- Steps


class Window(NamedTuple):
    """A step on one device, ns."""

    step: int
    start: float
    end: float


def windows(trace: Trace, module: Module | None) -> dict[int, tuple[Window, ...]]:
    """Return the whole steps of each device.

    Raises:
        TraceError: there is none.
    """
    divide = _by_run if trace.platform == "cpu" else _by_last_operation
    main = trace.main_program
    found = {n: divide([e for e in events if e.program == main], trace.steps, module) for n, events in trace.devices.items()}
    if not any(found.values()):
        raise TraceError(f"{trace.path}: no step is whole in this trace. Fix: raise profile.steps, and trace again.")
    return {device: steps for device, steps in found.items() if steps}


def _by_run(events: Sequence[Event], marked: Sequence[int], module: Module | None) -> tuple[Window, ...]:
    """Divide a CPU's events by the executions of the program. The last ones are the marked steps; one before them was cut."""
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


def _by_last_operation(events: Sequence[Event], marked: Sequence[int], module: Module | None) -> tuple[Window, ...]:
    """Divide a GPU's events, which name no execution, by the last operation that runs once in a step."""
    counts = Counter(e.op for e in events if e.op)
    if module:  # in the order of the schedule, without the operations of loops
        counts = {i.name: counts[i.name] for i in module.entry.instructions if i.name in counts}
    times = len(marked) or max(Counter(counts.values()).items(), key=lambda item: item[1], default=(0, 0))[0]
    once = [op for op, count in counts.items() if times and count in (times, times + 1)]  # one more, of a step that was cut
    if not once:
        return ()
    last = once[-1] if module else max(once, key=lambda op: max(e.end for e in events if e.op == op))
    ends = sorted(e.end for e in events if e.op == last)
    starts = [events[0].start, *ends][-times - 1 : -1]
    return tuple(Window(n, *ab) for n, ab in zip(marked or range(times), zip(starts, ends[-times:], strict=True), strict=True))


# ---- Time

# Columns of the time of an operation: of the step, overlapped, from start to end (ns), and launches.
TIME, OVERLAPPED, RAN, COUNT = range(4)
type Spent = dict[Operation, list[float]]


def operation_of(event: Event, main: int, known: Mapping[str, Operation]) -> Operation | None:
    """Return the operation of an event; None for a loop or a call."""
    if event.program == main and event.op in known:
        return known[event.op]
    if event.op.split(".")[0] in CONTROL:
        return None
    found = programs.by_kernel(event.kernel)
    return found if event.program in (main, -1) else Operation(found.kind, "other programs", "", found.label, "")


def divide_time(
    events: Iterable[tuple[Event, Operation]], steps: Sequence[Window]
) -> tuple[Spent, dict[int, tuple[Stretch, ...]]]:
    """Divide the time of one device's steps among the operations that ran.

    Returns:
        Operation -> its time over all steps; step -> its lane of a timeline, without gaps.
    """
    spent: Spent = defaultdict(lambda: [0.0, 0.0, 0.0, 0])
    lanes: dict[int, list[Stretch]] = {}
    first, last = steps[0].start, steps[-1].end
    points: list[tuple[float, int, Operation | None]] = [(w.start, 2, None) for w in steps]  # 2: a step begins
    for e, operation in events:
        if e.end > first and e.start < last:
            spent[operation][COUNT] += 1
            spent[operation][RAN] += e.end - e.start
            points += [(max(e.start, first), 1, operation), (min(e.end, last), -1, operation)]
    points.sort(key=lambda p: (p[0], p[1]))
    running: dict[bool, Counter[Operation]] = {False: Counter(), True: Counter()}  # links?
    at, now = -1, first
    for time, change, operation in (*points, (last, 0, None)):
        if time > now and at >= 0:
            charged, overlapped, kind = _shares(running[False], running[True])
            for o, share in charged.items():
                spent[o][TIME] += (time - now) * share
            for o in overlapped:
                spent[o][OVERLAPPED] += time - now
            begun = steps[at].start
            part = next(iter(charged)).part if charged else ""
            lanes[steps[at].step].append(Stretch((now - begun) / NS_PER_MS, (time - begun) / NS_PER_MS, kind, part))
        now = max(now, time)
        if change == 2:
            at += 1
            lanes[steps[at].step] = []
        elif operation is not None:
            counter = running[operation.kind in LINKS]
            counter[operation] += change
            if not counter[operation]:
                del counter[operation]
    return dict(spent), {step: programs.merge(lane) for step, lane in lanes.items()}


def _shares(computing: Counter[Operation], links: Counter[Operation]) -> tuple[dict[Operation, float], list[Operation], str]:
    """Return (operation -> its share of the time while these run; those that are overlapped; the kind of the time)."""
    if computing:
        return {o: n / computing.total() for o, n in computing.items()}, list(links), next(iter(computing)).kind
    exposed = [o for o in links if o.kind == "communication"] or list(links)
    kind = f"exposed {exposed[0].kind}" if exposed else "idle"
    return {o: 1 / len(exposed) for o in exposed}, [o for o in links if o not in exposed], kind


def kind_of(operation: Operation) -> str:
    """Return the kind of an operation's time: of links, only exposed time is time of the step."""
    return f"exposed {operation.kind}" if operation.kind in LINKS else operation.kind


def total(spent: Iterable[tuple[Operation, Sequence[float]]], key: Callable[[Operation], tuple], column: int, per: float):
    """Return key -> sum of one column over the operations of that key, divided by `per`."""
    sums: dict[tuple, float] = defaultdict(float)
    for operation, row in spent:
        sums[key(operation)] += row[column] / per
    return sums


def profile(path: Path, run: Run) -> Profile:
    """Return the time of a step by a trace.

    Raises:
        TraceError: the trace cannot be read, or no step is whole in it.
    """
    trace = traces.read(path)
    device_kind = run.device_kind or trace.platform
    rates, no_plan = rates_of(run, device_kind)
    program, no_program = program_of(trace, run)
    notes = [no_program] if no_program else []
    summary = planned = None
    try:
        summary = programs.summarize(program) if program else None
        planned = programs.plan(program, rates) if program and rates else None
    except HloError as error:
        no_plan = no_plan or f"no plan: {error}"
        notes.append(f"No summary of the program: {error}")
    steps = windows(trace, program.module if program else None)
    operations = program.operations if program else {}
    by_device: dict[int, Spent] = {}
    drawn: dict[int, tuple[list[tuple[Event, Operation]], dict[int, tuple[Stretch, ...]]]] = {}
    for device in steps:
        known = ((e, operation_of(e, trace.main_program, operations)) for e in trace.devices[device])
        events = [(e, operation) for e, operation in known if operation]
        by_device[device], lanes = divide_time(events, steps[device])
        drawn[device] = events, lanes

    lengths = [(w.end - w.start) / NS_PER_MS for found in steps.values() for w in found]
    step_ms = statistics.fmean(lengths)
    spent = [item for found in by_device.values() for item in found.items()]
    per = NS_PER_MS * len(lengths)
    by_kind = total(spent, lambda o: (kind_of(o),), TIME, per)
    by_part: dict[str, dict[str, float]] = defaultdict(dict)
    for (part, phase, kind), ms in total(spent, lambda o: (o.part, o.phase, kind_of(o)), TIME, per).items():
        by_part[f"{part}, {phase}" if phase else part][kind] = ms
    scoped = total(spent, lambda o: (o.part != NO_SCOPE,), TIME, per)
    devices = tuple(_device(device, by_device[device], steps[device]) for device in sorted(steps))
    busiest = max(devices, key=lambda d: d.busy_ms).device
    return Profile(
        name=run.name,
        trace=str(path),
        device_kind=device_kind,
        steps=tuple(sorted({w.step for found in steps.values() for w in found})),
        step_ms=step_ms,
        step_range_ms=(min(lengths), max(lengths)),
        by_kind={k: step_ms - sum(by_kind.values()) if k == "idle" else by_kind.get((k,), 0.0) for k in KINDS},
        overlapped={k: ms for (k,), ms in total(spent, lambda o: (o.kind,), OVERLAPPED, per).items() if k in LINKS},
        by_part=dict(sorted(by_part.items(), key=lambda item: -sum(item[1].values()))),
        named=scoped[True,] / sum(scoped.values()) if sum(scoped.values()) else 0.0,
        ops=_ops(spent, per, len(lengths), rates),
        devices=devices,
        timeline=_timeline(busiest, *drawn[busiest], steps[busiest]),
        untraced_ms=run.untraced_ms,
        planned=planned,
        no_plan="" if planned else no_plan,
        program=summary,
        notes=(*notes, *_caveats(trace.platform, len(steps))),
    )


def _ops(spent: list[tuple[Operation, list[float]]], per: float, steps: int, rates: Rates | None) -> tuple[Op, ...]:
    groups: dict[tuple, list[tuple[Operation, list[float]]]] = defaultdict(list)
    for item in spent:
        groups[item[0].kind, item[0].part, item[0].phase, item[0].label, item[0].source].append(item)
    found = []
    for key, rows in groups.items():
        done = [(o.work, row[COUNT] / steps) for o, row in rows if o.work]
        whole = len(done) == len(rows)
        found.append(
            Op(
                *key,
                count=sum(row[COUNT] for _, row in rows) / steps,
                ms=sum(row[TIME] for _, row in rows) / per,
                ran_ms=sum(row[RAN] for _, row in rows) / per,
                overlapped_ms=sum(row[OVERLAPPED] for _, row in rows) / per,
                gflop=sum(work.flops * n for work, n in done) / 1e9 if whole else None,
                gb=sum(work.bytes * n for work, n in done) / 1e9 if whole else None,
                planned_ms=sum(work.seconds(rates) * n for work, n in done) * 1e3 if whole and rates else None,
            )
        )
    return tuple(sorted(found, key=lambda op: -(op.ms + op.overlapped_ms)))


def _device(device: int, spent: Spent, steps: Sequence[Window]) -> Device:
    per = NS_PER_MS * len(steps)
    step_ms = sum(w.end - w.start for w in steps) / per
    by_link = total(spent.items(), lambda o: (o.kind in LINKS,), TIME, per)
    return Device(device, step_ms, by_link[False,], by_link[True,], step_ms - sum(by_link.values()))


def _timeline(
    device: int,
    events: Iterable[tuple[Event, Operation]],
    lanes: Mapping[int, tuple[Stretch, ...]],
    steps: Sequence[Window],
) -> Timeline:
    """Return the median step of a device: its time by kind, then its events by stream."""
    length = statistics.median_low([w.end - w.start for w in steps])
    window = next(w for w in steps if w.end - w.start == length)
    streams: dict[str, list[Stretch]] = defaultdict(list)
    for e, o in events:
        if e.end > window.start and e.start < window.end:
            start, end = max(e.start, window.start) - window.start, min(e.end, window.end) - window.start
            streams[e.stream].append(Stretch(start / NS_PER_MS, end / NS_PER_MS, o.kind, o.part, o.label))
    by_stream = {name: programs.merge(streams[name]) for name in sorted(streams, key=lambda name: (len(name), name))}
    title = f"step {window.step} on device {device}"
    return Timeline(title, length / NS_PER_MS, {"measured: device": lanes[window.step], **by_stream})


def _caveats(platform: str, devices: int) -> list[str]:
    if platform == "gpu":
        return [
            "XLA launches each kernel by itself while a profiler records, without command buffers (CUDA graphs). A traced step "
            "takes longer than one without, and gaps between short kernels are longer."
        ]
    out = ["On a CPU, waiting for a core counts as time of the operation: XLA, the data and other programs share the cores."]
    shared = f"{devices} devices of one host share its cores, so a collective waits for the computation of other devices."
    return [*out, shared] if devices > 1 else out


# ---- Two traces


@dataclasses.dataclass(frozen=True)
class Change:
    """A time of a step in two traces, ms."""

    name: str
    before_ms: float
    after_ms: float


@dataclasses.dataclass(frozen=True)
class Diff:
    """Slower and faster kinds, parts and operations, largest change first."""

    before: str  # path
    after: str
    step: Change
    kinds: tuple[Change, ...]
    parts: tuple[Change, ...]
    ops: tuple[Change, ...]


def diff(before: Profile, after: Profile) -> Diff:
    """Compare two profiles. Operations are matched by label and source file, since the compiler's names change."""

    def by_op(found: Profile) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for op in found.ops:
            file = op.source.rpartition(":")[0]  # an edit above moves the line
            sums[f"{op.label} ({op.kind}, {file or op.part})"] += op.ms
        return sums

    def changes(figures: Callable[[Profile], Mapping[str, float]]) -> tuple[Change, ...]:
        old, new = figures(before), figures(after)
        found = [Change(name, old.get(name, 0.0), new.get(name, 0.0)) for name in dict.fromkeys((*old, *new))]
        found = [c for c in found if c.before_ms or c.after_ms]
        return tuple(sorted(found, key=lambda c: -abs(c.after_ms - c.before_ms)))

    by_part = changes(lambda found: {part: sum(kinds.values()) for part, kinds in found.by_part.items()})
    step = Change("step", before.step_ms, after.step_ms)
    return Diff(before.trace, after.trace, step, changes(lambda found: found.by_kind), by_part, changes(by_op))
