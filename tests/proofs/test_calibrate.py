"""Calibration: its loops on CPU devices in tiny sizes, the programs that XLA's GPU compiler makes of them, how readings become
rates, and which rates a plan gets.
"""

import dataclasses
import datetime
import io
import re
import statistics
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import rich.console

from jaxtrain.data import loading
from jaxtrain.kernels import fp8
from jaxtrain.node import calibrate
from jaxtrain.node import measure as micro
from jaxtrain.node.calibrate import CURVE, CalibrationError, to_rates
from jaxtrain.node.measure import COLLECTIVES, TINY, Sizes, TimedWork, WorkReading, chain, time_calls, time_work
from jaxtrain.plan import rates, topology
from jaxtrain.plan.program.op_cost import ATTENTION_BACKWARD
from jaxtrain.step import compiler
from jaxtrain.step.program import build_program

SIZES = dataclasses.replace(TINY, gemms=TINY.gemms[:1], curve_mib=TINY.curve_mib[:1], attention=(1, 32, 2, 1, 16))


def test_everything_is_measured_and_counted_by_hand():
    readings = calibrate.measure_rates(jax.devices()[:4], SIZES)
    assert {r.work.kind for r in readings} == {CURVE, *(kind for kinds, _ in calibrate.MEASURED.values() for kind in kinds)}
    # Times of backward passes and of small messages are differences. At this size noise can make them negative.
    whole = [r for r in readings if "backward" not in r.work.kind and r.work.kind != CURVE]
    assert all(r.seconds > 0 and r.spread >= 0 for r in whole)
    work = {r.work.kind: r.work.amount for r in readings}
    assert work["gemm bf16"] == work["gemm fp8"] == 2 * 64 * 32 * 48  # of one of the three matmuls
    assert (work["memory"], work["host"]) == (3 * 2**20, 2**20)
    # Scores and their matmul with v: 2 FLOPs each, for half of 32 x 32 pairs, in 2 heads of 16.
    assert work["attention forward"] == 2 * 2 * 32 * 32 / 2 * 2 * 16
    assert work["attention backward"] == 2.5 * work["attention forward"]
    assert micro.ATTENTION_BACKWARD == ATTENTION_BACKWARD  # the factor that plans use
    # A ring of 4 devices sends three quarters of 1 MiB in an all-gather and in a reduce-scatter.
    sent = {"all-gather": 0.75 * 2**20, "reduce-scatter": 0.75 * 2**20, "all-reduce": 1.5 * 2**20}
    assert {kind: work[kind] for kind in COLLECTIVES} == sent
    assert [(r.work.message, r.work.bytes) for r in readings if r.work.kind == CURVE] == [(2**14, 0.75 * 2**14)]


def test_without_a_gpu_nothing_is_measured_or_stored(tmp_path):
    with pytest.raises(CalibrationError, match="devices are cpu"):
        calibrate.calibrate_gpus(tmp_path)
    assert not list(tmp_path.iterdir())


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
    h200s = topology.devices(topology.parse_topology("h200:8"))
    kept: list[str] = []

    def described(x, sharding):
        here = isinstance(x, jax.Array) or x.sharding is None  # arrays that are not on the H200s yet
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if here else x.sharding)

    def timed(run, *args, sizes, devices=()):
        where = jax.sharding.SingleDeviceSharding(h200s[0])
        kept.append(run.lower(*jax.tree.map(lambda x: described(x, where), args)).compile().as_text())
        return [[1.0]] * max(len(devices), 1)

    def on_each(seed, shape, dtype, devices):
        whole = (len(devices) * shape[0], *shape[1:])
        return jax.ShapeDtypeStruct(whole, dtype, sharding=micro.sharding_over(devices))

    def normal(seed, shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    monkeypatch.setattr(micro, "time_calls", timed)
    monkeypatch.setattr(micro, "normal_on_each", on_each)
    monkeypatch.setattr(micro, "normal", normal)
    return h200s, kept


def test_the_gpu_compiler_leaves_every_product_in_the_loop(for_h200s):
    """In the sizes measured on GPUs, no matmul is hoisted, merged or cut down to the element that is read. The program has no
    collective.
    """
    devices, kept = for_h200s
    assert len(time_work(micro.gemm((8192, 4096, 14336), "bf16", devices), Sizes())) == 8
    (text,) = kept
    made = re.findall(r"= \(bf16\[(\d+,\d+)\]\S* .*custom-call\(.*__cublas.*while/body", text)
    assert sorted(made) == ["4096,14336", "8192,14336", "8192,4096"]
    rounds = -(-100e12 // (3 * 2 * 8192 * 4096 * 14336))
    assert f'"known_trip_count":{{"n":"{int(rounds)}"}}' in text
    assert not re.search(r"all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all", text)


def test_the_gpu_compiler_leaves_every_fp8_product_in_the_loop(for_h200s):
    devices, kept = for_h200s
    time_work(micro.gemm((8192, 4096, 14336), "fp8", devices[:1]), Sizes())
    made = re.findall(r"= \(?bf16\[(\d+,\d+)\]\S* .*custom_call_target=\"__cublas\$lt\$matmul\$f8\".*while/body", kept[0])
    assert sorted(made) == ["4096,14336", "8192,14336", "8192,4096"]


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_gpu_compiler_leaves_every_small_product_in_the_loop(for_h200s, dtype):
    """The nine matmuls of a round, which share operands, are neither merged nor joined into a batch."""
    devices, kept = for_h200s
    time_work(micro.gemm((512, 512, 512), dtype, devices[:1]), Sizes())
    assert len(re.findall(r"= \(?bf16\[512,512\]\S* .*custom-call\(.*__cublas.*while/body", kept[0])) == 9


def test_the_gpu_compiler_leaves_attention_alone_in_the_loop(for_h200s):
    """The loop has cuDNN's forward and backward kernels, and only one other operation that moves a whole array."""
    (device, *_), kept = for_h200s
    works, plain = calibrate.attention(device, Sizes())
    assert "cudnn;" in plain[0].label
    for work in works:
        assert "cudnn, packed" in work.label
        time_work(work, Sizes())
    ahead, both = kept
    body = [line for line in both.splitlines() if "while/body" in line and "= " in line]
    assert ahead.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert both.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert both.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1
    moves = [line for line in body if re.search(r"bf16\[1,8192,\d+,128\]\S* (copy|fusion|transpose)\(", line)]
    assert len(moves) == 1 and "dynamic_update_slice" in moves[0], moves


def test_each_device_is_timed_by_itself(monkeypatch):
    """One device becomes slow after the first timed round. Only that device's median time shows it."""
    devices, calls, thread = ["a", "b", "c"], [], threading.local()
    monkeypatch.setattr(micro, "time", SimpleNamespace(perf_counter=lambda: getattr(thread, "now", 0.0)))
    monkeypatch.setattr(micro.jax, "block_until_ready", lambda x: x() if callable(x) else x)

    def shard(device, seconds):
        return SimpleNamespace(device=device, data=lambda: setattr(thread, "now", seconds))

    def run():
        calls.append(1)
        slow = {"a": 0.01, "b": 0.15 if len(calls) > 2 else 0.01, "c": 0.02}
        return SimpleNamespace(addressable_shards=[shard(d, slow[d]) for d in reversed(devices)])

    found = time_calls(run, devices=devices, sizes=dataclasses.replace(TINY, repeats=5))
    assert [statistics.median(each) for each in found] == [0.01, 0.15, 0.02] and len(calls) == 1 + 5


# ---- From readings to rates

TODAY = datetime.date(2026, 11, 21)
H200 = topology.parse_topology("h200:8").gpu


def reading(kind: str, amount: float, seconds: float, **more) -> WorkReading:
    """Return a reading of `amount` FLOPs, or bytes for memory and links."""
    over = {"memory": "memory", "host": "host"}.get(kind, "NVLink" if kind in (*COLLECTIVES, CURVE) else "")
    amounts = {"flop": 0.0, "bytes": amount, "over": over} if over else {"flop": amount, "bytes": 0.0}
    return WorkReading(TimedWork(kind, "", prepare=lambda: (None, None, None), **amounts, **more), seconds, 0.01)


GOOD = [
    reading("gemm bf16", 600e12, 1.0, weight=3),
    reading("gemm bf16", 300e12, 1.0, weight=1),
    reading("attention forward", 500e12, 1.0),
    reading("attention backward", 400e12, 1.0),
    reading("memory", 4e12, 1.0),
    reading("host", 50e9, 1.0),
    reading("host", 50e9, 1.5),
]
LINKS = [
    reading("all-gather", 300e9, 1.0),
    reading("reduce-scatter", 330e9, 1.0),
    reading(CURVE, 3.5 * 2**20, 35e-6, message=4 * 2**20),
    reading(CURVE, 0.875 * 2**20, 25e-6, message=2**20),
    reading(CURVE, 224 * 2**20, 0.7e-3, message=256 * 2**20),
]


@pytest.fixture
def untimed(monkeypatch):
    """Replace timing by a constant: no kernel runs, and every call takes a second."""
    monkeypatch.setattr(micro, "time_calls", lambda run, *args, sizes, devices=(): [[1.0]] * max(len(devices), 1))
    monkeypatch.setattr(micro, "normal", lambda seed, shape, dtype=jnp.bfloat16: jnp.zeros(shape, dtype))
    monkeypatch.setattr(micro, "normal_on_each", lambda seed, shape, dtype, devices: jnp.zeros(shape, dtype))


def test_one_device_has_no_links(untimed):
    kinds = {r.work.kind for r in calibrate.measure_rates(jax.devices()[:1], TINY)}
    assert kinds and not kinds & {*COLLECTIVES, CURVE}


def test_times_are_of_warm_calls(monkeypatch):
    """The first call compiles, further calls warm up the device for warm_s seconds. Each call takes a second here."""
    now = [0.0]
    monkeypatch.setattr(micro.time, "perf_counter", lambda: now[0])

    def run(x):
        now[0] += 1.0

    assert time_calls(run, 1, sizes=dataclasses.replace(TINY, repeats=5)) == [[1.0] * 5] and now[0] == 6
    now[0] = 0.0
    time_calls(run, 1, sizes=dataclasses.replace(TINY, repeats=5, warm_s=2.5))
    assert now[0] == 1 + 3 + 5


def test_gemms_are_compiled_as_in_training():
    run = loading.load_config(["--config=configs/llama3_1b.py", "--config.model.num_layers=1"]).run
    program = build_program(run, topology.devices(topology.parse_topology("h200:8")))
    training = compiler.choose_options(program, compiler.make_card(139.8)).options
    assert {k: training[k] for k in micro.OPTIONS} == micro.OPTIONS


def test_one_gpu_keeps_the_data_sheets_links():
    got, sheet = to_rates(GOOD, H200, "NVIDIA H200", TODAY), rates.datasheet(H200, "bf16")
    assert (got.gemm_tflops, got.memory_tb_s, got.host_gb_s) == (525.0, 4.0, 40.0)
    assert (got.attention_forward_tflops, got.attention_backward_tflops) == (500.0, 400.0)
    assert (got.nvlink_gb_s, got.collective_curve) == (sheet.nvlink_gb_s, sheet.collective_curve)
    assert "NVIDIA H200, 2026-11-21, jaxlib " in got.source and "NVLink" in got.source


def test_several_gpus_measure_their_links():
    got, sheet = to_rates(GOOD + LINKS, H200, "NVIDIA H200", TODAY), rates.datasheet(H200, "bf16")
    assert got.nvlink_gb_s == pytest.approx(315)
    # Rates by message size, relative to the full rate. A rate above the full rate counts as 1.
    (one, slow), (four, faster), last = got.collective_curve
    assert (one, four, last) == (2**20, 2**22, (2**28, 1.0))
    assert (slow, faster) == pytest.approx((0.875 * 2**20 / 25e-6 / 315e9, 3.5 * 2**20 / 35e-6 / 315e9))
    assert (got.network_gb_s, got.network_curve) == (sheet.network_gb_s, sheet.network_curve)
    assert "NVLink" not in got.source and "network" in got.source


@pytest.mark.parametrize(
    ("kind", "seconds", "key"),
    [
        ("gemm bf16", 0.1, "gemm_tflops"),
        ("attention backward", -1.0, "attention_backward_tflops"),
        ("attention forward", 0.0, "attention_forward_tflops"),
        ("memory", 0.5, "memory_tb_s"),
        ("all-gather", 0.1, "nvlink_gb_s"),
        (CURVE, -1.0, "collective_curve"),
    ],
)
def test_what_cannot_be_is_not_stored(kind, seconds, key):
    wrong = [dataclasses.replace(r, seconds=seconds) if r.work.kind == kind else r for r in GOOD + LINKS]
    with pytest.raises(CalibrationError, match=f"^{key}"):
        to_rates(wrong, H200, "NVIDIA H200", TODAY)


def test_a_reading_that_fails_loses_its_own_rate_only(untimed, monkeypatch):
    def broken(*_):
        raise RuntimeError("luck\nand much more")

    made = micro.normal_on_each
    monkeypatch.setattr(micro, "normal_on_each", lambda *of: (made if of[2] != fp8.E4M3 else broken)(*of))
    monkeypatch.setattr(micro.attention_table, "implementation", broken)
    found = calibrate.measure_rates(jax.devices()[:1], TINY)
    failed = [r for r in found if r.failed]
    assert {r.work.kind for r in failed} == {"gemm fp8", "attention forward", "attention backward"}
    assert {r.failed for r in failed} == {"RuntimeError: luck"}
    good = [r for r in GOOD if "attention" not in r.work.kind]
    got, sheet = to_rates(good + failed, H200, "NVIDIA H200", TODAY), rates.datasheet(H200, "bf16")
    assert (got.gemm_tflops, got.memory_tb_s, got.fp8_tflops) == (525.0, 4.0, 0.0)
    assert got.attention_forward_tflops == sheet.attention_forward_tflops
    assert all(name in got.source for name in ("attention_forward_tflops", "attention_backward_tflops", "fp8_tflops"))
    with pytest.raises(CalibrationError):
        to_rates(failed, H200, "NVIDIA H200", TODAY)


def test_attention_without_packing_is_measured_if_that_with_packing_fails(untimed, monkeypatch):
    def work(what: str, prepare) -> tuple[TimedWork, TimedWork]:
        return TimedWork("attention forward", what, 1.0, 1.0, prepare), TimedWork(
            "attention forward+backward", what, 3.5, 1.0, prepare
        )

    def prepare():
        return lambda _, x: x, (), jnp.ones(())

    def broken():
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(calibrate, "attention", lambda *_: [work("packed", broken), work("plain", prepare)])
    found = [r for r in calibrate.measure_rates(jax.devices()[:1], TINY) if "attention" in r.work.kind]
    assert [(r.work.kind, r.work.label, r.failed) for r in found] == [
        ("attention forward", "plain", ""),
        ("attention backward", "plain", ""),
    ]


class FakeGpu:
    platform = "gpu"

    def __init__(self, kind: str):
        self.device_kind = kind


def test_a_gpus_rates_are_stored_where_plans_find_them(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeGpu("NVIDIA H200")] * 2)
    monkeypatch.setattr(calibrate, "measure_rates", lambda devices, sizes, say: GOOD + LINKS if sizes == Sizes() else None)
    console = rich.console.Console(record=True, width=160, file=io.StringIO())
    assert calibrate.calibrate_gpus(tmp_path, console=console).parent == tmp_path
    found = rates.rates_for(H200, "bf16", tmp_path)
    assert found.gemm_tflops == 525.0 and found.source.startswith("calibrated on NVIDIA H200, ")
    text = console.export_text()
    assert all(number in text for number in ("600", "60.6%", "83.3%", "36.7"))


def test_runs_that_cannot_calibrate_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeGpu("NVIDIA L4")])
    with pytest.raises(CalibrationError, match="'NVIDIA L4'"):
        calibrate.calibrate_gpus(tmp_path)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(CalibrationError, match="one of 2"):
        calibrate.calibrate_gpus(tmp_path)
    assert not list(tmp_path.iterdir())
