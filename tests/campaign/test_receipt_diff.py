"""Two runs with one planted difference: `receipt diff` names it and nothing else. The runs use a real git checkout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs

from jaxtrain.data import tokenizer
from jaxtrain.data.tokenfile import TokenWriter
from jaxtrain.metrics.receipt import open_run
from jaxtrain.report.receipt import compare_receipts

# One process for several runs: starting Python and jax takes most of a small run's time.
SEVERAL = "import sys, json; from jaxtrain import main; sys.exit(max(main.main(line) for line in json.loads(sys.argv[1])))"


TINY = {"train__steps": 3, "eval__every_steps": 0, "checkpoint__every_steps": 0, "log__tensorboard": False}
CHANGED = "jaxtrain/train/services.py"


def git(folder: Path, *args: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-C", str(folder), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def token_file(folder: Path, text: bytes) -> Path:
    """Write text.tok in a new folder, with a document for each line of the text. `receipt diff` ignores the folder's path."""
    folder.mkdir()
    byte = tokenizer.ByteTokenizer()
    with TokenWriter(folder / "text.tok", tokenizer.tokenizer_info(byte)) as writer:
        for line in text.splitlines():
            writer.write(byte.encode(line.decode()), len(line))
            writer.end_document()
    return folder / "text.tok"


class Bench:
    """A git checkout of jaxtrain with one commit, and runs of it."""

    def __init__(self, folder: Path):
        self.folder, self.repo = folder, folder / "repo"
        package = Path(runs.REPO / "jaxtrain")
        shutil.copytree(package, self.repo / "jaxtrain", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("run.sh", ".gitignore"):
            shutil.copy(runs.REPO / name, self.repo)
        git(self.repo, "init", "-q")
        git(self.repo, "add", ".")
        git(self.repo, "commit", "-qm", "one")
        runs.smallest(folder)
        text = b"".join(b"the square of %d is %d\n" % (n, n * n) for n in range(1000))
        self.data = token_file(folder / "data", text)
        self.other_data = token_file(folder / "other", text.replace(b"is 49\n", b"is 48\n"))
        # Package metadata has the version, and the first package on the path counts.
        about = folder / "fake" / "optax-99.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 99.0\n")

    def run(self, runs_of: dict[str, dict[str, Any]], path: str = "", **env: str) -> None:
        """Train runs in one process. runs_of: name of a run's folder -> overrides."""
        lines = []
        for name, overrides in runs_of.items():
            given = {**TINY, "data__source": self.data, "paths__cache": self.folder / "cache", **overrides}
            lines.append(runs.arguments(self.folder / "small.py", self.folder / name, given))
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_", "JAXTRAIN_"))}
        environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{path}:{self.repo}", **env}
        line = [sys.executable, "-c", SEVERAL, json.dumps(lines)]
        done = subprocess.run(line, cwd=self.repo, env=environ, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("planted"))
    there = {"data__source": bench.other_data}
    moved = {"checkpoint__dir": bench.folder / "elsewhere", "log__every_steps": 2, "paths__cache": ""}
    forked = {"checkpoint__dir": bench.folder / "base" / "checkpoints"}
    bench.run({"base": {}, "again": moved, "key": {"optimizer__lr": 0.02}, "file": there, "forked": forked})
    bench.run({"variable": {}}, NCCL_CROSS_NIC="1")
    bench.run({"package": {}}, path=str(bench.folder / "fake"))
    source = bench.repo / CHANGED
    source.write_text("".join(["# Another line.\n", *source.read_text().splitlines(keepends=True)[1:]]))
    bench.run({"line": {}})
    return bench


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("again", [("config", name) for name in ("checkpoint.dir", "log.every_steps", "paths.cache")]),
        ("variable", [("environment", "NCCL_CROSS_NIC")]),
        ("key", [("config", "optimizer.lr")]),
        ("package", [("versions", "optax")]),
        ("file", [("data", "files.1")]),
        ("line", [("code", "digest")]),
        ("forked", [("config", "checkpoint.dir"), ("data", "origin")]),
    ],
)
def test_what_was_planted_is_named_and_nothing_else(bench: Bench, name: str, expected: list[tuple[str, str]]) -> None:
    found, _ = compare_receipts(open_run(bench.folder / "base"), open_run(bench.folder / name))
    assert [(one["group"], one["name"]) for one in found] == expected


@pytest.mark.long
def test_a_receipt_names_the_code_that_ran(bench: Bench) -> None:
    base, line = (runs.receipt(bench.folder / name)["code"] for name in ("base", "line"))
    assert base["commit"] == line["commit"] == git(bench.repo, "rev-parse", "HEAD")
    assert (base["dirty"], line["dirty"]) == (False, True) and base["digest"] != line["digest"]
