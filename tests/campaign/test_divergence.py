"""NaN in a batch, a gradient and a parameter, and a loss that jumps: each policy does what it says, and a replay finds it."""

import json
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import runs
from faults import Faults, Figures, same

# What goes wrong does so where the tokens of a batch begin with MARK, or at a step of the optimizer.
OWN = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtrain.data import pipeline
from jaxtrain.loss import cross_entropy

MARK = 250


class Source:
    synthetic = False

    def __init__(self, batches, marked, poisoned=(), rows=slice(None)):
        self.batches, self.marked, self.poisoned, self.rows = batches, marked, poisoned, rows

    def __getattr__(self, name):
        return getattr(self.batches, name)

    def batch(self, step, rows=None):
        batch = self.batches.batch(step, rows)
        batch["tokens"] = np.where(batch["tokens"] == MARK, 0, batch["tokens"])
        if step in self.marked:
            batch["tokens"][self.rows, 0] = MARK
        if step in self.poisoned:
            batch["weights"] = batch["weights"] * np.float32("nan")
        return batch


def opened(data, split, global_batch):
    return pipeline.open_source(data, "synthetic", split=split, global_batch=global_batch, data_dir="")


def clean(data, split, global_batch):
    return Source(opened(data, split, global_batch), ())


def poisoned(data, split, global_batch):
    return Source(opened(data, split, global_batch), (), (6,))


def poisoned_long(data, split, global_batch):
    return Source(opened(data, split, global_batch), (), (6, 7, 8))


def marked(data, split, global_batch):
    return Source(opened(data, split, global_batch), (41,))


def marked_early(data, split, global_batch):
    return Source(opened(data, split, global_batch), (6,))


def marked_behind(data, split, global_batch):
    return Source(opened(data, split, global_batch), (6,), rows=slice(global_batch // 2, None))


def is_marked(batch):
    return (batch["tokens"][:, 0] == MARK).any()


def spiky(hidden_BTD, head_VD, batch, spec):
    return cross_entropy(hidden_BTD, head_VD, batch, spec) * jnp.where(is_marked(batch), 100.0, 1.0)


@jax.custom_jvp
def spoiled(x, bad):
    return x


@spoiled.defjvp
def _(primals, tangents):
    x, bad = primals
    return x, tangents[0] * jnp.where(bad, jnp.nan, 1.0)


def bad_gradient(hidden_BTD, head_VD, batch, spec):
    return cross_entropy(spoiled(hidden_BTD, is_marked(batch)), head_VD, batch, spec)


def breaking(optimizer, dtypes, axes):
    # Sign descent that makes one weight of the second layer NaN after six updates.
    def init(params):
        return {"count": jnp.zeros((), jnp.int32)}

    def update(grads, state, params=None):
        made = jax.tree.map(jnp.sign, grads)
        gate = made["layers"]["mlp"]["gate"]
        made["layers"]["mlp"]["gate"] = gate.at[1, 0, 0].set(jnp.where(state["count"] == 5, jnp.nan, gate[1, 0, 0]))
        return made, {"count": state["count"] + 1}

    return optax.GradientTransformation(init, update)
"""

KINDS: dict[str, dict[str, Any]] = {
    "batch": {"data__source": "own:poisoned"},
    "gradient": {"data__source": "own:marked_early", "loss__name": "own:bad_gradient"},
    "gradient on stages": {
        "data__source": "own:marked_behind",
        "loss__name": "own:bad_gradient",
        "mesh__stage": 2,
        "train__grad_accum": 2,
    },
    "parameter": {"optimizer__name": "own:breaking", "optimizer__clip_norm": 0, "optimizer__lr": 1e-4, "train__max_skips": 3},
    "spike": {"data__source": "own:marked", "loss__name": "own:spiky", "train__spike": 8.0, "train__steps": 44},
}
# Where the replay is to find it.
FIRST = {
    "batch": "first: the batch: weights of tokens that are not finite, in (microbatch, row) [0, 0], [0, 1]",
    "gradient": "in the backward pass, after a loss that is finite",
    "gradient on stages": ", in microbatch 1",
    "parameter": "first: parameter params.layers.1.mlp.gate, 1 values that are not finite",
    "spike": "every value is finite: the largest gradients are those of params.",
}
STEP = {"batch": 7, "gradient": 7, "gradient on stages": 7, "parameter": 7, "spike": 42}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("divergence"), OWN, train__steps=12)


@pytest.mark.parametrize("kind", helpers.few(KINDS, "spike", "parameter"))
def test_a_bad_step_is_skipped_and_kept_for_a_replay(
    faults: Faults, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], figures: Figures
) -> None:
    workdir, step = tmp_path / "run", STEP[kind]
    code = faults.in_process(workdir, **KINDS[kind])
    said = capsys.readouterr().out
    if kind == "parameter":  # every step after it is bad: skipping does not help
        assert code == 76 and "3 steps in a row were skipped" in said
        assert runs.steps(workdir) == [5], "nothing is saved from the bad step on"
    else:
        assert code == 0, said
        assert [line["skipped_steps"] for line in runs.lines(workdir)][-1] == 1
        assert all(np.isfinite(x).all() for x in runs.tensors(workdir).values())
    assert f"step {step}: loss" in said and ("spike" if kind == "spike" else "not finite") in said
    assert f"Data: batch {step - 1} (windows " in said

    bundle = workdir / "replay" / f"step-{step}"
    record = json.loads((bundle / "bundle.json").read_text())
    assert record["step"] == step and record["state_digest"] and record["config"]["train"]["steps"]
    assert faults.replay(bundle) == 0
    said = capsys.readouterr().out
    assert "weights: the same bits as then" in said
    assert said.count("now: the same") == 2, said
    assert f"{'spike' if kind == 'spike' else 'not finite'} again" in said
    assert FIRST[kind] in said, said
    figures.add(f"divergence: {kind}", exit_code=code, replay=said.strip().splitlines()[-1])


def test_the_skipped_step_changes_nothing(faults: Faults, tmp_path: Path) -> None:
    """Up to the bad step as if nothing were wrong; its weights are those before it; and a resumed run agrees to the bit."""
    bad, good, cut = tmp_path / "bad", tmp_path / "good", tmp_path / "cut"
    assert faults.in_process(bad, **KINDS["batch"]) == 0
    assert faults.in_process(good, train__steps=6, data__source="own:clean") == 0
    for steps in (6, 7, 12):
        assert faults.in_process(cut, checkpoint__every_steps=0, **{**KINDS["batch"], "train__steps": steps}) == 0
    before, after = runs.tensors(cut, 6), runs.tensors(cut, 7)
    assert same(before, runs.tensors(good, 6))
    kept = {name for name in before if before[name].tobytes() == after[name].tobytes()}
    assert kept >= {name for name in before if name.startswith(("params.", "optimizer."))}
    assert int(after["guard.skipped"]) == 1 and int(after["step"]) == 7
    assert same(runs.tensors(cut, 12), runs.tensors(bad, 12))


def test_rollback_passes_over_the_data(faults: Faults, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Back to step 5, batch 5 once more, and then past batches 6 to 8: what a source without them would give."""
    workdir, how = tmp_path / "run", {"train__on_divergence": "rollback", "train__max_skips": 3}
    assert faults.in_process(workdir, **how, data__source="own:poisoned_long") == 0
    said = capsys.readouterr().out
    assert "3 steps in a row were skipped" in said and "back to step 5, and past batch 6" in said
    assert runs.steps(workdir)[-1] == 12
    lines = {line["step"]: line for line in runs.lines(workdir)}
    assert list(lines) == list(range(1, 13)), "metrics are rewound"
    assert lines[6]["tokens"] == 6 * 512 and lines[7]["tokens"] == 10 * 512, "batches 6, 7 and 8 are passed over"
    [skipped] = json.loads((workdir / "checkpoints/skipped_data.json").read_text())["skipped"]
    assert skipped["tokens"] == [6 * 512, 9 * 512] and skipped["back_to"] == 5
    # A run that is killed right after the rollback goes on in the same way.
    again = tmp_path / "again"
    assert faults.in_process(again, **how, data__source="own:poisoned_long", train__steps=9) == 0
    assert faults.in_process(again, **how, data__source="own:poisoned_long") == 0
    assert same(runs.tensors(again, 12), runs.tensors(workdir, 12))


def test_a_rollback_that_does_not_help_ends(faults: Faults, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = tmp_path / "run"
    assert faults.in_process(workdir, **KINDS["parameter"], train__on_divergence="rollback") == 76
    said = capsys.readouterr().out
    assert said.count("back to step 5, and past") == 3 and "after 3 rollbacks to step 5: it is not the data alone" in said
    nothing = tmp_path / "nothing"
    how = {"train__on_divergence": "rollback", "train__max_skips": 3, "checkpoint__every_steps": 0}
    assert faults.in_process(nothing, **how, data__source="own:poisoned_long") == 76
    assert "there is no checkpoint to go back to" in capsys.readouterr().out
