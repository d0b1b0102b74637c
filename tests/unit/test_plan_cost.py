"""A whole run by its plan: the formulas against numbers worked out by hand and against published ones, and the section."""

import dataclasses
import json
import math

import pytest
from plans import config
from sample_plan import sample

from jaxtrain.config.counts import read_count
from jaxtrain.config.schema import ConfigError
from jaxtrain.plan import cost, topology
from jaxtrain.plan.cost import Cost, CostOptions, daly_interval, estimate_cost, wall_time, young_interval
from jaxtrain.report.plan_run import run_section
from jaxtrain.report.tables import print_sections, render_text

NODE = topology.parse_topology("h200:8")
MINUTE, DAY = 60.0, 86_400.0
CHECKPOINT = 400 * 10**9  # one second of copies at 50 GB/s of each of 8 GPUs


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1e12", 10**12),
        ("15T", 15 * 10**12),
        ("1.5T", 1_500_000_000_000),
        ("300B", 300 * 10**9),
        ("2_000_000", 2_000_000),
        ("2m", 2_000_000),
        ("65k", 65_000),
        ("7", 7),
    ],
)
def test_counts_as_people_type_them(text, count):
    assert read_count(text) == count


@pytest.mark.parametrize("text", ["", "T", "15 trillion", "0", "-1", "1.5", "nan", "inf", "1e400"])
def test_texts_that_are_no_count(text):
    with pytest.raises(ValueError):
        read_count(text)


@pytest.mark.parametrize(("between", "best"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_best_intervals_of_dalys_paper(between, best):
    """Figures 3 to 5 of Daly 2006: saves of 5 minutes, and failures 24 h, 6 h and 15 min apart."""
    assert daly_interval(5 * MINUTE, between * MINUTE) / MINUTE == pytest.approx(best, rel=0.006)


def test_formulas_by_hand():
    # d = 2 s, M = 100 s: sqrt(400) = 20; 20 (1 + 0.1 / 3 + 0.01 / 9) - 2 = 18.6889
    assert young_interval(2.0, 100.0) == 20.0
    assert daly_interval(2.0, 100.0) == pytest.approx(18.68889, abs=1e-5)
    assert daly_interval(200.0, 100.0) == 100.0  # a save of 2 M or more
    # 100 e^0.3 (e^0.2 - 1) 1000 / 18 = 1660.35
    assert wall_time(1000.0, 18.0, 2.0, 30.0, 100.0) == pytest.approx(1660.35, abs=0.01)
    assert wall_time(1e9, 1e6, 1.0, 1.0, 1.0) == math.inf


@pytest.mark.parametrize("between_s", [600.0, 86_400.0, 1e7])
def test_no_other_interval_is_faster(between_s):
    best = daly_interval(3.0, between_s)
    least = wall_time(1e6, best, 3.0, 100.0, between_s)
    assert all(wall_time(1e6, best * factor, 3.0, 100.0, between_s) >= least * (1 - 1e-6) for factor in (0.5, 0.8, 1.25, 2.0))


def made(
    *overrides: str, machine: topology.Topology = NODE, tokens: int = 10**9, expected: bool = True, **asked: float
) -> Cost:
    """Return the run of a plan with steps of 65,536 tokens that take 0.8 to 1 s, compiled in 5 s."""
    time = dataclasses.replace(sample().time, step_ms=700.0, expected_step_ms=(800.0, 1000.0) if expected else None)
    plan = sample(time=time, compile_s=5.0)
    return estimate_cost(plan, config(*overrides), machine, CHECKPOINT, CostOptions(tokens, **asked))


def test_a_run_by_hand():
    found = made(price=2.0, failures=1000.0 / 8, storage_gb_s=40.0)
    assert found.steps == 15_259  # 1e9 / 65,536 = 15,258.8
    assert found.between_failures_s == DAY  # 8 GPUs with a failure in 8 GPU-days
    assert (found.checkpoint_bytes, found.write_s) == (CHECKPOINT, 10.0)
    assert found.restart_s == 15 + 180 + 5 + 10  # noticed, started, compiled, read
    assert found.young_s == pytest.approx(math.sqrt(2 * DAY))  # copies take 1 s
    best_s = math.sqrt(2 * DAY) * (1 + math.sqrt(1 / (2 * DAY)) / 3 + 1 / (2 * DAY) / 9) - 1
    assert found.daly_s == pytest.approx(best_s) and found.every_steps == round(best_s / 0.8) == 519
    for end, step_s in zip(found.ends, (0.8, 1.0), strict=True):
        interval_s, solve_s = 519 * step_s, 15_259 * step_s
        all_s = DAY * math.exp(220 / DAY) * (math.exp((interval_s + 1) / DAY) - 1) * solve_s / interval_s
        assert end.days == pytest.approx(all_s / DAY) and end.gpu_hours == pytest.approx(8 * all_s / 3600)
        assert end.money == pytest.approx(2 * end.gpu_hours) and end.failures == pytest.approx(all_s / DAY)
        assert end.saves_s == pytest.approx(15_259 / 519)
        assert end.failures_s + end.saves_s == pytest.approx(all_s - solve_s)
        # To first order a failure costs half an interval, the write of a save, and a restart.
        assert end.failures_s == pytest.approx(end.failures * (interval_s / 2 + 220), rel=0.01)


def test_a_ramp_of_the_batch_takes_more_steps_and_hardly_more_time():
    plain, ramp = made(), made("train.global_batch=16", "train.batch_ramp=4:1000,8:3000")
    assert ramp.steps == plain.steps + 1000 * 3 // 4 + 2000 // 2
    assert [end.days for end in ramp.ends] == pytest.approx([end.days for end in plain.ends], rel=1e-3)


def test_saves_are_never_closer_than_a_write():
    found = made(storage_gb_s=0.5, failures=1000.0 / 8)
    assert found.write_s == 800.0 > found.daly_s and found.every_steps == 1000
    assert all(end.step_s * found.every_steps >= found.write_s for end in found.ends)
    # With the config's 100 steps, each save waits 720 s for the write before it.
    assert found.config_lost_s and found.config_lost_s > 15_259 / 100 * 720


def test_the_interval_of_the_config_is_compared():
    found = made("checkpoint.every_steps=519", failures=1000.0 / 8, storage_gb_s=40.0)
    assert found.config_every_steps == 519
    assert found.config_lost_s == pytest.approx(found.ends[0].failures_s + found.ends[0].saves_s)
    never = made("checkpoint.every_steps=0", tokens=10**15, failures=1000.0 / 8, storage_gb_s=40.0)
    assert never.config_lost_s is None and json.loads(json.dumps(dataclasses.asdict(never)))["config_lost_s"] is None


def test_defaults():
    """Llama 3's failures, and a gigabyte a second of each node."""
    assert round(419 / 54 / 16_384 * 1000, 2) == cost.FAILURES
    found = made(machine=topology.parse_topology("h200:8x4"))
    assert found.gpus == 32 and found.write_s == 100.0
    assert found.between_failures_s == pytest.approx(1000 * DAY / 0.47 / 32)
    assert found.ends[0].money is None
    said = {name: (value, source) for name, value, source in found.assumptions}
    assert (
        said["independent failures per 1,000 GPU-days"][0] == "0.47"
        and "2407.21783" in said["independent failures per 1,000 GPU-days"][1]
    )
    assert said["storage, all nodes together"][0] == "4 GB/s"


def test_without_an_expected_range_the_roofline_is_a_lower_bound():
    found = made(expected=False)
    assert [end.step_s for end in found.ends] == [0.7]
    assert "lower bound" in found.assumptions[0][2]


def test_a_run_shorter_than_the_interval_saves_at_its_end():
    found = made(tokens=65_536 * 10)
    assert found.every_steps == found.steps == 10 and made(tokens=1).steps == 1


def test_failures_without_end_are_refused():
    with pytest.raises(ConfigError) as refused:
        made(failures=1e6)
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("--failures-per-1000-gpu-days", 1e6)


def test_a_storage_without_end_is_refused_with_one_that_is_enough():
    with pytest.raises(ConfigError) as refused:
        made(storage_gb_s=1e-6)
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("--storage-gb-s", 1e-6)
    assert made(storage_gb_s=float(problem.remedy.split()[1])).ends[0].days > 0


def test_the_section_names_everything():
    found = made(price=2.0)
    shown = render_text(lambda console: print_sections(run_section(found), console), 118)
    assert f"--config.train.steps=15259 --config.checkpoint.every_steps={found.every_steps}" in shown
    assert "money" in shown and "400" in shown and "15,259" in shown
    assert all(value in shown for _, value, _ in found.assumptions)
    assert "money" not in render_text(lambda console: print_sections(run_section(made()), console), 118)
    assert run_section(None) == []
