"""Small pictures of a page, as inline SVG: bars in parts, bars beside a number, and the round numbers of an axis."""

import math
from collections.abc import Sequence
from html import escape


def stacked(label: str, parts: Sequence[tuple[str, float, str]], whole: float, mark: float | None = None) -> str:
    """A bar of (what, value, CSS colour), 100% being `whole`; a line at `mark`. Each part's text is its tooltip."""
    out = [f'<svg class="bar" role="img" aria-label="{escape(label)}">']
    out.append('<rect class="empty" x="0" y="0.5" width="100%" height="97%"/>')
    start = 0.0
    for what, value, colour in parts:
        width = 100 * value / whole
        if width > 0:
            out.append(
                f'<rect x="{start:.3f}%" width="{width:.3f}%" height="100%" style="fill:{colour};stroke:var(--ground)">'
                f"<title>{escape(what)}</title></rect>"
            )
        start += width
    if mark is not None:
        x = f"{100 * mark / whole:.3f}%"
        out.append(f'<line class="mark" x1="{x}" x2="{x}" y1="-4" y2="38"/>')
    return "".join([*out, "</svg>"])


def single(value: float, whole: float, colour: str = "var(--c1)") -> str:
    """A thin bar beside a number that already says it, so hidden from screen readers."""
    width = 100 * value / whole if whole else 0.0
    return f'<svg class="bar" aria-hidden="true"><rect width="{width:.2f}%" height="100%" style="fill:{colour}"/></svg>'


def ticks(top: float) -> list[float]:
    """Four to eight round numbers from 0 to `top`."""
    step = 10.0 ** math.floor(math.log10(top / 4))
    step *= max(m for m in (1, 2, 2.5, 5) if 4 * m * step <= top)
    return [i * step for i in range(int(top / step) + 1)]


def ticks_between(low: float, high: float, most: int = 5) -> list[float]:
    """At most so many round numbers from `low` to `high`, which must be the larger one."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(m for m in (1, 2, 2.5, 5, 10, 20) if math.floor(high / (m * step)) - math.ceil(low / (m * step)) < most)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def ticks_of_log(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers for an axis of powers of ten, from a positive `low` to `high`."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for parts in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5), (1, 3), (1,)):
        found = [m * 10.0**d for d in decades for m in parts if low <= m * 10.0**d <= high]
        if len(found) <= most:
            return found if len(found) > 1 else ticks_between(low, high, most)
    return found[:: -(-len(found) // most)]
