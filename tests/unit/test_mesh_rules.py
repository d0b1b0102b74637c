"""The rules of a layout: each refusal names its key; similar valid settings pass."""

import pytest

from jaxtrain.config.hardware import Devices
from jaxtrain.config.layout import rules_in_use
from jaxtrain.config.schema import MESH_AXES, Problem, resolve, to_dict
from jaxtrain.data import loading
from jaxtrain.step.validate import validate_step

CPUS = Devices("cpu", "cpu", 8, 4.0, "test")
H200 = Devices("gpu", "NVIDIA H200", 8, 140.4, "test", 90)
V100 = Devices("gpu", "V100", 8, 32.0, "test", 70)
B200 = Devices("gpu", "B200", 8, 180.0, "test", 100)
# 8 layers of width 128 with a vocabulary of 320, in 4 microbatches of 8.
MODEL = (
    *("model.num_layers=8", "model.d_model=128", "model.d_ff=256", "model.vocab_size=320", "train.grad_accum=4"),
    *("train.global_batch=32", "data.source=synthetic", "eval.every_steps=0", "attention.impl=chunked", "mesh.data=1"),
)
EXPERTS = ("model.num_experts=8", "mesh.expert=4", "mesh.fsdp=2")
STAGES = ("mesh.stage=4", "mesh.fsdp=2")
GROUPS = ("pipeline.schedule=interleaved", "pipeline.groups=2")


def found(*overrides: str, devices: Devices = CPUS) -> list[Problem]:
    loaded = loading.load_config(["--config=configs/tiny.py", *(f"--config.{o}" for o in (*MODEL, *overrides))])
    return [*loaded.problems, *validate_step(loaded.run, devices)]


def problems_of(*overrides: str, devices: Devices = CPUS) -> list[str]:
    return [str(p) for p in found(*overrides, devices=devices)]


RIGHT = [
    STAGES,
    (*STAGES, *GROUPS),
    (*STAGES, "model.num_layers=6"),  # the number of layers need not divide by the stages
    (*STAGES, "train.grad_accum=2"),  # a large bubble is allowed
    (*STAGES, "train.accumulate=microbatch"),
    (*STAGES, "remat.policy=full", "remat.every=2"),
    (*STAGES, "model.vocab_size=322", "sharding.rules.vocab=tensor"),
    (*STAGES, "optimizer.name=muon"),
    (*GROUPS, "mesh.fsdp=8"),  # with one stage the schedule is ignored, as in the reference layout of parity
    EXPERTS,
    (*EXPERTS, "model.router=sigmoid", "model.router_bias=true", "moe.bias_rate=0.01"),
    (*EXPERTS, "model.shared_d_ff=128", "moe.capacity_factor=1.5"),
    ("model.num_experts=8", "mesh.expert=2", "mesh.stage=2", "mesh.tensor=2"),
    ("model.num_experts=8", "mesh.expert=2", "mesh.stage=4", "model.num_layers=6"),
    (*EXPERTS, "sharding.rules.experts=expert", "sharding.rules.expert_embed="),
    (*EXPERTS, "model.experts_per_token=1", "model.renormalize=false"),
    (*EXPERTS, "precision=fp8", "moe.capacity_factor=2.0"),
    ("mesh.fsdp=8", "sharding.gather=step"),
    ("mesh.fsdp=8", "sharding.zero=0", "model.d_model=60", "model.num_heads=6", "model.num_kv_heads=6"),
    ("mesh.data=4", "mesh.fsdp=2", "train.accumulate=layer", "remat.policy=dots", "parallel.scan_layers=false"),
    ("mesh.data=4", "mesh.fsdp=2", "train.accumulate=layer", "remat.policy=dots", "train.grad_accum=1"),
]


@pytest.mark.parametrize("overrides", RIGHT, ids=" ".join)
def test_right(overrides: tuple[str, ...]):
    assert problems_of(*overrides) == []


TENSOR = "model.num_experts=8", "mesh.tensor=4", "mesh.data=2"
SEQ = ("mesh.seq=8", "parallel.context=ulysses")

# (overrides, key)
WRONG = [
    # ---- ZeRO and microbatches
    (("sharding.zero=0", "sharding.gather=step", "mesh.fsdp=8"), "sharding.gather"),
    (("sharding.zero=2", "sharding.gather=forward", "mesh.fsdp=8"), "sharding.gather"),
    (("mesh.fsdp=8", "model.d_model=60", "model.num_heads=6", "model.num_kv_heads=6"), "model.d_model"),
    # ---- sequences
    (("mesh.seq=4", "mesh.data=2", "data.seq_len=60"), "data.seq_len"),
    # ---- the table of logical axes
    (("mesh.seq=4", "mesh.tensor=2", "sharding.rules.sequence=tensor"), "sharding.rules.sequence"),
    (("mesh.seq=4", "mesh.tensor=2", "sharding.rules.residual=tensor+seq"), "sharding.rules.residual"),
    (("mesh.seq=4", "mesh.fsdp=2", "sharding.rules.embed=seq+fsdp"), "sharding.rules.embed"),
    (("mesh.data=4", "mesh.fsdp=2", "sharding.rules.batch=fsdp+data"), "sharding.rules.batch"),
    (("mesh.tensor=8", "model.d_model=192", "model.num_heads=24", "model.num_kv_heads=3"), "model.num_kv_heads"),
    # ---- stages
    ((*STAGES, "pipeline.schedule=interleaved"), "pipeline.schedule"),
    ((*STAGES, "pipeline.groups=2"), "pipeline.groups"),
    ((*STAGES, *GROUPS, "train.grad_accum=2"), "train.grad_accum"),
    ((*STAGES, "model.num_layers=3"), "model.num_layers"),
    ((*STAGES, *GROUPS, "model.num_layers=7"), "model.num_layers"),
    ((*STAGES, "train.accumulate=layer"), "train.accumulate"),
    ((*STAGES, "optimizer.offload=moments"), "optimizer.offload"),
    ((*STAGES, "remat.policy=custom", "remat.tensors=q=offload,k=keep"), "remat.tensors"),
    ((*STAGES, "remat.policy=full", "remat.every=3"), "remat.every"),
    ((*STAGES, "model.vocab_size=322"), "model.vocab_size"),
    (("mesh.stage=2", "mesh.tensor=4", "model.vocab_size=324"), "model.vocab_size"),
    ((*STAGES, "sharding.rules.embed=fsdp+stage"), "sharding.rules.embed"),
    (("mesh.stage=2", "mesh.tensor=4", "sharding.rules.vocab=tensor+stage"), "sharding.rules.vocab"),
    # ---- experts
    (("mesh.expert=8",), "mesh.expert"),
    (("mesh.expert=8", "model.num_experts=12"), "model.num_experts"),
    ((*EXPERTS, "model.experts_per_token=9"), "model.experts_per_token"),
    ((*EXPERTS, "model.experts_per_token=1"), "model.renormalize"),
    ((*EXPERTS, "moe.bias_rate=0.01"), "moe.bias_rate"),
    ((*EXPERTS, "sharding.rules.experts="), "sharding.rules.experts"),
    ((*EXPERTS, "sharding.rules.experts=fsdp+expert"), "sharding.rules.experts"),
    ((*EXPERTS, "sharding.rules.expert_embed=expert"), "sharding.rules.expert_embed"),
    ((*EXPERTS, "sharding.rules.batch=data+fsdp"), "sharding.rules.batch"),
    ((*TENSOR, "sharding.rules.mlp=", "sharding.rules.experts=expert+tensor"), "sharding.rules.experts"),
    ((*TENSOR, "sharding.rules.mlp=", "sharding.rules.expert_embed=tensor"), "sharding.rules.expert_embed"),
    ((*TENSOR, "model.d_ff=126"), "model.d_ff"),
    ((*EXPERTS, "lora.rank=4", "lora.experts=none", "lora.targets=wq,gate"), "lora.targets"),
    ((*EXPERTS, "precision=fp8", "moe.impl=ragged"), "precision"),
    (("mesh.fsdp=8", "model.router_bias=true"), "model.router_bias"),
    (("mesh.fsdp=8", "moe.capacity_factor=2.0"), "moe.capacity_factor"),
    ((*EXPERTS, "model.shared_d_ff=8200", "dtypes.m=int8"), "dtypes.m"),
]


@pytest.mark.parametrize(("overrides", "key"), WRONG, ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")
def test_wrong(overrides: tuple[str, ...], key: str):
    """One mistake gives one line. Only a rule for logical axes may break the constraints of several keys."""
    keys = [p.key for p in found(*overrides)]
    assert key in keys
    assert any(o.startswith("sharding.rules") for o in overrides) or keys == [key]


def test_uneven_rows_in_8_bits_need_hopper():
    """The fix keeps what fp8.exclude lists already. With a capacity, or one expert a device, rows are even."""
    (line,) = problems_of(*EXPERTS, "precision=fp8", "fp8.exclude=mlp.gate,mlp.up", devices=B200)
    assert "B200" in line and "fp8.exclude=mlp.gate,mlp.up,mlp.down." in line
    for right in (("mesh.expert=8", "mesh.fsdp=1"), ("moe.capacity_factor=2.0",), ("fp8.exclude=mlp.gate,mlp.up,mlp.down",)):
        assert problems_of(*EXPERTS, "precision=fp8", *right, devices=B200) == []
    for devices in (H200, CPUS):
        assert problems_of(*EXPERTS, "precision=fp8", devices=devices) == []


@pytest.mark.parametrize(("devices", "more"), [(V100, "precision=bf16"), (CPUS, "precision=bf16"), (H200, "precision=f32")])
def test_pallas_grouped_matmuls_need_hopper(devices, more):
    """With `auto`, other GPUs use another implementation."""
    assert "moe.impl" in [p.key for p in found(*EXPERTS, more, "moe.impl=pallas", devices=devices)]
    assert "moe.impl" not in [p.key for p in found(*EXPERTS, more, devices=devices)]
    assert problems_of(*EXPERTS, "precision=bf16", "moe.impl=pallas", devices=H200) == []


@pytest.mark.parametrize(
    ("experts", "sizes", "zero", "whole", "cut"),
    [
        (8, {"fsdp": 8}, 3, ("expert", "fsdp", "seq"), ()),
        (8, {"fsdp": 4, "seq": 4}, 3, ("expert", "fsdp"), ("seq",)),
        (6, {"fsdp": 8, "seq": 2}, 3, ("expert", "seq"), ("fsdp",)),
        (8, {"expert": 4, "fsdp": 2}, 0, ("expert",), ()),
        (6, {"fsdp": 8}, 0, ("expert",), ()),
    ],
)
def test_experts_rest_as_wholes_while_their_number_divides(experts, sizes, zero, whole, cut):
    """Mesh axes whose size divides the experts shard whole experts. Other axes shard the experts' model dimension."""
    named = (f"--config.model.num_experts={experts}", f"--config.sharding.zero={zero}")
    run = loading.load_config(["--config=configs/tiny.py", *named]).run
    rules = rules_in_use(run.sharding, run.model.num_experts, dict.fromkeys(MESH_AXES, 1) | sizes)
    assert (rules["experts"], rules["expert_embed"]) == (whole, cut)


def test_axes_that_follow_others_have_no_rule_and_own_axes_may_have_one():
    """Key/value heads are sharded like query heads, and layers over the stages."""
    run = loading.load_config(["--config=configs/tiny.py", "--config.sharding.rules.heads="]).run
    sizes = dict.fromkeys(MESH_AXES, 1) | {"tensor": 2, "stage": 2}
    rules = rules_in_use(run.sharding, run.model.num_experts, sizes)
    assert (rules["heads"], rules["kv_heads"], rules["head_dim"], rules["layers"]) == ((), (), (), ("stage",))
    for axis, keys in (("kv_heads", ["sharding.rules.kv_heads"]), ("layers", ["sharding.rules.layers"]), ("channels", [])):
        tree = to_dict(run)
        tree["sharding"]["rules"][axis] = "tensor"
        found, problems = resolve(tree)
        assert [p.key for p in problems] == keys
        assert (axis in dict(found.sharding.rules)) != bool(keys)
