"""A chart of curves, as inline SVG that keeps its letters at one size however wide the page is.

Letters and lines of the frame stand at percentages of the plot; only the curves lie in a nested svg that is stretched as a
whole. The plot is complete without scripts; page.js reads values off it by the data that stands beside it.

A long curve is thinned to two points in each of COLUMNS equal stretches, its lowest and its highest there, so that no spike is
lost. Both the drawing and the data hold the thinned curve, the data with every digit.
"""

import dataclasses
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from jaxtrain.page.charts import ticks_between, ticks_of_log
from jaxtrain.page.kit import cursor_data, swatch

COLUMNS = 480  # of a page with one run; several share them
LEAST_COLUMNS = 120
DOTS = 40  # a curve of at most so many points shows them
MARKED = 40  # values that are no numbers, with a line of their own
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k"))


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values at rising places. None is a gap; NaN and infinities are marked and not drawn."""

    name: str
    at: Sequence[float]
    values: Sequence[float | None]
    colour: str = "var(--c1)"  # CSS
    kind: str = ""  # "faint" behind others, "dashed"
    keyed: bool = True  # whether it has a place in the key


@dataclasses.dataclass(frozen=True)
class Spread:
    """The room between two curves with the same places."""

    low: Curve
    high: Curve


@dataclasses.dataclass(frozen=True)
class Limit:
    """A level to compare with."""

    name: str
    value: float


@dataclasses.dataclass(frozen=True)
class Picture:
    """A chart before it is drawn. `spreads` are drawn behind `curves`; `zero`: the axis begins there; `log`: it counts in
    powers of ten."""

    title: str
    x: str  # what places are: "step"
    curves: Sequence[Curve]
    spreads: Sequence[Spread] = ()
    limits: Sequence[Limit] = ()
    zero: bool = False
    log: bool = False
    kind: str = ""  # CSS class of its place on the page


def thinned(c: Curve, columns: int) -> Curve:
    """The same curve in at most two points of each column, its lowest and highest, and with a gap and a value that is no number
    of each, as far as a column has one. A curve of no more points comes back as it is."""
    at, values = c.at, c.values
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
    return dataclasses.replace(c, at=[at[i] for i in order], values=[values[i] for i in order])


def draw(picture: Picture, columns: int = COLUMNS) -> str:
    """The chart with its title and key; "" where no curve has a value to draw."""
    p = dataclasses.replace(
        picture,
        curves=[thinned(c, columns) for c in picture.curves],
        spreads=[Spread(thinned(s.low, columns), thinned(s.high, columns)) for s in picture.spreads],
    )
    every = [*(c for s in p.spreads for c in (s.low, s.high)), *p.curves]
    numbers = [v for c in every for v in c.values if v is not None and math.isfinite(v)]
    if not numbers:
        return ""
    low, high, log = _range([*numbers, *(limit.value for limit in p.limits)], p.zero, p.log)
    first, last = min(c.at[0] for c in every if c.at), max(c.at[-1] for c in every if c.at)

    def x(place: float) -> float:
        return (place - first) / (last - first) if last > first else 0.0

    def y(value: float) -> float:
        if not log:
            return 1 - (value - low) / (high - low)
        return 1 - math.log(max(value, low) / low) / math.log(high / low)

    out = [f'<svg role="img" aria-label="{escape(said(picture))}">', *_frame(low, high, log, y, first, last, x, p.x)]
    out.append('<svg width="100%" height="100%" viewBox="0 0 1000 1000" preserveAspectRatio="none" overflow="visible">')
    out += [_area(s.low, s.high, x, y) for s in p.spreads]
    out += [_path(c, x, y) for c in sorted(p.curves, key=lambda c: c.kind != "faint")]
    out.append("</svg>")
    for c in p.curves:
        out += _marks(c, x, y)
    for limit in p.limits:
        at = f"{100 * y(limit.value):.2f}%"
        out.append(f'<line class="usable" x1="0" x2="100%" y1="{at}" y2="{at}"/>')
    out.append('<line class="cursor" x1="0" x2="0" y1="0" y2="100%"/></svg>')
    found = {"x": p.x, "from": first, "to": last, "curves": [_data(c) for c in every]}
    name = escape(p.title)
    label = f"{name}; arrow keys move the cursor"
    tip = '<div class="tip" role="status"></div>'
    chart = f'<div class="chart" tabindex="0" role="group" aria-label="{label}">{"".join(out)}{cursor_data(found)}{tip}</div>'
    return f'<div class="{p.kind}"><h3>{name}</h3>{_key(picture)}{chart}</div>'


def said(picture: Picture) -> str:
    """A chart in words, for those who do not see it."""
    parts = []
    for c in (*picture.curves, *(c for s in picture.spreads for c in (s.low, s.high))):
        known = [(place, v) for place, v in zip(c.at, c.values, strict=True) if v is not None and math.isfinite(v)]
        if not known:
            continue
        (a, begin), (b, end) = known[0], known[-1]
        low, high = min(known, key=lambda k: k[1]), max(known, key=lambda k: k[1])
        parts.append(
            f"{c.name}: {begin:.4g} at {picture.x} {a:g} to {end:.4g} at {picture.x} {b:g}, lowest {low[1]:.4g} at {low[0]:g}, "
            f"highest {high[1]:.4g} at {high[0]:g}"
        )
    parts += [f"{limit.name}: {limit.value:.4g}" for limit in picture.limits]
    return f"{picture.title}. {'; '.join(parts)}."


def _range(values: Sequence[float], zero: bool, log: bool) -> tuple[float, float, bool]:
    """(low, high, whether the axis counts in powers of ten), with some room. Powers of ten need values above zero."""
    low, high = min(values), max(values)
    if log and low > 0 and high > low:
        room = (high / low) ** 0.06
        return low / room, high * room, True
    low = min(0.0, low) if zero else low
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return (low if zero and low == 0 else low - room), high + room, False


def _frame(low: float, high: float, log: bool, y: Any, first: float, last: float, x: Any, unit: str) -> list[str]:
    out = []
    for tick in ticks_of_log(low, high) if log else ticks_between(low, high):
        at = f"{100 * y(tick):.2f}%"
        out.append(f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/>')
        out.append(f'<text class="axis" x="-8" y="{at}" dy="4" text-anchor="end">{short(tick)}</text>')
    places = ticks_between(first, last) if last > first else [first]
    if x(places[0]) > 0.2:
        places = [first, *places]
    for tick in places:
        part = x(tick)
        anchor = "start" if part < 0.05 else "end" if part > 0.95 else "middle"
        words = f"{unit} {short(tick)}" if tick == places[0] else short(tick)
        out.append(f'<line class="grid" x1="{100 * part:.2f}%" x2="{100 * part:.2f}%" y1="100%" y2="102%"/>')
        out.append(f'<text class="axis" x="{100 * part:.2f}%" y="100%" dy="18" text-anchor="{anchor}">{escape(words)}</text>')
    return out


def short(value: float) -> str:
    """A number of an axis: 25k for 25,000."""
    for size, letter in UNITS:
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.10g}{letter}"
    return f"{value:.10g}"


def _stretches(c: Curve) -> list[list[tuple[float, float]]]:
    """Its points, apart at gaps."""
    out: list[list[tuple[float, float]]] = [[]]
    for place, value in zip(c.at, c.values, strict=True):
        if value is not None and math.isfinite(value):
            out[-1].append((place, value))
        elif out[-1]:
            out.append([])
    return [stretch for stretch in out if stretch]


def _path(c: Curve, x: Any, y: Any) -> str:
    lines = (" ".join(f"{1000 * x(a):.1f} {1000 * y(b):.1f}" for a, b in stretch) for stretch in _stretches(c))
    return f'<path class="curve {c.kind}" style="stroke:{c.colour}" d="{"".join(f"M{line}" for line in lines)}"/>'


def _area(low: Curve, high: Curve, x: Any, y: Any) -> str:
    out = []
    for below, above in zip(_stretches(low), _stretches(high), strict=False):
        points = [*below, *reversed(above)]
        out.append("M" + " ".join(f"{1000 * x(a):.1f} {1000 * y(b):.1f}" for a, b in points) + "Z")
    return f'<path class="spread" style="fill:{low.colour}" d="{"".join(out)}"/>'


def _marks(c: Curve, x: Any, y: Any) -> list[str]:
    """Dots where a line would not show the points, and lines where a value is no number."""
    stretches = _stretches(c)
    few = len(c.at) <= DOTS and c.kind != "faint"
    dots = [point for stretch in stretches if few or len(stretch) == 1 for point in stretch]
    out = [
        f'<circle cx="{100 * x(a):.2f}%" cy="{100 * y(b):.2f}%" r="2.6" style="fill:{c.colour}"/>'
        for a, b in dots[: 2 * COLUMNS]
    ]
    lost = [(a, v) for a, v in zip(c.at, c.values, strict=True) if v is not None and not math.isfinite(v)]
    for place, value in lost[:MARKED]:
        at = f"{100 * x(place):.2f}%"
        words = escape(f"{c.name}: {_word(value)} at {place:g}")
        out.append(f'<line class="lost" x1="{at}" x2="{at}" y1="0" y2="100%"><title>{words}</title></line>')
    return out


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _data(c: Curve) -> dict[str, Any]:
    """As page.js reads it: every digit, null for a gap, and a word for what is no number."""
    shown = [v if v is None or math.isfinite(v) else _word(v) for v in c.values]
    return {"name": c.name, "at": list(c.at), "is": shown}


def _key(p: Picture) -> str:
    parts = [f"<span>{swatch(c.colour)}{escape(c.name)}</span>" for c in p.curves if c.keyed]
    parts += [f"<span>between {escape(s.low.name)} and {escape(s.high.name)}</span>" for s in p.spreads]
    parts += [f"<span>- - {escape(limit.name)} {float(f'{limit.value:.4g}'):,.10g}</span>" for limit in p.limits]
    lost = sum(v is not None and not math.isfinite(v) for c in p.curves for v in c.values)
    parts += [f"<span>{lost} {'value' if lost == 1 else 'values'} NaN or infinite, marked</span>"] if lost else []
    return f'<p class="key">{" &ensp; ".join(parts)}</p>'
