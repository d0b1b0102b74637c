"""Batches that are not finite: the step is skipped and its batch stored for a replay, a rollback skips the data, or the run
ends.
"""

import json
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import runs
from faults import same

from jaxtrain import main, replay
from jaxtrain.checkpoint import files
from jaxtrain.data import pipeline, tokenizer
from jaxtrain.data.tokenfile import TokenWriter
from jaxtrain.train import state
from jaxtrain.train.batch import place_batch

STEPS = 12
ROLLBACK = {"train__on_divergence": "rollback", "train__max_skipped_steps": 3}


def train(workdir: Path, source: str, **overrides: Any) -> int:
    usual = {"train__steps": STEPS, "eval__every_steps": 0, "log__tensorboard": "false", "data__source": f"sources:{source}"}
    return runs.train(runs.small(), workdir, **{**usual, **overrides})


def replayed(bundle: Path) -> int:
    return main.main([f"--replay={bundle}"])


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train twelve steps. The seventh has a batch that is not finite, and is skipped."""
    workdir = tmp_path_factory.mktemp("skipped") / "run"
    assert train(workdir, "poisoned") == 0
    return workdir


def test_a_skipped_step_changes_nothing_and_a_resumed_run_agrees_to_the_bit(skipped: Path, tmp_path: Path) -> None:
    for steps in (6, 7, STEPS):
        assert train(tmp_path / "cut", "poisoned", train__steps=steps, checkpoint__every_steps=0) == 0
    before, after = (runs.tensors(tmp_path / "cut", step) for step in (6, 7))
    kept = {name for name in before if before[name].tobytes() == after[name].tobytes()}
    assert kept >= {name for name in before if name.startswith(("params.", "optimizer."))}
    assert int(after["guard.skipped"]) == 1 and int(after["step"]) == 7
    assert same(runs.tensors(tmp_path / "cut", STEPS), runs.tensors(skipped, STEPS))
    assert repr(runs.exact(tmp_path / "cut")) == repr(runs.exact(skipped)), "as text: nan is not nan"
    assert [line["skipped_steps"] for line in runs.lines(skipped)] == [0] * 6 + [1] * 6


def test_the_replay_of_a_bundle_finds_the_batch(skipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = skipped / "replay/step-7"
    record = json.loads((bundle / "bundle.json").read_text())
    assert (record["step"], record["batch"], record["tokens"]) == (7, 6, [6 * 512, 7 * 512])
    assert replayed(bundle) == 0
    said = capsys.readouterr().out
    assert "weights: the same bits as then" in said and said.count("now: the same") == 2, said
    assert "not finite again" in said
    assert "first: the batch: weights of tokens that are not finite, in (microbatch, row) [0, 0], [0, 1]" in said

    # The same bundle, changed as if it were of another step.
    other = files.unseal((bundle / "bundle.json").read_bytes()) | {"verdict": 2, "weights_digest": "0" * 8}
    (bundle / "bundle.json").write_text(files.sealed(other))
    assert replayed(bundle) == 1
    said = capsys.readouterr().out
    assert "OTHER bits than then" in said and "spike then, not finite now: not reproduced" in said


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_replay_names_the_first_bad_layer(layer: int) -> None:
    """The weights of `layer` are finite, but so large that its matmuls overflow."""
    run = helpers.tiny(
        {"model.num_layers": 3, "model.d_model": 16, "model.num_heads": 2, "model.num_kv_heads": 1, "mesh.fsdp": 8}
    )
    made = helpers.program(run)
    current = helpers.fresh_state(run)
    block = current.params["layers"]["mlp"]
    block |= {name: block[name].at[layer].mul(1e38) for name in ("gate", "up")}
    batch = place_batch(helpers.host_batch(run, 0), made.batch, made.context)
    sums = state.digests_by_name(state.to_digests(replay.weights_alone(current)))
    found = replay.first_bad(run, made, current.params, batch, sums)
    assert found.startswith(f"first: the forward pass of layer {layer}"), found


def test_a_run_whose_steps_stay_bad_ends_and_saves_nothing_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = tmp_path / "run"
    assert train(workdir, "poisoned_for_good", train__max_skipped_steps=3) == 76
    said = capsys.readouterr().out
    assert "step 7: loss nan, gradient norm nan, not finite: the step is skipped. Data: batch 6" in said
    assert "3 steps in a row were skipped, the last one step 9 with loss nan. Nothing is saved from here; the newest" in said
    assert [line["skipped_steps"] for line in runs.lines(workdir)] == [0] * 6 + [1, 2, 3]
    assert runs.steps(workdir) == [5]
    assert all(np.isfinite(value).all() for value in runs.tensors(workdir).values())
    receipt = runs.receipt(workdir)
    assert receipt["exit_code"] == 76 and "3 steps in a row were skipped" in receipt["reason"]
    # The same if a bad step itself were due to be saved.
    assert train(tmp_path / "other", "poisoned_for_good", train__max_skipped_steps=3, checkpoint__every_steps=7) == 76
    assert runs.steps(tmp_path / "other") == []


def test_a_rollback_passes_over_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes back to step 5, reads batch 5 again, then skips batches 6 to 8."""
    workdir = tmp_path / "run"
    assert train(workdir, "poisoned_long", **ROLLBACK) == 0
    said = capsys.readouterr().out
    assert "3 steps in a row were skipped" in said and "rolling back to step 5, and skipping batch 6" in said
    assert runs.steps(workdir)[-1] == STEPS
    lines = runs.lines(workdir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "metrics are rewound"
    read = [1, 2, 3, 4, 5, 6, *range(10, 16)]  # the number of batches read by each step, with the skipped ones
    assert [line["tokens"] for line in lines] == [512 * batches for batches in read]
    [passed] = json.loads((workdir / "checkpoints/skipped_data.json").read_text())["skipped"]
    assert passed["tokens"] == [6 * 512, 9 * 512] and passed["back_to"] == 5
    # A run that stops right after the rollback continues in the same way.
    for steps in (9, STEPS):
        assert train(tmp_path / "again", "poisoned_long", **ROLLBACK, train__steps=steps) == 0
    assert same(runs.tensors(tmp_path / "again", STEPS), runs.tensors(workdir, STEPS))


def test_a_schedule_of_sources_takes_effect_at_its_step_after_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes back to step 5 and skips batches 7 to 9. The mixture still changes after step 14, also if a run resumes at
    step 10.
    """
    for i, name in enumerate("ab"):
        with TokenWriter(tmp_path / f"{name}.tok", tokenizer.info(tokenizer.ByteTokenizer())) as writer:
            for _ in range(200):
                writer.write([i] * 99, 99)
                writer.end_document()
    batch = pipeline.Batches.batch

    def poisoned(self: pipeline.Batches, step: int, rows: Any = None) -> dict[str, np.ndarray]:
        found = batch(self, step, rows)
        if step in (7, 8, 9):
            found["weights"] = found["weights"] * np.float32("nan")
        return found

    monkeypatch.setattr(pipeline.Batches, "batch", poisoned)
    how = ROLLBACK | {
        "data__max_segments": 4,  # as with synthetic data, for which the step is compiled already
        "data__source_schedule": f"14: {tmp_path}/a.tok=0.25,{tmp_path}/b.tok=0.75",
    }
    source = f"{tmp_path}/a.tok=0.75,{tmp_path}/b.tok=0.25"
    for name, parts in (("whole", (16,)), ("resumed", (10, 16))):
        for steps in parts:
            assert train(tmp_path / name, "", data__source=source, train__steps=steps, **how) == 0
    assert capsys.readouterr().out.count("rolling back to step 5, and skipping batch 7") == 2
    for name in ("whole", "resumed"):
        lines = [line for line in runs.lines(tmp_path / name) if line["kind"] == "source" and line["source"] == "a.tok"]
        assert {line["step"]: line["weight"] for line in lines} == {
            step: 0.75 if step <= 14 else 0.25 for step in range(1, 17)
        }, name
    assert same(runs.tensors(tmp_path / "resumed", 16), runs.tensors(tmp_path / "whole", 16))
    data, other = (json.loads((tmp_path / n / "checkpoints/16/meta.json").read_text())["data"] for n in ("whole", "resumed"))
    assert data["mixture"] == other["mixture"]


def test_rollbacks_that_do_not_help_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "poisoned_for_good", **ROLLBACK) == 76
    said = capsys.readouterr().out
    assert said.count("rolling back to step 5, and skipping") == 3
    assert "after 3 rollbacks to step 5: the data is not the only cause" in said
    assert train(tmp_path / "nothing", "poisoned_for_good", **ROLLBACK, checkpoint__every_steps=0) == 76
    assert "there is no checkpoint to roll back to" in capsys.readouterr().out
