"""Helium: Llama's layers, whose rotary pairs are neighbours."""

from typing import Any

from jaxtrain.models.hf_keys import FLAG, HfKey, ValueKind
from jaxtrain.models.hf_tensors import COMMON, MLP_BIAS, QKV_BIAS, in_pairs
from jaxtrain.models.hugging_face import KEYS, MLP_BIASED, UNTIED, Format, head_width
from jaxtrain.models.structure import Structure

STRUCTURE = Structure()
SQUARE = ValueKind(
    "must be hidden_size / num_attention_heads: the output is built square", lambda x, hf_config: x == head_width(hf_config)
)
FAMILY_KEYS = {"attention_bias": HfKey("qkv_bias", FLAG, False), "head_dim": HfKey("head_dim", SQUARE)}
TENSORS = in_pairs(COMMON | QKV_BIAS | MLP_BIAS)
FORMAT = Format("helium", "HeliumForCausalLM", TENSORS, KEYS | UNTIED | MLP_BIASED | FAMILY_KEYS)
PRESETS: dict[str, dict[str, Any]] = {}
