"""Moments in 8-bit blocks: the published code maps and errors, what goes into blocks, training, checkpoints in either form."""

import contextlib
from pathlib import Path
from typing import Any

import helpers
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import config, state, validate
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import RunConfig
from jaxtrain.hardware import Devices
from jaxtrain.moments import block, block_axis
from jaxtrain.optimizer import stored_moments
from jaxtrain.quantized import Blocks, code_map, decode, encode, scales_of
from jaxtrain.sharding import LayoutError
from jaxtrain.start import decide_start, initial_state
from jaxtrain.step import place_batch

INT8 = {"dtypes.m": "int8", "dtypes.v": "int8"}
# Heads of 16, so that attention has blocks too; wk and wv are below 4096 elements a layer.
SIZES = {"model.num_layers": 2, "model.head_dim": 16, "model.d_ff": 512, "data.seq_len": 32}
SPLIT = {"mesh.fsdp": 2, "mesh.tensor": 2}


def in_blocks(x: Any, signed: bool, axis: int = -1) -> Blocks:
    x = jnp.asarray(x, jnp.float32)
    axis %= x.ndim
    return encode(x, scales_of(x, axis), axis, signed)


# ---- The quantiser


@pytest.mark.parametrize("signed", [True, False])
def test_code_map_is_the_published_one(signed):
    """Written out from the bits: sign or nothing, zeros that count decades, a one, a linear fraction."""
    values = [0.0, 1.0]
    for byte in range(256):
        bits = f"{byte:08b}"[1:] if signed else f"{byte:08b}"  # unsigned: the sign's bit is one more of the fraction
        zeros = len(bits) - len(bits.lstrip("0"))
        fraction = bits[zeros + 1 :]
        if zeros > 6:  # unsigned: what is left of the zero decade
            continue
        at = (int(fraction, 2) if fraction else 0) + 0.5
        magnitude = 10.0**-zeros * (0.1 + 0.9 * at / 2 ** len(fraction))
        values.append(-magnitude if signed and byte >= 128 else magnitude)
    np.testing.assert_allclose(code_map(signed), sorted(values), rtol=1e-12)
    assert len(values) == 256
    assert code_map(signed)[127 if signed else 0] == 0


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_nearest_values(signed):
    rng = np.random.default_rng(0)
    x = np.where(rng.random((64, 255)) < 0.5, rng.random((64, 255)), 10 ** rng.uniform(-8, 0, (64, 255)))
    x = x * rng.choice([-1, 1], x.shape) if signed else x
    x = np.concatenate([x, np.ones((64, 1))], 1).astype(np.float32)  # each block's scale is 1
    values = code_map(signed)
    found = values[np.asarray(in_blocks(x, signed).codes)]
    nearest = np.abs(x[..., None].astype(float) - values).min(-1)
    off = np.abs(found - x)
    rounded_up = (x > 0) & (x < values[1] / 2) if not signed else np.zeros(x.shape, bool)
    np.testing.assert_allclose(off[~rounded_up], nearest[~rounded_up], atol=1e-7)
    assert (found[rounded_up] == values[1]).all()
    np.testing.assert_allclose(decode(in_blocks(x, signed), signed), found, rtol=1e-6)


def test_error_of_normal_data_is_as_published():
    """What bitsandbytes asks of its own kernels (tests/test_functional.py): mean absolute error of N(0, 1) below 0.011 and mean
    relative error below 0.018; of uniform data in [0, 1], 0.0035 and 0.015."""
    rng = np.random.default_rng(0)
    for x, absolute, relative in ((rng.standard_normal((1024, 256)), 0.011, 0.018), (rng.random((1024, 256)), 0.0035, 0.015)):
        error = np.abs(np.asarray(decode(in_blocks(x, True), True)) - x)
        assert absolute / 3 < error.mean() < absolute
        assert relative / 3 < (error / np.abs(x + 1e-8)).mean() < relative
        assert (error <= np.abs(x).max(-1, keepdims=True) * 0.9 / 64 / 2 + 1e-6).all()  # half a part of the largest decade


def test_blocks_of_zeros_and_of_what_is_no_number():
    zeros = in_blocks(np.zeros((2, 256)), True)
    assert (np.asarray(decode(zeros, True)) == 0).all() and (np.asarray(zeros.codes) == 127).all()
    bad = np.ones((2, 256), np.float32)
    bad[0, 3] = np.nan
    found = np.asarray(decode(in_blocks(bad, True), True))
    assert np.isnan(found[0]).all() and (found[1] == 1).all()


def test_what_goes_into_blocks():
    assert [block(n) for n in (256, 28672, 128, 96, 11008, 80, 24, 1)] == [256, 256, 128, 32, 256, 16, 0, 0]
    assert block_axis(("layers", "embed", "mlp"), (80, 8192, 28672)) == 2
    assert block_axis(("layers", "mlp", "embed"), (80, 28672, 8192)) == 1  # fsdp splits embed
    assert block_axis(("layers", "embed", "heads", "head_dim"), (80, 8192, 64, 128)) == 3
    assert block_axis(("layers", "heads", "head_dim", "embed"), (80, 64, 128, 8192)) == 2
    assert block_axis(("layers", "embed", "heads", "head_dim"), (2, 64, 32, 8)) == 2  # heads, where a head is too narrow
    assert block_axis(("vocab", "embed"), (128256, 8192)) is None
    assert block_axis(("layers", "embed"), (80, 8192)) is None
    assert block_axis(("layers", "embed", "mlp"), (80, 32, 96)) is None  # 3072 elements a layer


# ---- The optimizer


def toy_steps(m: str, v: str, grads: list[np.ndarray], eps: float = 1e-8) -> list[np.ndarray]:
    """Updates of one (16, 256) matrix."""
    tx = stored_moments(m, v, {"w": ("embed", "mlp")}, 0.9, 0.95, eps)
    p = {"w": jnp.zeros((16, 256))}
    s, found = tx.init(p), []
    for g in grads:
        updated: Any = tx.update({"w": jnp.asarray(g, jnp.float32)}, s, p)
        found.append(np.asarray(updated[0]["w"]))
        s = updated[1]
    return found


def test_updates_follow_those_of_float32():
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal((16, 256)) * 10 ** rng.uniform(-2, 0, (16, 1)) for _ in range(20)]
    exact, found = toy_steps("f32", "f32", grads), toy_steps("int8", "int8", grads)
    np.testing.assert_allclose(found[0], exact[0], rtol=1e-6)  # the first step reads moments that are exactly 0
    off = np.abs(found[-1] - exact[-1]).mean() / np.abs(exact[-1]).mean()
    assert 0 < off < 0.05


def test_a_second_moment_never_vanishes_before_the_first():
    """Small gradients beside a large one that then cease: with v rounded to 0, as nearest would have it, m / eps is left."""
    first = np.full((16, 256), 1e-4)
    first[:, 0] = 1.0
    updates = toy_steps("int8", "int8", [first, np.zeros((16, 256))])
    nearest = np.abs(1e-8 - code_map(False)).argmin()  # of v's block, 1e-8 of the largest
    assert nearest == 0  # what this test is about
    assert np.abs(updates[1]).max() < 1.0
    assert (np.abs(updates[1][:, 1:]) > 0).all()  # the first moment is still there


def test_state_is_split_like_the_parameters():
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


@pytest.fixture(scope="module")
def losses() -> dict[str, np.ndarray]:
    return {m: helpers.train(helpers.tiny(SIZES | {"dtypes.m": m, "dtypes.v": m}), 20).loss for m in ("f32", "int8")}


def test_training_tracks_float32(losses):
    """The long version is benchmarks/numerics.py; its table is in docs/memory.md."""
    assert losses["f32"][0] == losses["int8"][0]
    assert losses["int8"][-1] < losses["int8"][0] - 0.05
    np.testing.assert_allclose(losses["int8"], losses["f32"], rtol=0.01)
    assert (losses["int8"][2:] != losses["f32"][2:]).all()


def test_layouts_agree(losses):
    """Blocks are the same on any mesh: what differs is the order of sums."""
    found = helpers.first_steps(helpers.tiny(SIZES | INT8 | SPLIT), 3)
    np.testing.assert_allclose(found.loss, losses["int8"][:3], rtol=1e-4)


# ---- Checkpoints


def trained(run: RunConfig, steps: int = 2) -> Any:
    made, current = helpers.program(run), helpers.fresh_state(run)
    for i in range(steps):
        batch = place_batch(helpers.host_batch(run, i), made.batch, made.context)
        current, _ = helpers.train_step(run)(current, batch)
    return current


def resumed(run: RunConfig, folder: Path) -> Any:
    """The state that a resumed run begins with."""
    checkpoints, program = Checkpoints(folder), helpers.program(run)
    start = decide_start(run, checkpoints, program)
    assert start.resumed
    return initial_state(run, program, start, checkpoints, print)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint of an int8 run on one device, and its tensors."""
    run, folder = helpers.tiny(SIZES | INT8), tmp_path_factory.mktemp("int8")
    return folder, save(run, trained(run), folder)


def save(run: RunConfig, current: Any, folder: Path) -> dict[str, np.ndarray]:
    tensors = state.to_tensors(current)
    checkpoints = Checkpoints(folder)
    meta = {"config": config.to_dict(run), "data": {"tokens": 0, "fingerprint": {}}}
    checkpoints.save(int(current.step), tensors, meta)
    checkpoints.close()
    return {name: np.asarray(x) for name, x in tensors.items()}


def test_restored_on_another_mesh_bit_for_bit(saved):
    folder, tensors = saved
    found = state.to_tensors(resumed(helpers.tiny(SIZES | INT8 | SPLIT), folder))
    assert found.keys() == tensors.keys()
    assert tensors["optimizer.mu.layers.1.mlp.gate.codes"].std() > 0
    for name, x in tensors.items():
        np.testing.assert_array_equal(np.asarray(found[name]), x, err_msg=name)


ALLOWED = {"checkpoint.allow_change": "dtypes.m,dtypes.v"}


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
    np.testing.assert_array_equal(back[f"optimizer.nu.{name}.codes"], blocks.codes)  # no moment is negative, so none moves


def test_change_must_be_allowed(saved):
    with pytest.raises(ValueError, match="dtypes.m"):
        resumed(helpers.tiny(SIZES), saved[0])


# ---- What is refused


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.d_ff": 100, "model.head_dim": 16}, "no dimension of mlp.gate"),
        ({"model.d_ff": 96, "model.d_model": 256, "mesh.tensor": 4, "model.head_dim": 32}, "would lie on two devices"),
        ({"model.d_ff": 16, "model.d_model": 16, "model.head_dim": 2}, "no matrix of the layers"),
    ],
)
def test_blocks_that_cannot_be(changes, said):
    run = helpers.tiny(INT8 | changes)
    problems = validate.validate_step(run, Devices("cpu", "cpu", changes.get("mesh.tensor", 1), 8.0, "test"))
    with pytest.raises(LayoutError, match="block") if "two devices" in said else contextlib.nullcontext():
        helpers.program(run)
    assert [p.key for p in problems] == ["dtypes.m"] and said in problems[0].rule
