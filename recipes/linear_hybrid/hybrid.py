"""A small hybrid of linear and full attention. It learns Python from the standard library's source, on a CPU in minutes.

PYTHONPATH=recipes ./run.sh --config=recipes/linear_hybrid/hybrid.py --workdir=runs/hybrid
PYTHONPATH=recipes ./run.sh plan --config=recipes/linear_hybrid/hybrid.py:1b --topology=h200:8
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Return the config. Variant: `1b` (24 layers of width 2048, with the attention sizes of Qwen3-Next, for 8 GPUs)."""
    variant = parse_arg(arg, **{"1b": False})
    config = default_config()
    config.model.family = "linear_hybrid.gated_delta_net:small"
    config.precision = "f32"
    config.model.num_layers = 4  # three gated delta nets, then one layer of softmax attention
    config.model.d_model = 128
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.d_ff = 384
    config.model.vocab_size = 264
    config.model.qk_norm = True
    config.remat.policy = "full"
    config.data.source = "stdlib"
    config.data.tokenizer = "byte"
    config.data.seq_len = 128
    config.train.steps = 400
    config.train.global_batch = 16
    config.optimizer.lr = 4e-3
    config.optimizer.lr_min = 1e-4
    config.optimizer.warmup_steps = 50
    config.eval.every_steps = 100
    config.checkpoint.every_steps = 100
    config.sample.max_tokens = 0  # the model has no decode()

    if variant["1b"]:
        config.model.family = "linear_hybrid.gated_delta_net:qwen3_next"
        config.precision = "bf16"
        config.model.num_layers = 24
        config.model.d_model = 2048
        config.model.num_heads = 16
        config.model.num_kv_heads = 2
        config.model.head_dim = 256
        config.model.d_ff = 5632
        config.model.vocab_size = 151_936
        config.model.rope_base = 10_000_000.0
        config.data.source = "synthetic"
        config.data.eval_source = ""
        config.eval.every_steps = 0
        config.data.seq_len = 4096
        config.train.global_batch = 64
        config.optimizer.lr = 3e-4
    return config
