"""Which hardware ran: the GPUs of this node as the driver tells of them, how they are linked, and the host.

`nvml` is pynvml, or an object with the same functions. What a GPU does not tell is None. One that the driver has lost is
{"index": its number, "lost": True}, and is no error: the run may go on without it, and its end is told all the same.
"""

import contextlib
import itertools
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.hardware import host_gib
from jaxtrain.monitor.card import THROTTLING

# Why a clock is lower than it could be, as the monitor has it, and the power limit: beside a card's power it says whether that
# was all the card may take.
REASONS = {0x4: "sw_power_cap", **THROTTLING}
# nvmlGpuTopologyLevel_t (nvml.h) in the words of `nvidia-smi topo -m`.
LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
NVLINKS = 18  # of a GPU at most (Hopper, Blackwell); NVML says so of each link that is not there


def hardware(nvml: Any) -> dict[str, Any]:
    """The host's CPU, memory and kernel; with GPUs also `gpus` (all of this node, by NVML's numbers), `topology`, and their
    clocks at this moment as `before`."""
    found: dict[str, Any] = {"cpu": cpu(), "kernel": platform.release(), "gpus": []}
    with opened(nvml) as there:
        handles = _handles(nvml) if there else []
        if handles:
            found["gpus"] = _each(_gpu, nvml, handles)
            found["topology"] = _topology(nvml, [handle for handle in handles if handle is not None])
            found["before"] = _each(_clocks, nvml, handles)
    return found


def clocks(nvml: Any) -> list[dict[str, Any]]:
    """Clocks, power, temperature, throttling and errors of every GPU at this moment; empty where there is none."""
    with opened(nvml) as there:
        return _each(_clocks, nvml, _handles(nvml)) if there else []


def processors() -> int | None:
    """Logical processors that this process may use: a scheduler or container may leave it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # not on macOS


def cpu() -> dict[str, Any]:
    """Of the whole machine: model, number of logical processors, memory in GiB."""
    model = None
    with contextlib.suppress(OSError):  # not on every system
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return {"model": model or platform.processor() or None, "count": os.cpu_count(), "memory_gib": round(host_gib(), 1)}


@contextlib.contextmanager
def opened(nvml: Any) -> Iterator[bool]:
    """Whether there is a driver to ask; it may be asked in the block."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        ask(nvml, "nvmlShutdown")


def ask(nvml: Any, function: str, *args: Any) -> Any:
    """What a function of NVML returns; None where this GPU or driver cannot tell."""
    try:
        value = getattr(nvml, function)(*args)
    except nvml.NVMLError:
        return None
    return value.decode() if isinstance(value, bytes) else value


def _handles(nvml: Any) -> list[Any]:
    """By NVML's numbers; None for a GPU that is lost."""
    return [ask(nvml, "nvmlDeviceGetHandleByIndex", i) for i in range(ask(nvml, "nvmlDeviceGetCount") or 0)]


def _each(told: Callable[[Any, int, Any], dict[str, Any]], nvml: Any, handles: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"index": i, "lost": True} if h is None else told(nvml, i, h) for i, h in enumerate(handles)]


def _gpu(nvml: Any, index: int, handle: Any) -> dict[str, Any]:
    limit, usual = (ask(nvml, f"nvmlDeviceGetPowerManagement{what}", handle) for what in ("Limit", "DefaultLimit"))
    pci, ecc = ask(nvml, "nvmlDeviceGetPciInfo", handle), ask(nvml, "nvmlDeviceGetEccMode", handle)
    bus = getattr(pci, "busId", None)
    bus = bus.decode() if isinstance(bus, bytes) else bus
    return {
        "index": index,
        "name": ask(nvml, "nvmlDeviceGetName", handle),
        "uuid": ask(nvml, "nvmlDeviceGetUUID", handle),
        "pci": bus,
        "nics": nearest_nics(bus),
        "power_limit_w": limit / 1000 if limit else None,
        "power_limit_default_w": usual / 1000 if usual else None,
        "max_sm_clock_mhz": ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
        "max_memory_clock_mhz": ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_MEM),
        "ecc": None if ecc is None else bool(ecc[0]),
    }


def _clocks(nvml: Any, index: int, handle: Any) -> dict[str, Any]:
    bits, power = ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle), ask(nvml, "nvmlDeviceGetPowerUsage", handle)
    uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)  # since the driver was loaded
    return {
        "index": index,
        "sm_clock_mhz": ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
        "power_w": power / 1000 if power else None,
        "temperature_c": ask(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": None if bits is None else "+".join(name for bit, name in REASONS.items() if bits & bit),
        "ecc_uncorrected": ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, *uncorrected),
    }


def _topology(nvml: Any, handles: list[Any]) -> dict[str, Any]:
    """`nvlinks`: active links of each GPU. `pairs`: how many pairs are linked how, as {"NVLink": 28}."""
    pairs: Counter[str] = Counter()
    for i, one in enumerate(handles):
        for other in handles[i + 1 :]:
            direct = ask(nvml, "nvmlDeviceGetP2PStatus", one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            level = ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", one, other)
            pairs["NVLink" if direct == nvml.NVML_P2P_STATUS_OK else LEVELS.get(level, "not told")] += 1
    active = [sum(ask(nvml, "nvmlDeviceGetNvLinkState", h, link) == 1 for link in range(NVLINKS)) for h in handles]
    return {"nvlinks": active, "pairs": dict(pairs)}


def nearest_nics(pci: str | None, sys: Path = Path("/sys")) -> list[str]:
    """Return the RDMA network cards that share the most PCIe bridges with a GPU, such as ["mlx5_0"]; [] if it shares none.

    Args:
      pci: the GPU's address as NVML has it, 00000000:1B:00.0.
      sys: where sysfs is mounted.
    """
    if not pci:
        return []
    domain, _, rest = pci.lower().partition(":")
    gpu = (sys / "bus/pci/devices" / f"{domain[-4:]}:{rest}").resolve().parts
    shared: dict[str, int] = {}
    for card in sorted((sys / "class/infiniband").glob("*")):
        path = (card / "device").resolve().parts
        shared[card.name] = sum(
            ":" in a for a, b in itertools.takewhile(lambda ab: ab[0] == ab[1], zip(gpu, path, strict=False))
        )
    most = max(shared.values(), default=0)
    return [name for name, count in shared.items() if count == most] if most else []


class HasKind(Protocol):
    """A jax.Device, as far as `device_facts` and `rank_map` look at it."""

    @property
    def platform(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def process_index(self) -> int: ...
    @property
    def id(self) -> int: ...


def device_facts(devices: Iterable[HasKind]) -> dict[str, Any]:
    """Kinds, counts and the device ids of each process, from `jax.devices()`."""
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


def rank_map(devices: Iterable[HasKind]) -> dict[str, list[int | None]]:
    """Return device id, process, and GPU number on its node of each device, in the order of the mesh's flat positions.

    The ranks of a communicator follow this order: those of an axis are the devices at its coordinates.
    """
    devices = list(devices)
    return {
        "device": [d.id for d in devices],
        "process": [d.process_index for d in devices],
        "gpu": [getattr(d, "local_hardware_id", None) for d in devices],
    }
