"""Monitoring GPUs: the lines made of a fake driver's readings, the warnings, and the handling of a driver that fails."""

import dataclasses
import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from played_nvml import AT_ITS_CAP, GIB, HW_THERMAL, IDLE, SW_THERMAL, Gpu, Nvml

from jaxtrain.config.hardware import visible_handles
from jaxtrain.metrics import alerts, nvml, table
from jaxtrain.metrics.gpu_monitor import MfuAlert, Monitor


def stats(in_use: float) -> dict[str, int]:
    """Return memory_stats of a GPU."""
    gib = {"bytes_in_use": in_use, "pool_bytes": 120.0, "bytes_limit": 120.0}
    return {name: int(value * GIB) for name, value in gib.items()}


class Watched:
    """A monitor whose threads never run and whose clock the test moves; it has taken its first sample."""

    def __init__(self, *gpus: Gpu, pools: dict[int, Any] | None = None, **options: Any):
        self.now = 100.0
        self.nvml = options.setdefault("nvml", Nvml(*gpus))
        self.memory: dict[int, Any] = {i: stats(80.0) for i in range(len(gpus))}
        pools = {i: lambda i=i: self.memory[i] for i in range(len(gpus))} if pools is None else pools
        self.monitor = Monitor(pools, **{"environ": {}, "clock": lambda: self.now} | options)

    def __enter__(self) -> "Watched":
        with pytest.MonkeyPatch.context() as patch:
            never = SimpleNamespace(start=lambda: None, join=lambda seconds: None, is_alive=lambda: False)
            patch.setattr("jaxtrain.metrics.gpu_monitor.threading.Thread", lambda **options: never)
            self.monitor.__enter__()
        self.monitor.sample()
        return self

    def __exit__(self, *exc: object) -> None:
        self.monitor.__exit__()

    def lines(self, step: int = 1, seconds: float = 10.0) -> list[dict[str, Any]]:
        """Move the clock by `seconds`, take one more sample, and return the metrics lines."""
        self.now += seconds
        self.monitor.sample()
        return self.monitor.lines(step)

    def alerts(self) -> list[str]:
        """Return the warnings after one more call of `lines`."""
        self.lines()
        return self.monitor.alerts()

    def in_thread(self, thread: Any, between: Iterator[Any]) -> None:
        """Run a thread's function here. Each wait takes the next item of `between`; when none is left, the function ends."""
        waits = SimpleNamespace(wait=lambda seconds: next(between, "over") == "over")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.monitor, "_over", waits)
            thread()


# ---- Lines


def test_a_line_has_every_key_and_its_unit():
    gpu = Gpu(0, sent_kib=10**9, received_kib=5)
    with Watched(gpu) as watched:
        assert watched.monitor.lines(1) == []  # no interval has passed yet
        gpu.sent_kib += 4 * 10**9 // 1024 * 10  # 4 GB/s for ten seconds
        (line,) = watched.lines(7)
        assert set(line) == {"step", "gpu", "process", "throttle_reasons", *table.GPU}
        assert line == {
            "step": 7, "gpu": 0, "process": 0, "utilization": 1.0, "memory_used_gib": 130.0, "pool_gib": 120.0,
            "in_use_gib": 80.0, "power_w": 650.0, "power_limit_w": 700.0, "temperature_c": 60.0,
            "sm_clock_mhz": 1800.0, "memory_clock_mhz": 3201.0, "throttled": 0.0, "throttle_reasons": "",
            "nvlink_tx_gb_s": pytest.approx(4.0), "nvlink_rx_gb_s": 0.0, "ecc_uncorrected": 0,
        }  # fmt: skip
        assert watched.monitor.lines(8) == []
        gpu.received_kib += 10**10 // 1024
        (line,) = watched.lines(8, seconds=20.0)
        assert (line["nvlink_tx_gb_s"], line["nvlink_rx_gb_s"]) == (0.0, pytest.approx(0.5))
        gpu.sent_kib = 0  # the driver was reloaded
        assert watched.lines(9)[0]["nvlink_tx_gb_s"] is None
    assert watched.nvml.open == 0


def test_samples_become_means_and_the_highest_temperature():
    gpu = Gpu(0, utilization=100, power_mw=700_000, temperature=70)
    with Watched(gpu) as watched:
        gpu.utilization, gpu.power_mw, gpu.temperature, gpu.reasons = 0, 100_000, 91, HW_THERMAL | IDLE
        watched.monitor.sample()
        gpu.temperature, gpu.reasons = 50, SW_THERMAL
        watched.monitor.sample()
        gpu.reasons = IDLE | AT_ITS_CAP | 0x2 | 0x100  # none of these reasons is a problem
        (line,) = watched.lines()
    assert line["utilization"] == 0.25 and line["power_w"] == 250.0 and line["temperature_c"] == 91.0
    assert line["throttled"] == 0.5 and line["throttle_reasons"] == "hw_thermal+sw_thermal"


def test_a_gpu_that_does_not_tell_has_nulls():
    silent = {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetFieldValues",
              "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetPowerManagementDefaultLimit"}  # fmt: skip
    with Watched(Gpu(0, limit_mw=300_000, broken=frozenset(silent))) as watched:
        watched.memory[0] = stats(80.0) | {"pool_bytes": -1}  # jaxlib's value for what it does not know
        (line,) = watched.lines()
        assert line["pool_gib"] is None and line["in_use_gib"] == 80.0
        watched.memory[0] = None
        (line,) = watched.lines()
        assert watched.monitor.alerts() == []
    unknown = {key for key, value in line.items() if value is None}
    assert unknown == {"power_w", "throttled", "nvlink_tx_gb_s", "nvlink_rx_gb_s", "ecc_uncorrected", "pool_gib",
                       "in_use_gib"}  # fmt: skip
    assert line["throttle_reasons"] == ""


def test_only_visible_gpus_of_this_process():
    gpus = [Gpu(i) for i in range(4)]
    with Watched(*gpus, pools={1: lambda: stats(80.0)}, environ={"CUDA_VISIBLE_DEVICES": "3,2"}, process=5) as watched:
        (line,) = watched.lines()
        assert (line["gpu"], line["process"]) == (2, 5)
        assert {index for index, _ in watched.nvml.asked} == {2}
    # as CUDA: the list ends at the first entry that is no GPU
    assert visible_handles("GPU-1, 0,9,2", Nvml(*gpus)) == [gpus[1], gpus[0]]


def test_without_gpus_nothing_happens():
    nvml = Nvml(Gpu(0))
    before = threading.active_count()
    with Monitor({}, nvml=nvml, environ={}, clock=lambda: 1e9) as monitor:
        assert monitor.lines(1) == [] and monitor.alerts() == [] and threading.active_count() == before
    assert nvml.asked == [] and nvml.open == 0


# ---- Failures


@pytest.mark.parametrize(
    ("driver", "visible", "place", "cause"),
    [(False, "0", 0, "Driver Not Loaded"), (True, "MIG-1", 0, "CUDA_VISIBLE_DEVICES = 'MIG-1'"), (True, "0", 1, "[1]")],
)
def test_what_cannot_be_monitored_is_told_once(driver, visible, place, cause):
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    with Watched(nvml=Nvml(Gpu(), driver=driver), pools={place: lambda: None}, environ=environ) as watched:
        (text,) = watched.monitor.alerts()
        assert cause in text
        assert watched.alerts() == watched.lines() == [] and watched.nvml.open == 0


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of the logger `jaxtrain` since the last call."""
    said = [record.getMessage() for record in caplog.records if (record.name, record.levelname) == ("jaxtrain", "WARNING")]
    caplog.clear()
    return said


def test_a_thread_that_fails_is_told_once_and_ends_no_run(caplog):
    with Watched(Gpu()) as watched:
        watched.nvml.DeviceGetPowerUsage = None
        watched.in_thread(watched.monitor._watch, itertools.repeat("another second"))
        (text,) = warnings(caplog)
        assert "TypeError" in text and watched.monitor.alerts() == []


@pytest.mark.parametrize("how", ["lost", "mute"])
def test_a_gpu_that_falls_off_the_bus_is_told_at_once_and_left_alone(how, caplog):
    """The monitor's thread reports the lost GPU, because the training loop may hang by then."""
    first, second = Gpu(0), Gpu(1)
    with Watched(first, second) as watched:
        assert len(watched.lines()) == 2
        if how == "lost":
            second.lost = True
        else:
            second.broken = frozenset(name for _, name in watched.nvml.asked)
            watched.monitor.sample()
            watched.monitor.sample()
            assert warnings(caplog) == []  # two samples without an answer may be a problem of the driver
        watched.monitor.sample()
        (text,) = warnings(caplog)
        assert text.startswith("GPU 1 ")
        watched.nvml.asked.clear()
        assert [line["gpu"] for line in watched.lines()] == [0] and {i for i, _ in watched.nvml.asked} == {0}
        assert watched.monitor.alerts() == [] and warnings(caplog) == []


def test_a_silent_driver_is_told_at_once_and_once(caplog):
    """A second thread reports the hang of the thread that reads the driver, because the training loop may hang too."""

    def seconds_later() -> Iterator[Any]:
        for seconds, said in ((60.0, 0), (1.0, 1), (30.0, 0)):
            watched.now += seconds
            yield
            texts = warnings(caplog)
            assert len(texts) == said and all("61 s" in text for text in texts)
        watched.monitor.sample()
        yield
        assert len(warnings(caplog)) == 1

    with Watched(Gpu()) as watched:
        watched.in_thread(watched.monitor._listen, seconds_later())


# ---- Warnings


HOT, WARM = {"reasons": HW_THERMAL, "temperature": 93, "sm_mhz": 1_100}, {"reasons": IDLE}
CLEAN = [(WARM, "")] * (alerts.CLEAN - 1)


@pytest.mark.parametrize(
    ("gpu", "lines"),
    [
        # a GPU at its power limit has full load, which is normal
        (Gpu(3), [({}, ""), (HOT, "GPU 3, hw_thermal, 100%, 93 C, 1,100 MHz"), ({}, ""), *CLEAN, (WARM, "GPU 3")]),
        (Gpu(3), [(HOT, "GPU 3"), *CLEAN, (HOT, ""), *CLEAN]),
        (Gpu(1, limit_mw=500_000), [({}, "GPU 1, 500 W, 700 W"), ({}, ""), ({"limit_mw": 700_000}, "GPU 1, 700 W")]),
        # preflight reports the errors of before
        (Gpu(2, ecc=5), [({}, ""), ({"ecc": 7}, "GPU 2, 2 new, 7 since"), ({}, ""), ({"ecc": 8}, "GPU 2, 1 new")]),
    ],
)
def test_a_word_is_said_when_something_begins_and_when_it_is_over(gpu, lines):
    with Watched(dataclasses.replace(gpu)) as watched:
        for changes, said in lines:
            vars(watched.nvml.gpus[0]).update(changes)
            texts = watched.alerts()
            assert len(texts) == bool(said) and all(part in text for text in texts for part in said.split(", "))


def test_every_reason_says_what_to_look_at():
    assert set(alerts.LOOK) == set(nvml.THROTTLING.values())
    named = {"HwSlowdown": "hw_slowdown", "SyncBoost": "sync_boost", "SwThermalSlowdown": "sw_thermal",
             "HwThermalSlowdown": "hw_thermal", "HwPowerBrakeSlowdown": "hw_power_brake", "BoardLimit": "board_limit",
             "Reliability": "reliability"}  # fmt: skip
    assert {getattr(pynvml, f"nvmlClocksThrottleReason{theirs}"): ours for theirs, ours in named.items()} == nvml.THROTTLING


def test_memory_that_grows_outside_the_pool():
    gpu = Gpu(0, used=124 * GIB)
    with Watched(gpu) as watched:
        for used in (125, 140, 127):  # NCCL and cuDNN allocate memory too; another process used the GPU for a moment
            gpu.used = used * GIB
            watched.monitor.sample()
            watched.monitor._samples[0] = watched.monitor._samples[0][-1:]
            watched.lines()
        gpu.used = 128 * GIB
        assert watched.alerts() == []
        for _ in range(2):
            gpu.used += GIB
            watched.monitor.sample()
        (text,) = watched.alerts()
        assert all(part in text for part in ("GPU 0", "7.0 to 9.7 GiB", "train.memory_fraction"))
        gpu.used = 125 * GIB
        (text,) = watched.alerts()
        assert "GPU 0" in text and "5.0 GiB" in text


def test_mfu_below_the_plan_is_one_episode():
    alert = MfuAlert(1.0)

    def said(*seconds: float | None) -> list[str]:
        return [text for s in seconds if (text := alert.note(s))]

    assert said(None, *[1.1] * 8, *[9.0] * 3) == []  # a few slow lines cause no warning
    (text,) = said(*[2.0] * 8)
    assert "below 80%" in text
    assert said(*[1.0 / 0.805] * 16) == []  # above the threshold, but not by enough to end the warning
    assert len(said(*[1.1] * 8)) == 1
    unplanned = MfuAlert(None)
    assert {unplanned.note(50.0) for _ in range(20)} == {None}
