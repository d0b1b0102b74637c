"""A profile as text for people."""

from collections.abc import Sequence

from rich.console import Console

from jaxtrain.page.numbers import column, gib, number, percent
from jaxtrain.plan.report.lines import bar, heading, listed, row, say, short, table
from jaxtrain.profile import figures
from jaxtrain.profile.result import Change, Diff, Profile, Program

ROWS = 15  # of the longer tables


def text(found: Profile, console: Console) -> None:
    """Prints the whole report: kinds, parts, operations, devices, the program and its memory, and what to keep in mind."""
    say(console, f"{found.name}: {found.trace}")
    say(console, figures.verdict(found), "bold")
    say(console, f"{figures.range_of(found)}, steps {', '.join(map(str, found.steps))}")
    say(console, figures.against_untraced(found))
    say(console, figures.against_plan(found))
    _kinds(found, console)
    _parts(found, console)
    _ops(found, console)
    _devices(found, console)
    if found.program:
        summary(found.program, console)
    listed(console, "how to read this", (*figures.LEGEND, *found.notes))


def _kinds(found: Profile, console: Console) -> None:
    heading(console, "time of a step by kind")
    rows = figures.kinds(found)
    plan = found.planned is not None
    hides = any(hidden for _, _, hidden, _ in rows)
    headings = ["", "ms", "of step", *(["hidden ms"] if hides else []), *(["planned ms"] if plan else []), ""]
    made = table(headings, numeric=range(1, len(headings) - 1))
    ms = column([m for _, m, _, _ in rows])
    for (kind, took, hidden, expected), shown in zip(rows, ms, strict=True):
        more = [number(hidden) if hidden else ""] if hides else []
        more += [number(expected)] if plan else []
        row(made, kind, shown, percent(took / found.step_ms), *more, bar(console, took, found.step_ms))
    row(made, "step", number(found.step_ms), *[""] * (len(headings) - 2), style="bold")
    console.print(made)


def _parts(found: Profile, console: Console) -> None:
    heading(console, "by part, ms of a step")
    kinds = figures.columns(found.by_part.values())
    made = table(["", "ms", "of step", *(figures.SHORT.get(k, k) for k in kinds)], numeric=range(1, 3 + len(kinds)))
    for name, spent in found.by_part.items():
        whole = sum(spent.values())
        cells = [number(spent[k]) if spent.get(k) else "" for k in kinds]
        row(made, name, number(whole), percent(whole / found.step_ms), *cells)
    console.print(made)
    say(console, figures.named(found))


def _ops(found: Profile, console: Console) -> None:
    shown, more = found.ops[:ROWS], found.ops[ROWS:]
    heading(console, "operations of a step, and what they reach")
    plan = found.planned is not None
    hides = any(op.hidden_ms for op in shown)
    unit, rates = figures.rates(shown)
    more_headings = [*(["hidden"] if hides else []), unit, "GB/s", *(["of plan"] if plan else [])]
    headings = ["kind", "count", "ms", "of step", *more_headings, "what", "source"]
    made = table(headings, numeric=range(1, len(headings) - 2))
    for op, ms, reached in zip(shown, column([op.ms for op in shown]), rates, strict=True):
        cells = [f"{op.count:,.0f}", ms, percent(op.ms / found.step_ms)]
        cells += [number(op.hidden_ms) if op.hidden_ms else ""] if hides else []
        cells += [reached.flops, reached.gb_s, *([reached.of_plan] if plan else [])]
        row(made, op.kind, *cells, op.label, short(op.source))
    console.print(made)
    if more:
        say(console, figures.rest(more))


def _devices(found: Profile, console: Console) -> None:
    if len(found.devices) < 2:
        return
    heading(console, "by device, ms of a step")
    made = table(["device", "step", "busy", "exposed", "idle"], numeric=range(1, 5))
    for d in found.devices:
        row(made, str(d.device), *(number(v) for v in (d.step_ms, d.busy_ms, d.exposed_ms, d.idle_ms)))
    console.print(made)
    say(console, figures.stragglers(found))


def summary(program: Program, console: Console) -> None:
    """Prints what a compiled program does and holds, traced or not."""
    heading(console, f"the program {program.name}: work of a step on each device")
    rows = figures.program_rows(program)
    made = table(["part", "kind", "launches", "GFLOP", "GB"], numeric=(2, 3, 4))
    flops, moved = column([r.gflop for r in rows]), column([r.gb for r in rows])
    for r, gflop, gb in zip(rows, flops, moved, strict=True):
        row(made, r.part, r.kind, f"{r.launches:,}", gflop, gb)
    console.print(made)
    for line in figures.counted(program):
        say(console, line)
    heading(console, figures.held_at_peak(program))
    if program.held is None:
        return
    parts = list(program.held.by_part.items())
    unit, sizes = gib([v for _, v in parts])
    made = table(["", unit, "", ""], numeric=(1, 2))
    for (name, value), shown in list(zip(parts, sizes, strict=True))[:ROWS]:
        row(made, name, shown, percent(value / program.held.peak_gib), bar(console, value, program.held.peak_gib))
    console.print(made)
    largest = program.held.largest
    unit, sizes = gib([value for value, *_ in largest])
    made = table(["array", unit, "part", "source"], numeric=(1,))
    for (_, part, shape, source), shown in zip(largest, sizes, strict=True):
        row(made, shape, shown, part, short(source))
    console.print(made)


def changes(found: Diff, console: Console) -> None:
    """Prints what differs between two traces."""
    say(console, f"\nfrom {found.before}\nto   {found.after}")
    say(
        console,
        f"step {number(found.step.before_ms)} ms -> {number(found.step.after_ms)} ms: {figures.signed(found.step)} ms",
        "bold",
    )
    for title, rows in (("kind", found.kinds), ("part", found.parts), ("operation", found.ops)):
        _changed(title, rows, console)


def _changed(title: str, rows: Sequence[Change], console: Console) -> None:
    heading(console, f"change by {title}, ms of a step")
    made = table(["before", "after", "change", ""], numeric=(0, 1, 2))
    for c in rows[:ROWS]:
        row(made, number(c.before_ms), number(c.after_ms), figures.signed(c), c.name)
    console.print(made)
