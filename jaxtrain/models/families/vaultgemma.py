"""VaultGemma: Gemma 2 with norms on the inputs of attention and feed-forward alone."""

from typing import Any

from jaxtrain.models.families.gemma2 import FAMILY_KEYS, STRUCTURE
from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, POST_NORMS
from jaxtrain.models.hugging_face import BIASED, GEMMA, GEMMA_SCORES, KEYS, Format

__all__ = ["FORMAT", "PRESETS", "STRUCTURE"]
NORMS = {name: tensor for name, tensor in POST_NORMS.items() if "_post_norm" not in name}
FORMAT = Format(
    "vaultgemma",
    "VaultGemmaForCausalLM",
    COMMON | ATTENTION_BIAS | NORMS,
    KEYS | BIASED | GEMMA | GEMMA_SCORES | FAMILY_KEYS,
)
PRESETS: dict[str, dict[str, Any]] = {}
