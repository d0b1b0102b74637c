"""GLM-4: rotary pairs are neighbours in the first half of a head, with biases on queries, keys and values."""

from jaxtrain.models.hf_keys import FLAG, HfKey
from jaxtrain.models.hf_tensors import COMMON, GATE_UP, QKV_BIAS, in_pairs
from jaxtrain.models.hugging_face import KEYS, UNTIED, Format, Rope
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
TENSORS = in_pairs(COMMON | QKV_BIAS | GATE_UP)
FAMILY_KEYS = {
    "head_dim": HfKey("head_dim"),
    "attention_bias": HfKey("qkv_bias", FLAG, True),
    "rope_parameters": Rope(partial=0.5),
}
FORMAT = Format("glm", "GlmForCausalLM", TENSORS, KEYS | UNTIED | FAMILY_KEYS)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "glm4_9b": (40, 4096, 32, 2, 128, 13696, 151552),
    },
    norm_eps=1.5625e-07, qkv_bias=True, partial_rotary_factor=0.5, rope_base=10_000.0,
)
# fmt: on
