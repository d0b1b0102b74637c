"""Receipts in a terminal: the parts of one, a line for each of many, what differs between two, and the verdicts of a check."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxtrain.receipt.golden import Verdict, passed, unproved
from jaxtrain.receipt.opened import Run
from jaxtrain.receipt.parts import ended, parts
from jaxtrain.receipt.result import GROUPS, Comparison

MARKS = {"ok": "green", "WORSE": "red", "not compared": "yellow"}


def show(run: Run, console: Console) -> None:
    """All parts of a receipt, in the order of docs/receipts.md."""
    r = run.receipt
    what = f"golden receipt of {r['golden']}" if "golden" in r else f"attempt {r.get('attempt', 1)}"
    console.print(f"{run.name}: {what}, {ended(r)}", style="bold", highlight=False, markup=False)
    for note in run.notes:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)
    for title, rows in parts(run):
        console.print()
        console.print(title, style="bold", highlight=False, markup=False)
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(f"  {escape(name)}", escape(str(value)))
        console.print(table, highlight=False)


def listed(runs: Iterable[Run | tuple[str, str]], console: Console) -> None:
    """One line a run; (name, why) for what could not be read."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("run", "attempts", "end", "step", "loss", "tok/s/device", "MFU", "goodput"):
        table.add_column(name, justify="left" if name in ("run", "end") else "right", overflow="fold")
    for run in runs:
        if isinstance(run, tuple):
            table.add_row(run[0], "", escape(run[1]), "", "", "", "", "")
            continue
        speed, goodput = run.figures["speed"] or {}, run.goodput or {}
        last = max(run.losses, default=None)
        rate, mfu, good = speed.get("tokens_per_s_per_device"), speed.get("mfu_causal"), goodput.get("goodput")
        cells = [run.name, str(len(run.attempts)), escape(run.end)]
        cells += [str(last), f"{run.losses[last]:.4f}"] if last is not None else ["-", "-"]
        cells += [f"{rate:,.0f}" if rate else "-", f"{mfu:.1%}" if mfu else "-", f"{good:.1%}" if good is not None else "-"]
        table.add_row(*cells)
    console.print(table, highlight=False)


def compared(found: Comparison, console: Console) -> None:
    """What differs, by group, and what came of it."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    say(f"A: {found.a}\nB: {found.b}")
    for group in GROUPS:
        mine = [d for d in found.differences if d.group == group]
        if not mine:
            continue
        say(f"\n{group}", "bold")
        for d in mine:
            say(f"  {d.title}: {d.a} -> {d.b}")
            for line in d.lines:
                say(f"      {line}", "red" if ": - " in line[:20] else "green")
    if found.same:
        say("\nnothing differs that can explain other results or another speed")
    say("\nwhat came of it", "bold")
    for each in found.outcomes:
        values = f": {each.a} -> {each.b}" if each.a or each.b else ""
        say(f"  {each.name}{values}{f' ({each.said})' if values and each.said else f': {each.said}' if each.said else ''}")
    for note in found.notes:
        say(f"note: {note}", "yellow")


def judged(verdicts: Sequence[Verdict], name: str, golden: str, console: Console) -> None:
    """The verdicts of a check, and one line at the end."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("check", "verdict", golden, name, "rule"):
        table.add_column(escape(column), overflow="fold")
    for v in verdicts:
        mark = f"[{MARKS[v.state]}]{v.state}[/]"
        table.add_row(escape(v.name), mark, escape(v.golden), escape(v.run), escape(v.rule))
    console.print(table, highlight=False)
    worse = [v.name for v in verdicts if v.state == "WORSE"]
    if passed(verdicts):
        end = "as the golden run"
    else:
        end = f"WORSE: {', '.join(worse)}" if worse else f"not proved: {' and '.join(unproved(verdicts))}"
    console.print(f"{name}: {end}", style="bold", highlight=False, markup=False)
