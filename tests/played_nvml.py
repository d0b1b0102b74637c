"""A fake of NVML: its functions, errors and constants, for GPUs that the test sets."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 2**30
IDLE, AT_ITS_CAP, SW_THERMAL, HW_THERMAL = 0x1, 0x4, 0x20, 0x40


@dataclasses.dataclass
class Gpu:
    """A fake GPU. The functions in `broken` fail for it, and all functions fail for a `lost` GPU."""

    index: int = 0
    utilization: int = 100
    used: int = 130 * GIB
    power_mw: int = 650_000
    limit_mw: int = 700_000
    temperature: int = 60
    sm_mhz: int = 1_800
    reasons: int = AT_ITS_CAP
    ecc: int = 0
    sent_kib: int = 0
    received_kib: int = 0
    links: int = 18  # of which the first 16 are up
    asleep: bool = False  # whether NVML gives links that are up the state "sleep"
    action: int = 0
    fabric: int = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
    broken: frozenset[str] = frozenset()
    lost: bool = False
    error: int = pynvml.NVML_ERROR_GPU_IS_LOST  # of a lost GPU


class Nvml:
    """A fake driver with these GPUs, which serve as their own handles. driver=False: no driver is loaded."""

    SystemGetDriverVersion, SystemGetCudaDriverVersion = "580.65.06", 13000
    DeviceGetName, DeviceGetEccMode = b"NVIDIA H200", [1, 1]
    DeviceGetPowerManagementDefaultLimit, DeviceGetMaxClockInfo = 700_000, 1980
    DeviceGetPowerManagementLimit, DeviceGetApplicationsClock, DeviceGetDefaultApplicationsClock = 650_000, 1755, 1980
    DeviceGetMigMode, DeviceGetRemappedRows = [0, 1], (4, 1, 0, 0)
    DeviceGetCurrPcieLinkWidth, DeviceGetMaxPcieLinkWidth = 8, 16
    DeviceGetCurrPcieLinkGeneration, DeviceGetMaxPcieLinkGeneration = 1, 5

    def __init__(self, *gpus: Gpu, driver: bool = True):
        self.gpus, self.driver = gpus, driver
        self.open = 0  # calls of nvmlInit minus calls of nvmlShutdown
        self.asked: list[tuple[int, str]] = []
        for index, gpu in enumerate(gpus):
            gpu.index = gpu.index or index

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("nvmlDevice", "nvmlSystem")):
            return getattr(pynvml, name)  # constants and errors

        def ask(*args: Any) -> Any:
            if not self.driver:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
            if args and isinstance(args[0], Gpu):
                self.asked.append((args[0].index, name))
                if args[0].lost:
                    raise pynvml.NVMLError(args[0].error)
                if name in args[0].broken:
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            found = getattr(self, name.removeprefix("nvml"))
            return found(*args) if callable(found) else found

        return ask

    def nvmlInit(self) -> None:
        if not self.driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def DeviceGetCount(self) -> int:
        return len(self.gpus)

    def DeviceGetHandleByIndex(self, index: int) -> Gpu:
        if self.gpus[index].lost:
            raise pynvml.NVMLError(self.gpus[index].error)
        return self.gpus[index]

    def DeviceGetUUID(self, gpu: Gpu) -> str:
        return f"GPU-{gpu.index}0ac6aa1"

    def DeviceGetIndex(self, gpu: Gpu) -> int:
        return gpu.index

    def DeviceGetPciInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(busId=b"0000:18:00.0")

    def DeviceGetUtilizationRates(self, gpu: Gpu) -> Any:
        return SimpleNamespace(gpu=gpu.utilization, memory=0)

    def DeviceGetMemoryInfo(self, gpu: Gpu, version: int | None = None) -> Any:
        return SimpleNamespace(used=gpu.used, total=141 * GIB)

    def DeviceGetCudaComputeCapability(self, gpu: Gpu) -> tuple[int, int]:
        return 9, 0

    def DeviceGetPowerUsage(self, gpu: Gpu) -> int:
        return gpu.power_mw

    def DeviceGetEnforcedPowerLimit(self, gpu: Gpu) -> int:
        return gpu.limit_mw

    def DeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return gpu.temperature

    def DeviceGetClockInfo(self, gpu: Gpu, kind: int) -> int:
        return {pynvml.NVML_CLOCK_SM: gpu.sm_mhz, pynvml.NVML_CLOCK_MEM: 3_201}[kind]

    def DeviceGetCurrentClocksThrottleReasons(self, gpu: Gpu) -> int:
        return gpu.reasons

    def DeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int:
        assert kind == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return gpu.ecc if counter == pynvml.NVML_VOLATILE_ECC else 12  # over the GPU's life

    def DeviceGetNvLinkState(self, gpu: Gpu, link: int) -> int:
        if link >= gpu.links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT if gpu.links else pynvml.NVML_ERROR_NOT_SUPPORTED)
        return (2 if gpu.asleep else 1) * (link < 16)

    def DeviceGetNvLinkErrorCounter(self, gpu: Gpu, link: int, kind: int) -> int:
        return 3 if (link, kind) == (5, pynvml.NVML_NVLINK_ERROR_DL_RECOVERY) else 0

    def DeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:
        return [SimpleNamespace(pid=7), SimpleNamespace(pid=8)]

    def SystemGetProcessName(self, pid: int) -> str:
        if pid == 8:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "python3"

    def DeviceGetGpuFabricInfo(self, gpu: Gpu, info: Any) -> int:
        info._obj.state, info._obj.status = gpu.fabric, pynvml.NVML_SUCCESS  # info: a reference, as the C function takes it
        return pynvml.NVML_SUCCESS

    def DeviceGetFieldValues(self, gpu: Gpu, fields: list[tuple[int, int]]) -> Any:
        """Return the fields as pynvml's array of c_nvmlFieldValue_t."""
        all_links = 2**32 - 1
        known = {(138, all_links): gpu.sent_kib, (139, all_links): gpu.received_kib, (230, 0): gpu.action}
        for link in range(gpu.links):
            known |= {(164, link): 26_562, (215, link): 7 * (link == 6)}
        values = (pynvml.c_nvmlFieldValue_t * len(fields))()
        for value, field in zip(values, fields, strict=True):
            value.nvmlReturn = pynvml.NVML_SUCCESS if field in known else pynvml.NVML_ERROR_NOT_SUPPORTED
            value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            value.value.ullVal = known.get(field, 0)
        return values
