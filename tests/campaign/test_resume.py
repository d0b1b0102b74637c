"""Runs that are interrupted, killed, moved to other meshes and changed: the same numbers come out, or a refusal."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs

from jaxtrain.checkpoint import files
from jaxtrain.data import tokenizer
from jaxtrain.data.tokenfile import TokenWriter
from jaxtrain.hf import exporting
from jaxtrain.hf.folder import open_folder

# A data source that stops before a given step until a file appears: so a test can send a signal at exactly that step. As long
# as it holds back what the training loop itself waits for, it says so in another file.
GATED = """
import os
import sys
import threading
import time
from pathlib import Path

from jaxtrain.config import Paths
from jaxtrain.data import pipeline
from jaxtrain.feed import Feed


class Gated:
    def __init__(self, batches):
        self.batches = batches

    def __getattr__(self, name):
        return getattr(self.batches, name)

    def batch(self, step, rows=None):
        gate = Path(os.environ["GATE_FILE"])
        while step >= int(os.environ.get("GATE_STEP", 1 << 30)) and not gate.exists():
            if loop_waits():
                gate.with_suffix(".waits").touch()
            time.sleep(0.01)
        return self.batches.batch(step, rows)


def loop_waits():
    "Whether the main thread waits for a batch."
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame and frame.f_code is not Feed.next.__code__:
        frame = frame.f_back
    return frame is not None


def source(data, split, global_batch):
    stdlib = pipeline.open_source(data, "stdlib", split=split, global_batch=global_batch, data_dir=Paths().data)
    return Gated(stdlib) if split == "train" else AtEval(stdlib)


class AtEval(Gated):
    "Held-out data that is never there, once a file asks for that."
    def batch(self, step, rows=None):
        while Path(os.environ["GATE_FILE"]).with_suffix(".no-eval").exists():
            Path(os.environ["GATE_FILE"]).with_suffix(".in-eval").touch()
            time.sleep(0.01)
        return self.batches.batch(step, rows)
"""


class Bench:
    """A folder with the small config, the gated source and one compile cache, and runs in processes of their own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = folder / "small.py"
        self.config.write_text(runs.SMALL)
        (folder / "gated.py").write_text(GATED)
        self.started = 0

    def start(self, workdir: Path, *, gate: int | None = None, **overrides: Any) -> runs.Child:
        self.started += 1
        self.opener = self.folder / f"gate-{self.started}"
        env = {"PYTHONPATH": os.pathsep.join([str(self.folder), str(runs.REPO)]), "GATE_FILE": str(self.opener)}
        env |= {} if gate is None else {"GATE_STEP": str(gate)}
        chosen = {
            "data__source": "gated:source",
            "optimizer__schedule": "cosine",
            "paths__cache": self.folder / "cache",
            **overrides,
        }
        return runs.Child(self.config, workdir, self.folder / f"words-{self.started}.txt", env=env, **chosen)

    def at_gate(self, workdir: Path, gate: int) -> runs.Child:
        """A run that waits at the gate: `gate` steps are taken, and saved as far as due; the next one has no data yet."""
        child = self.start(workdir, gate=gate)
        # Metrics are read one step late, so the line before the newest shows that the newest step is on its way.
        saved = gate // 5 * 5
        child.until(lambda: gate - 1 in written_steps(workdir) and (not saved or saved in runs.steps(workdir)))
        # From here on the loop can wait for one batch only; until it does, a signal would stop it a step earlier.
        waits = self.opener.with_suffix(".waits")
        waits.unlink(missing_ok=True)
        child.until(waits.exists)
        return child

    def asked_to_stop(self, child: runs.Child, number: signal.Signals) -> runs.Child:
        """After a signal that it has understood."""
        child.process.send_signal(number)
        child.until(lambda: "finishing this step" in child.said)
        return child

    def in_eval(self, workdir: Path) -> runs.Child:
        """A run whose next evaluation does not end, and which is in it."""
        self.opener = self.folder / f"gate-{self.started + 1}"
        self.opener.with_suffix(".no-eval").touch()
        child = self.start(workdir)
        child.until(self.opener.with_suffix(".in-eval").exists)
        return child

    def stopped(self, child: runs.Child, number: signal.Signals) -> tuple[int, str]:
        """How a run ends that is asked to stop while its data does not come."""
        return self.asked_to_stop(child, number).end(timeout=60)


def written_steps(workdir: Path) -> list[int]:
    return [line["step"] for line in runs.lines(workdir) if line["kind"] == "train"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("resume with spaces"))


@pytest.fixture(scope="module")
def whole(bench: Bench) -> Path:
    """The run that nobody interrupts."""
    workdir = bench.folder / "whole"
    code, said = bench.start(workdir).end()
    assert code == 0, said
    assert "\x1b" not in said, "control characters in a file"
    assert said.count("\nstep 24/24  loss ") == 1
    return workdir


@pytest.fixture(scope="module")
def hunted(bench: Bench) -> tuple[Path, dict[str, tuple[int, str]]]:
    """A run that is stopped in five ways before it may finish: its folder, and how each attempt ended."""
    workdir = bench.folder / "hunted"
    ended = {}

    child = bench.at_gate(workdir, 3)
    child.process.kill()
    ended["killed before the first checkpoint"] = child.end()
    assert (runs.steps(workdir), written_steps(workdir)) == ([], [1, 2])

    ended["Ctrl-C"] = bench.stopped(bench.at_gate(workdir, 7), signal.SIGINT)
    assert runs.steps(workdir) == [5, 7]

    child = bench.at_gate(workdir, 13)
    child.process.kill()
    ended["killed"] = child.end()
    assert (runs.steps(workdir), written_steps(workdir)[-1]) == ([5, 7, 10], 12)

    ended["Ctrl-C in an evaluation"] = bench.stopped(bench.in_eval(workdir), signal.SIGINT)
    assert runs.steps(workdir) == [5, 7, 10, 15, 16]

    ended["SIGTERM"] = bench.stopped(bench.at_gate(workdir, 20), signal.SIGTERM)
    assert runs.steps(workdir) == [5, 7, 10, 15, 16, 20]

    ended["finished"] = bench.start(workdir).end()
    return workdir, ended


def test_exit_codes_and_words(hunted: tuple[Path, dict[str, tuple[int, str]]]) -> None:
    workdir, ended = hunted
    assert {how: code for how, (code, _) in ended.items()} == {
        "killed before the first checkpoint": -signal.SIGKILL,
        "Ctrl-C": 130,
        "killed": -signal.SIGKILL,
        "Ctrl-C in an evaluation": 130,
        "SIGTERM": 75,
        "finished": 0,
    }
    assert "Ctrl-C: state saved at step 7; the same command goes on from there." in ended["Ctrl-C"][1]
    assert "resuming from step 7 in" in ended["killed"][1]
    assert "resuming from step 10 in" in ended["Ctrl-C in an evaluation"][1]
    assert "state saved at step 16" in ended["Ctrl-C in an evaluation"][1]
    assert "state saved at step 20" in ended["SIGTERM"][1]
    assert not any("Traceback" in said for _, said in ended.values())


def test_the_receipt_tells_of_every_attempt(hunted: tuple[Path, dict[str, tuple[int, str]]]) -> None:
    receipt = runs.receipt(hunted[0])
    attempts = [*receipt["attempts"], receipt]
    assert [a["exit_code"] for a in attempts] == [None, 130, None, 130, 75, 0]
    assert [a["resumed_from_step"] for a in attempts] == [None, None, 7, 10, 16, 20]
    assert attempts[1]["reason"] == "SIGINT at step 7"
    assert attempts[-1]["reason"] == "24 steps done"


def test_metrics_are_those_of_an_uninterrupted_run(whole: Path, hunted: tuple[Path, dict[str, tuple[int, str]]]) -> None:
    """Every line, bit by bit and in order: none missing, none twice."""
    assert [line["step"] for line in runs.lines(whole)] == [*range(1, 9), 8, *range(9, 17), 16, *range(17, 25), 24]
    assert runs.exact(hunted[0]) == runs.exact(whole)


def test_what_an_attempt_without_checkpoint_had_measured_is_kept(hunted: tuple[Path, dict[str, tuple[int, str]]]) -> None:
    (aside,) = hunted[0].glob("metrics.set_aside-*.jsonl")
    assert [json.loads(line)["step"] for line in aside.read_text().splitlines()] == [1, 2]


def test_parameters_and_moments_are_those_of_an_uninterrupted_run(
    whole: Path, hunted: tuple[Path, dict[str, tuple[int, str]]]
) -> None:
    ours, theirs = runs.tensors(hunted[0], 24), runs.tensors(whole, 24)
    assert ours.keys() == theirs.keys()
    assert {name.partition(".")[0] for name in ours} == {"step", "params", "optimizer", "guard"}
    different = [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
    assert different == []
    assert int(ours["step"]) == 24
    earlier = runs.tensors(whole, 20)
    counts = ("guard.skipped", "guard.in_a_row", "guard.held")  # of steps that went wrong: there were none
    changes = [(earlier[name] != theirs[name]).any() for name in earlier if name not in counts]
    assert all(changes), "a tensor that no step changes"


# ---- In this process, on 8 devices


@pytest.fixture(scope="module")
def config(bench: Bench) -> Path:
    return bench.config


@pytest.fixture(scope="module")
def base(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps on fsdp=8, with checkpoints at 5 and 10: what other runs go on from."""
    workdir = tmp_path_factory.mktemp("base") / "run"
    assert runs.train(bench.config, workdir, train__steps=10) == 0
    return workdir


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return shutil.copytree(base, tmp_path / "run")


def test_goes_on_on_other_meshes(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """fsdp=8, then data=8, then data=2 x fsdp=2 x tensor=2: the losses of a run on fsdp=8 alone."""
    whole = tmp_path / "whole"
    assert runs.train(config, whole) == 0
    workdir = tmp_path / "moved"
    assert runs.train(config, workdir, train__steps=6) == 0
    assert runs.train(config, workdir, train__steps=14, mesh__data=8, mesh__fsdp=1) == 0
    assert runs.train(config, workdir, mesh__data=2, mesh__fsdp=2, mesh__tensor=2) == 0
    assert "changed: mesh.tensor: 1 -> 2" in capsys.readouterr().out
    ours, theirs = runs.losses(workdir), runs.losses(whole)
    assert list(ours) == list(theirs) == list(range(1, 25))
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)
    held_out = [
        [line["loss"] for line in runs.lines(w) if line["kind"] == "eval" and line["step"] in (8, 16, 24)]
        for w in (workdir, whole)
    ]
    np.testing.assert_allclose(held_out[0], held_out[1], rtol=1e-5)


def test_a_finished_run_has_nothing_to_do(config: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = runs.exact(copy)
    assert runs.train(config, copy, train__steps=10) == 0
    assert "all 10 steps are done: nothing to train" in capsys.readouterr().out
    assert runs.exact(copy) == before
    assert runs.steps(copy) == [5, 10]
    assert runs.receipt(copy)["reason"] == "10 steps were done already"
    assert not (copy / "samples.txt").exists()  # sample.max_tokens = 0

    # The sample is written if the run was stopped before it, and then not again.
    assert runs.train(config, copy, train__steps=10, sample__max_tokens=4) == 0
    assert runs.train(config, copy, train__steps=10, sample__max_tokens=4) == 0
    assert (copy / "samples.txt").read_text().count("--- step 10\n") == 1


def test_a_changed_learning_rate_is_noted(config: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.train(config, copy, train__steps=12, optimizer__lr=5e-3) == 0
    said = capsys.readouterr().out
    assert "changed: optimizer.lr: 0.01 -> 0.005" in said
    assert "changed: optimizer.lr: 0.01 -> 0.005" in (copy / "log.txt").read_text()
    rates = {line["step"]: line["lr"] for line in runs.lines(copy) if line["kind"] == "train"}
    assert (rates[10], rates[11]) == (pytest.approx(1e-2), pytest.approx(5e-3))


def test_a_changed_mixture_goes_on_in_each_source(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Across two changes, and an attempt between them that changes nothing."""
    for i, name in enumerate("ab"):
        with TokenWriter(tmp_path / f"{name}.tok", tokenizer.info(tokenizer.ByteTokenizer())) as writer:
            for _ in range(200):
                writer.write([i] * 99, 99)
                writer.end_document()
    workdir, said = tmp_path / "run", []
    for steps, a, b in ((4, 0.75, 0.25), (8, 0.5, 0.5), (10, 0.5, 0.5), (12, 0.25, 0.75)):
        source = f"{tmp_path}/a.tok={a},{tmp_path}/b.tok={b}"
        assert runs.train(config, workdir, data__source=source, train__steps=steps, eval__every_steps=0) == 0
        said.append(capsys.readouterr().out)
    changed = [[line for line in out.splitlines() if "mixture changed" in line] for out in said]
    words = "data: mixture changed at step {}: each source continues where it stopped"
    assert [len(lines) for lines in changed] == [0, 1, 0, 1]
    assert words.format(4) in changed[1][0] and words.format(10) in changed[3][0]
    assert "data is not what" not in "".join(said)
    mixture = json.loads((workdir / "checkpoints/12/meta.json").read_text())["data"]["mixture"]
    # Of 8 rows a step: 24 + 24 + 4 and 8 + 24 + 12, of 64 tokens each.
    assert {s["name"]: s["tokens"] // 64 for s in mixture["sources"]} == {"a.tok": 52, "b.tok": 44}
    assert [(p["step"], [n // 64 for n in p["read"]]) for p in mixture["parts"]] == [(0, [0, 0]), (4, [24, 8]), (10, [48, 32])]


def test_another_sequence_length_must_be_allowed(config: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = runs.tree(copy)
    changed = {"train__steps": 12, "data__seq_len": 128}
    assert runs.train(config, copy, **changed) == 2
    said = capsys.readouterr().err
    assert "data.seq_len = 128: was 64 in the checkpoint" in said
    assert "--config.checkpoint.allow_change=data.seq_len" in said
    assert runs.tree(copy) == before

    assert runs.train(config, copy, **changed, checkpoint__allow_change="data.seq_len") == 0
    tokens = {line["step"]: line["tokens"] for line in runs.lines(copy) if line["kind"] == "train"}
    # Ten steps of 8 x 64 tokens, then steps of 8 x 128: the position in the data is kept.
    assert tokens == {s: s * 512 if s <= 10 else 5120 + (s - 10) * 1024 for s in range(1, 13)}
    meta = json.loads((copy / "checkpoints/12/meta.json").read_text())
    assert meta["data"]["tokens"] == 5120 + 2048

    # And is read from there: the next run does not need the permission again.
    assert runs.train(config, copy, train__steps=13, data__seq_len=128) == 0
    assert runs.lines(copy)[-2]["tokens"] == 5120 + 3072


def test_another_model_is_refused(config: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = runs.tree(copy)
    assert runs.train(config, copy, model__d_model=64, checkpoint__allow_change="") == 2
    said = capsys.readouterr().err
    assert "model.d_model = 64: was 32 in the checkpoint and can never change on resume" in said
    assert runs.tree(copy) == before


def test_goes_back_to_an_earlier_step(config: Path, base: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.train(config, copy, train__steps=10, checkpoint__step=5) == 0
    said = capsys.readouterr().out
    assert "going back to step 5: later steps 10 moved to" in said
    assert runs.exact(copy) == runs.exact(base)
    (aside,) = (copy / "checkpoints").glob("set_aside-*")
    assert [p.name for p in aside.iterdir()] == ["10"]
    ours, theirs = runs.tensors(copy, 10), runs.tensors(base, 10)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


def test_a_checkpoint_beyond_the_last_step_is_refused(config: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = runs.tree(copy)
    assert runs.train(config, copy, train__steps=7) == 2
    assert "train.steps = 7: the checkpoint is at step 10 already" in capsys.readouterr().err
    assert runs.train(config, copy, checkpoint__step=6) == 2
    assert "there is no such checkpoint. Complete steps: 5, 10." in capsys.readouterr().err
    assert runs.tree(copy) == before


def test_never_starts_over_a_damaged_checkpoint(config: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "checkpoints/10/meta.json").write_text('{"format": 1, "conf')
    (copy / "checkpoints/5/meta.json").rename(copy / "kept")
    before = runs.tree(copy)
    assert runs.train(config, copy, train__steps=12) == 2
    said = capsys.readouterr().err
    assert "no good checkpoint is left" in said and "checkpoints/10/meta.json cannot be read" in said
    assert "checkpoints/5/meta.json cannot be read" in said
    assert runs.tree(copy) == before

    (copy / "kept").rename(copy / "checkpoints/5/meta.json")
    assert runs.train(config, copy, train__steps=12) == 0
    assert "checkpoint 10 is passed over: " in capsys.readouterr().out
    assert runs.steps(copy) == [5, 10, 12]
    assert len(list(copy.glob("checkpoints/set_aside-*/10/meta.json"))) == 1
    assert len(runs.losses(copy)) == 12


def cut(step: Path) -> None:
    """Truncates the files of a checkpoint that hold its arrays."""
    for path in (step / "arrays/state").rglob("*"):
        if path.is_file() and path.stat().st_size > 10_000:
            path.write_bytes(path.read_bytes()[:5000])


def test_damaged_arrays_are_passed_over_too(config: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut(copy / "checkpoints/10")
    assert runs.train(config, copy, train__steps=12, checkpoint__step=10) == 1, "a step that was asked for is taken, or none"
    said = capsys.readouterr().out
    assert "checkpoints/10/arrays cannot be read" in said and "--config.checkpoint.step=5" in said
    assert runs.steps(copy) == [5, 10]
    assert runs.train(config, copy, train__steps=12) == 0
    assert "passing over damaged checkpoints, going on from step 5: 10 moved to" in capsys.readouterr().out
    assert runs.receipt(copy)["resumed_from_step"] == 5 and "10" in runs.receipt(copy)["passed_over"]
    assert list(runs.losses(copy)) == list(range(1, 13))
    for step in (5, 10, 12):
        cut(copy / "checkpoints" / str(step))
    before = runs.tree(copy / "checkpoints")
    assert runs.train(config, copy, train__steps=13) == 1
    assert "no good checkpoint is left" in capsys.readouterr().out
    assert runs.tree(copy / "checkpoints") == before


def test_a_broken_metrics_file_is_named(config: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join([*text[:3], "not a line\n", *text[3:]]))
    assert runs.train(config, copy, train__steps=12) == 1
    said = capsys.readouterr().out
    assert "metrics.jsonl:4: not a line of metrics" in said
    assert "Traceback" not in said + (copy / "log.txt").read_text()
    assert "metrics.jsonl:4" in runs.receipt(copy)["reason"]


def test_a_broken_receipt_is_named_and_kept(config: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "receipt.json").write_text("{")
    before = runs.tree(copy)
    assert runs.train(config, copy, train__steps=12) == 2
    assert "receipt.json: not a receipt" in capsys.readouterr().err
    assert runs.tree(copy) == before


# ---- A new run from another one's weights


def first_batch_loss(workdir: Path) -> float:
    return runs.losses(workdir)[1]


def test_starts_from_weights(config: Path, base: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first loss is that of the source's weights on the first batch: what a resumed run would have seen there."""
    new = tmp_path / "new"
    assert runs.train(config, new, init__from=base, train__steps=5) == 0
    assert (
        f"initial weights from step 10 of {base}/checkpoints; step and learning-rate schedule start at 0"
        in capsys.readouterr().out
    )
    assert [line["tokens"] for line in runs.lines(new) if line["kind"] == "train"] == [512 * s for s in range(1, 6)]

    # The same weights, the first batch again: the source resumed with its data position set back to the start.
    path = copy / "checkpoints/10/meta.json"
    meta = files.unsealed(path.read_text())
    meta["data"]["tokens"] = 0
    path.write_text(files.sealed(meta))
    assert runs.train(config, copy, train__steps=11) == 0
    assert runs.losses(new)[1] == runs.losses(copy)[11]
    assert runs.losses(new)[1] < runs.losses(base)[1] - 0.5

    lr = {line["step"]: line["lr"] for line in runs.lines(new) if line["kind"] == "train"}
    assert lr[1] == pytest.approx(1e-2 / 4)  # the first step of the warm-up
    assert int(runs.tensors(new)["step"]) == 5


def test_starts_from_weights_and_optimizer(config: Path, base: Path, tmp_path: Path) -> None:
    """A learning rate of 0 keeps the weights, and betas near 1 keep the moments, so that they can be read off the result."""
    source = runs.tensors(base, 10)
    kept = {
        "optimizer__lr": 0,
        "optimizer__lr_min": 0,
        "optimizer__warmup_steps": 0,
        "optimizer__beta1": 0.9999999,
        "optimizer__beta2": 0.9999999,
    }
    both, alone = tmp_path / "both", tmp_path / "alone"
    assert (
        runs.train(config, both, init__from=base / "checkpoints/10", init__what="weights+optimizer", train__steps=1, **kept)
        == 0
    )
    assert runs.train(config, alone, init__from=base / "checkpoints/10", train__steps=1, **kept) == 0
    with_moments, without = runs.tensors(both), runs.tensors(alone)
    moments = [name for name in source if ".mu." in name or ".nu." in name]
    assert len(moments) > 20
    for name, value in source.items():
        if name.startswith("params."):
            np.testing.assert_array_equal(with_moments[name], value)
            np.testing.assert_array_equal(without[name], value)
    for name in moments:
        np.testing.assert_allclose(with_moments[name], source[name], rtol=1e-3, atol=1e-6)
        assert np.abs(without[name]).max() < 0.01 * max(np.abs(source[name]).max(), 1e-9)


def test_a_source_that_does_not_fit_is_refused(
    config: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    assert runs.train(config, new, init__from=base, model__num_layers=1) == 2
    assert "params.layers.1.attention.wk: in the source, not in this model" in capsys.readouterr().err
    assert runs.train(config, new, init__from=base, model__d_ff=128) == 2
    assert "init.from" in (said := capsys.readouterr().err)
    assert "mlp.gate: shape (32, 64) in the checkpoint, (32, 128) in this run" in said
    (tmp_path / "empty").mkdir()
    assert runs.train(config, new, init__from=tmp_path / "empty") == 2
    assert "no complete checkpoint" in capsys.readouterr().err
    assert not new.exists()


def test_bfloat16_masters_are_resumed_to_the_bit_and_exported_as_they_are(config: Path, tmp_path: Path) -> None:
    kept = {"dtypes__params": "bf16", "eval__every_steps": 0, "log__tensorboard": "false", "checkpoint__every_steps": 4}
    for steps in (4, 8):
        assert runs.train(config, tmp_path / "halves", train__steps=steps, **kept) == 0
    assert runs.train(config, tmp_path / "whole", train__steps=8, **kept) == 0
    whole, halves = (runs.tensors(tmp_path / name, 8) for name in ("whole", "halves"))
    assert whole.keys() == halves.keys()
    for name, x in whole.items():
        np.testing.assert_array_equal(x, halves[name], err_msg=name)
    assert {str(whole[f"params.{name}"].dtype) for name in ("final_norm.scale", "layers.0.attention_norm.scale")} == {"float32"}
    # Scales in float32 do not make an export of weights in bfloat16 twice as large.
    how = {"dtype": "auto", "shard_bytes": 10**9, "tokenizer": "", "force": False, "say": lambda line: None}
    exporting.export(exporting.open_source(str(tmp_path / "whole")), tmp_path / "out", **how)
    folder = open_folder(tmp_path / "out")
    assert folder.dtype(folder.tensors) == "bf16"
