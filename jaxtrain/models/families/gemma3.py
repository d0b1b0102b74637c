"""The text models of Gemma 3: norms on queries and keys instead of Gemma 2's soft caps; every sixth layer without a window."""

from jaxtrain.config.schema import GLOBAL, LOCAL
from jaxtrain.models.hf_keys import LAYERS, Settings, only
from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, POST_NORMS, QK_NORM
from jaxtrain.models.hugging_face import BIASED, GEMMA, GEMMA_SCORES, KEYS, Format, Rope, Windows
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure(activation="gelu_tanh", norm_offset=True, scaled_embedding=True)


def pattern(settings: Settings) -> str:
    """Return the repeated letters of layers: of every `sliding_window_pattern` layers, the last has no sliding window."""
    every = settings.take("sliding_window_pattern", LAYERS, None) or settings.take("_sliding_window_pattern", LAYERS, 6)
    return LOCAL * (every - 1) + GLOBAL


NOT_APPLIED = "published models have null, and transformers reads another value and does not apply it"
FAMILY_KEYS = {
    "attn_logit_softcapping": only(None, NOT_APPLIED, fix=None),
    "sliding_window": Windows(pattern),
    "rope_parameters": Rope(local="rope_local_base_freq"),
}
# fmt: off
NESTED = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "attn_logit_softcapping": None, "final_logit_softcapping": None,
}
# fmt: on
FORMAT = Format(
    "gemma3_text",
    "Gemma3ForCausalLM",
    COMMON | ATTENTION_BIAS | POST_NORMS | QK_NORM,
    KEYS | BIASED | GEMMA | GEMMA_SCORES | FAMILY_KEYS,
    model={"norm_placement": "sandwich", "qk_norm": True},
    nested=NESTED,
)
SMALL = {"attn_logit_scale": 256**-0.5, "sliding_window": 512}
LARGE = {"attn_logit_scale": 256**-0.5, "sliding_window": 1024, "rope_scaling": "linear", "rope_factor": 8.0}
# gemma3_4b and larger presets are the text part of a model that also reads images.
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "gemma3_270m": (18,  640,  4,  1, 256,  2048, 262144, SMALL),
        "gemma3_1b":   (26, 1152,  4,  1, 256,  6912, 262144, SMALL),
        "gemma3_4b":   (34, 2560,  8,  4, 256, 10240, 262208, LARGE),
        "gemma3_12b":  (48, 3840, 16,  8, 256, 15360, 262208, LARGE),
        "gemma3_27b":  (62, 5376, 32, 16, 128, 21504, 262208, LARGE | {"attn_logit_scale": 168**-0.5}),
    },
    norm_eps=1e-06, tied_head=True, qk_norm=True, norm_placement="sandwich", attention_pattern="lllllg",
    rope_base=1_000_000.0, local_rope_base=10_000.0,
)
# fmt: on
