"""benchmarks/first_minutes.py in tiny form on a CPU: a call that is killed, and a second call with other items."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs
from compile_options import QUICKLY

from benchmarks import gpu_items

# These items alone in the second call: all take minutes on a CPU.
REST = ("rates", "gemm")


def start(tmp_path: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.first_minutes", "--smoke", "--seconds=2000", *more]
    command += [f"--out={tmp_path / 'out'}", f"--work={tmp_path / 'work'}"]
    # One CPU device: the script is for one GPU, and programs for several CPU devices are not cached.
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICKLY}
    with open(tmp_path / "said.txt", "ab") as said:
        return subprocess.Popen(command, cwd=runs.REPO, env=environ, stdout=said, stderr=said)


def results(tmp_path: Path) -> dict[str, dict]:
    file = tmp_path / "out" / "results.json"
    return json.loads(file.read_text())["parts"] if file.exists() else {}


@pytest.mark.long
def test_a_killed_call_keeps_its_results_and_the_next_one_adds_to_them(tmp_path):
    first = start(tmp_path)
    until = time.monotonic() + 600
    while "compute" not in results(tmp_path) and first.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    assert first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait(60)
    before = results(tmp_path)
    assert {"look", "compute"} <= {*before} and {found["verdict"] for found in before.values()} == {"ok"}
    assert start(tmp_path, f"--only={';'.join(REST)}").wait(2000) == 0, (tmp_path / "said.txt").read_text()
    after = results(tmp_path)
    assert all(after[name] == found for name, found in before.items()) and {*after} == {*before, *REST}
    assert [name for name in REST if after[name]["verdict"] != "ok"] == ["rates"]  # no plan is for a CPU
    sent = {file.name: file.stat().st_size for file in (tmp_path / "out").iterdir()}
    assert {"results.json", "results.md", "logs.tar.gz"} == {*sent} and max(sent.values()) <= gpu_items.MAX_FILE_BYTES
