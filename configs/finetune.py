"""Finetuning of a trained model on texts or on preferences, with all weights or with LoRA adapters.

The base model is a run of jaxtrain or a Hugging Face folder. The config has the base's sizes and tokenizer:

    ./run.sh --config=configs/finetune.py:base=runs/tiny,lora=8 --workdir=runs/tiny_lora

On a token file of conversations (docs/data.md), on one node of 8 GPUs:

    ./run.sh --config=configs/finetune.py:base=hf:meta-llama/Llama-3.1-8B,lora=16 --workdir=runs/chat \\
        --config.data.source=data/chat.tok --config.data.eval_source=data/chat.val.tok --config.train.steps=1000

A base of 70B parameters in 4 bits fits on one GPU. Its plan needs no weights, only the name of a published size:

    ./run.sh plan --config=configs/finetune.py:model=llama3.1_70b,lora=16,frozen=nf4,gpus=1 --topology=h200:1

On pairs of a preferred and another completion (docs/data.md), by direct preference optimisation:

    ./run.sh --config=configs/finetune.py:base=runs/chat_merged,lora=16,dpo --workdir=runs/preferred \\
        --config.data.source=data/pairs.tok --config.data.eval_source=data/pairs.val.tok --config.train.steps=500

docs/finetuning.md lists the weights that are trained and saved, and shows how to use them.
"""

import ml_collections

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.config import ConfigError, Model, Problem, default_config, parse_arg
from jaxtrain.hf.folder import describe
from jaxtrain.models import flops, preset
from jaxtrain.models.hugging_face import HuggingFaceError

LARGE = 50_000_000  # least number of parameters of a model that is finetuned on GPUs


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Return the config. Variants: `base=DIR` (the base model, or adapters to train further; required to train),
    `model=llama3.1_70b` (the preset of a plan without weights), `lora=16` (rank of new adapters; 0: all weights are trained),
    `frozen=nf4` (lora.base), `gpus=8` (number of GPUs that shard the batch), `dpo` (train on preferences)."""
    variant = parse_arg(arg, base="", model="", lora=0, frozen="", gpus=8, dpo=False)
    config = default_config()
    if variant.base and variant.model:
        rule = f"has sizes of its own, beside model={variant.model}"
        raise ConfigError([Problem("--config=FILE:base", variant.base, rule, "Fix: leave model out.")])
    if variant.base:
        try:
            config.update(describe(variant.base))
        except (CheckpointError, HuggingFaceError) as error:
            rule = str(error).removeprefix(f"{variant.base}: ").rstrip(".")
            raise ConfigError([Problem("--config=FILE:base", variant.base, rule, "")]) from error
        config.init["from"] = variant.base
    elif variant.model and variant.lora:  # without init.from, training of adapters is refused
        config.model.update(preset(variant.model))
        config.data.seq_len = 8192
    else:
        rule = "is missing, and the run would start from random weights"
        fix = "Fix: --config=configs/finetune.py:base=FOLDER, of a run or of a Hugging Face model (or hf:NAME)"
        fix += ", or for a plan model=NAME,lora=16."
        raise ConfigError([Problem("--config=FILE:base", None, rule, fix)])
    rank = config.lora.rank  # of adapters in `base`, which are trained further; else 0
    if rank and variant.lora not in (0, rank):
        rule = f"{variant.base} holds adapters of rank {rank}, which are trained further"
        raise ConfigError([Problem("--config=FILE:lora", variant.lora, rule, "Fix: leave lora out.")])
    large = flops.parameters(Model(**config.model.to_dict()))["total"] >= LARGE

    # Most conversations are shorter than 8192 tokens, and several are packed into a sequence.
    config.data.seq_len = min(config.data.seq_len, 8192)
    # Attention stays within a conversation.
    config.data.packing = "documents"
    # 8192 tokens are some dozens of short conversations. Further conversations in a sequence are masked.
    config.data.max_segments = 64

    if not rank:
        config.lora.rank = variant.lora
        # With rank 16, alpha / rank is 2, which is usual. With a fixed alpha, the best learning rate hardly depends on the
        # rank. All linear layers have adapters, because adapters on attention only reach a higher loss (Schulman et al. 2025,
        # "LoRA Without Regret").
        config.lora.alpha = 32.0
    if variant.frozen:
        config.lora.base = variant.frozen
    adapters = bool(config.lora.rank)

    if adapters or variant.dpo:
        config.model.mtp_layers = 0  # modules of multi-token prediction are trained with all weights, by cross entropy
    if variant.dpo:
        config.loss.name = "dpo"
        config.loss.beta = 0.1  # as in the paper and in TRL

    if large:
        config.data.source = "data/pairs.tok" if variant.dpo else "data/chat.tok"
        config.data.eval_source = config.data.source.replace(".tok", ".val.tok")
        # 32 x 8192 = 262 k tokens per step: some hundred conversations. A larger batch raises the loss of adapters more than
        # that of all weights.
        config.train.global_batch = max(32, variant.gpus)
        config.train.grad_accum = max(1, 32 // variant.gpus)
        if adapters and config.model.num_experts:
            # Four sequences for each GPU in a microbatch: an expert's matmuls have more rows for the weights that they read.
            config.train.grad_accum = max(1, 8 // variant.gpus)
        # Two or three epochs are usual, because a large model memorises its examples after them.
        config.train.epochs = 3.0
        config.train.steps = 1000  # of a plan without the data
        config.mesh.fsdp = -1
        config.remat.policy = "auto"
        # For all weights, a thirtieth of the learning rate of pretraining, so that weights stay near those of the base. The
        # best rate of adapters is about ten times that, for any rank and model ("LoRA Without Regret").
        config.optimizer.lr = 2e-4 if adapters else 1e-5
        if variant.dpo:
            # For all weights, the rate of Zephyr (Tunstall et al. 2023, arXiv:2310.16944). For adapters, ten times that.
            config.optimizer.lr = 5e-6 if adapters else 5e-7
        config.log.every_steps = 1
    else:
        # A small model may have a long limit: 131072 positions would make 131 k tokens a step, which take minutes on a CPU.
        config.data.seq_len = min(config.data.seq_len, 512)
        config.precision = "f32"
        config.remat.policy = "full"
        config.train.steps = 100
        config.train.global_batch = 16
        config.optimizer.lr = 4e-3 if adapters else 4e-4  # all weights: a tenth of that of tiny.py
        if variant.dpo:
            config.optimizer.lr /= 4
    config.optimizer.lr_min = 0.0
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = max(1, config.train.steps * 3 // 100)  # only until the moments have enough steps
    config.optimizer.weight_decay = 0.0  # decay would move weights away from the base
    config.optimizer.beta2 = 0.999  # a step has few tokens, so the second moment is averaged over more steps

    config.eval.every_steps = 100
    config.sample.every_steps = 100  # of conversations: answers to the first held-out ones
    config.checkpoint.every_steps = 100
    return config
