"""Runs in this process that fail, are stopped, or change meshes or keys give an uninterrupted run's numbers, or are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import runs
import sources

from jaxtrain import position
from jaxtrain.checkpoint import files
from jaxtrain.data import pipeline, tokenizer
from jaxtrain.data.tokenfile import TokenWriter

STEPS = 10
EIGHT = "mesh.fsdp=8"
THREE_AXES = "mesh.data=2, mesh.fsdp=2, mesh.tensor=2"
LAYOUTS: dict[str, dict[str, Any]] = {
    EIGHT: {},
    THREE_AXES: {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2},
    "bfloat16 parameters, moments on the host": {"dtypes__params": "bf16", "optimizer__offload": "moments"},
}


def train(workdir: Path, **overrides: Any) -> int:
    """Train ten steps of the small config, with checkpoints at 5 and 10 and evaluations at 4, 8 and 10."""
    usual = {"train__steps": STEPS, "eval__every_steps": 4, "log__tensorboard": "false"}
    return runs.train(runs.small(), workdir, **{**usual, **overrides})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains an uninterrupted run of a layout, once."""
    made: dict[str, Path] = {}

    def run(layout: str) -> Path:
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp("whole") / "run"
            assert train(made[layout], data__source="sources:watched", **LAYOUTS[layout]) == 0
        return made[layout]

    return run


@pytest.fixture(scope="module")
def base(whole: Callable[[str], Path]) -> Path:
    return whole(EIGHT)


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    """Copy the uninterrupted run into a folder that a test may change."""
    return shutil.copytree(base, tmp_path / "run")


def go_on(workdir: Path, **overrides: Any) -> int:
    return train(workdir, data__source="sources:watched", **overrides)


# ---- Bit for bit


@pytest.mark.parametrize("layout", helpers.few(LAYOUTS, THREE_AXES))
def test_a_run_that_fails_and_is_stopped_gives_the_bits_of_one_that_is_not(
    whole: Callable[[str], Path], layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The data thread reads at most two steps ahead, so that the test controls where the run ends.
    workdir, how = tmp_path / "run", LAYOUTS[layout] | {"data__prefetch": 1}

    def fails(batch: int) -> None:
        with monkeypatch.context() as m, pytest.raises(OSError, match="the disk is on fire"):
            m.setitem(sources.BEFORE, batch, sources.fail)
            go_on(workdir, **how)

    fails(3)
    assert runs.steps(workdir) == [], "before the first checkpoint"
    measured = [line["step"] for line in runs.lines(workdir)]
    with monkeypatch.context() as m:
        m.setitem(sources.BEFORE, 8, sources.interrupt)
        assert go_on(workdir, **how) == 130
    stopped = runs.steps(workdir)[-1]
    assert 5 < stopped <= 8
    fails(9)
    assert go_on(workdir, **how) == 0

    assert runs.exact(workdir) == runs.exact(whole(layout)), "every line of metrics: none is missing, none stands there twice"
    ours, theirs = runs.tensors(workdir, STEPS), runs.tensors(whole(layout), STEPS)
    assert ours.keys() == theirs.keys()
    assert {name.partition(".")[0] for name in ours} == {"step", "params", "optimizer", "guard"}
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []
    earlier = runs.tensors(whole(layout), 5)
    never = {"guard.skipped", "guard.in_a_row", "guard.held"}  # counts of skipped steps
    assert {name for name in theirs if (earlier[name] == theirs[name]).all()} == never, "a step changes every other tensor"

    receipt = runs.receipt(workdir)
    attempts = [*receipt["attempts"], receipt]
    assert [a["exit_code"] for a in attempts] == [1, 130, 1, 0]
    assert [a["resumed_from_step"] for a in attempts] == [None, None, stopped, stopped]
    assert attempts[1]["reason"] == f"SIGINT at step {stopped}"
    (aside,) = workdir.glob("metrics.set_aside-*.jsonl")
    assert [json.loads(line)["step"] for line in aside.read_text().splitlines()] == measured


def test_a_run_goes_on_on_another_mesh(
    base: Path, copy: Path, whole: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert go_on(copy, checkpoint__step=5, **LAYOUTS[THREE_AXES]) == 0
    assert "changed: mesh.tensor: 1 -> 2" in capsys.readouterr().out
    ours, theirs = runs.exact(copy), runs.exact(base)
    assert [(line["kind"], line["step"]) for line in ours] == [(line["kind"], line["step"]) for line in theirs]
    np.testing.assert_allclose([x["loss"] for x in ours], [x["loss"] for x in theirs], rtol=1e-5)


def test_a_run_goes_back_to_an_earlier_step(base: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go_on(copy, checkpoint__step=5) == 0
    assert "going back to step 5: later steps 10 moved to" in capsys.readouterr().out
    assert runs.exact(copy) == runs.exact(base)
    (aside,) = (copy / "checkpoints").glob("set_aside-*")
    assert [p.name for p in aside.iterdir()] == ["10"]
    ours, theirs = runs.tensors(copy), runs.tensors(base)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


def test_a_finished_run_has_nothing_to_do(base: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go_on(copy, optimizer__lr=5e-3) == 0
    assert "all 10 steps are done: nothing to train" in capsys.readouterr().out
    assert runs.exact(copy) == runs.exact(base) and runs.steps(copy) == [5, 10]
    assert (copy / "config.json").read_text() == (base / "config.json").read_text()
    before, after = runs.receipt(base), runs.receipt(copy)
    idle = after["attempts"].pop()
    assert (idle["attempt"], idle["reason"]) == (before["attempt"] + 1, "10 steps were done already")
    assert after == before


# ---- Allowed and refused changes


def test_a_resumed_run_may_change_learning_rate_and_sequence_length(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = runs.tree(copy)
    changed = {"train__steps": 12, "data__seq_len": 128, "optimizer__lr": 5e-3}
    assert go_on(copy, **changed) == 2
    said = capsys.readouterr().err
    assert "data.seq_len = 128: was 64 in the checkpoint" in said
    assert "--config.checkpoint.allow_change=data.seq_len" in said
    assert runs.tree(copy) == before

    assert go_on(copy, **changed, checkpoint__allow_change="data.seq_len") == 0
    assert "changed: optimizer.lr: 0.01 -> 0.005" in capsys.readouterr().out
    assert "changed: optimizer.lr: 0.01 -> 0.005" in (copy / "log.txt").read_text()
    lines = {line["step"]: line for line in runs.lines(copy) if line["kind"] == "train"}
    assert (lines[10]["lr"], lines[11]["lr"]) == (pytest.approx(1e-2), pytest.approx(5e-3))
    # Ten steps of 8 x 64 tokens, then steps of 8 x 128: the position in the data is kept.
    assert [lines[s]["tokens"] for s in range(1, 13)] == [*(s * 512 for s in range(1, 11)), 5120 + 1024, 5120 + 2048]
    assert json.loads((copy / "checkpoints/12/meta.json").read_text())["data"]["tokens"] == 5120 + 2048

    # The next run reads that position, and needs no second permission.
    assert go_on(copy, **changed | {"train__steps": 13}) == 0
    assert [line["tokens"] for line in runs.lines(copy) if line["kind"] == "train"][-1] == 5120 + 3072


# Changes to a run of 10 steps -> the key in the error, and words of its line.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "another model": ({"model__d_model": 64}, "model.d_model = 64", "was 32 in the checkpoint and can never change on resume"),
    "fewer steps": ({"train__steps": 7}, "train.steps = 7", "the newest checkpoint is at step 10 already"),
    "no such step": ({"checkpoint__step": 6}, "checkpoint.step = 6", "has no such step. Set one of its steps: 5, 10."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_resume_that_cannot_be_is_refused_and_nothing_written(
    case: str, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed, key, words = REFUSED[case]
    before = runs.tree(base)
    assert go_on(base, **changed) == 2
    said = capsys.readouterr().err
    assert key in said and words in said
    assert runs.tree(base) == before


def test_a_changed_mixture_goes_on_in_each_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each source continues from its last position. The mixture changes twice, and one attempt between the changes keeps it."""
    for i, name in enumerate("ab"):
        with TokenWriter(tmp_path / f"{name}.tok", tokenizer.info(tokenizer.ByteTokenizer())) as writer:
            for _ in range(200):
                writer.write([i] * 99, 99)
                writer.end_document()
    workdir, said = tmp_path / "run", []
    how = {"eval__every_steps": 0, "data__max_segments": 4}  # as with synthetic data, for which the step is compiled already
    for steps, a, b in ((4, 0.75, 0.25), (8, 0.5, 0.5), (10, 0.5, 0.5), (12, 0.25, 0.75)):
        source = f"{tmp_path}/a.tok={a},{tmp_path}/b.tok={b}"
        assert train(workdir, data__source=source, train__steps=steps, **how) == 0
        said.append(capsys.readouterr().out)
    changed = [[line for line in out.splitlines() if "mixture changed" in line] for out in said]
    words = "data: mixture changed at step {}: each source continues from its last position"
    assert [len(lines) for lines in changed] == [0, 1, 0, 1]
    assert words.format(4) in changed[1][0] and words.format(10) in changed[3][0]
    assert "data is not what" not in "".join(said)
    mixture = json.loads((workdir / "checkpoints/12/meta.json").read_text())["data"]["mixture"]
    # Rows of the sources, at 8 rows a step: 24 + 24 + 4 and 8 + 24 + 12. Each row has 64 tokens.
    assert {s["name"]: s["tokens"] // 64 for s in mixture["sources"]} == {"a.tok": 52, "b.tok": 44}
    assert [(p["step"], [n // 64 for n in p["read"]]) for p in mixture["phases"]] == [(0, [0, 0]), (4, [24, 8]), (10, [48, 32])]


def test_an_annealed_mixture_over_resumes_with_another_batch_and_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule changes the mixture at steps 3 and 7. The run resumes before the first change with another batch and layout.

    It resumes again after the second change, with another layout. Each source is read once, in order, and the mixture changes
    at its steps, even after a skipped batch.
    """
    for i, name in enumerate("abc"):
        with TokenWriter(tmp_path / f"{name}.tok", tokenizer.info(tokenizer.ByteTokenizer())) as writer:
            for k in range(200):
                writer.write([i * 50 + k % 50] * 99, 99)
                writer.end_document()
    workdir, fed = tmp_path / "run", []
    batch = pipeline.Batches.batch

    def recorded(self: pipeline.Batches, step: int, rows: Any = None) -> dict[str, np.ndarray]:
        index = step * self.global_batch + np.arange(self.global_batch)
        number, within = self.mixture.sources_of(index)
        names = [Path(self.sources[k].name).name for k in number.tolist()]
        fed.append((step, [*zip(names, within.tolist(), strict=True)]))
        return batch(self, step, rows)

    monkeypatch.setattr(pipeline.Batches, "batch", recorded)
    how = {
        "eval__every_steps": 0,
        "data__max_segments": 4,
        "data__prefetch": 1,
        "data__source": f"{tmp_path}/a.tok=0.75,{tmp_path}/b.tok=0.25",
        "data__source_schedule": f"3: {tmp_path}/a.tok=0.5,{tmp_path}/c.tok=0.5; 7: {tmp_path}/c.tok",
        "checkpoint__allow_change": "train.global_batch",
    }
    steps: list[list[tuple[str, int]]] = []

    def run(until: int, **keys: Any) -> None:
        fed.clear()
        assert train(workdir, train__steps=until, **how, **keys) == 0
        steps.extend(rows for _, rows in sorted(fed)[: until - len(steps)])

    run(2)
    # 2 steps of 8 sequences: with batches of 12, the run continues at batch 2. It skips batch 4.
    position.skip(workdir / "checkpoints", (4 * 12 * 64, 5 * 12 * 64), (4, 4), "a test", back_to=2)
    twelve = {"train__global_batch": 12, "mesh__data": 2, "mesh__tensor": 2}
    run(8, mesh__fsdp=2, **twelve)
    run(10, mesh__fsdp=1, **twelve | {"mesh__data": 4})
    said = capsys.readouterr().out
    assert "data: mixture from step 3: a.tok 50.0%, c.tok 50.0% (not reached: train.steps=2)" in said
    assert "data: mixture from step 7: c.tok 100.0%" in said
    assert "mixture changed" not in said
    names = [sorted({name for name, _ in rows}) for rows in steps]
    assert names == [["a.tok", "b.tok"]] * 3 + [["a.tok", "c.tok"]] * 4 + [["c.tok"]] * 3
    read = {"a.tok": 0, "b.tok": 0, "c.tok": 0}
    for step, rows in enumerate(steps):
        if step == 4:  # the skipped batch has 12 sequences, half from each source
            read["a.tok"] += 6
            read["c.tok"] += 6
        for name, within in rows:
            assert within == read[name]
            read[name] += 1
    data = json.loads((workdir / "checkpoints/10/meta.json").read_text())["data"]
    assert {s["name"]: s["tokens"] for s in data["mixture"]["sources"]} == {name: rows * 64 for name, rows in read.items()}
    lines = [line for line in runs.lines(workdir) if line["kind"] == "source" and line["step"] == 10]
    assert {line["source"]: (line["tokens"], line["weight"]) for line in lines} == {
        name: (rows * 64, float(name == "c.tok")) for name, rows in read.items()
    }


# ---- Damage


def cut(step: Path) -> None:
    """Truncate the array files of a checkpoint."""
    for path in (step / "arrays/state").rglob("*"):
        if path.is_file() and path.stat().st_size > 10_000:
            path.write_bytes(path.read_bytes()[:5000])


def test_a_damaged_checkpoint_is_passed_over_and_never_started_over(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = copy / "checkpoints"
    cut(checkpoints / "10")
    assert go_on(copy, train__steps=12, checkpoint__step=10) == 1, "a step that was asked for is taken, or none"
    said = capsys.readouterr().out
    assert "checkpoints/10/arrays cannot be read" in said and "--config.checkpoint.step=5" in said
    assert runs.steps(copy) == [5, 10]
    assert go_on(copy, train__steps=12) == 0
    assert "passing over damaged checkpoints, going on from step 5: 10 moved to" in capsys.readouterr().out
    assert runs.receipt(copy)["resumed_from_step"] == 5 and "10" in runs.receipt(copy)["passed_over"]
    assert list(runs.losses(copy)) == list(range(1, 13))

    (checkpoints / "12/meta.json").write_text('{"format": 1, "conf')
    assert go_on(copy, train__steps=13) == 0
    assert "checkpoint 12 is passed over: " in capsys.readouterr().out
    assert len(list(checkpoints.glob("set_aside-*/12/meta.json"))) == 1 and len(runs.losses(copy)) == 13

    for step in runs.steps(copy):
        cut(checkpoints / str(step))
    before = runs.tree(checkpoints)
    assert go_on(copy, train__steps=14) == 1
    assert "no good checkpoint is left" in capsys.readouterr().out
    assert runs.tree(checkpoints) == before
    for step in runs.steps(copy):
        (checkpoints / str(step) / "meta.json").unlink()
    before = runs.tree(copy)
    assert go_on(copy, train__steps=14) == 2
    assert "no good checkpoint is left" in capsys.readouterr().err
    assert runs.tree(copy) == before


def test_broken_files_of_a_run_are_named_and_kept(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join([*text[:3], "not a line\n", *text[3:]]))
    assert go_on(copy, train__steps=12) == 1
    said = capsys.readouterr().out
    assert "metrics.jsonl:4: not a line of metrics" in said
    assert "Traceback" not in said + (copy / "log.txt").read_text()
    assert "metrics.jsonl:4" in runs.receipt(copy)["reason"]
    (copy / "receipt.json").write_text("{")
    before = runs.tree(copy)
    assert go_on(copy, train__steps=12) == 2
    assert "receipt.json: not a receipt" in capsys.readouterr().err
    assert runs.tree(copy) == before


# ---- A new run from another one's weights


def test_a_run_starts_from_weights(base: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first loss with the weights of init.from equals a resumed run's loss with the same weights on the first batch."""
    new = tmp_path / "new"
    assert go_on(new, init__from=base, train__steps=5) == 0
    said = f"initial weights from step 10 of {base}/checkpoints; step and learning-rate schedule start at 0"
    assert said in capsys.readouterr().out
    lines = {line["step"]: line for line in runs.lines(new) if line["kind"] == "train"}
    assert [line["tokens"] for line in lines.values()] == [512 * s for s in range(1, 6)]
    assert lines[1]["lr"] == pytest.approx(1e-2 / 4), "the first step of the warm-up"
    assert int(runs.tensors(new)["step"]) == 5

    # The same weights on the first batch: the source run resumes with its data position reset.
    path = copy / "checkpoints/10/meta.json"
    meta = files.unseal(path.read_text())
    meta["data"]["tokens"] = 0
    path.write_text(files.sealed(meta))
    assert go_on(copy, train__steps=11) == 0
    assert runs.losses(new)[1] == runs.losses(copy)[11] < runs.losses(base)[1] - 0.5


def test_a_run_starts_from_weights_and_optimizer(base: Path, tmp_path: Path) -> None:
    """A learning rate of 0 keeps the weights, and betas near 1 keep the moments. So the first checkpoint shows whether the
    moments were restored.
    """
    source = runs.tensors(base, 10)
    kept: dict[str, Any] = {f"optimizer__{name}": 0 for name in ("lr", "lr_min", "warmup_steps")}
    kept |= {"optimizer__beta1": 0.9999999, "optimizer__beta2": 0.9999999, "train__steps": 1, "eval__every_steps": 0}
    found = {}
    for what in ("weights", "weights+optimizer"):
        assert go_on(tmp_path / what, init__from=base / "checkpoints/10", init__what=what, **kept) == 0
        found[what] = runs.tensors(tmp_path / what)
        for name in (name for name in source if name.startswith("params.")):
            np.testing.assert_array_equal(found[what][name], source[name])
    moments = [name for name in source if ".mu." in name or ".nu." in name]
    assert len(moments) > 20
    for name in moments:
        np.testing.assert_allclose(found["weights+optimizer"][name], source[name], rtol=1e-3, atol=1e-6)
        assert np.abs(found["weights"][name]).max() < 0.01 * max(np.abs(source[name]).max(), 1e-9)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model__num_layers": 1}, "params.layers.1.attention.wk: in the source, not in this model"),
        ({"model__d_ff": 128}, "mlp.gate: shape (32, 64) in the checkpoint, (32, 128) in this run"),
        ({"init__from": "empty"}, "no complete checkpoint"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(
    changed: dict[str, Any], words: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    if "init__from" in changed:
        changed = {"init__from": tmp_path / "empty"}
    assert go_on(tmp_path / "new", **{"init__from": base, **changed}) == 2
    said = capsys.readouterr().err
    assert words in said and ("init.from" in said or "cannot start" in said)
    assert not (tmp_path / "new").exists()
