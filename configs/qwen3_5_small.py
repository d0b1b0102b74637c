"""The text model of Qwen3.5 0.8B from scratch, sequences of 8192 tokens; from one GPU with 80 GB up.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:Qwen/Qwen3.5-0.8B \\
        --output=data/fineweb-edu-qwen3.5.tok --validation=0.001

The plan for one GPU:

    ./run.sh plan --config=configs/qwen3_5_small.py:gpus=1 --topology=h100:1
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg
from jaxtrain.models import preset


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Return the config. Variant: `gpus=8` (number of GPUs that shard the batch)."""
    variant = parse_arg(arg, gpus=8)
    config = default_config()
    config.model.update(preset("qwen3_5_0.8b"))

    config.data.source = "data/fineweb-edu-qwen3.5.tok"
    config.data.eval_source = "data/fineweb-edu-qwen3.5.val.tok"
    config.data.tokenizer = "hf:Qwen/Qwen3.5-0.8B"
    config.data.seq_len = 8192

    # 64 x 8192 = 0.5 M tokens per step, with two sequences per GPU and microbatch.
    config.train.global_batch = max(64, 2 * variant.gpus)
    config.train.grad_accum = max(1, 32 // variant.gpus)
    config.train.steps = 30_000  # 16 B tokens, about 20 per parameter

    config.mesh.fsdp = -1
    config.remat.policy = "auto"

    config.optimizer.schedule = "wsd"
    config.optimizer.lr = 6e-4
    config.optimizer.lr_min = 6e-5
    config.optimizer.warmup_steps = 2000

    config.eval.every_steps = 500
    config.eval.sequences = 256
    config.checkpoint.every_steps = 500
    return config
