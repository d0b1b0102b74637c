"""How a plan's numbers are written.

Memory is in GiB, as allocators count; what travels is in GB (1e9 bytes), as links and the literature count. A column has the
decimals that its largest entry deserves: a plan is good to a few percent, not to five digits.
"""

import math
from collections.abc import Iterable, Sequence

GB_PER_GIB = 2**30 / 1e9


def decimals(values: Iterable[float]) -> int:
    """How many decimals a column with these values deserves."""
    largest = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
    return 0 if largest >= 1000 else 1 if largest >= 10 else 2


def column(values: Sequence[float]) -> list[str]:
    """Numbers of one unit with equal decimals; what would round to zero without being it shows as '<0.1'."""
    places = decimals(values)
    return [number(v, places) for v in values]


def number(value: float | None, places: int | None = None) -> str:
    """One number with thousands separated; '-' where there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    places = decimals([value]) if places is None else places
    if value == 0:
        return "0"
    least = 10.0**-places
    if 0 < abs(value) < least / 2:
        return f"<{least:.{places}f}"
    return f"{value:,.{places}f}"


def rough(value: float, digits: int = 3) -> str:
    """A number that is known to so many digits: 24,034 as 24,000."""
    if value == 0 or not math.isfinite(value):
        return number(value, 0)
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(0, places)}f}"


def gib(values: Sequence[float]) -> tuple[str, list[str]]:
    """(unit, numbers) of memory sizes: in MiB where not one of them reaches a GiB."""
    if max((abs(v) for v in values), default=0.0) >= 1:
        return "GiB", column(values)
    return "MiB", column([v * 1024 for v in values])


def size(value: float) -> str:
    """One memory size with its unit."""
    unit, (text,) = gib([value])
    return f"{text} {unit}"


def percent(fraction: float | None) -> str:
    """A fraction with one decimal; '-' where there is none, as for the MFU of a GPU without a known peak."""
    return "-" if fraction is None or not math.isfinite(fraction) else f"{number(100 * fraction, 1)}%"
