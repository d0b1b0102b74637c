"""The shell of an HTML report and its texts: document, sections, tiles, tables, lists.

A page is one file that needs no network and is complete without scripts. Functions return markup and escape every text that
they are given, except `Markup`. Charts are in `jaxtrain.page.charts`.
"""

import dataclasses
from collections.abc import Sequence
from html import escape
from importlib import resources

# Block every request, whatever a name in a report contains.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class Markup(str):
    """A text that is HTML already."""


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        heading: text of its header.
        cells: one text per row.
        values: numbers that sort the rows; None for a column of texts. Numbers are right-aligned.
        kind: CSS class: "number", "whole" (one line), "path" and "scope" (break anywhere), "share" (a bar).
        total: text of the last row; a table has one if its first column has a total.
    """

    heading: str
    cells: Sequence[str]
    values: Sequence[float] | None = None
    kind: str = ""
    total: str = ""


def document(title: str, description: str, body: Sequence[str]) -> str:
    """Return a whole page. `title` and `description` are text, `body` is markup."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}'
        f'</title>\n<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="description" '
        f'content="{escape(description)}">\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<link rel="icon" href="data:,">\n<style>\n{asset("page.css")}</style>\n</head>\n<body>\n'
        + "\n".join(filter(None, body))
        + f"\n<script>\n{asset('page.js')}</script>\n</body>\n</html>\n"
    )


def asset(name: str) -> str:
    """Return the text of a file of page/assets."""
    return (resources.files("jaxtrain.page") / "assets" / name).read_text(encoding="utf-8")


def section(title: str, *parts: str) -> str:
    """Return the parts (markup) below a heading; "" if all of them are empty."""
    body = "".join(parts)
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def folded(title: str, body: str) -> str:
    """Return markup that a click on its title shows; "" if it is empty."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def tiles(cells: Sequence[tuple[str, str, str]]) -> str:
    """Return the key figures of a page: (name, value, note) each."""
    shown = (f"<div><dt>{escape(a)}</dt><dd>{escape(b)}<span>{escape(c)}</span></dd></div>" for a, b, c in cells)
    return f'<dl class="tiles">{"".join(shown)}</dl>'


def table(caption: str, columns: Sequence[Column], kind: str = "") -> str:
    """Return a table. Its first column names the rows and stays in sight while a wide table scrolls; "" without rows.

    kind: CSS class: "sortable" (by a click on a header), "small" (narrow).
    """
    if not columns[0].cells:
        return ""

    def css(c: Column) -> str:
        return f' class="{c.kind or "number"}"' if c.kind or c.values is not None else ""

    def cell(c: Column, i: int) -> str:
        text = c.cells[i] if isinstance(c.cells[i], Markup) else escape(c.cells[i])
        if c is columns[0]:
            return f'<th scope="row"{css(c)}>{text}</th>'
        value = f' data-value="{c.values[i]!r}"' if c.values is not None else ""
        return f"<td{css(c)}{value}>{text}</td>"

    head = "".join(f'<th scope="col"{css(c)}>{escape(c.heading)}</th>' for c in columns)
    rows = "".join(f"<tr>{''.join(cell(c, i) for c in columns)}</tr>" for i in range(len(columns[0].cells)))
    foot = ""
    if columns[0].total:
        totals = "".join(f"<td{css(c)}>{escape(c.total)}</td>" for c in columns[1:])
        foot = f'<tfoot><tr><th scope="row">{escape(columns[0].total)}</th>{totals}</tr></tfoot>'
    name = escape(caption)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{name}"><table{f' class="{kind}"' if kind else ""}>'
        f"<caption>{name}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>{foot}</table></div>"
    )


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of text; "" for an empty one. kind: CSS class: "quiet", "key"."""
    return f"<p{f' class="{kind}"' if kind else ''}>{escape(text)}</p>" if text else ""


def bullets(title: str, lines: Sequence[str], kind: str = "") -> str:
    """Return a list of texts below a heading; "" for an empty one. kind: CSS class: "warnings"."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return section(title, f'<ul class="list {kind}">{items}</ul>') if items else ""


def swatch(colour: str) -> str:
    """Return a patch of a CSS colour, for keys and tables; "": an outline."""
    return f'<span class="swatch" style="background:{colour}"></span>' if colour else '<span class="swatch outline"></span>'


def key(parts: Sequence[tuple[str, str]], notes: Sequence[str] = ()) -> str:
    """Return the legend of a chart: (name, CSS colour) of its parts, and texts."""
    shown = [f"<span>{swatch(colour)}{escape(name)}</span>" for name, colour in parts]
    shown += [f"<span>{escape(note)}</span>" for note in notes]
    return f'<p class="key">{" &ensp; ".join(shown)}</p>'


def plural(n: int, noun: str) -> str:
    """Return `1 GPU`, `8 GPUs`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
