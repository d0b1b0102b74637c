"""Real commands in a folder with the user's own files: in other locales, and beside modules named like Python's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import locales
import pytest
import runs

CONFIG = """# größe
from jaxtrain.config import default_config

def get_config(arg=None):
    config = default_config()
    config.model.num_layers, config.model.d_model, config.model.d_ff, config.data.seq_len = 1, 32, 64, 32
    config.data.source, config.data.eval_source = "größe.tok", "größe.tok"
    config.train.steps, config.train.global_batch, config.eval.every_steps = 2, 8, 0
    config.sample.prompt, config.sample.max_tokens = "größe", 4
    return config
"""
NAMES = (
    *("types", "random", "token", "tokenize", "calendar", "secrets", "platform", "numbers", "operator", "logging", "inspect"),
    *("string", "copy", "signal", "jax", "numpy", "queue", "tempfile", "multiprocessing", "pickle", "struct"),
)


def command(folder: Path, locale: dict[str, str], *words: str | bytes, code: int = 0) -> str:
    """Run run.sh in a folder, with the environment of this process, and return its output."""
    environ = locales.environ(locale) | {"JAXTRAIN_RESTARTS": "0"}
    done = subprocess.run([runs.REPO / "run.sh", *words], cwd=folder, env=environ, capture_output=True, timeout=600)
    assert done.returncode == code, done.stderr.decode(errors="replace")
    return (done.stdout + done.stderr).decode()


@pytest.mark.parametrize("kind", ["ascii", "latin"])
def test_a_run_in_another_locale_has_the_texts_of_its_files(tmp_path: Path, kind: str):
    locale = locales.ASCII if kind == "ascii" else locales.latin()
    (tmp_path / "é.py").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "in.txt").write_text("größe " * 4000, encoding="utf-8")
    command(tmp_path, locale, "data", "prepare", "--input=in.txt", "--output=größe.tok")
    command(tmp_path, locale, "--config=é.py", "--workdir=läufe/ä")
    run = tmp_path / "läufe" / "ä"
    assert json.loads((run / "config.json").read_text())["sample"]["prompt"] == "größe"
    for name in ("samples.txt", "log.txt"):
        assert "größe" in (run / name).read_text(encoding="utf-8")
    assert "größe" in command(tmp_path, locale, "sample", "--workdir=läufe/ä", "--prompt=größe", "--max-tokens=2")
    typed = "--config.sample.prompt=ßö"
    shown = command(tmp_path, locale, "--config=é.py", typed, "--explain")
    assert "ßö" in shown and "größe.tok" in shown
    if kind == "latin":
        assert "ßö" in command(tmp_path, locale, "--config=é.py", typed.encode("iso-8859-1"), "--explain")


def test_files_whose_names_are_not_utf_8_are_used(tmp_path: Path):
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / f"{name}.py").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "in.txt").write_text("a text. " * 4000)
    locale = {"LC_ALL": "C.UTF-8"}
    command(tmp_path, locale, "data", "prepare", "--input=in.txt", f"--output={name}.tok")
    files = [f"--config.data.{key}={name}.tok" for key in ("source", "eval_source")]
    assert "--workdir" in command(tmp_path, locale, f"--config={name}.py", *files, code=2)  # named after the config
    command(tmp_path, locale, f"--config={name}.py", *files, "--workdir=run")
    assert (tmp_path / "run" / "receipt.json").is_file()


def test_modules_of_the_current_folder_named_like_pythons_are_not_imported(tmp_path: Path):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__name__} was imported')\n")
    (tmp_path / "c.py").write_text(CONFIG.replace("größe.tok", "a,b=1.tok"), encoding="utf-8")
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a text. " * 4000)
    command(tmp_path, {}, "data", "prepare", "--input=[0-9].txt", "--output=a,b=1.tok", "--processes=2")
    command(tmp_path, {}, "--config=c.py", "--workdir=run")
    assert (tmp_path / "run" / "samples.txt").is_file()
    (tmp_path / "mine").mkdir()
    family = "from jaxtrain.models.families import llama\nfrom jaxtrain.models.transformer import build_as\n"
    family += "class Family:\n    build = staticmethod(lambda *args: build_as(llama.STRUCTURE, *args))\n"
    (tmp_path / "mine" / "own_family.py").write_text(family)
    no_files = ("--config.data.source=synthetic", "--config.data.eval_source=")
    named = ("--config=c.py", "--config.model.family=own_family:Family", *no_files, "--explain")
    assert "own_family" in command(tmp_path, {}, *named, code=2)  # the module is not found
    command(tmp_path, {"PYTHONPATH": "mine"}, *named)
    command(tmp_path / "mine", {"PYTHONPATH": "."}, "--config=../c.py", *named[1:])
    refused = {"PYTHONPATH": ":/nowhere"}  # the empty item before the colon would be the current folder
    command(tmp_path / "mine", refused, "--config=../c.py", *named[1:], code=2)


def test_plans_of_a_program_beside_such_modules(tmp_path: Path):
    """The processes of a search import what the program imports, and nothing of the current folder."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__name__} was imported')\n")
    (tmp_path / "lib").mkdir()
    program = tmp_path / "lib" / "program.py"
    program.write_text(
        "import sys\nfrom jaxtrain.plan import search_parallel as parallel\nimport time\n"
        "child = parallel.Child(None, 'no:thing', 60)\n"
        "while not (outcome := child.outcome()): time.sleep(0.1)\n"
        "print(outcome)\n"
    )
    environ = locales.environ({"PYTHONPATH": str(runs.REPO)})
    done = subprocess.run([sys.executable, program], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "was imported" not in done.stdout + done.stderr
