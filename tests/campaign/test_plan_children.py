"""Plans made in child processes: those that go wrong, and a real search, advice, and a table of what fits, by XLA:GPU."""

import dataclasses
import math
import os
from pathlib import Path

import pytest
from made_plans import flat, load, tiny
from rich.console import Console

from benchmarks import what_fits
from benchmarks.studies import Model
from jaxtrain.config import Problem, RunConfig
from jaxtrain.plan import __main__ as command
from jaxtrain.plan import topology
from jaxtrain.plan.report import search_report
from jaxtrain.plan.search import best, fit, parallel, space
from jaxtrain.plan.search.cache import Cache
from jaxtrain.plan.search.parallel import Request

ONE = topology.parse("h200:1")


@pytest.fixture
def children(monkeypatch):
    """Children find made_plans."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))


def request(accum: int = 1) -> Request:
    run = load("train.global_batch=32", f"train.grad_accum={accum}", file="configs/tiny.py")
    return Request(run, ONE, "tiny")


def test_children_that_go_wrong_are_named_and_the_rest_goes_on(children, tmp_path):
    requests, kept, heard = {a: request(a) for a in (1, 2, 4, 32)}, Cache(tmp_path), []
    found = parallel.plan_many(
        requests, jobs=2, cache=kept, plan_one="made_plans:by_accum", on_done=lambda ident, outcome: heard.append(ident)
    )
    assert [found[a].kind for a in requests] == ["planned", "failed", "crashed", "planned"] and sorted(heard) == [1, 2, 4, 32]
    assert found[2].reason == "ValueError: no plan of two microbatches" and "SIGSEGV" in found[4].reason
    assert found[32].plan.time.step_ms == pytest.approx(1000 / 32) and found[32].plan.config == "tiny"
    # What planning raised would be raised again; a crash may be chance.
    again = {a: parallel.from_cache(kept, requests[a], "made_plans:by_accum") for a in requests}
    assert [a for a in requests if again[a]] == [1, 2, 32]
    assert again[1].plan == found[1].plan and "to try again" in again[2].reason


def test_a_child_that_takes_too_long_is_stopped(children):
    found = parallel.plan_many({8: request(8)}, jobs=1, plan_one="made_plans:by_accum", timeout_s=2.0)
    assert found[8].kind == "out of time" and "within 2 s" in found[8].reason


def test_a_host_without_memory_stops_the_largest_child(children, monkeypatch):
    monkeypatch.setattr(parallel, "free_gib", lambda: 0.1)
    with parallel.Pool(1, plan_one="made_plans:sleeps") as pool:
        pool.start("one", request())
        found = pool.wait(300.0)
    assert found[0][1].kind == "out of memory" and "0.1 GiB were left" in found[0][1].reason


def test_a_child_that_the_system_kills_ran_out_of_memory(children):
    with parallel.Pool(1, plan_one="made_plans:killed") as pool:
        pool.start("one", request())
        found = pool.wait(300.0)
    assert found[0][1].kind == "out of memory" and "killed, as the system does" in found[0][1].reason


def test_budget_stops_children(children):
    found = parallel.plan_many({i: request() for i in range(3)}, jobs=2, budget_s=1.0, plan_one="made_plans:sleeps")
    assert {o.kind for o in found.values()} == {"stopped"} and "budget of 1 s" in found[0].reason


def test_no_child_outlives_its_pool(children):
    with pytest.raises(KeyboardInterrupt), parallel.Pool(2, plan_one="made_plans:sleeps") as pool:
        for i in range(2):
            pool.start(i, request())
        pids = [child.process.pid for child in pool._children.values()]
        assert len(pids) == 2 and not pool.room
        raise KeyboardInterrupt
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# ---- Compiled


def few(settings):
    """Of a knob's settings those of this test: fsdp=2, weights gathered by layer, one microbatch, full remat or none."""

    def some(*args):
        for s in settings(*args):
            wanted = {"mesh.fsdp": (2,), "train.grad_accum": (1,), "remat.policy": ("full", "none"), "remat.every": (1,)}
            wanted |= {"sharding.zero": (3,), "sharding.gather": ("layer",)}
            if all(s.get(key, values[0]) in values for key, values in wanted.items()):
                yield s

    return some


def test_a_real_search(tmp_path, monkeypatch):
    """Two layouts of a small model on two H200s, compiled in two processes; then again from the cache."""
    monkeypatch.setattr(space, "KNOBS", tuple(dataclasses.replace(k, settings=few(k.settings)) for k in space.KNOBS))
    run, machine, kept = tiny(), topology.parse("h200:2"), Cache(tmp_path)
    console = Console(record=True, width=160)
    with search_report.watch(console) as progress:
        result = best.search(run, "tiny", machine, jobs=2, cache=kept, on_progress=progress)
    assert [c.outcome.kind for c in result.tried] == ["planned"] * 2, [c.outcome for c in result.tried]
    assert result.ended == "complete" and not result.warnings and result.best.plan.fits
    for c in result.tried:
        assert c.plan.time.step_ms >= c.bound.step_s * 1e3 and c.plan.memory.peak_gib >= c.bound.memory_gib
        assert c.plan.config == "tiny" and c.plan.mesh["fsdp"] == 2
    assert "2: fsdp=2" in console.export_text()
    again = best.search(run, "tiny", machine, jobs=2, cache=kept)
    assert [c.outcome.kind for c in again.tried] == ["cached"] * 2
    assert again.best.plan == result.best.plan


def test_a_model_that_does_not_fit_is_made_to(tmp_path):
    """With everything kept the step takes more than the part of the card that it may have; with full remat it fits."""
    machine = topology.parse("h100:1")
    small = ("model.num_layers=4", "data.seq_len=4096", "train.global_batch=1", "loss.chunk=2048", "data.packing=none")
    run, kept = tiny(*small, "train.memory_fraction=0.002", "remat.policy=none"), Cache(tmp_path)
    legal = space.training_check(machine)

    def check(r: RunConfig) -> list[Problem]:
        turned = {key for key, value in flat(r).items() if value != flat(run)[key]}
        if turned - {"remat.policy"} or r.remat.policy not in ("none", "full"):
            return [Problem("remat.policy", r.remat.policy, "left out here, to compile no more than this", "")]
        return list(legal(r))

    plan = parallel.plan_many({0: Request(run, machine, "tiny")}, cache=kept)[0].plan
    assert plan and not plan.fits
    found = fit.advise(run, plan, machine, check=check, cache=kept, jobs=1)
    best = found[0]
    assert best.fits and best.changes == ("remat.policy=full",) and best.plan and best.plan.overrides == best.changes
    assert best.plan.memory.peak_gib < plan.memory.usable_gib < plan.memory.peak_gib

    full = space.with_overrides(run, (("remat.policy", "full"),))
    (reason,) = fit.why(full, best.plan, machine, check=legal, cache=kept)
    assert reason.choice == "remat.policy=full" and reason.plan
    assert reason.plan.memory.peak_gib > best.plan.memory.peak_gib and reason.needed is not reason.plan.fits
    assert math.isfinite(reason.plan.time.step_ms)


def test_a_table_of_what_fits_is_compiled_and_made_again_from_the_cache(monkeypatch, tmp_path, capsys):
    sizes = {"num_layers": 2, "d_model": 256, "num_heads": 4, "num_kv_heads": 2, "d_ff": 512, "vocab_size": 1024}
    asked = ((Model("small", sizes, 256, "made up"),), ("h200:1", "h200:2"))
    page = what_fits.page(what_fits.fill_all(*asked, jobs=2, cache=Cache(tmp_path / "plans")))
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in page if line[:1] == "|"]
    assert [line[0] for line in lines] == ["GPUs", "---", "h200:1", "h200:2"]
    assert all(all(line) and len(line) == len(what_fits.HEADINGS) for line in lines)
    assert lines[2][1].startswith("one GPU; keep q k v") and lines[3][1].startswith("fsdp=2; ")
    assert lines[2][-1] == "100.0%" and float(lines[3][-1].rstrip("%")) != 100
    assert what_fits.COMMAND in page and "small on h200:2: fsdp=2" in capsys.readouterr().out

    def start(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(parallel.Pool, "start", start)
    assert what_fits.page(what_fits.fill_all(*asked, jobs=2, cache=Cache(tmp_path / "plans"))) == page


SMALL = (
    "--config=configs/llama3_1b.py",
    "--config.model.num_layers=2",
    "--config.model.vocab_size=1024",
    "--config.data.seq_len=1024",
    "--config.train.global_batch=8",
    "--config.train.grad_accum=1",
)


@pytest.mark.parametrize("asked", [("--search", "--most=2"), ("--why",)], ids=" ".join)
def test_ctrl_c_among_many_plans_tells_what_there_is(asked, monkeypatch, tmp_path, capsys, request):
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # what the command sets would stay with the tests that follow

    def interrupted(self, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxtrain.plan.search.parallel.Pool.wait", interrupted)
    argv = [*SMALL, "--topology=h200:8", "--config.dtypes.m=bf16", *asked, f"--cache={tmp_path}"]
    assert command.main(argv) == command.INTERRUPTED
    printed = capsys.readouterr().out
    assert "interrupted" in printed and ("it ended before the first plan was made" in printed) == ("--search" in asked)
