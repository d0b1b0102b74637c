"""Calibration: its loops on CPU devices in tiny sizes, what XLA's GPU compiler makes of them, and what a plan is given."""

import dataclasses
import datetime
import io
import re

import jax
import jax.numpy as jnp
import pytest
import rich.console

from jaxtrain import compiler, hardware, launch
from jaxtrain.plan import calibrate, rates, topology
from jaxtrain.plan import readings as made
from jaxtrain.plan.calibrate import TINY, Sizes, chain, looped, timed
from jaxtrain.plan.readings import COLLECTIVES, CURVE, CalibrationError, Reading, rate, to_rates
from jaxtrain.step import build

TODAY = datetime.date(2026, 11, 21)


@pytest.fixture(scope="module")
def readings():
    return calibrate.measure(jax.devices()[:4], TINY)


def test_everything_is_measured(readings):
    kinds = [r.kind for r in readings]
    assert kinds.count("gemm") == len(TINY.gemms) and kinds.count("host") == kinds.count(CURVE) == 2
    assert set(kinds) == {*made.UNITS}
    # Backward passes and small messages are differences, which noise can turn at this size.
    whole = [r for r in readings if "backward" not in r.kind and r.kind != CURVE]
    assert all(0 < r.seconds < 10 and r.spread >= 0 for r in whole)


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


def test_one_device_has_no_links(monkeypatch):
    monkeypatch.setattr(calibrate, "timed", lambda run, *args, sizes: [1.0])
    monkeypatch.setattr(calibrate, "normal", lambda seed, shape, dtype=jnp.bfloat16: jnp.zeros(shape, dtype))
    kinds = {r.kind for r in calibrate.measure(jax.devices()[:1], TINY)}
    assert kinds and not kinds & {*COLLECTIVES, CURVE}


def test_times_are_of_warm_calls():
    calls = []
    taken = timed(calls.append, 1, sizes=dataclasses.replace(TINY, repeats=5))
    assert len(calls) == 6 and len(taken) == 5
    calls.clear()
    timed(calls.append, 1, sizes=dataclasses.replace(TINY, repeats=5, warm_s=0.01))
    assert len(calls) > 6


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


H200 = hardware.lookup("NVIDIA H200")
GOOD = [
    Reading("gemm", "a", 600e12, 1.0, 0.01, weight=3),
    Reading("gemm", "b", 300e12, 1.0, 0.01, weight=1),
    Reading("attention forward", "cudnn", 550e12, 1.0, 0.01),
    Reading("attention backward", "cudnn", 450e12, 1.0, 0.01),
    Reading("packed attention forward", "cudnn", 500e12, 1.0, 0.01),
    Reading("packed attention backward", "cudnn", 400e12, 1.0, 0.01),
    Reading("memory", "d", 4e12, 1.0, 0.01),
    Reading("host", "to", 50e9, 1.0, 0.01),
    Reading("host", "from", 50e9, 1.5, 0.01),
]
LINKS = [
    Reading("all-gather", "e", 300e9, 1.0, 0.01),
    Reading("reduce-scatter", "e", 330e9, 1.0, 0.01),
    Reading(CURVE, "4 MiB", 3.5 * 2**20, 35e-6, 0.01, message=4 * 2**20),
    Reading(CURVE, "1 MiB", 0.875 * 2**20, 25e-6, 0.01, message=2**20),
    Reading(CURVE, "256 MiB", 224 * 2**20, 0.7e-3, 0.01, message=256 * 2**20),
]


def test_a_rate_is_all_work_over_all_time():
    assert rate(GOOD, "gemm") == pytest.approx((3 * 600e12 + 300e12) / 4)
    assert rate(GOOD, "host") == pytest.approx(100e9 / 2.5)
    assert rate(GOOD, "all-gather") == 0.0


def test_packed_rows_count_where_cudnn_serves_them():
    """On Ampere it does not, and plans of unpacked rows are all that use these rates."""
    assert H200
    other = [dataclasses.replace(r, what="chunked") if r.kind.startswith("packed") else r for r in GOOD]
    got = to_rates(other, H200, "NVIDIA H200", TODAY)
    assert (got.attention_forward_tflops, got.attention_backward_tflops) == (550.0, 450.0)


def test_gemms_are_compiled_as_in_training():
    run = launch.load(["--config=configs/llama3_1b.py", "--config.model.num_layers=1"]).run
    program = build(run, topology.devices(topology.parse("h200:8")))
    training = compiler.choose(program, compiler.card(139.8)).options
    assert {k: training[k] for k in calibrate.OPTIONS} == calibrate.OPTIONS


def test_one_gpu_keeps_the_data_sheets_links():
    assert H200
    got, sheet = to_rates(GOOD, H200, "NVIDIA H200", TODAY), rates.datasheet(H200, "bf16")
    assert (got.gemm_tflops, got.memory_tb_s, got.host_gb_s) == (525.0, 4.0, 40.0)
    assert (got.attention_forward_tflops, got.attention_backward_tflops) == (500.0, 400.0)
    assert (got.nvlink_gb_s, got.collective_curve) == (sheet.nvlink_gb_s, sheet.collective_curve)
    assert got.source.startswith("calibrated on NVIDIA H200, 2026-11-21, jaxlib ")
    assert got.source.endswith("; NVLink and network rates at published kernel rates")


def test_several_gpus_measure_their_links():
    assert H200
    got, sheet = to_rates(GOOD + LINKS, H200, "NVIDIA H200", TODAY), rates.datasheet(H200, "bf16")
    assert got.nvlink_gb_s == pytest.approx(315)
    # By size, in parts of that rate; one that is faster counts as the full rate.
    (one, slow), (four, faster), last = got.collective_curve
    assert (one, four, last) == (2**20, 2**22, (2**28, 1.0))
    assert (slow, faster) == pytest.approx((0.875 * 2**20 / 25e-6 / 315e9, 3.5 * 2**20 / 35e-6 / 315e9))
    assert (got.network_gb_s, got.network_curve) == (sheet.network_gb_s, sheet.network_curve)
    assert got.source.endswith("; network rates at published kernel rates")


@pytest.mark.parametrize(
    ("kind", "seconds", "key"),
    [
        ("gemm", 0.1, "gemm_tflops"),
        ("packed attention backward", -1.0, "attention_backward_tflops"),
        ("packed attention forward", 0.0, "attention_forward_tflops"),
        ("memory", 0.5, "memory_tb_s"),
        ("all-gather", 0.1, "nvlink_gb_s"),
        (CURVE, -1.0, "collective_curve"),
    ],
)
def test_what_cannot_be_is_not_stored(kind, seconds, key):
    assert H200
    wrong = [dataclasses.replace(r, seconds=seconds) if r.kind == kind else r for r in GOOD + LINKS]
    with pytest.raises(CalibrationError, match=f"^{key}( =|:) .*Nothing is stored"):
        to_rates(wrong, H200, "NVIDIA H200", TODAY)


def test_a_reading_that_fails_loses_its_own_rate_only(monkeypatch):
    assert H200
    monkeypatch.setattr(calibrate, "timed", lambda run, *args, sizes: [1.0])
    monkeypatch.setattr(calibrate, "normal", lambda seed, shape, dtype=jnp.bfloat16: jnp.zeros(shape, dtype))

    def broken(*_):
        raise RuntimeError("no such luck\nand much more")

    monkeypatch.setattr(calibrate, "fp8_gemm", broken)
    monkeypatch.setattr(calibrate, "attention_pair", broken)
    found = calibrate.measure(jax.devices()[:1], TINY)
    failed = [r for r in found if r.failed]
    assert {r.kind for r in failed} == {
        "FP8 gemm",
        *(f"{p}attention {d}" for p in ("", "packed ") for d in ("forward", "backward")),
    }
    assert {r.failed for r in failed} == {"RuntimeError: no such luck"}
    good = [r for r in GOOD if "attention" not in r.kind]
    got, sheet = to_rates(good + failed, H200, "NVIDIA H200", TODAY), rates.datasheet(H200, "bf16")
    assert (got.gemm_tflops, got.memory_tb_s, got.fp8_tflops) == (525.0, 4.0, 0.0)
    assert got.attention_forward_tflops == sheet.attention_forward_tflops
    names = "attention_forward_tflops, attention_backward_tflops, fp8_tflops"
    assert got.source.endswith(f"; NVLink and network rates, and {names}, whose measurement failed, at published kernel rates")
    with pytest.raises(CalibrationError, match="nothing could be measured"):
        to_rates(failed, H200, "NVIDIA H200", TODAY)
    console = rich.console.Console(width=160, file=io.StringIO(), record=True)
    console.print(made.table(failed, H200, ""))
    assert "no such luck" in console.export_text()


def printed(**kwargs) -> tuple[rich.console.Console, dict]:
    console = rich.console.Console(record=True, width=160, file=io.StringIO())
    return console, {"console": console, **kwargs}


def test_cpu_is_refused_unless_asked_and_never_stored(tmp_path, monkeypatch, readings):
    with pytest.raises(CalibrationError, match="finds none .its devices are cpu"):
        calibrate.run(tmp_path)
    monkeypatch.setattr(calibrate, "measure", lambda devices, sizes, say: readings if sizes is TINY else None)
    console, arguments = printed(on_cpu=True)
    assert calibrate.run(tmp_path, **arguments) is None
    text = console.export_text()
    assert "nothing is stored" in text and CURVE in text
    assert not list(tmp_path.iterdir())


class FakeGpu:
    platform = "gpu"

    def __init__(self, kind: str):
        self.device_kind = kind


def test_a_gpus_rates_are_stored_where_plans_find_them(tmp_path, monkeypatch):
    assert H200
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeGpu("NVIDIA H200")] * 2)
    monkeypatch.setattr(calibrate, "measure", lambda devices, sizes, say: GOOD + LINKS if sizes == Sizes() else None)
    console, arguments = printed()
    file = calibrate.run(tmp_path, **arguments)
    assert file and file.parent == tmp_path
    found = rates.rates_for(H200, "bf16", tmp_path)
    assert found.gemm_tflops == 525.0 and found.source.startswith("calibrated on NVIDIA H200, ")
    text = console.export_text()
    assert "600 TFLOP/s" in text and "989.4 TFLOP/s" in text and "61%" in text and "36.7 GB/s" in text


def test_runs_that_cannot_calibrate_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeGpu("NVIDIA L4")])
    with pytest.raises(CalibrationError, match="'NVIDIA L4': its data sheet is not known"):
        calibrate.run(tmp_path)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(CalibrationError, match="one of 2. Run it on one node"):
        calibrate.run(tmp_path)
    assert not list(tmp_path.iterdir())
