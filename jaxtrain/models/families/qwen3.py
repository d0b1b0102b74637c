"""Qwen3: Llama's layers with RMSNorm on queries and keys; head_dim is independent of d_model."""

from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, QK_NORM
from jaxtrain.models.hugging_face import BIASED, HEAD_DIM, KEYS, QWEN_WINDOWS, Format
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
FORMAT = Format(
    "qwen3",
    "Qwen3ForCausalLM",
    COMMON | ATTENTION_BIAS | QK_NORM,
    KEYS | HEAD_DIM | BIASED | QWEN_WINDOWS,
    model={"qk_norm": True},
)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "qwen3_0.6b": (28, 1024, 16, 8, 128,  3072, 151936, {"tied_head": True}),
        "qwen3_1.7b": (28, 2048, 16, 8, 128,  6144, 151936, {"tied_head": True}),
        "qwen3_4b":   (36, 2560, 32, 8, 128,  9728, 151936, {"tied_head": True}),
        "qwen3_8b":   (36, 4096, 32, 8, 128, 12288, 151936),
        "qwen3_14b":  (40, 5120, 40, 8, 128, 17408, 151936),
        "qwen3_32b":  (64, 5120, 64, 8, 128, 25600, 151936),
    },
    norm_eps=1e-06, qk_norm=True, rope_base=1_000_000.0,
)
# fmt: on
