"""The GPUs of this node as NVML describes them: for preflight, which reads all facts in a process of its own, and for receipts.

python -m jaxtrain.metrics.gpu_facts FILE
"""

import contextlib
import ctypes
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxtrain.metrics.nvml import MEMBERS, decode_text

# NVML_GPU_RECOVERY_ACTION_* and NVML_GPU_FABRIC_STATE_*, in the words of nvidia-smi
RECOVERY_ACTIONS = (
    *("None", "Reset", "Reboot", "Drain P2P", "Drain and Reset"),
    *("Recover IMEX domain", "Bus reset", "System reboot"),
)
FABRIC_STATES = ("Not Supported", "Not Started", "In Progress", "Completed")
MANY = 3  # readings of a GPU that fail with "Unknown Error", from which on the GPU is broken: healthy ones may have one


def read_gpu_facts(nvml: Any, names: Iterable[str] = ()) -> dict[str, Any]:
    """Return {"driver": version, "cuda": its version of CUDA, "gpus": {NVML's index: facts}}.

    The facts of a GPU are those of READINGS, and `refused`: name of a fact -> the driver's reason why it is missing. A GPU that
    the driver cannot reach also has `error`, and `reset`: whether a reset mends it. A GPU that this process may not use is left
    out. Without an answer, return {"error": reason, "loaded": whether there is a driver, as far as NVML can tell}.

    Args:
        nvml: pynvml, or an object with the same functions.
        names: names of the facts to read; all if empty.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        loaded = error.value not in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return {"error": f"NVML: {error}", "loaded": loaded}
    out: dict[str, Any] = {"driver": "", "cuda": "", "gpus": {}}
    try:
        with contextlib.suppress(nvml.NVMLError):
            out["driver"], cuda = decode_text(nvml.nvmlSystemGetDriverVersion()), nvml.nvmlSystemGetCudaDriverVersion()
            out["cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
        for index in range(nvml.nvmlDeviceGetCount()):
            if gpu := _read_gpu(nvml, index, [*names] or [*READINGS]):
                out["gpus"][str(index)] = gpu
    except nvml.NVMLError as error:
        return {"error": f"NVML: {error}", "loaded": True}
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return out


def _read_gpu(nvml: Any, index: int, names: Iterable[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"refused": {}}
    unknown = 0
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        for name in names:
            try:
                out[name] = READINGS[name](nvml, gpu)
            except Exception as error:  # pynvml has errors of its own, as for a library without a function
                value = getattr(error, "value", None)
                unknown += value == nvml.NVML_ERROR_UNKNOWN
                if value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED) or unknown == MANY:
                    raise
                out["refused"][name] = str(error)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_NO_PERMISSION:
            return {}
        out |= {"error": str(error), "reset": error.value == nvml.NVML_ERROR_RESET_REQUIRED}
    return out


def _memory(nvml: Any, gpu: Any) -> dict[str, float]:
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2)  # `used` of the first version has the driver's own memory
    return {"total_gib": memory.total / 2**30, "used_gib": memory.used / 2**30}


def _processes(nvml: Any, gpu: Any) -> list[str]:
    names = []
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu):
        try:
            name = decode_text(nvml.nvmlSystemGetProcessName(process.pid))
        except (nvml.NVMLError, UnicodeDecodeError):  # of another container, or not in UTF-8
            name = "a process"
        names.append(f"{name} (pid {process.pid})")
    return sorted(names)


def _remapped_rows(nvml: Any, gpu: Any) -> dict[str, int]:
    return dict(zip(("correctable", "uncorrectable", "pending", "failed"), nvml.nvmlDeviceGetRemappedRows(gpu), strict=True))


def _recovery_action(nvml: Any, gpu: Any) -> str:
    (value,) = _fields(nvml, gpu, [(nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0)])
    if value is None:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return _word(RECOVERY_ACTIONS, value)


def _pcie(nvml: Any, gpu: Any) -> dict[str, int]:
    return {
        "width": nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
        "max_width": nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
        "gen": nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
        "max_gen": nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
    }


def _fabric(nvml: Any, gpu: Any) -> dict[str, str]:
    info = nvml.c_nvmlGpuFabricInfo_t()
    nvml.nvmlDeviceGetGpuFabricInfo(gpu, ctypes.byref(info))
    if info.state == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    status = "Success" if info.status == nvml.NVML_SUCCESS else str(nvml.NVMLError(info.status))
    is_completed = info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED
    return {"state": _word(FABRIC_STATES, info.state), "status": status if is_completed else ""}


def _word(words: tuple[str, ...], number: int) -> str:
    return words[number] if number < len(words) else f"number {number}"


def _fields(nvml: Any, gpu: Any, fields: list[tuple[int, int]]) -> list[int | None]:
    """Return the values of NVML's fields; None for a field that the driver refuses. fields: (number, link)."""
    values = nvml.nvmlDeviceGetFieldValues(gpu, fields)
    valid = (value.nvmlReturn == nvml.NVML_SUCCESS and value.valueType in MEMBERS for value in values)
    return [int(getattr(v.value, MEMBERS[v.valueType])) if ok else None for v, ok in zip(values, valid, strict=True)]


def _nvlinks(nvml: Any, gpu: Any) -> dict[str, list[Any]]:
    """Return the numbers of the links that are up and down, and the rates in GB/s of those that are up, without repetition."""
    up, down = [], []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            (up if nvml.nvmlDeviceGetNvLinkState(gpu, link) else down).append(link)
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                raise  # the two mean that there is no such link
    speeds = _fields(nvml, gpu, [(nvml.NVML_FI_DEV_NVLINK_GET_SPEED, link) for link in up]) if up else []
    return {"up": up, "down": down, "gb_s": sorted({speed / 1e3 for speed in speeds if speed})}


def _nvlink_errors(nvml: Any, gpu: Any) -> dict[str, dict[str, int]]:
    """Return kind of error -> link -> count, without zeros."""
    kinds = {"recovery": nvml.NVML_NVLINK_ERROR_DL_RECOVERY, "replay": nvml.NVML_NVLINK_ERROR_DL_REPLAY}
    kinds["CRC"] = nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT
    links = _nvlinks(nvml, gpu)["up"]
    errors: dict[str, dict[str, int]] = {}
    try:
        counts = {kind: [nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, n) for link in links] for kind, n in kinds.items()}
    except nvml.NVMLError:  # Blackwell has one counter instead
        events = _fields(nvml, gpu, [(nvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS, link) for link in links])
        if None in events:
            raise
        counts = {"recovery": events}
    for kind, each in counts.items():
        if any(each):
            errors[kind] = {str(link): count for link, count in zip(links, each, strict=True) if count}
    return errors


# Name of a fact -> its reading.
READINGS: dict[str, Callable[[Any, Any], Any]] = {
    "name": lambda nvml, gpu: decode_text(nvml.nvmlDeviceGetName(gpu)),
    "uuid": lambda nvml, gpu: decode_text(nvml.nvmlDeviceGetUUID(gpu)),
    "pci": lambda nvml, gpu: decode_text(nvml.nvmlDeviceGetPciInfo(gpu).busId),
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
    "nvlinks": _nvlinks,
    "nvlink_errors": _nvlink_errors,
}


if __name__ == "__main__":
    import pynvml

    Path(sys.argv[1]).write_text(json.dumps(read_gpu_facts(pynvml)), encoding="utf-8")
