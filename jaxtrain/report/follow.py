"""A run followed while it trains: a live view on a terminal, elsewhere a line for each of its lines of metrics.

Files are read and nothing else: the run knows nothing of it, and any number may follow it, from any machine that sees its
folder.
"""

import sys
import time
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxtrain import goodput
from jaxtrain.page.numbers import number, percent, size
from jaxtrain.progress import duration, numbers
from jaxtrain.report.figures import loss, middle
from jaxtrain.report.followed import Followed
from jaxtrain.report.run import check, verdict

POLL_S = 0.5
WARNINGS, GPUS = 4, 16  # rows of each; more GPUs than that are one row
BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
PLAIN_BARS = "_.-~=+*#"  # where the terminal has no such characters
SPARK = 48  # characters of the loss


def watch(folder: Path, stream: TextIO | None = None) -> int:
    """Follows the run until it ends; the exit code, 1 where it died without an end. Raises RunError for a folder of no run."""
    followed = Followed(check(folder))
    console = Console(file=stream or sys.stdout, highlight=False)
    return _live(followed, console) if console.is_terminal else _plain(followed, console)


def _live(followed: Followed, console: Console) -> int:
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            followed.poll()
            live.update(view(followed, console), refresh=True)
            if followed.over:
                return int(followed.given_up)
            time.sleep(POLL_S)


def _plain(followed: Followed, console: Console) -> int:
    first, said = True, ""
    while True:
        back, lines = followed.poll()
        if back:
            _print(console, f"the run goes on from step {followed.train[-1]['step'] if followed.train else 0}")
        if (back or first) and lines:  # what was before is in the file; the newest says where the run is
            lines = [line for line in lines if line["kind"] == "train"][-1:]
        for line in lines:
            if text := _line(followed, line):
                _print(console, text)
        first = False
        state = followed.stands
        if followed.over or (followed.run.ended and state != said) or (not followed.run.alive and not said):
            _print(console, state)
            said = state
        elif followed.run.alive:
            said = ""
        if followed.over:
            return int(followed.given_up)
        time.sleep(POLL_S)


def _print(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
    console.file.flush()


def _line(followed: Followed, line: dict[str, Any]) -> str:
    of = f"/{followed.run.steps}" if followed.run.steps else ""
    if line["kind"] == "train":
        return f"step {line['step']}{of}  {numbers(line, followed.left_s)}"
    if line["kind"] == "eval":
        return f"step {line['step']}{of}  held-out {line.get('set', 'loss')} {loss(line['loss'])}"
    return ""  # lines of GPUs are too many to be read


# ---- The live view


def view(followed: Followed, console: Console) -> Group:
    """All that is seen at one moment."""
    run, train = followed.run, followed.train
    kind = {"yes": "green", "no": "red", "": ""}[verdict(run)[0]]
    parts: list[Any] = [Text.assemble((run.name, "bold"), "  ", (followed.stands, kind))]
    if run.steps and train:
        bar = Table.grid(padding=(0, 2))
        left = f"left {duration(followed.left_s)}" if run.alive else ""
        bar.add_row(ProgressBar(run.steps, train[-1]["step"], width=40), f"{train[-1]['step']:,} of {run.steps:,}", left)
        parts.append(bar)
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, text in _rows(followed, console):
        rows.add_row(name, Text(text))
    parts.append(rows)
    if followed.gpus:
        parts.append(_gpus(followed))
    if run.alerts:
        first, more = run.alerts[-WARNINGS:], len(run.alerts) - WARNINGS
        parts.append(Text(f"warnings{f', the last {WARNINGS} of {len(run.alerts)}' if more > 0 else ''}", style="yellow"))
        parts += [Text(f"- {text.splitlines()[0]}", style="yellow", no_wrap=True, overflow="ellipsis") for text in first]
    return Group(*parts)


def _rows(followed: Followed, console: Console) -> list[tuple[str, str]]:
    if not followed.train:
        return [("", "no step has been written yet")]
    line = followed.train[-1]
    rate = line["tokens_per_s_per_device"]
    usual = middle([x["tokens_per_s_per_device"] for x in followed.train if x["tokens_per_s_per_device"] is not None])
    rows = [
        ("loss", f"{loss(line['loss'])}  {spark([x['loss'] for x in followed.train], console)}"),
        *((f"held-out {name}".rstrip(), f"{loss(x['loss'])} at step {x['step']:,}") for name, x in followed.evals.items()),
        ("gradient norm", f"{number(line['grad_norm'])}, learning rate {line['lr']:.3g}"),
        ("tokens/s", f"{number(line['tokens_per_s'], 0)}, each device {number(rate, 0)} (usually {number(usual, 0)})"),
        ("MFU", f"{percent(line['mfu_causal'])} causal, {percent(line['mfu_full'])} full, HFU {percent(line['hfu'])}"),
    ]
    if line["step_time_s"] is not None:
        rows.append(("step", f"{line['step_time_s']:.4g} s, {number(line['data_wait_s'], 3)} s of it waiting for data"))
    if line["peak_memory_gib"] is not None:
        rows.append(("memory", f"{size(line['memory_gib'] or 0.0)} in use, {size(line['peak_memory_gib'])} at the peak"))
    if found := followed.run.goodput():
        rows.append(("goodput", goodput.words(found).removeprefix("goodput ")))
    return rows


def spark(values: list[float | None], console: Console) -> str:
    """All values as a row of bars, each the mean of its share of them; nothing where there are too few."""
    known = [v for v in values if v is not None and v == v and abs(v) != float("inf")]
    if len(known) < 2:
        return ""
    width = min(SPARK, len(known))
    cuts = [round(i * len(known) / width) for i in range(width + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    low, high = min(means), max(means)
    bars = BARS if console.encoding.lower().startswith("utf") else PLAIN_BARS
    return "".join(bars[round(7 * (m - low) / (high - low)) if high > low else 0] for m in means)


def _gpus(followed: Followed) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("GPU", "used", "W", "\u00b0C", "SM MHz", "in use GiB", "of pool GiB", "throttled"):
        table.add_column(name, justify="left" if name in ("GPU", "throttled") else "right")
    lines = [followed.gpus[key] for key in sorted(followed.gpus)]
    keys = ("power_w", "temperature_c", "sm_clock_mhz", "in_use_gib", "pool_gib")
    if len(lines) > GPUS:

        def span(key: str, scale: float = 1.0) -> str:
            known = [x[key] * scale for x in lines if x.get(key) is not None]
            return f"{number(min(known), 0)} to {number(max(known), 0)}" if known else "-"

        hot = sum(bool(x.get("throttled")) for x in lines)
        table.add_row(f"{len(lines)}, all", f"{span('utilization', 100)} %", *map(span, keys), f"{hot} of them" if hot else "")
        return table
    several = len({x["process"] for x in lines}) > 1
    for x in lines:
        name = f"{x['process']}.{x['gpu']}" if several else str(x["gpu"])
        hot = f"{percent(x['throttled'])} {x.get('throttle_reasons') or ''}" if x.get("throttled") else ""
        cells = [number(x.get(key), 0 if key != "in_use_gib" else 1) for key in keys]
        table.add_row(name, percent(x.get("utilization")), *cells, hot, style="yellow" if hot else "")
    return table
