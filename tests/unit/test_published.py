"""Published runs compared with their plans: the page, the stored values, and the figures of both."""

import dataclasses
import json

import pytest

from benchmarks import published, studies
from benchmarks.published import RUNS
from jaxtrain.config import hardware
from jaxtrain.config.schema import default_config, resolve
from jaxtrain.models import preset
from jaxtrain.plan import rates
from jaxtrain.plan import topology as machines
from jaxtrain.plan.fit import training_check

ROWS = published.rows(published.stored())


def row(name: str) -> published.Row:
    return next(row for row in ROWS if row.run.name == name)


def test_page_is_what_the_stored_plans_give():
    page = "\n".join(published.page(published.stored())) + "\n"
    assert studies.generated(published.PAGE) == page, f"run {published.COMMAND}"


def test_stored_plans_are_of_these_runs():
    stale = [row.run.name for row in ROWS if row.planned["asked"] != published.digest(row.run.request)]
    assert not stale, f"the layouts of these have changed, run {published.COMMAND}"
    assert len({run.name for run in RUNS}) == len(RUNS)


def test_training_would_accept_every_run():
    refused = [run.name for run in RUNS if training_check(run.topology)(run.run_config)]
    assert not refused and all(run.source.startswith("https://") for run in RUNS)


def test_published_mfu_is_that_of_the_publishers():
    """Published MFU counts attention without a causal mask: Google's 508.371 of 989 TFLOP/s, and NVIDIA's 52.59%."""
    assert row("Llama 3.1 70B, 256 H200").mfu.full == pytest.approx(508.371 / 989.4, rel=1e-3)
    assert row("Llama 2 70B, 64 H100").mfu.full == pytest.approx(0.5259, rel=2e-3)
    assert row("Llama 3.1 8B, 8 H100, 32 microbatches").mfu.full == pytest.approx(0.6247, rel=2e-3)
    assert row("Llama 3.1 8B, 8 H100 at 500 W").mfu.full == pytest.approx(0.390, rel=2e-3)


def test_causes_add_up_to_the_published_time():
    for r in ROWS:
        p = r.planned
        parts = sum(p[f"{part}_s"] for part in ("gemm", "attention_forward", "attention_backward", "memory", "exposed"))
        assert parts == pytest.approx(p["step_s"], rel=0.01), r.run.name
        explained = p["step_s"] - p["gemm_s"] + p["gemm_tflop"] / r.gemm_rate
        assert explained == pytest.approx(r.run.published_s, rel=1e-6), r.run.name


def test_causal_mfu_of_experts_is_that_of_the_publisher():
    """NeMo AutoModel's 277 TFLOP/s count half of the attention square, and the active experts of a token."""
    assert row("Qwen3 30B-A3B, 8 H100").mfu.causal == pytest.approx(277 / 989.4, rel=5e-3)


def test_ranges_are_over_published_runs_of_the_same_kind():
    """If at least three runs of a kind are XLA programs, the range covers those alone. The stored ranges match the stored
    plans.
    """
    plans = published.stored()["plans"]

    def spread(runs):
        ratios = [plans[r.name]["step_s"] / r.published_s for r in runs]
        assert len(ratios) >= 3
        return [min(ratios), max(ratios)]

    hopper = [r for r in RUNS if r.machine[0] == "h" and r.seq_len <= 8192]
    eight = [r for r in hopper if "FP8" in r.name]
    bf16 = [r for r in hopper if r not in eight and r.xla]
    assert rates.published_ranges()["ranges"] == {
        "bf16 dense": pytest.approx(spread(bf16)),
        "fp8 dense": pytest.approx(spread(eight)),
    }


def test_published_rates_explain_xla_programs_better_than_parts_of_the_peak():
    """The geometric mean of planned over published time must be nearer to 1 than 0.81, its value with 75% of the peak."""
    rows = published.rows_by_kind(ROWS)["bf16 dense"]
    assert len(rows) >= 6 and 0.81 < published.mean(rows) < 1


@pytest.mark.parametrize(
    "kind, source, expected",
    [
        ("bf16 dense", rates.PUBLISHED, (1000 / 0.9, 1000 / 0.8)),
        ("fp8 dense", rates.PUBLISHED, None),  # too few published runs
        ("", rates.PUBLISHED, None),  # experts, 131,072 tokens, another GPU generation
        ("bf16 dense", "calibrated on NVIDIA H200, 2026-11-21", None),  # the ratios apply to published rates only
    ],
)
def test_a_range_is_given_to_the_kind_of_run_that_it_was_derived_from(monkeypatch, tmp_path, kind, source, expected):
    (tmp_path / "published.json").write_text('{"ranges": {"bf16 dense": [0.8, 0.9]}}')
    monkeypatch.setattr(rates, "COMPARED", tmp_path / "published.json")
    gpu = hardware.lookup("NVIDIA H200")
    assert gpu
    taken = dataclasses.replace(rates.datasheet(gpu, "bf16"), source=source)
    assert rates.expected_ms(1000.0, kind, taken) == (expected and pytest.approx(expected))


HYBRID = {f"model.{name}": value for name, value in preset("qwen3_5_0.8b").items()}  # three of four layers have delta nets


@pytest.mark.parametrize(
    "topology, changes, kind",
    [
        ("h200:8", {}, "bf16 dense"),
        ("h100:8", {"precision": "fp8"}, "fp8 dense"),
        ("h200:8x32", {}, "bf16 dense"),
        ("h200:8x8", {"precision": "fp8"}, "fp8 dense"),
        ("h200:8x16", {"precision": "fp8"}, ""),
        ("a100:8", {}, ""),
        ("h200:8", {"data.seq_len": 16_384}, ""),
        ("h200:8", {"mesh.tensor": 2}, ""),
        ("h200:8", {"lora.rank": 8}, ""),
        ("h200:8", {"optimizer.name": "muon"}, ""),
        ("h200:8", {"remat.policy": "custom", "remat.tensors": "q=offload"}, ""),
        ("h200:8", {"model.num_experts": 8, "model.experts_per_token": 2}, ""),
        ("h200:8", HYBRID, ""),
    ],
)
def test_kinds_of_run(topology, changes, kind):
    config = default_config()
    config.data.seq_len = 8192
    config.precision = "bf16"
    config.update_from_flattened_dict(changes)
    run, problems = resolve(config)
    machine = machines.parse_topology(topology)
    assert not problems and rates.run_kind(run, machine.gpu, machine.total, "cudnn") == kind
    assert rates.run_kind(run, machine.gpu, machine.total, "pallas") == ""


def test_stored_ranges_and_sizes_are_those_of_the_compared_runs():
    assert json.loads(rates.COMPARED.read_text()) == json.loads(json.dumps(published.ranges(ROWS)))
    for kind, rows in published.rows_by_kind(ROWS).items():
        sizes = [machines.parse_topology(row.run.machine).total for row in rows]
        assert (min(sizes), max(sizes)) == rates.SIZES[kind.removesuffix(" dense")], kind
