"""The differences between two plans on a terminal."""

from collections.abc import Sequence

from rich.console import Console

from jaxtrain.config.numbers import column, number, plural
from jaxtrain.plan.diff import GIB, MIB, NONE, SIZES, SMALL, TIMES, Diff, DiffRow
from jaxtrain.report.plan_sections import argument
from jaxtrain.report.tables import Column, Listing, Section, Table, numbers, print_sections, say, text_table

ROWS = 30  # of a table


def print_diff(changes: Diff, console: Console, names: tuple[str, str]) -> None:
    """Print the figures, times, sizes and settings that differ, and the number of smaller differences. names: of the plans."""
    say(console, f"A: {names[0]}\nB: {names[1]}")
    figures = [(name, *column((x, y)), *_signed([y - x])) for name, (x, y) in changes.figures.items() if x != y]
    times, sizes = ([row for row in changes.rows if row.key.what in kinds] for kinds in (TIMES, SIZES))
    settings = [r for r in changes.rows if r.key.what not in TIMES + SIZES]
    values = [[(each or NONE).text or "absent" for each in (r.before, r.after)] for r in settings]
    words = [f"{r.change}: {r.key.what} {r.key.name}: {x} -> {y}" for r, (x, y) in zip(settings, values, strict=True)]
    note = f"{plural(len(changes.smaller), 'smaller difference')}, each below {SMALL:.1%} of the step or of the memory, with "
    note += f"{number(sum(row.increase('ms') for row in changes.smaller))} ms in all"
    sections = [Section("Figures", [text_table("", ("", "A", "B", "change"), figures)])] if figures else []
    sections += [Section("Time of a step; of collectives exposed, and on the link", [_table(times, "ms", 1)])] if times else []
    largest = max((abs(row.increase("bytes")) for row in sizes), default=0.0)
    unit, scale = ("GiB", GIB) if largest >= 0.1 * GIB else ("MiB", MIB)
    sections += [Section("Memory at the peak", [_table(sizes, unit, scale)])] if sizes else []
    sections.append(Section("Settings and warnings", [Listing(words)]))
    print_sections(sections, console)
    say(console, "nothing changed" if changes.same else f"\n{note}" if changes.smaller else "")


def _table(rows: Sequence[DiffRow], unit: str, scale: float) -> Table:
    field = "ms" if unit == "ms" else "bytes"
    changes = [("change", field, scale)] + ([("on link", "link_ms", 1), ("GB", "bytes", 1e9)] if unit == "ms" else [])
    columns = [
        Column("", [r.change for r in rows]),
        Column("what", [" ".join(filter(None, (r.key.what, r.key.name, r.key.dtype, r.key.axis))) for r in rows]),
        numbers(f"A {unit}", [getattr(r.before or NONE, field) / scale for r in rows], total=False),
        numbers(f"B {unit}", [getattr(r.after or NONE, field) / scale for r in rows], total=False),
        *(numbers(name, [r.increase(of) / by for r in rows], _signed, total=False) for name, of, by in changes),
        Column("operation", [_operation(r.key.scope) for r in rows]),
        Column("source", [r.source for r in rows], kind="source"),
    ]
    return Table("", columns, ROWS)


def _operation(scope: str) -> str:
    """Return the name of an argument, or of the first of the operations that XLA combined, with the number of the others."""
    first, *others = scope.split("; ")
    if others:
        return f"{first}, and {len(others)} more"
    return argument(scope) if scope.startswith("state.") else scope


def _signed(values: Sequence[float]) -> list[str]:
    return ["+" * (value > 0 and text[0] != "<") + text for value, text in zip(values, column(values), strict=True)]
