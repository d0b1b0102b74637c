"""Shapes of well-known models, for tables that plan them. Models that jaxtrain trains by name are in models/families/."""

import dataclasses
from typing import Any

from jaxtrain.models.families.llama import PRESETS


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's dimensions, and where they are from."""

    name: str
    model: dict[str, Any]  # keys of config.Model
    seq_len: int
    source: str


def _llama(layers: int, width: int, heads: int, kv_heads: int, d_ff: int, vocab: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_layers": layers, "d_model": width, "num_heads": heads, "num_kv_heads": kv_heads, "d_ff": d_ff}
    return sizes | {"vocab_size": vocab} | more


SHAPES = {
    "llama2_7b": Shape("Llama 2 7B", PRESETS["llama2_7b"], 4096, "arXiv 2307.09288"),
    "llama2_13b": Shape("Llama 2 13B", _llama(40, 5120, 40, 40, 13824, 32000), 4096, "arXiv 2307.09288"),
    "llama_30b": Shape("llama-shaped 30B", _llama(60, 6656, 52, 52, 17920, 32000), 4096, "LLaMA 33B, arXiv 2302.13971"),
    "llama2_70b": Shape("Llama 2 70B", _llama(80, 8192, 64, 8, 28672, 32000), 4096, "arXiv 2307.09288"),
    "llama3_8b": Shape("Llama 3 8B", PRESETS["llama3_8b"], 8192, "arXiv 2407.21783"),
    "llama3_70b": Shape("Llama 3 70B", PRESETS["llama3_70b"], 8192, "arXiv 2407.21783"),
    # GPT-3's layers, width and heads; three SwiGLU matrices of 8/3 the width are its two of 4 times the width.
    "llama_175b": Shape("llama-shaped 175B", _llama(96, 12288, 96, 96, 32768, 50304), 4096, "GPT-3, arXiv 2005.14165"),
    # Falcon's, likewise, its 39,595 rounded up to a multiple of 256; its heads are 64 wide.
    "llama_180b": Shape("llama-shaped 180B", _llama(80, 14848, 232, 8, 39680, 65024), 4096, "Falcon-180B, arXiv 2311.16867"),
    "llama3_405b": Shape(
        "Llama 3 405B", _llama(126, 16384, 128, 8, 53248, 128256, rope_base=500_000.0), 8192, "arXiv 2407.21783"
    ),
}
