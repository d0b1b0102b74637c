"""The hardware of a run: the GPUs of this node by NVML, the links between them, the host, and the devices of the mesh.

`nvml` is pynvml, or an object with the same functions. A fact that a GPU does not report is None. For a GPU that the
driver cannot reach, the facts are {"index": its number, "lost": True}.
"""

import contextlib
import itertools
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxtrain.config.hardware import host_gib
from jaxtrain.metrics.card import THROTTLING

REASONS = {0x4: "sw_power_cap", **THROTTLING}  # bit -> reason for clocks below their maximum
# Value of nvmlGpuTopologyLevel_t (nvml.h) -> its name in `nvidia-smi topo -m`.
LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
NVLINKS = 18  # most NVLinks of a GPU (Hopper, Blackwell)

Ask = Callable[..., Any]  # (name of an NVML function without its prefix, arguments) -> value, or None if it fails


@contextlib.contextmanager
def open_nvml(nvml: Any) -> Iterator[Ask | None]:
    """Yield a function that calls NVML functions by name (Ask); None if NVML cannot be started."""

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

    Hardware has `cpu` and `gpus` (in NVML's order). A node with GPUs also has `topology`, and `before`: the result of `clocks`
    before training.
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
    """Return the current clocks, power, temperature, throttling and errors of every GPU; [] without GPUs."""
    with open_nvml(nvml) as ask:
        return _each(_clocks, nvml, ask, _handles(ask)) if ask else []


def processors() -> int | None:
    """Return the number of logical processors that this process may use (its CPU affinity)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS does not have the call


def cpu_model() -> str | None:
    """Return the model of the CPU; None if it is unknown."""
    with contextlib.suppress(OSError):  # some systems do not have this file
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _handles(ask: Ask) -> list[Any]:
    return [ask("DeviceGetHandleByIndex", i) for i in range(ask("DeviceGetCount") or 0)]  # None: a lost GPU


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
    uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)  # counts errors since the driver was loaded
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
    """Return `nvlinks`: the number of each GPU's active NVLinks; and `pairs`: connection -> number of GPU pairs."""
    pairs: Counter[str] = Counter()
    for one, other in itertools.combinations(handles, 2):
        direct = ask("DeviceGetP2PStatus", one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK
        level = ask("DeviceGetTopologyCommonAncestor", one, other)
        pairs["NVLink" if direct else LEVELS.get(level, "unknown")] += 1
    active = [sum(ask("DeviceGetNvLinkState", h, link) == 1 for link in range(NVLINKS)) for h in handles]
    return {"nvlinks": active, "pairs": dict(pairs)}


def device_facts(devices: Iterable[Any]) -> dict[str, Any]:
    """Return platforms, kinds and number of the devices, and process -> ids of its devices. devices: `jax.devices()`."""
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
    """Return three lists: id, process, and number on its node (GPUs only) of each device. devices: the flattened mesh.

    The ranks in an NCCL communicator over a mesh axis have the order of these lists.
    """
    devices = list(devices)
    return {
        "device": [d.id for d in devices],
        "process": [d.process_index for d in devices],
        "gpu": [getattr(d, "local_hardware_id", None) for d in devices],
    }
