"""A profile as one page that can be mailed, printed and opened anywhere, complete without scripts; no request leaves it."""

import math
import re
from collections.abc import Sequence
from html import escape

from jaxtrain.page.charts import single, stacked, ticks
from jaxtrain.page.kit import Column, Markup, bullets, document, say, swatch, table, tiles
from jaxtrain.page.numbers import column, gib, number, percent, rough, size
from jaxtrain.page.sections import place
from jaxtrain.profile import figures
from jaxtrain.profile.result import KINDS, Change, Diff, Op, Profile, Program, Stretch, Timeline

LISTED = 40  # operations with a row of their own
COLOURS = {
    "GEMM": "var(--c1)",
    "attention": "var(--c4)",
    "elementwise": "var(--c2)",
    "copies": "var(--c3)",
    "exposed collectives": "var(--c5)",
    "collectives": "var(--c5)",
    "exposed host copies": "var(--c6)",
    "host copies": "var(--c6)",
    "idle": "transparent",
}


def html(found: Profile, diff: Diff | None = None) -> str:
    """The page; with `diff`, what changed since another trace."""
    title = f"{found.name}: where the time of a step went"
    body = [
        f"<header><h1>{escape(title)}</h1>",
        say(f"{found.trace}; steps {', '.join(map(str, found.steps))}", "quiet"),
        f'<p class="verdict">{escape(figures.verdict(found))}</p></header><main>',
        _tiles(found),
        _sentence(figures.range_of(found)),
        _sentence(figures.against_untraced(found)),
        _sentence(figures.against_plan(found)),
        "<h2>A step as it ran</h2>",
        _timelines(found),
        "<h2>Time by kind</h2>",
        _kinds(found),
        "<h2>Time by part</h2>",
        _parts(found),
        "<h2>Operations</h2>",
        _ops(found),
        _devices(found),
        _changes(diff) if diff else "",
        _program(found.program) if found.program else "",
        bullets("How to read this", (*figures.LEGEND, *found.notes)),
        "</main>",
    ]
    return document(title, figures.verdict(found), body)


def _sentence(text: str, kind: str = "") -> str:
    return say(f"{text[:1].upper()}{text[1:]}.", kind)


def _tiles(found: Profile) -> str:
    exposed = sum(ms for kind, ms in found.by_kind.items() if kind.startswith("exposed"))
    hidden = math.fsum(found.hidden.values())
    held = found.program.held if found.program else None
    untraced = f"{rough(found.untraced_ms)} ms" if found.untraced_ms is not None else "-"
    planned = f"{rough(found.planned.step_ms)} ms" if found.planned else "-"
    return tiles(
        [
            ("step, traced", f"{rough(found.step_ms)} ms", f"mean of {len(found.steps)} steps"),
            ("step, not traced", untraced, "median of the run"),
            ("step, planned", planned, "" if found.planned else found.no_plan),
            ("exposed", percent(exposed / found.step_ms), f"{rough(hidden)} ms more is hidden"),
            ("idle", percent(found.by_kind["idle"] / found.step_ms), "nothing runs"),
            ("held at the peak", size(held.peak_gib) if held else "-", "by the compiler, on each device"),
        ]
    )


def _timelines(found: Profile) -> str:
    drawn = [found.planned.timeline] if found.planned else []
    drawn.append(found.timeline)
    longest = max(t.ms for t in drawn)
    there = {s.kind for t in drawn for s in (*t.device, *t.links)}
    key = " &ensp; ".join(
        swatch(COLOURS[k]) + escape(k) for k in KINDS if {k, k.removeprefix("exposed ")} & there and k != "idle"
    )
    note = "Upper lane: the device, gaps are idle. Lower lane, where there is one: what moves beside it. Tooltips tell parts."
    return f'{"".join(_timeline(t, longest) for t in drawn)}<p class="quiet">{key}</p>{say(note, "quiet")}'


def _timeline(t: Timeline, longest: float) -> str:
    """One step on the scale of the longest."""
    lanes = [t.device, *([t.links] if t.links else [])]
    height = 34 * len(lanes) - 6
    spent: dict[str, float] = {}
    for s in t.device:
        spent[s.kind] = spent.get(s.kind, 0.0) + s.end - s.start
    said = ", ".join(f"{kind} {percent(ms / t.ms)}" for kind, ms in sorted(spent.items(), key=lambda kv: -kv[1]))
    label = f"{t.title}, {rough(t.ms)} ms: {said}"
    out = [f'<svg class="lanes" style="height:{height + 22}px" role="img" aria-label="{escape(label)}">']
    for n, lane in enumerate(lanes):
        y = 34 * n
        out.append(f'<rect class="empty" x="0" y="{y}" width="{100 * t.ms / longest:.3f}%" height="28"/>')
        out += [_stretch(s, longest, y) for s in lane if s.kind != "idle"]
    for tick in ticks(longest):
        x, end = 100 * tick / longest, tick > 0.95 * longest
        out.append(f'<line class="grid" x1="{x:.2f}%" x2="{x:.2f}%" y1="{height}" y2="{height + 5}"/>')
        anchor = "end" if end else "start" if not tick else "middle"
        unit = " ms" if not tick else ""
        out.append(f'<text class="axis" x="{x:.2f}%" y="{height + 18}" text-anchor="{anchor}">{tick:g}{unit}</text>')
    return f'<p class="quiet">{escape(t.title)}, {escape(rough(t.ms))} ms</p>' + "".join([*out, "</svg>"])


def _stretch(s: Stretch, longest: float, y: int) -> str:
    words = f"{s.kind}{f', {s.part}' if s.part else ''}: {number(s.end - s.start)} ms from {number(s.start)}"
    return (
        f'<rect x="{100 * s.start / longest:.3f}%" y="{y}" width="{100 * (s.end - s.start) / longest:.3f}%" height="28" '
        f'fill="{COLOURS[s.kind]}"><title>{escape(words)}</title></rect>'
    )


def _kinds(found: Profile) -> str:
    rows = figures.kinds(found)
    names, ms = [kind for kind, *_ in rows], [m for _, m, _, _ in rows]
    shown = column([*ms, found.step_ms])
    drawn = [(f"{kind}: {s} ms", m, COLOURS[kind]) for kind, m, s in zip(names, ms, shown, strict=False) if kind != "idle"]
    columns = [
        Column("kind", [Markup(swatch(COLOURS[k]) + escape(k)) for k in names], total="step"),
        Column("ms", shown[:-1], ms, total=shown[-1]),
        Column("of step", [percent(m / found.step_ms) for m in ms], ms),
    ]
    if any(hidden for _, _, hidden, _ in rows):
        hidden = [h or 0.0 for _, _, h, _ in rows]
        columns.append(Column("hidden ms", [number(h) if h else "" for h in hidden], hidden))
    if found.planned:
        planned = [p or 0.0 for *_, p in rows]
        columns.append(Column("planned ms", column(planned), planned, total=number(found.planned.step_ms)))
    label = f"Time of a step: {', '.join(what for what, *_ in drawn)}"
    return stacked(label, drawn, found.step_ms) + table("Of a step, mean of steps and devices", columns, "sortable")


def _parts(found: Profile) -> str:
    kinds = figures.columns(found.by_part.values())
    sums = [math.fsum(spent.values()) for spent in found.by_part.values()]
    columns = [
        Column("part and pass", list(found.by_part), kind="whole"),
        Column("ms", column(sums), sums),
        Column("of step", [percent(v / found.step_ms) for v in sums], sums),
        Column("", [Markup(single(v, max(sums))) for v in sums], kind="share"),
    ]
    for kind in kinds:
        values = [spent.get(kind, 0.0) for spent in found.by_part.values()]
        columns.append(Column(kind, [number(v) if v else "" for v in values], values))
    shown = table("ms of a step", columns, "sortable")
    if found.planned:
        names = list(dict.fromkeys((*(n.partition(",")[0] for n in found.by_part), *found.planned.by_part)))
        measured = [sum(v for n, v in zip(found.by_part, sums, strict=True) if n.partition(",")[0] == name) for name in names]
        planned = [found.planned.by_part.get(name, 0.0) for name in names]
        shown += table(
            "Measured beside planned, ms of a step",
            [
                Column("part", names),
                Column("measured", column(measured), measured),
                Column("planned", column(planned), planned),
            ],
            "sortable",
        )
    return shown + _sentence(figures.named(found), "quiet")


def _ops(found: Profile) -> str:
    shown, more = found.ops[:LISTED], found.ops[LISTED:]
    unit, rates = figures.rates(shown)
    ms = [op.ms for op in shown]
    columns = [
        Column("kind", [op.kind for op in shown], kind="whole"),
        Column("what", [Markup(_breakable(op.label)) for op in shown], kind="path"),
        Column("part", [op.part for op in shown]),
        Column("count", [f"{op.count:,.0f}" for op in shown], [op.count for op in shown]),
        Column("ms", column(ms), ms),
        Column("of step", [percent(v / found.step_ms) for v in ms], ms),
    ]
    if any(op.hidden_ms for op in shown):
        hidden = [op.hidden_ms for op in shown]
        columns.append(Column("hidden ms", [number(v) if v else "" for v in hidden], hidden))
    columns += [
        Column(unit, [r.flops for r in rates], [_rate(op.gflop, op) for op in shown]),
        Column("GB/s", [r.gb_s for r in rates], [_rate(op.gb, op) for op in shown]),
    ]
    if found.planned:
        columns.append(Column("of plan", [r.of_plan for r in rates], [_rate(op.planned_ms, op) for op in shown]))
    columns.append(Column("source", [place(op.source) for op in shown], kind="whole"))
    rest = _sentence(figures.rest(more), "quiet") if more else ""
    return table("What runs in a step, and what it reaches while it runs", columns, "sortable") + rest


def _rate(what: float | None, op: Op) -> float:
    return what / op.ran_ms if what and op.ran_ms else 0.0


def _breakable(label: str) -> str:
    return re.sub(r"([/:,])", r"\1<wbr>", escape(label))


def _devices(found: Profile) -> str:
    if len(found.devices) < 2:
        return ""
    columns = [Column("device", [str(d.device) for d in found.devices])]
    for name in ("step", "busy", "exposed", "idle"):
        values = [getattr(d, f"{name}_ms") for d in found.devices]
        columns.append(Column(name, column(values), values))
    return "<h2>Devices</h2>" + table("ms of a step", columns, "sortable") + _sentence(figures.stragglers(found), "quiet")


def _changes(diff: Diff) -> str:
    head = f"From {diff.before}: step {number(diff.step.before_ms)} ms, now {number(diff.step.after_ms)} ms."
    shown = [
        _changed(title, rows) for title, rows in (("kind", diff.kinds), ("part", diff.parts), ("operation", diff.ops[:LISTED]))
    ]
    return f"<h2>What changed</h2>{say(head)}{''.join(shown)}"


def _changed(title: str, rows: Sequence[Change]) -> str:
    columns = [
        Column(title, [c.name for c in rows], kind="path"),
        Column("before", column([c.before_ms for c in rows]), [c.before_ms for c in rows]),
        Column("after", column([c.after_ms for c in rows]), [c.after_ms for c in rows]),
        Column("change", [figures.signed(c) for c in rows], [c.ms for c in rows]),
    ]
    return table(f"By {title}, ms of a step", columns, "sortable")


def _program(program: Program) -> str:
    rows = figures.program_rows(program)
    launches, flops, moved = [r.launches for r in rows], [r.gflop for r in rows], [r.gb for r in rows]
    work = table(
        "Work of a step on each device, by the compiled program",
        [
            Column("part", [r.part for r in rows]),
            Column("kind", [r.kind for r in rows]),
            Column("launches", [f"{n:,}" for n in launches], launches),
            Column("GFLOP", column(flops), flops),
            Column("GB", column(moved), moved),
        ],
        "sortable",
    )
    shown = [f"<h2>The program {escape(program.name)}</h2>", work, *(say(line, "quiet") for line in figures.counted(program))]
    shown.append(f"<h2>Memory at the peak</h2>{_sentence(figures.held_at_peak(program))}")
    if program.held:
        names, values = list(program.held.by_part), list(program.held.by_part.values())
        unit, sizes = gib(values)
        bars = [Markup(single(v, max(values))) for v in values]
        by_part = [Column("part", names), Column(unit, sizes, values), Column("", bars, kind="share")]
        shown.append(table(f"By what made it, {unit} on each device", by_part, "sortable"))
        unit, sizes = gib([v for v, *_ in program.held.largest])
        largest = [
            Column("array", [shape for _, _, shape, _ in program.held.largest], kind="whole"),
            Column(unit, sizes, [v for v, *_ in program.held.largest]),
            Column("part", [part for _, part, _, _ in program.held.largest]),
            Column("source", [place(source) for *_, source in program.held.largest], kind="whole"),
        ]
        shown.append(table("Largest arrays at the peak", largest, "sortable"))
    return "".join(shown)
