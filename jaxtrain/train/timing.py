"""Find steps that took far longer than others, and keep Python's garbage collector out of the steps. Imports no jax."""

import collections
import contextlib
import gc
import math
import os
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path


def process_age_s() -> float:
    """Return the seconds since this process was started; 0.0 on a system without /proc."""
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        return float(Path("/proc/uptime").read_bytes().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Switch Python's garbage collector off, with all present objects frozen: later collections do not traverse them.

    Python would collect in each process at another step, while the other processes wait in a collective. So the loop collects
    after the same steps in all of them.
    """
    on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if on:
            gc.enable()


class SlowSteps:
    """Finds steps that took more than TIMES the median of the last steps, and a run that became slower than at its start."""

    WINDOW, ENOUGH = 64, 16  # steps whose times are known; times that make a median
    TIMES, LEAST_S = 2.0, 0.25  # a slow step: times the median, and at least so much more
    SLOWER, SLOWER_S = 3.0, 0.1  # a slower run: the same of the first median
    SHARE = 0.01  # of the excess; a cause with a smaller share is left out of the line
    APART = 20  # steps between two lines, at least

    def __init__(self):
        self._times: collections.deque[float] = collections.deque(maxlen=self.WINDOW)
        self._reported, self._left_out = -self.APART, 0
        self._at_start, self._is_slower = math.inf, False  # the first median of a whole window

    def note(self, step: int, seconds: Mapping[str, float], saving: int | None = None) -> str | None:
        """Note the seconds of a step by cause, as in goodput.jsonl. Return a line for the log if it or the run is slow.

        A step with evaluation takes long on purpose, and is not compared. saving: the step whose save ran beside this one.
        """
        if seconds.get("eval"):
            return None
        wall_s = math.fsum(seconds.values())
        usual = statistics.median_low(self._times) if len(self._times) >= self.ENOUGH else math.inf
        self._times.append(wall_s)
        if self._at_start == math.inf and len(self._times) == self.WINDOW:
            self._at_start = usual
        was_slower, excess = self._is_slower, usual - self._at_start
        self._is_slower = usual > (self.TIMES if was_slower else self.SLOWER) * self._at_start and excess > self.SLOWER_S
        if self._is_slower and not was_slower:
            return f"steps take {usual:.2f} s around step {step}, and took {self._at_start:.2f} s at the start of this run"
        if wall_s <= self.TIMES * usual or wall_s - usual < self.LEAST_S:
            return None
        if step - self._reported < self.APART:
            self._left_out += 1
            return None
        more = f" ({self._left_out} more slow since step {self._reported})" if self._left_out else ""
        self._reported, self._left_out = step, 0
        causes = sorted(seconds.items(), key=lambda item: -item[1])
        cause_text = ", ".join(f"{cause} {s:.2f} s" for cause, s in causes if s >= self.SHARE * (wall_s - usual))
        beside = f", while step {saving} was being saved" if saving is not None else ""
        return f"step {step} took {wall_s:.2f} s, usually {usual:.2f} s: {cause_text}{beside}{more}"
