"""Preflight's measurements: its programs on CPU devices, its formulas by hand, and disks with a fake clock."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxtrain import hardware
from jaxtrain.bench import child, disk_rates
from jaxtrain.bench import microbenchmarks as micro
from jaxtrain.bench.disk_rates import Unmeasured
from jaxtrain.bench.microbenchmarks import TINY
from jaxtrain.config import ConfigError
from jaxtrain.distributed import Cluster
from jaxtrain.monitor import card
from jaxtrain.preflight import measure, rates
from jaxtrain.preflight.node import Unanswered

REPO = Path(__file__).parents[2]
MIB = 2**20


def test_no_gpu_is_said(tmp_path):
    found = measure.measure({"data": tmp_path}, 10, disk_bytes=MIB)
    assert found["gemm_tflops"] == [] and found["all_reduce_bus_gb_s"] is None and found["disk"]["data"]["read_gb_s"] > 0
    assert found["left_out"]["gemm_tflops"].startswith("there is no GPU to measure (JAX_PLATFORMS=cpu")


def hang(*_: Any) -> Any:
    """Raise Unanswered, as `call_with_timeout` does after its timeout."""
    raise Unanswered("it did not answer within 3 s")


class Clock:
    """A fake of the module `time`, whose clock the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def test_a_driver_that_hangs_is_a_fault(monkeypatch):
    monkeypatch.setattr(measure, "call_with_timeout", hang)
    found = measure.measure({}, 10)
    assert (
        found["failed"] == {"driver": "it did not answer within 3 s"} and "did not answer" in found["left_out"]["gemm_tflops"]
    )


def all_devices_at_once(monkeypatch, seconds: float) -> None:
    """Make every program take `seconds` on every device."""
    monkeypatch.setattr(micro, "timed", lambda run, *args, sizes: [seconds])
    monkeypatch.setattr(micro, "timed_by_device", lambda run, *args, devices, sizes: [[seconds]] * len(devices))


def test_rates_have_the_units_of_their_names(monkeypatch, tmp_path):
    """Expected by hand: FLOPs of three matmuls, bytes of three arrays, nccl-tests' bus bandwidth with 2(n-1)/n or (n-1)/n."""
    all_devices_at_once(monkeypatch, 0.5)
    found = measure.Results({}, 60.0)
    measure.measure_gpus(jax.devices()[:2], jax.devices()[:2], found)
    measured = found.answer["measured"]
    assert measured["gemm_tflops"] == pytest.approx([3 * 2 * 64 * 32 * 48 * 2 / 0.5e12] * 2)
    assert measured["hbm_gb_s"] == pytest.approx([3 * MIB * TINY.memory_rounds / 0.5e9] * 2)
    assert measured["h2d_gb_s"] == pytest.approx([MIB / 0.5e9] * 2)
    algorithm = MIB * TINY.collective_rounds / 0.5 / 1e9
    assert measured["all_reduce_bus_gb_s"] == pytest.approx(algorithm * 2 * 1 / 2)
    assert measured["reduce_scatter_bus_gb_s"] == pytest.approx(algorithm * 1 / 2)


def test_processes_make_the_same_number_of_calls(monkeypatch, tmp_path):
    """The number of calls of a collective is fixed. With a limit by the clock, one process could start a call that another does
    not.
    """
    seen: list[micro.Sizes] = []
    all_devices_at_once(monkeypatch, 0.5)
    monkeypatch.setattr(micro, "timed", lambda run, *args, sizes: seen.append(sizes) or [1.0])
    monkeypatch.setattr(micro, "TINY", dataclasses.replace(TINY, warm_s=9.0))
    measure.measure_gpus(jax.devices()[:2], jax.devices()[:2], measure.Results({}, 60.0))
    assert [(s.warm_s, s.repeats) for s in seen] == [(0.0, TINY.repeats)] * 2


def test_nodes_are_told_apart(monkeypatch):
    """Each collective runs over the node's devices, and over all devices if there are several nodes."""
    members: list[list[Any]] = []
    all_devices_at_once(monkeypatch, 0.5)
    monkeypatch.setattr(
        micro, "collective", lambda kind, over, *_: members.append(list(over)) or micro.Reading("", "", 1.0, 1.0, 0.0)
    )
    every = jax.devices()
    monkeypatch.setattr("jaxtrain.sharding.node_of", lambda device: device.id // 4)
    measure.measure_gpus(every, every[4:6], measure.Results({}, 60.0))
    assert members == [every[4:]] * 2 + [every] * 2


@pytest.mark.parametrize("late", [False, True])
def test_what_fails_or_comes_too_late_is_left_out(tmp_path, monkeypatch, late):
    """Measurements of a GPU that fail or come too late are left out, with the reason. Collectives are never left out: other
    processes would wait.
    """

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such luck\nand much more")

    reading = micro.Reading("", "", 1e9, 1.0, 0.0)
    monkeypatch.setattr(micro, "gemm", broken)
    monkeypatch.setattr(micro, "memory", lambda *_: [reading])
    monkeypatch.setattr(micro, "host", lambda *_: [reading])
    monkeypatch.setattr(micro, "collective", lambda kind, members, *_: dataclasses.replace(reading, work=1e9 * len(members)))
    request = {"answer_file": str(tmp_path / "answer.json")}
    found = measure.Results(request, -1.0 if late else 60.0)
    measure.measure_gpus(jax.devices(), jax.devices()[:2], found)
    saved = json.loads((tmp_path / "answer.json").read_text())
    assert saved["verdict"] == child.LATE and saved["current"]  # the state that a killed process leaves
    kept, why = found.answer, found.answer["left_out"]
    assert {k: kept["measured"][k] for k in rates.BUS_RATES} == dict.fromkeys(rates.BUS_RATES, 8)
    assert why["inter_node_all_reduce_bus_gb_s"] == "there is one node"
    if late:
        assert {why[name] for name in rates.GPU_RATES} == {"no time was left"} and not kept["failed"]
    else:
        assert kept["failed"] == {"gemm_tflops": "GEMMs on 2 GPUs: RuntimeError: no such luck"}
        assert why["gemm_tflops"] == "RuntimeError: no such luck" and kept["measured"]["hbm_gb_s"] == [1.0]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS", True),
        # another process uses the memory, as the check `memory in use` reports
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 256 MiB", False),
        ("UNIMPLEMENTED: no pinned_host on this platform", False),
    ],
)
def test_which_errors_are_faults(tmp_path, text, fault):
    def broken() -> Any:
        raise RuntimeError(text)

    found = measure.Results({}, 60.0)
    found.add("hbm_gb_s", "memory of 8 GPUs", broken)
    assert text in found.answer["left_out"]["hbm_gb_s"] and bool(found.answer["failed"]) == fault


def test_a_jax_that_goes_on_with_the_cpu_is_a_fault(monkeypatch):
    """JAX falls back to the CPU if its plugin for GPUs does not start. The measurement then ends with an error."""
    monkeypatch.setattr(hardware, "probe", lambda: hardware.Devices("gpu", "NVIDIA H200", 8, 140.0, "NVML"))
    monkeypatch.setattr(measure, "measure_gpus", lambda *_: pytest.fail("measured the CPU"))
    with pytest.raises(ConfigError, match="the driver reports 8 x NVIDIA H200"):
        measure.measure_in_child({"limit_s": 10.0, "cluster": None})


@pytest.mark.parametrize(("ids", "count"), [((0,), 4), (None, 32)])
def test_a_run_of_some_gpus_of_a_node_is_measured_on_these(ids, count, monkeypatch):
    """JAX starts the GPUs of all processes: here of 4, with one GPU each or with a node of 8 each."""
    monkeypatch.setattr(hardware, "probe", lambda: hardware.Devices("gpu", "NVIDIA H200", 8, 140.0, "NVML"))
    asked = []
    monkeypatch.setattr(measure.startup, "start_jax", lambda devices, cluster: asked.append(devices.count))
    monkeypatch.setattr(measure, "measure_gpus", lambda *_: None)
    measure.measure_in_child({"limit_s": 10.0, "cluster": dataclasses.asdict(Cluster("here:1", 4, 0, ids, "test"))})
    assert asked == [count]


class Played:
    """A fake of monitor.card.Card, a GPU under load. `sample` returns or raises the items of `said` one after another, and
    repeats the last item.
    """

    index = 6

    def __init__(self, *said: Any):
        self.said = list(said)

    def sample(self, at: float) -> Any:
        given = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if isinstance(given, Exception):
            raise given
        return given


def sampled(mhz: float, *reasons: str) -> card.Sample:
    return card.Sample(0.0, 1.0, 90.0, 650.0, 700.0, 60.0, mhz, 3201.0, reasons, 0, None)


def test_gpus_are_watched_while_they_compute():
    watched = Played(sampled(1500.0), None, sampled(1100.0, "hw_thermal", "sw_thermal"), card.Lost("gone"))
    out: list[dict[str, Any]] = []
    with measure.load_samples([watched], out, period_s=0.001):  # pyright: ignore[reportArgumentType]
        while len(watched.said) > 1:
            time.sleep(0.001)
    (found,) = out
    assert found == {"gpu": 6, "sm_mhz": 1300.0, "power_w": 650.0, "power_limit_w": 700.0,
                     "reasons": {"hw_thermal": 0.5, "sw_thermal": 0.5}}  # fmt: skip
    with measure.load_samples([], nothing := []):
        pass
    assert nothing == [] and measure.cards_of(jax.devices()) == []


@pytest.mark.parametrize(
    ("key", "measured", "for_s", "fault"),
    [
        ("all_reduce_bus_gb_s", {"gemm_tflops": [7.0]}, 16, True),
        ("all_reduce_bus_gb_s", {"gemm_tflops": [7.0]}, 5, False),  # NCCL may have started just then
        ("all_reduce_bus_gb_s", {}, 16, False),
        ("gemm_tflops", {}, 50, False),
        ("", {}, 50, False),
    ],
)
def test_what_is_a_hang(key, measured, for_s, fault):
    assert bool(measure.hangs({"key": key, "measured": measured, "began_unix": time.time() - for_s})) == fault


def test_it_takes_little_of_the_gpus_memory():
    here = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HOME": "/h"}
    got = measure.child_environment(hardware.Devices("gpu", "NVIDIA H200", 8, 140.0, "NVML"), here)
    assert got == {"HOME": "/h", "XLA_CLIENT_MEM_FRACTION": "0.0571", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    small = measure.child_environment(hardware.Devices("gpu", "some card", 1, 8.0, "NVML"), here)
    assert small["XLA_CLIENT_MEM_FRACTION"] == "0.5"


@pytest.fixture
def disk(monkeypatch) -> Any:
    """Fake a disk that takes 0.1 s for each fsync and each read. Returns two lists: the file's bytes at each fsync, and the
    number of fsyncs before the page cache is dropped for reading.
    """
    clock, synced, dropped = Clock(), [], []
    monkeypatch.setattr(disk_rates, "time", clock)

    def fsync(handle: int) -> None:
        clock.work(0.1)
        synced.append(os.fstat(handle).st_size)

    readv, advised = os.readv, os.posix_fadvise
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "readv", lambda *args: clock.work(0.1) or readv(*args))
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: dropped.append(len(synced)) or advised(*args))
    return synced, dropped


def test_a_disk_is_timed_until_it_has_the_bytes(disk, tmp_path, monkeypatch):
    """The file is read back only after all of it was written."""
    synced, dropped = disk
    monkeypatch.setattr(disk_rates, "SYNC_BYTES", 4 * MIB)
    found = disk_rates.disk(tmp_path, 60.0, 10 * MIB)
    assert synced == [4 * MIB, 8 * MIB, 10 * MIB] and dropped == [3]
    assert found == {"write_gb_s": pytest.approx(10 * MIB / 0.3 / 1e9), "read_gb_s": pytest.approx(10 * MIB / 0.1 / 1e9)}
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_given_up_in_time(disk, tmp_path, monkeypatch):
    """Half of the limit of 0.5 s is for writing. Each piece takes 0.1 s, so writing ends after the third."""
    monkeypatch.setattr(disk_rates, "SYNC_BYTES", MIB)
    found = disk_rates.disk(tmp_path, 0.5, 64 * MIB)
    assert len(disk[0]) == 3 and found["write_gb_s"] == pytest.approx(3 * MIB / 0.3 / 1e9)


def test_a_place_that_may_only_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(Unmeasured, match="has no file to read"):
        disk_rates.disk(tmp_path, 10.0)
    (tmp_path / "small").write_bytes(b"1")
    (tmp_path / "large.tok").write_bytes(bytes(3 * MIB))
    read: list[int] = []
    real = os.readv
    monkeypatch.setattr(os, "readv", lambda *args: read.append(real(*args)) or read[-1])
    found = disk_rates.disk(tmp_path, 10.0)
    assert found["write_gb_s"] is None and found["read_gb_s"] and sum(read) == 3 * MIB


def disks_of(paths: dict[str, Path], seconds: float = 10.0) -> dict[str, dict]:
    found: dict[str, dict] = {"disk": {}, "left_out": {}, "failed": {}}
    measure.measure_disks(paths, seconds, MIB, found)
    return found


def test_full_and_broken_disks_say_why(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * MIB))
    words = f"{tmp_path} has 0.00 GiB free; the test needs 0.00"
    assert disks_of({"data": tmp_path}) == {"disk": {}, "left_out": {"disk.data": words}, "failed": {}}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**40))

    def quota(*_: Any) -> int:
        raise OSError(122, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", quota)
        found = disks_of({"data": tmp_path, "cache": tmp_path})
    both = dict.fromkeys(("disk.data", "disk.cache"), f"{tmp_path}: Disk quota exceeded")
    assert found == {"disk": {}, "left_out": both, "failed": both}


def test_a_mount_that_hangs_hangs_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "call_with_timeout", hang)
    found = disks_of({"data": tmp_path}, 0.2)
    assert found["disk"] == {} and "did not answer within" in found["left_out"]["disk.data"]


def test_a_broken_jax_costs_no_finding(tmp_path):
    """Preflight exists to explain faults such as a jax that cannot be imported, so it must give its findings without jax."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text('raise RuntimeError("jaxlib is incompatible")\n')
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPO)])}
    command = [sys.executable, "-m", "jaxtrain.preflight", "--limit=30", f"--json={tmp_path}/found.json"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=120)
    assert "Traceback" not in ended.stderr, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert ended.returncode == found["exit_code"] and found["exit_code"] in (0, 3)
