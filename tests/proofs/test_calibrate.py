"""Calibration: its loops on CPU devices in tiny sizes, and what XLA's GPU compiler makes of them."""

import io
import re

import jax
import jax.numpy as jnp
import pytest
import rich.console

from jaxtrain.plan import calibrate, topology
from jaxtrain.plan import readings as made
from jaxtrain.plan.calibrate import TINY, Sizes, chain, looped
from jaxtrain.plan.readings import COLLECTIVES, CURVE, CalibrationError


@pytest.fixture(scope="module")
def readings():
    return calibrate.measure(jax.devices()[:4], TINY)


def test_everything_is_measured(readings):
    kinds = [r.kind for r in readings]
    assert kinds.count("gemm") == len(TINY.gemms) and kinds.count("host") == kinds.count(CURVE) == 2
    assert set(kinds) == {*made.UNITS}
    # Backward passes and small messages are differences, which noise can turn at this size.
    whole = [r for r in readings if "backward" not in r.kind and r.kind != CURVE]
    assert all(r.seconds > 0 and r.spread >= 0 for r in whole)


def test_work_is_counted_by_hand(readings):
    work = {(r.kind, r.what): r.work for r in readings}
    assert work["gemm", "64 x 32 x 48"] == 3 * 2 * 64 * 32 * 48
    assert work["memory", "2 x 1 MiB read, 1 written"] == 3 * 2**20
    assert work["host", "device to host"] == 2**20
    # Scores and their product with v, 2 FLOPs each, for half of 128 x 128 pairs, 4 heads of 16.
    forward = [r for r in readings if r.kind == "attention forward"]
    assert forward[0].work == 2 * 2 * 128 * 128 / 2 * 4 * 16
    # Of 1 MiB over 4 devices, a ring sends three quarters for each of gathering and reducing.
    sent = {r.kind: r.work for r in readings if r.kind in COLLECTIVES}
    assert sent == {"all-gather": 0.75 * 2**20, "reduce-scatter": 0.75 * 2**20, "all-reduce": 1.5 * 2**20}
    assert [(r.message, r.work) for r in readings if r.kind == CURVE] == [(2**14, 0.75 * 2**14), (2**16, 0.75 * 2**16)]


def test_cpu_is_measured_only_where_asked_and_never_stored(tmp_path, monkeypatch, readings):
    with pytest.raises(CalibrationError, match="finds none .its devices are cpu"):
        calibrate.run(tmp_path)
    monkeypatch.setattr(calibrate, "measure", lambda devices, sizes, say: readings if sizes is TINY else None)
    console = rich.console.Console(record=True, width=160, file=io.StringIO())
    assert calibrate.run(tmp_path, console=console, on_cpu=True) is None
    text = console.export_text()
    assert "nothing is stored" in text and CURVE in text
    assert not list(tmp_path.iterdir())


def test_a_loop_does_its_rounds():
    assert int(looped(lambda c, s: s + c, 7)(jnp.int32(3), jnp.int32(1))) == 22


def test_a_round_waits_for_all_of_the_last():
    x = jnp.arange(6.0).reshape(2, 3)

    def corner(a, b):
        return chain(x, a * jnp.ones((4,)), b * jnp.ones((2, 2)))[0, 0]

    assert jnp.array_equal(chain(x, jnp.zeros(4)).ravel()[1:], x.ravel()[1:])
    assert corner(0.1, 0.2) != corner(0.3, 0.2) != corner(0.3, 0.5)
    assert jnp.isfinite(corner(1e30, 1e30))


@pytest.fixture
def for_h200(monkeypatch):
    """Instead of being timed, programs are compiled for a described H200; their HLO is kept."""
    (device,) = topology.devices(topology.parse("h200:1"))
    where = jax.sharding.SingleDeviceSharding(device)

    def described(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    kept: list[str] = []

    def compiled(run, *args, sizes):
        kept.append(run.lower(*jax.tree.map(described, args)).compile().as_text())
        return [1.0]

    monkeypatch.setattr(calibrate, "timed", compiled)
    monkeypatch.setattr(calibrate, "normal", lambda seed, shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype))
    return device, kept


def test_the_gpu_compiler_leaves_every_product_in_the_loop(for_h200):
    """In the sizes that are measured on a GPU: nothing is hoisted, merged, or cut down to the element that is used."""
    _, kept = for_h200
    calibrate.gemm((8192, 4096, 14336), 1, Sizes())
    (text,) = kept
    made = re.findall(r"= \(bf16\[(\d+,\d+)\]\S* .*custom-call\(.*__cublas.*while/body", text)
    assert sorted(made) == ["4096,14336", "8192,14336", "8192,4096"]
    rounds = -(-100e12 // (3 * 2 * 8192 * 4096 * 14336))
    assert f'"known_trip_count":{{"n":"{int(rounds)}"}}' in text


@pytest.mark.parametrize("packed", [False, True])
def test_the_gpu_compiler_leaves_attention_alone_in_the_loop(for_h200, packed):
    """cuDNN's kernel, and nothing that moves a whole array beside it."""
    device, kept = for_h200
    calibrate.attention_pair(device, packed, Sizes())
    ahead, both = kept
    body = [line for line in both.splitlines() if "while/body" in line and "= " in line]
    assert ahead.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert both.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert both.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1
    moves = [line for line in body if re.search(r"bf16\[1,8192,\d+,128\]\S* (copy|fusion|transpose)\(", line)]
    assert len(moves) == 1 and "dynamic_update_slice" in moves[0], moves
