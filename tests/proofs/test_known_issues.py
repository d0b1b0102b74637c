"""`python -m jaxtrain.parity --known-issues`: it finds no bug in jaxtrain, and finds planted bugs of its three classes."""

import json
import os
import sys

import jax
import numpy as np
import pytest

from jaxtrain import sharding
from jaxtrain.kernels.attention import reference
from jaxtrain.parity import __main__ as command
from jaxtrain.parity import known_issues, layouts

FEW = (
    *("--config=configs/tiny.py", "--config.data.source=synthetic", "--config.data.seq_len=32", "--config.model.num_layers=1"),
    *("--config.model.d_model=32", "--config.model.d_ff=64", "--config.train.global_batch=4"),
)


@pytest.fixture(autouse=True)
def at_home(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        # The command sets these variables; monkeypatch restores them for later tests.
        monkeypatch.setenv(name, os.environ[name])


@pytest.fixture
def retraced():
    """Clear JAX's caches before and after the test. Otherwise JAX would reuse a trace without the planted bug in a step with
    the bug, or the reverse.
    """
    jax.clear_caches()
    yield
    jax.clear_caches()


def straddling():
    return [(layout, layouts.load(layout, FEW, *layouts.FLOAT32)[0]) for layout in layouts.parse("one,seq2")[0]]


def test_each_document_gets_a_sequence_of_its_own():
    packed = {
        "tokens": np.array([[1, 2, 3, 4], [5, 6, 0, 0]]),
        "segments": np.array([[1, 1, 1, 2], [1, 1, 0, 0]]),
        "positions": np.array([[0, 1, 2, 0], [0, 1, 0, 0]]),
        "weights": np.array([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]]),
    }
    apart = known_issues.separate_documents(packed)
    assert apart["tokens"].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 0, 0]]
    assert apart["segments"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert apart["positions"].tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert apart["weights"].sum() == packed["weights"].sum()


def test_documents_are_apart():
    found = known_issues.check_documents(straddling())
    assert found.ok and 0 < found.figure < found.bound == 1e-5


@pytest.mark.parametrize("where", ["everywhere", "across devices"])
def test_documents_that_leak_are_found(where, monkeypatch, retraced):
    """The planted bug: a token attends to all other documents of its sequence, or to those on another device. It is found."""
    name = "visible" if where == "everywhere" else "describe_block"
    right = getattr(reference, name)

    def leak(rows, spec, **block):
        if not block.get("diagonal"):
            rows = rows._replace(q_segments=rows.q_segments.clip(max=1), kv_segments=rows.kv_segments.clip(max=1))
        return right(rows, spec, **block)

    monkeypatch.setattr(reference, name, leak)
    found = known_issues.check_documents(straddling())
    assert not found.ok and found.figure > 100 * found.bound
    assert found.where.startswith("seq2" if where == "across devices" else ("one", "seq2"))


def test_wrong_gradients_are_found(monkeypatch, capsys, tmp_path, retraced):
    """The planted bug sums a gradient twice over `data`. The command exits with 1, and names the layout and the tensor."""
    right = sharding.reduce_gradient
    monkeypatch.setattr(
        sharding, "reduce_gradient", lambda g, how: right(2 * g if g.ndim == 3 and "data" in how.summed else g, how)
    )
    fine = known_issues.Check("documents", 0.0, 1e-5, "one")
    monkeypatch.setattr(known_issues, "check_documents", lambda runs: fine)
    monkeypatch.setattr(known_issues, "check_processes", lambda argv: fine)
    monkeypatch.setattr(known_issues, "COMBINED", "one,fsdp2xtensor2,data2xfsdp2")
    file = tmp_path / "known.json"
    assert command.main([*FEW, "--known-issues", f"--json={file}"]) == 1
    assert "WRONG: gradients of combined layouts" in capsys.readouterr().out
    first, second, third = json.loads(file.read_text())["known_issues"]
    assert first["ok"] and third["ok"] and not second["ok"]
    assert second["where"].startswith("data2xfsdp2: layers.") and second["figure"] > 100 * second["bound"]


def test_a_layout_that_cannot_run_is_wrong():
    row = type("Row", (), {"comparison": None, "failed": "no such luck", "layout": layouts.parse("fsdp2")[0][0]})
    found = known_issues.check_gradients([row, row])
    assert not found.ok and found.where == "fsdp2: no such luck"


@pytest.mark.more
@pytest.mark.parametrize("planted", [False, True])
def test_data_that_depends_on_processes_is_found(planted, monkeypatch):
    """The planted bug: each process reads the first rows of a batch instead of its own. The check fails, and without the bug
    passes.
    """
    bug = """
from jaxtrain.data.pipeline import Batches
right = Batches.batch
def batch(self, step, rows=None):
    return right(self, step, None if rows is None else range(len(rows)))
Batches.batch = batch
from jaxtrain.main import main
raise SystemExit(main())
"""
    monkeypatch.setattr(known_issues, "PROCESSES", (1, 2))
    if planted:
        monkeypatch.setattr(known_issues, "TRAIN", [sys.executable, "-c", bug])
    found = known_issues.check_processes(FEW)
    assert found.ok != planted and found.where.startswith("2 processes: ")
    assert np.isfinite(found.figure) and (found.figure > 10 * found.bound) == planted
