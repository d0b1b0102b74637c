"""Recorded nodes for the tests of preflight, as recorded or with some facts changed.

recorded/faults/NAME/facts.json has what differs from a healthy node. The recordings are composed from what NVML, nvidia-smi and
the kernel report; they were not taken from nodes (docs/cluster.md).
"""

import json
import os
from pathlib import Path

import pytest

from jaxtrain.commands import preflight as command
from jaxtrain.node.facts import FILE
from jaxtrain.report.preflight import FAULT

RECORDED = Path(__file__).resolve().parent / "recorded"
H200 = RECORDED / "h200_healthy"


def judged(folder: Path, capsys, *more: str) -> tuple[int, dict, str]:
    """Run preflight on a recorded node. Returns (exit code, JSON, verdict line)."""
    code = command.main([f"--recorded={folder}", "--json", *more])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err.strip()


def faults(found: dict) -> dict[str, dict]:
    """Return name -> check of each check that is a fault."""
    return {check["name"]: check for node in found["nodes"] for check in node["checks"] if check["state"] == FAULT}


def copied(tmp_path: Path, change: dict, base: Path = H200) -> Path:
    """Write a recording that differs from the recording `base` by a JSON merge patch."""
    folder = tmp_path / "node"
    folder.mkdir(parents=True)
    (folder / FILE).write_text(json.dumps({"base": str(base), **change}))
    return folder


def answer(command_: str, out: str, code: int | None = 0) -> dict:
    return {"commands": {command_: {"code": code, "out": out}}}


def gpus(only: int | None = None, **change) -> dict:
    """Return the patch that changes facts of all GPUs of the healthy node, or of GPU `only`."""
    return {"nvml": {"gpus": {str(i): change for i in range(8) if only in (None, i)}}}


def refused(fact: str) -> dict:
    """Return the patch of a healthy node whose driver does not report a fact of its GPUs."""
    return gpus(**{fact: None, "refused": {fact: "Not Supported"}})


def some_gpus(count: int) -> dict:
    """Return the patch that leaves `count` GPUs of the healthy node."""
    return {"nvml": {"gpus": {str(i): None for i in range(count, 8)}}}


def both(a: dict, b: dict) -> dict:
    """Return one patch for two."""
    nested = {k: both(a[k], b[k]) for k in a.keys() & b.keys() if isinstance(a[k], dict) and isinstance(b[k], dict)}
    return a | b | nested


def sliders(*values: int | str) -> str:
    """Return the table of `nvidia-smi boost-slider --list` with vboost at these values, as CSCS's manual prints it (GH200)."""
    line = "+-------------------------------------------------+\n"
    heading = "| GPU Boost Slider                                |\n| GPU     Slider       Max Value    Current Value |\n"
    rows = [f"| {i:3}     vboost           4            {value:>3}       |\n{line}" for i, value in enumerate(values)]
    return f"{line}{heading}|{'=' * 49}|\n{''.join(rows)}"


@pytest.fixture(autouse=True)
def a_plain_environment(monkeypatch):
    """Remove the variables of launchers: the shell of the tests may be a job of several processes."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "JAXTRAIN_", "OMPI_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
