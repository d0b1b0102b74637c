"""Phi-3 and Phi-4: Llama's layers, queries, keys and values in one tensor, in some versions with a sliding window."""

from jaxtrain.models.hf_keys import ANY, POSITIVE, HfKey
from jaxtrain.models.hf_tensors import COMMON, GATE_UP, HfTensor
from jaxtrain.models.hugging_face import KEYS, UNTIED, Format, Rope
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
QKV = {
    f"layers.{{i}}.attention.{name}": HfTensor(
        "model.layers.{i}.self_attn.qkv_proj.weight", f"D {heads} H", "(N H + K H + K H) D", part
    )
    for part, (name, heads) in enumerate((("wq", "N"), ("wk", "K"), ("wv", "K")))
}
FAMILY_KEYS = {
    "sliding_window": HfKey("sliding_window", POSITIVE, 0, null=0),  # of all layers
    "original_max_position_embeddings": HfKey("", ANY, None),  # for longrope alone
    # transformers reads yarn and su as longrope, and refuses all other types.
    "rope_parameters": Rope(rope_types=("default",), partial=1.0),
}
FORMAT = Format("phi3", "Phi3ForCausalLM", COMMON | QKV | GATE_UP, KEYS | UNTIED | FAMILY_KEYS)
# Phi-3.5, Phi-4-mini and the versions of Phi-3 for long texts have longrope.
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "phi3_mini_4k":   (32, 3072, 32, 32,  96,  8192,  32064, {"sliding_window": 2047}),
        "phi3_medium_4k": (40, 5120, 40, 10, 128, 17920,  32064, {"sliding_window": 2047}),
        "phi4_14b":       (40, 5120, 40, 10, 128, 17920, 100352, {"rope_base": 250_000.0}),
    },
    norm_eps=1e-05,
)
# fmt: on
