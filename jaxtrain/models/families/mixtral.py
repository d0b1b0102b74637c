"""Mixtral: Mistral's layers, with experts in place of the feed-forward block."""

from jaxtrain.models.hf_keys import POSITIVE, HfKey, only
from jaxtrain.models.hf_tensors import COMMON, experts
from jaxtrain.models.hugging_face import KEYS, UNTIED, Format
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()


FAMILY_KEYS = {
    # transformers, too, reads a missing sliding_window as none.
    "sliding_window": HfKey("sliding_window", POSITIVE, 0, null=0),
    "num_local_experts": HfKey("num_experts"),
    "num_experts_per_tok": HfKey("experts_per_token"),
    "router_jitter_noise": only(0.0, "jaxtrain adds no noise before the router; set it to 0.0 to go on without"),
}
FORMAT = Format(
    "mixtral",
    "MixtralForCausalLM",
    COMMON | experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
    KEYS | UNTIED | FAMILY_KEYS,
    model={"renormalize": True},
    written={"output_router_logits": False},
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
