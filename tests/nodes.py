"""Recorded nodes for the tests of preflight, as recorded or with some answers changed.

recorded/faults/NAME holds a few files that replace those of a healthy node. The recordings are composed from the formats that
nvidia-smi and the kernel print; they were not taken from nodes (docs/cluster.md).
"""

import json
import os
from pathlib import Path

import pytest

from jaxtrain.commands import preflight as command
from jaxtrain.node import nvidia_smi
from jaxtrain.node.node import RecordedNode, file_name
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


def copied(tmp_path: Path, change: dict[str, str], base: Path = H200) -> Path:
    """Write a recording that replaces some files of the recording `base`."""
    folder = tmp_path / "node"
    folder.mkdir(parents=True)
    (folder / "base.txt").write_text(str(base))
    for name, text in change.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def answer(command_: str, out: str, code: str = "0") -> dict[str, str]:
    return {f"commands/{file_name(command_)}": f"$ {command_}\nexit {code}\n{out}"}


def gpu_table(only: int | None = None, **change: str) -> dict[str, str]:
    """Return the healthy node's GPU table with cells changed, field="value", for all GPUs or for GPU `only`."""
    heading, *lines = RecordedNode(H200).run(nvidia_smi.GPUS).out.splitlines()
    rows = [dict(zip(nvidia_smi.FIELDS, line.split(", "), strict=True)) for line in lines]
    for i, row in enumerate(rows):
        row.update({k.replace("__", "."): v for k, v in change.items()} if only in (None, i) else {})
    return answer(nvidia_smi.GPUS, "\n".join([heading, *(", ".join(row.values()) for row in rows)]) + "\n")


def some_gpus(count: int) -> dict[str, str]:
    """Return the healthy node's GPU table cut to `count` GPUs, or continued to 16."""
    heading, *lines = RecordedNode(H200).run(nvidia_smi.GPUS).out.splitlines()
    lines += [f"{int(line[0]) + 8}{line[1:]}" for line in lines]
    return answer(nvidia_smi.GPUS, "\n".join([heading, *lines[:count]]) + "\n")


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
