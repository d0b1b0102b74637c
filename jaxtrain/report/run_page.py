"""The page of one run, or of several with their curves in the same charts. It needs no network and no scripts.

With one run, a chart has several quantities; with several runs one quantity, and a colour for each run.
"""

import dataclasses
import itertools
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from jaxtrain.config.commands import to_run_sh
from jaxtrain.config.counts import short_count
from jaxtrain.config.durations import duration, unit_of
from jaxtrain.config.numbers import column, number, percent, plural, size
from jaxtrain.config.schema import flatten
from jaxtrain.metrics import goodput
from jaxtrain.metrics.files import write_atomic
from jaxtrain.metrics.goodput import Goodput
from jaxtrain.metrics.table import GPU, METRICS, Chart, Metric
from jaxtrain.report import profile_trace
from jaxtrain.report.charts import COLUMNS, SMOOTHED, Curve, LineChart, controls, draw_chart, is_number, lanes
from jaxtrain.report.html import collapsible, document, frame_page, paragraph, swatch, tiles
from jaxtrain.report.lost_time import lost_time, lost_time_section
from jaxtrain.report.profile import StepProfile, load_profile
from jaxtrain.report.receipt import receipt_rows
from jaxtrain.report.run import EXIT_CODES, PAGE, RunError, RunFolder, verdict
from jaxtrain.report.tables import Column, Drawing, Listing, Section, Table, html_sections, html_table

MANY = 8  # most runs on a page
LEAST_COLUMNS = 120  # least number of points of a thinned curve if there are many runs
LOG_FROM = 4.0  # the log scale is selected at first if a loss changes by this factor
SMOOTH, MOST = 50, 500  # the smoothed loss is the mean over 1/SMOOTH of all lines on each side, but over MOST lines at most
UNIT = 2**40  # losses are summed as integers, in units of 1/UNIT nat
STRETCHES = 240  # intervals of equal length in the lane of the wall time
WARNINGS = 30  # most warnings of a run; the newest are shown
SAMPLE = 1_500  # most characters of a sample
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
    "stopped": "",  # between attempts; the lane is empty there
}
ELSEWHERE = ("goodput", "held_out", "overrides")  # fields of the receipt that have separate sections
FIRST = ("command", "config", "code.commit", "code.dirty", "host", "devices", "mesh", "attention", "data.source")


def run_html(runs: Sequence[RunFolder], target: Path = Path("report.html")) -> str:
    """Return the page as HTML. Raises RunError for more than MANY runs.

    Args:
        target: path of the page. Links to other pages are relative to its folder.
    """
    if len(runs) > MANY:
        raise RunError(f"RUN = {len(runs)} runs: a page has at most {MANY}. Fix: name fewer.")
    title, described, head = _head(runs, target)
    single = runs[0] if len(runs) == 1 else None
    body = [
        f"<header>{head}</header><main>",
        tiles(_tiles(single)) if single else "",
        *(paragraph(f"{'' if single else f'{run.name}: '}{note}") for run in runs for note in run.notes),
        _links(single, target) if single else "",
        *html_sections([_warnings(run, "Warnings" if single else f"Warnings of {run.name}") for run in runs]),
    ]
    charts = Charts(runs)
    sections = [wall_time(runs), Section("GPUs", [charts.gpus(), *(_gpus(single) if single else ())])]
    if any(run.train.steps for run in runs):
        body.append(controls(charts.axes, log=charts.log))
        training = charts.show(*charts.losses(), *charts.metric_charts("training"))
        sections = [
            Section("Training", [training]),
            *([_evaluations(single), _lost_time(single)] if single else []),
            Section("Throughput", [charts.show(*charts.metric_charts("throughput"))]),
            Section("Memory", [charts.show(*charts.metric_charts("memory", kind="first"))]),
            *sections,
        ]
    sections.append(Section("Samples", [Drawing(_sample(run, s, bool(single))) for run in runs for s in run.samples]))
    sections.append(Section("Receipt", _receipt(single) if single else []))
    return document(title, described, [*body, *html_sections(sections), "</main>"])


def _head(runs: Sequence[RunFolder], target: Path) -> tuple[str, str, str]:
    """Return (title, description, header) of the page: the state of each run."""
    if len(runs) == 1:
        run, devices = runs[0], runs[0].receipt.get("devices")
        kind, text = verdict(run)
        facts = (run.receipt.get("config"), devices and f"{devices['count']} x {', '.join(devices['kind'])}", str(run.folder))
        head = f"<h1>{escape(run.name)}</h1>{paragraph('; '.join(filter(None, facts)), 'quiet')}"
        return f"{run.name}: {text}", f"Report of a training run: {text}", f'{head}<p class="verdict {kind}">{escape(text)}</p>'
    states = []
    for i, run in enumerate(runs):
        page = run.folder / PAGE
        has_page = page.exists() and page.resolve() != target.resolve()
        name = _link(page, run.name, target) if has_page else escape(run.name)
        states.append(f"<li>{swatch(colour(i))}{name}: {escape(verdict(run)[1])}</li>")
    title = f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    head = f'<h1>{len(runs)} runs</h1><ul class="list plain">{"".join(states)}</ul>'
    hint = f"{to_run_sh('python -m jaxtrain receipt diff')} A B names the differences between two of them, also of their data."
    return title, title, head + paragraph(hint, "quiet")


class OpenRun(RunFolder):
    """A run as the Python API returns it: it shows itself as its page, and has the profile of its newest trace."""

    def __repr__(self) -> str:
        return f"{self.name} ({self.folder}): {verdict(self)[1]}"

    def _repr_html_(self) -> str:
        """Return the page of `python -m jaxtrain report` in an HTML frame, for a notebook."""
        return frame_page(run_html([self]))

    def profile(self) -> StepProfile:
        """Return the profile of the run's newest trace. Raises TraceError if there is no trace."""
        return newest_profile(self)

    def write_report(self, file: str | Path = "") -> Path:
        """Write the HTML report, by default report.html in the run's folder. Return the path of the page."""
        target = Path(file).expanduser() if file else self.folder / PAGE
        write_atomic(target, run_html([self], target))
        return target


# ---- Curves


class Series(NamedTuple):
    """Values of one run by step. times: Unix seconds of each step; None: the times of the train lines."""

    steps: Sequence[int]
    values: Sequence[Any]
    times: Sequence[float] | None = None


class Charts:
    """The line charts of one page: runs, their colours, and the x axes that all charts share."""

    def __init__(self, runs: Sequence[RunFolder]):
        self.runs = runs
        unit, self._seconds = unit_of(max(run.positions([run.last_step])[2][0] for run in runs))
        self.axes = ("step", "tokens", f"time, {unit}")
        losses = [[v for v in run.train["loss"] if is_number(v)] for run in runs]
        # The page begins with log scales if a run's highest loss is at least LOG_FROM times its lowest.
        self.log = any(values and min(values) > 0 and max(values) / min(values) >= LOG_FROM for values in losses)

    def show(self, *charts: LineChart) -> Drawing:
        """Return HTML with charts next to each other. Charts without values are left out."""
        points, several = max(LEAST_COLUMNS, COLUMNS // len(self.runs)), len(self.runs) > 1
        drawn = "".join(draw_chart(dataclasses.replace(chart, with_legend=several), self.axes, points) for chart in charts)
        return Drawing(f'<div class="figures">{drawn}</div>' if drawn else "")

    def curve(self, run: RunFolder, name: str, series: Series, **style: str) -> Curve:
        """Return the curve of a series over all x axes. style: `colour` and `kind` of the curve."""
        step, tokens, seconds = run.positions(series.steps, series.times)
        return Curve(name, (step, tokens, [s / self._seconds for s in seconds]), series.values, **style)

    def curves(self, series_by_run: Sequence[Mapping[str, Series]]) -> list[Curve]:
        """Return a curve for each series of a single run; for several runs, a curve for the first series of each run.

        series_by_run: for each run, name of a curve -> its series.
        """
        if len(self.runs) == 1:
            return [self.curve(self.runs[0], *item, colour=colour(n)) for n, item in enumerate(series_by_run[0].items())]
        return [
            self.curve(run, run.name, next(iter(series.values())), colour=colour(i))
            for i, (run, series) in enumerate(zip(self.runs, series_by_run, strict=True))
            if series
        ]

    def metric_charts(self, section: str, kind: str = "") -> list[LineChart]:
        """Return the charts of a section of METRICS. With several runs, a chart has its first metric alone."""
        charts: dict[Chart, dict[str, Metric]] = {}
        for name, metric in METRICS.items():
            if metric.chart and metric.chart.section == section:
                charts.setdefault(metric.chart, {})[name] = metric
        return [self._chart(chart, metrics, kind) for chart, metrics in charts.items()]

    def _chart(self, chart: Chart, metrics: Mapping[str, Metric], kind: str) -> LineChart:
        title, first = chart.title, next(iter(metrics))
        if len(self.runs) > 1 and len(metrics) > 1:
            title = f"{metrics[first].curve}, {title.rpartition(', ')[2]}"
            metrics = {first: metrics[first]}
        series_by_run = [
            {
                metric.curve: Series(run.train.steps, [None if v is None else v * metric.factor for v in run.train[name]])
                for name, metric in metrics.items()
                if any(is_number(v) for v in run.train[name])
            }
            for run in self.runs
        ]
        curves = self.curves(series_by_run)
        limits = planned_limits(self.runs[0]) if len(self.runs) == 1 and curves else {}
        for label, value in (pair for name in metrics for pair in limits.get(name, ())):
            ends = [[axis[0], axis[-1]] for axis in curves[0].x]
            curves.append(Curve(f"{label} {float(f'{value:.4g}'):,.10g}", ends, [value, value], "var(--ink)", "limit"))
        return LineChart(title, curves, chart.zero, chart.log, kind)

    def losses(self) -> list[LineChart]:
        """Return the chart of the loss, and with several runs one of each held-out set."""
        single = len(self.runs) == 1
        loss, held_out = [], []
        for i, run in enumerate(self.runs):
            name, raw = "train" if single else run.name, run.train["loss"]
            for kind, label, values in (("raw", name, raw), ("smooth", f"{name}{SMOOTHED}", smooth(raw))):
                loss.append(self.curve(run, label, Series(run.train.steps, values), colour=colour(i), kind=kind))
        for n, name in enumerate(dict.fromkeys(name for run in self.runs for name in run.evals)):
            title = f"held-out {name}".rstrip()
            sets = [run.evals.get(name) for run in self.runs]
            series_by_run = [{title: Series(c.steps, c["loss"])} if c else {} for c in sets]
            if single:
                loss.append(self.curve(self.runs[0], title, series_by_run[0][title], colour=colour((4, 1, 3, 2, 5)[n % 5])))
            else:
                held_out.append(LineChart(f"{title[:1].upper()}{title[1:]} loss", self.curves(series_by_run), log=True))
        return [LineChart(f"Loss, {METRICS['loss'].unit}", loss, log=True, kind="first"), *held_out]

    def gpus(self) -> Drawing:
        """Return charts of NVML's measurements: for one run, mean and range over its GPUs; else the mean of each run."""
        charts = []
        for name, metric in GPU.items():
            if metric.chart is None:
                continue
            series_by_run = []
            for run in self.runs:
                steps, times, *values = list(zip(*moments(run, name), strict=True)) or [()] * 5
                mean, low, high = (Series(steps, [v * metric.factor for v in values[n]], times) for n in (1, 0, 2))
                series_by_run.append({"mean": mean, "lowest GPU": low, "highest GPU": high} if steps else {})
            title = metric.chart.title if len(self.runs) == 1 else f"{metric.chart.title}, mean"
            charts.append(LineChart(title, self.curves(series_by_run), metric.chart.zero))
        return self.show(*charts)


def colour(i: int) -> str:
    """Return the CSS colour of run `i`, or of curve `i` on the page of a single run."""
    return f"var(--c{i % MANY + 1})"


def planned_limits(run: RunFolder) -> dict[str, list[tuple[str, float]]]:
    """Return name of a metric -> (label, value) of each planned value of a run."""
    plan = run.receipt.get("planned") or {}
    limits: dict[str, list[tuple[str, float]]] = {"step_time_s": []}
    if plan.get("range_s"):
        limits["step_time_s"] = [("planned, fastest", plan["range_s"][0]), ("planned, slowest", plan["range_s"][1])]
    elif plan.get("step_s"):
        limits["step_time_s"] = [("roofline", plan["step_s"])]
    if run.tokens_per_step:
        per_device = run.tokens_per_step / run.devices
        limits["tokens_per_s_per_device"] = [(name, per_device / s) for name, s in limits["step_time_s"]]
    if plan.get("peak_gib"):
        limits["peak_memory_gib"] = [("planned", plan["peak_gib"])]
    return limits


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """Return the centered moving average. None, NaN and infinities do not count in the means, and are None in the result."""
    reach = min(MOST, len(values) // SMOOTH)
    finite = [v if is_number(v) else None for v in values]
    # Sums of integers are exact. In floats, one loss of 1e30 would erase the digits of all later sums.
    sums = list(itertools.accumulate((int((v or 0.0) * UNIT) for v in finite), initial=0))
    counts = list(itertools.accumulate((v is not None for v in finite), initial=0))
    out: list[float | None] = []
    for i, v in enumerate(finite):
        low, high = max(0, i - reach), min(len(finite), i + reach + 1)
        out.append(None if v is None else (sums[high] - sums[low]) / (counts[high] - counts[low]) / UNIT)
    return out


def moments(run: RunFolder, quantity: str) -> list[tuple[int, float, float, float, float]]:
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


# ---- Wall time


def wall_time(runs: Sequence[RunFolder]) -> Section:
    """Return the section of the wall time by cause: a lane in order of time for each run, and one table of all runs.

    Shares are of the same time as goodput, without "stopped".
    """
    spent_by_run = [(run.name, spent) for run in runs if (spent := run.wall_time) and spent.wall_s > 0]
    if not spent_by_run:
        return Section("Wall time", [])
    causes = [cause for cause in goodput.CAUSES if any(spent.seconds[cause] for _, spent in spent_by_run)]
    total = "all but stopped" if "stopped" in causes else "all"
    columns = [Column("cause", causes, None, total, kind="whole", colours=[COLOURS[cause] for cause in causes])]
    words, single = [], len(runs) == 1
    for name, spent in spent_by_run:
        seconds = [spent.seconds[cause] for cause in causes]
        heading = "seconds" if single else f"{name}, s"
        columns.append(Column(heading, [f"{s:,.1f}" for s in seconds], seconds, f"{spent.wanted_s:,.1f}"))
        shares = [spent.seconds[cause] / spent.wanted_s if cause != "stopped" and spent.wanted_s else None for cause in causes]
        columns.append(Column("share", [percent(share) for share in shares], [share or 0.0 for share in shares], percent(1.0)))
        text = goodput.format_goodput(spent)
        words.append(f"{text[:1].upper()}{text[1:]}." if single else f"{name}: {text}.")
    columns.append(Column("meaning", [goodput.MEANING[cause] for cause in causes]))
    unit, size = unit_of(max(spent.wall_s for _, spent in spent_by_run))
    drawn = lanes("Wall time in order, by cause", {name: wall_time_events(spent, size) for name, spent in spent_by_run}, unit)
    return Section("Wall time", [*words, Drawing(drawn), Table("Wall time by cause", columns, style="sortable")])


def wall_time_events(spent: Goodput, size: float) -> list[tuple[float, float, str, str]]:
    """Return the wall time as events for `charts.lanes`: the longest cause of each of STRETCHES equal intervals.

    size: seconds of the unit of the events' times.
    """
    start, length = spent.spans[0].start, spent.wall_s / STRETCHES
    shares = [dict.fromkeys(COLOURS, 0.0) for _ in range(STRETCHES)]
    for span in spent.spans:
        first, last = (span.start - start) / length, (span.end - start) / length
        for i in range(int(first), min(STRETCHES - 1, int(last)) + 1):
            inside = max(0.0, min(last, i + 1) - max(first, i))
            for cause, seconds in span.seconds.items():
                shares[i][cause] += seconds / length * inside / (last - first) if last > first else 0.0
    events, end = [], 0
    for cause, group in itertools.groupby(max(share, key=share.__getitem__) for share in shares):
        begin, end = end, end + len(list(group))
        if COLOURS[cause]:
            tip = f"mostly {cause}, {duration(begin * length)} to {duration(end * length)} from the start"
            events.append((begin * length / size, end * length / size, COLOURS[cause], tip))
    return events


# ---- One run


def loss_text(value: float | None) -> str:
    """Return a loss as text with four decimals; NaN and infinities by name."""
    return "-" if value is None else f"{value:.4f}" if math.isfinite(value) else str(value)


def _tiles(run: RunFolder) -> list[tuple[str, str, str]]:
    """Return (name, value, note) of each figure that the run has."""
    rates = run.rates
    cells = [("step", f"{run.last_step:,}", f"of {run.steps:,}" if run.steps else "")]
    if run.train.steps:
        held_out = ", ".join(f"{name or 'held-out'} {loss_text(lines['loss'][-1])}" for name, lines in run.evals.items())
        cells.append(("loss", loss_text(run.train["loss"][-1]), held_out or METRICS["loss"].unit))
    if run.train.steps and (tokens := run.train["tokens"][-1]):
        tokens_note = f"of {short_count(run.tokens_in_all)}" if run.tokens_in_all else "seen"
        cells.append(("tokens", short_count(tokens), tokens_note))
    if (per_device := rates["tokens_per_s_per_device"]) is not None:
        note = f"{number(per_device, 0)} per device; median" if run.devices > 1 else "median"
        cells.append(("tokens/s", number(per_device * run.devices, 0), f"{note} without the first fifth"))
    if (step_s := rates["step_time_s"]) is not None:
        cells.append(("step time", f"{step_s:.3g} s", "median"))
    if (mfu := rates["mfu_causal"]) is not None:
        cells.append(("MFU, causal", percent(mfu), f"full {percent(rates['mfu_full'])}, HFU {percent(rates['hfu'])}"))
    if (peak := rates["peak_memory_gib"]) is not None:
        plan = (run.receipt.get("planned") or {}).get("peak_gib")
        cells.append(("peak memory", size(peak), f"planned {size(plan)}" if plan else "fullest device"))
    if spent := run.wall_time:
        stopped = f", and {duration(spent.seconds['stopped'])} stopped" if spent.seconds["stopped"] else ""
        cells.append(("elapsed", duration(spent.wanted_s), f"goodput {percent(spent.goodput)}{stopped}"))
    return cells


def newest_profile(run: RunFolder) -> StepProfile:
    """Return the profile of the run's newest trace. Raises TraceError if there is no trace."""
    return load_profile(profile_trace.find_traces(run.folder)[-1], run)


def _lost_time(run: RunFolder) -> Section:
    """Return the section with the causes of lost time, from the newest trace if there is one."""
    unread = []
    if any(run.folder.rglob("*.xplane.pb")):
        try:
            return lost_time_section(newest_profile(run).lost)
        except ValueError as error:  # TraceError and HloError are subclasses
            unread = [f"The newest trace is left out: {error}"]
    lost = lost_time(None, run)
    return lost_time_section(dataclasses.replace(lost, missing=(*unread, *lost.missing)))


def _evaluations(run: RunFolder) -> Section:
    """Return the section with the newest evaluation and the lowest loss of each held-out set."""
    sets = list(run.evals.values())
    custom_loss = any(c["cross_entropy"][-1] is not None for c in sets)  # the loss is a user's own
    lowest = [min(((v, s) for v, s in zip(c["loss"], c.steps, strict=True) if v == v), default=None) for c in sets]
    columns = [
        Column("set", [name or "held-out" for name in run.evals], kind="whole"),
        Column("step", [f"{c.steps[-1]:,}" for c in sets], kind="number"),
        *([Column("weights", [c["weights"][-1] or "-" for c in sets])] if any(c["weights"][-1] for c in sets) else []),
        Column("loss", [loss_text(c["loss"][-1]) for c in sets], kind="number"),
        *([Column("cross entropy", [loss_text(c["cross_entropy"][-1]) for c in sets], kind="number")] if custom_loss else []),
        Column("bits per byte", [number(c["bits_per_byte"][-1], 4) for c in sets], kind="number"),
        Column("perplexity", [number(c["perplexity"][-1]) for c in sets], kind="number"),
        Column("lowest loss", [f"{low[0]:.4f} at step {low[1]:,}" if low else "-" for low in lowest], kind="number"),
    ]
    return Section("Evaluation", [Table("Newest evaluations", columns)])


def _link(path: Path, words: str, target: Path) -> str:
    url = quote(Path(os.path.relpath(path.resolve(), target.resolve().parent)).as_posix())
    return f'<a href="./{url}">{escape(words)}</a>'


def _links(run: RunFolder, target: Path) -> str:
    """Return links to other pages in the run's folder, such as plan.html."""
    paths = sorted((*run.folder.glob("*.html"), *run.folder.glob("profile/*.html")))
    links = [_link(path, str(path.relative_to(run.folder)), target) for path in paths if path.resolve() != target.resolve()]
    return f'<p class="links">Pages: {", ".join(links)}</p>' if links else ""


def _warnings(run: RunFolder, title: str) -> Section:
    earlier = len(run.alerts) - WARNINGS
    more = [f"{plural(earlier, 'earlier warning')} in log.txt"] if earlier > 0 else []
    return Section(title, [Listing([*more, *run.alerts[-WARNINGS:]], "warning")])


def _sample(run: RunFolder, s: Any, single: bool) -> str:
    name = f"{'' if single else f'{run.name}, '}step {s.step:,}{f', prompt {s.prompt}' if s.prompt else ''}"
    text = s.text if len(s.text) <= SAMPLE else f"{s.text[:SAMPLE]} ... ({len(s.text):,} characters in samples.txt)"
    return f"{paragraph(name, 'quiet')}<pre>{escape(text)}</pre>"


def _gpus(run: RunFolder) -> list[Table]:
    """Return a table with the newest values of each GPU, and the GPU's throttling over the run; [] without values."""
    every: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in sorted(run.gpu, key=lambda line: (line["process"], line["gpu"])):
        every.setdefault((line["process"], line["gpu"]), []).append(line)
    if not every:
        return []
    newest = []
    for lines in every.values():
        shares = [line["throttled"] for line in lines if line.get("throttled") is not None]
        reasons = dict.fromkeys(r for line in lines for r in (line.get("throttle_reasons") or "").split("+") if r)
        newest.append(lines[-1] | {"throttled": statistics.fmean(shares) if shares else None, "reasons": "+".join(reasons)})
    several = len({process for process, _ in every}) > 1
    columns = [Column("GPU", [f"{process}.{gpu}" if several else str(gpu) for process, gpu in every])]
    for name, metric in GPU.items():
        values = [line.get(name) for line in newest]
        if metric.curve and any(v is not None for v in values):
            scaled = [(v or 0.0) * metric.factor for v in values]
            cells = [c if v is not None else "-" for c, v in zip(column(scaled), values, strict=True)]
            columns.append(Column(metric.curve, cells, scaled))
        if name == "throttled" and any(line["reasons"] for line in newest):
            columns.append(Column("throttled by", [line["reasons"] for line in newest]))
    note = "throttled: over the run" if any(c.heading == GPU["throttled"].curve for c in columns) else ""
    title = "; ".join(filter(None, (f"Each GPU at step {newest[-1]['step']:,}", note)))
    return [Table(title, columns, style="sortable")]


def _receipt(run: RunFolder) -> list[str | Table | Drawing]:
    """Return the parts of the receipt: overrides of the config, main facts, attempts if several; other fields, folded."""
    if not run.receipt:
        return []
    every = [(name, value) for name, value in receipt_rows(run) if not name.startswith(ELSEWHERE)]
    first = {name: value for name, value in every if name.startswith(FIRST)}
    remaining = {name: value for name, value in every if name not in first}
    overrides = run.receipt.get("overrides") or {}
    folded_parts = [
        collapsible("All other fields of the receipt", html_table(_pairs("Fields of receipt.json", remaining))),
        collapsible("The resolved config", html_table(_pairs("Keys of config.json", dict(flatten(run.config))))),
    ]
    return [
        _pairs("Overrides of the config", overrides) if overrides else "No key of the config was overridden.",
        _pairs("What ran", first),
        *(_attempts(run) if len(run.attempts) > 1 else ()),
        Drawing("".join(folded_parts)),
    ]


def _pairs(caption: str, rows: Mapping[str, Any]) -> Table:
    columns = [Column("name", list(rows), kind="whole"), Column("value", [str(v) for v in rows.values()], kind="path")]
    return Table(caption, columns, style="pairs")


def _attempts(run: RunFolder) -> list[Table]:
    ends = []
    for a in run.attempts:
        code, alive = a.get("exit_code"), run.alive and a is run.attempts[-1]
        means = f"{code}, {a.get('reason')}{f' ({EXIT_CODES[code]})' if code in EXIT_CODES else ''}"
        ends.append(means if code is not None else "running" if alive else "killed: the receipt has no end")
    resumed = [a.get("resumed_from_step") or 0 for a in run.attempts]
    times = [[(a.get(name) or "-")[:19].replace("T", " ") for a in run.attempts] for name in ("started", "ended")]
    columns = [
        Column("attempt", [str(i) for i in range(1, len(ends) + 1)]),
        Column("started", times[0], kind="whole"),
        Column("ended", times[1], kind="whole"),
        Column("from step", [f"{step:,}" for step in resumed], resumed),
        Column("exit code", ends, kind="path"),
    ]
    return [Table("Attempts", columns)]
