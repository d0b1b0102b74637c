"""benchmarks/what_fits.py: its page and its search have a plan or a reason in every row."""

import re

import made_plans
import pytest

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


@pytest.mark.parametrize(
    ("model", "machine", "moments"),
    [("llama2_7b", "h200:8", "f32"), ("llama2_13b", "h200:1", "bf16"), ("llama3_405b", "h200:8", "-")],
    ids=["fits", "fits with narrower moments", "does not fit"],
)
def test_a_row_is_the_best_of_a_search_or_says_the_least_memory(model, machine, moments, monkeypatch):
    planned = made_plans.plan_inline(monkeypatch)
    found = what_fits.fill(MODELS[model], machine, plan_one="made_plans:above")
    assert len(planned) == len(found.tried) <= what_fits.MOST
    plan = found.best and found.best.plan
    row = dict(zip(what_fits.HEADINGS, what_fits.cells(found, plan), strict=True))
    assert (row["GPUs"], row["moments"]) == (machine, moments)
    if plan:
        assert row["peak"] == f"{plan.memory.peak_gib:.1f}" and row["scaling"] == "100.0%"
    else:
        assert f"{found.least_gib:,.0f} GiB" in row["layout"] and found.least_gib > found.usable_gib
