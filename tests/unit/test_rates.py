"""GPU rates in plans: published rates, by hand and compared with published measurements, and stored calibrations."""

import dataclasses

import pytest
from hlo_text import BIG, RATES, read

from jaxtrain.config import hardware
from jaxtrain.plan import rates
from jaxtrain.plan.program import collectives, op_cost
from jaxtrain.plan.program.op_cost import OpCost

H200 = hardware.lookup("NVIDIA H200")
MEASURED = dataclasses.replace(RATES, source="calibrated on H200 SXM, 2026-11-21", fp8_tflops=0.0)


def test_datasheet_rates():
    assert H200
    found = rates.datasheet(H200, "bf16")
    assert (found.gemm_tflops, found.fp8_tflops) == pytest.approx((720.0, 1280.0), rel=1e-3)
    assert (found.attention_forward_tflops, found.attention_backward_tflops) == pytest.approx((529.0, 518.0))
    assert (found.memory_tb_s, found.nvlink_gb_s, found.network_gb_s) == pytest.approx((4.08, 370.0, 45.0))
    assert rates.datasheet(H200, "fp8") == found
    assert rates.datasheet(H200, "f32").attention_forward_tflops == pytest.approx(529.0 / 989.4 * 66.9)
    assert found.source == rates.PUBLISHED
    for _, gpu in hardware.TABLE:
        sheet = dataclasses.asdict(rates.datasheet(gpu, "bf16"))
        assert (sheet.pop("fp8_tflops") > 0) == (gpu.sm >= 89)
        assert min(v for v in sheet.values() if isinstance(v, float)) > 0
        # The best of all shapes that a published search tried on an H200: 794.5 of 989.4 TFLOP/s, and 1,453 of 1,978.9 in FP8.
        assert rates.datasheet(gpu, "bf16").gemm_tflops <= 794.5 / 989.4 * gpu.bf16
        assert rates.datasheet(gpu, "bf16").fp8_tflops <= 1453 / 1978.9 * gpu.fp8
    a100 = hardware.lookup("A100-SXM4-80GB")
    assert a100
    with pytest.raises(ValueError, match="fp8"):
        rates.datasheet(a100, "fp8")
    with pytest.raises(ValueError, match=r"12\.0"):
        rates.datasheet(dataclasses.replace(a100, sm=120), "bf16")


@pytest.mark.parametrize(
    ("keys", "forward", "backward"),
    [(16, 518, 499), (4096, 518, 499), (8192, 529, 518), (16384, 539, 516), (131072, 539, 516), (11585, 534, 517)],
)
def test_attention_runs_at_the_rate_of_its_length(keys, forward, backward):
    """Rates are the measured ones at 4k, 8k and 16k keys, linear in log keys between those, and constant outside."""
    assert H200
    sheet = rates.datasheet(H200, "bf16")
    for rate, back in ((forward, False), (backward, True)):
        done = OpCost("attention", 1e12, backward=back, keys=keys)
        assert 1 / done.seconds(sheet) == pytest.approx(rate, rel=1e-4)


def on_links(kind: str, mib: float, nodes: int) -> float:
    """Return a plan's bus bandwidth in GB/s, as nccl-tests define it, for a collective over all GPUs of nodes with 8 H200s."""
    assert H200
    n = 8 * nodes
    given = mib * 2**20 / (n if kind == "all-gather" else 1)
    sent = collectives._ring_bytes(kind, given, n)
    hops = collectives._hops(kind, nodes)
    found = collectives.CollectiveOp(kind, "f32", "fsdp", n, 1, sent, sent / 8 if nodes > 1 else 0.0, "", "", "c", (), hops)
    assert found.message == pytest.approx(mib * 2**20)
    work = op_cost.instruction_cost(*next((m, m.entry, m.entry.root) for m in [read(ROOT)]), {"c": found})
    return sent / work.seconds(rates.datasheet(H200, "bf16")) / 1e9


ROOT = f"\n  ROOT %c = {BIG} all-gather(%x), replica_groups={{{{0,1}}}}, dimensions={{0}}"


def test_small_messages_are_slower():
    """On one node the largest all-gathers reach 370 GB/s, and the smallest take 10 us. The rates of sizes in between follow the
    published all-reduce bandwidths by size (`_SWEEP` in plan/rates.py).
    """
    speeds = [on_links("all-gather", mib, 1) for mib in (1 / 1024, 1 / 32, 1, 8, 64, 512, 16384)]
    assert speeds == pytest.approx([0.09, 2.87, 30.6, 119.3, 265.9, 345.5, 370.0], rel=0.01)
    assert on_links("all-reduce", 64, 1) == on_links("all-gather", 64, 1)
    seconds = [size / on_links("all-gather", size / 2**20, 1) for size in (2 ** (n / 4) for n in range(40, 140))]
    assert all(a <= b * (1 + 1e-9) for a, b in zip(seconds, seconds[1:], strict=False))


@pytest.mark.parametrize(
    ("kind", "mib", "nodes", "published", "within"),
    [
        # NVIDIA/nccl issue 1229: reduce-scatters over H100s. The issue gives no sizes; 2 GiB is an assumption.
        *(("reduce-scatter", 2048, 2**n, gb_s, 0.1) for n, gb_s in enumerate((360, 345, 320, 300, 280, 260), 2)),
        # NVIDIA/nccl-tests issue 283: all-reduces over 248 nodes of 8 H200s, mostly about 350 and at times below 300.
        ("all-reduce", 512, 248, 325, 0.1),
    ],
)
def test_collectives_over_many_nodes_beside_published_ones(kind, mib, nodes, published, within):
    """A plan's bus bandwidth is within 10% of published measurements (the table in docs/evidence/rates.md)."""
    assert on_links(kind, mib, nodes) == pytest.approx(published, rel=within)


def test_calibration_is_kept_by_gpu(tmp_path):
    assert H200
    assert rates.load_calibration(H200.name, tmp_path) is None
    assert rates.rates_for(H200, "bf16", tmp_path) == rates.datasheet(H200, "bf16")
    file = rates.save_calibration(MEASURED, H200.name, tmp_path / "new")
    assert file == tmp_path / "new" / "H200_SXM.json" and [p.name for p in file.parent.iterdir()] == [file.name]
    assert rates.rates_for(H200, "bf16", tmp_path / "new") == MEASURED
    other = rates.rates_for(H200, "f32", tmp_path / "new")
    assert (other.gemm_tflops, other.memory_tb_s) == pytest.approx((720 / 989.4 * 66.9, 1.0))
    assert other.source.startswith(MEASURED.source) and "f32" in other.source
    eight = rates.rates_for(H200, "fp8", tmp_path / "new")
    assert (eight.gemm_tflops, eight.fp8_tflops) == (MEASURED.gemm_tflops, rates.datasheet(H200, "fp8").fp8_tflops)
    assert eight.source.startswith(MEASURED.source) and "fp8" in eight.source
    both = dataclasses.replace(MEASURED, fp8_tflops=1200.0)
    rates.save_calibration(both, H200.name, tmp_path / "new")
    assert rates.rates_for(H200, "fp8", tmp_path / "new") == both


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("}", "", "line"),
        ('"format": 2', '"format": 1', "format"),
        ("0.99009", "1.99009", "collective_curve"),
        ('"network_curve": [', '"network_curve": [[2.0, 1.0],', "network_curve"),
        ("H200 SXM", "H100 SXM", "H100 SXM"),
        ('"memory_tb_s": 1.0', '"memory_tb_s": NaN', "memory_tb_s"),
        ('"memory_tb_s": 1.0,', "", "memory_tb_s"),
    ],
)
def test_a_damaged_calibration_is_refused(tmp_path, old, new, reason):
    file = rates.save_calibration(MEASURED, "H200 SXM", tmp_path)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=f"H200_SXM.json.*{reason}"):
        rates.load_calibration("H200 SXM", tmp_path)
