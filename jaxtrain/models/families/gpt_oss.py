"""GPT-OSS: experts with biases and a clamped gate, attention sinks, a sliding window in every other layer, YaRN."""

from jaxtrain.config.schema import GLOBAL, LOCAL
from jaxtrain.models.hf_keys import ANY, HfKey, alias, only
from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, HfTensor
from jaxtrain.models.hugging_face import HEAD_DIM, KEYS, UNTIED, Format, Windows, quantization_row
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure(activation="clamped_swiglu")
PATTERN = LOCAL + GLOBAL
LAYER, OURS = "model.layers.{i}.", "layers.{i}."
TENSORS = {
    f"{OURS}attention.sinks": HfTensor(f"{LAYER}self_attn.sinks", "N", "N"),
    f"{OURS}mlp.router": HfTensor(f"{LAYER}mlp.router.weight", "D E", "E D"),
    f"{OURS}mlp.router_logit_bias": HfTensor(f"{LAYER}mlp.router.bias", "E", "E"),
    # Columns of gate and up alternate.
    f"{OURS}mlp.gate": HfTensor(f"{LAYER}mlp.experts.gate_up_proj", "E D F", "E D (F (1 + 1))", 0),
    f"{OURS}mlp.up": HfTensor(f"{LAYER}mlp.experts.gate_up_proj", "E D F", "E D (F (1 + 1))", 1),
    f"{OURS}mlp.down": HfTensor(f"{LAYER}mlp.experts.down_proj", "E D F", "E F D"),
    f"{OURS}mlp.gate_bias": HfTensor(f"{LAYER}mlp.experts.gate_up_proj_bias", "E F", "E (F (1 + 1))", 0),
    f"{OURS}mlp.up_bias": HfTensor(f"{LAYER}mlp.experts.gate_up_proj_bias", "E F", "E (F (1 + 1))", 1),
    f"{OURS}mlp.down_bias": HfTensor(f"{LAYER}mlp.experts.down_proj_bias", "E D", "E D"),
}
BUILT = "experts are built with this gate only"


MODEL = {
    "qkv_bias": True,
    "attention_out_bias": True,
    "attention_sinks": True,
    "router_logit_bias": True,
    "expert_bias": True,
    "renormalize": True,
}
FAMILY_KEYS = {
    "sliding_window": Windows(lambda s: PATTERN),
    "num_local_experts": HfKey("num_experts"),
    "num_experts_per_tok": HfKey("experts_per_token"),
    "experts_per_token": alias("num_experts_per_tok", lambda hf_config: hf_config["num_experts_per_tok"]),
    "initial_context_length": HfKey("", ANY, None),  # that of the rotary settings is original_max_position_embeddings
    "swiglu_limit": only(7.0, BUILT),
    "swiglu_alpha": only(1.702, BUILT),
    "attention_bias": only(True, "attention is built with biases"),
    "quantization_config": quantization_row("mxfp4"),
}
FORMAT = Format(
    "gpt_oss",
    "GptOssForCausalLM",
    COMMON | ATTENTION_BIAS | TENSORS,
    KEYS | HEAD_DIM | UNTIED | FAMILY_KEYS,
    model=MODEL,
    written={"output_router_logits": False},
)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "gpt_oss_20b":  (24, 2880, 64, 8, 64, 2880, 201088, {"num_experts": 32}),
        "gpt_oss_120b": (36, 2880, 64, 8, 64, 2880, 201088, {"num_experts": 128}),
    },
    norm_eps=1e-05, experts_per_token=4, sliding_window=128, attention_pattern=PATTERN, rope_base=150_000.0,
    rope_scaling="yarn", rope_factor=32.0, rope_original_len=4096, rope_truncate=False, **MODEL,
)
# fmt: on
