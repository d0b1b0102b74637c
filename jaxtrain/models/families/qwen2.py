"""Qwen2 and Qwen2.5: Llama's layers with biases on queries, keys and values."""

from jaxtrain.models.hf_keys import POSITIVE, HfKey
from jaxtrain.models.hf_tensors import COMMON, QKV_BIAS
from jaxtrain.models.hugging_face import KEYS, QWEN_WINDOWS, Format, head_width
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
HEAD_DIM = {"head_dim": HfKey("head_dim", POSITIVE, head_width, written=False)}
FORMAT = Format("qwen2", "Qwen2ForCausalLM", COMMON | QKV_BIAS, KEYS | HEAD_DIM | QWEN_WINDOWS, model={"qkv_bias": True})
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "qwen2.5_0.5b": (24,  896, 14, 2,  64,  4864, 151936, {"tied_head": True}),
        "qwen2.5_1.5b": (28, 1536, 12, 2, 128,  8960, 151936, {"tied_head": True}),
        "qwen2.5_3b":   (36, 2048, 16, 2, 128, 11008, 151936, {"tied_head": True}),
        "qwen2.5_7b":   (28, 3584, 28, 4, 128, 18944, 152064),
    },
    norm_eps=1e-06, qkv_bias=True, rope_base=1_000_000.0,
)
# fmt: on
