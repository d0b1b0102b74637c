"""Config files are Python: their encoding, their modules, the helpers beside them, and where their errors arise."""

import os
import pickle
import sys
import typing
from pathlib import Path

import pytest

from jaxtrain.config import launch
from jaxtrain.data import loading

BASE = "from jaxtrain.config import default_config\n"
GET = "def get_config(arg=None):\n    config = default_config()\n"
HELPER = f"import sizes\n{BASE}{GET}    config.model.num_layers = sizes.LAYERS\n    return config\n"


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def load(path: Path | str) -> launch.LoadedConfig:
    return loading.load_config([f"--config={path}"])


def wrong(path: Path | str) -> str:
    """Return the rule and the remedy of the only problem of a config file."""
    (problem,) = load(path).problems
    return f"{problem.rule} | {problem.remedy}"


@pytest.mark.parametrize(
    ("encoding", "head"),
    [("utf-8", ""), ("utf-8-sig", ""), ("iso-8859-1", "# -*- coding: iso-8859-1 -*-\n"), ("utf-8", "# ü\n")],
)
def test_a_config_file_is_decoded_as_python_source(tmp_path: Path, encoding: str, head: str):
    text = f"{head}{BASE}{GET}    config.sample.prompt = 'größe'\n    return config\n"
    assert load(write(tmp_path / "größe c.py", text.encode(encoding))).run.sample.prompt == "größe"


def test_a_config_file_imports_modules_beside_it_each_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(str(write(tmp_path / "elsewhere" / "sizes.py", "LAYERS = 9").parent))
    before = list(sys.path)
    for folder, layers in (("one", 2), ("two", 3)):
        write(tmp_path / folder / "sizes.py", "from parts.deep import LAYERS")
        write(tmp_path / folder / "parts" / "__init__.py", "")
        write(tmp_path / folder / "parts" / "deep.py", f"LAYERS = {layers}")
        assert load(write(tmp_path / folder / "c.py", HELPER)).run.model.num_layers == layers
    assert sys.path == before and not {"sizes", "parts"} & set(sys.modules)
    import sizes  # pyright: ignore[reportMissingImports]

    assert load(tmp_path / "two" / "c.py").run.model.num_layers == 3  # not the module that the program has imported
    assert sys.modules["sizes"] is sizes
    monkeypatch.delitem(sys.modules, "sizes")
    (tmp_path / "link.py").symlink_to(tmp_path / "one" / "c.py")
    assert load(tmp_path / "link.py").run.model.num_layers == 2
    assert not [path for folder in ("one", "two") for path in (tmp_path / folder).rglob("__pycache__")]


def test_a_config_file_imports_configs_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "lab" / "base.py", f"{BASE}{GET}    config.model.num_layers = 5\n    return config\n")
    write(tmp_path / "lab" / "mine.py", "from lab.base import get_config\n")
    write(tmp_path / "lab" / "other.py", "from configs.tiny import get_config\n")  # a preset of jaxtrain
    write(tmp_path / "configs" / "common.py", "LAYERS = 6")
    write(tmp_path / "lab" / "own.py", HELPER.replace("sizes", "configs.common"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "configs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(launch.REPO))
    assert load("lab/mine.py").run.model.num_layers == 5
    assert not load("lab/other.py").problems
    assert load("lab/own.py").run.model.num_layers == 6


def test_modules_named_as_ones_of_python_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("types", "colorsys"):
        write(tmp_path / "mine" / f"{name}.py", "raise RuntimeError('not for you')")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    text = f"import types, colorsys\n{BASE}{GET}    return config\n"
    monkeypatch.chdir(tmp_path / "mine")
    assert load(write(tmp_path / "mine" / "c.py", text)).problems == []


def test_classes_of_a_config_file_are_found_by_their_module(tmp_path: Path):
    """Dataclasses, type hints and pickle look for a class's module in sys.modules."""
    text = (
        f"from __future__ import annotations\nimport dataclasses\n{BASE}"
        "@dataclasses.dataclass\nclass Size:\n    layers: int = 4\n"
        f"{GET}    get_config.size = Size()\n    config.model.num_layers = Size().layers\n    return config\n"
        "if __name__ == '__main__':\n    raise SystemExit('run as a script')\n"
    )
    assert load(file := write(tmp_path / "c.py", text)).run.model.num_layers == 4
    module = next(each for each in sys.modules.values() if getattr(each, "__file__", "") == str(file))
    assert typing.get_type_hints(module.Size) == {"layers": int}
    assert pickle.loads(pickle.dumps(module.get_config.size)) == module.Size()


def test_a_config_file_has_no_future_of_the_program_that_reads_it(tmp_path: Path):
    note = "seen = []\ndef note(x: seen.append(1)): pass\n"
    text = f"{BASE}{note}{GET}    config.model.num_layers += len(seen)\n    return config\n"
    code = compile("from __future__ import annotations\nloaded = loading.load_config([f'--config={file}'])", "caller", "exec")
    names = {"loading": loading, "file": write(tmp_path / "c.py", text)}
    exec(code, names)
    assert (
        typing.cast(launch.LoadedConfig, names["loaded"]).run.model.num_layers == load(names["file"]).run.model.num_layers == 5
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{BASE}{GET}    return config +\n", "line 4"),
        ("x = 1\n\ty = 2\n", "line 2"),
        (f"{BASE}\0", "SyntaxError"),
        ("x = 'ü'\n".encode("iso-8859-1"), "# coding:"),
        (f"import sys\n{BASE}{GET}    sys.exit(0)\n", "line 5 raises SystemExit"),
        (f"import gone_module\n{BASE}", "PYTHONPATH"),
        ("get_config = 5\n", "get_config"),
        ("def get_config(arg):\n    return arg\n", "VARIANT"),
        ("import helper\n", "helper.py, line 2"),
        ("import broken\n", "broken.py, line 1"),
    ],
)
def test_the_error_of_a_config_file_is_one_problem_with_its_place(tmp_path: Path, text: str | bytes, found: str):
    write(tmp_path / "helper.py", "x = 1\nx.nothing\n")
    write(tmp_path / "broken.py", "x = = 1\n")
    assert found in wrong(write(tmp_path / "my-config.py", text))


def test_a_config_file_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(
        "HOME", str(write(tmp_path / "c.py", f"{BASE}{GET}    config.train.steps = 7\n    return config\n").parent)
    )
    assert load("~/c.py").run.train.steps == 7


def test_a_colon_in_the_path_of_a_config_file(tmp_path: Path):
    text = f"{BASE}{GET}    config.sample.prompt = arg or ''\n    return config\n"
    for name, variant in (("x.py:y/c.py", ""), ("x.py:y/c.py", "a.py:b"), ("a:b.py", "v")):
        loaded = load(f"{write(tmp_path / name, text)}{variant and ':'}{variant}")
        assert (loaded.problems, loaded.run.sample.prompt) == ([], variant)


def test_a_config_file_that_is_a_pipe_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "c.py")
    assert "is a pipe" in wrong(tmp_path / "c.py")


def test_a_prompt_that_is_not_utf_8_is_refused():
    (problem,) = loading.load_config(["--config.sample.prompt=gr\udcf6\udcdfe"]).problems
    assert problem.key == "sample.prompt"
