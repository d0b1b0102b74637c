"""benchmarks/what_fits.py: which layouts are compiled for a cell of its table, with made-up plans, and the page."""

import re
from types import SimpleNamespace

import pytest

from benchmarks import studies, what_fits
from benchmarks.studies import MODELS
from benchmarks.what_fits import Cell, Layout
from jaxtrain.plan.search.parallel import Outcome
from jaxtrain.plan.topology import parse


def fill(model: str, machine: str, above: float, by_nodes: float = 1.0) -> tuple[Cell, list[Layout]]:
    """Return a cell of the page's table, and the layouts compiled for it.

    Args:
        above: a plan's memory beside its state, as a multiple of the layout's bound.
        by_nodes: a plan's step time as a multiple of the layout's bound, if the state is sharded within each node.
    """
    compiled: list[Layout] = []
    topology = parse(machine)

    def make(layout: Layout) -> Outcome:
        compiled.append(layout)
        fits = taken(layout, machine, above) <= topology.usable_gib()
        time = SimpleNamespace(step_ms=1e3 * layout.step_s * (by_nodes if layout.run.mesh.data > 1 else 1.0))
        memory = SimpleNamespace(taken_gib=taken(layout, machine, above))
        return Outcome(SimpleNamespace(fits=fits, memory=memory, time=time), "planned")  # type: ignore[arg-type]

    return what_fits.fill(MODELS[model], topology, make), compiled


def taken(layout: Layout, machine: str, above: float) -> float:
    m = layout.run.model
    model = next(x for x in MODELS.values() if x.keys["d_model"] == m.d_model and x.keys["num_layers"] == m.num_layers)
    state = layout.run.mesh.data * what_fits.state_gib(model, parse(machine), layout.run.dtypes.m)
    return state + above * (layout.memory_gib - state)


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
        ("llama_175b", 175, 5e-3),  # Llama's architecture at the size of another model
        ("llama_180b", 180, 5e-3),
    ],
)
def test_shapes_have_the_published_number_of_parameters(model, billions, within):
    assert what_fits.parameters(MODELS[model]) / 1e9 == pytest.approx(billions, rel=within)


def test_what_cannot_fit_is_not_compiled():
    cell, compiled = fill("llama2_70b", "h200:2", 1.0)
    assert not compiled
    # 68.98 billion parameters of 4 bytes and two moments of 2, over 2 GPUs.
    assert cell.why_not.startswith("does not fit: state alone 257 GiB a GPU, 134 GiB")
    # The state would fit on four GPUs. With gradients and the largest weight it does not.
    cell, compiled = fill("llama2_70b", "h200:4", 1.0)
    assert not compiled and re.match(r"does not fit: at least 1[4-9]\d GiB a GPU by formula", cell.why_not)


def test_the_fastest_that_should_fit_is_compiled_and_kept():
    cell, (layout,) = fill("llama2_13b", "h200:2", 1.2)
    assert cell.run is layout.run and layout.run.dtypes.m == "f32"
    usable = parse("h200:2").usable_gib()
    others = what_fits.layouts(MODELS["llama2_13b"], parse("h200:2"), "f32")
    fitting = [other for other in others if taken(other, "h200:2", what_fits.ABOVE_BOUND) <= usable]
    assert all(layout.step_s <= other.step_s for other in fitting)


def test_a_plan_that_is_too_big_leads_to_a_smaller_layout_then_to_smaller_moments():
    cell, compiled = fill("llama_30b", "h200:4", 2.6)
    first = [layout.memory_gib for layout in compiled if layout.run.dtypes.m == "f32"]
    assert first == sorted(first, reverse=True) and 1 <= len(first) <= what_fits.TRIES
    assert cell.run is compiled[-1].run and cell.run.dtypes.m == "bf16"
    assert all(taken(layout, "h200:4", 2.6) > cell.topology.usable_gib() for layout in compiled[:-1])


def test_where_nothing_fits_the_smallest_compiled_plan_is_the_reason():
    cell, compiled = fill("llama_30b", "h200:4", 9.0)
    assert cell.plan is None and {layout.run.dtypes.m for layout in compiled} == {"f32", "bf16"}
    smallest = min(taken(layout, "h200:4", 9.0) for layout in compiled)
    assert cell.why_not.startswith(f"does not fit: compiled, {smallest:.0f} GiB a GPU")


def test_on_several_nodes_the_faster_way_to_shard_is_shown():
    for by_nodes, replicas in ((0.5, 4), (2.0, 1)):
        cell, compiled = fill("llama2_7b", "h200:8x4", 1.2, by_nodes)
        assert sorted(layout.run.mesh.data for layout in compiled) == [1, 4]
        assert cell.run and cell.run.mesh.data == replicas


def test_a_layout_that_cannot_be_compiled_is_named():
    cell = what_fits.fill(MODELS["llama2_13b"], parse("h200:1"), lambda layout: Outcome(None, "crashed", "SIGSEGV"))
    row = what_fits.cells(cell, None)
    assert row[1] == "crashed: SIGSEGV" and all(row) and len(row) == len(what_fits.HEADINGS)
    # Rules of thumb: 8 and 16 bytes for each of 13.016 billion parameters.
    assert row[8:10] == ["97.0", "194.0"]


def test_the_page_has_every_cell():
    tables = re.split(r"^## ", studies.generated(what_fits.PAGE), flags=re.MULTILINE)[1:-1]
    assert [table.splitlines()[0] for table in tables] == [MODELS[model].name for model in what_fits.ROWS]
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
