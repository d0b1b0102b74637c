"""Traces requested by signals while `tiny` trains in a child process."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import runs
from gpu_traces import gpu_run, gpu_space

from jaxtrain.profile import __main__ as command
from jaxtrain.profile import measure, trace

TINY = runs.REPO / "configs" / "tiny.py"


def test_each_signal_takes_a_trace_and_changes_nothing_else(tmp_path: Path):
    """The config requests one trace, and two signals request two more.

    In the first profile, operations of a known part of the model have at least 95% of the time (`Profile.named`).
    """
    workdir = tmp_path / "run"
    asked = {"profile__start": 3, "profile__steps": 2, "log__every_steps": 1, "data__source": "synthetic"}
    off = {"eval__every_steps": 0, "checkpoint__every_steps": 0, "sample__max_tokens": 0, "log__tensorboard": "false"}
    child = runs.Child(TINY, workdir, tmp_path / "words.txt", **asked, **off)
    for taken in (1, 2, 3):
        child.until(lambda taken=taken: child.said.count("Trace: ") == taken)
        if taken < 3:
            child.process.send_signal(signal.SIGUSR2)
    child.process.send_signal(signal.SIGTERM)
    code, said = child.end()
    assert code == 75 and runs.receipt(workdir)["reason"].startswith("SIGTERM")
    assert said.count("SIGUSR2: a trace was asked for.") == 2
    windows = [(int(a), int(b)) for a, b in re.findall(r"Tracing steps (\d+) to (\d+)\.", said)]
    assert len(windows) == 3 and windows[0] == (3, 4)
    assert all(b == a + 1 for a, b in windows), "profile.steps steps each time"
    assert [path.parent.name.rpartition("_")[2] for path in trace.find(workdir)] == [str(a) for a, _ in windows]
    rates = {line["step"]: line["step_time_s"] for line in runs.lines(workdir)}
    for first, last in windows:
        # A line counts finished steps: after step 3 it has 4.
        assert [rates[step] for step in range(first + 1, last + 3)] == [None, None, None]
    found = measure.profile(trace.find(workdir)[0], measure.run_around(workdir))
    assert found.steps == (3, 4) and len(found.devices) == 1 and found.named >= 0.95
    (op,) = [op for op in found.ops if op.label == "forward mlp/BTF,DF->BTD"]
    assert op.count == 4 and abs(op.gflop / (2 * 16 * 128 * 384 * 128 * 4 / 1e9) - 1) < 1e-6


def test_the_command_needs_no_device_and_is_quick_to_refuse():
    done = subprocess.run([sys.executable, "-m", "jaxtrain.profile"], capture_output=True, text=True, cwd=runs.REPO)
    assert done.returncode == 2 and "RUN" in done.stderr


def test_xprof_gets_the_same_trace(tmp_path, capfd, monkeypatch):
    script = tmp_path / "xprof"
    script.write_text('#!/bin/sh\necho "got $*"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "run").mkdir()
    folder = gpu_run(tmp_path / "run", gpu_space(steps=1)[0])
    assert command.main([str(folder), "--xprof"]) == 0
    assert capfd.readouterr().out == f"got --logdir {folder / 'profile'}\n"
