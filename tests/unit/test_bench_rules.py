"""Benchmarks without running a case: options, sweeps, the handling of results, and their comparison with plans."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from bench_helpers import ANSWER, SMALL, at_home  # noqa: F401

from jaxtrain import hardware, launch
from jaxtrain.bench import __main__ as command
from jaxtrain.bench import child, kernel_workloads, kernels, node_suite, parts, report, train_step
from jaxtrain.bench.train_step import DATA
from jaxtrain.plan import rates
from jaxtrain.preflight import measure, multi_node
from jaxtrain.validate import validate_step


def ask(**more):
    argv = [*SMALL, *DATA["synthetic"], "--config.log.peak_tflops=1"]
    return {"argv": argv, "devices": 2, "warmup": 2, "steps": 4, "limit_s": None} | more


def test_fp8_and_bf16_share_one_peak():
    """MFU of a step with FP8 is relative to the bfloat16 peak FLOP/s, as in the log of a run and in plans."""
    runs = {p: launch.load([*SMALL, f"--config.precision={p}"]).run for p in ("bf16", "fp8", "f32")}
    peaks = {p: train_step.peak_tflops(run, "NVIDIA H200") for p, run in runs.items()}
    assert peaks["fp8"] == peaks["bf16"] == pytest.approx(989.4, rel=1e-3) and peaks["f32"] == pytest.approx(66.9, rel=0.1)


def test_what_cannot_hold_its_state_is_not_compiled(monkeypatch):
    monkeypatch.setattr(hardware, "probe", lambda: hardware.Devices("gpu", "NVIDIA H200", 1, 140.0, "described", 90))
    monkeypatch.delenv("XLA_FLAGS")  # the suite's fake devices are in the environment, which a run on a GPU would refuse
    argv = ["--config=configs/llama3_70b.py:gpus=1", *DATA["synthetic"]]
    r = train_step.measure(ask(argv=argv, devices=1))
    assert r["verdict"] == "out of memory" and "alone take 525.7 GiB per device, which has 140.0" in r["why"]
    run = launch.load([*argv, "--config.dtypes.m=int8", "--config.dtypes.v=int8"]).run
    assert train_step.state_gib(run, 8) == pytest.approx(525.7 * 6 / 8 / 8, rel=1e-3)


def test_a_config_that_cannot_be():
    r = train_step.measure(ask(argv=[*SMALL, *DATA["synthetic"], "--config.mesh.tensor=3"]))
    assert r["verdict"] == "refused" and "tensor=3 x seq=1" in r["why"] and "product of the fixed sizes is 3" in r["why"]


# ---- A case, in its own process


@pytest.mark.parametrize(
    ("kept", "code", "verdict", "why"),
    [
        ({"verdict": "ok", "rows": [1]}, 0, "ok", ""),
        ({"verdict": "ok", "rows": [1]}, None, "ok", ""),  # the process ends after its last output
        ({"verdict": "refused", "why": "so it is"}, 0, "refused", "so it is"),
        ({"verdict": "out of time", "rows": [1]}, None, "out of time", "not done after 3 s"),
        ({"verdict": "out of time", "rows": [1]}, 0, "failed", "exit code 0: a | b | no such luck"),
        (None, None, "out of time", "not done after 3 s"),
        (None, -9, "failed", "exit code -9: a | b | no such luck"),
    ],
)
def test_a_case_that_is_ended_keeps_what_it_had_found(kept, code, verdict, why, monkeypatch):
    def run(argv, log, *, environ, limit_s, killed_s):
        asked, answered = map(Path, argv[-2:])
        assert argv[-3] == "a:b" and limit_s == 3.0 and json.loads(asked.read_text())["kind"] == "gemm"
        if kept:
            child.save_partial(json.loads(asked.read_text()), kept)
            assert json.loads(answered.read_text()) == kept
        return code, "long before\na\nb\nno such luck\n"

    monkeypatch.setattr(child, "run_program", run)
    found = child.run_case("a:b", {"kind": "gemm"}, limit_s=3.0)
    assert (found["verdict"], found.get("why", "")) == (verdict, why)
    assert found.get("rows") == (kept or {}).get("rows") and found["seconds"] >= 0


def test_a_killed_child_in_a_hung_driver_is_not_waited_for_longer_than_asked(monkeypatch):
    waits = []

    class Hung:
        pid = 1

        def wait(self, timeout):
            waits.append(timeout)
            raise subprocess.TimeoutExpired("hung", timeout)

    monkeypatch.setattr(child.subprocess, "Popen", lambda *_, **__: Hung())
    monkeypatch.setattr(child.os, "killpg", lambda *_: None)
    assert child.run_case("a:b", {}, limit_s=20.0, killed_s=3.0)["verdict"] == child.LATE
    assert waits == [20.0, 3.0]


def test_preflight_waits_less_for_a_killed_child_than_it_keeps_for_its_last_messages(monkeypatch):
    asked = []
    monkeypatch.setattr(child, "run_case", lambda kind, ask, **how: asked.append(how) or {"verdict": child.OK})
    measure.measure({}, 20.0, on_cpu=True)
    assert asked[0]["killed_s"] <= multi_node.RESERVE_S / 2


def test_the_spread_of_times():
    assert train_step.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "min": 1.0, "max": 5.0}
    assert set(train_step.spread([2.0]).values()) == {2.0}


# ---- Sweeps


def test_a_sweep_says_what_became_of_each_case(monkeypatch, capsys, tmp_path):
    answers = iter([ANSWER, ANSWER | {"tokens_per_s": 20.0}, {"verdict": "out of memory", "why": "90 GiB"}])
    asked = []
    monkeypatch.setattr(train_step, "run_case", lambda kind, ask, log: asked.append(ask["argv"]) or dict(next(answers)))
    file = tmp_path / "sweep.json"
    assert command.main([*SMALL, "--sweep=remat.policy=full,dots,none; mesh.tensor=1,3", f"--json={file}"]) == 0
    printed = capsys.readouterr().out
    assert len(asked) == 3, "those that cannot be are not started"
    assert "out of memory: 90 GiB" in printed and "mesh.tensor=3: refused: mesh = " in printed
    assert "best: remat.policy=dots mesh.tensor=1, 20 tokens/s" in printed
    tree = json.loads(file.read_text())
    assert [c["verdict"] for c in tree["cases"]] == ["ok", "refused", "ok", "refused", "out of memory", "refused"]
    assert tree["best"] == "remat.policy=dots mesh.tensor=1" and asked[1][-2:] == [
        "--config.remat.policy=dots",
        "--config.mesh.tensor=1",
    ]


def test_a_sweep_of_which_nothing_can_be_measured(monkeypatch, capsys):
    monkeypatch.setattr(train_step, "run_case", lambda kind, ask, log: {"verdict": "failed", "why": "so it is"})
    assert command.main([*SMALL, "--sweep=remat.policy=full,none"]) == 1
    assert "no case was measured" in capsys.readouterr().out


def test_an_interrupted_sweep_keeps_what_is_done(monkeypatch, capsys, tmp_path):
    def run_case(kind, ask, log):
        if "--config.remat.policy=none" in ask["argv"]:
            raise KeyboardInterrupt
        return dict(ANSWER)

    monkeypatch.setattr(train_step, "run_case", run_case)
    out = tmp_path / "out"
    assert command.main([*SMALL, "--sweep=remat.policy=full,none", f"--out={out}"]) == 130
    said = capsys.readouterr()
    assert "best: remat.policy=full" in said.out and "interrupted" in said.err
    assert [c["name"] for c in json.loads((out / "results.json").read_text())["cases"]] == ["remat.policy=full"]
    assert json.loads((out / "receipt.json").read_text())["exit_code"] == 130


def test_values_of_a_sweep_may_hold_commas():
    found, wrong = train_step.combinations("remat.tensors=q=keep,k=keep;mesh.fsdp=4,8")
    assert not wrong and found == [("remat.tensors=q=keep,k=keep", f"mesh.fsdp={n}") for n in (4, 8)]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--steps=0"], "--steps = '0': must be a whole number, 1 or more"),
        (["--data=fake"], "--data = 'fake': must be one of synthetic, real"),
        (["--sweep=remat.policy"], "is no key with its values. Write key=value,value"),
        (["--sweep=mesh.fsdp=1;mesh.fsdp=2"], "--sweep = 'mesh.fsdp': given twice"),
        (["--sweep=nun.layers=1,2"], "nun.layers = '1': no such key"),
        (["--config.mesh.tensor=3"], "tensor=3 x seq=1': the product of the fixed sizes is 3"),
        (["--kernels=attention,rope"], "'rope' is not one of attention, loss"),
        (["--kernels"], "--config: --kernels does not use it"),
        (["--suite=world"], "--suite = 'world': must be one of node"),
        (["--parts=run"], "--parts: this action does not use it"),
        (["--json=nowhere/bench.json"], "there is no folder"),
        (["--step=3"], "--step: no such option. Did you mean --steps?"),
    ],
)
def test_mistakes_are_named(argv, said, capsys):
    assert command.main([*SMALL, *argv]) == 2
    assert said in capsys.readouterr().err


def test_help_names_every_part_and_kind(capsys):
    assert command.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert not [name for name in (*node_suite.PARTS, *kernels.KINDS) if name not in text]


# ---- Kernels


def test_a_kernel_that_fails_is_a_row(capsys, monkeypatch, tmp_path):
    def broken():
        raise ValueError("no such luck\nand much more")

    row = kernels.time_one(kernel_workloads.Work("k", "w", 1.0, 1.0, broken), kernel_workloads.TINY, None)
    assert (row["verdict"], row["why"]) == ("failed", "ValueError: no such luck")
    monkeypatch.setattr(kernels, "run_case", lambda kind, ask, log: {"verdict": "ok", "rows": [row], "seconds": 1.0})
    out = tmp_path / "kernels"
    assert command.main(["--kernels=norm", f"--out={out}"]) == 1
    assert json.loads((out / "receipt.json").read_text())["reason"] == "a kernel failed"
    assert "no such luck" in capsys.readouterr().out


def test_loads_of_experts():
    assert kernel_workloads.loads("even", 14, 4) == [4, 4, 3, 3]
    assert kernel_workloads.loads("uneven", 14, 4) == [7, 4, 3, 0]


def test_kinds_of_kernels_are_those_of_the_command():
    assert tuple(kernel_workloads.WORKLOADS) == kernels.KINDS


# ---- The suite of a node


@pytest.mark.parametrize(
    ("lines", "code", "want", "said"),
    [
        ([("a", "passed", ""), ("b", "skipped", "no cuDNN")], 0, "ok", "1 tests passed"),
        ([("a", "passed", ""), ("b", "skipped", "no time was left")], 0, "off", "1 tests passed; for 1 there was no time"),
        ([("a", "passed", ""), ("b", "failed", "o: 3.0")], 1, "FAILED", "1 of 2 tests failed, first b: o: 3.0"),
        ([("a", "passed", "")], None, "FAILED", "1 tests passed; not done in time"),
        ([("a", "skipped", "no cuDNN")], 0, "FAILED", "0 tests passed"),
        ([], 2, "FAILED", "0 tests passed; exit code 2: no such module"),
    ],
)
def test_verdicts_of_kernel_tests(lines, code, want, said, tmp_path, monkeypatch):
    """The verdict follows from the results of tests/gpu, whose process is faked here."""

    def run_program(command, log, *, environ, limit_s):
        assert command[:3] == [sys.executable, "-m", "pytest"] and environ["JAXTRAIN_TEST_SECONDS"] == "48.0"
        with open(environ["JAXTRAIN_TEST_RESULTS"], "a") as file:
            file.writelines(json.dumps(dict(zip(("test", "outcome", "why"), line, strict=True))) + "\n" for line in lines)
        return code, "no such module"

    monkeypatch.setattr(parts, "run_program", run_program)
    node = parts.Node(train_step.devices_for(0), True, report.Folder(str(tmp_path / "node"), "", "suite"))
    (tmp_path / "node" / "logs").mkdir()
    found = node_suite.run_gpu_tests(node, 60.0)
    assert found.verdict == want and found.found == said


@pytest.mark.parametrize(
    ("verdicts", "want", "said"),
    [
        (("ok", "out of memory", "ok", "out of memory"), "ok", "tokens/s a device"),
        (("ok", "ok", "ok", "out of time"), "off", "llama3_70b:gpus=8: so it is"),
        (("ok", "failed", "ok", "ok"), "FAILED", "llama2_7b:gpus=8: so it is"),
        (("out of memory",) * 4, "FAILED", "no shipped config was measured"),
    ],
)
def test_what_shipped_configs_come_to(verdicts, want, said, tmp_path, monkeypatch):
    """The verdict is "ok" if some configs run out of memory, "off" if one runs out of time, and "FAILED" if one fails.

    Each config gets its share of the remaining time.
    """
    answers, shares = iter(verdicts), []

    def run_case(kind, ask, *, log, environ, limit_s):
        shares.append(limit_s)
        loaded = launch.load(ask["argv"])
        assert not [*loaded.problems, *validate_step(loaded.run, node.devices)]
        return ANSWER | {"verdict": next(answers), "why": "so it is"}

    monkeypatch.setattr(node_suite, "run_case", run_case)
    monkeypatch.setattr(node_suite, "time", types.SimpleNamespace(monotonic=lambda: 0.0))
    devices = hardware.Devices("gpu", "NVIDIA H200", 8, 140.0, "described", 90)
    node = parts.Node(devices, False, report.Folder(str(tmp_path / "node"), "", "suite"))
    found = node_suite.time_configs(node, 100.0)
    assert found.verdict == want and said in found.found
    assert [round(s) for s in shares] == [25, 33, 50, 100]


def test_the_budget_of_a_suite():
    assert sum(seconds for _, seconds in node_suite.PARTS.values()) <= node_suite.BUDGET_S == 1800


def test_layouts_for_fewer_gpus():
    for count, text in node_suite.LAYOUTS.items():
        found, problems = node_suite.layouts.parse(text)
        assert not problems and max(layout.devices for layout in found) == count and found[0].name == "one"
    assert len(node_suite.LAYOUTS[8].split(",")) == 8


def test_a_step_that_differs_from_its_plan():
    planned = {"step_s": 1.0, "peak_gib": 51.0, "rates": "calibrated"}
    r = {"step_s": {"median": 1.2}, "memory": {"peak_gib": 50.0}, "planned": planned}
    assert node_suite.differences_from_plan("a", r) == ["a: step time 1.20 times the plan"]
    published = planned | {"rates": rates.PUBLISHED}
    assert node_suite.differences_from_plan("a", r | {"planned": published}) == [], (
        "longer than a roofline without a comparable run"
    )
    assert node_suite.differences_from_plan("a", r | {"planned": published | {"range_s": [1.1, 1.3]}}) == []
    (text,) = node_suite.differences_from_plan("a", r | {"planned": published | {"range_s": [1.05, 1.15], "peak_gib": 50.0}})
    assert text == "a: step time 1.20 times the plan (1.05 to 1.15 s are expected)"
    for peak, times in ((40.0, "1.25"), (80.0, "0.62")):
        assert f"a: peak memory {times} times the plan" in node_suite.differences_from_plan(
            "a", r | {"planned": planned | {"peak_gib": peak}}
        )
    assert node_suite.differences_from_plan("a", r | {"planned": None}) == []
    assert report.beside_plan(1.2, 1.0) == "1.2 (1.20 x plan)" and report.beside_plan(1.2, None) == "1.2"
