"""GLM-4.7-Flash: DeepSeek-V3's latent attention, router and experts, without its multi-token prediction."""

from typing import Any

from jaxtrain.models.families.deepseek_v3 import LATENT_KEYS, LAYER, NEXT, ROUTED_KEYS, STRUCTURE, stacks
from jaxtrain.models.hf_keys import COUNT, REQUIRED, HfConfig, HfKey, ValueKind, alias
from jaxtrain.models.hf_tensors import COMMON
from jaxtrain.models.hugging_face import KEYS, UNTIED, Format

__all__ = ["FORMAT", "PRESETS", "STRUCTURE"]
TENSORS = {name: tensor for name, tensor in COMMON.items() if "{i}" not in name} | stacks(LAYER)
TYPES = "mlp_layer_types"


def num_dense(hf_config: HfConfig) -> int:
    """Return the number of dense layers."""
    return hf_config[TYPES].count("dense") if isinstance(hf_config.get(TYPES), list) else 1


def mlp_layer_types(layers: int, first: int) -> list[str]:
    """Return the value of mlp_layer_types for this number of dense layers."""
    return ["dense"] * first + ["sparse"] * (layers - first)


DENSE_FIRST = ValueKind(
    "must be dense layers, then sparse ones",
    lambda x, hf_config: x == mlp_layer_types(hf_config["num_hidden_layers"], num_dense(hf_config)),
)
FAMILY_KEYS = {
    TYPES: HfKey(
        "dense_layers",
        DENSE_FIRST,
        [],
        REQUIRED,
        lambda _, hf_config: num_dense(hf_config),
        lambda m: mlp_layer_types(m.num_layers, m.dense_layers),
    ),
    "first_k_dense_replace": alias(f"the number of dense layers of {TYPES}, 1 without it", num_dense),
    "intermediate_size": HfKey(
        "dense_d_ff", to_model=lambda x, hf_config: num_dense(hf_config) and x, to_hf=lambda m: m.dense_d_ff or m.d_ff
    ),
    "head_dim": alias("qk_rope_head_dim", lambda hf_config: hf_config.get("qk_rope_head_dim")),
    NEXT: HfKey("", COUNT, None, to_hf=lambda m: 0),
}
MODEL = {"router": "sigmoid", "router_bias": True}
ALL_KEYS = KEYS | UNTIED | ROUTED_KEYS | LATENT_KEYS | FAMILY_KEYS
BEYOND = "of multi-token prediction, which this family is built without, as in transformers"
FORMAT = Format("glm4_moe_lite", "Glm4MoeLiteForCausalLM", TENSORS, ALL_KEYS, model=MODEL, beyond=BEYOND)
PRESETS: dict[str, dict[str, Any]] = {}
