"""GLM-4.7-Flash: DeepSeek-V3's latent attention, router and experts, without its multi-token prediction."""

from jaxtrain.models.families.deepseek_v3 import LATENT_KEYS, LAYER, NEXT, ROUTED_KEYS, STRUCTURE, stacks
from jaxtrain.models.hf_keys import COUNT, REQUIRED, Given, Key, Kind, same
from jaxtrain.models.hf_tensors import COMMON
from jaxtrain.models.hugging_face import KEYS, UNTIED, Format
from jaxtrain.models.structure import presets

__all__ = ["FORMAT", "PRESETS", "STRUCTURE"]
TENSORS = {name: tensor for name, tensor in COMMON.items() if "{i}" not in name} | stacks(LAYER)
TYPES = "mlp_layer_types"


def dense(given: Given) -> int:
    """Return the number of dense layers."""
    return given[TYPES].count("dense") if isinstance(given.get(TYPES), list) else 1


def types(layers: int, first: int) -> list[str]:
    """Return the value of mlp_layer_types for this number of dense layers."""
    return ["dense"] * first + ["sparse"] * (layers - first)


KNOWN = Kind("must be dense layers, then sparse ones", lambda x, given: x == types(given["num_hidden_layers"], dense(given)))
OWN_KEYS = {
    TYPES: Key("dense_layers", KNOWN, [], REQUIRED, lambda _, g: dense(g), lambda m: types(m.num_layers, m.dense_layers)),
    "first_k_dense_replace": same(f"the number of dense layers of {TYPES}, 1 without it", dense),
    "intermediate_size": Key("dense_d_ff", to_ours=lambda x, g: dense(g) and x, to_theirs=lambda m: m.dense_d_ff or m.d_ff),
    "head_dim": same("qk_rope_head_dim", lambda given: given.get("qk_rope_head_dim")),
    NEXT: Key("", COUNT, None, to_theirs=lambda m: 0),
}
MODEL = {"router": "sigmoid", "router_bias": True}
KEYS_OF_ALL = KEYS | UNTIED | ROUTED_KEYS | LATENT_KEYS | OWN_KEYS
BEYOND = "of multi-token prediction, which this family is built without, as in transformers"
FORMAT = Format("glm4_moe_lite", "Glm4MoeLiteForCausalLM", TENSORS, KEYS_OF_ALL, model=MODEL, beyond=BEYOND)
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "q_lora_rank": 768}
ROUTED = {"num_experts": 64, "experts_per_token": 4, "routed_scaling": 1.8, "shared_d_ff": 1536, **MODEL}
# layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
FLASH = (47, 2048, 20, 20, 256, 1536, 154880, {"dense_layers": 1, "dense_d_ff": 10240, "rope_base": 1_000_000.0})
PRESETS = presets({"glm4.7_flash_30b": FLASH}, norm_eps=1e-05, **LATENT, **ROUTED)
