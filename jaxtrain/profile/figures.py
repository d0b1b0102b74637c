"""What the text and the page of a profile both say: its reductions and its sentences."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxtrain.page.numbers import number, percent, rough, size
from jaxtrain.profile.result import HIDDEN, KINDS, NO_SCOPE, Change, Op, Profile, Program

SHORT = {"exposed collectives": "exposed coll.", "exposed host copies": "exposed host"}  # of kinds, over columns


def verdict(found: Profile) -> str:
    """The step, and what it is bound by."""
    kind, ms = max(found.by_kind.items(), key=lambda item: item[1])
    return f"step {rough(found.step_ms)} ms, {percent(ms / found.step_ms)} of it {kind}"


def range_of(found: Profile) -> str:
    """How far steps and devices are apart."""
    low, high = found.step_range_ms
    steps, devices = len(found.steps), len(found.devices)
    many = f"{steps} step{'s' if steps > 1 else ''} on {devices} device{'s' if devices > 1 else ''}"
    return f"mean of {many}, {rough(low)} to {rough(high)} ms; {found.device_kind}"


def against_untraced(found: Profile) -> str:
    """The profiler's own cost, so that nobody takes the traced step for the real one."""
    if found.untraced_ms is None:
        return "step time without the profiler: not recorded, so what tracing adds is not known"
    ratio = found.step_ms / found.untraced_ms
    median = rough(found.untraced_ms)
    return f"this run's median step is {median} ms without the profiler: traced, it takes {ratio:.2f} times that"


def against_plan(found: Profile) -> str:
    """Measured beside planned, or why there is no plan."""
    if found.planned is None:
        return found.no_plan
    ratio = found.step_ms / found.planned.step_ms
    return f"planned: {rough(found.planned.step_ms)} ms ({found.planned.rates}); measured is {ratio:.2f} times that"


def stragglers(found: Profile) -> str:
    """Who computes longest; the others wait for it in collectives. "" with one device."""
    if len(found.devices) < 2:
        return ""
    busy = sorted(found.devices, key=lambda d: d.busy_ms)
    mean = math.fsum(d.busy_ms for d in busy) / len(busy)
    last = busy[-1]
    if not mean:
        return ""
    return (
        f"arithmetic takes {rough(busy[0].busy_ms)} to {rough(last.busy_ms)} ms a step; device {last.device} takes longest, "
        f"{percent(last.busy_ms / mean - 1)} more than the mean"
    )


def named(found: Profile) -> str:
    """How much of the time has a part."""
    return f"{percent(found.named)} of the time in which something ran belongs to a part of the model or of the step"


def kinds(found: Profile) -> list[tuple[str, float, float | None, float | None]]:
    """(kind, ms, hidden ms or None, planned ms or None), of those that take time."""
    planned = found.planned.by_kind if found.planned else None
    out = []
    for kind in KINDS:
        link = kind.removeprefix("exposed ")
        hidden = found.hidden.get(link, 0.0) if link in HIDDEN else None
        expected = planned.get(kind, 0.0) if planned is not None else None
        if found.by_kind[kind] or hidden or expected or kind == "idle":
            out.append((kind, found.by_kind[kind], hidden, expected))
    return out


def columns(tables: Iterable[dict[str, float]]) -> list[str]:
    """The kinds that occur, in their order."""
    there = {kind for table in tables for kind, ms in table.items() if ms}
    return [kind for kind in KINDS if kind in there]


@dataclasses.dataclass(frozen=True)
class Reached:
    """What an operation reaches while it runs; '-' where that is not known."""

    flops: str
    gb_s: str
    of_plan: str  # the plan's time for it over what it took


def rates(ops: Sequence[Op]) -> tuple[str, list[Reached]]:
    """(unit of the FLOP/s, what each operation reaches)."""
    flops = [_per_s(op.gflop, op) for op in ops]
    large = max((f for f in flops if f), default=0.0) >= 1000
    found = []
    for op, gflops in zip(ops, flops, strict=True):
        of_plan = op.planned_ms / op.ran_ms if op.planned_ms is not None and op.ran_ms else None
        shown = "-" if not gflops else rough(gflops / 1000 if large else gflops)
        moved = _per_s(op.gb, op)
        found.append(Reached(shown, number(moved) if moved else "-", percent(of_plan)))
    return "TFLOP/s" if large else "GFLOP/s", found


def _per_s(work: float | None, op: Op) -> float | None:
    return work / (op.ran_ms / 1e3) if work and op.ran_ms else None


def signed(change: Change) -> str:
    """A change with its sign."""
    return f"{'+' if change.ms > 0 else '-' if change.ms < 0 else ''}{number(abs(change.ms))}"


def rest(ops: Sequence[Op]) -> str:
    """What the operations that are not listed take together."""
    return f"{len(ops)} more take {number(math.fsum(op.ms for op in ops))} ms together" if ops else ""


class Row(NamedTuple):
    """What a program does of one kind in one part, in a step."""

    part: str
    kind: str
    launches: int
    gflop: float
    gb: float


def program_rows(program: Program) -> list[Row]:
    """Most bytes first."""
    rows = [Row(part, kind, *cell) for part, cells in program.by_part.items() for kind, cell in cells.items()]
    return sorted(rows, key=lambda row: (-row.gb, -row.gflop))


def held_at_peak(program: Program) -> str:
    """The peak in one line."""
    if program.held is None:
        return "what is held at the peak is not known: the program came without its buffer assignment, as from a compile cache"
    return f"held at the peak {size(program.held.peak_gib)} on each device, {size(program.held.arguments_gib)} of it arguments"


def counted(program: Program) -> tuple[str, ...]:
    """What the program's sums leave out."""
    if not program.unread:
        return ()
    return (f"work not counted of {len(program.unread)} operations; the first: {program.unread[0]}",)


LEGEND = (
    "GEMM, attention (fused kernels), elementwise (all other arithmetic: memory-bound) and copies are time on the device; of "
    "what runs at once each has its share. Collectives and copies to the host count where nothing else ran (exposed); beside "
    "arithmetic they are hidden. idle: nothing ran.",
    "Parts are the program's named scopes; the loss makes its gradients in its forward pass. What the compiler made up "
    f"belongs to what it is made for; {NO_SCOPE!r} is what is left.",
    "FLOPs and bytes are counted in the compiled program; an operation's rate is over its own time, from start to end.",
)
