"""The text models of Gemma 3: Gemma 2's layers with norms on queries and keys in place of caps, and a base of their own for
layers with a sliding window."""

from typing import Any

from jaxtrain.config import Model
from jaxtrain.models.gemma2 import read_gemma, write_gemma
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
from jaxtrain.models.structure import Structure

STRUCTURE = Structure(activation="gelu_tanh", norm_offset=True, scaled_embedding=True)

# From 4b on, the text part of a model that also sees.
PRESETS: dict[str, dict[str, Any]] = {
    "gemma3_270m": {
        "num_layers": 18,
        "d_model": 640,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 256,
        "d_ff": 2048,
        "vocab_size": 262144,
        "query_scale": 256.0,
        "sliding_window": 512,
        "norm_eps": 1e-06,
        "tied_head": True,
        "qk_norm": True,
        "post_norms": True,
        "attention_pattern": "lllllg",
        "rope_base": 1000000.0,
        "local_rope_base": 10000.0,
    },
    "gemma3_1b": {
        "num_layers": 26,
        "d_model": 1152,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 256,
        "d_ff": 6912,
        "vocab_size": 262144,
        "query_scale": 256.0,
        "sliding_window": 512,
        "norm_eps": 1e-06,
        "tied_head": True,
        "qk_norm": True,
        "post_norms": True,
        "attention_pattern": "lllllg",
        "rope_base": 1000000.0,
        "local_rope_base": 10000.0,
    },
    "gemma3_4b": {
        "num_layers": 34,
        "d_model": 2560,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 256,
        "d_ff": 10240,
        "vocab_size": 262208,
        "query_scale": 256.0,
        "sliding_window": 1024,
        "norm_eps": 1e-06,
        "tied_head": True,
        "qk_norm": True,
        "post_norms": True,
        "attention_pattern": "lllllg",
        "rope_base": 1000000.0,
        "local_rope_base": 10000.0,
        "rope_scaling": "linear",
        "rope_factor": 8.0,
    },
    "gemma3_12b": {
        "num_layers": 48,
        "d_model": 3840,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 256,
        "d_ff": 15360,
        "vocab_size": 262208,
        "query_scale": 256.0,
        "sliding_window": 1024,
        "norm_eps": 1e-06,
        "tied_head": True,
        "qk_norm": True,
        "post_norms": True,
        "attention_pattern": "lllllg",
        "rope_base": 1000000.0,
        "local_rope_base": 10000.0,
        "rope_scaling": "linear",
        "rope_factor": 8.0,
    },
    "gemma3_27b": {
        "num_layers": 62,
        "d_model": 5376,
        "num_heads": 32,
        "num_kv_heads": 16,
        "head_dim": 128,
        "d_ff": 21504,
        "vocab_size": 262208,
        "query_scale": 168.0,
        "sliding_window": 1024,
        "norm_eps": 1e-06,
        "tied_head": True,
        "qk_norm": True,
        "post_norms": True,
        "attention_pattern": "lllllg",
        "rope_base": 1000000.0,
        "local_rope_base": 10000.0,
        "rope_scaling": "linear",
        "rope_factor": 8.0,
    },
}

NAMES = COMMON | POST_NORMS | QK_NORM
MODEL_TYPE, ARCHITECTURE = "gemma3_text", "Gemma3ForCausalLM"


def read(s: Settings) -> dict[str, Any]:
    """Keys of config.Model from config.json."""
    every = s.take("sliding_window_pattern", None) or s.take("_sliding_window_pattern", None) or 6
    return read_gemma(s, "l" * (every - 1) + "g") | {"qk_norm": True} | read_rope_by_kind(s)


def write(model: Model) -> dict[str, Any]:
    """Keys of config.json that say what the model is. Raises HuggingFaceError where they cannot."""
    must_have(model, "Gemma 3", qkv_bias=False, qk_norm=True, post_norms=True, tied_head=True)
    if model.rope_scaling == "llama3":
        raise HuggingFaceError("model.rope_scaling = 'llama3': transformers' Gemma 3 has 'linear' or 'none' only.")
    local = model.local_rope_base or model.rope_base
    old = write_rope(model) | {"rope_local_base_freq": local}
    new = {FULL: rope_settings(model), SLIDING: {"rope_theta": local, "rope_type": "default"}}
    return write_gemma(model) | old | {"rope_parameters": new}


def build(*args: Any) -> Any:
    """A `Transformer` from (the model's config, kernel, remat plan, context, rngs)."""
    from jaxtrain.models.transformer import build_as

    return build_as(STRUCTURE, *args)
