"""Plans on disk: the key of an entry, damaged entries, failures."""

import dataclasses
import gzip

import pytest
from made_plans import H200, RATES, load, made, plan_inline

from jaxtrain.plan import search_cache, search_parallel, topology
from jaxtrain.plan.result import Rates
from jaxtrain.plan.search_cache import PlanCache, PlanOutcome, Request

PLAN = PlanOutcome(made(load(), H200, 1.0, 2.0), "planned")


def planned(*overrides: str, **how) -> Request:
    return Request(load(*overrides), **{"topology": H200, "name": "made", **how})


def test_a_search_again_plans_nothing_but_what_was_damaged(tmp_path, monkeypatch):
    kept, started = PlanCache(tmp_path), plan_inline(monkeypatch)
    requests = {i: planned(f"loss.chunk={256 * i}") for i in (1, 2, 3)}

    def plans():
        started.clear()
        return search_parallel.plan_many(requests, cache=kept, plan_one="made_plans:above")

    first = plans()
    assert len(started) == 3
    again = plans()
    assert not started and {o.kind for o in again.values()} == {"cached"}
    assert [o.plan for o in again.values()] == [o.plan for o in first.values()] and again[1].plan.config == "made"
    kept.path(requests[1], "made_plans:above").write_bytes(b"")
    plans()
    assert started == [requests[1].run] and kept.get(requests[1], "made_plans:above").plan


def test_key_holds_what_matters_and_nothing_else(tmp_path, monkeypatch):
    kept = PlanCache(tmp_path)

    def path(*overrides, **how):
        return kept.path(planned(*overrides, **how), "by")

    first = path()
    same = ("log.every_steps=7", "checkpoint.keep=9", "mesh.fsdp=8", "paths.cache=elsewhere", "sample.max_tokens=1")
    other = ("data.seed=3", "remat.every=2", "dtypes.m=bf16", "train.grad_accum=16", "optimizer.clip_norm=0.0")
    for override in (*same, *other):
        assert (path(override) == first) == (override in same), override
    assert path(name="another", overrides=("a=b",)) == first
    assert path(topology=topology.parse_topology("h200:4x2")) != first
    slower: Rates = dataclasses.replace(RATES, gemm_tflops=500.0)
    assert path(rates=slower) != path(rates=RATES)
    monkeypatch.setattr(search_cache, "_digest_of_module", lambda name: "other code")
    assert path() != first
    monkeypatch.undo()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    assert path() != first


def test_own_code_is_part_of_the_key(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "my_loss_for_the_key.py"
    file.write_text("def loss(*a): return 1")
    request = planned("loss.name=my_loss_for_the_key:loss")
    first = PlanCache(tmp_path).path(request, "by")
    file.write_text("def loss(*a): return 2")
    assert PlanCache(tmp_path).path(request, "by") != first


@pytest.mark.parametrize("damage", ["", "cut", '{"format": 0}'])
def test_a_damaged_entry_counts_as_none_with_a_warning(tmp_path, caplog, damage):
    kept, request = PlanCache(tmp_path), planned()
    kept.put(request, "by", PLAN)
    path = kept.path(request, "by")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else gzip.compress(damage.encode()))
    with caplog.at_level("WARNING", logger="jaxtrain"):
        assert kept.get(request, "by") is None
    assert str(path) in caplog.text


def test_plans_and_errors_of_planning_are_kept_whole(tmp_path):
    """Plans and errors of planning are cached. A crash or a lack of memory may happen by chance, so it is not cached."""
    kept, request = PlanCache(tmp_path), planned()
    for kind in ("crashed", "out of memory", "out of time", "stopped"):
        kept.put(request, "by", PlanOutcome(None, kind, "no"))
    assert kept.get(request, "by") is None
    kept.put(request, "by", PLAN)
    assert [p.name for p in tmp_path.iterdir()] == [kept.path(request, "by").name]
    assert kept.get(request, "by") == PlanOutcome(request.label(PLAN.plan), "cached")
    kept.put(request, "other", PlanOutcome(None, "failed", "no such layout"))
    assert kept.get(request, "other").reason.startswith("no such layout")
