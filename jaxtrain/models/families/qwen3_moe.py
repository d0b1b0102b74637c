"""The Qwen3-MoE family: Qwen3's layers, with many narrow experts for a feed-forward block."""

from typing import Any

from jaxtrain.config import Model
from jaxtrain.models.hugging_face import (
    COMMON,
    QK_NORM,
    HfTensor,
    HuggingFaceError,
    Settings,
    must_have,
    must_have_experts,
    read_common,
    read_experts,
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
        "qwen3_30b_a3b":   (48, 2048, 32, 4, 128,  768, 151936),
        "qwen3_235b_a22b": (94, 4096, 64, 4, 128, 1536, 151936),
    },
    norm_eps=1e-06,
    qk_norm=True,
    rope_base=1000000.0,
    num_experts=128,
    experts_per_token=8,
)
# fmt: on

_BLOCK = "model.layers.{i}.mlp."
NAMES = (
    COMMON
    | QK_NORM
    | {
        "layers.{i}.mlp.router": HfTensor(_BLOCK + "gate.weight", "D E", "E D"),
        "layers.{i}.mlp.gate": HfTensor(_BLOCK + "experts.{e}.gate_proj.weight", "E D F", "F D"),
        "layers.{i}.mlp.up": HfTensor(_BLOCK + "experts.{e}.up_proj.weight", "E D F", "F D"),
        "layers.{i}.mlp.down": HfTensor(_BLOCK + "experts.{e}.down_proj.weight", "E D F", "D F"),
    }
)
MODEL_TYPE, ARCHITECTURE = "qwen3_moe", "Qwen3MoeForCausalLM"


def read(s: Settings) -> dict[str, Any]:
    """Keys of config.Model from config.json."""
    common = read_common(s, "silu", tied=False)
    dense = "all layers are built with experts"
    s.only("decoder_sparse_step", 1, dense)
    s.only("mlp_only_layers", [], dense)
    # transformers gives the window to all layers and ignores max_window_layers, others do not: no model has shown which it is.
    s.only("use_sliding_window", False, "which layers have the window is not settled, so none is built")
    s.take("sliding_window", None)
    s.take("max_window_layers", None)
    renormalize = s.take("norm_topk_prob")
    if not isinstance(renormalize, bool):
        raise HuggingFaceError(f"{s.path}: norm_topk_prob = {renormalize!r}: must be true or false.")
    # intermediate_size, which read_common took, is the width of layers without experts.
    experts = read_experts(s, _experts(s)) | {"d_ff": s.whole("moe_intermediate_size"), "renormalize": renormalize}
    return common | {"qk_norm": True} | experts | read_rope(s)


def _experts(s: Settings) -> int:
    """transformers 4 calls it num_experts, some of version 5 num_local_experts."""
    new = s.take("num_local_experts", None)
    experts = s.whole("num_experts") if new is None else s.whole("num_experts", new)
    if new not in (None, experts):
        raise HuggingFaceError(f"{s.path}: num_experts is {experts} and num_local_experts {new!r}. Remove the wrong one.")
    return experts


def write(model: Model) -> dict[str, Any]:
    """Keys of config.json that say what the model is. Raises HuggingFaceError where they cannot."""
    must_have(model, "Qwen3-MoE", qkv_bias=False, qk_norm=True, sandwich_norm=False, attn_logit_scale=0.0, local_rope_base=0.0)
    must_have(model, "Qwen3-MoE", attention_softcap=0.0, logit_softcap=0.0, sliding_window=0)
    must_have_experts(model, "Qwen3-MoE")
    return (
        write_common(model, "silu")
        | write_rope(model)
        | {
            "attention_bias": False,
            # Of layers without experts, of which there are none; as published, the width that a token goes through.
            "intermediate_size": model.experts_per_token * model.d_ff,
            "moe_intermediate_size": model.d_ff,
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "norm_topk_prob": model.renormalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            "sliding_window": None,
            "output_router_logits": False,
        }
    )
