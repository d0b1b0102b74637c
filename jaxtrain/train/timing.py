"""Measure the start of a run by part, and find steps that took far longer than others. Imports no jax.

Python would collect garbage at any time, in each process at another step, while the other processes wait in a collective. So
the garbage collector is off during training, and the loop calls it in every process after the same step.
"""

import collections
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxtrain.config.durations import duration


def process_age_s() -> float:
    """Return the seconds since this process was started; 0.0 on a system without /proc."""
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        return float(Path("/proc/uptime").read_bytes().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


class StartTimes:
    """Seconds from the start of the process to the first step, by part.

    Construct it when JAX has its devices: the part `launch` ends with the construction.
    """

    def __init__(self):
        self.parts: dict[str, float] = {"launch": process_age_s()}
        self._since = time.perf_counter()

    def end(self, part: str) -> None:
        """Add the time since the previous call to the part `part`; at the first call, the time since the construction."""
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._since
        self._since = now

    @property
    def words(self) -> str:
        """Return a line for the log with all parts, in order."""
        parts = ", ".join(f"{part} {duration(seconds)}" for part, seconds in self.parts.items())
        return f"first step {duration(sum(self.parts.values()))} after the process began: {parts}"


class Patience:
    """Tells, from a thread of its own, that something still runs: after FIRST_S seconds, then every AGAIN_S. A context manager.

    tell: called with the seconds since `begin`.
    """

    FIRST_S = 60.0
    AGAIN_S = 300.0

    def __init__(self, tell: Callable[[float], None]):
        self._tell = tell
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start to wait, unless this was done before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="slow start", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Tell nothing from here on."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> "Patience":
        self.begin()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def _wait(self) -> None:
        began, pause = time.monotonic(), self.FIRST_S
        while not self._over.wait(pause):
            self._tell(time.monotonic() - began)
            pause = self.AGAIN_S


class GarbageCollector:
    """Switches Python's garbage collector off during the loop, and collects by `step`. Use as a context manager.

    On entry all objects (modules, compiled programs, the model's tree) are frozen: collections then do not traverse them. On
    exit the collector is as it was before. Objects that other code had frozen are unfrozen too: Python cannot distinguish them.
    """

    EVERY = 50  # steps between two collections

    def __enter__(self) -> "GarbageCollector":
        self._enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def __exit__(self, *exc: object) -> None:
        gc.unfreeze()
        if self._enabled:
            gc.enable()

    def step(self, done: int) -> float:
        """Collect garbage if `done`, the number of steps, is a multiple of EVERY. Return the seconds of the collection, or 0.0.

        Call it after every step. It collects only the two young generations: a step leaves no old garbage, and a search of the
        old generation takes far longer.
        """
        if done % self.EVERY:
            return 0.0
        began = time.perf_counter()
        gc.collect(1)
        return time.perf_counter() - began


class SlowSteps:
    """Finds steps that took far longer than others, and a run that became slower than it was at its start.

    A slow step takes more than TIMES the median of the last steps, and at least LEAST_S more than the median. A step's time is
    from its start to the start of the next step. Time that the loop does not account for is attributed to the device and other
    causes.
    """

    WINDOW = 64  # steps whose times are known
    ENOUGH = 16  # times that make a median
    TIMES = 2.0
    LEAST_S = 0.25  # a shorter pause is ignored, even for short steps
    SHARE = 0.01  # of the excess; a smaller share is left out of the line
    APART = 20  # steps between two lines, at least
    SLOWER = 3.0  # times the median at the run's start
    SLOWER_S = 0.1  # and at least this many seconds more

    def __init__(self):
        self._times: collections.deque[float] = collections.deque(maxlen=self.WINDOW)
        self._at_start: float | None = None  # the first median, s
        self._slower = False  # it was reported that all steps have become slower
        self._reported: int | None = None  # the step of the last line
        self._left_out = 0

    def note(
        self, step: int, wall_s: float, *, data_s: float, save_s: float, gc_s: float, eval_s: float, saving: int | None = None
    ) -> str | None:
        """Note the times of a step. Return a line for the log if the step was slow or steps have become slower, else None.

        Args:
          wall_s: seconds from the start of the step to the start of the next step.
          data_s: seconds of `wall_s` in which the loop waited for data.
          save_s: seconds of `wall_s` in which the loop waited for saves.
          gc_s: seconds of `wall_s` in which the loop collected garbage.
          eval_s: seconds of evaluation and samples. If above 0, the step takes long on purpose and is not compared.
          saving: the step whose save runs at the same time, which slows this step; None: no save runs.
        """
        if eval_s > 0:
            return None
        usual = statistics.median_low(self._times) if len(self._times) >= self.ENOUGH else None
        self._times.append(wall_s)
        if usual is None:
            return None
        if len(self._times) == self.WINDOW and self._at_start is None:
            self._at_start = usual
        if slower := self._note_slower(step, usual):
            return slower
        if wall_s <= self.TIMES * usual or wall_s - usual < self.LEAST_S:
            return None
        if self._reported is not None and step - self._reported < self.APART:
            self._left_out += 1
            return None
        rest = max(0.0, wall_s - data_s - save_s - gc_s)
        parts = {"data": data_s, "save": save_s, "Python's collector": gc_s, "device and other causes": rest}
        worth = {name: seconds for name, seconds in parts.items() if seconds >= self.SHARE * (wall_s - usual)}
        said = ", ".join(f"{name} {worth[name]:.2f} s" for name in sorted(worth, key=worth.__getitem__, reverse=True))
        more = f" ({self._left_out} more slow since step {self._reported})" if self._left_out else ""
        self._reported, self._left_out = step, 0
        beside = f", while step {saving} was being saved" if saving is not None else ""
        return f"step {step} took {wall_s:.2f} s, usually {usual:.2f} s: {said}{beside}{more}"

    def _note_slower(self, step: int, usual: float) -> str | None:
        """Return a line once if steps have become slower than at the start of the run, else None.

        It returns another line only if steps have become fast again in between.
        """
        start = self._at_start
        if start is None:
            return None
        slow = usual > self.SLOWER * start and usual - start > self.SLOWER_S
        if slow and not self._slower:
            self._slower = True
            return f"steps take {usual:.2f} s around step {step}, and took {start:.2f} s at the start of this run"
        if usual <= self.TIMES * start:
            self._slower = False
        return None
