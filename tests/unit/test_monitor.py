"""Watching GPUs: what a driver that is played here says, the lines made of it, the warnings, and where lines go."""

import dataclasses
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from runs import events
from test_metrics import train_line

from jaxtrain import metrics
from jaxtrain.hardware import visible_handles
from jaxtrain.monitor import MfuAlert, Monitor, alerts, card
from jaxtrain.plan.expect import Expected
from jaxtrain.plan.rates import PUBLISHED
from jaxtrain.trackers.tensorboard import TensorBoard

GIB = 2**30
IDLE, AT_ITS_CAP, SW_THERMAL, HW_THERMAL = 0x1, 0x4, 0x20, 0x40


@dataclasses.dataclass
class Gpu:
    """What the played driver says of a GPU; `broken` are functions that it refuses, `lost` all of them."""

    index: int
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
    broken: frozenset[str] = frozenset()
    lost: bool = False


class Nvml:
    """NVML's functions, errors and constants, of GPUs that a test sets. Handles are the GPUs."""

    def __init__(self, *gpus: Gpu):
        self.gpus = gpus
        self.open = 0  # nvmlInit less nvmlShutdown
        self.asked: list[tuple[int, str]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDevice"):
            return getattr(pynvml, name)  # constants and errors

        def ask(gpu: Gpu, *args: Any) -> Any:
            self.asked.append((gpu.index, name))
            if gpu.lost:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            if name in gpu.broken:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return getattr(self, f"_{name.removeprefix('nvmlDevice')}")(gpu, *args)

        return ask

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def _GetUUID(self, gpu: Gpu) -> str:
        return f"GPU-{gpu.index}0ac6aa1"

    def _GetIndex(self, gpu: Gpu) -> int:
        return gpu.index

    def _GetPowerManagementDefaultLimit(self, gpu: Gpu) -> int:
        return 700_000

    def _GetUtilizationRates(self, gpu: Gpu) -> Any:
        return SimpleNamespace(gpu=gpu.utilization, memory=0)

    def _GetMemoryInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(used=gpu.used)

    def _GetPowerUsage(self, gpu: Gpu) -> int:
        return gpu.power_mw

    def _GetEnforcedPowerLimit(self, gpu: Gpu) -> int:
        return gpu.limit_mw

    def _GetTemperature(self, gpu: Gpu, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return gpu.temperature

    def _GetClockInfo(self, gpu: Gpu, kind: int) -> int:
        return {pynvml.NVML_CLOCK_SM: gpu.sm_mhz, pynvml.NVML_CLOCK_MEM: 3_201}[kind]

    def _GetCurrentClocksThrottleReasons(self, gpu: Gpu) -> int:
        return gpu.reasons

    def _GetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int:
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return gpu.ecc

    def _GetFieldValues(self, gpu: Gpu, fields: list[tuple[int, int]]) -> Any:
        """In the library's own structure, a union and all."""
        kib = {138: gpu.sent_kib, 139: gpu.received_kib}
        values = (pynvml.c_nvmlFieldValue_t * len(fields))()
        for value, (field, scope) in zip(values, fields, strict=True):
            assert scope == 2**32 - 1  # over all links
            value.nvmlReturn = pynvml.NVML_SUCCESS
            value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            value.value.ullVal = kib[field]
        return values


def stats(in_use: float, pool: float = 120.0, largest: float = 0.0) -> dict[str, int]:
    """As a GPU's memory_stats: XLA's allocator there says 0 for the largest free block."""
    return {
        "bytes_in_use": int(in_use * GIB),
        "pool_bytes": int(pool * GIB),
        "largest_free_block_bytes": int(largest * GIB),
        "bytes_limit": int(pool * GIB),
    }


class Watched:
    """A monitor whose clock a test moves: the thread takes its first sample and then waits."""

    def __init__(self, *gpus: Gpu, pools: dict[int, Any] | None = None, **options: Any):
        self.now = 100.0
        self.nvml = Nvml(*gpus)
        self.memory: dict[int, Any] = {i: stats(80.0) for i in range(len(gpus))}
        pools = {i: lambda i=i: self.memory[i] for i in range(len(gpus))} if pools is None else pools
        options = {"nvml": self.nvml, "environ": {}, "sample_s": 1e6, "clock": lambda: self.now} | options
        self.monitor = Monitor(pools, 10.0, **options)

    def __enter__(self) -> "Watched":
        self.monitor.__enter__()
        limit = time.monotonic() + 10
        while self.monitor._thread and not (self.monitor._samples or self.monitor._gone or self.monitor._failed):
            assert time.monotonic() < limit
            time.sleep(0.002)
        return self

    def __exit__(self, *exc: object) -> None:
        self.monitor.__exit__()

    def lines(self, step: int = 1, seconds: float = 10.0) -> list[dict[str, Any]]:
        """After so long, with one more sample."""
        self.now += seconds
        self.monitor.sample()
        return self.monitor.lines(step)


# lines


def test_a_line_has_every_key_and_its_unit():
    gpu = Gpu(0, sent_kib=10**9, received_kib=5)
    with Watched(gpu) as watched:
        assert watched.monitor.lines(1) == []  # not yet
        gpu.sent_kib += 4 * 10**9 // 1024 * 10  # 4 GB/s for ten seconds
        (line,) = watched.lines(7)
        assert set(line) | {"kind", "time_unix"} == set(metrics.GPU_KEYS)
        assert line == {
            "step": 7, "gpu": 0, "process": 0, "utilization": 1.0, "memory_used_gib": 130.0, "pool_gib": 120.0,
            "in_use_gib": 80.0, "largest_free_gib": None, "power_w": 650.0, "power_limit_w": 700.0, "temperature_c": 60.0,
            "sm_clock_mhz": 1800.0, "memory_clock_mhz": 3201.0, "throttled": 0.0, "throttle_reasons": "",
            "nvlink_tx_gb_s": pytest.approx(4.0), "nvlink_rx_gb_s": 0.0, "ecc_uncorrected": 0,
        }  # fmt: skip
        assert watched.monitor.lines(8) == []
        gpu.received_kib += 10**10 // 1024
        (line,) = watched.lines(8, seconds=20.0)
        assert (line["nvlink_tx_gb_s"], line["nvlink_rx_gb_s"]) == (0.0, pytest.approx(0.5))
        gpu.sent_kib = 0  # the driver was loaded anew
        assert watched.lines(9)[0]["nvlink_tx_gb_s"] is None
    assert watched.nvml.open == 0


def test_samples_become_means_and_the_highest_temperature():
    gpu = Gpu(0, utilization=100, power_mw=700_000, temperature=70)
    with Watched(gpu) as watched:
        gpu.utilization, gpu.power_mw, gpu.temperature, gpu.reasons = 0, 100_000, 91, HW_THERMAL | IDLE
        watched.monitor.sample()
        gpu.temperature, gpu.reasons = 50, SW_THERMAL
        watched.monitor.sample()
        gpu.reasons = IDLE | AT_ITS_CAP | 0x2 | 0x100  # none of them is trouble
        (line,) = watched.lines()
    assert line["utilization"] == 0.25 and line["power_w"] == 250.0 and line["temperature_c"] == 91.0
    assert line["throttled"] == 0.5 and line["throttle_reasons"] == "hw_thermal+sw_thermal"


def test_the_thread_samples_by_itself():
    gpu = Gpu(0)
    options: dict[str, Any] = {"nvml": Nvml(gpu), "environ": {}, "sample_s": 0.01}
    with Monitor({0: lambda: stats(80.0)}, 0.05, **options) as monitor:
        limit, lines = time.monotonic() + 10, []
        while len(lines) < 3 and time.monotonic() < limit:
            lines += monitor.lines(len(lines))
            time.sleep(0.005)
        thread = monitor._thread
        assert [line["step"] for line in lines] == [0, 1, 2] and thread and thread.daemon
    assert not thread.is_alive() and options["nvml"].open == 0


def test_a_gpu_that_does_not_tell_has_nulls():
    silent = {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetFieldValues",
              "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetPowerManagementDefaultLimit"}  # fmt: skip
    with Watched(Gpu(0, limit_mw=300_000, broken=frozenset(silent))) as watched:
        watched.memory[0] = None
        (line,) = watched.lines()
        assert watched.monitor.alerts() == []
    unknown = {key for key, value in line.items() if value is None}
    assert unknown == {"power_w", "throttled", "nvlink_tx_gb_s", "nvlink_rx_gb_s", "ecc_uncorrected", "pool_gib",
                       "in_use_gib", "largest_free_gib"}  # fmt: skip
    assert line["throttle_reasons"] == ""


def test_jaxlib_says_minus_one_for_what_it_does_not_know():
    with Watched(Gpu(0)) as watched:
        watched.memory[0] = stats(80.0, largest=40.0) | {"pool_bytes": -1}
        (line,) = watched.lines()
    assert line["pool_gib"] is None and line["largest_free_gib"] == 40.0


def test_only_visible_gpus_of_this_process():
    gpus = [Gpu(i) for i in range(4)]
    with Watched(*gpus, pools={1: lambda: stats(80.0)}, environ={"CUDA_VISIBLE_DEVICES": "3,2"}, process=5) as watched:
        (line,) = watched.lines()
        assert (line["gpu"], line["process"]) == (2, 5)
        assert {index for index, _ in watched.nvml.asked} == {2}
    assert visible_handles("GPU-1, 0,9,2", Nvml(*gpus)) == [gpus[1], gpus[0]]  # as CUDA: it ends at the first that is none


@pytest.mark.parametrize(("pools", "every_s"), [({}, 10.0), ({0: lambda: stats(1.0)}, 0.0)])
def test_without_gpus_or_switched_off_nothing_happens(pools, every_s):
    nvml = Nvml(Gpu(0))
    before = threading.active_count()
    with Monitor(pools, every_s, nvml=nvml, environ={}, clock=lambda: 1e9) as monitor:
        assert monitor.lines(1) == [] and monitor.alerts() == [] and threading.active_count() == before
    assert nvml.asked == [] and nvml.open == 0


# failures


def test_no_driver_is_told_once():
    class NoDriver(Nvml):
        def nvmlInit(self) -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    with Monitor({0: lambda: None}, 10.0, nvml=NoDriver(), environ={}) as monitor:
        assert monitor.alerts() == ["the GPUs are not monitored: NVML does not start (Driver Not Loaded)"]
        assert monitor.alerts() == monitor.lines(1) == []


def test_a_slice_of_a_gpu_is_not_monitored():
    with Watched(Gpu(0), pools={0: lambda: None}, environ={"CUDA_VISIBLE_DEVICES": "MIG-1"}) as watched:
        (said,) = watched.monitor.alerts()
        assert said.startswith("the GPUs are not monitored: CUDA_VISIBLE_DEVICES = 'MIG-1': MIG-1 is a MIG slice")
        assert watched.lines() == [] and watched.nvml.open == 0


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the threads have said since the last call, on the road that leads to log.txt."""
    said = [record.getMessage() for record in caplog.records if (record.name, record.levelname) == ("jaxtrain", "WARNING")]
    caplog.clear()
    return said


def eventually(caplog: pytest.LogCaptureFixture) -> list[str]:
    limit = time.monotonic() + 10
    while not caplog.records and time.monotonic() < limit:
        time.sleep(0.005)
    return warnings(caplog)


def test_a_thread_that_fails_is_told_once_and_ends_no_run(caplog):
    def broken(gpu: Gpu) -> int:
        raise AttributeError("no such function in this driver")

    watched = Watched(Gpu(0))
    watched.nvml._GetPowerUsage = broken
    with watched:
        assert eventually(caplog) == ["the GPUs are no longer monitored: AttributeError: no such function in this driver"]
        assert watched.monitor.alerts() == []
    assert warnings(caplog) == []


@pytest.mark.parametrize("how", ["lost", "mute"])
def test_a_gpu_that_falls_off_the_bus_is_told_at_once_and_left_alone(how, caplog):
    """By the thread: the loop may hang by then."""
    first, second = Gpu(0), Gpu(1)
    with Watched(first, second) as watched:
        assert len(watched.lines()) == 2
        if how == "lost":
            second.lost = True
        else:
            second.broken = frozenset(name for _, name in watched.nvml.asked)
            watched.monitor.sample()
            watched.monitor.sample()
            assert warnings(caplog) == []  # twice without an answer may be the driver's trouble
        watched.monitor.sample()
        (text,) = warnings(caplog)
        assert [line["gpu"] for line in watched.lines()] == [0]
        assert text.startswith("GPU 1 has fallen off the bus, or needs a reset") and "dmesg" in text
        watched.nvml.asked.clear()
        assert [line["gpu"] for line in watched.lines()] == [0] and {i for i, _ in watched.nvml.asked} == {0}
        assert watched.monitor.alerts() == [] and warnings(caplog) == []


def test_a_gpu_that_answers_again_is_not_lost(caplog):
    gpu = Gpu(0)
    with Watched(gpu) as watched:
        for _ in range(3):
            watched.lines()
            gpu.broken = frozenset(name for _, name in watched.nvml.asked)
            watched.monitor.sample()
            watched.monitor.sample()
            gpu.broken = frozenset()
        assert watched.lines()[0]["power_w"] == 650.0  # and what it did not say is no zero
    assert warnings(caplog) == []


def test_a_driver_that_hangs_is_told_at_once_and_does_not_hold_the_end(monkeypatch, caplog):
    monkeypatch.setattr("jaxtrain.monitor.JOIN_S", 0.1)
    hangs = threading.Event()
    watched = Watched(Gpu(0), sample_s=0.01)
    with watched:
        watched.nvml._GetPowerUsage = lambda gpu: hangs.wait(30) and 0
        time.sleep(0.1)
        watched.now += 61.0
        (text,) = eventually(caplog)
        assert text.startswith("the driver has not answered for 6")
        watched.now += 30.0
        time.sleep(0.1)
        assert warnings(caplog) == []
        hangs.set()
        assert eventually(caplog) == ["the driver answers again"]
        hangs.clear()
        time.sleep(0.1)
    assert watched.nvml.open == 1  # the library is still in use
    hangs.set()


# warnings


def test_throttling_is_one_episode():
    gpu = Gpu(3)
    with Watched(gpu) as watched:
        watched.lines()
        assert watched.monitor.alerts() == []  # at its power limit: that is what full load looks like
        gpu.reasons, gpu.temperature, gpu.sm_mhz = HW_THERMAL, 93, 1_100
        watched.lines()
        (text,) = watched.monitor.alerts()
        assert text.startswith("GPU 3 is throttled: hw_thermal in 100% of the samples, 93 C, 1,100 MHz: it is too hot")
        assert "-i 3" in text
        watched.lines()
        assert watched.monitor.alerts() == []
        gpu.reasons = IDLE
        for _ in range(alerts.CLEAN - 1):
            watched.lines()
        assert watched.monitor.alerts() == []
        watched.lines()
        assert watched.monitor.alerts() == ["GPU 3 is no longer throttled"]
        gpu.reasons = HW_THERMAL
        watched.lines()
        assert len(watched.monitor.alerts()) == 1


def test_a_short_dip_is_not_worth_a_word():
    found = alerts.GpuAlerts(episodes := alerts.Episodes())
    line = dict.fromkeys(metrics.GPU_KEYS) | {"gpu": 0, "throttle_reasons": "sw_thermal"}
    shares = [(0.1, 0), (0.3, 1), (0.1, 0), (0.3, 0), *[(0.3, 0), (0.0, 0)] * 30, *[(0.0, 0)] * (alerts.CLEAN - 2), (0.0, 1)]
    for share, said in [*shares, (0.0, 0), (None, 0), (0.3, 1)]:  # one that comes and goes is one episode
        found.look(line | {"throttled": share, "throttle_reasons": "sw_thermal" if share else ""}, None)
        assert len(episodes.take()) == said, share


def test_every_reason_says_what_to_look_at():
    assert set(alerts.LOOK) == set(card.THROTTLING.values())
    bits = {name: getattr(pynvml, name) for name in dir(pynvml) if name.startswith("nvmlClocksThrottleReason")}
    named = {"HwSlowdown": "hw_slowdown", "SyncBoost": "sync_boost", "SwThermalSlowdown": "sw_thermal",
             "HwThermalSlowdown": "hw_thermal", "HwPowerBrakeSlowdown": "hw_power_brake", "BoardLimit": "board_limit",
             "Reliability": "reliability"}  # fmt: skip
    assert {bits[f"nvmlClocksThrottleReason{theirs}"]: ours for theirs, ours in named.items()} == card.THROTTLING


def test_power_capped_below_the_default():
    gpu = Gpu(1, limit_mw=500_000)
    with Watched(gpu) as watched:
        watched.lines()
        (text,) = watched.monitor.alerts()
        assert text.startswith("GPU 1 is limited to 500 W, 700 W by default") and "nvidia-smi -i 1 -pl 700" in text
        watched.lines()
        gpu.limit_mw = 700_000
        watched.lines()
        assert watched.monitor.alerts() == ["GPU 1 has its default power limit again, 700 W"]


def test_only_new_memory_errors_are_told():
    gpu = Gpu(2, ecc=5)
    with Watched(gpu) as watched:
        watched.lines()
        assert watched.monitor.alerts() == []
        gpu.ecc = 7
        watched.lines()
        (text,) = watched.monitor.alerts()
        assert text.startswith("GPU 2 has 2 new uncorrected memory errors (ECC), 7 since")
        watched.lines()
        assert watched.monitor.alerts() == []
        gpu.ecc = 8
        watched.lines()
        assert "1 new" in watched.monitor.alerts()[0]


def test_memory_that_grows_outside_the_pool():
    gpu = Gpu(0, used=124 * GIB)
    with Watched(gpu) as watched:
        for used in (125, 140, 127):  # NCCL and cuDNN take theirs; somebody's process was there for a moment
            gpu.used = used * GIB
            watched.monitor.sample()
            watched.monitor._samples[0] = watched.monitor._samples[0][-1:]
            watched.lines()
        gpu.used = 128 * GIB
        watched.lines()
        assert watched.monitor.alerts() == []
        for _ in range(2):
            gpu.used += GIB
            watched.monitor.sample()
        watched.lines()
        (text,) = watched.monitor.alerts()
        assert (
            text.startswith("GPU 0: memory outside JAX's pool has grown from 7.0 to 9.7 GiB.")
            and "train.memory_fraction" in text
        )
        gpu.used = 125 * GIB
        watched.lines()
        assert watched.monitor.alerts() == ["GPU 0: memory outside JAX's pool is back to 5.0 GiB"]


def test_alerts_rest_on_what_gpus_report():
    """XLA's allocator on GPUs says 0 for the largest free block: an alert about fragments could never fire."""
    with Watched(Gpu(0)) as watched:
        (line,) = watched.lines()
    assert line.pop("largest_free_gib") is None
    episodes = alerts.Episodes()
    alerts.GpuAlerts(episodes).look(line, 700.0)
    assert episodes.take() == []


def test_mfu_below_the_plan_is_one_episode():
    alert = MfuAlert(1.0, 0.8)
    said = [alert.note(s) for s in [None, *[1.1] * 8, *[9.0] * 3]]
    assert set(said) == {None}  # some slow lines are no matter
    said = [alert.note(2.0) for _ in range(8)]
    (text,) = [text for text in said if text]
    assert text.startswith("MFU is ") and "below log.mfu_alert=0.8" in text
    near = [alert.note(1.0 / 0.805) for _ in range(16)]  # above, but not by enough to call it over
    assert set(near) == {None}
    said = [alert.note(1.1) for _ in range(8)]
    (text,) = [text for text in said if text]
    assert text.startswith("MFU is back at 8")
    for never in (MfuAlert(1.0, 0.0), MfuAlert(None, 0.8)):
        assert {never.note(50.0) for _ in range(20)} == {None}


def test_the_alert_begins_below_the_range_that_is_expected():
    """0.7 of the roofline's MFU may be what published runs reach; without a comparable run only a calibration says more."""
    assert Expected(1.0, 50.0, PUBLISHED, (1.1, 1.4)).longest_s == 1.4
    assert Expected(1.0, 50.0, PUBLISHED).longest_s is None and Expected(1.0, 50.0, "calibrated").longest_s == 1.0


# files


def gpu_line(step: int, gpu: int = 0, process: int = 0, **changes: Any) -> dict[str, Any]:
    line: dict[str, Any] = dict.fromkeys(metrics.GPU_KEYS[1:-1], 0.5) | {"step": step, "gpu": gpu, "process": process}
    return line | {"throttle_reasons": "sw_thermal", "ecc_uncorrected": None} | changes


def test_gpu_lines_are_kept_and_shown(tmp_path):
    with metrics.Writers(tmp_path, [TensorBoard(tmp_path)]) as writers:
        writers.train(**train_line(1))
        for gpu in (0, 1):
            writers.gpu(**gpu_line(1, gpu, power_w=600.0 + gpu))
        with pytest.raises(TypeError, match=r"a gpu line lacks \['power_w'\]"):
            writers.gpu(**{k: v for k, v in gpu_line(1).items() if k != "power_w"})
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert tuple(json.loads(text[1])) == metrics.GPU_KEYS and json.loads(text[2])["power_w"] == 601.0
    shown: dict[str, Any] = {}
    for step, _, values in events(tmp_path / "tb")[0]:
        assert step == 1
        shown |= values
    assert shown["train/loss"] == 0.5 and shown["gpu/0/power_w"] == 600.0 and shown["gpu/1/power_w"] == 601.0
    assert not {"gpu/0/gpu", "gpu/0/process", "gpu/0/throttle_reasons", "gpu/0/ecc_uncorrected"} & set(shown)
    assert "gpu/3.1/power_w" in metrics.tagged({"kind": "gpu", **gpu_line(1, gpu=1, process=3)})


def test_other_processes_write_their_gpus_apart(tmp_path):
    for process in (0, 1):
        with metrics.Writers(tmp_path, process_index=process) as writers:
            for step in (1, 2, 3):
                writers.train(**train_line(step))
                writers.gpu(**gpu_line(step, process=process))
    files = {name: list(metrics.read(tmp_path / name)) for name in ("metrics.jsonl", "metrics.1.jsonl")}
    assert [(line["kind"], line["step"]) for line in files["metrics.1.jsonl"]] == [("gpu", 1), ("gpu", 2), ("gpu", 3)]
    assert len(files["metrics.jsonl"]) == 6
    for process in (0, 1):  # each rewinds its own
        kept = metrics.Writers(tmp_path, process_index=process).rewind(2)
        assert kept == metrics.Rewound(4 - 2 * process, 2 - process, False)
    assert [line["step"] for line in metrics.read(tmp_path / "metrics.1.jsonl")] == [1, 2]
    (moved,) = metrics.Writers(tmp_path, process_index=1).set_aside()
    assert moved.name.startswith("metrics.1.set_aside-") and (tmp_path / "metrics.jsonl").exists()


def test_a_line_of_a_killed_process_is_cut_off(tmp_path):
    writers = metrics.Writers(tmp_path, process_index=2)
    for step in (1, 2):
        writers.gpu(**gpu_line(step, process=2))
    writers.close()
    path = tmp_path / "metrics.2.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert writers.rewind(5) == metrics.Rewound(1, 0, True)


def test_importing_the_monitor_is_light():
    code = "import sys, jaxtrain.monitor\nprint([n for n in ('jax', 'numpy') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
