"""Starting JAX: the environment is set first, CPU devices get enough threads, and stderr loses only known messages."""

import os
from pathlib import Path

import helpers
import jax
import pytest

from jaxtrain import environment, startup
from jaxtrain.config import ConfigError, RunConfig
from jaxtrain.hardware import HOST_LIMIT, Devices

H200 = Devices("gpu", "NVIDIA H200", 8, 140.4, "test")


def test_gpus_that_were_started_without_the_budget_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay, problems = environment.overlay(RunConfig(), H200, {})
    assert not problems and overlay.set["XLA_CLIENT_MEM_FRACTION"] and overlay.set[HOST_LIMIT]
    for name in overlay.set:
        monkeypatch.setenv(name, "")  # monkeypatch then restores the exported variables
    assert not startup._started_on_gpus()  # these devices are CPUs
    monkeypatch.setattr(startup, "_started_on_gpus", lambda: True)
    with pytest.raises(ConfigError, match="XLA_CLIENT_MEM_FRACTION=0.*: JAX was started .* before"):
        startup.set_environment(overlay)
    monkeypatch.setattr(startup, "_started_on_gpus", lambda: False)
    startup.set_environment(overlay)
    assert {name: os.environ[name] for name in overlay.set} == overlay.set
    monkeypatch.setattr(startup, "_started_on_gpus", lambda: True)
    startup.set_environment(overlay)  # the second run of a process


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
    startup.set_compile_cache(helpers.tiny({"paths.cache": str(tmp_path)}))
    assert jax.config.jax_compilation_cache_dir is None  # pyright: ignore[reportAttributeAccessIssue]


def test_known_notes_are_left_out_of_stderr_and_nothing_else(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(KeyError), startup.quiet():
        os.write(2, b"first\nI0000 cudart_stub.cc:31] no drivers\nWARNING: All log messages before absl::InitializeLog\n")
        os.write(2, b"[Gloo] Rank 0 is connected\nnot [Gloo] Rank\nlast, without an end of line")
        raise KeyError
    assert capfd.readouterr().err == "first\nnot [Gloo] Rank\nlast, without an end of line"
