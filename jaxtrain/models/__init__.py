"""The model: transformer, experts, remat, ZeRO, FLOPs; and its families by name.

This module imports no jax, so that a config can be read and checked without it.
"""

import difflib
import importlib
from types import ModuleType
from typing import Any

from jaxtrain.config import own_parts
from jaxtrain.config.schema import ConfigError, Problem

# model.family -> module with PRESETS, STRUCTURE and FORMAT (models/hugging_face.py). A family is one file, one line here, and
# one in the choices of model.family (config/schema.py).
FAMILIES = {
    "llama": "jaxtrain.models.families.llama",
    "mistral": "jaxtrain.models.families.mistral",
    "mixtral": "jaxtrain.models.families.mixtral",
    "qwen2": "jaxtrain.models.families.qwen2",
    "qwen3": "jaxtrain.models.families.qwen3",
    "qwen3_moe": "jaxtrain.models.families.qwen3_moe",
    "qwen3_next": "jaxtrain.models.families.qwen3_next",
    "qwen3_5": "jaxtrain.models.families.qwen3_5",
    "qwen3_5_moe": "jaxtrain.models.families.qwen3_5_moe",
    "gpt_oss": "jaxtrain.models.families.gpt_oss",
    "deepseek_v3": "jaxtrain.models.families.deepseek_v3",
    "olmo2": "jaxtrain.models.families.olmo2",
    "phi3": "jaxtrain.models.families.phi3",
    "glm": "jaxtrain.models.families.glm",
    "glm4": "jaxtrain.models.families.glm4",
    "glm4_moe": "jaxtrain.models.families.glm4_moe",
    "seed_oss": "jaxtrain.models.families.seed_oss",
    "qwen2_moe": "jaxtrain.models.families.qwen2_moe",
    "ernie4_5": "jaxtrain.models.families.ernie4_5",
    "dots1": "jaxtrain.models.families.dots1",
    "minimax_m2": "jaxtrain.models.families.minimax_m2",
    "olmo3": "jaxtrain.models.families.olmo3",
    "exaone4": "jaxtrain.models.families.exaone4",
    "smollm3": "jaxtrain.models.families.smollm3",
    "granite": "jaxtrain.models.families.granite",
    "granitemoe": "jaxtrain.models.families.granitemoe",
    "granitemoeshared": "jaxtrain.models.families.granitemoeshared",
    "cwm": "jaxtrain.models.families.cwm",
    "olmoe": "jaxtrain.models.families.olmoe",
    "flex_olmo": "jaxtrain.models.families.flex_olmo",
    "gemma": "jaxtrain.models.families.gemma",
    "gemma2": "jaxtrain.models.families.gemma2",
    "gemma3": "jaxtrain.models.families.gemma3",
    "vaultgemma": "jaxtrain.models.families.vaultgemma",
    "ministral": "jaxtrain.models.families.ministral",
    "helium": "jaxtrain.models.families.helium",
    "solar_open": "jaxtrain.models.families.solar_open",
    "hyperclovax": "jaxtrain.models.families.hyperclovax",
    "glm4_moe_lite": "jaxtrain.models.families.glm4_moe_lite",
    "youtu": "jaxtrain.models.families.youtu",
}


def family(name: str) -> Any:
    """Return the module of a family in FAMILIES; for `package.module:name`, return the named object, which must have `build`.

    Raises:
      ValueError: no such family.
      ConfigError: the named object cannot be imported.
    """
    if ":" in name:
        return own_parts.load_part("model.family", name)
    if name not in FAMILIES:
        raise ValueError(f"model.family = {name!r}: no such family. Known: {', '.join(FAMILIES)}, or package.module:name.")
    module: ModuleType = importlib.import_module(FAMILIES[name])
    return module


def presets() -> dict[str, dict[str, Any]]:
    """Return name of a preset -> the keys of config.Model that the preset sets. A preset is a published model size."""
    return {preset: {"family": name} | keys for name in FAMILIES for preset, keys in family(name).PRESETS.items()}


def preset(name: str) -> dict[str, Any]:
    """Return the keys of config.Model that a preset sets. Use in a config file: `config.model.update(preset("llama3.1_70b"))`.

    Raises:
      ConfigError: no such preset.
    """
    all_presets = presets()
    if name not in all_presets:
        near = difflib.get_close_matches(name, all_presets, 1, 0.0)[0]
        rule = f"no such preset. Known: {', '.join(all_presets)}"
        raise ConfigError([Problem("preset", name, rule, f"Use {near}.")])
    return all_presets[name]
