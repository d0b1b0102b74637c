"""How reports print: headings, tables without rules, bars. For every command that reports to a terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.page.sections import place

BAR = 28
SOURCE = 28


def table(headings: Sequence[str], numeric: Iterable[int] = ()) -> Table:
    """Aligned columns without rules; headings of numbers stand to the right, as the numbers do."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, name in enumerate(headings):
        right = i in set(numeric)
        whole = right or name in ("kind", "dtype", "source")
        made.add_column(Text(name), justify="right" if right else "left", no_wrap=whole, overflow="fold")
    return made


def heading(console: Console, title: str) -> None:
    """A line in bold, apart from what stands above."""
    say(console, f"\n{title}", "bold")


def row(table: Table, *cells: str, style: str = "") -> None:
    """One row of plain text."""
    table.add_row(*(Text(cell) for cell in cells), style=style)  # Text: brackets in a shape are no markup


def say(console: Console, line: str, style: str = "") -> None:
    """One line of plain text."""
    console.print(Text(line, style=style))


def short(source: str) -> str:
    """file:line, short: without `jaxtrain/`, and of what is still too long its end."""
    shown = place(source).removeprefix("jaxtrain/")
    return shown if len(shown) <= SOURCE else "..." + shown[3 - SOURCE :]


def listed(console: Console, title: str, lines: Iterable[str], style: str = "") -> None:
    """A list under a heading; nothing where it is empty."""
    lines = list(lines)
    if not lines:
        return
    heading(console, title)
    made = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    made.add_column(width=1)
    made.add_column(overflow="fold")
    for line in lines:
        row(made, "-", line, style=style)
    console.print(made)


def bar(console: Console, value: float, whole: float) -> str:
    """A bar of at most BAR characters, with eighths of one where the terminal has them."""
    eighths = round(8 * BAR * max(0.0, min(1.0, value / whole if whole else 0.0)))
    if not console.encoding.lower().startswith("utf"):
        return "#" * round(eighths / 8)
    return "\u2588" * (eighths // 8) + ("", *"\u258f\u258e\u258d\u258c\u258b\u258a\u2589")[eighths % 8]
