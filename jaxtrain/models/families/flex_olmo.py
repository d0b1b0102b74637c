"""FlexOlmo: OLMo 2's layers with experts in place of the feed-forward block."""

from jaxtrain.models.families.olmo2 import MODEL, STRUCTURE
from jaxtrain.models.families.olmo2 import TENSORS as DENSE
from jaxtrain.models.families.olmoe import EXPERTS, ROUTED, WRITTEN
from jaxtrain.models.hugging_face import BIASED, KEYS, UNTIED, Format
from jaxtrain.models.structure import presets

__all__ = ["FORMAT", "PRESETS", "STRUCTURE"]
ALL_KEYS = KEYS | UNTIED | BIASED | ROUTED
FORMAT = Format("flex_olmo", "FlexOlmoForCausalLM", DENSE | EXPERTS, ALL_KEYS, model=MODEL, written=WRITTEN)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "flex_olmo_7x7b": (32, 4096, 32, 32, 0, 11008, 100352),
    },
    norm_eps=1e-06, rope_base=500_000.0, num_experts=7, experts_per_token=5, renormalize=False, **MODEL,
)
# fmt: on
