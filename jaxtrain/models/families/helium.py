"""Helium: Llama's layers, whose rotary pairs are neighbours."""

from jaxtrain.models.hf_keys import FLAG, Key, Kind
from jaxtrain.models.hf_tensors import COMMON, MLP_BIAS, QKV_BIAS, in_pairs
from jaxtrain.models.hugging_face import KEYS, MLP_BIASED, UNTIED, Format, head_width
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
SQUARE = Kind("must be hidden_size / num_attention_heads: the output is built square", lambda x, given: x == head_width(given))
OWN_KEYS = {"attention_bias": Key("qkv_bias", FLAG, False), "head_dim": Key("head_dim", SQUARE)}
TENSORS = in_pairs(COMMON | QKV_BIAS | MLP_BIAS)
FORMAT = Format("helium", "HeliumForCausalLM", TENSORS, KEYS | UNTIED | MLP_BIASED | OWN_KEYS)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "helium1_preview_2b": (24, 2560, 20, 20, 128, 7040, 48000),
    },
    norm_eps=1e-08, rope_base=100_000.0,
)
# fmt: on
