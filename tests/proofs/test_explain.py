"""--explain refuses what the start of a run refuses, with the same words, and writes nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs

from jaxtrain import main

LORA = {"lora__rank": 2}
MUON = {"optimizer__name": "muon", "model__tied_head": True}


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the errors on stderr. With errors, nothing may be on stdout."""
    said = capsys.readouterr()
    errors = re.findall(r"^error: .*", said.err, re.MULTILINE)
    assert not (errors and said.out)
    return errors


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (LORA, "init.from"),
        (MUON | {"optimizer__groups": "head:optimizer=adamw"}, "optimizer.groups"),
        ({"train__freeze": "layers.9.*"}, "train.freeze"),
        ({"loss__name": "helpers:no_such_loss"}, "loss.name"),
        ({"data__source": "sources:no_such_source"}, "data.source"),
        ({"init__from": "."}, "cannot start"),
        ({"compiler__options": "xla_cpu_enable_fast_math=maybe"}, "compiler.options"),
    ],
)
def test_explain_refuses_what_a_run_refuses(
    settings: dict[str, Any], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = runs.arguments(runs.small(), tmp_path / "run", settings | {"paths__cache": "", "eval__every_steps": 0})
    assert main.main([*argv, "--explain"]) == 2
    explained = told(capsys)
    assert len(explained) == 1 and explained[0].startswith(f"error: {key}")
    assert main.main(argv) == 2
    assert told(capsys) == explained and not list(tmp_path.iterdir())


def test_explain_takes_what_a_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"optimizer__groups": "head:lr=0.5", "loss__name": "helpers:half_loss", "train__freeze": "embed.*"}
    argv = runs.arguments(runs.small(), tmp_path / "run", settings)
    assert main.main([*argv, "--explain"]) == 0 and told(capsys) == []


def test_explain_ends_beside_a_thread_of_the_users_module(tmp_path: Path) -> None:
    (tmp_path / "lingering.py").write_text(
        "import threading\nfrom helpers import half_loss\nthreading.Thread(target=threading.Event().wait).start()\n",
        encoding="utf-8",
    )
    argv = runs.arguments(runs.small(), tmp_path / "run", {"loss__name": "lingering:half_loss"})
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(runs.REPO), str(tmp_path), *sys.path))}
    done = subprocess.run([sys.executable, "-m", "jaxtrain.main", *argv, "--explain"], env=environ, timeout=300)
    assert done.returncode == 0
