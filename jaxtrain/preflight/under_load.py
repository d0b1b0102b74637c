"""What GPUs tell of themselves while they compute: clocks that sink and brakes that bite show only then."""

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import pynvml

from jaxtrain.hardware import visible_handles
from jaxtrain.monitor.card import Card, Lost, Sample, mean

SAMPLE_S = 0.5  # the driver's own figures are means over up to a second
JOIN_S = 2.0


def cards(devices: Sequence[Any]) -> list[Card]:
    """Of these devices of JAX, in their order; none for CPUs. CUDA must count as NVML does (CUDA_DEVICE_ORDER=PCI_BUS_ID).

    Raises NVMLError, and InvisibleGpu as `hardware.visible_handles` does.
    """
    if devices[0].platform != "gpu":
        return []
    pynvml.nvmlInit()
    handles = visible_handles(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [Card(pynvml, handles[device.local_hardware_id]) for device in devices]


class UnderLoad:
    """Samples these cards in a thread, while its block runs."""

    def __init__(self, watched: Sequence[Card], sample_s: float = SAMPLE_S):
        self._sample_s = sample_s
        self._samples: dict[Card, list[Sample]] = {card: [] for card in watched}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="GPUs under load", daemon=True)

    def __enter__(self) -> "UnderLoad":
        if self._samples:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._samples:
            self._thread.join(JOIN_S)

    def _watch(self) -> None:
        while not self._over.wait(self._sample_s):  # not at once: clocks rise first
            for card, samples in self._samples.items():
                try:
                    found = card.sample(time.monotonic())
                except Lost:
                    return  # what was at work there fails, and says so
                samples += [found] if found and not self._over.is_set() else []

    def found(self) -> list[dict[str, Any]]:
        """For each card that told: gpu (its index on the node), sm_mhz, power_w and power_limit_w as means, and `reasons`: why
        clocks were held down -> part of the samples."""
        out = []
        for card, samples in self._samples.items():
            told = [sample.reasons for sample in samples if sample.reasons is not None]
            names = dict.fromkeys(reason for reasons in told for reason in reasons)
            means = {name: mean([getattr(s, theirs) for s in samples]) for name, theirs in MEANS.items()}
            shares = {name: sum(name in reasons for reasons in told) / len(told) for name in names}
            out += [{"gpu": card.index, **means, "reasons": shares}] if samples else []
        return out


MEANS = {"sm_mhz": "sm_clock_mhz", "power_w": "power_w", "power_limit_w": "power_limit_w"}
