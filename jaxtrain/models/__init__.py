"""Model families by name. Importing this imports no jax, so that a config can be read and checked without it."""

import importlib
from types import ModuleType
from typing import Any

# model.family -> module with PRESETS and STRUCTURE, and the names of Hugging Face (models/hugging_face.py): NAMES, MODEL_TYPE,
# ARCHITECTURE, read(), write(). A new family is one file and one line here.
FAMILIES = {
    "llama": "jaxtrain.models.families.llama",
    "mistral": "jaxtrain.models.families.mistral",
    "mixtral": "jaxtrain.models.families.mixtral",
    "qwen2": "jaxtrain.models.families.qwen2",
    "qwen3": "jaxtrain.models.families.qwen3",
    "qwen3_moe": "jaxtrain.models.families.qwen3_moe",
    "gemma2": "jaxtrain.models.families.gemma2",
    "gemma3": "jaxtrain.models.families.gemma3",
}


def family(name: str) -> Any:
    """Return the module of a family in FAMILIES, or for `package.module:name` that object, which must have `build`.

    Raises:
      ValueError: no such family. ImportError, AttributeError: no such module, or no such name in it.
    """
    module, given, attribute = name.partition(":")
    if given:
        return getattr(importlib.import_module(module), attribute)
    if name not in FAMILIES:
        raise ValueError(f"model.family = {name!r}: no such family. Known: {', '.join(FAMILIES)}, or package.module:name.")
    found: ModuleType = importlib.import_module(FAMILIES[name])
    return found
