"""The Mistral family: Llama's layers, in some versions with a sliding window."""

from typing import Any

from jaxtrain import windows
from jaxtrain.config import Model
from jaxtrain.models.hugging_face import (
    COMMON,
    Settings,
    must_have,
    read_common,
    read_rope,
    windows_of,
    write_common,
    write_rope,
)
from jaxtrain.models.structure import Structure

STRUCTURE = Structure()

# The first 7B, the third (no window, a larger base), and NeMo.
PRESETS: dict[str, dict[str, Any]] = {
    "mistral_7b": {
        "num_layers": 32,
        "d_model": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 14336,
        "vocab_size": 32000,
        "norm_eps": 1e-05,
        "sliding_window": 4096,
        "rope_base": 10000.0,
    },
    "mistral_7b_v3": {
        "num_layers": 32,
        "d_model": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 14336,
        "vocab_size": 32768,
        "norm_eps": 1e-05,
        "rope_base": 1000000.0,
    },
    "mistral_nemo_12b": {
        "num_layers": 40,
        "d_model": 5120,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 14336,
        "vocab_size": 131072,
        "norm_eps": 1e-05,
        "rope_base": 1000000.0,
    },
}

NAMES = COMMON
MODEL_TYPE, ARCHITECTURE = "mistral", "MistralForCausalLM"


def read(s: Settings) -> dict[str, Any]:
    """Keys of config.Model from config.json."""
    common = read_common(s, "silu", tied=False)
    window = s.said("sliding_window")
    letters = (windows.LOCAL if window else windows.GLOBAL) * common["num_layers"]
    return common | read_rope(s) | windows_of(letters, window, s.path)


def write(model: Model) -> dict[str, Any]:
    """Keys of config.json that say what the model is. Raises HuggingFaceError where they cannot."""
    must_have(model, "Mistral", qkv_bias=False, qk_norm=False, post_norms=False, query_scale=0.0, attention_pattern="")
    must_have(model, "Mistral", attention_softcap=0.0, logit_softcap=0.0, local_rope_base=0.0)
    return write_common(model, "silu") | write_rope(model) | {"sliding_window": model.sliding_window or None}


def build(*args: Any) -> Any:
    """A `Transformer` from (the model's config, kernel, remat plan, context, rngs)."""
    from jaxtrain.models.transformer import build_as

    return build_as(STRUCTURE, *args)
