"""OLMo 2: norms on the outputs of attention and feed-forward alone, and on all queries and all keys of a token together."""

from jaxtrain.models.hf_tensors import ATTENTION_BIAS, JOINT_QK_NORM, ONLY_POST_NORMS
from jaxtrain.models.hugging_face import BIASED, KEYS, UNTIED, Format
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
MODEL = {"norm_placement": "post", "qk_norm": True, "qk_norm_joint": True}
TENSORS = ONLY_POST_NORMS | JOINT_QK_NORM | ATTENTION_BIAS
FORMAT = Format("olmo2", "Olmo2ForCausalLM", TENSORS, KEYS | UNTIED | BIASED, model=MODEL)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "olmo2_1b":  (16, 2048, 16, 16, 0,  8192, 100352),
        "olmo2_7b":  (32, 4096, 32, 32, 0, 11008, 100352),
        "olmo2_13b": (40, 5120, 40, 40, 0, 13824, 100352),
        "olmo2_32b": (64, 5120, 40,  8, 0, 27648, 100352),
    },
    norm_eps=1e-06, rope_base=500_000.0, **MODEL,
)
# fmt: on
