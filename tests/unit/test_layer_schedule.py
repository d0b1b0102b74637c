"""The schedule of one layer: its start and end in the step, and its lanes on the page."""

import pytest
from gpu_traces import MESH, PROGRAM
from sample_plan import sample

from jaxtrain.page.timeline import Stretch
from jaxtrain.plan import layer_schedule
from jaxtrain.plan.program import hlo
from jaxtrain.plan.report import page
from jaxtrain.plan.topology import parse


@pytest.mark.parametrize(
    ("starts", "layers", "window"),
    [
        ([0.0, 2.0, 4.0, 9.0], 4, (0.0, 2.0)),  # the loss is in the last gap
        ([0.0, 1.0, 4.0, 5.0, 8.0, 9.0], 3, (0.0, 4.0)),  # ring attention with two kernels a layer
        ([0.0], 1, None),
        ([], 8, None),
    ],
)
def test_a_layer_lasts_from_its_attention_to_the_next(starts: list[float], layers: int, window: tuple[float, float] | None):
    assert layer_schedule._window(starts, layers) == window


def test_lanes_are_cut_to_the_layer(monkeypatch: pytest.MonkeyPatch):
    """The lanes have one of the loop's three iterations. A matmul takes the place of attention, and a gather overlaps with the
    matmul.
    """
    module = hlo.parse(PROGRAM)
    monkeypatch.setitem(layer_schedule.roofline.KIND_OF_WORK, "gemm", "attention")
    lanes = layer_schedule.read(module, MESH, parse("h200:2"), sample().rates, 3)
    assert set(lanes) == {"forward: computation", "forward: links"}
    (attention,) = [e for e in lanes["forward: computation"] if e.kind == "attention"]
    assert attention.start == 0 and attention.label == "forward mlp/BTD,DF->BTF"
    ends = {name: max(e.end for e in lane) for name, lane in lanes.items()}
    assert ends["forward: links"] <= ends["forward: computation"] or ends["forward: computation"] == attention.end
    assert all(e.start >= 0 and e.end > e.start for lane in lanes.values() for e in lane)
    assert all(e.kind == "communication" for e in lanes["forward: links"])


def test_the_page_has_the_schedule_behind_the_time_of_a_step():
    lanes = {"forward: computation": [Stretch(0.0, 2.0, "matmul", "", "forward mlp")]}
    text = page.html(sample(), lanes=lanes)
    assert text.index("<h2>Time of a step") < text.index("<h2>Schedule of a layer") < text.index("<h2>Kernels")
    assert "forward 2.00 ms" in text and "forward mlp" in text
    assert "Schedule of a layer" not in page.html(sample())
    assert "Schedule of a layer" not in page.html(sample(fits=False), lanes=lanes)
