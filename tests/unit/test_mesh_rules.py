"""The rules of a layout: each refusal names its key, the broken rule and a fix; similar valid settings pass."""

import pytest

from jaxtrain import launch
from jaxtrain.config import MESH_AXES, Problem, rules_in_use
from jaxtrain.hardware import Devices
from jaxtrain.validate import validate_step

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
    loaded = launch.load(["--config=configs/tiny.py", *(f"--config.{o}" for o in (*MODEL, *overrides))])
    return [*loaded.problems, *validate_step(loaded.run, devices)]


def problems_of(*overrides: str, devices: Devices = CPUS) -> list[str]:
    return [str(p) for p in found(*overrides, devices=devices)]


RIGHT = [
    STAGES,
    (*STAGES, *GROUPS),
    (*STAGES, "pipeline.schedule=gpipe"),
    (*STAGES, "model.num_layers=6"),  # the number of layers need not divide by the stages
    (*STAGES, *GROUPS, "model.num_layers=9"),
    (*STAGES, "train.grad_accum=2"),  # a large bubble is allowed
    (*STAGES, "train.grad_accum=1"),
    (*STAGES, "train.accumulate=microbatch"),
    (*STAGES, "remat.policy=full", "remat.every=2"),
    (*STAGES, "remat.policy=custom", "remat.tensors=q=keep"),
    (*STAGES, "model.vocab_size=322", "sharding.rules.vocab=tensor"),
    (*STAGES, "optimizer.name=muon"),
    (*STAGES, "dtypes.m=int8", "dtypes.v=int8"),
    (*GROUPS, "mesh.fsdp=8"),  # with one stage the schedule is ignored, as in the reference layout of parity
    EXPERTS,
    (*EXPERTS, "model.router=sigmoid", "model.router_bias=true", "moe.bias_rate=0.01"),
    (*EXPERTS, "model.shared_d_ff=128", "moe.capacity_factor=1.5"),
    ("model.num_experts=6", "mesh.fsdp=8"),
    ("model.num_experts=8", "mesh.expert=2", "mesh.stage=2", "mesh.tensor=2"),
    ("model.num_experts=8", "mesh.expert=2", "mesh.stage=4", "model.num_layers=6", "moe.capacity_factor=2.0"),
    ("model.num_experts=8", "mesh.fsdp=2", "mesh.stage=4", "model.num_layers=6"),
    (*EXPERTS, "sharding.rules.experts=expert"),
    (*EXPERTS, "sharding.rules.experts=expert", "sharding.rules.expert_embed="),
    (*EXPERTS, "lora.rank=4", "lora.targets=wq,wv"),
    (*EXPERTS, "dtypes.m=int8", "dtypes.v=int8"),
    (*EXPERTS, "model.experts_per_token=1", "model.renormalize=false"),
    (*EXPERTS, "model.experts_per_token=1", "train.freeze=layers.mlp.router"),
    (*EXPERTS, "precision=fp8", "fp8.exclude=mlp.gate,mlp.up,mlp.down"),
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
BY_LAYER = ("train.accumulate=layer", "mesh.data=4")

# (overrides, key, words of the rule or the fix)
WRONG = [
    # ---- ZeRO and microbatches
    *[
        ((f"sharding.zero={zero}", f"sharding.gather={gather}", "mesh.fsdp=8"), "sharding.gather", "Set sharding.zero to 3")
        for zero in (0, 1, 2)
        for gather in ("forward", "step")
    ],
    (("mesh.fsdp=8", "model.d_model=60", "model.num_heads=6", "model.num_kv_heads=6"), "model.d_model", "does not divide"),
    # ---- sequences
    (("mesh.seq=4", "mesh.data=2", "data.seq_len=60"), "data.seq_len", "4 ranks of a ring"),
    ((*SEQ, "data.seq_len=60", "model.num_heads=8", "model.num_kv_heads=8"), "data.seq_len", "not divide over 8 ranks"),
    (("mesh.seq=4", "mesh.data=2", "attention.ulysses=2"), "attention.ulysses", "only with parallel.context = ulysses"),
    ((*SEQ, "attention.ulysses=3"), "attention.ulysses", "Set one of"),
    (("mesh.seq=8", "parallel.context=rings"), "parallel.context", "Did you mean ring?"),
    # ---- the table of logical axes
    (("mesh.seq=4", "mesh.tensor=2", "sharding.rules.sequence=tensor"), "sharding.rules.sequence", "Set 'seq'"),
    (("mesh.seq=4", "mesh.tensor=2", "sharding.rules.residual=tensor+seq"), "sharding.rules.residual", "Set seq+tensor"),
    (("mesh.seq=4", "mesh.fsdp=2", "sharding.rules.embed=seq+fsdp"), "sharding.rules.embed", "Set fsdp+seq"),
    (("mesh.data=4", "mesh.fsdp=2", "sharding.rules.batch=fsdp+data"), "sharding.rules.batch", "Set data+fsdp"),
    (
        ("mesh.tensor=8", "model.d_model=192", "model.num_heads=24", "model.num_kv_heads=3"),
        "model.num_kv_heads",
        "does not divide",
    ),
    # ---- stages
    ((*STAGES, "pipeline.schedule=1f2b"), "pipeline.schedule", "Did you mean 1f1b?"),
    ((*STAGES, "pipeline.groups=0"), "pipeline.groups", "at least 1"),
    ((*STAGES, "pipeline.schedule=interleaved"), "pipeline.schedule", "Set pipeline.groups to 2"),
    ((*STAGES, "pipeline.groups=2"), "pipeline.groups", "interleaved"),
    ((*STAGES, *GROUPS, "train.grad_accum=2"), "train.grad_accum", "mesh.stage = 4"),
    ((*STAGES, "model.num_layers=3"), "model.num_layers", "some of the 4 groups"),
    ((*STAGES, *GROUPS, "model.num_layers=7"), "model.num_layers", "some of the 8 groups"),
    ((*STAGES, "train.accumulate=layer"), "train.accumulate", "Set auto"),
    ((*STAGES, "optimizer.offload=moments"), "optimizer.offload", "mesh.stage = 4"),
    ((*STAGES, "remat.policy=custom", "remat.tensors=q=offload,k=keep"), "remat.tensors", "Write keep or recompute"),
    ((*STAGES, "remat.policy=full", "remat.every=3"), "remat.every", "does not divide the 2 layers"),
    ((*STAGES, "model.vocab_size=322"), "model.vocab_size", "sharding.rules.vocab=''"),
    (("mesh.stage=2", "mesh.tensor=4", "model.vocab_size=324"), "model.vocab_size", "mesh.stage = 2 x mesh.tensor = 4"),
    (("mesh.stage=2", "mesh.tensor=4", "model.vocab_size=324"), "model.vocab_size", "sharding.rules.vocab=tensor"),
    ((*STAGES, "sharding.rules.layers="), "sharding.rules.layers", "mesh.stage = 4"),
    ((*STAGES, "sharding.rules.embed=fsdp+stage"), "sharding.rules.embed", "'stage'"),
    (("sharding.rules.layers=fsdp", "mesh.fsdp=8"), "sharding.rules.layers", "Set 'stage'"),
    (("mesh.stage=2", "mesh.tensor=4", "sharding.rules.vocab=tensor+stage"), "sharding.rules.vocab", "Set stage+tensor"),
    # ---- experts
    (
        ("model.num_experts=8", "mesh.expert=2", "mesh.stage=4", "model.num_layers=6"),
        "model.num_layers",
        "Set a multiple of 4",
    ),
    (("mesh.expert=8",), "mesh.expert", "model.num_experts = 0"),
    (("mesh.expert=8", "model.num_experts=12"), "model.num_experts", "mesh.expert = 8"),
    ((*EXPERTS, "model.experts_per_token=9"), "model.experts_per_token", "model.num_experts = 8"),
    ((*EXPERTS, "model.experts_per_token=0"), "model.experts_per_token", "at least 1"),
    ((*EXPERTS, "model.router=tanh"), "model.router", "no such choice"),
    ((*EXPERTS, "model.experts_per_token=1"), "model.renormalize", "Set false"),
    ((*EXPERTS, "moe.impl=triton"), "moe.impl", "no such choice"),
    ((*EXPERTS, "moe.capacity_factor=-1.0"), "moe.capacity_factor", "at least 0"),
    ((*EXPERTS, "moe.buffer=0.0"), "moe.buffer", "above 0"),
    ((*EXPERTS, "moe.bias_rate=0.01"), "moe.bias_rate", "model.router_bias"),
    ((*EXPERTS, "sharding.rules.experts="), "sharding.rules.experts", "mesh.expert = 4"),
    ((*EXPERTS, "sharding.rules.experts=fsdp"), "sharding.rules.experts", "Name expert first"),
    ((*EXPERTS, "sharding.rules.expert_embed=expert"), "sharding.rules.expert_embed", "expert"),
    ((*EXPERTS, "sharding.rules.experts=fsdp+expert"), "sharding.rules.experts", "Set expert+fsdp"),
    ((*EXPERTS, "sharding.rules.batch=data+fsdp"), "sharding.rules.batch", "expert"),
    *[
        (("model.num_experts=8", "mesh.tensor=8", "sharding.rules.mlp=", f"sharding.rules.{rule}"), key, "be sharded over")
        for key, rule in (
            ("sharding.rules.experts", "experts=expert+tensor"),
            ("sharding.rules.expert_embed", "expert_embed=tensor"),
        )
    ],
    ((*TENSOR, "model.d_ff=126"), "model.d_ff", "does not divide"),
    ((*TENSOR, "model.shared_d_ff=126"), "model.shared_d_ff", "does not divide"),
    ((*EXPERTS, "lora.rank=4", "lora.targets=wq,gate"), "lora.targets", "Name weights of attention"),
    ((*EXPERTS, "precision=fp8", "moe.impl=ragged"), "precision", "moe.impl = ragged"),
    (("model.num_experts=8", "mesh.expert=8", "precision=fp8", "moe.impl=ragged"), "precision", "moe.impl = ragged"),
    *[
        (("mesh.fsdp=8", f"{key}={value}"), key, "experts")
        for key, value in (
            ("model.router_bias", "true"),
            ("model.shared_d_ff", "64"),
            ("model.router", "sigmoid"),
            ("moe.capacity_factor", "2.0"),
        )
    ],
    ((*EXPERTS, "model.shared_d_ff=8200", "dtypes.m=int8"), "dtypes.m", "mlp.gate"),
]


@pytest.mark.parametrize(("overrides", "key", "words"), WRONG, ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")
def test_wrong(overrides: tuple[str, ...], key: str, words: str):
    """One mistake gives one line. Only a rule for logical axes may break the constraints of several keys."""
    problems = found(*overrides)
    problem, *_ = [p for p in problems if p.key == key]
    assert words in str(problem)
    assert problem.rule and problem.remedy
    assert any(o.startswith("sharding.rules") for o in overrides) or len(problems) == 1, [str(p) for p in problems]


def test_uneven_rows_in_8_bits_need_hopper():
    """The fix names weights that fp8.exclude does not list yet. With a capacity, or one expert a device, rows are even."""
    (line,) = problems_of(*EXPERTS, "precision=fp8", "fp8.exclude=mlp.gate,mlp.up", devices=B200)
    assert "only Hopper" in line and "B200 is sm100" in line and "fp8.exclude=mlp.down" in line
    for right in (("mesh.expert=8", "mesh.fsdp=1"), ("moe.capacity_factor=2.0",), ("fp8.exclude=mlp.gate,mlp.up,mlp.down",)):
        assert problems_of(*EXPERTS, "precision=fp8", *right, devices=B200) == []
    for devices in (H200, CPUS):
        assert problems_of(*EXPERTS, "precision=fp8", devices=devices) == []


@pytest.mark.parametrize(
    ("devices", "more", "words"),
    [
        (V100, ("precision=bf16",), "need Hopper's WGMMA (sm90); V100 is sm70"),
        (CPUS, ("precision=bf16",), "need a GPU"),
        (H200, ("precision=f32",), "have no float32"),
    ],
)
def test_pallas_grouped_matmuls_need_hopper(devices, more, words):
    """With `auto`, other GPUs use another implementation."""
    (line,) = [line for line in problems_of(*EXPERTS, *more, "moe.impl=pallas", devices=devices) if "moe.impl" in line]
    assert words in line and "Set auto" in line
    assert not any("moe.impl" in line for line in problems_of(*EXPERTS, *more, devices=devices))
    assert problems_of(*EXPERTS, "precision=bf16", "moe.impl=pallas", devices=H200) == []


@pytest.mark.parametrize(
    ("experts", "sizes", "zero", "whole", "cut"),
    [
        (8, {"fsdp": 8}, 3, ("expert", "fsdp", "seq"), ()),
        (8, {"expert": 2, "fsdp": 4}, 3, ("expert", "fsdp", "seq"), ()),
        (8, {"fsdp": 4, "seq": 4}, 3, ("expert", "fsdp"), ("seq",)),
        (6, {"fsdp": 8, "seq": 2}, 3, ("expert", "seq"), ("fsdp",)),
        (6, {"fsdp": 8}, 3, ("expert", "seq"), ("fsdp",)),
        (8, {"expert": 4, "fsdp": 2}, 0, ("expert",), ()),
        (6, {"fsdp": 8}, 0, ("expert",), ()),
    ],
)
def test_experts_rest_as_wholes_while_their_number_divides(experts, sizes, zero, whole, cut):
    """Mesh axes whose size divides the experts shard whole experts. Other axes shard the experts' model dimension."""
    named = (f"--config.model.num_experts={experts}", f"--config.sharding.zero={zero}")
    run = launch.load(["--config=configs/tiny.py", *named]).run
    rules = rules_in_use(run, dict.fromkeys(MESH_AXES, 1) | sizes)
    assert (rules["experts"], rules["expert_embed"]) == (whole, cut)
