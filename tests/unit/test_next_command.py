"""The last line of a run: the command to type next."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxtrain.environment import Overlay
from jaxtrain.launch import Launch
from jaxtrain.train import run

ARGV = ("--config=configs/tiny.py", "--config.sample.prompt=a 'b' c", "--workdir=runs/my run")


def last_line(code: int, step: int = 5, count: int = 1, own: bool = True, devices: str = "", error: Any = None) -> str:
    setup: Any = SimpleNamespace(launch=Launch("configs/tiny.py", "", (), ARGV), workdir=Path("runs/my run"))
    ending = run.Ending()
    ending.code, ending.step, ending.error = code, step, error
    ending.peers = SimpleNamespace(count=count)  # pyright: ignore[reportAttributeAccessIssue]
    overlay = Overlay(inherited={"JAX_NUM_CPU_DEVICES": devices} if devices else {})
    return run.next_command(setup, ending, overlay, own)


@pytest.mark.parametrize("prefix", ["", "./run.sh"])
def test_a_stopped_run_names_its_own_command_and_another_its_report(prefix, monkeypatch):
    monkeypatch.delenv("JAXTRAIN_COMMAND_PREFIX", raising=False)
    if prefix:
        monkeypatch.setenv("JAXTRAIN_COMMAND_PREFIX", prefix)
    trains = [prefix] if prefix else ["python", "-m", "jaxtrain.main"]
    reports = [prefix, "report"] if prefix else ["python", "-m", "jaxtrain.report"]
    for code in (75, 130):
        assert shlex.split(last_line(code)) == ["resume:", *trains, *ARGV]
        assert shlex.split(last_line(code, devices="8")) == ["resume:", "JAX_NUM_CPU_DEVICES=8", *trains, *ARGV]
    report = ["report:", *reports, "runs/my run"]
    ended = (last_line(0), last_line(76, error=ValueError()), last_line(1, error=ValueError()))
    launched = (last_line(75, count=2), last_line(130, own=False))  # by a launcher, and by a Python program
    assert all(shlex.split(line) == report for line in (*ended, *launched))
    assert last_line(0, step=0) == "", "no step, no report"
