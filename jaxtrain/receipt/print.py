"""Receipts as tables in a terminal: one in full, a line for each of several, and the differences between two."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxtrain.receipt.diff import GROUPS, Comparison
from jaxtrain.receipt.format import Run, flatten

FIRST = ("command", "config", "overrides", "mesh", "attention", "data")  # fields that a reader looks for
# Fields with a table of their own or a file beside the receipt (config.json), and long ones.
HIDDEN = ("attempts", "format", "resolved", "ranks", "devices.processes", "source.patch", "source.files", "changed")
LIST = {  # heading -> path in the flattened receipt, format
    "tok/s/device": ("speed.tokens_per_s_per_device", ",.0f"),
    "MFU": ("speed.mfu_causal", ".1%"),
    "goodput": ("goodput.goodput", ".1%"),
}


def rows(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, value) of a run's receipt as it is shown, the overrides of its config first."""
    receipt = run.receipt | {k: v for k, v in run.figures.items() if v is not None} | {"goodput": run.goodput}
    source = receipt.get("source") or {}
    shown = {name: receipt[name] for name in (*FIRST, *receipt) if name in receipt}
    for path, value in flatten(shown):
        if not any(path == name or path.startswith(f"{name}.") for name in HIDDEN):
            if isinstance(value, float) and not path.startswith("loss_at"):
                value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
            yield path, str(value)
    if source.get("patch"):
        yield "source.patch", f"{len(source['patch'])} characters in receipt.json"


def show(run: Run, console: Console) -> None:
    """Print one receipt."""
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
    """Print one line for each attempt."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("attempt", "started", "ended", "resumed from step", "exit code", "reason", "changed"):
        table.add_column(name, overflow="fold")
    for one in run.attempts:
        names = ("attempt", "started", "ended", "resumed_from_step", "exit_code", "reason")
        changed = ", ".join(f"{name}: {was} -> {now}" for _, name, was, now in one.get("changed", ()))
        table.add_row(*("-" if one.get(name) is None else escape(str(one[name])) for name in names), escape(changed))
    console.print()
    console.print(table, highlight=False)


def show_list(runs: Sequence[Run | tuple[str, str]], console: Console) -> None:
    """Print one line for each run; (name, error) for a receipt that cannot be read."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("run", "attempts", "end", "step", "loss", *LIST):
        table.add_column(name, justify="left" if name in ("run", "end") else "right", overflow="fold")
    for run in runs:
        if not isinstance(run, Run):
            table.add_row(escape(run[0]), "", escape(run[1]))
            continue
        values = dict(flatten(run.figures | {"goodput": run.goodput}))
        last = max(run.losses, default=None)
        cells = ["-", "-"] if last is None else [str(last), f"{run.losses[last]:.4f}"]
        cells += [f"{values[path]:{form}}" if path in values else "-" for path, form in LIST.values()]
        table.add_row(escape(run.name), str(len(run.attempts)), escape(run.end), *cells)
    console.print(table, highlight=False)


def show_diff(found: Comparison, console: Console) -> None:
    """Print the differences by group, and the results that differ."""

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
