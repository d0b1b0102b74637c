"""The node suite in tiny form, benchmarks as a user runs them, and those against PyTorch, in processes."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_helpers import PEER, SMALL, at_home, run_here  # noqa: F401

from benchmarks import peer_torch
from jaxtrain import main
from jaxtrain.commands import bench as command
from jaxtrain.commands.command import read_line
from jaxtrain.commands.parity import main as parity_main
from jaxtrain.config import launch
from jaxtrain.node import suite, train_step
from jaxtrain.node.train_step import DATA
from jaxtrain.report import bench
from jaxtrain.train import child


def program_here(command, log, *, environ=None, limit_s=None):
    """Run parity in this process. Return fixed results for preflight, kernel tests and training, which other tests cover."""
    if command[3] in ("preflight", "checkpoint"):
        return 0, "a warning\n12 checks"
    if command[2] == "pytest":
        log.parent.mkdir(exist_ok=True)
        Path(environ["JAXTRAIN_TEST_RESULTS"]).write_text('{"test": "a", "outcome": "passed", "why": "", "ratio": 0.5}\n')
        return 0, "1 passed"
    if command[3] == "main":
        assert not read_line(main.parser(), command[4:]).problems
        (workdir,) = [Path(arg.partition("=")[2]) for arg in command if arg.startswith("--workdir=")]
        workdir.mkdir(exist_ok=True)
        (workdir / "metrics.jsonl").write_text('{"kind": "train", "loss": 3.0}\n{"kind": "eval", "loss": 2.5}\n')
        receipt = {"restore": {"digests": "matched", "seconds": 0.1}, "goodput": {"parts_s": {"save": 0.2}}}
        (workdir / "receipt.json").write_text(json.dumps(receipt))
        return 0, "trained"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = parity_main(command[4:])
    return code, said.getvalue()


# ---- The suite


def test_a_suite_in_tiny_form(tmp_path, monkeypatch):
    """All parts except rates succeed on 8 CPU devices in this process. `program_here` fixes the results of preflight, kernel
    tests and training.
    """
    monkeypatch.setattr(suite, "run_case", run_here)
    monkeypatch.setattr(suite, "run_program", program_here)
    monkeypatch.setattr(suite, "SMOKE_LAYOUTS", "one,fsdp2")
    out = tmp_path / "node"
    assert command.main(["--suite=node", f"--out={out}"]) == 0
    found = json.loads((out / "results.json").read_text())["parts"]
    verdicts = {name: part["verdict"] for name, part in found.items()}
    assert verdicts == dict.fromkeys([part.name for part in suite.PARTS], "ok") | {"rates": "left out"}
    assert found["parity"]["data"]["f32"]["agrees"] and found["configs"]["data"]["tiny"]["devices"]["count"] == 8
    assert found["run"]["data"]["loss"] == 2.5 and found["checkpoint"]["data"]["waited_s"] == 0.2
    assert {"results.md", "results.json", "receipt.json", "suite_run"} <= {p.name for p in out.iterdir()}
    assert out.with_suffix(".tar.gz").exists()


# ---- A process of its own


def test_as_a_user_runs_it(tmp_path):
    out, file, compiled = tmp_path / "out", tmp_path / "bench.json", tmp_path / "compiled"
    argv = [*SMALL, "--steps=2", "--warmup=1", f"--out={out}", f"--json={file}", f"--config.paths.cache={compiled}"]
    done = subprocess.run([sys.executable, "-m", "jaxtrain", "bench", *argv], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert not compiled.exists(), "programs for several CPU devices are not kept"
    assert bench.NO_MEASUREMENT in done.stdout
    tree = json.loads(file.read_text())
    assert tree == json.loads((out / "results.json").read_text())
    assert tree["format"] == 2 and tree["kind"] == "steps" and tree["best"] == "tiny"
    assert {"date", "device", "count", "python", "packages", "git", "command"} <= tree["about"].keys()
    # Other programs depend on this form.
    wanted = """name argv verdict mesh attention precision seq_len global_batch grad_accum remat parameters compile_s step_s
        steps compiler_options warmup data_wait_s tokens_per_s tokens_per_s_per_device tflops_per_device peak_tflops
        mfu_causal mfu_full hfu memory planned not_planned loss seconds config_sha256 devices"""
    (case,) = tree["cases"]
    assert set(wanted.split()) <= case.keys()
    assert case["devices"]["count"] == 8, "all of them"
    receipt = json.loads((out / "receipt.json").read_text())
    assert receipt["exit_code"] == 0 and receipt["bench"] == "steps" and receipt["devices"]["platform"] == "cpu"
    assert (out / "results.md").stat().st_size and (out / "logs" / "tiny.txt").exists()


LEAF = """
import os, pathlib, sys, time
file = pathlib.Path(sys.argv[1])
file.with_suffix(".new").write_text(str(os.getpid()))
file.with_suffix(".new").rename(file)
time.sleep(600)
"""
SLEEPER = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {LEAF!r}, sys.argv[1]])
time.sleep(600)
"""
# Like benchmarks/first_minutes.py: a command that starts child processes itself.
NESTED = """
import sys, pathlib
from jaxtrain.train.child import run_program
run_program([sys.executable, "-c", sys.argv[1], sys.argv[2]], pathlib.Path(sys.argv[2] + ".log"))
"""


def gone(pid: int) -> bool:
    """Wait until a process has ended; a zombie has."""
    until = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_what_a_child_started_ends_with_it(tmp_path):
    file = tmp_path / "pid"
    code, _ = child.run_program([sys.executable, "-c", SLEEPER, str(file)], tmp_path / "log.txt", limit_s=15.0)
    assert code is None and gone(int(file.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a child of its parent's end")
def test_children_end_with_a_parent_that_is_ended(tmp_path):
    """If SIGTERM ends a command that cannot end its children, the children end too."""
    file = tmp_path / "pid"
    environ = {**os.environ, "PYTHONPATH": str(launch.REPO)}
    parent = subprocess.Popen([sys.executable, "-c", NESTED, LEAF, str(file)], env=environ)
    try:
        until = time.monotonic() + 120
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.05)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(timeout=120) == -signal.SIGTERM and gone(int(file.read_text()))
    finally:
        parent.kill()
        parent.wait()


def test_a_process_that_dies_or_takes_too_long(tmp_path):
    r = child.run_case("jaxtrain.node:nothing", {}, log=tmp_path / "log.txt")
    assert r["verdict"] == "failed" and "nothing" in r["why"] and "Traceback" in (tmp_path / "log.txt").read_text()
    assert child.run_case(train_step.CASE, {}, limit_s=0.01)["verdict"] == "out of time"


# ---- Against PyTorch

TORCH = os.environ.get("JAXTRAIN_PEER_PYTHON", sys.executable)


def test_torch_does_the_same_work(tmp_path, capsys):
    """From the same weights, a small model has the same loss in each of four steps in PyTorch and in jaxtrain. The model has
    grouped queries, a tied head and scaled rotary frequencies.

    If the Python in JAXTRAIN_PEER_PYTHON has no torch, the command exits with 2 and reports the failed import.
    """
    probe = subprocess.run([TORCH, "-c", "import torch, transformers"], capture_output=True, check=False)
    if probe.returncode:
        assert peer_torch.main([*PEER, f"--python={TORCH}"]) == 2
        assert f"--python = '{TORCH}'" in capsys.readouterr().err
        return
    base = [*PEER[:-3], *DATA["synthetic"], *peer_torch.SAME_WORK]
    example = peer_torch.export_small(base, tmp_path / "small", tmp_path / "logs" / "log.txt", 600)
    found = peer_torch.compare_losses(example, TORCH, tmp_path / "logs" / "torch.txt", 600, platform="cpu")
    assert found["verdict"] == "ok", found
    assert found["off"] < 1e-5 and found["ours"][-1] < found["ours"][0] - 0.01, "steps were taken"
    how = {"platform": "cpu", "settings": peer_torch.read_settings("sdpa,none,checkpoint;sdpa,none"), "tune_s": 0.0}
    timed = peer_torch.run_peer(TORCH, example["spec"] | how | {"warmup": 1, "steps": 3}, tmp_path / "logs" / "timed.txt", 600)
    assert timed["verdict"] == "ok" and timed["losses"] == pytest.approx(found["theirs"]), timed
    assert timed["settings"] == how["settings"][0] and len(timed["step_times"]) == 3
