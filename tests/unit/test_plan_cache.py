"""Plans on disk: the key of an entry, damaged entries, failures."""

import ast
import dataclasses
import gzip
import importlib.util
from pathlib import Path

import pytest
from made_plans import H200, RATES, Inline, load, made

from jaxtrain.plan import topology
from jaxtrain.plan.result import Plan, Rates
from jaxtrain.plan.search import cache, parallel
from jaxtrain.plan.search.cache import Cache, Failure


def test_a_search_again_plans_nothing_but_what_was_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "_Children", Inline)
    kept = Cache(tmp_path)
    requests = {i: parallel.Request(load(f"loss.chunk={256 * i}"), H200, "made") for i in (1, 2, 3)}

    def plans():
        return parallel.plan_many(requests, cache=kept, plan_one="made_plans:above")

    first = plans()
    assert len(Inline.last.started) == 3
    again = plans()
    assert not Inline.last.started and {o.kind for o in again.values()} == {"cached"}
    assert [o.plan for o in again.values()] == [o.plan for o in first.values()] and again[1].plan.config == "made"
    path = next(tmp_path.glob("*.json.gz"))
    path.write_bytes(b"")
    plans()
    assert len(Inline.last.started) == 1 and isinstance(kept.get(path.name.partition(".")[0]), Plan)


def test_key_holds_what_matters_and_nothing_else(tmp_path, monkeypatch):
    kept, run = Cache(tmp_path), load()
    key = kept.key(run, H200, None)
    same = ("log.every_steps=7", "data.seed=3", "checkpoint.keep=9", "mesh.fsdp=8", "sample.max_tokens=1", "train.seed=4")
    other = ("model.d_ff=8192", "remat.every=2", "dtypes.m=bf16", "train.grad_accum=16", "optimizer.clip_norm=0.0")
    for override in (*same, *other):
        assert (kept.key(load(override), H200, None) == key) == (override in same), override
    assert kept.key(run, topology.parse("h200:4x2"), None) != key
    slower: Rates = dataclasses.replace(RATES, gemm_tflops=500.0)
    assert kept.key(run, H200, slower) != kept.key(run, H200, RATES), "other rates are other plans"
    monkeypatch.setattr(cache, "_code", lambda: "other code")
    assert kept.key(run, H200, None) != key
    monkeypatch.undo()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    assert kept.key(run, H200, None) != key


def test_own_code_is_part_of_the_key(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "my_loss_for_the_key.py"
    file.write_text("def loss(*a): return 1")
    run = load("loss.name=my_loss_for_the_key:loss")
    key = Cache(tmp_path).key(run, H200, None)
    file.write_text("def loss(*a): return 2")
    assert Cache(tmp_path).key(run, H200, None) != key


def imported(name: str) -> set[str]:
    """The modules of jaxtrain that a module imports, anywhere in it."""
    spec = importlib.util.find_spec(f"jaxtrain.{name}")
    assert spec and spec.origin, name
    tree = [*ast.walk(ast.parse(Path(spec.origin).read_text()))]
    nodes = [n for n in tree if isinstance(n, ast.ImportFrom)]
    full = [f"{n.module}.{alias.name}" for n in nodes for alias in n.names] + [n.module for n in nodes]
    full += [n.value for n in tree if isinstance(n, ast.Constant) and isinstance(n.value, str)]  # imported by name
    ours = {f.removeprefix("jaxtrain.") for f in full if f and f.startswith("jaxtrain.")}
    root = Path(cache.__file__).parents[2]
    return {m for m in ours if m and ((root / m.replace(".", "/")).is_dir() or (root / f"{m.replace('.', '/')}.py").exists())}


def test_no_code_that_plans_are_made_of_is_left_out_of_the_key():
    reached, todo = set(), {"plan.make"}
    while todo - reached:
        name = (todo - reached).pop()
        todo |= imported(name)
        reached.add(name)
    assert {"train.step", "kernels.dot", "models.families.llama", "plan.program.roofline", "train.compiler"} <= reached
    assert not [name for name in reached if cache._is_other(name)]
    assert cache._is_other("checkpoint") and cache._is_other("data.pipeline") and cache._is_other("plan.search")


@pytest.mark.parametrize("damage", ["", "not gzip", "cut", "{}", '{"format": 0}'])
def test_a_damaged_entry_counts_as_none_with_a_warning(tmp_path, caplog, damage):
    kept = Cache(tmp_path)
    kept.put("a", made(load(), H200, 1.0, 2.0))
    path, whole = kept.path("a"), kept.path("a").read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "not gzip": b"not gzip"}.get(damage, gzip.compress(damage.encode())))
    with caplog.at_level("WARNING", logger="jaxtrain"):
        assert kept.get("a") is None
    assert f"{path} is damaged" in caplog.text


def test_cache_that_cannot_be_written_is_only_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level("WARNING", logger="jaxtrain"):
        Cache(tmp_path / "file").put("key", Failure("no"))
    assert "not kept" in caplog.text


def test_entries_are_written_whole(tmp_path):
    kept = Cache(tmp_path)
    kept.put("a", made(load(), H200, 1.0, 2.0))
    assert kept.get("a") == made(load(), H200, 1.0, 2.0)
    assert [p.name for p in tmp_path.iterdir()] == ["a.json.gz"]
    kept.put("b", Failure("no such layout"))
    assert kept.get("b") == Failure("no such layout") and kept.get("c") is None


def test_only_what_would_fail_again_is_kept():
    kinds = [parallel._kind(e) for e in (ValueError("no"), MemoryError(), OSError(28, "no space left"))]
    assert kinds == ["failed", "out of memory", "crashed"]
    assert parallel._kind(RuntimeError("RESOURCE_EXHAUSTED: out of host memory")) == "out of memory"
