"""What can be asked of a node in a second: its driver, whether its GPUs are alike and free, links, environment."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from jaxtrain import hardware

IN_USE_GIB = 2.0  # of a GPU, held by others: the driver itself reserves less
ECC = "uncorrected memory errors since the driver started"
HEADINGS = ("what", "found", "")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line. `state`: ok, note (worth knowing), WRONG."""

    what: str
    found: str
    state: str = "ok"


def environment(environ: Mapping[str, str], devices: hardware.Devices) -> list[Finding]:
    """Variables that contradict the memory budget are wrong; others that change how fast a run is are worth knowing."""
    out = []
    if devices.kind == "gpu" and devices.count:
        fraction = hardware.memory_fraction(devices.memory_gib)
        for p in hardware.memory_environment(fraction, environ)[1]:
            out.append(Finding(p.key, f"{p.value}: {p.rule}. {p.remedy}", "WRONG"))
    told = ("XLA_FLAGS", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "LIBTPU_INIT_ARGS")
    for name, value in sorted(environ.items()):
        if name in told or name.startswith("NCCL_"):
            out.append(Finding(name, value, "note"))
    return out or [Finding("environment", "nothing that changes a run")]


def gpus(nvml: Any = pynvml) -> list[Finding]:
    """What the driver says of all GPUs of the node. A GPU model that does not tell something is left out of that line."""
    out = []
    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]

        def each(ask: Callable[[Any], Any]) -> list[Any]:
            found = []
            for handle in handles:
                try:
                    found.append(ask(handle))
                except nvml.NVMLError:  # this GPU, or this driver, does not know the question
                    continue
            return found

        out.append(Finding("driver", str(nvml.nvmlSystemGetDriverVersion())))
        names = each(nvml.nvmlDeviceGetName)
        alike = len({*names}) == 1
        out.append(Finding("GPUs", f"{len(names)} x {', '.join(sorted({*map(str, names)}))}", "ok" if alike else "WRONG"))
        used = each(lambda h: nvml.nvmlDeviceGetMemoryInfo(h).used / 2**30)
        busy = [i for i, gib in enumerate(used) if gib > IN_USE_GIB]
        text = f"{max(used):.1f} GiB at most" + (f"; GPUs {busy} are used by others" if busy else "")
        out.append(Finding("memory in use", text, "WRONG" if busy else "ok"))
        volatile = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        if errors := each(lambda h: nvml.nvmlDeviceGetTotalEccErrors(h, *volatile)):
            out.append(Finding(ECC, str(sum(errors)), "WRONG" if any(errors) else "ok"))
        limits = each(lambda h: (nvml.nvmlDeviceGetEnforcedPowerLimit(h), nvml.nvmlDeviceGetPowerManagementDefaultLimit(h)))
        if limits:
            low = any(now < normal for now, normal in limits)
            watts = f"{min(now for now, _ in limits) / 1e3:.0f} W, by default {max(n for _, n in limits) / 1e3:.0f} W"
            out.append(Finding("power limit", watts, "note" if low else "ok"))
        if len(handles) > 1:
            out.append(links(nvml, handles))
    finally:
        nvml.nvmlShutdown()
    return out


def links(nvml: Any, handles: list[Any]) -> Finding:
    """Active NVLinks of each GPU: all the same, or something is broken; none means PCIe."""
    counts = []
    for handle in handles:
        active = 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                active += nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
            except nvml.NVMLError:  # there is no such link
                break
        counts.append(active)
    text = f"{counts[0]} active a GPU" if len({*counts}) == 1 else f"active by GPU: {counts}"
    return Finding("NVLink", text, "WRONG" if len({*counts}) > 1 else "ok" if counts[0] else "note")


def check(devices: hardware.Devices) -> list[Finding]:
    """All findings on this machine."""
    if devices.kind != "gpu":
        return [
            Finding("devices", f"{devices.count} x {devices.name} ({devices.source})", "note"),
            *environment(os.environ, devices),
        ]
    if not devices.count:
        return [Finding("devices", devices.source, "WRONG")]
    return [*gpus(), *environment(os.environ, devices)]
