"""The document of an HTML report, and its small elements: tiles, paragraphs, legends.

A page is one file that needs no network. Without scripts, all of it can be read. Functions return markup and
escape all text. Tables are in `jaxtrain.report.tables`, charts in `jaxtrain.report.charts`.
"""

import re
from collections.abc import Sequence
from html import escape, unescape
from importlib import resources

# Block every network request, so that no name in a report can cause one.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def document(title: str, description: str, body: Sequence[str]) -> str:
    """Return a complete HTML page. `title` and `description` are text, `body` is markup."""
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
    return (resources.files("jaxtrain.report") / "assets" / name).read_text(encoding="utf-8")


def heading(title: str) -> str:
    """Return the heading of a section, which `contents` links to."""
    return f'<h2 id="{_anchor(title)}">{escape(title)}</h2>'


def contents(body: Sequence[str]) -> str:
    """Return links to all headings of a page's `body`."""
    titles = [unescape(title) for title in re.findall("<h2 id=[^>]+>([^<]+)</h2>", "".join(body))]
    links = (f'<a href="#{_anchor(title)}">{escape(title)}</a>' for title in titles)
    return f'<nav class="contents" aria-label="Contents">{" ".join(links)}</nav>'


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def collapsible(title: str, body: str) -> str:
    """Return markup that is hidden until its title is clicked; "" if `body` is empty."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def tiles(cells: Sequence[tuple[str, str, str]]) -> str:
    """Return the tiles with the key figures of a page. cells: (name, value, note) of each tile."""
    shown = (f"<div><dt>{escape(a)}</dt><dd>{escape(b)}<span>{escape(c)}</span></dd></div>" for a, b, c in cells)
    return f'<dl class="tiles">{"".join(shown)}</dl>'


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph; "" if `text` is empty. kind: CSS class, "quiet" or "key"."""
    return f"<p{f' class="{kind}"' if kind else ''}>{escape(text)}</p>" if text else ""


def swatch(colour: str) -> str:
    """Return a small square of a CSS colour, for legends and tables; an outlined square if `colour` is empty."""
    return f'<span class="swatch" style="background:{colour}"></span>' if colour else '<span class="swatch outline"></span>'


def chart_legend(entries: Sequence[tuple[str, str]], notes: Sequence[str] = ()) -> str:
    """Return the legend of a chart. entries: (name, CSS colour) of each entry. notes: texts after the entries."""
    shown = [f"<span>{swatch(colour)}{escape(name)}</span>" for name, colour in entries]
    shown += [f"<span>{escape(note)}</span>" for note in notes]
    return f'<p class="key">{" &ensp; ".join(shown)}</p>'


def frame_page(page: str) -> str:
    """Return a page in an HTML frame for a notebook, so that the page's style does not affect the notebook."""
    return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 640px; border: 0"></iframe>'
