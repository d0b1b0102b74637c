"""OLMoE: Llama's layers with one norm over all queries and all keys of a token, and many narrow experts."""

from jaxtrain.models.hf_keys import FLAG, POSITIVE, HfKey, ValueKind, alias, only
from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, JOINT_QK_NORM, experts
from jaxtrain.models.hugging_face import BIASED, KEYS, UNTIED, Format, head_width
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
MODEL = {"qk_norm": True, "qk_norm_joint": True}
HEADS = ValueKind(
    "must be hidden_size / num_attention_heads, the width of the norms", lambda x, hf_config: x == head_width(hf_config)
)
ROUTED = {
    "num_experts": HfKey("num_experts", POSITIVE),
    "num_local_experts": alias("num_experts", lambda hf_config: hf_config["num_experts"]),
    "num_experts_per_tok": HfKey("experts_per_token"),
    "norm_topk_prob": HfKey("renormalize", FLAG),
}
FAMILY_KEYS = {
    "head_dim": HfKey("head_dim", HEADS, head_width, written=False),
    "clip_qkv": only(None, "queries, keys and values are not clipped", fix=None),
}
EXPERTS = experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")
TENSORS = COMMON | ATTENTION_BIAS | JOINT_QK_NORM | EXPERTS
WRITTEN = {"output_router_logits": False}
FORMAT = Format(
    "olmoe", "OlmoeForCausalLM", TENSORS, KEYS | UNTIED | BIASED | ROUTED | FAMILY_KEYS, model=MODEL, written=WRITTEN
)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "olmoe_7b_a1b": (16, 2048, 16, 16, 0, 1024, 50304),
    },
    norm_eps=1e-05, rope_base=10_000.0, num_experts=64, experts_per_token=8, renormalize=False, **MODEL,
)
# fmt: on
