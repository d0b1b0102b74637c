"""Whole runs on 8 CPU devices: what they say, what they leave behind, and how they end when something is wrong."""

import importlib
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import runs

from jaxtrain import memory, session, train
from jaxtrain.config import RunConfig, resolve

GIB = 2**30
# What a user might bring along. The family doubles the embedding so that it can be told from the built-in one.
OWN = '''
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.data import pipeline
from jaxtrain.loss import cross_entropy
from jaxtrain.models import llama


def halved(hidden_BTD, head_VD, batch, spec):
    return cross_entropy(hidden_BTD, head_VD, batch, spec) / 2


def signs(optimizer, dtypes, axes):
    """Sign descent: no moments, so that its checkpoints differ from Adam's."""
    return optax.stateless(lambda updates, params: jax.tree.map(jnp.sign, updates))


class Source:
    def __init__(self, data, split, global_batch):
        self.batches = pipeline.open_source(data, "synthetic", split=split, global_batch=global_batch, data_dir="")
        self.synthetic = False
        self.fingerprint = {"source": "own", "split": split}

    def __getattr__(self, name):
        return getattr(self.batches, name)

    def batch(self, step, rows=None):
        return self.batches.batch(step, rows)


class Poisoned(Source):
    def batch(self, step, rows=None):
        batch = self.batches.batch(step, rows)
        if step >= 6:
            batch["weights"] = batch["weights"] * np.float32("nan")
        return batch


class Failing(Source):
    def batch(self, step, rows=None):
        if step == 3:
            raise OSError("the disk is on fire\\nand the house too")
        return self.batches.batch(step, rows)


class Family:
    """A family is whatever has `build`."""

    def build(self, *args, **kwargs):
        model = llama.build(*args, **kwargs)
        model.embed.embedding.set_value(model.embed.embedding.get_value() * 2)
        return model


family = Family()
'''


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.py"
    path.write_text(
        runs.SMALL.replace('config.precision = "f32"', 'config.precision = "f32"\n    config.data.source = "synthetic"')
    )
    return path


@pytest.fixture(scope="module")
def plain(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps of the small config on made-up data."""
    workdir = tmp_path_factory.mktemp("plain") / "run"
    assert runs.train(config, workdir, train__steps=8) == 0
    return workdir


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `own` that can be imported."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own", raising=False)


# ---- What a run says and writes


def test_says_what_it_is(plain: Path) -> None:
    log = (plain / "log.txt").read_text()
    assert "global batch 8 = 8 devices x 1 x 1 microbatch; 512 tokens a step" in log
    assert "mesh: fsdp 8; attention: reference (" in log
    assert "synthetic. Its loss says nothing about language" in log
    assert "not split over any device" not in log
    assert "compiled in" in log
    assert "held-out loss" in log
    receipt = runs.receipt(plain)
    assert receipt["synthetic"] is True
    assert receipt["max_segments"] == 4 and "data: up to 4 documents in a sequence" in log
    assert receipt["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1, "seq": 1}
    assert receipt["devices"]["count"] == 8
    assert receipt["reason"] == "8 steps done"
    assert receipt["memory_gib"]["optimizer state"] > receipt["memory_gib"]["parameters"] > 0
    assert receipt["overrides"]["train.steps"] == "8"
    assert not (plain / "samples.txt").exists()


def test_checkpoints_tell_what_they_hold(plain: Path) -> None:
    assert runs.steps(plain) == [5, 8]
    meta = json.loads((plain / "checkpoints/5/meta.json").read_text())
    assert meta["data"]["tokens"] == 5 * 8 * 64
    assert meta["loss"] == runs.losses(plain)[5]
    assert meta["receipt"] == runs.receipt(plain)["id"]
    assert meta["config"] == json.loads((plain / "config.json").read_text())
    assert meta["config"]["data"]["max_segments"] == 0, "as asked for, whatever the data made of it"


def test_switches_switch_off(config: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    off = {"eval__every_steps": 0, "checkpoint__every_steps": 0, "log__tensorboard": "false", "data__prefetch": 0}
    assert runs.train(config, workdir, train__steps=6, log__every_steps=4, **off) == 0
    assert [(line["kind"], line["step"]) for line in runs.lines(workdir)] == [("train", 4), ("train", 6)]
    assert runs.steps(workdir) == [6]
    assert not (workdir / "tb").exists()


def test_microbatches_change_nothing(config: Path, plain: Path, tmp_path: Path) -> None:
    """Twice the batch in two parts is the batch in one, to rounding: losses, gradient norms, evaluations."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert runs.train(config, one, train__steps=6, train__global_batch=16) == 0
    assert runs.train(config, two, train__steps=6, train__global_batch=16, train__grad_accum=2) == 0
    a, b = runs.lines(one), runs.lines(two)
    for field in ("loss", "grad_norm"):
        ours, theirs = ([line[field] for line in lines if line["kind"] == "train"] for lines in (a, b))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    # Evaluation takes batches of one microbatch, so its batches are other ones: only the last training state is comparable.
    for name, value in runs.tensors(one).items():
        np.testing.assert_allclose(runs.tensors(two)[name], value, rtol=1e-3, atol=1e-5)
    assert abs(runs.losses(one)[1] - runs.losses(plain)[1]) > 1e-6, "the batch size had no effect"


def test_traces_and_compiler_output(config: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "a run"
    assert runs.train(config, workdir, train__steps=4, profile__start=2, profile__steps=2, profile__dump_hlo="true") == 0
    assert list((workdir / "profile/plugins/profile").glob("*/*.xplane.pb"))
    assert "ENTRY" in (workdir / "profile/train_step.hlo.txt").read_text()
    assert "Tracing steps 2 to 3." in (workdir / "log.txt").read_text()
    assert list(runs.losses(workdir)) == [1, 2, 3, 4]


# ---- What a user brings along


@pytest.mark.usefixtures("own")
def test_own_parts(config: Path, plain: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "own run"
    parts: dict[str, Any] = {
        "loss__name": "own:halved",
        "data__source": "own:Source",
        "optimizer__name": "own:signs",
        "optimizer__clip_norm": 0,
        "optimizer__lr": 1e-3,
    }
    assert runs.train(config, workdir, train__steps=4, **parts) == 0
    ours, theirs = runs.losses(workdir), runs.losses(plain)
    np.testing.assert_allclose(ours[1], theirs[1] / 2, rtol=1e-5)  # the same weights and data, half the loss
    assert ours[4] < ours[1]
    assert not any(name.startswith("optimizer.") for name in runs.tensors(workdir))
    assert runs.receipt(workdir)["data"] == {"source": "own", "split": "train"}
    assert runs.receipt(workdir)["synthetic"] is False
    assert runs.train(config, workdir, train__steps=5, **parts) == 0  # and it can go on
    assert list(runs.losses(workdir)) == [1, 2, 3, 4, 5]


@pytest.mark.more
@pytest.mark.usefixtures("own")
def test_own_family(config: Path, plain: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    assert runs.train(config, workdir, train__steps=5, model__family="own:family", optimizer__lr=0, optimizer__lr_min=0) == 0
    ours, theirs = runs.tensors(workdir), runs.tensors(plain, 5)
    assert ours.keys() == theirs.keys()
    assert ours["params.embed.embedding"].std() == pytest.approx(0.04, rel=0.05)


@pytest.mark.usefixtures("own")
def test_own_names_that_are_wrong(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = tmp_path / "run"
    wrong = {"loss__name": "own:hlaved", "optimizer__name": "own:sings", "data__source": "own:Suorce"}
    assert runs.train(config, workdir, **wrong) == 2
    said = capsys.readouterr().err
    for key, name in (("loss.name", "hlaved"), ("optimizer.name", "sings"), ("data.source", "Suorce")):
        assert f"{key} = 'own:{name}': {tmp_path}/own.py defines no {name}" in said
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere\n")
    assert runs.train(config, workdir, loss__name="broken:loss") == 2
    assert "No module named 'no_such_module_anywhere'" in capsys.readouterr().err
    assert not workdir.exists()


# ---- What goes wrong


@pytest.mark.usefixtures("own")
def test_a_loss_that_is_no_number_ends_the_run(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = tmp_path / "run"
    poisoned = {"data__source": "own:Poisoned", "eval__every_steps": 0, "checkpoint__every_steps": 5, "train__max_skips": 3}
    assert runs.train(config, workdir, **poisoned) == 76
    said = capsys.readouterr().out
    assert "step 7: loss nan, gradient norm nan, not finite: the step is skipped. Data: batch 6" in said
    assert "3 steps in a row were skipped, the last one step 9 with loss nan. Nothing is saved from here; the newest" in said
    assert "checkpoint is 5. Lower optimizer.lr" in said
    assert [line["skipped_steps"] for line in runs.lines(workdir)] == [0] * 6 + [1, 2, 3]
    assert runs.steps(workdir) == [5]
    assert all(np.isfinite(value).all() for value in runs.tensors(workdir).values())
    assert runs.receipt(workdir)["exit_code"] == 76
    assert "3 steps in a row were skipped" in runs.receipt(workdir)["reason"]
    # Also where a bad step itself would have been saved.
    other = tmp_path / "other"
    assert runs.train(config, other, **(poisoned | {"checkpoint__every_steps": 7})) == 76
    assert runs.steps(other) == []
    assert "the newest checkpoint is none" in capsys.readouterr().out


def test_a_learning_rate_that_blows_up_ends_the_run(config: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    assert runs.train(config, workdir, optimizer__lr=1e30, optimizer__lr_min=0, optimizer__warmup_steps=0) == 76
    assert runs.steps(workdir) == []
    assert list(runs.losses(workdir)) == list(range(1, 10))


@pytest.mark.usefixtures("own")
def test_an_exception_reaches_receipt_and_log(config: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    with pytest.raises(OSError, match="the disk is on fire"):
        runs.train(config, workdir, data__source="own:Failing", eval__every_steps=0)
    receipt = runs.receipt(workdir)
    assert (receipt["exit_code"], receipt["reason"]) == (1, "OSError: the disk is on fire")
    assert receipt["ended"]
    assert "Traceback" in (workdir / "log.txt").read_text()
    assert set(runs.losses(workdir)) <= {1, 2, 3}


def test_a_signal_while_compiling(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_step = session.Session.compile

    def interrupted(begun: session.Session) -> session.Compiled:
        os.kill(os.getpid(), signal.SIGINT)
        return compile_step(begun)

    workdir = tmp_path / "run"
    with monkeypatch.context() as m:
        m.setattr(session.Session, "compile", interrupted)
        assert runs.train(config, workdir) == 130
    assert "Ctrl-C: before the first step, nothing to save" in capsys.readouterr().out
    assert runs.steps(workdir) == []
    assert runs.receipt(workdir)["exit_code"] == 130
    assert runs.train(config, workdir, train__steps=5) == 0
    assert list(runs.losses(workdir)) == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("own")
def test_ctrl_c_before_the_run_listens(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slow_to_import.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    importlib.invalidate_caches()  # the folder was on the path, and looked through, before the file was there
    assert runs.train(config, tmp_path / "run", loss__name="slow_to_import:loss") == 130
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_one_run_at_a_time_in_a_folder(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = tmp_path / "run"
    workdir.mkdir()
    held = train.lock_folder(workdir)
    assert held is not None and held >= 0
    assert runs.train(config, workdir) == 2
    assert "another run is at work in this folder" in capsys.readouterr().err
    assert list(workdir.iterdir()) == []
    os.close(held)
    assert runs.train(config, workdir) == 0
    assert runs.train(config, workdir) == 0, "the lock is given back"


def test_a_folder_that_cannot_be_written(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file/run", Path("/proc/run")):
        assert runs.train(config, place) == 2
        assert f"--workdir = '{place}'" in capsys.readouterr().err


# ---- Memory

MEMORY = {"parameters": 15.0, "optimizer state": 30.0, "batch": 0.01, "temporaries": 80.5, "peak": 125.51}


def memory_hungry(**section: Any) -> RunConfig:
    """A resolved config with these keys of `train`."""
    run, problems = resolve({"train": section})
    assert not problems
    return run


def explained(run: RunConfig, error: Exception) -> str:
    with pytest.raises(memory.OutOfMemory) as caught, memory.out_of_memory_explained(run, MEMORY):
        raise error
    assert caught.value.__cause__ is error
    return str(caught.value)


def test_out_of_memory_is_explained() -> None:
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.")
    run = memory_hungry(global_batch=32, grad_accum=2)
    said = explained(run, error)
    assert "out of memory" in said
    for name, gib in MEMORY.items():
        assert re.search(rf"^  {name} +{memory.size(gib)}$", said, re.MULTILINE)
    hints = said.partition("What would help:\n")[2].splitlines()
    assert [hint.split()[0] for hint in hints] == [
        "train.grad_accum",
        "remat.policy=full:",
        "dtypes.m=bf16:",
        "optimizer.offload=moments:",
        "mesh.fsdp",
    ]


def test_only_hints_that_are_left_are_given() -> None:
    run = memory_hungry(global_batch=2, grad_accum=2)
    assert "grad_accum" not in memory.explain_memory(run, MEMORY, "there is")


def test_other_errors_of_the_runtime_stay_as_they_are() -> None:
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory.out_of_memory_explained(RunConfig(), MEMORY):
        raise error


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        (None, ""),
        ({"bytes_limit": 100 * GIB, "bytes_in_use": 40 * GIB, "largest_free_block_bytes": 0}, ""),
        ({"bytes_limit": 100 * GIB, "bytes_in_use": 40 * GIB}, ""),
        ({"bytes_limit": 100 * GIB, "bytes_in_use": 61 * GIB, "largest_free_block_bytes": 0}, "free memory of GPU 0 is 39.00"),
        ({"bytes_limit": 100 * GIB, "bytes_in_use": 40 * GIB, "largest_free_block_bytes": 50 * GIB}, ""),
        (
            {"bytes_limit": 100 * GIB, "bytes_in_use": 40 * GIB, "largest_free_block_bytes": 30 * GIB},
            "the largest free block of GPU 0 is 30.00",
        ),
    ],
)
def test_the_step_is_compared_with_the_free_memory_that_is_left(stats: dict[str, int] | None, said: str) -> None:
    """At 42 GiB beside a state of 36 GiB."""
    analysis = SimpleNamespace(
        argument_size_in_bytes=36 * GIB,
        output_size_in_bytes=37 * GIB,
        alias_size_in_bytes=35 * GIB,
        temp_size_in_bytes=40 * GIB,
    )
    compiled = SimpleNamespace(memory_analysis=lambda: analysis)
    device: Any = type("Device", (), {"memory_stats": lambda self: stats, "__str__": lambda self: "GPU 0"})()
    program: Any = SimpleNamespace(batch={})
    if not said:
        memory.check_free_memory(program, compiled, [device])
        return
    with pytest.raises(memory.OutOfMemory, match=said) as caught:
        memory.check_free_memory(program, compiled, [device])
    assert "needs 42.00 GiB beside its state" in str(caught.value) and "36.00 GiB of them by the state" in str(caught.value)


def test_memory_is_looked_at_and_reserved_for_saves_before_the_first_step(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    reserve, run_loop, check = session.Snapshots.reserve, session.Loop.run, session.check_free_memory

    def noted(name: str, what: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (seen.append(name), what(*args))[1]

    monkeypatch.setattr(session, "check_free_memory", noted("free memory", check))
    monkeypatch.setattr(session.Snapshots, "reserve", noted("reserve", reserve))
    monkeypatch.setattr(session.Loop, "run", noted("steps", run_loop))
    assert runs.train(config, tmp_path / "run", train__steps=5) == 0
    assert seen == ["reserve", "free memory", "steps"], "pinning takes minutes, beside compiling"


class SmallDevice:
    """A device with room for a thousand bytes."""

    platform = "cpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 1000, "bytes_in_use": 0}


def test_a_step_beyond_the_budget_is_refused_before_it_allocates(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session.jax, "local_devices", lambda: [SmallDevice()])
    monkeypatch.setattr(session, "memory_by_class", lambda program, compiled: MEMORY)
    monkeypatch.setattr(session, "initial_state", lambda *args: pytest.fail("it allocated all the same"))
    workdir = tmp_path / "run"
    assert runs.train(config, workdir) == 1
    assert "needs more than the budget of 0.0 GiB a device" in capsys.readouterr().out
    assert runs.receipt(workdir)["reason"].startswith("out of memory")
