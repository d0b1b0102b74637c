"""The pages in a real browser: nothing overlaps or leaves the window, scripts run, and no page loads a file."""

import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gpu_traces import gpu_run, gpu_space, profile_of
from made_runs import everything, fake, line
from pages import curves_of
from sample_plan import sample

from jaxtrain.report import plan_page, profile, run_page
from jaxtrain.report.charts import Curve, LineChart, draw_chart
from jaxtrain.report.html import document
from jaxtrain.report.layer_schedule import LaneEvent
from jaxtrain.report.run import read_runs

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium here: the pages are checked as text only")


def opened(text: str, folder: Path, width: int) -> tuple[str, list[str]]:
    """Return a page's document after its scripts ran in a browser, and the lines of the browser's console."""
    path = folder / "page.html"
    path.write_text(text)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"]
    command = [str(BROWSER), *flags, f"--window-size={width},1200", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


LAYOUT = """<pre id="probe"></pre><script>
const found = { words: [], overlaps: [], outside: [], wide: document.documentElement.scrollWidth - innerWidth, tips: [] };
for (const chart of document.querySelectorAll(".chart, .lanes")) {
  const boxes = [...chart.querySelectorAll("text")].filter((t) => t.getClientRects().length)
    .map((t) => [t.textContent, t.getBoundingClientRect()]);
  boxes.forEach(([a, p], i) => {
    found.words.push(a);
    if (p.left < 0 || p.right > innerWidth) found.outside.push(a);
    for (const [b, q] of boxes.slice(i + 1))
      if (p.left < q.right && q.left < p.right && p.top < q.bottom - 2 && q.top < p.bottom - 2) found.overlaps.push([a, b]);
  });
  const shown = [...chart.children].find((c) => c.tagName === "svg" && c.getClientRects().length);
  if (!shown) continue; // lanes have no cursor
  const plot = shown.getBoundingClientRect(), tip = chart.querySelector(".tip"), tips = [];
  for (const part of [0, 1]) {
    const clientX = plot.left + part * plot.width;
    chart.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY: plot.top + 5 }));
    const box = tip.getBoundingClientRect();
    if (box.left < 0 || box.right > innerWidth) found.outside.push(tip.textContent);
    tips.push(tip.textContent);
  }
  for (const key of ["Home", "ArrowRight"]) chart.dispatchEvent(new KeyboardEvent("keydown", { key }));
  found.tips.push([...tips, tip.textContent]);
}
MORE
document.getElementById("probe").textContent = JSON.stringify(found);
</script>"""


def laid_out(page: str, folder: Path, width: int, more: str = "") -> dict[str, Any]:
    """Measure a page in a browser, with the script LAYOUT, and return the script's `found`.

    Checks that the console is empty, that no texts overlap or leave the window, and that the page is no wider than the window.

    Args:
        width: the window's width in px.
        more: further statements of the script, which add to `found`.
    """
    document, console = opened(page.replace("</body>", f"{LAYOUT.replace('MORE', more)}</body>"), folder, width)
    assert console == []
    found = json.loads(html.unescape(re.findall(r'<pre id="probe">(.+?)</pre>', document)[0]))
    assert found["overlaps"] == [] and found["outside"] == [] and found["wide"] <= 0
    return found


def five(value: float) -> str:
    return f"{float(f'{value:.5g}'):.10g}"


CONTROLS = """const loss = document.querySelector(".chart");
const labels = () => [...loss.querySelectorAll("svg .axes text")].map((t) => t.textContent);
const smooth = () => loss.querySelectorAll("path.smooth").length;
const set = (id) => document.getElementById(id).click();
found.shown = [labels()];
set("x1"); found.shown.push(labels());
set("log"); found.shown.push(labels());
const before = smooth();
set("smooth"); found.smooth = [smooth(), before];"""


@pytest.mark.parametrize(("several", "width"), [(False, 1280), (False, 500), (True, 1280)])
def test_the_page_of_runs(tmp_path: Path, several: bool, width: int):
    """The page of one run or two fits the window. Buttons and tips of the loss chart work.

    The runs have GPU metrics, losses that are NaN or infinite, a spike, and thousands of lines.
    """
    folders = [everything(tmp_path / "a", 0), everything(tmp_path / "b", 1)]
    shown = run_page.run_html(read_runs(folders if several else folders[:1]))
    found = laid_out(shown, tmp_path, width, CONTROLS)
    if several:
        return
    # because of the spike, the log scale is the default
    steps, tokens, linear = found["shown"]
    assert {"step 1", "1000"} <= {*steps} and "300k" in tokens and {"10", "30"} <= {*steps} & {*tokens}
    assert {"0", "50", "100"} <= {*linear} and found["smooth"] == [0, 1]
    first, last, second = found["tips"][0]  # the loss chart
    curves = curves_of(shown)
    assert first.splitlines()[:2] == ["step 1", f"train {five(curves['train'][1])}"]
    assert last.splitlines()[0] == "step 3000" and f"held-out web {five(curves['held-out web'][3000])}" in last
    assert second.splitlines()[0] != "step 1"


SHARED = """const charts = [...document.querySelectorAll(".chart")];
const shown = (chart) => [...chart.children].find((c) => c.tagName === "svg" && c.getClientRects().length);
const labels = (chart) => [...shown(chart).querySelectorAll("text")].map((t) => t.textContent);
const [loss] = charts, box = shown(loss).getBoundingClientRect(), reset = document.querySelector(".views button");
loss.setPointerCapture = () => {};
const point = (kind, part, more = {}) => loss.dispatchEvent(new PointerEvent(kind, { clientX: box.left + part * box.width,
  clientY: box.top + 9, cancelable: true, ...more }));
const drag = (more) => { point("pointerdown", 0.25, more); point("pointermove", 0.5, more); point("pointerup", 0.5, more); };
const press = (key) => loss.dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }));
const state = () => ({ x: charts.map((c) => labels(c).find((t) => t.startsWith("step"))), labels: charts.map(labels),
  drawn: charts.map((c) => [...shown(c).querySelectorAll("path")].map((p) => p.dataset.curve)),
  reset: reset.getClientRects().length });
const click = (name) => document.querySelector(`.key button[data-legend="${name}"]`).click();
found.select = getComputedStyle(loss).userSelect;
found.before = state();
drag({ pointerType: "touch" }); found.touched = state();
drag(); found.zoomed = state();
point("pointermove", 0.5);
const first = (tip) => [tip.textContent.split("\\n")[0], tip.style.visibility];
found.cursors = charts.map((c) => [...first(c.querySelector(".tip")),
  shown(c).querySelector(".cursor").getAttribute("x1")]);
found.pressed = press("Tab"); loss.dispatchEvent(new MouseEvent("dblclick")); found.reset = state();
press("+"); found.plus = state(); press("Escape"); found.escaped = [state(), press("Escape")];
drag(); for (const _ of "---") press("-"); found.widened = state();
drag(); reset.click(); found.button = state();
click("low"); found.hidden = state(); click("low"); found.back = state();"""


def test_all_charts_share_zoom_cursor_and_hidden_runs(tmp_path: Path):
    """A drag zooms all charts, a double click or the button shows all again. A legend hides a run, and the y axis follows."""
    low = fake(tmp_path / "low", [line(s, loss=1 + s / 1000, grad_norm=1.0 + s) for s in range(1, 402)])
    high = fake(tmp_path / "high", [line(s, loss=50 + s / 10, grad_norm=2.0 + s) for s in range(1, 402)])
    found = laid_out(run_page.run_html(read_runs([low, high])), tmp_path, 1280, SHARED)
    before, zoomed, hidden = found["before"], found["zoomed"], found["hidden"]
    assert len(before["labels"]) > 5 and len(set(before["x"])) == 1
    assert found["select"] == "none" and found["touched"] == before and not before["reset"]
    assert zoomed["reset"] == 1 and set(zoomed["x"]) == {"step 120"}  # of 101 to 201
    assert all({"140", "160", "180", "200"} <= set(labels) and "300" not in labels for labels in zoomed["labels"])
    assert "80" in before["labels"][0] and "80" not in zoomed["labels"][0], "the y axis follows what is visible"
    assert {tuple(each) for each in found["cursors"]} == {("step 151", "visible", "50%")}
    for restored in (found["reset"], found["escaped"][0], found["widened"], found["button"], found["back"]):
        assert restored == before
    assert found["pressed"] and found["escaped"][1], "keys that do nothing on a chart keep their meaning"
    assert set(found["plus"]["x"]) != set(before["x"])
    for n, (all_curves, left) in enumerate(zip(before["drawn"], hidden["drawn"], strict=True)):
        of_low = {"0", "1"} if n == 0 else {"0"}  # raw and smoothed
        assert {*all_curves} - {*left} == of_low
    lowest = min(float(text) for text in hidden["labels"][0] if re.fullmatch(r"[\d.]+", text) and float(text) < 100)
    assert lowest > 40, "the axis begins at the run that is left"


def test_a_curve_stands_where_its_values_are(tmp_path: Path):
    limit = Curve("planned 4", [[10, 30]], [4.0, 4.0], kind="limit")
    curve = Curve("c", [[10, 20, 25, 30]], [1.0, None, math.nan, 3.0])
    page = document("a chart", "", ["<main>", draw_chart(LineChart("a", [curve, limit], zero=True)), "</main>"])
    more = """found.paths = [...document.querySelectorAll("path")].map((p) => p.getAttribute("d"));
const places = (kind, ...names) => [...document.querySelectorAll(kind)]
  .map((e) => names.map((n) => parseFloat(e.getAttribute(n))));
found.dots = places("circle", "cx", "cy"); found.lost = places("line.lost", "x1");"""
    found = laid_out(page, tmp_path, 1280, more)
    high = 4.0 * 1.06
    at = {value: 1000 * (1 - value / high) for value in (1, 3, 4)}
    path, line = ([float(n) for n in re.findall(r"[\d.]+", each)] for each in found["paths"])
    assert line == pytest.approx([0, at[4], 1000, at[4]])
    assert path == pytest.approx([0, at[1], 1000, at[3]]) and found["paths"][0].count("M") == 2, "a gap between two points"
    assert found["dots"] == [pytest.approx([0, at[1] / 10]), pytest.approx([100, at[3] / 10])]
    assert found["lost"] == [[75.0]]


def test_a_page_of_one_line_cannot_be_zoomed(tmp_path: Path):
    run = fake(tmp_path / "run", [line(1, loss=2.0, grad_norm=1.0)])
    found = laid_out(
        run_page.run_html(read_runs([run])),
        tmp_path,
        1280,
        SHARED.partition("found.select")[0]
        + """
found.before = state(); press("+"); drag(); found.after = state();""",
    )
    assert found["before"] == found["after"]


SORTED = """const table = [...document.querySelectorAll("table.sortable")]
  .find((t) => t.caption.textContent.startsWith("Collectives"));
const click = (name) => {
  const head = [...table.tHead.rows[0].cells].find((c) => c.textContent === name);
  head.querySelector("button").click();
  return [head.getAttribute("aria-sort"), ...[...table.tBodies[0].rows].map((r) => r.cells[head.cellIndex].textContent)];
};
found.sorted = [click("count"), click("count"), click("kind")];
found.links = [...document.querySelectorAll(".contents a")].map((a) => [a.textContent,
  document.querySelectorAll(`h2[id="${a.getAttribute("href").slice(1)}"]`).length]);
found.position = innerWidth > 860 ? getComputedStyle(document.querySelector(".contents")).position : "sticky";"""


LAYER = {
    "forward: computation": [LaneEvent(0, 2, "attention", "forward attention"), LaneEvent(2, 2.01, "matmul", "forward mlp")],
    "backward: links": [LaneEvent(1, 5, "communication", "backward gather")],
}


@pytest.mark.parametrize("width", [1280, 700, 420])
def test_the_page_of_a_plan(tmp_path: Path, width: int):
    """Every band has a letter, also the loss's, which is 1% of the schedule. Each event of the layer is drawn."""
    more = """found.events = [...document.querySelectorAll(".lanes rect")].map((r) => r.getBoundingClientRect().width);"""
    found = laid_out(plan_page.plan_html(sample(), steps=50_000, layer=LAYER), tmp_path, width, SORTED + more)
    assert {"peak 40.8 GiB", "usable 134.4 GiB", "GiB", "0 ms", "forward: computation", "backward: links"} <= set(
        found["words"]
    )
    assert [word for word in found["words"] if re.fullmatch("[A-Z]", word)] == ["A", "B", "C", "D"]
    attention, matmul, gather = found["events"]
    assert 0 < matmul < 4 and gather == pytest.approx(2 * attention, rel=0.01)
    counts = ["64", "32", "3", "1", "1"]
    assert found["sorted"][:2] == [["descending", *counts], ["ascending", *counts[::-1]]]
    assert found["sorted"][2][:2] == ["ascending", "all-gather"]
    tips = [text.splitlines() for text in found["tips"][0]]
    assert [lines[0] for lines in tips] == ["12.1 GiB, forward", "16.2 GiB, optimizer", "12.3 GiB, forward"]
    for first, *classes in tips:
        values = [float(text.split()[-1]) for text in classes]
        assert len(values) > 1 and sum(values) == pytest.approx(float(first.split()[0]), abs=0.11)
    assert len(found["links"]) > 5 and all(there == 1 for _, there in found["links"]) and found["position"] == "sticky"


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_of_a_profile(tmp_path: Path, width: int):
    """The tables can be sorted, and lost time comes first."""
    found = profile_of(gpu_run(tmp_path / "run", gpu_space()[0]))
    probe = """const table = document.querySelector("table.sortable");
table.tHead.querySelectorAll("button")[1].click();
found.first = Number(table.tBodies[0].rows[0].cells[1].dataset.value);
found.titles = [...document.querySelectorAll("h2")].map((h) => h.textContent);"""
    seen = laid_out(profile.make_html(found), tmp_path, width, probe)
    assert seen["first"] == max(found.by_kind.values()) and seen["titles"][0] == "Lost time"


def test_a_page_with_a_mistake_would_be_seen(tmp_path: Path):
    """The console reports a script's error and a blocked image, so an empty console proves that a page has neither."""
    shown = plan_page.plan_html(sample())
    _, console = opened(shown.replace("const data =", "const data = missing +"), tmp_path, 1280)
    assert any("missing is not defined" in line for line in console)
    _, console = opened(shown.replace("</main>", '<img src="https://example.com/x.png"></main>'), tmp_path, 1280)
    assert any("Content Security Policy" in line for line in console)
