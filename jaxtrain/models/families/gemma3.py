"""The text models of Gemma 3: Gemma 2's layers with norms on queries and keys in place of caps, and a base of their own for
layers with a sliding window."""

from typing import Any

from jaxtrain.config import Model
from jaxtrain.models.families.gemma2 import read_gemma, write_gemma
from jaxtrain.models.hugging_face import (
    COMMON,
    FULL,
    POST_NORMS,
    QK_NORM,
    SLIDING,
    HuggingFaceError,
    Settings,
    must_have,
    read_rope_by_kind,
    rope_settings,
    write_rope,
)
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure(activation="gelu_tanh", norm_offset=True, scaled_embedding=True)

LONG = {"rope_scaling": "linear", "rope_factor": 8.0}
# From 4b on, the text part of a model that also sees.
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "gemma3_270m": (18,  640,  4,  1, 256,  2048, 262144, {"attn_logit_scale": 256**-0.5, "sliding_window": 512}),
        "gemma3_1b":   (26, 1152,  4,  1, 256,  6912, 262144, {"attn_logit_scale": 256**-0.5, "sliding_window": 512}),
        "gemma3_4b":   (34, 2560,  8,  4, 256, 10240, 262208, {"attn_logit_scale": 256**-0.5, "sliding_window": 1024} | LONG),
        "gemma3_12b":  (48, 3840, 16,  8, 256, 15360, 262208, {"attn_logit_scale": 256**-0.5, "sliding_window": 1024} | LONG),
        "gemma3_27b":  (62, 5376, 32, 16, 128, 21504, 262208, {"attn_logit_scale": 168**-0.5, "sliding_window": 1024} | LONG),
    },
    norm_eps=1e-06,
    tied_head=True,
    qk_norm=True,
    sandwich_norm=True,
    attention_pattern="lllllg",
    rope_base=1000000.0,
    local_rope_base=10000.0,
)
# fmt: on

NAMES = COMMON | POST_NORMS | QK_NORM
MODEL_TYPE, ARCHITECTURE = "gemma3_text", "Gemma3ForCausalLM"


def read(s: Settings) -> dict[str, Any]:
    """Keys of config.Model from config.json."""
    every = s.take("sliding_window_pattern", None) or s.take("_sliding_window_pattern", None) or 6
    return read_gemma(s, "l" * (every - 1) + "g") | {"qk_norm": True} | read_rope_by_kind(s)


def write(model: Model) -> dict[str, Any]:
    """Keys of config.json that say what the model is. Raises HuggingFaceError where they cannot."""
    must_have(model, "Gemma 3", qkv_bias=False, qk_norm=True, sandwich_norm=True, tied_head=True)
    if model.rope_scaling == "llama3":
        raise HuggingFaceError("model.rope_scaling = 'llama3': transformers' Gemma 3 has 'linear' or 'none' only.")
    local = model.local_rope_base or model.rope_base
    old = write_rope(model) | {"rope_local_base_freq": local}
    new = {FULL: rope_settings(model), SLIDING: {"rope_theta": local, "rope_type": "default"}}
    return write_gemma(model) | old | {"rope_parameters": new}
