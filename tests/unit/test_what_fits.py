"""benchmarks/what_fits.py: which layouts are compiled for a cell of its table, with made-up plans, and the page."""

import re
from types import SimpleNamespace

from benchmarks import studies, what_fits
from benchmarks.studies import MODELS
from benchmarks.what_fits import Cell, Layout
from jaxtrain.plan.search.parallel import Outcome
from jaxtrain.plan.topology import parse


def fill(model: str, machine: str, above: float) -> tuple[Cell, list[Layout]]:
    """Return a cell of the page's table, and the layouts compiled for it.

    Args:
        above: a plan's memory beside its state, as a multiple of the layout's bound.
    """
    compiled: list[Layout] = []
    topology = parse(machine)

    def make(layout: Layout) -> Outcome:
        compiled.append(layout)
        fits = taken(layout, machine, above) <= topology.usable_gib()
        time = SimpleNamespace(step_ms=1e3 * layout.step_s)
        memory = SimpleNamespace(taken_gib=taken(layout, machine, above))
        return Outcome(SimpleNamespace(fits=fits, memory=memory, time=time), "planned")  # type: ignore[arg-type]

    return what_fits.fill(MODELS[model], topology, make), compiled


def taken(layout: Layout, machine: str, above: float) -> float:
    m = layout.run.model
    model = next(x for x in MODELS.values() if x.keys["d_model"] == m.d_model and x.keys["num_layers"] == m.num_layers)
    state = layout.run.mesh.data * what_fits.state_gib(model, parse(machine), layout.run.dtypes.m)
    return state + above * (layout.memory_gib - state)


def test_a_plan_that_is_too_big_leads_to_a_smaller_layout_then_to_smaller_moments():
    cell, compiled = fill("llama_30b", "h200:4", 2.6)
    first = [layout.memory_gib for layout in compiled if layout.run.dtypes.m == "f32"]
    assert first == sorted(first, reverse=True) and 1 <= len(first) <= what_fits.TRIES
    assert cell.run is compiled[-1].run and cell.run.dtypes.m == "bf16"
    assert all(taken(layout, "h200:4", 2.6) > cell.topology.usable_gib() for layout in compiled[:-1])


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
