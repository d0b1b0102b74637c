"""What a run came to, in a few numbers: for the tiles of its page, the table of several, and the terminal."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

from jaxtrain.page.numbers import number, percent, size
from jaxtrain.report.columns import Columns
from jaxtrain.report.run import Run

SMOOTH = 50  # the smoothed loss at a line is the mean of its neighbours to a 50th of all lines on each side,
LEAST, MOST = 2, 500  # but no fewer and no more lines than these
UNIT = 2**40  # parts of a nat that sums of losses count in


@dataclasses.dataclass(frozen=True)
class Figures:
    """None where a run does not tell. Rates and memory are those of the receipt, or as a receipt would have them by now: of the
    newest attempt, rates as medians over `window`."""

    step: int
    loss: float | None  # of the newest line, as it stands; nats per token
    held_out: dict[str, float]  # newest, by set
    window: tuple[int, int] | None
    step_s: float | None
    per_device: float | None  # tokens/s
    mfu_causal: float | None
    mfu_full: float | None
    hfu: float | None
    peak_gib: float | None
    goodput: float | None


def figures(run: Run) -> Figures:
    """Those of one run."""
    t = run.train
    rates, memory = (run.opened.figures[part] or {} for part in ("speed", "memory"))
    window, found = rates.get("window"), run.goodput()
    return Figures(
        step=t.steps[-1] if t.steps else 0,
        loss=t["loss"][-1] if t.steps else None,
        held_out={name: column["loss"][-1] for name, column in run.evals.items()},
        window=(window["first_step"], window["last_step"]) if window else None,
        step_s=(rates.get("step_time_s") or {}).get("median"),
        per_device=rates.get("tokens_per_s_per_device"),
        mfu_causal=rates.get("mfu_causal"),
        mfu_full=rates.get("mfu_full"),
        hfu=rates.get("hfu"),
        peak_gib=memory.get("peak_gib"),
        goodput=found.goodput if found else None,
    )


def middle(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return statistics.median(values) if values else None


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """The mean of each value and its neighbours on both sides, so that nothing lags. Gaps and what is no number stay out of it,
    and have no mean themselves."""
    reach = max(LEAST, min(MOST, len(values) // SMOOTH))
    kept = [v if v is not None and math.isfinite(v) else None for v in values]
    # In whole numbers, whose sums are exact: one loss of 1e30 must not take the digits of all that follow.
    sums = list(itertools.accumulate((int((v or 0.0) * UNIT) for v in kept), initial=0))
    counts = list(itertools.accumulate((v is not None for v in kept), initial=0))
    out: list[float | None] = []
    for i, v in enumerate(kept):
        low, high = max(0, i - reach), min(len(kept), i + reach + 1)
        out.append(None if v is None else (sums[high] - sums[low]) / (counts[high] - counts[low]) / UNIT)
    return out


def loss(value: float | None) -> str:
    """A loss with four decimals; NaN and infinities by name."""
    return "-" if value is None else f"{value:.4f}" if math.isfinite(value) else str(value)


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """(name, value, note) of the numbers that stand above all."""
    f = figures(run)
    held_out = ", ".join(f"{name or 'held-out'} {loss(value)}" for name, value in f.held_out.items())
    over = f"steps {f.window[0]:,} to {f.window[1]:,}" if f.window else "not measured"
    found = run.goodput()
    lost = f"of {hours(found.wall_s - found.parts['stopped'])}" if found else "no ledger"
    planned = run.receipt.get("planned") or {}
    plan = f"planned {size(planned['peak_gib'])}" if planned.get("peak_gib") else "of the fullest device"
    return [
        ("step", f"{f.step:,}", f"of {run.steps:,}" if run.steps else ""),
        ("loss", loss(f.loss), held_out or "nats per token"),
        ("tokens/s/device", number(f.per_device, 0), over),
        ("MFU, causal", percent(f.mfu_causal), f"full {percent(f.mfu_full)}, HFU {percent(f.hfu)}"),
        ("goodput", percent(f.goodput), lost),
        ("peak memory", size(f.peak_gib) if f.peak_gib is not None else "-", plan if f.peak_gib else "not measured"),
    ]


def hours(seconds: float) -> str:
    """'42 s', '3.4 min', '5.2 h', '1.3 days'."""
    for unit, long in (("days", 172_800), ("h", 5_400), ("min", 120)):
        if seconds >= long:
            return f"{number(seconds / {'days': 86_400, 'h': 3_600, 'min': 60}[unit], 1)} {unit}"
    return f"{number(seconds, 0 if seconds >= 10 else 1)} s"


def last_common(runs: Sequence[Run]) -> int | None:
    """The last step that all runs have reached; None where one has none."""
    ends = [run.train.steps[-1] if run.train.steps else None for run in runs]
    known = [end for end in ends if end is not None]
    return min(known) if len(known) == len(runs) else None


def window(runs: Sequence[Run], last: int) -> int:
    """The first of the steps to `last` over which the training losses of these runs are compared: a twentieth of all, and as
    many as the run that writes the fewest lines needs for ten. One line alone is noise."""
    apart = 1
    for run in runs:
        steps = [at for at in run.train.steps if at <= last][-11:]
        apart = max(apart, -(-(steps[-1] - steps[0]) // (len(steps) - 1)) if len(steps) > 1 else 1)
    return max(1, last + 1 - max(10 * apart, last // 20))


def loss_over(run: Run, first: int, last: int) -> float | None:
    """The mean training loss of the lines of these steps; None where there is none that is a number."""
    found = [v for at, v in zip(run.train.steps, run.train["loss"], strict=True) if first <= at <= last]
    known = [v for v in found if v is not None and math.isfinite(v)]
    return statistics.fmean(known) if known else None


def held_out_at(runs: Sequence[Run], name: str) -> tuple[int | None, list[float | None]]:
    """(the last step at which all runs that have this held-out set were evaluated, the losses there). Where there is no such
    step, None and the newest of each: they may not be compared."""
    sets = [run.evals.get(name, Columns([], {})) for run in runs]
    every = [dict(zip(each.steps, each["loss"], strict=True)) for each in sets]
    common = set.intersection(*(set(losses) for losses in every if losses))
    if not common:
        return None, [losses[max(losses)] if losses else None for losses in every]
    return max(common), [losses.get(max(common)) for losses in every]


def best(values: Sequence[float | None], cells: Sequence[str], most: bool) -> set[int]:
    """Which of several are the best, with all whose cells read the same; none where that is all of them, or one is known."""
    known = [i for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    ordered = sorted(known, key=lambda i: values[i] or 0.0, reverse=most)
    equal = {i for i in known if cells[i] == cells[ordered[0]]}
    return equal if len(equal) < len(known) else set()
