"""The page of benchmarks/what_fits.py has a plan or a reason in every cell."""

import re

from benchmarks import studies, what_fits
from benchmarks.studies import MODELS


def test_the_page_has_every_cell():
    tables = re.split(r"^## ", studies.generated(what_fits.PAGE), flags=re.MULTILINE)[1:-1]
    assert [table.splitlines()[0] for table in tables] == [MODELS[model].name for model in what_fits.ROWS]
    for table in tables:
        lines = [line.strip().strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
        headings, _, *rows = [[cell.strip() for cell in line] for line in lines]
        assert tuple(headings) == what_fits.HEADINGS
        assert [row[0] for row in rows] == list(what_fits.MACHINES)
        fitting = []
        for row in rows:
            cell = dict(zip(headings, row, strict=True))
            assert all(row), row
            if cell["peak"] == "-":
                continue
            fitting.append(cell)
            parts = [float(cell[name]) for name in ("weights", "moments GiB", "gradients", "activations")]
            assert sum(parts) < float(cell["peak"]) < 134
        assert fitting[0]["scaling"] == "100.0%"
