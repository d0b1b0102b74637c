"""Qwen3-MoE: Qwen3's layers, with many narrow experts in place of the feed-forward block."""

from typing import Any

from jaxtrain.config.schema import Model
from jaxtrain.models.hugging_face import (
    COMMON,
    QK_NORM,
    ROPE,
    Format,
    HuggingFaceError,
    Part,
    Settings,
    experts,
    read_experts_per_token,
)
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()


def read_experts(s: Settings, _: int) -> dict[str, Any]:
    for key in ("sliding_window", "max_window_layers"):
        s.take(key, None)  # without effect: use_sliding_window is False
    # The key is num_experts in transformers 4, and num_local_experts in some versions of transformers 5.
    new = s.take("num_local_experts", None)
    experts = s.whole("num_experts") if new is None else s.whole("num_experts", new)
    if new not in (None, experts):
        raise HuggingFaceError(f"{s.path}: num_experts is {experts} and num_local_experts {new!r}. Remove the wrong one.")
    renormalize = s.flag("norm_topk_prob")
    # intermediate_size is the width of layers without experts.
    return read_experts_per_token(s, experts) | {"d_ff": s.whole("moe_intermediate_size"), "renormalize": renormalize}


def write_experts(model: Model) -> dict[str, Any]:
    return {
        # No layer is without experts. In published models this key is the total width of a token's experts.
        "intermediate_size": model.experts_per_token * model.d_ff,
        "moe_intermediate_size": model.d_ff,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": model.renormalize,
    }


DENSE = "all layers are built with experts"
FORMAT = Format(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    COMMON | QK_NORM | experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    (ROPE, Part(read_experts, write_experts)),
    model={"qk_norm": True},
    fixed={
        "decoder_sparse_step": (1, DENSE),
        "mlp_only_layers": ([], DENSE),
        # transformers applies the window to all layers and ignores max_window_layers; other programs do not.
        "use_sliding_window": (False, "which layers have the window is not settled, so none is built"),
    },
    written={"attention_bias": False, "sliding_window": None, "output_router_logits": False},
    tied=False,
)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "qwen3_30b_a3b":   (48, 2048, 32, 4, 128,  768, 151936),
        "qwen3_235b_a22b": (94, 4096, 64, 4, 128, 1536, 151936),
    },
    norm_eps=1e-06, qk_norm=True, rope_base=1_000_000.0, num_experts=128, experts_per_token=8,
)
# fmt: on
