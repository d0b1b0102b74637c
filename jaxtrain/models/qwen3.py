"""The Qwen3 family: Llama's layers with RMSNorm on queries and keys, and heads as wide as they like."""

from typing import Any

from jaxtrain.config import Model
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
from jaxtrain.models.qwen2 import read_windows, write_windows
from jaxtrain.models.structure import Structure

STRUCTURE = Structure()

PRESETS: dict[str, dict[str, Any]] = {
    "qwen3_600m": {
        "num_layers": 28,
        "d_model": 1024,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 3072,
        "vocab_size": 151936,
        "norm_eps": 1e-06,
        "tied_head": True,
        "qk_norm": True,
        "rope_base": 1000000.0,
    },
    "qwen3_1b": {
        "num_layers": 28,
        "d_model": 2048,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 6144,
        "vocab_size": 151936,
        "norm_eps": 1e-06,
        "tied_head": True,
        "qk_norm": True,
        "rope_base": 1000000.0,
    },
    "qwen3_4b": {
        "num_layers": 36,
        "d_model": 2560,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 9728,
        "vocab_size": 151936,
        "norm_eps": 1e-06,
        "tied_head": True,
        "qk_norm": True,
        "rope_base": 1000000.0,
    },
    "qwen3_8b": {
        "num_layers": 36,
        "d_model": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 12288,
        "vocab_size": 151936,
        "norm_eps": 1e-06,
        "qk_norm": True,
        "rope_base": 1000000.0,
    },
    "qwen3_14b": {
        "num_layers": 40,
        "d_model": 5120,
        "num_heads": 40,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 17408,
        "vocab_size": 151936,
        "norm_eps": 1e-06,
        "qk_norm": True,
        "rope_base": 1000000.0,
    },
    "qwen3_32b": {
        "num_layers": 64,
        "d_model": 5120,
        "num_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 25600,
        "vocab_size": 151936,
        "norm_eps": 1e-06,
        "qk_norm": True,
        "rope_base": 1000000.0,
    },
}

NAMES = COMMON | QK_NORM
MODEL_TYPE, ARCHITECTURE = "qwen3", "Qwen3ForCausalLM"


def read(s: Settings) -> dict[str, Any]:
    """Keys of config.Model from config.json."""
    common = read_common(s, "silu", free_heads=True)
    return common | {"qk_norm": True} | read_rope(s) | read_windows(s, common["num_layers"])


def write(model: Model) -> dict[str, Any]:
    """Keys of config.json that say what the model is. Raises HuggingFaceError where they cannot."""
    must_have(model, "Qwen3", qkv_bias=False, qk_norm=True, post_norms=False, query_scale=0.0, local_rope_base=0.0)
    must_have(model, "Qwen3", attention_softcap=0.0, logit_softcap=0.0)
    return write_common(model, "silu") | write_rope(model) | write_windows(model) | {"attention_bias": False}


def build(*args: Any) -> Any:
    """A `Transformer` from (the model's config, kernel, remat plan, context, rngs)."""
    from jaxtrain.models.transformer import build_as

    return build_as(STRUCTURE, *args)
