"""What a run came to, in a few numbers: for the tiles of its page, the table of several, and the terminal."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from jaxtrain.plan.numbers import number, percent, rough, size
from jaxtrain.receipt.figures import RATES
from jaxtrain.receipt.figures import speed as receipt_speed
from jaxtrain.report.run import Run

SMOOTH = 50  # the smoothed loss at a line is the mean of its neighbours to a 50th of all lines on each side,
LEAST, MOST = 2, 500  # but no fewer and no more lines than these
UNIT = 2**40  # parts of a nat that sums of losses count in


@dataclasses.dataclass(frozen=True)
class Figures:
    """None where a run does not tell. Rates are medians over `window`, the steps that receipts take theirs over."""

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
    rates = speed(run)
    window, found = rates["window"], run.goodput()
    return Figures(
        step=t.steps[-1] if t.steps else 0,
        loss=t["loss"][-1] if t.steps else None,
        held_out={name: column["loss"][-1] for name, column in run.evals.items()},
        window=(window["first_step"], window["last_step"]) if window else None,
        step_s=(rates["step_time_s"] or {}).get("median"),
        per_device=rates["tokens_per_s_per_device"],
        mfu_causal=rates["mfu_causal"],
        mfu_full=rates["mfu_full"],
        hfu=rates["hfu"],
        peak_gib=max(t.known("peak_memory_gib"), default=None),
        goodput=found.goodput if found else None,
    )


def speed(run: Run) -> dict[str, Any]:
    """As a receipt has it (jaxtrain.receipt.figures): of the newest attempt, or of all where that one has too little."""
    keys = ("step_time_s", *RATES)
    columns = [run.train[key] for key in keys]
    lines = [
        {"kind": "train", "step": step, **dict(zip(keys, values, strict=True))}
        for step, *values in zip(run.train.steps, *columns, strict=True)
    ]
    since = run.receipt.get("resumed_from_step") or 0
    newest = receipt_speed(line for line in lines if line["step"] > since)
    return newest if newest["window"] else receipt_speed(lines)


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
        ("tokens/s/device", rough(f.per_device, 4) if f.per_device else "-", over),
        ("MFU, causal", percent(f.mfu_causal), f"full {percent(f.mfu_full)}, HFU {percent(f.hfu)}"),
        ("goodput", percent(f.goodput), lost),
        ("peak memory", size(f.peak_gib) if f.peak_gib is not None else "-", plan if f.peak_gib else "the devices do not tell"),
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


def loss_at(run: Run, step: int) -> float | None:
    """The mean training loss of the last twentieth of the lines up to a step, and of ten at least: a run that went further is
    not better for that, and one line alone is noise."""
    upto = [v for at, v in zip(run.train.steps, run.train["loss"], strict=True) if at <= step]
    last = [v for v in upto[-max(10, len(upto) // 20) :] if v is not None and math.isfinite(v)]
    return statistics.fmean(last) if last else None


def best(values: Sequence[float | None], most: bool) -> int | None:
    """Which of several is the best; None where less than two are known, or all are equal."""
    known = [i for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    ordered = sorted(known, key=lambda i: values[i] or 0.0, reverse=most)
    return ordered[0] if len(known) > 1 and values[ordered[0]] != values[ordered[-1]] else None
