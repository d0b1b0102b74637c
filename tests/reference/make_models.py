"""Tiny random models of every family, made by transformers with each of its options in use: `python make_models.py OUT`.

Runs in a Python with torch and transformers, not in jaxtrain's. Norms and biases are random too: at their initial ones and
zeros they could be left out unnoticed.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers as t

SHAPE = {"vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
ENDS = {"bos_token_id": 1, "eos_token_id": 256, "pad_token_id": 0, "max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
COMMON = SHAPE | HEADS | ENDS | {"rms_norm_eps": 1e-5}
MODELS = {
    "llama": t.LlamaConfig(
        **COMMON, tie_word_embeddings=True, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 64}
    ),
    "llama2": t.LlamaConfig(**COMMON, rope_parameters={"rope_type": "default", "rope_theta": 777.0}),
    "mistral": t.MistralConfig(
        **COMMON, head_dim=16, sliding_window=7, rope_parameters={"rope_type": "default", "rope_theta": 2000.0}
    ),
    "qwen2": t.Qwen2Config(
        **COMMON,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 3000.0},
    ),
    "qwen3": t.Qwen3Config(
        **COMMON,
        head_dim=16,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 3e3},
    ),
    "gemma2": t.Gemma2Config(
        **COMMON,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=6,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=3.0,
        rope_parameters={"rope_type": "default", "rope_theta": 4000.0},
    ),
    "gemma3": t.Gemma3TextConfig(
        **COMMON,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
}


def main():
    out = Path(sys.argv[1])
    torch.manual_seed(0)
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (3, 48)).astype(np.int32)
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "tokens.npy", tokens)
    for name, config in MODELS.items():
        config._attn_implementation = "eager"
        model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for key, p in model.named_parameters():
                # Wide enough that scores and logits reach their caps.
                p.add_(torch.randn_like(p) * (0.3 if "norm" in key or "bias" in key else 0.12))
            logits = model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits.float().numpy()
        model.save_pretrained(out / name, max_shard_size="60KB" if name == "qwen3" else "5GB")
        np.save(out / f"{name}.npy", logits)


if __name__ == "__main__":
    main()
