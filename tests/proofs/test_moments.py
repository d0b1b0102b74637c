"""Moments in 8-bit blocks: training, and checkpoints of int8 or float32 moments that resume as either type on any mesh."""

from pathlib import Path

import helpers
import jax.numpy as jnp
import numpy as np
import pytest
from states import ALLOWED, INT8, SIZES, assert_same, resumed, save, trained

from jaxtrain.optim.quantized import Blocks, decode
from jaxtrain.train import state

SPLIT = {"mesh.fsdp": 2, "mesh.tensor": 2}


def test_moments_are_split_like_the_parameters():
    run = helpers.tiny(SIZES | INT8 | SPLIT)
    adam = helpers.program(run).state.optimizer[0]
    for moment in (adam.mu, adam.nu):
        gate, wq = moment["layers"]["mlp"]["gate"], moment["layers"]["attention"]["wq"]
        param = helpers.program(run).state.params["layers"]["mlp"]["gate"]
        assert gate.codes.dtype == jnp.uint8 and gate.codes.shape == param.shape
        assert gate.codes.sharding.spec == gate.scales.sharding.spec == param.sharding.spec
        assert gate.scales.shape == (2, 64, 2)
        assert isinstance(wq, Blocks) and wq.scales.shape == (2, 64, 8, 1)
        for kept in (moment["head"], moment["embed"]["embedding"], moment["layers"]["mlp_norm"]["scale"]):
            assert kept.dtype == jnp.float32


def test_training_tracks_float32():
    """Over 20 steps, losses with int8 moments stay within 1% of those with float32. docs/evidence/moments.md has longer runs of
    benchmarks/numerics.py.
    """
    wide, narrow = (helpers.train(helpers.tiny(SIZES | {"dtypes.m": m, "dtypes.v": m}), 20).loss for m in ("f32", "int8"))
    assert wide[0] == narrow[0]
    assert narrow[-1] < narrow[0] - 0.05
    np.testing.assert_allclose(narrow, wide, rtol=0.01)
    assert (narrow[2:] != wide[2:]).all()


@pytest.mark.more
def test_layouts_agree():
    """Losses on a mesh are those of one device. Blocks are the same on any mesh, so that only the order of sums differs."""
    found = helpers.first_steps(helpers.tiny(SIZES | INT8 | SPLIT), 3)
    np.testing.assert_allclose(found.loss, helpers.train(helpers.tiny(SIZES | INT8), 3).loss, rtol=1e-4)


# ---- Checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """Return the folder with a checkpoint of an int8 run on one device, and the checkpoint's tensors."""
    run, folder = helpers.tiny(SIZES | INT8), tmp_path_factory.mktemp("int8")
    return folder, save(run, trained(run), folder)


def test_moments_are_restored_on_another_mesh_bit_for_bit(saved):
    folder, tensors = saved
    assert tensors["optimizer.mu.layers.1.mlp.gate.codes"].std() > 0
    assert_same(state.to_tensors(resumed(helpers.tiny(SIZES | INT8 | SPLIT), folder)), tensors)


def test_from_blocks_to_float32_and_back(saved, tmp_path):
    folder, tensors = saved
    wide = helpers.tiny(SIZES | ALLOWED)
    current = resumed(wide, folder)
    name = "layers.1.mlp.gate"
    blocks = Blocks(tensors[f"optimizer.nu.{name}.codes"], tensors[f"optimizer.nu.{name}.scales"])
    np.testing.assert_array_equal(current.optimizer[0].nu["layers"]["mlp"]["gate"][1], decode(blocks, False))
    exact = save(wide, current, tmp_path)
    back = {k: np.asarray(v) for k, v in state.to_tensors(resumed(helpers.tiny(SIZES | INT8 | ALLOWED), tmp_path)).items()}
    assert back.keys() == tensors.keys() != exact.keys()
    # no second moment is negative, so none changes
    np.testing.assert_array_equal(back[f"optimizer.nu.{name}.codes"], blocks.codes)


def test_change_must_be_allowed(saved):
    with pytest.raises(ValueError, match="dtypes.m"):
        resumed(helpers.tiny(SIZES), saved[0])
