"""Qwen3-Next: three layers with gated delta nets, then one of gated softmax attention; all with many narrow experts."""

from jaxtrain.models.families.qwen2_moe import EXPERTS
from jaxtrain.models.families.qwen3_moe import DENSE
from jaxtrain.models.hf_keys import ANY, FLAG, HfKey, only
from jaxtrain.models.hf_tensors import COMMON, QK_NORM, HfTensor
from jaxtrain.models.hugging_face import HEAD_DIM, KEYS, UNTIED, DeltaLayers, Format, Rope
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure(norm_offset=True)
OURS, LINEAR = "layers.{i}.delta.", "model.layers.{i}.linear_attn."
Q_PROJ, QUERY_AND_GATE = "model.layers.{i}.self_attn.q_proj.weight", "(N (H + H)) D"
CHANNELS = "(M P + M P + M J X) 1 T"  # of the convolution: queries, keys, values
# Tensors of gated softmax attention, and of a delta net without its projections.
GATED = {
    "layers.{i}.attention.wq": HfTensor(Q_PROJ, "D N H", QUERY_AND_GATE, 0),
    "layers.{i}.attention.wg": HfTensor(Q_PROJ, "D N H", QUERY_AND_GATE, 1),
    **QK_NORM,
}
DELTA = {
    f"{OURS}taps_q": HfTensor(f"{LINEAR}conv1d.weight", "M P T", CHANNELS, 0),
    f"{OURS}taps_k": HfTensor(f"{LINEAR}conv1d.weight", "M P T", CHANNELS, 1),
    f"{OURS}taps_v": HfTensor(f"{LINEAR}conv1d.weight", "(M J) X T", CHANNELS, 2),
    f"{OURS}log_rate": HfTensor(f"{LINEAR}A_log", "(M J)", "(M J)", exact=True),
    f"{OURS}shift": HfTensor(f"{LINEAR}dt_bias", "(M J)", "(M J)", exact=True),
    f"{OURS}norm.scale": HfTensor(f"{LINEAR}norm.weight", "X", "X"),
    f"{OURS}wo": HfTensor(f"{LINEAR}out_proj.weight", "D (M J) X", "D (M J X)"),
}
QKVZ, BA = "(M (P + P + J X + J X)) D", "(M (J + J)) D"  # rows of each key head
PROJECTIONS = {
    f"{OURS}wq": HfTensor(f"{LINEAR}in_proj_qkvz.weight", "D M P", QKVZ, 0),
    f"{OURS}wk": HfTensor(f"{LINEAR}in_proj_qkvz.weight", "D M P", QKVZ, 1),
    f"{OURS}wv": HfTensor(f"{LINEAR}in_proj_qkvz.weight", "D (M J) X", QKVZ, 2),
    f"{OURS}wz": HfTensor(f"{LINEAR}in_proj_qkvz.weight", "D (M J) X", QKVZ, 3),
    f"{OURS}wb": HfTensor(f"{LINEAR}in_proj_ba.weight", "D (M J)", BA, 0),
    f"{OURS}wa": HfTensor(f"{LINEAR}in_proj_ba.weight", "D (M J)", BA, 1),
}
DELTA_KEYS = {
    "linear_num_key_heads": HfKey("linear_key_heads"),
    "linear_num_value_heads": HfKey("linear_value_heads"),
    "linear_key_head_dim": HfKey("linear_key_dim"),
    "linear_value_head_dim": HfKey("linear_value_dim"),
    "linear_conv_kernel_dim": HfKey("linear_conv"),
    "layer_types": DeltaLayers(),
}
EXPERT_KEYS = {
    "num_experts": HfKey("num_experts"),
    "num_experts_per_tok": HfKey("experts_per_token"),
    "moe_intermediate_size": HfKey("d_ff"),
    "shared_expert_intermediate_size": HfKey("shared_d_ff"),
    "intermediate_size": HfKey("", ANY, None),  # of layers without experts, of which there are none
}
FAMILY_KEYS = {
    "norm_topk_prob": HfKey("renormalize", FLAG, True),
    "decoder_sparse_step": only(1, DENSE),
    "mlp_only_layers": only([], DENSE),
    "rope_parameters": Rope(partial=0.25),
}
MODEL = {"qk_norm": True, "attention_gate": True}
NOT_USED = "of multi-token prediction, which transformers does not use either"
FORMAT = Format(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    COMMON | GATED | DELTA | PROJECTIONS | EXPERTS,
    KEYS | HEAD_DIM | UNTIED | DELTA_KEYS | EXPERT_KEYS | FAMILY_KEYS,
    model=MODEL | {"shared_gate": True},
    written={"attention_bias": False, "output_router_logits": False},
    beyond=NOT_USED,
)
SIZES = {"linear_key_heads": 16, "linear_value_heads": 32, "linear_key_dim": 128, "linear_value_dim": 128, "linear_conv": 4}
SIZES |= {"attention_pattern": "dddg", "partial_rotary_factor": 0.25, "rope_base": 10_000_000.0, "norm_eps": 1e-06}
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "qwen3_next_80b_a3b": (48, 2048, 16, 2, 256, 512, 151936),
    },
    num_experts=512, experts_per_token=10, shared_d_ff=512, shared_gate=True, **MODEL, **SIZES,
)
# fmt: on
