"""Runs called from Python: what `train.run` returns and raises, and what it leaves alone."""

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import runs
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain import environment, startup, train
from jaxtrain.config import ConfigError, RunConfig, resolve
from jaxtrain.hardware import HOST_LIMIT, Devices

H200 = Devices("gpu", "NVIDIA H200", 8, 140.4, "test")


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compiled steps are kept while this file runs, and other tests of the process keep nothing on disk."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    names += ("jax_persistent_cache_min_entry_size_bytes",)
    before = {name: getattr(jax.config, name) for name in names}
    yield tmp_path_factory.mktemp("compiled")
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def config(compiled: Path) -> Any:
    """Two steps of the small config of runs.py on made-up data."""
    scope: dict[str, Any] = {}
    exec(runs.SMALL, scope)
    made = scope["get_config"]()
    made.train.steps, made.data.source, made.paths.cache, made.eval.every_steps = 2, "synthetic", str(compiled), 0
    made.optimizer.warmup_steps, made.log.tensorboard, made.model.num_layers = 1, False, 1
    return made


def test_a_run_and_its_going_on(config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)]
    result = train.run(config, tmp_path / "run")
    assert (result.exit_code, result.reason, result.step, result.error) == (0, "2 steps done", 2, None)
    assert result.metrics == runs.lines(tmp_path / "run")[-1] and result.metrics["step"] == 2
    assert result.checkpoints == tmp_path / "run" / "checkpoints" and runs.steps(tmp_path / "run") == [2]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)] == before
    assert "step 2/2" in capsys.readouterr().out
    # A RunConfig does as well as a ConfigDict, and a path may be text; the same call goes on from there.
    again = train.run(resolve(config)[0], str(tmp_path / "run"))
    assert (again.exit_code, again.step, again.metrics) == (0, 2, result.metrics)
    config.train.steps = 3
    more = train.run(config, tmp_path / "run")
    assert (more.step, more.metrics["step"]) == (3, 3)
    assert list(runs.losses(tmp_path / "run")) == [1, 2, 3]
    assert runs.receipt(tmp_path / "run")["resumed_from_step"] == 2


def test_a_run_in_another_thread_hears_no_signals(config: Any, tmp_path: Path) -> None:
    handler, found = signal.getsignal(signal.SIGINT), []
    thread = threading.Thread(target=lambda: found.append(train.run(config, tmp_path / "run")))
    thread.start()
    thread.join()
    assert found[0].exit_code == 0 and signal.getsignal(signal.SIGINT) is handler


def test_all_that_is_wrong_is_raised_and_nothing_written(config: Any, tmp_path: Path) -> None:
    config.model.num_heads, config.optimizer.schedule = 3, "cosin"
    config.model.dropout = 0.1
    with pytest.raises(ConfigError) as raised:
        train.run(config, tmp_path / "run")
    said = str(raised.value)
    assert {"model.dropout", "model.d_model", "optimizer.schedule"} <= {p.key for p in raised.value.problems}
    assert "jaxtrain has no dropout" in said and "Did you mean cosine?" in said
    with pytest.raises(ConfigError, match="object stores are not supported"):
        train.run(config, "gs://bucket/run")
    assert not list(tmp_path.iterdir())


def test_what_is_found_later_is_raised_too(config: Any, tmp_path: Path) -> None:
    """A name that does not exist; a folder whose receipt cannot be read, and which is free again afterwards."""
    with pytest.raises(ConfigError, match="defines no hlaf_loss"):
        train.run(changed(config, "loss", name="helpers:hlaf_loss"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "receipt.json").write_text("{")
    for _ in range(2):
        with pytest.raises(ConfigError, match="receipt.json"):
            train.run(config, tmp_path / "run")


def test_a_run_that_diverges_raises(config: Any, tmp_path: Path) -> None:
    config.optimizer.lr, config.optimizer.lr_min, config.optimizer.warmup_steps, config.train.steps = 1e30, 0.0, 0, 4
    config.train.max_skips = 2
    with pytest.raises(train.Diverged, match="Lower optimizer.lr"):
        train.run(config, tmp_path / "run")
    assert runs.receipt(tmp_path / "run")["exit_code"] == train.DIVERGED


def changed(config: Any, section: str, **values: Any) -> Any:
    """A RunConfig with other values."""
    run = resolve(config)[0]
    return dataclasses.replace(run, **{section: dataclasses.replace(getattr(run, section), **values)})


def test_gpus_that_were_started_without_the_budget_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay, problems = environment.overlay(RunConfig(), H200, {})
    assert not problems and overlay.set["XLA_CLIENT_MEM_FRACTION"] and overlay.set[HOST_LIMIT]
    for name in overlay.set:
        monkeypatch.setenv(name, "")  # so that what is exported is taken back
    assert not startup._started_on_gpus()  # these are CPUs
    monkeypatch.setattr(startup, "_started_on_gpus", lambda: True)
    with pytest.raises(ConfigError, match="XLA_CLIENT_MEM_FRACTION=0.*: JAX was started .* before"):
        startup.set_environment(overlay)
    monkeypatch.setattr(startup, "_started_on_gpus", lambda: False)
    startup.set_environment(overlay)
    assert {name: os.environ[name] for name in overlay.set} == overlay.set
    monkeypatch.setattr(startup, "_started_on_gpus", lambda: True)
    startup.set_environment(overlay)  # the second run of a process


def test_cpu_devices_of_one_process_get_more_threads_than_collectives_hold(monkeypatch: pytest.MonkeyPatch):
    """With eight threads for eight devices, copies of a state in stages waited for each other until XLA ended the process."""
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
