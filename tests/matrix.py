"""Layouts whose steps must agree with steps on one device, each with its model.

The layouts are written as for `python -m jaxtrain parity --meshes=`. Sequences have several documents, so that some documents
cross every border between devices (checked by test_parity.py).
"""

import functools
import itertools
from collections.abc import Iterable

import helpers

from jaxtrain.config.schema import MESH_AXES, RunConfig, flatten, to_dict
from jaxtrain.train import parity, parity_layouts
from jaxtrain.train.parity import Bounds, ParityComparison, Trained
from jaxtrain.train.parity_layouts import to_float32

# Weights ten times as large as usual make attention scores differ, so that a wrong mask or position changes the results.
BASE = {"model.num_layers": 1, "model.init_std": 0.2, "data.max_segments": 6}
EXPERTS = {"model.num_experts": 8, "model.d_ff": 32}
# The balance and z losses are computed for each microbatch, so that another number of microbatches would train differently.
NO_LOSSES = {"moe.balance_loss": 0.0, "moe.z_loss": 0.0}
# Each model has 8 query heads and 4 key/value heads unless it sets other numbers.
MODELS = {
    "2 queries a key": {},
    "3 queries a key": {"model.num_heads": 6, "model.num_kv_heads": 2},
    "8 queries a key": {"model.num_kv_heads": 1},
    "kinds of layers": {
        "optimizer.name": "muon",
        "model.num_layers": 3,
        "model.family": "gemma3",
        "model.norm_placement": "sandwich",
        "model.qk_norm": True,
        "model.sliding_window": 12,
        "model.attention_pattern": "lgl",
        "model.local_rope_base": 100.0,
        "model.attn_logit_scale": 24**-0.5,
    },
    # Stages of two layers each: the layers at one position of all stages are of one kind. Ring attention needs that.
    "kinds in phase": {"model.num_layers": 4, "model.sliding_window": 12, "model.attention_pattern": "lg"},
    # Five layers do not divide into 2 or 4 groups.
    "everything": {
        "train.global_batch": 8,
        "model.num_layers": 5,
        "model.init_std": 0.1,
        "model.tied_head": True,
        "model.qk_norm": True,
        "model.qkv_bias": True,
        "model.sliding_window": 24,
        "model.attention_softcap": 5.0,
        "model.logit_softcap": 3.0,
        "model.rope_scaling": "llama3",
        "model.rope_original_len": 32,
    },
    "experts": EXPERTS | {"model.shared_d_ff": 32},
    "experts on stages": EXPERTS | NO_LOSSES | {"model.num_layers": 2, "model.shared_d_ff": 32},
    "experts with room": EXPERTS | NO_LOSSES | {"moe.capacity_factor": 4.0},  # no token is dropped
    # As in DeepSeek-V3: latent attention with narrower values, a dense layer before the stack, groups of experts.
    "latent": {
        **EXPERTS,
        **NO_LOSSES,
        "model.num_layers": 3,
        "model.dense_layers": 1,
        "model.dense_d_ff": 48,
        "model.num_kv_heads": 8,
        "model.kv_lora_rank": 32,
        "model.q_lora_rank": 48,
        "model.qk_nope_head_dim": 8,
        "model.qk_rope_head_dim": 8,
        "model.v_head_dim": 12,
        "model.shared_d_ff": 32,
        "model.router": "sigmoid",
        "model.router_bias": True,
        "model.routed_scaling": 2.5,
        "model.router_groups": 4,
        "model.groups_per_token": 2,
    },
    "sinks": {
        **EXPERTS,
        **NO_LOSSES,
        "model.family": "gpt_oss",
        "model.qkv_bias": True,
        "model.attention_out_bias": True,
        "model.attention_sinks": True,
        "model.router_logit_bias": True,
        "model.expert_bias": True,
        "model.sliding_window": 12,
        "model.rope_scaling": "yarn",
        "model.rope_original_len": 32,
        "model.rope_truncate": False,
    },
}
MODELS["multi-token"] = MODELS["latent"] | {
    "model.num_layers": 1,
    "model.dense_layers": 0,
    "model.dense_d_ff": 0,
    "model.mtp_layers": 1,
}
TWO, FOUR = "/train.grad_accum=2", "/train.grad_accum=4"
GPIPE = "/pipeline.schedule=gpipe"
INTERLEAVED = "/pipeline.schedule=interleaved/pipeline.groups=2"
CHUNKED = "/attention.impl=chunked"
CUSTOM = "/remat.policy=custom/remat.tensors=q=keep,mlp_up=keep"
# The layouts of every run, in float32, with each pair of mesh axes (checked by test_parity.py).
SAMPLE = (
    f"everything: stage2xfsdp2xseq2{TWO}{INTERLEAVED}/sharding.zero=1/parallel.context=gather{CHUNKED}",
    f"experts on stages: expert2xtensor2xseq2{TWO}/sharding.zero=0",
    f"8 queries a key: data2xtensor2xseq2/sharding.gather=forward/parallel.context=ulysses{CHUNKED}{CUSTOM}",
    f"experts on stages: data2xstage2xexpert2{TWO}{GPIPE}/sharding.zero=2",
    f"kinds of layers: stage2xfsdp2xtensor2{TWO}/remat.policy=full",
    "8 queries a key: fsdp2xtensor2xseq2/sharding.zero=0",  # sums the embedding table's gradient over seq, in one microbatch
    "sinks: fsdp2xtensor2xseq2/sharding.zero=2/remat.policy=dots",
    "experts: fsdp2xexpert2xtensor2/sharding.zero=1",
)
SAMPLE_BF16 = (f"8 queries a key: data2xfsdp4{TWO}/sharding.gather=step",)
# More devices on an axis, and more settings together. With these each axis is with each stage of ZeRO.
FURTHER = {
    "2 queries a key": (
        "seq8/parallel.context=gather",
        f"fsdp2xseq4{CHUNKED}/remat.policy=full",
        f"data2xfsdp2xseq2{TWO}/train.accumulate=layer/sharding.zero=1",
        f"data2xfsdp2xtensor2{TWO}/sharding.gather=step",
    ),
    "3 queries a key": ("seq8/parallel.context=ulysses",),  # Ulysses groups of two ranks, in a ring of four
    "8 queries a key": ("tensor8", "seq8/parallel.context=ulysses", "fsdp8/sharding.gather=forward"),
    "multi-token": (f"data2xfsdp2xexpert2{TWO}/parallel.scan_layers=False",),
    "kinds of layers": (
        f"data2xstage2xtensor2{TWO}/sharding.zero=0",
        "data2xseq4",
        f"fsdp2xseq2{TWO}/train.accumulate=layer/remat.every=2",
    ),
    "kinds in phase": (f"stage2xfsdp2xseq2{TWO}{GPIPE}/sharding.gather=forward/parallel.context=ulysses",),
    "everything": (f"stage4xfsdp2{FOUR}{GPIPE}", f"stage2xtensor2xseq2{FOUR}/remat.policy=full"),
    "experts": ("expert8", "fsdp2xexpert2xseq2/sharding.rules.experts=expert+seq"),
    "experts on stages": (f"stage2xexpert2xtensor2{FOUR}{INTERLEAVED}/sharding.gather=forward/remat.policy=full",),
    "experts with room": (f"expert2xtensor2xseq2{TWO}/train.accumulate=layer",),
    "latent": (
        f"fsdp2xseq4/parallel.context=ulysses{CHUNKED}",
        "fsdp2xexpert4/remat.policy=custom/remat.tensors=q_latent=keep,kv_latent=keep",
        f"stage2xfsdp2xseq2{TWO}{GPIPE}/sharding.zero=2",
    ),
    "sinks": ("data2xseq4",),
}
MATRIX = {name: tuple(name.split(": ")) for name in (*SAMPLE, *SAMPLE_BF16)}
MATRIX |= {f"{model}: {layout}": (model, layout) for model, names in FURTHER.items() for layout in names}


def pairs(names: Iterable[str]) -> set[tuple[str, str]]:
    """Return every pair of mesh axes that these entries of MATRIX shard, and every axis with its stage of ZeRO."""
    found = set()
    for name in names:
        run = config(*MATRIX[name], "f32")
        axes = [axis for axis in MESH_AXES if getattr(run.mesh, axis) > 1]
        found |= {*itertools.combinations(axes, 2), *((axis, f"ZeRO {run.sharding.zero}") for axis in axes)}
    return found


def config(model: str, layout: str, precision: str) -> RunConfig:
    """Return a tiny run of this model in this layout. Raises ConfigError if the model cannot have the layout."""
    (found,), problems = parity_layouts.parse_layouts(layout)
    assert not problems, problems
    types = dict(flatten(to_dict(helpers.tiny())))
    chosen = {o.partition("=")[0]: o.partition("=")[2] for o in found.overrides}
    typed = {key: type(types[key])(text) for key, text in chosen.items()}
    mesh = {f"mesh.{axis}": size for axis, size in found.mesh}
    return helpers.tiny(BASE | MODELS[model] | mesh | typed | {"precision": precision})


@functools.cache
def allowed(model: str, precision: str, parts: int) -> tuple[Trained, Bounds]:
    """Return a model's steps on one device, and the error bounds for a run. parts: its devices times its microbatches."""
    run = config(model, "one", precision)
    reference = one_device(run)
    exact = None if precision == "f32" else one_device(to_float32(run))
    return reference, parity.bounds(reference, exact, parts, run.train.global_batch * run.data.seq_len)


one_device = functools.cache(helpers.first_steps)


def against_one_device(name: str, precision: str) -> ParityComparison:
    """Compare three steps of an entry of MATRIX with three steps of the same model on one device."""
    model, layout = MATRIX[name]
    run = config(model, layout, precision)
    # The reference comes first, so that a bug that a test plants in the step is not in the reference.
    reference, bounds = allowed(model, precision, len(helpers.devices_of(run)) * run.train.grad_accum)
    return parity.compare_runs(helpers.first_steps(run), reference, bounds)
