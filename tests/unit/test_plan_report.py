"""The report and the page of a plan show all figures of the plan and only those, legibly."""

import dataclasses
import io
import itertools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import EVIL, Read, assert_self_contained
from rich.console import Console
from sample_plan import sample

from jaxtrain.config import numbers
from jaxtrain.plan.result import Collective, Memory, Plan
from jaxtrain.report import html, plan_page, plan_sections
from jaxtrain.report.plan import print_plan
from jaxtrain.report.tables import relative_source

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


def written(plan: Plan, width: int = 110, **arguments: Any) -> str:
    stream = io.StringIO()
    print_plan(plan, Console(file=stream, width=width, highlight=False), **arguments)
    return stream.getvalue()


def row(shown: str, start: str) -> list[str]:
    """Return the words of the one line that starts with `start`."""
    (line,) = [line for line in shown.splitlines() if line.startswith(start)]
    return line.split()


def page_words(plan: Plan, steps: int) -> str:
    """Return the texts of the page without the round numbers of the chart's axis and the numbers of GPUs in the mesh."""
    text = re.sub(r'<text [^>]*class="axis"[^>]*>[^<]*</text>', "", plan_page.plan_html(plan, steps=steps))
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
    shown = plan_page.plan_html(plan)
    for path, value in leaves(plan):
        if re.search(NOWHERE, path) or (isinstance(value, str) and not re.search(r"\d", value)):
            continue
        if value == 0 or (isinstance(value, float) and value < 0.04):
            continue  # twice zero is zero, and a smaller value has no visible digit in its column
        draw = random.Random(0)
        new = changed(plan, lambda p, v, path=path, draw=draw: other(v, draw) if p == path else v)
        assert plan_page.plan_html(new) != shown, f"{path} = {value!r} changes nothing that is shown"


def test_bands_are_the_phases_without_short_stretches_inside_another():
    """A short stretch between two different phases stays, and a long one inside a phase too."""
    lengths = [
        ("forward", 40),
        ("loss", 1),
        ("backward", 20),
        ("forward", 1),
        ("backward", 20),
        ("forward", 10),
        ("backward", 20),
    ]
    phases = [phase for phase, n in lengths for _ in range(n)]
    found = plan_page.bands(phases)
    assert [phase for phase, *_ in found] == ["forward", "loss", "backward", "forward", "backward"]
    assert [last - first + 1 for _, first, last in found] == [40, 1, 41, 10, 20]
    assert found[0][1] == 0 and all(a[2] + 1 == b[1] for a, b in itertools.pairwise(found)) and found[-1][2] == len(phases) - 1


def test_the_peak_is_named_by_its_largest_arrays():
    """Arrays of one class and shape are one text."""
    plan = sample()
    first = plan.memory.largest[2]
    memory = dataclasses.replace(plan.memory, largest=(*plan.memory.largest, *[first] * 9))
    named = plan_page.peak_arrays(dataclasses.replace(plan, memory=memory))
    assert named[0] == (f"10 x {first.shape} {first.kind}", pytest.approx(10 * first.gib)) and len(named) == 3
    assert all(array in plan_page.plan_html(dataclasses.replace(plan, memory=memory)) for array, _ in named)


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


def test_temporaries_are_divided_by_what_wrote_them():
    """Each part has a colour of its own, and all rows sum to the peak. The usable memory is named at its mark."""
    plan = sample()
    rows = plan_sections.memory_classes(plan)
    parts = [gib for name, gib, _ in rows if name.startswith("temporaries")]
    assert sum(parts) == pytest.approx(plan.memory.by_class["temporaries"]) and len(parts) > 2
    assert sum(gib for _, gib, _ in rows) == pytest.approx(sum(plan.memory.by_class.values()))
    assert len({colour for *_, colour in rows}) == len(rows)
    (bar,) = re.findall(r'<svg class="bar marked".*?</svg>', plan_page.plan_html(plan))
    assert "134.4" in re.sub("<title>.*?</title>|<svg[^>]*>", "", bar)


@pytest.mark.parametrize(
    ("op_name", "name"),
    [
        ("state.params['layers']['mlp']['gate']", "layers.mlp.gate"),
        ("state.optimizer[0].mu['layers'][3]['mlp']['gate']", "layers.3.mlp.gate"),
        ("batch['tokens']", "tokens"),
        ("state.step", "state.step"),
    ],
)
def test_arguments_have_dotted_names(op_name: str, name: str):
    assert plan_sections.argument(op_name) == name
    plan = sample()
    first = dataclasses.replace(plan.memory.largest[0], op_name=op_name)
    shown = plan_page.plan_html(dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, largest=(first,))))
    assert name in shown and "state.optimizer" not in shown


def test_a_missing_range_is_explained_once():
    time = dataclasses.replace(sample().time, expected_step_ms=None, expected_tokens_per_s_per_device=None)
    plan = sample(time=time)
    assert plan_page.plan_html(plan).partition("<main>")[2].count(plan_sections.no_range(plan)) == 1


# ---- The text


def test_the_verdict_comes_first():
    assert numbers_in(written(sample()).splitlines()[0]) == {"40.8", "134.4", "93.6"}
    held = sample().memory
    memory = dataclasses.replace(held, peak_gib=159.44, temp_gib=159.44 - held.arguments_gib)
    shown = written(sample(fits=False, memory=memory))
    assert numbers_in(shown.splitlines()[0]) == {"159.4", "134.4", "25.0"}
    assert "MFU" not in shown  # a step that does not fit has no speed
    # A step may not fit because of fragmentation alone.
    memory = dataclasses.replace(sample().memory, peak_gib=134.0, temp_gib=124.0)
    assert numbers_in(written(sample(fits=False, memory=memory)).splitlines()[0]) == {"135.2", "134.4", "0.8"}


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
    # Over a network, the network's share has a column, and the network's rate is in the list of rates.
    remote = sample(collectives=(dataclasses.replace(one, network_gib=0.5),))
    assert row(written(remote), "all-gather")[5:7] == ["1.07", "0.54"]
    assert "45 GB/s" in plan_page.plan_html(remote) and "45 GB/s" not in plan_page.plan_html(plan)


def test_the_text_keeps_to_the_width():
    """The command is on one line, so that it can be copied."""
    *lines, command = written(sample(), 100, steps=50_000).splitlines()
    assert max(map(len, lines)) <= 100
    assert {"--config=configs/llama3_8b.py", "--config.train.grad_accum=1", "--topology=h200:8"} < {*command.split()}


def test_published_runs_bound_what_is_believed():
    """The range from published runs precedes the roofline's step time. Without comparable runs, there is none."""
    shown = written(sample(), 120)
    assert shown.index("746 to 824 ms") < shown.index("709 ms") and "746 to 824 ms" in plan_page.plan_html(sample())
    assert {"60.1%", "30.0%", "51.7%", "57.1%"} <= {word.strip(",;") for word in shown.split()}
    assert "0.86 to 0.95" in plan_page.plan_html(sample())
    none = dataclasses.replace(sample().time, expected_step_ms=None, expected_tokens_per_s_per_device=None)
    for text in (written(sample(time=none), 120), plan_page.plan_html(sample(time=none))):
        assert "746 to" not in text and "709" in text
    nan = dict.fromkeys(("mfu_causal", "mfu_full", "hfu"), float("nan"))
    unknown = sample(time=dataclasses.replace(sample().time, **nan, mfu_fp8_peak=None))
    assert "nan" not in written(unknown) and "MFU - " in written(unknown)


def test_time_to_train():
    # 50,000 steps of 65,536 tokens at 92,460 tokens/s are 9.84 hours by the roofline. The expected range is 746 to 824 ms a
    # step.
    spans = ["10", "to", "11", "h", "82.9", "to", "91.6"]
    assert row(written(sample(), steps=50_000), "this config") == ["this", "config", "3.28", "B", "50,000", *spans]
    none = sample(time=dataclasses.replace(sample().time, expected_step_ms=None, expected_tokens_per_s_per_device=None))
    assert row(written(none, steps=50_000), "this config") == ["this", "config", "3.28", "B", "50,000", "9.8", "h", "78.8"]
    assert "this config" not in written(sample())
    short = row(written(none, steps=1), "this config")  # 709 ms of 8 GPUs
    assert short == ["this", "config", "65.5", "k", "1", "0.7", "s", "<0.01"]


def test_sizes_and_places():
    assert numbers.gib([0.25, 0.001]) == ("MiB", ["256.0", "1.0"])
    assert numbers.rough(24_034.0) == "24,000"
    assert relative_source("/a/jaxtrain/b/jaxtrain/step/loss.py:88") == "jaxtrain/step/loss.py:88"
    assert relative_source("/env/site-packages/optax/adam.py:3") == "optax/adam.py:3"
    assert relative_source("/mine/model.py:7") == "/mine/model.py:7"
    assert plan_sections.command(sample(config="my file.py", overrides=())).endswith("'--config=my file.py' --topology=h200:8")


# ---- The page


def test_the_page_is_whole_html_with_text_for_every_picture():
    read = Read(plan_page.plan_html(sample(), steps=50_000))
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
    read = Read(plan_page.plan_html(dataclasses.replace(plan, memory=memory)))
    plain = plan_page.plan_html(sample(), steps=50_000)
    assert_self_contained(plain)
    assert len(read.named("script")) == len(Read(plain).named("script")) == 2
    assert " ".join(read.words).count(EVIL) > 50
