"""Where the wall time of a run went, on its page: a bar by cause, and how the causes followed each other over its attempts."""

from collections.abc import Sequence
from html import escape

from jaxtrain import goodput
from jaxtrain.goodput import Goodput, Span
from jaxtrain.page.charts import stacked, ticks
from jaxtrain.page.kit import Column, Markup, say, swatch, table
from jaxtrain.page.numbers import percent
from jaxtrain.report.figures import hours
from jaxtrain.report.run import Run

STRETCHES = 240  # of equal length, that the wall time is drawn in
UNITS = (("days", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
EMPTY = ("stopped",)  # nothing ran, and nobody missed it: nothing is drawn
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
}


def section(runs: Sequence[Run]) -> str:
    """For one run bar, table and timeline; for several a bar each and one table. "" where no run kept a ledger."""
    found = [(run, g) for run in runs if (g := run.goodput()) and g.wall_s > 0]
    if not found:
        return ""
    if len(runs) == 1:
        run, g = found[0]
        return say(f"{_capital(goodput.words(g))}.") + _bar(g, "") + _table(g) + _timeline(g)
    out = [_key([g for _, g in found]), *(_bar(g, run.name) for run, g in found)]
    columns = [Column("run", [run.name for run, _ in found])]
    for cause in goodput.CAUSES:
        seconds = [g.parts[cause] for _, g in found]
        if any(seconds):
            head = [hours(s) if s else "" for s in seconds]
            columns.append(Column(cause, head, seconds))
    wall = [g.wall_s for _, g in found]
    columns.append(Column("all", [hours(s) for s in wall], wall))
    return "".join(out) + table("Wall time by cause", columns, "sortable")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _bar(g: Goodput, name: str) -> str:
    parts = [(f"{c}: {hours(s)}", s, COLOURS.get(c, "transparent")) for c, s in g.parts.items() if s > 0]
    label = f"Wall time{f' of {name}' if name else ''}: {', '.join(what for what, *_ in parts)}"
    title = say(f"{name}: goodput {percent(g.goodput)} of {hours(g.wall_s - g.parts['stopped'])}", "quiet") if name else ""
    return title + stacked(label, parts, g.wall_s)


def _key(every: Sequence[Goodput]) -> str:
    """Which colour is which cause, of those that any of them has."""
    causes = [cause for cause in goodput.CAUSES if any(g.parts[cause] for g in every)]
    return f'<p class="key">{" &ensp; ".join(f"<span>{_patch(cause)}{cause}</span>" for cause in causes)}</p>'


def _patch(cause: str) -> str:
    return swatch(COLOURS[cause]) if cause in COLOURS else '<span class="swatch outline"></span>'


def _table(g: Goodput) -> str:
    parts = [(cause, s) for cause, s in g.parts.items() if s > 0]
    seconds = [s for _, s in parts]
    patch = [Markup(_patch(c) + c) for c, _ in parts]
    columns = [
        Column("cause", patch, total="wall time"),
        Column("seconds", [f"{s:,.1f}" for s in seconds], seconds, total=f"{g.wall_s:,.1f}"),
        Column("share", [percent(s / g.wall_s) for s in seconds], seconds),
        Column("what it is", [goodput.MEANING[c] for c, _ in parts]),
    ]
    return table("Wall time by cause", columns, "sortable")


def _timeline(g: Goodput) -> str:
    """The wall time from left to right in equal stretches, each as high as its causes' shares; marks where attempts begin."""
    start, length = g.spans[0].start, g.wall_s / STRETCHES
    shares = [dict.fromkeys(COLOURS, 0.0) for _ in range(STRETCHES)]
    for span in g.spans:
        _add(shares, span, start, length)
    label = f"Wall time in order, {hours(g.wall_s)}: {'; '.join(_attempts(g))}"
    out = [f'<svg class="lanes" style="height:92px" role="img" aria-label="{escape(label)}">']
    out.append('<rect class="empty" x="0" y="0" width="100%" height="60"/>')
    at = 0
    for share, many in _merged(shares):
        top, left, width = 60.0, 100 * at / STRETCHES, 100 * many / STRETCHES + 0.02  # overlapping a little: no seams
        when = f"{hours(at * length)} to {hours((at + many) * length)} from the start"
        for cause, part in share.items():
            if part >= 0.004:
                top -= 60 * part
                place = f'x="{left:.3f}%" width="{width:.3f}%" y="{top:.1f}" height="{60 * part:.1f}"'
                out.append(f'<rect {place} fill="{COLOURS[cause]}"><title>{cause}, {escape(when)}</title></rect>')
        at += many
    begins: dict[int, float] = {}
    for span in g.spans:
        if span.attempt:
            begins.setdefault(span.attempt, span.start)
    for at in begins.values():
        x = f"{100 * (at - start) / g.wall_s:.2f}%"
        out.append(f'<line class="mark" x1="{x}" x2="{x}" y1="-4" y2="64"/>')
    unit, size = next((u, s) for u, s in UNITS if g.wall_s >= 2 * s or s == 1)
    for tick in ticks(g.wall_s / size):
        x, last = 100 * tick * size / g.wall_s, tick * size > 0.95 * g.wall_s
        anchor = "end" if last else "middle" if tick else "start"
        words = f"{tick:g}" if tick else f"0 {unit}"
        out.append(f'<text class="axis" x="{x:.2f}%" y="80" text-anchor="{anchor}">{words}</text>')
    note = "From left to right as it happened."
    if len(begins) > 1:
        note += f" Lines mark the beginnings of {len(begins)} attempts; in what is empty it was stopped."
    return say(note, "quiet") + "".join([*out, "</svg>"])


def _add(shares: list[dict[str, float]], span: Span, start: float, length: float) -> None:
    """A span's time to the stretches that it lies in, evenly."""
    whole = span.end - span.start
    if whole <= 0:
        return
    first, last = (span.start - start) / length, (span.end - start) / length
    for i in range(int(first), min(len(shares) - 1, int(last)) + 1):
        inside = max(0.0, min(last, i + 1) - max(first, i)) * length
        for cause, seconds in span.seconds.items():
            if cause not in EMPTY:
                shares[i][cause] += seconds / whole * inside / length


def _merged(shares: Sequence[dict[str, float]]) -> list[tuple[dict[str, float], int]]:
    """(shares, how many) of neighbours that are as good as equal."""
    out: list[tuple[dict[str, float], int]] = []
    for share in shares:
        if out and all(abs(share[c] - out[-1][0][c]) < 0.01 for c in share):
            out[-1] = out[-1][0], out[-1][1] + 1
        else:
            out.append((share, 1))
    return out


def _attempts(g: Goodput) -> list[str]:
    """A sentence's part for each attempt, of few."""
    by: dict[int, dict[str, float]] = {}
    for span in g.spans:
        if span.attempt:
            total = by.setdefault(span.attempt, {})
            for cause, seconds in span.seconds.items():
                total[cause] = total.get(cause, 0.0) + seconds
    if len(by) > 12:
        return [f"{len(by)} attempts"]
    return [
        f"attempt {n}: " + ", ".join(f"{cause} {hours(s)}" for cause, s in sorted(parts.items(), key=lambda kv: -kv[1])[:4])
        for n, parts in by.items()
    ]
