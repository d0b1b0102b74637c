"""The Qwen3 family: Llama's layers with RMSNorm on queries and keys, and heads as wide as they like."""

from typing import Any

from jaxtrain.config import Model
from jaxtrain.models.families.qwen2 import read_windows, write_windows
from jaxtrain.models.hugging_face import (
    COMMON,
    QK_NORM,
    Settings,
    must_have,
    read_common,
    read_rope,
    write_common,
    write_rope,
)
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()

# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "qwen3_600m": (28, 1024, 16, 8, 128,  3072, 151936, {"tied_head": True}),
        "qwen3_1b":   (28, 2048, 16, 8, 128,  6144, 151936, {"tied_head": True}),
        "qwen3_4b":   (36, 2560, 32, 8, 128,  9728, 151936, {"tied_head": True}),
        "qwen3_8b":   (36, 4096, 32, 8, 128, 12288, 151936),
        "qwen3_14b":  (40, 5120, 40, 8, 128, 17408, 151936),
        "qwen3_32b":  (64, 5120, 64, 8, 128, 25600, 151936),
    },
    norm_eps=1e-06,
    qk_norm=True,
    rope_base=1000000.0,
)
# fmt: on

NAMES = COMMON | QK_NORM
MODEL_TYPE, ARCHITECTURE = "qwen3", "Qwen3ForCausalLM"


def read(s: Settings) -> dict[str, Any]:
    """Keys of config.Model from config.json."""
    common = read_common(s, "silu", free_heads=True)
    return common | {"qk_norm": True} | read_rope(s) | read_windows(s, common["num_layers"])


def write(model: Model) -> dict[str, Any]:
    """Keys of config.json that say what the model is. Raises HuggingFaceError where they cannot."""
    must_have(model, "Qwen3", qkv_bias=False, qk_norm=True, sandwich_norm=False, attn_logit_scale=0.0, local_rope_base=0.0)
    must_have(model, "Qwen3", attention_softcap=0.0, logit_softcap=0.0)
    return write_common(model, "silu") | write_rope(model) | write_windows(model) | {"attention_bias": False}
