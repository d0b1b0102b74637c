"""Benchmarks of the step and of kernels in this process, on CPU devices: figures, limits, failures, measured programs."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import pytest
from bench_helpers import SMALL, at_home  # noqa: F401
from helpers import few

from jaxtrain.config import hardware, launch
from jaxtrain.data import loading
from jaxtrain.models import flops
from jaxtrain.node import kernel_workloads, kernels, measure, train_step
from jaxtrain.node.train_step import DATA
from jaxtrain.step import compiler
from jaxtrain.train import child


def ask(**more):
    keys = ("log.peak_tflops=1", "mesh.data=2", "sharding.zero=0", "parallel.scan_layers=false")  # these compile quickly
    argv = [*SMALL, *DATA["synthetic"], *(f"--config.{key}" for key in keys)]
    return {"argv": argv, "devices": 2, "warmup": 2, "steps": 4, "limit_s": None} | more


@pytest.fixture(scope="module")
def compiled():
    """Return (the benchmark's result for the case `ask()`, its compiled step)."""
    made = []
    right = compiler.compile_train
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(launch.REPO)
        patch.setattr(train_step, "set_compile_cache", lambda run: None)  # a compile cache would stay set for later tests
        patch.setattr(compiler, "compile_train", lambda *args: made.append(right(*args)) or made[0])
        return train_step.measure(ask()), made[0]


def test_figures_follow_from_the_times(compiled):
    r, _ = compiled
    run = loading.load_config(ask()["argv"]).run
    assert r["verdict"] == "ok" and r["steps"] == 4 and r["mesh"]["fsdp"] * r["mesh"]["data"] == 2
    s = r["step_s"]
    assert 0 < s["min"] <= s["q1"] <= s["median"] <= s["q3"] <= s["max"]
    tokens = run.train.global_batch * run.data.seq_len
    assert r["tokens_per_s"] == pytest.approx(tokens / s["median"])
    assert r["tokens_per_s_per_device"] == pytest.approx(r["tokens_per_s"] / 2)
    per_token = flops.per_token(run.model, run.data.seq_len)
    each = r["tokens_per_s_per_device"] / 1e12
    assert r["mfu_causal"] == pytest.approx(per_token.causal * each)
    assert r["mfu_full"] == pytest.approx(per_token.full * each) and r["mfu_full"] > r["mfu_causal"]
    assert r["hfu"] > r["mfu_causal"], "the config recomputes"
    assert r["parameters"] == flops.parameters(run.model)["total"]
    assert r["planned"] is None and "GPUs" in r["not_planned"]
    assert r["memory"]["peak_gib"] is None and r["compile_s"] > 0
    assert abs(r["loss"]["first"] - math.log(run.model.vocab_size)) < 0.5


def test_a_case_stops_at_its_limit_and_says_what_auto_keeps(compiled, monkeypatch):
    monkeypatch.setattr(compiler, "compile_train", lambda *_: compiled[1])
    r = train_step.measure(ask(argv=[*ask()["argv"], "--config.remat.policy=auto"], limit_s=1e-9, steps=50))
    assert r["verdict"] == "ok" and r["steps"] == train_step.MIN_STEPS
    assert r["remat"] == "auto" and "remat.policy=auto" in r["remat_auto"]


def test_what_fails_after_the_timing_takes_nothing_from_it(compiled, monkeypatch, tmp_path):
    """The plan and the trace fail. The result keeps everything measured before."""
    from jaxtrain.metrics import profiling

    def broken(*_, **__):
        raise RuntimeError("no such luck\nand much more")

    kept = []
    monkeypatch.setattr(compiler, "compile_train", lambda *_: compiled[1])
    monkeypatch.setattr(profiling, "Tracer", broken)
    monkeypatch.setattr(train_step, "_plan", lambda *_: kept.append("planned") or {"planned": None, "not_planned": "so it is"})
    monkeypatch.setattr(train_step, "save_partial", lambda ask, out: kept.append(dict(out)))
    r = train_step.measure(ask(trace=str(tmp_path / "trace")))
    assert r["verdict"] == "ok" and "no such luck" in r["trace"] and r["not_planned"] == "so it is"
    assert kept[0]["verdict"] == "out of time" and kept[0]["attention"] == r["attention"]
    assert kept[1]["verdict"] == "ok" and kept[1]["step_s"] == r["step_s"] and kept[2] == "planned"


def test_memory_that_does_not_suffice(compiled, monkeypatch, tmp_path):
    """The allocator fails while the step runs. The result keeps everything known before the failure."""

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory trying to allocate 1 TiB.\nand much more")

    monkeypatch.setattr(compiler, "compile_train", lambda *_: full)
    asked, answered = tmp_path / "asked.json", tmp_path / "answered.json"
    asked.write_text(json.dumps(ask(answer_file=str(answered))))
    child.main([train_step.CASE, str(asked), str(answered)])
    r = json.loads(answered.read_text())
    assert r["verdict"] == "out of memory" and "1 TiB" in r["why"] and r["attention"] == "reference"


# ---- Kernels


H200 = hardware.lookup("NVIDIA H200")


@pytest.mark.parametrize("kind", few(kernels.KINDS, "optimizer"))
def test_kernels_run(kind, monkeypatch):
    monkeypatch.setattr(measure, "TINY", dataclasses.replace(measure.TINY, repeats=2, squares=(32,)))
    monkeypatch.setattr(kernel_workloads, "LOADS", ("uneven",))
    found = kernels.measure({"kind": kind, "limit_s": None})["rows"]
    timed = [r for r in found if r["verdict"] == "ok"]
    assert timed and not [r for r in found if r["verdict"] not in ("ok", "not timed")]
    assert all(r["seconds_a_call"] > 0 and r["gb_s"] > 0 and r["bound_s"] is None for r in timed)
    if kind == "attention":
        forward, both = (next(r for r in timed if r["kind"] == f"attention {k}") for k in ("forward", "forward+backward"))
        assert forward["flop"] == 4 * 64 * 64 * 4 * 16 / 2 and both["flop"] == 3.5 * forward["flop"]
        assert any("cudnn" in r["what"] and "NVIDIA" in r["why"] for r in found)
    if kind == "optimizer":
        assert timed[0]["bytes"] >= 2 * 32 * 64 * 7 * 4
    if kind == "experts":
        assert [r["kind"] for r in timed] == [f"experts {name}" for name in ("dense", "over D", "over F", "outer")]
        assert {r["flop"] for r in timed} == {2 * 64 * 32 * 64}
        # Weights of experts that have rows are read. A gradient is written for all experts.
        assert [r["bytes"] for r in timed] == [2 * (64 * 96 + n * 32 * 64) for n in (1, 3, 3, 4)]


def test_products_with_one_array_stay_apart():
    """The compiler does not merge the small matmuls of a round that share an operand into one wider matmul."""
    work = next(kernel_workloads.gemm(jax.devices()[0], measure.TINY))
    assert work.flop == 2 * 32**3 and work.bytes == 3 * 2 * 32**2
    body, constants, state = work.prepare()
    text = measure.make_loop(body, 2).lower(constants, state).compile().as_text()
    assert work.calls == 9 and len(re.findall(r"= \S+\[32,32\]\S* dot\(", text)) >= 9 and "[96,32]" not in text


def test_kernels_end_at_their_limit():
    found = kernels.measure({"kind": "gemm", "limit_s": 1e-9})["rows"]
    assert found and {r["verdict"] for r in found} == {"not timed"}


def test_floors_are_those_of_the_data_sheet():
    def row(flop, moved, dtype="bf16"):
        work = measure.TimedWork("k", "w", flop, moved, lambda: (lambda c, x: x + c, jnp.ones(()), jnp.ones(())), dtype=dtype)
        (reading,) = measure.try_work(work, measure.TINY)
        return kernels.make_row(reading, H200)

    assert H200
    r = row(989.4e12, 1.0)
    assert r["bound_s"] == pytest.approx(1.0) and r["of_bound"] == pytest.approx(1 / r["seconds_a_call"])
    assert row(1978.9e12, 1.0, "fp8")["bound_s"] == pytest.approx(1.0)
    assert row(1.0, 9.6e12)["bound_s"] == pytest.approx(2.0)
