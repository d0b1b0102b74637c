"""Counts of tokens and parameters as people say them: 512, 2.05 k, 1.43 M, 8.03 B. Imports no jax."""

import math

UNITS = ((1e3, "k"), (1e6, "M"), (1e9, "B"))
WORDS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}  # behind a count that people type


def short_count(number: float) -> str:
    """Return a count as text, from 1000 on to three digits with its unit: '262 k', '1.43 M', '1,000 B'."""
    if number < 1000:
        return f"{number:.3g}"
    # The digits that are shown decide: 999,999 are 1.00 M.
    scale, unit = next((each for each in UNITS if round(number / each[0]) < 1000), UNITS[-1])
    value = number / scale
    decimal_places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{decimal_places}f} {unit}"


def read_count(text: str) -> int:
    """Return the count of a text such as 15T, 1.5T, 300B, 1e12 or 2_000_000. Raises ValueError for any other text."""
    unit = WORDS.get(text[-1:].upper(), 1)
    count = float(text[:-1] if unit > 1 else text) * unit
    if not 1 <= count < math.inf or round(count, 3) % 1:
        raise ValueError(f"{text} is no count")
    return round(count)
