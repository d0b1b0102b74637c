"""The report of made-up runs: its numbers are those of the runs' files, and a section without data is left out."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import runs
from made_runs import ended, everything, fake, gpu, held_out, line, silence, write_lines
from pages import EVIL, Read, assert_self_contained, curves_of

from jaxtrain import goodput, metrics
from jaxtrain.page.charts import Curve, LineChart, draw, log_ticks, thin, ticks
from jaxtrain.receipt.format import ReceiptError
from jaxtrain.report import __main__ as command
from jaxtrain.report import charts, compare, page
from jaxtrain.report.run import RunError, read, read_all, verdict

# ---- Contents of a page


def test_long_runs_keep_their_spikes_and_stay_small(tmp_path: Path):
    shown = page.html([read(everything(tmp_path / "long", 0, steps=4_000))])
    assert len(shown) < 1_000_000
    curves = curves_of(shown)
    assert len(curves["train"]) < 2000
    assert curves["train"][1500] == 99.5
    assert curves["train"][700] == "NaN" and curves["train"][2500] == "Infinity"
    assert "3 values NaN or infinite, marked" in shown and "train: NaN at 700" in shown


def test_thinning_keeps_what_stands_out():
    draw = random.Random(1)
    values: list[float | None] = [draw.random() for _ in range(20_000)]
    values[7_003], values[9_000], values[12_345], values[15_000] = 50.0, None, -50.0, math.nan
    found = thin(Curve("x", [list(range(20_000))], values), 100)
    assert len(found.y) <= 2 * 100 + 4
    kept = dict(zip(found.x[0], found.y, strict=True))
    assert kept[7_003] == 50.0 and kept[9_000] is None and kept[12_345] == -50.0 and math.isnan(kept[15_000] or 0.0)
    assert found.x[0][0] == 0 and found.x[0][-1] == 19_999 and list(found.x[0]) == sorted(found.x[0])
    for column in range(100):  # the lowest and the highest value of each hundredth
        whole = [v for v in values[200 * column : 200 * column + 199] if v is not None and v == v]
        part = [v for at, v in kept.items() if 200 * column - 2 <= at < 200 * column + 202 and v is not None and v == v]
        assert min(part) <= min(whole) and max(part) >= max(whole)
    short = Curve("x", [[1, 2]], [None, 1.0])
    assert thin(short, 100) is short


def test_a_curve_stands_where_its_values_are():
    limit = Curve("planned 4", [[10, 30]], [4.0, 4.0], kind="limit")
    text = draw(LineChart("a <b>", [Curve("c<d", [[10, 20, 30]], [1.0, None, 3.0]), limit], zero=True))
    high = 4.0 * 1.06
    path, line = re.findall(r'class="curve [^"]*" style="[^"]*" d="([^"]*)"', text)
    assert line == f"M0.0 {1000 * (1 - 4 / high):.1f} 1000.0 {1000 * (1 - 4 / high):.1f}" and "planned 4<" in text
    # two points, on both sides of the gap
    assert path == f"M0.0 {1000 * (1 - 1 / high):.1f}M1000.0 {1000 * (1 - 3 / high):.1f}"
    assert re.findall(r'<circle cx="([\d.]+)%" cy="([\d.]+)%"', text) == [
        ("0.00", f"{100 * (1 - 1 / high):.2f}"),
        ("100.00", f"{100 * (1 - 3 / high):.2f}"),
    ]
    assert "a &lt;b&gt;, over the step. c&lt;d: 1 to 3, lowest 1, highest 3; planned 4: 4 to 4, lowest 4, highest 4." in text
    assert draw(LineChart("empty", [Curve("c", [[1, 2]], [None, math.nan])])) == ""


@pytest.mark.parametrize("low, high", [(0, 1), (3, 3.001), (2, 300), (1, 100_000), (-5, 5), (1e-7, 4e-3), (0.97, 12.3)])
def test_axes_have_few_round_numbers(low: float, high: float):
    found = ticks(low, high)
    assert 2 <= len(found) <= 5 and low <= found[0] and found[-1] <= high * (1 + 1e-12)
    if low > 0:
        found = log_ticks(low, high)
        assert 2 <= len(found) <= 6 and all(low <= t <= high * (1 + 1e-12) for t in found) and found == sorted(found)


def test_the_smoothed_loss_is_a_mean_of_neighbours():
    found = charts.smoothed([1.0, 2.0, 3.0, None, 5.0, math.nan, *[7.0] * 94])  # two points on each side
    assert found[:7] == [2.0, 2.0, 2.75, None, 5.0, None, 6.5]
    assert charts.smoothed([1.0, 2.0, 4.0]) == [1.0, 2.0, 4.0], "a short run is shown as it is"
    assert charts.smoothed([1e30] + [2.5] * 100)[50] == 2.5
    many = charts.smoothed([float(i) for i in range(1000)])
    assert many[500] == pytest.approx(500.0) and many[0] == pytest.approx(10.0)


def test_time_is_drawn_as_it_was_spent():
    """Areas of the timeline are shares of the wall time. The time between a kill and the next attempt is shown as down."""
    lines: list[dict[str, Any]] = [{"kind": "begin", "time": 100.0, "seen": None}]
    lines.append({"kind": "spent", "until": 110.0, "seconds": {"startup": 6.0, "compile": 4.0}, "step": 0, "doing": "step"})
    lines.append({"kind": "spent", "until": 140.0, "seconds": {"step": 27.0, "data": 3.0}, "step": 30, "doing": "step"})
    lines.append({"kind": "begin", "time": 160.0, "seen": 145.0})
    lines.append({"kind": "spent", "until": 165.0, "seconds": {"restore": 5.0}, "step": 30, "doing": "step"})
    lines.append({"kind": "back", "step": 20})
    lines.append({"kind": "spent", "until": 200.0, "seconds": {"step": 35.0}, "step": 60, "doing": "step"})
    lines.append({"kind": "end", "time": 200.0, "exit_code": 0, "reason": "60 steps"})
    found = goodput.summarise(lines)
    drawn = {cause: 0.0 for cause, colour in charts.COLOURS.items() if colour}
    places = r'<rect x="([\d.]+)%" width="([\d.]+)%" y="[\d.]+" height="([\d.]+)" fill="[^"]+"><title>(\w+),'
    rects = re.findall(places, charts.wall_time_strip(found))
    for _, width, height, cause in rects:
        drawn[cause] += float(width) / 100 * float(height) / 60 * found.wall_s
    for cause, seconds in drawn.items():
        assert seconds == pytest.approx(found.parts[cause], abs=0.02 * found.wall_s), cause
    assert found.parts["down"] == 15.0
    # the wall time is 100 s, so 52% is 52 s after the start
    between = {cause for x, width, _, cause in rects if 0 < 52 - float(x) < float(width)}
    assert between == {"down"}


def test_gpus_are_drawn_by_their_range_and_told_one_by_one(tmp_path: Path):
    lines = [line(step) for step in (1, 2, 3)]
    lines += [gpu(step, n, power_w=100.0 * (n + 1) + step) for step in (1, 2, 3) for n in range(4)]
    lines.append(gpu(3, 2, throttled=0.5, throttle_reasons="sw_power_cap+hw_slowdown", ecc_uncorrected=7))
    folder = fake(tmp_path / "run", lines)
    other = [gpu(3, n, process=1, power_w=5.0) for n in range(4)]
    write_lines(folder / "metrics.1.jsonl", other)
    (folder / "metrics.set_aside-1.jsonl").write_text("not read\n")
    run = read(folder)
    assert [(m[0], m[2], m[4]) for m in charts.moments(run, "power_w")] == [(2, 101.0, 402.0), (3, 5.0, 500.0)]
    words = " ".join(Read(page.html([run])).words)
    assert "1.3" in words and "0.2" in words and "sw_power_cap+hw_slowdown" in words
    rows = re.findall(r"<tr><th scope=\"row\">([01].[0-3])</th>(.*?)</tr>", page.html([run]))
    powers = {gpu: re.findall(r">([^<]+)</td>", row)[1:3] for gpu, row in rows}
    assert len(powers) == 8 and powers["0.3"] == ["403.0", "700.0"] and powers["1.3"] == ["5.0", "700.0"]


def test_gpus_of_nodes_that_are_a_step_apart_are_drawn_together(tmp_path: Path):
    """Each process has its own clock, so the GPU lines of two nodes have different steps. The chart combines both nodes."""
    lines = [line(step) for step in range(1, 41)]
    lines += [gpu(step, 0, power_w=500.0) for step in range(2, 40, 2)]
    folder = fake(tmp_path / "run", lines)
    other = [gpu(step, 0, process=1, power_w=100.0) for step in range(1, 40, 2)]
    write_lines(folder / "metrics.1.jsonl", other)
    found = charts.moments(read(folder), "power_w")
    assert len(found) > 8 and [m[0] for m in found] == sorted({m[0] for m in found})
    inside = [m for m in found if 2 < m[0] < 38]
    assert inside and all((m[2], m[4]) == (100.0, 500.0) and 250 < m[3] < 350 for m in inside)
    slow = fake(tmp_path / "slow", [line(40), *(gpu(step, 0, power_w=500.0) for step in range(2, 40, 2) for _ in range(4))])
    write_lines(slow / "metrics.1.jsonl", other)
    assert charts.moments(read(slow), "power_w")[1][2::2] == (100.0, 500.0), "four lines in each step"
    alone = read(fake(tmp_path / "one", [line(1), gpu(1, 0), gpu(1, 1, power_w=700.0)]))
    assert [(m[0], m[2], m[4]) for m in charts.moments(alone, "power_w")] == [(1, 500.0, 700.0)]


def test_rates_and_memory_are_the_newest_attempts_or_not_measured(tmp_path: Path):
    """As in the receipt, values of an earlier attempt do not appear in place of missing ones."""
    lines = [line(s, tokens_per_s_per_device=900.0, peak_memory_gib=99.0 if s < 50 else 40.0) for s in range(1, 53)]
    told = json.loads(ended(None)) | {"resumed_from_step": 49}
    run = read(fake(tmp_path / "run", lines, receipt__json=json.dumps(told)))
    paths = ("speed.tokens_per_s_per_device", "speed.window.last_step", "memory.peak_gib")
    assert [run.figure(path) for path in paths] == [None, None, 40.0]
    assert "tokens/s/device" not in [name for name, *_ in page._tiles(run)]
    told |= {"speed": {"tokens_per_s_per_device": 123.0, "window": {"first_step": 50, "last_step": 52}}}
    run = read(fake(tmp_path / "done", lines, receipt__json=json.dumps(told | {"memory": {"peak_gib": 41.0}})))
    assert [run.figure(path) for path in paths] == [123.0, 52, 41.0]


def test_tokens_of_a_step_do_not_count_what_was_skipped(tmp_path: Path):
    config = {"train": {"global_batch": 8}, "data": {"seq_len": 64}}
    lines = [line(1, tokens=512), line(2, tokens=9 * 512)]  # seven batches were skipped
    assert read(fake(tmp_path / "run", lines, config__json=json.dumps(config))).tokens_per_step == 512
    assert read(fake(tmp_path / "bare", lines)).tokens_per_step is None


def test_warnings_are_those_of_the_logs(tmp_path: Path):
    (tmp_path / "log.txt").write_text(
        "2026-01-01 00:00:00+0000 step 1/2  loss 3\n2026-01-01 00:00:02+0000 WARNING slow\n  and more of it\n"
        "2026-01-01 00:00:04+0000 no WARNING of mine\n2026-01-01 00:00:05+0000 ERROR ends\n"
    )
    (tmp_path / "log.1.txt").write_text("2026-01-01 00:00:03+0000 WARNING other process\n")
    run = read(fake(tmp_path, []))
    assert [text[25:] for text in run.alerts] == [
        "WARNING slow\n  and more of it",
        "WARNING other process",
        "ERROR ends",
    ]


def test_names_in_a_run_cannot_write_the_page(tmp_path: Path):
    told = ended(1, EVIL, config=EVIL, command=EVIL, id=EVIL, overrides={EVIL: EVIL})
    folder = fake(tmp_path / "run", [line(1), line(2), held_out(2, 1.0, set=EVIL)], receipt__json=told)
    (folder / "samples.txt").write_text(f"--- step 2\n{EVIL}\n")
    (folder / "log.txt").write_text(f"2026-01-01 00:00:00+0000 WARNING {EVIL}\n")
    shown = page.html([read(folder)])
    assert '<script>alert("1' not in shown
    assert " ".join(Read(shown).words).count(EVIL) > 6
    assert_self_contained(shown)
    assert_self_contained(page.html(read_all([folder, everything(tmp_path / "other", 0, steps=200)])))


def test_the_controls_choose_among_views_of_every_x_axis_and_scale(tmp_path: Path):
    lines = [line(s, loss=9.0 / s, grad_norm=0.0, tokens=7 * s, time_unix=1e9 + 3600 * s) for s in range(1, 11)]
    shown = page.html([read(fake(tmp_path / "run", [*lines, held_out(4, 2.0)]))])
    assert "time, h" in shown and 'id="log" checked' in shown
    views = re.findall(r'class="view (x\d) (\w+)" data-axis="(\d)" data-from="([\d.]+)" data-to="([\d.]+)"', shown)
    assert [v[:2] for v in views[:6]] == [(f"x{i}", scale) for i in range(3) for scale in ("linear", "log")]
    assert {v[3:] for v in views if v[0] == "x0"} == {("1", "10")}
    assert {v[3:] for v in views if v[0] == "x1"} == {("7", "70")} and {v[3:] for v in views if v[0] == "x2"} == {
        ("0.0", "9.0")
    }
    assert [v for v in views if v[1] == "log"] == views[1:6:2]  # a gradient norm of 0 has no logarithm
    losses = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', shown)[0])
    (evaluated,) = [c for c in losses["curves"] if c["name"] == "held-out"]
    assert evaluated["x"] == [[4], [28], [3.0]]


def test_the_receipt_begins_with_overrides_and_pages_of_the_folder_are_linked(tmp_path: Path):
    told = ended(0, overrides={"optimizer.lr": "2e-3"}, config="tiny", command="python x", packages={"jax": "1"})
    folder = fake(tmp_path / "a run", [line(1)], receipt__json=told, plan__html="x", report__html="x")
    (folder / "profile").mkdir()
    (folder / "profile" / "profile.html").write_text("x")
    shown = page.html([read(folder)], tmp_path / "page.html")
    assert re.findall(r'href="\./([^"]+)"', shown) == [f"a%20run/{n}.html" for n in ("plan", "profile/profile", "report")]
    own = page.html([read(folder)], folder / "report.html")
    assert re.findall(r'href="\./([^"]+)"', own) == ["plan.html", "profile/profile.html"]
    assert_self_contained(own)
    words = Read(own).words
    words = words[words.index("Receipt") :]
    places = [words.index(word) for word in ("optimizer.lr", "2e-3", "python x", "packages.jax")]
    assert places == sorted(places)


def test_the_plan_of_a_run_is_drawn_beside_it(tmp_path: Path):
    config = json.dumps({"train": {"global_batch": 8}, "data": {"seq_len": 100}})
    told = ended(0, planned={"range_s": [0.5, 0.8], "step_s": 0.4, "peak_gib": 70.0}, devices={"count": 2, "kind": ["H100"]})
    run = read(fake(tmp_path / "run", [line(1), line(2)], receipt__json=told, config__json=config))
    shown = page.html([run])
    assert "planned, fastest 0.5<" in shown and "planned, slowest 0.8<" in shown  # seconds
    assert "planned, fastest 800<" in shown and "planned, slowest 500<" in shown  # 400 tokens per device and step
    assert "planned 70<" in shown


# ---- Several runs


def test_several_runs_and_the_best(tmp_path: Path):
    batch = [json.dumps({"train": {"global_batch": n}, "data": {"seq_len": 10}}) for n in (10, 20)]
    lines = [line(s, loss=5.0 - s / 10, tokens_per_s_per_device=100.0) for s in range(1, 31)]
    slow = fake(tmp_path / "x" / "run", lines, config__json=batch[0])
    fast = [line(s, loss=4.0 - s / 10, tokens=200 * s, tokens_per_s_per_device=300.0) for s in range(1, 21)]
    quick = fake(tmp_path / "y" / "run", fast, config__json=batch[1])
    shown = page.html(read_all([slow, quick]))
    read_page = Read(shown)
    assert {"x/run", "y/run"} <= set(read_page.words)  # if two runs have the same name, their folders are shown
    assert "train loss, steps 11 to 20" in read_page.words, "steps that both have"
    (results,) = re.findall(r'<table class="sortable">(.*?)</table>', shown[: shown.index("<h2>Training")])
    losses = [float(v) for v in re.findall(r'data-value="([^"]+)">\d\.\d{4}<', results)]
    assert losses == pytest.approx([3.45, 2.45]), "not the lower loss that more steps gave"
    drawn = [json.loads(s) for s in re.findall(r'<script type="application/json">(.*?)</script>', shown)]
    (losses,) = [c for c in drawn if any("smoothed" in x["name"] for x in c["curves"])]
    assert losses["axes"] == ["step", "tokens", "time, s"]
    assert [axis[-1] for axis in losses["curves"][2]["x"]] == [20, 4000, 0]
    assert "Differences" in read_page.words


def test_a_rate_is_written_in_one_way(tmp_path: Path):
    speed = {"tokens_per_s_per_device": 11_293.9, "tokens_per_s": 11_293.9, "tflops_per_device": None, "mfu_causal": None}
    speed |= {"step_time_s": {"median": 1.0, "p10": 1.0, "p90": 1.0}}
    speed["window"] = {"first_step": 1, "last_step": 9, "lines": 9}
    folders = [fake(tmp_path / name, [line(1), line(9)], receipt__json=ended(0, speed=speed)) for name in ("a", "b")]
    one, several = Read(page.html([read(folders[0])])).words, Read(page.html(read_all(folders))).words
    assert "11,294" in one and "11,294" in several


def test_a_finer_log_is_no_lower_loss(tmp_path: Path):
    """Losses are compared over the same steps, even if one run wrote more lines."""
    fall = [line(s, loss=10.0 - s / 100) for s in range(1, 501)]
    fine, coarse = read(fake(tmp_path / "fine", fall)), read(fake(tmp_path / "coarse", fall[9::10]))
    first = compare.window([fine, coarse], 500)
    assert first == 401
    losses = [compare.loss_over(run, first, 500) for run in (fine, coarse)]
    assert losses == [pytest.approx(10 - 4.505), pytest.approx(10 - 4.55)]
    assert compare.window([fine], 500) == 476  # a twentieth of the lines


def test_held_out_loss_is_compared_where_all_were_evaluated(tmp_path: Path):
    def evaluated(name: str, at: dict[int, float]) -> Path:
        return fake(tmp_path / name, [line(1, loss=1.0), line(2, loss=1.0), *(held_out(s, v) for s, v in at.items())])

    long, short = evaluated("long", {10: 4.0, 20: 3.0, 30: 1.5}), evaluated("short", {10: 5.0, 20: 2.0})
    shown = page.html(read_all([long, short]))
    assert "held-out at step 20" in Read(shown).words
    assert "3.0000" in shown and "2.0000" in shown
    shown = page.html(read_all([long, evaluated("never", {7: 0.5})]))
    assert "held-out, newest" in Read(shown).words and "0.5000" in shown


def test_the_wall_time_of_several_runs_has_a_key(tmp_path: Path):
    spent = {"kind": "spent", "until": 9.0, "seconds": {"startup": 2.0, "step": 7.0}, "step": 3, "doing": "step"}
    ledger = [{"kind": "begin", "time": 0.0, "seen": None}, spent, {"kind": "back", "step": 1}]
    told = "".join(json.dumps(each) + "\n" for each in ledger)
    shown = page.html(read_all([fake(tmp_path / name, [line(1)], goodput__jsonl=told) for name in ("a", "b")]))
    spent_by = shown[shown.index("<h2>Wall time") :]
    assert spent_by.count('class="lanes"') == 2 and spent_by.count('<th scope="col" class="number">share</th>') == 2
    for cause in ("step", "startup", "repeated"):
        assert f'style="background:{charts.COLOURS[cause]}"></span>{cause}<' in spent_by
    # Every cause has its own colour; "stopped" is left empty.
    assert charts.COLOURS.keys() == {*goodput.CAUSES} and charts.COLOURS["stopped"] == ""
    assert len({*charts.COLOURS.values()}) == len(charts.COLOURS)


# ---- Runs with missing files


@pytest.mark.parametrize(
    "code, kind, words",
    [
        (0, "yes", "done: why"),
        (75, "no", "ended at step 2 with exit code 75 (asked to stop, or a process was lost: start it again): why"),
        (124, "no", "ended at step 2 with exit code 124 (the watchdog ended a hang): why"),
        (9, "no", "ended at step 2 with exit code 9: why"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, code: int, kind: str, words: str):
    folder = fake(tmp_path, [line(1), line(2)], receipt__json=ended(code))
    assert verdict(read(folder)) == (kind, words)


def test_alive_or_killed_is_told_by_the_last_sign_of_life(tmp_path: Path):
    folder = fake(tmp_path, [line(1), line(2)], receipt__json=ended(None), config__json='{"train": {"steps": 9}}')
    kind, words = verdict(read(folder))
    assert kind == "" and words.startswith("running: step 2 of 9, last write ")
    silence(folder, 7200)
    kind, words = verdict(read(folder))
    assert kind == "no" and words == "killed or hanging at step 2 of 9: the receipt has no end, last write 2h00m ago"


@pytest.mark.parametrize("name", ["config.json", "receipt.json", "metrics.jsonl"])
def test_a_run_of_one_file_has_a_page(tmp_path: Path, name: str):
    content = {"config.json": "{}", "receipt.json": ended(1), "metrics.jsonl": ""}[name]
    (tmp_path / name).write_text(content)
    words = " ".join(Read(page.html([read(tmp_path)])).words)
    assert "metrics.jsonl has no step yet" in words
    assert "There is no goodput.jsonl" in words
    assert ("There is no receipt.json" in words) == (name != "receipt.json")
    assert not {"Training", "Throughput", "Memory", "GPUs", "Wall time"} & set(Read(page.html([read(tmp_path)])).words)


def test_what_cannot_be_read_is_said(tmp_path: Path):
    folder = fake(tmp_path, [line(1)], receipt__json='{"format": 99, "attempts": []}', config__json="{")
    (folder / "goodput.jsonl").write_text("{}\n")
    words = " ".join(Read(page.html([read(folder)])).words)
    for file in ("receipt.json", "config.json", "goodput.jsonl"):
        assert f"{file} is left out, because it cannot be read" in words
    assert "99" in words
    (folder / "metrics.jsonl").write_text('{"kind": "train"}\n' + metrics.encode(line(2)) + "\n")
    with pytest.raises(ReceiptError, match="metrics.jsonl:1"):
        read(folder)
    assert command.main([str(folder)]) == 2


def test_old_lines_without_a_key_are_gaps(tmp_path: Path):
    old = {k: v for k, v in line(1).items() if k != "hfu"}
    run = read(fake(tmp_path, [old, line(2)]))
    assert run.train["hfu"] == [None, 0.5] and run.train["step_time_s"] == [0.5, 0.5] and run.train["no such"] == [None, None]


# ---- The command


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "RUN: is missing"),
        (["."], "not a run's folder, it has none of receipt.json, metrics.jsonl, config.json"),
        (["none"], "RUN = none: no such folder. Fix: name a run's folder"),
        (["one", "one"], "named twice"),
        (["one", "--html=."], "is a folder"),
        ([f"r{i}" for i in range(9)], "9 runs"),
    ],
)
def test_wrong_commands_are_refused(words: list[str], said: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    for name in ("one", "two", *(f"r{i}" for i in range(9))):
        fake(tmp_path / name, [line(1)])
    monkeypatch.chdir(tmp_path)
    before = runs.tree(tmp_path)
    assert command.main(words) == 2
    assert said in capsys.readouterr().err
    assert runs.tree(tmp_path) == before


def test_the_command(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    one, other = everything(tmp_path / "a", 0, steps=20), everything(tmp_path / "b", 1, steps=20)
    assert command.main([str(one)]) == 0
    assert capsys.readouterr().out == f"{one / 'report.html'}\n"
    assert command.main([str(one), f"--html={tmp_path / 'one.html'}"]) == 0
    assert (tmp_path / "one.html").read_text().startswith("<!doctype html>")
    assert command.main([str(one), str(other)]) == 0
    assert "2 runs compared" in (tmp_path / "report.html").read_text()
    with pytest.raises(RunError, match="at most 8"):
        page.html([None] * 9)  # type: ignore[list-item]
