"""A plan as one page that can be mailed, printed and opened anywhere: no request leaves it, all of it works without scripts."""

import math
import re
from html import escape

from jaxtrain.page.charts import cursor_data, single, stacked
from jaxtrain.page.html import Column, Markup, bullets, document, paragraph, plural, swatch, table, tiles
from jaxtrain.plan.numbers import GB_PER_GIB, column, decimals, gib, number, percent, rough, size
from jaxtrain.plan.report.figures import (
    ASSUMPTIONS,
    TRAINING,
    built,
    card,
    classes,
    command,
    devices,
    expected,
    experts,
    headline,
    host_waits,
    in_pieces,
    matmuls,
    mesh,
    mfu,
    moved,
    no_range,
    off_by,
    peak_at,
    pipeline,
    place,
    ran,
    rates,
    span,
    step_parts,
    supposed,
    training,
    verdict,
    work,
)
from jaxtrain.plan.report.page_charts import colour, memory_chart
from jaxtrain.plan.result import Buffer, Collective, Plan

PART_COLOURS = {
    "GEMM": "var(--c1)",
    "attention": "var(--c4)",
    "memory-bound": "var(--c2)",
    "exposed communication": "var(--c5)",
    "waiting for the host": "var(--c8)",
}
LISTED = 40  # kernels and arrays with a row of their own; what is left is summed in one more


def html(plan: Plan, *, steps: int | None = None) -> str:
    """The page. `steps`: the config's number of training steps."""
    title = f"{plan.config} on {plan.topology}"
    body = [
        f"<header><h1>{escape(title)}</h1>",
        paragraph(f"{plan.chip}, {plural(devices(plan), 'GPU')}: mesh {mesh(plan)}, attention {plan.attention}", "quiet"),
        paragraph(f"with {' '.join(plan.overrides)}", "quiet") if plan.overrides else "",
        f'<p class="verdict {"yes" if plan.fits else "no"}">{escape(verdict(plan))}</p></header><main>',
        _tiles(plan),
        paragraph(f"{plan.kept}.") if plan.kept else "",
        paragraph(f"{f'{expected(plan)} ({off_by(plan)})' if plan.time.expected_step_ms else off_by(plan)}{supposed(plan)}."),
        bullets("Warnings", plan.warnings, "warnings"),
        bullets("Hints" if plan.fits else "What would make it fit", plan.hints),
        "<h2>Memory over the schedule</h2>",
        _schedule(plan),
        "<h2>Memory at the peak</h2>",
        _memory(plan),
        "<h2>Time of a step, by the roofline</h2>",
        _time(plan, steps),
        bullets("Pipeline", pipeline(plan)),
        bullets("Experts", experts(plan)),
        "<h2>What moves between GPUs</h2>",
        _collectives(plan),
        "<h2>Kernels</h2>",
        _kernels(plan),
        "<h2>Largest arrays at the peak</h2>",
        _buffers(plan),
        _loops(plan),
        paragraph(f"{waits}.") if (waits := host_waits(plan)) else "",
        bullets("How it was counted", (rates(plan), f"the meter: {ASSUMPTIONS}", work(plan), built(plan))),
        f"<h2>To make this plan again</h2><pre><code>{escape(command(plan))}</code></pre></main>",
    ]
    return document(f"{title}: {verdict(plan)}", headline(plan), body)


def _tiles(plan: Plan) -> str:
    t, m = plan.time, plan.memory
    wire = sum(c.wire_gib for c in plan.collectives) * GB_PER_GIB
    cells = [
        ("memory", size(m.taken_gib), f"of {size(m.usable_gib)} usable"),
        _speed(
            plan,
            "step" if plan.fits else "step, if it did fit",
            t.expected_step_ms,
            f"{rough(t.step_ms)} ms",
            f"bound by {t.bound_by}",
            " ms",
        ),
        _speed(
            plan,
            "tokens/s/GPU",
            t.expected_tokens_per_s_per_device,
            rough(t.tokens_per_s_per_device, 4),
            f"{rough(t.tokens_per_s, 4)} in all",
        ),
        _mfu(plan),
        ("exposed", percent(t.exposed_ms / t.step_ms), "communication, of the step"),
        ("on the wire", f"{number(wire)} GB", "a GPU and step"),
    ]
    return tiles(cells)


def _mfu(plan: Plan) -> tuple[str, str, str]:
    """The tile of MFU, with the expected range first where there is one."""
    t = plan.time
    note = f"{mfu(plan)}, full {percent(t.mfu_full)}, HFU {percent(t.hfu)}"
    if t.expected_step_ms is None:
        return "MFU by the roofline", percent(t.mfu_causal), note
    low, high = (percent(t.mfu_causal * t.step_ms / each) for each in reversed(t.expected_step_ms))
    return "MFU, expected", f"{low} to {high}", f"roofline {note}"


def _speed(
    plan: Plan, what: str, low_high: tuple[float, float] | None, roofline: str, note: str, unit: str = ""
) -> tuple[str, str, str]:
    """A tile: the expected range and below it the roofline; without a range the roofline, named as such, and why."""
    if low_high:
        return f"{what}, expected", span(low_high) + unit, f"roofline {roofline}, {note}"
    return f"{what}, roofline", roofline, f"{no_range(plan)}; {note}"


def _schedule(plan: Plan) -> str:
    m = plan.memory
    if not m.timeline:
        return paragraph("The schedule of this plan was not recorded.")
    phases = list(dict.fromkeys(phase for _, phase in m.timeline))
    held = {p: [gib for gib, phase in m.timeline if phase == p] for p in phases}
    low, high = [min(held[p]) for p in phases], [max(held[p]) for p in phases]
    note = "In the order in which the compiler scheduled the step, bodies of loops once: not to scale in time."
    if m.taken_gib > 1.001 * m.peak_gib:
        note += f" Above the peak, {in_pieces(plan)}."
    unit, lows = gib(low)
    by_phase = table(
        "Phases of the schedule",
        [
            Column("phase", [phase or "start" for phase in phases]),
            Column(f"least held, {unit}", lows, low),
            Column(f"most held, {gib(high)[0]}", gib(high)[1], high),
        ],
        "small",
    )
    places = decimals([held for held, _ in m.timeline])
    points = cursor_data([f"{number(held, places)} GiB, {phase or 'start'}" for held, phase in m.timeline])
    key = swatch("var(--c8)") + "state and batch, held throughout &ensp; " + swatch("var(--c1)") + "everything else"
    return (
        f'<div class="chart" tabindex="0" role="group" aria-label="Memory over the schedule; arrow keys move the cursor">'
        f'{memory_chart(plan)}{points}<div class="tip" role="status"></div></div><p class="quiet">{key}</p>'
        f"{paragraph(note, 'quiet')}{by_phase}"
    )


def _memory(plan: Plan) -> str:
    m = plan.memory
    held = classes(plan)
    names, values = [n for n, _ in held], [v for _, v in held]
    unit, sizes = gib([*values, m.peak_gib])
    whole = max(m.hbm_gib, m.peak_gib + m.reserve_gib)
    parts = [(f"{n}: {s} {unit}", v, colour(n)) for n, v, s in zip(names, values, sizes, strict=False)]
    label = f"Memory at the peak: {', '.join(what for what, *_ in parts)}; {size(m.usable_gib)} are usable"
    by_class = table(
        f"By class, {unit} on each GPU",
        [
            Column("class", [Markup(swatch(colour(n)) + escape(n)) for n in names], total="peak"),
            Column(unit, sizes[:-1], values, total=sizes[-1]),
            Column("share", [percent(v / m.peak_gib) for v in values], values),
        ],
        "sortable",
    )
    saved = ""
    if m.saved:
        ordered = sorted(m.saved.items(), key=lambda kv: -kv[1])
        kept, held = [n for n, _ in ordered], [v for _, v in ordered]
        unit, sizes = gib([*held, sum(held)])
        saved = table(
            f"Activations saved for the backward pass, {unit}",
            [
                Column("activation", kept, total="all"),
                Column(unit, sizes[:-1], held, total=sizes[-1]),
                Column("", [Markup(single(v, held[0])) for v in held], kind="share"),
            ],
        )
    host = paragraph(f"Pinned host memory for each GPU: {size(m.host_gib)}.") if m.host_gib else ""
    return (
        stacked(label, parts, whole, mark=m.usable_gib)
        + paragraph(f"The line marks what is usable: {card(plan)}.", "quiet")
        + f'<div class="pair">{by_class}{saved}</div>'
        + paragraph(f"The peak is {peak_at(plan)}.", "quiet")
        + host
    )


def _time(plan: Plan, steps: int | None) -> str:
    t = plan.time
    parts = step_parts(plan)
    values = [ms for _, ms in parts]
    shown = column([*values, t.step_ms])
    drawn = [(f"{name}: {s} ms", ms, PART_COLOURS[name]) for (name, ms), s in zip(parts, shown, strict=False)]
    label = f"Time of a step: {', '.join(what for what, *_ in drawn)}"
    by_part = table(
        "A step on each GPU",
        [
            Column("part", [Markup(swatch(PART_COLOURS[name]) + escape(name)) for name, _ in parts], total="step"),
            Column("ms", shown[:-1], values, total=shown[-1]),
            Column("share", [percent(ms / t.step_ms) for ms in values], values),
        ],
    )
    rows = list(zip(*training(plan, steps), strict=True))
    long = [Column(name, cells, kind="number" if name else "") for name, cells in zip(TRAINING, rows, strict=True)]
    by = "expected" if t.expected_step_ms else "by the roofline"
    caption = f"Time to train on {plural(devices(plan), 'GPU')}, {by}; {plan.tokens_per_step:,} tokens a step, steps alone"
    on_links, waited = column([t.communication_ms, t.exposed_ms])
    return (
        stacked(label, drawn, max(t.step_ms, sum(values)))
        + f'<div class="pair">{by_part}{table(caption, long)}</div>'
        + paragraph(f"Communication takes {on_links} ms on the links; the GPU waits for {waited} ms of it.", "quiet")
        + (paragraph(f"{matmuls(plan)}.", "quiet") if plan.matmuls else "")
    )


def _collectives(plan: Plan) -> str:
    found = moved(plan)
    if not found:
        return paragraph("Nothing: the program has no collectives.")

    def numbers(heading: str, values: list[float]) -> Column:
        *cells, total = column([*values, math.fsum(values)])
        return Column(heading, cells, values, total=total)

    network = [c.network_gib * GB_PER_GIB for c in found]
    counts = [c.count for c in found]
    columns = [
        Column("kind", [c.kind for c in found], kind="whole", total="all"),
        Column("dtype", [c.dtype for c in found]),
        Column("axis", [c.axis for c in found]),
        Column("GPUs", [str(c.group) for c in found], [c.group for c in found]),
        Column("count", [f"{n:,}" for n in counts], counts, total=f"{sum(counts):,}"),
        numbers("wire GB", [c.wire_gib * GB_PER_GIB for c in found]),
        *([numbers("network GB", network)] if any(network) else []),
        numbers("ms", [c.ms for c in found]),
        numbers("exposed ms", [c.exposed_ms for c in found]),
        Column("source", [place(c.source) for c in found], kind="whole"),
        Column("scope, and the longest one's name in the HLO", [_origin(c) for c in found], kind="scope"),
    ]
    return table("Collectives of a step; bytes are those that each GPU sends", columns, "sortable")


def _kernels(plan: Plan) -> str:
    ordered = ran(plan)
    found, rest = ordered[:LISTED], ordered[LISTED:]

    def numbers(heading: str, field: str) -> Column:
        values = [getattr(k, field) for k in found]
        *cells, others = column([*values, math.fsum(getattr(k, field) for k in rest)])
        return Column(heading, cells, values, total=others)

    ms = [k.ms for k in found]
    columns = [
        Column("kind", [k.kind for k in found], total=f"{len(rest)} more" if rest else ""),
        Column("what", [k.op_name for k in found], kind="path"),
        Column("count", [f"{k.count:,}" for k in found], [k.count for k in found], total=f"{sum(k.count for k in rest):,}"),
        numbers("ms", "ms"),
        Column("of step", [percent(v / plan.time.step_ms) for v in ms], ms),
        numbers("TFLOP", "tflop"),
        numbers("GB", "gb"),
        Column("source", [place(k.source) for k in found], kind="whole"),
    ]
    return table("What each GPU computes in a step", columns, "sortable")


def _buffers(plan: Plan) -> str:
    found, rest = plan.memory.largest[:LISTED], plan.memory.largest[LISTED:]
    if not found:
        return paragraph("None were recorded.")
    values = [b.gib for b in found]
    others = math.fsum(b.gib for b in rest)
    unit, (*sizes, all_others) = gib([*values, others])
    columns = [
        Column("array", [b.shape for b in found], kind="whole", total=f"{len(rest)} more" if rest else ""),
        Column(unit, sizes, values, total=all_others),
        Column("class", [b.kind for b in found]),
        Column("source", [place(b.source) for b in found], kind="whole"),
        Column("scope, and name in the HLO", [_origin(b) for b in found], kind="scope"),
    ]
    return table("Held on each GPU at the peak", columns, "sortable")


def _origin(part: Collective | Buffer) -> Markup:
    """Scope and instruction, with places to break the line after slashes."""
    shown = part.op_name.removeprefix("jit(train_step)/")
    for machinery in ("while/body/", "eval_jaxpr/"):  # of loops and of rematerialisation: in nearly all of them
        shown = shown.replace(machinery, "")
    scope = re.sub(r"([/:])", r"\1<wbr>", escape(shown))
    return Markup(f'{scope}<br><span class="quiet">{escape(part.instruction)}</span>')


def _loops(plan: Plan) -> str:
    if not plan.trip_counts:
        return ""
    loops = sorted(plan.trip_counts.items(), key=lambda kv: -kv[1])
    counts = [n for _, n in loops]
    columns = [Column("loop", [n for n, _ in loops], kind="path"), Column("iterations", [f"{n:,}" for n in counts], counts)]
    return "<h2>Loops</h2>" + table("Loops of the program; all figures above are multiplied out", columns)
