"""GPT-OSS: experts with biases and a clamped gate, attention sinks, a sliding window in every other layer, YaRN."""

from typing import Any

from jaxtrain.config.schema import GLOBAL, LOCAL, Model
from jaxtrain.models.hugging_face import (
    COMMON,
    QKV_BIAS,
    ROPE,
    Format,
    HfTensor,
    HuggingFaceError,
    Part,
    Settings,
    read_experts_per_token,
    window_by_layer,
)
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure(activation="clamped_swiglu")
PATTERN = LOCAL + GLOBAL
LAYER, OURS = "model.layers.{i}.", "layers.{i}."
TENSORS = {
    f"{OURS}attention.bo": HfTensor(f"{LAYER}self_attn.o_proj.bias", "D", "D"),
    f"{OURS}attention.sinks": HfTensor(f"{LAYER}self_attn.sinks", "N", "N"),
    f"{OURS}mlp.router": HfTensor(f"{LAYER}mlp.router.weight", "D E", "E D"),
    f"{OURS}mlp.router_logit_bias": HfTensor(f"{LAYER}mlp.router.bias", "E", "E"),
    # Columns of gate and up alternate.
    f"{OURS}mlp.gate": HfTensor(f"{LAYER}mlp.experts.gate_up_proj", "E D F", "E D (F 2)", 0),
    f"{OURS}mlp.up": HfTensor(f"{LAYER}mlp.experts.gate_up_proj", "E D F", "E D (F 2)", 1),
    f"{OURS}mlp.down": HfTensor(f"{LAYER}mlp.experts.down_proj", "E D F", "E F D"),
    f"{OURS}mlp.gate_bias": HfTensor(f"{LAYER}mlp.experts.gate_up_proj_bias", "E F", "E (F 2)", 0),
    f"{OURS}mlp.up_bias": HfTensor(f"{LAYER}mlp.experts.gate_up_proj_bias", "E F", "E (F 2)", 1),
    f"{OURS}mlp.down_bias": HfTensor(f"{LAYER}mlp.experts.down_proj_bias", "E D", "E D"),
}
BUILT = "experts are built with this gate only"


def read_experts(s: Settings, _: int) -> dict[str, Any]:
    packed = s.mapping("quantization_config")
    if packed and packed.get("quant_method") != "mxfp4":
        rule = f"quantization_config has quant_method = {packed.get('quant_method')!r}: only mxfp4 is read"
        raise HuggingFaceError(f"{s.path}: {rule}.")
    chosen = read_experts_per_token(s, s.whole("num_local_experts"))
    s.only("experts_per_token", chosen["experts_per_token"], "num_experts_per_tok is another number, and both mean the same")
    s.take("initial_context_length", None)  # the rotary settings have this length as original_max_position_embeddings
    return chosen


def write_experts(model: Model) -> dict[str, Any]:
    return {"num_local_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}


KEYS = {
    "qkv_bias": True,
    "attention_out_bias": True,
    "attention_sinks": True,
    "router_logit_bias": True,
    "expert_bias": True,
    "renormalize": True,
}
FORMAT = Format(
    "gpt_oss",
    "GptOssForCausalLM",
    COMMON | QKV_BIAS | TENSORS,
    (ROPE, window_by_layer(PATTERN), Part(read_experts, write_experts)),
    model=KEYS,
    fixed={"swiglu_limit": (7.0, BUILT), "swiglu_alpha": (1.702, BUILT)},
    written={"attention_bias": True, "output_router_logits": False},
    head_dim="required",
    tied=False,
    attention_bias=True,
)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "gpt_oss_20b":  (24, 2880, 64, 8, 64, 2880, 201088, {"num_experts": 32}),
        "gpt_oss_120b": (36, 2880, 64, 8, 64, 2880, 201088, {"num_experts": 128}),
    },
    norm_eps=1e-05, experts_per_token=4, sliding_window=128, attention_pattern=PATTERN, rope_base=150_000.0,
    rope_scaling="yarn", rope_factor=32.0, rope_original_len=4096, rope_truncate=False, **KEYS,
)
# fmt: on
