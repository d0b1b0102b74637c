"""The charts of a report: curves of metrics.jsonl and of the GPUs, and the wall time by cause.

With several runs, a chart has one quantity, and a colour for each run. With one run, a chart has several quantities.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from jaxtrain.config.durations import duration, unit_of
from jaxtrain.config.numbers import percent
from jaxtrain.metrics import goodput
from jaxtrain.metrics.goodput import Goodput
from jaxtrain.report.charts import COLUMNS, SMOOTHED, Curve, LineChart, draw, is_number, ticks
from jaxtrain.report.html import paragraph
from jaxtrain.report.run_files import Run
from jaxtrain.report.sections import Column, Drawing, Section, Table

MANY = 8  # most runs on a page
LEAST_COLUMNS = 120  # least number of points of a thinned curve if there are many runs
LOG_FROM = 4.0  # the log scale is selected at first if a loss changes by this factor
SMOOTH, MOST = 50, 500  # the smoothed loss is the mean over 1/SMOOTH of all lines on each side, but over MOST lines at most
UNIT = 2**40  # losses are summed as integers, in units of 1/UNIT nat
STRETCHES, HEIGHT = 240, 60  # intervals of equal length in the strip of the wall time, and its height in px
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
    "stopped": "",  # between attempts; the strip is empty there
}
# (title, {key: name}, factor). With several runs, the chart has only the first key, with its name.
SPEED = (
    ("Tokens/s per device", {"tokens_per_s_per_device": "tokens/s/device"}, 1.0),
    ("MFU and HFU, %", {"mfu_causal": "MFU causal", "mfu_full": "MFU full", "hfu": "HFU"}, 100.0),
    ("Step time, s", {"step_time_s": "step"}, 1.0),
    ("Waiting for data, s per step", {"data_wait_s": "waiting for data"}, 1.0),
)
EXPERTS = (
    ("Largest load of an expert over an even load", {"expert_load_max": "largest load"}, 1.0),
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


class Series(NamedTuple):
    """Values of one run by step. times: Unix seconds of each step; None: the times of the train lines."""

    steps: Sequence[int]
    values: Sequence[Any]
    times: Sequence[float] | None = None


class Charts:
    """The line charts of one page: runs, their colours, and the x axes that all charts share."""

    def __init__(self, runs: Sequence[Run]):
        self.runs = runs
        ends = [run.positions([run.last_step])[2][0] for run in runs]
        unit, self._seconds = unit_of(max(ends))
        self.axes = ("step", "tokens", f"time, {unit}")

    def show(self, *charts: LineChart) -> Drawing:
        """Return HTML with charts next to each other. Charts without values are left out."""
        columns, several = max(LEAST_COLUMNS, COLUMNS // len(self.runs)), len(self.runs) > 1
        drawn = "".join(
            draw(dataclasses.replace(chart, named=several), self.axes, columns, log=self.log_at_first()) for chart in charts
        )
        return Drawing(f'<div class="figures">{drawn}</div>' if drawn else "")

    def curve(self, run: Run, name: str, series: Series, **style: str) -> Curve:
        """Return the curve of a series over all x axes. style: `colour` and `kind` of the curve."""
        step, tokens, seconds = run.positions(series.steps, series.times)
        return Curve(name, (step, tokens, [s / self._seconds for s in seconds]), series.values, **style)

    def curves(self, found: Sequence[Mapping[str, Series]]) -> list[Curve]:
        """Return a curve for each series of a single run; for several runs, a curve for the first series of each run.

        found: for each run, name of a curve -> its series.
        """
        if len(self.runs) == 1:
            return [self.curve(self.runs[0], *named, colour=colour(n)) for n, named in enumerate(found[0].items())]
        return [
            self.curve(run, run.name, next(iter(series.values())), colour=colour(i))
            for i, (run, series) in enumerate(zip(self.runs, found, strict=True))
            if series
        ]

    def of_keys(self, title: str, keys: Mapping[str, str], factor: float = 1.0, **options: Any) -> LineChart:
        """Return a chart of train lines: all keys, and the first key's planned values; for several runs only the first key.

        Args:
            keys: key of a train line -> name of its curve.
            factor: multiplies the values.
            options: further arguments of `LineChart`.
        """
        first = next(iter(keys))
        if len(self.runs) > 1:
            title = title if len(keys) == 1 else f"{keys[first]}, {title.rpartition(', ')[2]}"
            keys = {first: keys[first]}
        found = [
            {
                name: Series(run.train.steps, [None if v is None else v * factor for v in run.train[key]])
                for key, name in keys.items()
                if any(is_number(v) for v in run.train[key])
            }
            for run in self.runs
        ]
        curves = self.curves(found)
        limits = planned(self.runs[0]).get(first, ()) if len(self.runs) == 1 and curves else ()
        for name, value in limits:
            ends = [[axis[0], axis[-1]] for axis in curves[0].x]
            curves.append(Curve(f"{name} {float(f'{value:.4g}'):,.10g}", ends, [value, value], "var(--ink)", "limit"))
        return LineChart(title, curves, **options)

    def training(self) -> Section:
        """Return the section of loss, held-out loss, gradient norm, learning rate, and figures of experts."""
        one = len(self.runs) == 1
        loss, held_out = [], []
        for i, run in enumerate(self.runs):
            name, raw = "train" if one else run.name, run.train["loss"]
            for kind, shown, values in (("raw", name, raw), ("smooth", f"{name}{SMOOTHED}", smoothed(raw))):
                loss.append(self.curve(run, shown, Series(run.train.steps, values), colour=colour(i), kind=kind))
        for n, name in enumerate(dict.fromkeys(name for run in self.runs for name in run.evals)):
            title = f"held-out {name}".rstrip()
            found = [run.evals.get(name) for run in self.runs]
            series = [{title: Series(c.steps, c["loss"])} if c else {} for c in found]
            if one:
                loss.append(self.curve(self.runs[0], title, series[0][title], colour=colour((4, 1, 3, 2, 5)[n % 5])))
            else:
                named = f"{title} loss, nats per token{apart(self.runs, name)}"
                held_out.append(LineChart(named[:1].upper() + named[1:], self.curves(series), log=True))
        charts = self.show(
            LineChart(f"Loss, nats per token{apart(self.runs)}", loss, log=True, kind="first"),
            self.of_keys("Loss of multi-token prediction, nats per token", {"mtp_loss": "mtp loss"}, log=True),
            *held_out,
            self.of_keys("Gradient norm", {"grad_norm": "gradient norm"}, log=True),
            self.of_keys("Learning rate", {"lr": "learning rate"}, zero=True),
            *(self.of_keys(*row, zero=True) for row in EXPERTS),
        )
        return Section("Training", [charts])

    def log_at_first(self) -> bool:
        """Return whether the page begins with log scales: if a run's highest loss is at least LOG_FROM times its lowest."""
        every = [[v for v in run.train["loss"] if is_number(v)] for run in self.runs]
        return any(known and min(known) > 0 and max(known) / min(known) >= LOG_FROM for known in every)

    def gpus(self) -> Drawing:
        """Return charts of NVML's measurements: for one run, mean and range over its GPUs; else the mean of each run."""
        charts = []
        for quantity, title, factor in GPU:
            found = []
            for run in self.runs:
                steps, times, *values = list(zip(*moments(run, quantity), strict=True)) or [()] * 5
                mean, low, high = (Series(steps, [v * factor for v in values[n]], times) for n in (1, 0, 2))
                found.append({"mean": mean, "lowest GPU": low, "highest GPU": high} if steps else {})
            title = title if len(self.runs) == 1 else f"{title}, mean"
            charts.append(LineChart(title, self.curves(found), zero=quantity != "temperature_c"))
        return self.show(*charts)


def colour(i: int) -> str:
    """Return the CSS colour of run `i`, or of curve `i` on the page of a single run."""
    return f"var(--c{i % MANY + 1})"


def apart(runs: Sequence[Run], held_out: str | None = None) -> str:
    """Return a mark for losses whose runs have different training data, or different data in a held-out set; else ""."""
    known = [data for run in runs if (data := run.data_of(held_out))]
    return " (different data)" if any(data != known[0] for data in known) else ""


def planned(run: Run) -> dict[str, list[tuple[str, float]]]:
    """Return key of a train line -> (name, value) of each planned value of a run."""
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
    """Return the centered moving average. None, NaN and infinities do not count in the means, and are None in the result."""
    reach = min(MOST, len(values) // SMOOTH)
    kept = [v if is_number(v) else None for v in values]
    # Sums of integers are exact. In floats, one loss of 1e30 would erase the digits of all later sums.
    sums = list(itertools.accumulate((int((v or 0.0) * UNIT) for v in kept), initial=0))
    counts = list(itertools.accumulate((v is not None for v in kept), initial=0))
    out: list[float | None] = []
    for i, v in enumerate(kept):
        low, high = max(0, i - reach), min(len(kept), i + reach + 1)
        out.append(None if v is None else (sums[high] - sums[low]) / (counts[high] - counts[low]) / UNIT)
    return out


def moments(run: Run, quantity: str) -> list[tuple[int, float, float, float, float]]:
    """Return (step, Unix seconds, lowest, mean, highest) of a quantity over all GPUs, in order of steps.

    Each process writes at times of its own clock, so the lines of two nodes have different steps. Lines are therefore grouped
    in ranges of twice the steps between two lines of a GPU. The step and the time of a group are those of its last line.
    """
    lines = [line for line in run.gpu if line.get(quantity) is not None]
    first = sorted({line["step"] for line in lines if all(line[key] == lines[0][key] for key in ("process", "gpu"))})
    width = 2 * statistics.median([b - a for a, b in itertools.pairwise(first)] or [math.inf])
    groups: dict[float, list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["step"] - first[0]) // width, []).append(line)
    out = []
    for _, group in sorted(groups.items()):
        values = [line[quantity] for line in group]
        step, time = (max(line[name] for line in group) for name in ("step", "time_unix"))
        out.append((step, time, min(values), statistics.fmean(values), max(values)))
    return out


def wall_time(runs: Sequence[Run]) -> Section:
    """Return the section of the wall time by cause: a strip in order of time for each run, and one table of all runs.

    Shares are of the same time as goodput, without "stopped".
    """
    found = [(run.name, g) for run in runs if (g := run.wall_time) and g.wall_s > 0]
    causes = [cause for cause in goodput.CAUSES if any(g.parts[cause] for _, g in found)]
    total = "all but stopped" if "stopped" in causes else "all"
    columns = [Column("cause", causes, None, total, kind="whole", colours=[COLOURS[cause] for cause in causes])]
    strips = []
    for name, g in found:
        seconds = [g.parts[cause] for cause in causes]
        one = len(runs) == 1
        columns.append(
            Column("seconds" if one else f"{name}, s", [f"{s:,.1f}" for s in seconds], seconds, f"{g.wanted_s:,.1f}")
        )
        shares = [g.parts[cause] / g.wanted_s if cause != "stopped" and g.wanted_s else None for cause in causes]
        columns.append(Column("share", [percent(share) for share in shares], [share or 0.0 for share in shares], percent(1.0)))
        text = goodput.words(g)
        strips.append(paragraph(f"{text[:1].upper()}{text[1:]}." if one else f"{name}: {text}.") + wall_time_strip(g))
    columns.append(Column("meaning", [goodput.MEANING[cause] for cause in causes]))
    return Section("Wall time", [Drawing("".join(strips)), Table("Wall time by cause", columns, style="sortable")])


def wall_time_strip(g: Goodput) -> str:
    """Return the strip of the wall time as SVG: equal intervals with the share of each cause. Lines mark new attempts."""
    unit, size = unit_of(g.wall_s)
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
            begins.setdefault(span.attempt, first / STRETCHES)
    label = f"Wall time in order, {duration(g.wall_s)} in {len(begins)} attempts"
    out = [f'<svg class="lanes" style="height:{HEIGHT + 32}px" role="img" aria-label="{label}">']
    out.append(f'<rect class="empty" x="0" y="0" width="100%" height="{HEIGHT}"/>')
    end = 0
    for share, group in itertools.groupby(shares, lambda share: [round(s, 2) for s in share.values()]):
        at, end, low = end, end + len(list(group)), 0.0
        text = f"{duration(at * length)} to {duration(end * length)} from the start"
        # Adjacent rectangles overlap by 0.02%, so no gap is visible between them.
        place = f'x="{100 * at / STRETCHES:.3f}%" width="{100 * (end - at) / STRETCHES + 0.02:.3f}%"'
        for cause, part in zip(COLOURS, share, strict=True):
            if part and COLOURS[cause]:
                low += part
                place_y = f'y="{HEIGHT * (1 - low):.1f}" height="{HEIGHT * part:.1f}"'
                out.append(f'<rect {place} {place_y} fill="{COLOURS[cause]}"><title>{cause}, {text}</title></rect>')
    for begin in begins.values():
        x = f"{100 * begin:.2f}%"
        out.append(f'<line class="mark" x1="{x}" x2="{x}" y1="-4" y2="{HEIGHT + 4}"/>')
    for tick in ticks(0, g.wall_s / size, 7):
        part = tick * size / g.wall_s
        anchor = "end" if part > 0.95 else "middle" if tick else "start"
        place = f'x="{100 * part:.2f}%" y="{HEIGHT + 20}" text-anchor="{anchor}"'
        out.append(f'<text class="axis" {place}>{escape(f"{tick:g}" if tick else f"0 {unit}")}</text>')
    note = f"In order of time. Lines mark the starts of {len(begins)} attempts." if len(begins) > 1 else ""
    return "".join([*out, "</svg>", paragraph(note, "quiet")])
