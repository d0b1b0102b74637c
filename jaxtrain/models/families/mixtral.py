"""The Mixtral family: Mistral's layers, with experts for a feed-forward block."""

from typing import Any

from jaxtrain import windows
from jaxtrain.config import Model
from jaxtrain.models.hugging_face import (
    COMMON,
    HfTensor,
    Settings,
    must_have,
    must_have_experts,
    read_common,
    read_experts,
    read_rope,
    windows_of,
    write_common,
    write_rope,
)
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()

# The vocabulary of 8x22b is that of the first release; the instructed one has 768 more rows.
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "mixtral_8x7b":  (32, 4096, 32, 8, 128, 14336, 32000),
        "mixtral_8x22b": (56, 6144, 48, 8, 128, 16384, 32000),
    },
    norm_eps=1e-05,
    rope_base=1000000.0,
    num_experts=8,
    experts_per_token=2,
)
# fmt: on

_BLOCK = "model.layers.{i}.block_sparse_moe."
NAMES = COMMON | {
    "layers.{i}.mlp.router": HfTensor(_BLOCK + "gate.weight", "D E", "E D"),
    "layers.{i}.mlp.gate": HfTensor(_BLOCK + "experts.{e}.w1.weight", "E D F", "F D"),
    "layers.{i}.mlp.up": HfTensor(_BLOCK + "experts.{e}.w3.weight", "E D F", "F D"),
    "layers.{i}.mlp.down": HfTensor(_BLOCK + "experts.{e}.w2.weight", "E D F", "D F"),
}
MODEL_TYPE, ARCHITECTURE = "mixtral", "MixtralForCausalLM"


def read(s: Settings) -> dict[str, Any]:
    """Keys of config.Model from config.json."""
    common = read_common(s, "silu", tied=False)
    s.only("router_jitter_noise", 0.0, "jaxtrain adds no noise before the router; set it to 0.0 to go on without")
    window = s.take("sliding_window", None)  # transformers, too, takes no key for no window
    letters = (windows.LOCAL if window else windows.GLOBAL) * common["num_layers"]
    # The scores of the chosen are always divided by their sum.
    experts = read_experts(s, s.whole("num_local_experts")) | {"renormalize": True}
    return common | experts | read_rope(s) | windows_of(letters, window, s.path)


def write(model: Model) -> dict[str, Any]:
    """Keys of config.json that say what the model is. Raises HuggingFaceError where they cannot."""
    must_have(model, "Mixtral", qkv_bias=False, qk_norm=False, sandwich_norm=False, attn_logit_scale=0.0, attention_pattern="")
    must_have(model, "Mixtral", attention_softcap=0.0, logit_softcap=0.0, local_rope_base=0.0, renormalize=True)
    must_have_experts(model, "Mixtral")
    out = write_common(model, "silu") | write_rope(model) | {"sliding_window": model.sliding_window or None}
    return out | {
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "output_router_logits": False,
        "router_jitter_noise": 0.0,
    }
