"""Line charts as inline SVG, with a view for each x axis and each scale.

A chart is drawn once for each x axis (step, tokens, time), and again with a logarithmic scale. `controls` are the inputs that
choose among these views by CSS alone, for all charts of a page. page.js adds the cursor that reads values.

A long curve is thinned to the lowest and the highest point of each of `COLUMNS` equal ranges of x, so no spike is lost.
The page holds the thinned curves with every digit, as JSON beside each chart.
"""

import dataclasses
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from jaxtrain.page.charts import cursor_data, log_ticks, ticks
from jaxtrain.page.html import key

COLUMNS = 480
DOTS = 40  # a curve of at most this many points shows each as a dot
MARKED = 40  # NaN and infinite values of a curve that are marked
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k"))


@dataclasses.dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`. Calling it returns the place of a value as a fraction of the axis."""

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values over one or several x axes.

    Attributes:
        x: rising positions, a sequence for each axis of the chart.
        y: a value for each position. None is a gap; NaN and infinities are marked instead of drawn.
        colour: CSS.
        kind: CSS class: "raw" and "smooth" of a curve that can be smoothed.
    """

    name: str
    x: Sequence[Sequence[float]]
    y: Sequence[float | None]
    colour: str = "var(--c1)"
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class LineChart:
    """A line chart before it is drawn.

    Attributes:
        bands: (low, high) curves with equal positions; the area between them is filled.
        limits: (name, value) of horizontal lines.
        zero: the y axis starts at 0.
        log: there is a view with a logarithmic y axis.
        kind: CSS class: "first" takes the full width.
    """

    title: str
    curves: Sequence[Curve]
    bands: Sequence[tuple[Curve, Curve]] = ()
    limits: Sequence[tuple[str, float]] = ()
    zero: bool = False
    log: bool = False
    kind: str = ""


def controls(axes: Sequence[str], *, log: bool, smooth: bool) -> str:
    """Return the inputs that choose the views of all charts of a page.

    Args:
        axes: names of the x axes.
        log: the logarithmic scale is chosen at first.
        smooth: there are curves that can be smoothed.
    """
    out = [
        f'<label><input type="radio" name="x" id="x{i}"{"" if i else " checked"}> {escape(axis)}</label>'
        for i, axis in enumerate(axes)
    ]
    out = [f"<span>x axis: {' '.join(out)}</span>"] if len(axes) > 1 else []
    out.append(f'<label><input type="checkbox" id="log"{" checked" if log else ""}> log scale of losses and norms</label>')
    out += ['<label><input type="checkbox" id="smooth" checked> smoothed</label>'] if smooth else []
    return f'<form class="views" autocomplete="off">{" ".join(out)}</form>'


def figures(charts: Sequence[LineChart], axes: Sequence[str], columns: int = COLUMNS) -> str:
    """Return charts beside each other, without those that have no value; "" if all have none."""
    drawn = "".join(draw(chart, axes, columns) for chart in charts)
    return f'<div class="figures">{drawn}</div>' if drawn else ""


def draw(chart: LineChart, axes: Sequence[str] = ("step",), columns: int = COLUMNS) -> str:
    """Return a chart with its title and legend; "" if no curve has a value."""
    curves = [thin(c, columns) for c in chart.curves]
    bands = [(thin(low, columns), thin(high, columns)) for low, high in chart.bands]
    every = [*(c for band in bands for c in band), *curves]
    values = [v for c in every for v in c.y if v is not None and math.isfinite(v)]
    if not values:
        return ""
    values += [value for _, value in chart.limits]
    scales = [_y_scale(values, chart.zero, log) for log in ((False, True) if chart.log and min(values) > 0 else (False,))]
    label, views = escape(describe(chart, axes[0])), []
    for axis, name in enumerate(axes):
        x = Scale(min(c.x[axis][0] for c in every if c.y), max(c.x[axis][-1] for c in every if c.y))
        for y in scales:
            out = [f'<svg role="img" aria-label="{label}" class="view x{axis} {"log" if y.log else "linear"}" ']
            out.append(f'data-axis="{axis}" data-from="{x.low!r}" data-to="{x.high!r}">')
            out += _grid(x, y, name)
            out.append('<svg width="100%" height="100%" viewBox="0 0 1000 1000" preserveAspectRatio="none" overflow="visible">')
            out += [_area(low, high, axis, x, y) for low, high in bands]
            out += [_path(c, axis, x, y) for c in sorted(curves, key=lambda c: c.kind != "raw")]
            out.append("</svg>")
            for c in curves:
                out += _dots(c, axis, x, y)
            for _, value in chart.limits:
                at = f"{100 * (1 - y(value)):.2f}%"
                out.append(f'<line class="usable" x1="0" x2="100%" y1="{at}" y2="{at}"/>')
            views.append("".join([*out, '<line class="cursor" x1="0" x2="0" y1="0" y2="100%"/></svg>']))
    data = cursor_data({"axes": list(axes), "curves": [_data(c) for c in every]})
    title = escape(chart.title)
    return (
        f'<div class="{chart.kind}{" scales" if len(scales) > 1 else ""}"><h3>{title}</h3>{_legend(chart)}'
        f'<div class="chart" tabindex="0" role="group" aria-label="{title}; arrow keys move the cursor">{"".join(views)}{data}'
        '<div class="tip" role="status"></div></div></div>'
    )


def thin(c: Curve, columns: int) -> Curve:
    """Return a curve with few points: of each range of the first x axis the lowest, the highest, a gap, a NaN or infinity."""
    at, values = c.x[0], c.y
    if len(at) <= 2 * columns:
        return c
    first, width = at[0], (at[-1] - at[0]) / columns or 1.0
    kept: set[int] = {0, len(at) - 1}
    column: dict[str, int] = {}
    now = 0
    for i, value in enumerate(values):
        place = min(columns - 1, int((at[i] - first) / width))
        if place != now:
            kept |= set(column.values())
            column, now = {}, place
        if value is None or not math.isfinite(value):
            column.setdefault("gap" if value is None else "lost", i)
            continue
        for name, sign in (("low", 1), ("high", -1)):
            other = values[column[name]] if name in column else None
            if other is None or sign * value < sign * other:
                column[name] = i
    kept |= set(column.values())
    order = sorted(kept)
    return dataclasses.replace(c, x=[[axis[i] for i in order] for axis in c.x], y=[values[i] for i in order])


def describe(chart: LineChart, axis: str) -> str:
    """Return a chart in words, for screen readers."""
    parts = [f"{name}: {value:.4g}" for name, value in chart.limits]
    for c in (*chart.curves, *(c for band in chart.bands for c in band)):
        known = [(v, place) for place, v in zip(c.x[0], c.y, strict=True) if v is not None and math.isfinite(v)]
        if known:
            ends = (known[0], known[-1], min(known), max(known))
            first, last, low, high = (f"{v:.4g} at {place:g}" for v, place in ends)
            parts.append(f"{c.name}: {first} to {last}, lowest {low}, highest {high}")
    return f"{chart.title}, over the {axis}. {'; '.join(parts)}."


def short(value: float) -> str:
    """Return a number for an axis: 25k for 25,000."""
    for size, letter in UNITS:
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.10g}{letter}"
    return f"{value:.10g}"


def _y_scale(values: Sequence[float], zero: bool, log: bool) -> Scale:
    """Return the y axis of values, with 6% of space."""
    low, high = min(values), max(values)
    if log:
        space = (high / low) ** 0.06 if high > low else 1.5
        return Scale(low / space, high * space, log=True)
    low = min(0.0, low) if zero else low
    space = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return Scale(low if zero and low == 0 else low - space, high + space)


def _grid(x: Scale, y: Scale, name: str) -> list[str]:
    out = []
    for level in log_ticks(y.low, y.high) if y.log else ticks(y.low, y.high):
        at = f"{100 * (1 - y(level)):.2f}%"
        out.append(f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/>')
        out.append(f'<text class="axis" x="-8" y="{at}" dy="4" text-anchor="end">{short(level)}</text>')
    places = ticks(x.low, x.high) if x.high > x.low else [x.low]
    if x(places[0]) > 0.2:
        places = [x.low, *places]
    for place in places:
        part = x(place)
        anchor = "start" if part < 0.05 else "end" if part > 0.95 else "middle"
        text = f"{name} {short(place)}" if place == places[0] else short(place)
        out.append(f'<line class="grid" x1="{100 * part:.2f}%" x2="{100 * part:.2f}%" y1="100%" y2="102%"/>')
        out.append(f'<text class="axis" x="{100 * part:.2f}%" y="100%" dy="18" text-anchor="{anchor}">{escape(text)}</text>')
    return out


def _stretches(c: Curve, axis: int) -> list[list[tuple[float, float]]]:
    """Return the points of a curve, divided at gaps."""
    out: list[list[tuple[float, float]]] = [[]]
    for place, value in zip(c.x[axis], c.y, strict=True):
        if value is not None and math.isfinite(value):
            out[-1].append((place, value))
        elif out[-1]:
            out.append([])
    return [stretch for stretch in out if stretch]


def _points(stretch: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    return "M" + " ".join(f"{1000 * x(a):.1f} {1000 * (1 - y(b)):.1f}" for a, b in stretch)


def _path(c: Curve, axis: int, x: Scale, y: Scale) -> str:
    lines = "".join(_points(stretch, x, y) for stretch in _stretches(c, axis))
    return f'<path class="curve {c.kind}" style="stroke:{c.colour}" d="{lines}"/>'


def _area(low: Curve, high: Curve, axis: int, x: Scale, y: Scale) -> str:
    pairs = zip(_stretches(low, axis), _stretches(high, axis), strict=False)
    areas = "".join(_points([*below, *reversed(above)], x, y) + "Z" for below, above in pairs)
    return f'<path class="spread" style="fill:{low.colour}" d="{areas}"/>'


def _dots(c: Curve, axis: int, x: Scale, y: Scale) -> list[str]:
    """Return dots for points that a line would not show, and lines for NaN and infinite values."""
    stretches = _stretches(c, axis)
    few = len(c.y) <= DOTS and c.kind != "raw"
    dots = [point for stretch in stretches if few or len(stretch) == 1 for point in stretch]
    out = [
        f'<circle cx="{100 * x(a):.2f}%" cy="{100 * (1 - y(b)):.2f}%" r="2.6" class="{c.kind}" style="fill:{c.colour}"/>'
        for a, b in dots[: 2 * COLUMNS]
    ]
    lost = [(a, v) for a, v in zip(c.x[axis], c.y, strict=True) if v is not None and not math.isfinite(v)]
    for place, value in lost[:MARKED]:
        at, text = f"{100 * x(place):.2f}%", escape(f"{c.name}: {_word(value)} at {place:g}")
        out.append(f'<line class="lost" x1="{at}" x2="{at}" y1="0" y2="100%"><title>{text}</title></line>')
    return out


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _data(c: Curve) -> dict[str, Any]:
    """Return a curve as page.js reads it: null is a gap, a word is NaN or an infinity."""
    values = [v if v is None or math.isfinite(v) else _word(v) for v in c.y]
    return {"name": c.name, "kind": c.kind, "x": [list(axis) for axis in c.x], "y": values}


def _legend(chart: LineChart) -> str:
    """Return the names of the curves, bands and limits; "" for one curve alone, which the title names."""
    lost = sum(v is not None and not math.isfinite(v) for c in chart.curves for v in c.y)
    notes = [f"between {low.name} and {high.name}" for low, high in chart.bands]
    notes += [f"- - {name} {float(f'{value:.4g}'):,.10g}" for name, value in chart.limits]
    notes += [f"{lost} {'value' if lost == 1 else 'values'} NaN or infinite, marked"] if lost else []
    named = [(c.name, c.colour) for c in chart.curves if c.kind != "smooth"]
    return key(named, notes) if len(named) > 1 or notes else ""
