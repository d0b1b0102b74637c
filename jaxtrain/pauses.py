"""Pauses of the loop that are not the device's: why a step was slow, and Python's collector at steps of our choosing.

Python collects garbage when it likes: on each process at another step, and in a collective the others wait for that one. So
the collector is switched off while a run trains and called by the loop, on every process after the same step. No jax here.
"""

import collections
import gc
import statistics
import time


class Collector:
    """Python's collector under the loop's control. A context manager around it.

    What is alive on entry (modules, compiled programs, the model's tree) is taken out of the collector's sight, or each
    collection would walk through all of it. On exit the collector is as it was; what others had taken out of sight before is
    in its sight again too, since Python cannot tell the two apart. That costs time, never correctness.
    """

    EVERY = 50  # steps between two collections

    def __enter__(self) -> "Collector":
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
        """Call after every step, with the steps that are done. Collects when that is a multiple of EVERY; returns the seconds
        it took, 0.0 where it did nothing.

        Young objects only: a step leaves no old garbage, and looking for it would take far longer."""
        if done % self.EVERY:
            return 0.0
        began = time.perf_counter()
        gc.collect(1)
        return time.perf_counter() - began


class Pauses:
    """Finds steps that took far longer than usual, and says what they waited for.

    Slow is a step above TIMES the median of the last steps, and at least LEAST_S above it. Where the loop runs ahead of the
    device, a step's time is that from its start to the next one's start, and "the device" is what the loop cannot account for.
    """

    WINDOW = 64  # steps whose times are known
    ENOUGH = 16  # times from which on there is a "usually"
    TIMES = 2.0
    LEAST_S = 0.25  # a pause too short to care about, however short the steps
    SHARE = 0.01  # of the excess, below which a part is not worth a word
    APART = 20  # steps from one line to the next at least

    def __init__(self):
        self._times: collections.deque[float] = collections.deque(maxlen=self.WINDOW)
        self._told: int | None = None  # step of the last line
        self._left_out = 0

    def note(
        self, step: int, wall_s: float, *, data_s: float, save_s: float, gc_s: float, eval_s: float, saving: int | None = None
    ) -> str | None:
        """A step took `wall_s` seconds, of which the loop spent these on other things. A line for the log where it was slow.

        saving: the step that was being saved meanwhile: its copies hold up the device, writing takes processors and memory.
        Steps with evaluation or samples (`eval_s` above 0) take long on purpose: not compared, and no measure for others.
        """
        if eval_s > 0:
            return None
        usual = statistics.median(self._times) if len(self._times) >= self.ENOUGH else None
        self._times.append(wall_s)
        if usual is None or wall_s <= self.TIMES * usual or wall_s - usual < self.LEAST_S:
            return None
        if self._told is not None and step - self._told < self.APART:
            self._left_out += 1
            return None
        rest = max(0.0, wall_s - data_s - save_s - gc_s)
        parts = {"data": data_s, "save": save_s, "Python's collector": gc_s, "device and the rest": rest}
        worth = {name: seconds for name, seconds in parts.items() if seconds >= self.SHARE * (wall_s - usual)}
        said = ", ".join(f"{name} {worth[name]:.2f} s" for name in sorted(worth, key=worth.__getitem__, reverse=True))
        more = f" ({self._left_out} more slow since step {self._told})" if self._left_out else ""
        self._told, self._left_out = step, 0
        beside = f", while step {saving} was being saved" if saving is not None else ""
        return f"step {step} took {wall_s:.2f} s, usually {usual:.2f} s: {said}{beside}{more}"
