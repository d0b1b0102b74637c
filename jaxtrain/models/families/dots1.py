"""dots.llm1: Qwen3's attention, a few dense layers, then DeepSeek-V3's router and experts."""

from jaxtrain.config.schema import GLOBAL, LOCAL
from jaxtrain.models.families.deepseek_v3 import ROUTED, ROUTED_KEYS, stacks
from jaxtrain.models.hf_keys import COUNT, POSITIVE, HfKey, Settings, ValueKind
from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, QK_NORM
from jaxtrain.models.hugging_face import BIASED, KEYS, UNTIED, Format, Windows
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
LAYER = {name: tensor for name, tensor in COMMON.items() if "{i}" in name and ".mlp." not in name} | ROUTED
TENSORS = {name: tensor for name, tensor in COMMON.items() if "{i}" not in name}
TENSORS |= stacks(LAYER | ATTENTION_BIAS | QK_NORM)


def window_letters(settings: Settings) -> str:
    """Return the letters of layers: those from `max_window_layers` on have the sliding window, if there is one."""
    first = settings.take("max_window_layers", COUNT, 62)
    if settings.hf_config.get("sliding_window", 0) is None:
        return GLOBAL
    return "".join(LOCAL if i >= first else GLOBAL for i in range(settings.hf_config["num_hidden_layers"]))


MODEL = {"qk_norm": True, "router": "sigmoid", "router_bias": True}
BY_SIGMOIDS = ValueKind("scores are built as sigmoids", lambda x, _: x in ("sigmoid", "noaux_tc"))  # as published
FAMILY_KEYS = {
    "sliding_window": Windows(window_letters),
    "n_group": HfKey("router_groups", POSITIVE, 1),
    "topk_group": HfKey("groups_per_token", POSITIVE, 1),
    "scoring_func": HfKey("", BY_SIGMOIDS, None),
}
FORMAT = Format("dots1", "Dots1ForCausalLM", TENSORS, KEYS | UNTIED | BIASED | ROUTED_KEYS | FAMILY_KEYS, model=MODEL)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "dots1_142b": (62, 4096, 32, 32, 128, 1408, 152064),
    },
    norm_eps=1e-05, rope_base=10_000_000.0, dense_layers=1, dense_d_ff=10944, shared_d_ff=2816, num_experts=128,
    experts_per_token=6, routed_scaling=2.5, **MODEL,
)
# fmt: on
