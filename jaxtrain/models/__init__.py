"""Model families by name. Importing this imports no jax, so that a config can be read and checked without it."""

import importlib
from types import ModuleType
from typing import Any

# model.family -> module with PRESETS, HF_NAMES and build(). A new family is one file and one line here.
FAMILIES = {
    "llama": "jaxtrain.models.llama",
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
