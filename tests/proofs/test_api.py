"""The Python API, `import jaxtrain as jt`, and runs called from Python: results, errors, and the process's state."""

import dataclasses
import errno
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import runs

import jaxtrain
from jaxtrain.commands import api
from jaxtrain.config import environment, hardware
from jaxtrain.config.schema import ConfigError, RunConfig
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.hf.importing import open_origin
from jaxtrain.hf.model import logits_function
from jaxtrain.metrics.files import NotWritten
from jaxtrain.metrics.receipt import Receipt
from jaxtrain.plan import topology
from jaxtrain.report.run import RunError
from jaxtrain.train import run as train

SMALL: dict[str, Any] = {
    "precision": "f32",
    "data": {"source": "synthetic", "eval_source": "", "seq_len": 32},
    "model": {"num_layers": 1, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "d_ff": 64},
    "train": {"steps": 3, "global_batch": 8},
    "optimizer": {"warmup_steps": 1, "schedule": "constant"},
    "eval": {"every_steps": 0},
    "sample": {"max_tokens": 0},
    "log": {"every_steps": 1, "tensorboard": False},
    "env": {"set": "NCCL_CROSS_NIC=1"},
    "paths": {"cache": ""},
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("api") / "run"
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_CROSS_NIC", "")  # so that the run's environment variables are removed afterwards
        patch.setenv(environment.EXPORTED, "")
        patch.setenv("NCCL_P2P_DISABLE", "1")
        result = jaxtrain.train("tiny", folder, **SMALL)
        assert os.environ["NCCL_CROSS_NIC"] == "1"
        assert (result.exit_code, result.step, result.error) == (0, 3, None)
        assert result.metrics == runs.lines(folder)[-1] and result.metrics["step"] == 3
        assert result.checkpoints == folder / "checkpoints" and runs.steps(folder) == [3]
        assert [signal.getsignal(number) for number in SIGNALS] == before
        yield folder


def config(**changes: Any) -> RunConfig:
    """Return the run of `trained` with other keys: optimizer__lr=1."""
    return jaxtrain.load("tiny", **SMALL | {key.replace("__", "."): value for key, value in changes.items()})


def test_importing_is_light_and_touches_no_device() -> None:
    """The names of the API are functions, whatever was imported before."""
    code = """
import importlib, pkgutil, sys, jaxtrain
assert "jax" not in sys.modules and set(jaxtrain.__all__) <= set(dir(jaxtrain)) and not hasattr(jaxtrain, "nothing")
assert jaxtrain.load("tiny") == jaxtrain.load("configs/tiny.py")
import jaxtrain.commands.lm_eval, jaxtrain.metrics.trackers
assert not {"jax", "lm_eval", "wandb"} & set(sys.modules)
for module in pkgutil.walk_packages(jaxtrain.__path__, "jaxtrain."):
    importlib.import_module(module.name)
assert all(callable(getattr(jaxtrain, name)) for name in jaxtrain.__all__)
from jax._src import xla_bridge
assert "jaxtrain.train.run" in sys.modules and not xla_bridge.backends_are_initialized()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=runs.REPO, timeout=300)
    assert done.returncode == 0, done.stderr


def test_load_takes_names_variants_and_sections() -> None:
    run = jaxtrain.load("llama3_8b:half", mesh={"fsdp": 4, "tensor": 2}, **{"optimizer.lr": 1e-4})
    assert (run.model.num_layers, run.mesh.tensor, run.optimizer.lr) == (16, 2, 1e-4)
    assert jaxtrain.load(run) is run
    with pytest.raises(TypeError):
        jaxtrain.load(run, precision="f32")
    with pytest.raises(ConfigError, match=r"mesh.tensr"):
        jaxtrain.load("tiny", mesh={"tensr": 2})
    with pytest.raises(TypeError):
        api.train({"train": {"steps": 1}}, "runs/none", precision="f32")


def test_values_that_were_fitted_to_the_overrides_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the log of a run, and by a warning of a config. A command in a problem names the file of the config."""
    told: list[tuple[str, ...]] = []

    def attempt(run: RunConfig, folder: Path, how: Any, overlay: Any) -> Any:
        told.append(how.notes)
        return SimpleNamespace(error=None)

    monkeypatch.setattr(train, "attempt", attempt)
    jaxtrain.train("tiny", tmp_path, train={"steps": 60})
    with pytest.warns(UserWarning, match=r"optimizer.warmup_steps"):
        run = jaxtrain.load("tiny", train={"steps": 60})
    assert run.optimizer.warmup_steps == 4
    assert [[note.partition(":")[0] for note in notes] for notes in told] == [["optimizer.warmup_steps"]]
    for call in (lambda **wrong: jaxtrain.load("tiny", **wrong), lambda **wrong: jaxtrain.train("tiny", tmp_path, **wrong)):
        with pytest.raises(ConfigError) as caught:
            call(memory_estimation={"enable": True})
        assert f"--config={runs.REPO}/configs/tiny.py" in str(caught.value) and "FILE" not in str(caught.value)


def test_a_run_opens_as_data_frames(trained: Path, tmp_path: Path) -> None:
    run = jaxtrain.open_run(trained)
    frame = run.to_pandas()
    with pytest.raises(ValueError, match="evals"):
        run.to_pandas("evals")
    assert list(frame["step"]) == [1, 2, 3] and list(frame["loss"]) == list(runs.losses(trained).values())
    assert run.write_report().exists()
    assert run.write_report(tmp_path / "other.html") == tmp_path / "other.html"
    with pytest.raises(RunError):
        jaxtrain.open_run(trained / "nowhere")


def test_a_model_generates_and_is_evaluated(trained: Path) -> None:
    """The loss of a text is that of the logits."""
    text = jaxtrain.generate(trained, "def ", max_tokens=5, temperature=0.0)
    assert text.startswith("def ") and text == jaxtrain.generate(trained, "def ", max_tokens=5, temperature=0.0)
    tokenizer, text = load_tokenizer("byte"), "def f(x):\n    return x\n"
    ids = [*tokenizer.bos, *tokenizer.encode(text)]
    found = jaxtrain.evaluate(trained, [text, "a"])  # of "a" nothing is scored
    logits = logits_function(open_origin(str(trained)))(np.array([ids[:-1]], np.int32), np.ones((1, len(ids) - 1), np.int32))
    shifted = logits[0].astype(np.float64)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    expected = -np.mean([log_probs[i, token] for i, token in enumerate(ids[1:])])
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / math.log(2) / (len(text) - 1))
    with pytest.raises(ValueError):
        jaxtrain.evaluate(trained, [])


def test_a_plan_shows_itself() -> None:
    small = {"num_layers": 1, "vocab_size": 4096, "d_model": 512, "num_heads": 4, "num_kv_heads": 4, "d_ff": 1024}
    plan = jaxtrain.plan("llama3_1b", "h200:8", model=small, train={"global_batch": 8, "grad_accum": 1}, data={"seq_len": 512})
    assert plan.fits and "--config=configs/llama3_1b.py --config.model.num_layers=1" in repr(plan)
    assert "&lt;!doctype html&gt;" in plan._repr_html_()
    collectives, memory, timeline = (plan.to_pandas(name) for name in ("collectives", "memory", "timeline"))
    assert collectives["wire_gib"].sum() == pytest.approx(sum(c.wire_gib for c in plan.collectives))
    assert memory["gib"].sum() == pytest.approx(plan.memory.peak_gib)
    assert timeline["gib"].max() <= plan.memory.peak_gib + 1e-9 and {"phase", "parameters"} <= set(timeline)
    assert plan.to_pandas("kernels")["ms"].sum() > 0
    with pytest.raises(ValueError):
        plan.to_pandas("memries")
    run = jaxtrain.load("llama3_1b")
    with pytest.raises(ConfigError, match="mesh"):
        jaxtrain.plan(dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, fsdp=3)), "h200:8")


def test_plans_need_no_gpu_and_no_variable() -> None:
    """The first call, for the devices of this process, starts JAX with the compiler that plans of other machines need."""
    code = """
import jaxtrain
here, there = jaxtrain.shardings("tiny"), jaxtrain.shardings("tiny", "h200:2")
assert here.sums() != there.sums()
assert jaxtrain.plan("tiny", "h200:2", train={"global_batch": 2}, model={"num_layers": 1}).fits
"""
    left = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", environment.EXPORTED)
    environ = {name: value for name, value in os.environ.items() if name not in left} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=runs.REPO, env=environ, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("installed", "remedy"), [(True, "start Python with JAX_PLATFORMS=cpu"), (False, r"\./run\.sh setup")])
def test_a_missing_compiler_names_what_brings_it(installed: bool, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_registered(**_: Any) -> None:
        raise NotImplementedError  # of JAX, if it was started without its CUDA plugin

    monkeypatch.setattr(topology.topologies, "get_topology_desc", not_registered)
    monkeypatch.setattr(hardware, "has_cuda_plugin", lambda: installed)
    with pytest.raises(RuntimeError, match=rf"Fix: {remedy}"):
        jaxtrain.shardings("tiny", "h200:2")


# ---- train.run


def test_the_same_call_resumes_a_run(trained: Path, tmp_path: Path) -> None:
    """A path may be a string. The run's environment variables are in its receipt."""
    folder = shutil.copytree(trained, tmp_path / "run")
    assert runs.receipt(folder)["env"]["set"] == {"NCCL_CROSS_NIC": "1"}
    assert runs.receipt(folder)["env"]["inherited"]["NCCL_P2P_DISABLE"] == "1"
    assert "NCCL_P2P_DISABLE=1" in (folder / "log.txt").read_text()
    assert runs.receipt(folder)["environment"]["NCCL_CROSS_NIC"] == "1"
    again = train.run(config(), str(folder))
    assert (again.exit_code, again.step, again.metrics) == (0, 3, runs.lines(trained)[-1])
    more = train.run(config(train__steps=4), folder)
    assert (more.step, more.metrics["step"]) == (4, 4) and list(runs.losses(folder)) == [1, 2, 3, 4]
    assert runs.receipt(folder)["resumed_from_step"] == 3


def test_a_run_in_another_thread_hears_no_signals(trained: Path, tmp_path: Path) -> None:
    handler, found = signal.getsignal(signal.SIGINT), []
    thread = threading.Thread(target=lambda: found.append(train.run(config(train__steps=1), tmp_path / "run")))
    thread.start()
    thread.join()
    assert found[0].exit_code == 0 and signal.getsignal(signal.SIGINT) is handler


def test_all_that_is_wrong_is_raised_and_nothing_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, Any] = {}
    exec(runs.SMALL, scope)
    tree = scope["get_config"]()
    tree.model.num_heads, tree.optimizer.schedule, tree.model.dropout = 3, "cosin", 0.1
    with pytest.raises(ConfigError) as raised:
        train.run(tree, tmp_path / "run")
    assert {"model.dropout", "model.d_model", "optimizer.schedule"} <= {p.key for p in raised.value.problems}
    run = config()
    with pytest.raises(ConfigError, match="workdir"):
        train.run(run, "gs://bucket/run")
    with pytest.raises(ConfigError, match="hlaf_loss"):
        train.run(dataclasses.replace(run, loss=dataclasses.replace(run.loss, name="helpers:hlaf_loss")), tmp_path / "run")
    assert not list(tmp_path.iterdir())

    def full(*_: object) -> None:
        raise NotWritten(errno.ENOSPC, "no space left", "receipt.json")

    monkeypatch.setattr(Receipt, "start", full)
    for _ in range(2):  # the first error unlocks the folder
        with pytest.raises(ConfigError, match=r"receipt.json"):
            train.run(run, tmp_path / "run")
