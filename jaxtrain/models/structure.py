"""Differences between families of models that the config has no keys for. Imports no jax."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Structure:
    """Properties that are equal in all sizes of a family, so they are not config keys."""

    activation: str = "silu"  # of the feed-forward block: silu | gelu_tanh | clamped_swiglu (models/layers.py, GATED)
    norm_offset: bool = False  # all norms, also of queries and keys, multiply by 1 + scale
    scaled_embedding: bool = False  # embeddings are multiplied by the root of d_model


SIZES = ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "vocab_size")


def presets(rows: Mapping[str, Sequence[Any]], **shared: Any) -> dict[str, dict[str, Any]]:
    """Return preset -> keys of config.Model. Other keys stay at their defaults.

    Args:
      rows: for each preset, the values of SIZES (head_dim 0: d_model / num_heads), and optionally a dict of further keys.
      shared: keys of all presets.
    """
    table = {}
    for name, (*sizes, more) in ((name, (*row, {})[: len(SIZES) + 1]) for name, row in rows.items()):
        keys = dict(zip(SIZES, sizes, strict=True))
        table[name] = {key: value for key, value in keys.items() if key != "head_dim" or value} | shared | more
    return table
