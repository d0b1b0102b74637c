"""`python -m jaxtrain parity --known-issues`: it finds no bug in jaxtrain, and finds planted bugs of its three classes."""

import json
import os

import jax
import pytest

from jaxtrain import sharding
from jaxtrain.commands import parity as command
from jaxtrain.kernels.attention import reference
from jaxtrain.train import parity_known_issues, parity_layouts

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
    return [
        (layout, parity_layouts.load(layout, FEW, *parity_layouts.FLOAT32)[0]) for layout in parity_layouts.parse("one,seq2")[0]
    ]


def test_documents_are_apart():
    found = parity_known_issues.check_documents(straddling())
    assert found.ok and 0 < found.figure < found.bound == 1e-5


def test_documents_that_leak_are_found(monkeypatch, retraced):
    """The planted bug: a token attends to all documents of its sequence that are on another device. It is found."""
    right = reference.describe_block

    def leak(rows, spec, **block):
        if not block.get("diagonal"):
            rows = rows._replace(q_segments=rows.q_segments.clip(max=1), kv_segments=rows.kv_segments.clip(max=1))
        return right(rows, spec, **block)

    monkeypatch.setattr(reference, "describe_block", leak)
    found = parity_known_issues.check_documents(straddling())
    assert not found.ok and found.figure > 100 * found.bound
    assert found.where.startswith("seq2")


def test_wrong_gradients_are_found(monkeypatch, tmp_path, retraced):
    """The planted bug sums a gradient twice over `data`."""
    right = sharding.reduce_gradient
    monkeypatch.setattr(
        sharding, "reduce_gradient", lambda g, how: right(2 * g if g.ndim == 3 and "data" in how.summed else g, how)
    )
    fine = parity_known_issues.Check("documents", 0.0, 1e-5, "one")
    monkeypatch.setattr(parity_known_issues, "check_documents", lambda runs: fine)
    monkeypatch.setattr(parity_known_issues, "check_processes", lambda argv: fine)
    monkeypatch.setattr(parity_known_issues, "COMBINED", "one,data2xfsdp2")
    file = tmp_path / "known.json"
    assert command.main([*FEW, "--known-issues", f"--json={file}"]) == 1
    first, second, third = json.loads(file.read_text())["known_issues"]
    assert first["ok"] and third["ok"] and not second["ok"]
    assert second["where"].startswith("data2xfsdp2: layers.") and second["figure"] > 100 * second["bound"]
