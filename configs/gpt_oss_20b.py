"""GPT-OSS 20B, sequences of 8192 tokens; sized for one node of 8 GPUs with 141 GB each.

It trains from scratch, or with --config.init.from=hf:openai/gpt-oss-20b from the published weights.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:openai/gpt-oss-20b \\
        --output=data/fineweb-edu-gpt-oss.tok --validation=0.001
    ./run.sh --config=configs/gpt_oss_20b.py --workdir=runs/gpt_oss_20b

The plan for this or another machine, and a search for a better mesh:

    ./run.sh plan --config=configs/gpt_oss_20b.py --topology=h200:8
    ./run.sh plan --config=configs/gpt_oss_20b.py --topology=h200:8 --search --budget=600

On up to 64 GPUs, the batch is the same and the accumulation changes: --config=configs/gpt_oss_20b.py:gpus=16
GPT-OSS 120B on 8 and on 64 GPUs: --config=configs/gpt_oss_20b.py:120b and --config=configs/gpt_oss_20b.py:120b,gpus=64
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg
from jaxtrain.models import preset

GPUS = 8  # number of GPUs without the variant gpus=N


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Return the config. Variants: `gpus=8` (number of GPUs that shard the batch), `120b` (the larger model)."""
    variant = parse_arg(arg, gpus=GPUS, **{"120b": False})
    config = default_config()
    config.model.update(preset("gpt_oss_120b" if variant["120b"] else "gpt_oss_20b"))

    config.data.source = "data/fineweb-edu-gpt-oss.tok"
    config.data.eval_source = "data/fineweb-edu-gpt-oss.val.tok"
    config.data.tokenizer = "hf:openai/gpt-oss-20b"
    config.data.seq_len = 8192

    # 256 x 8192 = 2.1 M tokens per step, with four sequences per GPU and microbatch. With even loads, each of the 32 experts
    # has 32,768 rows from all GPUs.
    config.train.global_batch = max(256, 4 * variant.gpus)
    config.train.grad_accum = max(1, 64 // variant.gpus)
    config.train.steps = 50_000  # 105 B tokens

    # Weights, moments and gradients in float32 are 16 bytes a parameter, 39 GiB on each of 8 GPUs. Gradients are added to their
    # sum layer by layer, because all gradients of a microbatch would be 10 GiB more. The planned peak is 105 GiB.
    config.train.accumulate = "layer"
    config.remat.policy = "auto"
    if variant["120b"]:
        # Expert parallelism is within a node, and experts' weights are gathered between nodes. Up to 64 GPUs shard one copy of
        # weights and moments, 20 GiB on each of 64. On 64 GPUs the plan needs 129.3 GiB.
        config.mesh.expert = 8
        config.mesh.data = max(1, variant.gpus // 64)
    if variant["120b"] and variant.gpus <= GPUS:
        # Weights and moments in float32 would be 163 GiB on each of 8 GPUs. With 8-bit moments they are 84.2 GiB, and the sum
        # of gradients in bfloat16 is 27 GiB. With two sequences per GPU and microbatch and full remat, the plan needs 123.7
        # GiB.
        config.dtypes.m = config.dtypes.v = "int8"
        config.dtypes.grads = "bf16"
        config.remat.policy = "full"
        config.train.global_batch = 32
        config.train.grad_accum = 2

    config.optimizer.lr = 4e-4
    config.optimizer.lr_min = 4e-5
    config.optimizer.warmup_steps = 2000
    config.optimizer.schedule = "cosine"

    config.eval.every_steps = 500
    config.eval.sequences = 256
    config.checkpoint.every_steps = 100
    config.log.every_steps = 1  # steps are long, so each has a line
    return config
