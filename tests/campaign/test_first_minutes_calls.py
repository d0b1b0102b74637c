"""benchmarks/first_minutes.py in tiny form on a CPU: a call that is killed, and a second call that does everything else."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import runs
from compile_options import QUICKLY

from benchmarks import first_minutes, gpu_items


def start(tmp_path: Path, seconds: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.first_minutes", "--smoke", f"--seconds={seconds}"]
    command += [f"--out={tmp_path / 'out'}", f"--work={tmp_path / 'work'}"]
    # One CPU device: the script is for one GPU, and programs for several CPU devices are not cached.
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICKLY}
    with open(tmp_path / "said.txt", "ab") as said:
        return subprocess.Popen(command, cwd=runs.REPO, env=environ, stdout=said, stderr=said)


def results(tmp_path: Path) -> dict[str, dict]:
    file = tmp_path / "out" / "results.json"
    return json.loads(file.read_text())["parts"] if file.exists() else {}


def test_a_killed_call_keeps_its_results_and_the_next_one_does_the_rest(tmp_path):
    first = start(tmp_path, 1000)
    until = time.monotonic() + 600
    while "attention of llama3" not in results(tmp_path) and first.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    assert first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait(60)
    before = results(tmp_path)
    assert [name for name, found in before.items() if found["verdict"] == "ok"] == ["look", "compute", "attention of llama3"]
    assert start(tmp_path, 2000).wait(2000) == 0, (tmp_path / "said.txt").read_text()
    after = results(tmp_path)
    assert [*after] == [item.name for item in first_minutes.ITEMS]
    assert all(after[name] == found for name, found in before.items()), "finished items are not repeated"
    left_out = {"rates"} | ({"PyTorch"} if importlib.util.find_spec("torch") is None else set())  # no plan is for a CPU
    assert {name: found["found"] for name, found in after.items() if found["verdict"] != "ok"}.keys() == left_out
    sent = {file.name: file.stat().st_size for file in (tmp_path / "out").iterdir()}
    assert {"results.json", "results.md", "logs.tar.gz", "trace.tar.gz"} == {*sent}
    assert max(sent.values()) <= gpu_items.MAX_FILE_BYTES
    with tarfile.open(tmp_path / "out" / "trace.tar.gz") as trace:
        names = trace.getnames()
    assert "trace/report.html" in names and [name for name in names if name.endswith(".xplane.pb")]
    resumed = after["killed and resumed"]["data"]
    assert resumed["repeated"] == resumed["equal"] >= 10, "on a CPU the same program has the same bits"
