"""The last line of a run: the command to type next."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxtrain import main
from jaxtrain.config import launch
from jaxtrain.config.launch import Launch
from jaxtrain.train import run

ARGV = ("--config=configs/tiny.py", "--config.sample.prompt=a 'b' c", "--workdir=runs/my run")


def last_line(code: int, step: int = 5, count: int = 1, own: bool = True, error: Any = None) -> str:
    setup: Any = SimpleNamespace(launch=Launch("configs/tiny.py", "", (), ARGV), workdir=Path("runs/my run"))
    peers: Any = SimpleNamespace(count=count)
    return run.next_command(setup, peers, code, error, step, own)


@pytest.mark.parametrize("prefix", ["", "./run.sh"])
def test_a_stopped_run_names_its_own_command_and_another_its_report(prefix, monkeypatch):
    monkeypatch.delenv("JAXTRAIN_COMMAND_PREFIX", raising=False)
    if prefix:
        monkeypatch.setenv("JAXTRAIN_COMMAND_PREFIX", prefix)
    for name in launch.DECIDING:
        monkeypatch.delenv(name, raising=False)
    trains = [prefix] if prefix else ["python", "-m", "jaxtrain.main"]
    reports = [prefix, "report"] if prefix else ["python", "-m", "jaxtrain", "report"]
    for code in (75, 130):
        assert shlex.split(last_line(code)) == ["resume:", *trains, *ARGV]
    report = ["report:", *reports, "runs/my run"]
    ended = (last_line(0), last_line(76, error=ValueError()), last_line(1, error=ValueError()))
    launched = (last_line(75, count=2), last_line(130, own=False))  # by a launcher, and by a Python program
    assert all(shlex.split(line) == report for line in (*ended, *launched))
    assert last_line(0, step=0) == "", "no step, no report"


def test_a_command_that_a_message_names_has_the_shells_variables(monkeypatch, capsys):
    monkeypatch.delenv("JAXTRAIN_COMMAND_PREFIX", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    monkeypatch.setenv("PYTHONPATH", "my parts")
    tiny = f"--config={launch.REPO}/configs/tiny.py"
    typed = f"JAX_NUM_CPU_DEVICES=2 PYTHONPATH='my parts' python -m jaxtrain plan {tiny} "
    assert main.main([tiny, "--explain"]) == 0 and typed in capsys.readouterr().err
    assert main.main([tiny, "--config.memory_estimation.enable=true"]) == 2
    assert typed in capsys.readouterr().err
