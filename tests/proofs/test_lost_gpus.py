"""GPUs that the driver reports and JAX cannot start: every command refuses them, and none takes the CPU in their place."""

import subprocess
import sys
from pathlib import Path

import pytest
import runs
from compile_options import QUICKLY

NVML = """
class NVMLError(Exception):
    pass

class Memory:
    total = 141 * 2**30

def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(handle): return "NVIDIA H200"
def nvmlDeviceGetCudaComputeCapability(handle): return 9, 0
def nvmlDeviceGetMemoryInfo(handle): return Memory
def __getattr__(name):
    if name.startswith("NVML_"):
        return 0
    def refuse(*args):
        raise NVMLError(name)
    return refuse
"""
PLUGIN = 'def initialize():\n    raise RuntimeError("cuInit(0) failed:\\nsystem not yet initialized")\n'


@pytest.fixture
def lost_gpus(tmp_path, monkeypatch) -> None:
    """Two GPUs by NVML, and a CUDA plugin that fails."""
    (tmp_path / "fake/jax_plugins/xla_cuda12").mkdir(parents=True)
    (tmp_path / "fake/pynvml.py").write_text(NVML)
    (tmp_path / "fake/jax_plugins/xla_cuda12/__init__.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'fake'}:{runs.REPO}")
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


def run(*command: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "jaxtrain", *command], capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


CONFIG = [f"--config={runs.REPO}/configs/tiny.py", "--config.data.source=synthetic", "--config.data.eval_source="]
CONFIG += [f"--config.{key}=0" for key in ("eval.every_steps", "sample.max_tokens", "checkpoint.every_steps")]
CONFIG += [f"--config.{key}=1" for key in ("train.steps", "optimizer.warmup_steps", "model.num_layers")]


@pytest.mark.parametrize(
    ("command", "platform"),
    [
        (("main", *CONFIG, "--workdir=run"), "cuda"),
        (("bench", *CONFIG, "--out=bench"), ""),
        pytest.param(("plan", "--calibrate"), "", marks=pytest.mark.more),
    ],
)
def test_gpus_that_jax_cannot_start_are_refused(command, platform, lost_gpus, monkeypatch):
    if platform:
        monkeypatch.setenv("JAX_PLATFORMS", platform)
    code, said = run(*command)
    assert code == 2, said
    (line,) = [line for line in said.splitlines() if line.startswith("error: devices: ")]
    assert "2 x NVIDIA H200" in line and "cuInit(0)" in line and "JAX_PLATFORMS=cpu" in line
    assert "Traceback" not in said and not [*Path.cwd().iterdir()]


def test_preflight_reports_them_as_a_fault(lost_gpus):
    """The other checks may have the cause, so preflight finishes. The GPUs are a fault, also without nvidia-smi."""
    code, said = run("preflight", "--json=report.json", f"--workdir={Path.cwd()}")
    assert code == 3, said
    assert "cuInit(0)" in Path("report.json").read_text()


@pytest.mark.more
def test_cpus_that_were_asked_for_are_used(lost_gpus, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", QUICKLY)
    code, said = run("main", *CONFIG, "--config.paths.cache=", "--workdir=run")
    assert code == 0, said
    assert Path("run/metrics.jsonl").exists()
