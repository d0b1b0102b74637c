"""What pipeline stages and experts ask of a config: every refusal in its words, and what is right beside it."""

import pytest

from jaxtrain import launch
from jaxtrain.config import MESH_AXES, rules_in_use
from jaxtrain.hardware import Devices
from jaxtrain.validate import validate_step

CPUS = Devices("cpu", "cpu", 8, 4.0, "test")
H200 = Devices("gpu", "NVIDIA H200", 8, 140.4, "test", 90)
V100 = Devices("gpu", "V100", 8, 32.0, "test", 70)
# 8 layers of width 128 with a vocabulary of 320, in 4 microbatches of 8.
MODEL = (
    *("model.num_layers=8", "model.d_model=128", "model.d_ff=256", "model.vocab_size=320", "train.grad_accum=4"),
    *("train.global_batch=32", "data.source=synthetic", "eval.every_steps=0", "attention.impl=chunked", "mesh.data=1"),
)
EXPERTS = ("model.num_experts=8", "mesh.expert=4", "mesh.fsdp=2")
STAGES = ("mesh.stage=4", "mesh.fsdp=2")
GROUPS = ("pipeline.schedule=interleaved", "pipeline.groups=2")


def problems_of(*overrides: str, devices: Devices = CPUS) -> list[str]:
    loaded = launch.load(["--config=configs/tiny.py", *(f"--config.{o}" for o in (*MODEL, *overrides))])
    return [str(p) for p in (*loaded.problems, *validate_step(loaded.run, devices))]


RIGHT = [
    STAGES,
    (*STAGES, *GROUPS),
    (*STAGES, "pipeline.schedule=gpipe"),
    (*STAGES, "model.num_layers=6"),  # layers need not divide
    (*STAGES, *GROUPS, "model.num_layers=9"),
    (*STAGES, "train.grad_accum=2"),  # a large bubble, and no mistake
    (*STAGES, "train.grad_accum=1"),
    (*STAGES, "train.accumulate=microbatch"),
    (*STAGES, "remat.policy=full", "remat.every=2"),
    (*STAGES, "remat.policy=custom", "remat.tensors=q=keep"),
    (*STAGES, "model.vocab_size=322", "sharding.rules.vocab=tensor"),
    (*STAGES, "optimizer.name=muon"),
    (*STAGES, "dtypes.m=int8", "dtypes.v=int8"),
    (*GROUPS, "mesh.fsdp=8"),  # one stage: a schedule is not used, as by the layout that others are compared with
    EXPERTS,
    (*EXPERTS, "model.router=sigmoid", "model.router_bias=true", "experts.bias_rate=0.01"),
    (*EXPERTS, "model.shared_d_ff=128", "experts.capacity=1.5"),
    ("model.num_experts=6", "mesh.fsdp=8"),
    ("model.num_experts=8", "mesh.expert=2", "mesh.stage=2", "mesh.tensor=2"),
    ("model.num_experts=8", "mesh.expert=2", "mesh.stage=4", "model.num_layers=6", "experts.capacity=2.0"),
    ("model.num_experts=8", "mesh.fsdp=2", "mesh.stage=4", "model.num_layers=6"),
    (*EXPERTS, "sharding.rules.experts=expert"),
    (*EXPERTS, "sharding.rules.experts=expert", "sharding.rules.expert_embed="),
    (*EXPERTS, "lora.rank=4", "lora.targets=wq,wv"),
    (*EXPERTS, "dtypes.m=int8", "dtypes.v=int8"),
    (*EXPERTS, "model.experts_per_token=1", "model.renormalize=false"),
    (*EXPERTS, "model.experts_per_token=1", "train.freeze=layers.mlp.router"),
]


@pytest.mark.parametrize("overrides", RIGHT, ids=" ".join)
def test_right(overrides: tuple[str, ...]):
    assert problems_of(*overrides) == []


WRONG = [
    # ---- stages
    ((*STAGES, "pipeline.schedule=1f2b"), "pipeline.schedule", "Did you mean 1f1b?"),
    ((*STAGES, "pipeline.groups=0"), "pipeline.groups", "must be at least 1"),
    ((*STAGES, "pipeline.schedule=interleaved"), "pipeline.schedule", "Set pipeline.groups to 2 or more, or 1f1b."),
    ((*STAGES, "pipeline.groups=2"), "pipeline.groups", "is read only with pipeline.schedule = interleaved, which is 1f1b"),
    ((*STAGES, *GROUPS, "train.grad_accum=2"), "train.grad_accum", "in runs of mesh.stage = 4, of which it is no multiple"),
    ((*STAGES, "model.num_layers=3"), "model.num_layers", "some of the 4 groups of layers (mesh.stage = 4) would be empty"),
    (
        (*STAGES, *GROUPS, "model.num_layers=7"),
        "model.num_layers",
        "some of the 8 groups of layers (mesh.stage = 4 x pipeline.groups = 2) would be empty",
    ),
    ((*STAGES, "train.accumulate=layer"), "train.accumulate", "adds gradients up in a way of its own. Set auto."),
    ((*STAGES, "optimizer.offload=moments"), "optimizer.offload", "with mesh.stage = 4 each stage has another layer at a time"),
    (
        (*STAGES, "remat.policy=custom", "remat.tensors=q=offload,k=keep"),
        "remat.tensors",
        "waits on the device. Write keep or recompute for offload.",
    ),
    (
        (*STAGES, "remat.policy=full", "remat.every=3"),
        "remat.every",
        "does not divide the 2 layers that a stage runs at a time",
    ),
    ((*STAGES, "model.vocab_size=322"), "model.vocab_size", "or sharding.rules.vocab=''."),
    (
        ("mesh.stage=2", "mesh.tensor=4", "model.vocab_size=324"),
        "model.vocab_size",
        "does not divide over mesh.stage = 2 x mesh.tensor = 4",
    ),
    (("mesh.stage=2", "mesh.tensor=4", "model.vocab_size=324"), "model.vocab_size", "or sharding.rules.vocab=tensor."),
    ((*STAGES, "sharding.rules.layers="), "sharding.rules.layers", "mesh.stage = 4 splits nothing but layers"),
    ((*STAGES, "sharding.rules.embed=fsdp+stage"), "sharding.rules.embed", "mesh axis 'stage' splits layers"),
    (("sharding.rules.layers=fsdp", "mesh.fsdp=8"), "sharding.rules.layers", "layers follow each other over 'stage' only"),
    (("mesh.stage=2", "mesh.tensor=4", "sharding.rules.vocab=tensor+stage"), "sharding.rules.vocab", "Name stage first"),
    # ---- experts
    (
        ("model.num_experts=8", "mesh.expert=2", "mesh.stage=4", "model.num_layers=6"),
        "model.num_layers",
        "an empty place would send all tokens to the same experts over mesh.expert. Set a multiple of 4, another mesh.stage",
    ),
    (("mesh.expert=8",), "mesh.expert", "splits experts, and model.num_experts = 0"),
    (("mesh.expert=8", "model.num_experts=12"), "model.num_experts", "does not divide over mesh.expert = 8"),
    ((*EXPERTS, "model.experts_per_token=9"), "model.experts_per_token", "there are only model.num_experts = 8 experts"),
    ((*EXPERTS, "model.experts_per_token=0"), "model.experts_per_token", "must be at least 1"),
    ((*EXPERTS, "model.router=tanh"), "model.router", "no such choice"),
    ((*EXPERTS, "model.experts_per_token=1"), "model.renormalize", "teaches the router nothing. Set false, or keep"),
    ((*EXPERTS, "experts.impl=triton"), "experts.impl", "no such choice"),
    ((*EXPERTS, "experts.capacity=-1.0"), "experts.capacity", "must be at least 0"),
    ((*EXPERTS, "experts.buffer=0.0"), "experts.buffer", "must be above 0"),
    ((*EXPERTS, "experts.bias_rate=0.01"), "experts.bias_rate", "is read only with model.router_bias"),
    (
        (*EXPERTS, "sharding.rules.experts="),
        "sharding.rules.experts",
        "mesh.expert = 4 splits nothing but experts and the batch",
    ),
    (
        (*EXPERTS, "sharding.rules.experts=fsdp"),
        "sharding.rules.experts",
        "does not name it, and mesh.expert = 4 splits nothing but experts and the batch. Name expert first",
    ),
    ((*EXPERTS, "sharding.rules.expert_embed=expert"), "sharding.rules.expert_embed", "experts of its own and whole ones"),
    ((*EXPERTS, "sharding.rules.experts=fsdp+expert"), "sharding.rules.experts", "mesh axis 'expert' stands behind another"),
    ((*EXPERTS, "sharding.rules.batch=data+fsdp"), "sharding.rules.batch", "sends tokens of its own to the experts"),
    (
        ("model.num_experts=8", "mesh.tensor=8", "sharding.rules.mlp=", "sharding.rules.experts=expert+tensor"),
        "sharding.rules.experts",
        "does not split the batch, and every device needs whole rows of its experts' weights",
    ),
    (
        ("model.num_experts=8", "mesh.tensor=8", "sharding.rules.mlp=", "sharding.rules.expert_embed=tensor"),
        "sharding.rules.expert_embed",
        "does not split the batch, and every device needs whole rows of its experts' weights",
    ),
    (("model.num_experts=8", "mesh.tensor=4", "mesh.data=2", "model.d_ff=126"), "model.d_ff", "does not divide"),
    (("model.num_experts=8", "mesh.tensor=4", "mesh.data=2", "model.shared_d_ff=126"), "model.shared_d_ff", "does not divide"),
    ((*EXPERTS, "lora.rank=4", "lora.targets=wq,gate"), "lora.targets", "gate are theirs. Name weights of attention"),
    ((*EXPERTS, "precision=fp8"), "precision", "several experts of a device have uneven numbers of rows"),
    (("mesh.fsdp=8", "model.router_bias=true"), "model.router_bias", "is read only of a model with experts"),
    (("mesh.fsdp=8", "model.shared_d_ff=64"), "model.shared_d_ff", "is read only of a model with experts"),
    (("mesh.fsdp=8", "model.router=sigmoid"), "model.router", "is read only of a model with experts"),
    (("mesh.fsdp=8", "experts.capacity=2.0"), "experts.capacity", "is read only of a model with experts"),
    (
        (*EXPERTS, "model.shared_d_ff=8200", "dtypes.m=int8"),
        "dtypes.m",
        "no dimension of mlp.gate divides into blocks",
    ),
]


@pytest.mark.parametrize(("overrides", "key", "words"), WRONG, ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")
def test_wrong(overrides: tuple[str, ...], key: str, words: str):
    lines = [line for line in problems_of(*overrides) if line.startswith(key)]
    assert any(words in line for line in lines), (lines, problems_of(*overrides))


def test_one_mistake_is_one_line():
    for overrides, _, _ in WRONG:
        if not any(o.startswith("sharding.rules") for o in overrides):
            assert len(problems_of(*overrides)) == 1, problems_of(*overrides)


def test_old_gpus_take_the_plain_grouped_matmuls():
    (line,) = [line for line in problems_of(*EXPERTS, devices=V100) if line.startswith("experts.impl")]
    assert "needs a GPU from Ampere (sm80) on; V100 is sm70. Set ragged." in line
    assert not any("experts" in line for line in problems_of(*EXPERTS, "experts.impl=ragged", devices=V100))
    assert problems_of(*EXPERTS, devices=H200) == []


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
    """Then no gather puts them in another order; the rest of the mesh splits the model dimension of each."""
    named = (f"--config.model.num_experts={experts}", f"--config.sharding.zero={zero}")
    run = launch.load(["--config=configs/tiny.py", *named]).run
    rules = rules_in_use(run, dict.fromkeys(MESH_AXES, 1) | sizes)
    assert (rules["experts"], rules["expert_embed"]) == (whole, cut)
