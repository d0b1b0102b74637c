"""Mixtral: Mistral's layers, with experts in place of the feed-forward block."""

from typing import Any

from jaxtrain.config.schema import Model
from jaxtrain.models.hugging_face import (
    COMMON,
    ROPE,
    Format,
    Part,
    Settings,
    experts,
    read_experts_per_token,
    window_of_all_layers,
)
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()


def read_experts(s: Settings, _: int) -> dict[str, Any]:
    return read_experts_per_token(s, s.whole("num_local_experts"))


def write_experts(model: Model) -> dict[str, Any]:
    return {"num_local_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}


FORMAT = Format(
    "mixtral",
    "MixtralForCausalLM",
    COMMON | experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
    # transformers, too, reads a missing sliding_window as none.
    (ROPE, window_of_all_layers(lambda s: s.take("sliding_window", None)), Part(read_experts, write_experts)),
    model={"renormalize": True},
    fixed={"router_jitter_noise": (0.0, "jaxtrain adds no noise before the router; set it to 0.0 to go on without")},
    written={"output_router_logits": False},
    tied=False,
)
# The vocabulary of 8x22b is that of the base model; the instruct model has 768 more rows.
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "mixtral_8x7b":  (32, 4096, 32, 8, 128, 14336, 32000),
        "mixtral_8x22b": (56, 6144, 48, 8, 128, 16384, 32000),
    },
    norm_eps=1e-05, rope_base=1_000_000.0, num_experts=8, experts_per_token=2,
)
# fmt: on
