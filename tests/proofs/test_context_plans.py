"""Plans of sequences that are split over GPUs: arithmetic by formula and by program, in equal parts; bounds below them."""

import functools
from typing import Any

import pytest

from jaxtrain import launch
from jaxtrain.config import RunConfig
from jaxtrain.context import Context, make_context, pairs
from jaxtrain.plan.make import make_plan
from jaxtrain.plan.rates import rates_for
from jaxtrain.plan.report.figures import balance
from jaxtrain.plan.result import Plan, from_json, to_json
from jaxtrain.plan.search.bound import bound
from jaxtrain.plan.topology import parse

NODE = parse("h200:4")
SIZES = ("num_layers=2", "d_model=512", "num_heads=8", "num_kv_heads=4", "head_dim=64", "d_ff=1024", "vocab_size=2048")
BATCH = ("data.seq_len=32768", "train.global_batch=1", "train.grad_accum=1", "mesh.seq=4")
CASES = {
    "ring": ("attention.context=ring",),
    "ulysses": ("attention.context=ulysses",),
    "gather": ("attention.context=gather",),
    "ulysses x ring": ("attention.context=ulysses", "attention.ulysses=2"),
    "window": ("attention.context=ring", "model.sliding_window=1024"),
    "full remat": ("attention.context=ring", "remat.policy=full", "remat.tensors="),
}


@functools.cache
def planned(case: str) -> tuple[RunConfig, Plan]:
    overrides = (*(f"model.{s}" for s in SIZES), *BATCH, *CASES[case])
    loaded = launch.load(["--config=configs/llama3_8b.py", *(f"--config.{o}" for o in overrides)])
    assert not loaded.problems, loaded.problems
    return loaded.run, make_plan(loaded.run, NODE)


def sampled(*cases: str) -> list[Any]:
    """Those that are compiled by a campaign alone are marked."""
    rare = ("gather", "ulysses x ring", "full remat")
    return [pytest.param(case, marks=pytest.mark.more if case in rare else ()) for case in cases]


@pytest.mark.parametrize("case", sampled(*CASES))
def test_arithmetic_by_program_and_by_formula(case):
    run, plan = planned(case)
    assert plan.attention == "cudnn" and plan.mesh["seq"] == 4
    assert plan.flops.hardware_per_step == pytest.approx(plan.flops.expected_per_step, rel=0.01)
    least = bound(run, NODE, rates_for(NODE.gpu, run.precision))
    assert 0 < least.step_s < plan.time.step_ms / 1e3 and 0 < least.memory_gib < plan.memory.taken_gib


@pytest.mark.parametrize("case", sampled("ring", "ulysses", "gather", "ulysses x ring", "full remat"))
def test_ranks_do_equal_work_and_none_for_nothing(case):
    """What the program computes is what the causal mask asks of every rank: no rank idles, and no block is empty."""
    _, plan = planned(case)
    asked = plan.flops.attention_by_rank
    assert len(asked) == 4 and max(asked) / min(asked) < 1.02
    assert plan.flops.attention_per_step == pytest.approx(max(asked), rel=0.01)
    assert "of each of 4 ranks of seq" in balance(plan) and "+0.0%" in balance(plan)
    assert from_json(to_json(plan)) == plan


def test_pairs_of_each_rank():
    ring = make_context("ring", 0, 4, 8, 8)
    assert sum(pairs(ring, 4096)) == 4096**2 / 2 and len({*pairs(ring, 4096)}) == 1
    # Chunks in the order of the text would be as uneven as can be; a window evens them out but for the first chunk.
    assert pairs(Context(1, 1), 4096) == [4096**2 / 2]
    windowed = pairs(ring, 4096, 256)
    assert sum(windowed) == pytest.approx(4096 * 256 - 256**2 / 2)
    assert windowed[0] < windowed[1] == windowed[2] == windowed[3]
    assert pairs(make_context("ulysses", 2, 4, 8, 8), 4096) == [4096**2 / 8] * 4


def test_activations_grow_with_tokens_and_sends_are_hidden():
    """Twice the tokens: at most twice the memory beside the state. With wide heads attention is long enough to send behind."""

    def at(tokens: int) -> Plan:
        wide = (
            "num_layers=2",
            "d_model=2048",
            "num_heads=16",
            "num_kv_heads=4",
            "head_dim=128",
            "d_ff=4096",
            "vocab_size=2048",
        )
        given = (
            *(f"model.{s}" for s in wide),
            "train.global_batch=1",
            "train.grad_accum=1",
            "mesh.seq=4",
            f"data.seq_len={tokens}",
        )
        return make_plan(launch.load(["--config=configs/llama3_8b.py", *(f"--config.{o}" for o in given)]).run, NODE)

    short, long = at(1 << 16), at(1 << 17)
    assert long.memory.temp_gib > 3  # activations, not the state, are what is compared
    assert long.memory.temp_gib <= 2.02 * short.memory.temp_gib
    sent = [c for c in long.collectives if c.kind == "collective-permute"]
    assert sum(c.ms for c in sent) > 5
    assert sum(c.exposed_ms for c in sent) < 0.01 * long.time.attention_ms
