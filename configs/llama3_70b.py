"""Llama 3 70B from scratch, sequences of 8192 tokens, on one node of 8 GPUs with 141 GB each, or more.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:NousResearch/Meta-Llama-3-8B \\
        --output=data/fineweb-edu-llama3.tok --validation=0.001
    ./run.sh --config=configs/llama3_70b.py --workdir=runs/llama3_70b

Mesh and remat are what the first of these found; the second says what each choice that saves memory is needed for:

    ./run.sh plan --config=configs/llama3_70b.py --topology=h200:8 --search --budget=600
    ./run.sh plan --config=configs/llama3_70b.py --topology=h200:8 --why

Moments are bfloat16. On one node they can also be in 8-bit blocks, which leaves memory to save queries too, or float32 in host
memory, which leaves memory for a batch of 64 by accumulation; docs/memory.md compares the three:

    --config=configs/llama3_70b.py:int8
    --config=configs/llama3_70b.py:f32

Say how many GPUs there are, and batch, mesh and remat follow (docs/evidence/layouts.md has the plan of each size):

    --config=configs/llama3_70b.py:gpus=64
"""

import ml_collections

from jaxtrain.config import ConfigError, Problem, default_config, parse_arg
from jaxtrain.models import preset

GPUS = 8  # unless gpus=N says otherwise


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Variants: `gpus=8`, for how many GPUs batch, mesh and remat are; `int8` and `f32`, how moments are stored on one node."""
    variant = parse_arg(arg, gpus=GPUS, int8=False, f32=False)
    if variant.gpus & (variant.gpus - 1):
        below = 1 << variant.gpus.bit_length() - 1
        fix = f"Fix: --config=configs/llama3_70b.py:gpus={below}, or {2 * below}."
        raise ConfigError([Problem("--config=FILE:gpus", variant.gpus, "must be a power of two", fix)])
    config = default_config()
    config.model.update(preset("llama3_70b"))

    config.data.source = "data/fineweb-edu-llama3.tok"
    config.data.eval_source = "data/fineweb-edu-llama3.val.tok"
    config.data.tokenizer = (
        "hf:NousResearch/Meta-Llama-3-8B"  # all Llama 3 sizes share it; the original asks for a licence click
    )
    config.data.seq_len = 8192

    # One sequence a GPU at a time. From 16 GPUs on, 256 x 8192 = 2.1 M tokens a step by accumulation. On 8 there is no room for
    # a microbatch's gradients beside their sum: 8 x 8192 = 65 k tokens a step, which suits continued training (init.from). More
    # at once, at 131.7 GiB and 6% more time a token: train.global_batch=64, train.grad_accum=8, train.accumulate=layer,
    # remat.tensors=k=keep,v=keep,residual=keep.
    config.train.global_batch = max(256, variant.gpus) if variant.gpus >= 16 else variant.gpus
    config.train.grad_accum = config.train.global_batch // variant.gpus
    config.train.steps = 50_000  # 105 B tokens

    # Over all GPUs, of up to 8 nodes: one node has no room for the state twice, nor for two sets of gradients. A ring through
    # more nodes is too long, 24 us for each: groups of 64 GPUs hold a copy each, and sum their gradients once a step.
    config.mesh.data = max(1, variant.gpus // 64)
    config.mesh.fsdp = -1
    # Weights, moments and gradients in float32 would be 16 bytes a parameter: 131 GiB on each of 8 GPUs, of which 134 are
    # usable. Both moments are bfloat16 (beta2 = 0.95 moves the second by up to 5% a step, far above bfloat16's 0.4%). That
    # leaves memory to save, besides the input of each layer, keys, values, attention's output and the residual: the compiled
    # step peaks at 127 GiB.
    config.dtypes.m = "bf16"
    config.dtypes.v = "bf16"
    config.remat.policy = "custom"
    config.remat.tensors = "k=keep,v=keep,residual=keep,attention_out=keep,attention_lse=keep"
    if variant.int8:  # moments of one byte instead of two: queries are saved too
        config.dtypes.m = config.dtypes.v = "int8"
        config.remat.tensors = "q=keep,k=keep,v=keep,residual=keep,attention_out=keep,attention_lse=keep"
    elif variant.f32:  # 32.9 GiB less on the device: the sum of gradients over microbatches, which share the copies' cost
        config.dtypes.m = config.dtypes.v = "f32"
        # If attention's output is saved too, XLA overlaps less communication.
        config.remat.tensors = "k=keep,v=keep,residual=keep"
        config.optimizer.offload = "moments"
        if variant.gpus == 8:
            config.train.global_batch, config.train.grad_accum = 64, 8
    elif variant.gpus >= 64:
        # The state takes an eighth of that: outputs of matmuls are saved too, as far as they fit. By plan that is 16% more
        # tokens/s on 64 GPUs, at 126 GiB.
        config.remat.policy, config.remat.tensors = "auto", ""

    config.optimizer.lr = 1.5e-4
    config.optimizer.lr_min = 1.5e-5
    config.optimizer.warmup_steps = 2000
    config.optimizer.schedule = "cosine"

    config.eval.every_steps = 200
    config.eval.sequences = 64
    config.checkpoint.every_steps = 20
    config.log.every_steps = 1
    return config
