"""Finetuning of a model that is trained already, on texts or on preferences: all of its weights, or adapters beside them.

From any base, a run of jaxtrain or a Hugging Face model's folder, whose sizes and tokenizer this config takes over:

    ./run.sh --config=configs/finetune.py:base=runs/tiny,lora=8 --workdir=runs/tiny_lora

On a token file of conversations (docs/data.md), on one node of 8 GPUs:

    ./run.sh --config=configs/finetune.py:base=hf:meta-llama/Llama-3.1-8B,lora=16 --workdir=runs/chat \\
        --config.data.source=data/chat.tok --config.data.eval_source=data/chat.val.tok --config.train.steps=1000

On pairs of a preferred and another completion (docs/data.md), by direct preference optimisation:

    ./run.sh --config=configs/finetune.py:base=runs/chat_merged,lora=16,dpo --workdir=runs/preferred \\
        --config.data.source=data/pairs.tok --config.data.eval_source=data/pairs.val.tok --config.train.steps=500

docs/finetuning.md says what is trained, saved, and how to use it.
"""

import ml_collections

from jaxtrain import flops
from jaxtrain.checkpoint import CheckpointError
from jaxtrain.config import ConfigError, Model, Problem, default_config, parse_arg
from jaxtrain.hf.folder import describe
from jaxtrain.models.hugging_face import HuggingFaceError

LARGE = 50_000_000  # parameters from which a model is one for GPUs


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Variants: `base=DIR` (the model it starts from), `lora=16` (the adapters' rank; 0: all weights are trained), `gpus=8`
    (how many the batch is divided over), `dpo` (from preferences). Only `base` has to be given."""
    variant = parse_arg(arg, base="", lora=0, gpus=8, dpo=False)
    config = default_config()
    if not variant.base:
        rule = "is missing, and the run would start from random weights"
        fix = "Fix: --config=configs/finetune.py:base=FOLDER, of a run or of a Hugging Face model (or hf:NAME)."
        raise ConfigError([Problem("--config=FILE:base", None, rule, fix)])
    try:
        config.update(describe(variant.base))
    except (CheckpointError, HuggingFaceError) as error:
        raise ConfigError([Problem("--config=FILE:base", variant.base, str(error).rstrip("."), "")]) from error
    config.init["from"] = variant.base
    large = flops.parameters(Model(**config.model.to_dict()))["total"] >= LARGE

    # Most conversations are shorter, and several share a sequence.
    config.data.seq_len = min(config.data.seq_len, 8192)
    # A conversation sees itself only, whatever else stands in its sequence.
    config.data.packing = "documents"
    # Short conversations: 8192 tokens hold some dozens of them, and what does not fit is masked.
    config.data.max_segments = 64

    config.lora.rank = variant.lora
    # With rank 16 outputs count twice, as people have it; of other ranks the best rates are then alike. All linear layers have
    # adapters: beside attention alone they fall behind (Schulman et al. 2025, "LoRA Without Regret").
    config.lora.alpha = 32.0

    if variant.lora or variant.dpo:
        config.model.mtp_layers = 0  # modules of multi-token prediction are trained with all weights, by cross entropy
    if variant.dpo:
        config.loss.name = "dpo"
        config.loss.beta = 0.1  # as in the paper and in TRL

    if large:
        config.data.source = "data/pairs.tok" if variant.dpo else "data/chat.tok"
        config.data.eval_source = config.data.source.replace(".tok", ".val.tok")
        # 32 x 8192 = 262 k tokens a step: some hundred conversations. Larger batches cost adapters more than all weights.
        config.train.global_batch = max(32, variant.gpus)
        config.train.grad_accum = max(1, 32 // variant.gpus)
        # Two or three times through the data; later, a model of this size knows its examples by heart. The run says how many
        # epochs its steps are.
        config.train.steps = 1000
        config.mesh.fsdp = -1
        config.remat.policy = "auto"
        # A thirtieth of pretraining's: weights should stay near where they are. Adapters want about ten times the rate of all
        # weights, whatever the rank and the model ("LoRA Without Regret").
        config.optimizer.lr = 2e-4 if variant.lora else 1e-5
        if variant.dpo:
            # All weights: that of Zephyr (Tunstall et al. 2023, arXiv:2310.16944). Adapters want ten times that here too.
            config.optimizer.lr = 5e-6 if variant.lora else 5e-7
        config.sample.max_tokens = 0
        config.log.every_steps = 1
    else:
        config.precision = "f32"
        config.remat.policy = "full"
        config.train.steps = 100
        config.train.global_batch = 16
        config.optimizer.lr = 4e-3 if variant.lora else 4e-4  # a tenth of what the model was trained with, as above
        if variant.dpo:
            config.optimizer.lr /= 4
        config.sample.prompt = "def "
    config.optimizer.lr_min = 0.0
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = max(1, config.train.steps * 3 // 100)  # moments fill; there is nothing else to warm up
    config.optimizer.weight_decay = 0.0  # it would pull towards zero, and away from the base
    config.optimizer.beta2 = 0.999  # few steps, each of few tokens: a longer memory of their sizes

    config.eval.every_steps = 100
    config.checkpoint.every_steps = 100
    return config
