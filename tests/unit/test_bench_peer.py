"""Benchmarks against PyTorch: what the peer is given, and how its answer is compared."""

import numpy as np
from bench_helpers import PEER, at_home  # noqa: F401

from jaxtrain.bench import __main__ as command
from jaxtrain.bench import peer
from jaxtrain.models.llama import NAMES


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


def test_other_work_is_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(peer, "apart", lambda kind, ask, **how: {"verdict": "ok", "spec": {}, "losses": [5.0, 4.0]})
    monkeypatch.setattr(peer, "theirs", lambda *_: {"verdict": "ok", "losses": [5.0, 4.01]})
    found = peer.same_work(PEER[:1], "python", tmp_path, tmp_path / "log.txt")
    assert found["verdict"] == "failed" and "not the same work" in found["why"]


def test_what_the_peer_cannot_import():
    """The script must run where jaxtrain is not installed."""
    assert "jaxtrain" not in [
        line.split()[1].split(".")[0] for line in peer.SCRIPT.read_text().splitlines() if line.startswith(("import ", "from "))
    ]
