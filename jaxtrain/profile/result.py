"""What a trace says, as plain data: `--json` writes it, and every table and picture is drawn from it."""

import dataclasses
from typing import Any

FORMAT = 1

# What the time of a device goes to. These add up to the step.
KINDS = ("GEMM", "attention", "elementwise", "copies", "exposed collectives", "exposed host copies", "idle")
HIDDEN = ("collectives", "host copies")  # may also run beside arithmetic, and then cost nothing
NO_SCOPE = "no scope"


@dataclasses.dataclass(frozen=True)
class Op:
    """Operations of one kind and origin, over a step, on the mean of devices and steps."""

    kind: str  # one of KINDS without "exposed", never "idle"
    part: str  # part of the model, or of the step
    phase: str  # forward | backward | recompute | "" (done once a step)
    label: str  # named scopes and what is done there
    source: str  # file:line
    count: float  # launches
    ms: float  # of the step: what runs at the same time shares it, what is hidden has none
    ran_ms: float  # from its start to its end, summed over launches
    hidden_ms: float  # of collectives and host copies: beside arithmetic
    gflop: float | None  # by the program; None where it does not tell
    gb: float | None  # device memory; of collectives, what is sent
    planned_ms: float | None  # at the plan's rates for this GPU


@dataclasses.dataclass(frozen=True)
class Device:
    """One device's mean step, ms."""

    device: int
    step_ms: float
    busy_ms: float  # arithmetic and copies inside the device
    exposed_ms: float  # waiting for collectives and the host
    idle_ms: float


@dataclasses.dataclass(frozen=True)
class Stretch:
    """A piece of a timeline, ms since the step began."""

    start: float
    end: float
    kind: str  # as in KINDS, and "collectives" and "host copies" on their own lanes
    part: str


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One step on one device. The first lane is the device, the second what moves beside it."""

    title: str
    ms: float
    device: tuple[Stretch, ...]
    links: tuple[Stretch, ...]


@dataclasses.dataclass(frozen=True)
class Planned:
    """The plan of the traced program at this GPU's rates."""

    step_ms: float
    by_kind: dict[str, float]  # sums to step_ms
    by_part: dict[str, float]  # likewise, without what is exposed
    rates: str
    timeline: Timeline


@dataclasses.dataclass(frozen=True)
class Held:
    """What is in memory on one device at the peak, by the compiler's buffer assignment."""

    peak_gib: float
    arguments_gib: float
    by_part: dict[str, float]  # GiB; sums to peak_gib
    largest: tuple[tuple[float, str, str, str], ...]  # GiB, part, shape, source


@dataclasses.dataclass(frozen=True)
class Program:
    """What the compiled program does in a step on one device, whether or not it was traced."""

    name: str
    by_part: dict[str, dict[str, tuple[int, float, float]]]  # part -> kind -> launches, GFLOP, GB
    unread: tuple[str, ...]  # operations whose work is not known, and why
    held: Held | None


@dataclasses.dataclass(frozen=True)
class Profile:
    """A trace, read."""

    name: str  # of the run, or of the file
    trace: str  # path
    device_kind: str
    steps: tuple[int, ...]
    step_ms: float  # mean over steps and devices
    step_range_ms: tuple[float, float]  # shortest and longest of them
    by_kind: dict[str, float]  # ms of a step; sums to step_ms
    hidden: dict[str, float]  # ms of collectives and host copies beside arithmetic
    by_part: dict[str, dict[str, float]]  # "part, phase" -> kind -> ms
    named: float  # fraction of the time in which something ran that belongs to a part
    ops: tuple[Op, ...]  # longest first
    devices: tuple[Device, ...]
    timeline: Timeline  # of the middle step on the busiest device
    untraced_ms: float | None  # median step of the same run without the profiler; None where it recorded none
    planned: Planned | None
    no_plan: str  # why there is none
    program: Program | None
    notes: tuple[str, ...]
    format: int = FORMAT


@dataclasses.dataclass(frozen=True)
class Change:
    """Something in two traces, ms of a step."""

    name: str
    before_ms: float
    after_ms: float

    @property
    def ms(self) -> float:
        """What the later one takes longer."""
        return self.after_ms - self.before_ms


@dataclasses.dataclass(frozen=True)
class Diff:
    """What became slower or faster, largest change first."""

    before: str
    after: str
    step: Change
    kinds: tuple[Change, ...]
    parts: tuple[Change, ...]
    ops: tuple[Change, ...]


def to_json(found: Profile, diff: Diff | None = None) -> dict[str, Any]:
    """Plain data for `--json`; with `diff`, under that key."""
    tree = dataclasses.asdict(found)
    return tree | ({"diff": dataclasses.asdict(diff)} if diff else {})
