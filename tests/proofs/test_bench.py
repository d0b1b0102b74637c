"""`python -m jaxtrain.bench`: what is measured and how, what becomes of what fails, and sweeps.

Cases are made in this process where a process of their own is not what is tested. On a CPU nothing is measured of note: what
is checked is that figures follow from the times, that all of it runs, and what is said.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import pytest
from bench_helpers import ANSWER, SMALL, at_home  # noqa: F401

from jaxtrain import compiler, flops, hardware, launch
from jaxtrain.bench import __main__ as command
from jaxtrain.bench import case, kernels, measure, peer, report, suite, sweep
from jaxtrain.bench.measure import DATA

# ---- train steps


def ask(**more):
    argv = [*SMALL, *DATA["synthetic"], "--config.log.peak_tflops=1"]
    return {"argv": argv, "devices": 2, "warmup": 2, "steps": 4, "limit_s": None} | more


@pytest.fixture(scope="module")
def compiled():
    """(what `ask()` gave, its compiled step)."""
    made = []
    right = compiler.compile_train
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(launch.REPO)
        patch.setattr(measure, "set_compile_cache", lambda run: None)  # it would stay with the tests that follow
        patch.setattr(compiler, "compile_train", lambda *args: made.append(right(*args)) or made[0])
        return measure.steps(ask()), made[0]


def test_figures_follow_from_the_times(compiled):
    r, _ = compiled
    run = launch.load(ask()["argv"]).run
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


def test_a_case_stops_at_its_limit(compiled, monkeypatch):
    monkeypatch.setattr(compiler, "compile_train", lambda *_: compiled[1])
    r = measure.steps(ask(limit_s=1e-9, steps=50))
    assert r["verdict"] == "ok" and r["steps"] == measure.LEAST


def test_what_fails_after_the_timing_takes_nothing_from_it(compiled, monkeypatch, tmp_path):
    """A plan and a trace that raise whatever; what was measured by then is the answer."""
    from jaxtrain import profiling

    def broken(*_, **__):
        raise RuntimeError("no such luck\nand much more")

    kept = []
    monkeypatch.setattr(compiler, "compile_train", lambda *_: compiled[1])
    monkeypatch.setattr(profiling, "Tracer", broken)
    monkeypatch.setattr(measure, "_planned", lambda *_: kept.append("planned") or {"planned": None, "not_planned": "so it is"})
    monkeypatch.setattr(measure, "keep", lambda ask, out: kept.append(dict(out)))
    r = measure.steps(ask(trace=str(tmp_path / "trace")))
    assert r["verdict"] == "ok" and r["trace"] == "failed: RuntimeError: no such luck" and r["not_planned"] == "so it is"
    assert kept[0]["verdict"] == "ok" and kept[0]["step_s"] == r["step_s"] and kept[1] == "planned"
    rows = dict(map(tuple, report.step_details("a", r)))
    assert rows["trace"].startswith("failed: RuntimeError")


def test_fp8_and_bf16_share_one_peak():
    """As in the log of a run and in plans: a step with FP8 has no peak of its own."""
    card = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    runs = {p: launch.load([*SMALL, f"--config.precision={p}"]).run for p in ("bf16", "fp8", "f32")}
    peaks = {p: measure.peak_tflops(run, card) for p, run in runs.items()}
    assert peaks["fp8"] == peaks["bf16"] == pytest.approx(989.4, rel=1e-3) and peaks["f32"] < 100
    answer = {"verdict": "ok", "device": "NVIDIA H200", "seconds": [1.0], "losses": [1.0, 1.0], "reserved_gib": 1.0}
    theirs = peer._as_ours(answer | {"settings": {"checkpoint": False}}, runs["fp8"])
    assert theirs["peak_tflops"] == peaks["bf16"]


def test_what_cannot_hold_its_state_is_not_compiled(monkeypatch):
    monkeypatch.setattr(hardware, "probe", lambda: hardware.Devices("gpu", "NVIDIA H200", 1, 140.0, "described", 90))
    monkeypatch.delenv("XLA_FLAGS")  # the suite's fake devices, which a GPU's environment has no place for
    argv = ["--config=configs/llama3_70b.py:gpus=1", *DATA["synthetic"]]
    r = measure.steps(ask(argv=argv, devices=1))
    assert r["verdict"] == "out of memory" and "alone take 525.7 GiB a device, which has 140.0" in r["why"]
    run = launch.load([*argv, "--config.dtypes.m=int8", "--config.dtypes.v=int8"]).run
    assert measure.state_gib(run, 8) == pytest.approx(525.7 * 6 / 8 / 8, rel=1e-3)


def test_results_say_what_auto_keeps(monkeypatch):
    r = measure.steps(ask(argv=[*ask()["argv"], "--config.remat.policy=auto"], limit_s=1e-9))
    assert r["remat"] == "auto" and r["remat_auto"].startswith("remat.policy=auto keeps ")
    assert ["kept", r["remat_auto"]] in report.step_details("a", r)


def test_memory_that_does_not_suffice(compiled, monkeypatch):
    """Found out by the allocator while it runs; what was known by then is kept."""

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory trying to allocate 1 TiB.\nand much more")

    monkeypatch.setattr(compiler, "compile_train", lambda *_: full)
    r = measure.steps(ask())
    assert r["verdict"] == "out of memory" and r["why"].endswith("allocate 1 TiB.") and r["attention"] == "reference"


def test_a_config_that_cannot_be():
    r = measure.steps(ask(argv=[*SMALL, *DATA["synthetic"], "--config.mesh.tensor=3"]))
    assert r["verdict"] == "refused" and "mesh.tensor" in r["why"]


# ---- a process of its own


def test_as_a_user_runs_it(tmp_path):
    out, file, compiled = tmp_path / "out", tmp_path / "bench.json", tmp_path / "compiled"
    argv = [*SMALL, "--steps=2", "--warmup=1", f"--out={out}", f"--json={file}", f"--config.paths.cache={compiled}"]
    done = subprocess.run([sys.executable, "-m", "jaxtrain.bench", *argv], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert [*compiled.glob("jit_train_step-*")], "a case keeps its programs as a run does"
    assert "median of 2 after 1 to warm up" in done.stdout and report.NO_MEASUREMENT in done.stdout
    tree = json.loads(file.read_text())
    assert tree == json.loads((out / "results.json").read_text())
    assert tree["format"] == 1 and tree["kind"] == "steps" and tree["best"] == "tiny"
    assert {"date", "device", "count", "python", "packages", "git", "command"} <= tree["about"].keys()
    # The contract that other programs read.
    wanted = {"name", "argv", "verdict", "mesh", "attention", "precision", "seq_len", "global_batch", "grad_accum", "remat"}
    wanted |= {"parameters", "compile_s", "compiler_options", "step_s", "steps", "warmup", "data_wait_s", "tokens_per_s"}
    wanted |= {"tokens_per_s_per_device", "tflops_per_device", "peak_tflops", "mfu_causal", "mfu_full", "hfu", "memory"}
    wanted |= {"planned", "not_planned", "loss", "seconds", "config_sha256", "devices"}
    assert wanted <= tree["cases"][0].keys()
    assert tree["cases"][0]["devices"]["count"] == 8, "all of them"
    receipt = json.loads((out / "receipt.json").read_text())
    assert receipt["exit_code"] == 0 and receipt["bench"] == "steps" and receipt["devices"]["platform"] == "cpu"
    page = (out / "results.md").read_text()
    assert page.startswith("# Step time") and "| tiny |" in page and (out / "logs" / "tiny.txt").exists()


SLEEPER = """
import subprocess, sys, pathlib, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""
LEAF = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""
# As benchmarks/first_hour.py, which runs a command that runs its own cases.
NESTED = """
import sys, pathlib
from jaxtrain.bench.case import run
run([sys.executable, "-c", sys.argv[1], sys.argv[2]], pathlib.Path(sys.argv[2] + ".log"))
"""


def alive(pid: int) -> bool:
    """Whether a process is there and no mere zombie."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    return any(not alive(pid) or time.sleep(0.05) for _ in range(100))


def test_what_a_child_started_ends_with_it(tmp_path):
    file = tmp_path / "pid"
    code, _ = case.run([sys.executable, "-c", SLEEPER, str(file)], tmp_path / "log.txt", limit_s=2.0)
    assert code is None and gone(int(file.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a child of its parent's end")
def test_children_end_with_a_parent_that_is_ended(tmp_path):
    """However it ends: SIGTERM gives it no time to see to them."""
    file = tmp_path / "pid"
    environ = {**os.environ, "PYTHONPATH": str(launch.REPO)}
    parent = subprocess.Popen([sys.executable, "-c", NESTED, LEAF, str(file)], env=environ)
    try:
        assert any(file.exists() and file.read_text() or time.sleep(0.05) for _ in range(400))
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(timeout=10) == -signal.SIGTERM and gone(int(file.read_text()))
    finally:
        parent.kill()
        parent.wait()


KEEPER = """
import json, pathlib, sys, time
from jaxtrain.bench.case import keep
ask = json.loads(pathlib.Path(sys.argv[2]).read_text())
keep(ask, {"verdict": ask["verdict"], "rows": [1, 2]})
time.sleep(ask["sleep"])
"""


def test_a_case_that_is_ended_keeps_what_it_had_found(tmp_path, monkeypatch):
    monkeypatch.setattr(case, "program", lambda name, *args: [sys.executable, "-c", KEEPER, *args])
    late = case.apart("kernels", {"verdict": "out of time", "sleep": 60}, limit_s=3.0)
    assert late["rows"] == [1, 2] and late["verdict"] == "out of time" and late["why"] == "not done after 3 s"
    died = case.apart("kernels", {"verdict": "out of time", "sleep": 0})
    assert died["rows"] == [1, 2] and died["verdict"] == "failed" and died["why"].startswith("exit code 0")
    assert case.apart("steps", {"verdict": "ok", "sleep": 60}, limit_s=3.0)["verdict"] == "ok"


def test_a_process_that_dies_or_takes_too_long(tmp_path):
    r = case.apart("nothing", {}, log=tmp_path / "log.txt")
    assert r["verdict"] == "failed" and "KeyError: 'nothing'" in r["why"] and "Traceback" in (tmp_path / "log.txt").read_text()
    r = case.apart("steps", {}, limit_s=0.01)
    assert r["verdict"] == "out of time" and r["why"] == "not done after 0 s"


# ---- sweeps


def test_a_sweep_says_what_became_of_each_case(monkeypatch, capsys, tmp_path):
    answers = iter([ANSWER, ANSWER | {"tokens_per_s": 20.0}, {"verdict": "out of memory", "why": "90 GiB"}])
    asked = []
    monkeypatch.setattr(sweep, "apart", lambda kind, ask, log: asked.append(ask["argv"]) or dict(next(answers)))
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
    monkeypatch.setattr(sweep, "apart", lambda kind, ask, log: {"verdict": "failed", "why": "so it is"})
    assert command.main([*SMALL, "--sweep=remat.policy=full,none"]) == 1
    assert "no case was measured" in capsys.readouterr().out


def test_an_interrupted_sweep_keeps_what_is_done(monkeypatch, capsys, tmp_path):
    def apart(kind, ask, log):
        if "--config.remat.policy=none" in ask["argv"]:
            raise KeyboardInterrupt
        return dict(ANSWER)

    monkeypatch.setattr(sweep, "apart", apart)
    out = tmp_path / "out"
    assert command.main([*SMALL, "--sweep=remat.policy=full,none", f"--out={out}"]) == 130
    said = capsys.readouterr()
    assert "best: remat.policy=full" in said.out and "what was done is kept" in said.err
    assert [c["name"] for c in json.loads((out / "results.json").read_text())["cases"]] == ["remat.policy=full"]
    assert json.loads((out / "receipt.json").read_text())["exit_code"] == 130


def test_values_of_a_sweep_may_hold_commas():
    found, wrong = sweep.combinations("remat.tensors=q=keep,k=keep;mesh.fsdp=4,8")
    assert not wrong and found == [("remat.tensors=q=keep,k=keep", f"mesh.fsdp={n}") for n in (4, 8)]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--steps=0"], "--steps = '0': must be a whole number, 1 or more"),
        (["--data=fake"], "--data = 'fake': no such data. Write synthetic or real"),
        (["--sweep=remat.policy"], "is no key with its values. Write key=value,value"),
        (["--sweep=mesh.fsdp=1;mesh.fsdp=2"], "--sweep = 'mesh.fsdp': given twice"),
        (["--sweep=nun.layers=1,2"], "nun.layers = '1': no such key"),
        (["--config.mesh.tensor=3"], "mesh.tensor = 3"),
        (["--kernels=attention,rope"], "--kernels = 'rope': no such part. Write some of attention,"),
        (["--kernels"], "--config: --kernels has no use for it"),
        (["--suite=world"], "--suite = 'world': no such suite"),
        (["--peer=mesh"], "--peer = 'mesh': no such peer"),
        (["--rounds=3"], "--rounds: the timing of steps has no use for it"),
        (["--json=nowhere/bench.json"], "there is no folder"),
        (["--step=3"], "--step: no such option. Did you mean --steps?"),
    ],
)
def test_mistakes_are_named(argv, said, capsys):
    assert command.main([*SMALL, *argv]) == 2
    assert said in capsys.readouterr().err


def test_help_names_every_option(capsys):
    assert command.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert not [name for name in (*command.OPTIONS, *command.SWITCHES) if f"--{name}" not in text]
    assert not [name for name in (*suite.PARTS, *kernels.KINDS) if name not in text]
