"""GLM-4.5: a part of each head is rotated, a few dense layers, then DeepSeek-V3's router and experts."""

from jaxtrain.models.families.deepseek_v3 import NEXT, ROUTED, ROUTED_KEYS, stacks
from jaxtrain.models.hf_keys import COUNT, FLAG, HfKey
from jaxtrain.models.hf_tensors import COMMON, QK_NORM, QKV_BIAS
from jaxtrain.models.hugging_face import KEYS, UNTIED, Format, Rope
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
LAYER = {name: tensor for name, tensor in COMMON.items() if "{i}" in name and ".mlp." not in name} | ROUTED
TENSORS = {name: tensor for name, tensor in COMMON.items() if "{i}" not in name} | stacks(LAYER | QKV_BIAS | QK_NORM)
FAMILY_KEYS = {
    "attention_bias": HfKey("qkv_bias", FLAG, False),
    "use_qk_norm": HfKey("qk_norm", FLAG, False),
    "rope_parameters": Rope(partial=0.5),
    NEXT: HfKey("", COUNT, None, to_hf=lambda m: 0),
}
MODEL = {"router": "sigmoid", "router_bias": True}
FORMAT = Format(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    TENSORS,
    KEYS | UNTIED | ROUTED_KEYS | FAMILY_KEYS,
    model=MODEL,
    beyond="of multi-token prediction, which this family is built without, as in transformers",
)
LARGE = {
    "qk_norm": True,
    "num_experts": 160,
    "routed_scaling": 2.5,
    "dense_layers": 3,
    "dense_d_ff": 12288,
    "shared_d_ff": 1536,
}
AIR = {"num_experts": 128, "dense_layers": 1, "dense_d_ff": 10944, "shared_d_ff": 1408}
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "glm4.5_355b":     (92, 5120, 96, 8, 128, 1536, 151552, LARGE),
        "glm4.5_air_106b": (46, 4096, 96, 8, 128, 1408, 151552, AIR),
    },
    norm_eps=1e-05, qkv_bias=True, experts_per_token=8, rope_base=1_000_000.0, partial_rotary_factor=0.5, **MODEL,
)
# fmt: on
