"""Runs in this process that fail, are stopped, or change meshes or keys give an uninterrupted run's numbers, or are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import runs
import sources

from jaxtrain.checkpoint import Checkpoints, files, storage
from jaxtrain.config.schema import RunConfig
from jaxtrain.data import loading
from jaxtrain.step.state import to_tensors
from jaxtrain.train import batch_feed
from jaxtrain.train.initial_state import choose_start, initial_state

STEPS, TOKENS = 8, 8 * 32  # tokens of a step
OFFLOADED = {"dtypes__params": "bf16", "optimizer__offload": "moments"}


def train(workdir: Path, **overrides: Any) -> int:
    """Train eight steps of the smallest config, with checkpoints at 4 and 8 and evaluations at 3, 6 and 8."""
    return runs.train(runs.small(), workdir, **{"log__tensorboard": "false", "data__source": "sources:watched"} | overrides)


def parsed(workdir: Path, **overrides: Any) -> RunConfig:
    """Return the config of a run."""
    return loading.load_config(runs.arguments(runs.small(), workdir, overrides)).run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train an uninterrupted run, on mesh.fsdp=8."""
    workdir = tmp_path_factory.mktemp("base") / "run"
    assert train(workdir) == 0
    return workdir


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    """Copy the uninterrupted run into a folder that a test may change."""
    return shutil.copytree(base, tmp_path / "run")


# ---- Bit for bit


@pytest.mark.parametrize("layout", [{}, pytest.param(OFFLOADED, marks=pytest.mark.more, id="offloaded")])
def test_a_run_that_fails_and_is_stopped_gives_the_bits_of_one_that_is_not(base, layout, tmp_path, monkeypatch):
    # The data thread reads at most two steps ahead, so that the test controls where the run ends.
    monkeypatch.setattr(batch_feed, "AHEAD", 1)
    workdir = tmp_path / "run"
    whole = base
    if layout:
        whole = tmp_path / "whole"
        assert train(whole, **layout) == 0

    with monkeypatch.context() as m:
        m.setitem(sources.BEFORE, 2, sources.fail)
        assert train(workdir, **layout) == 1
    assert runs.steps(workdir) == [], "before the first checkpoint"
    assert "Traceback" in (workdir / "log.txt").read_text()
    measured = [line["step"] for line in runs.lines(workdir)]
    with monkeypatch.context() as m:
        m.setitem(sources.BEFORE, 7, sources.interrupt)
        assert train(workdir, **layout) == 130
    stopped = runs.steps(workdir)[-1]
    assert 4 < stopped <= 7
    assert train(workdir, **layout) == 0

    assert runs.exact(workdir) == runs.exact(whole), "every line of metrics: none is missing, none stands there twice"
    ours, theirs = runs.tensors(workdir, STEPS), runs.tensors(whole, STEPS)
    assert ours.keys() == theirs.keys()
    assert {name.partition(".")[0] for name in ours} == {"step", "params", "optimizer", "guard"}
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []
    earlier = runs.tensors(whole, 4)
    never = {"guard.skipped", "guard.in_a_row", "guard.held"}  # counts of skipped steps
    assert {name for name in theirs if (earlier[name] == theirs[name]).all()} == never, "a step changes every other tensor"

    receipt = runs.receipt(workdir)
    attempts = [*receipt["attempts"], receipt]
    assert [a["exit_code"] for a in attempts] == [1, 130, 0]
    assert [a["resumed_from_step"] for a in attempts] == [None, None, stopped]
    assert "OSError: the disk is on fire" in attempts[0]["reason"] and attempts[1]["reason"].startswith("SIGINT")
    (aside,) = workdir.glob("metrics.set_aside-*.jsonl")
    assert [json.loads(line)["step"] for line in aside.read_text().splitlines()] == measured


def test_a_run_goes_back_to_an_earlier_step_and_on_on_another_mesh(base: Path, copy: Path) -> None:
    assert train(copy, checkpoint__step=4, mesh__data=2, mesh__fsdp=2, mesh__tensor=2) == 0
    ours, theirs = runs.exact(copy), runs.exact(base)
    assert [(line["kind"], line["step"]) for line in ours] == [(line["kind"], line["step"]) for line in theirs]
    np.testing.assert_allclose([x["loss"] for x in ours], [x["loss"] for x in theirs], rtol=1e-5)
    (aside,) = (copy / "checkpoints").glob("set_aside-*")
    assert [p.name for p in aside.iterdir()] == ["8"]


def test_a_finished_run_has_nothing_to_do(base: Path, copy: Path) -> None:
    assert train(copy, optimizer__lr=5e-3) == 0
    assert runs.exact(copy) == runs.exact(base) and runs.steps(copy) == [4, 8]
    assert (copy / "config.json").read_text() == (base / "config.json").read_text()
    before, after = runs.receipt(base), runs.receipt(copy)
    assert (after["attempt"], after["exit_code"], after["origin"]) == (before["attempt"] + 1, 0, before["origin"])
    assert after["attempts"][-1]["id"] == before["id"] and after["changed"]["config.optimizer.lr"][1] == 5e-3


def test_a_checkpoint_must_fit_before_the_first_step(base, copy, tmp_path, monkeypatch):
    """Room is asked for once, for the size that the next save writes, and only if steps are left."""
    size, before = Checkpoints(copy / "checkpoints").meta(8)["bytes"], runs.tree(copy)
    for workdir, free, steps, code in ((copy, size - 1, 9, 2), (tmp_path / "new", size - 1, 9, 2), (copy, size, 9, 0)):
        with monkeypatch.context() as patch:
            patch.setattr(storage, "free_bytes", lambda path, free=free: free)
            assert train(workdir, train__steps=steps) == code
        assert code == 0 or runs.tree(copy) == before
    assert not (tmp_path / "new").exists() and runs.steps(copy)[-1] == 9
    monkeypatch.setattr(storage, "free_bytes", lambda path: 0)
    assert train(copy, train__steps=9) == 0, "no step is left"


def test_a_killed_saves_remains_stay_where_the_next_save_removes_them(copy):
    """Each restart would keep one more of them otherwise."""
    remains = copy / "checkpoints" / "9" / "arrays.orbax-checkpoint-tmp"
    remains.mkdir(parents=True)
    (remains / "data").write_bytes(bytes(100))
    assert train(copy, train__steps=10) == 0
    assert {p.name for p in (copy / "checkpoints").iterdir()} == {"4", "8", "10"}


# ---- Allowed and refused changes


def test_a_resumed_run_may_change_learning_rate_and_batch(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = runs.tree(copy)
    changed = {"train__steps": 10, "train__global_batch": 16, "optimizer__lr": 5e-3, "eval__every_steps": 0}
    assert train(copy, **changed) == 2
    said = capsys.readouterr().err
    assert "train.global_batch = 16" in said and "--config.checkpoint.allow_change=train.global_batch" in said
    assert runs.tree(copy) == before

    assert train(copy, **changed, checkpoint__allow_change="train.global_batch") == 0
    assert "optimizer.lr: 0.01 -> 0.005" in (copy / "log.txt").read_text()
    lines = {line["step"]: line for line in runs.lines(copy) if line["kind"] == "train"}
    assert (lines[8]["lr"], lines[9]["lr"]) == (pytest.approx(1e-2), pytest.approx(5e-3))
    # Steps of 8 sequences, then steps of 16: the position in the data is kept.
    assert [lines[s]["tokens"] for s in range(1, 11)] == [TOKENS * n for n in (*range(1, 9), 10, 12)]
    assert json.loads((copy / "checkpoints/10/meta.json").read_text())["data"]["tokens"] == TOKENS * 12

    # The next run reads that position, and needs no second permission.
    run = parsed(copy, **changed | {"train__steps": 11})
    start = choose_start(run, Checkpoints(copy / "checkpoints"), helpers.program(run))
    assert (start.step, start.position.at(10)) == (10, 12 // 2)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"model__d_model": 64}, "model.d_model = 64"),
        ({"train__steps": 7}, "train.steps = 7"),  # the newest checkpoint is at 8
        ({"checkpoint__step": 6}, "checkpoint.step = 6"),  # no such step
        ({"model__num_layers": 2, "init__from": "the base"}, "params.layers.1."),
        ({"model__d_ff": 128, "init__from": "the base"}, "mlp.gate"),
        ({"init__from": "an empty folder"}, "no complete checkpoint"),
    ],
)
def test_a_start_that_cannot_be_is_refused_and_nothing_written(changed, key, base, tmp_path, capsys):
    """A resume, or a new run from weights that do not fit, or that are not there."""
    workdir, changed = base, dict(changed)
    if "init__from" in changed:
        workdir = tmp_path / "new"
        changed["init__from"] = base if changed["init__from"] == "the base" else tmp_path
    before = runs.tree(workdir)
    assert train(workdir, **changed) == 2
    assert key in capsys.readouterr().err
    assert runs.tree(workdir) == before and workdir.exists() == (workdir == base)


# ---- Damage


def cut(step: Path) -> None:
    """Truncate the array files of a checkpoint."""
    for path in (step / "arrays/state").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:500])


def test_a_damaged_checkpoint_is_passed_over_and_never_started_over(copy: Path) -> None:
    checkpoints = copy / "checkpoints"
    cut(checkpoints / "8")
    assert train(copy, train__steps=9, checkpoint__step=8) == 1, "a step that was asked for is taken, or none"
    assert runs.steps(copy) == [4, 8]
    assert train(copy, train__steps=9) == 0
    assert runs.receipt(copy)["resumed_from_step"] == 4 and "8" in runs.receipt(copy)["passed_over"]
    assert list(runs.losses(copy)) == list(range(1, 10))
    assert len(list(checkpoints.glob("set_aside-*/8/meta.json"))) == 1

    for step in runs.steps(copy):
        cut(checkpoints / str(step))
    before = runs.tree(checkpoints)
    assert train(copy, train__steps=10) == 1
    assert runs.tree(checkpoints) == before
    for step in runs.steps(copy):
        (checkpoints / str(step) / "meta.json").unlink()
    before = runs.tree(copy)
    assert train(copy, train__steps=10) == 2
    assert runs.tree(copy) == before


def test_broken_files_of_a_run_are_named_and_kept(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join([*text[:3], "not a line\n", *text[3:]]))
    assert train(copy, train__steps=9) == 1
    assert "Traceback" not in (copy / "log.txt").read_text()
    assert "metrics.jsonl:4" in runs.receipt(copy)["reason"]
    (copy / "metrics.jsonl").write_text("".join(text))
    (copy / "receipt.json").write_text('{"format": 3}')
    assert train(copy, train__steps=9) == 0
    (aside,) = copy.glob("receipt.set_aside-*.json")
    assert aside.read_text() == '{"format": 3}' and runs.receipt(copy)["attempts"] == []
    assert [line for line in (copy / "log.txt").read_text().splitlines() if "WARNING" in line and aside.name in line]


# ---- A new run from another one's weights


def test_a_run_starts_from_weights(base: Path, copy: Path, tmp_path: Path) -> None:
    """The first loss with the weights of init.from equals a resumed run's loss with the same weights on the first batch."""
    new = tmp_path / "new"
    assert train(new, init__from=base, train__steps=3) == 0
    lines = {line["step"]: line for line in runs.lines(new) if line["kind"] == "train"}
    assert [line["tokens"] for line in lines.values()] == [TOKENS * s for s in range(1, 4)]
    assert lines[1]["lr"] == pytest.approx(1e-2 / 2), "the first step of the warm-up"
    assert int(runs.tensors(new)["step"]) == 3

    # The same weights on the first batch: the source run resumes with its data position reset.
    path = copy / "checkpoints/8/meta.json"
    meta = files.unseal(path.read_text())
    meta["data"]["tokens"] = 0
    path.write_text(files.to_sealed_json(meta))
    assert train(copy, train__steps=9) == 0
    assert runs.losses(new)[1] == runs.losses(copy)[9] < runs.losses(base)[1]


def test_a_checkpoint_with_keys_of_an_older_version_resumes(copy: Path) -> None:
    path = copy / "checkpoints/8/meta.json"
    meta = files.unseal(path.read_text())
    meta["config"]["compiler"]["defaults"] = False
    meta["config"]["sharding"]["rules"]["kv_heads"] = "tensor"
    path.write_text(files.to_sealed_json(meta))
    assert train(copy, train__steps=9) == 0
    assert "compiler.defaults = False" in (copy / "log.txt").read_text()


@pytest.mark.parametrize("what", ["weights", "weights+optimizer"])
def test_a_run_starts_from_weights_and_optimizer(base: Path, tmp_path: Path, what: str) -> None:
    run = parsed(tmp_path / "new", init__from=base / "checkpoints/8", init__what=what)
    none, program = Checkpoints(tmp_path / "none"), helpers.program(run)
    first = to_tensors(initial_state(program, choose_start(run, none, program), none, print)[0])
    source = runs.tensors(base, 8)
    assert int(first["step"]) == 0
    moments = [name for name in source if ".mu." in name or ".nu." in name]
    assert len(moments) > 10
    for name in source:
        if name.startswith("params.") or (name in moments and what == "weights+optimizer"):
            np.testing.assert_array_equal(first[name], source[name])
        elif name in moments:
            assert not np.asarray(first[name]).any()
