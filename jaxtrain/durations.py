"""Durations as people say them: 42 s, 39 min, 4.2 h, 12 days. Imports no jax."""

import math

# Unit, its seconds, and the least seconds that are told in it.
UNITS = (("days", 86_400, 2 * 86_400), ("h", 3_600, 5_400), ("min", 60, 120), ("s", 1, 0))


def unit_of(seconds: float) -> tuple[str, int]:
    """Return the unit in which people tell a duration, and its seconds."""
    return next((unit, size) for unit, size, least in UNITS if seconds >= least or not least)


def duration(seconds: float | None, longest: float | None = None) -> str:
    """Return a duration in seconds as text with its unit, to two or three digits: '39 min'; '-' for None and infinity.

    longest: the other end of a range, which has the unit of that end: '39 to 61 min'.
    """
    ends = [seconds] if longest is None else [seconds, longest]
    known = [max(0.0, end) for end in ends if end is not None and math.isfinite(end)]
    if len(known) < len(ends):
        return "-"
    unit, size = unit_of(known[-1])
    texts = dict.fromkeys(_number(end / size) for end in known)
    return f"{' to '.join(texts)} {unit}"


def _number(value: float) -> str:
    if 0 < value < 0.05:
        return "<0.1"
    if value < 9.95:
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:,.0f}"
