"""Which charts a report has: curves of metrics.jsonl, ranges over GPUs, and the wall time by cause.

Several runs share a chart: a colour for each run. Of one run a chart has several quantities.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain import goodput
from jaxtrain.goodput import Goodput
from jaxtrain.page.charts import Box, stacked, strip
from jaxtrain.page.html import Column, Markup, key, paragraph, swatch, table
from jaxtrain.page.lines import COLUMNS, Curve, LineChart, figures
from jaxtrain.page.numbers import number, percent
from jaxtrain.report.run import Run

MANY = 8  # runs on a page: as many as there are colours
LEAST_COLUMNS = 120  # ranges of x for each of many runs
LOG_FROM = 4.0  # the log scale is chosen at first if a loss changes by this factor
SMOOTH = 50  # the smoothed loss is the mean over 1/50 of all lines on each side,
LEAST, MOST = 2, 500  # but over this many lines at least and at most
UNIT = 2**40  # fractions of a nat in which losses are summed
STRETCHES = 240  # parts of equal length that the strip of the wall time has
TIMES = (("days", 86_400, 2 * 86_400), ("h", 3_600, 5_400), ("min", 60, 120), ("s", 1, 0))  # unit, seconds, used from
COLOURS = {
    "step": "var(--c1)",
    "startup": "var(--c3)",
    "compile": "var(--c4)",
    "restore": "var(--c6)",
    "data": "var(--c2)",
    "save": "var(--c7)",
    "eval": "var(--c8)",
    "repeated": "var(--c5)",
    "hang": "var(--quiet)",
    "other": "var(--rule)",
    "down": "var(--ink)",
    "stopped": "",  # nobody missed the run: left empty
}
# (title, {key: name}, factor); several runs show the first key, by its name.
SPEED = (
    ("Tokens/s per device", {"tokens_per_s_per_device": "tokens/s/device"}, 1.0),
    ("MFU and HFU, %", {"mfu_causal": "MFU causal", "mfu_full": "MFU full", "hfu": "HFU"}, 100.0),
    ("Step time, s", {"step_time_s": "step"}, 1.0),
    ("Waiting for data, s per step", {"data_wait_s": "waiting for data"}, 1.0),
)
EXPERTS = (
    ("Largest load of an expert, in even shares", {"expert_load_max": "largest load"}, 1.0),
    ("Dropped tokens, %", {"dropped_tokens": "dropped"}, 100.0),
    ("Router entropy, nats", {"router_entropy": "entropy"}, 1.0),
)
MEMORY = (("Memory of the fullest device, GiB", {"peak_memory_gib": "peak", "memory_gib": "in use"}, 1.0),)
GPU = (
    ("power_w", "Power per GPU, W", 1.0),
    ("temperature_c", "Temperature, °C", 1.0),
    ("utilization", "Utilization, %", 100.0),
    ("throttled", "Throttled, % of the time", 100.0),
    ("sm_clock_mhz", "SM clock, MHz", 1.0),
    ("in_use_gib", "Memory in use per GPU, GiB", 1.0),
)


class Charts:
    """The line charts of one page: runs, their colours, and the x axes that all charts share."""

    def __init__(self, runs: Sequence[Run]):
        self.runs = runs
        ends = [run.positions([run.last_step])[2][0] for run in runs]
        self._unit, self._seconds = time_unit(max(ends))
        self.axes = ("step", "tokens", f"time, {self._unit}")

    def show(self, *charts: LineChart) -> str:
        return figures(charts, self.axes, max(LEAST_COLUMNS, COLUMNS // len(self.runs)))

    def curve(self, i: int, name: str, steps: Sequence[int], values: Sequence[Any], **more: Any) -> Curve:
        """Return a curve of run `i` over all x axes. `more`: colour, kind, and times of the steps."""
        step, tokens, seconds = self.runs[i].positions(steps, more.pop("times", None))
        return Curve(name, (step, tokens, [s / self._seconds for s in seconds]), values, more.pop("colour", colour(i)), **more)

    def of_keys(self, title: str, keys: Mapping[str, str], factor: float = 1.0, **options: Any) -> LineChart:
        """Return a chart of train lines: all keys of one run, or the first key of several."""
        shown = []
        for i, run in enumerate(self.runs):
            named = {k: n for k, n in keys.items() if run.train.known(k)}
            for n, (k, name) in enumerate(named.items()):
                values = [None if v is None else v * factor for v in run.train[k]]
                if len(self.runs) == 1:
                    shown.append(self.curve(i, name, run.train.steps, values, colour=colour(n)))
                elif k == next(iter(keys)):
                    shown.append(self.curve(i, run.name, run.train.steps, values))
        if len(self.runs) > 1 and len(keys) > 1:
            title = f"{next(iter(keys.values()))}, {title.rpartition(', ')[2]}"
        return LineChart(title, shown, **options)

    def training(self) -> str:
        """Return loss, held-out loss of several runs, gradient norm, learning rate, and figures of experts."""
        one = len(self.runs) == 1
        loss = []
        for i, run in enumerate(self.runs):
            name, raw = "train" if one else run.name, run.train["loss"]
            if run.train.steps:
                loss.append(self.curve(i, name, run.train.steps, raw, kind="raw"))
                loss.append(self.curve(i, f"{name}, smoothed", run.train.steps, smoothed(raw), kind="smooth"))
        held_out = []
        for n, name in enumerate(dict.fromkeys(name for run in self.runs for name in run.evals)):
            title = f"held-out {name}".rstrip()
            found = [(i, run.evals[name]) for i, run in enumerate(self.runs) if name in run.evals]
            if one:
                loss.append(self.curve(0, title, found[0][1].steps, found[0][1]["loss"], colour=colour((4, 1, 3, 2, 5)[n % 5])))
            else:
                curves = [self.curve(i, self.runs[i].name, c.steps, c["loss"]) for i, c in found]
                held_out.append(LineChart(f"{title} loss, nats per token".capitalize(), curves, log=True))
        return self.show(
            LineChart("Loss, nats per token", loss, log=True, kind="first"),
            *held_out,
            self.of_keys("Gradient norm", {"grad_norm": "gradient norm"}, log=True),
            self.of_keys("Learning rate", {"lr": "learning rate"}, zero=True),
            *(self.of_keys(*row, zero=True) for row in EXPERTS),
        )

    def log_at_first(self) -> bool:
        """Return whether the loss of a run changes by the factor LOG_FROM."""
        every = [[v for v in run.train.known("loss") if math.isfinite(v)] for run in self.runs]
        return any(known and min(known) > 0 and max(known) / min(known) >= LOG_FROM for known in every)

    def rows(self, rows: Sequence[tuple[str, Mapping[str, str], float]], kind: str = "") -> str:
        """Return the charts of SPEED or MEMORY; of one run with what its plan expected."""
        limits = planned(self.runs[0]) if len(self.runs) == 1 else {}
        charts = [self.of_keys(*row, limits=limits.get(next(iter(row[1])), ()), zero=True, kind=kind) for row in rows]
        return self.show(*charts)

    def gpus(self) -> str:
        """Return what NVML measured: of one run the range over its GPUs, of several the mean of each."""
        shown = []
        for quantity, title, factor in GPU:
            curves, bands = [], []
            for i, run in enumerate(self.runs):
                found = moments(run, quantity)
                if not found:
                    continue
                steps, times = [m[0] for m in found], [m[1] for m in found]
                low, mean, high = ([m[n] * factor for m in found] for n in (2, 3, 4))
                one = len(self.runs) == 1
                curves.append(self.curve(i, "mean" if one else run.name, steps, mean, times=times))
                if one:
                    ends = (("the lowest GPU", low), ("the highest", high))
                    bands.append(tuple(self.curve(i, name, steps, values, times=times) for name, values in ends))
            title = title if len(self.runs) == 1 else f"{title}, mean"
            shown.append(LineChart(title, curves, bands, zero=quantity != "temperature_c"))
        return self.show(*shown)


def colour(i: int) -> str:
    """Return the CSS colour of run `i`, or of curve `i` of one run."""
    return f"var(--c{i % MANY + 1})"


def planned(run: Run) -> dict[str, list[tuple[str, float]]]:
    """Return key of a train line -> the limits that the plan of a run sets: (name, value) each."""
    plan = run.receipt.get("planned") or {}
    limits: dict[str, list[tuple[str, float]]] = {"step_time_s": []}
    if plan.get("range_s"):
        limits["step_time_s"] = [("planned, fastest", plan["range_s"][0]), ("planned, slowest", plan["range_s"][1])]
    elif plan.get("step_s"):
        limits["step_time_s"] = [("roofline", plan["step_s"])]
    devices, tokens = (run.receipt.get("devices") or {}).get("count"), run.tokens_per_step
    if devices and tokens:
        limits["tokens_per_s_per_device"] = [(name, tokens / devices / s) for name, s in limits["step_time_s"]]
    if plan.get("peak_gib"):
        limits["peak_memory_gib"] = [("planned", plan["peak_gib"])]
    return limits


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Return the mean of each value and its neighbours on both sides, without gaps, NaN and infinities."""
    reach = max(LEAST, min(MOST, len(values) // SMOOTH))
    kept = [v if v is not None and math.isfinite(v) else None for v in values]
    # Sums of integers are exact: one loss of 1e30 must not take the digits of all later sums.
    sums = list(itertools.accumulate((int((v or 0.0) * UNIT) for v in kept), initial=0))
    counts = list(itertools.accumulate((v is not None for v in kept), initial=0))
    out: list[float | None] = []
    for i, v in enumerate(kept):
        low, high = max(0, i - reach), min(len(kept), i + reach + 1)
        out.append(None if v is None else (sums[high] - sums[low]) / (counts[high] - counts[low]) / UNIT)
    return out


def moments(run: Run, quantity: str) -> list[tuple[int, float, float, float, float]]:
    """Return (step, seconds since 1970, lowest, mean, highest) of all GPUs, in order of steps.

    Each process writes by its own clock, so the lines of two nodes have different steps. Lines are therefore grouped by time,
    in ranges twice as long as the time between two lines of a GPU. A group has the last of its steps.
    """
    lines = [line for line in run.gpu if line.get(quantity) is not None]
    if not lines:
        return []
    first = [line["time_unix"] for line in lines if all(line[x] == lines[0][x] for x in ("process", "gpu"))]
    apart = [b - a for a, b in itertools.pairwise(first)]
    width = 2 * statistics.median(apart) if apart else math.inf
    groups: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(int((line["time_unix"] - first[0]) // width) if width else 0, []).append(line)
    by_step: dict[int, list[dict[str, Any]]] = {}  # two groups may end in one step
    for _, group in sorted(groups.items()):
        by_step.setdefault(max(line["step"] for line in group), []).extend(group)
    out = []
    for step, group in sorted(by_step.items()):
        values = [line[quantity] for line in group]
        out.append((step, group[-1]["time_unix"], min(values), statistics.fmean(values), max(values)))
    return out


def time_unit(seconds: float) -> tuple[str, int]:
    """Return the unit that suits a duration, and its seconds."""
    return next((unit, size) for unit, size, least in TIMES if seconds >= least)


def hours(seconds: float) -> str:
    """Return '42 s', '3.4 min', '5.2 h', '1.3 days'."""
    unit, size = time_unit(seconds)
    return f"{number(seconds / size, 0 if unit == 's' and seconds >= 10 else 1)} {unit}"


def wall_time(runs: Sequence[Run]) -> str:
    """Return the wall time by cause: of one run strip and table, of several a bar each and one table; "" without ledgers."""
    found = [(run, g) for run in runs if (g := run.goodput()) and g.wall_s > 0]
    causes = [cause for cause in goodput.CAUSES if any(g.parts[cause] for _, g in found)]
    if not found:
        return ""
    if len(runs) > 1:
        columns = [Column("run", [run.name for run, _ in found])]
        for cause in causes:
            seconds = [g.parts[cause] for _, g in found]
            columns.append(Column(cause, [hours(s) if s else "" for s in seconds], seconds))
        wall = [g.wall_s for _, g in found]
        columns.append(Column("all", [hours(s) for s in wall], wall))
        bars = "".join(_bar(run.name, g) for run, g in found)
        return key([(cause, COLOURS[cause]) for cause in causes]) + bars + table("Wall time by cause", columns, "sortable")
    g = found[0][1]
    seconds = [g.parts[cause] for cause in causes]
    columns = [
        Column("cause", [Markup(swatch(COLOURS[cause]) + cause) for cause in causes], kind="whole", total="wall time"),
        Column("seconds", [f"{s:,.1f}" for s in seconds], seconds, total=f"{g.wall_s:,.1f}"),
        Column("share", [percent(s / g.wall_s) for s in seconds], seconds),
        Column("meaning", [goodput.MEANING[cause] for cause in causes]),
    ]
    text = goodput.words(g)
    return paragraph(f"{text[:1].upper()}{text[1:]}.") + wall_time_strip(g) + table("Wall time by cause", columns, "sortable")


def _bar(name: str, g: Goodput) -> str:
    parts = [(f"{cause}: {hours(s)}", s, COLOURS[cause] or "transparent") for cause, s in g.parts.items() if s > 0]
    label = f"Wall time of {name}: {', '.join(text for text, *_ in parts)}"
    title = paragraph(f"{name}: goodput {percent(g.goodput)} of {hours(g.wall_s - g.parts['stopped'])}", "quiet")
    return title + stacked(label, parts, g.wall_s)


def wall_time_strip(g: Goodput) -> str:
    """Return the wall time in order, in stretches of equal length with the shares of their causes. Lines mark attempts."""
    unit, size = time_unit(g.wall_s)
    start, length = g.spans[0].start, g.wall_s / STRETCHES
    shares = [dict.fromkeys(COLOURS, 0.0) for _ in range(STRETCHES)]
    begins: dict[int, float] = {}
    for span in g.spans:
        first, last = (span.start - start) / length, (span.end - start) / length
        for i in range(int(first), min(STRETCHES - 1, int(last)) + 1):
            inside = max(0.0, min(last, i + 1) - max(first, i))
            for cause, seconds in span.seconds.items():
                shares[i][cause] += seconds / length * inside / (last - first) if last > first else 0.0
        if span.attempt:
            begins.setdefault(span.attempt, (span.start - start) / size)
    boxes, at = [], 0
    for share, group in itertools.groupby(shares, lambda share: [round(s, 2) for s in share.values()]):
        end, low = at + len(list(group)), 0.0
        text = f"{hours(at * length)} to {hours(end * length)} from the start"
        for cause, part in zip(COLOURS, share, strict=True):
            if part and COLOURS[cause]:
                place = (at * length / size, end * length / size, low, low + part)
                boxes.append(Box(*place, COLOURS[cause], f"{cause}, {text}"))
                low += part
        at = end
    label = f"Wall time in order, {hours(g.wall_s)} in {len(begins)} attempts"
    note = f"In order of time. Lines mark the starts of {len(begins)} attempts." if len(begins) > 1 else ""
    return strip(label, boxes, g.wall_s / size, unit, [*begins.values()]) + paragraph(note, "quiet")
