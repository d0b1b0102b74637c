"""Gemma 2: norms before and after attention and MLP, soft caps on logits, a sliding window in every other layer."""

from jaxtrain.config.schema import GLOBAL, LOCAL
from jaxtrain.models.hf_keys import NUMBER, HfKey
from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, POST_NORMS
from jaxtrain.models.hugging_face import BIASED, GEMMA, GEMMA_SCORES, KEYS, Format, Windows
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure(activation="gelu_tanh", norm_offset=True, scaled_embedding=True)
PATTERN = LOCAL + GLOBAL
FAMILY_KEYS = {
    "attn_logit_softcapping": HfKey("attention_softcap", NUMBER, null=0.0),
    "sliding_window": Windows(lambda s: PATTERN),
}
FORMAT = Format(
    "gemma2",
    "Gemma2ForCausalLM",
    COMMON | ATTENTION_BIAS | POST_NORMS,
    KEYS | BIASED | GEMMA | GEMMA_SCORES | FAMILY_KEYS,
    model={"norm_placement": "sandwich"},
)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "gemma2_2b":  (26, 2304,  8,  4, 256,  9216, 256000, {"attn_logit_scale": 256**-0.5}),
        "gemma2_9b":  (42, 3584, 16,  8, 256, 14336, 256000, {"attn_logit_scale": 256**-0.5}),
        "gemma2_27b": (46, 4608, 32, 16, 128, 36864, 256000, {"attn_logit_scale": 144**-0.5}),
    },
    norm_eps=1e-06, tied_head=True, norm_placement="sandwich", sliding_window=4096, attention_pattern=PATTERN,
    attention_softcap=50.0, logit_softcap=30.0, rope_base=10_000.0,
)
# fmt: on
