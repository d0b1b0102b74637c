"""The least memory of a run: compared with sums by hand and with golden plans."""

import math

import golden_plans
import pytest
from made_plans import H200, load

from jaxtrain.config import launch
from jaxtrain.data import loading
from jaxtrain.plan import fit, topology

PARAMS = 8_030_261_248  # of Llama 3 8B
ONE = ("train.global_batch=8", "train.grad_accum=1", "remat.policy=full", "remat.tensors=")
GIB = 2**30


def of(*overrides: str, machine: topology.Topology = H200, file: str = "configs/llama3_8b.py") -> fit.Least:
    return fit.least(load(*overrides, file=file), machine)


def test_least_memory_by_hand():
    """Llama 3 8B on 8 GPUs: float32 weights and moments, and the head in bfloat16, the largest gathered weight."""
    head = 128_256 * 4096
    one, many = of(*ONE), of("train.global_batch=16", "train.grad_accum=2", *ONE[2:])
    assert one.state_gib == pytest.approx(PARAMS * 12 / 8 / GIB, rel=1e-4)
    assert one.gradients_gib == pytest.approx(PARAMS * 2 / 8 / GIB), "in the dtype of their reduction"
    assert many.gradients_gib == pytest.approx(PARAMS * 4 / 8 / GIB), "summed in float32"
    assert one.gathered_gib == many.gathered_gib == head * 2 / GIB
    inputs = 32 * 8192 * 4096 * 2 / GIB
    assert one.inputs_gib == many.inputs_gib == inputs and of(*ONE, "remat.every=2").inputs_gib == inputs / 2
    assert one.gib == pytest.approx(one.state_gib + max(one.gradients_gib, one.gathered_gib + inputs))
    assert many.gib == pytest.approx(many.state_gib + many.gradients_gib + many.gathered_gib + inputs)
    assert of(*ONE, "optimizer.clip_norm=0.0").gradients_gib == 0, "each gradient may be freed once it is used"


def test_zero_stages_hold_what_they_gather_and_sum():
    many = ("train.global_batch=16", "train.grad_accum=2", *ONE[2:])
    layer, step, stage2, stage1 = (
        of(*many, o) for o in ("sharding.zero=3", "sharding.gather=step", "sharding.zero=2", "sharding.zero=1")
    )
    assert step.gathered_gib == stage1.gathered_gib == stage2.gathered_gib == pytest.approx(PARAMS * 2 / GIB)
    assert step.gradients_gib == stage1.gradients_gib == pytest.approx(PARAMS * 4 / GIB), "each device's own sums"
    assert stage2.gradients_gib == layer.gradients_gib
    forward = of(*many, "sharding.gather=forward")
    assert forward.gathered_gib == pytest.approx((PARAMS - 2 * 128_256 * 4096) * 2 / GIB, rel=1e-4), (
        "kept for the backward pass"
    )
    assert of(*many, "sharding.zero=0").state_gib == pytest.approx(PARAMS * 12 / GIB, rel=1e-4)
    assert of(*many, "optimizer.offload=moments").state_gib == pytest.approx(PARAMS * 4 / 8 / GIB, rel=1e-2)


def test_experts_stay_where_they_are_or_are_gathered():
    few = ("train.global_batch=64", "train.grad_accum=8", "remat.policy=full", "remat.tensors=")
    expert = 4096 * 14_336
    kept = of(*few, "mesh.expert=8", "mesh.fsdp=1", file="configs/mixtral_8x7b.py")
    gathered = of(*few, "mesh.expert=1", "mesh.fsdp=8", file="configs/mixtral_8x7b.py")
    assert kept.state_gib == pytest.approx(gathered.state_gib, rel=1e-2)
    assert kept.gathered_gib == max(expert, 32_000 * 4096) * 2 / GIB and gathered.gathered_gib == 8 * expert * 2 / GIB


def test_what_is_repeated_grows_as_memory_shrinks():
    """All of a layer's matmuls and attention calls are saved, some of them, only its input, or not even that."""
    plenty, some, few, none = (of(f"train.memory_fraction={f}").repeated for f in (0.9, 0.25, 0.17, 0.1))
    assert plenty == 0 < some < few < 0.34 and math.isinf(none)
    nodes = topology.parse("h200:8x2")
    piped = ("mesh.stage=2", "mesh.fsdp=8", "train.grad_accum=8", "train.global_batch=64", "train.accumulate=auto")
    assert of(*piped, machine=nodes).repeated == pytest.approx((2 - 1) / 8), "the bubble"
    own = of("model.family=helpers:WiderFamily")
    assert own.repeated == own.inputs_gib == 0, "its activations are not known"


@pytest.mark.parametrize("name", golden_plans.SHIPPED)
def test_no_golden_plan_is_below_its_least_memory(name):
    """Else a config that fits would be refused."""
    plan = golden_plans.load(golden_plans.path(name))
    loaded = loading.load([f"--config={launch.REPO}/{plan['config']}"])
    least = fit.least(loaded.run, topology.parse(plan["topology"]))
    assert 0 < least.state_gib < least.gib <= plan["peak_gib"] and math.isfinite(least.repeated)
