"""Ends a run that hangs, and writes evidence of the cause. Imports no jax.

Each activity of a run has a budget (`BUDGETS`, in seconds): the phases of its main thread, and background work such as a save.
A thread checks the clock. When a budget is used up, it writes a folder `hang-YYYYMMDD-HHMMSS` into the run's folder and ends
the process with 124:

    cause.txt     the budget, in one sentence
    stacks.txt    the stack of every Python thread, and the state of every thread of the process
    report.json   the cause, the running activities with their ages, and the last facts of the run

(`cause.1.txt` and so on for processes other than 0.) The thread runs only while Python runs: a call into C that never returns
and holds the interpreter's lock (the GIL) blocks the thread too. XLA, tensorstore and the operating system release the lock.
"""

import contextlib
import faulthandler
import json
import logging
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.durations import duration
from jaxtrain.config.schema import Problem, nearest

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
CAUSES = {  # the name of a phase that took too long; the seconds follow
    "startup": "the run has not started after",
    "compile": "compiling has not finished after",
    "step": "no step finished within",
    "checkpoint": "saving has not finished after",
    "data": "waiting for data for",
}

# Seconds for each step of ending the process: file systems, devices and terminals may be the cause of the hang.
STACKS_S, FACTS_S, REPORT_S, LOG_S, ENDED_S = 3.0, 3.0, 2.0, 2.0, 5.0

POLL_S = 2.0  # the longest interval between two checks


def parse_budgets(text: str) -> tuple[dict[str, float], list[Problem]]:
    """Return `train.timeouts` ("step=600,data=120") as name -> seconds, and its problems.

    Budgets that are not named, or whose entry is wrong, keep their default; 0 disables a budget.
    """
    budgets, named, problems = dict(BUDGETS), set(), []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, given, value = (part.strip() for part in item.partition("="))
        if not (given and name and value):
            problems.append(Problem(KEY, item, "must be NAME=SECONDS", f"For example {name or 'step'}=600."))
            continue
        if name not in BUDGETS:
            problems.append(Problem(KEY, item, f"there is no {name!r} to watch", nearest(name, list(BUDGETS))))
            continue
        if name in named:
            problems.append(Problem(KEY, item, f"{name!r} is named twice", "Keep one of them."))
            continue
        named.add(name)
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            rule = "a budget is a number of seconds above 0, or 0 for none"
            problems.append(Problem(KEY, item, rule, f"{name}={BUDGETS[name]:g} is the default."))
            continue
        budgets[name] = seconds
    return budgets, problems


class _Activity:
    """A running activity, and the seconds of its budget that are used."""

    def __init__(self, name: str, what: str | None, budget: float):
        self.name, self.what, self.budget = name, what, budget  # what: only for background activities; seconds, 0: none
        self.began = self.since = time.monotonic()
        self.used = 0.0  # seconds of the budget, those after `since` not counted
        self.stands = False  # whether its clock is paused, because a phase within it runs

    def seconds(self, now: float) -> float:
        """Return the used seconds of the budget."""
        return self.used if self.stands else self.used + now - self.since

    def pause(self, now: float) -> None:
        self.used, self.stands = self.seconds(now), True

    def resume(self, now: float) -> None:
        self.since, self.stands = now, False

    def restart(self, now: float) -> None:
        self.used, self.since = 0.0, now

    def over(self, now: float) -> float:
        """Return seconds beyond the budget; negative within it, and -inf without a budget."""
        return self.seconds(now) - self.budget if self.budget else -math.inf

    def cause(self) -> str:
        """Return the sentence of cause.txt for a budget that is used up."""
        began = f"{self.what} has not finished after" if self.what else CAUSES[self.name]
        return f"{began} {duration(self.budget)} ({KEY}: {self.name}={self.budget:g})"

    def fields(self, now: float) -> dict[str, Any]:
        """Return the activity's fields in report.json; times in seconds."""
        return {
            "name": self.name,
            "what": self.what,
            "seconds": self.seconds(now),
            "budget_s": self.budget or None,
            "since_begun_s": now - self.began,
            "stands": self.stands,
        }


class Watchdog:
    """Watches a run from `__enter__` to `__exit__`. A context manager; see the module.

    Args:
        budgets: seconds by name, from `parse_budgets`; if all are 0, no thread is started.
        workdir: the run's folder. Created at a hang if it is missing.
        facts: returns facts about the run (last steps, a pending save, device memory) for report.json. Called at a hang, in its
            own thread, for at most FACTS_S seconds. An exception is written into the report.
        ended: called with the cause after the folder is written, to finish the receipt. The call may take ENDED_S seconds.
        process_index: part of the files' names. May be set later, once it is known.
    """

    def __init__(
        self,
        budgets: Mapping[str, float],
        workdir: Path,
        *,
        ended: Callable[[str], None],
        process_index: int = 0,
    ):
        self.process_index = process_index
        self._budgets = {name: budgets.get(name, 0.0) for name in BUDGETS}
        self._workdir = Path(workdir).absolute()
        self._ended = ended
        self.facts: Callable[[], dict[str, Any]] = dict
        self.peers: Any = None
        on = [seconds for seconds in self._budgets.values() if seconds]
        self._interval = min(POLL_S, min(on, default=0.0) / 20)
        self._lock = threading.Lock()
        self._phases: list[_Activity] = []  # of the main thread, the innermost last
        self._beside: dict[int, _Activity] = {}
        self._tokens = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self._interval:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Give the main thread's work in this block the budget `name`; the budget of the enclosing block is paused.

        Raises KeyError for a name that is not in BUDGETS.
        """
        activity = _Activity(name, None, self._budgets[name])
        with self._lock:
            if self._phases:
                self._phases[-1].pause(activity.began)
            self._phases.append(activity)
        try:
            yield
        finally:
            with self._lock:
                self._phases.pop()
                if self._phases:
                    self._phases[-1].resume(time.monotonic())

    def budget(self, name: str) -> float:
        """Return the seconds of a budget; 0: not watched."""
        return self._budgets[name]

    def beat(self, step: int | None = None) -> None:
        """Reset the budget of the innermost phase, which made progress."""
        with self._lock:
            if self._phases:
                self._phases[-1].restart(time.monotonic())

    def begin(self, name: str, what: str) -> int:
        """Begin an activity in the background with the budget `name`; `what` ("the save of step 500") names it in the cause.

        Returns the token for `end`. Raises KeyError for a name that is not in BUDGETS."""
        activity = _Activity(name, what, self._budgets[name])
        with self._lock:
            self._tokens += 1
            self._beside[self._tokens] = activity
            return self._tokens

    def end(self, token: int) -> None:
        """End a background activity. Raises KeyError for a token that has ended before."""
        with self._lock:
            del self._beside[token]

    # ---- The watchdog's thread

    def _watch(self) -> None:
        try:
            last = time.monotonic()
            while not self._stop.wait(self._interval):
                now = time.monotonic()
                late, last = now - last - self._interval, now
                with self._lock:
                    if late > self._interval:
                        self._give_back(late, now)
                    report = self._overdue(now)
                if report:
                    self._leave(report)
        except Exception:  # of this file, or no space for a few lines: no reason to end a healthy run
            LOGGER.exception("the watchdog has failed; the run continues without it")

    def _under_way(self) -> list[_Activity]:
        return [*self._phases, *self._beside.values()]

    def _give_back(self, late: float, now: float) -> None:
        """Extend all budgets by `late` seconds in which the process did not run (it was stopped, or its node suspended).

        A call into C that holds the GIL for long and then returns has the same effect: the two cannot be distinguished here.
        """
        for activity in self._under_way():
            activity.since = min(activity.since + late, now)  # an activity that began after the pause is not extended

    def _overdue(self, now: float) -> dict[str, Any] | None:
        """Return the report of the activity that is furthest beyond its budget, or None."""
        running = [*self._phases[-1:], *self._beside.values()]
        late = max(running, key=lambda activity: activity.over(now), default=None)
        if late is None or late.over(now) <= 0:
            return None
        return {
            "cause": late.cause(),
            "phase": self._phases[-1].name if self._phases else None,
            "budget": late.name,
            "budget_s": late.budget,
            "seconds": late.seconds(now),
            "activities": [activity.fields(now) for activity in self._under_way()],
            **_here(os.getpid(), self.process_index),
        }

    def _leave(self, report: dict[str, Any]) -> None:
        """Write the evidence and end the process, even if something else hangs or fails."""
        try:
            cause, faults = report["cause"], []
            # The stacks first: asking a device for facts may end this process. They go elsewhere if the run's folder hangs.
            for place in (self._workdir, Path(tempfile.gettempdir())):
                folder = _folder(place)
                _, fault = _within(STACKS_S, lambda folder=folder: self._write_stacks(folder, cause))
                if fault is None:
                    break
                faults.append(f"{folder} could not be written: {fault}")
            facts, fault = _within(FACTS_S, lambda: _plain(self.facts()))
            report["facts"] = {"error": fault} if fault is not None else facts
            path = folder / _name("report", "json", self.process_index)
            _, fault = _within(REPORT_S, lambda: path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8"))
            if fault is not None:
                faults.append(f"{path} could not be written: {fault}")
            text = "; ".join([f"the run hangs and is ended: {cause}. Evidence: {folder}", *faults])
            _within(LOG_S, lambda: LOGGER.error("%s", text))
            _, fault = _within(ENDED_S, lambda: self._ended(cause))
            if fault is not None:
                _within(LOG_S, lambda: LOGGER.error("%s", f"the run's files could not be completed: {fault}"))
        finally:
            os._exit(EXIT_CODE)  # sys.exit would end only this thread, and the main thread hangs

    def _write_stacks(self, folder: Path, cause: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _name("cause", "txt", self.process_index)).write_bytes(f"{cause}\n".encode(errors="backslashreplace"))
        names = [f"  Thread 0x{t.ident or 0:016x}  {t.native_id}  {t.name}" for t in threading.enumerate()]
        # A temporary file first: faulthandler holds the GIL while it writes, and would block Python if the folder hangs.
        with tempfile.TemporaryFile("w+", encoding="utf-8") as dumped:
            faulthandler.dump_traceback(dumped, all_threads=True)
            dumped.seek(0)
            stacks = dumped.read()
        text = "\n".join([cause, "", "Python's threads: as below, native id, name", *names, "", stacks])
        text += _native_threads(os.getpid())
        (folder / _name("stacks", "txt", self.process_index)).write_bytes(text.encode(errors="backslashreplace"))


def _within(seconds: float, call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Call a function in its own thread. Return (its result, None), or (None, its exception or the timeout)."""
    found: list[tuple[Any, str | None]] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except BaseException as error:  # SystemExit too: the caller ends the process, and the error is reported
            found.append((None, repr(error)))

    try:
        thread = threading.Thread(target=run, name="watchdog's evidence", daemon=True)
        thread.start()
    except RuntimeError as error:  # no more threads may be started
        return None, repr(error)
    thread.join(seconds)
    return found[0] if found else (None, f"not done within {seconds:g} s")


def _plain(facts: Any) -> Any:
    """Return facts for JSON: values that JSON does not have, such as NaN, become text."""
    try:
        return json.loads(json.dumps(facts, default=str), parse_constant=str)
    except (TypeError, ValueError):  # keys that are no text, a cycle
        return {"text": repr(facts)}


def _here(pid: int, process_index: int) -> dict[str, Any]:
    """Return the fields of a report that identify the process and the time."""
    at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"time": at, "host": socket.gethostname(), "pid": pid, "process_index": process_index}


def _folder(workdir: Path) -> Path:
    return workdir / time.strftime("hang-%Y%m%d-%H%M%S")


def _name(stem: str, suffix: str, process_index: int) -> str:
    return f"{stem}.{suffix}" if process_index == 0 else f"{stem}.{process_index}.{suffix}"


def _native_threads(pid: int) -> str:
    """Return every thread of a process: native id, name, state, and the kernel's function that it waits in, if readable."""
    tasks = Path(f"/proc/{pid}/task")
    if not tasks.exists():
        return "\nThe system does not list the threads of a process.\n"
    lines = ["", "All threads of the process: native id, name, state (R runs, S waits, D waits for a device), waits in"]
    for task in sorted(tasks.iterdir(), key=lambda task: int(task.name)):
        try:
            name = (task / "comm").read_text(encoding="utf-8", errors="replace").strip()
            state = _state(task / "stat")
        except OSError:
            continue  # it ended meanwhile
        try:
            waits = (task / "wchan").read_text(encoding="utf-8").strip("0")
        except OSError:
            waits = ""  # not readable for this user
        lines.append(f"  {task.name}  {name}  {state}  {waits}".rstrip())
    return "\n".join(lines) + "\n"


def _state(stat: Path) -> str:
    """Return the state letter of a process or thread from its file `stat`: T if it is stopped."""
    return stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
