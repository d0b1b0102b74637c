"""ERNIE 4.5 without experts: Llama's layers, whose rotary pairs are neighbours."""

from jaxtrain.models.hf_keys import Flags
from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, MLP_BIAS, in_pairs
from jaxtrain.models.hugging_face import HEAD_DIM, KEYS, TIED, Format
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
BIASED = {"use_bias": Flags(("qkv_bias", "attention_out_bias", "mlp_bias"))}
TENSORS = in_pairs(COMMON | ATTENTION_BIAS | MLP_BIAS)
FORMAT = Format("ernie4_5", "Ernie4_5ForCausalLM", TENSORS, KEYS | HEAD_DIM | TIED | BIASED)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "ernie4.5_0.3b": (18, 1024, 16, 2, 128, 3072, 103424),
    },
    norm_eps=1e-05, tied_head=True, rope_base=500_000.0,
)
# fmt: on
