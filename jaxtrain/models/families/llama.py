"""Llama 2, 3, 3.1, 3.2 and 3.3: their sizes, and the format of their checkpoints."""

from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, MLP_BIAS
from jaxtrain.models.hugging_face import BIASED, KEYS, MLP_BIASED, Format
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
FORMAT = Format("llama", "LlamaForCausalLM", COMMON | ATTENTION_BIAS | MLP_BIAS, KEYS | BIASED | MLP_BIASED)
LLAMA31 = {
    "rope_base": 500_000.0,
    "rope_scaling": "llama3",
    "rope_factor": 8.0,
    "rope_low_freq": 1.0,
    "rope_high_freq": 4.0,
    "rope_original_len": 8192,
}
LLAMA32 = LLAMA31 | {"rope_factor": 32.0, "tied_head": True}
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "llama2_7b":     (32,  4096,  32, 32,   0, 11008,  32000, {"rope_base": 10_000.0}),
        "llama2_13b":    (40,  5120,  40, 40,   0, 13824,  32000, {"rope_base": 10_000.0}),
        "llama2_70b":    (80,  8192,  64,  8,   0, 28672,  32000, {"rope_base": 10_000.0}),
        "llama3_8b":     (32,  4096,  32,  8,   0, 14336, 128256, {"rope_base": 500_000.0}),
        "llama3_70b":    (80,  8192,  64,  8,   0, 28672, 128256, {"rope_base": 500_000.0}),
        "llama3.1_8b":   (32,  4096,  32,  8, 128, 14336, 128256, LLAMA31),
        "llama3.1_70b":  (80,  8192,  64,  8, 128, 28672, 128256, LLAMA31),
        "llama3.1_405b": (126, 16384, 128, 8, 128, 53248, 128256, LLAMA31),
        "llama3.2_1b":   (16,  2048,  32,  8,  64,  8192, 128256, LLAMA32),
        "llama3.2_3b":   (28,  3072,  24,  8, 128,  8192, 128256, LLAMA32),
        "llama3.3_70b":  (80,  8192,  64,  8, 128, 28672, 128256, LLAMA31),
    },
    norm_eps=1e-05,
)
# fmt: on
