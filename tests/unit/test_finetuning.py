"""benchmarks/finetuning.py: the tables of plans of adapters, and the golden plans behind them."""

import re

import golden_plans
import pytest

from benchmarks import finetuning, studies
from benchmarks.finetuning import BASES, CASES, NAMES
from jaxtrain.config import launch
from jaxtrain.models import presets

Row = dict[str, str]


def rows(text: str) -> list[Row]:
    """Return the rows of the first table of a text, as heading -> cell."""
    table = re.search(r"^\|.*\n(\|.*\n)+", text, re.MULTILINE)
    assert table
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


ROWS = rows(studies.generated(finetuning.PAGE))


def number(text: str) -> float:
    return float(text.replace(",", "").removesuffix("%"))


def test_the_page_has_a_row_for_each_case():
    assert [(row["model"], row["GPUs"], row["base"]) for row in ROWS] == [(NAMES[c.model], c.machine, c.base) for c in CASES]
    assert NAMES.keys() <= presets().keys() and all(all(row.values()) for row in ROWS)
    assert [case for case, row in zip(CASES, ROWS, strict=True) if number(row["GiB of a GPU"]) <= number(row["of"])] == [
        case for case in CASES if case.fits
    ]


@pytest.mark.parametrize("at", [at for at, case in enumerate(CASES) if case.fits], ids=lambda at: CASES[at].name)
def test_a_row_has_the_figures_of_its_golden_plan(at: int):
    case, row = CASES[at], ROWS[at]
    kept, run = golden_plans.load(golden_plans.path(case.name)), case.request.run
    assert row["kept"] and number(row["GiB of a GPU"]) == pytest.approx(kept["peak_gib"], rel=0.02)
    assert number(row["parameters"]) == pytest.approx(kept["classes_gib"]["parameters"], abs=0.06)
    assert number(row["roofline tokens/s"]) == pytest.approx(run.tokens_per_step / kept["step_ms"] * 1e3, rel=2e-3)
    # The weights that are not in fewer bits are those of a base in bfloat16.
    assert 20 < number(row["MFU causal"]) < number(row["MFU full"]) < 70


def test_the_table_of_users_is_that_of_the_page():
    page = (launch.REPO / finetuning.USERS_PAGE).read_text()
    short = rows(page[page.index(f"| model | GPUs | {' | '.join(BASES)} |") :])
    cells = {(row["model"], row["GPUs"], base): row[base] for row in short for base in BASES if row[base]}
    assert list(cells) == [(NAMES[c.model], c.machine, c.base) for c in CASES]
    for cell, row, case in zip(cells.values(), ROWS, CASES, strict=True):
        held, of, speed = row["GiB of a GPU"], row["of"], row["roofline tokens/s"]
        figures = [number(text) for text in re.findall(r"[\d,]+", cell.rstrip(","))]
        assert figures == pytest.approx([number(held), number(speed if case.fits else of)], rel=0.01, abs=0.51)
        assert cell.startswith("needs") != case.fits
