"""Train states after a few steps, their checkpoints, and the state from which a resumed run starts."""

from pathlib import Path
from typing import Any

import helpers
import numpy as np

from jaxtrain import config
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import RunConfig
from jaxtrain.train import state
from jaxtrain.train.batch import place_batch
from jaxtrain.train.initial_state import choose_start, initial_state

INT8 = {"dtypes.m": "int8", "dtypes.v": "int8"}
# Heads of 16 give attention's weights 8-bit blocks too. wk and wv have fewer than 4096 elements a layer.
SIZES = {"model.num_layers": 2, "model.head_dim": 16, "model.d_ff": 512, "data.seq_len": 32}
ALLOWED = {"checkpoint.allow_change": "dtypes.m,dtypes.v"}


def trained(run: RunConfig, steps: int = 2) -> Any:
    """Return the state after `steps` steps."""
    return stepped(run, helpers.fresh_state(run), range(steps))


def stepped(run: RunConfig, current: Any, steps: range) -> Any:
    """Take these steps from a state, whose buffers are donated, and return the new state."""
    made = helpers.program(run)
    for i in steps:
        batch = place_batch(helpers.host_batch(run, i), made.batch, made.context)
        current, _ = helpers.train_step(run)(current, batch)
    return current


def save(run: RunConfig, current: Any, folder: Path) -> dict[str, np.ndarray]:
    """Save a state, and return its tensors."""
    tensors = state.to_tensors(current)
    checkpoints = Checkpoints(folder)
    meta = {"config": config.to_dict(run), "data": {"tokens": 0, "fingerprint": {}}}
    checkpoints.save(int(current.step), tensors, meta)
    checkpoints.close()
    return {name: np.asarray(x) for name, x in tensors.items()}


def resumed(run: RunConfig, folder: Path) -> Any:
    """Return the state from which a resumed run starts."""
    checkpoints, program = Checkpoints(folder), helpers.program(run)
    start = choose_start(run, checkpoints, program)
    assert start.resumed
    return initial_state(run, program, start, checkpoints, print)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Check that two states have the same tensors with equal values."""
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(x), err_msg=name)
