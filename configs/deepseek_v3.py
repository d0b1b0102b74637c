"""DeepSeek-V3 from scratch (671 B parameters, 37 B active), sequences of 4096 tokens on 16 or more nodes of 8 GPUs with 141 GB.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/350BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:deepseek-ai/DeepSeek-V3 \\
        --output=data/fineweb-edu-deepseek.tok --validation=0.001
    ./run.sh --config=configs/deepseek_v3.py:gpus=128 --workdir=runs/deepseek_v3

Run the last command on each node (docs/cluster.md). The plan needs no GPU:

    ./run.sh plan --config=configs/deepseek_v3.py --topology=h200:8x16

The variant gpus=N chooses batch and mesh for N GPUs, 128 times a power of two: --config=configs/deepseek_v3.py:gpus=1024
With multi-token prediction (loss.mtp_weight is 0.3 as published; set 0.1 late in training): --config=configs/deepseek_v3.py:mtp
"""

import ml_collections

from jaxtrain.config import ConfigError, Problem, default_config, parse_arg
from jaxtrain.models import preset

GPUS = 128  # number of GPUs without the variant gpus=N
EXPERT = 8
FSDP = 32  # at most


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Return the config. Variants: `gpus=128` (batch and mesh for that many GPUs), `mtp` (multi-token prediction)."""
    variant = parse_arg(arg, gpus=GPUS, mtp=False)
    if variant.gpus < GPUS or variant.gpus & (variant.gpus - 1):
        below = max(GPUS, 1 << variant.gpus.bit_length() - 1)
        rule = "must be 128 times a power of two"
        raise ConfigError(
            [Problem("--config=FILE:gpus", variant.gpus, rule, f"Fix: --config=configs/deepseek_v3.py:gpus={below}.")]
        )
    config = default_config()
    config.model.update(preset("deepseek_v3"))
    config.model.mtp_layers = int(variant.mtp)
    config.model.rope_scaling = "none"  # the published scaling is for sequences of 131,072 tokens late in training

    config.data.source = "data/fineweb-edu-deepseek.tok"
    config.data.eval_source = "data/fineweb-edu-deepseek.val.tok"
    config.data.tokenizer = "hf:deepseek-ai/DeepSeek-V3"
    config.data.seq_len = 4096

    # Expert parallelism is within a node, so its all-to-alls use NVLink. Each GPU has 32 of a layer's 256 experts. Weights are
    # gathered over the network, 2.8 GB of a layer each time. Eight sequences per GPU and microbatch are enough compute for
    # that.
    config.mesh.expert = EXPERT
    config.mesh.fsdp = min(FSDP, variant.gpus // EXPERT)
    config.mesh.data = variant.gpus // (EXPERT * config.mesh.fsdp)
    config.train.global_batch = max(2048, 8 * variant.gpus)
    # With multi-token prediction, the plan of eight sequences per GPU needs 143.2 GiB on each of 128 GPUs.
    at_a_time = 4 if variant.mtp and variant.gpus == GPUS else 8
    config.train.grad_accum = config.train.global_batch // (at_a_time * variant.gpus)
    config.train.steps = 50_000
    config.train.accumulate = "layer" if config.train.grad_accum > 1 else "auto"

    config.remat.policy = "full"
    config.dtypes.m = config.dtypes.v = "bf16"

    # The router's bias balances the loads. The factor of the sequence-wise loss is the published one.
    config.moe.balance_loss = 0.0
    config.moe.sequence_balance_loss = 1e-4
    config.moe.z_loss = 0.0

    config.optimizer.lr = 2.2e-4
    config.optimizer.lr_min = 2.2e-5
    config.optimizer.warmup_steps = 2000
    config.optimizer.schedule = "cosine"
    config.optimizer.beta2 = 0.95

    config.eval.every_steps = 500
    config.eval.sequences = 1024
    config.checkpoint.every_steps = 100
    config.log.every_steps = 1
    return config
