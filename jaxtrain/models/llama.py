"""The Llama family: sizes, and what Hugging Face calls each tensor and key. The model itself is models/transformer.py."""

from typing import Any

from jaxtrain.config import Model
from jaxtrain.models.hugging_face import COMMON, Settings, must_have, read_common, read_rope, write_common, write_rope
from jaxtrain.models.structure import Structure

STRUCTURE = Structure()

# Keys of config.Model for each published size; what is not named stays at its default. Llama 3.0 (8192 tokens, no rotary
# scaling), not 3.1, for 8b and 70b: pretraining starts from the shorter context. llama3_1b is Llama 3.2, whose head is its
# embedding.
PRESETS: dict[str, dict[str, Any]] = {
    "llama2_7b": {
        "num_layers": 32,
        "d_model": 4096,
        "num_heads": 32,
        "num_kv_heads": 32,
        "d_ff": 11008,
        "vocab_size": 32000,
        "norm_eps": 1e-5,
        "rope_base": 10_000.0,
    },
    "llama3_8b": {
        "num_layers": 32,
        "d_model": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "d_ff": 14336,
        "vocab_size": 128256,
        "norm_eps": 1e-5,
        "rope_base": 500_000.0,
    },
    "llama3_70b": {
        "num_layers": 80,
        "d_model": 8192,
        "num_heads": 64,
        "num_kv_heads": 8,
        "d_ff": 28672,
        "vocab_size": 128256,
        "norm_eps": 1e-5,
        "rope_base": 500_000.0,
    },
    "llama3_1b": {
        "num_layers": 16,
        "d_model": 2048,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 64,
        "d_ff": 8192,
        "vocab_size": 128256,
        "norm_eps": 1e-5,
        "tied_head": True,
        "rope_base": 500_000.0,
        "rope_scaling": "llama3",
        "rope_factor": 32.0,
        "rope_low_freq": 1.0,
        "rope_high_freq": 4.0,
        "rope_original_len": 8192,
    },
    "llama31_8b": {
        "num_layers": 32,
        "d_model": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 14336,
        "vocab_size": 128256,
        "norm_eps": 1e-05,
        "rope_base": 500000.0,
        "rope_scaling": "llama3",
        "rope_factor": 8.0,
        "rope_low_freq": 1.0,
        "rope_high_freq": 4.0,
        "rope_original_len": 8192,
    },
    "llama31_70b": {
        "num_layers": 80,
        "d_model": 8192,
        "num_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 28672,
        "vocab_size": 128256,
        "norm_eps": 1e-05,
        "rope_base": 500000.0,
        "rope_scaling": "llama3",
        "rope_factor": 8.0,
        "rope_low_freq": 1.0,
        "rope_high_freq": 4.0,
        "rope_original_len": 8192,
    },
    "llama31_405b": {
        "num_layers": 126,
        "d_model": 16384,
        "num_heads": 128,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 53248,
        "vocab_size": 128256,
        "norm_eps": 1e-05,
        "rope_base": 500000.0,
        "rope_scaling": "llama3",
        "rope_factor": 8.0,
        "rope_low_freq": 1.0,
        "rope_high_freq": 4.0,
        "rope_original_len": 8192,
    },
    "llama32_3b": {
        "num_layers": 28,
        "d_model": 3072,
        "num_heads": 24,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 8192,
        "vocab_size": 128256,
        "norm_eps": 1e-05,
        "tied_head": True,
        "rope_base": 500000.0,
        "rope_scaling": "llama3",
        "rope_factor": 32.0,
        "rope_low_freq": 1.0,
        "rope_high_freq": 4.0,
        "rope_original_len": 8192,
    },
}


NAMES = COMMON
MODEL_TYPE, ARCHITECTURE = "llama", "LlamaForCausalLM"


def read(s: Settings) -> dict[str, Any]:
    """Keys of config.Model from config.json."""
    return read_common(s, "silu") | read_rope(s)


def write(model: Model) -> dict[str, Any]:
    """Keys of config.json that say what the model is. Raises HuggingFaceError where they cannot."""
    must_have(model, "Llama", qkv_bias=False, qk_norm=False, post_norms=False, sliding_window=0, query_scale=0.0)
    must_have(model, "Llama", attention_softcap=0.0, logit_softcap=0.0)
    return write_common(model, "silu") | write_rope(model) | {"attention_bias": False, "mlp_bias": False}


def build(*args: Any) -> Any:
    """A `Transformer` from (the model's config, kernel, remat plan, context, rngs)."""
    # Imported here because configs and `--help` read PRESETS, and must not wait for jax.
    from jaxtrain.models.transformer import build_as

    return build_as(STRUCTURE, *args)
