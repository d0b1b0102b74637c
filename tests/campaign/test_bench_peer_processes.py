"""Benchmarks against PyTorch, in processes: with a fake of PyTorch, and with PyTorch itself if it is installed."""

import json
import os
import subprocess
import sys

import pytest
from bench_helpers import ANSWER, PEER, at_home, run_here  # noqa: F401

from benchmarks import peer_torch
from jaxtrain.bench import train_step
from jaxtrain.bench.train_step import DATA

TORCH = os.environ.get("JAXTRAIN_PEER_PYTHON", sys.executable)


def test_a_python_without_torch(capsys, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    python.chmod(0o755)
    assert peer_torch.main([*PEER, f"--python={python}"]) == 2
    assert "cannot import torch and transformers: ModuleNotFoundError: No module named 'torch'" in capsys.readouterr().err


STAND_IN = """
import json, sys
spec = json.load(open(sys.argv[1]))
how = {"attention": "sdpa", "compile": "layers", "checkpoint": False}
tried = [] if spec["settings"] else [{**how, "step_s": 0.5, "why": ""}]
answer = {"verdict": "ok", "torch": "2", "transformers": "5", "device": "cpu", "settings": how, "tried": tried}
answer |= {"step_times": [0.5] * spec["steps"], "losses": [5.0] * 3, "parameters": spec["parameters"]}
json.dump(answer | {"allocated_gib": None, "reserved_gib": None}, open(sys.argv[2], "w"))
"""


def test_turns_and_their_ratio(tmp_path, monkeypatch, capsys):
    """Each round times jaxtrain, then PyTorch. The ratio is that of their fakes: a fixed result and a script's."""
    script, file, right = tmp_path / "stand_in.py", tmp_path / "peer.json", peer_torch.run_case

    def run_case(function, request, **how):
        if function == "peer_torch":
            return right(function, request, **how)
        return dict(ANSWER) if function == train_step.CASE else run_here(function, request)

    script.write_text(STAND_IN)
    monkeypatch.setattr(peer_torch, "SCRIPT", script)
    monkeypatch.setattr(peer_torch, "run_case", run_case)
    monkeypatch.setattr(peer_torch, "export_small", lambda *_: {"verdict": "ok"})
    monkeypatch.setattr(peer_torch, "compare_losses", lambda *_: {"verdict": "ok", "off": 1e-7})
    monkeypatch.setattr(peer_torch, "interpreter", lambda *_: [])
    assert peer_torch.main([*PEER, f"--json={file}"]) == 0
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
    monkeypatch.setattr(peer_torch, "SCRIPT", script)
    answer = peer_torch.run_peer(sys.executable, {}, tmp_path / "log.txt", 0.5)
    assert answer["verdict"] == "out of time" and answer["why"].startswith("not done after")


def test_torch_does_the_same_work(tmp_path, capsys):
    """From the same weights, a small model has the same loss in each of four steps in PyTorch and in jaxtrain.

    The model has grouped queries, a tied head and scaled rotary frequencies.

    If the Python in JAXTRAIN_PEER_PYTHON has no torch, the command exits with 2 and reports the failed import.
    """
    probe = subprocess.run([TORCH, "-c", "import torch, transformers"], capture_output=True, check=False)
    if probe.returncode:
        assert peer_torch.main([*PEER, f"--python={TORCH}"]) == 2
        assert "cannot import torch and transformers" in capsys.readouterr().err
        return
    base = [*PEER[:-3], *DATA["synthetic"], *peer_torch.SAME_WORK]
    example = peer_torch.export_small(base, tmp_path / "small", tmp_path / "logs" / "log.txt", 600)
    found = peer_torch.compare_losses(example, TORCH, tmp_path / "logs" / "torch.txt", 600, platform="cpu")
    assert found["verdict"] == "ok", found
    assert found["off"] < 1e-5 and found["ours"][-1] < found["ours"][0] - 0.01, "steps were taken"
    how = {"platform": "cpu", "settings": peer_torch.read_settings("sdpa,none,checkpoint;sdpa,none"), "tune_s": 0.0}
    timed = peer_torch.run_peer(TORCH, example["spec"] | how | {"warmup": 1, "steps": 3}, tmp_path / "logs" / "timed.txt", 600)
    assert timed["verdict"] == "ok" and timed["losses"] == pytest.approx(found["theirs"]), timed
    assert timed["settings"] == how["settings"][0] and len(timed["step_times"]) == 3
