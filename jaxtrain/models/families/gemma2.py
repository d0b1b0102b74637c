"""The Gemma 2 family: norms before and after, scores and logits capped, every other layer with a sliding window."""

from typing import Any

from jaxtrain import windows
from jaxtrain.config import Model
from jaxtrain.models.hugging_face import (
    COMMON,
    POST_NORMS,
    HuggingFaceError,
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

STRUCTURE = Structure(activation="gelu_tanh", norm_offset=True, scaled_embedding=True)
ACTIVATION = "gelu_pytorch_tanh"  # as config.json has it

# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "gemma2_2b":  (26, 2304,  8,  4, 256,  9216, 256000, {"attn_logit_scale": 256**-0.5}),
        "gemma2_9b":  (42, 3584, 16,  8, 256, 14336, 256000, {"attn_logit_scale": 256**-0.5}),
        "gemma2_27b": (46, 4608, 32, 16, 128, 36864, 256000, {"attn_logit_scale": 144**-0.5}),
    },
    norm_eps=1e-06,
    tied_head=True,
    sandwich_norm=True,
    sliding_window=4096,
    attention_pattern="lg",
    attention_softcap=50.0,
    logit_softcap=30.0,
    rope_base=10000.0,
)
# fmt: on

NAMES = COMMON | POST_NORMS
MODEL_TYPE, ARCHITECTURE = "gemma2", "Gemma2ForCausalLM"
PATTERN = windows.LOCAL + windows.GLOBAL  # where config.json does not say: transformers before layer_types knew no other


def read_gemma(s: Settings, pattern: str) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common."""
    common = read_common(s, ACTIVATION, tied=True, free_heads=True)
    if s.take("use_bidirectional_attention", False):
        raise HuggingFaceError(f"{s.path}: use_bidirectional_attention: jaxtrain has causal attention only.")
    layers, window = common["num_layers"], s.said("sliding_window")
    s.only("sliding_window_size", window, f"sliding_window is {window!r}, and both mean the same")
    letters = read_layer_types(s, layers) or (pattern * layers)[:layers]
    divisor = s.number("query_pre_attn_scalar")
    if divisor <= 0:
        raise HuggingFaceError(f"{s.path}: query_pre_attn_scalar = {divisor:g}: must be above 0.")
    return common | {
        "sandwich_norm": True,
        "attn_logit_scale": divisor**-0.5,
        "attention_softcap": float(s.said("attn_logit_softcapping") or 0.0),
        "logit_softcap": float(s.said("final_logit_softcapping") or 0.0),
        **windows_of(letters, window, s.path),
    }


def write_gemma(model: Model) -> dict[str, Any]:
    """The inverse of `read_gemma`."""
    return write_common(model, ACTIVATION, "hidden_activation") | {
        "attention_bias": False,
        "query_pre_attn_scalar": whole(float(f"{(model.attn_logit_scale or model.head_dim**-0.5) ** -2:.12g}")),
        "attn_logit_softcapping": model.attention_softcap or None,
        "final_logit_softcapping": model.logit_softcap or None,
        "sliding_window": model.sliding_window or None,
        "layer_types": write_layer_types(model),
    }


def whole(x: float) -> float | int:
    """As an integer where it is one: transformers asks for that type."""
    return int(x) if x == int(x) else x


def read(s: Settings) -> dict[str, Any]:
    """Keys of config.Model from config.json."""
    return read_gemma(s, PATTERN) | read_rope(s)


def write(model: Model) -> dict[str, Any]:
    """Keys of config.json that say what the model is. Raises HuggingFaceError where they cannot."""
    must_have(model, "Gemma 2", qkv_bias=False, qk_norm=False, sandwich_norm=True, tied_head=True, local_rope_base=0.0)
    return write_gemma(model) | write_rope(model)
