"""Time limits: stop before `train.max_minutes` or the end of a Slurm job."""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxtrain.config.durations import duration
from jaxtrain.config.schema import Problem
from jaxtrain.runtime.variables import LAUNCHED, NOTE

END = "SLURM_JOB_END_TIME"  # seconds since 1970; Slurm sets it for every job
LEAST_S = 60.0  # left for the last save, in addition to twice the longest save
MOST = 0.25  # largest fraction of the whole time that is left for the last save
LOOK_S = 1.0
REASON = "time limit"


def launch_time(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the time when run.sh was called, in seconds since 1970; None without run.sh."""
    text = environ.get(LAUNCHED, "")
    return float(text) if text.isdigit() else None


def forbid_restart(why: str, environ: Mapping[str, str] = os.environ) -> None:
    """If `why`, the reason of the stop, is the time limit, ask the run.sh that started this run not to restart it."""
    if why.startswith(REASON) and NOTE in environ:
        with contextlib.suppress(OSError):  # without the note, the next attempt ends at once for its time limit
            Path(environ[NOTE]).write_text("its time limit is over (train.max_minutes)\n", encoding="utf-8")


def limit_s(
    text: str, environ: Mapping[str, str] = os.environ, now: float | None = None, age: float = 0.0
) -> tuple[float, list[Problem]]:
    """Return the seconds from now that `train.max_minutes` allows, inf for no limit, and its problems.

    Minutes count from the call of run.sh, or without run.sh from `age` seconds ago. "auto": until the end of the Slurm job.
    """
    key, value = "train.max_minutes", text.strip()
    if not value:
        return math.inf, []
    if value == "auto":
        end = environ.get(END, "")
        if not end.isdigit():
            rule = f"auto goes by {END}, which is {'not set' if not end else repr(end)}: this is no job of Slurm's"
            return math.inf, [Problem(key, text, rule, "Set a number of minutes, or '' for no limit.")]
        return float(end) - (time.time() if now is None else now), []
    try:
        minutes = float(value)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        return math.inf, [
            Problem(key, text, "must be a number of minutes above 0, or auto", "For example 230, or '' for no limit.")
        ]
    now = time.time() if now is None else now
    began = launch_time(environ)
    return 60 * minutes - (now - began if began is not None else age), []


class TimeLimit:
    """Asks a run to stop in time. A context manager.

    seconds: until the run should have ended; inf: never. save_s: returns the seconds of the longest save so far. ask: called
    once, with a reason in words, when the remaining time is LEAST_S + 2 save_s(), but at most MOST x `seconds`.
    """

    def __init__(self, seconds: float, save_s: Callable[[], float], ask: Callable[[str], None]):
        self._end, self._seconds = time.monotonic() + seconds, seconds
        self._save_s, self._ask = save_s, ask
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "TimeLimit":
        if math.isfinite(self._seconds):
            self._thread = threading.Thread(target=self._wait, name="time limit", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._thread:
            self._thread.join()

    def _wait(self) -> None:
        while not self._over.wait(LOOK_S):
            remaining = self._end - time.monotonic()
            if remaining <= min(LEAST_S + 2 * self._save_s(), MOST * self._seconds):
                self._ask(f"{REASON}, {duration(remaining)} before it")
                return
