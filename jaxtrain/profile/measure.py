"""From events to time: every nanosecond of a step is counted once, on each device.

While arithmetic (or a copy inside the device) runs, the time is that operation's; several at once share it equally. Where none
does, it is that of the collective that runs, which is then exposed; else of a copy to or from the host; else it is idle.
Collectives and host copies beside arithmetic are hidden. Loops and calls are not operations of their own: what they run is.

A step lasts from the end of the step before to its own end, so gaps between steps count. Of the first one in a trace, where
nothing of the step before was recorded, the time before its first operation does not.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxtrain.plan.program.hlo import Module
from jaxtrain.profile.parts import CONTROL, Origin, by_kernel
from jaxtrain.profile.result import HIDDEN, NO_SCOPE, Device, Op, Stretch, Timeline
from jaxtrain.profile.trace import Event, Trace, TraceError

NS_PER_MS = 1e6
LINKS = HIDDEN  # kinds that can run beside arithmetic
STRETCHES = 1000  # of a timeline's lane; beyond that, short neighbours are merged


class Window(NamedTuple):
    """A step on one device, ns."""

    step: int
    start: float
    end: float


class Sums:
    """What the steps of one device took, by operation; ns over all of its steps."""

    def __init__(self, windows: Sequence[Window]):
        self.windows = windows
        self.time: dict[Origin, float] = defaultdict(float)  # shared and exposed
        self.hidden: dict[Origin, float] = defaultdict(float)
        self.ran: dict[Origin, float] = defaultdict(float)
        self.count: Counter[Origin] = Counter()
        self.lanes: dict[int, tuple[list[Stretch], list[Stretch]]] = {}  # step -> device, links; ms

    @property
    def steps_ns(self) -> float:
        return sum(w.end - w.start for w in self.windows)


def main_program(trace: Trace) -> int:
    """The number of the program that most time went to."""
    spent: Counter[int] = Counter()
    for events in trace.devices.values():
        for e in events:
            spent[e.program] += int(e.end - e.start)
    return spent.most_common(1)[0][0]


def windows(trace: Trace, program: int, module: Module | None) -> dict[int, tuple[Window, ...]]:
    """The whole steps of each device. Raises TraceError where there is none."""
    found = {}
    for device, events in trace.devices.items():
        mine = [e for e in events if e.program == program]
        found[device] = _by_run(mine, trace.steps) if trace.platform == "cpu" else _by_anchor(mine, trace.steps, module)
    found = {device: steps for device, steps in found.items() if steps}
    if not found:
        raise TraceError(f"{trace.path}: no step is whole in this trace. Trace more steps: profile.steps.")
    return found


def _by_run(events: Iterable[Event], steps: Sequence[int]) -> tuple[Window, ...]:
    """By the executions of the program: the last ones are the steps that the loop marked. One before them was cut off."""
    starts, ends = {}, {}
    for e in events:
        starts[e.run] = min(e.start, starts.get(e.run, e.start))
        ends[e.run] = max(e.end, ends.get(e.run, e.end))
    order = sorted(starts, key=lambda run: starts[run])
    count = len(steps) or len(order)
    before = [ends[run] for run in order[:-count]]
    numbers = steps or tuple(range(count))
    found = []
    for number, run in zip(numbers, order[-count:], strict=False):
        start = max(before[-1], 0.0) if before else starts[run]
        found.append(Window(number, start, ends[run]))
        before.append(ends[run])
    return tuple(found)


def _by_anchor(events: Sequence[Event], steps: Sequence[int], module: Module | None) -> tuple[Window, ...]:
    """By the operation that ends a step, the last that runs once in it: a GPU's events do not say which step they are of."""
    counts = Counter(e.op for e in events if e.op)
    if module:  # in the order of the schedule, without what loops run
        counts = {i.name: counts[i.name] for i in module.entry.instructions if i.name in counts}
    times = len(steps) or max(Counter(counts.values()).items(), key=lambda item: item[1], default=(0, 0))[0]
    once = [op for op, count in counts.items() if times and count in (times, times + 1)]  # one more, of a step that was cut off
    if not once:
        return ()
    anchor = once[-1] if module else max(once, key=lambda op: max(e.end for e in events if e.op == op))
    ends = sorted(e.end for e in events if e.op == anchor)
    begins = [events[0].start, *ends][-times - 1 : -1]
    return tuple(Window(n, *ab) for n, ab in zip(steps or range(times), zip(begins, ends[-times:], strict=True), strict=True))


def origin_of(event: Event, program: int, known: Mapping[str, Origin]) -> Origin | None:
    """None for what is no operation of its own."""
    if event.program == program and event.op in known:
        return known[event.op]
    if event.op.split(".")[0] in CONTROL:
        return None
    found = by_kernel(event.kernel)
    other = event.program not in (program, -1)
    return Origin(found.kind, "other programs", "", found.label, "") if other else found


def sums(events: Sequence[Event], steps: Sequence[Window], program: int, known: Mapping[str, Origin]) -> Sums:
    """One device's."""
    made = Sums(steps)
    points: list[tuple[float, int, Origin | None]] = []
    first, last = steps[0].start, steps[-1].end
    for e in events:
        if e.end <= first or e.start >= last or (origin := origin_of(e, program, known)) is None:
            continue
        made.count[origin] += 1
        made.ran[origin] += e.end - e.start
        points += [(max(e.start, first), 1, origin), (min(e.end, last), -1, origin)]
    points += [(w.start, 2, None) for w in steps]
    points.sort(key=lambda p: (p[0], p[1]))
    at = -1
    running: tuple[Counter[Origin], Counter[Origin]] = (Counter(), Counter())  # arithmetic, links
    now = first
    lanes: tuple[list[Stretch], list[Stretch]] = ([], [])
    for time, what, origin in (*points, (last, 0, None)):
        if time > now and at >= 0:
            _account(made, running, now, time, steps[at], lanes)
        now = max(now, time)
        if what == 2:
            at, lanes = at + 1, ([], [])
            made.lanes[steps[at].step] = lanes
        elif origin is not None:
            lane = running[origin.kind in LINKS]
            lane[origin] += what
            if not lane[origin]:
                del lane[origin]
    return made


def _account(made: Sums, running, now: float, time: float, step: Window, lanes) -> None:
    """Nothing starts or ends between `now` and `time`."""
    work, links = running
    took = time - now
    began, ended = (now - step.start) / NS_PER_MS, (time - step.start) / NS_PER_MS
    for origin, n in work.items():
        made.time[origin] += took * n / work.total()
    if work:
        for origin in links:
            made.hidden[origin] += took
        first = next(iter(work))
        _draw(lanes[0], began, ended, first.kind, first.part)
    elif links:
        chosen = [o for o in links if o.kind == "collectives"] or list(links)
        for origin in chosen:
            made.time[origin] += took / len(chosen)
        for origin in links.keys() - set(chosen):
            made.hidden[origin] += took
        _draw(lanes[0], began, ended, f"exposed {chosen[0].kind}", chosen[0].part)
    else:
        _draw(lanes[0], began, ended, "idle", "")
    for origin in links:
        _draw(lanes[1], began, ended, origin.kind, origin.part)


def _draw(lane: list[Stretch], start: float, end: float, kind: str, part: str) -> None:
    if lane and (lane[-1].kind, lane[-1].part) == (kind, part) and start - lane[-1].end < 1e-6:
        lane[-1] = Stretch(lane[-1].start, end, kind, part)
    else:
        lane.append(Stretch(start, end, kind, part))


def thinned(lane: Sequence[Stretch], most: int = STRETCHES) -> tuple[Stretch, ...]:
    """At most so many stretches: in each small piece of time what took most of it, or nothing where most of it is empty."""
    if len(lane) <= most:
        return tuple(lane)
    whole, out = max(s.end for s in lane), []
    width = whole / most
    taken: dict[int, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    for s in lane:
        for cell in range(int(s.start / width), int(s.end / width) + 1):
            shared = min(s.end, (cell + 1) * width) - max(s.start, cell * width)
            if shared > 0:
                taken[cell][s.kind, s.part] += shared
    for cell, shares in sorted(taken.items()):
        if sum(shares.values()) < width / 2:
            continue
        kind, part = max(shares, key=lambda key: shares[key])
        _draw(out, cell * width, min((cell + 1) * width, whole), kind, part)
    return tuple(out)


# ---- Over devices


def kind_of(origin: Origin) -> str:
    """As the step is divided: what of a link's time is counted is what was exposed."""
    return f"exposed {origin.kind}" if origin.kind in LINKS else origin.kind


def by_kind(found: Mapping[int, Sums]) -> tuple[dict[str, float], dict[str, float]]:
    """(ms of a step by kind, idle included; ms hidden), means over devices and steps."""
    steps = sum(len(s.windows) for s in found.values())
    spent: dict[str, float] = defaultdict(float)
    hidden: dict[str, float] = defaultdict(float)
    for s in found.values():
        for origin, ns in s.time.items():
            spent[kind_of(origin)] += ns / NS_PER_MS / steps
        for origin, ns in s.hidden.items():
            hidden[origin.kind] += ns / NS_PER_MS / steps
        spent["idle"] += (s.steps_ns - sum(s.time.values())) / NS_PER_MS / steps
    return dict(spent), dict(hidden)


def by_part(found: Mapping[int, Sums]) -> dict[tuple[str, str], dict[str, float]]:
    """(part, phase) -> kind -> ms of a step, largest part first."""
    steps = sum(len(s.windows) for s in found.values())
    spent: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for s in found.values():
        for origin, ns in s.time.items():
            spent[origin.part, origin.phase][kind_of(origin)] += ns / NS_PER_MS / steps
    return {key: dict(kinds) for key, kinds in sorted(spent.items(), key=lambda item: -sum(item[1].values()))}


def named(found: Mapping[int, Sums]) -> float:
    """The fraction of the time in which something ran that belongs to a part."""
    whole = sum(ns for s in found.values() for ns in s.time.values())
    lost = sum(ns for s in found.values() for origin, ns in s.time.items() if origin.part == NO_SCOPE)
    return 1 - lost / whole if whole else 0.0


def ops(found: Mapping[int, Sums], rates) -> tuple[Op, ...]:
    """Operations of one kind and origin together, longest first."""
    steps = sum(len(s.windows) for s in found.values())
    groups: dict[tuple[str, ...], list[Origin]] = defaultdict(list)
    for origin in {origin: None for s in found.values() for origin in s.count}:
        groups[origin.kind, origin.part, origin.phase, origin.label, origin.source].append(origin)
    out = []
    for key, members in groups.items():

        def total(of: str, members: list[Origin] = members) -> float:
            return sum(getattr(s, of)[o] for s in found.values() for o in members if o in getattr(s, of))

        n = {o: sum(s.count[o] for s in found.values()) / steps for o in members}
        done = [(o.work, n[o]) for o in members if o.work]
        whole = len(done) == len(members)
        out.append(
            Op(
                *key,
                count=sum(n.values()),
                ms=total("time") / NS_PER_MS / steps,
                ran_ms=total("ran") / NS_PER_MS / steps,
                hidden_ms=total("hidden") / NS_PER_MS / steps,
                gflop=sum(w.flops * times for w, times in done) / 1e9 if whole else None,
                gb=sum(w.bytes * times for w, times in done) / 1e9 if whole else None,
                planned_ms=sum(w.seconds(rates) * times for w, times in done) * 1e3 if whole and rates else None,
            )
        )
    return tuple(sorted(out, key=lambda op: -(op.ms + op.hidden_ms)))


def devices(found: Mapping[int, Sums]) -> tuple[Device, ...]:
    """The mean step of each."""
    out = []
    for device, s in sorted(found.items()):
        n = len(s.windows) * NS_PER_MS
        exposed = sum(ns for origin, ns in s.time.items() if origin.kind in LINKS)
        spent = sum(s.time.values())
        out.append(Device(device, s.steps_ns / n, (spent - exposed) / n, exposed / n, (s.steps_ns - spent) / n))
    return tuple(out)


def timeline(found: Mapping[int, Sums]) -> Timeline:
    """The middle step, by its length, of the device that computes longest."""
    device = max(devices(found), key=lambda d: d.busy_ms).device
    s = found[device]
    middle = statistics.median_low([w.end - w.start for w in s.windows])
    window = next(w for w in s.windows if w.end - w.start == middle)
    lane, links = s.lanes[window.step]
    where = f", device {device}" if len(found) > 1 else ""
    title = f"measured: step {window.step}{where}"
    return Timeline(title, middle / NS_PER_MS, thinned(lane), thinned(links) if links else ())
