"""Real hangs in Python and in C, and in a run's step and save: exit code 124, and a folder that names the cause."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
from faults import Faults

CHILD = """
import ctypes, os, sys, threading, time
from pathlib import Path
from jaxtrain.runtime import watchdog
from jaxtrain.runtime.watchdog import Watchdog
workdir = Path(sys.argv[1])
def facts(): return {{"last_step": 7}}
def ended(cause): print("ended:", cause, flush=True)
{before}
with Watchdog({{"step": 0.5}}, workdir, facts=facts, ended=ended) as dog, dog.phase("step"):
    {hang}
"""
LOCK = "lock = threading.Lock(); lock.acquire(); lock.acquire()"
SLEEP_IN_C = "ctypes.CDLL(None).sleep(1000)"


def hang(workdir: Path, how: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run a process that hangs under a watchdog."""
    command = [sys.executable, "-c", CHILD.format(before=before, hang=how), str(workdir / "run")]
    environment = {**os.environ, "TMPDIR": str(workdir)}
    return subprocess.run(command, capture_output=True, text=True, cwd=runs.REPO, env=environment, timeout=300)


def evidence(workdir: Path) -> tuple[str, str, dict[str, Any]]:
    """Return (cause, stacks, report) from the files of a run's only hang folder."""
    (folder,) = workdir.glob("hang-????????-??????")
    cause = (folder / "cause.txt").read_text().strip()
    return cause, (folder / "stacks.txt").read_text(), json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("how", [LOCK, SLEEP_IN_C])
def test_a_hang_in_whatever_way_ends_with_124(how: str, tmp_path: Path):
    done = hang(tmp_path, how)
    cause, stacks, report = evidence(tmp_path / "run")
    assert (done.returncode, done.stdout, report["budget"]) == (124, f"ended: {cause}\n", "step"), done.stderr
    assert "MainThread" in stacks and 'File "<string>"' in stacks and report["facts"] == {"last_step": 7}


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
    done = hang(tmp_path, "time.sleep(1000)", before)
    assert done.returncode == 124 and str(tmp_path / "run" / "stuck") in done.stderr
    _, _, report = evidence(tmp_path)
    assert report["budget"] == "step" and "0.3" in report["facts"]["error"]


# ---- In a run

OWN = """
import os
import threading
import time

import jax
import jax.numpy as jnp
from jaxtrain.data.batches import open_source
from jaxtrain.step.loss import cross_entropy

HOW = os.environ.get("HANGS", "")


def source(data, split, global_batch, own):
    if HOW == "save":  # a file system on which nothing reaches the disk any more
        here, sync = threading.current_thread, os.fsync
        os.fsync = lambda handle: time.sleep(1000) if here().name.startswith("checkpoint") else sync(handle)
    return open_source(data, "synthetic", split=split, global_batch=global_batch, data_dir="")


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

# What hangs in a run, and the budget of the watchdog that it uses up. The first save also compiles.
BUDGETS = {"step": ("step", 8), "save": ("checkpoint", 30)}


@pytest.mark.long
@pytest.mark.parametrize("how", BUDGETS)
def test_a_run_that_hangs_ends_with_124(how: str, tmp_path: Path) -> None:
    faults = Faults(tmp_path, OWN, data__source="own:source", loss__name="own:loss", train__steps=4000, model__num_layers=1)
    name, seconds = BUDGETS[how]
    limits = {"train__timeouts": f"{name}={seconds}", "paths__cache": ""}  # programs with host callbacks are never cached
    code, said = faults.start(tmp_path / "run", env={"HANGS": how}, **limits).end(timeout=600)
    assert code == 124, said
    cause, stacks, report = evidence(tmp_path / "run")
    assert report["budget"] == name and "MainThread" in stacks
    assert report["facts"]["last_steps_heard_of"] and "device_memory" in report["facts"]
    assert report["facts"]["pending_save"] == (5 if how == "save" else None)
    receipt = runs.receipt(tmp_path / "run")
    assert receipt["exit_code"] == 124 and receipt["reason"] == cause
