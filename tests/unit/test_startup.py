"""Starting JAX: the environment is set first, CPU devices get enough threads, and stderr loses only known messages."""

import _ctypes
import logging
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxtrain.config import environment
from jaxtrain.config.hardware import HOST_LIMIT, Devices
from jaxtrain.config.schema import ConfigError, Problem, RunConfig
from jaxtrain.runtime import startup

H200 = Devices("gpu", "NVIDIA H200", 8, 140.4, "test")


def test_gpus_that_were_started_without_the_budget_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay, problems = environment.overlay(RunConfig(), H200, {})
    assert not problems and overlay.set["XLA_CLIENT_MEM_FRACTION"] and overlay.set[HOST_LIMIT]
    for name in (*overlay.set, "FI_PROVIDER", environment.EXPORTED):
        monkeypatch.setenv(name, "")  # monkeypatch then restores the exported variables
    assert not startup._started_on_gpus()  # these devices are CPUs
    monkeypatch.setattr(startup, "_started_on_gpus", lambda: True)
    with pytest.raises(ConfigError, match="XLA_CLIENT_MEM_FRACTION"):
        startup.set_environment(overlay)
    monkeypatch.setattr(startup, "_started_on_gpus", lambda: False)
    startup.set_environment(overlay)
    assert {name: os.environ[name] for name in overlay.set} == overlay.set
    monkeypatch.setattr(startup, "_started_on_gpus", lambda: True)
    startup.set_environment(overlay)  # the second run of a process
    startup.export({"FI_PROVIDER": "efa"})  # another run of it, by env.set
    with pytest.raises(ConfigError, match="FI_PROVIDER"):
        startup.set_environment(overlay)
    monkeypatch.setattr(startup, "_started_on_gpus", lambda: False)  # a process that this one has started
    startup.set_environment(overlay)
    assert "FI_PROVIDER" not in os.environ


def test_a_variable_that_a_user_sets_between_two_runs_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FI_PROVIDER", "FI_LOG_LEVEL", environment.EXPORTED):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("FI_LOG_LEVEL", "warn")
    startup.set_environment(environment.Overlay({"FI_PROVIDER": "efa", "FI_LOG_LEVEL": "warn"}))
    startup.set_environment(environment.Overlay())
    assert "FI_PROVIDER" not in os.environ and os.environ["FI_LOG_LEVEL"] == "warn", "the shell has set the latter"
    monkeypatch.setenv("FI_PROVIDER", "efa")
    startup.set_environment(environment.Overlay())
    assert os.environ["FI_PROVIDER"] == "efa"


def test_cpu_devices_of_one_process_get_more_threads_than_collectives_hold(monkeypatch: pytest.MonkeyPatch):
    """Eight devices get at least 24 threads. With eight threads, collectives can block every thread, which is a deadlock."""
    cores = os.cpu_count() or 1
    for devices, before, after in ((8, None, max(cores, 24)), (8, "1000", 1000), (8, "2", max(cores, 24)), (1, "2", 2)):
        monkeypatch.delenv(startup.THREADS, raising=False)
        if before:
            monkeypatch.setenv(startup.THREADS, before)
        startup.threads_for_cpus(devices)
        assert int(os.environ[startup.THREADS]) == after
    monkeypatch.delenv(startup.THREADS)
    startup.threads_for_cpus(1)
    assert startup.THREADS not in os.environ


def test_the_compile_cache_stays_off_with_several_cpu_devices(tmp_path: Path):
    assert jax.device_count() == 8
    startup.set_compile_cache(str(tmp_path))
    assert jax.config.jax_compilation_cache_dir is None  # pyright: ignore[reportAttributeAccessIssue]


def test_known_notes_are_left_out_of_stderr_and_nothing_else(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(KeyError), startup.quiet():
        os.write(2, b"first\nI0000 cudart_stub.cc:31] no drivers\nWARNING: All log messages before absl::InitializeLog\n")
        os.write(2, b"[Gloo] Rank 0 is connected\nnot [Gloo] Rank\nlast, without an end of line")
        raise KeyError
    assert capfd.readouterr().err == "first\nnot [Gloo] Rank\nlast, without an end of line"


@pytest.mark.parametrize(("platform", "count"), [("cpu", 8), ("gpu", 7), ("gpu", 8)])
def test_fewer_gpus_than_the_driver_reports_are_refused(platform: str, count: int, monkeypatch: pytest.MonkeyPatch):
    """H200 has 8 GPUs. JAX takes the CPU if its plugin does not start, and leaves out a GPU that CUDA cannot use."""
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform=platform)] * count)
    if (platform, count) == ("gpu", 8):
        startup.start_jax(H200)
        return
    with pytest.raises(ConfigError) as refused:
        startup.start_jax(H200)
    (problem,) = refused.value.problems
    assert problem.key == "devices" and "8 x NVIDIA H200" in problem.rule


def test_what_jax_logs_is_lost_only_if_it_is_in_the_refusal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    log = logging.getLogger("jax._src.xla_bridge")

    def devices(platform: str) -> list[SimpleNamespace]:
        log.warning("a warning about %s", platform)
        try:
            raise RuntimeError("a plugin\nfails")
        except RuntimeError:
            log.exception("Jax plugin configuration error")
        return [SimpleNamespace(platform=platform)] * 8

    monkeypatch.setattr(jax, "devices", lambda: devices("gpu"))
    startup.start_jax(H200)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    monkeypatch.setattr(jax, "devices", lambda: devices("cpu"))
    with pytest.raises(ConfigError, match="plugin fails"):
        startup.start_jax(H200)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "WARNING"]


def test_a_gpu_that_a_run_does_not_take_may_be_used_by_other_commands(monkeypatch: pytest.MonkeyPatch):
    """NVML does not list a MIG slice as a GPU, but JAX computes on it: enough for samples. The CPU would be no substitute."""
    problem = Problem("CUDA_VISIBLE_DEVICES", "MIG-1", "is a MIG slice", "Set another.")
    slice_of_one = Devices("gpu", "", 0, 0.0, "test", problem=problem)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    startup.start_jax(slice_of_one)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="cpu")])
    with pytest.raises(ConfigError) as refused:
        startup.start_jax(slice_of_one)
    assert refused.value.problems == [problem]


def test_builtins_of_nvrtc_are_loaded_from_nvidias_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "nvidia/cu99/lib"
    folder.mkdir(parents=True)
    library = folder / "libnvrtc-builtins.so.99.1"
    shutil.copy(_ctypes.__file__, library)  # any shared library
    (folder / "libnvrtc-builtins.so.99.0").write_text("damaged")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu")] * 8)
    startup.start_jax(H200)
    assert str(library) in Path("/proc/self/maps").read_text()
