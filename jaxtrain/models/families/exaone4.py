"""EXAONE 4: OLMo 2's norms of outputs, norms of each head; with a sliding window in most layers, the others have no rotary."""

import dataclasses
from typing import Any

from jaxtrain.config.schema import GLOBAL, LOCAL, UNROTATED, Model
from jaxtrain.models.hf_keys import POSITIVE, Settings
from jaxtrain.models.hf_tensors import ONLY_POST_NORMS, QK_NORM
from jaxtrain.models.hugging_face import KEYS, UNTIED, Format, Windows, layer_letters, window_keys
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
EVERY = "sliding_window_pattern"  # of so many layers the last has no window, unless layer_types says another


@dataclasses.dataclass(frozen=True)
class ExaoneWindows(Windows):
    """The window of some layers. If there is one, layers without it have no rotary embeddings."""

    def read(self, settings: Settings, key: str) -> dict[str, Any]:
        window, letters = settings.take(key, null=None), layer_letters(settings)
        every = settings.take(EVERY, default=None) if letters else settings.take(EVERY, POSITIVE)
        letters = letters or LOCAL * (every - 1) + GLOBAL
        return window_keys(settings, letters if window is None else letters.replace(GLOBAL, UNROTATED), window)

    def write(self, model: Model, key: str) -> dict[str, Any]:
        any_window = 4096 if UNROTATED in model.kinds else None  # transformers then rotates in no layer without a window
        return super().write(model, key) | {key: model.sliding_window or any_window}


MODEL = {"norm_placement": "post", "qk_norm": True}
FAMILY_KEYS = {"sliding_window": ExaoneWindows()}
FORMAT = Format("exaone4", "Exaone4ForCausalLM", ONLY_POST_NORMS | QK_NORM, KEYS | UNTIED | FAMILY_KEYS, model=MODEL)
LARGE = {"sliding_window": 4096, "attention_pattern": 3 * LOCAL + UNROTATED}
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "exaone4_1.2b": (30, 2048, 32, 8,  64,  4096, 102400, {"tied_head": True}),
        "exaone4_32b":  (64, 5120, 40, 8, 128, 27392, 102400, LARGE),
    },
    norm_eps=1e-05, rope_base=1_000_000.0, rope_scaling="llama3", rope_factor=16.0, rope_low_freq=1.0, rope_high_freq=4.0,
    rope_original_len=8192, **MODEL,
)
# fmt: on
