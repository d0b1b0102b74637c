"""The Llama family: sizes, and what Hugging Face calls each tensor. The model itself is models/transformer.py."""

import dataclasses
from typing import Any

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
}


@dataclasses.dataclass(frozen=True)
class HfTensor:
    """A tensor's name in a Hugging Face checkpoint, and how its array becomes ours.

    `ours` and `theirs` are the axes of the two arrays; axes in brackets are one merged axis there. torch stores a linear
    layer as (out, in), so most differ by a transpose. Head axes split off as (heads, head_dim), in that order.
    Hugging Face keeps queries and keys in rotate-half order (first half of the head dimension paired with the second), which
    is ours too: nothing is permuted.
    """

    name: str
    ours: str
    theirs: str


# Our canonical name -> theirs. {i} is the layer. A model whose head is tied has no head; the biases and q/k norms exist
# only where model.qkv_bias and model.qk_norm are set.
HF_NAMES = {
    "embed.embedding": HfTensor("model.embed_tokens.weight", "V D", "V D"),
    "layers.{i}.attention_norm.scale": HfTensor("model.layers.{i}.input_layernorm.weight", "D", "D"),
    "layers.{i}.attention.wq": HfTensor("model.layers.{i}.self_attn.q_proj.weight", "D N H", "(N H) D"),
    "layers.{i}.attention.wk": HfTensor("model.layers.{i}.self_attn.k_proj.weight", "D K H", "(K H) D"),
    "layers.{i}.attention.wv": HfTensor("model.layers.{i}.self_attn.v_proj.weight", "D K H", "(K H) D"),
    "layers.{i}.attention.wo": HfTensor("model.layers.{i}.self_attn.o_proj.weight", "D N H", "D (N H)"),
    "layers.{i}.attention.bq": HfTensor("model.layers.{i}.self_attn.q_proj.bias", "N H", "(N H)"),
    "layers.{i}.attention.bk": HfTensor("model.layers.{i}.self_attn.k_proj.bias", "K H", "(K H)"),
    "layers.{i}.attention.bv": HfTensor("model.layers.{i}.self_attn.v_proj.bias", "K H", "(K H)"),
    "layers.{i}.attention.q_norm.scale": HfTensor("model.layers.{i}.self_attn.q_norm.weight", "H", "H"),
    "layers.{i}.attention.k_norm.scale": HfTensor("model.layers.{i}.self_attn.k_norm.weight", "H", "H"),
    "layers.{i}.mlp_norm.scale": HfTensor("model.layers.{i}.post_attention_layernorm.weight", "D", "D"),
    "layers.{i}.mlp.gate": HfTensor("model.layers.{i}.mlp.gate_proj.weight", "D F", "F D"),
    "layers.{i}.mlp.up": HfTensor("model.layers.{i}.mlp.up_proj.weight", "D F", "F D"),
    "layers.{i}.mlp.down": HfTensor("model.layers.{i}.mlp.down_proj.weight", "D F", "D F"),
    "final_norm.scale": HfTensor("model.norm.weight", "D", "D"),
    "head": HfTensor("lm_head.weight", "V D", "V D"),
}


def build(*args: Any, **kwargs: Any) -> Any:
    """A `Transformer` from its own arguments (the model's config, numerics, placement, rngs, ...)."""
    # Imported here because configs and `--help` read PRESETS, and must not wait for jax.
    from jaxtrain.models.transformer import Transformer

    return Transformer(*args, **kwargs)
