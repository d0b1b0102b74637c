"""The comparison of MaxText's compiled step with ours: reading and printing, with a small step of ours for all cases."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny

from benchmarks import peer_maxtext, peer_maxtext_read
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.topology import parse_topology


@pytest.mark.more
def test_a_compiled_step_is_read_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Every case of the page has the same small step of jaxtrain. The page keeps what is written by hand."""
    machine, case = parse_topology(peer_maxtext.TOPOLOGY), peer_maxtext.PAIR[0]
    assert peer_maxtext.main([f"--read={tmp_path}"]) == 1, "there are no steps"
    compiled = compile_step(
        tiny({"model.num_layers": 1, "mesh.fsdp": 8, "precision": "bf16", "attention.impl": "cudnn"}), machine
    )
    memory: Any = compiled.executable.memory_analysis()
    facts = {"peak": "peak_memory_in_bytes", "arguments": "argument_size_in_bytes", "temp": "temp_size_in_bytes"}
    facts = {name: getattr(memory, field) for name, field in facts.items()}
    facts |= {"options": {}, "date": "2026-01-02", "versions": {"maxtext": "1.2.3", "jax": "4.5.6"}}
    (tmp_path / f"{case.name}.hlo").write_text(compiled.text)
    (tmp_path / f"{case.name}.pb").write_bytes(compiled.buffers)
    (tmp_path / f"{case.name}.json").write_text(json.dumps(facts))
    read = peer_maxtext_read.read(tmp_path, case.name, machine, per_token=1e9, tokens=1000)
    t = read.timed
    assert t.step_ms == pytest.approx(t.gemm_ms + t.attention_ms + t.memory_ms + t.exposed_ms + t.host_exposed_ms)
    assert min(t.gemm_ms, t.attention_ms, t.memory_ms, read.memory_gb, read.wire_gb) > 0
    assert read.mfu == pytest.approx(1e9 * 1000 / (t.step_ms / 1e3) / 989e12, rel=1e-3)
    # Beside the heap's peak there are arguments, and results and constants that do not reuse an argument's memory.
    assert sum(gib for gib, _ in read.held) + read.arguments_gib == pytest.approx(read.peak_gib, rel=0.01)
    assert sum(m.exposed_ms for m in read.moved) == pytest.approx(t.exposed_ms)

    monkeypatch.setattr(peer_maxtext, "read", lambda *_: read)
    page = tmp_path / "page.md"
    page.write_text(f"old\n\n{peer_maxtext.EXPLAINED}\n\nBy hand.\n")
    assert peer_maxtext.main([f"--read={tmp_path}", f"--markdown={page}"]) == 0
    text = page.read_text()
    assert text.endswith(f"\n{peer_maxtext.EXPLAINED}\n\nBy hand.\n") and "old" not in text and str(tmp_path) not in text
    for case in peer_maxtext.CASES:
        what = f"MaxText 1.2.3 | `{case.what}`" if case.who == "MaxText" else f"jaxtrain | {case.what}"
        assert text.count(f"| {what} | {case.options} |") == 1
    assert peer_maxtext.table({}).splitlines()[0] in capsys.readouterr().out


def test_an_environment_without_maxtext_is_refused(tmp_path: Path, capsys):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # no site-packages
    bare.chmod(0o755)
    for python in (bare, tmp_path / "nowhere"):
        assert peer_maxtext.main([f"--python={python}"]) == 2
        assert str(python) in capsys.readouterr().err
