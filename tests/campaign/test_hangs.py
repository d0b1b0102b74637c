"""Real hangs in Python and in C, and in a run's step and save: exit code 124, and a folder that names the cause."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import runs
from faults import Faults, steps_written

CHILD = """
import ctypes, os, sys, threading, time
from pathlib import Path
from jaxtrain.runtime import watchdog
from jaxtrain.runtime.watchdog import Watchdog
workdir = Path(sys.argv[1])
def facts(): return {{"last_step": 7}}
def ended(cause): print("ended:", cause, flush=True); return 124
{before}
dog = Watchdog({{"step": 0.5}}, workdir, ended=ended)
dog.facts = facts
with dog, dog.phase("step"):
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
watchdog.EVIDENCE_S = 2
def facts(): time.sleep(1000)
def ended(cause): time.sleep(1000)
stuck = workdir / 'hang-20260101-000000'; stuck.mkdir(parents=True); os.mkfifo(stuck / 'cause.txt')
usual = time.strftime
time.strftime = lambda *how: stuck.name if how[0].startswith('hang') else usual(*how)
"""
    done = hang(tmp_path, "time.sleep(1000)", before)
    assert done.returncode == 124 and str(tmp_path / "run" / "hang-20260101-000000") in done.stderr
    _, _, report = evidence(tmp_path)
    assert report["budget"] == "step" and "not done" in report["facts"]["error"]


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


# ---- In a run of several processes

COUNT = 3
ODD = 1  # the process that the others wait for
OTHERS = f"""
import ctypes
import json
import os
import time

import jax
from jaxtrain.data.batches import open_source
from jaxtrain.runtime.peers import Peers

HOW = os.environ.get("HANGS", "") if jax.process_index() == {ODD} else ""


def source(data, split, global_batch, own):
    made = open_source(data, "synthetic", split=split, global_batch=global_batch, data_dir="")
    batch, gather = made.batch, Peers.gather

    def waiting(step, *rows):
        time.sleep(0.5)
        if step == 6:
            if HOW == "python":
                ctypes.PyDLL(None).sleep(1000)  # holds the GIL
            time.sleep(1000)
        return batch(step, *rows)

    def skipping(self, name, value, timeout_s):
        return [json.dumps(False)] * self.count if name == "best" else gather(self, name, value, timeout_s)

    if HOW in ("data", "python") and split == "train":
        made.batch = waiting
    if HOW == "exchange":
        Peers.gather = skipping
    return made
"""
BUDGET = {"train__timeouts": "step=8,data=12", "train__steps": 4000, "model__num_layers": 1, "checkpoint__every_steps": 0}
BUDGET |= {"mesh__data": COUNT, "mesh__fsdp": 1}
BEST = {"eval__every_steps": 4, "eval__sequences": 8, "checkpoint__keep_best": 1}


def several(tmp_path: Path, how: str, **more: Any) -> tuple[list[runs.Child], Path]:
    """Start a run of COUNT processes, one of which leaves the others waiting."""
    faults = Faults(tmp_path, OTHERS, **{"data__source": "own:source", **BUDGET, **more})
    os.environ["HANGS"] = how
    try:
        return faults.processes(tmp_path / "run", COUNT, 1, train__global_batch=6), tmp_path / "run"
    finally:
        del os.environ["HANGS"]


def reports(workdir: Path, processes: list[int]) -> tuple[str, list[dict[str, Any]]]:
    """Return the cause and where the processes are, of which every process has written the same."""
    (folder,) = workdir.glob("hang-????????-??????")
    found = []
    for i in processes:
        own = f".{i}" if i else ""
        cause = (folder / f"cause{own}.txt").read_text().strip()
        report = json.loads((folder / f"report{own}.json").read_text())
        assert (report["process_index"], report["cause"]) == (i, cause)
        assert "MainThread" in (folder / f"stacks{own}.txt").read_text()
        found.append((cause, report["processes"]))
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.long
def test_a_stopped_process_is_named(tmp_path: Path) -> None:
    """Its heartbeats are missed before any budget of the others is over."""
    children, workdir = several(tmp_path, "", train__timeouts="")
    children[0].until(lambda: steps_written(workdir) > 3)
    time.sleep(5)  # each process publishes every two seconds where it is
    before, odd = steps_written(workdir), children[ODD].process
    odd.send_signal(signal.SIGSTOP)
    try:
        ends = [children[i].end() for i in (0, 2)]
    finally:
        odd.send_signal(signal.SIGCONT)
    assert [code for code, _ in ends] == [75, 75], ends
    assert children[ODD].end()[0] == 75  # it has lost process 0
    reason = runs.receipt(workdir)["reason"]
    assert all(reason in said for _, said in ends)
    name = f"process {ODD} (host {socket.gethostname()}, pid {odd.pid})"
    first, second = reason.split("; ", 1)
    assert first.startswith(f"{name} ") and second.startswith(f"{name} ")
    steps = [int(step) for step in re.findall(r"in step (\d+), phase \w+", second)]
    assert len(steps) >= 2 and steps[0] > 4 and before <= steps[-1] <= before + 100, reason


@pytest.mark.long
def test_a_process_in_which_python_does_not_run_is_named(tmp_path: Path) -> None:
    """It sends heartbeats, because these need no Python, and cannot end by its own watchdog."""
    children, workdir = several(tmp_path, "python")
    ends = [child.end() for child in children]
    assert [code for code, _ in ends] == [-signal.SIGABRT if i == ODD else 124 for i in range(COUNT)], ends
    cause, places = reports(workdir, [0, 2])
    assert cause.startswith(f"process {ODD} (host {socket.gethostname()}, pid {children[ODD].process.pid}) ")
    assert [place["silent_s"] is not None for place in places] == [False, True, False]
    assert places[ODD]["silent_s"] > 5 and all(place["step"] > 3 for place in places)
    receipt = runs.receipt(workdir)
    assert (receipt["exit_code"], receipt["reason"]) == (124, cause)


@pytest.mark.long
def test_a_process_that_waits_for_data_is_named(tmp_path: Path) -> None:
    children, workdir = several(tmp_path, "data")
    ends = [child.end() for child in children]
    assert [code for code, _ in ends] == [124] * COUNT, ends
    cause, places = reports(workdir, [0, 1, 2])
    assert cause.startswith(f"process {ODD} ")
    assert [(place["phase"], place["waits_at"]) for place in places] == [("step", None), ("data", None), ("step", None)]
    assert places[ODD]["step"] == 7 and all(7 <= place["step"] <= 8 and place["silent_s"] is None for place in places)


@pytest.mark.long
def test_a_process_that_leaves_an_exchange_out_is_named(tmp_path: Path) -> None:
    """The exchange's own timeout is longer than an hour: the budget of a step ends the run."""
    children, workdir = several(tmp_path, "exchange", **BEST)
    ends = [child.end() for child in children]
    assert [code for code, _ in ends] == [124] * COUNT, ends
    cause, places = reports(workdir, [0, 1, 2])
    assert cause.startswith(f"process {ODD} ") and "step=8" in cause
    assert [(place["step"], place["phase"], place["waits_at"]) for place in places if place["process"] != ODD] == [
        (4, "step", "best")
    ] * 2
    assert (places[ODD]["phase"], places[ODD]["waits_at"]) == ("step", None) and places[ODD]["step"] in (5, 6)
