"""Granite 3: Llama's layers with factors of embeddings, scores, residual additions and logits."""

from jaxtrain.config.schema import Model
from jaxtrain.models.hf_keys import ABOVE_0, HfKey
from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, MLP_BIAS
from jaxtrain.models.hugging_face import BIASED, KEYS, MLP_BIASED, UNTIED, Format
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()


def logits_divisor(model: Model) -> float:
    """Return the inverse of the factor of the logits, without its rounding."""
    return float(f"{1 / model.logit_multiplier:.12g}")


# A missing attention_multiplier would be 1.0 in transformers, which no checkpoint has.
FACTORS = {
    "embedding_multiplier": HfKey("embedding_multiplier", ABOVE_0, 1.0),
    "residual_multiplier": HfKey("residual_multiplier", ABOVE_0, 1.0),
    "logits_scaling": HfKey("logit_multiplier", ABOVE_0, 1.0, to_model=lambda x, _: 1 / x, to_hf=logits_divisor),
    "attention_multiplier": HfKey("attn_logit_scale", ABOVE_0, to_hf=lambda m: m.attn_logit_scale or m.head_dim**-0.5),
}
FORMAT = Format(
    "granite",
    "GraniteForCausalLM",
    COMMON | ATTENTION_BIAS | MLP_BIAS,
    KEYS | UNTIED | BIASED | MLP_BIASED | FACTORS,
)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "granite3.1_2b": (40, 2048, 32, 8, 0,  8192, 49155,
                          {"attn_logit_scale": 1 / 64, "logit_multiplier": 1 / 8, "rope_base": 5_000_000.0}),
        "granite3.1_8b": (40, 4096, 32, 8, 0, 12800, 49155,
                          {"attn_logit_scale": 1 / 128, "logit_multiplier": 1 / 16, "rope_base": 10_000_000.0}),
    },
    norm_eps=1e-05, tied_head=True, embedding_multiplier=12.0, residual_multiplier=0.22,
)
# fmt: on
