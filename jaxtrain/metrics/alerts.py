"""Warnings about the GPUs of a run: one when a condition, such as throttling, begins, and one when it ends."""

import collections
import os
import statistics
from collections.abc import Mapping
from typing import Any

from jaxtrain.config.commands import to_run_sh

THROTTLED = 0.2  # of a line's samples; shorter throttling causes no warning
CLEAN = 6  # consecutive lines without throttling, after which it has ended, since it comes and goes as a GPU warms and cools
CAP_W = 1.0  # tolerance below the board's default limit, since drivers round
OUTSIDE_GIB = 1.0  # tolerated growth of memory outside JAX's pool after the first steps
SETTLED = 3  # first lines of a GPU, in which NCCL and cuDNN allocate; their median is the usual memory outside the pool

# Reason (card.THROTTLING) -> fix.
LOOK = {
    "hw_slowdown": "the hardware halves the clocks, or worse: look at temperature and power supply",
    "sync_boost": "another GPU of its sync boost group is slower: look at the others",
    "sw_thermal": "it is near its highest temperature: look at the fans, the air inlet, and neighbouring nodes",
    "hw_thermal": "it is too hot and the hardware slows it down: look at the fans and the air inlet, or give the node back",
    "hw_power_brake": "the chassis requests less power: look at power supplies and the rack's budget",
    "board_limit": "the board limits it: report it to the vendor",
    "reliability": "voltage is at its limit: report it to the vendor",
}


class Episodes:
    """Conditions, such as throttling of a GPU, with a message when a condition begins and another when it ends."""

    def __init__(self):
        self._open: set[str] = set()
        self.messages: list[str] = []

    def update(self, key: str, active: bool | None, begun: str, over: str) -> None:
        """Update condition `key`. active: whether the condition holds now; None: not known, so nothing changes.

        begun, over: the messages for its begin and its end.
        """
        if active is None or active == (key in self._open):
            return
        self._open ^= {key}
        self.messages.append(begun if active else over)

    def take(self) -> list[str]:
        """Return the messages of all conditions since the last call."""
        messages, self.messages = self.messages, []
        return messages


class GpuAlerts:
    """Checks lines of kind "gpu" for throttling, lowered power limits, memory errors, and memory outside JAX's pool."""

    def __init__(self, episodes: Episodes):
        self._episodes = episodes
        self._ecc: dict[int, int] = {}  # GPU -> number of errors that are reported already, or were there at the start
        self._clean: collections.Counter[int] = collections.Counter()  # GPU -> consecutive lines without throttling
        self._outside: dict[int, list[float]] = {}  # GPU -> GiB outside the pool, in its first lines

    def look(self, line: Mapping[str, Any], default_limit_w: float | None) -> None:
        """Check a line about a GPU. default_limit_w: the board's default power limit in W; None if unknown."""
        gpu = line["gpu"]
        self._throttling(gpu, line)
        self._power(gpu, line["power_limit_w"], default_limit_w)
        self._memory_errors(gpu, line["ecc_uncorrected"])
        self._outside_the_pool(gpu, line["memory_used_gib"], line["pool_gib"])

    def _throttling(self, gpu: int, line: Mapping[str, Any]) -> None:
        share, reasons = line["throttled"], line["throttle_reasons"]
        if share is not None:
            self._clean[gpu] = 0 if share else self._clean[gpu] + 1
        throttled, over = share is not None and share >= THROTTLED, self._clean[gpu] >= CLEAN
        active = throttled if throttled or over else None
        look = "; ".join(LOOK[reason] for reason in reasons.split("+") if reason)
        heat = "" if line["temperature_c"] is None else f", {line['temperature_c']:.0f} C"
        clock = "" if line["sm_clock_mhz"] is None else f", {line['sm_clock_mhz']:,.0f} MHz"
        begun = f"GPU {gpu} is throttled: {reasons} in {share or 0:.0%} of the samples{heat}{clock}: {look}."
        more = f" nvidia-smi -q -d PERFORMANCE -i {gpu} tells more."
        self._episodes.update(f"throttled {gpu}", active, begun + more, f"GPU {gpu} is no longer throttled")

    def _power(self, gpu: int, limit: float | None, default: float | None) -> None:
        if limit is None or default is None:
            return
        begun = (
            f"GPU {gpu} is limited to {limit:.0f} W, {default:.0f} W by default: it will be slower under load. "
            f"This was set by a user or tool; nvidia-smi -i {gpu} -pl {default:.0f} sets it back."
        )
        over = f"GPU {gpu} has its default power limit again, {default:.0f} W"
        self._episodes.update(f"power {gpu}", limit < default - CAP_W, begun, over)

    def _memory_errors(self, gpu: int, errors: int | None) -> None:
        if errors is None:
            return
        reported = self._ecc.setdefault(gpu, errors)  # preflight reports errors from before this run
        if errors > reported:
            self._episodes.messages.append(
                f"GPU {gpu} has {errors - reported} new uncorrected memory errors (ECC), {errors} since its driver was loaded: "
                "what it has computed since may be wrong. Take the node out of service and reset the GPU; "
                f"nvidia-smi -q -d ECC,ROW_REMAPPER -i {gpu} tells more."
            )
        self._ecc[gpu] = errors

    def _outside_the_pool(self, gpu: int, used: float | None, pool: float | None) -> None:
        if used is None or pool is None:
            return
        outside = used - pool
        first = self._outside.setdefault(gpu, [])
        if len(first) < SETTLED:
            first.append(outside)
            return
        before = statistics.median(first)  # a median, since a single line may be an outlier
        begun = (
            f"GPU {gpu}: memory outside JAX's pool has grown from {before:.1f} to {outside:.1f} GiB. Another process uses "
            f"the GPU (nvidia-smi -i {gpu} lists them), or NCCL or cuDNN take more than at the start. Theirs is what "
            "train.memory_fraction leaves: lower it before an allocation fails."
        )
        over = f"GPU {gpu}: memory outside JAX's pool is back to {outside:.1f} GiB"
        self._episodes.update(f"outside {gpu}", outside > before + OUTSIDE_GIB, begun, over)


class MfuAlert:
    """Warns when the MFU of a run falls below THRESHOLD of the lowest expected MFU.

    Measured and expected MFU count the same FLOPs, so their ratio is the inverse ratio of the step times. The measured step
    time is the median of the last LINES lines, so that a single slow line causes no warning.

    Args:
        longest_s: longest expected step time in seconds (plan.expect.Expected.longest_s); None: no warnings.
    """

    LINES = 8
    THRESHOLD = 0.8  # of the lowest expected MFU
    BACK = 1.02  # times the threshold: an MFU above it ends the condition

    def __init__(self, longest_s: float | None):
        self._longest = longest_s
        self._steps: collections.deque[float] = collections.deque(maxlen=self.LINES)
        self._low = False

    def note(self, step_s: float | None) -> str | None:
        """Add a train line's `step_time_s`. Return a warning if MFU becomes low, a message if it recovers, else None."""
        if step_s is None or not self._longest:
            return None
        self._steps.append(step_s)
        if len(self._steps) < self.LINES:
            return None
        middle = statistics.median(self._steps)
        reached = self._longest / middle
        if not self._low and reached < self.THRESHOLD:
            self._low = True
            return (
                f"MFU is {reached:.0%} of the lowest expected, below {self.THRESHOLD:.0%}: {middle:.3g} s a step, "
                f"{self._longest:.3g} s expected at most. Look at data_wait_s, and at throttling and power in the lines on "
                f"GPUs. kill -USR2 {os.getpid()} records a trace; "
                f"{to_run_sh('python -m jaxtrain profile RUN')} divides its time."
            )
        if self._low and reached >= self.BACK * self.THRESHOLD:
            self._low = False
            return f"MFU is back at {reached:.0%} of the lowest expected: {middle:.3g} s a step"
        return None
