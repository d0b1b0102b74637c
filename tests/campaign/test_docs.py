"""README and docs say what is so: their commands run, their links lead somewhere, the tree names the files that exist.

A ```bash block is run as it stands, block after block of a page in one copy of the repository, with five differences: `run.sh`
is a stand-in that starts the same modules in this environment (the real one has tests of its own, test_launcher.py); HOME is
empty, and programs for CPUs are compiled as the suite's are; every training run is cut short, by overrides appended to its
command line (SHORT); and of contract tests only those are run that compile little (QUICK). Where the page says what a block
prints (the word `prints`, then a ```text block), it must print just that. Commands in ```text blocks, and those that config
files open with, need GPUs or the network: their command lines are parsed, and their configs checked against a described node
of eight GPUs. So are the commands of LONG pages, which a campaign runs.
"""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import attention_tiles, first_hour, import_memory, numerics, peer_maxtext, ragged_dot
from jaxtrain import environment, explain, launch, lm_eval, main
from jaxtrain.activations import ACTIVATIONS
from jaxtrain.bench import __main__ as bench
from jaxtrain.bench import sweep
from jaxtrain.config import RunConfig, flatten, to_dict
from jaxtrain.data.__main__ import parser as data_parser
from jaxtrain.hardware import Devices
from jaxtrain.hf import __main__ as hugging_face_command
from jaxtrain.parity import __main__ as parity
from jaxtrain.parity import layouts as parity_layouts
from jaxtrain.plan import __main__ as plan
from jaxtrain.preflight import __main__ as preflight
from jaxtrain.profile import __main__ as profile
from jaxtrain.report import __main__ as report
from jaxtrain.resume import markdown as resume_table
from jaxtrain.validate import validate

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
SHORT = [
    "--config.train.steps=6",
    "--config.optimizer.warmup_steps=1",
    "--config.eval.sequences=8",
    "--config.sample.max_tokens=4",
]
# Pages whose commands take minutes: run by a campaign alone. Runs, parity and reports have tests of their own.
LONG = ("experts", "parallelism", "pipeline", "report")
QUICKLY_COMPILED = "--xla_backend_optimization_level=0"
QUICK = "not layout and not gradients"
SCRIPTS = {
    f"benchmarks.{module.__name__.split('.')[-1]}": module
    for module in (attention_tiles, first_hour, import_memory, peer_maxtext, ragged_dot)
}
NODE = Devices("gpu", "NVIDIA H200", 8, 140.0, "described", 90)

PYTHON = """#!/usr/bin/env bash
case "$*" in
  *--explain*) ;;
  "-m jaxtrain.main"*) set -- "$@" {short} ;;
esac
exec {python} "$@"
"""
RUN = """#!/usr/bin/env bash
case "${1-}" in
  '' | -*) exec python -m jaxtrain.main "$@" ;;
  test) shift; exec python -m pytest "$@" -k {quick} ;;
  *) module=$1; shift; exec python -m "jaxtrain.$module" "$@" ;;
esac
"""


def blocks(path: Path, language: str) -> list[str]:
    """The contents of a page's fenced blocks."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def outputs(path: Path) -> dict[str, str]:
    """Block that is run -> what the page says it prints, where it says so."""
    body = r"((?:(?!```).*\n)*?)```\n"
    return dict(re.findall(rf"^```bash\n{body}\nprints\n\n```text\n{body}", path.read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all pages, so that the second one finds the corpus and the compiled steps of the first."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.more if p.stem in LONG else (), id=p.name) for p in PAGES if blocks(p, "bash")],
)
def test_commands_run(page: Path, home: Path, tmp_path: Path):
    clone, tools = tmp_path / "jaxtrain", tmp_path / "tools"
    clone.mkdir()
    for name in ("jaxtrain", "configs", "tests", "benchmarks"):
        shutil.copytree(REPO / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", clone)
    tools.mkdir()
    for file, text in ((tools / "python", PYTHON), (clone / "run.sh", RUN)):
        text = text.replace("{short}", shlex.join(SHORT)).replace("{quick}", shlex.quote(QUICK))
        file.write_text(text.replace("{python}", shlex.quote(sys.executable)))
        file.chmod(0o755)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_", "JAXTRAIN_"))}
    environ |= {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(home), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(clone)}
    environ |= {"TMPDIR": str(tmp_path), "XLA_FLAGS": QUICKLY_COMPILED}
    printed = outputs(page)
    for block in blocks(page, "bash"):
        command = block.replace("/tmp/", f"{tmp_path}/")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command], cwd=clone, env=environ, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, f"{page.name}:\n{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert done.stdout == printed.get(block, done.stdout), f"{page.name}:\n{command}"


def commands(text: str) -> list[str]:
    """The command lines in a text, with continued lines joined."""
    lines = [line.strip() for line in text.replace("\\\\\n", "\\\n").replace("\\\n", " ").splitlines()]
    lines = [re.sub(r"^([A-Z_]+=\S+ )+", "", line) for line in lines]
    return [
        line
        for line in lines
        if line.startswith(("./run.sh", "python -m jaxtrain", "python -m benchmarks", ".venv/bin/python", "hf "))
    ]


def text_commands() -> list[tuple[str, str]]:
    found = [(p.name, c) for p in PAGES for block in blocks(p, "text") for c in commands(block)]
    found += [(p.name, c) for p in PAGES if p.stem in LONG for block in blocks(p, "bash") for c in commands(block)]
    for path in sorted((REPO / "configs").glob("*.py")):
        doc = path.read_text().split('"""')[1]
        found += [(path.name, c) for c in commands(doc)]
    return found


@pytest.mark.parametrize(("page", "command"), text_commands())
def test_commands_that_are_not_run_can_be_parsed(page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPO)
    for variable in environment.changing(os.environ):  # the suite's own fake devices, on a described node
        monkeypatch.delenv(variable)
    words = shlex.split(command)
    if words[0] == "hf":
        assert words[1] == "download"
        return
    if words[1] == "-m" and words[2] in SCRIPTS:
        SCRIPTS[words[2]].parser().parse_args(words[3:])
        return
    if words[1:3] == ["-m", "benchmarks.numerics"]:
        assert not launch.load(words[3:], numerics.OPTIONS).problems
        return
    if words[0] == "./run.sh":
        words = [word for word in words if word != "--no-preflight" and not re.fullmatch(r"--nodes=[\w.,:@-]+", word)]
    words = words[1:] if words[0] == "./run.sh" else [words[2].removeprefix("jaxtrain."), *words[3:]]
    name = words.pop(0) if words and not words[0].startswith("-") else "main"
    if name == "data":
        data_parser().parse_args(words)
        return
    if name == "profile":
        profile.parser().parse_args(words)
        return
    if name == "lm_eval":
        assert "--tasks" in " ".join(lm_eval.parser().parse_known_args(words)[1])
        return
    if name == "hf":
        hugging_face_command.parser().parse_args(words)
        return
    if name == "setup":
        assert not words
        return
    if name == "test":
        options = ("--campaign", "--ledger", "--hypothesis-profile=thorough")
        assert all(word in options or word.startswith("--part=") or (REPO / word).is_file() for word in words)
        return
    if name == "plan":
        asked = launch.load(words, plan.OPTIONS, plan.SWITCHES)
        assert not [*asked.problems, *plan._options(asked)]
        return
    if name == "bench":
        asked = launch.load(words, bench.OPTIONS, bench.SWITCHES)
        action = next((n for n in ("suite", "kernels", "peer", "sweep") if asked.options[n]), "steps")
        assert not [*asked.problems, *bench.options_wrong(asked, action)]
        if asked.options["sweep"]:
            cases, wrong = sweep.cases(bench.command(asked), "", asked.options["sweep"])
            assert not wrong and not [p for case in cases for p in launch.load(case.argv).problems]
        return
    if name == "parity":
        asked = launch.load(words, parity.OPTIONS)
        _, problems = parity_layouts.parse(asked.options["meshes"] or parity_layouts.DEFAULT)
        assert not [*asked.problems, *parity._options(asked), *problems]
        return
    if name == "preflight":
        asked = launch.load(words, preflight.OPTIONS, preflight.SWITCHES)
        assert not [*asked.problems, *preflight.options_wrong(asked)]
        return
    if name == "report":
        assert not report.parse(words)[3]
        return
    assert name == "main", f"{page}: what is {command!r}?"
    loaded = launch.load(words, main.OPTIONS, main.SWITCHES)
    variant = loaded.launch.variant
    gpus = re.search(r"gpus=(\d+)", variant)
    count = int(gpus[1]) if gpus else 1 if "half" in variant else NODE.count
    node = dataclasses.replace(NODE, count=count)
    missing = ("data.source", "data.eval_source", "data.tokenizer", "init.from", "--config=FILE:base")
    problems = [*loaded.problems, *validate(loaded.run, node, tmp_path / "run")]
    assert not [str(p) for p in problems if p.key not in missing or not re.search("no such (file|folder)", p.rule)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert heading in anchors, f"{page.name}: {target}; headings: {anchors}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_of_files_exist(page: Path):
    """Files of this repository that a page names in backticks."""
    roots = ("jaxtrain/", "configs/", "tests/", "docs/", "benchmarks/", "requirements/")
    for name in re.findall(r"`([\w./-]+)`", page.read_text()):
        if name.startswith(roots):
            assert (REPO / name).exists(), f"{page.name}: {name}"


def test_outputs_are_found():
    """A block whose output went unread would never fail."""
    page = REPO / "docs" / "mfu.md"
    assert len(outputs(page)) == page.read_text().count("\nprints\n") > 0


def settings() -> list[tuple[str, str]]:
    """(row, what it tells to write) for the rows of the tables in coming_from.md: their second column."""
    rows = [line for line in (REPO / "docs" / "coming_from.md").read_text().splitlines() if line.startswith("| ")]
    return [(row, text) for row in rows for text in re.findall(r"`([^`]+)`", row.split("|")[2])]


def test_settings_for_people_from_elsewhere_exist():
    """Whatever coming_from.md tells to write is a key, with a value that it takes."""
    keys = {key for key, _ in flatten(to_dict(RunConfig()))}
    other = ("--", "./run.sh", "python -m", "CUDA_VISIBLE_DEVICES")
    wrong = []
    for row, text in settings():
        key, given, value = text.partition("=")
        if key not in keys:
            wrong += [] if text.startswith(other) or key in (*ACTIVATIONS, "custom", "wsd") else [row]
        elif given and value not in ("hf:NAME", "package.module:name"):
            overrides = [f"--config.{text}"] + ["--config.remat.policy=custom"] * (key == "remat.tensors")
            overrides += ["--config.precision=fp8"] * (key == "fp8.exclude")
            if key == "attention.ulysses":
                overrides += ["--config.attention.context=ulysses", "--config.mesh.seq=8"]
            loaded = launch.load(["--config=configs/llama3_8b.py", *overrides])
            found = [*loaded.problems, *validate(loaded.run, NODE, REPO / "runs" / "none")]
            wrong += [row for p in found if p.key == key and p.rule != "no such file"]
    assert not wrong
    assert len(settings()) > 200


def test_rows_without_a_setting_say_why():
    rows = [line for line in (REPO / "docs" / "coming_from.md").read_text().splitlines() if line.startswith("| `")]
    words = ("always", "derived", "needless", "not there")
    assert not [row for row in rows if "`" not in row.split("|")[2] and row.split("|")[2].strip() not in words]


def tree() -> dict[str, str]:
    """Path -> description, from the README's tree: two spaces of indentation a level, folders end in a slash."""
    (block,) = [b for b in blocks(REPO / "README.md", "text") if b.startswith("run.sh ")]
    found, folders = {}, []
    for line in block.splitlines():
        name, _, about = line.strip().partition(" ")
        level = (len(line) - len(line.lstrip())) // 2
        folders = folders[:level]
        path = "".join(folders) + name
        assert path not in found
        found[path] = about.strip()
        if name.endswith("/"):
            folders.append(name)
    return found


def test_the_tree_names_what_exists():
    listed = {path for path in tree() if path != "tests/"}
    skipped = {".git", ".venv", ".uv", "runs", "data", "corpus", "build", "README.md"}
    exists = set()
    for top in REPO.iterdir():
        hidden = top.name.startswith(".") and top.name != ".ci"
        if top.name in skipped or hidden or top.suffix == ".egg-info" or top.name in ("__pycache__", "tests"):
            continue
        if top.is_dir() and any(p.is_file() for p in top.rglob("*")):
            exists.add(top.name + "/")
        elif top.is_file():
            exists.add(top.name)
    for top in ("configs", "jaxtrain", "benchmarks", "docs", "notebooks"):
        for path in (REPO / top).rglob("*"):
            inside = path.relative_to(REPO).as_posix()
            if "__pycache__" in inside or ".ipynb_checkpoints" in inside or path.name == "__init__.py":
                continue
            exists.add(inside + "/" if path.is_dir() else inside)
    assert listed == exists


def test_every_entry_of_the_tree_says_what_it_is():
    assert not [path for path, about in tree().items() if not about and path not in ("benchmarks/", "docs/")]


def test_generated_pages_are_up_to_date():
    assert (REPO / "docs" / "config.md").read_text() == explain.markdown(), (
        "run: python -m jaxtrain.main --explain=markdown > docs/config.md"
    )
    assert resume_table() in (REPO / "docs" / "checkpoints.md").read_text(), "paste jaxtrain.resume.markdown()"


def test_every_rule_and_activation_is_documented():
    from jaxtrain.activations import ACTIVATIONS, POLICIES
    from jaxtrain.config import RULES

    page = (REPO / "docs" / "parallelism.md").read_text()
    for axis, onto in RULES.items():
        assert re.search(rf"^\| `{axis}` \| {f'`{re.escape(onto)}`' if onto else ''} ?\|", page, re.MULTILINE), axis
    assert not [name for name in (*ACTIVATIONS, *POLICIES) if f"`{name}`" not in page]
