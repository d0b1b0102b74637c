"""Qwen2-MoE and Qwen1.5-MoE: Qwen2's attention, narrow experts, and a shared expert with a gate."""

from jaxtrain.models.families import qwen3_moe
from jaxtrain.models.hf_keys import FLAG, HfKey
from jaxtrain.models.hf_tensors import COMMON, QKV_BIAS, HfTensor, experts
from jaxtrain.models.hugging_face import KEYS, UNTIED, Format
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
MLP = "model.layers.{i}.mlp."
EXPERTS = {
    **experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    "layers.{i}.mlp.shared.gate": HfTensor(MLP + "shared_expert.gate_proj.weight", "D S", "S D"),
    "layers.{i}.mlp.shared.up": HfTensor(MLP + "shared_expert.up_proj.weight", "D S", "S D"),
    "layers.{i}.mlp.shared.down": HfTensor(MLP + "shared_expert.down_proj.weight", "D S", "D S"),
    "layers.{i}.mlp.shared_gate": HfTensor(MLP + "shared_expert_gate.weight", "D", "1 D"),
}
FAMILY_KEYS = {
    **qwen3_moe.FAMILY_KEYS,
    "qkv_bias": HfKey("qkv_bias", FLAG, True),
    "shared_expert_intermediate_size": HfKey("shared_d_ff"),
}
FORMAT = Format(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    COMMON | QKV_BIAS | EXPERTS,
    KEYS | UNTIED | FAMILY_KEYS,
    model={"shared_gate": True},
    written={"output_router_logits": False},
)
SMALL = {"num_experts": 60, "experts_per_token": 4, "shared_d_ff": 5632}
LARGE = {"num_experts": 64, "experts_per_token": 8, "shared_d_ff": 20480}
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "qwen1.5_moe_a2.7b": (24, 2048, 16, 16, 128, 1408, 151936, SMALL),
        "qwen2_57b_a14b":    (28, 3584, 28,  4, 128, 2560, 151936, LARGE),
    },
    norm_eps=1e-06, qkv_bias=True, renormalize=False, shared_gate=True, rope_base=1_000_000.0,
)
# fmt: on
