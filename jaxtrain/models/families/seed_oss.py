"""Seed-OSS: Llama's layers with biases on queries, keys and values; head_dim is independent of d_model."""

from jaxtrain.models.hf_keys import FLAG, HfKey, only
from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, MLP_BIAS
from jaxtrain.models.hugging_face import HEAD_DIM, KEYS, MLP_BIASED, UNTIED, Format
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
FAMILY_KEYS = {
    "attention_bias": HfKey("qkv_bias", FLAG, True),
    "attention_out_bias": HfKey("attention_out_bias", FLAG, False),
    "residual_dropout": only(0.0, "jaxtrain has no dropout", fix=0.0),
}
FORMAT = Format(
    "seed_oss",
    "SeedOssForCausalLM",
    COMMON | ATTENTION_BIAS | MLP_BIAS,
    KEYS | HEAD_DIM | UNTIED | MLP_BIASED | FAMILY_KEYS,
)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "seed_oss_36b": (64, 5120, 80, 8, 128, 27648, 155136),
    },
    norm_eps=1e-06, qkv_bias=True, rope_base=10_000_000.0,
)
# fmt: on
