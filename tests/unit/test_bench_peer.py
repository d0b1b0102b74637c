"""Benchmarks against PyTorch."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from bench_helpers import ANSWER, at_home, here  # noqa: F401

from jaxtrain.bench import __main__ as command
from jaxtrain.bench import peer, suite
from jaxtrain.bench.measure import DATA
from jaxtrain.models.llama import NAMES

# ---- the peer

TORCH = os.environ.get("JAXTRAIN_PEER_PYTHON", sys.executable)
PEER = [
    *("--config=configs/llama3_1b.py:gpus=1", *suite.SMALL, "--config.model.vocab_size=272", "--config.model.num_heads=4"),
    *("--config.model.num_kv_heads=2", "--config.model.head_dim=8", "--config.train.global_batch=4"),
    *("--config.train.grad_accum=2", "--devices=1", "--steps=2", "--warmup=1", "--peer=torch", "--rounds=2"),
]


def test_tensors_go_over_as_transformers_has_them():
    sizes = {"D": 6, "N": 4, "K": 2, "H": 3, "V": 7, "F": 5}
    for ours, theirs in NAMES.items():
        array = np.random.default_rng(0).normal(size=[sizes[a] for a in theirs.ours.split()])
        name, turned = peer.to_hf(ours.replace("{i}", "1"), array)
        assert name == theirs.name.replace("{i}", "1") and turned.ndim == (1 if turned.ndim == 1 else 2)
        if theirs.theirs == "(N H) D":
            assert turned[1 * 3 + 2, 5] == array[5, 1, 2]
        if theirs.theirs == "D (N H)":
            assert turned[5, 1 * 3 + 2] == array[5, 1, 2]
        if theirs.theirs == "F D":
            assert turned[4, 3] == array[3, 4]


def test_a_peer_that_cannot_be(capsys):
    """An interpreter without torch, several devices, and what transformers' Llama has not: all at once."""
    more = ["--devices=2", "--config.model.qk_norm=true", "--peer-python=nowhere/python"]
    assert command.main([*PEER, *more]) == 2
    said = capsys.readouterr().err
    assert "the peer runs on one device, and 2 would be measured" in said and "no such program" in said
    assert "model.qk_norm = True: transformers' Llama has no such thing" in said


def test_a_python_without_torch(capsys, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    python.chmod(0o755)
    assert command.main([*PEER, f"--peer-python={python}"]) == 2
    assert "cannot import torch and transformers: ModuleNotFoundError: No module named 'torch'" in capsys.readouterr().err


STAND_IN = """
import json, sys
spec = json.load(open(sys.argv[1]))
how = {"attention": "sdpa", "compile": "layers", "checkpoint": False}
tried = [] if spec["settings"] else [{**how, "step_s": 0.5, "why": ""}]
answer = {"verdict": "ok", "torch": "2", "transformers": "5", "device": "cpu", "settings": how, "tried": tried}
answer |= {"seconds": [0.5] * spec["steps"], "losses": [5.0] * 3, "parameters": spec["parameters"]}
json.dump(answer | {"allocated_gib": None, "reserved_gib": None}, open(sys.argv[2], "w"))
"""


def test_turns_and_their_ratio(tmp_path, monkeypatch, capsys):
    """Ours in this process, theirs by a stand-in that answers as the script does and takes half a second a step."""
    script, file = tmp_path / "stand_in.py", tmp_path / "peer.json"
    script.write_text(STAND_IN)
    monkeypatch.setattr(peer, "SCRIPT", script)
    monkeypatch.setattr(peer, "apart", lambda kind, ask, **how: dict(ANSWER) if kind == "steps" else here(kind, ask))
    monkeypatch.setattr(peer, "same_work", lambda *_: {"verdict": "ok", "off": 1e-7})
    monkeypatch.setattr(peer, "refusal", lambda *_: [])
    assert command.main([*PEER, f"--json={file}"]) == 0
    printed = capsys.readouterr().out
    tree = json.loads(file.read_text())
    assert [t["who"] for t in tree["turns"]] == ["jaxtrain", "torch"] * 2
    theirs = 4 * 32 / 0.5
    assert tree["turns"][1]["tokens_per_s"] == pytest.approx(theirs) and tree["turns"][1]["steps"] == 2
    assert tree["compared"]["ratio"] == pytest.approx(10.0 / theirs) and tree["compared"]["rounds"] == 2
    assert "ratio ours/theirs in tokens/s: 0.039" in printed and "tried: SDPA sdpa, compile layers: 0.5 s" in printed


def test_a_peer_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    script = tmp_path / "sleeps.py"
    script.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(peer, "SCRIPT", script)
    answer = peer.theirs(sys.executable, {}, tmp_path / "log.txt", 0.5)
    assert answer["verdict"] == "out of time" and answer["why"].startswith("not done after")


def test_other_work_is_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(peer, "apart", lambda kind, ask, **how: {"verdict": "ok", "spec": {}, "losses": [5.0, 4.0]})
    monkeypatch.setattr(peer, "theirs", lambda *_: {"verdict": "ok", "losses": [5.0, 4.01]})
    found = peer.same_work(PEER[:1], "python", tmp_path, tmp_path / "log.txt")
    assert found["verdict"] == "failed" and "not the same work" in found["why"]


def test_torch_does_the_same_work(tmp_path, capsys):
    """Four losses of a small model with grouped queries, tied head and scaled rotary frequencies, from the same weights.

    Where there is no torch, that is what the command must say. JAXTRAIN_PEER_PYTHON names an interpreter that has it.
    """
    probe = subprocess.run([TORCH, "-c", "import torch, transformers"], capture_output=True, check=False)
    if probe.returncode:
        assert command.main([*PEER, f"--peer-python={TORCH}"]) == 2
        assert "cannot import torch and transformers" in capsys.readouterr().err
        return
    base = [*PEER[:-6], *DATA["synthetic"], *peer.SAME_WORK]
    found = peer.same_work(base, TORCH, tmp_path, tmp_path / "logs" / "log.txt")
    assert found["verdict"] == "ok", found
    assert found["off"] < 1e-5 and found["ours"][-1] < found["ours"][0] - 0.01, "steps were taken"


def test_what_the_peer_cannot_import():
    """The script must run where jaxtrain is not installed."""
    assert "jaxtrain" not in [
        line.split()[1].split(".")[0] for line in peer.SCRIPT.read_text().splitlines() if line.startswith(("import ", "from "))
    ]
