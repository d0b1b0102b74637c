"""GPUs by name, the GPUs that a run may use, and the memory that it may use; the driver is a fake."""

import pytest
from played_nvml import Gpu, Nvml

from jaxtrain.commands import bench
from jaxtrain.config import hardware
from jaxtrain.config.schema import ConfigError
from jaxtrain.data import loading
from jaxtrain.node import train_step
from jaxtrain.step.validate import validate_step
from jaxtrain.train import parity_layouts


@pytest.mark.parametrize(
    ("kind", "name", "bf16"),
    [
        ("NVIDIA H200", "H200 SXM", 989.4),
        ("NVIDIA H200 NVL", "H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.4),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB", 312.0),
        ("NVIDIA GH200 480GB", "GH200 96GB", 989.4),
        ("NVIDIA GB200", "GB200", 2500.0),
    ],
)
def test_known_gpus(kind, name, bf16):
    gpu = hardware.lookup(kind)
    assert gpu is not None and (gpu.name, gpu.peak("bf16")) == (name, bf16)


@pytest.mark.parametrize("kind", ["", "NVIDIA GB300", "NVIDIA H800", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100"])
def test_unknown_gpus_are_not_guessed(kind):
    assert hardware.lookup(kind) is None


def test_rates_are_dense():
    """Rates double from TF32 to bf16, and from bf16 to FP8. A sparse rate is twice as high."""
    for _, gpu in hardware.TABLE:
        assert gpu.tf32 == pytest.approx(gpu.bf16 / 2, rel=0.01)
        assert gpu.fp8 in (0.0, pytest.approx(2 * gpu.bf16, rel=0.01))
        assert gpu.source


def test_probe_counts_cpu_devices():
    base = {"JAX_PLATFORMS": "cpu"}
    assert hardware.probe(base).count == 1
    flags = base | {"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=4"}
    assert hardware.probe(flags).count == 4
    assert hardware.probe(flags | {"JAX_NUM_CPU_DEVICES": "8"}).count == 8


@pytest.fixture
def played(monkeypatch):
    """Return a function played(count) that fakes a driver with so many H200s, which JAX can use."""
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: object())

    def put(count: int) -> Nvml:
        nvml = Nvml(*(Gpu() for _ in range(count)), driver=count > 0)
        monkeypatch.setattr(hardware, "pynvml", nvml)
        return nvml

    return put


def test_probe_counts_visible_gpus(played):
    nvml = played(8)
    assert hardware.probe({}) == hardware.Devices("gpu", "NVIDIA H200", 8, 141.0, "NVML", 90)
    assert hardware.probe({"CUDA_VISIBLE_DEVICES": "2,3,5"}).count == 3
    assert hardware.probe({"CUDA_VISIBLE_DEVICES": "GPU-10a,9,2"}).count == 1, "CUDA stops at the first that is not there"
    assert hardware.probe({"CUDA_VISIBLE_DEVICES": ""}).kind == "cpu"
    assert hardware.probe({"JAX_PLATFORMS": "cpu"}).kind == "cpu"
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("visible", "gpu"),
    [
        ("MIG-b3fe6a2c-4e0b-5c2f-a1d4-0f6f2f5b1c11", "MIG-b3fe6a2c"),
        ("0,MIG-GPU-10ac6aa1/1/0", "MIG-GPU-10ac6aa1/1/0"),
        ("GPU-", "4 GPUs"),
        ("0,GPU-ffff", "GPU-ffff"),
        ("4", "'4'"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_by_name(played, monkeypatch, visible, gpu):
    nvml = played(4)
    found = hardware.probe({"CUDA_VISIBLE_DEVICES": visible})
    assert (found.kind, found.count, nvml.open) == ("gpu", 0, 0), "the CPU is no substitute"
    assert found.problem is not None
    assert (found.problem.key, found.problem.value) == ("CUDA_VISIBLE_DEVICES", visible) and gpu in found.problem.rule
    (told,) = validate_step(loading.load_config([]).run, found)
    assert told is found.problem, "one mistake, one problem"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        train_step.start_devices(train_step.one_device(), 1)
    assert parity_layouts.find_devices(2).problem is not None, "parity is not compared on CPUs instead"
    assert bench.main(["--kernels"]) == 2


def test_a_driver_that_fails_or_a_missing_plugin_is_a_problem(played, monkeypatch):
    """The probe reports the problem and no GPU. It does not fall back to CPUs, because the machine has GPUs."""
    nvml = played(4)

    nvml.gpus[0].lost = True
    problems = [hardware.probe({})]
    nvml.gpus[0].lost = False
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: object() if name == "jax_plugins" else None)
    for found in (*problems, hardware.probe({})):
        assert (found.kind, found.count, nvml.open) == ("gpu", 0, 0) and found.problem is not None
    assert hardware.probe({"JAX_PLATFORMS": "cpu"}).kind == "cpu"


def test_probe_without_a_driver(played):
    played(0)
    found = hardware.probe({})
    assert found.kind == "cpu" and "Driver Not Loaded" in found.source
    asked = hardware.probe({"JAX_PLATFORMS": "cuda"})
    assert (asked.kind, asked.count) == ("gpu", 0), "what was asked for is not there; the CPU is no substitute"


def test_a_choice_of_devices_that_the_probe_does_not_follow_is_a_problem(played):
    """JAX would start other devices than those that were counted."""
    played(4)
    for name, value in {"JAX_CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "rocm", "JAX_PLATFORM_NAME": "cpu"}.items():
        found = hardware.probe({name: value})
        assert (found.kind, found.count) == ("gpu", 0) and found.problem and found.problem.key == name
    for name, value in {"JAX_NUM_CPU_DEVICES": "two", "JAX_PLATFORM_NAME": "gpu"}.items():
        found = hardware.probe({"JAX_PLATFORMS": "cpu", name: value})
        assert (found.kind, found.count) == ("cpu", 0) and found.problem and found.problem.key == name
    assert hardware.probe({"JAX_PLATFORM_NAME": "gpu"}).count == 4
    assert hardware.probe({"JAX_CUDA_VISIBLE_DEVICES": "all"}).count == 4
    assert hardware.probe({"JAX_CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}).kind == "cpu"


V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("cgroup", "files", "gib"),
    [
        ("", {}, 24.0),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "8589934592\n"}, 8.0),
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": "8589934592\n"}, 8.0),
        ("0::/a\n", {"sys/fs/cgroup/a/memory.max": "max\n"}, 24.0),
        ("5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n", {f"{V1}/a/memory.limit_in_bytes": "4294967296\n"}, 4.0),
        ("4:memory:/path/on/the/host\n", {f"{V1}/memory.limit_in_bytes": "4294967296\n"}, 4.0),
    ],
    ids=["no cgroup", "v2", "v2, of a parent", "v2, no limit", "v1", "v1, in a container"],
)
def test_memory_that_is_available(tmp_path, cgroup, files, gib):
    files |= {"proc/meminfo": "MemTotal:       33554432 kB\nMemAvailable:   25165824 kB\n"}
    for name, text in (files | {"proc/self/cgroup": cgroup}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert hardware.available_gib(tmp_path) == gib


def test_memory_budget():
    assert hardware.memory_fraction(140.0) == pytest.approx(1 - hardware.RESERVE_GIB / 140.0, abs=1e-4)
    assert hardware.memory_fraction(8.0) == 0.75
    assert hardware.memory_fraction(140.0, 0.5) == 0.5
    exported, problems = hardware.memory_environment(0.95, {})
    assert exported == {"XLA_CLIENT_MEM_FRACTION": "0.95"} and not problems
    assert not hardware.memory_environment(0.95, exported)[1], "what we exported ourselves is no contradiction"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_CLIENT_MEM_FRACTION", "0.5"),
        ("XLA_CLIENT_MEM_FRACTION", "much"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
    ],
)
def test_contradicting_memory_variables(name, value):
    _, (problem,) = hardware.memory_environment(0.95, {name: value})
    assert problem.key == name


def test_jax_reads_the_variable_that_is_exported(monkeypatch):
    from jaxlib import xla_client

    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    for name, value in hardware.memory_environment(0.875, {})[0].items():
        monkeypatch.setenv(name, value)
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.875
