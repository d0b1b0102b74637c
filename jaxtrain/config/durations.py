"""Durations as people say them: 42 s, 39 min, 4.2 h, 12 days. Imports no jax."""

import itertools
import math

# Unit, its seconds, and the least seconds that are told in it.
UNITS = (("s", 1, 0), ("min", 60, 120), ("h", 3_600, 5_400), ("days", 86_400, 2 * 86_400))


def unit_of(seconds: float) -> tuple[str, int]:
    """Return the unit in which people tell a duration, and its seconds. The digits that are shown decide: 119.6 s are 2 min."""
    for (unit, size, _), (_, _, least) in itertools.pairwise(UNITS):
        value = seconds / size
        if round(value, _decimal_places(value)) * size < least:
            return unit, size
    return UNITS[-1][:2]


def duration(seconds: float | None, longest: float | None = None) -> str:
    """Return a duration in seconds as text with its unit, to two or three digits: '39 min'; '-' for None and infinity.

    longest: the other end of a range: '39 to 61 min', '30 s to 5 days'.
    """
    ends = [seconds] if longest is None else [seconds, longest]
    finite_ends = sorted(max(0.0, end) for end in ends if end is not None and math.isfinite(end))
    if len(finite_ends) < len(ends):
        return "-"
    units = [unit_of(end) for end in finite_ends]
    texts = [_number(end / size) for end, (_, size) in zip(finite_ends, units, strict=True)]
    if len({*units}) == 1:
        return f"{' to '.join(dict.fromkeys(texts))} {units[0][0]}"
    return " to ".join(f"{text} {unit}" for text, (unit, _) in zip(texts, units, strict=True))


def _decimal_places(value: float) -> int:
    return 1 if value < 9.95 else 0


def _number(value: float) -> str:
    if 0 < value < 0.05:
        return "<0.1"
    text = f"{value:,.{_decimal_places(value)}f}"
    return text.removesuffix(".0")
