"""The pages in a real browser: nothing overlaps or leaves the window, scripts run, and no page loads a file."""

from pathlib import Path

import pytest
from gpu_traces import gpu_run, gpu_space
from made_runs import everything
from pages import BROWSER, curves_of, laid_out, opened
from sample_plan import sample

from jaxtrain.plan.report import page as plan_page
from jaxtrain.profile import measure, trace
from jaxtrain.profile import report as profile_report
from jaxtrain.report import page as run_page
from jaxtrain.report.run import read_all

pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium here: the pages are checked as text only")


def five(value: float) -> str:
    return f"{float(f'{value:.5g}'):.10g}"


CONTROLS = """const loss = document.querySelector(".chart");
const views = () => [...loss.children].filter((c) => c.tagName === "svg" && c.getClientRects().length)
  .map((c) => c.getAttribute("class").replace("view ", ""));
const smooth = () => Number(getComputedStyle(loss.querySelector("path.smooth")).display !== "none");
const set = (id) => document.getElementById(id).click();
found.shown = [views()];
set("x1"); found.shown.push(views());
set("log"); found.shown.push(views());
const before = smooth();
set("smooth"); found.shown.push([smooth(), before]);"""


@pytest.mark.parametrize(("several", "width"), [(False, 1280), (False, 500), (True, 1280)])
def test_the_page_of_runs(tmp_path: Path, several: bool, width: int):
    """The page of one run or two fits the window. Buttons and tips of the loss chart work.

    The runs have GPU metrics, losses that are NaN or infinite, a spike, and thousands of lines.
    """
    folders = [everything(tmp_path / "a", 0), everything(tmp_path / "b", 1)]
    shown = run_page.html(read_all(folders if several else folders[:1]))
    found = laid_out(shown, tmp_path, width, CONTROLS)
    if several:
        return
    # because of the spike, the log scale is the default
    assert found["shown"] == [["x0 log"], ["x1 log"], ["x1 linear"], [0, 1]]
    first, last, second = found["tips"][0]  # the loss chart
    curves = curves_of(shown)
    assert first.splitlines()[:2] == ["step 1", f"train {five(curves['train'][1])}"]
    assert last.splitlines()[0] == "step 3000" and f"held-out web {five(curves['held-out web'][3000])}" in last
    assert second.splitlines()[0] != "step 1"


SORTED = """const table = [...document.querySelectorAll("table.sortable")]
  .find((t) => t.caption.textContent.startsWith("Collectives"));
const click = (name) => {
  const head = [...table.tHead.rows[0].cells].find((c) => c.textContent === name);
  head.querySelector("button").click();
  return [head.getAttribute("aria-sort"), ...[...table.tBodies[0].rows].map((r) => r.cells[head.cellIndex].textContent)];
};
found.sorted = [click("count"), click("count"), click("kind")];"""


@pytest.mark.parametrize("width", [1280, 700])
def test_the_page_of_a_plan(tmp_path: Path, width: int):
    found = laid_out(plan_page.html(sample(), steps=50_000), tmp_path, width, SORTED)
    assert {"peak 40.8 GiB", "usable 134.4 GiB", "forward", "backward", "GiB"} <= set(found["words"])
    assert ("optimizer" in found["words"]) == (width > 1000)
    counts = ["64", "32", "3", "1", "1"]
    assert found["sorted"][:2] == [["descending", *counts], ["ascending", *counts[::-1]]]
    assert found["sorted"][2][:2] == ["ascending", "all-gather"]
    assert found["tips"][0] == ["12.1 GiB, forward", "16.2 GiB, optimizer", "12.3 GiB, forward"]


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_of_a_profile(tmp_path: Path, width: int):
    """The table can be sorted. A drag and the buttons change the timeline's window, and the pointer shows
    an operation's name.
    """
    folder = gpu_run(tmp_path / "run", gpu_space()[0])
    profile = measure.profile(trace.find(folder)[-1], measure.run_around(folder))
    probe = """const table = document.querySelector("table.sortable");
table.tHead.querySelectorAll("button")[1].click();
found.first = Number(table.tBodies[0].rows[0].cells[1].dataset.value);
const canvas = document.querySelector(".timeline canvas"), box = canvas.getBoundingClientRect();
canvas.setPointerCapture = () => {};
const point = (kind, x, y) => canvas.dispatchEvent(new PointerEvent(kind, { clientX: box.left + x * box.width,
  clientY: box.top + y * box.height }));
const range = () => document.querySelector(".controls span").textContent;
const press = (name) => (document.querySelector(`.controls [aria-label="${name}"]`).click(), range());
found.whole = press("whole step");
point("pointerdown", 0.25, 0.5); point("pointermove", 0.75, 0.5); point("pointerup", 0.75, 0.5);
found.zoomed = [range(), press("zoom in"), press("later"), press("whole step")];
point("pointermove", 0.1, 0.6);
found.tip = document.querySelector(".timeline .tip").textContent;
found.pixels = new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data).size;"""
    found = laid_out(profile_report.make_html(profile), tmp_path, width, probe)
    assert found["first"] == max(profile.by_kind.values()) and found["pixels"] > 10
    length = float(found["whole"].split()[-2])
    starts_and_ends = [[float(text.split()[i]) for i in (0, 3)] for text in found["zoomed"]]
    expected = [(0.25, 0.75), (0.375, 0.625), (0.5, 0.75), (0, 1)]
    for shown, part in zip(starts_and_ends, expected, strict=True):
        assert shown == pytest.approx([length * p for p in part], abs=0.02 * length)
    assert found["tip"].splitlines()[0] == "forward mlp/BTD,DF->BTF, mlp"


def test_a_page_with_a_mistake_would_be_seen(tmp_path: Path):
    """The console reports a script's error and a blocked image, so an empty console proves that a page has neither."""
    shown = plan_page.html(sample())
    _, console = opened(shown.replace("const data =", "const data = missing +"), tmp_path, 1280)
    assert any("missing is not defined" in line for line in console)
    _, console = opened(shown.replace("</main>", '<img src="https://example.com/x.png"></main>'), tmp_path, 1280)
    assert any("Content Security Policy" in line for line in console)
