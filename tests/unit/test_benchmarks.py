"""The scripts of benchmarks/: first_minutes.py, its schedule, configs and verdicts; peer_torch.py, its settings and figures."""

import itertools
import json
import shutil
import sys
import types
from pathlib import Path

import pytest
from bench_helpers import ANSWER, PEER, at_home  # noqa: F401

from benchmarks import first_minutes, gpu_items, peer_torch
from jaxtrain.config import hardware, schema
from jaxtrain.data import loading
from jaxtrain.models import flops
from jaxtrain.node import suite, train_step
from jaxtrain.step.validate import validate_step
from jaxtrain.train import step_log

NAMES = [item.name for item in first_minutes.ITEMS]
H100 = hardware.Devices("gpu", "NVIDIA H100 80GB HBM3", 1, 79.6, "described", 90)


@pytest.fixture
def node(tmp_path: Path) -> suite.Node:
    (tmp_path / "results" / "keep").mkdir(parents=True)
    return suite.Node(str(tmp_path / "results"), "", "first_minutes", True, str(tmp_path / "compiled"))


# ---- The schedule


def test_items_are_in_the_order_of_their_value():
    assert len(set(NAMES)) == len(NAMES) and {*gpu_items.CASES} < {*NAMES} and {*gpu_items.PEERS} < {*gpu_items.CASES}
    assert all(item.need_s <= item.most_s < 560 - first_minutes.MARGIN_S for item in first_minutes.ITEMS)
    order = ["compute", "attention of llama3", "losses as on a CPU", "packed, loop", "packed, unrolled"]
    assert sorted(order, key=NAMES.index) == order
    assert [item.name for item in first_minutes.ITEMS if item.gate] == ["compute"]
    first = sum(item.need_s for item in first_minutes.ITEMS[: NAMES.index("trace") + 1] if not item.least_gib)
    assert first < 560 - first_minutes.MARGIN_S, "a call of ten minutes can begin all items up to the trace"


def test_cases_can_be_run():
    """They differ, and half of Llama 3 8B is left out on an H100."""

    def valid(argv: list[str]) -> schema.RunConfig:
        loaded = loading.load_config(argv)
        assert not [str(p) for p in (*loaded.problems, *validate_step(loaded.run, H100))], argv
        return loaded.run

    runs = {case: valid(gpu_items.step_argv(case, False)) for case in gpu_items.CASES}
    assert not [a for a, b in itertools.combinations(runs, 2) if runs[a] == runs[b]]
    large = {case for case, run in runs.items() if run.model.num_layers == 16 and run.model.d_model == 4096}
    assert large == {item.name for item in first_minutes.ITEMS if item.least_gib > H100.memory_gib and item.name in runs}
    assert runs["one document, unrolled"].data.packing == "none" and not runs["one document, unrolled"].parallel.scan_layers
    parameters = flops.parameters(runs["mixtral"].model)["total"]
    assert 16 * parameters < 40e9, "weights, gradients and moments in float32: half of a card of 80 GB"
    valid([suite.TINY, *gpu_items.RESUMED])
    valid([*gpu_items.SHORT, *gpu_items.LEAN])
    assert peer_torch.refusal(runs[gpu_items.PEERS[1]]) == [] and peer_torch.check_settings(gpu_items.TORCH) == gpu_items.TORCH


def test_kernels_that_are_compared_exist():
    sys.path.insert(0, str(suite.GPU_TESTS))
    try:
        from test_gpu_attention import OF_PALLAS, SHAPES, SHARDED, SMALL, name_of
    finally:
        sys.path.remove(str(suite.GPU_TESTS))
    on_gpu = {f"cudnn-{name_of(s)}" for s in (*SHAPES, *SHARDED)} | {f"pallas-{name_of(s)}" for s in (*SHAPES, *OF_PALLAS)}
    assert {*gpu_items.FIRST_KERNELS, *gpu_items.MORE_KERNELS} <= on_gpu
    assert {*gpu_items.SMOKE_KERNELS} <= {f"chunked-{name_of(shape)}" for shape in SMALL}


# ---- Calls and machines


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "probe", lambda: H100)
    monkeypatch.setattr(first_minutes, "begin_background", lambda node, names: None)


def call(tmp_path: Path, *more: str) -> tuple[int, dict[str, str]]:
    """Run the command; return its exit code and item -> verdict in --out."""
    code = first_minutes.main([f"--out={tmp_path / 'out'}", f"--work={tmp_path / 'work'}", *more])
    file = tmp_path / "out" / "results.json"
    done = json.loads(file.read_text())["parts"] if file.exists() else {}
    return code, {name: found["verdict"] for name, found in done.items()}


def act(*verdicts: str):
    """Return an item's function that has these verdicts in turn, and then raises an error."""
    left = iter(verdicts)
    return lambda node, limit_s: suite.PartOutcome(next(left), "so")


def test_a_second_call_continues_and_repeats_no_finished_item(tmp_path, one_gpu, monkeypatch):
    items = (
        first_minutes.Item("a", act("ok"), 60.0),
        first_minutes.Item("b", act(), 60.0),  # it raises an error, at once, and not because its time ended
        first_minutes.Item("c", act("out of time", "ok"), 60.0),
        first_minutes.Item("d", act("ok"), 60.0, need_s=50.0),
        first_minutes.Item("e", act(), 60.0, least_gib=100.0),
    )
    monkeypatch.setattr(first_minutes, "ITEMS", items)
    first = call(tmp_path, "--seconds=52")
    assert first == (1, {"a": "ok", "b": "FAILED", "c": "out of time", "d": "left out"})
    (log,) = tmp_path.rglob("b_error.txt")
    assert "Traceback" in log.read_text()
    done = {"a": "ok", "b": "FAILED", "c": "ok", "d": "ok"}
    assert call(tmp_path, "--seconds=100") == (0, done)
    shutil.rmtree(tmp_path / "out")
    assert call(tmp_path, "--seconds=100")[1] == done, "sent again, as to a new folder"


def test_nothing_runs_behind_a_failed_gate_and_the_gate_is_tried_again(tmp_path, one_gpu, monkeypatch):
    items = (first_minutes.Item("gate", act("FAILED", "ok"), 60.0, gate=True), first_minutes.Item("a", act("ok"), 60.0))
    monkeypatch.setattr(first_minutes, "ITEMS", items)
    assert call(tmp_path) == (first_minutes.NO_COMPUTE, {"gate": "FAILED"})
    assert call(tmp_path) == (0, {"gate": "ok", "a": "ok"})


# ---- Verdicts


@pytest.mark.parametrize(
    ("cpu", "verdict"),
    [
        ({"steps": 19, "loss": {"first": 5.0, "last": 4.0}}, "ok"),
        ({"steps": 19, "loss": {"first": 5.0, "last": 4.04}}, "FAILED"),
        ({"steps": 19, "loss": {"first": 5.0, "last": 3.96}}, "FAILED"),
        ({"steps": 7, "loss": {"first": 5.0, "last": 4.0}}, "FAILED"),  # the last losses are of different steps
        ({"verdict": "out of time", "why": "late"}, "FAILED"),
    ],
)
def test_losses_are_compared_step_by_step(cpu, verdict, node, monkeypatch):
    here = {"verdict": "ok", "attention": "cudnn", "steps": 19, "loss": {"first": 5.0, "last": 4.0}}
    monkeypatch.setattr(gpu_items, "background", gpu_items.Background())
    gpu_items.background.begin("losses f32", lambda: here | cpu)
    monkeypatch.setattr(suite, "run_case", lambda *_, **__: here)
    assert gpu_items.compare_losses(node, 60.0).verdict == verdict


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "ok"),
        ({"product": 0.5}, "FAILED"),
        ({"functions": "JaxRuntimeError"}, "FAILED"),
        ({"attention": "JaxRuntimeError"}, "off"),
        ({"verdict": "failed", "why": "cuDNN", "attention": None}, "off"),
        ({"verdict": "refused", "why": "CUDA", **dict.fromkeys(("product", "functions", "pinned"))}, "FAILED"),
    ],
)
def test_wrong_numbers_close_the_gate_and_missing_libraries_do_not(change, verdict, node, monkeypatch):
    fine = {"verdict": "ok", "kind": "H200", "product": 1e-7, "functions": 1e-7, "pinned": 0.0, "attention": 1e-3}
    answer = {key: value for key, value in (fine | change).items() if value is not None}
    monkeypatch.setattr(gpu_items, "run_case", lambda *_, **__: answer)
    assert gpu_items.compute(node, 60.0).verdict == verdict


# ---- Against PyTorch


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        # Two mistakes are reported together: a missing interpreter, and a setting that transformers' Llama does not support.
        (["--config.model.qk_norm=true", "--python=nowhere/python"], ["--python = 'nowhere/python'", "model.qk_norm = True"]),
        (["--settings=layers,cudnn"], ["--settings = 'layers,cudnn'"]),
        (["--settings=sdpa,none,checkpoint;"], ["--settings = 'sdpa,none,checkpoint;'"]),
    ],
)
def test_a_peer_that_cannot_be(more, keys, capsys):
    assert peer_torch.main([*PEER, *more]) == 2
    said = capsys.readouterr().err
    assert all(f"{key}:" in said for key in keys)


def test_losses_are_compared_on_the_platform_that_is_asked_for(monkeypatch, tmp_path):
    """PyTorch trains the example of `export_small`. If there is no example, PyTorch does not start."""
    asked, losses = [], [5.0, 4.0]
    example = {"verdict": "ok", "spec": {"parameters": 1}, "losses": [5.0, 4.0]}
    monkeypatch.setattr(peer_torch, "run_peer", lambda *args: asked.append(args) or {"verdict": "ok", "losses": losses})
    found = peer_torch.compare_losses(example, "python", tmp_path / "log", 30.0, platform="cpu")
    assert found == {"verdict": "ok", "ours": losses, "theirs": losses, "off": 0.0, "allowed": peer_torch.SAME}
    late = {"verdict": "out of time", "why": "not done"}
    assert peer_torch.compare_losses(late, "python") == late
    ((python, spec, *rest),) = asked
    assert (python, rest, spec["platform"], spec["parameters"]) == ("python", [tmp_path / "log", 30.0], "cpu", 1)
    assert spec["settings"] == [{"attention": "sdpa", "compile": "none", "checkpoint": False}]
    losses[1] = 4.01  # other work is not compared
    found = peer_torch.compare_losses(example, "python")
    assert found["verdict"] == "failed" and found["off"] == pytest.approx(0.0025)


SLOW, FAST = ({"attention": "sdpa", "compile": c, "checkpoint": False} for c in ("none", "layers"))


@pytest.mark.parametrize(
    ("more", "limits", "given"),
    [
        (["--limit=50", "--tune=7"], [50, 30, 10, 57, 50], []),
        (["--limit=25"], [25, 5, 1, 125, 25], []),
        (["--limit=50", "--tune=7", "--settings=sdpa,none;sdpa,layers"], [50, 30, 10, 50, 50], [SLOW, FAST]),
    ],
)
def test_limits_of_the_comparison_and_of_a_search(more, limits, given, tmp_path, monkeypatch):
    """The comparison and both exports share --limit; each takes 20 s here. A search adds --tune to its measurement's limit."""
    seconds, asked, seen = [0.0], [], []

    def run_case(function, request, log=None, limit_s=None, **_):
        if function == train_step.CASE:
            return dict(ANSWER)
        seconds[0] += 20
        seen.append(limit_s)
        if function == peer_torch.EXPORT:
            return {"verdict": "ok", "spec": {}, "losses": [5.0] * 3}
        asked.append((request["settings"], request["tune_s"]))
        answer = {"verdict": "ok", "torch": "2", "transformers": "5", "device": "cpu", "settings": FAST, "tried": []}
        return answer | {"step_times": [0.5] * 2, "losses": [5.0] * 3, "reserved_gib": None}

    monkeypatch.setattr(peer_torch, "run_case", run_case)
    monkeypatch.setattr(peer_torch, "interpreter", lambda *_: [])
    monkeypatch.setattr(peer_torch, "time", types.SimpleNamespace(monotonic=lambda: seconds[0]))
    assert peer_torch.main([*PEER, *more, f"--json={tmp_path}/peer.json"]) == 0
    assert seen == limits
    tune_s = 7.0 if "--tune=7" in more else 100.0
    assert asked[1:] == [(given, tune_s), ([FAST], tune_s)]  # the first is the comparison of losses
    tree = json.loads((tmp_path / "peer.json").read_text())
    assert tree["given"] == given and tree["turns"][3]["settings"] == FAST
    assert [turn["who"] for turn in tree["turns"]] == ["jaxtrain", "torch"] * 2
    assert tree["turns"][1]["tokens_per_s"] == 4 * 32 / 0.5 and tree["compared"]["ratio"] == 10.0 / (4 * 32 / 0.5)


def test_the_ratio_of_speeds():
    speeds = (("jaxtrain", 10.0), ("torch", 4.0), ("jaxtrain", 12.0), ("torch", 6.0), ("jaxtrain", 30.0))
    turns = [{"who": who, "verdict": "ok", "tokens_per_s": speed} for who, speed in speeds]
    assert peer_torch.compare_speeds(turns) == {"ratio": 12.0 / 5.0, "least": 2.0, "most": 2.5, "rounds": 2}
    assert peer_torch.compare_speeds(turns[:1]) is None


@pytest.mark.parametrize(("precision", "device"), [("f32", "cpu"), ("bf16", "NVIDIA H200")])
def test_the_peers_answer_in_our_terms(precision, device):
    """A step of 128 tokens takes half a second. The MFU is relative to the bfloat16 peak, as in jaxtrain's own results."""
    argv = [*(argv for argv in PEER if argv.startswith("--config")), f"--config.precision={precision}"]
    run = loading.load_config(argv).run
    answer = {"verdict": "ok", "device": device, "step_times": [0.5, 0.5], "losses": [5.0, 4.5, 4.0], "reserved_gib": 2.0}
    found = peer_torch.as_our_answer(answer | {"settings": {"checkpoint": False}}, run)
    assert found["tokens_per_s"] == found["tokens_per_s_per_device"] == 4 * 32 / 0.5
    assert (found["steps"], found["warmup"], found["loss"]) == (2, 1, {"first": 5.0, "last": 4.0})
    assert found["memory"]["peak_gib"] == 2.0 and found["hfu"] == found["mfu_causal"]
    assert found["peak_tflops"] == step_log.peak_tflops(run, device)
    assert device == "cpu" or found["peak_tflops"] == pytest.approx(989.4, rel=1e-3)
