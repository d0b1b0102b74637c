"""The comparison of MaxText's compiled step with ours: reading and printing, with a small step of ours for all cases."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny

from benchmarks import peer_maxtext, peer_maxtext_read
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.topology import parse


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files that `peer_maxtext --out` writes. Every case has the same small step of jaxtrain."""
    out = tmp_path_factory.mktemp("peer")
    run = tiny({"model.num_layers": 2, "mesh.fsdp": 8, "precision": "bf16", "attention.impl": "cudnn"})
    compiled = compile_step(run, parse(peer_maxtext.TOPOLOGY))
    memory: Any = compiled.executable.memory_analysis()
    facts = {
        "options": {},
        "peak": memory.peak_memory_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "date": "2026-01-02",
        "versions": {"maxtext": "1.2.3", "jax": "4.5.6"},
    }
    for case in peer_maxtext.CASES:
        (out / f"{case.name}.hlo").write_text(compiled.text)
        (out / f"{case.name}.pb").write_bytes(compiled.buffers)
        (out / f"{case.name}.json").write_text(json.dumps(facts))
    return out


def test_a_compiled_step_is_read(folder: Path):
    machine = parse(peer_maxtext.TOPOLOGY)
    read = peer_maxtext_read.read(folder, peer_maxtext.PAIR[0].name, machine, per_token=1e9, tokens=1000)
    t = read.timed
    assert t.step_ms == pytest.approx(t.gemm_ms + t.attention_ms + t.memory_ms + t.exposed_ms + t.host_exposed_ms)
    assert min(t.gemm_ms, t.attention_ms, t.memory_ms, read.memory_gb, read.wire_gb) > 0
    assert read.mfu == pytest.approx(1e9 * 1000 / (t.step_ms / 1e3) / 989e12, rel=1e-3)
    # Beside the heap's peak there are arguments, and results and constants that do not reuse an argument's memory.
    assert sum(gib for gib, _ in read.held) + read.arguments_gib == pytest.approx(read.peak_gib, rel=0.01)
    assert sum(m.exposed_ms for m in read.moved) == pytest.approx(t.exposed_ms)


def test_the_page_has_every_step_and_keeps_what_is_written_by_hand(folder: Path, tmp_path: Path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"old\n\n{peer_maxtext.EXPLAINED}\n\nBy hand.\n")
    assert peer_maxtext.main([f"--read={folder}", f"--markdown={page}"]) == 0
    text = page.read_text()
    assert text.endswith(f"\n{peer_maxtext.EXPLAINED}\n\nBy hand.\n") and "old" not in text
    for case in peer_maxtext.CASES:
        what = f"MaxText 1.2.3 | `{case.what}`" if case.who == "MaxText" else f"jaxtrain | {case.what}"
        assert text.count(f"| {what} | {case.options} |") == 1
    assert peer_maxtext.table({}).splitlines()[0] in capsys.readouterr().out
    assert "jaxtrain/models/layers.py" in text and not re.search(r"jaxtrain/\S+\.py:\d", text), "line numbers go stale"
    assert "2026-01-02" in text and "MaxText 1.2.3 on jax 4.5.6" in text and str(folder) not in text
    assert len({case.name for case in peer_maxtext.CASES}) == len(peer_maxtext.CASES)


def test_an_environment_without_maxtext_is_refused(tmp_path: Path, capsys):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # no site-packages
    bare.chmod(0o755)
    assert peer_maxtext.main([f"--python={bare}"]) == 2
    said = capsys.readouterr().err
    assert f"--python={bare}: this environment has no maxtext" in said and "benchmarks/peer_maxtext.py says how" in said
    assert peer_maxtext.main([f"--python={tmp_path / 'nowhere'}"]) == 2
    assert "nowhere: No such file or directory" in capsys.readouterr().err


def test_a_folder_without_steps_is_an_error(tmp_path: Path, capsys):
    assert peer_maxtext.main([f"--read={tmp_path}"]) == 1
    assert f"{peer_maxtext.CASES[0].name}.json" in capsys.readouterr().err
