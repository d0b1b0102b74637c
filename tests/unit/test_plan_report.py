"""The report and the page of a plan: what they show is the plan's, all of it, legibly, and safe to open anywhere."""

import dataclasses
import html
import io
import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxtrain.page import charts, kit
from jaxtrain.plan import numbers
from jaxtrain.plan.program.traffic import Part
from jaxtrain.plan.report import figures, page, terminal, traffic_report
from jaxtrain.plan.report.live import live
from jaxtrain.plan.result import Buffer, Collective, Flops, Kernel, Matmuls, Memory, Plan, Rates, Time

REPO = Path(__file__).resolve().parents[2]
LAYERS = 32


def timeline() -> tuple[tuple[float, str], ...]:
    """Memory over a step of 32 layers: up in the forward pass, a bump for the logits, down in the backward pass."""
    arguments, layer = 11.22, 0.664
    held = [(arguments + 0.9 + layer * i / 3, "forward") for i in range(3 * LAYERS)]
    top = arguments + 0.9 + layer * LAYERS
    held += [(top + 2.1, "loss"), (top + 3.2, "loss"), (top + 1.4, "loss")]
    for i in range(LAYERS):
        held += [(top - (layer - 0.117) * i + bump, "backward") for bump in (0.4, 2.6, 7.41, 1.1)]
    held += [(arguments + 3.74 + 0.6 * (i % 3), "optimizer") for i in range(30)]
    return tuple((round(gib, 3), phase) for gib, phase in held)


def sample(**changes: Any) -> Plan:
    """A plan as it could come out for Llama-3-8B on eight H200s, one sequence of 8192 tokens on each."""
    source = "/somewhere/jaxtrain/models/transformer.py:118"
    scope = "jit(train_step)/transpose(jvp(layers))/while/body/checkpoint"
    moves = [
        ("all-gather", "bf16", 64, 13.1 + 13.1, 76.2, 0.4, "models/attention.py:61"),
        ("all-gather", "bf16", 1, 0.86, 2.5, 2.5, "loss.py:88"),
        ("reduce-scatter", "bf16", 32, 13.1, 38.1, 12.3, "models/remat.py:40"),
        ("reduce-scatter", "bf16", 1, 0.86, 2.5, 2.5, "loss.py:97"),
        ("all-reduce", "f32", 3, 2e-9, 0.03, 0.03, "optimizer.py:52"),
    ]
    collectives = tuple(
        Collective(
            kind, dtype, "fsdp", 8, n, gib / 1.0737, 0.0, ms, exposed, f"/somewhere/jaxtrain/{line}", scope, f"{kind}.{i}"
        )
        for i, (kind, dtype, n, gib, ms, exposed, line) in enumerate(moves)
    )
    scopes = ["mlp BTD,DF->BTF", "attention BTD,DNH->BTNH", "mlp BTF,FD->BTD", "loss BTD,VD->BTV"]
    kernels = [
        Kernel("gemm", f"{way} {what}", source, LAYERS, 96.0 / (i + 1), 71.2 / (i + 1), 33.1 / (i + 1))
        for i, (way, what) in enumerate((way, what) for way in ("forward", "backward", "recompute") for what in scopes)
    ]
    kernels += [
        Kernel("attention", "backward attention cudnn", source, LAYERS, 73.4, 33.8, 21.5),
        Kernel("attention", "forward attention cudnn", source, LAYERS, 29.6, 17.6, 12.9),
        Kernel("memory", "optimizer mul", source, 1, 28.4, 0.0, 116.2),
        Kernel("communication", "forward attention all-gather", source, 64, 76.2, 0.0, 28.1),
    ]
    buffers = tuple(
        Buffer(gib, kind, shape, source, f"{scope}/{name}", f"fusion.{i}")
        for i, (gib, kind, shape, name) in enumerate(
            [
                (7.0, "saved activations", "bf16[32,1,8192,14336]", "mlp_gate"),
                (7.0, "saved activations", "bf16[32,1,8192,14336]", "mlp_up"),
                (3.28, "gradients", "f32[32,512,14336]", "mlp/gate"),
                (2.0, "saved activations", "bf16[32,1,8192,4096]", "residual"),
                (0.98, "logits and loss", "bf16[2048,128256]", "loss"),
            ]
        )
    )
    memory = Memory(
        hbm_gib=140.4,
        reserve_gib=6.0,
        usable_gib=134.4,
        peak_gib=40.78,
        arguments_gib=11.22,
        temp_gib=29.56,
        host_gib=0.0,
        by_class={
            "parameters": 3.74,
            "first moment": 3.74,
            "second moment": 3.74,
            "gradients": 3.74,
            "saved activations": 21.25,
            "logits and loss": 0.98,
            "temporaries": 3.59,
        },
        saved={
            "mlp_gate": 7.0,
            "mlp_up": 7.0,
            "residual": 2.0,
            "q": 2.0,
            "attention_out": 2.0,
            "k": 0.5,
            "v": 0.5,
            "attention_lse": 0.25,
        },
        peak_at=f"{scope}/mlp/BTF,FD->BTD/dot_general",
        timeline=timeline(),
        largest=buffers,
        workspace_gib=1.04,
        workspace_by="formula",
    )
    time = Time(
        gemm_ms=461.7,
        attention_ms=103.0,
        memory_ms=126.4,
        compute_ms=691.1,
        communication_ms=119.3,
        exposed_ms=17.7,
        host_exposed_ms=0.0,
        step_ms=708.8,
        tokens_per_s=92_460.0,
        tokens_per_s_per_device=11_557.0,
        mfu_causal=0.601,
        mfu_full=0.676,
        hfu=0.607,
        bound_by="GEMMs",
        mfu_fp8_peak=0.3003,
        expected_step_ms=(708.8 / 0.95, 708.8 / 0.86),
        expected_tokens_per_s_per_device=(11_557.0 * 0.86, 11_557.0 * 0.95),
    )
    curve = ((2.0**20, 0.083), (2.0**26, 0.72))
    rates = Rates(742.0, 594.0, 460.0, 4.08, 370.0, 45.0, 50.0, 20.0, "published kernel rates", 1481.0, curve)
    plan = Plan(
        config="configs/llama3_8b.py",
        overrides=("train.global_batch=8", "train.grad_accum=1"),
        topology="h200:8",
        chip="NVIDIA H200",
        mesh={"data": 1, "fsdp": 8, "tensor": 1, "seq": 1},
        attention="cudnn",
        fits=True,
        memory=memory,
        flops=Flops(51.47e9, 57.9e9, 425.7e12, 424.9e12),
        collectives=collectives,
        time=time,
        kernels=tuple(kernels),
        rates=rates,
        matmuls=Matmuls(22.0, 18.0, ("forward mlp BTF,FD->BTD at models/layers.py:92, 128 times",)),
        kept="remat.policy=auto keeps attention_lse, mlp_gate, mlp_up",
        kind="bf16 dense",
        tokens_per_step=65_536,
        compile_s=21.4,
        trip_counts={"jit(train_step)/jvp(layers)/while": 32, "jit(train_step)/transpose(jvp(layers))/while": 32},
        hints=("93.6 GiB are free: train.global_batch=16 with the same grad_accum keeps the GPUs busier",),
        warnings=("all-reduce in f32 over fsdp at optimizer.py:52: set dtypes.reduce=bf16 if it grows",),
        versions={"jax": "0.11.2", "jaxlib": "0.11.2"},
        options={"xla_gpu_enable_latency_hiding_scheduler": "true"},
    )
    return dataclasses.replace(plan, **changes)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """('memory.peak_gib', 40.78), ... of every number and string of a plan."""
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
    """A copy of a plan with `change(path, value)` in place of each number and string."""
    if dataclasses.is_dataclass(tree):
        fields = [f.name for f in dataclasses.fields(tree)]
        return type(tree)(**{name: changed(getattr(tree, name), change, f"{path}.{name}".lstrip(".")) for name in fields})
    if isinstance(tree, dict):
        return {name: changed(value, change, f"{path}.{name}") for name, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(changed(value, change, f"{path}.{i}") for i, value in enumerate(tree))
    return tree if tree is None else change(path, tree)


def other(value: Any, draw: random.Random) -> Any:
    """A value that would be written differently: another number, or a string with other digits."""
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
    terminal.text(plan, Console(file=stream, width=width, highlight=False), **arguments)
    stream.flush()
    return raw.getvalue().decode(encoding)


def row(shown: str, start: str) -> list[str]:
    """Words of the one line that starts so."""
    (line,) = [line for line in shown.splitlines() if line.startswith(start)]
    return line.split()


# What only the page shows, for want of room: the picture of the schedule, the buffers at the peak, names in the HLO.
PAGE_ONLY = r"memory\.(timeline|largest)|\.(op_name|instruction)$"
# In no rendering: the file format, the sum of three times that are shown, and the rates of links this plan does not use.
NOWHERE = (
    r"^(format|time\.compute_ms|rates\.(network_gb_s|network_curve\..*|network_latency_us|host_gb_s)|memory\.host_gib|fits)$"
    r"|network_gib$"
)


def test_every_number_of_the_plan_is_in_the_text():
    plan = sample()
    # So few that each has a row of its own; collectives are among the kernels too, and have a table of theirs.
    plan = dataclasses.replace(plan, kernels=tuple(k for k in plan.kernels[8:] if k.kind != "communication"))
    shown = written(plan)
    for path, value in leaves(plan):
        if re.search(f"{PAGE_ONLY}|{NOWHERE}", path) or (isinstance(value, str) and not re.search(r"\d", value)):
            continue
        if value == 0 or (isinstance(value, float) and value < 0.04):
            continue  # a zero times two is a zero; and what is below the last digit of its column
        draw = random.Random(0)
        new = changed(plan, lambda p, v, path=path, draw=draw: other(v, draw) if p == path else v)
        assert written(new) != shown, f"{path} = {value!r} changes nothing that is shown"


def test_every_number_in_the_text_is_of_the_plan():
    """No number survives when all of the plan's change, so none is the report's own invention."""
    same = numbers_in(written(sample(), steps=50_000))
    for seed in range(12):
        draw = random.Random(seed)
        plan = changed(sample(), lambda _, value, draw=draw: other(value, draw))
        same &= numbers_in(written(plan, steps=50_001 + 7 * seed))
    # Nothing, the thousand billions of a trillion, "<0.1", how many kernels have no row of their own, and the length of the
    # call that rates of attention are of, and two message sizes.
    assert same <= {"0", "1,000", "0.1", "3", "8,192", "1", "64"}, same


def test_the_verdict_comes_first_and_says_by_how_much():
    assert "fits: takes 40.8 of 134.4 GiB usable, 93.6 GiB to spare" in written(sample()).splitlines()[:3]
    held = sample().memory
    memory = dataclasses.replace(held, peak_gib=159.44, temp_gib=159.44 - held.arguments_gib)
    shown = written(sample(fits=False, memory=memory, hints=("dtypes.m=bf16 makes it fit: 121.4 GiB, compiled",)))
    lines = shown.splitlines()
    assert "does not fit: takes 159.4 of 134.4 GiB usable, 25.0 GiB too much" in lines[:3]
    assert lines[3].startswith("if it did fit, expected: step 746 to 824 ms")
    # Gaps alone can be too much.
    memory = dataclasses.replace(sample().memory, peak_gib=134.0, temp_gib=124.0)
    lines = written(sample(fits=False, memory=memory)).splitlines()
    assert "does not fit: takes 135.2 of 134.4 GiB usable, 0.8 GiB too much" in lines[:3]
    # The way out stands before everything else, and once.
    assert shown.index("dtypes.m=bf16 makes it fit") < shown.index("memory at the peak")
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
    # Over a network: its share has a column, and its rate is among those used.
    shown = written(sample(collectives=(dataclasses.replace(one, network_gib=0.5),)))
    assert row(shown, "all-gather")[5:7] == ["1.07", "0.54"]
    assert "network 45 GB/s + 20 us" in " ".join(shown.split())
    assert "nothing moves between GPUs" in written(sample(collectives=()))


def test_long_tables_end_in_a_sum_of_the_rest():
    many = tuple(
        Collective("all-gather", "bf16", "fsdp", 8, 1, 1.0, 0.0, 100.0 - i, 1.0, f"a.py:{i}", "scope", f"x{i}")
        for i in range(20)
    )
    shown = written(sample(collectives=many))
    assert "a.py:11" in shown
    assert "a.py:12" not in shown
    assert row(shown, "8 more") == ["8", "more", "8", "8.6", "676", "8.0"]


@pytest.mark.parametrize("width", [100, 120])
def test_the_text_keeps_to_the_width(width: int):
    shown = written(sample(), width, steps=50_000)
    report_lines, command = shown.split("to make this plan again\n")
    assert max(map(len, report_lines.splitlines())) <= width
    # In one line, so that it can be copied.
    assert command.splitlines() == [
        "python -m jaxtrain.plan --config=configs/llama3_8b.py --config.train.global_batch=8 --config.train.grad_accum=1"
        " --topology=h200:8"
    ]


def test_the_text_suits_a_terminal_without_unicode_and_names_with_brackets():
    plan = sample(warnings=("bf16[layers] is [bold]replicated[/bold]",))
    assert "bf16[layers] is [bold]replicated[/bold]" in written(plan, encoding="ascii")
    assert "####" in written(plan, encoding="ascii")


def test_traffic_stands_beside_the_least_in_a_step_and_in_a_layer():
    raw = io.StringIO()
    parts = (Part("norms", 52.24, 38.99, 32), Part("optimizer", 31.9, 32.1), Part("copies and others", 11.7, 0.0))
    traffic_report.show(parts, Console(file=raw, width=110))
    assert row(raw.getvalue(), "norms") == ["norms", "52.2", "39.0", "1.34", "1,632", "1,218"]
    assert row(raw.getvalue(), "optimizer") == ["optimizer", "31.9", "32.1", "0.99"]
    assert row(raw.getvalue(), "copies")[-3:] == ["11.7", "0", "-"]
    assert row(raw.getvalue(), "all") == ["all", "95.8", "71.1", "1.35"] and "1.35 x the least" in raw.getvalue()


def test_published_runs_bound_what_is_believed():
    """The range stands in front of the roofline; where nothing of this kind was published, the report says so instead."""
    expected = "expected: step 746 to 824 ms, 9,940 to 11,000 tokens/s/GPU, MFU 51.7% to 57.1% causal"
    expected += " of the bf16 peak, 25.8% to 28.5% of the FP8 peak"
    shown = " ".join(written(sample(), 120).split())
    assert f"{expected}; roofline: step 709 ms" in shown and "0.86 to 0.95 of the measured step time" in shown
    assert "60.1% causal of the bf16 peak, 30.0% of the FP8 peak" in shown
    none = dataclasses.replace(sample().time, expected_step_ms=None, expected_tokens_per_s_per_device=None)
    for text in (written(sample(time=none), 120), page.html(sample(time=none))):
        assert "no comparable published run" in text and "expected: step" not in text
    assert "746 to 824 ms" in page.html(sample())
    nan = dict.fromkeys(("mfu_causal", "mfu_full", "hfu"), float("nan"))
    unknown = sample(time=dataclasses.replace(sample().time, **nan, mfu_fp8_peak=None))
    assert "MFU - causal, - full; HFU -" in written(unknown)


def test_small_classes_share_a_row():
    plan = sample()
    by_class = plan.memory.by_class | {"batch": 0.001, "constants": 0.07}
    shown = written(dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, by_class=by_class)))
    assert row(shown, "2 others") == ["2", "others", "0.1", "0.2%"]
    assert "constants" not in shown
    assert row(written(plan), "logits and loss")[3:5] == ["1.0", "2.4%"]


def test_time_to_train():
    # 50,000 steps of 65,536 tokens at 92,460 tokens a second are 9.84 hours by the roofline; expected are 746 to 824 ms each.
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
    assert figures.place("/a/jaxtrain/b/jaxtrain/loss.py:88") == "jaxtrain/loss.py:88"
    assert figures.place("/env/site-packages/optax/adam.py:3") == "optax/adam.py:3"
    assert figures.place("/mine/model.py:7") == "/mine/model.py:7"
    assert figures.command(sample(config="my file.py", overrides=())).endswith("'--config=my file.py' --topology=h200:8")


def compared(plans: list[Plan], width: int = 100) -> str:
    stream = io.StringIO()
    terminal.compare(plans, Console(file=stream, width=width, force_terminal=True, color_system="standard", highlight=False))
    return stream.getvalue()


def test_compare_shows_every_plan_and_marks_the_best_that_fits():
    slow = sample(
        overrides=("remat.policy=full",),
        time=dataclasses.replace(sample().time, step_ms=786.0, bound_by="matrix products 65% of the step"),
    )
    fast = sample(fits=False, time=dataclasses.replace(sample().time, step_ms=600.0))
    shown = compared([sample(), slow, fast, *[slow] * 4])
    assert [line for line in shown.splitlines() if line.startswith("2: ")] == ["2: h200:8, mesh fsdp=8; remat.policy=full"]
    assert shown.count("matrix") == 5
    assert max(len(re.sub(r"\x1b\[\d*m", "", line)) for line in shown.splitlines()) <= 100
    (steps,) = [line for line in shown.splitlines() if "roofline ms" in line and "600.0" in line]
    # Bold is ESC[1m: on the fastest that fits, not on the fastest.
    assert re.findall(r"\x1b\[1m *([\d.]+)", steps) == ["708.8"]
    # A shorter step with fewer tokens is not a better one.
    half = dataclasses.replace(slow, tokens_per_step=32_768)
    assert not [line for line in compared([sample(), half]).splitlines() if "roofline ms" in line and "\x1b[1m" in line]
    with pytest.raises(ValueError, match="at least one"):
        compared([])


# ---- the page


VOID = {"meta", "link", "br", "wbr", "img", "input"}


class Read(HTMLParser):
    """What a page says: its text, titles and labels; its elements with their attributes; and whether tags close in order."""

    def __init__(self, page: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.code: list[str] = []  # of scripts and styles
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.words += [value or "" for name, value in attrs if name in ("title", "aria-label", "content")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))  # an element of an SVG, closed where it opens

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        opened = self._open.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        (self.code if self._open and self._open[-1] in ("script", "style") else self.words).append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_the_page_is_whole_html_with_text_for_every_picture():
    read = Read(page.html(sample(), steps=50_000))
    assert read.named("html") == [{"lang": "en"}]
    assert len(read.named("title")) > 1  # the page's own, and the tooltips of bars
    assert all("scope" in th for th in read.named("th"))
    assert len(read.named("caption")) == len(read.named("table"))
    for svg in read.named("svg"):
        nested = "viewbox" in svg
        assert nested or svg.get("aria-hidden") == "true" or (svg.get("role") == "img" and svg.get("aria-label")), svg
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)


def test_the_page_asks_for_nothing_from_outside():
    text = page.html(sample(), steps=50_000)
    assert not re.findall(r"https?:|//[a-z]|@import", re.sub(r"// .*", "", text))
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {"#too-much"}
    read = Read(text)
    for tag, attributes in read.elements:
        assert "src" not in attributes, tag
        assert attributes.get("href", "data:,") == "data:,", tag
    (policy,) = [m for m in read.named("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert (policy["content"] or "").startswith("default-src 'none'")


def test_names_in_a_plan_cannot_write_the_page():
    evil = '</script><script>alert("1&1")</script>'
    plan = changed(sample(), lambda _, value: value + evil if isinstance(value, str) else value)
    plan = dataclasses.replace(plan, trip_counts={evil: 3}, versions={evil: evil}, mesh={evil: 8})
    memory = dataclasses.replace(plan.memory, by_class={evil: 40.78}, saved={evil: 21.25})
    read = Read(page.html(dataclasses.replace(plan, memory=memory)))
    plain = Read(page.html(sample()))
    assert len(read.named("script")) == len(plain.named("script")) == 2
    assert " ".join(read.words).count(evil) > 50


def test_every_number_of_the_plan_is_on_the_page():
    plan = sample()
    plan = dataclasses.replace(plan, kernels=tuple(k for k in plan.kernels if k.kind != "communication"))
    shown = page.html(plan)
    for path, value in leaves(plan):
        if re.search(NOWHERE, path) or (isinstance(value, str) and not re.search(r"\d", value)):
            continue
        if value == 0 or (isinstance(value, float) and value < 0.04):
            continue  # as in the text
        draw = random.Random(0)
        new = changed(plan, lambda p, v, path=path, draw=draw: other(v, draw) if p == path else v)
        assert page.html(new) != shown, f"{path} = {value!r} changes nothing that is shown"


def test_every_number_on_the_page_is_of_the_plan():
    def said(plan: Plan, steps: int) -> str:
        # Without the axis of the chart, whose round numbers are its own.
        text = re.sub(r'<text [^>]*class="axis"[^>]*>[^<]*</text>', "", page.html(plan, steps=steps))
        return " ".join(w for w in Read(text).words if w not in (kit.POLICY, "width=device-width, initial-scale=1"))

    same = numbers_in(said(sample(), 50_000))
    for seed in range(12):
        draw = random.Random(seed)
        plan = changed(sample(), lambda _, value, draw=draw: other(value, draw))
        same &= numbers_in(said(plan, 50_001 + 7 * seed))
    assert same <= {"0", "1,000", "0.1", "8,192", "1", "64"}, same


def test_the_chart_marks_peak_and_limit_and_says_what_gaps_add():
    plan = sample()
    shown = page.html(plan)
    assert ">peak 40.8 GiB<" in shown
    assert ">usable 134.4 GiB<" in shown
    assert "gaps between arrays" not in shown
    gaps = dataclasses.replace(plan.memory, temp_gib=31.0)
    assert "Above the peak, a run takes 42.2 GiB, 1.4 of it gaps between arrays." in page.html(sample(memory=gaps))
    # A phase too short for its name has it in the table only.
    assert ">forward</text>" in shown
    assert ">loss</text>" not in shown
    assert ">loss</th>" in shown


@pytest.mark.parametrize("held", [(), ((0.3, ""),), ((0.3, "forward"), (0.2, "backward"))])
def test_plans_with_little_in_them_have_a_page(held: tuple[tuple[float, str], ...]):
    memory = dataclasses.replace(sample().memory, timeline=held, largest=(), saved={}, peak_gib=0.3, host_gib=1.5)
    plan = sample(memory=memory, collectives=(), kernels=(), trip_counts={}, hints=(), warnings=(), overrides=())
    words = " ".join(Read(page.html(plan)).words)
    assert "no collectives" in words
    assert "Pinned host memory for each GPU: 1.50 GiB" in words
    assert "Warnings" not in words


def test_many_arrays_and_kernels_end_in_a_sum():
    many = tuple(Buffer(2.0 - i / 100, "gradients", f"f32[{i}]", "a.py:1", "scope", f"x.{i}") for i in range(50))
    words = Read(page.html(sample(memory=dataclasses.replace(sample().memory, largest=many)))).words
    assert "f32[39]" in words
    assert "f32[40]" not in words
    # The ten that are left: 1.60 down to 1.51.
    assert words[words.index("10 more") + 1] == "15.6"
    kernels = tuple(Kernel("gemm", f"scope {i}", "a.py:1", 2, 50.0 - i, 1.0, 3.0) for i in range(45))
    words = Read(page.html(sample(kernels=kernels))).words
    # Count, ms, TFLOP and GB of the five that are left: 10.0 down to 6.0 ms.
    assert words[words.index("5 more") + 1 :][:4] == ["10", "40.0", "5.00", "15.0"]


@pytest.mark.parametrize(
    "top, expected", [(150.5, [0, 25, 50, 75, 100, 125, 150]), (0.9, [0, 0.2, 0.4, 0.6, 0.8]), (4, [0, 1, 2, 3, 4])]
)
def test_ticks_are_round(top: float, expected: list[float]):
    assert charts.ticks(top) == pytest.approx(expected)


def test_the_script_names_what_the_page_has():
    """The check of page.js that needs no browser: what it looks for is there."""
    text = page.html(sample())
    read = Read(text)
    script = (REPO / "jaxtrain/page/assets/page.js").read_text()
    looked_for = re.findall(r'(?:querySelector(?:All)?|getElementById|matches)\("([^"]+)"\)', script)
    assert len(looked_for) == 7
    classes = {c for _, attributes in read.elements for c in (attributes.get("class") or "").split()}
    tags = {tag for tag, _ in read.elements}
    for selector in looked_for:
        tag, _, name = selector.partition(".")
        assert selector == ":focus-visible" or not tag or tag in tags, selector
        assert not name or name in classes, selector
    points = json.loads(read.code[-2] if read.code[-2].startswith("[") else "null")
    assert len(points) == len(sample().memory.timeline)
    assert points[0] == "12.1 GiB, forward"
    # Sorting reads these.
    for body in re.findall(r'<table class="sortable">.*?<tbody>(.*?)</tbody>', text):
        cells = re.findall(r'<td class="number"[^>]*>', body)
        assert cells
        assert all("data-value=" in cell for cell in cells)


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """<pre id="probe"></pre><script>
const found = { words: [], overlaps: [], outside: [], wide: document.documentElement.scrollWidth - innerWidth };
const boxes = [...document.querySelectorAll(".chart text")].filter((t) => t.getClientRects().length)
  .map((t) => [t.textContent, t.getBoundingClientRect()]);
boxes.forEach(([a, p], i) => {
  found.words.push(a);
  if (p.left < 0 || p.right > innerWidth) found.outside.push(a);
  for (const [b, q] of boxes.slice(i + 1))
    if (p.left < q.right && q.left < p.right && p.top < q.bottom - 2 && q.top < p.bottom - 2) found.overlaps.push([a, b]);
});
const table = [...document.querySelectorAll("table.sortable")].find((t) => t.caption.textContent.startsWith("Collectives"));
const click = (name) => {
  const head = [...table.tHead.rows[0].cells].find((c) => c.textContent === name);
  head.querySelector("button").click();
  return [head.getAttribute("aria-sort"), ...[...table.tBodies[0].rows].map((r) => r.cells[head.cellIndex].textContent)];
};
found.sorted = [click("count"), click("count"), click("kind")];
const box = document.querySelector(".chart");
const plot = box.querySelector("svg").getBoundingClientRect();
box.dispatchEvent(new PointerEvent("pointermove", { clientX: plot.left + 1, clientY: plot.top + 1 }));
found.tips = [box.querySelector(".tip").textContent];
for (const key of ["ArrowRight", "End"]) {
  box.dispatchEvent(new KeyboardEvent("keydown", { key }));
  found.tips.push(box.querySelector(".tip").textContent);
}
document.getElementById("probe").textContent = JSON.stringify(found);
</script>"""


def opened(text: str, folder: Path, width: int) -> tuple[str, list[str]]:
    """A page as the browser has it after its scripts ran, and what the console said."""
    path = folder / "page.html"
    path.write_text(text)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"]
    command = [str(BROWSER), *flags, f"--window-size={width},1200", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(not BROWSER, reason="no Chromium here: page.js is checked only by the names it uses")
@pytest.mark.parametrize("width", [1280, 700])
def test_the_page_in_a_browser(tmp_path: Path, width: int):
    text = page.html(sample(), steps=50_000)
    document, console = opened(text.replace("</body>", f"{PROBE}</body>"), tmp_path, width)
    assert console == []
    (found,) = re.findall(r'<pre id="probe">(.+?)</pre>', document)
    found = json.loads(html.unescape(found))
    assert found["overlaps"] == []
    assert found["outside"] == []
    assert found["wide"] <= 0, "the page is wider than its window"
    assert {"peak 40.8 GiB", "usable 134.4 GiB", "forward", "backward", "GiB"} <= set(found["words"])
    assert ("optimizer" in found["words"]) == (width > 1000)
    counts = ["64", "32", "3", "1", "1"]
    assert found["sorted"][0] == ["descending", *counts]
    assert found["sorted"][1] == ["ascending", *counts[::-1]]
    assert found["sorted"][2][:2] == ["ascending", "all-gather"]
    assert found["tips"] == ["12.1 GiB, forward", "12.3 GiB, forward", "16.2 GiB, optimizer"]


@pytest.mark.skipif(not BROWSER, reason="no Chromium here: nothing whose console could be read")
def test_a_page_with_a_mistake_would_be_seen(tmp_path: Path):
    """Else an empty console would prove nothing."""
    broken = page.html(sample()).replace("const points =", "const points = missing +")
    _, console = opened(broken, tmp_path, 1280)
    assert any("missing is not defined" in line for line in console)
    _, console = opened(page.html(sample()).replace("</main>", '<img src="https://example.com/x.png"></main>'), tmp_path, 1280)
    assert any("Content Security Policy" in line for line in console)


# ---- while plans are made


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
