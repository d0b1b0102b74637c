"""Calibration without a GPU: how calls are timed, how readings become rates, and which rates a plan gets."""

import dataclasses
import datetime
import io

import jax
import jax.numpy as jnp
import pytest
import rich.console

from jaxtrain import launch
from jaxtrain.bench import microbenchmarks as micro
from jaxtrain.bench.microbenchmarks import COLLECTIVES, CURVE, TINY, Reading, Sizes, timed
from jaxtrain.plan import calibrate, rates, topology
from jaxtrain.plan.calibrate import CalibrationError, rate, to_rates
from jaxtrain.train import compiler
from jaxtrain.train.program import build

TODAY = datetime.date(2026, 11, 21)
H200 = topology.parse("h200:8").gpu
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


@pytest.fixture
def untimed(monkeypatch):
    """Replace timing by a constant: no kernel runs, and every call takes a second."""
    monkeypatch.setattr(micro, "timed", lambda run, *args, sizes: [1.0])
    monkeypatch.setattr(micro, "timed_by_device", lambda run, *args, devices, sizes: [[1.0]] * len(devices))
    monkeypatch.setattr(micro, "normal", lambda seed, shape, dtype=jnp.bfloat16: jnp.zeros(shape, dtype))


def test_one_device_has_no_links(untimed):
    kinds = {r.kind for r in calibrate.measure(jax.devices()[:1], TINY)}
    assert kinds and not kinds & {*COLLECTIVES, CURVE}


def test_times_are_of_warm_calls(monkeypatch):
    """The first call compiles. Further calls warm up the device for warm_s seconds, and the next calls are timed.

    Each call takes a second here.
    """
    now = [0.0]
    monkeypatch.setattr(micro.time, "perf_counter", lambda: now[0])

    def run(x):
        now[0] += 1.0

    assert timed(run, 1, sizes=dataclasses.replace(TINY, repeats=5)) == [1.0] * 5 and now[0] == 6
    now[0] = 0.0
    timed(run, 1, sizes=dataclasses.replace(TINY, repeats=5, warm_s=2.5))
    assert now[0] == 1 + 3 + 5


def test_a_rate_is_all_work_over_all_time():
    assert rate(GOOD[:2]) == pytest.approx((3 * 600e12 + 300e12) / 4)
    assert rate(GOOD[-2:]) == pytest.approx(100e9 / 2.5)
    assert rate([]) == 0.0


def test_packed_rows_count_where_cudnn_serves_them():
    """If cuDNN does not support packed rows, as on Ampere, the attention rates are those of unpacked rows."""
    other = [dataclasses.replace(r, what="chunked") if r.kind.startswith("packed") else r for r in GOOD]
    got = to_rates(other, H200, "NVIDIA H200", TODAY)
    assert (got.attention_forward_tflops, got.attention_backward_tflops) == (550.0, 450.0)


def test_gemms_are_compiled_as_in_training():
    run = launch.load(["--config=configs/llama3_1b.py", "--config.model.num_layers=1"]).run
    program = build(run, topology.devices(topology.parse("h200:8")))
    training = compiler.choose(program, compiler.card(139.8)).options
    assert {k: training[k] for k in micro.OPTIONS} == micro.OPTIONS


def test_one_gpu_keeps_the_data_sheets_links():
    got, sheet = to_rates(GOOD, H200, "NVIDIA H200", TODAY), rates.datasheet(H200, "bf16")
    assert (got.gemm_tflops, got.memory_tb_s, got.host_gb_s) == (525.0, 4.0, 40.0)
    assert (got.attention_forward_tflops, got.attention_backward_tflops) == (500.0, 400.0)
    assert (got.nvlink_gb_s, got.collective_curve) == (sheet.nvlink_gb_s, sheet.collective_curve)
    assert got.source.startswith("calibrated on NVIDIA H200, 2026-11-21, jaxlib ")
    assert got.source.endswith("; NVLink and network rates at published kernel rates")


def test_several_gpus_measure_their_links():
    got, sheet = to_rates(GOOD + LINKS, H200, "NVIDIA H200", TODAY), rates.datasheet(H200, "bf16")
    assert got.nvlink_gb_s == pytest.approx(315)
    # Rates by message size, relative to the full rate. A rate above the full rate counts as 1.
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
    wrong = [dataclasses.replace(r, seconds=seconds) if r.kind == kind else r for r in GOOD + LINKS]
    with pytest.raises(CalibrationError, match=f"^{key}( =|:) .*Nothing is stored"):
        to_rates(wrong, H200, "NVIDIA H200", TODAY)


def test_a_reading_that_fails_loses_its_own_rate_only(untimed, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such luck\nand much more")

    monkeypatch.setattr(micro, "fp8_gemm", broken)
    monkeypatch.setattr(micro, "attention_pair", broken)
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
    console.print(calibrate.table(failed, H200, ""))
    assert "no such luck" in console.export_text()


class FakeGpu:
    platform = "gpu"

    def __init__(self, kind: str):
        self.device_kind = kind


def test_a_gpus_rates_are_stored_where_plans_find_them(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeGpu("NVIDIA H200")] * 2)
    monkeypatch.setattr(calibrate, "measure", lambda devices, sizes, say: GOOD + LINKS if sizes == Sizes() else None)
    console = rich.console.Console(record=True, width=160, file=io.StringIO())
    file = calibrate.run(tmp_path, console=console)
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
