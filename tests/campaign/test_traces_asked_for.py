"""Traces requested by a signal while `tiny` trains in a child process."""

import re
import signal
from pathlib import Path

import runs
from gpu_traces import profile_of

from jaxtrain.report import profile_trace

TINY = runs.REPO / "configs" / "tiny.py"


def test_a_signal_takes_a_trace_and_changes_nothing_else(tmp_path: Path):
    """The config requests one trace, and a signal requests another."""
    workdir = tmp_path / "run"
    asked = {"profile__start": 3, "profile__steps": 2, "log__every_steps": 1, "data__source": "synthetic"}
    off = {"eval__every_steps": 0, "checkpoint__every_steps": 0, "sample__max_tokens": 0, "log__tensorboard": "false"}
    child = runs.Child(TINY, workdir, tmp_path / "words.txt", **asked, **off)
    child.until(lambda: child.said.count("Trace: ") == 1)
    child.process.send_signal(signal.SIGUSR2)
    child.until(lambda: child.said.count("Trace: ") == 2)
    child.process.send_signal(signal.SIGTERM)
    code, said = child.end()
    assert code == 75 and runs.receipt(workdir)["reason"].startswith("SIGTERM")
    windows = [(int(a), int(b)) for a, b in re.findall(r"Tracing steps (\d+) to (\d+)\.", said)]
    assert len(windows) == 2 and windows[0] == (3, 4) and windows[1][1] == windows[1][0] + 1
    assert [path.parent.name.rpartition("_")[2] for path in profile_trace.find_traces(workdir)] == [str(a) for a, _ in windows]
    rates = {line["step"]: line["step_time_s"] for line in runs.lines(workdir)}
    for first, last in windows:
        # A line counts finished steps: after step 3 it has 4.
        assert [rates[step] for step in range(first + 1, last + 3)] == [None, None, None]
    found = profile_of(workdir)
    # Operations of a known part of the model have nearly all of the time.
    assert found.steps == (3, 4) and len(found.by_device) == 1 and found.named >= 0.95
    (op,) = [op for op in found.ops if op.label == "forward mlp/BTF,DF->BTD"]
    assert op.count == 4 and abs(op.gflop / (2 * 16 * 128 * 384 * 128 * 4 / 1e9) - 1) < 1e-6
