"""The hardware of a run: the GPUs of this node by NVML, the links between them, the host, and the devices of the mesh.

`nvml` is pynvml, or an object with the same functions. A fact that a GPU does not report is None. A GPU that the driver has
lost is {"index": its number, "lost": True}.
"""

import contextlib
import itertools
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxtrain.hardware import host_gib
from jaxtrain.monitor.card import THROTTLING

REASONS = {0x4: "sw_power_cap", **THROTTLING}  # for clocks below their maximum
# nvmlGpuTopologyLevel_t (nvml.h), as `nvidia-smi topo -m` names its values.
LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
NVLINKS = 18  # of a GPU at most (Hopper, Blackwell)

Ask = Callable[..., Any]  # (function of NVML without its prefix, arguments) -> value, None if it fails


@contextlib.contextmanager
def open_nvml(nvml: Any) -> Iterator[Ask | None]:
    """Yield the function that asks the driver; None if there is no driver."""

    def ask(name: str, *args: Any) -> Any:
        try:
            value = getattr(nvml, f"nvml{name}")(*args)
        except nvml.NVMLError:
            return None
        return value.decode() if isinstance(value, bytes) else value

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        yield ask
    finally:
        ask("Shutdown")


def node_facts(nvml: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (hardware, driver versions) of this node.

    Hardware has `cpu`, `gpus` (by NVML's numbers), and if there are GPUs `topology` and `before`: their clocks now.
    """
    hardware: dict[str, Any] = {"cpu": {"model": cpu_model(), "memory_gib": round(host_gib())}, "gpus": []}
    driver: dict[str, Any] = {"driver": None, "driver_cuda": None}
    with open_nvml(nvml) as ask:
        if ask is None:
            return hardware, driver
        if number := ask("SystemGetCudaDriverVersion"):
            driver = {"driver": ask("SystemGetDriverVersion"), "driver_cuda": f"{number // 1000}.{number % 1000 // 10}"}
        if handles := _handles(ask):
            hardware["gpus"] = _each(_gpu, nvml, ask, handles)
            hardware["topology"] = _topology(nvml, ask, [handle for handle in handles if handle is not None])
            hardware["before"] = _each(_clocks, nvml, ask, handles)
    return hardware, driver


def clocks(nvml: Any) -> list[dict[str, Any]]:
    """Return clocks, power, temperature, throttling and errors of every GPU now; [] without GPUs."""
    with open_nvml(nvml) as ask:
        return _each(_clocks, nvml, ask, _handles(ask)) if ask else []


def processors() -> int | None:
    """Return the logical processors that this process may use: a scheduler or container may allow fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # not on macOS


def cpu_model() -> str | None:
    """Return the model of the CPU."""
    with contextlib.suppress(OSError):  # not on every system
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _handles(ask: Ask) -> list[Any]:
    return [ask("DeviceGetHandleByIndex", i) for i in range(ask("DeviceGetCount") or 0)]  # None: a GPU that is lost


def _each(read: Callable[[Any, Ask, Any], dict[str, Any]], nvml: Any, ask: Ask, handles: list[Any]) -> list[dict[str, Any]]:
    return [{"index": i} | ({"lost": True} if h is None else read(nvml, ask, h)) for i, h in enumerate(handles)]


def _gpu(nvml: Any, ask: Ask, handle: Any) -> dict[str, Any]:
    bus = getattr(ask("DeviceGetPciInfo", handle), "busId", None)
    bus = bus.decode() if isinstance(bus, bytes) else bus
    ecc = ask("DeviceGetEccMode", handle)
    return {
        "name": ask("DeviceGetName", handle),
        "uuid": ask("DeviceGetUUID", handle),
        "pci": bus,
        "power_limit_w": _watts(ask("DeviceGetPowerManagementLimit", handle)),
        "power_limit_default_w": _watts(ask("DeviceGetPowerManagementDefaultLimit", handle)),
        "max_sm_clock_mhz": ask("DeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
        "max_memory_clock_mhz": ask("DeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_MEM),
        "ecc": None if ecc is None else bool(ecc[0]),
    }


def _clocks(nvml: Any, ask: Ask, handle: Any) -> dict[str, Any]:
    bits = ask("DeviceGetCurrentClocksThrottleReasons", handle)
    uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)  # since the driver was loaded
    return {
        "sm_clock_mhz": ask("DeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask("DeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
        "power_w": _watts(ask("DeviceGetPowerUsage", handle)),
        "temperature_c": ask("DeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": None if bits is None else "+".join(name for bit, name in REASONS.items() if bits & bit),
        "ecc_uncorrected": ask("DeviceGetTotalEccErrors", handle, *uncorrected),
    }


def _watts(milliwatts: int | None) -> float | None:
    return milliwatts / 1000 if milliwatts else None


def _topology(nvml: Any, ask: Ask, handles: list[Any]) -> dict[str, Any]:
    """Return `nvlinks`, active links of each GPU, and `pairs`, the count of pairs by link, such as {"NVLink": 28}."""
    pairs: Counter[str] = Counter()
    for one, other in itertools.combinations(handles, 2):
        direct = ask("DeviceGetP2PStatus", one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK
        level = ask("DeviceGetTopologyCommonAncestor", one, other)
        pairs["NVLink" if direct else LEVELS.get(level, "unknown")] += 1
    active = [sum(ask("DeviceGetNvLinkState", h, link) == 1 for link in range(NVLINKS)) for h in handles]
    return {"nvlinks": active, "pairs": dict(pairs)}


def device_facts(devices: Iterable[Any]) -> dict[str, Any]:
    """Return kinds, counts and the device ids of each process, from `jax.devices()`."""
    devices = list(devices)
    processes: dict[str, list[int]] = {}
    for device in devices:
        processes.setdefault(str(device.process_index), []).append(device.id)
    return {
        "platform": sorted({device.platform for device in devices}),
        "kind": sorted({device.device_kind for device in devices}),
        "count": len(devices),
        "process_count": len(processes),
        "processes": processes,
    }


def rank_map(devices: Iterable[Any]) -> dict[str, list[int | None]]:
    """Return device id, process, and GPU number on its node of each device, in the order of the mesh's flat positions.

    The ranks of a communicator follow this order: those of an axis are the devices at its coordinates.
    """
    devices = list(devices)
    return {
        "device": [d.id for d in devices],
        "process": [d.process_index for d in devices],
        "gpu": [getattr(d, "local_hardware_id", None) for d in devices],
    }
