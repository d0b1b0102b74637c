"""Whole runs on 8 CPU devices: their messages and files, a user's own parts, and how runs end after an error or a signal."""

import importlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import sources

from jaxtrain.train import initial_state, saver, setup
from jaxtrain.train import run as train

GIB = 2**30


def run(workdir: Path, **overrides: Any) -> int:
    """Train the small config on synthetic data, and return the exit code."""
    return runs.train(runs.small(), workdir, **overrides)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train eight steps, for several tests."""
    workdir = tmp_path_factory.mktemp("plain") / "run"
    assert run(workdir, train__steps=8) == 0
    return workdir


# ---- Messages and files of a run


def test_a_run_says_what_it_is(plain: Path) -> None:
    log = (plain / "log.txt").read_text()
    assert "global batch 8 = 8 devices x 1 x 1 microbatch; 512 tokens a step" in log
    assert "mesh: fsdp 8; attention: reference (" in log
    assert "synthetic. Its loss is not that of language" in log
    assert "not split over any device" not in log
    assert "compiled in" in log
    assert "held-out loss" in log
    receipt = runs.receipt(plain)
    assert receipt["synthetic"] is True
    assert receipt["max_segments"] == 4 and "data: up to 4 documents in a sequence" in log
    assert receipt["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1, "seq": 1}
    assert receipt["devices"]["count"] == 8
    assert receipt["ranks"] == {"device": list(range(8)), "process": [0] * 8, "gpu": receipt["ranks"]["gpu"]}
    assert receipt["reason"] == "8 steps"
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


def test_switches_switch_off(plain: Path, tmp_path: Path) -> None:
    """The final tensors are the same without evaluations, TensorBoard and earlier saves, and with one batch read ahead."""
    workdir = tmp_path / "a run"
    off = {"eval__every_steps": 0, "checkpoint__every_steps": 0, "log__tensorboard": "false", "data__prefetch": 1}
    assert run(workdir, train__steps=8, log__every_steps=3, **off) == 0
    assert [(line["kind"], line["step"]) for line in runs.lines(workdir)] == [("train", 3), ("train", 6), ("train", 8)]
    assert runs.steps(workdir) == [8]
    assert not (workdir / "tb").exists()
    ours, theirs = runs.tensors(workdir), runs.tensors(plain)
    assert [name for name in theirs if ours[name].tobytes() != theirs[name].tobytes()] == []


# ---- A user's own parts


def test_own_parts_train_and_resume(plain: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "own run"
    parts: dict[str, Any] = {
        "loss__name": "sources:halved",
        "data__source": "sources:clean",
        "optimizer__name": "sources:signs",
        "optimizer__clip_norm": 0,
        "optimizer__lr": 1e-3,
    }
    assert run(workdir, train__steps=4, **parts) == 0
    ours, theirs = runs.losses(workdir), runs.losses(plain)
    np.testing.assert_allclose(ours[1], theirs[1] / 2, rtol=1e-5)  # the same weights and data, half the loss
    assert ours[4] < ours[1]
    assert not any(name.startswith("optimizer.") for name in runs.tensors(workdir))
    assert runs.receipt(workdir)["data"] == {"source": "own"}
    assert runs.receipt(workdir)["synthetic"] is False
    assert run(workdir, train__steps=5, **parts) == 0
    assert list(runs.losses(workdir)) == [1, 2, 3, 4, 5]


@pytest.mark.more
def test_an_own_family_has_its_own_first_weights(plain: Path, tmp_path: Path) -> None:
    how = {"model__family": "sources:family", "optimizer__lr": 0, "optimizer__lr_min": 0}
    assert run(tmp_path / "run", train__steps=5, **how) == 0
    ours, theirs = runs.tensors(tmp_path / "run"), runs.tensors(plain, 5)
    assert ours.keys() == theirs.keys()
    assert ours["params.embed.embedding"].std() == pytest.approx(0.04, rel=0.05)


def test_own_names_that_are_wrong_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"loss__name": "sources:hlaved", "optimizer__name": "sources:sings", "data__source": "sources:claen"}
    assert run(tmp_path / "run", **wrong) == 2
    said = capsys.readouterr().err
    for key, name in (("loss.name", "hlaved"), ("optimizer.name", "sings"), ("data.source", "claen")):
        assert f"{key} = 'sources:{name}': {sources.__file__} defines no {name}" in said
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run(tmp_path / "run", loss__name="broken:loss") == 2
    assert "No module named 'no_such_module_anywhere'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# ---- Failures. test_divergence.py has steps that are not finite


def test_an_exception_reaches_receipt_and_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workdir = tmp_path / "run"
    monkeypatch.setitem(sources.BEFORE, 3, sources.fail)
    with pytest.raises(OSError, match="the disk is on fire"):
        run(workdir, data__source="sources:watched")
    receipt = runs.receipt(workdir)
    assert (receipt["exit_code"], receipt["reason"]) == (1, "OSError: the disk is on fire")
    assert receipt["ended"]
    assert "Traceback" in (workdir / "log.txt").read_text()
    assert set(runs.losses(workdir)) <= {1, 2, 3}


def test_a_signal_while_compiling_ends_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_steps = train.compile_steps

    def interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return compile_steps(*args)

    workdir = tmp_path / "run"
    with monkeypatch.context() as m:
        m.setattr(train, "compile_steps", interrupted)
        assert run(workdir) == 130
    assert "Ctrl-C: before the first step, nothing to save" in capsys.readouterr().out
    assert runs.steps(workdir) == []
    assert runs.receipt(workdir)["exit_code"] == 130
    assert run(workdir, train__steps=5) == 0
    assert list(runs.losses(workdir)) == [1, 2, 3, 4, 5]


def test_ctrl_c_before_the_run_listens_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow_to_import.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert run(tmp_path / "run", loss__name="slow_to_import:loss") == 130
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_holds_one_run_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = tmp_path / "run"
    workdir.mkdir()
    held = train.lock(workdir)
    assert held is not None and held >= 0
    assert run(workdir, train__steps=4) == 2
    assert "another run is at work in this folder" in capsys.readouterr().err
    assert list(workdir.iterdir()) == []
    os.close(held)
    assert run(workdir, train__steps=4) == 0
    assert run(workdir, train__steps=4) == 0, "the lock is given back"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file/run", Path("/proc/run")):
        assert run(place) == 2
        assert f"--workdir = '{place}'" in capsys.readouterr().err


# ---- Memory. tests/unit/test_memory.py has the message for too little


def test_memory_is_looked_at_and_reserved_for_saves_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    reserve, take_steps, check = saver.Snapshots.reserve, train.Loop.train, train.check_free_memory

    def noted(name: str, what: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (seen.append(name), what(*args))[1]

    monkeypatch.setattr(train, "check_free_memory", noted("free memory", check))
    monkeypatch.setattr(saver.Snapshots, "reserve", noted("reserve", reserve))
    monkeypatch.setattr(train.Loop, "train", noted("steps", take_steps))
    assert run(tmp_path / "run", train__steps=5) == 0
    assert seen == ["reserve", "free memory", "steps"], "pinning takes minutes, beside compiling"


class SmallDevice:
    """A fake device with a thousand bytes of memory."""

    platform = "cpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 1000, "bytes_in_use": 0}


def test_a_step_beyond_the_budget_is_refused_before_it_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup.jax, "local_devices", lambda: [SmallDevice()])
    monkeypatch.setattr(setup, "memory_by_class", lambda program, compiled: {"parameters": 15.0, "peak": 125.51})
    monkeypatch.setattr(initial_state, "initial_state", lambda *args: pytest.fail("it allocated all the same"))
    workdir = tmp_path / "run"
    assert run(workdir) == 1
    assert "needs more than the budget of 0.0 GiB a device" in capsys.readouterr().out
    assert runs.receipt(workdir)["reason"].startswith("out of memory")
