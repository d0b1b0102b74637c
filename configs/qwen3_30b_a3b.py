"""Qwen3 30B-A3B from scratch, sequences of 8192 tokens; sized for one node of 8 GPUs with 141 GB each.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    python -m jaxtrain.data prepare --input='corpus/**/*.parquet' --tokenizer=hf:Qwen/Qwen3-30B-A3B-Base \\
        --output=data/fineweb-edu-qwen3.tok --validation=0.001
    python -m jaxtrain.main --config=configs/qwen3_30b_a3b.py --workdir=runs/qwen3_30b_a3b

To see its plan on this or any other machine, or to search for a better mesh:

    python -m jaxtrain.plan --config=configs/qwen3_30b_a3b.py --topology=h200:8
    python -m jaxtrain.plan --config=configs/qwen3_30b_a3b.py --topology=h200:8 --search --budget=600

Another number of GPUs keeps the batch and changes the accumulation: --config=configs/qwen3_30b_a3b.py:gpus=16
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg
from jaxtrain.models.qwen3_moe import PRESETS


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Variant `gpus=8`: how many GPUs the batch is divided over."""
    variant = parse_arg(arg, gpus=8)
    config = default_config()
    config.model.update(PRESETS["qwen3_30b_a3b"])

    config.data.source = "data/fineweb-edu-qwen3.tok"
    config.data.eval_source = "data/fineweb-edu-qwen3.val.tok"
    config.data.tokenizer = "hf:Qwen/Qwen3-30B-A3B-Base"
    config.data.seq_len = 8192

    # 256 x 8192 = 2.1 M tokens a step, two sequences a GPU at a time: each of the 128 experts then has 8192 rows from all GPUs,
    # where loads are even. One at a time: 3% slower by plan, 96 GiB.
    config.train.global_batch = max(256, 2 * variant.gpus)
    config.train.grad_accum = max(1, 128 // variant.gpus)
    config.train.steps = 50_000  # 105 B tokens

    # Each GPU of a node holds 16 experts of every layer whole, and tokens travel to them: a token goes through 8 experts, so a
    # GPU sends 0.59 GB there and as much back for a layer, and its own 16 experts' weights not at all. The other 1.5 B of the
    # 30.5 B parameters are split over the same GPUs. On one node mesh.expert=1, which is fsdp=8, is 8% faster by plan, at 118
    # GiB: the gathers of a layer's 1.2 GB hide behind two sequences, and an exchange behind little.
    config.mesh.expert = 8
    # Weights, moments and gradients in float32 are 16 bytes a parameter, 57 GiB on each of 8 GPUs. Gradients are added to their
    # sum layer by layer, since a microbatch's beside it would be 14 GiB more. What is left holds whatever costs a GEMM or an
    # attention call; the step peaks at 107 GiB by plan.
    config.train.accumulate = "layer"
    config.remat.policy = "auto"

    config.optimizer.lr = 4e-4
    config.optimizer.lr_min = 4e-5
    config.optimizer.warmup_steps = 2000
    config.optimizer.schedule = "cosine"

    config.eval.every_steps = 500
    config.checkpoint.every_steps = 100
    config.log.every_steps = 1  # a step takes long enough to deserve its line
    return config
