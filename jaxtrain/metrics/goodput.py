"""The wall time of a run by cause, over all attempts: its ledger goodput.jsonl, and the sum over its lines. Imports no jax.

Goodput is the fraction of the wall time spent on steps that are not repeated later. It does not count "stopped" as wall time:
the time between a planned end (exit code 0, or 130 for Ctrl-C) and the next attempt.

Process 0 appends to the ledger. A line of kind `begin` opens an attempt. `spent` has the seconds since the previous line, by
cause. `back` is a rollback to a step: the steps after it are repeated. `end` has the end of the attempt. The file's
modification time is set once a second, and so shows when a killed attempt was last alive.
"""

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.durations import duration
from jaxtrain.metrics.files import naming

LOGGER = logging.getLogger("jaxtrain")

# Cause -> its meaning. "other" is the end of the process, after the last step.
MEANING = {
    "step": "steps that counted",
    "startup": "from the start of the process to the first step, without compiling, restoring and data",
    "compile": "compiling",
    "restore": "reading a checkpoint",
    "data": "waiting for data",
    "save": "waiting for a save",
    "eval": "held-out loss and samples",
    "repeated": "steps that were lost and repeated",
    "hang": "hang, until the watchdog ended it",
    "down": "from a crash or a request to stop to the next attempt, preflight included",
    "other": "the rest",
    "stopped": "between a planned end and the next attempt",
}
CAUSES = tuple(MEANING)
REPEATABLE = ("step", "data", "eval")  # time of a step that was lost
HUNG = 124  # the watchdog's exit code
WANTED = (0, 130)  # exit codes of a planned end
FILE = "goodput.jsonl"
LINE_S = 30.0  # longest time between two lines of the ledger
BEAT_S = 1.0
PATIENCE_S = 2.0  # longest wait for another thread that may hang in a write


@dataclasses.dataclass
class Span:
    """A span of time of an attempt, or between two attempts (attempt 0).

    `first` and `last` are the numbers of steps done at its start and at its end. last None: unknown.
    """

    attempt: int
    start: float  # seconds since 1970
    end: float
    seconds: dict[str, float]
    first: int = 0
    last: int | None = 0


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The wall time of a run by cause. `seconds` has the seconds of every cause, "stopped" included, and sums to `wall_s`."""

    wall_s: float
    seconds: dict[str, float]
    attempts: int
    steps: int  # done
    steps_repeated: int  # at least: the last seconds of a killed attempt are not counted
    spans: list[Span] = dataclasses.field(default_factory=list)

    @property
    def wanted_s(self) -> float:
        """Return the wall time without "stopped", of which goodput is a fraction."""
        return self.wall_s - self.seconds["stopped"]

    @property
    def goodput(self) -> float | None:
        """Return the goodput as a fraction of `wanted_s`; None if that time is 0."""
        return self.seconds["step"] / self.wanted_s if self.wanted_s > 0 else None

    def record(self) -> dict[str, Any]:
        """Return the goodput as the receipt stores it."""
        seconds = {cause: round(s, 3) for cause, s in self.seconds.items()}
        counted = {"attempts": self.attempts, "steps": self.steps, "steps_repeated": self.steps_repeated}
        return {"goodput": self.goodput, "wall_s": round(self.wall_s, 3), "parts_s": seconds, **counted}


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ledger. The last line also has `seen_last`: the file's modification time, as the run set it last.

    A line cut short, by a kill or a full disk, is left out. A missing ledger has no lines. Raises ValueError for another file.
    """
    lines = []
    for text in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    if not all(isinstance(line, dict) and "kind" in line for line in lines):
        raise ValueError(f"{path}: not a goodput ledger")
    if lines:
        lines[-1]["seen_last"] = path.stat().st_mtime
    return lines


def summarise(lines: Iterable[Mapping[str, Any]]) -> Goodput:
    """Sum up the lines of a ledger. The last activity of a killed or a live attempt counts until it was last seen."""
    spans: list[Span] = []
    attempts = at = repeated = 0
    end = began = 0.0  # of the last span; of the first attempt
    doing: str | None = None  # in the present attempt; None between attempts
    away = "down"
    last_seen: float | None = None

    def add(attempt: int, seconds: dict[str, float], last: int | None) -> float:
        spans.append(Span(attempt, end, end + sum(seconds.values()), seconds, at, last))
        return spans[-1].end

    def unwritten(alive_until: float | None) -> float:
        """Return the seconds from the last line to `alive_until`. A file with a far later modification time was copied."""
        return min(max(0.0, (alive_until or end) - end), 2 * LINE_S)

    for line in lines:
        kind = line["kind"]
        if kind == "begin":
            if doing is not None:  # the attempt was killed
                end, away = add(attempts, {doing: unwritten(line["seen"])}, None), "down"
                for span in _without_progress(spans, attempts):
                    span.last = None  # during unfinished steps
            if attempts:
                end = add(0, {away: max(0.0, line["time"] - end)}, at)
            else:
                end = began = line["time"]
            attempts, doing, last_seen = attempts + 1, "startup", None
        elif kind == "spent":
            done = at if line["step"] is None else line["step"]
            end = add(attempts, dict(line["seconds"]), done)
            at, doing = done, line["doing"]
        elif kind == "back":
            repeated += max(0, at - line["step"])
            at = line["step"]
            _repeat(spans, at)
        elif kind == "end":
            doing, away = None, "stopped" if line["exit_code"] in WANTED else "down"
            if line["exit_code"] == HUNG:  # the watchdog ended it
                for span in _without_progress(spans, attempts):
                    span.seconds = {"hang": sum(span.seconds.values())}
        last_seen = line.get("seen_last", last_seen)
    if doing is not None:
        end = add(attempts, {doing: unwritten(last_seen)}, None)
    cause_seconds = {cause: math.fsum(span.seconds.get(cause, 0.0) for span in spans) for cause in CAUSES}
    return Goodput(end - began, cause_seconds, attempts, at, repeated, spans)


def _without_progress(spans: list[Span], attempt: int) -> list[Span]:
    """Return the newest spans of an attempt, after its last span in which a step was done."""
    newest = itertools.takewhile(lambda span: span.attempt == attempt, reversed(spans))
    return list(itertools.takewhile(lambda span: span.last is None or span.first == span.last, newest))


def _repeat(spans: list[Span], step: int) -> None:
    """Count the time of steps after `step` as "repeated": the run takes these steps again."""
    for span in spans:
        if span.last is not None and span.last <= step:
            continue
        repeats_all = span.last is None or span.first >= step
        share = 1.0 if repeats_all or span.last is None else (span.last - step) / (span.last - span.first)
        for cause in REPEATABLE:
            lost = share * span.seconds.get(cause, 0.0)
            if lost:
                span.seconds[cause] -= lost
                span.seconds["repeated"] = span.seconds.get("repeated", 0.0) + lost
        span.last = span.first if repeats_all else step  # a later `back` may go further


def format_goodput(total: Goodput) -> str:
    """Return one line: the goodput, and the causes of at least 0.1% of the wall time, except "step" and "stopped"."""
    if total.goodput is None:
        return "goodput: nothing has been measured yet"
    shown = {cause: s for cause, s in total.seconds.items() if cause not in ("step", "stopped") and s >= 0.001 * total.wall_s}
    lost = ", ".join(f"{cause} {duration(shown[cause])}" for cause in sorted(shown, key=shown.__getitem__, reverse=True))
    attempts = f"{total.attempts} attempt{'s' if total.attempts > 1 else ''}"
    repeated = f"; {total.steps_repeated} steps or more were taken again" if total.steps_repeated else ""
    return f"goodput {total.goodput:.1%} of {duration(total.wanted_s)} in {attempts}; the rest: {lost or 'nothing'}{repeated}"


class Ledger:
    """Records the time of one attempt by cause. A context manager. Only the main thread calls `during` and `base`.

    path: path of goodput.jsonl. began: start of the process, in seconds since 1970. active: False on processes other than 0,
    which write nothing.
    """

    def __init__(self, path: Path, began: float, active: bool = True):
        self.path, self._active, self._ended = path, active, False
        self._offset = time.time() - time.monotonic()  # one clock for the whole attempt, independent of NTP
        self._since = self._line = began  # when the present cause began; when the last line was written
        self._stack = ["startup"]
        self._spent: dict[str, float] = {}  # since the last line
        self._total: dict[str, float] = {}  # of this attempt
        self._step: int | None = None  # unknown before there is a state
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._cut = False  # whether the last line is incomplete: a kill, or a full disk, has cut it
        self._thread = threading.Thread(target=self._beat, name="goodput", daemon=True)

    def __enter__(self) -> "Ledger":
        if self._active:
            last_seen = None
            with naming(self.path), contextlib.suppress(FileNotFoundError):
                last_seen = self.path.stat().st_mtime
                self._cut = self.path.read_bytes()[-1:] not in (b"", b"\n")
            self._append({"kind": "begin", "time": self._since, "seen": last_seen})
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def base(self, cause: str) -> None:
        """Set the cause of all time that no `during` block counts, from now on."""
        with self._lock:
            self._account()
            self._stack[0] = cause
            self._write()  # a reader counts the time since the last line for the cause in that line

    @contextlib.contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Count the time in this block for `cause`, except the time of blocks within it."""
        with self._lock:
            self._account()
            self._stack.append(cause)
        try:
            yield
        finally:
            with self._lock:
                self._account()
                self._stack.pop()
                if cause != "data":
                    self._write()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of this attempt so far by cause, on any process."""
        with self._lock:
            self._account()
            return dict(self._total)

    @property
    def step(self) -> int | None:
        """Return the number of steps done; None before there is a state."""
        return self._step

    def record_step(self, step: int) -> None:
        """Record that `step` steps are done."""
        with self._lock:
            self._step = step

    def back(self, step: int) -> None:
        """Record a rollback to this step: later steps will be repeated."""
        with self._lock:
            self._account()
            self._write()
            self._step = step
            self._append({"kind": "back", "step": step})

    def end(self, exit_code: int, reason: str) -> None:
        """Record the end of the attempt, the last line that is written.

        If another thread holds the lock for PATIENCE_S seconds, nothing is recorded.
        """
        self._over.set()
        if not self._lock.acquire(timeout=PATIENCE_S):  # the watchdog, for example, must not wait
            return
        try:
            self._account()
            self._write()
            self._append({"kind": "end", "time": self._line, "exit_code": exit_code, "reason": reason})
            self._ended = True
        finally:
            self._lock.release()

    def close(self, exit_code: int, reason: str) -> Goodput | None:
        """Record the end, and return the goodput of all attempts; None on processes other than 0, or for an unreadable file."""
        self.end(exit_code, reason)
        try:
            return summarise(read_ledger(self.path)) if self._active else None
        except (OSError, ValueError) as error:
            LOGGER.warning("%s", f"no goodput: {error}")
            return None

    def _account(self) -> None:
        now, cause = time.monotonic() + self._offset, self._stack[-1]
        for seconds in (self._spent, self._total):
            seconds[cause] = seconds.get(cause, 0.0) + now - self._since
        self._since = now

    def _write(self) -> None:
        """Write one line with all time since the last line. If the write fails, the next line includes this time."""
        seconds = {cause: round(s, 6) for cause, s in self._spent.items() if s > 0}
        line = {"kind": "spent", "until": self._since, "seconds": seconds, "step": self._step, "doing": self._stack[-1]}
        if seconds and self._append(line):
            self._spent, self._line = {}, self._since

    def _append(self, line: Mapping[str, Any]) -> bool:
        if not self._active or self._ended:
            return False
        try:
            with open(self.path, "ab", buffering=0) as file:
                text = b"\n" * self._cut + json.dumps(line).encode() + b"\n"
                if file.write(text) != len(text):
                    raise OSError(errno.ENOSPC, "only a part of a line could be written")
        except OSError as error:
            if not self._cut:
                LOGGER.warning("%s", f"{self.path} cannot be written ({error}): the time it lacks counts as lost")
            self._cut = True
            return False
        self._cut = False
        return True

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            with self._lock:
                self._account()
                if self._since - self._line >= LINE_S:
                    self._write()
                now = self._since
            with contextlib.suppress(OSError):  # the next line of the ledger includes this time
                os.utime(self.path, (now, now))
