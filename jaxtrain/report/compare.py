"""Several runs beside each other: a table of their results, and the differences of their receipts."""

import math
import statistics
from collections.abc import Callable, Sequence
from html import escape

from jaxtrain.page.html import Column, Markup, paragraph, swatch, table
from jaxtrain.page.numbers import number, percent, size
from jaxtrain.receipt.diff import compare
from jaxtrain.receipt.format import ReceiptError
from jaxtrain.report.charts import colour
from jaxtrain.report.run import Columns, Run

LINES = 12  # changed lines of a source file
# (heading, figure, its text, whether the largest is the best or None)
FIGURES = (
    ("tokens/s/device", "speed.tokens_per_s_per_device", lambda v: number(v, 0), True),
    ("step time, s", "speed.step_time_s.median", lambda v: f"{v:.4g}" if v else "-", None),
    ("MFU causal", "speed.mfu_causal", percent, True),
    ("goodput", "goodput", percent, True),
    ("peak memory", "memory.peak_gib", lambda v: "-" if v is None else size(v), False),
)


def loss(value: float | None) -> str:
    """Return a loss with four decimals; NaN and infinities by name."""
    return "-" if value is None else f"{value:.4f}" if math.isfinite(value) else str(value)


def results(runs: Sequence[Run]) -> str:
    """Return a table of the figures of each run, with a star at the best."""
    steps = Column("step", [f"{run.last_step:,}" for run in runs], kind="number")
    columns = [Column("run", [Markup(swatch(colour(i)) + escape(run.name)) for i, run in enumerate(runs)], kind="whole"), steps]

    def add(heading: str, values: Sequence[float | None], text: Callable[[float | None], str], most: bool | None) -> None:
        """Add a column. most: the largest value is the best; None: no value is."""
        if all(v is None for v in values):
            return
        cells = [text(v) for v in values]
        stars = best(values, cells, most) if most is not None else set()
        star = '<span class="best" title="best">{}</span>'
        marked = [Markup(star.format(escape(c))) if i in stars else c for i, c in enumerate(cells)]
        columns.append(Column(heading, marked, kind="number"))

    if all(run.train.steps for run in runs):
        last = min(run.last_step for run in runs)
        first = window(runs, last)
        add(f"train loss, steps {first:,} to {last:,}", [loss_over(run, first, last) for run in runs], loss, most=False)
    for name in dict.fromkeys(name for run in runs for name in run.evals):
        step, losses = held_out_at(runs, name)
        heading = f"held-out {name}".rstrip() + (", newest" if step is None else f" at step {step:,}")
        add(heading, losses, loss, most=None if step is None else False)
    for heading, path, text, most in FIGURES:
        add(heading, [run.figure(path) for run in runs], text, most)
    note = "Losses are compared over the same steps. Rates are medians of the newest attempt without its first fifth."
    return table("Results", columns) + paragraph(note, "quiet")


def window(runs: Sequence[Run], last: int) -> int:
    """Return the first step whose loss counts in the comparison up to step `last`.

    The window is a twentieth of all steps, and long enough for ten lines of the run that writes the fewest.
    """
    apart = 1
    for run in runs:
        steps = [at for at in run.train.steps if at <= last][-11:]
        apart = max(apart, -(-(steps[-1] - steps[0]) // (len(steps) - 1)) if len(steps) > 1 else 1)
    return max(1, last + 1 - max(10 * apart, last // 20))


def loss_over(run: Run, first: int, last: int) -> float | None:
    """Return the mean training loss of the lines from step `first` to `last`; None if none is a number."""
    found = [v for at, v in zip(run.train.steps, run.train["loss"], strict=True) if first <= at <= last]
    known = [v for v in found if v is not None and math.isfinite(v)]
    return statistics.fmean(known) if known else None


def held_out_at(runs: Sequence[Run], name: str) -> tuple[int | None, list[float | None]]:
    """Return (the last step at which all runs with this set were evaluated, their losses there).

    Without such a step: None and the newest loss of each, which cannot be compared.
    """
    sets = [run.evals.get(name, Columns([], {})) for run in runs]
    every = [dict(zip(each.steps, each["loss"], strict=True)) for each in sets]
    common = set.intersection(*(set(losses) for losses in every if losses))
    if not common:
        return None, [losses[max(losses)] if losses else None for losses in every]
    return max(common), [losses.get(max(common)) for losses in every]


def best(values: Sequence[float | None], cells: Sequence[str], most: bool) -> set[int]:
    """Return the indices of the best value and of all with the same cell; none if that is every known one."""
    known = [i for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    ordered = sorted(known, key=lambda i: values[i] or 0.0, reverse=most)
    equal = {i for i in known if cells[i] == cells[ordered[0]]}
    return equal if len(equal) < len(known) else set()


def differences(one: Run, other: Run) -> str:
    """Return what `jaxtrain.receipt diff` finds between two runs."""
    title = f"From {one.name} to {other.name}"
    without = [run.name for run in (one, other) if not run.receipt]
    if without:
        return paragraph(f"{title}: not compared, {' and '.join(without)} has no receipt.")
    try:
        found = compare(one.opened, other.opened)
    except ReceiptError as error:
        return paragraph(f"{title}: not compared. {error}")
    columns = [
        Column("group", [d.group for d in found.differences]),
        Column("name", [_named(d.name, d.lines) for d in found.differences], kind="path"),
        Column(one.name, [d.a for d in found.differences], kind="path"),
        Column(other.name, [d.b for d in found.differences], kind="path"),
    ]
    results = [
        Column("name", [o.name for o in found.outcomes]),
        Column(one.name, [o.a for o in found.outcomes], kind="path"),
        Column(other.name, [o.b for o in found.outcomes], kind="path"),
        Column("ratio", [o.ratio for o in found.outcomes], kind="path"),
    ]
    same = "" if found.differences else paragraph("No difference that can explain other results or another speed.")
    return f"<h3>{escape(title)}</h3>{same}{table('Possible causes', columns)}{table('Results that differ', results)}"


def _named(name: str, lines: tuple[str, ...]) -> str:
    """Return the name of a difference, with the changed lines of a source file."""
    if not lines:
        return name
    more = (f"... {len(lines) - LINES} more",) if len(lines) > LINES else ()
    return Markup(f"{escape(name)}<pre>{escape(chr(10).join((*lines[:LINES], *more)))}</pre>")
