"""Qwen3 30B-A3B from scratch, sequences of 8192 tokens; sized for one node of 8 GPUs with 141 GB each.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:Qwen/Qwen3-30B-A3B-Base \\
        --output=data/fineweb-edu-qwen3.tok --validation=0.001
    ./run.sh --config=configs/qwen3_30b_a3b.py --workdir=runs/qwen3_30b_a3b

The plan for this or another machine, and a search for a better mesh:

    ./run.sh plan --config=configs/qwen3_30b_a3b.py --topology=h200:8
    ./run.sh plan --config=configs/qwen3_30b_a3b.py --topology=h200:8 --search --budget=600

On up to 64 GPUs, the batch is the same and the accumulation changes: --config=configs/qwen3_30b_a3b.py:gpus=16
With expert parallelism in place of fsdp: --config=configs/qwen3_30b_a3b.py:exchange
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg
from jaxtrain.models import preset

GPUS = 8  # number of GPUs without the variant gpus=N


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Return the config. Variants: `gpus=8` (number of GPUs that shard the batch), `exchange` (expert parallelism)."""
    variant = parse_arg(arg, gpus=GPUS, exchange=False)
    config = default_config()
    config.model.update(preset("qwen3_30b_a3b"))

    config.data.source = "data/fineweb-edu-qwen3.tok"
    config.data.eval_source = "data/fineweb-edu-qwen3.val.tok"
    config.data.tokenizer = "hf:Qwen/Qwen3-30B-A3B-Base"
    config.data.seq_len = 8192

    # 256 x 8192 = 2.1 M tokens per step, with four sequences per GPU and microbatch. With even loads, each of the 128 experts
    # has 16,384 rows from all GPUs. The plan of two sequences per microbatch is slower.
    config.train.global_batch = max(256, 4 * variant.gpus)
    config.train.grad_accum = max(1, 64 // variant.gpus)
    config.train.steps = 50_000  # 105 B tokens

    # On one node fsdp=8: the compute of four sequences overlaps the gather of a layer's 1.2 GB. With `exchange`, each GPU has
    # 16 complete experts of every layer, and a token goes to 8 experts. For a layer, a GPU sends 1.2 GB of tokens to experts
    # and the same back. Little compute overlaps that, and the planned step is 34% longer.
    if variant.exchange:
        config.mesh.expert = 8
    # Weights, moments and gradients in float32 are 16 bytes a parameter, 57 GiB on each of 8 GPUs. Gradients are added to their
    # sum layer by layer, because all gradients of a microbatch would be 14 GiB more. The remaining memory is enough to save the
    # results of large matmuls and attention calls. The planned peak is 126 GiB.
    config.train.accumulate = "layer"
    config.remat.policy = "auto"

    config.optimizer.lr = 4e-4
    config.optimizer.lr_min = 4e-5
    config.optimizer.warmup_steps = 2000
    config.optimizer.schedule = "cosine"

    config.eval.every_steps = 500
    config.eval.sequences = 256
    config.checkpoint.every_steps = 100
    config.log.every_steps = 1  # steps are long, so each has a line
    return config
