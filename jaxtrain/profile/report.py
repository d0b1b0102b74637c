"""A profile as text and as one HTML page, both from the same sections."""

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from rich.console import Console

from jaxtrain.page.charts import single
from jaxtrain.page.kit import Column, Markup, bullets, cursor_data, document, swatch, tiles
from jaxtrain.page.kit import say as paragraph
from jaxtrain.page.kit import table as html_table
from jaxtrain.plan.numbers import column, number, percent, rough
from jaxtrain.plan.report.figures import place
from jaxtrain.plan.report.lines import bar, heading, listed, row, say, short
from jaxtrain.plan.report.lines import table as text_table
from jaxtrain.profile.measure import Diff, Profile
from jaxtrain.profile.program import KINDS, NO_SCOPE

ROWS, ROWS_OF_PAGE = 15, 40  # of a long table
SHARE = "share"  # CSS class of a column of bars
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
    f"added belong to the part of their users; {NO_SCOPE!r} is the rest.",
    "FLOPs and bytes are counted in the compiled program. Rates of an operation are over its own time, from start to end.",
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading with tables of (caption, columns), and sentences."""

    title: str
    tables: Sequence[tuple[str, Sequence[Column]]]
    sentences: Sequence[str] = ()


def verdict(found: Profile) -> str:
    """Return the step time and its largest kind."""
    kind, ms = max(found.by_kind.items(), key=lambda item: item[1])
    return f"step {rough(found.step_ms)} ms, {percent(ms / found.step_ms)} of it {kind}"


def introduction(found: Profile) -> list[str]:
    """Return sentences on the step: its range, its time without the profiler, its plan."""
    low, high = found.step_range_ms
    steps, devices = len(found.steps), len(found.devices)
    many = f"{steps} step{'s' if steps > 1 else ''} on {devices} device{'s' if devices > 1 else ''}"
    untraced, plan = "The step time without the profiler was not recorded, so the cost of tracing is unknown", found.no_plan
    if found.untraced_ms is not None:
        untraced = f"Without the profiler, the run's median step is {rough(found.untraced_ms)} ms; a traced step takes "
        untraced += f"{found.step_ms / found.untraced_ms:.2f} times that"
    if found.planned:
        plan = f"Planned: {rough(found.planned.step_ms)} ms ({found.planned.rates}); measured is "
        plan += f"{found.step_ms / found.planned.step_ms:.2f} times that"
    return [f"Mean of {many}, {rough(low)} to {rough(high)} ms; {found.device_kind}", untraced, plan]


def sections(found: Profile, diff: Diff | None = None) -> list[Section]:
    """Return the report of a profile; with `diff`, also the changes since another trace."""
    out = [_kinds(found), _parts(found), _operations(found)]
    if len(found.devices) > 1:
        out.append(_devices(found))
    if diff:
        out.append(_changes(diff))
    return out


def _numbers(name: str, values: Sequence[float], kind: str = "", total: str = "") -> Column:
    return Column(name, column(values), values, kind, total)


def _sparse(name: str, values: Sequence[float]) -> Column:
    """Return a column whose zeros are empty."""
    return Column(name, [number(v) if v else "" for v in values], values)


def _shares(values: Sequence[float], whole: float) -> Column:
    return Column("of step", [percent(v / whole) for v in values], values)


def _bars(values: Sequence[float]) -> Column:
    return Column("", [""] * len(values), values, SHARE)


def _kinds(found: Profile) -> Section:
    planned = found.planned.by_kind if found.planned else {}
    hidden = {f"exposed {link}": ms for link, ms in found.overlapped.items()}
    names = [k for k in KINDS if found.by_kind[k] or hidden.get(k) or planned.get(k) or k == "idle"]
    ms = [found.by_kind[k] for k in names]
    shown = [Column("kind", names, total="step"), _numbers("ms", ms, total=number(found.step_ms)), _shares(ms, found.step_ms)]
    if any(hidden.values()):
        shown.append(_sparse("overlapped ms", [hidden.get(k, 0.0) for k in names]))
    if found.planned:
        shown.append(_numbers("planned ms", [planned.get(k, 0.0) for k in names], total=number(found.planned.step_ms)))
    return Section("Time by kind", [("Time of a step by kind, mean of steps and devices", [*shown, _bars(ms)])])


def _parts(found: Profile) -> Section:
    kinds = [k for k in KINDS if any(spent.get(k) for spent in found.by_part.values())]
    sums = {name: math.fsum(spent.values()) for name, spent in found.by_part.items()}
    by_kind = [_sparse(SHORT.get(k, k), [spent.get(k, 0.0) for spent in found.by_part.values()]) for k in kinds]
    ms = list(sums.values())
    shown = [Column("part, pass", list(sums), kind="whole"), _numbers("ms", ms), _shares(ms, found.step_ms), *by_kind]
    tables = [("Time of a step by part and pass, ms", shown)]
    if found.planned:
        names = list(dict.fromkeys((*(name.partition(",")[0] for name in sums), *found.planned.by_part)))
        measured = [math.fsum(v for name, v in sums.items() if name.partition(",")[0] == part) for part in names]
        planned = [found.planned.by_part.get(part, 0.0) for part in names]
        beside = [Column("part", names), _numbers("measured", measured), _numbers("planned", planned)]
        tables.append(("Time of a step by part, measured beside planned, ms", beside))
    return Section("Time by part", tables, [f"{percent(found.named)} of the time in which something ran belongs to a part"])


def _operations(found: Profile) -> Section:
    ops, rest = found.ops[:ROWS_OF_PAGE], found.ops[ROWS_OF_PAGE:]
    ms, overlapped = [op.ms for op in ops], [op.overlapped_ms for op in ops]

    def rate(work: Iterable[float | None]) -> list[float]:
        return [w / op.ran_ms if w and op.ran_ms else 0.0 for w, op in zip(work, ops, strict=True)]

    tflops, gbs = rate(op.gflop for op in ops), rate(1e3 * op.gb if op.gb else None for op in ops)
    large = max(tflops, default=0.0) >= 1
    flops = tflops if large else [1e3 * v for v in tflops]
    shown = [
        Column("operation", [op.label for op in ops], kind="path"),
        Column("kind", [op.kind for op in ops], kind="whole"),
        Column("count", [f"{op.count:,.0f}" for op in ops], [op.count for op in ops]),
        _numbers("ms", ms),
        _shares(ms, found.step_ms),
    ]
    if any(overlapped):
        shown.append(_sparse("overlapped", overlapped))
    shown += [
        Column("TFLOP/s" if large else "GFLOP/s", [rough(v) if v else "-" for v in flops], flops),
        Column("GB/s", [number(v) if v else "-" for v in gbs], gbs),
    ]
    if found.planned:
        of_plan = rate(op.planned_ms for op in ops)
        shown.append(Column("of plan", [percent(v) if v else "-" for v in of_plan], of_plan))
    shown.append(Column("source", [place(op.source) for op in ops], kind="whole"))
    more = [f"{len(rest)} more take {number(math.fsum(op.ms for op in rest))} ms together"] if rest else []
    return Section("Operations", [("Operations of a step, and their rates while they run", shown)], more)


def _devices(found: Profile) -> Section:
    names = {"step": "step_ms", "busy": "busy_ms", "exposed": "exposed_ms", "idle": "idle_ms"}
    shown = [_numbers(name, [getattr(d, field) for d in found.devices]) for name, field in names.items()]
    low, *_, high = sorted(found.devices, key=lambda d: d.busy_ms)
    above = high.busy_ms / statistics.fmean(d.busy_ms for d in found.devices) - 1 if high.busy_ms else 0.0
    straggler = (
        f"Computation takes {rough(low.busy_ms)} to {rough(high.busy_ms)} ms a step. Device {high.device} takes longest, "
    )
    straggler += f"{percent(above)} more than the mean, and the others wait for it in communication"
    return Section(
        "Devices",
        [("Time of a step by device, ms", [Column("device", [str(d.device) for d in found.devices]), *shown])],
        [straggler],
    )


def _changes(diff: Diff) -> Section:
    tables = []
    for name, changes in diff.changes.items():
        shown = changes[:ROWS_OF_PAGE]
        signed = [f"{'+' if c.ms > 0 else '-' if c.ms < 0 else ''}{number(abs(c.ms))}" for c in shown]
        columns = [
            Column(name, [c.name for c in shown], kind="path"),
            _numbers("before", [c.before_ms for c in shown]),
            _numbers("after", [c.after_ms for c in shown]),
            Column("change", signed, [c.ms for c in shown]),
        ]
        tables.append((f"Change by {name}, ms of a step", columns))
    return Section("Changes", tables, [f"From {diff.before} to {diff.after}"])


# ---- Text


def print_profile(found: Profile, diff: Diff | None, console: Console) -> None:
    """Print the whole report."""
    say(console, f"{found.name}: {found.trace}, steps {', '.join(map(str, found.steps))}")
    say(console, verdict(found), "bold")
    for sentence in introduction(found):
        say(console, sentence)
    print_sections(sections(found, diff), console)
    listed(console, "Notes", (*NOTES, *found.notes))


def print_sections(shown: Iterable[Section], console: Console) -> None:
    """Print sections, with the first rows of long tables."""
    for section in shown:
        for caption, columns in section.tables:
            heading(console, caption)
            numeric = [i for i, c in enumerate(columns) if c.values is not None and c.kind != SHARE]
            made = text_table([c.heading for c in columns], numeric)
            for i in range(min(ROWS, len(columns[0].cells))):
                row(made, *(_text_cell(c, i, console) for c in columns))
            if columns[0].total:
                row(made, *(c.total for c in columns), style="bold")
            console.print(made)
        for sentence in section.sentences:
            say(console, sentence)


def _text_cell(c: Column, i: int, console: Console) -> str:
    if c.kind == SHARE and c.values is not None:
        return bar(console, c.values[i], max(c.values))
    return short(c.cells[i]) if c.heading == "source" else c.cells[i]


# ---- Page


def html(found: Profile, diff: Diff | None = None) -> str:
    """Return the report as one page that fetches nothing."""
    title = f"{found.name}: time of a step"
    steps = f"{found.trace}; steps {', '.join(map(str, found.steps))}"
    body = [f"<header><h1>{escape(title)}</h1>{paragraph(steps, 'quiet')}"]
    body.append(f'<p class="verdict">{escape(verdict(found))}</p></header><main>{_tiles(found)}')
    body += [paragraph(f"{sentence[:1].upper()}{sentence[1:]}.") for sentence in introduction(found)]
    body += ["<h2>Timeline of a step</h2>", _timeline(found)]
    for section in sections(found, diff):
        body.append(f"<h2>{escape(section.title)}</h2>")
        body += [html_table(caption, _page_columns(columns), "sortable") for caption, columns in section.tables]
        body += [paragraph(f"{sentence[:1].upper()}{sentence[1:]}.", "quiet") for sentence in section.sentences]
    body += [bullets("Notes", (*NOTES, *found.notes)), "</main>"]
    return document(title, verdict(found), body)


def _page_columns(columns: Sequence[Column]) -> list[Column]:
    """Return columns with bars, swatches of kinds, and places to break a path."""
    out = []
    for c in columns:
        if c.kind == SHARE and c.values is not None:
            colours = [_colour(name) for name in columns[0].cells]
            bars = [single(v, max(c.values), colour) for v, colour in zip(c.values, colours, strict=True)]
            c = Column(c.heading, [Markup(drawn) for drawn in bars], kind=SHARE)
        elif c.heading == "kind":
            c = dataclasses.replace(c, cells=[Markup(swatch(_colour(kind)) + escape(kind)) for kind in c.cells])
        elif c.kind == "path":
            c = dataclasses.replace(c, cells=[Markup(re.sub(r"([/:,])", r"\1<wbr>", escape(text))) for text in c.cells])
        out.append(c)
    return out


def _colour(kind: str) -> str:
    return f"var({COLOURS.get(kind.removeprefix('exposed '), '--rule')})"


def _tiles(found: Profile) -> str:
    exposed = sum(ms for kind, ms in found.by_kind.items() if kind.startswith("exposed"))
    untraced = f"{rough(found.untraced_ms)} ms" if found.untraced_ms is not None else "-"
    planned = f"{rough(found.planned.step_ms)} ms" if found.planned else "-"
    return tiles(
        [
            ("step, traced", f"{rough(found.step_ms)} ms", f"mean of {len(found.steps)} steps"),
            ("step, not traced", untraced, "median of the run"),
            ("step, planned", planned, "at the rates below" if found.planned else found.no_plan),
            ("exposed", percent(exposed / found.step_ms), f"{rough(math.fsum(found.overlapped.values()))} ms more overlapped"),
            ("idle", percent(found.by_kind["idle"] / found.step_ms), "nothing runs"),
            ("devices", str(len(found.devices)), found.device_kind),
        ]
    )


def _timeline(found: Profile) -> str:
    """Return the canvas that timeline.js draws, with its data.

    The data of a lane are runs of four numbers: start and duration in ns, and the indices of a kind and of a label.
    """
    lanes = (found.planned.lanes if found.planned else {}) | found.lanes
    kinds = [k for k in COLOURS if any(s.kind == k for lane in lanes.values() for s in lane)]
    labels: dict[str, int] = {}
    encoded = []
    for name, lane in lanes.items():
        events = []
        for s in lane:
            label = labels.setdefault(", ".join(filter(None, (s.label, s.part))), len(labels))
            events += [round(s.start * 1e6), round((s.end - s.start) * 1e6), kinds.index(s.kind), label]
        encoded.append({"name": name, "events": events})
    longest = max(lane[-1].end for lane in lanes.values())
    data = {"ns": round(longest * 1e6), "kinds": [[k, COLOURS[k]] for k in kinds], "labels": list(labels), "lanes": encoded}
    key = " ".join(f"<span>{swatch(_colour(k))}{escape(k)}</span>" for k in kinds)
    files = resources.files("jaxtrain.profile")
    return (
        f"<style>{(files / 'timeline.css').read_text(encoding='utf-8')}</style>"
        f'<figure class="timeline"><p class="key">{key}</p><canvas tabindex="0" role="img" aria-label="Timeline: '
        f'{escape(verdict(found))}"></canvas><div class="tip"></div><p class="controls"></p>{cursor_data(data)}</figure>'
        f"<noscript>{paragraph('The timeline needs JavaScript.')}</noscript>"
        f"<script>{(files / 'timeline.js').read_text(encoding='utf-8')}</script>"
    )


def to_json(found: Profile, diff: Diff | None = None) -> str:
    """Return a profile as JSON without its timeline; with `diff`, the changes under that key."""
    tree = dataclasses.asdict(found) | ({"diff": dataclasses.asdict(diff)} if diff else {})
    for timed in filter(None, (tree, tree["planned"])):
        del timed["lanes"]
    return json.dumps(tree, indent=1) + "\n"
