"""Solar Open: GLM-4.5's router and experts in all layers, and whole heads are rotated."""

from typing import Any

from jaxtrain.models.families.deepseek_v3 import ROUTED, ROUTED_KEYS
from jaxtrain.models.hf_keys import ANY, FLAG, HfKey, only
from jaxtrain.models.hf_tensors import COMMON, QKV_BIAS
from jaxtrain.models.hugging_face import HEAD_DIM, KEYS, UNTIED, Format
from jaxtrain.models.structure import Structure

STRUCTURE = Structure()
TENSORS = {name: tensor for name, tensor in COMMON.items() if ".mlp." not in name} | QKV_BIAS | ROUTED
FAMILY_KEYS = {
    "attention_bias": HfKey("qkv_bias", FLAG, False),
    "first_k_dense_replace": only(0, "all layers are built with experts"),
    "intermediate_size": HfKey("", ANY, None),  # of no layer
}
FORMAT = Format(
    "solar_open",
    "SolarOpenForCausalLM",
    TENSORS,
    KEYS | HEAD_DIM | UNTIED | ROUTED_KEYS | FAMILY_KEYS,
    model={"router": "sigmoid", "router_bias": True},
)
PRESETS: dict[str, dict[str, Any]] = {}
