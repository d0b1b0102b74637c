"""Layouts whose steps must agree with steps on one device, each with its model.

The layouts are written as for `python -m jaxtrain.parity --meshes=`. Sequences have several documents, so that some documents
cross every border between devices (checked by test_parity.py).
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any

import helpers

from jaxtrain.config import RunConfig, flatten, to_dict
from jaxtrain.parity import compare, layouts
from jaxtrain.parity.compare import Bounds, Comparison, Trained
from jaxtrain.parity.layouts import in_float32

# Weights ten times as large as usual make attention scores differ, so that a wrong mask or position changes the results.
BASE = {"model.num_layers": 2, "model.init_std": 0.2, "data.max_segments": 6}
# Each model has 8 query heads. It has 4 key/value heads unless it sets another number.
MODELS = {
    "2 queries a key": {},
    "1 query a key": {"model.num_kv_heads": 8},
    "4 queries a key": {"model.num_kv_heads": 2},
    "8 queries a key": {"model.num_kv_heads": 1},
    "window": {"model.sliding_window": 12},
    "muon": {"optimizer.name": "muon"},
    "kinds of layers": {
        "model.num_layers": 3,
        "model.family": "gemma3",
        "model.sandwich_norm": True,
        "model.qk_norm": True,
        "model.sliding_window": 12,
        "model.attention_pattern": "lgl",
        "model.local_rope_base": 100.0,
        "model.attn_logit_scale": 24**-0.5,
    },
    # Stages of two layers each: the layers at one position of all stages are of one kind. Ring attention needs that.
    "kinds in phase": {"model.num_layers": 4, "model.sliding_window": 12, "model.attention_pattern": "lg"},
    "biases": {"model.qkv_bias": True, "model.qk_norm": True},  # with these the model has every kind of weight
    "one layer": {"model.num_layers": 1},
    # Nine layers do not divide into 2, 4 or 8 groups. With an init_std of 0.2, rounding grows so much through nine layers that
    # a ring of two without stages exceeds the bound after three steps; so it is 0.1 here.
    "stages": {"model.num_layers": 9, "model.init_std": 0.1},
    "both": {
        "model.num_layers": 4,
        "model.num_experts": 8,
        "model.d_ff": 32,
        "model.shared_d_ff": 32,
        "moe.balance_loss": 0.0,
        "moe.z_loss": 0.0,
    },
    "experts": {"model.num_experts": 8, "model.d_ff": 32, "model.shared_d_ff": 32},
    # As in DeepSeek-V3: latent attention with narrower values, a dense layer before the stack, groups of experts.
    "latent": {
        "model.num_layers": 5,
        "model.dense_layers": 1,
        "model.dense_d_ff": 48,
        "model.num_kv_heads": 8,
        "model.kv_lora_rank": 32,
        "model.q_lora_rank": 48,
        "model.qk_nope_head_dim": 8,
        "model.qk_rope_head_dim": 8,
        "model.v_head_dim": 12,
        "model.num_experts": 8,
        "model.d_ff": 32,
        "model.shared_d_ff": 32,
        "model.router": "sigmoid",
        "model.router_bias": True,
        "model.routed_scaling": 2.5,
        "model.router_groups": 4,
        "model.groups_per_token": 2,
        "moe.balance_loss": 0.0,
        "moe.z_loss": 0.0,
    },
    # With this capacity no token is dropped. The balance and z losses are computed for each microbatch, so that another number
    # of microbatches would train differently; they are off.
    "experts with room": {
        "model.num_experts": 8,
        "model.d_ff": 32,
        "moe.capacity_factor": 4.0,
        "moe.balance_loss": 0.0,
        "moe.z_loss": 0.0,
    },
    "sinks": {
        "model.num_layers": 2,
        "model.family": "gpt_oss",
        "model.num_experts": 8,
        "model.d_ff": 32,
        "model.qkv_bias": True,
        "model.attention_out_bias": True,
        "model.attention_sinks": True,
        "model.router_logit_bias": True,
        "model.expert_bias": True,
        "model.sliding_window": 12,
        "model.attention_pattern": "lg",
        "model.rope_scaling": "yarn",
        "model.rope_original_len": 32,
        "model.rope_truncate": False,
        "moe.balance_loss": 0.0,
        "moe.z_loss": 0.0,
    },
    "everything": {
        "model.tied_head": True,
        "model.qk_norm": True,
        "model.qkv_bias": True,
        "model.sliding_window": 24,
        "model.attention_softcap": 5.0,
        "model.logit_softcap": 3.0,
        "model.rope_scaling": "llama3",
        "model.rope_original_len": 32,
    },
}
# Two modules of multi-token prediction, whose blocks have experts too.
MODELS["multi-token"] = MODELS["latent"] | {"model.num_layers": 2, "model.mtp_layers": 2}
CONTEXT = (
    *(f"seq{n}" for n in (2, 4, 8)),
    *(f"seq{n}/parallel.context={method}" for method in ("ulysses", "gather") for n in (2, 4, 8)),
)
ZERO = "data2xfsdp4/train.grad_accum=2"
SCHEDULES = ("", "/pipeline.schedule=gpipe", "/pipeline.schedule=interleaved/pipeline.groups=2")
TWO, FOUR = "/train.grad_accum=2", "/train.grad_accum=4"
LAYOUTS = {
    "2 queries a key": (
        "data8",
        "fsdp8",
        "tensor4",
        *CONTEXT,
        # Pairs of axes
        "data4xfsdp2",
        "data2xfsdp4",
        "data4xtensor2",
        "data2xtensor4",
        "data4xseq2",
        "data2xseq4",
        "fsdp4xtensor2",
        "fsdp2xtensor4",
        "fsdp4xseq2",
        "fsdp2xseq4",
        "tensor4xseq2",
        "tensor2xseq4",
        # Triples
        "data2xfsdp2xtensor2",
        "data2xfsdp2xseq2",
        "data2xtensor2xseq2",
        "fsdp2xtensor2xseq2",
        "fsdp2xtensor2xseq2/parallel.context=ulysses",
        "fsdp2xtensor2xseq2/parallel.context=gather",
        # Fewer key/value heads than tensor ranks
        "tensor8",
        "tensor8/attention.impl=chunked",
        # Stages of ZeRO, and when weights are gathered
        *(f"fsdp8/sharding.zero={zero}" for zero in (0, 1, 2)),
        *(f"{ZERO}/sharding.zero={zero}" for zero in (0, 1, 2)),
        *(f"{ZERO}/sharding.gather={gather}" for gather in ("layer", "forward", "step")),
        *(f"fsdp2xtensor2xseq2/sharding.zero={zero}" for zero in (0, 1, 2)),
        *(f"data2xtensor2xseq2/train.grad_accum=2/sharding.gather={gather}" for gather in ("forward", "step")),
        "seq8/sharding.zero=2/train.grad_accum=2",
        "data8/sharding.zero=0/train.grad_accum=2",
        "fsdp8/sharding.gather=forward/remat.policy=full",
        # Ulysses groups in a ring
        "seq4/parallel.context=ulysses/attention.ulysses=2",
        "seq8/parallel.context=ulysses/attention.ulysses=2",
        "seq8/parallel.context=ulysses/attention.ulysses=4",
        "tensor2xseq4/parallel.context=ulysses/attention.ulysses=2",
        # Microbatches, activation checkpointing, other kernels
        "one/train.grad_accum=4",
        ZERO,
        "data2xfsdp2xseq2/train.grad_accum=4",
        "fsdp2xtensor2xseq2/train.grad_accum=2/remat.policy=full",
        "fsdp4xtensor2/remat.policy=full/remat.every=2",
        "fsdp4xseq2/remat.policy=attention",
        "tensor2xseq4/remat.policy=dots",
        "fsdp2xseq4/attention.impl=chunked",
        "fsdp2xseq4/attention.impl=chunked/parallel.context=gather/remat.policy=full",
        # Gradients accumulated layer by layer, in a loop and unrolled
        "fsdp4xseq2/train.grad_accum=2/train.accumulate=layer",
        "data2xfsdp2xtensor2/train.grad_accum=2/train.accumulate=layer",
        "fsdp2xtensor2xseq2/train.grad_accum=2/sharding.zero=1/parallel.scan_layers=False",
        "data2xfsdp2xtensor2/train.grad_accum=2/parallel.scan_layers=False",
    ),
    "1 query a key": CONTEXT,
    "4 queries a key": CONTEXT,
    "8 queries a key": (*CONTEXT, "tensor4xseq2", "tensor2xseq4/parallel.context=ulysses"),
    "window": (*CONTEXT, "fsdp2xtensor2xseq2", "seq8/parallel.context=ulysses/attention.ulysses=2"),
    "experts": (
        *(f"expert{n}" for n in (2, 4, 8)),
        *(f"expert{n}/moe.buffer=0.5" for n in (2, 8)),
        "fsdp8",
        "fsdp4xtensor2",
        "fsdp4xseq2",
        "expert2xfsdp4",
        "expert2xfsdp4/sharding.rules.experts=expert",
        "fsdp2xexpert2xseq2/sharding.rules.experts=expert+seq",
        "fsdp2xexpert4/sharding.zero=0",
        "data2xexpert4",
        "expert4xtensor2/remat.policy=dots",
        "expert4xseq2",
        "fsdp2xexpert2xtensor2",
        "fsdp2xexpert2xseq2/remat.policy=none",
        "expert2xtensor2xseq2/moe.buffer=0.5/remat.policy=full",
        "fsdp2xexpert2xtensor2/parallel.scan_layers=False",
        "expert8/remat.policy=full/remat.every=2",
        "fsdp2xexpert4/sharding.gather=forward",
    ),
    "experts with room": (
        "expert8",
        "expert4xseq2/remat.policy=full",
        "one/train.grad_accum=4",
        *(f"fsdp2xexpert4/train.grad_accum=2/sharding.zero={zero}" for zero in (0, 1, 2, 3)),
        *(f"fsdp4xexpert2/train.grad_accum=2/sharding.rules.experts=expert/sharding.zero={zero}" for zero in (1, 2, 3)),
        *(f"data2xfsdp2xexpert2/train.grad_accum=2/sharding.gather={gather}" for gather in ("layer", "forward", "step")),
        "expert2xtensor2xseq2/train.grad_accum=2/train.accumulate=layer",
        "fsdp2xexpert2xtensor2/train.grad_accum=2/parallel.scan_layers=False",
    ),
    "biases": (
        "fsdp4xtensor2",
        "data2xfsdp2xseq2/sharding.zero=1",
        *(f"data2xfsdp2xtensor2{TWO}/sharding.zero={zero}" for zero in (0, 1, 2, 3)),
        *(f"data2xfsdp2xtensor2{TWO}/sharding.gather={gather}" for gather in ("forward", "step")),
        f"fsdp4xtensor2{TWO}/sharding.zero=2",
        "data2xfsdp4/remat.policy=dots",
        "fsdp8/sharding.gather=forward/remat.policy=dots",
    ),
    "one layer": ("fsdp8", "data2xfsdp4/remat.policy=full"),
    "stages": (
        *(f"stage{n}{FOUR}{schedule}" for n in (2, 4) for schedule in SCHEDULES),
        *(f"{mesh}{TWO}{schedule}" for mesh in ("stage2xfsdp4", "stage2xtensor4") for schedule in SCHEDULES),
        *(f"{mesh}{TWO}{schedule}" for mesh in ("data4xstage2", "stage2xseq4") for schedule in SCHEDULES),
        *(f"{mesh}{FOUR}{schedule}" for mesh in ("stage4xtensor2", "data2xstage4") for schedule in SCHEDULES),
        *(f"{mesh}{FOUR}{schedule}" for mesh in ("stage4xfsdp2", "stage4xseq2") for schedule in SCHEDULES),
        f"stage2xfsdp2xtensor2{FOUR}/pipeline.schedule=interleaved/pipeline.groups=4",
        f"stage2xfsdp2xseq2{FOUR}/parallel.context=ulysses",
        f"stage2xtensor2xseq2{FOUR}/remat.policy=full",
        f"data2xstage2xfsdp2{TWO}/remat.policy=full/remat.every=5",  # a stage has at most 5 layers
        f"stage2xfsdp2xtensor2{FOUR}/remat.policy=none/parallel.scan_layers=False",
        f"stage8{FOUR}",
        "stage2xfsdp4/train.grad_accum=1",
        *(f"data2xstage2xfsdp2{TWO}/sharding.zero={zero}" for zero in (0, 1, 2)),
        *(f"stage2xfsdp2xtensor2{TWO}/sharding.gather={gather}" for gather in ("forward", "step")),
        f"stage2xfsdp4{TWO}/attention.impl=chunked",
    ),
    "both": (
        f"stage2xexpert4{TWO}",
        f"stage4xexpert2{FOUR}/pipeline.schedule=gpipe",
        f"stage2xexpert2xtensor2{FOUR}/pipeline.schedule=interleaved/pipeline.groups=2",
        f"stage2xfsdp2xexpert2{TWO}/sharding.zero=1",
        f"stage2xexpert2xseq2{FOUR}/remat.policy=full/moe.buffer=0.5",
    ),
    "latent": (
        "fsdp4xtensor2",
        "seq4",
        "seq4/parallel.context=gather",
        "fsdp2xseq4/parallel.context=ulysses/attention.impl=chunked",
        "fsdp2xtensor2xseq2/remat.policy=full",
        "expert4xtensor2/remat.policy=attention",
        "fsdp2xexpert4/remat.policy=custom/remat.tensors=q_latent=keep,kv_latent=keep",
        "data2xexpert2xtensor2/train.grad_accum=2/parallel.scan_layers=False",
        "data2xfsdp4/train.grad_accum=2/sharding.zero=1",
        "fsdp8/remat.policy=dots",
        f"stage4xfsdp2{FOUR}",
        f"stage2xexpert2xtensor2{FOUR}/pipeline.schedule=interleaved/pipeline.groups=2",
        f"stage2xfsdp2xseq2{TWO}/pipeline.schedule=gpipe/sharding.zero=2",
    ),
    "multi-token": (
        "fsdp4xtensor2",
        "seq4",
        "expert4xtensor2/remat.policy=full",
        "data2xfsdp2xseq2/train.grad_accum=2/sharding.zero=1",
        "fsdp2xtensor2xseq2/remat.policy=dots/parallel.scan_layers=False",
        "data2xfsdp4/train.grad_accum=2/train.accumulate=layer/sharding.zero=2",
        "fsdp8/sharding.gather=step",
    ),
    "muon": (
        f"stage2xfsdp2{TWO}",
        "fsdp8",
        "fsdp4xtensor2",
        "data2xfsdp2xtensor2/train.grad_accum=2",
        "fsdp2xtensor2xseq2",
        "fsdp8/sharding.zero=1",
    ),
    "kinds of layers": (
        f"stage2xfsdp2xtensor2{TWO}",
        "fsdp4xtensor2/remat.policy=full",
        "data2xseq4",
        "data2xfsdp2xtensor2/train.grad_accum=2/parallel.scan_layers=False",
        "data2xfsdp2xseq2/train.grad_accum=2/train.accumulate=layer",
        "fsdp8/remat.policy=full/remat.every=2",
        "fsdp4xseq2/parallel.context=ulysses/remat.policy=attention/attention.impl=chunked",
    ),
    "kinds in phase": (f"stage2xseq2{TWO}", f"stage2xfsdp2xseq2{TWO}/parallel.context=gather"),
    "sinks": (
        "fsdp4xtensor2",
        "data2xseq4",
        "fsdp2xtensor2xseq2/parallel.context=ulysses",
        "fsdp2xexpert2xtensor2",
        "expert8",
        "expert2xtensor2xseq2/moe.buffer=0.5/remat.policy=full",
        f"stage2xexpert2xtensor2{FOUR}",
    ),
    "everything": (
        f"stage2xfsdp2xseq2{TWO}/remat.policy=full",
        "fsdp4xtensor2",
        "fsdp2xtensor2xseq2/train.grad_accum=2/remat.policy=full",
        "data2xseq4",
        f"data2xfsdp4{TWO}/sharding.zero=2",
    ),
}
# Layouts that combine as many settings as possible: these few contain each pair of settings that any layout here has.
INTERLEAVED = "/pipeline.schedule=interleaved/pipeline.groups=2"
GPIPE = "/pipeline.schedule=gpipe"
CUSTOM = "/remat.policy=custom/remat.tensors=q=keep,mlp_up=keep"
PAIRS = (
    "muon: data2xstage2xfsdp2/sharding.zero=0/remat.policy=full",
    f"stages: stage2xfsdp2xseq2{TWO}{INTERLEAVED}/sharding.zero=1/parallel.context=gather/attention.impl=chunked",
    f"8 queries a key: data2xtensor2xseq2/sharding.gather=forward/parallel.context=ulysses/attention.impl=chunked{CUSTOM}",
    f"both: data2xstage2xexpert2{TWO}{GPIPE}/sharding.zero=2/attention.impl=chunked",
    f"kinds in phase: stage2xfsdp2xseq2{TWO}{GPIPE}/sharding.gather=forward/parallel.context=ulysses",
    "4 queries a key: fsdp2xtensor2xseq2/sharding.zero=2/parallel.context=gather/remat.policy=dots",
    f"both: stage2xexpert2xtensor2{TWO}{INTERLEAVED}/sharding.gather=forward/attention.impl=chunked/remat.policy=full",
    "experts: data2xfsdp2xexpert2/sharding.zero=1/moe.buffer=0.5",
    f"stages: data2xstage2xseq2{TWO}{INTERLEAVED}/sharding.gather=step/parallel.context=gather/remat.policy=full",
    f"experts with room: expert2xtensor2xseq2{TWO}/sharding.zero=0",
    "experts: fsdp2xexpert2xtensor2/sharding.gather=step/attention.impl=chunked",
    f"everything: data2xtensor2xseq2{TWO}/sharding.zero=1/attention.impl=chunked/remat.policy=full",
    f"1 query a key: stage2xtensor2xseq2{TWO}{GPIPE}/sharding.zero=2/parallel.context=gather/attention.impl=chunked"
    "/remat.policy=full",
    f"kinds of layers: data2xfsdp2xseq2{TWO}/train.accumulate=layer/remat.policy=attention",
)
MATRIX = {f"{model}: {layout}": (model, layout) for model, names in LAYOUTS.items() for layout in names}
MATRIX |= {name: tuple(name.split(": ")) for name in PAIRS}
# The layouts of every run; the others run in a campaign. test_parity.py checks that these contain every model and every pair.
# The models "biases", "sinks" and "one layer" are in no pair. The last entry sums the embedding table's gradient over seq, in
# one microbatch.
LATENT = "latent: data2xexpert2xtensor2/train.grad_accum=2/parallel.scan_layers=False"
SINKS = ("sinks: expert2xtensor2xseq2/moe.buffer=0.5/remat.policy=full", "sinks: data2xseq4")
FURTHER = "multi-token: data2xfsdp2xseq2/train.grad_accum=2/sharding.zero=1"
SAMPLE = (
    *(*PAIRS, LATENT, FURTHER, *SINKS, "biases: fsdp4xtensor2", "one layer: fsdp8"),
    "2 queries a key: fsdp2xtensor2xseq2/sharding.zero=0",
)
SAMPLE_BF16 = (
    "2 queries a key: data2xfsdp4/train.grad_accum=2/sharding.gather=step",
    "2 queries a key: fsdp8/sharding.zero=2",
    "window: seq2/parallel.context=ulysses",
)


def settings(run: RunConfig) -> set[tuple[str, Any]]:
    """Return the settings of a layout: the mesh axes that shard it, and each choice that changes its program."""
    found: set[tuple[str, Any]] = {(axis, size > 1) for axis, size in dataclasses.asdict(run.mesh).items()}
    found |= {("zero", run.sharding.zero), ("gather", run.sharding.gather), ("kernel", run.attention.impl)}
    found |= {("context", run.parallel.context), ("accum", run.train.grad_accum > 1)}
    return found | {("remat", run.remat.policy != "none"), ("schedule", run.pipeline.schedule)}


def pairs(names: Iterable[str]) -> set[frozenset[tuple[str, Any]]]:
    """Return every pair of settings that occurs together in one of these entries of MATRIX."""
    runs = [config(*MATRIX[name], "f32") for name in names]
    return {frozenset(pair) for run in runs for pair in itertools.combinations(settings(run), 2)}


def config(model: str, layout: str, precision: str) -> RunConfig:
    """Return a tiny run of this model in this layout. Raises ConfigError if the model cannot have the layout."""
    (found,), problems = layouts.parse(layout)
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
    exact = None if precision == "f32" else one_device(in_float32(run))
    return reference, compare.bounds(reference, exact, parts, run.train.global_batch * run.data.seq_len)


one_device = functools.cache(helpers.first_steps)


def against_one_device(name: str, precision: str) -> Comparison:
    """Compare three steps of an entry of MATRIX with three steps of the same model on one device."""
    model, layout = MATRIX[name]
    run = config(model, layout, precision)
    # The reference comes first, so that a bug that a test plants in the step is not in the reference.
    reference, bounds = allowed(model, precision, len(helpers.devices_of(run)) * run.train.grad_accum)
    return compare.compare(helpers.first_steps(run), reference, bounds)
