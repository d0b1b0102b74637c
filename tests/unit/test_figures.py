"""Figures in user pages and in comments of configs agree with a golden plan, a formula, or a page of evidence.

A figure is a number with a unit, such as "127 GiB", outside of fenced blocks. A new figure needs a line in `SOURCES`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import gpu_items
from jaxtrain import flops, hardware
from jaxtrain.api import load
from jaxtrain.checkpoint import arrays
from jaxtrain.kernels.attention import cudnn
from jaxtrain.monitor import alerts
from jaxtrain.preflight import boards

REPO = Path(__file__).resolve().parents[2]
GIB = 2**30
H200 = hardware.lookup("NVIDIA H200")
assert H200 is not None
UNITS = "GiB|GB/s|TFLOP/s|tokens/s/GPU|tokens/s|ms|% MFU"
FIGURE = re.compile(rf"(?<![\d.,])(\d[\d,]*(?:\.\d+)?) ?({UNITS})(?![\w/])")
GENERATED = {"config.md", "modules.md", "presets.md", "coming_from.md", "commands.md"}


def pages() -> list[Path]:
    """Return the README, the hand-written user pages, and the shipped configs."""
    docs = [path for path in sorted((REPO / "docs").glob("*.md")) if path.name not in GENERATED]
    return [REPO / "README.md", *docs, *sorted((REPO / "configs").glob("*.py"))]


def figures(path: Path) -> list[str]:
    """Return the figures of a page outside of fenced blocks, each once."""
    text = path.read_text()
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    else:  # a line break in a comment may fall within a figure
        text = re.sub(r"\n\s*#\s*", " ", text)
    return list(dict.fromkeys(f"{number} {unit}" for number, unit in FIGURE.findall(text)))


def peak(name: str) -> Callable[[], float]:
    """Return a function that returns the peak memory of a golden plan, in GiB."""
    return lambda: json.loads((REPO / f"tests/golden/{name}.json").read_text())["peak_gib"]


def a_parameter(config: str, size: float, gpus: int) -> Callable[[], float]:
    """Return a function that returns the GiB on each GPU, if each of the model's parameters has `size` bytes."""
    return lambda: flops.parameters(load(config).model)["total"] * size / gpus / GIB


def attention_outputs(config: str, gpus: int) -> Callable[[], float]:
    """Return a function that returns the GiB of attention's bfloat16 outputs on each GPU, for one sequence and all layers."""
    run = load(config)
    return lambda: 2 * run.model.num_layers * run.data.seq_len * run.model.d_model / gpus / GIB


def recorded(page: str) -> str:
    """Return the text of a page of docs/evidence, as the source of its figures. A command writes this page, or the page names
    the command that measured them.
    """
    return (REPO / "docs/evidence" / page).read_text()


# "page: figure" -> the value that the figure rounds, or the text of a page that contains the figure
SOURCES: dict[str, Callable[[], float] | str] = {
    "attention.md: 2.5 GiB": lambda: cudnn.WORKSPACE / GIB,
    "attention.md: 8.28 GiB": recorded("attention_kernels.md"),
    "attention.md: 2.07 GiB": recorded("attention_kernels.md"),
    "benchmarks.md: 100 GiB": lambda: gpu_items.HALF_GIB,
    "checkpoints.md: 4 GiB": lambda: arrays.WRITE_BYTES / GIB,
    "cluster.md: 480 GB/s": lambda: boards.BOARDS["H200 SXM"].all_reduce or 0,
    "concepts.md: 1,979 TFLOP/s": lambda: 2 * H200.bf16,
    "first_gpu_run.md: 6 GiB": lambda: hardware.RESERVE_GIB,
    "memory.md: 131 GiB": a_parameter("llama3_70b", 16, 8),
    "memory.md: 526 GiB": a_parameter("llama3_70b", 8, 1),
    "observing.md: 1 GiB": lambda: alerts.OUTSIDE_GIB,
    "optimizers.md: 112 ms": recorded("muon.md"),
    "plan.md: 6 GiB": lambda: hardware.RESERVE_GIB,
    "gpt_oss_20b.py: 39 GiB": a_parameter("gpt_oss_20b", 16, 8),
    "gpt_oss_20b.py: 10 GiB": a_parameter("gpt_oss_20b", 4, 8),
    "deepseek_v3.py: 143.2 GiB": recorded("deepseek_v3.md"),
    "gpt_oss_20b.py: 20 GiB": a_parameter("gpt_oss_20b:120b", 12, 64),
    "gpt_oss_20b.py: 163 GiB": a_parameter("gpt_oss_20b:120b", 12, 8),
    "gpt_oss_20b.py: 84.2 GiB": recorded("deepseek_v3.md"),
    "gpt_oss_20b.py: 27 GiB": a_parameter("gpt_oss_20b:120b", 2, 8),
    "gpt_oss_20b.py: 123.7 GiB": recorded("deepseek_v3.md"),
    "gpt_oss_20b.py: 129.3 GiB": recorded("deepseek_v3.md"),
    "gpt_oss_20b.py: 105 GiB": peak("gpt_oss_20b"),
    "llama2_7b.py: 42 GiB": peak("llama2_7b"),
    "llama3_1b.py: 40 GiB": peak("llama3_1b"),
    "llama3_405b.py: 142 GiB": a_parameter("llama3_405b", 12, 32),
    "llama3_405b.py: 18 GiB": a_parameter("llama3_405b", 6, 128),
    "llama3_405b.py: 23.6 GiB": a_parameter("llama3_405b", 4, 64),
    "llama3_70b.py: 131 GiB": a_parameter("llama3_70b", 16, 8),
    "llama3_70b.py: 131.7 GiB": recorded("moments.md"),
    "llama3_70b.py: 127 GiB": peak("llama3_70b"),
    "llama3_70b.py: 32.9 GiB": a_parameter("llama3_70b", 4, 8),
    "llama3_70b.py: 126 GiB": peak("llama3_70b_on_64"),
    "llama3_8b.py: 120 GiB": a_parameter("llama3_8b", 16, 1),
    "llama3_8b.py: 50 GiB": peak("llama3_8b"),
    "llama3_8b.py: 32 GiB": attention_outputs("llama3_8b:1m", 8),
    "mixtral_8x7b.py: 87 GiB": a_parameter("mixtral_8x7b", 16, 8),
    "mixtral_8x7b.py: 22 GiB": a_parameter("mixtral_8x7b", 4, 8),
    "mixtral_8x7b.py: 129 GiB": peak("mixtral_8x7b"),
    "qwen3_30b_a3b.py: 57 GiB": a_parameter("qwen3_30b_a3b", 16, 8),
    "qwen3_30b_a3b.py: 14 GiB": a_parameter("qwen3_30b_a3b", 4, 8),
    "qwen3_30b_a3b.py: 126 GiB": peak("qwen3_30b_a3b"),
}


def shown(source: Callable[[], float] | str) -> str:
    return "a page without it" if isinstance(source, str) else f"{source():,.6g}"


def agrees(figure: str, source: Callable[[], float] | str) -> bool:
    """Return whether a figure, to its printed digits, is the value of its source."""
    number = figure.split(" ")[0]
    if isinstance(source, str):
        return re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d,]|\.\d)", source) is not None
    decimals = len(number.partition(".")[2])
    return f"{source():,.{decimals}f}" == number


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.name)
def test_figures_have_sources(page: Path):
    """Each figure of a page has a source with the same value, and each source has a figure."""
    found = {f"{page.name}: {figure}" for figure in figures(page)}
    listed = {name for name in SOURCES if name.startswith(f"{page.name}: ")}
    assert found == listed, "without a source (give it one, or leave the figure out), or with a source and gone"
    wrong = {name: shown(SOURCES[name]) for name in found if not agrees(name.split(": ")[1], SOURCES[name])}
    assert not wrong, "figure -> its source"


def test_a_wrong_figure_is_noticed():
    assert agrees("127 GiB", lambda: 127.4) and not agrees("127 GiB", lambda: 127.6)
    assert agrees("1,234.5 ms", lambda: 1234.46) and not agrees("1,234.5 ms", lambda: 1234.4)
    assert agrees("45.4 ms", "took 45.4 ms") and not agrees("5.4 ms", "took 45.4 ms")
