"""Whole runs on 8 CPU devices: their files, a user's own parts, and how runs end after an error or a signal."""

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import runs
import sources
from faults import same, steps_written
from run_sh import wait_for
from safetensors.numpy import load_file
from token_files import poke, random_documents, write_file

from jaxtrain.checkpoint import Checkpoints, arrays
from jaxtrain.hf import exporting
from jaxtrain.hf.importing import open_origin
from jaxtrain.metrics import files as metrics
from jaxtrain.train import folder, initial_state, loop, saver, setup
from jaxtrain.train import run as train


def run(workdir: Path, **overrides: Any) -> int:
    """Train the smallest config on synthetic data, and return the exit code."""
    return runs.train(runs.small(), workdir, **overrides)


class Plain(NamedTuple):
    """A run of eight steps, and what happened around the compilation, in order."""

    workdir: Path
    seen: list[str]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    made = Plain(tmp_path_factory.mktemp("plain") / "run", [])

    def noted(name: str, what: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            made.seen.append(name)
            return what(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "check_free_memory", noted("free memory", train.check_free_memory))
        patch.setattr(saver.Snapshots, "reserve", noted("reserve", saver.Snapshots.reserve))
        patch.setattr(train.Loop, "train", noted("steps", train.Loop.train))
        assert run(made.workdir) == 0
    return made


# ---- Files of a run


def test_a_receipt_has_the_facts_of_the_run(plain: Plain) -> None:
    receipt = runs.receipt(plain.workdir)
    assert (receipt["synthetic"], receipt["max_segments"], receipt["reason"]) == (True, 4, "8 steps")
    assert receipt["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1, "seq": 1}
    assert receipt["devices"]["count"] == 8
    assert receipt["ranks"] == {"device": list(range(8)), "process": [0] * 8, "gpu": receipt["ranks"]["gpu"]}
    assert receipt["memory_gib"]["optimizer state"] > receipt["memory_gib"]["parameters"] > 0
    assert not (plain.workdir / "samples.txt").exists()
    assert plain.seen == ["reserve", "free memory", "steps"], "pinning takes minutes, beside compiling"


def test_the_findings_of_preflight_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [{"name": "driver", "state": "ok", "seen": "580"}, {"name": "disk", "state": "note", "seen": "nearly full"}]
    found = {"verdict": "fit", "nodes": [{"host": "a", "checks": checks, "measured": {"h2d_gb_s": [55.0]}}]}
    (tmp_path / "found.json").write_text(json.dumps(found))
    assert folder.keep_preflight(tmp_path) is None
    monkeypatch.setenv("JAXTRAIN_PREFLIGHT", str(tmp_path / "found.json"))
    assert folder.keep_preflight(tmp_path) == {"verdict": "fit", "checks": [{"host": "a", **checks[1]}]}
    assert json.loads((tmp_path / "preflight.json").read_text()) == found
    monkeypatch.setenv("JAXTRAIN_PREFLIGHT", str(tmp_path / "gone.json"))
    assert "gone.json" in folder.keep_preflight(tmp_path)["error"]


@pytest.mark.parametrize("name", ["log.txt", "goodput.jsonl"])
def test_a_file_that_cannot_be_opened_ends_the_receipt(name: str, tmp_path: Path) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    assert run(tmp_path / "run") == 2
    receipt = runs.receipt(tmp_path / "run")
    assert receipt["exit_code"] == 2 and name in receipt["reason"] and receipt["ended"]


def test_a_slow_first_step_says_what_would_make_it_faster(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line has the tokens and the settings to lower, those of the evaluation before the first step too, on CPUs."""
    monkeypatch.setattr(loop, "SLOW_START_S", 0.0)
    assert run(tmp_path / "run", train__steps=2) == 0
    quick, slow = ((folder / "log.txt").read_text().splitlines() for folder in (plain.workdir, tmp_path / "run"))
    settings = ("data.seq_len (32)", "train.global_batch (8)", "eval.sequences (")
    told = [[line for line in lines if all(each in line for each in settings)] for lines in (quick, slow)]
    assert not told[0] and len(told[1]) == 1 and "step 1 " in told[1][0] and " 256 tokens on 8 x cpu" in told[1][0]


def test_checkpoints_tell_what_they_hold(plain: Plain) -> None:
    workdir = plain.workdir
    assert runs.steps(workdir) == [4, 8]
    meta = json.loads((workdir / "checkpoints/4/meta.json").read_text())
    assert meta["data"]["tokens"] == 4 * 8 * 32
    assert meta["loss"] == runs.losses(workdir)[4]
    assert meta["receipt"] == runs.receipt(workdir)["id"]
    assert meta["config"] == json.loads((workdir / "config.json").read_text())
    assert meta["config"]["data"]["max_segments"] == 0, "as asked for, whatever the data made of it"


def test_switches_switch_off(plain: Plain, tmp_path: Path) -> None:
    """The final tensors are the same without evaluations, TensorBoard and earlier saves."""
    workdir = tmp_path / "a run"
    off = {"eval__every_steps": 0, "checkpoint__every_steps": 0, "log__tensorboard": "false"}
    assert run(workdir, log__every_steps=3, **off) == 0
    assert [(line["kind"], line["step"]) for line in runs.lines(workdir)] == [("train", 3), ("train", 6), ("train", 8)]
    assert runs.steps(workdir) == [8]
    ours, theirs = runs.tensors(workdir), runs.tensors(plain.workdir)
    assert [name for name in theirs if ours[name].tobytes() != theirs[name].tobytes()] == []


def test_steps_go_on_while_a_save_writes(plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save writes nothing before two more steps are logged. Training and what is saved stay the same."""
    workdir, context = tmp_path / "run", arrays.orbax_context

    def late(folder: Any, *args: Any) -> Any:
        if folder.name == "4":
            wait_for(lambda: steps_written(workdir) >= 6)
        return context(folder, *args)

    monkeypatch.setattr(arrays, "orbax_context", late)
    assert run(workdir) == 0 and runs.steps(workdir) == runs.steps(plain.workdir) == [4, 8]
    for step in (4, 8):
        assert same(runs.tensors(workdir, step), runs.tensors(plain.workdir, step))


def test_a_run_that_overfits_keeps_its_best(tmp_path: Path) -> None:
    """It is evaluated from step 0 on. Commands use its best step, and it resumes from its newest."""
    draw, workdir = np.random.default_rng(0), tmp_path / "run"
    for name, tokens in {"few": 257, "held": 500}.items():
        write_file(tmp_path / f"{name}.tok", [draw.integers(0, 8, tokens).tolist()])
    files = {"data__source": tmp_path / "few.tok", "data__eval_source": tmp_path / "held.tok", "eval__every_steps": 20}
    kept = {**files, "checkpoint__keep_best": True, "checkpoint__keep": 1, "checkpoint__every_steps": 50}

    def held_out() -> dict[int, float]:
        return {line["step"]: line["loss"] for line in runs.lines(workdir) if line["kind"] == "eval"}

    assert run(workdir, train__steps=80, **kept) == 0
    losses = held_out()
    best = min(losses, key=losses.__getitem__)
    assert [*losses] == [*range(0, 81, 20)] and losses[0] > losses[80] and best == 40, losses
    assert runs.steps(workdir) == [40, 80]
    metas = {step: Checkpoints(workdir / "checkpoints").meta(step) for step in (40, 80)}
    assert {step: meta["held_out_loss"] for step, meta in metas.items()} == {step: losses[step] for step in metas}
    assert runs.receipt(workdir)["start_s"]["eval"] > 0 and runs.receipt(workdir)["held_out"][0]["step"] == 80
    said: list[str] = []
    exporting.export_model(str(workdir), tmp_path / "out", say=said.append)
    exported = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert np.array_equal(exported, runs.tensors(workdir, 40)["params.embed.embedding"]) and "40" in said[0]
    assert open_origin(str(workdir / "checkpoints")).step == 40 and open_origin(str(workdir / "checkpoints/80")).step == 80
    # The next attempts: from the newest, and from the best, which sets the newer ones aside.
    assert run(workdir, train__steps=82, **kept) == 0
    assert runs.receipt(workdir)["resumed_from_step"] == 80 and runs.steps(workdir) == [40, 82]
    assert [*held_out()] == [*losses, 82]
    assert run(workdir, train__steps=41, checkpoint__step=40, **kept) == 0
    assert runs.steps(workdir) == [40, 41] and [*held_out()] == [0, 20, 40, 41]


# ---- A user's own parts


@pytest.mark.more
def test_own_parts_train_and_resume(plain: Plain, tmp_path: Path) -> None:
    workdir = tmp_path / "own run"
    parts: dict[str, Any] = {
        "loss__name": "sources:halved",
        "data__source": "sources:clean",
        "optimizer__name": "sources:signs",
        "optimizer__clip_norm": 0,
        "optimizer__lr": 1e-3,
        "eval__every_steps": 4,
    }
    assert run(workdir, train__steps=4, **parts) == 0
    _, held_out = (line for line in metrics.read_metrics(workdir / "metrics.jsonl") if line["kind"] == "eval")
    assert held_out["cross_entropy"] == pytest.approx(2 * held_out["loss"], rel=1e-6)
    assert held_out["perplexity"] == math.exp(held_out["cross_entropy"])
    ours, theirs = runs.losses(workdir), runs.losses(plain.workdir)
    np.testing.assert_allclose(ours[1], theirs[1] / 2, rtol=1e-5)  # the same weights and data, half the loss
    assert ours[4] < ours[1]
    assert not any(name.startswith("optimizer.") for name in runs.tensors(workdir))
    assert runs.receipt(workdir)["data"] == {"source": "own"}
    assert runs.receipt(workdir)["synthetic"] is False
    assert run(workdir, train__steps=5, **parts) == 0
    assert list(runs.losses(workdir)) == [1, 2, 3, 4, 5]


def test_own_names_that_are_wrong_are_refused(tmp_path, monkeypatch, capsys):
    wrong = {"loss__name": "sources:hlaved", "optimizer__name": "sources:sings", "data__source": "sources:claen"}
    assert run(tmp_path / "run", **wrong) == 2
    said = capsys.readouterr().err
    assert all(key in said for key in ("loss.name", "optimizer.name", "data.source")) and sources.__file__ in said
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run(tmp_path / "run", loss__name="broken:loss") == 2
    assert "no_such_module_anywhere" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# ---- Failures. test_divergence.py has steps that are not finite, test_resume.py an exception


def test_a_damaged_data_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_file(tmp_path / "text.tok", random_documents(0, 1000, 30))
    poke(path, 5000, path.read_bytes()[5000] ^ 64)
    assert run(tmp_path / "run", data__source=path, data__max_segments=4, eval__every_steps=0) == 2
    said = capsys.readouterr().err
    assert said.count("data.source = ") == 1 and str(path) in said
    assert not runs.losses(tmp_path / "run")


def test_a_data_file_that_changes_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "text.tok", random_documents(0, 1000, 30))
    compile_steps = train.compile_steps

    def changed(*args: Any) -> Any:
        os.truncate(path, 5000)
        return compile_steps(*args)

    monkeypatch.setattr(train, "compile_steps", changed)
    assert run(tmp_path / "run", data__source=path, data__max_segments=4, eval__every_steps=0) == 1
    assert f"{path}: has changed" in runs.receipt(tmp_path / "run")["reason"]


def test_a_signal_while_compiling_ends_the_run_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_steps = train.compile_steps

    def interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return compile_steps(*args)

    monkeypatch.setattr(train, "compile_steps", interrupted)
    assert run(tmp_path / "run") == 130
    assert runs.steps(tmp_path / "run") == [] and not runs.losses(tmp_path / "run")
    assert runs.receipt(tmp_path / "run")["exit_code"] == 130


def test_a_folder_holds_one_run_at_a_time(plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = tmp_path / "run"
    workdir.mkdir()
    held = folder.lock_folder(workdir)
    assert held is not None and held >= 0
    assert run(workdir) == 2
    assert "--workdir" in capsys.readouterr().err
    assert list(workdir.iterdir()) == []
    os.close(held)
    for free in (workdir, plain.workdir):
        held = folder.lock_folder(free)
        assert held is not None and held >= 0, "the lock is given back"
        os.close(held)


class SmallDevice:
    """A fake device with a thousand bytes of memory."""

    platform = "cpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 1000, "bytes_in_use": 0}


def test_a_step_beyond_the_memory_is_refused_before_it_allocates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.jax, "local_devices", lambda: [SmallDevice()])
    monkeypatch.setattr(setup, "memory_by_class", lambda program, compiled: {"parameters": 15.0, "peak": 125.51})
    monkeypatch.setattr(initial_state, "initial_state", lambda *args: pytest.fail("it allocated all the same"))
    assert run(tmp_path / "run") == 1
    assert runs.receipt(tmp_path / "run")["reason"].startswith("out of memory")
