"""The node suite in tiny form, and benchmarks as a user runs them, in processes."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from bench_helpers import SMALL, at_home, run_here  # noqa: F401
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain import launch
from jaxtrain.bench import __main__ as command
from jaxtrain.bench import child, node_suite, parts, report, train_step
from jaxtrain.parity.__main__ import main as parity_main


def program_here(command, log, *, environ=None, limit_s=None):
    """Run parity in this process. Return fixed results for preflight, kernel tests and training, which other tests cover."""
    if command[2] == "jaxtrain.preflight":
        return 0, "a warning\n12 checks"
    if command[2] == "pytest":
        log.parent.mkdir(exist_ok=True)
        Path(environ["JAXTRAIN_TEST_RESULTS"]).write_text('{"test": "a", "outcome": "passed", "why": "", "ratio": 0.5}\n')
        return 0, "1 passed"
    if command[2] == "jaxtrain.main":
        assert not launch.load(command[3:], {"workdir": ""}).problems
        (workdir,) = [Path(arg.partition("=")[2]) for arg in command if arg.startswith("--workdir=")]
        workdir.mkdir()
        (workdir / "metrics.jsonl").write_text('{"kind": "train", "loss": 3.0}\n{"kind": "eval", "loss": 2.5}\n')
        return 0, "trained"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = parity_main(command[3:])
    return code, said.getvalue()


# ---- The suite


@pytest.fixture(scope="module")
def kept_programs(tmp_path_factory):
    """Keep a compile cache, so that programs shared by several cases of this file compile once."""
    limits = ("jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
    names = ("jax_compilation_cache_dir", *limits)
    before = {name: getattr(jax.config, name) for name in names}
    folder = str(tmp_path_factory.mktemp("cache"))
    for name, value in zip(names, (folder, 0.0, -1), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # other tests of this process use no cache


def test_a_suite_in_tiny_form(tmp_path, monkeypatch, capsys, kept_programs):
    """All parts except rates succeed on 8 CPU devices in this process. `program_here` fixes the results of preflight, kernel
    tests and training.
    """
    monkeypatch.setattr(node_suite, "run_case", run_here)
    monkeypatch.setattr(parts, "run_program", program_here)
    monkeypatch.setattr(node_suite, "SMOKE_LAYOUTS", "one,fsdp2xtensor2")
    out = tmp_path / "node"
    assert command.main(["--suite=node", f"--out={out}"]) == 0
    printed = capsys.readouterr().out
    assert "no fault" in printed and "At most 5:00" in printed
    tree = json.loads((out / "results.json").read_text())
    verdicts = {name: part["verdict"] for name, part in tree["parts"].items()}
    assert (
        verdicts.pop("rates") == "left out"
        and {*verdicts.values()} == {"ok"}
        and verdicts.keys() == node_suite.PARTS.keys() - {"rates"}
    )
    assert tree["parts"]["parity"]["data"]["f32"]["agrees"] and tree["parts"]["kernels"]["found"].startswith("1 tests passed")
    assert tree["parts"]["configs"]["data"]["tiny"]["devices"]["count"] == 8
    assert "restored bit for bit" in tree["parts"]["checkpoint"]["found"] and not (out / "checkpoint").exists()
    assert tree["parts"]["run"]["found"].startswith("trained, evaluated (loss 2.500)")
    assert {"results.md", "results.json", "receipt.json", "run"} <= {p.name for p in out.iterdir()}
    assert out.with_suffix(".tar.gz").exists()
    page = (out / "results.md").read_text()
    assert "**no fault**" in page and page.index("## Parts") < page.index("## Preflight") < page.index("## Checkpoint")


def test_a_suite_names_what_failed(tmp_path, monkeypatch, capsys):
    def fail(node, limit_s):
        """Return a failed outcome."""
        return parts.Outcome("FAILED", "one layout DIFFERS")

    def succeed(node, limit_s):
        """Return a good outcome."""
        return parts.Outcome("ok", "12 checks")

    monkeypatch.setattr(node_suite, "PARTS", {"preflight": (succeed, 60.0), "parity": (fail, 60.0)})
    out = tmp_path / "node"
    assert command.main(["--suite=node", f"--out={out}", "--parts=preflight,parity"]) == 1
    assert "FAULT: parity (one layout DIFFERS)" in capsys.readouterr().out
    assert json.loads((out / "receipt.json").read_text())["reason"] == "failed: parity"


def test_a_part_that_breaks_is_one_that_failed(tmp_path, monkeypatch, capsys):
    def broken(node, limit_s):
        """Raise an error."""
        raise OSError("no such luck")

    after = (lambda node, limit_s: parts.Outcome("ok", "12 checks"), 60.0)
    monkeypatch.setattr(node_suite, "PARTS", {"rates": (broken, 60.0), "preflight": after})
    out = tmp_path / "node"
    assert command.main(["--suite=node", f"--out={out}"]) == 1
    found = json.loads((out / "results.json").read_text())["parts"]
    assert found["rates"]["found"].startswith("OSError: no such luck") and found["preflight"]["verdict"] == "ok"
    assert "Traceback" in (out / "logs" / "rates_error.txt").read_text()


def test_a_state_that_comes_back_different(tmp_path, monkeypatch, kept_programs):
    """If a restore changes one bit of a tensor, the checkpoint part fails and names the tensor."""
    from jaxtrain.checkpoint import Checkpoints

    right = Checkpoints.restore

    def restore(self, *args, **kwargs):
        tensors = right(self, *args, **kwargs)
        name = "params.final_norm.scale"
        bits = jax.lax.bitcast_convert_type(tensors[name], jnp.uint32).at[0].add(jnp.uint32(1))
        return tensors | {name: jax.lax.bitcast_convert_type(bits, jnp.float32)}

    monkeypatch.setattr(Checkpoints, "restore", restore)
    monkeypatch.setattr(node_suite, "run_case", run_here)
    node = parts.Node(train_step.devices_for(0), True, report.Folder(str(tmp_path / "node"), "", "suite"))
    found = node_suite.check_checkpoint(node, 60.0)
    assert found.verdict == "FAILED" and "1 tensors restored with differences: params.final_norm.scale" in found.found


# ---- A process of its own


def test_as_a_user_runs_it(tmp_path):
    out, file, compiled = tmp_path / "out", tmp_path / "bench.json", tmp_path / "compiled"
    argv = [*SMALL, "--steps=2", "--warmup=1", f"--out={out}", f"--json={file}", f"--config.paths.cache={compiled}"]
    done = subprocess.run([sys.executable, "-m", "jaxtrain.bench", *argv], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert not compiled.exists(), "programs for several CPU devices are not kept"
    assert "median of 2 after 1 to warm up" in done.stdout and report.NO_MEASUREMENT in done.stdout
    tree = json.loads(file.read_text())
    assert tree == json.loads((out / "results.json").read_text())
    assert tree["format"] == 1 and tree["kind"] == "steps" and tree["best"] == "tiny"
    assert {"date", "device", "count", "python", "packages", "git", "command"} <= tree["about"].keys()
    # Other programs depend on this form.
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


# Like benchmarks/first_minutes.py: a command that starts child processes itself.
NESTED = """
import sys, pathlib
from jaxtrain.bench.child import run_program
run_program([sys.executable, "-c", sys.argv[1], sys.argv[2]], pathlib.Path(sys.argv[2] + ".log"))
"""


def alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    return any(not alive(pid) or time.sleep(0.05) for _ in range(100))


def test_what_a_child_started_ends_with_it(tmp_path):
    file = tmp_path / "pid"
    code, _ = child.run_program([sys.executable, "-c", SLEEPER, str(file)], tmp_path / "log.txt", limit_s=2.0)
    assert code is None and gone(int(file.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a child of its parent's end")
def test_children_end_with_a_parent_that_is_ended(tmp_path):
    """If SIGTERM ends a command that cannot end its children, the children end too."""
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


def test_a_process_that_dies_or_takes_too_long(tmp_path):
    r = child.run_case("jaxtrain.bench:nothing", {}, log=tmp_path / "log.txt")
    assert (
        r["verdict"] == "failed"
        and "has no attribute 'nothing'" in r["why"]
        and "Traceback" in (tmp_path / "log.txt").read_text()
    )
    r = child.run_case(train_step.CASE, {}, limit_s=0.01)
    assert r["verdict"] == "out of time" and r["why"] == "not done after 0 s"
