"""Readings of GPUs through NVML. Imports no jax, because NVML uses the driver only.

`nvml` is pynvml, or an object with the same functions. A reading is None if the driver does not report it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

# NVML's bit (nvml.h, nvmlClocksEventReasons) -> reason for reduced clocks. Reasons that are no problem are left out: an idle
# GPU (0x1), clocks set by the user (0x2, 0x100), and the power limit (0x4), which a GPU reaches under full load. A line has
# power and power limit anyway.
THROTTLING = {
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x200: "board_limit",
    0x400: "reliability",
}
ALL_LINKS = 0xFFFFFFFF  # scope of an NVLink counter: the sum over all links of the GPU (nvml.h)
MUTE = 3  # consecutive samples without any answer, after which a GPU counts as lost; a single one may be a driver problem
# Type of a value (nvmlValueType_t) -> its member of NVML's union of values.
MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


class Lost(RuntimeError):
    """An error: the driver cannot reach this GPU until the GPU is reset."""


@dataclasses.dataclass(frozen=True)
class GpuSample:
    """The readings of a GPU at one time. A reading is None if the driver does not report it."""

    at: float  # time in seconds of the monitor's clock
    utilization: float | None  # 0 to 1: fraction of the driver's last period in which a kernel ran
    memory_used_gib: float | None  # of the whole GPU, including other processes and the driver
    power_w: float | None
    power_limit_w: float | None
    temperature_c: float | None
    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    reasons: tuple[str, ...] | None  # values of THROTTLING
    ecc_uncorrected: int | None  # since the driver was loaded
    nvlink_kib: tuple[int, int] | None  # sent, received since the driver was loaded


class Card:
    """A GPU, given by its NVML handle. The constructor raises nvml.NVMLError if the GPU's index cannot be read."""

    def __init__(self, nvml: Any, handle: Any):
        self._nvml, self._handle = nvml, handle
        self._refused: Exception | None = None  # error of the last failed call
        self._mute = 0  # consecutive samples without any answer
        self.index = int(nvml.nvmlDeviceGetIndex(handle))
        self.default_limit_w = self._ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit, lambda mw: mw / 1e3)

    def sample(self, at: float) -> GpuSample | None:
        """Return a sample; None if every NVML call failed. at: time in seconds on the monitor's clock.

        Raises Lost if the driver returns an error for a GPU that has fallen off the bus or needs a reset. Also raises Lost
        after MUTE consecutive samples in which every call failed.
        """
        nvml = self._nvml
        reading = GpuSample(
            at,
            self._ask(nvml.nvmlDeviceGetUtilizationRates, lambda rates: rates.gpu / 100),
            self._ask(nvml.nvmlDeviceGetMemoryInfo, lambda info: int(info.used) / 2**30),
            self._ask(nvml.nvmlDeviceGetPowerUsage, lambda mw: mw / 1e3),
            self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, lambda mw: mw / 1e3),
            self._ask(nvml.nvmlDeviceGetTemperature, float, nvml.NVML_TEMPERATURE_GPU),
            self._ask(nvml.nvmlDeviceGetClockInfo, float, nvml.NVML_CLOCK_SM),
            self._ask(nvml.nvmlDeviceGetClockInfo, float, nvml.NVML_CLOCK_MEM),
            # The older of two names of this function. All drivers support it.
            self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, throttle_reasons),
            self._ask(nvml.nvmlDeviceGetTotalEccErrors, int, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
            self._nvlink(),
        )
        if any(value is not None for name, value in dataclasses.asdict(reading).items() if name != "at"):
            self._mute = 0
            return reading
        self._mute += 1
        if self._mute >= MUTE:
            raise Lost(f"answers none of the driver's questions ({self._refused})")
        return None

    def _ask(self, question: Callable[..., Any], reading: Callable[[Any], Any], *args: Any) -> Any:
        """Return the result of an NVML function, converted by `reading`; None if the call fails. Raises Lost for a lost GPU."""
        try:
            return reading(question(self._handle, *args))
        except self._nvml.NVMLError as error:
            if error.value in (self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_RESET_REQUIRED):
                raise Lost(str(error)) from error
            self._refused = error
            return None

    def _nvlink(self) -> tuple[int, int] | None:
        nvml = self._nvml
        fields = [nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX]
        values = self._ask(nvml.nvmlDeviceGetFieldValues, list, [(field, ALL_LINKS) for field in fields])
        if values is None or any(value.nvmlReturn != nvml.NVML_SUCCESS for value in values):
            return None
        sent, received = (getattr(value.value, MEMBERS[value.valueType]) for value in values)
        return int(sent), int(received)


def decode_text(value: bytes | str) -> str:
    """Return a text of NVML, which older versions of pynvml give as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Return the names of the reasons in THROTTLING whose bits NVML has set in `bits`."""
    return tuple(name for bit, name in THROTTLING.items() if bits & bit)


def rate_gb_s(before: tuple[float, int], now: tuple[float, int]) -> float | None:
    """Return GB/s between two readings (seconds, KiB) of a counter; None if the counter was reset, or no time has passed."""
    seconds, kib = now[0] - before[0], now[1] - before[1]
    return kib * 1024 / 1e9 / seconds if seconds > 0 and kib >= 0 else None


def mean(values: list[float | None]) -> float | None:
    """Return the mean of the known values; None if no value is known."""
    known_values = [value for value in values if value is not None]
    return math.fsum(known_values) / len(known_values) if known_values else None
