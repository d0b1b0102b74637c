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
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()

# The first 7B, the third (no window, a larger base), and NeMo.
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "mistral_7b":       (32, 4096, 32, 8, 128, 14336,  32000, {"sliding_window": 4096, "rope_base": 10000.0}),
        "mistral_7b_v3":    (32, 4096, 32, 8, 128, 14336,  32768, {"rope_base": 1000000.0}),
        "mistral_nemo_12b": (40, 5120, 32, 8, 128, 14336, 131072, {"rope_base": 1000000.0}),
    },
    norm_eps=1e-05,
)
# fmt: on

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
    must_have(model, "Mistral", qkv_bias=False, qk_norm=False, sandwich_norm=False, attn_logit_scale=0.0, attention_pattern="")
    must_have(model, "Mistral", attention_softcap=0.0, logit_softcap=0.0, local_rope_base=0.0)
    return write_common(model, "silu") | write_rope(model) | {"sliding_window": model.sliding_window or None}
