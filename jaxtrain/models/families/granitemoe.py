"""Granite 3 MoE: Granite's layers, with many narrow experts in place of the feed-forward block."""

from jaxtrain.models.families.granite import FACTORS, STRUCTURE
from jaxtrain.models.hf_keys import HfKey, only
from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, HfTensor
from jaxtrain.models.hugging_face import BIASED, KEYS, UNTIED, Format
from jaxtrain.models.structure import presets

__all__ = ["FORMAT", "PRESETS", "STRUCTURE"]
MOE = "model.layers.{i}.block_sparse_moe."
GATE_UP = MOE + "experts.gate_up_proj"
EXPERTS = {
    "layers.{i}.mlp.router": HfTensor(MOE + "router.layer.weight", "D E", "E D", parameter=MOE + "router.weight"),
    "layers.{i}.mlp.gate": HfTensor(MOE + "input_linear.weight", "E D F", "E (F + F) D", 0, parameter=GATE_UP),
    "layers.{i}.mlp.up": HfTensor(MOE + "input_linear.weight", "E D F", "E (F + F) D", 1, parameter=GATE_UP),
    "layers.{i}.mlp.down": HfTensor(MOE + "output_linear.weight", "E D F", "E D F", parameter=MOE + "experts.down_proj"),
}
TENSORS = COMMON | ATTENTION_BIAS | EXPERTS
FAMILY_KEYS = {
    "num_local_experts": HfKey("num_experts"),
    "num_experts_per_tok": HfKey("experts_per_token"),
    "position_embedding_type": only("rope", "positions are rotary embeddings", written=False),
}
ALL_KEYS = KEYS | UNTIED | BIASED | FACTORS | FAMILY_KEYS
MODEL = {"renormalize": True}
WRITTEN = {"output_router_logits": False}
FORMAT = Format("granitemoe", "GraniteMoeForCausalLM", TENSORS, ALL_KEYS, model=MODEL, written=WRITTEN)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "granite3.0_1b_a400m": (24, 1024, 16, 8, 0, 512, 49155, {"num_experts": 32}),
        "granite3.0_3b_a800m": (32, 1536, 24, 8, 0, 512, 49155, {"num_experts": 40}),
    },
    norm_eps=1e-06, tied_head=True, embedding_multiplier=12.0, residual_multiplier=0.22, attn_logit_scale=1 / 64,
    logit_multiplier=1 / 6, rope_base=10_000.0, experts_per_token=8, **MODEL,
)
# fmt: on
