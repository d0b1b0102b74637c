"""Qwen3 30B-A3B from scratch, sequences of 8192 tokens; sized for one node of 8 GPUs with 141 GB each.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:Qwen/Qwen3-30B-A3B-Base \\
        --output=data/fineweb-edu-qwen3.tok --validation=0.001
    ./run.sh --config=configs/qwen3_30b_a3b.py --workdir=runs/qwen3_30b_a3b

To see its plan on this or any other machine, or to search for a better mesh:

    ./run.sh plan --config=configs/qwen3_30b_a3b.py --topology=h200:8
    ./run.sh plan --config=configs/qwen3_30b_a3b.py --topology=h200:8 --search --budget=600

Up to 64 GPUs keep the batch and change the accumulation: --config=configs/qwen3_30b_a3b.py:gpus=16. With experts
divided over GPUs instead, each whole on one: --config=configs/qwen3_30b_a3b.py:exchange
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg
from jaxtrain.models import preset

GPUS = 8  # unless gpus=N says otherwise


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Variants: `gpus=8`, how many GPUs the batch is divided over; `exchange`, tokens travel to experts, not weights."""
    variant = parse_arg(arg, gpus=GPUS, exchange=False)
    config = default_config()
    config.model.update(preset("qwen3_30b_a3b"))

    config.data.source = "data/fineweb-edu-qwen3.tok"
    config.data.eval_source = "data/fineweb-edu-qwen3.val.tok"
    config.data.tokenizer = "hf:Qwen/Qwen3-30B-A3B-Base"
    config.data.seq_len = 8192

    # 256 x 8192 = 2.1 M tokens a step, four sequences a GPU at a time: each of the 128 experts then has 16,384 rows from all
    # GPUs, where loads are even. Two at a time are slower by plan.
    config.train.global_batch = max(256, 4 * variant.gpus)
    config.train.grad_accum = max(1, 64 // variant.gpus)
    config.train.steps = 50_000  # 105 B tokens

    # On one node fsdp=8: gathers of a layer's 1.2 GB hide behind four sequences. With `exchange` each GPU holds 16 experts of
    # every layer whole, and a token goes to 8: a GPU sends 1.2 GB there and as much back for a layer, which hides behind
    # little, and a step takes 34% longer by plan.
    if variant.exchange:
        config.mesh.expert = 8
    # Weights, moments and gradients in float32 are 16 bytes a parameter, 57 GiB on each of 8 GPUs. Gradients are added to their
    # sum layer by layer, since a microbatch's beside it would be 14 GiB more. What is left holds what costs a large GEMM or an
    # attention call; the step peaks at 126 GiB by plan.
    config.train.accumulate = "layer"
    config.remat.policy = "auto"

    config.optimizer.lr = 4e-4
    config.optimizer.lr_min = 4e-5
    config.optimizer.warmup_steps = 2000
    config.optimizer.schedule = "cosine"

    config.eval.every_steps = 500
    config.eval.sequences = 256
    config.checkpoint.every_steps = 100
    config.log.every_steps = 1  # a step takes long enough to deserve its line
    return config
