"""Batches that are not finite: the step is skipped and its batch stored for a replay, a rollback skips the data, or the run
ends.
"""

import json
import re
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import runs
from faults import same
from token_files import open_batches

from jaxtrain import main
from jaxtrain.checkpoint import files
from jaxtrain.data import tokenizer
from jaxtrain.data.batches import Batches
from jaxtrain.data.tokenfile import TokenWriter
from jaxtrain.step import state
from jaxtrain.step.batch import place_batch
from jaxtrain.train import replay
from jaxtrain.train.history import open_history

TOKENS = 8 * 32  # tokens of a step
ROLLBACK = {"train__on_divergence": "rollback", "train__max_skipped_steps": 3}


def train(workdir: Path, source: str, **overrides: Any) -> int:
    """Train six steps of the smallest config, with a checkpoint every three steps."""
    usual = {"train__steps": 6, "eval__every_steps": 0, "log__tensorboard": "false", "checkpoint__every_steps": 3}
    return runs.train(runs.small(), workdir, **{**usual, "data__source": source, **overrides})


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train six steps. The fourth has a batch that is not finite, and is skipped."""
    workdir = tmp_path_factory.mktemp("skipped") / "run"
    assert train(workdir, "sources:poisoned") == 0
    return workdir


def test_a_skipped_step_changes_nothing_and_a_resumed_run_agrees_to_the_bit(skipped: Path, tmp_path: Path) -> None:
    for steps in (4, 6):
        assert train(tmp_path / "cut", "sources:poisoned", train__steps=steps) == 0
    before, after = (runs.tensors(tmp_path / "cut", step) for step in (3, 4))
    kept = {name for name in before if before[name].tobytes() == after[name].tobytes()}
    assert kept >= {name for name in before if name.startswith(("params.", "optimizer."))}
    assert int(after["guard.skipped"]) == 1 and int(after["step"]) == 4
    assert same(runs.tensors(tmp_path / "cut", 6), runs.tensors(skipped, 6))
    assert repr(runs.exact(tmp_path / "cut")) == repr(runs.exact(skipped)), "as text: nan is not nan"
    assert [line["skipped_steps"] for line in runs.lines(skipped)] == [0] * 3 + [1] * 3


def test_the_replay_of_a_bundle_finds_the_batch(skipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = skipped / "replay/step-4"
    record = json.loads((bundle / "bundle.json").read_text())
    assert (record["step"], record["batches"], record["tokens"]) == (4, [3], [3 * TOKENS, 4 * TOKENS])
    assert main.main([f"--replay={bundle}"]) == 0
    said = capsys.readouterr().out
    assert "same bits" in said and said.count("now: the same") == 2 and "first: the batch: weights" in said, said

    for other in (skipped, skipped / "replay", skipped / "replay/step-9"):
        assert main.main([f"--replay={other}"]) == 2
        assert f"--replay={bundle}" in capsys.readouterr().err

    # The same bundle, changed as if it were of another step.
    other = files.unseal((bundle / "bundle.json").read_bytes()) | {"verdict": 2, "weights_digest": "0" * 8}
    (bundle / "bundle.json").write_text(files.to_sealed_json(other))
    assert main.main([f"--replay={bundle}"]) == 1
    assert "OTHER bits" in capsys.readouterr().out


@pytest.mark.parametrize("layer", [0, 2])
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
    assert f"layer {layer}" in replay.first_bad(made, current.params, batch, sums)


def test_a_run_whose_steps_stay_bad_ends_and_saves_nothing_more(tmp_path: Path) -> None:
    """The last bad step, the sixth, would be due to be saved."""
    workdir = tmp_path / "run"
    assert train(workdir, "sources:poisoned_for_good", train__steps=8, train__max_skipped_steps=3) == 76
    assert [line["skipped_steps"] for line in runs.lines(workdir)] == [0] * 3 + [1, 2, 3]
    assert runs.steps(workdir) == [3]
    assert all(np.isfinite(value).all() for value in runs.tensors(workdir).values())
    receipt = runs.receipt(workdir)
    assert receipt["exit_code"] == 76 and "3 steps" in receipt["reason"]


@pytest.mark.parametrize(
    ("made", "settings", "steps"),
    [
        ("nan_embedding", {"train__max_skipped_steps": 100}, 2),  # the loss is NaN from step 2 on
        ("nan_embedding", {"train__steps": 1}, 1),  # only the last save sees it
        ("nan_unused_row", {"checkpoint__every_steps": 2}, 4),  # the loss stays finite
    ],
)
def test_weights_that_are_not_finite_are_a_divergence(tmp_path: Path, made: str, settings: dict[str, Any], steps: int) -> None:
    """The run does not wait for further skipped steps, repeats no save, and names the weights, not the disk."""
    workdir = tmp_path / "run"
    assert train(workdir, "synthetic", optimizer__name=f"helpers:{made}", **settings) == 76
    assert runs.lines(workdir)[-1]["step"] == steps and runs.steps(workdir) == []
    log = (workdir / "log.txt").read_text()
    assert "params.embed.embedding" in log and "optimizer.lr" in log
    assert not {"space", "intact"} & {*re.findall(r"\w+", log)} and log.count("is not saved") <= 2
    assert runs.receipt(workdir)["exit_code"] == 76


def test_a_run_without_an_applied_step_does_not_blame_the_learning_rate(tmp_path: Path) -> None:
    """A scale of scores overflows in the first step."""
    wrong = {"model__attn_logit_scale": 1e30, "model__init_std": 1000.0, "train__max_skipped_steps": 2}
    assert train(tmp_path / "run", "synthetic", **wrong) == 76
    assert "optimizer.lr is not the cause" in runs.receipt(tmp_path / "run")["reason"]


def test_a_run_of_skipped_steps_alone_is_a_divergence(tmp_path: Path) -> None:
    """Although it has fewer than train.max_skipped_steps. Nothing is saved, so the same command would start over."""
    assert train(tmp_path / "run", "synthetic", loss__z_loss=1e25, train__steps=2) == 76
    assert runs.steps(tmp_path / "run") == []


def test_the_numbers_nearest_to_a_limit_of_float32_train(tmp_path: Path) -> None:
    """They are those that the messages name. Of each run, all steps are applied."""
    edge = {"optimizer__beta1": 0.9999999, "optimizer__beta2": 0.9999999, "optimizer__eps": 1e-30, "model__norm_eps": 1e-20}
    assert train(tmp_path / "run", "synthetic", optimizer__momentum=0.9999999, **edge) == 0
    assert [line["skipped_steps"] for line in runs.lines(tmp_path / "run")] == [0] * 6


def test_a_rollback_passes_over_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes back to step 3, reads batch 3 again, then skips batches 4 to 6. A run that stops afterwards goes on in the
    same way.
    """
    for i, name in enumerate("ab"):
        with TokenWriter(tmp_path / f"{name}.tok", tokenizer.tokenizer_info(tokenizer.ByteTokenizer())) as writer:
            for _ in range(100):
                writer.write([i] * 99, 99)
                writer.end_document()
    batch = Batches.batch

    def poisoned(self: Batches, step: int, rows: Any = None) -> dict[str, np.ndarray]:
        found = batch(self, step, rows)
        if step in (4, 5, 6):
            found["weights"] = found["weights"] * np.float32("nan")
        return found

    monkeypatch.setattr(Batches, "batch", poisoned)
    how = ROLLBACK | {
        "data__max_segments": 4,  # as with synthetic data, for which the step is compiled already
    }
    source = f"{tmp_path}/a.tok=0.75,{tmp_path}/b.tok=0.25"
    for name, parts in (("whole", (11,)), ("resumed", (7, 11))):
        workdir = tmp_path / name
        for steps in parts:
            assert train(workdir, source, train__steps=steps, **how) == 0
        lines = [line for line in runs.lines(workdir) if line["kind"] == "train"]
        assert [line["step"] for line in lines] == list(range(1, 12)), "metrics are rewound"
        read = [1, 2, 3, 4, *range(8, 15)]  # the number of batches read by each step, with the skipped ones
        assert [line["tokens"] for line in lines] == [TOKENS * batches for batches in read]
        [passed] = json.loads((workdir / "checkpoints/skipped_data.json").read_text())["skipped"]
        assert passed["tokens"] == [4 * TOKENS, 7 * TOKENS] and passed["back_to"] == 3
        history = open_history(workdir)
        batches = open_batches(source, seq_len=32, global_batch=8, max_segments=4)
        want = [np.concatenate([batch(batches, k)["tokens"] for k in numbers]) for numbers in ([3], [7], [4, 5, 6])]
        [skipped] = history.skipped
        passed_over = history.rows(history.stretch_of(5), skipped.rows)
        for rows, tokens_RT in zip((history.step(4), history.step(5), passed_over), want, strict=True):
            for row, tokens_T in zip(rows, tokens_RT, strict=True):
                parts = [history.file(row.source).tokens[first:last] for _, first, last in row.spans]
                assert np.concatenate(parts).tolist() == tokens_T.tolist()
        assert (skipped.first, skipped.last, skipped.back_to) == (5, 7, 3)
    assert same(runs.tensors(tmp_path / "resumed", 11), runs.tensors(tmp_path / "whole", 11))
    data, other = (json.loads((tmp_path / n / "checkpoints/11/meta.json").read_text())["data"] for n in ("whole", "resumed"))
    assert data["mixture"] == other["mixture"]


def test_rollbacks_that_do_not_help_end_the_run(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "sources:poisoned_for_good", **ROLLBACK, train__steps=8) == 76
    passed = json.loads((tmp_path / "run/checkpoints/skipped_data.json").read_text())["skipped"]
    assert [skip["back_to"] for skip in passed] == [3, 3, 3]
    nothing = ROLLBACK | {"train__steps": 8, "checkpoint__every_steps": 0}  # no checkpoint to go back to
    assert train(tmp_path / "nothing", "sources:poisoned_for_good", **nothing) == 76
