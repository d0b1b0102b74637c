"""Qwen3-MoE: Qwen3's layers, with many narrow experts in place of the feed-forward block."""

from jaxtrain.models.hf_keys import ANY, FLAG, POSITIVE, REQUIRED, HfKey, alias, only
from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, QK_NORM, experts
from jaxtrain.models.hugging_face import BIASED, KEYS, UNTIED, Format
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()


DENSE = "all layers are built with experts"
NEW = "num_local_experts"  # in some versions of transformers 5; in others num_experts
FAMILY_KEYS = {
    "num_experts": HfKey("num_experts", POSITIVE, lambda hf_config: hf_config.get(NEW) or REQUIRED),
    NEW: alias("num_experts", lambda hf_config: hf_config.get("num_experts") or hf_config[NEW]),
    "num_experts_per_tok": HfKey("experts_per_token"),
    "moe_intermediate_size": HfKey("d_ff"),
    # The width of layers without experts, of which there are none. In published models it is that of a token's experts.
    "intermediate_size": HfKey(to_hf=lambda m: m.experts_per_token * m.d_ff),
    "norm_topk_prob": HfKey("renormalize", FLAG),
    "decoder_sparse_step": only(1, DENSE),
    "mlp_only_layers": only([], DENSE),
    # transformers applies the window to all layers and ignores max_window_layers; other programs do not.
    "use_sliding_window": only(False, "which layers have the window is not settled, so none is built"),
    "sliding_window": HfKey("", ANY, None, to_hf=lambda m: None),
    "max_window_layers": HfKey("", ANY, None),
}
FORMAT = Format(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    COMMON | ATTENTION_BIAS | QK_NORM | experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    KEYS | UNTIED | BIASED | FAMILY_KEYS,
    model={"qk_norm": True},
    written={"output_router_logits": False},
)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "qwen3_30b_a3b":   (48, 2048, 32, 4, 128,  768, 151936),
        "qwen3_235b_a22b": (94, 4096, 64, 4, 128, 1536, 151936),
    },
    norm_eps=1e-06, qk_norm=True, rope_base=1_000_000.0, num_experts=128, experts_per_token=8,
)
# fmt: on
