"""Sections of a report as data, and their renderings: rich tables on a terminal, HTML on a page, Markdown tables.

The same sections are printed and written as HTML. The terminal has the first rows of a long table and a row with the sum of the
remaining rows. The page also has further rows, swatches, scopes and drawings.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from jaxtrain.config.numbers import column, percent
from jaxtrain.report import html

BAR = 28  # characters of a bar on a terminal
FOLDED = 60  # characters of a path that are visible on the page before it is unfolded
FOLDED_TEXT = 16  # least characters of a folded text column on a terminal
SOURCE = 28  # most characters of a file:line on a terminal
# By default, notebooks align all cells to the right. They do not have the page's style sheet.
NOTEBOOK_STYLE = ".wide :is(th, td, caption) {text-align: left} .wide .number {text-align: right}"


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        heading: name and unit.
        cells: the text of each row.
        values: the number of each cell, by which the page sorts; None for text. Numbers are right-aligned.
        total: the text below the cells.
        sum_from: function of n that returns the text for the sum of all rows from the n-th on.
        kind: "source" for file:line, "scope" for a path of named scopes, "bar" for bars, or a CSS class: "number", "whole"
            (no line break), "path" (line breaks anywhere).
        colours: a CSS colour for each row, shown as a swatch on the page.
        page_only: whether the terminal leaves the column out.
    """

    heading: str
    cells: Sequence[str]
    values: Sequence[float] | None = None
    total: str = ""
    sum_from: Callable[[int], str] | None = None
    kind: str = ""
    colours: Sequence[str] = ()
    page_only: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class Table:
    """A table, for terminals, pages and notebooks. The first column has the names of the rows.

    Attributes:
        title: the caption.
        rows: number of rows on a terminal; None: all. One more row has the sums of the remaining rows.
        page_rows: number of rows on the page; None: all.
        style: CSS class: "sortable" or "small".
    """

    title: str
    columns: Sequence[Column]
    rows: int | None = None
    page_rows: int | None = None
    style: str = ""

    def __repr__(self) -> str:
        """Return the table as text, as `print_table` prints it on a terminal of 160 columns."""
        return render_text(lambda console: print_table(self, console), 160)

    def _repr_html_(self) -> str:
        return f"<style scoped>{NOTEBOOK_STYLE}</style>{html_table(self)}"


@dataclasses.dataclass(frozen=True)
class Listing:
    """A bulleted list. style: "warning" for warnings, else ""."""

    lines: Sequence[str]
    style: str = ""


@dataclasses.dataclass(frozen=True)
class Drawing:
    """HTML that the page shows and the terminal leaves out."""

    html: str


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and its blocks, in order. A str is a paragraph. A section without blocks is left out."""

    title: str
    blocks: Sequence[str | Table | Listing | Drawing]


def numbers(
    heading: str, values: Sequence[float], write: Callable[[Sequence[float]], list[str]] = column, *, total: bool = True
) -> Column:
    """Return a column of numbers, with the sum of the rows that a table leaves out.

    Args:
        write: returns the texts of numbers, all with the same decimals.
        total: whether the sum is shown below the column.
    """
    sums = [math.fsum(values)] if total else []
    texts = write([*values, *sums])

    def sum_from(start: int) -> str:
        return write([*values, *sums, math.fsum(values[start:])])[-1]

    return Column(heading, texts[: len(values)], values, texts[-1] if total else "", sum_from)


def counts(heading: str, values: Sequence[int], *, total: bool = True) -> Column:
    """Return a column of whole numbers. total: see `numbers`."""
    return numbers(heading, values, lambda ns: [f"{round(n):,}" for n in ns], total=total)


def labels(heading: str, values: Sequence[int]) -> Column:
    """Return a column of whole numbers that are never summed, such as group sizes."""
    return Column(heading, [f"{n:,}" for n in values], values)


def shares(heading: str, values: Sequence[float], total: float) -> Column:
    """Return a column of values as percentages of `total`."""
    return Column(heading, [percent(v / total) for v in values], values)


def bars(values: Sequence[float], total: float) -> Column:
    """Return a column of bars. total: the value of a bar with full length."""
    return Column("", [str(v / total if total else 0.0) for v in values], kind="bar")


def text_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], total: Sequence[str] = ()) -> Table:
    """Return a table from rows of texts. Columns of numbers are aligned to the right. total: texts of the last row."""
    rows = list(rows)
    columns = []
    for i, heading in enumerate(headings):
        cells = [row[i] for row in rows]
        kind = "number" if _are_numbers(cells) else ""
        columns.append(Column(heading, cells, total=total[i] if total else "", kind=kind))
    return Table(title, columns)


def _are_numbers(cells: Sequence[str]) -> bool:
    """Return whether each text starts with a digit, as 8 and <0.1 do, or is a dash."""
    return all(cell.removeprefix("<")[:1].isdigit() or cell == "-" for cell in cells)


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a pandas.DataFrame. Raises ImportError if pandas is missing."""
    try:
        import pandas  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("pandas is not installed. Fix: ./run.sh notebooks, which installs it.") from error
    return pandas.DataFrame(list(rows))


# ---- terminal


def render_text(show: Callable[[Console], None], width: int) -> str:
    """Return the text that `show` prints on a terminal of `width` columns."""
    console = Console(width=width, color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as captured:
        show(console)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def say(console: Console, line: str, style: str = "") -> None:
    """Print one line of plain text. Brackets are not markup."""
    console.print(Text(line, style=style))


def print_sections(sections: Sequence[Section], console: Console) -> None:
    """Print sections on a terminal."""
    for section in sections:
        shown = [p for p in section.blocks if not isinstance(p, Drawing) and not (isinstance(p, Listing) and not p.lines)]
        if shown:
            say(console, f"\n{section.title}", "bold")
        for block in shown:
            if isinstance(block, str):
                say(console, block)
            elif isinstance(block, Listing):
                _print_listing(block, console)
            elif isinstance(block, Table):
                print_table(block, console, with_title=block.title != section.title)


def _print_listing(listing: Listing, console: Console) -> None:
    table = RichTable(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(width=1)
    table.add_column(overflow="fold")
    for line in listing.lines:
        table.add_row("-", Text(line), style="yellow" if listing.style == "warning" else listing.style)
    console.print(table)


def print_table(table: Table, console: Console, *, with_title: bool = True) -> None:
    """Print a table without lines between cells. Numbers are aligned to the right, the total is bold.

    On a narrow terminal the columns of bars are left out, then those of sources. If the table is still too wide, its lines are
    longer than the terminal, so that no digit and no name is cut off.
    """
    columns = [col for col in table.columns if not col.page_only]
    for kind in ("bar", "source"):
        if sum(map(_least_width, columns)) > console.width:
            columns = [col for col in columns if col.kind != kind]
    if table.title and with_title:
        say(console, table.title, "dim")
    rich_table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for col in columns:
        right = col.values is not None or col.kind == "number"
        no_wrap = right or col.kind in ("whole", "source", "bar")
        least = _least_width(col) - 2 if col.kind != "bar" else None
        rich_table.add_column(
            Text(col.heading), justify="right" if right else "left", no_wrap=no_wrap, overflow="fold", min_width=least
        )
    shown = len(columns[0].cells[: table.rows])
    for i in range(shown):
        rich_table.add_row(*(Text(_terminal_cell(col, i, console)) for col in columns))
    for texts, style in _last_rows(columns, shown):
        rich_table.add_row(*map(Text, texts), style=style)
    console.print(rich_table, width=max(console.width, sum(map(_least_width, columns))), crop=False)


def _last_rows(columns: Sequence[Column], shown: int) -> list[tuple[list[str], str]]:
    """Return (texts, style) of the rows below the first `shown` rows: the sums of the remaining rows, and the totals."""
    more, out = len(columns[0].cells) - shown, []
    if more:
        out.append(([f"{more} more", *(c.sum_from(shown) if c.sum_from else "" for c in columns[1:])], ""))
    if columns[0].total:
        out.append(([c.total for c in columns], "bold"))
    return out


def _least_width(col: Column) -> int:
    """Return the number of characters that a column needs on a terminal, including the space after the column."""
    if col.kind == "bar":
        return BAR + 2
    cells = [shorten_source(cell) if col.kind == "source" else cell for cell in col.cells]
    longest = max(map(len, [col.heading, col.total, *cells]))
    is_text = col.values is None and col.kind not in ("number", "whole", "source")
    return (min(longest, max(len(col.heading), FOLDED_TEXT)) if is_text else longest) + 2


def _terminal_cell(col: Column, i: int, console: Console) -> str:
    if col.kind == "bar":  # in eighths of a character if the terminal has such characters
        eighths = round(8 * BAR * max(0.0, min(1.0, float(col.cells[i]))))
        if not console.encoding.lower().startswith("utf"):
            return "#" * round(eighths / 8)
        return "\u2588" * (eighths // 8) + ("", *"\u258f\u258e\u258d\u258c\u258b\u258a\u2589")[eighths % 8]
    return shorten_source(col.cells[i]) if col.kind == "source" else col.cells[i]


def relative_source(source: str) -> str:
    """Return a source (file:line) without the path to site-packages; for a file of jaxtrain, without the path to jaxtrain."""
    for package, prefix in (("/site-packages/", ""), ("/jaxtrain/", "jaxtrain/")):
        before, separator, inside = source.rpartition(package)
        source = prefix + inside if separator else source
    return source


def shorten_source(source: str) -> str:
    """Return file:line without `jaxtrain/`, cut at its beginning if it is longer than SOURCE."""
    shown = relative_source(source).removeprefix("jaxtrain/")
    return shown if len(shown) <= SOURCE else "..." + shown[3 - SOURCE :]


# ---- page


def html_sections(sections: Sequence[Section]) -> list[str]:
    """Return sections as HTML."""
    out = []
    for section in sections:
        if blocks := [markup for block in section.blocks if (markup := _html_block(block))]:
            out += [html.heading(section.title), *blocks]
    return out


def _html_block(block: str | Table | Listing | Drawing) -> str:
    if isinstance(block, str):
        return html.paragraph(block, "quiet")
    if isinstance(block, Drawing):
        return block.html
    if isinstance(block, Table):
        return html_table(block)
    lines = "".join(f"<li>{escape(line)}</li>" for line in block.lines)
    return f'<ul class="list{" warnings" if block.style == "warning" else ""}">{lines}</ul>' if lines else ""


def html_table(table: Table) -> str:
    """Return a table as HTML; "" without rows. While a wide table scrolls, its first column stays visible."""
    columns, shown = table.columns, len(table.columns[0].cells[: table.page_rows])
    if not shown:
        return ""

    def row(cells: Sequence[str], values: Sequence[float | None]) -> str:
        first, *remaining = zip(columns, cells, values, strict=True)
        return f"<tr>{_tag('th scope="row"', *first)}{''.join(_tag('td', *each) for each in remaining)}</tr>"

    head = "".join(_tag('th scope="col"', c, escape(c.heading)) for c in columns)
    cells = [[_html_cell(c, i) for c in columns] for i in range(shown)]
    body = "".join(row(each, [c.values[i] if c.values is not None else None for c in columns]) for i, each in enumerate(cells))
    foot = "".join(row([escape(text) for text in texts], [None] * len(columns)) for texts, _ in _last_rows(columns, shown))
    name, style = escape(table.title), f' class="{table.style}"' if table.style else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{name}"><table{style}><caption>{name}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>{f'<tfoot>{foot}</tfoot>' if foot else ''}</table></div>"
    )


def _tag(tag: str, col: Column, markup: str, value: float | None = None) -> str:
    """Return a cell of a column as HTML element `tag` with content `markup`. value: the number by which the page sorts."""
    kind = {"source": "whole", "bar": "share"}.get(col.kind, col.kind) or ("number" if col.values is not None else "")
    css = f' class="{kind}"' if kind else ""
    data = f' data-value="{value!r}"' if value is not None and tag == "td" else ""
    return f"<{tag}{css}{data}>{markup}</{tag[:2]}>"


def _html_cell(col: Column, i: int) -> str:
    text = col.cells[i]
    if col.kind == "bar":  # the number is next to it, so screen readers skip the bar
        width = f"{100 * float(text):.2f}%"
        return f'<svg class="bar" aria-hidden="true"><rect width="{width}" height="100%" style="fill:var(--c1)"/></svg>'
    if col.kind == "scope":  # the text is a path of scopes, a line feed, and the name in the HLO
        path, _, name = text.partition("\n")
        shown = re.sub(r"([/:])", r"\1<wbr>", escape(path))
        if len(path) > FOLDED:
            first = path[:FOLDED].rpartition("; ")[0] or path[:FOLDED]
            shown = f"<details><summary>{escape(first)} ...</summary>{shown}</details>"
        elif path:
            shown += "<br>"
        return f'{shown}<span class="quiet">{escape(name)}</span>'
    colour = html.swatch(col.colours[i]) if col.colours else ""
    return colour + escape(relative_source(text) if col.kind == "source" else text)


# ---- Markdown


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; columns of numbers are aligned to the right."""
    rows = [list(cells) for cells in rows]
    rule = ["---:" if _are_numbers([cells[i] for cells in rows]) else "---" for i in range(len(headings))]
    return ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows)]
