"""Ends a run that hangs, and writes evidence of the cause. Imports no jax.

Each activity of a run has a budget (`BUDGETS`, in seconds): the phases of its main thread, and background work such as a save.
A thread checks the clock. When a budget is used up, it writes a folder `hang-YYYYMMDD-HHMMSS` into the run's folder and ends
the process with 124:

    cause.txt     where the processes of the run are, and the budget, in one line
    stacks.txt    the stack of every Python thread
    report.json   the cause, the running activities with their ages, where the processes are, and the last facts of the run

(`cause.1.txt` and so on for processes other than 0.) In a run of several processes, a second thread publishes where this
process is (progress.py). The first watchdog that finds a hang tells the others, so all processes write their evidence and end
with 124.

The threads run only while Python runs: a call into C that never returns and holds the interpreter's lock (the GIL) blocks them
too. XLA, tensorstore and the operating system release the lock. Of several processes, the others report such a process.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.config.durations import duration
from jaxtrain.config.schema import Problem, suggest
from jaxtrain.runtime import progress
from jaxtrain.runtime.service import LEAVE_S

if TYPE_CHECKING:
    from jaxtrain.runtime.peers import Peers

LOGGER = logging.getLogger("jaxtrain")
KEY = "train.timeouts"
EXIT_CODE = 124

BUDGETS: dict[str, float] = {  # seconds; 0: not watched
    "startup": 900.0,
    "compile": 5400.0,  # a cold compile of a large model takes 20 minutes, and autotuning adds to it
    "step": 900.0,
    "checkpoint": 1800.0,
    "data": 900.0,
}
CAUSES = {  # what took too long, as `phase` and `begin` name it; the seconds follow. Of others: NAME has not finished after
    "startup": "the run has not started after",
    "compile": "compiling has not finished after",
    "step": "no step finished within",
    "eval": "no batch of an evaluation finished within",
    "save": "saving has not finished after",
    "restore": "restoring has not finished after",
    "data": "waiting for data for",
}

POLL_S = 2.0  # the longest interval between two checks
EVIDENCE_S = 4.0  # for each part of the evidence: file systems, devices and terminals may be the cause of the hang
TOGETHER_S = 10.0  # for the other processes to write theirs


def parse_budgets(text: str) -> tuple[dict[str, float], list[Problem]]:
    """Return `train.timeouts` ("step=600,data=120") as name -> seconds, and its problems.

    Budgets that are not named, or whose entry is wrong, keep their default; 0 disables a budget.
    """
    budgets, named_budgets, problems = dict(BUDGETS), set(), []
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = (piece.strip() for piece in item.partition("="))
        seconds = math.nan
        with contextlib.suppress(ValueError):
            seconds = float(value)
        if not (name and value):
            problems.append(Problem(KEY, item, "must be NAME=SECONDS", f"For example {name or 'step'}=600."))
        elif name not in BUDGETS:
            problems.append(Problem(KEY, item, f"there is no {name!r} to watch", suggest(name, list(BUDGETS))))
        elif name in named_budgets:
            problems.append(Problem(KEY, item, f"{name!r} is named twice", "Keep one of them."))
        elif not 0 <= seconds < math.inf:
            rule = "a budget is a number of seconds above 0, or 0 for none"
            problems.append(Problem(KEY, item, rule, f"{name}={BUDGETS[name]:g} is the default."))
        else:
            budgets[name] = seconds
        named_budgets.add(name)
    return budgets, problems


@dataclasses.dataclass(eq=False)
class Activity:
    """A running activity. Its clock shows the seconds of its budget that are used; times are those of time.monotonic()."""

    budget: str  # in BUDGETS
    label: str  # in CAUSES, or in words
    budget_s: float  # 0: not watched
    since: float  # the clock's zero: the last progress, later by the time for which the clock was paused

    def over(self, now: float) -> float:
        """Return seconds beyond the budget; negative within it, and -inf without a budget."""
        return now - self.since - self.budget_s if self.budget_s else -math.inf


class Watchdog:
    """Watches a run from `__enter__` to `__exit__`. A context manager; see the module.

    Args:
        budgets: seconds by name, from `parse_budgets`; if all are 0, no thread is started.
        workdir: the run's folder. Created at a hang if it is missing.
        ended: called with the cause after the folder is written, to finish the receipt, for at most EVIDENCE_S seconds. Returns
            the exit code: EXIT_CODE, or that of a run that had ended before.
        process_index: part of the files' names.

    Attributes:
        facts: returns facts about the run (last steps, a pending save, device memory) for report.json. Called at a hang, in its
            own thread, for at most EVIDENCE_S seconds. An exception is written into the report.
        peers: the processes of the run, once they are connected.
    """

    def __init__(self, budgets: Mapping[str, float], workdir: Path, *, ended: Callable[[str], int], process_index: int = 0):
        self.facts: Callable[[], dict[str, Any]] = dict
        self.peers: Peers | None = None
        self._budgets = {name: budgets.get(name, 0.0) for name in BUDGETS}
        self._workdir = Path(workdir).absolute()
        self._ended, self._process_index = ended, process_index
        self._interval = min(POLL_S, min(filter(None, self._budgets.values()), default=0.0) / 20)
        self._lock = threading.Lock()
        self._step: int | None = None
        self._phases: list[Activity] = []  # of the main thread, the innermost last
        self._background: set[Activity] = set()  # in the background
        self._last_end = time.monotonic()  # when the last phase ended
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self._interval:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
            threading.Thread(target=self._publish, name="watchdog: progress", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _activity(self, budget: str, label: str) -> Activity:
        return Activity(budget, label, self._budgets[budget], time.monotonic())

    @contextlib.contextmanager
    def phase(self, name: str, label: str = "") -> Iterator[None]:
        """Give the main thread's work in this block the budget `name`; the budget of the enclosing block is paused.

        label: names the work, as in CAUSES, if it is not `name`. Raises KeyError for a name that is not in BUDGETS.
        """
        activity, began = self._activity(name, label or name), time.monotonic()
        with self._lock:
            self._phases.append(activity)
        try:
            yield
        finally:
            with self._lock:
                self._phases.pop()
                self._last_end = now = time.monotonic()
                if self._phases:
                    outer = self._phases[-1]
                    outer.since = min(outer.since + now - began, now)

    def budget(self, name: str) -> float:
        """Return the seconds of a budget; 0: not watched."""
        return self._budgets[name]

    def beat(self, step: int | None = None) -> None:
        """Reset the budget of the innermost phase, which made progress. step: the one that now begins, counted from 1."""
        with self._lock:
            self._step = step or self._step
            if self._phases:
                self._phases[-1].since = time.monotonic()

    def begin(self, name: str, label: str) -> Activity:
        """Begin an activity in the background with the budget `name`; `label` ("the save of step 500") names it in the cause.

        Raises KeyError for a name that is not in BUDGETS."""
        activity = self._activity(name, label)
        with self._lock:
            self._background.add(activity)
        return activity

    def end(self, activity: Activity) -> None:
        """End what `begin` has begun. Raises KeyError if it has ended before."""
        with self._lock:
            self._background.remove(activity)

    # ---- The watchdog's threads

    def _publish(self) -> None:
        """Publish where this process is. Not in the thread that watches, because this one waits if process 0 is stopped."""
        while not self._stop.wait(progress.PUBLISH_S):
            if self.peers is not None and self.peers.count > 1:
                with self._lock:
                    inner = self._phases[-1] if self._phases else Activity("", "end", 0.0, self._last_end)
                since, waits_at = time.monotonic() - inner.since, self.peers.waits_at()
                with contextlib.suppress(RuntimeError):  # process 0 is lost: peers.py reports it
                    self.peers.publish(progress.record(self._step, inner.label, since, waits_at))

    def _watch(self) -> None:
        try:
            last = time.monotonic()
            while not self._stop.wait(self._interval):
                now = time.monotonic()
                # Time in which the process did not run (it was stopped, or its node suspended) uses no budget. A call into C
                # that holds the GIL for long and then returns has the same effect: the two cannot be distinguished here.
                late, last = now - last - self._interval, now
                with self._lock:
                    for activity in (*self._phases, *self._background) if late > self._interval else ():
                        activity.since = min(activity.since + late, now)  # one that began after the pause is not extended
                    overdue = self._overdue(now)
                    peer_hang = self.peers is not None and self.peers.hang is not None
                    report = self._report(overdue) if overdue or peer_hang else None
                if report:
                    self._leave(report)
        except Exception:  # of this file, or no space for a few lines: no reason to end a healthy run
            LOGGER.exception("the watchdog has failed; the run continues without it")

    def _running(self) -> list[Activity]:
        return [*self._phases[-1:], *self._background]

    def _overdue(self, now: float) -> Activity | None:
        """Return the activity that is furthest beyond its budget, or None."""
        late = max(self._running(), key=lambda activity: activity.over(now), default=None)
        return late if late is not None and late.over(now) > 0 else None

    # ---- The end

    def _leave(self, report: dict[str, Any]) -> None:
        """Write the evidence and end the process, even if something else hangs or fails."""
        faults, codes = list[str](), [EXIT_CODE]

        def attempt(failure: str, call: Callable[[], Any], seconds: float = EVIDENCE_S) -> str | None:
            if (fault := _run_within(seconds, call)) is not None:
                faults.append(f"{failure}: {fault}")
            return fault

        try:
            peers = self.peers if self.peers is not None and self.peers.count > 1 else None
            if peers is not None:
                attempt("unknown where all are", lambda: self._compare(report, peers), progress.SILENT_S + EVIDENCE_S)
            cause = report["cause"]
            # The stacks first: asking a device for facts may end this process. They go elsewhere if the run's folder hangs.
            for parent in (self._workdir, Path(tempfile.gettempdir())):
                folder = parent / report["folder"]
                write = functools.partial(self._write_stacks, folder, cause)
                if attempt(f"{folder} could not be written", write) is None:
                    break
            if fault := attempt("facts are missing", lambda: report.update(facts=self.facts())):
                report["facts"] = {"error": fault}
            attempt(
                "report.json could not be written",
                lambda: self._write(folder, "report.json", json.dumps(report, indent=1, default=str) + "\n"),
            )
            text = "; ".join([f"the run hangs and is ended: {cause}. Evidence: {folder}", *faults])
            _run_within(EVIDENCE_S, lambda: LOGGER.error("%s", text))
            if fault := _run_within(EVIDENCE_S, lambda: codes.append(int(self._ended(cause)))):
                _run_within(EVIDENCE_S, lambda: LOGGER.error("%s", f"the run's files could not be completed: {fault}"))
            if peers is not None:  # the end of process 0 would abort the others
                _run_within(TOGETHER_S + 1, lambda: peers.meet("hang", TOGETHER_S))
                if self._process_index == 0:
                    time.sleep(LEAVE_S)  # until the others have the answer
        finally:
            os._exit(codes[-1])  # sys.exit would end only this thread, and the main thread hangs

    def _report(self, overdue: Activity | None) -> dict[str, Any]:
        """Return the fields of report.json that are known at once."""
        now, cause = time.monotonic(), ""
        if overdue is not None:
            cause = CAUSES.get(overdue.label, f"{overdue.label} has not finished after")
            cause += f" {duration(overdue.budget_s)} ({KEY}: {overdue.budget}={overdue.budget_s:g})"
        return {
            "cause": cause,
            "phase": self._phases[-1].label if self._phases else None,
            "step": self._step,
            "budget": overdue and overdue.budget,
            "budget_s": overdue and overdue.budget_s,
            "seconds": overdue and now - overdue.since,
            "activities": [{"name": a.budget, "what": a.label, "seconds": now - a.since} for a in self._running()],
            "folder": time.strftime("hang-%Y%m%d-%H%M%S"),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_index": self._process_index,
        }

    def _compare(self, report: dict[str, Any], peers: "Peers") -> None:
        """Add where all processes are to the cause and the report. The first process to find this tells it to the others."""
        if (hang := peers.hang) is None:
            before = peers.read_progress()
            time.sleep(progress.SILENT_S)
            now = peers.read_progress()
            states = progress.process_states(now, peers.present(), [i for i in now if now[i] == before.get(i)])
            cause = ": ".join(filter(None, (progress.describe_states(states, peers.name), report["cause"])))
            hang = peers.tell_hang(json.dumps({"cause": cause, "processes": states, "folder": report["folder"]}))
        report |= json.loads(hang)

    def _write_stacks(self, folder: Path, cause: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._write(folder, "cause.txt", f"{cause}\n")
        # Not by faulthandler, which holds the GIL while it writes: if the folder hangs, it would block Python.
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [cause]
        for ident, frame in sys._current_frames().items():
            lines += ["", f"Thread {names.get(ident, ident)} (most recent call first):"]
            for each, line in traceback.walk_stack(frame):
                lines.append(f'  File "{each.f_code.co_filename}", line {line} in {each.f_code.co_name}')
        self._write(folder, "stacks.txt", "\n".join(lines) + "\n")

    def _write(self, folder: Path, name: str, text: str) -> None:
        stem, suffix = name.split(".")
        name = f"{stem}.{self._process_index}.{suffix}" if self._process_index else name
        (folder / name).write_bytes(text.encode(errors="backslashreplace"))


def _run_within(seconds: float, call: Callable[[], Any]) -> str | None:
    """Call a function in its own thread. Return its exception, or that it takes longer; None if it has returned."""
    faults: list[str | None] = []

    def run_call() -> None:
        try:
            call()
            faults.append(None)
        except BaseException as error:  # SystemExit too: the caller ends the process, and the error is reported
            faults.append(repr(error))

    try:
        thread = threading.Thread(target=run_call, name="watchdog's evidence", daemon=True)
        thread.start()
    except RuntimeError as error:  # no more threads may be started
        return repr(error)
    thread.join(seconds)
    return faults[0] if faults else f"not done within {seconds:g} s"
