"""Llama 3.1 405B from scratch, sequences of 8192 tokens, on 16 nodes of 8 GPUs with 141 GB each, or more.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:NousResearch/Meta-Llama-3-8B \\
        --output=data/fineweb-edu-llama3.tok --validation=0.001
    ./run.sh --config=configs/llama3_405b.py:gpus=128 --workdir=runs/llama3_405b

The last on each node, as docs/cluster.md says. Its plan needs none of them:

    ./run.sh plan --config=configs/llama3_405b.py --topology=h200:8x16

More nodes keep the batch and take fewer microbatches, down to 32: --config=configs/llama3_405b.py:gpus=512
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg
from jaxtrain.models.families.llama import PRESETS

STAGES, TENSOR = 8, 8


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Variant `gpus=128`: how many GPUs the batch is divided over, 64 times a power of two."""
    variant = parse_arg(arg, gpus=128)
    config = default_config()
    config.model.update(PRESETS["llama31_405b"])
    config.model.rope_scaling = "none"  # the published one is for 131,072 tokens, which training came to last

    config.data.source = "data/fineweb-edu-llama3.tok"
    config.data.eval_source = "data/fineweb-edu-llama3.val.tok"
    config.data.tokenizer = (
        "hf:NousResearch/Meta-Llama-3-8B"  # all Llama 3 sizes share it; the original asks for a licence click
    )
    config.data.seq_len = 8192

    # tensor=8 is a node: what a layer sends, twice each way, stays on NVLink. Stages are nodes apart and hand each other only
    # the residual stream of a microbatch. fsdp is what is left, nodes apart too: with stage=8 two of them on 16 nodes.
    config.mesh.tensor = TENSOR
    config.mesh.stage = STAGES
    config.mesh.data = 1
    config.mesh.fsdp = -1
    # Every microbatch passes through all of a stage's layers, so gathering weights again for each would cross the network once
    # a microbatch. They are gathered once a step instead, and gradients summed once: in bfloat16 a 64th of the weights is
    # 12 GiB. Master weights and moments are split over fsdp too.
    config.sharding.zero = 1

    # 256 x 8192 = 2.1 M tokens a step. On 16 nodes these are 128 microbatches of one sequence for each fsdp rank: stages are
    # idle for (8 - 1) / (128 + 8 - 1) = 5% of the step, and 18% with 32 microbatches, on 64 nodes.
    rows = max(1, variant.gpus // (STAGES * TENSOR))
    config.train.global_batch = max(256, 4 * STAGES * rows)
    config.train.grad_accum = config.train.global_batch // rows
    config.train.steps = 50_000  # 105 B tokens

    # One microbatch forward and one backward at a time, so that 16 wait at most, two for each stage, however many a step has.
    # Of each a stage keeps what fits for them all; the compiled step peaks at 127 of 134 GiB. Keeping layer inputs alone, it
    # would peak at 84 and take 9% longer.
    config.pipeline.schedule = "1f1b"
    config.remat.policy = "custom"
    config.remat.tensors = "q=keep,k=keep,v=keep,residual=keep,mlp_gate=keep"

    config.optimizer.lr = 8e-5
    config.optimizer.lr_min = 8e-7
    config.optimizer.warmup_steps = 8000
    config.optimizer.schedule = "cosine"

    config.eval.every_steps = 200
    config.eval.sequences = 16
    config.checkpoint.every_steps = 20
    config.log.every_steps = 1
    return config
