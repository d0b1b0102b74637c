"""What every page is made of: one self-contained document, tables, sentences, tiles. No request leaves it."""

import dataclasses
import json
from collections.abc import Sequence
from html import escape
from importlib import resources

# Nothing may be fetched, whatever a name in a report says.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class Markup(str):
    """A table cell that is HTML already."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table: `values` decide the order of its numbers, and make it a column of numbers."""

    heading: str
    cells: Sequence[str]
    values: Sequence[float] | None = None
    kind: str = ""  # CSS class
    total: str = ""


def document(title: str, description: str, body: Sequence[str]) -> str:
    """A whole page. `title` and `description` are text, `body` is markup."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}'
        f'</title>\n<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="description" '
        f'content="{escape(description)}">\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<link rel="icon" href="data:,">\n<style>\n{_asset("page.css")}</style>\n</head>\n<body>\n'
        + "\n".join(filter(None, body))
        + f"\n<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (resources.files("jaxtrain.page") / "assets" / name).read_text(encoding="utf-8")


def cursor_data(found: object) -> str:
    """What page.js reads off a chart under its cursor, for that chart's element: texts at equal distances, or curves."""
    # "<" as an escape of JSON, so that no name can end the script element.
    text = json.dumps(found, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def tiles(cells: Sequence[tuple[str, str, str]]) -> str:
    """(name, value, note) of the few numbers that stand above all."""
    shown = (f"<div><dt>{escape(a)}</dt><dd>{escape(b)}<span>{escape(c)}</span></dd></div>" for a, b, c in cells)
    return f'<dl class="tiles">{"".join(shown)}</dl>'


def table(caption: str, columns: Sequence[Column], kind: str = "") -> str:
    """A table whose first column names the row. Wide ones scroll by themselves, and can be reached by keyboard to do so."""

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


def say(line: str, kind: str = "") -> str:
    """A paragraph of text."""
    return f"<p{f' class="{kind}"' if kind else ''}>{escape(line)}</p>"


def bullets(title: str, lines: Sequence[str], kind: str = "") -> str:
    """A list of texts under a heading; nothing where it is empty."""
    if not lines:
        return ""
    return f'<h2>{title}</h2><ul class="list {kind}">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def swatch(colour: str) -> str:
    """A patch of a colour, beside the name of what has it."""
    return f'<span class="swatch" style="background:{colour}"></span>'


def plural(n: int, what: str) -> str:
    """`1 GPU`, `8 GPUs`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"
