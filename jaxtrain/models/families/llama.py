"""The Llama family: sizes, and what Hugging Face calls each tensor and key. The model itself is models/transformer.py."""

from typing import Any

from jaxtrain.config import Model
from jaxtrain.models.hugging_face import COMMON, Settings, must_have, read_common, read_rope, write_common, write_rope
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()

# Keys of rotary scaling as in Llama 3.1 and 3.2.
LLAMA31 = {
    "rope_base": 500_000.0,
    "rope_scaling": "llama3",
    "rope_low_freq": 1.0,
    "rope_high_freq": 4.0,
    "rope_original_len": 8192,
}

# Keys of config.Model for each published size; what is not named stays at its default. Llama 3.0 (8192 tokens, no rotary
# scaling), not 3.1, for 8b and 70b: pretraining starts from the shorter context. llama3_1b is Llama 3.2, whose head is its
# embedding.
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "llama2_7b":    (32,  4096,  32, 32,   0, 11008,  32000, {"rope_base": 10_000.0}),
        "llama3_8b":    (32,  4096,  32,  8,   0, 14336, 128256, {"rope_base": 500_000.0}),
        "llama3_70b":   (80,  8192,  64,  8,   0, 28672, 128256, {"rope_base": 500_000.0}),
        "llama3_1b":    (16,  2048,  32,  8,  64,  8192, 128256, LLAMA31 | {"rope_factor": 32.0, "tied_head": True}),
        "llama31_8b":   (32,  4096,  32,  8, 128, 14336, 128256, LLAMA31 | {"rope_factor": 8.0}),
        "llama31_70b":  (80,  8192,  64,  8, 128, 28672, 128256, LLAMA31 | {"rope_factor": 8.0}),
        "llama31_405b": (126, 16384, 128,  8, 128, 53248, 128256, LLAMA31 | {"rope_factor": 8.0}),
        "llama32_3b":   (28,  3072,  24,  8, 128,  8192, 128256, LLAMA31 | {"rope_factor": 32.0, "tied_head": True}),
    },
    norm_eps=1e-05,
)
# fmt: on


NAMES = COMMON
MODEL_TYPE, ARCHITECTURE = "llama", "LlamaForCausalLM"


def read(s: Settings) -> dict[str, Any]:
    """Keys of config.Model from config.json."""
    return read_common(s, "silu") | read_rope(s)


def write(model: Model) -> dict[str, Any]:
    """Keys of config.json that say what the model is. Raises HuggingFaceError where they cannot."""
    must_have(model, "Llama", qkv_bias=False, qk_norm=False, sandwich_norm=False, sliding_window=0, attn_logit_scale=0.0)
    must_have(model, "Llama", attention_softcap=0.0, logit_softcap=0.0)
    return write_common(model, "silu") | write_rope(model) | {"attention_bias": False, "mlp_bias": False}
