"""Sphinx builds the documentation site with these settings: `./run.sh docs`."""

import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a unit test reads this file without Sphinx
    from sphinx.application import Sphinx
    from sphinx.config import Config

DOCS = Path(__file__).parent
ABOUT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Pages of evidence without an estimate for GPUs. All others show the banner, a new one too.
MEASURED = {"buckets", "data_rates", "dpo", "faults", "host_memory", "loss_masks", "padding"}
BANNER = """
```{admonition} Estimates
:class: caution
The times, speeds and memory of GPUs that jaxtrain states on this page are computed. None was measured on a GPU.
```
"""

project, release = ABOUT["name"], ABOUT["version"]
html_title = f"{project} {release}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # levels of headings that links can name, as on GitHub
add_module_names = False
default_role = "code"  # of docstrings
smartquotes = False  # quotes and dashes of code are typed as they are shown
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = html_show_copyright = False


def add_banner(app: "Sphinx", page: str, source: list[str]) -> None:
    """Add the banner of estimates below the title of a page of evidence."""
    folder, _, name = page.rpartition("/")
    if folder == "evidence" and name not in MEASURED:
        title, newline, text = source[0].partition("\n")
        source[0] = title + newline + BANNER + text


def write_scorer(app: "Sphinx", config: "Config") -> None:
    """Write the scorer of the search: scorer.js with the texts of all pages but those of evidence."""
    texts = {path.stem: _searched(path.read_text(encoding="utf-8")) for path in sorted(DOCS.glob("*.md"))}
    made = Path(app.doctreedir) / "scorer.js"
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text(f"const TEXTS = {json.dumps(texts)};\n{(DOCS / 'scorer.js').read_text(encoding='utf-8')}", encoding="utf-8")
    config.html_search_scorer = str(made)


def _searched(text: str) -> tuple[str, list[str]]:
    """Return (words of a page, words of each message that a table of it explains), as scorer.js writes a query."""
    tables = re.findall(r"^\| message \|.*\n((?:\|.*\n?)+)", text, re.MULTILINE)
    messages = [row.split("`")[1] for table in tables for row in table.splitlines() if row.startswith("| `")]
    return _plain(text), [_plain(message) for message in messages]


def _plain(text: str) -> str:
    return f" {' '.join(re.findall(r'\w+', text.lower()))} "


def setup(app: "Sphinx") -> dict[str, bool]:
    """Connect the banner and the search; pages can be read in parallel."""
    app.connect("config-inited", write_scorer)
    app.connect("source-read", add_banner)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
