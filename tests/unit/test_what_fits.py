"""What fits: how a cell is pruned, tried and judged, with made-up plans; and the page."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxtrain.plan.known import what_fits
from jaxtrain.plan.known.well_known import SHAPES
from jaxtrain.plan.known.what_fits import Cell, Layout, Track
from jaxtrain.plan.search.parallel import Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "what_fits.md"


def plan(track: Track, layout: Layout, above: float) -> Outcome:
    """One that needs so many times more than its bound says, beside the state; and takes twice the time."""
    peak = track.state_gib + above * (layout.memory_gib - track.state_gib)
    memory, time = SimpleNamespace(peak_gib=peak, taken_gib=peak), SimpleNamespace(step_ms=2e3 * layout.step_s)
    return Outcome(SimpleNamespace(fits=peak <= track.usable_gib, memory=memory, time=time), "planned")  # type: ignore[arg-type]


def settle(cell: Cell, above: float) -> list[tuple[Track, Layout]]:
    """Lets a cell have the plans that it asks for, and returns what it asked for."""
    asked = []
    while todo := cell.todo():
        for track, layout in todo:
            asked.append((track, layout))
            track.settle(layout, plan(track, layout, above))
    return asked


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


@pytest.mark.parametrize(
    ("model", "billions", "within"),
    [
        ("llama2_7b", 6.738, 1e-3),
        ("llama2_13b", 13.016, 1e-3),
        ("llama_30b", 32.529, 1e-3),
        ("llama2_70b", 68.977, 1e-3),
        ("llama3_405b", 405.9, 1e-3),
        ("llama_175b", 175, 5e-3),  # in another's likeness
        ("llama_180b", 180, 5e-3),
    ],
)
def test_shapes_have_the_published_number_of_parameters(model, billions, within):
    assert what_fits.parameters(SHAPES[model]) / 1e9 == pytest.approx(billions, rel=within)


def test_what_cannot_fit_is_not_compiled():
    cell = Cell(SHAPES["llama2_70b"], "h200:2")
    assert not cell.todo()
    # 68.98 billion parameters of 4 bytes and two moments of 2, over 2 GPUs.
    assert cell.why_not.startswith("does not fit: state alone 257 GiB a GPU, 134 GiB")
    # The state would fit on four; with gradients and the largest weight it does not.
    cell = Cell(SHAPES["llama2_70b"], "h200:4")
    assert not cell.todo()
    assert re.match(r"does not fit: at least 1[4-9]\d GiB a GPU by formula", cell.why_not)


def test_the_fastest_that_should_fit_is_compiled_and_kept():
    cell = Cell(SHAPES["llama2_13b"], "h200:2")
    ((track, layout),) = settle(cell, above=1.2)
    assert track.moments == "f32" and cell.best is track and track.run is layout.run
    slower = [other for other in track.layouts if track.guess(other) <= track.usable_gib]
    assert all(layout.step_s <= other.step_s for other in slower)


def test_a_plan_that_is_too_big_leads_to_a_smaller_layout_then_to_smaller_moments():
    cell = Cell(SHAPES["llama_30b"], "h200:4")
    asked = settle(cell, above=2.6)
    first = [layout.memory_gib for track, layout in asked if track.moments == "f32"]
    assert first == sorted(first, reverse=True) and 1 <= len(first) <= what_fits.TRIES
    assert asked[-1][0].moments == "bf16" and cell.best is not None and cell.best.moments == "bf16"
    for track, layout in asked[:-1]:
        assert plan(track, layout, 2.6).plan.memory.taken_gib > cell.usable_gib  # type: ignore[union-attr]


def test_where_nothing_fits_the_smallest_compiled_plan_is_the_reason():
    cell = Cell(SHAPES["llama_30b"], "h200:4")
    asked = settle(cell, above=9.0)
    sizes = [plan(track, layout, 9.0).plan.memory.taken_gib for track, layout in asked]  # type: ignore[union-attr]
    assert cell.best is None and {track.moments for track, _ in asked} == {"f32", "bf16"}
    assert cell.why_not.startswith(f"does not fit: compiled, {min(sizes):.0f} GiB a GPU")


def test_on_several_nodes_the_faster_way_to_split_is_shown():
    cell = Cell(SHAPES["llama2_7b"], "h200:8x4")
    todo = cell.todo()
    assert sorted(layout.run.mesh.data for _, layout in todo) == [1, 4]
    for track, layout in todo:
        made = plan(track, layout, 1.2)
        made.plan.time.step_ms = 300 if layout.run.mesh.data == 4 else 400  # type: ignore[union-attr]
        track.settle(layout, made)
    assert not cell.todo() and cell.best and cell.best.run and cell.best.run.mesh.data == 4


def test_a_layout_that_cannot_be_compiled_and_a_spent_budget_are_said():
    for outcome, said in (
        (Outcome(None, "stopped"), "not planned: budget"),
        (Outcome(None, "crashed", "SIGSEGV"), "crashed: SIGSEGV"),
    ):
        cell = Cell(SHAPES["llama2_13b"], "h200:1")
        ((track, layout),) = cell.todo()
        track.settle(layout, outcome)
        assert not cell.todo()
        row = what_fits.row(cell, None)
        assert row[1] == said and all(row) and len(row) == len(what_fits.HEADINGS)
        # Rules of thumb: 8 and 16 bytes for each of 13.016 billion parameters.
        assert row[8:10] == ["97.0", "194.0"]


def test_the_page_has_every_cell():
    tables = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:-1]
    assert [table.splitlines()[0] for table in tables] == [SHAPES[model].name for model in what_fits.MODELS]
    for table in tables:
        headings, _, *rows = [cells_of(line) for line in table.splitlines() if line.startswith("|")]
        assert tuple(headings) == what_fits.HEADINGS
        assert [row[0] for row in rows] == list(what_fits.MACHINES)
        fitting = []
        for row in rows:
            cell = dict(zip(headings, row, strict=True))
            assert all(row), row
            if cell["peak"] == "-":
                assert cell["layout"].startswith("does not fit: "), row
                continue
            fitting.append(cell)
            parts = [float(cell[name]) for name in ("weights", "moments GiB", "gradients", "activations")]
            assert sum(parts) < float(cell["peak"]) < 134
        assert fitting[0]["scaling"] == "100.0%"
