"""README and docs are correct: links, file names, keys and commands exist, and generated pages are up to date.

tests/campaign/test_doc_commands.py runs the commands of ```bash blocks. Commands in ```text blocks, and in the docstrings of
config files, need GPUs or the network: their configs are checked against the properties of a node of eight GPUs.
"""

import ast
import dataclasses
import importlib
import importlib.util
import itertools
import json
import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_imports

from benchmarks import command_reference, config_reference, file_tree, gpu_items, model_types
from jaxtrain import main
from jaxtrain.checkpoint import arrays
from jaxtrain.commands.api import load
from jaxtrain.commands.command import read_line
from jaxtrain.config import hardware
from jaxtrain.config.command_line import Parser
from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import choices
from jaxtrain.data import loading, tokenfile
from jaxtrain.kernels.attention import cudnn
from jaxtrain.metrics import alerts, table
from jaxtrain.models import flops
from jaxtrain.models.activations import ACTIVATIONS
from jaxtrain.node import machine, train_step
from jaxtrain.step.resume import markdown as resume_table
from jaxtrain.step.validate import validate
from jaxtrain.train import parity_layouts

REPO = Path(__file__).resolve().parents[2]
PAGES = [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md"))]
# The function of a command that finds mistakes beside those of the options
FURTHER_CHECKS = {"plan": "_find_problems", "bench": "find_problems", "parity": "find_problems"}
FURTHER_CHECKS["preflight"] = "find_problems"
NODE = Devices("gpu", "NVIDIA H200", 8, 140.0, "described", 90)


def blocks(path: Path, language: str) -> list[str]:
    """Return the contents of a page's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Return the command lines in a text, with continued lines joined."""
    lines = [line.strip() for line in text.replace("\\\\\n", "\\\n").replace("\\\n", " ").splitlines()]
    lines = [re.sub(r"^([A-Z_]+=\S+ )+", "", line) for line in lines]
    programs = ("./run.sh", "python -m jaxtrain", "python -m benchmarks", ".venv/bin/python", "hf ")
    return [line for line in lines if line.startswith(programs)]


def all_commands() -> list[tuple[str, str, str]]:
    """Return (page or config file, language of the block, command) for every command."""
    found = [(p.name, kind, c) for p in PAGES for kind in ("text", "bash") for b in blocks(p, kind) for c in commands(b)]
    found += [
        ("README.md", "text", c)
        for c in re.findall(r"^\|.*`(\./run\.sh [^`]+[^`.])` \|", (REPO / "README.md").read_text(), re.M)
    ]
    for path in sorted((REPO / "configs").glob("*.py")):
        found += [(path.name, "text", c) for c in commands(path.read_text().split('"""')[1])]
    return found


def first_of_a_line(command: str) -> list[str]:
    """Return the words of a command line up to the first operator of the shell."""
    read = shlex.shlex(command, posix=True, punctuation_chars=";&|<>")
    read.whitespace_split, read.commenters = True, ""
    return list(itertools.takewhile(lambda word: word.strip(";&|<>"), read))


def module_of(name: str) -> Any:
    """Return the module that runs for a command. Raises ModuleNotFoundError if there is none."""
    if not name.startswith("benchmarks."):
        name = "jaxtrain.main" if name == "main" else f"jaxtrain.commands.{name}"
    return importlib.import_module(name)


def parsed(words: list[str]) -> list[Any]:
    """Return the problems of a command line of a module or of run.sh, [] if it can be parsed. main's config is not checked."""
    name, *words = words
    if name == "test":
        files = [word for word in words if "/" in word and not word.startswith("-")]
        return [file for file in files if not (REPO / file).exists()]
    if name in ("hf download", "setup", "lint", "notebooks", "docs", "sample"):  # these are run by the campaign
        return []
    module = module_of(name)
    parser = module.parser()
    if not isinstance(parser, Parser):
        return parser.parse_known_args(words)[1]
    asked = read_line(parser, words)
    problems = [*asked.problems, *(getattr(module, FURTHER_CHECKS[name])(asked) if name in FURTHER_CHECKS else [])]
    if name == "bench":
        cases, _ = train_step.make_cases(asked.loaded.launch.config_argv, "", asked.sweep)
        problems += [p for argv in cases.values() for p in loading.load_config(argv).problems]
    elif name == "parity":
        problems += parity_layouts.parse_layouts(asked.meshes or parity_layouts.DEFAULT)[1]
    return problems


def mains_problems(words: list[str], runs_here: bool, folder: Path) -> list[str]:
    """Return the problems of a training command, apart from missing files. `runs_here`: a campaign runs it, so that its config
    need not be valid for NODE.
    """
    parsed = read_line(main.parser(), words)
    variant = parsed.loaded.launch.variant
    gpus = re.search(r"gpus=(\d+)", variant)
    count = int(gpus[1]) if gpus else 1 if "half" in variant else NODE.count
    checked = [] if runs_here else validate(parsed.loaded.run, dataclasses.replace(NODE, count=count), folder)
    files = ("data.source", "data.eval_source", "data.tokenizer", "init.from", "--config", "--config=FILE:base")
    found = [*parsed.problems, *checked]
    return [str(p) for p in found if p.key not in files or not re.search("no such (file|folder)", p.rule)]


@pytest.mark.parametrize("page", sorted({page for page, *_ in all_commands()}))
def test_commands_of_a_page_can_be_parsed(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Commands of ```bash blocks run on this machine in a campaign; all others are checked for a node of eight GPUs."""
    monkeypatch.chdir(REPO)
    for kind, command in [(kind, command) for name, kind, command in all_commands() if name == page]:
        words = first_of_a_line(command)
        if words[0] == "./run.sh":
            words = [word for word in words[1:] if word != "--no-preflight"]
        else:
            words = ["hf download"] if words[:2] == ["hf", "download"] else words[2:]
            words = words[1:] if words[0] == "jaxtrain" else [words[0].removeprefix("jaxtrain."), *words[1:]]
        if words and not words[0].startswith("-") and words[0] != "main":
            assert not parsed(words), command
        else:
            words = words[1:] if words[:1] == ["main"] else words
            assert not mains_problems(words, kind == "bash", tmp_path / "run"), command


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_names_of_files_lead_somewhere(page: Path):
    """The names are those in backticks that start with a folder of this repository."""
    roots = ("jaxtrain/", "configs/", "tests/", "docs/", "benchmarks/", "requirements/")
    for name in re.findall(r"`([\w./-]+)`", page.read_text()):
        assert not name.startswith(roots) or (REPO / name).exists(), name
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert heading in anchors, target


def names_in(files: list[Path]) -> set[str]:
    """Return the functions and classes that files, or the modules of folders, define."""
    modules = [module for file in files for module in ([file] if file.suffix else sorted(file.rglob("*.py")))]
    nodes = [node for module in modules for node in ast.walk(ast.parse(module.read_text()))]
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_the_architecture_lists_every_folder_and_names_functions_that_exist():
    """A row of the paths has functions or classes, and the files or folders that define them."""
    page = (REPO / "docs" / "architecture.md").read_text()
    assert len(page.splitlines()) <= 110, "two screens"
    listing, *paths = page.split("\n## The path")
    rows = re.findall(r"^\| (`.*`) \| .* \| (`.*`) \|$", listing, re.MULTILINE)
    entries = [name.strip("`/").removesuffix(".py") for cell, _ in rows for name in cell.split(", ")]
    assert entries == test_imports.ROOMS.split()
    for cell, start in rows[:-1]:
        room = REPO / "jaxtrain" / cell.strip("`")
        for name in start.replace("`", "").split(", "):
            assert (room / name).exists() if room.is_dir() else name in names_in([room]), (cell, name)
    steps = re.findall(r"^\| (`.*`) \| (\S.*) \| .* \|$", "".join(paths), re.MULTILINE)
    assert len(steps) >= 20
    for cell, places in steps:
        wanted = {part for name in re.findall(r"`([\w.]+)`", cell) for part in name.split(".")}
        missing = wanted - names_in([REPO / "jaxtrain" / place for place in places.split(", ")])
        assert not missing, (cell, missing)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (file_tree.PAGE, file_tree.page),  # written by: python -m benchmarks.file_tree --write
        (config_reference.PAGE, config_reference.page),  # python -m benchmarks.config_reference --write
        (command_reference.PAGE, command_reference.page),  # python -m benchmarks.command_reference --write
        (model_types.PAGE, model_types.page),  # python -m benchmarks.model_types --write
    ],
    ids=["list_of_modules", "list_of_keys", "list_of_commands", "list_of_model_types"],
)
def test_generated_pages_are_up_to_date(page: Path, text: Any, monkeypatch: pytest.MonkeyPatch):
    """The pages do not depend on the width of the terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    assert page.read_text() == text()


def test_the_readme_counts_the_model_types_as_their_page_does():
    page = model_types.PAGE.read_text()
    (read, every), *_ = re.findall(r"(\d+) of the (\d+) decoder types", (REPO / "README.md").read_text())
    (accepted, refused), *_ = re.findall(r"(\d+) are accepted, and (\d+) are refused", page)
    assert (int(read), int(every)) == (int(accepted), int(accepted) + int(refused))


# Pages that are made from the code, and those for contributors
REFERENCE = {"config.md", "commands.md", "modules.md", "coming_from.md", "presets.md", "migration.md"}
NOT_OF_USERS = REFERENCE | {"architecture.md", "step.md", "testing.md"}


def test_the_pages_of_users_are_short():
    pages = [p for p in (REPO / "docs").glob("*.md") if p.name not in NOT_OF_USERS]
    assert sum(len(p.read_bytes()) for p in pages) <= 130_000


def test_the_table_of_resumes_is_up_to_date():
    assert resume_table() in (REPO / "docs" / "checkpoints.md").read_text(), "paste jaxtrain.step.resume.markdown()"


def test_the_tables_of_metrics_are_up_to_date():
    page = (REPO / "docs" / "observing.md").read_text()
    assert all(text in page for text in table.markdown()), "paste jaxtrain.metrics.table.markdown()"


def test_the_site_lists_every_page_once():
    text = (REPO / "docs" / "index.md").read_text()
    (*trees, evidence) = re.findall(r"^```{toctree}\n(?::[^\n]*\n)+\n(.*?)```$", text, re.MULTILINE | re.DOTALL)
    pages = [path.stem for path in (*(REPO / "docs").glob("*.md"), *(REPO / "docs").glob("*.rst"))]
    assert sorted(["index", *"".join(trees).split()]) == sorted(pages)
    assert evidence == "evidence/*\n"


def test_a_page_of_evidence_is_called_an_estimate_unless_it_is_measured():
    conf = runpy.run_path(str(REPO / "docs" / "conf.py"))
    evidence = {f"evidence/{path.stem}" for path in (REPO / "docs" / "evidence").glob("*.md")}
    measured = {f"evidence/{name}" for name in conf["MEASURED"]}
    assert measured < evidence
    for name in {*evidence, "index", "README"}:
        text = "# Title\n\nText.\n"
        source = [text]
        conf["add_banner"](None, name, source)
        assert source[0].count(conf["BANNER"]) == (name in evidence - measured)
        assert source[0].replace(conf["BANNER"], "") == text and source[0].startswith("# Title\n")


def test_the_readme_is_short_and_leads_to_every_page():
    """The README has at most 10 KB. It links each page of docs, or a page that has a link to it."""
    text = (REPO / "README.md").read_text()
    assert len(text.encode()) <= 10_000
    linked = set(re.findall(r"\(docs/([\w.]+\.md)", text))
    others = {name for page in linked for name in re.findall(r"\]\(([\w.]+\.md)", (REPO / "docs" / page).read_text())}
    assert {p.name for p in (REPO / "docs").glob("*.md")} <= linked | others


def test_every_activation_and_policy_is_documented():
    page = (REPO / "docs" / "memory.md").read_text()
    assert not [name for name in (*ACTIVATIONS, *choices("remat.policy")) if f"`{name}`" not in page]


def literals() -> str:
    """Return the strings of the package, docstrings excluded, a newline between two."""
    nodes = [n for path in (REPO / "jaxtrain").rglob("*.py") for n in ast.walk(ast.parse(path.read_text()))]
    docstrings = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
    return "\n".join(str(n.value) for n in nodes if isinstance(n, ast.Constant) and id(n) not in docstrings)


def test_messages_of_troubleshooting_occur_in_the_package():
    """Messages are quoted as the package prints them, because users search the page for a message. Parts of a message that
    vary are written as `...`.
    """
    page = (REPO / "docs" / "troubleshooting.md").read_text()
    quoted, known = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE), literals()
    assert len(quoted) >= 30
    for message in quoted:
        parts = [part.strip(" .,;:()") for part in re.split(r"\.\.\.| = |: ", message)]
        assert max(map(len, parts)) >= 9, "too short to find"
        assert not [part for part in parts if len(part) > 3 and part not in known], message


# ---- Figures: numbers with a unit, such as "127 GiB", outside of fenced blocks. A new figure needs a line in SOURCES.

GIB = 2**30
H200 = hardware.lookup("NVIDIA H200")
assert H200 is not None
UNITS = "GiB|GB/s|TFLOP/s|tokens/s/GPU|tokens/s|ms|% MFU"
FIGURE = re.compile(rf"(?<![\d.,])(\d[\d,]*(?:\.\d+)?) ?({UNITS})(?![\w/])")
GENERATED = {"config.md", "modules.md", "presets.md", "coming_from.md", "commands.md"}


HAND_WRITTEN = [path for path in sorted((REPO / "docs").glob("*.md")) if path.name not in GENERATED]
WITH_FIGURES = [REPO / "README.md", *HAND_WRITTEN, *sorted((REPO / "configs").glob("*.py"))]


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


def recorded(page: str) -> str:
    """Return the text of a page of docs/evidence, as the source of its figures."""
    return (REPO / "docs/evidence" / page).read_text()


LONG = load("llama3_8b:1m")
# "page: figure" -> the value that the figure rounds, or the text of a page that contains the figure
SOURCES: dict[str, Callable[[], float] | str] = {
    "attention.md: 2.5 GiB": lambda: cudnn.WORKSPACE / GIB,
    "attention.md: 8.28 GiB": recorded("attention_kernels.md"),
    "attention.md: 2.07 GiB": recorded("attention_kernels.md"),
    "benchmarks.md: 100 GiB": lambda: gpu_items.HALF_GIB,
    "checkpoints.md: 4 GiB": lambda: arrays.WRITE_BYTES / GIB,
    "cluster.md: 480 GB/s": lambda: machine.BOARDS["H200 SXM"].all_reduce or 0,
    "concepts.md: 1,979 TFLOP/s": lambda: 2 * H200.bf16,
    "data.md: 1 GiB": lambda: tokenfile.CHECKED_BYTES / GIB,
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
    "qwen3_next_80b_a3b.py: 88 GiB": peak("qwen3_next_80b_a3b"),
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
    "llama3_8b.py: 32 GiB": lambda: 2 * LONG.model.num_layers * LONG.data.seq_len * LONG.model.d_model / 8 / GIB,
    "mixtral_8x7b.py: 87 GiB": a_parameter("mixtral_8x7b", 16, 8),
    "mixtral_8x7b.py: 22 GiB": a_parameter("mixtral_8x7b", 4, 8),
    "mixtral_8x7b.py: 129 GiB": peak("mixtral_8x7b"),
    "qwen3_30b_a3b.py: 57 GiB": a_parameter("qwen3_30b_a3b", 16, 8),
    "qwen3_30b_a3b.py: 14 GiB": a_parameter("qwen3_30b_a3b", 4, 8),
    "qwen3_30b_a3b.py: 126 GiB": peak("qwen3_30b_a3b"),
}


def agrees(figure: str, source: Callable[[], float] | str) -> bool:
    """Return whether a figure, to its printed digits, is the value of its source."""
    number = figure.split(" ")[0]
    if isinstance(source, str):
        return re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d,]|\.\d)", source) is not None
    decimals = len(number.partition(".")[2])
    return f"{source():,.{decimals}f}" == number


@pytest.mark.parametrize("page", WITH_FIGURES, ids=lambda path: path.name)
def test_figures_have_sources(page: Path):
    """Each figure of a page has a source with the same value, and each source has a figure."""
    found = {f"{page.name}: {figure}" for figure in figures(page)}
    listed = {name for name in SOURCES if name.startswith(f"{page.name}: ")}
    assert found == listed, "without a source (give it one, or leave the figure out), or with a source and gone"
    assert not [name for name in found if not agrees(name.split(": ")[1], SOURCES[name])]
