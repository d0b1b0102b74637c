"""Watch the GPUs of this process during training: a thread samples them, and the loop writes lines and warnings.

    with Monitor({d.local_hardware_id: d.memory_stats for d in jax.local_devices() if d.platform == "gpu"}) as monitor:
        ...
        for line in monitor.lines(step):
            writers.gpu(**line)
        for text in monitor.alerts():
            console.warn(text)

Without a GPU the monitor does nothing. If sampling fails, the monitor logs one warning, and the run continues unmonitored.
Threads of the monitor log a lost GPU or an unresponsive driver, because the training loop may hang then. The module does not
import jax: callers pass functions that return memory statistics.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from jaxtrain.config.durations import duration
from jaxtrain.config.hardware import InvisibleGpu, visible_handles
from jaxtrain.metrics.alerts import Episodes, GpuAlerts, MfuAlert
from jaxtrain.metrics.nvml import Card, GpuSample, Lost, mean, rate_gb_s

__all__ = ["MfuAlert", "Monitor"]

LOGGER = logging.getLogger("jaxtrain")
LINES_S = 10.0  # between two lines of a GPU
SAMPLE_S = 1.0  # between two samples of a GPU; the driver's own figures are means over up to a second
SILENT_S = 60.0  # without an answer of the driver, after which a warning is logged
LISTEN_S = 5.0  # between two checks for an answer of the driver
JOIN_S = 5.0  # wait for the sampling thread at the end, since it may be in a call that never returns

Pools = Mapping[int, Callable[[], Mapping[str, int] | None]]


class Monitor:
    """The GPUs of one process. A context manager: a thread samples the GPUs inside the `with` block.

    Args:
        pools: index of a GPU among the visible GPUs (jax's local_hardware_id) -> the method memory_stats of its jax device.
            Only these GPUs are watched.
        process: index of this process, for the lines.
        nvml: pynvml, or an object with the same functions.
        environ: environment variables. CUDA_VISIBLE_DEVICES selects the visible GPUs.
        sample_s: seconds between samples.
        clock: returns the time in seconds. Tests pass another clock.
    """

    def __init__(
        self,
        pools: Pools,
        *,
        process: int = 0,
        nvml: Any = pynvml,
        environ: Mapping[str, str] = os.environ,
        sample_s: float = SAMPLE_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._pools, self._process, self._nvml, self._environ = pools, process, nvml, environ
        self._sample_s, self._clock = sample_s, clock
        self._cards: dict[int, Card] = {}  # by index among the visible GPUs
        self._lock = threading.Lock()  # for the fields below, which the sampling thread writes
        self._samples: dict[int, list[GpuSample]] = {}  # GPU -> samples since its last line
        self._lost: dict[int, str] = {}  # GPU that is no longer sampled -> reason
        self._failed = False  # whether the sampling thread has failed
        self._heard = 0.0  # time of the driver's last answer
        self._counters: dict[int, tuple[float, tuple[int, int]]] = {}  # GPU -> (time, NVLink counters) of its last line
        self._episodes = Episodes()
        self._alerts = GpuAlerts(self._episodes)
        self._written = 0.0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Monitor":
        if not self._pools:
            return self
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._episodes.messages.append(f"the GPUs are not monitored: NVML does not start ({error})")
            return self
        try:
            handles = visible_handles(self._environ.get("CUDA_VISIBLE_DEVICES"), nvml)
            missing = sorted(local_id for local_id in self._pools if local_id >= len(handles))
            if missing:
                self._episodes.messages.append(f"visible GPUs {missing} are not monitored: NVML lists {len(handles)}")
            self._cards = {local_id: Card(nvml, handles[local_id]) for local_id in self._pools if local_id not in missing}
        except (nvml.NVMLError, Lost, InvisibleGpu) as error:
            self._episodes.messages.append(f"the GPUs are not monitored: {error}")
            self._cards = {}
        self._written = self._heard = self._clock()
        if self._cards:
            self._thread = threading.Thread(target=self._watch, name="monitor of GPUs", daemon=True)
            self._thread.start()
            # A second thread, because the first hangs if the driver hangs.
            threading.Thread(target=self._listen, name="monitor of the driver", daemon=True).start()
        else:
            nvml.nvmlShutdown()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._thread is None:
            return
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():  # a living thread is inside an NVML call, so NVML must stay open
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    # ---- The threads

    def _watch(self) -> None:
        try:
            while True:
                self.sample()
                if self._over.wait(self._sample_s):
                    return
        except Exception as error:  # an unknown error of NVML must not end a run, and is logged once
            self._failed = True
            LOGGER.warning("the GPUs are no longer monitored: %s: %s", type(error).__name__, error)

    def _listen(self) -> None:
        silence = Episodes()
        while not self._over.wait(min(self._sample_s, LISTEN_S)):
            with self._lock:
                silent = self._clock() - self._heard
                expects_answer = not self._failed and len(self._lost) < len(self._cards)
            silence.update(
                "silent",
                expects_answer and silent > SILENT_S,
                f"the driver has not answered for {duration(silent)}: a GPU may hang. Look for Xid errors in dmesg.",
                "the driver answers again",
            )
            for text in silence.take():
                LOGGER.warning("%s", text)

    def sample(self) -> None:
        """Read a sample of each GPU that is not lost. A GPU that becomes lost is logged."""
        for local_id, card in self._cards.items():
            if local_id in self._lost:
                continue
            try:
                reading = card.sample(self._clock())
            except Lost as error:
                with self._lock:
                    self._lost[local_id] = str(error)
                LOGGER.warning(
                    "GPU %d has fallen off the bus, or needs a reset: %s. The run will fail or hang. Look for Xid errors in "
                    "dmesg, and take the node out of service.",
                    *(card.index, error),
                )
                continue
            with self._lock:
                self._heard = self._clock()
                if reading:
                    self._samples.setdefault(local_id, []).append(reading)

    # ---- The loop's side

    def lines(self, step: int) -> list[dict[str, Any]]:
        """Return a line for each GPU from the samples since its last line, for `Writers.gpu`.

        Call it after every step. Until LINES_S seconds have passed since the last lines, the result is []. A GPU without
        samples has no line.
        """
        if not self._cards or self._clock() - self._written < LINES_S:
            return []
        self._written = self._clock()
        with self._lock:
            samples, self._samples = self._samples, {}
        out = []
        for local_id, card in self._cards.items():
            if gpu_samples := samples.get(local_id):
                line = {"step": step, "gpu": card.index, "process": self._process} | self._line(local_id, gpu_samples)
                self._alerts.look(line, card.default_limit_w)
                out.append(line)
        return out

    def _line(self, local_id: int, samples: list[GpuSample]) -> dict[str, Any]:
        def over_time(name: str) -> float | None:
            return mean([getattr(sample, name) for sample in samples])

        stats = self._pools[local_id]() or {}
        reported = [sample.reasons for sample in samples if sample.reasons is not None]
        temperatures = [sample.temperature_c for sample in samples if sample.temperature_c is not None]
        sent, received = self._nvlink(local_id, samples)
        return {
            "utilization": over_time("utilization"),
            "memory_used_gib": over_time("memory_used_gib"),
            "pool_gib": stat_gib(stats, "pool_bytes"),
            "in_use_gib": stat_gib(stats, "bytes_in_use"),
            "power_w": over_time("power_w"),
            "power_limit_w": samples[-1].power_limit_w,
            "temperature_c": max(temperatures, default=None),
            "sm_clock_mhz": over_time("sm_clock_mhz"),
            "memory_clock_mhz": over_time("memory_clock_mhz"),
            "throttled": sum(map(bool, reported)) / len(reported) if reported else None,
            "throttle_reasons": "+".join(dict.fromkeys(reason for reasons in reported for reason in reasons)),
            "nvlink_tx_gb_s": sent,
            "nvlink_rx_gb_s": received,
            "ecc_uncorrected": samples[-1].ecc_uncorrected,
        }

    def _nvlink(self, local_id: int, samples: list[GpuSample]) -> tuple[float | None, float | None]:
        """Return (sent, received) GB/s of a GPU over NVLink, since the last sample of its previous line.

        local_id: index of the GPU among the visible GPUs.
        """
        readings = [(sample.at, sample.nvlink_kib) for sample in samples if sample.nvlink_kib is not None]
        if not readings:
            return None, None
        (began, before), (ended, now) = self._counters.get(local_id, readings[0]), readings[-1]
        self._counters[local_id] = (ended, now)
        sent, received = (rate_gb_s((began, a), (ended, b)) for a, b in zip(before, now, strict=True))
        return sent, received

    def alerts(self) -> list[str]:
        """Return the warnings since the last call: a text for each condition that has begun or ended."""
        return self._episodes.take()


def stat_gib(stats: Mapping[str, int], name: str) -> float | None:
    """Return the figure `name` of JAX's memory_stats in GiB; None if it is missing, or -1, jaxlib's value for unknown."""
    value = stats.get(name, -1)
    return value / 2**30 if value >= 0 else None
