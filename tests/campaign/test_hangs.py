"""Real hangs in Python and in C, and in a run's step, data or save: exit code 124, and a folder that names the cause."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import runs
from faults import Faults, Figures

CHILD = """
import ctypes, os, sys, threading, time
from pathlib import Path
from jaxtrain import watchdog
from jaxtrain.watchdog import Watchdog
workdir = Path(sys.argv[1])
def facts(): return {{"last_step": 7, "loss": float("nan"), "path": workdir}}
def ended(cause): print("ended:", cause, flush=True)
{before}
with Watchdog({budgets}, workdir, facts=lambda: facts(), ended=lambda cause: ended(cause), process_index={index}) as dog:
{body}
print("well")
"""


def start(workdir: Path, body: str, before: str = "", index: int = 0, **budgets: float) -> subprocess.Popen[str]:
    """Start a process whose `body` runs under a watchdog, `dog`."""
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    code = CHILD.format(before=before, budgets=budgets, body=lines, index=index)
    environment = {**os.environ, "TMPDIR": str(workdir)}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(workdir / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=runs.REPO,
        env=environment,
    )


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a process. Returns (exit code, stdout, stderr)."""
    try:
        out, err = child.communicate(timeout=300)
    finally:
        child.kill()
    return child.returncode, out, err


def evidence(workdir: Path) -> tuple[str, str, dict[str, Any]]:
    """Return (cause, stacks, report) from the files of a run's only hang folder."""
    (folder,) = workdir.glob("hang-????????-??????")
    cause = (folder / "cause.txt").read_text().strip()
    return cause, (folder / "stacks.txt").read_text(), json.loads((folder / "report.json").read_text())


HANGS = {
    "sleep": "time.sleep(1000)",
    "lock": "lock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "fifo": "os.mkfifo(workdir.parent / 'fifo')\nopen(workdir.parent / 'fifo').read()",
    "c": "ctypes.CDLL(None).sleep(1000)",
}


@pytest.mark.parametrize("how", HANGS)
def test_a_hang_in_whatever_way_ends_with_124(how: str, tmp_path: Path):
    body = "with dog.phase('step'):\n" + "\n".join("    " + line for line in HANGS[how].splitlines())
    code, out, err = finish(start(tmp_path, body, step=0.5))
    cause, stacks, report = evidence(tmp_path / "run")
    assert (code, cause) == (124, "no step finished within 0.5 s (train.timeouts: step=0.5)"), err
    assert out == f"ended: {cause}\n"
    assert cause in err and "hang-" in err
    assert "MainThread" in stacks and 'File "<string>"' in stacks
    assert report["facts"] == {"last_step": 7, "loss": "NaN", "path": str(tmp_path / "run")}


def test_what_else_hangs_loses_no_evidence(tmp_path: Path):
    """If collecting facts, completing the run's files and writing the evidence hang too, the evidence is in TMPDIR.

    A pipe without a reader blocks the write, as a lost mount would.
    """
    before = """
watchdog.FACTS_S = watchdog.ENDED_S = 0.3
watchdog.STACKS_S = 3
def facts(): time.sleep(1000)
def ended(cause): time.sleep(1000)
stuck = workdir / 'stuck'; stuck.mkdir(parents=True); os.mkfifo(stuck / 'cause.txt')
usual = watchdog._folder
watchdog._folder = lambda place: stuck if place == workdir else usual(place)
"""
    code, _, err = finish(start(tmp_path, "with dog.phase('step'):\n    time.sleep(1000)", before, step=0.3))
    assert code == 124, err
    assert f"{tmp_path / 'run' / 'stuck'} could not be written: not done within 3 s" in err
    assert "the run's files could not be completed: not done within 0.3 s" in err
    cause, _, report = evidence(tmp_path)
    assert "no step finished" in cause and report["facts"] == {"error": "not done within 0.3 s"}


def test_a_process_that_was_stopped_gets_its_time_back(tmp_path: Path):
    child = start(tmp_path, "with dog.phase('step'):\n    print('hangs', flush=True)\n    time.sleep(1000)", step=1)
    assert child.stdout is not None and child.stdout.readline() == "hangs\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(6)  # far longer than the budget
    child.send_signal(signal.SIGCONT)
    code, _, err = finish(child)
    assert code == 124, err
    assert evidence(tmp_path / "run")[2]["seconds"] < 5


# ---- In a run

OWN = """
import os
import threading
import time

import jax
import jax.numpy as jnp
from jaxtrain.data import pipeline
from jaxtrain.train.loss import cross_entropy

HOW = os.environ.get("HANGS", "")


class Source:
    def __init__(self, batches):
        self.batches = batches

    def __getattr__(self, name):
        return getattr(self.batches, name)

    def batch(self, step, rows=None):
        if HOW == "data" and step == 7:
            time.sleep(1000)
        return self.batches.batch(step, rows)


def source(data, split, global_batch):
    if HOW == "save":  # a file system on which nothing reaches the disk any more
        here, sync = threading.current_thread, os.fsync
        os.fsync = lambda handle: time.sleep(1000) if here().name.startswith("checkpoint") else sync(handle)
    return Source(pipeline.open_source(data, "synthetic", split=split, global_batch=global_batch, data_dir=""))


def loss(hidden_BTD, head_VD, batch, spec):
    made = [0]

    def slow(x):
        made[0] += 1
        if HOW == "step" and made[0] > 4:
            time.sleep(1000)
        return x

    nothing = jax.pure_callback(slow, jax.ShapeDtypeStruct((), jnp.float32), batch["weights"][0, 0])
    return cross_entropy(hidden_BTD, head_VD, batch, spec) + jax.lax.stop_gradient(0 * nothing)
"""

CAUSES = {
    "step": "no step finished within 8 s (train.timeouts: step=8)",
    "data": "waiting for data for 8 s (train.timeouts: data=8)",
    "save": "the save of step 5 has not finished after 8 s (train.timeouts: checkpoint=8)",
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=() if how == "step" else pytest.mark.more) for how in CAUSES])
def test_a_hang_ends_with_124_and_says_what_hung(how: str, tmp_path: Path, figures: Figures) -> None:
    faults = Faults(tmp_path, OWN, data__source="own:source", loss__name="own:loss", train__steps=4000)
    workdir = tmp_path / "run"
    # programs with host callbacks are never cached
    limits = {"train__timeouts": "step=8,data=8,checkpoint=8", "paths__cache": ""}
    code, said = faults.start(workdir, env={"HANGS": how}, **limits).end()
    assert code == 124, said
    [folder] = workdir.glob("hang-*")
    cause = (folder / "cause.txt").read_text().strip()
    assert cause == CAUSES[how]
    assert f"the run hangs and is ended: {cause}" in said and str(folder) in said
    report = json.loads((folder / "report.json").read_text())
    assert report["facts"]["last_steps_heard_of"] and "device_memory" in report["facts"]
    assert report["facts"]["pending_save"] == (5 if how == "save" else None)
    assert "MainThread" in (folder / "stacks.txt").read_text()
    receipt = runs.receipt(workdir)
    assert receipt["exit_code"] == 124 and receipt["reason"] == cause
    figures.add(f"hang in a {how}", exit_code=code, cause=cause)
    if how != "save":  # checkpoints from before the hang are kept
        assert (5 in runs.steps(workdir)) == (how == "data")


def test_a_slow_step_is_explained(tmp_path: Path) -> None:
    own = OWN.replace("time.sleep(1000)\n        return self.batches", "time.sleep(1)\n        return self.batches")
    own = own.replace("step == 7", "step == 40")
    faults = Faults(tmp_path, own, data__source="own:source", train__steps=44, checkpoint__every_steps=0)
    code, said = faults.start(tmp_path / "run", env={"HANGS": "data"}).end()
    assert code == 0, said
    found = re.search(r"step 4\d took \S+ s, usually (\S+) s: data (\S+) s", said)
    assert found, said  # the largest part comes first
    assert float(found[2]) > float(found[1]), "prefetched batches hide a part of the second, not the cause"
