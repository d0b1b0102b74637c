"""Figures of runs, and several runs beside each other: states, results, and differences of their receipts."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from html import escape

from jaxtrain.page.html import Column, Markup, bullets, paragraph, swatch, table
from jaxtrain.plan.numbers import number, percent, size
from jaxtrain.receipt import ReceiptError
from jaxtrain.receipt.compare import compare
from jaxtrain.report.charts import colour
from jaxtrain.report.run import Columns, Run, verdict

LINES = 12  # changed lines of a source file


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of a run; None if they are not known. Rates and memory are those of the newest attempt, as in its receipt.

    Attributes:
        loss: of the newest line, in nats per token.
        held_out: the newest held-out loss of each set.
        window: first and last step of the lines whose median the rates are.
        step_s: seconds.
        per_device: tokens/s.
    """

    step: int
    loss: float | None
    held_out: dict[str, float]
    window: tuple[int, int] | None
    step_s: float | None
    per_device: float | None
    mfu_causal: float | None
    mfu_full: float | None
    hfu: float | None
    peak_gib: float | None
    goodput: float | None


def figures(run: Run) -> Figures:
    """Return the figures of a run."""
    speed, memory = (run.opened.figures[part] or {} for part in ("speed", "memory"))
    window, found = speed.get("window"), run.goodput()
    return Figures(
        step=run.last_step,
        loss=run.train["loss"][-1] if run.train.steps else None,
        held_out={name: lines["loss"][-1] for name, lines in run.evals.items()},
        window=(window["first_step"], window["last_step"]) if window else None,
        step_s=(speed.get("step_time_s") or {}).get("median"),
        per_device=speed.get("tokens_per_s_per_device"),
        mfu_causal=speed.get("mfu_causal"),
        mfu_full=speed.get("mfu_full"),
        hfu=speed.get("hfu"),
        peak_gib=memory.get("peak_gib"),
        goodput=found.goodput if found else None,
    )


def loss(value: float | None) -> str:
    """Return a loss with four decimals; NaN and infinities by name."""
    return "-" if value is None else f"{value:.4f}" if math.isfinite(value) else str(value)


def states(runs: Sequence[Run]) -> str:
    """Return how each run ended or where it is."""
    columns = [
        Column("run", _names(runs), kind="whole"),
        Column("state", [verdict(run)[1] for run in runs]),
        Column("devices", [run.devices or "-" for run in runs]),
        Column("tokens per step", [f"{run.tokens_per_step:,}" if run.tokens_per_step else "-" for run in runs], kind="number"),
        Column("warnings", [str(len(run.alerts)) for run in runs], [len(run.alerts) for run in runs]),
    ]
    return table("Runs", columns)


def results(runs: Sequence[Run]) -> str:
    """Return the figures of each run, with a star at the best."""
    found = [figures(run) for run in runs]
    columns = [Column("run", _names(runs), kind="whole"), Column("step", [f"{f.step:,}" for f in found], kind="number")]

    def add(heading: str, values: Sequence[float | None], cells: Sequence[str], most: bool | None = None) -> None:
        """Add a column. most: the largest value is the best; None: no value is."""
        if all(v is None for v in values):
            return
        stars = best(values, cells, most) if most is not None else set()
        star = '<span class="best" title="best">{}</span>'
        marked = [Markup(star.format(escape(c))) if i in stars else c for i, c in enumerate(cells)]
        columns.append(Column(heading, marked, kind="number"))

    if all(run.train.steps for run in runs):
        last = min(run.last_step for run in runs)
        first = window(runs, last)
        losses = [loss_over(run, first, last) for run in runs]
        add(f"train loss, steps {first:,} to {last:,}", losses, [loss(v) for v in losses], most=False)
    for name in dict.fromkeys(name for run in runs for name in run.evals):
        step, losses = held_out_at(runs, name)
        heading = f"held-out {name}".rstrip() + (", newest" if step is None else f" at step {step:,}")
        add(heading, losses, [loss(v) for v in losses], most=None if step is None else False)
    rates = [f.per_device for f in found]
    add("tokens/s/device", rates, [number(v, 0) for v in rates], most=True)
    add("step time, s", [f.step_s for f in found], [f"{f.step_s:.4g}" if f.step_s else "-" for f in found])
    add("MFU causal", [f.mfu_causal for f in found], [percent(f.mfu_causal) for f in found], most=True)
    add("goodput", [f.goodput for f in found], [percent(f.goodput) for f in found], most=True)
    peaks = [f.peak_gib for f in found]
    add("peak memory", peaks, ["-" if v is None else size(v) for v in peaks], most=False)
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
        Column("name", [_named(d.title, d.lines) for d in found.differences], kind="path"),
        Column(one.name, [d.a for d in found.differences], kind="path"),
        Column(other.name, [d.b for d in found.differences], kind="path"),
    ]
    results = [
        Column("name", [o.name for o in found.outcomes]),
        Column(one.name, [o.a for o in found.outcomes], kind="path"),
        Column(other.name, [o.b for o in found.outcomes], kind="path"),
        Column("ratio", [o.said for o in found.outcomes], kind="path"),
    ]
    same = "" if found.differences else paragraph("No difference that can explain other results or another speed.")
    shown = f"<h3>{escape(title)}</h3>{same}{table('Possible causes', columns)}{table('Results that differ', results)}"
    return shown + bullets("Not compared", found.notes)


def _named(name: str, lines: tuple[str, ...]) -> str:
    """Return the name of a difference, with the changed lines of a source file."""
    if not lines:
        return name
    more = (f"... {len(lines) - LINES} more",) if len(lines) > LINES else ()
    return Markup(f"{escape(name)}<pre>{escape(chr(10).join((*lines[:LINES], *more)))}</pre>")


def _names(runs: Sequence[Run]) -> list[str]:
    return [Markup(swatch(colour(i)) + escape(run.name)) for i, run in enumerate(runs)]
