"""Llama 3 70B from scratch, sequences of 8192 tokens, on one or more nodes of 8 GPUs with 141 GB each.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:NousResearch/Meta-Llama-3-8B \\
        --output=data/fineweb-edu-llama3.tok --validation=0.001
    ./run.sh --config=configs/llama3_70b.py --workdir=runs/llama3_70b

A plan without the GPUs, and a search for a faster mesh, microbatch and remat:

    ./run.sh plan --config=configs/llama3_70b.py --topology=h200:8
    ./run.sh plan --config=configs/llama3_70b.py --topology=h200:8 --search

Moments are bfloat16. There are two variants for one node. int8 stores moments in 8-bit blocks, so there is memory to save
queries too. f32 stores float32 moments in host memory, so there is memory for a batch of 64 by accumulation. docs/memory.md
compares all three dtypes:

    --config=configs/llama3_70b.py:int8
    --config=configs/llama3_70b.py:f32

The variant gpus=N chooses batch, mesh and remat for N GPUs (docs/evidence/layouts.md has the plan of each number of GPUs):

    --config=configs/llama3_70b.py:gpus=64
"""

import ml_collections

from jaxtrain.config import ConfigError, Problem, default_config, parse_arg
from jaxtrain.models import preset

GPUS = 8  # number of GPUs without the variant gpus=N


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Return the config. Variants: `gpus=8` (batch, mesh and remat for that many GPUs), `int8` and `f32` (moments)."""
    variant = parse_arg(arg, gpus=GPUS, int8=False, f32=False)
    if variant.gpus & (variant.gpus - 1):
        below = 1 << variant.gpus.bit_length() - 1
        fix = f"Fix: --config=configs/llama3_70b.py:gpus={below}, or {2 * below}."
        raise ConfigError([Problem("--config=FILE:gpus", variant.gpus, "must be a power of two", fix)])
    config = default_config()
    config.model.update(preset("llama3_70b"))

    config.data.source = "data/fineweb-edu-llama3.tok"
    config.data.eval_source = "data/fineweb-edu-llama3.val.tok"
    config.data.tokenizer = "hf:NousResearch/Meta-Llama-3-8B"  # for all Llama 3 sizes; this copy needs no accepted licence
    config.data.seq_len = 8192

    # One sequence per GPU and microbatch. From 16 GPUs on, a step has 256 x 8192 = 2.1 M tokens by accumulation. 8 GPUs have no
    # memory for a sum of gradients in addition to a microbatch's gradients. So a step has 8 x 8192 = 65 k tokens, which suits
    # continued training (init.from). For a larger batch, at 131.7 GiB and 6% more time per token, set train.global_batch=64,
    # train.grad_accum=8, train.accumulate=layer and remat.tensors=k=keep,v=keep,residual=keep.
    config.train.global_batch = max(256, variant.gpus) if variant.gpus >= 16 else variant.gpus
    config.train.grad_accum = config.train.global_batch // variant.gpus
    config.train.steps = 50_000  # 105 B tokens

    # fsdp is over all GPUs of up to 8 nodes: a node with a whole replica has no memory for two sets of gradients. Rings over
    # more nodes have too much latency, 24 us per node. So each group of 64 GPUs has a replica, and gradients are summed over
    # the groups once per step.
    config.mesh.data = max(1, variant.gpus // 64)
    config.mesh.fsdp = -1
    # Weights, moments and gradients in float32 would be 16 bytes a parameter: 131 GiB on each of 8 GPUs, which have 134 usable
    # GiB. So both moments are bfloat16. That is precise enough: beta2 = 0.95 changes the second moment by up to 5% per step,
    # and bfloat16 rounds to 0.4%. The remaining memory is enough to save keys, values, attention's output and the residual, in
    # addition to the input of each layer. The compiled step has a peak of 127 GiB.
    config.dtypes.m = "bf16"
    config.dtypes.v = "bf16"
    config.remat.policy = "custom"
    config.remat.tensors = "k=keep,v=keep,residual=keep,attention_out=keep,attention_lse=keep"
    if variant.int8:  # moments have one byte instead of two, so queries are saved too
        config.dtypes.m = config.dtypes.v = "int8"
        config.remat.tensors = "q=keep,k=keep,v=keep,residual=keep,attention_out=keep,attention_lse=keep"
    elif variant.f32:  # 32.9 GiB less on the device, enough for accumulation, which copies moments once per 8 microbatches
        config.dtypes.m = config.dtypes.v = "f32"
        # If attention's output is saved too, XLA overlaps less communication.
        config.remat.tensors = "k=keep,v=keep,residual=keep"
        config.optimizer.offload = "moments"
        if variant.gpus == 8:
            config.train.global_batch, config.train.grad_accum = 64, 8
    elif variant.gpus >= 64:
        # The state on each GPU is an eighth of that on one node, so outputs of matmuls are saved as far as they fit. On 64
        # GPUs, the plan has 16% more tokens/s, at 126 GiB.
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
