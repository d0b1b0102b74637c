"""Preflight's measurements: its programs on CPU devices, its formulas by hand, and disks with a fake clock; and preflight on a
live node, with a script as nvidia-smi: hanging commands are killed, and a record gives the same verdict.
"""

import dataclasses
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import pytest
from nodes import H200, a_plain_environment, faults  # noqa: F401

from jaxtrain.config import hardware
from jaxtrain.config.schema import ConfigError
from jaxtrain.metrics import nvml
from jaxtrain.node import disk_rates, node_rates, rates
from jaxtrain.node import measure as micro
from jaxtrain.node.disk_rates import Unmeasured
from jaxtrain.node.facts import Unanswered
from jaxtrain.node.measure import TINY
from jaxtrain.train import child

REPO = Path(__file__).parents[2]

MIB = 2**20
H200S = hardware.Devices("gpu", "NVIDIA H200", 8, 140.0, "NVML")


def test_no_gpu_is_said(tmp_path):
    found = node_rates.measure_node({"data": tmp_path}, 10, disk_bytes=MIB)
    assert found["gemm_tflops"] == [] and found["all_reduce_bus_gb_s"] is None and found["disk"]["data"]["read_gb_s"] > 0
    assert set(found["left_out"]) == set(node_rates.RATES) and found["failed"] == {}


def test_a_driver_or_a_mount_that_hangs_is_left_out(tmp_path, monkeypatch):
    """A driver that hangs is a fault."""

    def hang(*_: Any) -> Any:
        raise Unanswered("it did not answer")

    monkeypatch.setattr(node_rates, "call_with_timeout", hang)
    found = node_rates.measure_node({"data": tmp_path}, 10)
    assert set(found["failed"]) == {"driver"} and found["disk"] == {} and {"gemm_tflops", "disk.data"} < set(found["left_out"])


# ---- GPUs


WORK = micro.TimedWork("", "", 0.0, 1e9, lambda: (None, None, None))


def test_rates_have_the_units_of_their_names(monkeypatch):
    """Every program takes half a second on every device. Expected by hand: FLOPs of three matmuls, bytes of three arrays,
    nccl-tests' bus bandwidth with 2(n-1)/n.

    The number of calls of a collective is fixed: with a limit by the clock, one process could start a call that another does
    not.
    """
    calls: list[float] = []

    def timed(run: Any, *args: Any, sizes: micro.Sizes, devices: Any = ()) -> list[list[float]]:
        calls.extend([] if devices else [sizes.warm_s])
        return [[0.5]] * max(len(devices), 1)

    monkeypatch.setattr(micro, "time_calls", timed)
    monkeypatch.setattr(micro, "TINY", dataclasses.replace(TINY, squares=(4096,), flop=1.0, warm_s=9.0))
    found = node_rates.Results({}, 60.0)
    node_rates.measure_gpus(jax.devices()[:2], jax.devices()[:2], found)
    measured = found.answer["measured"]
    assert set(measured) == {"gpus", "under_load", *rates.GPU_RATES, rates.BUS_RATES[0]}
    assert measured["gemm_tflops"] == pytest.approx([3 * 2 * 4096**3 / 0.5e12] * 2)
    assert measured["hbm_gb_s"] == pytest.approx([3 * MIB * TINY.rounds / 0.5e9] * 2)
    algorithm = MIB * TINY.collective_rounds / 0.5 / 1e9
    assert measured["all_reduce_bus_gb_s"] == pytest.approx(algorithm * 2 * 1 / 2)
    assert calls == [0.0]


def test_a_slow_gpu_runs_fewer_iterations(monkeypatch):
    """The probe of PROBE iterations takes 0.1 s. A collective's number of iterations is fixed, as all processes must agree."""
    programs: list[int] = []
    looped = micro.make_loop
    monkeypatch.setattr(micro, "make_loop", lambda body, rounds: programs.append(rounds) or looped(body, rounds))
    monkeypatch.setattr(micro, "time_calls", lambda *_, sizes, devices=(): [[0.1]] * max(len(devices), 1))
    sizes, devices = dataclasses.replace(TINY, rounds=90, seconds=0.3), jax.devices()[:2]
    micro.time_work(micro.memory(devices, sizes), sizes)
    micro.time_work(micro.collective("all-reduce", devices, MIB, TINY.collective_rounds), sizes)
    assert programs == [micro.PROBE, 3 * micro.PROBE, TINY.collective_rounds]


def test_nodes_are_told_apart(monkeypatch):
    """Each collective runs over the node's devices, and over all devices if there are several nodes."""
    members: list[list[Any]] = []
    monkeypatch.setattr(micro, "time_work", lambda *_, **__: [micro.WorkReading(WORK, 1.0)])
    monkeypatch.setattr(micro, "collective", lambda kind, over, *_: members.append(list(over)) or WORK)
    every = jax.devices()
    monkeypatch.setattr("jaxtrain.sharding.node_of", lambda device: device.id // 4)
    node_rates.measure_gpus(every, every[4:6], node_rates.Results({}, 60.0))
    assert members == [every[4:], every]


@pytest.mark.parametrize("late", [False, True])
def test_what_fails_or_comes_too_late_is_left_out(tmp_path, monkeypatch, late):
    """Measurements of a GPU that fail or come too late are left out, with the reason. Collectives are never left out: other
    processes would wait.
    """

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such luck\nand much more")

    monkeypatch.setattr(micro, "gemm", broken)
    monkeypatch.setattr(micro, "time_work", lambda work, *_: [micro.WorkReading(work, 1.0)])
    monkeypatch.setattr(micro, "memory", lambda *_: WORK)
    monkeypatch.setattr(micro, "collective", lambda kind, members, *_: dataclasses.replace(WORK, bytes=1e9 * len(members)))
    found = node_rates.Results({"answer_file": str(tmp_path / "answer.json")}, -1.0 if late else 60.0)
    node_rates.measure_gpus(jax.devices(), jax.devices()[:2], found)
    saved = json.loads((tmp_path / "answer.json").read_text())
    assert saved["verdict"] == child.LATE and saved["current"]  # the state that a killed process leaves
    kept, why = found.answer, found.answer["left_out"]
    assert kept["measured"][rates.BUS_RATES[0]] == 8
    assert set(why) == {rates.BUS_RATES[1], *(rates.GPU_RATES if late else ["gemm_tflops"])}
    assert set(kept["failed"]) == (set() if late else {"gemm_tflops"})
    assert late or (why["gemm_tflops"] == "RuntimeError: no such luck" and kept["measured"]["hbm_gb_s"] == [1.0])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS", True),
        # another process uses the memory, as the check `memory in use` reports
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 256 MiB", False),
        ("UNIMPLEMENTED: no pinned_host on this platform", False),
    ],
)
def test_which_errors_are_faults(text, fault):
    def broken() -> Any:
        raise RuntimeError(text)

    found = node_rates.Results({}, 60.0)
    found.add("hbm_gb_s", "memory of 8 GPUs", broken)
    assert text in found.answer["left_out"]["hbm_gb_s"] and bool(found.answer["failed"]) == fault


def test_a_jax_that_goes_on_with_the_cpu_is_a_fault(monkeypatch):
    """JAX falls back to the CPU if its plugin for GPUs does not start. The measurement then ends with an error."""
    monkeypatch.setattr(hardware, "probe", lambda: H200S)
    monkeypatch.setattr(node_rates, "measure_gpus", lambda *_: pytest.fail("measured the CPU"))
    with pytest.raises(ConfigError, match="8 x NVIDIA H200"):
        node_rates.measure_in_child({"limit_s": 10.0, "cluster": None})


def test_gpus_are_watched_while_they_compute():
    def sampled(mhz: float, *reasons: str) -> nvml.GpuSample:
        return nvml.GpuSample(0.0, 1.0, 90.0, 650.0, 700.0, 60.0, mhz, 3201.0, reasons, 0, None)

    said = [sampled(1500.0), None, sampled(1100.0, "hw_thermal", "sw_thermal")]
    all_said = threading.Event()

    def sample(at: float) -> nvml.GpuSample | None:
        if not said:
            all_said.set()
            raise nvml.Lost("gone")
        return said.pop(0)

    out: list[dict[str, Any]] = []
    watched = mock.Mock(index=6, sample=sample)
    with node_rates.load_samples([watched], out, period_s=0.001):
        assert all_said.wait(120)
    half = {"hw_thermal": 0.5, "sw_thermal": 0.5}
    assert out == [{"gpu": 6, "sm_mhz": 1300.0, "power_w": 650.0, "power_limit_w": 700.0, "reasons": half}]
    with node_rates.load_samples([], nothing := []):
        pass
    assert nothing == [] and node_rates.cards_of(jax.devices()) == []


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
def test_what_is_a_hang(key, measured, for_s, fault, monkeypatch):
    monkeypatch.setattr(node_rates, "time", SimpleNamespace(time=lambda: 1000.0))
    assert bool(node_rates.hangs({"key": key, "measured": measured, "began_unix": 1000.0 - for_s})) == fault


# ---- Disks


@pytest.fixture
def disk(monkeypatch) -> Any:
    """Fake a disk that takes 0.1 s for each fsync and each read. Returns two lists: the file's bytes at each fsync, and the
    number of fsyncs before the page cache is dropped for reading.
    """
    now, synced, dropped = [0.0], [], []
    monkeypatch.setattr(disk_rates, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slow(work: Any) -> Any:
        def call(*args: Any) -> Any:
            now[0] += 0.1
            return work(*args)

        return call

    advised = os.posix_fadvise
    monkeypatch.setattr(os, "fsync", slow(lambda handle: synced.append(os.fstat(handle).st_size)))
    monkeypatch.setattr(os, "readv", slow(os.readv))
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: dropped.append(len(synced)) or advised(*args))
    return synced, dropped


def test_a_disk_is_timed_until_it_has_the_bytes(disk, tmp_path, monkeypatch):
    """The file is read back only after all of it was written."""
    synced, dropped = disk
    monkeypatch.setattr(disk_rates, "SYNC_BYTES", 4 * MIB)
    found = disk_rates.measure_disk(tmp_path, 60.0, 10 * MIB)
    assert synced == [4 * MIB, 8 * MIB, 10 * MIB] and dropped == [3]
    assert found == {"write_gb_s": pytest.approx(10 * MIB / 0.3 / 1e9), "read_gb_s": pytest.approx(10 * MIB / 0.1 / 1e9)}
    assert list(tmp_path.iterdir()) == []
    synced.clear()
    monkeypatch.setattr(disk_rates, "SYNC_BYTES", MIB)
    found = disk_rates.measure_disk(
        tmp_path, 0.5, 64 * MIB
    )  # half of the limit is for writing, which ends after the third piece
    assert len(synced) == 3 and found["write_gb_s"] == pytest.approx(3 * MIB / 0.3 / 1e9)


def test_a_place_that_may_only_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(Unmeasured):
        disk_rates.measure_disk(tmp_path, 10.0)
    (tmp_path / "small").write_bytes(b"1")
    (tmp_path / "large.tok").write_bytes(bytes(3 * MIB))
    read: list[int] = []
    real = os.readv
    monkeypatch.setattr(os, "readv", lambda *args: read.append(real(*args)) or read[-1])
    found = disk_rates.measure_disk(tmp_path, 10.0)
    assert found["write_gb_s"] is None and found["read_gb_s"] and sum(read) == 3 * MIB


def test_full_and_broken_disks_say_why(tmp_path, monkeypatch):
    def disks_of(*names: str) -> tuple[set[str], dict[str, str]]:
        found: dict[str, dict] = {"disk": {}, "left_out": {}, "failed": {}}
        node_rates.measure_disks(dict.fromkeys(names, tmp_path), 10.0, MIB, found)
        assert found["disk"] == {}
        return set(found["left_out"]), found["failed"]

    def quota(*_: Any) -> int:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * MIB))
    assert disks_of("data") == ({"disk.data"}, {})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**40))
    monkeypatch.setattr(os, "write", quota)
    both = {"disk.data", "disk.cache"}
    assert disks_of("data", "cache") == (both, dict.fromkeys(both, f"{tmp_path}: Disk quota exceeded"))
