"""Counts of tokens and parameters as people say them: 512, 2.05 k, 1.43 M, 8.03 B. Imports no jax."""

UNITS = ((1e3, "k"), (1e6, "M"), (1e9, "B"))


def short_count(number: float) -> str:
    """Return a count as text, from 1000 on to three digits with its unit: '262 k', '1.43 M', '1,000 B'."""
    if number < 1000:
        return f"{number:.3g}"
    # The digits that are shown decide: 999,999 are 1.00 M.
    scale, unit = next((each for each in UNITS if round(number / each[0]) < 1000), UNITS[-1])
    value = number / scale
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{places}f} {unit}"
