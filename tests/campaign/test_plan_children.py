"""Plans in child processes: failures; and a search, and a state that is made to fit, by XLA:GPU."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from made_plans import flat, load, tiny

from jaxtrain.config.schema import Problem, RunConfig
from jaxtrain.plan import fit, search, search_parallel, topology
from jaxtrain.plan.search_cache import PlanCache
from jaxtrain.plan.search_parallel import Request
from jaxtrain.plan.topology import layout_of

ONE = topology.parse_topology("h200:1")


@pytest.fixture
def children(monkeypatch):
    """Put tests/ on PYTHONPATH, so that child processes can import made_plans."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))


def request(accum: int = 1) -> Request:
    run = load("train.global_batch=32", f"train.grad_accum={accum}", file="configs/tiny.py")
    return Request(run, ONE, "tiny")


def test_children_that_go_wrong_are_named_and_the_rest_goes_on(children, tmp_path):
    requests, kept, heard = {a: request(a) for a in (1, 2, 4, 32)}, PlanCache(tmp_path), []
    found = search_parallel.plan_many(
        requests, jobs=2, cache=kept, plan_one="made_plans:by_accum", on_done=lambda ident, outcome: heard.append(ident)
    )
    assert [found[a].kind for a in requests] == ["planned", "failed", "crashed", "planned"] and sorted(heard) == [1, 2, 4, 32]
    assert "ValueError" in found[2].reason and "SIGSEGV" in found[4].reason
    assert found[32].plan.time.step_ms == pytest.approx(1000 / 32) and found[32].plan.config == "tiny"
    # A planning error would occur again, so it is cached. A crash may be chance.
    again = {a: kept.get(requests[a], "made_plans:by_accum") for a in requests}
    assert [a for a in requests if again[a]] == [1, 2, 32]
    assert again[1].plan == found[1].plan


def test_a_child_that_takes_too_long_is_stopped(children):
    found = search_parallel.plan_many({8: request(8)}, jobs=1, plan_one="made_plans:by_accum", timeout_s=2.0)
    assert found[8].kind == "out of time"


def test_a_child_that_the_system_kills_ran_out_of_memory(children):
    found = search_parallel.plan_many({0: request()}, plan_one="made_plans:killed")
    assert found[0].kind == "out of memory"


@pytest.mark.parametrize("after", [1, 2], ids=["while the first starts", "with two"])
def test_no_child_outlives_an_interrupt(children, monkeypatch, after):
    started = []
    popen = search_parallel.subprocess.Popen

    def start(*args, **options):
        started.append(popen(*args, **options))
        if len(started) == after:
            signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(search_parallel.subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        search_parallel.plan_many({i: request() for i in range(3)}, jobs=2, plan_one="made_plans:sleeps")
    assert [process.poll() for process in started] == [-signal.SIGKILL] * after
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_child_whose_parent_has_ended_does_not_work(tmp_path):
    command = [sys.executable, "-c", search_parallel.BEGIN, str(tmp_path), str(os.getppid())]  # not the id of this process
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")  # a real parent would miss the file `request`


# ---- With XLA


def only(run: RunConfig, machine: topology.Topology, keys: set[str]) -> fit.Check:
    """Return a check that refuses changes of keys other than `keys`, so that few layouts are compiled."""
    legal = fit.training_check(machine)
    own = flat(run) | {f"mesh.{axis}": size for axis, size in layout_of(run, machine).mesh}

    def check(r: RunConfig) -> list[Problem]:
        changed = {key for key, value in flat(r).items() if value not in (own[key], flat(run)[key])}
        return [Problem(key, None, "left out in this test", "") for key in changed - keys] or list(legal(r))

    return check


@pytest.mark.long
def test_a_real_search(tmp_path):
    """Two layouts of a small model on two H200s are compiled in two processes, then read from the cache."""
    run, machine, kept = tiny(), topology.parse_topology("h200:2"), PlanCache(tmp_path)
    check = only(run, machine, {"remat.policy"})
    result = search.search(run, "tiny", machine, check=check, jobs=2, cache=kept)
    assert [c.outcome.kind for c in result.tried] == ["planned"] * 2
    assert result.ended == "complete" and result.best.fits
    for c in result.tried:
        assert c.plan.memory.peak_gib >= c.least.gib
        assert c.plan.config == "tiny" and c.plan.mesh["fsdp"] == 2
    again = search.search(run, "tiny", machine, check=check, jobs=2, cache=kept)
    assert [c.outcome.kind for c in again.tried] == ["cached"] * 2
    assert again.best.plan == result.best.plan


def test_a_model_that_does_not_fit_is_made_to(tmp_path):
    """If the step exceeds the usable memory with the config's moments, the search finds narrower ones that fit."""
    machine, kept = topology.parse_topology("h100:1"), PlanCache(tmp_path)
    small = ("model.num_layers=2", "data.seq_len=256", "train.global_batch=1", "data.packing=none", "model.vocab_size=65536")
    run = tiny(*small, "dtypes.m=f32", "dtypes.v=f32", "train.memory_fraction=0.0068")
    plan = search_parallel.plan_many({0: Request(run, machine, "tiny")}, cache=kept)[0].plan
    assert plan and not plan.fits
    found = search.search(run, "tiny", machine, cache=kept, jobs=1)
    assert found.best and found.best.fits and found.best.plan.overrides == found.best.changes
    assert any(change.startswith("dtypes.") for change in found.best.changes)
    assert found.best.plan.memory.taken_gib < plan.memory.usable_gib < plan.memory.taken_gib
