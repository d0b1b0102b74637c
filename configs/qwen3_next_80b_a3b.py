"""Qwen3-Next 80B-A3B from scratch, sequences of 8192 tokens; sized for eight nodes of 8 GPUs with 141 GB each.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:Qwen/Qwen3-Next-80B-A3B-Instruct \\
        --output=data/fineweb-edu-qwen3-next.tok --validation=0.001

The plan for this machine:

    ./run.sh plan --config=configs/qwen3_next_80b_a3b.py --topology=h200:8x8
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg
from jaxtrain.models import preset


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Return the config. Variant: `node` (one node of 8 GPUs, with moments in 8 bits and gradients in bfloat16)."""
    variant = parse_arg(arg, node=False)
    config = default_config()
    config.model.update(preset("qwen3_next_80b_a3b"))

    config.data.source = "data/fineweb-edu-qwen3-next.tok"
    config.data.eval_source = "data/fineweb-edu-qwen3-next.val.tok"
    config.data.tokenizer = "hf:Qwen/Qwen3-Next-80B-A3B-Instruct"
    config.data.seq_len = 8192

    # 256 x 8192 = 2.1 M tokens per step, with two sequences per GPU and microbatch on 64 GPUs.
    config.train.global_batch = 256
    config.train.grad_accum = 2
    config.train.steps = 50_000
    # Weights, moments and gradients in float32 are 16 bytes a parameter, 1.3 TB, sharded over all nodes. The planned peak
    # is 88 GiB.
    config.mesh.data = 1
    config.train.accumulate = "layer"
    config.remat.policy = "auto"
    if variant.node:
        config.mesh.expert = 8
        config.train.grad_accum = 16
        config.dtypes.m = config.dtypes.v = "int8"
        config.dtypes.grads = "bf16"
        config.remat.policy = "full"

    config.optimizer.lr = 4e-4
    config.optimizer.lr_min = 4e-5
    config.optimizer.warmup_steps = 2000
    config.optimizer.schedule = "cosine"

    config.eval.every_steps = 500
    config.eval.sequences = 256
    config.checkpoint.every_steps = 100
    config.log.every_steps = 1
    return config
