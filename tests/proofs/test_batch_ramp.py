"""Runs whose batch grows (train.batch_ramp): the data of each step, 1 and 8 devices, resumes, and a rollback."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from faults import same

from jaxtrain import main
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.data import tokenizer
from jaxtrain.data.batches import Batches
from jaxtrain.data.tokenfile import TokenWriter
from jaxtrain.train import position

# A quarter of a batch in steps 1 to 3, less than a microbatch, a half in steps 4 and 5, then 32 sequences in 2 microbatches.
RAMP = {"train__batch_ramp": "8:3,16:5", "train__global_batch": 32, "train__grad_accum": 2}
SIZES = [8] * 3 + [16] * 2 + [32] * 3
USUAL = {"eval__every_steps": 0, "log__tensorboard": "false", "checkpoint__every_steps": 0}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write two token files, and return a mixture of them."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    for name in "ab":
        with TokenWriter(folder / f"{name}.tok", tokenizer.tokenizer_info(tokenizer.ByteTokenizer())) as writer:
            for _ in range(60):
                writer.write(rng.integers(0, 250, 99).tolist(), 99)
                writer.end_document()
    return f"{folder}/a.tok=0.75,{folder}/b.tok=0.25"


def train(workdir: Path, mixture: str, **overrides: Any) -> int:
    """Train eight steps of the smallest config with the ramp, on both sources."""
    return runs.train(runs.small(), workdir, **{"data__source": mixture, "data__max_segments": 4, **USUAL, **RAMP, **overrides})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, mixture: str) -> Path:
    """Train an uninterrupted run on 8 devices."""
    workdir = tmp_path_factory.mktemp("base") / "run"
    assert train(workdir, mixture) == 0
    return workdir


def test_each_step_has_its_sequences_and_tokens(base: Path) -> None:
    lines = [line for line in runs.lines(base) if line["kind"] == "train"]
    assert [line["tokens"] for line in lines] == [32 * n for n in np.cumsum(SIZES).tolist()]
    files = {line["source"]: line for line in runs.lines(base) if line["kind"] == "source" and line["step"] == 8}
    total = sum(SIZES)
    assert {name: line["tokens"] for name, line in files.items()} == {"a.tok": 0.75 * total * 32, "b.tok": 0.25 * total * 32}


def test_one_device_has_the_losses_of_eight(base: Path, mixture: str, tmp_path: Path) -> None:
    how = {"data__source": mixture, "data__max_segments": 4, "paths__cache": tmp_path / "cache", **USUAL, **RAMP}
    one = runs.Child(runs.small(), tmp_path / "run", tmp_path / "words", env={"JAX_NUM_CPU_DEVICES": "1"}, **how)
    assert one.end()[0] == 0
    assert runs.receipt(tmp_path / "run")["devices"]["count"] == 1 and runs.receipt(base)["devices"]["count"] == 8
    ours, theirs = runs.losses(tmp_path / "run"), runs.losses(base)
    np.testing.assert_allclose([*ours.values()], [*theirs.values()], rtol=1e-5)


def test_a_run_that_stops_at_a_border_and_within_a_part_gives_the_same_bits(base: Path, mixture: str, tmp_path: Path) -> None:
    for steps in (2, 3, 5, 8):
        assert train(tmp_path / "run", mixture, train__steps=steps) == 0
    assert same(runs.tensors(tmp_path / "run", 8), runs.tensors(base, 8))
    assert runs.exact(tmp_path / "run") == runs.exact(base)
    whole, cut = (Checkpoints(folder / "checkpoints").meta(8)["data"] for folder in (base, tmp_path / "run"))
    assert cut == whole and len(whole["positions"]) == 1


def test_a_resumed_run_compiles_the_sizes_ahead_alone(base: Path, mixture: str, tmp_path: Path) -> None:
    log = (base / "log.txt").read_text()
    assert [log.count(f"compiling the train step of {size} ") for size in (8, 16, 32)] == [0, 1, 1]
    workdir = tmp_path / "run"
    assert train(workdir, mixture, train__steps=5) == 0
    before = len((workdir / "log.txt").read_text())
    assert train(workdir, mixture, train__steps=6) == 0
    assert "of 8 sequences" not in (workdir / "log.txt").read_text()[before:]
    assert "compiling the train step of" not in (workdir / "log.txt").read_text()[before:]


def test_the_ramp_may_change_on_resume_if_it_is_allowed(mixture: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    workdir = tmp_path / "run"
    assert train(workdir, mixture, train__steps=2) == 0
    other = RAMP | {"train__batch_ramp": "16:4", "train__steps": 5}
    assert train(workdir, mixture, **other) == 2
    assert "train.batch_ramp = '16:4'" in capsys.readouterr().err
    assert train(workdir, mixture, **other, checkpoint__allow_change="train.batch_ramp") == 0
    lines = [line for line in runs.lines(workdir) if line["kind"] == "train"]
    assert [line["tokens"] for line in lines] == [32 * n for n in (8, 16, 32, 48, 80)]
    entries = Checkpoints(workdir / "checkpoints").meta(5)["data"]["positions"]
    assert [(entry["step"], entry["ramp"], entry["unit"]) for entry in entries] == [(0, "8:3,16:5", 8), (2, "16:4", 16)]


def test_a_damaged_checkpoint_is_passed_over_across_a_border(base: Path, mixture: str, tmp_path: Path) -> None:
    """The run resumes before the size that it compiled, and takes the same steps again."""
    workdir = tmp_path / "run"
    assert train(workdir, mixture, checkpoint__every_steps=4, checkpoint__keep=9) == 0
    for path in (workdir / "checkpoints/8/arrays/state").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:500])
    assert train(workdir, mixture, train__steps=9, checkpoint__allow_change="train.steps") == 0
    assert runs.receipt(workdir)["resumed_from_step"] == 4
    found, wanted = runs.losses(workdir), runs.losses(base)
    assert list(found) == list(range(1, 10)) and {step: found[step] for step in wanted} == wanted


def test_a_rollback_across_a_border_passes_over_the_steps_data(
    mixture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Steps 4 and 5 (batches 3 to 6 of the source) are bad. The run goes back to step 2, and reads batch 2 and 7 on."""
    batch, read = Batches.batch, []

    def poisoned(self: Batches, step: int, rows: Any = None) -> dict[str, np.ndarray]:
        found = batch(self, step, rows)
        read.append(step)
        if 3 <= step < 7:
            found["weights"] = found["weights"] * np.float32("nan")
        return found

    monkeypatch.setattr(Batches, "batch", poisoned)
    how = {"checkpoint__every_steps": 2, "train__on_divergence": "rollback", "train__max_skipped_steps": 2}
    workdir = tmp_path / "run"
    assert train(workdir, mixture, **how, train__steps=7) == 0
    [passed] = json.loads((workdir / "checkpoints/skipped_data.json").read_text())["skipped"]
    assert passed["tokens"] == [3 * 8 * 32, 7 * 8 * 32] and passed["back_to"] == 2
    entries = Checkpoints(workdir / "checkpoints").meta(7)["data"]["positions"]
    wanted = {0: [0], 1: [1], 2: [2], 3: [7, 8], 4: [9, 10], 5: [11, 12, 13, 14], 6: [15, 16, 17, 18]}
    found = {}
    for step in wanted:
        entry = [entry for entry in entries if entry["step"] <= step][-1]
        found[step] = position.position_of(entry).batches(step)
    assert found == wanted
    taken = [line["tokens"] for line in runs.lines(workdir) if line["kind"] == "train"]
    assert taken == [256 * (numbers[-1] + 1) for numbers in wanted.values()]

    # The bundle of step 4 has its 16 sequences, and the config of its program.
    assert main.main([f"--replay={workdir}/replay/step-4"]) == 0
    said = capsys.readouterr().out
    assert "same bits" in said and said.count("now: the same") == 2 and "first: the batch: weights" in said, said
