"""Supervised finetuning of a model that is trained already: all of its weights, or low-rank adapters beside them.

The small model of configs/tiny.py, on any machine, from a run of it:

    python -m jaxtrain.main --config=configs/finetune.py:base=runs/tiny,lora=8 --workdir=runs/tiny_lora

Llama 3 8B on one node of 8 GPUs, on a token file of conversations (docs/data.md):

    python -m jaxtrain.main --config=configs/finetune.py:model=llama3_8b,base=DIR,lora=16 --workdir=runs/chat \\
        --config.data.source=data/chat.tok --config.data.eval_source=data/chat.val.tok --config.train.steps=1000

docs/finetuning.md says what is trained, saved, and how to use it.
"""

import ml_collections

from jaxtrain.config import ConfigError, Problem, default_config, parse_arg
from jaxtrain.models.llama import PRESETS


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Variants: `model=tiny` or one of the Llama presets, `base=DIR` (what it starts from), `lora=16` (the adapters' rank; 0:
    all weights are trained), `gpus=8` (how many the batch is divided over)."""
    variant = parse_arg(arg, model="tiny", base="", lora=0, gpus=8)
    tiny = variant.model == "tiny"
    if not tiny and variant.model not in PRESETS:
        rule = f"no such variant: {variant.model}"
        raise ConfigError([Problem("--config=FILE:model", None, rule, f"Known: tiny, {', '.join(PRESETS)}.")])
    config = default_config()
    config.init["from"] = variant.base

    # A conversation sees itself only, whatever else stands in its sequence.
    config.data.packing = "documents"
    # Short conversations: 8192 tokens hold some dozens of them, and what does not fit is masked.
    config.data.max_segments = 64

    config.lora.rank = variant.lora
    config.lora.alpha = (
        32.0  # with rank 16 outputs count twice, as people have it; of other ranks the best rates are then alike
    )
    # All linear layers: adapters beside attention alone fall behind (Schulman et al. 2025, "LoRA Without Regret").

    if tiny:
        config.precision = "f32"
        config.model.num_layers = 4
        config.model.d_model = 128
        config.model.num_heads = 4
        config.model.num_kv_heads = 2
        config.model.d_ff = 384
        config.model.vocab_size = 264
        config.remat.policy = "full"
        config.data.source = "stdlib"
        config.data.tokenizer = "byte"
        config.data.seq_len = 128
        config.train.steps = 100
        config.train.global_batch = 16
        config.optimizer.lr = 4e-4  # a tenth of what the model was trained with, as below
        config.sample.prompt = "def "
    else:
        config.model.update(PRESETS[variant.model])
        config.data.tokenizer = "hf:NousResearch/Meta-Llama-3-8B-Instruct"
        config.data.source = "data/chat.tok"
        config.data.eval_source = "data/chat.val.tok"
        config.data.seq_len = 8192
        # 32 x 8192 = 262 k tokens a step: some hundred conversations. Larger batches cost adapters more than all weights.
        config.train.global_batch = max(32, variant.gpus)
        config.train.grad_accum = max(1, 32 // variant.gpus)
        # Two or three times through the data; later, a model of this size knows its examples by heart. The run says how many
        # epochs its steps are.
        config.train.steps = 1000
        config.mesh.fsdp = -1
        config.remat.policy = "auto"
        config.optimizer.lr = 1e-5  # a thirtieth of pretraining's: weights should stay near where they are
        config.sample.max_tokens = 0

    # Adapters want about ten times the rate of all weights, whatever the rank and the model ("LoRA Without Regret").
    if variant.lora:
        config.optimizer.lr = 4e-3 if tiny else 2e-4
    config.optimizer.lr_min = 0.0
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = max(1, config.train.steps * 3 // 100)  # moments fill; there is nothing else to warm up
    config.optimizer.weight_decay = 0.0  # it would pull towards zero, and away from the base
    config.optimizer.beta2 = 0.999  # few steps, each of few tokens: a longer memory of their sizes

    config.eval.every_steps = 100
    config.checkpoint.every_steps = 100
    config.log.every_steps = 1 if not tiny else 10
    return config
