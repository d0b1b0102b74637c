"""DeepSeek-V3 and R1, Kimi K2: latent attention, a few dense layers, then layers with many narrow experts."""

import dataclasses
from collections.abc import Mapping

from jaxtrain.models.hf_keys import COUNT, FLAG, NUMBER, HfConfig, HfKey, HfRow, alias, only
from jaxtrain.models.hf_tensors import COMMON, HfTensor, experts
from jaxtrain.models.hugging_face import KEYS, UNTIED, Format, quantization_row
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
AT = "model.layers.{i}.self_attn."
ATTENTION = {
    "wq": HfTensor(AT + "q_proj.weight", "D N H", "(N H) D", interleaved="H"),
    "wq_down": HfTensor(AT + "q_a_proj.weight", "D Q", "Q D"),
    "q_norm.scale": HfTensor(AT + "q_a_layernorm.weight", "Q", "Q"),
    "wq_up": HfTensor(AT + "q_b_proj.weight", "Q N H", "(N H) Q", interleaved="H"),
    "wkv_down": HfTensor(AT + "kv_a_proj_with_mqa.weight", "D C", "C D", interleaved="C"),
    "kv_norm.scale": HfTensor(AT + "kv_a_layernorm.weight", "L", "L"),
    "wkv_up": HfTensor(AT + "kv_b_proj.weight", "L N U", "(N U) L"),
    "wo": HfTensor(AT + "o_proj.weight", "D N W", "D (N W)"),
}
MLP = "model.layers.{i}.mlp."
BIAS = HfTensor(MLP + "gate.e_score_correction_bias", "E", "E", exact=True)
SHARED = {
    "gate": HfTensor(MLP + "shared_experts.gate_proj.weight", "D S", "S D"),
    "up": HfTensor(MLP + "shared_experts.up_proj.weight", "D S", "S D"),
    "down": HfTensor(MLP + "shared_experts.down_proj.weight", "D S", "D S"),
}
DENSE = {
    "gate": HfTensor(MLP + "gate_proj.weight", "D G", "G D"),
    "up": HfTensor(MLP + "up_proj.weight", "D G", "G D"),
    "down": HfTensor(MLP + "down_proj.weight", "D G", "D G"),
}
ROUTED = experts("mlp", gate="gate_proj", up="up_proj", down="down_proj") | {"layers.{i}.mlp.router_bias": BIAS}
ROUTED |= {f"layers.{{i}}.mlp.shared.{name}": tensor for name, tensor in SHARED.items()}
LAYER = {name: tensor for name, tensor in COMMON.items() if "_norm.scale" in name and "{i}" in name}
LAYER |= {f"layers.{{i}}.attention.{name}": tensor for name, tensor in ATTENTION.items()} | ROUTED
# In the checkpoint, modules of multi-token prediction are numbered as layers after the last layer. Each has a copy of the
# embedding and of the head.
MTP = {
    "embed_norm.scale": HfTensor("model.layers.{i}.enorm.weight", "D", "D"),
    "hidden_norm.scale": HfTensor("model.layers.{i}.hnorm.weight", "D", "D"),
    "embed_proj": HfTensor("model.layers.{i}.eh_proj.weight", "D Y", "Y (D + D)", 0),
    "hidden_proj": HfTensor("model.layers.{i}.eh_proj.weight", "D Y", "Y (D + D)", 1),
    "norm.scale": HfTensor("model.layers.{i}.shared_head.norm.weight", "D", "D"),
}
COPIES = {
    "embed.embedding": "model.layers.{i}.embed_tokens.weight",
    "head": "model.layers.{i}.shared_head.head.weight",
}


def stacks(layer: Mapping[str, HfTensor]) -> dict[str, HfTensor]:
    """Return the tensors of dense layers and of the layers after them. layer: of a layer with experts."""
    dense = {f"dense_{name}": tensor for name, tensor in layer.items() if ".mlp." not in name}
    return {**dense, **{f"dense_layers.{{i}}.mlp.{name}": tensor for name, tensor in DENSE.items()}, **layer}


TENSORS = {
    **{name: dataclasses.replace(tensor, copy=COPIES.get(name, "")) for name, tensor in COMMON.items() if "{i}" not in name},
    **stacks(LAYER),
    **{f"mtp.{{i}}.{name}": tensor for name, tensor in MTP.items()},
    **{name.replace("layers.{i}", "mtp.{i}.block"): tensor for name, tensor in LAYER.items()},
}
NEXT = "num_nextn_predict_layers"


def qk_width(hf_config: HfConfig) -> int:
    """Return the width of a head of queries and keys."""
    return hf_config["qk_nope_head_dim"] + hf_config["qk_rope_head_dim"]


# Of a router of sigmoids, and the widths of experts and dense layers.
ROUTED_KEYS: dict[str, HfRow] = {
    "moe_intermediate_size": HfKey("d_ff"),
    "first_k_dense_replace": HfKey("dense_layers", COUNT),
    "intermediate_size": HfKey(
        "dense_d_ff",
        to_model=lambda value, hf_config: value if hf_config.get("first_k_dense_replace") else 0,
        to_hf=lambda m: m.dense_d_ff or m.experts_per_token * m.d_ff,
    ),
    "n_routed_experts": HfKey("num_experts"),
    "n_shared_experts": HfKey(
        "shared_d_ff",
        to_model=lambda value, hf_config: value * hf_config["moe_intermediate_size"],
        to_hf=lambda m: m.shared_d_ff // m.d_ff,
    ),
    "num_experts_per_tok": HfKey("experts_per_token"),
    "norm_topk_prob": HfKey("renormalize", FLAG),
    "routed_scaling_factor": HfKey("routed_scaling", NUMBER),
    "n_group": HfKey("router_groups"),
    "topk_group": HfKey("groups_per_token"),
    "moe_layer_freq": only(1, "all layers after first_k_dense_replace are built with experts"),
    "scoring_func": only("sigmoid", "scores are built as sigmoids"),
    "topk_method": only("noaux_tc", "experts are chosen by score and bias, in groups"),
}
LATENT_KEYS: dict[str, HfRow] = {
    "kv_lora_rank": HfKey("kv_lora_rank"),
    "q_lora_rank": HfKey("q_lora_rank", COUNT, null=0),
    "qk_nope_head_dim": HfKey("qk_nope_head_dim"),
    "qk_rope_head_dim": HfKey("qk_rope_head_dim"),
    "v_head_dim": HfKey("v_head_dim"),
    # In transformers' config, head_dim is the rotated part of a head.
    "head_dim": HfKey(default=None, to_hf=lambda m: m.qk_rope_head_dim),
    "qk_head_dim": alias("qk_nope_head_dim + qk_rope_head_dim", qk_width),
    "rope_interleave": only(True, "rotary pairs are read as neighbours"),
}
FAMILY_KEYS = {
    NEXT: HfKey("mtp_layers", COUNT, 0),
    "quantization_config": quantization_row("fp8"),
}
FORMAT = Format(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    TENSORS,
    KEYS | UNTIED | ROUTED_KEYS | LATENT_KEYS | FAMILY_KEYS,
    model={"router": "sigmoid", "router_bias": True},
    written={"attention_bias": False},
    beyond=f"of multi-token prediction, and {NEXT} is 0",
)
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536}
V3 = {"dense_layers": 3, "num_experts": 256, "routed_scaling": 2.5, "router_groups": 8, "groups_per_token": 4}
V3 |= {"rope_factor": 40.0}
K2 = {"dense_layers": 1, "num_experts": 384, "routed_scaling": 2.827, "rope_base": 50_000.0}
K2 |= {"rope_factor": 32.0, "rope_beta_fast": 1.0}
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "deepseek_v3": (61, 7168, 128, 128, 192, 2048, 129280, V3),
        "kimi_k2":     (61, 7168,  64,  64, 192, 2048, 163840, K2),
    },
    **LATENT, dense_d_ff=18432, shared_d_ff=2048, experts_per_token=8, router="sigmoid", router_bias=True,
    norm_eps=1e-06, rope_base=10_000.0, rope_scaling="yarn", rope_original_len=4096, rope_mscale=1.0, rope_mscale_all_dim=1.0,
)
# fmt: on
