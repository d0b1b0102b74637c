"""Runs called from Python: results and errors of `train.run`, and process state that neither a run nor the import changes."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import runs

from jaxtrain import environment
from jaxtrain.config import ConfigError, resolve
from jaxtrain.train import run as train


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Return a config of two steps, the small config of runs.py on synthetic data."""
    scope: dict[str, Any] = {}
    exec(runs.SMALL, scope)
    made = scope["get_config"]()
    made.train.steps, made.data.source, made.paths.cache, made.eval.every_steps = 2, "synthetic", str(tmp_path / "compiled"), 0
    made.optimizer.warmup_steps, made.log.tensorboard, made.model.num_layers = 1, False, 1
    return made


def test_importing_everything_touches_no_device() -> None:
    code = """
import importlib, pkgutil, jaxtrain
for module in pkgutil.walk_packages(jaxtrain.__path__, "jaxtrain."):
    importlib.import_module(module.name)
from jax._src import xla_bridge
assert "jaxtrain.train.run" in __import__("sys").modules and not xla_bridge.backends_are_initialized()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=runs.REPO, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_run_returns_what_it_reached_and_resumes(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train.run` returns exit code, step, metrics and checkpoints. The run's environment variables (env.set) are set in the
    process, and are in log and receipt.
    """
    monkeypatch.setenv("NCCL_CROSS_NIC", "")  # monkeypatch then restores the exported variables
    monkeypatch.setenv(environment.EXPORTED, "")
    config.env.set = "NCCL_CROSS_NIC=1"
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)]
    result = train.run(config, tmp_path / "run")
    assert (result.exit_code, result.reason, result.step, result.error) == (0, "2 steps", 2, None)
    assert result.metrics == runs.lines(tmp_path / "run")[-1] and result.metrics["step"] == 2
    assert result.checkpoints == tmp_path / "run" / "checkpoints" and runs.steps(tmp_path / "run") == [2]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)] == before
    said = capsys.readouterr().out
    assert "step 2/2" in said and "environment: NCCL_CROSS_NIC=1 (env.set" in said
    assert (
        runs.receipt(tmp_path / "run")["env"]["set"]
        == {"NCCL_CROSS_NIC": "1"}
        == {"NCCL_CROSS_NIC": os.environ["NCCL_CROSS_NIC"]}
    )
    assert runs.receipt(tmp_path / "run")["environment"]["NCCL_CROSS_NIC"] == "1"
    # A RunConfig works as well as a ConfigDict, and a path may be a string. The same call resumes the run.
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
    """A loss that does not exist and a folder whose receipt cannot be read raise ConfigError. The folder is unlocked
    afterwards.
    """
    with pytest.raises(ConfigError, match="defines no hlaf_loss"):
        train.run(changed(config, "loss", name="helpers:hlaf_loss"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "receipt.json").write_text("{")
    for _ in range(2):
        with pytest.raises(ConfigError, match="receipt.json"):
            train.run(config, tmp_path / "run")


@pytest.mark.more
def test_a_run_that_diverges_raises(config: Any, tmp_path: Path) -> None:
    config.optimizer.groups, config.optimizer.lr_min, config.optimizer.warmup_steps = "*:lr=1e30", 0.0, 0
    config.train.steps = 4
    config.train.max_skipped_steps = 2
    with pytest.raises(train.Diverged, match="Lower optimizer.lr"):
        train.run(config, tmp_path / "run")
    assert runs.receipt(tmp_path / "run")["exit_code"] == train.DIVERGED


def changed(config: Any, section: str, **values: Any) -> Any:
    """Return a RunConfig with other values in one section."""
    run = resolve(config)[0]
    return dataclasses.replace(run, **{section: dataclasses.replace(getattr(run, section), **values)})
