"""Gemma: Llama's layers with GELU, embeddings times the root of d_model, and norms that multiply by 1 + scale."""

from jaxtrain.models.hf_keys import HfKey, ValueKind
from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON
from jaxtrain.models.hugging_face import BIASED, GELU, GEMMA, KEYS, Format
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure(activation="gelu_tanh", norm_offset=True, scaled_embedding=True)
# The first checkpoints have "gelu" and mean its approximation by tanh, which is also what transformers computes then.
ACT = "gelu_pytorch_tanh"
GELUS = ValueKind(GELU, lambda x, _: x in (ACT, "gelu"))
FAMILY_KEYS = {"hidden_act": HfKey("", GELUS, None, to_hf=lambda m: ACT)}
FORMAT = Format("gemma", "GemmaForCausalLM", COMMON | ATTENTION_BIAS, KEYS | BIASED | GEMMA | FAMILY_KEYS)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "gemma_2b": (18, 2048,  8,  1, 256, 16384, 256000),
        "gemma_7b": (28, 3072, 16, 16, 256, 24576, 256000),
    },
    norm_eps=1e-06, tied_head=True, rope_base=10_000.0,
)
# fmt: on
