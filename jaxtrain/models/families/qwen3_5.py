"""Qwen3.5's text models without experts: Qwen3-Next's layers, with a feed-forward block. Their text positions are plain."""

from jaxtrain.models.families.qwen3_next import DELTA, DELTA_KEYS, GATED, LINEAR, MODEL, NOT_USED, OURS, SIZES
from jaxtrain.models.hf_tensors import COMMON, HfTensor
from jaxtrain.models.hugging_face import HEAD_DIM, KEYS, UNTIED, Format, Rope
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure(norm_offset=True)

QKV = "(M P + M P + M J X) D"
PROJECTIONS = {
    f"{OURS}wq": HfTensor(f"{LINEAR}in_proj_qkv.weight", "D M P", QKV, 0),
    f"{OURS}wk": HfTensor(f"{LINEAR}in_proj_qkv.weight", "D M P", QKV, 1),
    f"{OURS}wv": HfTensor(f"{LINEAR}in_proj_qkv.weight", "D (M J) X", QKV, 2),
    f"{OURS}wz": HfTensor(f"{LINEAR}in_proj_z.weight", "D (M J) X", "(M J X) D"),
    f"{OURS}wb": HfTensor(f"{LINEAR}in_proj_b.weight", "D (M J)", "(M J) D"),
    f"{OURS}wa": HfTensor(f"{LINEAR}in_proj_a.weight", "D (M J)", "(M J) D"),
}
# Dimensions of a head are rotated by positions in time, in height and in width, which are equal for text.
ROPE = Rope(partial=0.25)
FORMAT = Format(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    COMMON | GATED | DELTA | PROJECTIONS,
    KEYS | HEAD_DIM | UNTIED | DELTA_KEYS | {"rope_parameters": ROPE},
    model=MODEL,
    written={"attention_bias": False},
    beyond=NOT_USED,
)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "qwen3_5_0.8b": (24, 1024,  8, 2, 256,  3584, 248320, {"tied_head": True, "linear_value_heads": 16}),
        "qwen3_5_9b":   (32, 4096, 16, 4, 256, 12288, 248320),
        "qwen3_5_27b":  (64, 5120, 24, 4, 256, 17408, 248320, {"linear_value_heads": 48}),
    },
    **MODEL, **SIZES,
)
# fmt: on
