"""Qwen3.5's text models with experts."""

from jaxtrain.models.families.qwen2_moe import EXPERTS
from jaxtrain.models.families.qwen3_5 import PROJECTIONS, ROPE
from jaxtrain.models.families.qwen3_next import DELTA, DELTA_KEYS, EXPERT_KEYS, GATED, MODEL, NOT_USED, SIZES
from jaxtrain.models.hf_tensors import COMMON
from jaxtrain.models.hugging_face import HEAD_DIM, KEYS, UNTIED, Format
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure(norm_offset=True)

FORMAT = Format(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    COMMON | GATED | DELTA | PROJECTIONS | EXPERTS,
    KEYS | HEAD_DIM | UNTIED | DELTA_KEYS | EXPERT_KEYS | {"rope_parameters": ROPE},
    model=MODEL | {"shared_gate": True, "renormalize": True},
    written={"attention_bias": False, "output_router_logits": False},
    beyond=NOT_USED,
)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "qwen3_5_35b_a3b": (40, 2048, 16, 2, 256, 512, 248320),
    },
    num_experts=256, experts_per_token=8, shared_d_ff=512, shared_gate=True, **MODEL, **SIZES,
)
# fmt: on
