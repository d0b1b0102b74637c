"""CWM: Llama's layers with a sliding window in all but every fourth, the first of which has none."""

from jaxtrain.config.schema import GLOBAL, LOCAL
from jaxtrain.models.hf_tensors import COMMON, MLP_BIAS
from jaxtrain.models.hugging_face import HEAD_DIM, KEYS, MLP_BIASED, UNTIED, Format, Windows
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
PATTERN = GLOBAL + 3 * LOCAL
FAMILY_KEYS = {"sliding_window": Windows(lambda s: PATTERN)}
FORMAT = Format("cwm", "CwmForCausalLM", COMMON | MLP_BIAS, KEYS | HEAD_DIM | UNTIED | MLP_BIASED | FAMILY_KEYS)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "cwm_32b": (64, 6144, 48, 8, 128, 21504, 128256),
    },
    norm_eps=1e-05, sliding_window=8192, attention_pattern=PATTERN, rope_base=1_000_000.0, rope_scaling="llama3",
    rope_factor=16.0, rope_low_freq=1.0, rope_high_freq=4.0, rope_original_len=8192,
)
# fmt: on
