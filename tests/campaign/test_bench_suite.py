"""The suite of a node in tiny form, the checks of sharded sequences, and benchmarks as a user runs them, in processes."""

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
from bench_helpers import SMALL, at_home, here  # noqa: F401
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain import launch
from jaxtrain.bench import __main__ as command
from jaxtrain.bench import case, check, measure, report, suite
from jaxtrain.kernels import attention
from jaxtrain.parity.__main__ import main as parity_main


def program_here(command, log, *, environ=None, limit_s=None):
    """Parity in this process, with its exit code and what it prints; and training as others test it, reduced to its files."""
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


# ---- Sequences that are sharded


def test_sharded_sequences_are_checked_by_cudnn_too():
    """Every row of the check is lowered for a GPU, where each of four ranks calls cuDNN once per block."""
    for how, T, N, K, H, window, packed in check.SPLIT_SHAPES:
        spec = attention.Spec(H, "bf16", packed, 32 if packed else 1, window)
        segments, positions = (jnp.asarray(x) for x in check.documents(T, packed, seed=0))
        both = check.by_ranks(how, spec, "cudnn", (N, K), attention.Rows(segments, positions, segments, positions))
        q, kv = (jax.ShapeDtypeStruct((3, T, heads, H), jnp.bfloat16) for heads in (N, K))
        text = jax.jit(both).trace(q, kv, kv, q).lower(lowering_platforms=("cuda",)).as_text()
        blocks = 1 if how == "ulysses" or window else 2 + check.RANKS - 1  # on the diagonal, behind it, other ranks
        assert text.count("@__cudnn$fmhaSoftmax(") == blocks * check.RANKS, (how, window, packed)
        assert text.count("@__cudnn$fmhaSoftmaxBackward(") >= blocks * check.RANKS, (how, window, packed)


def small(case):
    """A row of the check with a 64th of the tokens and an eighth of the query heads, for a CPU."""
    how, T, N, K, _, window, packed = case
    return how, T // 64, N // 8 * 2, max(1, K // 4), 16, -(-window // 64), packed


SMALL_SPLIT = [(kernel, *small(case)) for kernel in ("chunked", "pallas") for case in check.SPLIT_SHAPES]


@pytest.mark.parametrize("case", SMALL_SPLIT, ids=str)
def test_sharded_sequences_are_within_their_bounds(case):
    kernel, how, *shape = case
    found = check.attempt(shape, kernel, how)
    assert found["ok"], found


# ---- The suite


@pytest.fixture(scope="module")
def kept_programs(tmp_path_factory):
    """Programs that several cases of this file compile are compiled once."""
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
    compilation_cache.reset_cache()  # other tests of this process keep nothing on disk


def test_a_suite_in_tiny_form(tmp_path, monkeypatch, capsys, kept_programs):
    """All parts on 8 CPU devices, in this process."""
    monkeypatch.setattr(suite, "apart", here)
    monkeypatch.setattr(suite, "run_program", program_here)
    monkeypatch.setattr(check, "SMOKE_SHAPES", check.SMOKE_SHAPES[:1])
    monkeypatch.setattr(check, "SMOKE_SPLIT_SHAPES", check.SMOKE_SPLIT_SHAPES[-1:])
    monkeypatch.setattr(suite, "FEW", "one,fsdp2xtensor2")
    out = tmp_path / "node"
    assert command.main(["--suite=node", f"--out={out}"]) == 0
    printed = capsys.readouterr().out
    assert "all is well" in printed and "At most 5:00" in printed
    tree = json.loads((out / "results.json").read_text())
    verdicts = {name: part["verdict"] for name, part in tree["parts"].items()}
    assert (
        verdicts.pop("rates") == "left out"
        and {*verdicts.values()} == {"ok"}
        and verdicts.keys() == suite.PARTS.keys() - {"rates"}
    )
    assert tree["parts"]["parity"]["data"]["f32"]["agrees"] and tree["parts"]["kernels"]["data"]["right"] == 2
    assert tree["parts"]["configs"]["data"]["tiny"]["devices"]["count"] == 8
    assert "came back bit for bit" in tree["parts"]["checkpoint"]["found"] and not (out / "checkpoint").exists()
    assert len(tree["parts"]["connections"]["data"]) == 2
    assert tree["parts"]["run"]["found"].startswith("trained, evaluated (loss 2.500)")
    assert {"results.md", "results.json", "receipt.json", "run"} <= {p.name for p in out.iterdir()}
    assert out.with_suffix(".tar.gz").exists()
    page = (out / "results.md").read_text()
    assert "**all is well**" in page and page.index("## Parts") < page.index("## Preflight") < page.index("## Checkpoint")


def test_a_suite_names_what_failed(tmp_path, monkeypatch, capsys):
    def fail(node, limit_s):
        """Fails."""
        return suite.Outcome("FAILED", "one layout DIFFERS")

    monkeypatch.setattr(suite, "PARTS", suite.PARTS | {"parity": (fail, 60.0)})
    out = tmp_path / "node"
    assert command.main(["--suite=node", f"--out={out}", "--parts=preflight,parity"]) == 1
    assert "NOT WELL: parity (one layout DIFFERS)" in capsys.readouterr().out
    assert json.loads((out / "receipt.json").read_text())["reason"] == "failed: parity"


def test_a_part_that_breaks_is_one_that_failed(tmp_path, monkeypatch, capsys):
    def broken(node, limit_s):
        """Breaks."""
        raise OSError("no such luck")

    monkeypatch.setattr(suite, "PARTS", {"rates": (broken, 60.0), "preflight": suite.PARTS["preflight"]})
    out = tmp_path / "node"
    assert command.main(["--suite=node", f"--out={out}"]) == 1
    found = json.loads((out / "results.json").read_text())["parts"]
    assert found["rates"]["found"].startswith("OSError: no such luck") and found["preflight"]["verdict"] == "ok"
    assert "Traceback" in (out / "logs" / "rates_error.txt").read_text()


def test_a_cpu_is_looked_at_too(tmp_path):
    node = suite.Node(measure.devices_for(0), True, report.Folder(str(tmp_path / "node"), "", "suite"))
    found = suite.part_preflight(node, 20.0)
    assert found.verdict == "ok" and "no NVIDIA GPU" in found.found
    assert {"/dev/shm", "clock"} <= {c["name"] for c in found.data}


def test_a_state_that_comes_back_different(tmp_path, monkeypatch, kept_programs):
    """One bit of one tensor."""
    from jaxtrain.checkpoint import Checkpoints

    right = Checkpoints.restore

    def restore(self, *args, **kwargs):
        tensors = right(self, *args, **kwargs)
        name = "params.final_norm.scale"
        bits = jax.lax.bitcast_convert_type(tensors[name], jnp.uint32).at[0].add(jnp.uint32(1))
        return tensors | {name: jax.lax.bitcast_convert_type(bits, jnp.float32)}

    monkeypatch.setattr(Checkpoints, "restore", restore)
    monkeypatch.setattr(suite, "apart", here)
    node = suite.Node(measure.devices_for(0), True, report.Folder(str(tmp_path / "node"), "", "suite"))
    found = suite.part_checkpoint(node, 60.0)
    assert found.verdict == "FAILED" and "1 tensors came back different: params.final_norm.scale" in found.found


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


def test_a_process_that_dies_or_takes_too_long(tmp_path):
    r = case.apart("nothing", {}, log=tmp_path / "log.txt")
    assert r["verdict"] == "failed" and "KeyError: 'nothing'" in r["why"] and "Traceback" in (tmp_path / "log.txt").read_text()
    r = case.apart("steps", {}, limit_s=0.01)
    assert r["verdict"] == "out of time" and r["why"] == "not done after 0 s"
