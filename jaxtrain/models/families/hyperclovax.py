"""HyperCLOVA X: Granite's factors, and norms before and after attention and MLP."""

from typing import Any

from jaxtrain.models.families.granite import FACTORS, STRUCTURE
from jaxtrain.models.hf_keys import ABOVE_0, FLAG, HfKey
from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, MLP_BIAS, HfTensor
from jaxtrain.models.hugging_face import BIASED, KEYS, MLP_BIASED, UNTIED, Format

__all__ = ["FORMAT", "PRESETS", "STRUCTURE"]
POST_NORMS = {
    "layers.{i}.attention_post_norm.scale": HfTensor("model.layers.{i}.post_norm1.weight", "D", "D"),
    "layers.{i}.mlp_post_norm.scale": HfTensor("model.layers.{i}.post_norm2.weight", "D", "D"),
}
FAMILY_KEYS = {
    "logits_scaling": HfKey("logit_multiplier", ABOVE_0, 1.0),  # not its inverse, as Granite's is
    "attention_multiplier": HfKey("attn_logit_scale", ABOVE_0, 0.0, 0.0),
    "use_post_norm": HfKey(
        "norm_placement",
        FLAG,
        True,
        to_model=lambda both, _: "sandwich" if both else "pre",
        to_hf=lambda m: m.norm_placement == "sandwich",
    ),
}
TENSORS = COMMON | ATTENTION_BIAS | MLP_BIAS | POST_NORMS
FORMAT = Format("hyperclovax", "HyperCLOVAXForCausalLM", TENSORS, KEYS | UNTIED | BIASED | MLP_BIASED | FACTORS | FAMILY_KEYS)
PRESETS: dict[str, dict[str, Any]] = {}
