"""The Qwen2 family, Qwen2.5 included: Llama's layers with biases on queries, keys and values."""

from typing import Any

from jaxtrain import windows
from jaxtrain.config import Model
from jaxtrain.models.hugging_face import (
    COMMON,
    QKV_BIAS,
    Settings,
    must_have,
    read_common,
    read_layer_types,
    read_rope,
    windows_of,
    write_common,
    write_layer_types,
    write_rope,
)
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()

# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "qwen25_500m": (24,  896, 14, 2,  64,  4864, 151936, {"tied_head": True}),
        "qwen25_1b":   (28, 1536, 12, 2, 128,  8960, 151936, {"tied_head": True}),
        "qwen25_7b":   (28, 3584, 28, 4, 128, 18944, 152064),
    },
    norm_eps=1e-06,
    qkv_bias=True,
    rope_base=1000000.0,
)
# fmt: on

NAMES = COMMON | QKV_BIAS
MODEL_TYPE, ARCHITECTURE = "qwen2", "Qwen2ForCausalLM"


def read_windows(s: Settings, layers: int) -> dict[str, Any]:
    """Which layers see a window, if `use_sliding_window`: by `layer_types`, or all from `max_window_layers` on."""
    s.only("use_mrope", False, "positions are numbers, not places in pictures")
    in_use = s.take("use_sliding_window", False)
    letters = read_layer_types(s, layers)
    if in_use:
        window, first = s.said("sliding_window"), layers if letters else s.whole("max_window_layers")
        s.take("max_window_layers", None)
    else:
        window, first = s.take("sliding_window", None), s.take("max_window_layers", layers)
    by_number = "".join(windows.LOCAL if in_use and window and i >= first else windows.GLOBAL for i in range(layers))
    return windows_of(letters or by_number, window if in_use else None, s.path)


def write_windows(model: Model) -> dict[str, Any]:
    """The inverse of `read_windows`. Before layer_types, transformers knew the first layer with a window, and all after it."""
    letters = windows.kinds(model)
    first = letters.find(windows.LOCAL)
    return {
        "use_sliding_window": windows.LOCAL in letters,
        "sliding_window": model.sliding_window or None,
        "max_window_layers": first if first >= 0 else model.num_layers,
        "layer_types": write_layer_types(model),
    }


def read(s: Settings) -> dict[str, Any]:
    """Keys of config.Model from config.json."""
    common = read_common(s, "silu")
    return common | {"qkv_bias": True} | read_rope(s) | read_windows(s, common["num_layers"])


def write(model: Model) -> dict[str, Any]:
    """Keys of config.json that say what the model is. Raises HuggingFaceError where they cannot."""
    must_have(model, "Qwen2", qkv_bias=True, qk_norm=False, sandwich_norm=False, attn_logit_scale=0.0, local_rope_base=0.0)
    must_have(model, "Qwen2", attention_softcap=0.0, logit_softcap=0.0, head_dim=model.d_model // model.num_heads)
    out = write_common(model, "silu") | write_rope(model) | write_windows(model)
    del out["head_dim"]  # no key of this family
    return out
