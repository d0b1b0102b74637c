"""The GPUs of this node as NVML describes them: for preflight, which reads all facts in a process of its own, and for receipts.

python -m jaxtrain.metrics.gpu_facts
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from jaxtrain.metrics.nvml import MEMBERS, text

# NVML_GPU_RECOVERY_ACTION_*, in the words of nvidia-smi
RECOVERY_ACTIONS = ("None", "Reset", "Reboot", "Drain P2P", "Drain and Reset")


def read(nvml: Any, names: Iterable[str] = ()) -> dict[str, Any]:
    """Return {"driver": version, "cuda": its version of CUDA, "gpus": {NVML's index: facts}}.

    The facts of a GPU are those of READINGS, and `refused`: name of a fact -> the driver's reason why it is missing. Of a GPU
    that the driver cannot reach, they are `error`, and `reset`: whether a reset mends it. A GPU that this process may not use
    is left out. Without a driver, return {"error": reason, "library": whether NVML's library is there}.

    Args:
        nvml: pynvml, or an object with the same functions.
        names: names of the facts to read; all if empty.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"error": f"NVML: {error}", "library": error.value != nvml.NVML_ERROR_LIBRARY_NOT_FOUND}
    try:
        gpus = {str(i): _read_gpu(nvml, i, [*names] or [*READINGS]) for i in range(nvml.nvmlDeviceGetCount())}
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        versions = {"driver": text(nvml.nvmlSystemGetDriverVersion()), "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}"}
        return versions | {"gpus": {i: gpu for i, gpu in gpus.items() if gpu}}
    except nvml.NVMLError as error:
        return {"error": f"NVML: {error}", "library": True}
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int, names: Iterable[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    refused: dict[str, str] = {}
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        for name in names:
            try:
                facts[name] = READINGS[name](nvml, gpu)
            except nvml.NVMLError as error:
                if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                    raise
                refused[name] = str(error)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_NO_PERMISSION:
            return {}
        return {"error": str(error), "reset": error.value == nvml.NVML_ERROR_RESET_REQUIRED}
    return facts | {"refused": refused}


def _memory(nvml: Any, gpu: Any) -> dict[str, float]:
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2)  # `used` of the first version has the driver's own memory
    return {"total_gib": memory.total / 2**30, "used_gib": memory.used / 2**30}


def _processes(nvml: Any, gpu: Any) -> list[str]:
    found = []
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu):
        try:
            name = text(nvml.nvmlSystemGetProcessName(process.pid))
        except nvml.NVMLError:  # of another container
            name = "a process"
        found.append(f"{name} (pid {process.pid})")
    return sorted(found)


def _remapped_rows(nvml: Any, gpu: Any) -> dict[str, int]:
    return dict(zip(("correctable", "uncorrectable", "pending", "failed"), nvml.nvmlDeviceGetRemappedRows(gpu), strict=True))


def _recovery_action(nvml: Any, gpu: Any) -> str:
    (value,) = _fields(nvml, gpu, [(nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0)])
    if value is None:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return RECOVERY_ACTIONS[value] if value < len(RECOVERY_ACTIONS) else f"number {value}"


def _pcie(nvml: Any, gpu: Any) -> dict[str, int]:
    return {
        "width": nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
        "max_width": nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
        "gen": nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
        "max_gen": nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
    }


def _fabric(nvml: Any, gpu: Any) -> dict[str, str]:
    info = nvml.c_nvmlGpuFabricInfo_t()
    nvml.nvmlDeviceGetGpuFabricInfo(gpu, info)
    if info.state == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    names = ("Not Started", "In Progress", "Completed")  # NVML_GPU_FABRIC_STATE_*, from 1 on
    status = "Success" if info.status == nvml.NVML_SUCCESS else str(nvml.NVMLError(info.status))
    return {"state": names[info.state - 1], "status": status if info.state == len(names) else ""}


def _fields(nvml: Any, gpu: Any, fields: list[tuple[int, int]]) -> list[int | None]:
    """Return the values of NVML's fields; None for a field that the driver refuses. fields: (number, link)."""
    values = nvml.nvmlDeviceGetFieldValues(gpu, fields)
    known = (value.nvmlReturn == nvml.NVML_SUCCESS for value in values)
    return [int(getattr(v.value, MEMBERS[v.valueType])) if ok else None for v, ok in zip(values, known, strict=True)]


def _nvlinks(nvml: Any, gpu: Any) -> list[float]:
    """Return GB/s of each link, 0 if it is down; empty if the GPU has no links."""
    (count,) = _fields(nvml, gpu, [(nvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0)])
    links = range(count or 0)
    state, speed = nvml.NVML_FI_DEV_NVLINK_GET_STATE, nvml.NVML_FI_DEV_NVLINK_GET_SPEED
    values = _fields(nvml, gpu, [(field, link) for field in (state, speed) for link in links]) if links else []
    return [(values[len(links) + link] or 0) / 1e3 if values[link] == 1 else 0.0 for link in links]


def _nvlink_errors(nvml: Any, gpu: Any) -> dict[str, dict[str, int]]:
    """Return kind of error -> link -> count, without zeros."""
    kinds = {"recovery": nvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY, "replay": nvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY}
    kinds["CRC"] = nvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC
    links = range(len(_nvlinks(nvml, gpu)))
    values = _fields(nvml, gpu, [(field, link) for field in kinds.values() for link in links]) if links else []
    if all(value is None for value in values):
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    by_kind = {kind: values[i * len(links) : (i + 1) * len(links)] for i, kind in enumerate(kinds)}
    return {kind: {str(link): n for link, n in enumerate(each) if n} for kind, each in by_kind.items() if any(each)}


# Name of a fact -> its reading.
READINGS: dict[str, Callable[[Any, Any], Any]] = {
    "name": lambda nvml, gpu: text(nvml.nvmlDeviceGetName(gpu)),
    "uuid": lambda nvml, gpu: text(nvml.nvmlDeviceGetUUID(gpu)),
    "pci": lambda nvml, gpu: text(nvml.nvmlDeviceGetPciInfo(gpu).busId),
    "compute_capability": lambda nvml, gpu: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(gpu)),
    "memory": _memory,
    "processes": _processes,
    "mig": lambda nvml, gpu: bool(nvml.nvmlDeviceGetMigMode(gpu)[0]),
    "ecc": lambda nvml, gpu: bool(nvml.nvmlDeviceGetEccMode(gpu)[0]),  # (current, after a restart)
    "ecc_uncorrected": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(
        gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    ),
    "remapped_rows": _remapped_rows,
    "recovery_action": _recovery_action,
    "power_limit_w": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    "power_limit_set_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1e3,
    "power_limit_default_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1e3,
    "max_sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "max_memory_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "application_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetApplicationsClock(gpu, nvml.NVML_CLOCK_GRAPHICS),
    "default_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetDefaultApplicationsClock(gpu, nvml.NVML_CLOCK_GRAPHICS),
    # The older of two names of this function. All drivers support it.
    "clock_reasons": lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
    "pcie": _pcie,
    "fabric": _fabric,
    "nvlinks": lambda nvml, gpu: sum(map(bool, _nvlinks(nvml, gpu))),
    "nvlink_gb_s": _nvlinks,
    "nvlink_errors": _nvlink_errors,
}


if __name__ == "__main__":
    import pynvml

    print(json.dumps(read(pynvml)))
