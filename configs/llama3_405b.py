"""Llama 3.1 405B from scratch, sequences of 8192 tokens, on 8 or more nodes of 8 GPUs with 141 GB each.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:NousResearch/Meta-Llama-3-8B \\
        --output=data/fineweb-edu-llama3.tok --validation=0.001
    ./run.sh --config=configs/llama3_405b.py:gpus=128 --workdir=runs/llama3_405b

Run the last command on each node (docs/cluster.md). The plan needs no GPU:

    ./run.sh plan --config=configs/llama3_405b.py --topology=h200:8x16

The variant gpus=N chooses batch, mesh and moments for N GPUs, 64 times a power of two (--config=FILE:gpus=1024).
docs/evidence/layouts.md has the plan of each number of GPUs.
"""

import ml_collections

from jaxtrain.config import ConfigError, Problem, default_config, parse_arg
from jaxtrain.models import preset

GPUS = 128  # number of GPUs without the variant gpus=N
TENSOR = 8


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Return the config. Variant: `gpus=128` (batch, mesh and moments for that many GPUs, 64 times a power of two)."""
    variant = parse_arg(arg, gpus=GPUS)
    if variant.gpus < 64:
        rule = "does not fit: weights, bfloat16 moments and gradients are 12 bytes a parameter, 142 GiB on each of 32 GPUs"
        raise ConfigError([Problem("--config=FILE:gpus", variant.gpus, rule, "Fix: --config=configs/llama3_405b.py:gpus=64.")])
    if variant.gpus & (variant.gpus - 1):
        below = 1 << variant.gpus.bit_length() - 1
        fix = f"Fix: --config=configs/llama3_405b.py:gpus={below}, or {2 * below}."
        raise ConfigError([Problem("--config=FILE:gpus", variant.gpus, "must be 64 times a power of two", fix)])
    config = default_config()
    config.model.update(preset("llama3.1_405b"))
    config.model.rope_scaling = "none"  # the published scaling is for sequences of 131,072 tokens late in training

    config.data.source = "data/fineweb-edu-llama3.tok"
    config.data.eval_source = "data/fineweb-edu-llama3.val.tok"
    config.data.tokenizer = "hf:NousResearch/Meta-Llama-3-8B"  # for all Llama 3 sizes; this copy needs no accepted licence
    config.data.seq_len = 8192

    # tensor=8 is a node, so the collectives of tensor parallelism stay on NVLink. Stages are on different nodes and send only
    # the residual stream of a microbatch. On 16 nodes, each node is a stage. Then no weight is sent over the network, and a GPU
    # has a 128th of master weights, moments, bfloat16 weights and sums of gradients. With 8 stages and fsdp=2, a GPU would have
    # a 64th of bfloat16 weights and sums of gradients, which is 18 GiB more. On more nodes, fsdp is larger.
    stages = 16 if 128 <= variant.gpus < 512 else 8
    fsdp = variant.gpus // (stages * TENSOR)
    config.mesh.tensor = TENSOR
    config.mesh.stage = stages
    config.mesh.data = 1
    config.mesh.fsdp = fsdp
    # Every microbatch passes through all layers of a stage. With ZeRO-3, weights would be gathered over the network for each
    # microbatch. With ZeRO-1, weights are gathered once per step, and gradients are reduced once per step.
    config.sharding.zero = 1

    # 256 x 8192 = 2.1 M tokens per step. A microbatch has one sequence for each fsdp rank, and a step has 32 or more
    # microbatches.
    config.train.global_batch = max(256, 32 * fsdp)
    config.train.grad_accum = config.train.global_batch // fsdp
    config.train.steps = 50_000  # 105 B tokens

    # On 16 nodes, the bubble is (16 - 1) / (2 x 256 + 16 - 1) = 2.8% of the step. More groups send a microbatch between stages
    # more often, but with few microbatches they make the bubble smaller: 5.2% instead of 18% on 1,024 GPUs. A stage has the
    # saved activations of (1 + 1 / groups) x stages microbatches. remat=auto saves as many activations as fit.
    config.pipeline.schedule = "interleaved"
    config.pipeline.groups = 2 if variant.gpus <= 128 else 4
    config.remat.policy = "auto"
    if variant.gpus < 128:  # float32 moments would be 23.6 GiB more on each of 64 GPUs
        config.dtypes.m = config.dtypes.v = "bf16"

    config.optimizer.lr = 8e-5
    config.optimizer.lr_min = 8e-7
    config.optimizer.warmup_steps = 8000
    config.optimizer.schedule = "cosine"

    config.eval.every_steps = 200
    config.eval.sequences = 16
    config.checkpoint.every_steps = 20
    config.log.every_steps = 1
    return config
