"""Llama 3.1 405B from scratch, sequences of 8192 tokens, on 16 nodes of 8 GPUs with 141 GB each, or more.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:NousResearch/Meta-Llama-3-8B \\
        --output=data/fineweb-edu-llama3.tok --validation=0.001
    ./run.sh --config=configs/llama3_405b.py:gpus=128 --workdir=runs/llama3_405b

The last on each node, as docs/cluster.md says. Its plan needs none of them:

    ./run.sh plan --config=configs/llama3_405b.py --topology=h200:8x16

Say how many GPUs there are, 64 times a power of two, and batch, mesh and moments follow
(docs/evidence/layouts.md has the plan of each size): --config=configs/llama3_405b.py:gpus=1024
"""

import ml_collections

from jaxtrain.config import ConfigError, Problem, default_config, parse_arg
from jaxtrain.models import preset

GPUS = 128  # unless gpus=N says otherwise
TENSOR = 8


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Variant `gpus=128`: for how many GPUs batch, mesh and moments are, 64 times a power of two."""
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
    config.model.rope_scaling = "none"  # the published one is for 131,072 tokens, which training came to last

    config.data.source = "data/fineweb-edu-llama3.tok"
    config.data.eval_source = "data/fineweb-edu-llama3.val.tok"
    config.data.tokenizer = (
        "hf:NousResearch/Meta-Llama-3-8B"  # all Llama 3 sizes share it; the original asks for a licence click
    )
    config.data.seq_len = 8192

    # tensor=8 is a node: what a layer sends, twice each way, stays on NVLink. Stages are nodes apart and hand each other only
    # the residual stream of a microbatch. On 16 nodes each is a stage: no weight crosses the network, and a GPU has a
    # 128th of weights, moments, bfloat16 weights and sums of gradients. With 8 stages and fsdp=2 it has a 64th of the last
    # two, which is 18 GiB more. What is left of more nodes is fsdp.
    stages = 16 if 128 <= variant.gpus < 512 else 8
    fsdp = variant.gpus // (stages * TENSOR)
    config.mesh.tensor = TENSOR
    config.mesh.stage = stages
    config.mesh.data = 1
    config.mesh.fsdp = fsdp
    # Every microbatch passes through all of a stage's layers, so gathering weights again for each would cross the network once
    # a microbatch. They are gathered once a step instead, and gradients summed once.
    config.sharding.zero = 1

    # 256 x 8192 = 2.1 M tokens a step, as microbatches of one sequence for each fsdp rank, 32 or more of them.
    config.train.global_batch = max(256, 32 * fsdp)
    config.train.grad_accum = config.train.global_batch // fsdp
    config.train.steps = 50_000  # 105 B tokens

    # Groups of layers in turn: stages are idle for (16 - 1) / (2 x 256 + 16 - 1) = 2.8% of the step on 16 nodes. A microbatch
    # is handed on as often as there are groups; with few microbatches that is worth it, and 1,024 GPUs are idle for 5.2%
    # instead of 18%. 1 + 1 / groups microbatches for each stage wait for their backward pass, of which all is saved that fits.
    config.pipeline.schedule = "interleaved"
    config.pipeline.groups = 2 if variant.gpus <= 128 else 4
    config.remat.policy = "auto"
    if variant.gpus < 128:  # moments in float32 would be 23.6 GiB more on each of 64
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
