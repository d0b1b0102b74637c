"""Youtu-LLM: DeepSeek-V3's latent attention, and Llama's feed-forward blocks."""

from typing import Any

from jaxtrain.models.families.deepseek_v3 import LATENT_KEYS, LAYER, STRUCTURE
from jaxtrain.models.hf_keys import ANY, HfKey
from jaxtrain.models.hf_tensors import COMMON
from jaxtrain.models.hugging_face import KEYS, TIED, Format

__all__ = ["FORMAT", "PRESETS", "STRUCTURE"]
ATTENTION = {name: tensor for name, tensor in LAYER.items() if ".attention." in name}
TENSORS = ATTENTION | {name: tensor for name, tensor in COMMON.items() if ".attention." not in name}
FAMILY_KEYS = {"embedding_initializer_range": HfKey("", ANY, None)}
FORMAT = Format(
    "youtu", "YoutuForCausalLM", TENSORS, KEYS | TIED | LATENT_KEYS | FAMILY_KEYS, written={"attention_bias": False}
)
PRESETS: dict[str, dict[str, Any]] = {}
