"""A plan as one HTML page that needs no network and is complete without scripts."""

import itertools
from collections.abc import Mapping, Sequence
from html import escape

from jaxtrain.config.numbers import GB_PER_GIB, decimals, gib, number, percent, plural, rough, size
from jaxtrain.plan.cost import Cost
from jaxtrain.plan.result import Plan
from jaxtrain.report.charts import cursor_data, lanes, ticks
from jaxtrain.report.html import chart_legend, contents, document, heading, paragraph, tiles
from jaxtrain.report.layer_schedule import LaneEvent
from jaxtrain.report.plan_sections import (
    CLASS_COLOURS,
    OTHER_CLASS,
    command,
    details,
    device_count,
    headline,
    mesh,
    mfu,
    no_range,
    range_source,
    span,
    summary,
    verdict,
    warnings_section,
)
from jaxtrain.report.tables import Column, Drawing, Section, Table, html_sections

LANE_COLOURS = {
    "matmul": "var(--c1)",
    "attention": "var(--c4)",
    "memory-bound": "var(--c2)",
    "communication": "var(--c5)",
    "host copies": "var(--c6)",
}
HEIGHT = 280  # px of the chart of memory; page.css has the same
SHORT = 0.015  # of the schedule: a shorter stretch inside another phase is drawn as part of it
APART = 3.5  # least distance of the letters of two phases, in percent of the width
LARGEST = 4  # groups of arrays that the peak is named by


def plan_html(
    plan: Plan,
    *,
    steps: int | None = None,
    tokens: int = 0,
    epochs: str = "",
    cost: Cost | None = None,
    layer: Mapping[str, Sequence[LaneEvent]] | None = None,
) -> str:
    """Return the page of a plan as HTML.

    Args:
        steps, tokens, epochs, cost: as in `summary`.
        layer: result of `layer_schedule.layer_events`; None: no schedule of a layer.
    """
    title = f"{plan.config} on {plan.topology}"
    schedule = [schedule_of_layer(layer)] if layer and plan.fits else []
    body_sections = [
        mesh_section(plan),
        schedule_section(plan),
        *summary(plan, steps, tokens, epochs, cost),
        *schedule,
        *details(plan),
    ]
    sections = html_sections([warnings_section(plan), *body_sections])
    sections.append(f"{heading('Command of this plan')}<pre><code>{escape(command(plan))}</code></pre>")
    body = [
        f"<header><h1>{escape(title)}</h1>",
        paragraph(f"{plan.chip}, {plural(device_count(plan), 'GPU')}: mesh {mesh(plan)}, attention {plan.attention}", "quiet"),
        paragraph(f"with {' '.join(plan.overrides)}", "quiet") if plan.overrides else "",
        f'<p class="verdict {"yes" if plan.fits else "no"}">{escape(verdict(plan))}</p></header><main>',
        _tiles(plan),
        paragraph(f"{plan.kept}.") if plan.kept else "",
        paragraph(f"{range_source(plan) or f'There is no expected range: {no_range(plan)}'}.") if plan.fits else "",
        contents(sections),
        *sections,
        "</main>",
    ]
    return document(f"{title}: {verdict(plan)}", headline(plan), body)


def _tiles(plan: Plan) -> str:
    """Return the tiles: allocated memory, and the speed and communication of a step that fits, else the missing memory."""
    time, memory = plan.time, plan.memory
    memory_tile = ("memory allocated", size(memory.taken_gib), f"of {size(memory.usable_gib)} usable")
    if not plan.fits:
        return tiles([memory_tile, ("missing", size(memory.taken_gib - memory.usable_gib), "on each GPU")])
    wire = sum(c.wire_gib for c in plan.collectives) * GB_PER_GIB
    roofline = {
        "step": f"{rough(time.step_ms)} ms, bound by {time.bound_by}",
        "tokens/s/GPU": f"{rough(time.tokens_per_s_per_device, 4)}, {rough(time.tokens_per_s, 4)} in all",
        "MFU": f"{mfu(plan)}, full {percent(time.mfu_full)}, HFU {percent(time.hfu)}",
    }
    if time.expected_step_ms:
        low, high = (percent(time.mfu_causal * time.step_ms / each) for each in reversed(time.expected_step_ms))
        values = {
            "step": f"{span(time.expected_step_ms)} ms",
            "tokens/s/GPU": span(time.expected_tokens_per_s_per_device),
            "MFU": f"{low} to {high}",
        }
        speed = [(f"{name}, expected", value, f"roofline {roofline[name]}") for name, value in values.items()]
    else:
        values = {
            "step": f"{rough(time.step_ms)} ms",
            "tokens/s/GPU": rough(time.tokens_per_s_per_device, 4),
            "MFU": percent(time.mfu_causal),
        }
        speed = [(f"{name}, roofline", value, roofline[name]) for name, value in values.items()]
    exposed = ("exposed communication", percent(time.exposed_ms / time.step_ms), "of the step")
    return tiles([memory_tile, *speed, exposed, ("on the wire", f"{number(wire)} GB", "a GPU and step")])


def schedule_of_layer(layer: Mapping[str, Sequence[LaneEvent]]) -> Section:
    """Return the section with the events of a layer's forward and backward pass."""
    ends: dict[str, float] = {}
    for name, events in layer.items():
        phase = name.partition(":")[0]
        ends[phase] = max(ends.get(phase, 0.0), events[-1].end)
    words = " and ".join(f"{phase} {rough(end)} ms" for phase, end in ends.items())
    note = f"One layer in the middle of each pass, by the roofline: {words}. Gaps of the computation are exposed communication."
    rows = {
        name: [(e.start, e.end, LANE_COLOURS[e.kind], f"{e.label}: {e.kind}, {rough(e.end - e.start)} ms") for e in events]
        for name, events in layer.items()
    }
    shown = {e.kind for events in layer.values() for e in events}
    legend = chart_legend([(kind, colour) for kind, colour in LANE_COLOURS.items() if kind in shown])
    return Section("Schedule of a layer", [Drawing(legend + lanes(note, rows, "ms")), note])


# ---- the mesh


def mesh_section(plan: Plan) -> Section:
    """Return the section with a picture of the mesh: nodes, their GPUs, and each GPU's coordinates along the mesh axes."""
    axes = [(axis, n) for axis, n in plan.mesh.items() if n > 1]
    total = device_count(plan)
    if total == 1:
        return Section("Mesh", [])
    node = _gpus_of_a_node(plan.topology, total)
    shown = min(total, 4 * node)
    boxes = []
    for first in range(0, shown, node):
        cells = []
        for rank in range(first, min(first + node, shown)):
            remaining, words = rank, []
            for axis, n in reversed(axes):
                remaining, coordinate = divmod(remaining, n)
                words.insert(0, f"{axis} {coordinate}")
            colour = f"var(--c{1 + (rank // _inner(axes)) % 8})"
            cells.append(f'<div class="gpu" style="border-color:{colour}"><b>{rank}</b>{escape(", ".join(words))}</div>')
        boxes.append(f'<div class="node"><span class="quiet">node {first // node}</span>{"".join(cells)}</div>')
    more = f" The first {shown} of {total:,} are drawn." if shown < total else ""
    names = " x ".join(f"{axis} {n}" for axis, n in axes)
    note = f"{names}: the last axis is the innermost. GPUs of one colour differ only in {axes[-1][0]}.{more}"
    return Section("Mesh", [Drawing(f'<div class="mesh">{"".join(boxes)}</div>'), note])


def _inner(axes: Sequence[tuple[str, int]]) -> int:
    return axes[-1][1]


def _gpus_of_a_node(topology: str, total: int) -> int:
    """Return the GPUs per node of a topology such as h200:8 or h200:8x4; `total` if its name has no count."""
    count = topology.partition(":")[2].partition("x")[0]
    return int(count) if count.isdecimal() and 0 < int(count) <= total else total


# ---- memory over the schedule


def schedule_section(plan: Plan) -> Section:
    """Return the section with memory over XLA's schedule, and the lowest and highest memory of each phase of the step."""
    memory = plan.memory
    if not memory.timeline:
        return Section("Memory over the schedule", [])
    phases = list(dict.fromkeys(phase for _, phase in memory.timeline))
    gib_by_phase = {p: [value for value, phase in memory.timeline if phase == p] for p in phases}
    low, high = [min(gib_by_phase[p]) for p in phases], [max(gib_by_phase[p]) for p in phases]
    letters = _letters(plan)
    columns = [Column("phase", [f"{letters.get(phase, '')} {phase or 'start'}".strip() for phase in phases])]
    for name, values in (("lowest", low), ("highest", high)):
        columns.append(Column(f"{name}, {gib(values)[0]}", gib(values)[1], values))
    digits = decimals([value for value, _ in memory.timeline])
    texts = [f"{number(value, digits)} GiB, {phase or 'start'}" for value, phase in memory.timeline]
    least = 10.0**-digits / 2  # smaller parts are left out
    layers = [(name, [number(v, digits) if v >= least else "" for v in values]) for name, _, values in reversed(_layers(plan))]
    points = cursor_data({"texts": texts, "parts": layers})
    chart = (
        '<div class="chart" tabindex="0" role="group" aria-label="Memory over the schedule; arrow keys move the cursor">'
        f'{memory_chart(plan)}{points}<div class="tip"></div></div>'
        f"{chart_legend([(name, colour) for name, colour, _ in _layers(plan)])}"
    )
    note = "In the order of the compiler's schedule, each loop's body once: not to scale in time."
    lettered = ", ".join(f"{letter} {phase or 'start'}" for phase, letter in letters.items())
    words = [f"Phases: {lettered}. Short stretches of a phase inside another have no letter.", note]
    if peak := peak_arrays(plan):
        arrays = "; ".join(f"{array} {size(each)}" for array, each in peak)
        words.insert(1, f"Largest arrays at the peak of {size(memory.peak_gib)}: {arrays}.")
    return Section(
        "Memory over the schedule", [Drawing(chart), *words, Table("Phases of the schedule", columns, style="small")]
    )


def peak_arrays(plan: Plan) -> list[tuple[str, float]]:
    """Return (name, GiB) of the largest arrays at the peak; arrays of one class and shape together."""
    sizes: dict[tuple[str, str], list[float]] = {}
    for b in plan.memory.largest:
        sizes.setdefault((b.kind, b.shape), []).append(b.gib)
    largest = sorted(sizes.items(), key=lambda item: -sum(item[1]))[:LARGEST]
    return [(f"{len(each)} x {shape} {kind}".removeprefix("1 x "), sum(each)) for (kind, shape), each in largest]


def _letters(plan: Plan) -> dict[str, str]:
    """Return phase -> its letter in the chart, for each phase with a band."""
    drawn = bands([phase for _, phase in plan.memory.timeline])
    return {phase: chr(ord("A") + n) for n, phase in enumerate(dict.fromkeys(phase for phase, *_ in drawn))}


def bands(phases: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (phase, first point, last point) of each range of consecutive points in one phase.

    XLA schedules some operations of one phase inside another. A range below SHORT inside another phase belongs to that phase.
    """
    ranges: list[tuple[str, int]] = []  # phase, number of points
    for phase, points in itertools.groupby(phases):
        ranges.append((phase, len(list(points))))
        if len(ranges) > 2 and ranges[-3][0] == phase and ranges[-2][1] <= SHORT * len(phases):
            ranges[-3:] = [(phase, sum(n for _, n in ranges[-3:]))]
    ends = list(itertools.accumulate(n for _, n in ranges))
    return [(phase, end - n, end - 1) for (phase, n), end in zip(ranges, ends, strict=True)]


def _layers(plan: Plan) -> list[tuple[str, str, list[float]]]:
    """Return (class, colour, GiB at each point) from the bottom of the chart up. Classes without a colour are summed."""
    memory = plan.memory
    classes = [c for c in memory.over_time if c.name in CLASS_COLOURS]
    # Classes of constant size are at the bottom, so that their edges are straight.
    classes.sort(key=lambda c: max(c.gib) - min(c.gib))
    layers = [(c.name, CLASS_COLOURS[c.name], list(c.gib)) for c in classes]
    unlisted = [value - sum(c.gib[i] for c in classes) for i, (value, _) in enumerate(memory.timeline)]
    return [*layers, ("others", OTHER_CLASS, unlisted)]


def _apart(centres: Sequence[float]) -> list[float]:
    """Return positions in percent, in the same order, that are at least APART from each other."""
    out: list[float] = []
    for centre in reversed(centres):  # from the right, where phases are shortest
        out.append(min(centre, out[-1] - APART) if out else centre)
    out.reverse()
    for n, centre in enumerate(out):  # those that left the chart on the left
        out[n] = max(centre, out[n - 1] + APART if n else 0.0)
    return out


def memory_chart(plan: Plan) -> str:
    """Return the chart of memory over the schedule as SVG: stacked classes, phases, usable memory and the peak.

    Positions along x are percentages, so the browser stretches the drawing and not the text. The curves are in a nested svg,
    which is stretched as a whole.
    """
    memory = plan.memory
    totals = [value for value, _ in memory.timeline]
    last = max(1, len(totals) - 1)
    top = 1.12 * max(memory.usable_gib, memory.peak_gib, *totals)

    def x(i: float) -> str:
        return f"{100 * i / last:.2f}%"

    def y(value: float) -> float:
        return HEIGHT * (1 - value / top)

    def curve(values: Sequence[float]) -> str:
        return " ".join(f"{1000 * i / last:.1f},{1000 * (1 - v / top):.2f}" for i, v in enumerate(values))

    def text(at: str, y: float, anchor: str, kind: str, words: str) -> str:
        return f'<text x="{at}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'

    highest = max(range(len(totals)), key=totals.__getitem__)
    alternative = (
        f"Memory on each GPU over the schedule of one step: between {size(min(totals))} and {size(totals[highest])}, highest "
        f"in phase {memory.timeline[highest][1] or 'start'}; {size(memory.usable_gib)} usable."
    )
    out = [f'<svg role="img" aria-label="{escape(alternative)}">']
    letters, centres = _letters(plan), []
    drawn = bands([phase for _, phase in memory.timeline])
    for index, (_, first, end) in enumerate(drawn):
        # A point covers the range up to the next point, so that bands of phases touch.
        begin, finish = 100 * first / last, 100 * min(end + 1, last) / last
        if index % 2 == 0:
            out.append(f'<rect class="band" x="{begin:.2f}%" y="-26" width="{finish - begin:.2f}%" height="{HEIGHT + 26}"/>')
        centres.append((begin + finish) / 2)
    for centre, (phase, *_) in zip(_apart(centres), drawn, strict=True):
        out.append(text(f"{centre:.2f}%", -10, "middle", "axis", letters[phase]))
    for tick in ticks(0, top, 7):
        out.append(f'<line class="grid" x1="0" x2="100%" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        out.append(text("-8", y(tick) + 4, "end", "axis", f"{tick:g}"))
    out.append(text("-8", -10, "end", "axis", "GiB"))

    area = f"0,1000 {curve(totals)} {1000 * (len(totals) - 1) / last:.1f},1000"
    out.append('<svg width="100%" height="100%" viewBox="0 0 1000 1000" preserveAspectRatio="none" overflow="visible">')
    limit = max(0.0, 1000 * (1 - memory.usable_gib / top))
    out.append(f'<clipPath id="too-much"><rect width="1000" height="{limit:.2f}"/></clipPath>')
    bottom = [0.0] * len(totals)
    for name, colour, values in _layers(plan):
        edge = [b + v for b, v in zip(bottom, values, strict=True)]
        points = f"{curve(bottom)} {' '.join(reversed(curve(edge).split()))}"
        out.append(f'<polygon class="layer" style="fill:{colour}" points="{points}"><title>{escape(name)}</title></polygon>')
        bottom = edge
    out.append(f'<polygon class="over" points="{area}" clip-path="url(#too-much)"/>')
    out.append(f'<polyline class="held" points="{curve(totals)}"/></svg>')

    out.append(f'<line class="usable" x1="0" x2="100%" y1="{y(memory.usable_gib):.1f}" y2="{y(memory.usable_gib):.1f}"/>')
    # The two labels are in opposite halves, so they never overlap.
    right = highest > last / 2
    edge, anchor = ("6", "start") if right else ("99.5%", "end")
    out.append(text(edge, y(memory.usable_gib) - 7, anchor, "halo", f"usable {size(memory.usable_gib)}"))
    out.append(f'<circle class="peak" cx="{x(highest)}" cy="{y(totals[highest]):.1f}" r="5"/>')
    above, anchor = y(totals[highest]) - 11, "end" if right else "start"
    out.append(text(x(highest), above, anchor, "halo", f"peak {size(totals[highest])}"))
    for array, _ in peak_arrays(plan)[:1]:
        out.append(text(x(highest), above - 16, anchor, "halo roomy", array))
    out.append(text("0", HEIGHT + 18, "start", "axis", "start of the step"))
    out.append(text("100%", HEIGHT + 18, "end", "axis", "end"))
    out.append(f'<line class="cursor" x1="0" x2="0" y1="0" y2="{HEIGHT}"/></svg>')
    return "".join(out)
