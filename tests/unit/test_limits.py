"""Shipped configs compared with their limits: the page, the stored figures and golden plans, and the formula."""

import golden_plans
import pytest

from benchmarks import finetuning, limits, published, studies

ROWS = limits.rows(limits.stored())
BY_NAME = {row.case.name: row for row in ROWS}


def test_page_is_what_the_stored_plans_give():
    page = "\n".join(limits.page(limits.stored())) + "\n"
    assert studies.generated(limits.PAGE) == page, limits.COMMAND


def test_stored_plans_are_of_these_configs():
    stale = [row.case.name for row in ROWS if row.planned["asked"] != published.digest(row.case.request)]
    assert not stale, limits.COMMAND


# The plan counts the attention of every GPT-OSS layer as full attention. DeepSeek-V3 has no golden plan of an earlier layout to
# compare with. Plans of adapters are on another page.
WITHOUT_ROW = {"gpt_oss_20b", "deepseek_v3", "qwen3_next_80b_a3b", "qwen3_next_80b_a3b_on_8", "qwen3_5_small"}
WITHOUT_ROW |= {case.name for case in finetuning.CASES}
WITH_ROW = [name for name in golden_plans.SHIPPED if name not in WITHOUT_ROW]


@pytest.mark.parametrize("name", WITH_ROW)
def test_stored_figures_are_those_of_the_golden_plan(name):
    golden, stored = golden_plans.load(golden_plans.path(name)), BY_NAME[name].planned
    margins, fix = golden["margins"], limits.COMMAND
    assert stored["step_s"] == pytest.approx(golden["step_ms"] / 1e3, rel=margins["step"]), fix
    assert stored["peak_gib"] == pytest.approx(golden["peak_gib"], rel=margins["peak"]), fix
    assert stored["exposed_s"] / stored["step_s"] == pytest.approx(golden["exposed_share"], abs=margins["exposed_share"]), fix
    assert sum(stored["work"].values()) == pytest.approx(golden["tflop"], rel=margins["tflop"]), fix
    again = sum(tflop for op, tflop in golden["work_tflop"].items() if op.startswith("recompute"))
    assert sum(stored["again"].values()) == pytest.approx(again, rel=margins["tflop"], abs=0.01), fix


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case.name)
def test_gaps_add_up_and_the_limit_is_below_the_plan(row):
    p = row.planned
    assert row.limit_s + sum(row.gaps.values()) == pytest.approx(p["step_s"], rel=1e-4)
    assert row.limit_s < p["step_s"]
    # XLA simplifies up to a percent of the formula's FLOPs away.
    assert all(gap > -0.01 * p["step_s"] for gap in row.gaps.values())
    assert row.tokens_s(p["step_s"]) == pytest.approx(p["tokens_s"], rel=1e-4)


def test_the_limit_of_8b_by_hand():
    """A GPU has 262,144 tokens of Llama 3 8B: each takes 6 FLOPs for each of 7.5 G matmul weights, and causal attention."""
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    matmuls = 6 * (32 * layer + 4096 * 128256) * 262_144
    attention = 32 * 2 * 4096 * 8192 * 262_144
    seconds = matmuls / 794.5e12 + attention / 602e12 + 2.5 * attention / 561e12
    assert BY_NAME["llama3_8b"].parts["model"] == pytest.approx(seconds, rel=1e-6)
    assert BY_NAME["llama3_8b"].parts["remat"] == 0.0
