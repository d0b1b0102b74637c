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

import jaxtrain
from jaxtrain.commands import report as command
from jaxtrain.metrics import files, goodput
from jaxtrain.metrics.receipt import ReceiptError
from jaxtrain.report import run_page
from jaxtrain.report.charts import Curve, LineChart, draw_chart, thin
from jaxtrain.report.run import RunError, read_run, read_runs, verdict

# ---- Contents of a page


def test_long_runs_keep_their_spikes_and_stay_small(tmp_path: Path):
    shown = run_page.run_html([read_run(everything(tmp_path / "long", 0, steps=4_000))])
    assert len(shown) < 1_000_000
    curves = curves_of(shown)
    assert len(curves["train"]) < 2000
    assert curves["train"][1500] == 99.5
    assert curves["train"][700] == "NaN" and curves["train"][2500] == "Infinity"


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


def test_a_chart_has_the_values_of_its_curves():
    limit = Curve("planned 4", [[10, 30]], [4.0, 4.0], kind="limit")
    text = draw_chart(LineChart("a <b>", [Curve("c", [[10, 20, 30]], [1.0, None, math.inf]), limit], zero=True, log=True))
    (data,) = map(json.loads, re.findall(r'<script type="application/json">(.*?)</script>', text))
    assert [curve["y"] for curve in data["curves"]] == [[1.0, None, "Infinity"], [4.0, 4.0]] and data["zero"] and data["log"]
    assert "a &lt;b&gt;" in text and "a <b>" not in text
    assert draw_chart(LineChart("empty", [Curve("c", [[1, 2]], [None, math.nan])])) == ""
    assert '"log":false' in draw_chart(LineChart("zero", [Curve("c", [[1, 2]], [0.0, 1.0])], log=True))


def test_the_smoothed_loss_is_a_mean_of_neighbours():
    found = run_page.smooth([1.0, 2.0, 3.0, None, 5.0, math.nan, *[7.0] * 94])  # two points on each side
    assert found[:7] == [2.0, 2.0, 2.75, None, 5.0, None, 6.5]
    assert run_page.smooth([1.0, 2.0, 4.0]) == [1.0, 2.0, 4.0], "a short run is shown as it is"
    many = run_page.smooth([float(i) for i in range(1000)])
    assert many[500] == pytest.approx(500.0) and many[0] == pytest.approx(10.0)


def test_time_is_drawn_as_it_was_spent():
    """The lane has the longest cause of each moment. The time between a kill and the next attempt is shown as down."""

    def spent(until: float, at: int, **seconds: float) -> dict[str, Any]:
        return {"kind": "spent", "until": until, "seconds": seconds, "step": at, "doing": "step"}

    lines: list[dict[str, Any]] = [{"kind": "begin", "time": 100.0, "seen": None}, spent(110.0, 0, startup=6.0, compile=4.0)]
    lines += [spent(140.0, 30, step=27.0, data=3.0), {"kind": "begin", "time": 160.0, "seen": 145.0}]
    lines += [spent(165.0, 30, restore=5.0), {"kind": "back", "step": 20}, spent(200.0, 60, step=35.0)]
    lines.append({"kind": "end", "time": 200.0, "exit_code": 0, "reason": "60 steps"})
    found = goodput.summarise(lines)
    assert found.seconds["down"] == 15.0
    events = run_page.wall_time_events(found, 1.0)
    assert (events[0][0], events[-1][1]) == (0.0, pytest.approx(100.0))
    causes = {colour: cause for cause, colour in run_page.COLOURS.items()}
    expected = {5.0: "startup", 20.0: "step", 52.0: "down", 62.0: "restore", 80.0: "step"}  # s after the start
    assert {at: causes[c] for start, end, c, _ in events for at in expected if start <= at < end} == expected
    parts = (0.0, 0.6, "startup"), (0.6, 1.0, "compile"), (1.0, float(run_page.STRETCHES), "step")  # of intervals of 1 s
    spans = [goodput.Span(1, start, end, {cause: end - start}) for start, end, cause in parts]
    drawn = run_page.wall_time_events(goodput.Goodput(spans[-1].end, {}, 1, 1, 0, spans), 1.0)
    assert [(start, causes[c]) for start, _, c, _ in drawn] == [(0.0, "startup"), (1.0, "step")]


def test_shares_of_the_wall_time_are_of_the_time_of_goodput(tmp_path: Path):
    """A stop on purpose is part of neither. The tiles have the time and tokens of the run, and the speed of all devices."""
    spent = {"kind": "spent", "until": 110.0, "seconds": {"step": 6.0, "startup": 4.0}, "step": 30, "doing": "step"}
    end = {"kind": "end", "time": 110.0, "exit_code": 130, "reason": "SIGINT"}
    again = [{"kind": "begin", "time": 210.0, "seen": None}, {**spent, "until": 220.0, "step": 60}]
    lines = [{"kind": "begin", "time": 100.0, "seen": None}, spent, end, *again, {**end, "time": 220.0, "exit_code": 0}]
    told = ended(0, devices={"count": 4, "kind": ["x"]})
    ledger = "".join(json.dumps(each) + "\n" for each in lines)
    trained = [line(step, tokens=1_234_567, tokens_per_s_per_device=250.0) for step in range(51, 61)]
    run = read_run(fake(tmp_path / "run", trained, receipt__json=told, goodput__jsonl=ledger))
    assert run.wall_time is not None and run.wall_time.seconds["stopped"] == 100.0
    table = run_page.wall_time([run]).blocks[-1]
    seconds, shares = table.columns[1:3]  # type: ignore[union-attr]
    found = dict(zip(table.columns[0].cells, shares.cells, strict=True))  # type: ignore[union-attr]
    assert found["step"] == "60.0%" and found["startup"] == "40.0%" and found["stopped"] == "-"
    assert seconds.total == "20.0" and run.wall_time.goodput == 0.6
    tiles = dict(re.findall("<dt>([^<]+)</dt><dd>([^<]+)<", run_page.run_html([run])))
    assert tiles["elapsed"] == "20 s" and tiles["tokens"] == "1.23 M" and tiles["tokens/s"] == "1,000"


def test_the_tokens_of_a_run_with_a_ramp_are_those_of_its_steps(tmp_path: Path):
    config = {"train": {"steps": 60, "global_batch": 16, "batch_ramp": "4:10,8:30"}, "data": {"seq_len": 1000}}
    run = read_run(fake(tmp_path / "run", [line(1, tokens=4000)], config__json=json.dumps(config)))
    assert run.tokens_in_all == (4 * 10 + 8 * 20 + 16 * 30) * 1000


def test_gpus_are_drawn_by_their_range_and_told_one_by_one(tmp_path: Path):
    lines = [line(step) for step in (1, 2, 3)]
    lines += [gpu(step, n, power_w=100.0 * (n + 1) + step) for step in (1, 2, 3) for n in range(4)]
    lines.append(gpu(3, 2, throttled=0.5, throttle_reasons="sw_power_cap+hw_slowdown", ecc_uncorrected=7))
    folder = fake(tmp_path / "run", lines)
    other = [gpu(3, n, process=1, power_w=5.0) for n in range(4)]
    write_lines(folder / "metrics.1.jsonl", other)
    run = read_run(folder)
    assert [(m[0], m[2], m[4]) for m in run_page.moments(run, "power_w")] == [(2, 101.0, 402.0), (3, 5.0, 500.0)]
    assert "sw_power_cap+hw_slowdown" in run_page.run_html([run])
    rows = re.findall(r"<tr><th scope=\"row\">([01].[0-3])</th>(.*?)</tr>", run_page.run_html([run]))
    powers = {gpu: re.findall(r">([^<]+)</td>", row)[1:3] for gpu, row in rows}
    assert len(powers) == 8 and powers["0.3"] == ["403.0", "700.0"] and powers["1.3"] == ["5.0", "700.0"]
    alone = read_run(fake(tmp_path / "one", [line(1), gpu(1, 0), gpu(1, 1, power_w=700.0)]))
    assert [(m[0], m[2], m[4]) for m in run_page.moments(alone, "power_w")] == [(1, 500.0, 700.0)]


def test_rates_and_memory_are_those_of_the_lines_or_not_measured(tmp_path: Path):
    names = ("tokens_per_s_per_device", "peak_memory_gib")
    few = read_run(fake(tmp_path / "few", [line(s, peak_memory_gib=30.0 + s) for s in range(1, 6)]))
    assert [few.rates[name] for name in names] == [None, 35.0]
    many = read_run(
        fake(tmp_path / "many", [line(s, tokens_per_s_per_device=float(s), peak_memory_gib=None) for s in range(1, 11)])
    )
    assert [many.rates[name] for name in names] == [6.5, None]


def test_warnings_are_those_of_the_logs(tmp_path: Path):
    (tmp_path / "log.txt").write_text(
        "2026-01-01 00:00:00+0000 step 1/2  loss 3\n2026-01-01 00:00:02+0000 WARNING slow\n  and more of it\n"
        "2026-01-01 00:00:04+0000 no WARNING of mine\n2026-01-01 00:00:05+0000 ERROR ends\n"
    )
    (tmp_path / "log.1.txt").write_text("2026-01-01 00:00:03+0000 WARNING other process\n")
    run = read_run(fake(tmp_path, []))
    alerts = [text[25:].splitlines() for text in run.alerts]
    assert alerts == [["WARNING slow", "  and more of it"], ["WARNING other process"], ["ERROR ends"]]


def test_names_in_a_run_cannot_write_the_page(tmp_path: Path):
    told = ended(1, EVIL, config=EVIL, command=EVIL, id=EVIL, overrides={EVIL: EVIL})
    folder = fake(tmp_path / "run", [line(1), line(2), held_out(2, 1.0, set=EVIL)], receipt__json=told)
    (folder / "samples.txt").write_text(f"--- step 2\n{EVIL}\n")
    (folder / "log.txt").write_text(f"2026-01-01 00:00:00+0000 WARNING {EVIL}\n")
    shown = run_page.run_html([read_run(folder)])
    assert '<script>alert("1' not in shown
    assert " ".join(Read(shown).words).count(EVIL) > 6
    assert_self_contained(shown)
    assert_self_contained(run_page.run_html(read_runs([folder, everything(tmp_path / "other", 0, steps=200)])))


def test_the_plan_of_a_run_is_drawn_beside_it(tmp_path: Path):
    config = json.dumps({"train": {"global_batch": 8}, "data": {"seq_len": 100}})
    told = ended(0, planned={"range_s": [0.5, 0.8], "step_s": 0.4, "peak_gib": 70.0}, devices={"count": 2, "kind": ["H100"]})
    run = read_run(fake(tmp_path / "run", [line(1), line(2)], receipt__json=told, config__json=config))
    shown = run_page.run_html([run])
    # the fastest and slowest step in seconds and, with 400 tokens per device and step, in tokens/s; the peak in GiB
    drawn = re.findall(r"planned(?:, \w+)? ([\d.]+)<", shown)
    assert sorted(map(float, {*drawn})) == [0.5, 0.8, 70.0, 500.0, 800.0]


# ---- Several runs


def test_several_runs_share_each_chart(tmp_path: Path):
    """A chart has a curve for each run, over its own steps and tokens."""
    batch = [json.dumps({"train": {"global_batch": n}, "data": {"seq_len": 10}}) for n in (10, 20)]
    lines = [line(s, loss=5.0 - s / 10, tokens_per_s_per_device=100.0) for s in range(1, 31)]
    slow = fake(tmp_path / "x" / "run", [*lines, held_out(30, 1.5)], config__json=batch[0])
    fast = [line(s, loss=4.0 - s / 10, tokens=200 * s, tokens_per_s_per_device=300.0) for s in range(1, 21)]
    quick = fake(tmp_path / "y" / "run", [*fast, held_out(20, 2.5)], config__json=batch[1])
    shown = run_page.run_html(read_runs([slow, quick]))
    assert {"x/run", "y/run"} <= set(Read(shown).words)  # if two runs have the same name, their folders are shown
    drawn = [json.loads(s) for s in re.findall(r'<script type="application/json">(.*?)</script>', shown)]
    (losses,) = [c for c in drawn if any("smoothed" in x["name"] for x in c["curves"])]
    assert [axis[-1] for axis in losses["curves"][2]["x"]] == [20, 4000, 0]
    ends = {tuple((curve["name"], curve["y"][-1]) for curve in chart["curves"]) for chart in drawn}
    assert (("x/run", 1.5), ("y/run", 2.5)) in ends and (("x/run", 100.0), ("y/run", 300.0)) in ends
    # The evaluation of a new run comes before its first train line, without tokens and without time.
    (begun,) = read_runs([fake(tmp_path / "new", [held_out(0, 5.0), line(10), line(20, time_unix=1e9 + 9), held_out(20, 4.0)])])
    assert begun.positions([0, 5, 20]) == [[0, 5, 20], [0, 500, 2000], [0.0, 0.0, 9.0]]


def test_each_run_links_to_its_own_page(tmp_path: Path):
    one, two = fake(tmp_path / "one", [line(1)]), fake(tmp_path / "two", [line(1)])
    jaxtrain.open_run(one).write_report()
    links = [a["href"] for a in Read(run_page.run_html(read_runs([one, two]), tmp_path / "all.html")).named("a")]
    assert "./one/report.html" in links and not any("two" in (link or "") for link in links)


# ---- Runs with missing files


def test_how_a_run_ended_or_when_it_was_last_alive(tmp_path: Path):
    folder = fake(tmp_path, [line(1), line(2)], receipt__json=ended(0))
    assert verdict(read_run(folder))[0] == "yes"
    fake(tmp_path, [line(1), line(2)], receipt__json=ended(75))
    kind, words = verdict(read_run(folder))
    assert kind == "no" and "75" in words and words.index("why") < words.index("75") < words.index("step 2")
    fake(tmp_path, [line(1), line(2)], receipt__json=ended(None), config__json='{"train": {"steps": 9}}')
    assert verdict(read_run(folder))[0] == ""
    silence(folder, 7200)
    kind, words = verdict(read_run(folder))
    assert kind == "no" and "2 h ago" in words


@pytest.mark.parametrize(("name", "content"), [("config.json", "{}"), ("receipt.json", ended(1)), ("metrics.jsonl", "")])
def test_a_run_of_one_file_has_a_page(tmp_path: Path, name: str, content: str):
    (tmp_path / name).write_text(content)
    shown = Read(run_page.run_html([read_run(tmp_path)])).words
    assert not {"Training", "Throughput", "Memory", "GPUs", "Wall time"} & set(shown)


def test_what_cannot_be_read_is_named(tmp_path: Path):
    folder = fake(tmp_path, [line(1)], receipt__json='{"format": 99, "attempts": []}', config__json="{")
    (folder / "goodput.jsonl").write_text("{}\n")
    words = " ".join(Read(run_page.run_html([read_run(folder)])).words)
    for file in ("receipt.json", "config.json", "goodput.jsonl"):
        assert file in words
    (folder / "metrics.jsonl").write_text('{"kind": "train"}\n' + files.encode_line(line(2)) + "\n")
    with pytest.raises(ReceiptError, match="metrics.jsonl:1"):
        read_run(folder)
    assert command.main([str(folder)]) == 2


# ---- The command


WRONG = [[], ["."], ["none"], ["one", "one"], ["one", "--html=."], [f"r{i}" for i in range(9)]]


@pytest.mark.parametrize("words", WRONG, ids=map("_".join, WRONG))
def test_wrong_commands_are_refused(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("one", "two", *(f"r{i}" for i in range(9))):
        fake(tmp_path / name, [line(1)])
    monkeypatch.chdir(tmp_path)
    before = runs.tree(tmp_path)
    assert command.main(words) == 2 and runs.tree(tmp_path) == before


def test_the_command(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    one, other = everything(tmp_path / "a", 0, steps=20), everything(tmp_path / "b", 1, steps=20)
    assert command.main([str(one)]) == 0
    assert capsys.readouterr().out == f"{one / 'report.html'}\n"
    assert command.main([str(one), f"--html={tmp_path / 'one.html'}"]) == 0
    assert (tmp_path / "one.html").read_text().startswith("<!doctype html>")
    assert command.main([str(one), str(other)]) == 0
    assert (tmp_path / "report.html").exists()
    with pytest.raises(RunError):
        run_page.run_html([None] * 9)  # type: ignore[list-item]
