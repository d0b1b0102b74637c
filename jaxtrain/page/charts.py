"""Bars, strips and ticks as inline SVG. Line charts are in `jaxtrain.page.lines`.

Positions along x are percentages, so the browser stretches a drawing and keeps the size of its letters. Each colour is CSS.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from html import escape

STRIP_HEIGHT = 60  # px of a strip without its axis


@dataclasses.dataclass(frozen=True)
class Box:
    """A part of a strip, from `start` to `end` in units of the strip's axis.

    Attributes:
        low, high: its place from the bottom (0) to the top (1) of the strip.
        text: its tooltip.
    """

    start: float
    end: float
    low: float
    high: float
    colour: str
    text: str


def stacked(label: str, parts: Sequence[tuple[str, float, str]], total: float, mark: float | None = None) -> str:
    """Return a bar in parts.

    Args:
        label: the bar in words, for screen readers.
        parts: (tooltip, value, colour) each.
        total: value of the full width.
        mark: value at which a line is drawn.
    """
    out = [f'<svg class="bar" role="img" aria-label="{escape(label)}">']
    out.append('<rect class="empty" x="0" y="0.5" width="100%" height="97%"/>')
    start = 0.0
    for text, value, colour in parts:
        width = 100 * value / total
        if width > 0:
            out.append(
                f'<rect x="{start:.3f}%" width="{width:.3f}%" height="100%" style="fill:{colour};stroke:var(--ground)">'
                f"<title>{escape(text)}</title></rect>"
            )
        start += width
    if mark is not None:
        x = f"{100 * mark / total:.3f}%"
        out.append(f'<line class="mark" x1="{x}" x2="{x}" y1="-4" y2="38"/>')
    return "".join([*out, "</svg>"])


def single(value: float, total: float, colour: str = "var(--c1)") -> str:
    """Return a thin bar for a table. The number stands beside it, so screen readers skip the bar."""
    width = 100 * value / total if total else 0.0
    return f'<svg class="bar" aria-hidden="true"><rect width="{width:.2f}%" height="100%" style="fill:{colour}"/></svg>'


def strip(label: str, boxes: Sequence[Box], length: float, unit: str, marks: Sequence[float] = ()) -> str:
    """Return boxes along one axis, such as wall time.

    Args:
        label: the strip in words, for screen readers.
        length: the axis goes from 0 to this.
        unit: unit of the axis.
        marks: places of vertical lines.
    """
    out = [f'<svg class="lanes" style="height:{STRIP_HEIGHT + 32}px" role="img" aria-label="{escape(label)}">']
    out.append(f'<rect class="empty" x="0" y="0" width="100%" height="{STRIP_HEIGHT}"/>')
    for b in boxes:
        # Boxes overlap by 0.02%, so no seam shows between neighbours.
        place = f'x="{100 * b.start / length:.3f}%" width="{100 * (b.end - b.start) / length + 0.02:.3f}%"'
        y, height = STRIP_HEIGHT * (1 - b.high), STRIP_HEIGHT * (b.high - b.low)
        text = f"<title>{escape(b.text)}</title>"
        out.append(f'<rect {place} y="{y:.1f}" height="{height:.1f}" fill="{b.colour}">{text}</rect>')
    for mark in marks:
        x = f"{100 * mark / length:.2f}%"
        out.append(f'<line class="mark" x1="{x}" x2="{x}" y1="-4" y2="{STRIP_HEIGHT + 4}"/>')
    for tick in ticks(0, length, 7):
        anchor = "end" if tick > 0.95 * length else "middle" if tick else "start"
        text = f"{tick:g}" if tick else f"0 {unit}"
        place = f'x="{100 * tick / length:.2f}%" y="{STRIP_HEIGHT + 20}" text-anchor="{anchor}"'
        out.append(f'<text class="axis" {place}>{escape(text)}</text>')
    return "".join([*out, "</svg>"])


def cursor_data(data: object) -> str:
    """Return data that page.js reads below the cursor of a chart: texts at equal distances, or curves."""
    # "<" is escaped for JSON, so no name can end the script element.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most `most` round numbers from `low` to `high` (low < high)."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(m for m in (1, 2, 2.5, 5, 10, 20) if math.floor(high / (m * step)) - math.ceil(low / (m * step)) < most)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` round numbers for a logarithmic axis from `low` to `high` (0 < low < high)."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5), (1, 3), (1,)):
        found = [m * 10.0**d for d in decades for m in digits if low <= m * 10.0**d <= high]
        if len(found) <= most:
            return found if len(found) > 1 else ticks(low, high, most)
    return found[:: -(-len(found) // most)]
