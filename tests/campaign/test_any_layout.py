"""Checkpoints of four layouts restore on all eight LAYOUTS: parameters and moments are equal, bit for bit."""

from pathlib import Path

import helpers
import numpy as np
import pytest

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.train.batch import place_batch
from jaxtrain.train.state import TrainState, abstract_tensors, from_tensors, to_tensors

# Together they have every ZeRO stage, mesh axis, context method and token order, and both sharded and copied key/value heads.
LAYOUTS = {
    "ring": {"mesh.fsdp": 2, "mesh.seq": 4},
    "Ulysses and ring, stage 1": {
        "mesh.seq": 8,
        "parallel.context": "ulysses",
        "attention.ulysses": 2,
        "sharding.zero": 1,
    },
    "gathered keys, weights held": {
        "mesh.tensor": 2,
        "mesh.seq": 4,
        "parallel.context": "gather",
        "sharding.gather": "step",
    },
    "tensor wider than heads": {"mesh.tensor": 8},
    "replicas": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "sharding.zero": 2},
    "nothing split": {"mesh.fsdp": 8, "sharding.zero": 0},
    "stages": {"mesh.stage": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "train.grad_accum": 2},
    "one device": {},
}
MODEL = {"model.num_layers": 3, "model.qkv_bias": True, "model.qk_norm": True}


def run_of(name: str):
    return helpers.tiny({**MODEL, **LAYOUTS[name]})


def stepped(run) -> TrainState:
    """Return the state after two steps. Its moments are not zero."""
    made, state = helpers.program(run), helpers.fresh_state(run)
    for i in range(2):
        batch = place_batch(helpers.host_batch(run, i), made.batch, made.context)
        state, _ = helpers.train_step(run)(state, batch)
    return state


@pytest.mark.parametrize("written", ["ring", "stages", "tensor wider than heads", "nothing split"])
def test_restores_on_every_other_layout(written: str, tmp_path: Path):
    state = stepped(run_of(written))
    kept = {name: np.asarray(x) for name, x in to_tensors(state).items()}
    assert any(".mu." in name for name in kept)
    assert all(np.abs(x).max() > 0 for name, x in kept.items() if ".mu." in name)
    store = Checkpoints(tmp_path)
    store.save(2, to_tensors(state), {})
    store.wait()
    for name in LAYOUTS:
        abstract = helpers.program(run_of(name)).state
        restored = from_tensors(abstract, store.restore(2, abstract_tensors(abstract)))
        again = to_tensors(restored)
        assert again.keys() == kept.keys(), name
        for tensor, x in kept.items():
            np.testing.assert_array_equal(np.asarray(again[tensor]), x, err_msg=f"{name}: {tensor}")


def test_a_run_goes_on_from_another_order():
    """After two steps on a ring, the third has the same loss on three layouts with different token orders, within 1e-5."""
    state = stepped(run_of("ring"))
    losses = {}
    for name in ("ring", "one device", "Ulysses and ring, stage 1"):
        run = run_of(name)
        made = helpers.program(run)
        moved = from_tensors(made.state, {k: np.asarray(x) for k, x in to_tensors(state).items()})
        batch = place_batch(helpers.host_batch(run, 2), made.batch, made.context)
        losses[name] = float(helpers.train_step(run)(moved, batch)[1]["loss"])
    assert losses["one device"] == pytest.approx(losses["ring"], rel=1e-5)
    assert losses["Ulysses and ring, stage 1"] == pytest.approx(losses["ring"], rel=1e-5)
