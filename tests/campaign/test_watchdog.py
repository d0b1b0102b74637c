"""The watchdog ends a run that hangs, in whatever way, with 124 and a folder that names the cause; and none that is well."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.watchdog import BUDGETS, Watchdog, parse_budgets

ROOT = Path(__file__).resolve().parents[2]

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
    """A run in another process whose `body` a watchdog, `dog`, watches."""
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    code = CHILD.format(before=before, budgets=budgets, body=lines, index=index)
    environment = {**os.environ, "TMPDIR": str(workdir)}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(workdir / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr), before long."""
    try:
        out, err = child.communicate(timeout=20)
    finally:
        child.kill()
    return child.returncode, out, err


def evidence(workdir: Path) -> tuple[str, str, dict[str, Any]]:
    """Cause, stacks and report of the one hang in a folder."""
    (folder,) = workdir.glob("hang-????????-??????")
    cause = (folder / "cause.txt").read_text().strip()
    return cause, (folder / "stacks.txt").read_text(), json.loads((folder / "report.json").read_text())


HANGS = {
    "sleep": "time.sleep(60)",
    "lock": "lock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "fifo": "os.mkfifo(workdir.parent / 'fifo')\nopen(workdir.parent / 'fifo').read()",
    "c": "ctypes.CDLL(None).sleep(60)",
}


@pytest.mark.parametrize("how", HANGS)
def test_a_hang_ends_with_124_and_names_its_cause(how: str, tmp_path: Path):
    body = "with dog.phase('step'):\n" + "\n".join("    " + line for line in HANGS[how].splitlines())
    code, out, err = finish(start(tmp_path, body, step=0.5))
    cause, stacks, report = evidence(tmp_path / "run")
    assert (code, cause) == (124, "no step finished within 0.5 s (train.timeouts: step=0.5)"), err
    assert out == f"ended: {cause}\n"
    assert cause in err and "hang-" in err
    assert "MainThread" in stacks and 'File "<string>"' in stacks and "All threads of the process" in stacks
    assert report["cause"] == cause and report["phase"] == "step" and 0.5 < report["seconds"] < 5
    assert report["facts"] == {"last_step": 7, "loss": "NaN", "path": str(tmp_path / "run")}
    assert {"host", "pid", "time", "process_index", "activities"} <= set(report)


HANG = "with dog.phase('step'):\n    time.sleep(60)"
SHORT = "watchdog.FACTS_S = watchdog.STACKS_S = watchdog.ENDED_S = 0.3\n"


@pytest.mark.parametrize(
    "facts, said",
    [("time.sleep(60)", "not done within 0.3 s"), ("1 / 0", "ZeroDivisionError"), ("sys.exit(3)", "SystemExit")],
)
def test_facts_that_hang_or_raise_are_told(facts: str, said: str, tmp_path: Path):
    code, out, _ = finish(start(tmp_path, HANG, f"{SHORT}def facts(): {facts}", step=0.3))
    assert code == 124 and out.startswith("ended: ")
    assert said in evidence(tmp_path / "run")[2]["facts"]["error"]


@pytest.mark.parametrize("ended, said", [("time.sleep(60)", "not done within 0.3 s"), ("1 / 0", "ZeroDivisionError")])
def test_the_process_ends_whatever_ended_does(ended: str, said: str, tmp_path: Path):
    code, _, err = finish(start(tmp_path, HANG, f"{SHORT}def ended(cause): {ended}", step=0.3))
    assert code == 124 and "could not be closed in good order" in err and said in err


def test_a_file_system_that_hangs_loses_no_evidence(tmp_path: Path):
    # Opening a pipe that nobody reads waits for ever, as a lost network file system does.
    before = (
        f"{SHORT}stuck = workdir / 'stuck'; stuck.mkdir(parents=True); os.mkfifo(stuck / 'cause.txt')\n"
        "usual = watchdog._folder\nwatchdog._folder = lambda place: stuck if place == workdir else usual(place)"
    )
    code, out, err = finish(start(tmp_path, HANG, before, step=0.3))
    assert code == 124 and out.startswith("ended: ")
    assert f"{tmp_path / 'run' / 'stuck'} could not be written: not done within 0.3 s" in err
    assert "no step finished" in evidence(tmp_path)[0]


def test_something_beside_the_main_thread(tmp_path: Path):
    body = """
dog.end(dog.begin('checkpoint', 'the save of step 250'))
dog.begin('checkpoint', 'the save of step 500')
with dog.phase('step'):
    while True:
        dog.beat()
        time.sleep(0.05)
"""
    code, _, _ = finish(start(tmp_path, body, checkpoint=0.5, step=5, index=3))
    (folder,) = (tmp_path / "run").iterdir()
    assert {path.name for path in folder.iterdir()} == {"cause.3.txt", "stacks.3.txt", "report.3.json"}
    cause, report = (folder / "cause.3.txt").read_text(), json.loads((folder / "report.3.json").read_text())
    assert (code, cause) == (124, "the save of step 500 has not finished after 0.5 s (train.timeouts: checkpoint=0.5)\n")
    assert [activity["what"] for activity in report["activities"]] == [None, "the save of step 500"]
    assert report["phase"] == "step" and report["budget"] == "checkpoint" and report["process_index"] == 3


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path):
    """Beats; phases entered again and again; an outer phase that stands still while an inner one runs; what is switched off."""
    body = """
with dog.phase('step'):
    for _ in range(15):
        time.sleep(0.1)
        dog.beat()
    for _ in range(3):
        with dog.phase('data'):
            time.sleep(0.4)
    with dog.phase('compile'):
        time.sleep(1)
"""
    code, out, err = finish(start(tmp_path, body, step=0.8, data=0.8, compile=0))
    assert (code, out, err) == (0, "well\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_was_stopped_gets_its_time_back(tmp_path: Path):
    body = "with dog.phase('step'):\n    print('hangs', flush=True)\n    time.sleep(60)"
    child = start(tmp_path, body, step=1)
    assert child.stdout is not None and child.stdout.readline() == "hangs\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(2)  # longer than the budget
    child.send_signal(signal.SIGCONT)
    began = time.monotonic()
    code, _, err = finish(child)
    assert code == 124, err
    assert time.monotonic() - began > 0.4
    assert evidence(tmp_path / "run")[2]["seconds"] < 1.5


def test_time_that_nobody_ran_is_given_back(tmp_path: Path):
    dog = watching(tmp_path, step=10, data=10)
    with dog.phase("step"), dog.phase("data"):
        dog.begin("step", "something")
        outer, inner = dog._phases
        now = inner.since
        assert dog._overdue(now + 9) is None
        dog._give_back(100, now + 109)
        assert dog._overdue(now + 109) is None and inner.seconds(now + 109) == pytest.approx(9)
        assert outer.seconds(now + 109) < 1
        dog.beat()
        dog._give_back(100, inner.since)  # what began after the pause owes nothing, and is owed nothing
        assert inner.seconds(inner.since) == 0


def test_phases_nest(tmp_path: Path):
    dog = watching(tmp_path, step=10, data=5)
    with dog.phase("step"):
        (outer,) = dog._phases
        with dog.phase("data"):
            inner = dog._phases[-1]
            report = dog._overdue(inner.since + 6)
            assert report is not None and report["cause"] == "waiting for data for 5 s (train.timeouts: data=5)"
            assert [(a["name"], a["stands"]) for a in report["activities"]] == [("step", True), ("data", False)]
        assert dog._overdue(outer.since + 9) is None
        report = dog._overdue(outer.since + 11)
        assert report is not None and report["phase"] == "step"
        with pytest.raises(KeyError):
            dog.phase("lunch").__enter__()
        token = dog.begin("data", "something")
        dog.end(token)
        with pytest.raises(KeyError):
            dog.end(token)
    assert dog._overdue(time.monotonic() + 1e6) is None


def test_a_watchdog_that_fails_ends_no_run(tmp_path: Path):
    before = "def fail(now): raise OSError('no space')\nWatchdog._overdue = lambda self, now: fail(now)"
    code, out, err = finish(start(tmp_path, "time.sleep(1.5)", before, step=0.3))
    assert (code, out) == (0, "well\n")
    assert "the watchdog has failed; the run goes on without it" in err and "no space" in err


def test_budgets_from_the_config():
    assert parse_budgets("") == (BUDGETS, [])
    assert parse_budgets(" step=600, data = 0.5,compile=0 ") == ({**BUDGETS, "step": 600, "data": 0.5, "compile": 0}, [])
    assert BUDGETS["compile"] > 2 * 20 * 60  # a cold compile of 20 minutes is well


@pytest.mark.parametrize(
    "text, said",
    [
        ("stop=5", "'stop' = 'stop=5'"),
        ("step", "must be NAME=SECONDS"),
        ("step=", "must be NAME=SECONDS"),
        ("step=fast", "a number of seconds above 0"),
        ("step=-1", "a number of seconds above 0"),
        ("step=nan", "a number of seconds above 0"),
        ("step=inf", "a number of seconds above 0"),
        ("step=5,step=6", "'step' is named twice"),
    ],
)
def test_budgets_that_are_wrong(text: str, said: str):
    budgets, problems = parse_budgets(text)
    (problem,) = problems
    assert problem.key == "train.timeouts"
    assert said in str(problem) or "Did you mean step?" in str(problem)
    assert budgets == {**BUDGETS, "step": 5.0 if text.startswith("step=5") else BUDGETS["step"]}


def watching(workdir: Path, **budgets: float) -> Watchdog:
    return Watchdog(budgets, workdir, facts=dict, ended=print)
