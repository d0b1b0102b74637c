"""MiniMax-M2: joint norms of queries and keys, half of each head is rotated, and Mixtral's experts chosen by sigmoids."""

from typing import Any

from jaxtrain.models.hf_keys import ANY, POSITIVE, HfKey, Settings, ValueKind, only
from jaxtrain.models.hf_tensors import COMMON, JOINT_QK_NORM, HfTensor, experts
from jaxtrain.models.hugging_face import HEAD_DIM, KEYS, PARTIAL, UNTIED, Format, Rope, quantization_row
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
BLOCK = "block_sparse_moe"
TENSORS = COMMON | JOINT_QK_NORM | experts(BLOCK, gate="w1", up="w3", down="w2")
TENSORS |= {"layers.{i}.mlp.router_bias": HfTensor(f"model.layers.{{i}}.{BLOCK}.e_score_correction_bias", "E", "E", exact=True)}


def rotated_fraction(settings: Settings) -> Any:
    """Return the part of each head that is rotated, or None: `rotary_dim` is the number of its dimensions."""
    width, fraction = settings.take("rotary_dim", POSITIVE, None), settings.take(PARTIAL, default=None)
    return fraction if width is None else width / settings.hf_config["head_dim"]


BUILT, TRAINING = "layers are built so only", HfKey("", ANY, None)  # for multi-token prediction, which is not published
FAMILY_KEYS = {
    "num_local_experts": HfKey("num_experts"),
    "num_experts_per_tok": HfKey("experts_per_token"),
    "rope_parameters": Rope(partial=1.0, fraction=rotated_fraction),
    "rotary_dim": HfKey("", ANY, None, to_hf=lambda m: m.rotary_dim),
    "router_jitter_noise": only(0.0, "jaxtrain adds no noise before the router; set it to 0.0 to go on without"),
    "scoring_func": only("sigmoid", BUILT),
    "use_routing_bias": only(True, BUILT),
    "use_qk_norm": only(True, BUILT),
    "qk_norm_type": only("per_layer", BUILT),
    "shared_intermediate_size": only(0, BUILT),
    "attn_type_list": HfKey(
        "", ValueKind("all layers have full attention, 1", lambda x, _: isinstance(x, list) and x == [1] * len(x)), None
    ),
    **dict.fromkeys(("use_mtp", "num_mtp_modules", "mtp_transformer_layers"), TRAINING),
    # Keys of the layers of another model, which this one does not have.
    **dict.fromkeys(
        (f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")), only(1.0, BUILT, False)
    ),
    **dict.fromkeys(("max_model_len", "mlp_intermediate_size", "shared_moe_mode"), HfKey("", ANY, None)),
    "quantization_config": quantization_row("fp8"),
}
MODEL = {"qk_norm": True, "qk_norm_joint": True, "router": "sigmoid", "router_bias": True, "renormalize": True}
FORMAT = Format("minimax_m2", "MiniMaxM2ForCausalLM", TENSORS, KEYS | HEAD_DIM | UNTIED | FAMILY_KEYS, model=MODEL)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "minimax_m2_230b": (62, 3072, 48, 8, 128, 1536, 200064),
    },
    norm_eps=1e-06, rope_base=5_000_000.0, partial_rotary_factor=0.5, num_experts=256, experts_per_token=8, **MODEL,
)
# fmt: on
