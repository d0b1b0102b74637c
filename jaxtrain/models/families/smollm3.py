"""SmolLM3: Llama's layers, every fourth of which has no rotary embeddings."""

from typing import Any

from jaxtrain.config.schema import GLOBAL, LOCAL, UNROTATED, Model
from jaxtrain.models.hf_keys import FLAG, POSITIVE, HuggingFaceError, Settings, ValueKind
from jaxtrain.models.hf_tensors import ATTENTION_BIAS, COMMON, MLP_BIAS
from jaxtrain.models.hugging_face import BIASED, KEYS, MLP_BIASED, TIED, Format, Windows, layer_letters, window_keys
from jaxtrain.models.structure import Structure, presets

STRUCTURE = Structure()
RULE = "must be a list with a 0 (no rotary embeddings) or 1 for each layer"
ROTATED = ValueKind(
    RULE, lambda x, hf_config: isinstance(x, list) and len(x) >= hf_config["num_hidden_layers"] and all(y in (0, 1) for y in x)
)


class SmolWindows(Windows):
    """The layers with a window, as in Qwen3's `layer_types`, and the layers with rotary embeddings."""

    def read(self, settings: Settings, key: str) -> dict[str, Any]:
        layers, every = range(settings.hf_config["num_hidden_layers"]), settings.take("no_rope_layer_interval", POSITIVE, 4)
        rotated = settings.take("no_rope_layers", ROTATED, [(i + 1) % every != 0 for i in layers])
        in_use, window = settings.take("use_sliding_window", FLAG, False), settings.take(key, default=None)
        settings.take("max_window_layers", default=None)  # transformers does not read it
        default = "".join(LOCAL if in_use and window is not None and not rotated[i] else GLOBAL for i in layers)
        kinds = layer_letters(settings) or default
        letters = {(LOCAL, True): LOCAL, (GLOBAL, True): GLOBAL, (GLOBAL, False): UNROTATED}
        pairs = [(kind, bool(rotated[i])) for i, kind in enumerate(kinds)]
        if (LOCAL, False) in pairs:
            rule = f"layer {pairs.index((LOCAL, False))} has the window and no rotary embeddings, which no layer here can have"
            raise HuggingFaceError(f"{settings.path}: use_sliding_window = {in_use!r}: {rule}.")
        return window_keys(settings, "".join(letters[pair] for pair in pairs), window if in_use else None)

    def write(self, model: Model, key: str) -> dict[str, Any]:
        rotated = [int(kind != UNROTATED) for kind in model.kinds]
        return super().write(model, key) | {"use_sliding_window": LOCAL in model.kinds, "no_rope_layers": rotated}


FORMAT = Format(
    "smollm3",
    "SmolLM3ForCausalLM",
    COMMON | ATTENTION_BIAS | MLP_BIAS,
    KEYS | TIED | BIASED | MLP_BIASED | {"sliding_window": SmolWindows()},
)
# fmt: off
PRESETS = presets(
    {
        # layers, d_model, heads, key/value heads, head_dim, d_ff, vocabulary
        "smollm3_3b": (36, 2048, 16, 4, 128, 11008, 128256),
    },
    norm_eps=1e-06, tied_head=True, attention_pattern=3 * GLOBAL + UNROTATED, rope_base=5_000_000.0,
)
# fmt: on
