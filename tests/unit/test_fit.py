"""The least memory of a run: compared with sums by hand and with golden plans."""

import math
import re

import golden_plans
import pytest
from made_plans import H200, load

from jaxtrain.config import launch, schema
from jaxtrain.data import loading
from jaxtrain.kernels import low_bits
from jaxtrain.models import preset, rules
from jaxtrain.plan import fit, topology
from jaxtrain.step import state_size
from jaxtrain.step.program import build_program

PARAMS = 8_030_261_248  # of Llama 3 8B
ONE = ("train.global_batch=8", "train.grad_accum=1", "remat.policy=full", "remat.tensors=")
GIB = 2**30


def of(*overrides: str, machine: topology.Topology = H200, file: str = "configs/llama3_8b.py") -> fit.LeastMemory:
    return fit.least_memory(load(*overrides, file=file), machine)


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
    nodes = topology.parse_topology("h200:8x2")
    piped = ("mesh.stage=2", "mesh.fsdp=8", "train.grad_accum=8", "train.global_batch=64", "train.accumulate=auto")
    assert of(*piped, machine=nodes).repeated == pytest.approx((2 - 1) / 8), "the bubble"
    own = of("model.family=helpers:WiderFamily")
    assert own.repeated == own.inputs_gib == 0, "its activations are not known"


@pytest.mark.parametrize("name", golden_plans.SHIPPED)
def test_no_golden_plan_is_below_its_least_memory(name):
    """Else a config that fits would be refused."""
    plan = golden_plans.load(golden_plans.path(name))
    loaded = loading.load_config([f"--config={launch.REPO}/{plan['config']}"])
    least = fit.least_memory(loaded.run, topology.parse_topology(plan["topology"]))
    assert 0 < least.state_gib < least.gib <= plan["peak_gib"] and math.isfinite(least.repeated)


MATRICES = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
# Bits of a weight beside those of its scales, and of the scales of Llama 3 8B's matrices
BITS = {"bf16": 16, "fp8": 8, "nf4": 4 + 8 / 64 + 32 / (64 * 256)}


@pytest.mark.parametrize("base", BITS)
def test_a_frozen_base_is_held_in_its_bits(base):
    """A layer decodes its largest matrix. If weights are gathered once a step, they stay in their bits."""
    lora = ("lora.rank=16", f"lora.base={base}", *ONE)
    found, once = of(*lora), of(*lora, "sharding.gather=step")
    # The ends of the seven matrices: fsdp shards those on the model dimension.
    wide, others = 32 * 7 * 4096, 32 * (2 * 4096 + 2 * 1024 + 3 * 14_336)
    base_bytes = MATRICES * BITS[base] / 8 + 2 * (PARAMS - MATRICES)
    assert found.state_gib == pytest.approx((base_bytes / 8 + 12 * 16 * (wide / 8 + others)) / GIB, rel=5e-3)
    assert found.gathered_gib == 128_256 * 4096 * 2 / GIB, "the head"
    assert once.gathered_gib == pytest.approx((base_bytes + 2 * 16 * (wide + others)) / GIB, rel=5e-3)
    run = load(*lora, file="configs/llama3_8b.py")
    assert state_size.least_gib(run, ("params",)) * GIB == pytest.approx(base_bytes, rel=1e-3)


@pytest.mark.parametrize("name", ["llama3.1_8b", "qwen2.5_0.5b", "gpt_oss_20b", "deepseek_v3", "gemma3_1b"])
def test_the_config_knows_the_matrices_that_a_base_stores(name):
    """The rules of a config, which imports no model, are about the weights that the model then stores."""
    assert rules.BLOCK == low_bits.BLOCK
    for base in low_bits.FORMATS:
        config = schema.default_config()
        config.model.update(preset(name))
        config.lora.update(rank=8, base=base)
        run = schema.resolve(config)[0]
        stored = {} if fit.training_check(H200)(run) else build_program(run, topology.devices(H200)).definition.stored
        if not stored:
            assert base == "mxfp4" and not run.model.num_experts
            continue
        found: dict[str, list[int]] = {}
        for weight, how in stored.items():
            into, out = how.matrix if how.inputs_first else how.matrix[::-1]
            sizes = found.setdefault(re.sub(r"^dense_layers\.\d+", "dense_layers", weight), [0, into, out])
            sizes[0] += math.prod(how.shape) // (into * out)
        expected = rules.base_matrices(run.model, base)
        for part in {key.rpartition(".")[2] for key in expected}:  # the dense layers' attention counts with the others'
            one = [sum(sizes[0] for key, sizes in each.items() if key.endswith(f".{part}")) for each in (found, expected)]
            assert one[0] == one[1], part
        assert all(found[key][1:] == list(sizes[1:]) for key, sizes in expected.items())
