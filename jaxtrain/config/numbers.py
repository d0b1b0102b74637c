"""Formatted numbers of a report.

Memory is in GiB, as in allocators. Bytes on the wire are in GB (1e9 bytes), as in data sheets of links. The decimals
of a column follow from its largest entry, since a plan is accurate to a few percent, not to five digits.
"""

import math
from collections.abc import Iterable, Sequence

GB_PER_GIB = 2**30 / 1e9


def decimals(values: Iterable[float]) -> int:
    """Return the number of decimals for a column with these values: 0, 1 or 2, from the largest value."""
    largest = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
    return 0 if largest >= 1000 else 1 if largest >= 10 else 2


def column(values: Sequence[float]) -> list[str]:
    """Return numbers of one unit as texts with equal decimals. A number that rounds to 0 is a bound, as '<0.1'."""
    decimal_places = decimals(values)
    return [number(v, decimal_places) for v in values]


def number(value: float | None, decimal_places: int | None = None) -> str:
    """Return a number with thousands separated and `decimal_places` decimals; '-' for None, NaN and infinities."""
    if value is None or not math.isfinite(value):
        return "-"
    decimal_places = decimals([value]) if decimal_places is None else decimal_places
    if value == 0:
        return "0"
    least = 10.0**-decimal_places
    if abs(value) < least / 2:
        return f"<{least:.{decimal_places}f}"
    return f"{value:,.{decimal_places}f}"


def rough(value: float, digits: int = 3) -> str:
    """Return a number rounded to `digits` significant digits: 24,034 as 24,000."""
    if value == 0 or not math.isfinite(value):
        return number(value, 0)
    decimal_places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, decimal_places):,.{max(0, decimal_places)}f}"


def gib(values: Sequence[float]) -> tuple[str, list[str]]:
    """Return (unit, texts) of memory sizes given in GiB. The unit is MiB if all are below 1 GiB, else GiB."""
    if max((abs(v) for v in values), default=0.0) >= 1:
        return "GiB", column(values)
    return "MiB", column([v * 1024 for v in values])


def size(value: float) -> str:
    """Return a memory size (GiB) as text with its unit."""
    unit, (text,) = gib([value])
    return f"{text} {unit}"


def percent(fraction: float | None) -> str:
    """Return a fraction in percent with one decimal; '-' for None, as for the MFU of a GPU without a known peak."""
    return "-" if fraction is None or not math.isfinite(fraction) else f"{number(100 * fraction, 1)}%"


def plural(count: int, noun: str, several: str = "") -> str:
    """Return a count with its noun: `1 GPU`, `8 GPUs`. several: the plural, if it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else several or f'{noun}s'}"
