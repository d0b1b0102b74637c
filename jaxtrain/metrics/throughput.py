"""The measured speed and memory of a run: fields of a train line. Imports no jax."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from jaxtrain.metrics.table import required_names


class Throughput:
    """Rates of a run from the wall times at which its steps start.

    A step's time is the wall time from its start to the next step's start, waiting for data included. A line reports the mean
    over the counted steps since the last line. The first two steps are not counted. The step during which `exclude` is called
    (evaluation, a blocking save, a trace being written) and the next step are not counted either. The loop runs one step ahead
    of the device, so the step after a pause is only queued and seems to take no time. A line without a counted step has None
    for every rate. FLOP/s and MFU count the model's FLOPs; recomputed FLOPs count only in `hfu`.

    Args:
        tokens_per_step: tokens of a step's batch, padding included; `resize` changes them.
        num_devices: number of devices of all processes.
        flops_causal, flops_full: model FLOPs per token, forward and backward, in the two conventions of flops.py: with the
            causal half of the attention scores, and with all scores.
        flops_hardware: FLOPs per token that the devices execute, recomputation included; None: `hfu` is None.
        peak_flops: dense FLOP/s of one device; None or 0 if unknown: MFU and HFU are then None.
        clock: returns the time in seconds; for tests.
    """

    SETTLE = 2  # steps that are not counted after a call of `exclude`, the current step included

    def __init__(
        self,
        *,
        tokens_per_step: int,
        num_devices: int,
        flops_causal: float,
        flops_full: float,
        flops_hardware: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._tokens_per_step = tokens_per_step
        self._num_devices = num_devices
        self._flops = {"mfu_causal": flops_causal, "mfu_full": flops_full, "hfu": flops_hardware}
        self._peak = peak_flops or None
        self._clock = clock
        self._started: float | None = None  # when the step under way began
        self._wait = 0.0  # of the step under way
        self._skip = self.SETTLE
        self._times: list[float] = []  # of counted steps since the last line
        self._waits: list[float] = []
        self._tokens: list[int] = []

    def start_step(self) -> None:
        """Record the start of a step. Call it at every step before the data is requested, and once after the last step."""
        now = self._clock()
        if self._started is not None:
            if self._skip:
                self._skip -= 1
            else:
                self._times.append(now - self._started)
                self._waits.append(self._wait)
                self._tokens.append(self._tokens_per_step)
        self._started, self._wait = now, 0.0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time of a block as waiting for data. The block requests the next batch."""
        before = self._clock()
        yield
        self._wait += self._clock() - before

    def exclude(self, more: int = 0) -> None:
        """Exclude the present step (which includes other work), the next step, and `more` further steps."""
        self._skip = max(self._skip, self.SETTLE + more)

    def resize(self, tokens_per_step: int) -> None:
        """Set the tokens of the steps from the next one on, and exclude the present step and the next one."""
        self._tokens_per_step = tokens_per_step
        self.exclude()

    def line(self) -> dict[str, float | None]:
        """Return the rate fields of a train line, over the steps since the last call."""
        times, waits, tokens = self._times, self._waits, self._tokens
        self._times, self._waits, self._tokens = [], [], []
        names = required_names()
        out: dict[str, float | None] = dict.fromkeys(names[names.index("step_time_s") : names.index("data_wait_s") + 1])
        if not times:
            return out
        out["step_time_s"] = sum(times) / len(times)
        out["data_wait_s"] = sum(waits) / len(waits)
        return out | self.rates(out["step_time_s"], sum(tokens) / len(tokens))

    def rates(self, step_time_s: float, tokens: float | None = None) -> dict[str, float | None]:
        """Return the rates of a step of so many tokens that takes `step_time_s` seconds. tokens: None: those of a step now."""
        per_device = (self._tokens_per_step if tokens is None else tokens) / self._num_devices / step_time_s
        out: dict[str, float | None] = {
            "tokens_per_s": per_device * self._num_devices,
            "tokens_per_s_per_device": per_device,
            "tflops_per_device": per_device * (self._flops["mfu_causal"] or 0.0) / 1e12,
        }
        for name, flops in self._flops.items():
            out[name] = per_device * flops / self._peak if self._peak and flops is not None else None
        return out


class HasMemoryStats(Protocol):
    """The part of a jax.Device that `memory_gib` uses."""

    def memory_stats(self) -> Mapping[str, int] | None: ...


def memory_gib(devices: Iterable[HasMemoryStats]) -> tuple[float | None, float | None]:
    """Return the largest (memory in use, peak memory) of these local devices in GiB; None if no device reports it (CPUs)."""
    stats = [device_stats for device in devices if (device_stats := device.memory_stats())]

    def most(name: str) -> float | None:
        return max((s[name] / 2**30 for s in stats if name in s), default=None)

    return most("bytes_in_use"), most("peak_bytes_in_use")
