"""Benchmarks against PyTorch: the settings passed to its script, and the comparison of results."""

import pytest
from bench_helpers import PEER, at_home  # noqa: F401

from benchmarks import peer_torch
from jaxtrain import launch
from jaxtrain.bench import train_step


def test_a_peer_that_cannot_be(capsys):
    """Two mistakes are reported together: a missing interpreter, and a setting that transformers' Llama does not support."""
    more = ["--config.model.qk_norm=true", "--python=nowhere/python"]
    assert peer_torch.main([*PEER, *more]) == 2
    said = capsys.readouterr().err
    assert "--python = 'nowhere/python': no such program" in said
    assert "model.qk_norm = True: transformers' Llama does not support it" in said


def test_other_work_is_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_torch, "run_case", lambda kind, ask, **how: {"verdict": "ok", "spec": {}, "losses": [5.0, 4.0]})
    monkeypatch.setattr(peer_torch, "run_peer", lambda *_: {"verdict": "ok", "losses": [5.0, 4.01]})
    found = peer_torch.compare_losses(PEER[:1], "python", tmp_path, tmp_path / "log.txt")
    assert found["verdict"] == "failed" and "not the same work" in found["why"]


def test_the_ratio_of_speeds():
    """`ratio` is jaxtrain's median speed over PyTorch's. `least` and `most` are ratios of single rounds."""
    speeds = (("jaxtrain", 10.0), ("torch", 4.0), ("jaxtrain", 12.0), ("torch", 6.0), ("jaxtrain", 30.0))
    turns = [{"who": who, "verdict": "ok", "tokens_per_s": speed} for who, speed in speeds]
    assert peer_torch.compare_speeds(turns) == {"ratio": 12.0 / 5.0, "least": 2.0, "most": 2.5, "rounds": 2}
    assert peer_torch.compare_speeds(turns[:1]) is None


def test_the_peers_answer_in_our_terms():
    """A step of 128 tokens takes half a second. Three losses with two timed steps mean one warm-up step."""
    run = launch.load([argv for argv in PEER if argv.startswith("--config")]).run
    answer = {"verdict": "ok", "device": "cpu", "step_times": [0.5, 0.5], "losses": [5.0, 4.5, 4.0], "reserved_gib": 2.0}
    found = peer_torch.as_our_answer(answer | {"settings": {"checkpoint": False}}, run)
    assert found["tokens_per_s"] == found["tokens_per_s_per_device"] == 4 * 32 / 0.5
    assert (found["steps"], found["warmup"], found["loss"]) == (2, 1, {"first": 5.0, "last": 4.0})
    assert found["memory"]["peak_gib"] == 2.0 and found["hfu"] == found["mfu_causal"]


def test_what_the_peer_cannot_import():
    """PyTorch's script imports nothing of jaxtrain, so that it runs where jaxtrain is not installed."""
    assert "jaxtrain" not in [
        line.split()[1].split(".")[0]
        for line in peer_torch.SCRIPT.read_text().splitlines()
        if line.startswith(("import ", "from "))
    ]


def test_the_peers_mfu_is_of_our_peak():
    """The MFU is relative to the bfloat16 peak, as in jaxtrain's own results."""
    run = launch.load([*(argv for argv in PEER if argv.startswith("--config")), "--config.precision=bf16"]).run
    answer = {"verdict": "ok", "device": "NVIDIA H200", "step_times": [1.0], "losses": [1.0, 1.0], "reserved_gib": 1.0}
    found = peer_torch.as_our_answer(answer | {"settings": {"checkpoint": False}}, run)
    assert found["peak_tflops"] == train_step.peak_tflops(run, "NVIDIA H200") == pytest.approx(989.4, rel=1e-3)
