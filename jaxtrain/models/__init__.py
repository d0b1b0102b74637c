"""Model families by name. Importing this imports no jax, so that a config can be read and checked without it."""

import importlib
from types import ModuleType
from typing import Any

# model.family -> module with PRESETS, STRUCTURE, build(), and what Hugging Face calls it all (models/hugging_face.py): NAMES,
# MODEL_TYPE, ARCHITECTURE, read(), write(). A new family is one file and one line here.
FAMILIES = {
    "llama": "jaxtrain.models.llama",
    "mistral": "jaxtrain.models.mistral",
    "mixtral": "jaxtrain.models.mixtral",
    "qwen2": "jaxtrain.models.qwen2",
    "qwen3": "jaxtrain.models.qwen3",
    "qwen3_moe": "jaxtrain.models.qwen3_moe",
    "gemma2": "jaxtrain.models.gemma2",
    "gemma3": "jaxtrain.models.gemma3",
}


def family(name: str) -> Any:
    """The module of a family in FAMILIES, or for `package.module:name` that object, which must have `build` too.

    Raises ValueError for an unknown name, and ImportError or AttributeError where your own module or name does not exist.
    """
    module, given, attribute = name.partition(":")
    if given:
        return getattr(importlib.import_module(module), attribute)
    if name not in FAMILIES:
        raise ValueError(f"model.family = {name!r}: no such family. Known: {', '.join(FAMILIES)}, or package.module:name.")
    found: ModuleType = importlib.import_module(FAMILIES[name])
    return found
