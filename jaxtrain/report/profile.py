"""A profile, and its report for the terminal and as one HTML page."""

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxtrain.config.numbers import number, percent, plural, rough
from jaxtrain.report import lost_time
from jaxtrain.report.html import document, frame_page, paragraph, tiles
from jaxtrain.report.lost_time import LostTime
from jaxtrain.report.profile_program import KINDS, NO_SCOPE
from jaxtrain.report.profile_times import Op, StepTimes, measure_steps
from jaxtrain.report.profile_trace import timeline_note
from jaxtrain.report.run import RunFolder
from jaxtrain.report.tables import (
    Column,
    Listing,
    Section,
    Table,
    bars,
    data_frame,
    html_sections,
    numbers,
    print_sections,
    render_text,
    shares,
)

ROWS, PAGE_ROWS = 15, 40  # of a long table on the terminal, and on the page
WORST = 3  # causes of lost time in the verdict
COMPUTATION = KINDS[:4]
SHORT = {"exposed communication": "exposed comm.", "exposed host copies": "exposed host"}  # kinds as headings
COLOURS = {
    "matmul": "--c1",
    "attention": "--c4",
    "memory-bound": "--c2",
    "copies": "--c3",
    "communication": "--c5",
    "host copies": "--c6",
}
NOTES = (
    "matmul, attention (fused kernels), memory-bound (all other arithmetic) and copies are time on the device; operations that "
    "run at once share it equally. Communication and host copies count where nothing else ran (exposed); beside computation "
    "they are overlapped. idle: nothing ran.",
    "Parts are the program's named scopes. The loss computes its gradients in its forward pass. Operations that the compiler "
    f"added belong to the part of their users; {NO_SCOPE!r} has all others.",
    "FLOPs and bytes are counted in the compiled program. Rates of an operation are over its own time, from start to end.",
)


@dataclasses.dataclass(frozen=True, repr=False)
class StepProfile(StepTimes):
    """The time of a step from a trace, and its lost time. It shows itself as text or as a page, and has data frames."""

    lost: LostTime = LostTime(0.0)

    def to_pandas(self, table: str = "kinds") -> Any:
        """Return a table as a pandas.DataFrame. Needs pandas.

        Args:
            table: lost (causes of lost time) | kinds | parts (ms of a step by part and kind) | operations.

        Raises:
            ValueError: the table has another name.
        """
        if table == "lost":
            return data_frame([dataclasses.asdict(row) for row in self.lost.rows])
        if table == "kinds":
            return data_frame([{"kind": kind, "ms": ms, "share": ms / self.step_ms} for kind, ms in self.by_kind.items()])
        if table == "parts":
            return data_frame([{"part": part, **kinds} for part, kinds in self.by_part.items()])
        if table == "operations":
            return data_frame([dataclasses.asdict(op) for op in self.ops])
        raise ValueError(f"table = {table!r}: no such table. Fix: lost, kinds, parts or operations.")

    def __repr__(self) -> str:
        """Return the report of `python -m jaxtrain profile`."""
        return render_text(lambda console: print_profile(self, console), 120)

    def _repr_html_(self) -> str:
        """Return the page of `python -m jaxtrain profile --html` in an HTML frame, for a notebook."""
        return frame_page(make_html(self))


def load_profile(path: Path, run: RunFolder | None) -> StepProfile:
    """Return the time of a step from a trace. run: the run of the trace; None if it is unknown.

    Raises:
        TraceError: the trace cannot be read, or has no complete step.
    """
    times = measure_steps(path, run)
    return StepProfile(**vars(times), lost=lost_time.lost_time(times, run))


# ---- Its report


def verdict(profile: StepProfile) -> str:
    """Return a line with the step time, and the longest causes of lost time."""
    lost = [f"{row.cause} {lost_time.share(row, profile.lost.step_s)}" for row in profile.lost.rows[:WORST]]
    return f"step {rough(profile.step_ms)} ms; lost: {', '.join(lost) or 'nothing that was measured'}"


def facts(profile: StepProfile) -> list[tuple[str, str, str]]:
    """Return (name, value, note) of each figure of the step."""
    low, high = map(rough, profile.step_range_ms)
    untraced, planned = ("-", "not recorded"), ("-", profile.no_plan)
    if profile.untraced_ms is not None:
        ratio = f"{profile.step_ms / profile.untraced_ms:.2f}"
        untraced = f"{rough(profile.untraced_ms)} ms", f"median of the run; the traced steps took {ratio} times as long"
    if profile.planned:
        ratio = f"{profile.step_ms / profile.planned.step_ms:.2f}"
        planned = f"{rough(profile.planned.step_ms)} ms", f"{profile.planned.rates}; the measured step takes {ratio} times that"
    return [
        ("step, traced", f"{rough(profile.step_ms)} ms", f"mean of {plural(len(profile.steps), 'step')}, {low} to {high} ms"),
        ("step, not traced", *untraced),
        ("step, planned", *planned),
        ("devices", str(len(profile.by_device)), profile.device_kind),
    ]


def make_sections(profile: StepProfile) -> list[Section]:
    """Return the sections of a profile's report."""
    return [
        lost_time.lost_time_section(profile.lost),
        Section("Time by kind", [_kinds(profile)]),
        Section("Time by part", _parts(profile)),
        Section("Operations", [_operations(profile)]),
        Section("Devices", _devices(profile)),
        Section("Notes", [Listing((timeline_note(Path(profile.trace)), *NOTES, *profile.notes))]),
    ]


def _sparse(heading: str, values: Sequence[float]) -> Column:
    """Return a column of numbers, with empty cells for zeros."""
    return Column(heading, [number(v) if v else "" for v in values], values)


def _kinds(profile: StepProfile) -> Table:
    planned = profile.planned.by_kind if profile.planned else {}
    overlapped = {f"exposed {link}": ms for link, ms in profile.overlapped.items()}
    names = [k for k in KINDS if profile.by_kind[k] or overlapped.get(k) or planned.get(k) or k == "idle"]
    ms = [profile.by_kind[k] for k in names]
    columns = [
        Column("kind", names, total="step", colours=[_colour(k) for k in names]),
        numbers("ms", ms),
        shares("of step", ms, profile.step_ms),
    ]
    if any(overlapped.values()):
        columns.append(_sparse("overlapped ms", [overlapped.get(k, 0.0) for k in names]))
    if profile.planned:
        columns.append(numbers("planned ms", [planned.get(k, 0.0) for k in names]))
    return Table("Mean of steps and devices", [*columns, bars(ms, profile.step_ms)], style="sortable")


def _parts(profile: StepProfile) -> list[str | Table]:
    planned = profile.planned.by_part if profile.planned else {}
    spent = {name: profile.by_part.get(name, {}) for name in dict.fromkeys((*profile.by_part, *planned))}
    ms = [sum(kinds.values()) for kinds in spent.values()]
    columns = [
        Column("part, pass", list(spent), total="all", kind="whole"),
        numbers("ms", ms),
        shares("of step", ms, profile.step_ms),
    ]
    if planned:
        columns.append(numbers("planned", [planned.get(name, 0.0) for name in spent]))
    columns += _kind_columns(list(spent.values()))
    coverage = f"{percent(profile.named)} of the time in which something ran belongs to a part."
    return [Table("By part and pass, ms", columns, style="sortable"), coverage]


def _kind_columns(rows: Sequence[Mapping[str, float]]) -> list[Column]:
    """Return a column for each kind of time that any row has. rows: kind -> ms."""
    kinds = [kind for kind in KINDS if any(row.get(kind) for row in rows)]
    return [_sparse(SHORT.get(kind, kind), [row.get(kind, 0.0) for row in rows]) for kind in kinds]


def _operations(profile: StepProfile) -> Table:
    ops = profile.ops
    ms = [op.ms for op in ops]
    tflops, gbs = _rates(ops, [(op.gflop or 0.0) / 1e3 for op in ops]), _rates(ops, [op.gb or 0.0 for op in ops])
    large = max(tflops, default=0.0) >= 1
    flops = tflops if large else [1e3 * v for v in tflops]
    columns = [
        Column("operation", [op.label for op in ops], kind="path"),
        Column("kind", [op.kind for op in ops], kind="whole", colours=[_colour(op.kind) for op in ops]),
        Column("count", [f"{op.count:,.0f}" for op in ops], [op.count for op in ops]),
        numbers("ms", ms, total=False),
        shares("of step", ms, profile.step_ms),
    ]
    if any(op.overlapped_ms for op in ops):
        columns.append(_sparse("overlapped", [op.overlapped_ms for op in ops]))
    columns.append(Column("TFLOP/s" if large else "GFLOP/s", [rough(v) if v else "-" for v in flops], flops))
    columns.append(Column("GB/s", [number(v) if v else "-" for v in gbs], gbs))
    if profile.planned:
        plan_shares = _rates(ops, [(op.planned_ms or 0.0) / 1e3 for op in ops])
        columns.append(Column("of plan", [percent(v) if v else "-" for v in plan_shares], plan_shares))
    columns.append(Column("source", [op.source for op in ops], kind="source"))
    return Table("Mean of a step, and rates while they run", columns, ROWS, PAGE_ROWS, "sortable")


def _rates(ops: Iterable[Op], work: Iterable[float]) -> list[float]:
    """Return the work per second of each operation: its `work` over its `ran_ms`; 0 if `ran_ms` is 0."""
    return [w / (op.ran_ms / 1e3) if op.ran_ms else 0.0 for op, w in zip(ops, work, strict=True)]


def _devices(profile: StepProfile) -> list[str | Table]:
    """Return the table of devices, and a sentence on the one with the longest computation; [] for one device."""
    if len(profile.by_device) == 1:
        return []
    busy = {device: sum(ms for kind, ms in kinds.items() if kind in COMPUTATION) for device, kinds in profile.by_device.items()}
    last = max(busy, key=lambda device: busy[device])
    above = busy[last] / statistics.fmean(busy.values()) - 1 if busy[last] else 0.0
    straggler = f"Computation takes {rough(min(busy.values()))} to {rough(busy[last])} ms a step. Device {last} takes longest, "
    straggler += f"{percent(above)} more than the mean, and the others wait for it in communication."
    steps = numbers("step", [sum(kinds.values()) for kinds in profile.by_device.values()], total=False)
    columns = [Column("device", [str(device) for device in busy]), steps, *_kind_columns(list(profile.by_device.values()))]
    return [Table("ms of a step", columns, ROWS, style="sortable"), straggler]


def print_profile(profile: StepProfile, console: Console) -> None:
    """Print the report of a profile."""
    steps = f"{profile.trace}, steps {', '.join(map(str, profile.steps))}"
    shown = Listing([f"{name}: {value}, {note}" for name, value, note in facts(profile)])
    print_sections([Section(f"{profile.name}: {verdict(profile)}", [steps, shown]), *make_sections(profile)], console)


def make_html(profile: StepProfile) -> str:
    """Return the report as one HTML page that needs no network."""
    title = f"{profile.name}: time of a step"
    steps = f"{profile.trace}; steps {', '.join(map(str, profile.steps))}"
    body = [
        f"<header><h1>{escape(title)}</h1>{paragraph(steps, 'quiet')}",
        f'<p class="verdict">{escape(verdict(profile))}</p></header><main>',
        tiles(facts(profile)),
        *html_sections(make_sections(profile)),
        "</main>",
    ]
    return document(title, verdict(profile), body)


def _colour(kind: str) -> str:
    return f"var({COLOURS.get(kind.removeprefix('exposed '), '--panel')})"


def to_json(profile: StepProfile) -> str:
    """Return a profile as JSON."""
    return json.dumps(dataclasses.asdict(profile), indent=1) + "\n"
