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
from jaxtrain.receipt import __main__ as command
from jaxtrain.receipt import collect, diff
from jaxtrain.receipt.format import open_run

# One process for several runs: starting Python and jax takes most of a small run's time.
SEVERAL = "import sys, json; from jaxtrain import main; sys.exit(max(main.main(line) for line in json.loads(sys.argv[1])))"


TINY = {
    "model__num_layers": 1,
    "train__steps": 3,
    "optimizer__warmup_steps": 1,
    "eval__every_steps": 0,
    "checkpoint__every_steps": 0,
    "log__tensorboard": False,
}


CHANGED = "jaxtrain/train/services.py"


def git(folder: Path, *args: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-C", str(folder), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def token_file(folder: Path, text: bytes) -> Path:
    """Write text.tok in a new folder, with a document for each line of the text. `receipt diff` ignores the folder's path."""
    folder.mkdir()
    byte = tokenizer.ByteTokenizer()
    with TokenWriter(folder / "text.tok", tokenizer.info(byte)) as writer:
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
        git(self.repo, "init", "-q")
        git(self.repo, "add", ".")
        git(self.repo, "commit", "-qm", "one")
        (folder / "small.py").write_text(runs.SMALL)
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
    bench.run({"variable": {}}, JAX_DEFAULT_MATMUL_PRECISION="highest")
    bench.run({"package": {}}, path=str(bench.folder / "fake"))
    source = bench.repo / CHANGED
    source.write_text("".join(["# Another line.\n", *source.read_text().splitlines(keepends=True)[1:]]))
    bench.run({"line": {}})
    return bench


def planted(bench: Bench, name: str) -> list[tuple[str, str]]:
    found = diff.compare(open_run(bench.folder / "base"), open_run(bench.folder / name))
    return [(d.group, d.name) for d in found.differences]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("again", []),
        ("variable", [("environment", "JAX_DEFAULT_MATMUL_PRECISION")]),
        ("key", [("config", "optimizer.lr")]),
        ("package", [("versions", "optax")]),
        ("file", [("data", "text.tok")]),
        ("line", [("code", CHANGED)]),
        ("forked", [("data", "first state")]),
    ],
)
def test_what_was_planted_is_named_and_nothing_else(bench: Bench, name: str, expected: list[tuple[str, str]]) -> None:
    assert planted(bench, name) == expected


def test_the_command_prints_it(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(bench.folder / "base")
    assert command.main(["diff", base, str(bench.folder / "line")]) == 1
    printed = capsys.readouterr().out
    first = (runs.REPO / CHANGED).read_text().splitlines()[0]
    assert f"      B: -{first}\n      B: +# Another line.\n" in printed
    assert "loss: the same, bit for bit, to step 3 (steps compared: 3)" in printed
    assert command.main(["diff", base, str(bench.folder / "again")]) == 0
    assert "no difference that can explain" in capsys.readouterr().out
    assert command.main(["diff", base, str(bench.folder / "key"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == [{"group": "config", "name": "optimizer.lr", "a": "0.01", "b": "0.02", "lines": []}]
    assert [one["ratio"] for one in found["outcomes"] if one["name"] == "loss"] == [
        "differs from step 2 on; the same to step 1"
    ]


def test_a_receipt_names_the_source_that_ran(bench: Bench) -> None:
    base, line = (runs.receipt(bench.folder / name)["source"] for name in ("base", "line"))
    assert base["commit"] == line["commit"] == git(bench.repo, "rev-parse", "HEAD")
    assert (base["dirty"], base["patch"], line["dirty"]) == (False, "", True)
    assert line["patch"] == git(bench.repo, "diff", "HEAD", "--no-ext-diff", "--no-color") + "\n"
    assert base["files"].keys() == line["files"].keys() and len(base["files"]) > 100


# ---- Git: the commit, and the changed lines of code of two checkouts


def test_git_is_asked_in_its_own_language_and_takes_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "git"
    said = '[ "$LC_ALL" = C ] && echo "fatal: not a git repository" >&2 || echo "fatal: kein Git-Repository" >&2'
    fake.write_text(f'#!/bin/sh\n[ "$GIT_OPTIONAL_LOCKS" = 0 ] || exit 0\n{said}\nexit 128\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.delenv("GIT_OPTIONAL_LOCKS", raising=False)
    assert collect.git_state(tmp_path) is None


BASE = [f"line {n}" for n in range(1, 41)]


def version(repo: Path, change: dict[int, list[str]]) -> dict[str, Any]:
    """Write jaxtrain/a.py from BASE with changes, and return commit and patch. change: line number from 1 -> new lines."""
    text = [row for n, old in enumerate(BASE, 1) for row in change.get(n, [old])]
    (repo / "jaxtrain").mkdir(exist_ok=True)
    (repo / "jaxtrain" / "a.py").write_text("\n".join(text) + "\n")
    if not (repo / ".git").exists():
        git(repo, "init", "-q")
        git(repo, "add", ".")
        git(repo, "commit", "-qm", "one")
    return {"commit": git(repo, "rev-parse", "HEAD"), "patch": git(repo, "diff", "HEAD", "--no-ext-diff", "--no-color")}


def test_lines_that_differ_between_two_patches(tmp_path: Path) -> None:
    clean = version(tmp_path, {})
    one = version(tmp_path, {5: ["five"], 20: [], 30: ["line 30", "--- a/no file", "more"]})
    two = version(tmp_path, {5: ["FIVE"], 30: ["line 30", "--- a/no file", "more"]})

    def found(a: dict[str, Any], b: dict[str, Any], name: str = "jaxtrain/a.py") -> list[str]:
        return [line for line in diff.changed_lines(name, a, b) if "@@" not in line]

    assert found(clean, clean) == found(one, one) == found(clean, one, "a.py") == found(clean, one, "jaxtrain/a") == []
    assert found(clean, one) == ["B: -line 5", "B: +five", "B: -line 20", "B: +--- a/no file", "B: +more"]
    assert found(one, clean) == ["A: -line 5", "A: +five", "A: -line 20", "A: +--- a/no file", "A: +more"]
    assert found(one, two) == ["A: +five", "A: -line 20", "B: +FIVE"]
    assert found(one, {**two, "commit": "another"}) == []
    assert found(one, {**two, "patch_cut": 1}) == found({**one, "patch_cut": 1}, two) == []
    many = version(tmp_path, {n: [f"other {n}"] for n in range(1, 41)})
    assert found(clean, many)[-1] == "... and 41 more lines" and len(found(clean, many)) == 40


def test_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = tmp_path / "package", tmp_path / "package" / "__init__.py"
    package.mkdir()
    module.write_text("")
    (tmp_path / "readme").write_text("a")
    assert collect.git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "readme")
    git(tmp_path, "commit", "-qm", "one")
    assert collect.git_state(package) is None  # in the checkout's folder, but not part of it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "two")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert collect.git_state(package) == {"commit": commit, "dirty": False}
    module.write_text("x = 1")
    assert collect.git_state(package) == {"commit": commit, "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    state = collect.git_state(package)
    assert state is not None and "git" in state["error"]
