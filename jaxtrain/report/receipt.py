"""Receipts on a terminal: one, a list, and the differences between two."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxtrain.metrics.receipt_format import ReceiptError, Run, flatten, open_run, rows
from jaxtrain.train.receipt_diff import GROUPS, Comparison

COLUMNS = {  # heading of the list -> (path in the flattened receipt, format)
    "tok/s/device": ("speed.tokens_per_s_per_device", ",.0f"),
    "MFU": ("speed.mfu_causal", ".1%"),
    "goodput": ("goodput.goodput", ".1%"),
}


def show(run: Run, console: Console) -> None:
    """Print the receipt of a run."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    section = ""
    for path, value in rows(run):
        begin = path.partition(".")[0]
        if section and "." in path and begin != section:
            table.add_row("", "")
        table.add_row(escape(path), escape(value))
        section = begin
    console.print(table, highlight=False)
    show_attempts(run, console)


def show_attempts(run: Run, console: Console) -> None:
    """Print a table with a row for each attempt of a run."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("attempt", "started", "ended", "resumed from step", "exit code", "reason", "changed"):
        table.add_column(name, overflow="fold", no_wrap=name in ("started", "ended"))
    for one in run.attempts:
        names = ("attempt", "started", "ended", "resumed_from_step", "exit_code", "reason")
        changed = ", ".join(f"{name}: {was} -> {now}" for _, name, was, now in one.get("changed", ()))
        table.add_row(*("-" if one.get(name) is None else escape(str(one[name])) for name in names), escape(changed))
    console.print()
    console.print(table, highlight=False)


def show_list(paths: Sequence[Path], console: Console) -> bool:
    """Print a table with a row for each run, or its error. Return whether the receipt of a run could be read."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("run", "attempts", "end", "step", "loss", *COLUMNS):
        table.add_column(name, justify="left" if name in ("run", "end") else "right", overflow="fold")
    readable = False
    for path in paths:
        try:
            run = open_run(path)
            values, losses = dict(flatten(run.figures | {"goodput": run.goodput})), run.losses
        except ReceiptError as error:
            table.add_row(escape(path.name), "", escape(str(error)))
            continue
        readable = True
        last = max(losses, default=None)
        cells = ["-", "-"] if last is None else [str(last), f"{losses[last]:.4f}"]
        cells += [f"{values[path]:{form}}" if path in values else "-" for path, form in COLUMNS.values()]
        table.add_row(escape(run.name), str(len(run.attempts)), escape(run.end), *cells)
    console.print(table, highlight=False)
    return readable


def show_diff(found: Comparison, console: Console) -> None:
    """Print the differences of two runs by group, and the results of both."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    say(f"A: {found.a}\nB: {found.b}")
    for group in GROUPS:
        mine = [d for d in found.differences if d.group == group]
        if mine:
            say(f"\n{group}", "bold")
        for d in mine:
            say(f"  {d.name}: {d.a} -> {d.b}")
            for line in d.lines:
                say(f"      {line}")
    if not found.differences:
        say("\nno difference that can explain other results or another speed")
    say("\nresults", "bold")
    for one in found.outcomes:
        values = f"{one.a} -> {one.b}" if one.a or one.b else ""
        say(f"  {one.name}: {values}{f' ({one.ratio})' if values and one.ratio else one.ratio}")
