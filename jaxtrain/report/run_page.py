"""The page of one run, or of several runs compared. It is complete without scripts and needs no network."""

import os
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jaxtrain.config.counts import short_count
from jaxtrain.config.durations import duration
from jaxtrain.config.numbers import column, number, percent, plural, size
from jaxtrain.config.schema import flatten
from jaxtrain.report import run_compare
from jaxtrain.report.charts import controls
from jaxtrain.report.html import document, folded, paragraph, swatch, tiles
from jaxtrain.report.receipt import rows
from jaxtrain.report.run_charts import MANY, MEMORY, SPEED, Charts, colour, wall_time
from jaxtrain.report.run_files import EXIT_CODES, PAGE, Run, RunError, verdict
from jaxtrain.report.sections import Column, Drawing, Listing, Section, Table, html_sections, html_table

WARNINGS = 30  # most warnings of a run; the newest are shown
SAMPLE = 1_500  # most characters of a sample
ELSEWHERE = ("rates", "goodput", "held_out")  # fields of the receipt that have separate sections
FIRST = ("command", "config", "code.commit", "code.dirty", "host", "devices", "mesh", "attention", "data.source")
GPU = (  # (heading, key, factor)
    ("used %", "utilization", 100),
    ("W", "power_w", 1),
    ("limit W", "power_limit_w", 1),
    ("°C", "temperature_c", 1),
    ("throttled %, of the run", "throttled", 100),
    ("SM MHz", "sm_clock_mhz", 1),
    ("memory MHz", "memory_clock_mhz", 1),
    ("used GiB", "memory_used_gib", 1),
    ("in use GiB", "in_use_gib", 1),
    ("NVLink sent GB/s", "nvlink_tx_gb_s", 1),
    ("received GB/s", "nvlink_rx_gb_s", 1),
    ("ECC uncorrected", "ecc_uncorrected", 1),
)


def html(runs: Sequence[Run], target: Path = Path("report.html")) -> str:
    """Return the page as HTML. Raises RunError for more than MANY runs.

    Args:
        target: path of the page. Links to other pages are relative to its folder.
    """
    if len(runs) > MANY:
        raise RunError(f"RUN = {len(runs)} runs: a page compares at most {MANY}. Fix: name fewer.")
    one = len(runs) == 1
    if one:
        kind, text = verdict(runs[0])
        devices = runs[0].receipt.get("devices")
        parts = (
            runs[0].receipt.get("config"),
            devices and f"{devices['count']} x {', '.join(devices['kind'])}",
            str(runs[0].folder),
        )
        title, described = f"{runs[0].name}: {text}", f"Report of a training run: {text}"
        head = f"<h1>{escape(runs[0].name)}</h1>{paragraph('; '.join(filter(None, parts)), 'quiet')}"
        head += f'<p class="verdict {kind}">{escape(text)}</p>'
    else:
        title = described = f"{len(runs)} runs compared: {', '.join(run.name for run in runs)}"
        states = [f"<li>{swatch(colour(i))}{_name(run, target)}: {escape(verdict(run)[1])}</li>" for i, run in enumerate(runs)]
        head = f'<h1>{len(runs)} runs compared</h1><ul class="list plain">{"".join(states)}</ul>'
    charts = Charts(runs)
    body = [
        f"<header>{head}</header><main>",
        tiles(_tiles(runs[0])) if one else "",
        *html_sections([] if one else [run_compare.results(runs)]),
        *(paragraph(f"{'' if one else f'{run.name}: '}{note}") for run in runs for note in run.notes),
        "".join(_links(run, target, one) for run in runs),
        *html_sections([_warnings(run, "Warnings" if one else f"Warnings of {run.name}") for run in runs]),
    ]
    sections = [wall_time(runs), Section("GPUs", [charts.gpus(), *(_gpus(runs[0]) if one else ())])]
    if any(run.train.steps for run in runs):
        body.append(controls(charts.axes, log=charts.log_at_first()))
        evaluations = [_evaluations(runs[0])] if one else []
        rates = charts.show(*(charts.of_keys(*row, zero=True) for row in SPEED))
        memory = charts.show(*(charts.of_keys(*row, zero=True, kind="first") for row in MEMORY))
        sections = [charts.training(), *evaluations, Section("Throughput", [rates]), Section("Memory", [memory]), *sections]
    sections.append(Section("Samples", [Drawing(_sample(run, s, one)) for run in runs for s in run.samples]))
    sections.append(Section("Differences", [part for run in runs[1:] for part in run_compare.differences(runs[0], run)]))
    sections.append(Section("Receipt", _receipt(runs[0]) if one else []))
    return document(title, described, [*body, *html_sections(sections), "</main>"])


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """Return (name, value, note) of each figure that the run has."""
    figure = run.figure
    per_device, step_s, mfu = map(figure, ("tokens_per_s_per_device", "step_time_s", "mfu_causal"))
    cells = [("step", f"{run.last_step:,}", f"of {run.steps:,}" if run.steps else "")]
    if run.train.steps:
        held_out = ", ".join(f"{name or 'held-out'} {run_compare.loss(lines['loss'][-1])}" for name, lines in run.evals.items())
        cells.append(("loss", run_compare.loss(run.train["loss"][-1]), held_out or "nats per token"))
    if run.train.steps and (tokens := run.train["tokens"][-1]):
        of = f"of {short_count(run.steps * run.tokens_per_step)}" if run.steps and run.tokens_per_step else "seen"
        cells.append(("tokens", short_count(tokens), of))
    if per_device is not None:
        devices = (run.receipt.get("devices") or {}).get("count", 1)
        window = f"{number(per_device, 0)} per device; median" if devices > 1 else "median"
        cells.append(("tokens/s", number(per_device * devices, 0), window))
    if step_s is not None:
        cells.append(("step time", f"{step_s:.3g} s", "median"))
    if mfu is not None:
        cells.append(("MFU, causal", percent(mfu), f"full {percent(figure('mfu_full'))}, HFU {percent(figure('hfu'))}"))
    if (peak := figure("peak_memory_gib")) is not None:
        planned = (run.receipt.get("planned") or {}).get("peak_gib")
        cells.append(("peak memory", size(peak), f"planned {size(planned)}" if planned else "fullest device"))
    if found := run.wall_time:
        stopped = f", and {duration(found.parts['stopped'])} stopped" if found.parts["stopped"] else ""
        cells.append(("elapsed", duration(found.wanted_s), f"goodput {percent(found.goodput)}{stopped}"))
    return cells


def _evaluations(run: Run) -> Section:
    """Return the section with the newest evaluation and the lowest loss of each held-out set."""
    sets = list(run.evals.values())
    own = any(c["cross_entropy"][-1] is not None for c in sets)  # the loss is a user's own
    lowest = [min(((v, s) for v, s in zip(c["loss"], c.steps, strict=True) if v == v), default=None) for c in sets]
    columns = [
        Column("set", [name or "held-out" for name in run.evals], kind="whole"),
        Column("step", [f"{c.steps[-1]:,}" for c in sets], kind="number"),
        Column("loss", [run_compare.loss(c["loss"][-1]) for c in sets], kind="number"),
        *([Column("cross entropy", [run_compare.loss(c["cross_entropy"][-1]) for c in sets], kind="number")] if own else []),
        Column("bits per byte", [number(c["bits_per_byte"][-1], 4) for c in sets], kind="number"),
        Column("perplexity", [number(c["perplexity"][-1]) for c in sets], kind="number"),
        Column("lowest loss", [f"{low[0]:.4f} at step {low[1]:,}" if low else "-" for low in lowest], kind="number"),
    ]
    return Section("Evaluation", [Table("Newest evaluations", columns)])


def _name(run: Run, target: Path) -> str:
    """Return a run's name as HTML, with a link to its own page if it has one."""
    page = run.folder / PAGE
    return _link(page, run.name, target) if page.exists() and page.resolve() != target.resolve() else escape(run.name)


def _link(path: Path, words: str, target: Path) -> str:
    place = quote(Path(os.path.relpath(path.resolve(), target.resolve().parent)).as_posix())
    return f'<a href="./{place}">{escape(words)}</a>'


def _links(run: Run, target: Path, one: bool) -> str:
    """Return links to other pages in the run's folder, such as plan.html. one: whether the page has a single run."""
    paths = sorted((*run.folder.glob("*.html"), *run.folder.glob("profile/*.html")))
    links = [_link(path, str(path.relative_to(run.folder)), target) for path in paths if path.resolve() != target.resolve()]
    return f'<p class="links">{"Pages" if one else escape(run.name)}: {", ".join(links)}</p>' if links else ""


def _warnings(run: Run, title: str) -> Section:
    earlier = len(run.alerts) - WARNINGS
    more = [f"{plural(earlier, 'earlier warning')} in log.txt"] if earlier > 0 else []
    return Section(title, [Listing([*more, *run.alerts[-WARNINGS:]], "warning")])


def _sample(run: Run, s: Any, one: bool) -> str:
    name = f"{'' if one else f'{run.name}, '}step {s.step:,}{f', prompt {s.prompt}' if s.prompt else ''}"
    text = s.text if len(s.text) <= SAMPLE else f"{s.text[:SAMPLE]} ... ({len(s.text):,} characters in samples.txt)"
    return f"{paragraph(name, 'quiet')}<pre>{escape(text)}</pre>"


def _gpus(run: Run) -> list[Table]:
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
    for heading, name, factor in GPU:
        values = [line.get(name) for line in newest]
        if any(v is not None for v in values):
            scaled = [(v or 0.0) * factor for v in values]
            cells = [c if v is not None else "-" for c, v in zip(column(scaled), values, strict=True)]
            columns.append(Column(heading, cells, scaled))
        if name == "throttled" and any(line["reasons"] for line in newest):
            columns.append(Column("throttled by", [line["reasons"] for line in newest]))
    return [Table(f"Each GPU at step {newest[-1]['step']:,}", columns, style="sortable")]


def _receipt(run: Run) -> list[str | Table | Drawing]:
    """Return the parts of the receipt: overrides of the config, main facts, attempts if several; other fields, folded."""
    if not run.receipt:
        return []
    every = [(name, value) for name, value in rows(run) if not name.startswith(("overrides", *ELSEWHERE))]
    first = {name: value for name, value in every if name.startswith(FIRST)}
    rest = {name: value for name, value in every if name not in first}
    overrides = run.receipt.get("overrides") or {}
    other = [
        folded("All other fields of the receipt", html_table(_pairs("Fields of receipt.json", rest))),
        folded("The resolved config", html_table(_pairs("Keys of config.json", dict(flatten(run.config))))),
    ]
    return [
        _pairs("Overrides of the config", overrides) if overrides else "No key of the config was overridden.",
        _pairs("What ran", first),
        *(_attempts(run) if len(run.attempts) > 1 else ()),
        Drawing("".join(other)),
    ]


def _pairs(caption: str, rows: Mapping[str, Any]) -> Table:
    columns = [Column("name", list(rows), kind="whole"), Column("value", [str(v) for v in rows.values()], kind="path")]
    return Table(caption, columns, style="pairs")


def _attempts(run: Run) -> list[Table]:
    ends = []
    for a in run.attempts:
        code, alive = a.get("exit_code"), run.alive and a is run.attempts[-1]
        means = f"{code}, {a.get('reason')}{f' ({EXIT_CODES[code]})' if code in EXIT_CODES else ''}"
        ends.append(means if code is not None else "running" if alive else "killed: the receipt has no end")
    resumed = [a.get("resumed_from_step") or 0 for a in run.attempts]
    columns = [
        Column("attempt", [str(i) for i in range(1, len(ends) + 1)]),
        Column("started", [_time(a.get("started")) for a in run.attempts], kind="whole"),
        Column("ended", [_time(a.get("ended")) for a in run.attempts], kind="whole"),
        Column("from step", [f"{step:,}" for step in resumed], resumed),
        Column("exit code", ends, kind="path"),
    ]
    return [Table("Attempts", columns)]


def _time(text: str | None) -> str:
    return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S") if text else "-"
