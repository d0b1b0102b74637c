"""The commands of README and docs run. tests/unit/test_docs.py checks links, names and all other commands.

Every ```bash block, and every ```python block as a program, runs as it is. The blocks of a page run in order in one copy of the
repository. There are five differences. `run.sh` is a fake that starts the same modules in this environment; the real one has
its own tests. HOME is a new folder. XLA compiles without backend optimization. Training runs are shortened by overrides on
their command line (SHORT). `run.sh test` runs only the contract tests that compile little (QUICK). If a page shows a block's
output (the word `prints`, then a ```text block), the output must match.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
SHORT = ["--config.train.steps=6", "--config.optimizer.warmup_steps=1", "--config.eval.sequences=8"]
FEW_TOKENS = "--config.sample.max_tokens=4"
QUICKLY_COMPILED = "--xla_backend_optimization_level=0"
QUICK = "not layout and not gradients"
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *--explain*) ;;
  "-m jaxtrain.main"*) set -- "$@" {short} {few_tokens} ;;
esac
exec {python} "$@"
"""
RUN = """#!/usr/bin/env bash
case "${1-}" in
  '' | -*) exec python -m jaxtrain.main "$@" ;;
  test) shift; exec python -m pytest "$@" -k {quick} ;;
  *) module=$1; shift; exec python -m jaxtrain "$module" "$@" ;;
esac
"""


def runnable(path: Path) -> list[tuple[str, str]]:
    """Return (language, contents) of the blocks to run, in order."""
    return re.findall(r"^```(bash|python)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def outputs(path: Path) -> dict[str, str]:
    """Return {block: its output on the page} for the blocks whose output the page shows."""
    body = r"((?:(?!```).*\n)*?)```\n"
    return dict(re.findall(rf"^```(?:bash|python)\n{body}\nprints\n\n```text\n{body}", path.read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a HOME for all pages, so that later pages reuse the corpus and the compiled steps of earlier pages."""
    return tmp_path_factory.mktemp("home")


LONG = dict.fromkeys(("README.md", "parallelism.md", "python.md", "recipes.md"), pytest.mark.long)  # more than a minute each


@pytest.mark.parametrize("page", [pytest.param(p, id=p.name, marks=LONG.get(p.name, ())) for p in PAGES if runnable(p)])
def test_commands_run(page: Path, home: Path, tmp_path: Path):
    clone, tools = tmp_path / "jaxtrain", tmp_path / "tools"
    clone.mkdir()
    for name in ("jaxtrain", "configs", "tests", "benchmarks"):
        shutil.copytree(REPO / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", clone)
    tools.mkdir()
    for file, text in ((tools / "python", PYTHON), (clone / "run.sh", RUN)):
        text = text.replace("{short}", shlex.join(SHORT)).replace("{few_tokens}", FEW_TOKENS)
        text = text.replace("{quick}", shlex.quote(QUICK)).replace("{python}", shlex.quote(sys.executable))
        file.write_text(text)
        file.chmod(0o755)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_", "JAXTRAIN_"))}
    environ |= {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(home), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(clone)}
    environ |= {"TMPDIR": str(tmp_path), "XLA_FLAGS": QUICKLY_COMPILED}
    printed = outputs(page)
    assert len(printed) == page.read_text().count("\nprints\n")
    for language, block in runnable(page):
        command = block.replace("/tmp/", f"{tmp_path}/")
        program = ["bash", "-euo", "pipefail", "-c"] if language == "bash" else [sys.executable, "-c"]
        done = subprocess.run([*program, command], cwd=clone, env=environ, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{page.name}:\n{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert done.stdout == printed.get(block, done.stdout), f"{page.name}:\n{command}"
