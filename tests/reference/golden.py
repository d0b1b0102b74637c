"""transformers' results for tiny models of every family, with all their options: `python golden.py golden [NAME ...]`.

It needs a Python with torch and transformers (requirements.txt). With transformers 5 it writes, for each family, config.json,
the logits with the weights of weights.py, and the losses of thirty steps of torch's AdamW. With transformers 4 it writes
config.json in version 4's form. With names, only those families are made, and their logits are in a separate file.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers as t
from safetensors.numpy import load_file, save_file
from weights import DOCUMENTS, YARN, random_tokens, random_weight

VOCAB = 128
SHAPE = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
# No token is a padding token: transformers would never train the embedding of one.
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "max_position_embeddings": 256}
COMMON = {**SHAPE, **HEADS, **ENDS, "rms_norm_eps": 1e-5}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {**COMMON, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6}
V5 = t.__version__.startswith("5.")


def rope(base, kind="default", **more):
    """Return rotary settings in the form of the installed transformers."""
    if V5:
        return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **more}}
    part = {key: more.pop(key) for key in [*more] if key == "partial_rotary_factor"}
    return {"rope_theta": base, **part, **({"rope_scaling": {"rope_type": kind, **more}} if kind != "default" else {})}


def gemma3_rope():
    """Return Gemma 3's rotary settings. Layers with a window have their own base."""
    scaled = {"rope_type": "linear", "factor": 8.0}
    if not V5:
        return {"rope_theta": 9000.0, "rope_local_base_freq": 300.0, "rope_scaling": scaled}
    local = {"rope_type": "default", "rope_theta": 300.0}
    return {"rope_parameters": {"full_attention": {**scaled, "rope_theta": 9000.0}, "sliding_attention": local}}


def olmo3_rope():
    """Return OLMo 3's rotary settings. Layers with a window are not stretched."""
    if not V5:
        return rope(3000.0, "yarn", **STRETCHED)
    local = {"rope_type": "default", "rope_theta": 3000.0}
    full = {"rope_type": "yarn", "rope_theta": 3000.0, **STRETCHED}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def yarn_tables():
    """Return the factor of the rotary tables, and the angle per position of each pair, for each of weights.py's settings."""
    rows = []
    for settings in YARN:
        config = t.Qwen3Config(**COMMON, head_dim=16, **rope(3000.0, "yarn", **settings))
        frequencies, factor = t.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config)
        rows.append([factor, *frequencies.tolist()])
    return np.array(rows)


TOP2 = {"num_local_experts": 6, "num_experts_per_tok": 2}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 3}
TOP3 = {**EIGHT, "moe_intermediate_size": 32, "norm_topk_prob": False}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "n_shared_experts": 2}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
WIDER = {**GROUPS, **ROUTED, "topk_group": 3, "num_experts_per_tok": 5}  # with other names' weights, each expert has tokens
# At the sixteenth position a sequence is twice as long as the original context.
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 2.0, "beta_slow": 0.25}
OPEN = {**STRETCHED, "truncate": False}
BIASED, NARROW = {"attention_bias": True}, {"intermediate_size": 32}
FACTORS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 3.0}
HALF = {"partial_rotary_factor": 0.5}
QK = {"head_dim": 16, "use_qk_norm": True}
S, F, L = "sliding_attention", "full_attention", "linear_attention"
LINEAR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
LINEAR |= {"linear_conv_kernel_dim": 4, "head_dim": 16, "layer_types": [L, F, L, F], "tie_word_embeddings": False}
# A delta net's norm divides its output by its length, at a document's first token |q . k| |v|, which may be nearly 0. With
# 1e-5 the norm would multiply the rounding of q, in transformers too.
EPS = {"rms_norm_eps": 1e-2}
SHARED = {**EIGHT, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40}
MROPE = {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
MODELS = {
    "llama": t.LlamaConfig(**COMMON, tie_word_embeddings=True, **rope(5000.0, "llama3", **LLAMA3)),
    "llama2": t.LlamaConfig(**COMMON, tie_word_embeddings=False, **rope(777.0)),
    "mistral": t.MistralConfig(**COMMON, head_dim=16, sliding_window=7, tie_word_embeddings=False, **rope(2000.0)),
    "qwen2": t.Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=9, max_window_layers=2, tie_word_embeddings=False, **rope(3000.0)
    ),
    "qwen3": t.Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True, **rope(3000.0, "linear", factor=2.0)),
    "qwen3_yarn": t.Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True, **rope(3000.0, "yarn", **STRETCHED)),
    "mixtral": t.MixtralConfig(**COMMON, **TOP2, head_dim=16, sliding_window=7, tie_word_embeddings=False, **rope(2000.0)),
    "qwen3_moe": t.Qwen3MoeConfig(**COMMON, **TOP3, head_dim=16, tie_word_embeddings=False, **rope(3000.0)),
    "gpt_oss": t.GptOssConfig(
        **COMMON, **TOP2, head_dim=16, sliding_window=7, tie_word_embeddings=False, **rope(3000.0, "yarn", **OPEN)
    ),
    "deepseek_v3": t.DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 8},
        **LATENT,
        **GROUPS,
        **ROUTED,
        tie_word_embeddings=False,
        **rope(2000.0, "yarn", **STRETCHED, mscale=1.0, mscale_all_dim=0.7),
    ),
    "llama_biased": t.LlamaConfig(**COMMON, **BIASED, mlp_bias=True, tie_word_embeddings=False, **rope(777.0)),
    "qwen3_biased": t.Qwen3Config(**COMMON, **BIASED, head_dim=16, tie_word_embeddings=False, **rope(3000.0)),
    "gemma": t.GemmaConfig(**COMMON, **BIASED, head_dim=16, **rope(4000.0)),
    "olmo2": t.Olmo2Config(**COMMON, tie_word_embeddings=False, **rope(3000.0)),
    "olmo3": t.Olmo3Config(**COMMON, sliding_window=6, tie_word_embeddings=False, **olmo3_rope()),
    "olmoe": t.OlmoeConfig(**COMMON | NARROW, **BIASED, **EIGHT, tie_word_embeddings=False, **rope(3000.0)),
    "flex_olmo": t.FlexOlmoConfig(**COMMON | NARROW, **EIGHT, norm_topk_prob=True, tie_word_embeddings=False, **rope(3000.0)),
    "exaone4": t.Exaone4Config(
        **COMMON, sliding_window=6, layer_types=[S, S, F, S], tie_word_embeddings=False, **rope(5000.0, "llama3", **LLAMA3)
    ),
    "smollm3": t.SmolLM3Config(**COMMON, no_rope_layer_interval=3, tie_word_embeddings=True, **rope(3000.0)),
    "granite": t.GraniteConfig(**COMMON, **BIASED, **FACTORS, mlp_bias=True, tie_word_embeddings=True, **rope(3000.0)),
    "granitemoe": t.GraniteMoeConfig(**COMMON | NARROW, **TOP2, **FACTORS, tie_word_embeddings=True, **rope(3000.0)),
    "granitemoeshared": t.GraniteMoeSharedConfig(
        **COMMON | NARROW, **TOP2, **FACTORS, shared_intermediate_size=48, tie_word_embeddings=False, **rope(3000.0)
    ),
    "vaultgemma": t.VaultGemmaConfig(**GEMMA, attn_logit_softcapping=4.0, final_logit_softcapping=3.0, **rope(4000.0)),
    "phi3": t.Phi3Config(**COMMON, sliding_window=7, tie_word_embeddings=False, **rope(3000.0, partial_rotary_factor=0.5)),
    "glm": t.GlmConfig(**COMMON, head_dim=16, tie_word_embeddings=False, **rope(3000.0, "linear", factor=2.0, **HALF)),
    "glm4": t.Glm4Config(**COMMON, head_dim=16, tie_word_embeddings=False, **rope(3000.0, **HALF)),
    "glm4_moe": t.Glm4MoeConfig(
        **COMMON, **WIDER, **QK, attention_bias=True, tie_word_embeddings=False, **rope(3000.0, "yarn", **OPEN, **HALF)
    ),
    "seed_oss": t.SeedOssConfig(
        **COMMON,
        head_dim=16,
        attention_out_bias=True,
        mlp_bias=True,
        attention_dropout=0.0,
        residual_dropout=0.0,
        tie_word_embeddings=False,
        **rope(3000.0),
    ),
    "qwen2_moe": t.Qwen2MoeConfig(
        **COMMON, **TOP3, shared_expert_intermediate_size=48, tie_word_embeddings=False, **rope(3000.0)
    ),
    "ernie4_5": t.Ernie4_5Config(**COMMON, head_dim=16, use_bias=True, tie_word_embeddings=True, **rope(3000.0)),
    "dots1": t.Dots1Config(**COMMON, **WIDER, head_dim=16, sliding_window=None, tie_word_embeddings=False, **rope(3000.0)),
    "gemma2": t.Gemma2Config(**GEMMA, attn_logit_softcapping=4.0, final_logit_softcapping=3.0, **rope(4000.0)),
    "gemma3": t.Gemma3TextConfig(**GEMMA, layer_types=[S, S, F, S], **gemma3_rope()),
    "qwen3_next": t.Qwen3NextConfig(
        **COMMON | EPS, **LINEAR, **SHARED, norm_topk_prob=False, partial_rotary_factor=0.25, **rope(3000.0)
    ),
}
if V5:  # transformers 4 has no such classes
    MODELS["cwm"] = t.CwmConfig(
        **COMMON, head_dim=16, sliding_window=6, tie_word_embeddings=False, **rope(5000.0, "llama3", **LLAMA3)
    )
    TOP3_OF_6 = {**TOP2, "num_experts_per_tok": 3}
    MODELS["minimax_m2"] = t.MiniMaxM2Config(
        **COMMON, **TOP3_OF_6, head_dim=16, tie_word_embeddings=False, **rope(3000.0, **HALF)
    )
    narrow = {key: value for key, value in (COMMON | EPS).items() if key != "intermediate_size"}
    MODELS["qwen3_5"] = t.Qwen3_5TextConfig(**COMMON | EPS, **LINEAR, **rope(3000.0, **MROPE))
    MODELS["qwen3_5_moe"] = t.Qwen3_5MoeTextConfig(**narrow, **LINEAR, **SHARED, **rope(3000.0, **MROPE))
    MODELS["ministral"] = t.MinistralConfig(
        **COMMON, head_dim=16, sliding_window=7, layer_types=[S, F, F, S], tie_word_embeddings=False, **rope(3000.0)
    )
    MODELS["helium"] = t.HeliumConfig(
        **COMMON, **BIASED, head_dim=8, mlp_bias=True, tie_word_embeddings=False, **rope(3000.0, "linear", factor=2.0)
    )
    one_key_per_head = COMMON | {"num_key_value_heads": 8}
    wider = {key: value for key, value in WIDER.items() if key != "first_k_dense_replace"}
    no_width = {key: value for key, value in COMMON.items() if key != "intermediate_size"}
    MODELS["solar_open"] = t.SolarOpenConfig(
        **no_width, **wider, **BIASED, head_dim=16, tie_word_embeddings=False, **rope(3000.0, "yarn", **OPEN)
    )
    MODELS["hyperclovax"] = t.HyperCLOVAXConfig(
        **COMMON, **BIASED, **FACTORS, mlp_bias=True, head_dim=16, tie_word_embeddings=False, **rope(3000.0)
    )
    MODELS["glm4_moe_lite"] = t.Glm4MoeLiteConfig(
        **one_key_per_head,
        **LATENT,
        **wider,
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        tie_word_embeddings=False,
        **rope(3000.0, "yarn", **STRETCHED, mscale=1.0, mscale_all_dim=0.7),
    )
    MODELS["youtu"] = t.YoutuConfig(
        **one_key_per_head, **LATENT | {"q_lora_rank": None}, tie_word_embeddings=True, **rope(3000.0)
    )
NAMES = {"gemma3": "Gemma3ForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
# Models whose gradients are stored, of two documents each by itself, and models whose logits of these documents are stored.
OLD = ("llama", "llama2", "mistral", "qwen2", "qwen3", "qwen3_yarn", "mixtral", "qwen3_moe", "gemma2", "gemma3")
GRADIENTS = tuple(name for name in MODELS if name not in OLD)
ONE_BY_ONE = ("gpt_oss", "deepseek_v3", "qwen3_next")


def model_of(config, scale=1.0):
    """Return a model with the weights of weights.py, multiplied by `scale` except norms.

    The weights pass through a checkpoint, whose names weights.py uses: in memory transformers stores all experts in one tensor.
    """
    with tempfile.TemporaryDirectory() as folder:
        t.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {name: x.shape for name, x in load_file(file).items()}
        numbers = {n: random_weight(n, s) * np.float32(1.0 if "norm" in n else scale) for n, s in shapes.items()}
        save_file(numbers, file, {"format": "pt"})
        return t.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def adamw_losses(config, steps=30):
    """Return the mean cross entropy of each step's batch, before its update."""
    model = model_of(config, 0.3)  # small weights: with large ones, which reach every cap, a step of 1e-3 would be too large
    vectors = ("norm", "bias", "sinks")
    matrices = [p for n, p in model.named_parameters() if not any(word in n for word in vectors)]
    others = [p for n, p in model.named_parameters() if any(word in n for word in vectors)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(steps):
        rows = torch.from_numpy(random_tokens(VOCAB, (4, 33), seed=100 + step % 3).astype(np.int64))
        logits = model(rows[:, :-1], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), rows[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def documents():
    """Return tokens and targets of weights.py's DOCUMENTS, each as its own row."""
    for i, length in enumerate(DOCUMENTS):
        row = torch.from_numpy(random_tokens(VOCAB, (1, length + 1), seed=200 + i).astype(np.int64))
        yield row[:, :-1], row[0, 1:]


def gradients(config):
    """Return two numbers for each parameter, by name, and the logits of the documents, one after the other.

    The numbers are the gradient's norm, and its inner product with weights.py's random numbers. The gradient is that of the
    documents' mean cross entropy, each document by itself.
    """
    model, total, count, logits = model_of(config), 0.0, sum(DOCUMENTS), []
    for tokens, targets in documents():
        logits.append(model(tokens, use_cache=False).logits.float()[0])
        total = total + torch.nn.functional.cross_entropy(logits[-1], targets, reduction="sum")
    (total / count).backward()
    with tempfile.TemporaryDirectory() as folder:  # names and tensors as in a checkpoint
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        model.save_pretrained(folder)
        found = load_file(Path(folder) / "model.safetensors")
    numbers = {name: (g.astype(np.float64), random_weight(name, g.shape)) for name, g in sorted(found.items())}
    rows = [[np.linalg.norm(g), (g * w).sum()] for name, (g, w) in numbers.items() if "correction" not in name]
    return np.array(rows), torch.cat(logits).detach().numpy()


def main():
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    chosen, logits = sys.argv[2:] or list(MODELS), {}
    for name, config in ((name, MODELS[name]) for name in chosen):
        config.architectures = [NAMES.get(name, type(config).__name__.replace("Config", "ForCausalLM"))]
        config.to_json_file(out / f"{name}.{5 if V5 else 4}.json", use_diff=True)
        if V5:
            with torch.no_grad():
                rows = torch.from_numpy(random_tokens(VOCAB).astype(np.int64))
                logits[name] = model_of(config)(rows, use_cache=False).logits.float().numpy()
    if V5:
        made = {
            f"{name}_adamw": adamw_losses(MODELS[name]) for name in ("llama2", "gemma2", "mixtral", "gpt_oss") if name in chosen
        }
        for name in (name for name in chosen if name in GRADIENTS):
            made[f"{name}_gradients"], of_documents = gradients(MODELS[name])
            made |= {f"{name}_documents": of_documents} if name in ONE_BY_ONE else {}
        made |= {} if sys.argv[2:] else {"yarn": yarn_tables()}
        np.savez_compressed(out / f"{'_'.join(sys.argv[2:]) or 'golden'}.npz", **logits, **made)


if __name__ == "__main__":
    main()
