"""Mistral: Llama's layers, in some versions with a sliding window."""

from jaxtrain.models.hf_keys import POSITIVE, HfKey
from jaxtrain.models.hf_tensors import COMMON
from jaxtrain.models.hugging_face import KEYS, UNTIED, Format
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
WINDOW = {"sliding_window": HfKey("sliding_window", POSITIVE, null=0)}  # of all layers
FORMAT = Format("mistral", "MistralForCausalLM", COMMON, KEYS | UNTIED | WINDOW)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "mistral_7b":       (32, 4096, 32, 8, 128, 14336,  32000, {"sliding_window": 4096, "rope_base": 10_000.0}),
        "mistral_7b_v0.3":  (32, 4096, 32, 8, 128, 14336,  32768, {"rope_base": 1_000_000.0}),
        "mistral_nemo_12b": (40, 5120, 32, 8, 128, 14336, 131072, {"rope_base": 1_000_000.0}),
    },
    norm_eps=1e-05,
)
# fmt: on
