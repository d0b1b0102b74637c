"""Sphinx builds the documentation site with these settings: `./run.sh docs`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a unit test reads this file without Sphinx
    from sphinx.application import Sphinx

# Pages of evidence without an estimate for GPUs. All others show the banner, a new one too.
MEASURED = {"buckets", "data_rates", "dpo", "faults", "host_memory", "loss_masks", "padding"}
BANNER = """
```{admonition} Estimates
:class: caution
The times, speeds and memory of GPUs that jaxtrain states on this page are computed. None was measured on a GPU.
```
"""

project = html_title = "jaxtrain"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # levels of headings that links can name, as on GitHub
add_module_names = False
default_role = "code"  # of docstrings
smartquotes = False  # quotes and dashes of code are typed as they are shown
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_copyright = False


def add_banner(app: "Sphinx", page: str, source: list[str]) -> None:
    """Add the banner of estimates below the title of a page of evidence."""
    folder, _, name = page.rpartition("/")
    if folder == "evidence" and name not in MEASURED:
        title, newline, text = source[0].partition("\n")
        source[0] = title + newline + BANNER + text


def setup(app: "Sphinx") -> dict[str, bool]:
    """Connect the banner; pages can be read in parallel."""
    app.connect("source-read", add_banner)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
