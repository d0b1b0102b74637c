"""The page of one run, or of several runs compared. It is complete without scripts and needs no network."""

import os
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jaxtrain.config import flatten
from jaxtrain.page.html import Column, bullets, document, folded, paragraph, plural, section, swatch, table, tiles
from jaxtrain.page.lines import controls
from jaxtrain.page.numbers import column, number, percent, size
from jaxtrain.receipt.format import rows
from jaxtrain.report import compare
from jaxtrain.report.charts import MANY, MEMORY, SPEED, Charts, colour, hours, wall_time
from jaxtrain.report.run import EXIT_CODES, Run, RunError, verdict

WARNINGS = 30  # the newest of a run
SAMPLE = 1_500  # characters of a sample
ELSEWHERE = ("loss_at", "goodput", "held_out")  # fields with sections of their own
FIRST = ("command", "config", "source.commit", "source.dirty", "host.name", "devices", "mesh", "attention", "data.source")
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
    """Return the page. Raises RunError for more runs than there are colours.

    Args:
        target: the page's file, from which links to other pages start.
    """
    if len(runs) > MANY:
        raise RunError(f"RUN = {len(runs)} runs: a page compares at most {MANY}. Fix: name fewer.")
    one = len(runs) == 1
    if one:
        kind, text = verdict(runs[0])
        title, described = f"{runs[0].name}: {text}", f"Report of a training run: {text}"
        parts = (runs[0].receipt.get("config"), runs[0].devices, str(runs[0].folder))
        head = f"<h1>{escape(runs[0].name)}</h1>{paragraph('; '.join(filter(None, parts)), 'quiet')}"
        head += f'<p class="verdict {kind}">{escape(text)}</p>'
        first = [tiles(_tiles(runs[0]))]
    else:
        names = ", ".join(run.name for run in runs)
        title = described = f"{len(runs)} runs compared: {names}"
        states = [f"<li>{swatch(colour(i))}{escape(f'{run.name}: {verdict(run)[1]}')}</li>" for i, run in enumerate(runs)]
        head = f'<h1>{len(runs)} runs compared</h1><ul class="list plain">{"".join(states)}</ul>'
        first = [compare.results(runs)]
    charts = Charts(runs)
    trained = any(run.train.steps for run in runs)
    body = [
        f"<header>{head}</header><main>",
        *first,
        *(paragraph(f"{'' if one else f'{run.name}: '}{note}") for run in runs for note in run.notes),
        "".join(_links(run, target, one) for run in runs),
        *(_warnings(run, "Warnings" if one else f"Warnings of {run.name}") for run in runs),
        controls(charts.axes, log=charts.log_at_first(), smooth=True) if trained else "",
        section("Training", charts.training() if trained else ""),
        section("Evaluation", _evaluations(runs[0])) if one else "",
        section("Throughput", charts.rows(SPEED) if trained else ""),
        section("Memory", charts.rows(MEMORY, "first") if trained else ""),
        section("Wall time", wall_time(runs)),
        section("GPUs", charts.gpus(), _gpus(runs[0]) if one else ""),
        section("Samples", *(_sample(run, s, one) for run in runs for s in run.samples)),
        section("Differences", *(compare.differences(runs[0], run) for run in runs[1:])),
        section("Receipt", _receipt(runs[0])) if one else "",
        "</main>",
    ]
    return document(title, described, body)


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """Return (name, value, note) of the figures that the run has."""
    held_out = ", ".join(f"{name or 'held-out'} {compare.loss(lines['loss'][-1])}" for name, lines in run.evals.items())
    window = run.figure("speed.window")
    median = f"median of steps {window['first_step']:,} to {window['last_step']:,}" if window else ""
    found, planned = run.goodput(), (run.receipt.get("planned") or {}).get("peak_gib")
    per_device, step_s, mfu = (
        run.figure(f"speed.{x}") for x in ("tokens_per_s_per_device", "step_time_s.median", "mfu_causal")
    )
    full = f"full {percent(run.figure('speed.mfu_full'))}, HFU {percent(run.figure('speed.hfu'))}"
    peak = run.figure("memory.peak_gib")
    cells = [
        ("step", f"{run.last_step:,}", f"of {run.steps:,}" if run.steps else "", True),
        ("loss", compare.loss(run.train["loss"][-1]) if run.train.steps else "-", held_out or "nats per token", run.last_step),
        ("tokens/s/device", number(per_device, 0), median, per_device),
        ("step time", f"{step_s or 0.0:.3g} s", "median", step_s),
        ("MFU, causal", percent(mfu), full, mfu),
        ("peak memory", size(peak or 0.0), f"planned {size(planned)}" if planned else "fullest device", peak),
        ("goodput", percent(found.goodput), f"of {hours(found.wall_s - found.parts['stopped'])}", True) if found else None,
    ]
    return [cell[:3] for cell in cells if cell and cell[3] is not None]


def _evaluations(run: Run) -> str:
    """Return the newest evaluation of each held-out set, and its lowest loss."""
    sets = list(run.evals.values())
    lowest = [min(((v, s) for v, s in zip(c["loss"], c.steps, strict=True) if v == v), default=None) for c in sets]
    columns = [
        Column("set", [name or "held-out" for name in run.evals], kind="whole"),
        Column("step", [f"{c.steps[-1]:,}" for c in sets], kind="number"),
        Column("loss", [compare.loss(c["loss"][-1]) for c in sets], kind="number"),
        Column("bits per byte", [number(c["bits_per_byte"][-1], 4) for c in sets], kind="number"),
        Column("perplexity", [number(c["perplexity"][-1]) for c in sets], kind="number"),
        Column("lowest loss", [f"{low[0]:.4f} at step {low[1]:,}" if low else "-" for low in lowest], kind="number"),
    ]
    return table("Newest evaluations", columns)


def _links(run: Run, target: Path, one: bool) -> str:
    """Return links to other pages in the run's folder, such as plan.html and profile.html."""
    links = []
    for path in sorted((*run.folder.glob("*.html"), *run.folder.glob("profile/*.html"))):
        if path.resolve() == target.resolve():
            continue
        place = quote(Path(os.path.relpath(path.resolve(), target.resolve().parent)).as_posix())
        links.append(f'<a href="./{place}">{escape(str(path.relative_to(run.folder)))}</a>')
    return f'<p class="links">{"Pages" if one else escape(run.name)}: {", ".join(links)}</p>' if links else ""


def _warnings(run: Run, title: str) -> str:
    earlier = len(run.alerts) - WARNINGS
    more = [f"{plural(earlier, 'earlier warning')} in log.txt"] if earlier > 0 else []
    return bullets(title, [*more, *run.alerts[-WARNINGS:]], "warnings")


def _sample(run: Run, s: Any, one: bool) -> str:
    name = f"{'' if one else f'{run.name}, '}step {s.step:,}{f', prompt {s.prompt}' if s.prompt else ''}"
    text = s.text if len(s.text) <= SAMPLE else f"{s.text[:SAMPLE]} ... ({len(s.text):,} characters in samples.txt)"
    return f"{paragraph(name, 'quiet')}<pre>{escape(text)}</pre>"


def _gpus(run: Run) -> str:
    """Return the newest line of each GPU, and its throttling over the run."""
    every: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in run.gpu:
        every.setdefault((line["process"], line["gpu"]), []).append(line)
    if not every:
        return ""
    lines = []
    for gpu in sorted(every):
        shares = [line["throttled"] for line in every[gpu] if line.get("throttled") is not None]
        lines.append(every[gpu][-1] | {"throttled": statistics.fmean(shares) if shares else None})
    several = len({process for process, _ in every}) > 1
    columns = [Column("GPU", [f"{process}.{gpu}" if several else str(gpu) for process, gpu in sorted(every)])]
    for heading, name, factor in GPU:
        values = [line.get(name) for line in lines]
        if any(v is not None for v in values):
            scaled = [(v or 0.0) * factor for v in values]
            cells = [c if v is not None else "-" for c, v in zip(column(scaled), values, strict=True)]
            columns.append(Column(heading, cells, scaled))
    reasons = [[r for x in every[gpu] for r in (x.get("throttle_reasons") or "").split("+") if r] for gpu in sorted(every)]
    if any(reasons):
        columns.insert(6, Column("throttled by", ["+".join(dict.fromkeys(r)) for r in reasons]))
    return table(f"Each GPU at step {lines[-1]['step']:,}", columns, "sortable")


def _receipt(run: Run) -> str:
    """Return what ran: overrides of the config first, then the main facts, attempts, and everything else folded."""
    if not run.receipt:
        return ""
    every = [(name, value) for name, value in rows(run.opened) if not name.startswith(("overrides", *ELSEWHERE))]
    first = {name: value for name, value in every if name.startswith(FIRST)}
    rest = {name: value for name, value in every if name not in first}
    patch = (run.receipt.get("source") or {}).get("patch")
    overrides = run.receipt.get("overrides") or {}
    none = paragraph("No key of the config was overridden.", "quiet")
    return (
        (_pairs("Overrides of the config", overrides) or none)
        + _pairs("What ran", first)
        + _attempts(run)
        + folded("All other fields of the receipt", _pairs("Fields of receipt.json", rest))
        + folded("Changes that were not committed", f"<pre>{escape(patch)}</pre>" if patch else "")
        + folded("The resolved config", _pairs("Keys of config.json", dict(flatten(run.config))))
    )


def _pairs(caption: str, rows: Mapping[str, Any]) -> str:
    columns = [Column("name", list(rows), kind="whole"), Column("value", [str(v) for v in rows.values()], kind="path")]
    return table(caption, columns)


def _attempts(run: Run) -> str:
    """Return the attempts of a run; "" if there was one."""
    every = run.opened.attempts
    if len(every) < 2:
        return ""
    ends = []
    for a in every:
        code, alive = a.get("exit_code"), run.alive and a is every[-1]
        means = f"{code}, {a.get('reason')}{f' ({EXIT_CODES[code]})' if code in EXIT_CODES else ''}"
        ends.append(means if code is not None else "running" if alive else "killed: the receipt has no end")
    resumed = [a.get("resumed_from_step") or 0 for a in every]
    columns = [
        Column("attempt", [str(i) for i in range(1, len(every) + 1)]),
        Column("started", [_time(a.get("started")) for a in every], kind="whole"),
        Column("ended", [_time(a.get("ended")) for a in every], kind="whole"),
        Column("from step", [f"{step:,}" for step in resumed], resumed),
        Column("exit code", ends, kind="path"),
    ]
    return table("Attempts", columns)


def _time(text: str | None) -> str:
    return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S") if text else "-"
