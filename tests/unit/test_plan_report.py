"""The report and the page of a plan show all figures of the plan and only those, legibly."""

import dataclasses
import io
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import EVIL, Read, assert_self_contained
from rich.console import Console
from sample_plan import sample

from jaxtrain.page import charts, html, numbers
from jaxtrain.page.sections import place, print_sections
from jaxtrain.plan.program.traffic import Part
from jaxtrain.plan.report import page, sections, terminal
from jaxtrain.plan.report.live import live
from jaxtrain.plan.result import Buffer, Collective, Kernel, Memory, Plan

REPO = Path(__file__).resolve().parents[2]


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of every number and string of a plan, such as ('memory.peak_gib', 40.78)."""
    if dataclasses.is_dataclass(tree):
        tree = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, tuple) else None
    if items is None:
        if tree is not None:
            yield path, tree
        return
    for name, value in items:
        yield from leaves(value, f"{path}.{name}".lstrip("."))


def changed(tree: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a copy of a plan with `change(path, value)` in place of each number and string."""
    if dataclasses.is_dataclass(tree):
        fields = [f.name for f in dataclasses.fields(tree)]
        return type(tree)(**{name: changed(getattr(tree, name), change, f"{path}.{name}".lstrip(".")) for name in fields})
    if isinstance(tree, dict):
        return {name: changed(value, change, f"{path}.{name}") for name, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(changed(value, change, f"{path}.{i}") for i, value in enumerate(tree))
    return tree if tree is None else change(path, tree)


def other(value: Any, draw: random.Random) -> Any:
    """Return a value that would be printed differently: another number, or a string with other digits."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return re.sub(r"\d", lambda digit: str((int(digit[0]) + draw.randint(1, 8)) % 10), value)
    if isinstance(value, int):
        return value * draw.randint(3, 9) + draw.randint(1, 9)
    return value * draw.uniform(1.1, 1.9)


def numbers_in(shown: str) -> set[str]:
    return set(re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", shown))


def written(plan: Plan, width: int = 110, encoding: str = "utf-8", **arguments: Any) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    terminal.print_plan(plan, Console(file=stream, width=width, highlight=False), **arguments)
    stream.flush()
    return raw.getvalue().decode(encoding)


def row(shown: str, start: str) -> list[str]:
    """Return the words of the one line that starts with `start`."""
    (line,) = [line for line in shown.splitlines() if line.startswith(start)]
    return line.split()


def page_words(plan: Plan, steps: int) -> str:
    """Return the texts of the page without the round numbers of the chart's axis and the numbers of GPUs in the mesh."""
    text = re.sub(r'<text [^>]*class="axis"[^>]*>[^<]*</text>', "", page.html(plan, steps=steps))
    text = re.sub(r'<div class="mesh">.*?<p class="quiet">', '<p class="quiet">', text, flags=re.DOTALL)
    return " ".join(w for w in Read(text).words if w not in (html.POLICY, "width=device-width, initial-scale=1"))


# Not on the page: the file format, a sum of three times that are shown, and the rates of links that this plan does not use.
NOWHERE = (
    r"^(format|time\.compute_ms|rates\.(network_gb_s|network_curve\..*|network_latency_us|host_gb_s)|memory\.host_gib|fits)$"
    r"|network_gib$"
)


def thinned(memory: Memory, stride: int) -> Memory:
    """Return a memory with every stride-th point of its timeline."""
    classes = tuple(dataclasses.replace(c, gib=c.gib[::stride]) for c in memory.over_time)
    return dataclasses.replace(memory, timeline=memory.timeline[::stride], over_time=classes)


def test_the_page_shows_every_number_of_the_plan():
    plan = sample()
    # The kernels are so few that each has a row. Collectives are kernels too, but have a table of their own.
    plan = dataclasses.replace(plan, kernels=tuple(k for k in plan.kernels[8:] if k.kind != "communication"))
    plan = dataclasses.replace(plan, memory=thinned(plan.memory, 20))
    shown = page.html(plan)
    for path, value in leaves(plan):
        if re.search(NOWHERE, path) or (isinstance(value, str) and not re.search(r"\d", value)):
            continue
        if value == 0 or (isinstance(value, float) and value < 0.04):
            continue  # twice zero is zero, and a smaller value has no visible digit in its column
        draw = random.Random(0)
        new = changed(plan, lambda p, v, path=path, draw=draw: other(v, draw) if p == path else v)
        assert page.html(new) != shown, f"{path} = {value!r} changes nothing that is shown"


@pytest.mark.parametrize("render", [lambda plan, steps: written(plan, steps=steps), page_words], ids=["text", "page"])
def test_every_number_shown_is_of_the_plan(render):
    """All numbers of the plan change, and every number of the report changes with them: the report adds none of its own."""
    same = numbers_in(render(sample(), 50_000))
    for seed in range(12):
        draw = random.Random(seed)
        plan = changed(sample(), lambda _, value, draw=draw: other(value, draw))
        same &= numbers_in(render(plan, 50_001 + 7 * seed))
    # The remaining numbers: nothing, the "1,000 B" of a trillion, "<0.1", the sequence length of the attention rates, and two
    # message sizes.
    assert same <= {"0", "1,000", "0.1", "8,192", "1", "64"}, same


# ---- The text


def test_the_verdict_comes_first_and_says_by_how_much():
    assert written(sample()).splitlines()[0] == "fits: 40.8 of 134.4 GiB usable memory, 93.6 GiB free"
    held = sample().memory
    memory = dataclasses.replace(held, peak_gib=159.44, temp_gib=159.44 - held.arguments_gib)
    shown = written(sample(fits=False, memory=memory, hints=("dtypes.m=bf16 makes it fit: 121.4 GiB, compiled",)))
    lines = shown.splitlines()
    assert lines[0] == "does not fit: needs 159.4 GiB, 134.4 GiB usable: 25.0 GiB missing"
    assert "MFU" not in shown and "Time of a step" not in shown  # a step that does not fit has no speed
    # A step may not fit because of fragmentation alone.
    memory = dataclasses.replace(sample().memory, peak_gib=134.0, temp_gib=124.0)
    lines = written(sample(fits=False, memory=memory)).splitlines()
    assert lines[0] == "does not fit: needs 135.2 GiB, 134.4 GiB usable: 0.8 GiB missing"
    # The fix is printed before everything else, and once.
    assert shown.index("dtypes.m=bf16 makes it fit") < shown.index("Memory at the peak")
    assert shown.count("dtypes.m=bf16") == 1


def test_bytes_on_the_wire_are_in_gb_and_the_lines_of_one_cause_are_added():
    one = Collective("all-gather", "f32", "tensor", 4, 3, 1.0, 0.0, 5.0, 1.0, "a.py:1", "scope", "x")
    memory = dataclasses.replace(sample().memory, saved={})
    plan = sample(
        memory=memory,
        collectives=(one, dataclasses.replace(one, count=2, wire_gib=2.0, ms=7.0, exposed_ms=9.5, instruction="y")),
    )
    shown = written(plan)
    assert row(shown, "all-gather") == ["all-gather", "f32", "tensor", "4", "5", "3.22", "12.0", "10.5", "a.py:1"]
    assert row(shown, "all  ") == ["all", "5", "3.22", "12.0", "10.5"]
    assert "network" not in shown
    # Over a network, the network's share has a column, and the network's rate is in the list of rates.
    remote = sample(collectives=(dataclasses.replace(one, network_gib=0.5),))
    assert row(written(remote), "all-gather")[5:7] == ["1.07", "0.54"]
    assert "network 45 GB/s + 20 us" in page.html(remote)
    assert "the GPUs do not communicate" in written(sample(collectives=()))


def test_long_tables_end_in_a_sum_of_the_rest():
    collective = sample().collectives[0]
    many = [dataclasses.replace(collective, count=1, wire_gib=1.0, ms=100.0 - i, exposed_ms=1.0) for i in range(20)]
    shown = written(sample(collectives=tuple(dataclasses.replace(c, source=f"a.py:{i}") for i, c in enumerate(many))))
    assert "a.py:4" in shown and "a.py:5" not in shown
    assert row(shown, "15 more") == ["15", "more", "15", "16.1", "1,320", "15.0"]
    arrays = tuple(Buffer(2.0 - i / 100, "gradients", f"f32[{i}]", "a.py:1", "scope", f"x.{i}") for i in range(50))
    words = Read(page.html(sample(memory=dataclasses.replace(sample().memory, largest=arrays)))).words
    assert "f32[39]" in words and "f32[40]" not in words
    assert words[words.index("10 more") + 1] == "15.6"  # 1.60 down to 1.51
    kernels = tuple(Kernel("gemm", f"scope {i}", "a.py:1", 2, 50.0 - i, 1.0, 3.0) for i in range(45))
    words = Read(page.html(sample(kernels=kernels))).words
    # Count, ms, TFLOP and GB of the five kernels that are not listed: 10.0 ms down to 6.0 ms each.
    assert words[words.index("5 more") + 1 :][:4] == ["10", "40.0", "5.00", "15.0"]
    small = sample().memory.by_class | {"batch": 0.001, "constants": 0.07}
    shown = written(sample(memory=dataclasses.replace(sample().memory, by_class=small)))
    assert row(shown, "2 others") == ["2", "others", "0.1", "0.2%"] and "constants" not in shown
    assert row(written(sample()), "logits and loss")[3:5] == ["1.0", "2.4%"]


@pytest.mark.parametrize("width", [100, 120])
def test_the_text_keeps_to_the_width(width: int):
    shown = written(sample(), width, steps=50_000)
    report_lines, command = shown.split("Command of this plan\n")
    assert max(map(len, report_lines.splitlines())) <= width
    # The list is on one line, so that it can be copied.
    assert command.splitlines() == [
        "python -m jaxtrain.plan --config=configs/llama3_8b.py --config.train.global_batch=8 --config.train.grad_accum=1"
        " --topology=h200:8"
    ]


def test_a_narrow_terminal_loses_no_digit_and_no_name():
    """Bars and source lines are left out. If a table is still too wide, it exceeds the terminal's width."""
    shown = written(sample(), 60)
    assert ["reduce-scatter", "bf16", "fsdp", "8", "32", "13.1", "38.1", "12.3"] in [r.split() for r in shown.splitlines()]
    assert "attention.py" not in shown


def test_the_text_suits_a_terminal_without_unicode_and_names_with_brackets():
    plan = sample(warnings=("bf16[layers] is [bold]replicated[/bold]",))
    assert "bf16[layers] is [bold]replicated[/bold]" in written(plan, encoding="ascii")
    assert "####" in written(plan, encoding="ascii")


def test_traffic_stands_beside_the_least_in_a_step_and_in_a_layer():
    raw = io.StringIO()
    parts = (Part("norms", 52.24, 38.99, 32), Part("optimizer", 31.9, 32.1), Part("copies and others", 11.7, 0.0))
    print_sections([sections.traffic_section(parts)], Console(file=raw, width=110))
    assert row(raw.getvalue(), "norms") == ["norms", "52.2", "39.0", "1.34", "1,632", "1,218"]
    assert row(raw.getvalue(), "optimizer") == ["optimizer", "31.9", "32.1", "0.99"]
    assert row(raw.getvalue(), "copies")[-3:] == ["11.7", "0", "-"]
    assert row(raw.getvalue(), "all") == ["all", "95.8", "71.1", "1.35"]


def test_published_runs_bound_what_is_believed():
    """The range from published runs precedes the roofline's step time. Without comparable runs, the report says so."""
    expected = "expected: step 746 to 824 ms, 9,940 to 11,000 tokens/s/GPU, MFU 51.7% to 57.1% causal"
    expected += " of the bf16 peak, 25.8% to 28.5% of the FP8 peak"
    shown = " ".join(written(sample(), 120).split())
    assert f"{expected}; roofline: step 709 ms" in shown
    assert "0.86 to 0.95 of the measured time" in page.html(sample())
    assert "60.1% causal of the bf16 peak, 30.0% of the FP8 peak" in shown
    none = dataclasses.replace(sample().time, expected_step_ms=None, expected_tokens_per_s_per_device=None)
    for text in (written(sample(time=none), 120), page.html(sample(time=none))):
        assert "no comparable published run" in text and "expected: step" not in text
    assert "746 to 824 ms" in page.html(sample())
    nan = dict.fromkeys(("mfu_causal", "mfu_full", "hfu"), float("nan"))
    unknown = sample(time=dataclasses.replace(sample().time, **nan, mfu_fp8_peak=None))
    assert "MFU - causal" in written(unknown) and "MFU - full; HFU -" in written(unknown)


def test_time_to_train():
    # 50,000 steps of 65,536 tokens at 92,460 tokens/s are 9.84 hours by the roofline. The expected range is 746 to 824 ms a
    # step.
    spans = ["0.432", "to", "0.477", "82.9", "to", "91.6"]
    assert row(written(sample(), steps=50_000), "this config") == ["this", "config", "3.28", "B", "50,000", *spans]
    none = sample(time=dataclasses.replace(sample().time, expected_step_ms=None, expected_tokens_per_s_per_device=None))
    assert row(written(none, steps=50_000), "this config") == ["this", "config", "3.28", "B", "50,000", "0.410", "78.8"]
    calibrated = dataclasses.replace(none, rates=dataclasses.replace(none.rates, source="calibrated on NVIDIA H200"))
    assert "calibrated rates, whose error is not known" in written(calibrated, 120).replace("\n", " ")
    assert "this config" not in written(sample())


@pytest.mark.parametrize(
    "values, shown",
    [
        ([708.8, 0.3], ["708.8", "0.3"]),
        ([24310.4, 12.0, 0.2], ["24,310", "12", "<1"]),
        ([40.78, 0.0], ["40.8", "0"]),
        ([3.14159, 0.001], ["3.14", "<0.01"]),
        ([float("nan"), 1.0], ["-", "1.00"]),
    ],
)
def test_a_column_has_the_digits_of_its_largest(values: list[float], shown: list[str]):
    assert numbers.column(values) == shown


def test_sizes_and_places():
    assert numbers.gib([0.25, 0.001]) == ("MiB", ["256.0", "1.0"])
    assert numbers.rough(24_034.0) == "24,000"
    assert place("/a/jaxtrain/b/jaxtrain/train/loss.py:88") == "jaxtrain/train/loss.py:88"
    assert place("/env/site-packages/optax/adam.py:3") == "optax/adam.py:3"
    assert place("/mine/model.py:7") == "/mine/model.py:7"
    assert sections.command(sample(config="my file.py", overrides=())).endswith("'--config=my file.py' --topology=h200:8")


# ---- The page


def test_the_page_is_whole_html_with_text_for_every_picture():
    read = Read(page.html(sample(), steps=50_000))
    assert read.named("html") == [{"lang": "en"}]
    assert len(read.named("title")) > 1  # the page's own style, and the tooltips of bars
    assert all("scope" in th for th in read.named("th"))
    assert len(read.named("caption")) == len(read.named("table"))
    for svg in read.named("svg"):
        nested = "viewbox" in svg
        assert nested or svg.get("aria-hidden") == "true" or (svg.get("role") == "img" and svg.get("aria-label")), svg
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)


def test_names_in_a_plan_cannot_write_the_page():
    plan = changed(sample(), lambda _, value: value + EVIL if isinstance(value, str) else value)
    plan = dataclasses.replace(plan, trip_counts={EVIL: 3}, versions={EVIL: EVIL}, mesh={EVIL: 8})
    memory = dataclasses.replace(plan.memory, by_class={EVIL: 40.78}, saved={EVIL: 21.25})
    read = Read(page.html(dataclasses.replace(plan, memory=memory)))
    plain = page.html(sample(), steps=50_000)
    assert_self_contained(plain)
    assert len(read.named("script")) == len(Read(plain).named("script")) == 2
    assert " ".join(read.words).count(EVIL) > 50


def test_the_chart_marks_peak_and_limit_and_says_what_gaps_add():
    plan = sample()
    shown = page.html(plan)
    assert ">peak 40.8 GiB<" in shown
    assert ">usable 134.4 GiB<" in shown
    assert "other memory 29.6 GiB with 0 GiB fragmentation" in shown
    gaps = dataclasses.replace(plan.memory, temp_gib=31.0)
    assert "other memory 31.0 GiB with 1.4 GiB fragmentation" in page.html(sample(memory=gaps))
    # A phase too short for its name is named in the table only.
    assert ">forward</text>" in shown
    assert ">loss</text>" not in shown
    assert ">loss</th>" in shown


@pytest.mark.parametrize("held", [(), ((0.3, ""),), ((0.3, "forward"), (0.2, "backward"))])
def test_plans_with_little_in_them_have_a_page(held: tuple[tuple[float, str], ...]):
    memory = dataclasses.replace(sample().memory, timeline=held, over_time=(), largest=(), saved={}, peak_gib=0.3, host_gib=1.5)
    plan = sample(memory=memory, collectives=(), kernels=(), trip_counts={}, hints=(), warnings=(), overrides=())
    words = " ".join(Read(page.html(plan)).words)
    assert "the GPUs do not communicate" in words
    assert "pinned host memory for each GPU: 1.50 GiB" in words
    assert "Warnings" not in words


@pytest.mark.parametrize(
    "top, expected", [(150.5, [0, 25, 50, 75, 100, 125, 150]), (0.9, [0, 0.2, 0.4, 0.6, 0.8]), (4, [0, 1, 2, 3, 4])]
)
def test_ticks_are_round(top: float, expected: list[float]):
    assert charts.ticks(0, top, 7) == pytest.approx(expected)


def test_the_script_names_what_the_page_has():
    """The elements that page.js looks up exist on the page. This check needs no browser."""
    text = page.html(sample())
    read = Read(text)
    script = (REPO / "jaxtrain/page/assets/page.js").read_text()
    looked_for = re.findall(r'(?:querySelector(?:All)?|getElementById|matches)\("([^"]+)"\)(?!\?)', script)
    assert len(looked_for) == 6
    classes = {c for _, attributes in read.elements for c in (attributes.get("class") or "").split()}
    tags = {tag for tag, _ in read.elements}
    for selector in looked_for:
        tag, _, name = selector.partition(".")
        assert selector == ":focus-visible" or not tag or tag in tags, selector
        assert not name or name in classes, selector
    points = json.loads(read.code[-2] if read.code[-2].startswith("[") else "null")
    assert len(points) == len(sample().memory.timeline)
    assert points[0] == "12.1 GiB, forward"
    # The sorting script reads these attributes.
    for body in re.findall(r'<table class="sortable">.*?<tbody>(.*?)</tbody>', text):
        cells = re.findall(r'<td class="number"[^>]*>', body)
        assert cells
        assert all("data-value=" in cell for cell in cells)


# ---- Progress while plans are made


@pytest.mark.parametrize("width", [60, 80, 120])
def test_count_and_clock_stand_whatever_is_told_beside_them(width):
    console = Console(record=True, width=width, force_terminal=True)
    with live(console, "published runs [all]") as show:
        show(3, 56, "2 compiling; best 20,800 ms, 118.5 GiB: fsdp=8, remat keep [q] k v " + "attention_out " * 20)
    text = console.export_text()
    assert "3/56" in text and "0:00:0" in text
    assert "published runs [all]" in text or width < 80
    assert "[q]" in text or width < 120


def test_off_a_terminal_each_plan_is_a_line():
    console = Console(record=True, width=40, force_terminal=False)
    with live(console) as show:
        show(0, 2)
        show(1, 2, "not shown", ["1: run [tiny]: " + "long " * 20])
        show(2, 2, lines=["2: b"])
    assert console.export_text().splitlines() == ["1: run [tiny]: " + "long " * 20, "2: b"]
