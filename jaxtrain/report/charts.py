"""Bars and lanes as inline SVG, and the data of line charts, which page.js draws.

A line chart is over one of several x axes (step, tokens, time), which `controls` selects for all charts of a page. Positions
are percentages, so the browser stretches a drawing but not its text. Each colour is a CSS colour.

A long curve is thinned to the lowest and the highest point of each of `COLUMNS` equal ranges of x, so no spike is lost. The
page has every digit of the thinned curves.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, TypeGuard

from jaxtrain.report.html import chart_legend

COLUMNS = 480
LANE = 46  # px: height of a lane with its name
SMOOTHED = ", smoothed"  # ends the name of a smoothed curve
KEYS = "arrow keys move the cursor, + and - zoom, Escape shows all"


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values over one or several x axes.

    Attributes:
        x: increasing positions, a sequence for each x axis of the chart.
        y: a value for each position. None is a gap. NaN and infinities are marked by vertical lines.
        colour: CSS colour.
        kind: CSS class: "raw" and "smooth" for the two versions of a smoothed curve, "limit" for a dashed line, else "".
    """

    name: str
    x: Sequence[Sequence[float]]
    y: Sequence[float | None]
    colour: str = "var(--c1)"
    kind: str = ""

    @property
    def legend(self) -> str:
        """Return the name in the legend, which both versions of a smoothed curve share."""
        return self.name.removesuffix(SMOOTHED) if self.kind == "smooth" else self.name


@dataclasses.dataclass(frozen=True)
class LineChart:
    """A line chart.

    Attributes:
        zero: whether the y axis starts at 0.
        log: whether the y axis may be logarithmic.
        kind: CSS class: "first" for the full width of the page, else "".
        with_legend: whether a single curve has a legend too.
    """

    title: str
    curves: Sequence[Curve]
    zero: bool = False
    log: bool = False
    kind: str = ""
    with_legend: bool = False


def stacked_bar(
    label: str, segments: Sequence[tuple[str, float, str]], total: float, mark: tuple[float, str] | None = None
) -> str:
    """Return a stacked bar as SVG.

    Args:
        label: description of the bar for screen readers.
        segments: (tooltip, value, colour) of each segment.
        total: value of the bar's full width.
        mark: value at which a line is drawn, and its name; None: no line.
    """
    out = [f'<svg class="bar{" marked" if mark else ""}" role="img" aria-label="{escape(label)}">']
    out.append('<rect class="empty" x="0" y="0.5" width="100%" height="97%"/>')
    start = 0.0
    for text, value, colour in segments:
        width = 100 * value / total
        if width > 0:
            out.append(
                f'<rect x="{start:.3f}%" width="{width:.3f}%" height="100%" style="fill:{colour};stroke:var(--ground)">'
                f"<title>{escape(text)}</title></rect>"
            )
        start += width
    if mark is not None:
        value, name = mark
        x, anchor = f"{100 * value / total:.3f}%", "end" if value > total / 2 else "start"
        out.append(f'<line class="mark" x1="{x}" x2="{x}" y1="-4" y2="38"/>')
        out.append(f'<text class="axis" x="{x}" y="-9" text-anchor="{anchor}">{escape(name)}</text>')
    return "".join([*out, "</svg>"])


def lanes(label: str, rows: Mapping[str, Sequence[tuple[float, float, str, str]]], unit: str) -> str:
    """Return lanes of events over one axis of time as SVG.

    Args:
        label: description of the lanes for screen readers.
        rows: name of a lane -> (start, end, colour, tooltip) of its events.
        unit: of the times.
    """
    longest = max(end for events in rows.values() for _, end, *_ in events)
    bottom = LANE * len(rows)
    out = [f'<svg class="lanes" style="height:{bottom + 20}px" role="img" aria-label="{escape(label)}">']
    for tick in ticks(0, longest):
        x, anchor = f"{100 * tick / longest:.2f}%", "end" if tick > 0.95 * longest else "middle" if tick else "start"
        out.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{bottom}"/>')
        text = f"{tick:g}" if tick else f"0 {unit}"
        out.append(f'<text class="axis" x="{x}" y="{bottom + 14}" text-anchor="{anchor}">{escape(text)}</text>')
    for lane, (name, events) in enumerate(rows.items()):
        out.append(f'<text class="axis" x="0" y="{LANE * lane + 12}">{escape(name)}</text>')
        for start, end, colour, tip in events:
            bounds = f'x="{100 * start / longest:.3f}%" width="{100 * (end - start) / longest:.3f}%" y="{LANE * lane + 17}"'
            # Only wide events have an edge, which would hide narrow ones.
            edge = ";stroke:var(--ground)" if end - start > 0.01 * longest else ""
            out.append(f'<rect {bounds} height="{LANE - 22}" style="fill:{colour}{edge}"><title>{escape(tip)}</title></rect>')
    return "".join([*out, "</svg>"])


def cursor_data(data: object) -> str:
    """Return a script element with JSON, from which page.js shows the values at the cursor."""
    # "<" is escaped in the JSON, so no name can end the script element.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most `most` round numbers from `low` to `high` (low < high)."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(m for m in (1, 2, 2.5, 5, 10, 20) if math.floor(high / (m * step)) - math.ceil(low / (m * step)) < most)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def controls(axes: Sequence[str], *, log: bool) -> str:
    """Return the HTML inputs that select the x axis, log scale and smoothing of all charts of a page.

    Args:
        axes: names of the x axes.
        log: whether the logarithmic scale is selected at first.
    """
    inputs = (
        f'<input type="radio" name="x" id="x{i}" value="{i}"{"" if i else " checked"}> {escape(name)}'
        for i, name in enumerate(axes)
    )
    return (
        f'<form class="views" autocomplete="off"><span>x axis: {" ".join(f"<label>{each}</label>" for each in inputs)}</span>'
        f'<label><input type="checkbox" id="log"{" checked" if log else ""}> log scale of losses and norms</label>'
        '<label><input type="checkbox" id="smooth" checked> smoothed</label></form>'
        "<noscript>The charts need JavaScript.</noscript>"
    )


def draw_chart(chart: LineChart, axes: Sequence[str] = ("step",), columns: int = COLUMNS) -> str:
    """Return a chart with its title, legend and data as HTML; "" if no curve has a value. axes: names of the x axes."""
    curves = [thin(c, columns) for c in chart.curves]
    if not any(is_number(v) for c in curves if c.kind != "limit" for v in c.y):
        return ""
    lowest = min(v for c in curves for v in c.y if is_number(v))
    # In the JSON, null is a gap, and a string is NaN or an infinity.
    words = [[v if v is None or math.isfinite(v) else _word(v) for v in c.y] for c in curves]
    data: list[dict[str, Any]] = [
        {"name": c.name, "legend": c.legend, "kind": c.kind, "colour": c.colour, "x": [list(at) for at in c.x], "y": y}
        for c, y in zip(curves, words, strict=True)
    ]
    title = escape(chart.title)
    return (
        f'<div class="{chart.kind}"><h3>{title}</h3>{_legend(chart)}'
        f'<div class="chart" tabindex="0" role="group" aria-label="{title}; {KEYS}">'
        f'<svg role="img" aria-label="{escape(describe_chart(chart, axes[0]))}"></svg>'
        f"{cursor_data({'axes': list(axes), 'zero': chart.zero, 'log': chart.log and lowest > 0, 'curves': data})}"
        '<div class="tip"></div></div></div>'
    )


def is_number(value: float | None) -> TypeGuard[float]:
    """Return whether a value is neither a gap nor NaN nor an infinity."""
    return value is not None and math.isfinite(value)


def thin(curve: Curve, columns: int) -> Curve:
    """Return a curve with at most four points in each of `columns` equal ranges of the first x axis, and both ends.

    The points of a range are the lowest, the highest, a gap, and a NaN or infinity. A curve of at most 2 x `columns` points is
    returned as it is.
    """
    xs = curve.x[0]
    if len(xs) <= 2 * columns:
        return curve
    width = (xs[-1] - xs[0]) / columns or 1.0
    indices = {0, len(xs) - 1}
    for _, group in itertools.groupby(range(len(xs)), lambda i: min(columns - 1, int((xs[i] - xs[0]) / width))):
        points = list(group)
        numbers = {i: value for i in points if is_number(value := curve.y[i])}
        indices.update({curve.y[i] is None: i for i in points if i not in numbers}.values())
        if numbers:
            indices |= {min(numbers, key=numbers.__getitem__), max(numbers, key=numbers.__getitem__)}
    order = sorted(indices)
    return dataclasses.replace(curve, x=[[axis[i] for i in order] for axis in curve.x], y=[curve.y[i] for i in order])


def describe_chart(chart: LineChart, axis: str) -> str:
    """Return the description of a chart for screen readers."""
    texts = []
    for curve in chart.curves:
        if values := [v for v in curve.y if is_number(v)]:
            first, last, low, high = (f"{v:.4g}" for v in (values[0], values[-1], min(values), max(values)))
            texts.append(f"{curve.name}: {first} to {last}, lowest {low}, highest {high}")
    return f"{chart.title}, over the {axis}. {'; '.join(texts)}."


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _legend(chart: LineChart) -> str:
    """Return the legend: the names of several curves, and the number of NaN and infinities. "" if it has neither."""
    lost = sum(v is not None and not math.isfinite(v) for c in chart.curves for v in c.y if c.kind != "smooth")
    notes = [f"{lost} {'value' if lost == 1 else 'values'} NaN or infinite, marked"] if lost else []
    entries = [(c.name, c.colour) for c in chart.curves if c.kind != "smooth"]
    return chart_legend(entries, notes) if len(entries) > 1 or chart.with_legend or notes else ""
