"""A comparison of several runs: a table of their results, and the differences of their receipts."""

import math
import statistics
from collections.abc import Callable, Sequence

from jaxtrain.config.numbers import number, percent, size
from jaxtrain.metrics.receipt import ReceiptError
from jaxtrain.report.charts import is_number
from jaxtrain.report.receipt import compare
from jaxtrain.report.run_charts import apart, colour
from jaxtrain.report.run_files import Columns, Run
from jaxtrain.report.sections import Column, Section, Table

FIGURES = (  # (heading, name of the figure, function for its text)
    ("tokens/s/device", "tokens_per_s_per_device", lambda v: number(v, 0)),
    ("step time, s", "step_time_s", lambda v: f"{v:.4g}"),
    ("MFU causal", "mfu_causal", percent),
    ("goodput", "goodput", percent),
    ("peak memory", "peak_memory_gib", size),
)
RATES = ("tokens_per_s_per_device", "step_time_s", "mfu_causal")  # figures that are medians


def loss(value: float | None) -> str:
    """Return a loss as text with four decimals; NaN and infinities by name."""
    return "-" if value is None else f"{value:.4f}" if math.isfinite(value) else str(value)


def results(runs: Sequence[Run]) -> Section:
    """Return the section with a table of each run's figures."""
    last = [run.last_step for run in runs]
    names = Column("run", [run.name for run in runs], kind="whole", colours=[colour(i) for i in range(len(runs))])
    columns = [names, Column("step", [f"{step:,}" for step in last], last)]

    def add(heading: str, values: Sequence[float | None], text: Callable[[float], str]) -> None:
        if any(v is not None for v in values):
            cells = ["-" if v is None else text(v) for v in values]
            columns.append(Column(heading, cells, [v if is_number(v) else -1.0 for v in values]))

    if all(last):
        first = window(runs, min(last))
        add(
            f"train loss{apart(runs)}, steps {first:,} to {min(last):,}",
            [loss_over(run, first, min(last)) for run in runs],
            loss,
        )
    evaluated = list(dict.fromkeys(name for run in runs for name in run.evals))
    for name in evaluated:
        step, losses = held_out_at(runs, name)
        when = ", newest" if step is None else f" at step {step:,}"
        when = apart(runs, name) + when
        add(f"held-out {name}".rstrip() + when, losses, loss)
        if any(v is not None for run in runs for v in run.evals.get(name, Columns([], {}))["cross_entropy"]):
            # Losses of the users' own are not comparable with other losses, cross entropies are.
            add(f"cross entropy, held-out {name}".rstrip() + when, held_out_at(runs, name, plain=True)[1], loss)
    rated = [[run.figure(path) for run in runs] for _, path, _ in FIGURES]
    for (heading, _, text), values in zip(FIGURES, rated, strict=True):
        add(heading, values, text)
    notes = []
    if all(last):
        notes.append("Losses are compared over the same steps.")
    if any(apart(runs, name) for name in (None, *evaluated)):
        notes.append("Losses of different data do not rank the runs: Differences has their token files.")
    if any(v is not None for (_, path, _), values in zip(FIGURES, rated, strict=True) if path in RATES for v in values):
        notes.append("Rates are medians without the first fifth of the train lines.")
    return Section("Results", [Table("A click on a heading sorts the runs", columns, style="sortable"), " ".join(notes)])


def window(runs: Sequence[Run], last: int) -> int:
    """Return the first step of the window that ends at step `last`, over which losses are compared.

    The window is a twentieth of the first `last` steps, but has at least ten train lines of each run.
    """
    apart = 1
    for run in runs:
        steps = [at for at in run.train.steps if at <= last][-11:]
        apart = max(apart, -(-(steps[-1] - steps[0]) // (len(steps) - 1)) if len(steps) > 1 else 1)
    return max(1, last + 1 - max(10 * apart, last // 20))


def loss_over(run: Run, first: int, last: int) -> float | None:
    """Return the mean training loss of the lines from step `first` to `last`; None if no loss is finite."""
    found = [v for at, v in zip(run.train.steps, run.train["loss"], strict=True) if first <= at <= last]
    known = [v for v in found if v is not None and math.isfinite(v)]
    return statistics.fmean(known) if known else None


def held_out_at(runs: Sequence[Run], name: str, plain: bool = False) -> tuple[int | None, list[float | None]]:
    """Return (last step at which all runs with this held-out set were evaluated, loss of each run at that step).

    Without such a step, return None and the newest loss of each run, which cannot be compared.

    plain: return cross entropies in place of losses; None for a loss of pairs.
    """
    sets = [run.evals.get(name, Columns([], {})) for run in runs]
    every = [dict(zip(each.steps, cross_entropies(each) if plain else each["loss"], strict=True)) for each in sets]
    common = set.intersection(*(set(losses) for losses in every if losses))
    if not common:
        return None, [losses[max(losses)] if losses else None for losses in every]
    return max(common), [losses.get(max(common)) for losses in every]


def cross_entropies(held_out: Columns) -> list[float | None]:
    """Return the plain cross entropy of each eval line: the loss, if it is not a user's own; None for a loss of pairs."""
    lines = zip(held_out["cross_entropy"], held_out["loss"], held_out["perplexity"], strict=True)
    return [own if own is not None else None if perplexity is None else loss for own, loss, perplexity in lines]


def differences(one: Run, other: Run) -> list[str | Table]:
    """Return the findings of `python -m jaxtrain receipt diff` between two runs: sentences and tables."""
    title = f"From {one.name} to {other.name}"
    without = [run.name for run in (one, other) if not run.receipt]
    if without:
        return [f"{title}: not compared, {' and '.join(without)} has no receipt."]
    try:
        causes, outcomes = compare(one, other)
    except ReceiptError as error:
        return [f"{title}: not compared. {error}"]
    columns = [
        Column("group", [d["group"] for d in causes]),
        Column("name", [d["name"] for d in causes], kind="path"),
        Column(one.name, [d["a"] for d in causes], kind="path"),
        Column(other.name, [d["b"] for d in causes], kind="path"),
    ]
    results = [
        Column("name", [o["name"] for o in outcomes]),
        Column(one.name, [o["a"] for o in outcomes], kind="path"),
        Column(other.name, [o["b"] for o in outcomes], kind="path"),
        Column("ratio", [o["ratio"] for o in outcomes], kind="path"),
    ]
    none = [] if causes else [f"{title}: no difference that can explain other results or another speed."]
    return [*none, Table(f"{title}: possible causes", columns), Table(f"{title}: results that differ", results)]
