"""OLMo 3: OLMo 2's layers, of which all but every fourth have a sliding window and rotary embeddings without YaRN."""

from jaxtrain.config.schema import GLOBAL, LOCAL
from jaxtrain.models.families.olmo2 import MODEL, STRUCTURE, TENSORS
from jaxtrain.models.hugging_face import BIASED, KEYS, UNTIED, Format, Rope, Windows
from jaxtrain.models.structure import presets

__all__ = ["FORMAT", "PRESETS", "STRUCTURE"]
PATTERN = 3 * LOCAL + GLOBAL
FAMILY_KEYS = {"sliding_window": Windows(lambda s: PATTERN), "rope_parameters": Rope(local="rope_theta")}
FORMAT = Format("olmo3", "Olmo3ForCausalLM", TENSORS, KEYS | UNTIED | BIASED | FAMILY_KEYS, model=MODEL)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "olmo3_7b":  (32, 4096, 32, 32, 0, 11008, 100278),
        "olmo3_32b": (64, 5120, 40,  8, 0, 27648, 100278),
    },
    norm_eps=1e-06, sliding_window=4096, attention_pattern=PATTERN, rope_base=500_000.0, local_rope_base=500_000.0,
    rope_scaling="yarn", rope_factor=8.0, rope_original_len=8192, **MODEL,
)
# fmt: on
