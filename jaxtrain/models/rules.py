"""The rules of a model by itself, which hold for every run and for every import: sizes, rotary settings, latents, experts.

Imports no jax.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence

from jaxtrain.config import schema, unread
from jaxtrain.config.schema import (
    DELTA,
    FEED_FORWARD,
    FIT,
    GLOBAL,
    LOCAL,
    UNROTATED,
    Lora,
    Model,
    Problem,
    format_value,
    split_items,
    with_fits,
)
from jaxtrain.models import flops
from jaxtrain.models.precision import EXPERTS

LATENT_KEYS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DELTA_KEYS = {
    "linear_key_heads": 16,
    "linear_value_heads": 32,
    "linear_key_dim": 128,
    "linear_value_dim": 128,
    "linear_conv": 4,
}
# For unread.find_unread.
READ_WITH = (
    *((f"model.{name}", "model.kv_lora_rank", None) for name in LATENT_KEYS),
    ("model.dense_d_ff", "model.dense_layers", None),
    ("model.qk_norm_joint", "model.qk_norm", None),
    ("model.shared_gate", "model.shared_d_ff", None),
    ("model.mlp_bias", "model.num_experts", 0),
)
# lora.base -> numbers of a block along a matrix's inputs that have one scale. fp8 has one for all inputs.
BLOCK = {"nf4": 64, "mxfp4": 32}
SPLIT = {"wo": "heads", "down": "mlp"}  # matrix -> the logical axis of its inputs that stays sharded where it is used
LATENT_REQUIRED = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Keys of attention without latents. Latent attention does not support them.
NOT_WITH_LATENT = ("qk_norm", "qkv_bias", "attention_out_bias", "attention_sinks", "attention_gate", "local_rope_base")
NOT_WITH_LATENT += ("partial_rotary_factor",)


def check_model(model: Model, bad: set[str]) -> Iterable[Problem]:
    """Yield the problems of a model's keys beside each other. bad: keys that have an invalid value by themselves."""
    yield from _attention(model, bad)
    if not bad & {"model.attention_pattern", "model.num_layers", *(f"model.{name}" for name in DELTA_KEYS)}:
        yield from _delta(model)
    if model.kv_lora_rank and not bad & {f"model.{name}" for name in ("kv_lora_rank", *LATENT_KEYS, "head_dim")}:
        yield from _latent(model)
    if model.dense_layers and not bad & {
        f"model.{name}" for name in ("dense_layers", "dense_d_ff", "num_layers", "num_experts")
    }:
        yield from _dense(model)
    if model.num_experts and "model.num_experts" not in bad:
        yield from _experts(model, bad)


def model_problems(model: Model) -> list[Problem]:
    """Return all problems of a model of jaxtrain's own families."""
    check = lambda key, number: {p.key for p in _problems(dataclasses.replace(model, **{key.removeprefix("model."): number}))}  # noqa: E731
    return with_fits(_problems(model), check)


def target_problems(lora: Lora, adaptable: Sequence[str], experts: bool) -> list[Problem]:
    """Return a problem if lora.targets names no weight, or a name that no weight for adapters has.

    adaptable: names of the weights that can have adapters. experts: whether the model has experts.
    """
    key, targets = "lora.targets", lora.targets
    requested = split_items(targets)
    unknown = [target for target in requested if target not in adaptable]
    if requested and not unknown:
        return []
    if not adaptable:
        return [Problem(key, targets, "the model has no adapters", "Give it models.lora.Adapters, or lora.rank=0.")]
    meant = {target: difflib.get_close_matches(target, adaptable, 1, 0.7) for target in unknown}
    expert_targets = [target for target in unknown if experts and lora.experts == "none" and target in FEED_FORWARD]
    rule, instead = f"no weight for adapters has the name {', '.join(unknown)}" if unknown else "names no weight", ""
    if unknown and expert_targets == unknown:
        rule = f"lora.experts = none, and {', '.join(unknown)} are weights of experts alone"
        instead = ", or lora.experts to each"
    suggested = [name for target in requested for name in ([target] if target in adaptable else meant[target])]
    unmatched = [target for target in unknown if not meant[target] and target not in expert_targets]
    listed = adaptable if unmatched or not suggested else dict.fromkeys(suggested)
    return [Problem(key, targets, rule, f"Set {','.join(listed)}{instead}.")]


def unused_experts(lora: Lora, model: Model) -> list[Problem]:
    """Return a problem if the experts are to share adapters, and lora.targets names none of their weights."""
    if lora.experts != "shared" or not model.num_experts or {*split_items(lora.targets)} & {*FEED_FORWARD}:
        return []
    rule = f"lora.targets = {lora.targets} names no weight of the experts"
    remedy = f"Set each, or add {','.join(FEED_FORWARD)} to lora.targets."
    return [Problem("lora.experts", lora.experts, rule, remedy)]


def base_matrices(model: Model, base: str) -> dict[str, tuple[int, int, int]]:
    """Return the matrices (`flops.matrices`) that a format of lora.base stores: {} for bf16, and for mxfp4 the experts'."""
    stored_names = {"bf16": (), "mxfp4": EXPERTS if model.num_experts else ()}.get(base)
    return {name: sizes for name, sizes in flops.matrices(model).items() if stored_names is None or name in stored_names}


def base_problems(base: str, model: Model, shards: Mapping[str, int]) -> list[Problem]:
    """Return a problem if the model has no known matrix for a format of lora.base, or one that its blocks do not divide.

    shards: logical axis -> its shards where matrices are used.
    """

    def uneven(base: str) -> str:
        for name, (_, inputs, _) in base_matrices(model, base).items():
            axis = SPLIT.get(name.rpartition(".")[2], "")
            num_shards = shards.get(axis, 1)
            heads = model.linear_value_heads if ".delta." in name else model.num_heads
            if (heads if axis == "heads" else inputs) % num_shards:
                continue  # the dimension itself is refused
            if inputs // num_shards % BLOCK.get(base, 1):
                subject = f"each of {num_shards} shards of {name}" if num_shards > 1 else name
                return f"has blocks of {BLOCK[base]} inputs, and {subject} has {inputs // num_shards}"
        return ""

    if model.outside:
        rule = f"knows the matrices of jaxtrain's own families, and not those of {model.family}"
        return [Problem("lora.base", base, rule, "Set bf16.")]
    rule = uneven(base)
    if base == "mxfp4" and not model.num_experts:
        rule = "is for the matrices of experts, and model.num_experts = 0"
    if not rule:
        return []
    alternative = next(alternative for alternative in ("nf4", "fp8") if alternative != base and not uneven(alternative))
    return [Problem("lora.base", base, rule, f"Set {alternative}.")]


def _problems(model: Model) -> list[Problem]:
    keys = {name: key for name, key in schema.all_keys().items() if name.startswith("model.")}
    values = {name: getattr(model, name.removeprefix("model.")) for name in keys}
    problems = [
        Problem(name, values[name], *violation) for name, key in keys.items() if (violation := key.out_of_range(values[name]))
    ]
    bad = {problem.key for problem in problems}
    problems += [problem for problem in check_model(model, bad) if problem.key not in bad]
    return [*problems, *unread.find_unread(values, READ_WITH, bad).values()]


def _attention(model: Model, bad: set[str]) -> Iterable[Problem]:
    if not bad & {"model.num_heads", "model.num_kv_heads"} and model.num_heads % model.num_kv_heads:
        rule = f"model.num_heads = {model.num_heads} is no multiple of it"
        yield Problem("model.num_kv_heads", model.num_kv_heads, rule, f"{FIT}make model.num_heads a multiple of it.")
    if not bad & {"model.num_heads", "model.d_model", "model.head_dim"}:
        # `resolve` fills head_dim with the quotient rounded down.
        if model.d_model % model.num_heads and model.head_dim == model.d_model // model.num_heads:
            rule = f"does not divide into model.num_heads = {model.num_heads} heads"
            width = max(2, model.head_dim - 1) if model.head_dim % 2 else model.head_dim + 2  # another than the quotient
            yield Problem("model.d_model", model.d_model, rule, f"{FIT}set model.head_dim={width}.")
        elif model.head_dim % 2 or model.head_dim < 2:
            remedy = f"{FIT}change model.d_model and model.num_heads, of which it is the quotient."
            yield Problem("model.head_dim", model.head_dim, "must be even: rotary turns pairs of numbers", remedy)
    letters = set(model.attention_pattern)
    if letters - {LOCAL, GLOBAL, UNROTATED, DELTA}:
        rule = "must consist of l (with model.sliding_window), g (full attention), n (that without rotary), d (gated delta net)"
        yield Problem("model.attention_pattern", model.attention_pattern, rule, "For example lllllg.")
    elif LOCAL in letters and not model.sliding_window:
        rule = "needs model.sliding_window, which is 0"
        yield Problem("model.attention_pattern", model.attention_pattern, rule, "Set '', or model.sliding_window.")
    elif model.local_rope_base and not model.sliding_window:
        rule = "is for layers with model.sliding_window, which is 0"
        yield Problem("model.local_rope_base", model.local_rope_base, rule, "Set 0, or model.sliding_window.")
    elif letters == {DELTA}:
        rule = "has no layer of softmax attention"
        yield Problem("model.attention_pattern", model.attention_pattern, rule, "For example dddg.")
    if letters and LOCAL not in letters and model.sliding_window:
        rule = f"no layer has it: model.attention_pattern = {model.attention_pattern} has no l"
        yield Problem("model.sliding_window", model.sliding_window, rule, "Set 0.")
    if (
        not bad & {"model.partial_rotary_factor", "model.head_dim"}
        and model.partial_rotary_factor != 1
        and not model.kv_lora_rank
        and (model.rotary_dim < 2 or model.rotary_dim % 2)
    ):
        rule = f"rotates {model.rotary_dim} of the {model.head_dim} dimensions of a head, and rotary turns pairs of numbers"
        yield Problem("model.partial_rotary_factor", model.partial_rotary_factor, rule, "Set 1.0.")
    if model.rope_scaling == "llama3" and model.rope_high_freq <= model.rope_low_freq:
        rule = f"must be above model.rope_low_freq = {model.rope_low_freq:g}"
        yield Problem("model.rope_high_freq", model.rope_high_freq, rule, "Llama 3.1 has 4 and 1.")
    if model.rope_scaling == "yarn" and 0 < model.rope_beta_fast < model.rope_beta_slow:
        rule = f"must not be below model.rope_beta_slow = {model.rope_beta_slow:g}"
        yield Problem("model.rope_beta_fast", model.rope_beta_fast, rule, "YaRN has 32 and 1.")
    if model.rope_scaling == "yarn" and 0 < model.rope_base <= 1:
        rule = "must be above 1 with model.rope_scaling = yarn, which divides by its logarithm"
        yield Problem("model.rope_base", model.rope_base, rule, "Set 10000, or the base that the model was trained with.")


def _delta(model: Model) -> Iterable[Problem]:
    if DELTA not in model.attention_pattern:
        for name in DELTA_KEYS:
            if value := getattr(model, name):
                rule = f"is read only with d in model.attention_pattern, which is {format_value(model.attention_pattern)}"
                yield Problem(f"model.{name}", value, rule, "Set 0.")
        return
    missing = [name for name in DELTA_KEYS if not getattr(model, name)]
    for name in missing:
        rule = f"is needed with d in model.attention_pattern = {model.attention_pattern}"
        yield Problem(f"model.{name}", 0, rule, f"Qwen3-Next has {DELTA_KEYS[name]}.")
    if not missing and model.linear_value_heads % model.linear_key_heads:
        rule = f"is no multiple of model.linear_key_heads = {model.linear_key_heads}"
        yield Problem(
            "model.linear_value_heads", model.linear_value_heads, rule, f"Set {model.linear_key_heads}, or a multiple."
        )
    if model.num_layers % model.period:
        rule = (
            f"is no multiple of the {model.period} layers of model.attention_pattern = "
            f"{model.attention_pattern}, which has delta nets"
        )
        yield Problem("model.num_layers", model.num_layers, rule, f"Set {-(-model.num_layers // model.period) * model.period}.")
    if model.kv_lora_rank:
        rule = "latent attention is built without delta nets, the d of this pattern"
        yield Problem("model.attention_pattern", model.attention_pattern, rule, "Set ''.")


def _latent(model: Model) -> Iterable[Problem]:
    missing = [name for name in LATENT_REQUIRED if not getattr(model, name)]
    for name in missing:
        yield Problem(f"model.{name}", 0, "is needed with model.kv_lora_rank", "DeepSeek-V3 has 128, 64 and 128.")
    if missing:
        return
    width = model.qk_nope_head_dim + model.qk_rope_head_dim
    if model.qk_rope_head_dim % 2:
        yield Problem("model.qk_rope_head_dim", model.qk_rope_head_dim, "must be even: rotary turns pairs of numbers", FIT)
    elif model.head_dim != width:
        rule = f"must be qk_nope_head_dim + qk_rope_head_dim = {width} with model.kv_lora_rank"
        yield Problem("model.head_dim", model.head_dim, rule, "Set 0.")
    if model.v_head_dim > width:
        rule = f"is above the width of a key's head, {width}, which kernels do not do"
        yield Problem("model.v_head_dim", model.v_head_dim, rule, f"Set {width} or less.")
    if model.num_kv_heads != model.num_heads and not model.num_heads % model.num_kv_heads:
        rule = f"each of the model.num_heads = {model.num_heads} heads has keys of its own with model.kv_lora_rank"
        yield Problem("model.num_kv_heads", model.num_kv_heads, rule, f"Set {model.num_heads}.")
    for name in NOT_WITH_LATENT:
        value, default = getattr(model, name), getattr(Model(), name)
        if value != default:
            yield Problem(f"model.{name}", value, "latent attention is built without it", f"Set {format_value(default)}.")


def _dense(model: Model) -> Iterable[Problem]:
    if not model.num_experts:
        rule = "are layers without experts in a model that has some, and model.num_experts = 0"
        yield Problem("model.dense_layers", model.dense_layers, rule, "Set 0.")
    elif model.dense_layers >= model.num_layers:
        rule = f"leaves no layer with experts of model.num_layers = {model.num_layers}"
        yield Problem("model.dense_layers", model.dense_layers, rule, f"Set {model.num_layers - 1} or less.")
    elif not model.dense_d_ff:
        yield Problem("model.dense_d_ff", 0, "is needed with model.dense_layers", "DeepSeek-V3 has 18432.")
    if model.attention_pattern:
        rule = "dense layers need a model whose layers all have the same attention"
        yield Problem("model.attention_pattern", model.attention_pattern, rule, "Set '', or model.dense_layers to 0.")


def _experts(model: Model, bad: set[str]) -> Iterable[Problem]:
    if "model.experts_per_token" not in bad and model.experts_per_token > model.num_experts:
        rule = f"there are only model.num_experts = {model.num_experts} experts"
        remedy = f"Set 1 to {model.num_experts}." if model.num_experts > 1 else "Set 1."
        yield Problem("model.experts_per_token", model.experts_per_token, rule, remedy)
    yield from _groups(model, bad)


def _groups(model: Model, bad: set[str]) -> Iterable[Problem]:
    """Yield the problems of model.router_groups and model.groups_per_token: a token's experts are chosen from these groups."""
    if bad & {"model.router_groups", "model.groups_per_token", "model.experts_per_token"}:
        return
    if model.num_experts % model.router_groups:
        rule = f"does not divide model.num_experts = {model.num_experts}"
        yield Problem("model.router_groups", model.router_groups, rule, FIT)
    elif model.groups_per_token > model.router_groups:
        rule = f"there are only model.router_groups = {model.router_groups} groups"
        yield Problem("model.groups_per_token", model.groups_per_token, rule, f"Set 1 to {model.router_groups}.")
    elif (
        model.num_experts
        >= model.experts_per_token
        > (most := model.num_experts // model.router_groups * model.groups_per_token)
    ):
        rule = f"has only {most} experts for model.experts_per_token = {model.experts_per_token}"
        least = -(-model.experts_per_token * model.router_groups // model.num_experts)
        yield Problem("model.groups_per_token", model.groups_per_token, rule, f"Set {least} or more.")
