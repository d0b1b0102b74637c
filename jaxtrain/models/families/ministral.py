"""Ministral: Mistral's layers, of which those of layer_types have the sliding window; without it, all have it."""

from typing import Any

from jaxtrain.config.schema import GLOBAL, LOCAL, Model
from jaxtrain.models.hf_keys import Settings
from jaxtrain.models.hf_tensors import COMMON
from jaxtrain.models.hugging_face import KEYS, UNTIED, Format, Windows
from jaxtrain.models.structure import Structure

STRUCTURE = Structure()


class MinistralWindows(Windows):
    """The window of some layers. transformers asks for its width even if no layer has it."""

    def write(self, model: Model, key: str) -> dict[str, Any]:
        return super().write(model, key) | {key: model.sliding_window or 4096}


def window_letters(settings: Settings) -> str:
    """Return the letter of all layers: they have the sliding window, if there is one."""
    return GLOBAL if settings.hf_config.get("sliding_window") is None else LOCAL


FORMAT = Format(
    "ministral", "MinistralForCausalLM", COMMON, KEYS | UNTIED | {"sliding_window": MinistralWindows(window_letters)}
)
PRESETS: dict[str, dict[str, Any]] = {}
