"""The measuring half of preflight: its programs on CPU devices, its formulas by hand, and disks by a clock of their own."""

import dataclasses
import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxtrain import hardware
from jaxtrain.monitor import card
from jaxtrain.plan import calibrate, topology
from jaxtrain.preflight import answer, device_work, disk_rates, measure, under_load
from jaxtrain.preflight.bounded import Unmeasured
from jaxtrain.preflight.device_work import TINY, Sizes

REPO = Path(__file__).parents[2]
MIB = 2**20


def test_no_gpu_is_said(tmp_path):
    found = measure.measure({"data": tmp_path}, 10, disk_bytes=MIB)
    assert found["gemm_tflops"] == [] and found["all_reduce_bus_gb_s"] is None and found["disk"]["data"]["read_gb_s"] > 0
    assert found["left_out"]["gemm_tflops"].startswith("there is no GPU to measure (JAX_PLATFORMS=cpu")


def hang(*_: Any) -> Any:
    """In place of `within`: there is no answer in time."""
    raise Unmeasured("it did not answer within 3 s")


class Clock:
    """In place of the module `time`: seconds pass where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def test_a_driver_that_hangs_is_a_fault(monkeypatch):
    monkeypatch.setattr(measure, "within", hang)
    found = measure.measure({}, 10)
    assert (
        found["failed"] == {"driver": "it did not answer within 3 s"} and "did not answer" in found["left_out"]["gemm_tflops"]
    )


def test_bus_bandwidth_is_that_of_nccl_tests(monkeypatch):
    """Computed here from their documentation: bytes over time, times 2(n-1)/n or (n-1)/n."""
    monkeypatch.setattr(calibrate, "timed", lambda run, *args, sizes: [0.05, 0.04, 0.06])
    sizes = dataclasses.replace(TINY, collective_mib=8, collective_rounds=10)
    for n in (2, 8):
        algorithm = 8 * MIB / (0.05 / 10) / 1e9
        assert device_work.collective("all-reduce", jax.devices()[:n], sizes) == pytest.approx(algorithm * 2 * (n - 1) / n)
        assert device_work.collective("reduce-scatter", jax.devices()[:n], sizes) == pytest.approx(algorithm * (n - 1) / n)


def test_processes_make_the_same_number_of_calls(monkeypatch):
    """By the clock, one would make a call that another does not answer."""
    seen: list[calibrate.Sizes] = []
    monkeypatch.setattr(calibrate, "timed", lambda run, *args, sizes: seen.append(sizes) or [1.0])
    device_work.collective("all-reduce", jax.devices()[:2], dataclasses.replace(TINY, warm_s=9.0))
    assert [(s.warm_s, s.repeats) for s in seen] == [(0.0, TINY.repeats)]


def test_work_is_counted_by_hand(monkeypatch):
    monkeypatch.setattr(device_work, "timed_each", lambda run, *args, devices, sizes: [0.5, 0.25])
    devices = jax.devices()[:2]
    flop = 2 * 64**3 * TINY.gemm_rounds
    assert device_work.gemm(devices, TINY) == pytest.approx([flop / 0.5e12, flop / 0.25e12])
    moved = 3 * MIB * TINY.memory_rounds
    assert device_work.memory(devices, TINY) == pytest.approx([moved / 0.5e9, moved / 0.25e9])
    assert device_work.host(devices, TINY) == pytest.approx([MIB / 0.5e9, MIB / 0.25e9])


def test_a_slow_card_makes_fewer_rounds(monkeypatch):
    """By a program of ten: 0.02 s a round are 15 rounds in 0.3 s."""
    clock, sizes = Clock(), Sizes()
    monkeypatch.setattr(device_work, "time", clock)
    for seconds, limit, rounds in ((0.2, 0.3, 15), (0.002, 0.3, sizes.gemm_rounds), (0.2, 0.001, 1)):
        run = lambda w, x, seconds=seconds: clock.work(seconds)  # noqa: E731
        assert device_work.enough(run, 0, 0, dataclasses.replace(sizes, gemm_s=limit)) == rounds


def test_each_device_is_timed_by_itself(monkeypatch):
    """One that takes longer than the others, in all rounds but the first, shows in its own figure alone."""
    devices, calls, thread = ["a", "b", "c"], [], threading.local()
    monkeypatch.setattr(device_work, "time", SimpleNamespace(perf_counter=lambda: getattr(thread, "now", 0.0)))

    def shard(device: str, seconds: float) -> Any:
        return SimpleNamespace(device=device, data=SimpleNamespace(block_until_ready=lambda: setattr(thread, "now", seconds)))

    def run() -> Any:
        calls.append(1)
        slow = {"a": 0.01, "b": 0.15 if len(calls) > 2 else 0.01, "c": 0.02}
        return SimpleNamespace(addressable_shards=[shard(d, slow[d]) for d in reversed(devices)])

    found = device_work.timed_each(run, devices=devices, sizes=dataclasses.replace(TINY, repeats=5))
    assert found == [0.01, 0.15, 0.02] and len(calls) == 1 + 5


def test_the_program_multiplies():
    devices = jax.devices()[:2]
    w, x = (device_work.random(seed, (16, 16), jnp.bfloat16, devices) for seed in (0, 1))
    one = device_work.gemm_program(devices, 1)(w, x)
    first = (x[:16].astype(jnp.float32) @ w[:16].astype(jnp.float32))[0, 0]  # of the first device's own matrices
    assert float(one[0, 0]) == pytest.approx(float(jnp.tanh(first)), rel=0.05)
    assert not jnp.array_equal(w[:16], w[16:])


def test_the_gpu_compiler_leaves_the_product_in_the_loop(monkeypatch):
    """For eight described H200s, in the sizes that are measured there: one GEMM a round, and nothing between the GPUs."""
    devices = topology.devices(topology.parse("h200:8"))
    n, sizes = Sizes().gemm, Sizes()
    whole = jax.ShapeDtypeStruct((8 * n, n), jnp.bfloat16, sharding=device_work.over(devices))
    text = device_work.gemm_program(devices, sizes.gemm_rounds).lower(whole, whole).compile().as_text()
    assert len(re.findall(r"bf16\[8192,8192\]\S* .*custom-call\(.*__cublas.*while/body", text)) == 1
    assert f'"known_trip_count":{{"n":"{sizes.gemm_rounds}"}}' in text
    assert not re.search(r"all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all", text)


def test_nodes_are_told_apart(monkeypatch):
    monkeypatch.setattr("jaxtrain.sharding.node_of", lambda device: device // 4)
    assert device_work.groups(range(8), 5) == ([4, 5, 6, 7], list(range(8)))
    assert device_work.groups(range(4), 2) == ([0, 1, 2, 3], [])


@pytest.mark.parametrize("late", [False, True])
def test_what_fails_or_comes_too_late_is_left_out(tmp_path, monkeypatch, late):
    """But not where processes measure together: the others would wait."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such luck\nand much more")

    monkeypatch.setattr(device_work, "gemm", broken)
    monkeypatch.setattr(device_work, "memory", lambda *_: [1.0])
    monkeypatch.setattr(device_work, "host", lambda *_: [2.0])
    monkeypatch.setattr(device_work, "collective", lambda kind, members, sizes: len(members))
    found = answer.Answer(tmp_path / "answer.json", -1.0 if late else 60.0)
    device_work.work(jax.devices(), jax.devices()[:2], TINY, found)
    kept = json.loads((tmp_path / "answer.json").read_text())
    assert not kept["done"] and kept["doing"]  # as a process leaves it that is ended now
    found.done()
    kept = json.loads((tmp_path / "answer.json").read_text())
    why = kept["left_out"]
    assert kept["done"] and {k: kept["measured"][k] for k in measure.BUS} == dict.fromkeys(measure.BUS, 8)
    assert why["inter_node_all_reduce_bus_gb_s"] == "there is one node"
    if late:
        assert {why[name] for name in measure.GPU_LISTS} == {"no time was left"} and not kept["failed"]
    else:
        assert kept["failed"] == {"gemm_tflops": "GEMMs on 2 GPUs: RuntimeError: no such luck"}
        assert why["gemm_tflops"] == "RuntimeError: no such luck" and kept["measured"]["hbm_gb_s"] == [1.0]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS", True),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 256 MiB", False),  # others hold it: `memory in use`
        ("UNIMPLEMENTED: no pinned_host on this platform", False),
    ],
)
def test_which_errors_are_faults(tmp_path, text, fault):
    def broken() -> Any:
        raise RuntimeError(text)

    found = answer.Answer(tmp_path / "answer.json", 60.0)
    found.add("hbm_gb_s", "memory of 8 GPUs", broken)
    assert text in found.fields["left_out"]["hbm_gb_s"] and bool(found.fields["failed"]) == fault


def test_a_jax_that_goes_on_with_the_cpu_is_a_fault(monkeypatch, tmp_path, capsys):
    """It does where its plugin for the GPUs does not start."""
    monkeypatch.setattr(hardware, "probe", lambda: hardware.Devices("gpu", "NVIDIA H200", 8, 140.0, "NVML"))
    monkeypatch.setattr(device_work.startup, "start_jax", lambda *_: None)
    monkeypatch.setattr(device_work, "work", lambda *_: pytest.fail("measured the CPU"))
    monkeypatch.setattr(device_work.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    options = [f"--answer={tmp_path / 'answer.json'}", "--limit=10", f"--parent={os.getppid()}"]
    assert device_work.main(options) == 1
    assert "JAX does not start on the GPUs (NVIDIA H200): it found cpu devices" in capsys.readouterr().err


class Played:
    """A card of monitor.card, as it answers under load."""

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
    with under_load.UnderLoad([watched], sample_s=0.001) as watch:  # pyright: ignore[reportArgumentType]
        watch._thread.join(10)
    (found,) = watch.found()
    assert found == {"gpu": 6, "sm_mhz": 1300.0, "power_w": 650.0, "power_limit_w": 700.0,
                     "reasons": {"hw_thermal": 0.5, "sw_thermal": 0.5}}  # fmt: skip
    with under_load.UnderLoad([]) as nothing:
        pass
    assert nothing.found() == [] and under_load.cards(jax.devices()) == []


@pytest.mark.parametrize(
    ("key", "measured", "for_s", "fault"),
    [
        ("all_reduce_bus_gb_s", {"gemm_tflops": [7.0]}, 16, True),
        ("all_reduce_bus_gb_s", {"gemm_tflops": [7.0]}, 5, False),  # NCCL may have been at its beginning
        ("all_reduce_bus_gb_s", {}, 16, False),
        ("gemm_tflops", {}, 50, False),
        ("", {}, 50, False),
    ],
)
def test_what_is_a_hang(key, measured, for_s, fault):
    assert bool(measure.hangs({"key": key, "measured": measured, "began_unix": time.time() - for_s})) == fault


def test_it_takes_little_of_the_gpus_memory():
    here = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HOME": "/h", "PYTHONPATH": "/p"}
    got = measure.environment(hardware.Devices("gpu", "NVIDIA H200", 8, 140.0, "NVML"), here)
    assert got == {"HOME": "/h", "PYTHONPATH": f"{REPO}{os.pathsep}/p", "XLA_CLIENT_MEM_FRACTION": "0.0571",
                   "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # fmt: skip
    small = measure.environment(hardware.Devices("gpu", "some card", 1, 8.0, "NVML"), here)
    assert small["XLA_CLIENT_MEM_FRACTION"] == "0.5"


@pytest.fixture
def disk(monkeypatch) -> Any:
    """A disk that takes 0.1 s for each fsync and each read: (bytes at each fsync, how many of those before reading)."""
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
    """It is read back only after all was written."""
    synced, dropped = disk
    monkeypatch.setattr(disk_rates, "SYNC", 4 * MIB)
    found = disk_rates.rates(tmp_path, 60.0, 10 * MIB)
    assert synced == [4 * MIB, 8 * MIB, 10 * MIB] and dropped == [3]
    assert found == {"write_gb_s": pytest.approx(10 * MIB / 0.3 / 1e9), "read_gb_s": pytest.approx(10 * MIB / 0.1 / 1e9)}
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_given_up_in_time(disk, tmp_path, monkeypatch):
    """Half of the time is for writing: three pieces of 0.1 s."""
    monkeypatch.setattr(disk_rates, "SYNC", MIB)
    found = disk_rates.rates(tmp_path, 0.5, 64 * MIB)
    assert len(disk[0]) == 3 and found["write_gb_s"] == pytest.approx(3 * MIB / 0.3 / 1e9)


def test_a_place_that_may_only_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(Unmeasured, match="holds no file to read"):
        disk_rates.rates(tmp_path, 10.0)
    (tmp_path / "small").write_bytes(b"1")
    (tmp_path / "large.tok").write_bytes(bytes(3 * MIB))
    read: list[int] = []
    real = os.readv
    monkeypatch.setattr(os, "readv", lambda *args: read.append(real(*args)) or read[-1])
    found = disk_rates.rates(tmp_path, 10.0)
    assert found["write_gb_s"] is None and found["read_gb_s"] and sum(read) == 3 * MIB


def test_full_and_broken_disks_say_why(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * MIB))
    left_out: dict[str, str] = {}
    failed: dict[str, str] = {}
    assert measure.disks({"data": tmp_path}, 10.0, left_out, failed, MIB) == {} and not failed
    assert left_out["disk.data"] == f"{tmp_path} has 0.00 GiB free; a file is written only where there are 0.00"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**40))

    def quota(*_: Any) -> int:
        raise OSError(122, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", quota)
        assert measure.disks({"data": tmp_path, "cache": tmp_path}, 10.0, left_out, failed, MIB) == {}
    assert failed == left_out and left_out["disk.data"] == left_out["disk.cache"] == f"{tmp_path}: Disk quota exceeded"


def test_a_mount_that_hangs_hangs_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_rates, "within", hang)
    left_out: dict[str, str] = {}
    assert measure.disks({"data": tmp_path}, 0.2, left_out, {}, MIB) == {} and "did not answer within" in left_out["disk.data"]
