"""Calibration: its loops on CPU devices in tiny sizes, and the programs that XLA's GPU compiler makes of them."""

import dataclasses
import re
import statistics
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.bench import microbenchmarks as micro
from jaxtrain.bench.microbenchmarks import COLLECTIVES, CURVE, TINY, Sizes, chain, looped
from jaxtrain.kernels.attention import Hardware
from jaxtrain.plan import calibrate, topology
from jaxtrain.plan.calibrate import CalibrationError
from jaxtrain.plan.program.op_cost import ATTENTION_BACKWARD


@pytest.fixture(scope="module")
def readings():
    return calibrate.measure(jax.devices()[:4], TINY)


def test_everything_is_measured(readings):
    kinds = [r.kind for r in readings]
    assert kinds.count("gemm") == len(TINY.gemms) and kinds.count("host") == kinds.count(CURVE) == 2
    assert set(kinds) == {kind for of_rate, _, _ in calibrate.MEASURED.values() for kind in of_rate}
    # Times of backward passes and of small messages are differences. At this size noise can make them negative.
    whole = [r for r in readings if "backward" not in r.kind and r.kind != CURVE]
    assert all(r.seconds > 0 and r.spread >= 0 for r in whole)


def test_work_is_counted_by_hand(readings):
    work = {(r.kind, r.what): r.work for r in readings}
    assert work["gemm", "64 x 32 x 48"] == 3 * 2 * 64 * 32 * 48
    assert work["memory", "2 x 1 MiB read, 1 written"] == 3 * 2**20
    assert work["host", "device to host"] == 2**20
    # Scores and their matmul with v: 2 FLOPs each, for half of 128 x 128 pairs, in 4 heads of 16.
    forward = [r for r in readings if r.kind == "attention forward"]
    assert forward[0].work == 2 * 2 * 128 * 128 / 2 * 4 * 16
    assert micro.ATTENTION_BACKWARD == ATTENTION_BACKWARD  # the factor that plans use
    # A ring of 4 devices sends three quarters of 1 MiB in an all-gather and in a reduce-scatter.
    sent = {r.kind: r.work for r in readings if r.kind in COLLECTIVES}
    assert sent == {"all-gather": 0.75 * 2**20, "reduce-scatter": 0.75 * 2**20, "all-reduce": 1.5 * 2**20}
    assert [(r.message, r.work) for r in readings if r.kind == CURVE] == [(2**14, 0.75 * 2**14), (2**16, 0.75 * 2**16)]


def test_without_a_gpu_nothing_is_measured_or_stored(tmp_path):
    with pytest.raises(CalibrationError, match="finds none .its devices are cpu"):
        calibrate.run(tmp_path)
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
def for_h200s(monkeypatch):
    """Compile programs ahead of time for eight H200s, and time none. Returns the devices and the list of HLO texts."""
    devices = topology.devices(topology.parse("h200:8"))
    kept: list[str] = []

    def described(x, sharding):
        here = isinstance(x, jax.Array) or x.sharding is None  # arrays that are not on the H200s yet
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if here else x.sharding)

    def compiled(run, *args, devices=devices[:1], sizes):
        where = jax.sharding.SingleDeviceSharding(devices[0])
        kept.append(run.lower(*jax.tree.map(lambda x: described(x, where), args)).compile().as_text())
        return [[1.0]] * len(devices)

    def on_each(seed, shape, dtype, devices):
        whole = (len(devices) * shape[0], *shape[1:])
        return jax.ShapeDtypeStruct(whole, dtype, sharding=micro.sharded_over(devices))

    def normal(seed, shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    monkeypatch.setattr(micro, "timed_by_device", compiled)
    monkeypatch.setattr(micro, "timed", lambda *args, sizes: compiled(*args, sizes=sizes)[0])
    monkeypatch.setattr(micro, "normal_on_each", on_each)
    monkeypatch.setattr(micro, "normal", normal)
    return devices, kept


@pytest.mark.parametrize("count", [1, 8])
def test_the_gpu_compiler_leaves_every_product_in_the_loop(for_h200s, count):
    """In the sizes measured on GPUs, no matmul is hoisted, merged or cut down to the element that is read. The program has no
    collective.
    """
    devices, kept = for_h200s
    assert len(micro.gemm((8192, 4096, 14336), devices[:count], Sizes())) == count
    (text,) = kept
    made = re.findall(r"= \(bf16\[(\d+,\d+)\]\S* .*custom-call\(.*__cublas.*while/body", text)
    assert sorted(made) == ["4096,14336", "8192,14336", "8192,4096"]
    rounds = -(-100e12 // (3 * 2 * 8192 * 4096 * 14336))
    assert f'"known_trip_count":{{"n":"{int(rounds)}"}}' in text
    assert not re.search(r"all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all", text)


def test_the_gpu_compiler_leaves_every_fp8_product_in_the_loop(for_h200s):
    devices, kept = for_h200s
    micro.fp8_gemm((8192, 4096, 14336), devices[:1], Sizes())
    made = re.findall(r"= \(?bf16\[(\d+,\d+)\]\S* .*custom_call_target=\"__cublas\$lt\$matmul\$f8\".*while/body", kept[0])
    assert sorted(made) == ["4096,14336", "8192,14336", "8192,4096"]


@pytest.mark.parametrize("packed", [False, True])
def test_the_gpu_compiler_leaves_attention_alone_in_the_loop(for_h200s, packed):
    """The loop has cuDNN's forward and backward kernels, and only one other operation that moves a whole array."""
    (device, *_), kept = for_h200s
    micro.attention_pair(device, Hardware.of(device), packed, Sizes())
    ahead, both = kept
    body = [line for line in both.splitlines() if "while/body" in line and "= " in line]
    assert ahead.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert both.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert both.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1
    moves = [line for line in body if re.search(r"bf16\[1,8192,\d+,128\]\S* (copy|fusion|transpose)\(", line)]
    assert len(moves) == 1 and "dynamic_update_slice" in moves[0], moves


def test_the_loop_multiplies():
    devices, seen = jax.devices()[:2], []
    w_KN, x_MK = (micro.normal_on_each(seed, (16, 16), jnp.bfloat16, devices) for seed in (0, 1))
    assert not jnp.array_equal(w_KN[:16], w_KN[16:])
    w, x = (m[16:].astype(jnp.float32) for m in (w_KN, x_MK))  # the second device's arrays
    y = (x @ w).astype(jnp.bfloat16).astype(jnp.float32)
    want = jnp.tanh((y @ w.T)[0, 0] + (x.T @ y)[0, 0])

    def run(run, *args, devices, sizes):
        seen.append(run(*args))
        return [[1.0]] * len(devices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro, "timed_by_device", run)
        micro.gemm((16, 16, 16), devices, dataclasses.replace(TINY, gemm_tflop=1e-9))
    assert float(seen[0][16, 0]) == pytest.approx(float(want), rel=0.05, abs=0.05)


def test_a_slow_gpu_makes_fewer_rounds(monkeypatch):
    """The number of rounds follows from a probe of 10 rounds: at 0.02 s each, 15 rounds fit in 0.3 s."""
    now = [0.0]
    monkeypatch.setattr(micro, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def program(seconds):
        return lambda constants, state: now.__setitem__(0, now[0] + seconds)

    for seconds, limit, rounds in ((0.2, 0.3, 15), (0.2, 0.001, 1)):
        sizes = dataclasses.replace(TINY, gemm_s=limit, gemm_probe=10)
        assert micro.rounds_within(program(seconds), 0, 0, sizes) == rounds


def test_each_device_is_timed_by_itself(monkeypatch):
    """One device becomes slow after the first timed round. Only that device's median time shows it."""
    devices, calls, thread = ["a", "b", "c"], [], threading.local()
    monkeypatch.setattr(micro, "time", SimpleNamespace(perf_counter=lambda: getattr(thread, "now", 0.0)))
    monkeypatch.setattr(micro.jax, "block_until_ready", lambda x: x)

    def shard(device, seconds):
        return SimpleNamespace(device=device, data=SimpleNamespace(block_until_ready=lambda: setattr(thread, "now", seconds)))

    def run():
        calls.append(1)
        slow = {"a": 0.01, "b": 0.15 if len(calls) > 2 else 0.01, "c": 0.02}
        return SimpleNamespace(addressable_shards=[shard(d, slow[d]) for d in reversed(devices)])

    found = micro.timed_by_device(run, devices=devices, sizes=dataclasses.replace(TINY, repeats=5))
    assert [statistics.median(each) for each in found] == [0.01, 0.15, 0.02] and len(calls) == 1 + 5
