"""Llama 3 8B from scratch, sequences of 8192 tokens; sized for one node of 8 GPUs.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:NousResearch/Meta-Llama-3-8B \\
        --output=data/fineweb-edu-llama3.tok --validation=0.001
    ./run.sh --config=configs/llama3_8b.py --workdir=runs/llama3_8b

Half of the layers, for measurements on one GPU (all of 8B in float32 with moments and gradients is 120 GiB):

    ./run.sh --config=configs/llama3_8b.py:half --config.data.source=synthetic --config.train.steps=20

The command below searches for mesh, microbatch and remat. Without --search, it plans this config, for this or another machine:

    ./run.sh plan --config=configs/llama3_8b.py --topology=h200:8 --search

On up to 256 GPUs, the batch is the same and the accumulation changes: --config=configs/llama3_8b.py:gpus=16

Sequences of 131,072 or 1,048,576 tokens, each over 8 GPUs (docs/parallelism.md). Both variants continue from the weights of a
run with 8192 tokens, and need token files of long documents.

    ./run.sh --config=configs/llama3_8b.py:long --config.init.from=runs/llama3_8b --workdir=runs/llama3_8b_long
    ./run.sh plan --config=configs/llama3_8b.py:1m --topology=h200:8
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg
from jaxtrain.models import preset


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Return the config. Variants: `half` (16 layers, one GPU, a small batch), `gpus=8` (number of GPUs that shard the batch),
    `long` and `1m` (sequences of 131,072 and 1,048,576 tokens, on 8 GPUs)."""
    variant = parse_arg(arg, **{"half": False, "gpus": 8, "long": False, "1m": False})
    config = default_config()
    config.model.update(preset("llama3_8b"))

    config.data.source = "data/fineweb-edu-llama3.tok"
    config.data.eval_source = "data/fineweb-edu-llama3.val.tok"
    config.data.tokenizer = "hf:NousResearch/Meta-Llama-3-8B"  # this copy needs no accepted licence
    config.data.seq_len = 8192

    # 256 x 8192 = 2.1 M tokens per step, with one sequence per GPU and microbatch: 8192 rows are enough for efficient matmuls.
    # The plan needs 50 GiB on each of 8 H200s, so the step also fits on GPUs with 80 GB.
    config.train.global_batch = max(256, variant.gpus)
    config.train.grad_accum = max(1, 256 // variant.gpus)
    config.train.steps = 50_000  # 105 B tokens, about once through the 100BT sample

    config.mesh.fsdp = -1  # weights, moments and batch are sharded over the GPUs of a node
    # Results of matmuls and attention calls are saved as far as they fit. Norms, rotary embedding and the activation function
    # are recomputed.
    config.remat.policy = "auto"
    # In plans, unrolled layers are faster than a loop over layers, with little more memory and three times the compile time.
    config.parallel.scan_layers = False

    config.optimizer.lr = 3e-4
    config.optimizer.lr_min = 3e-5
    config.optimizer.warmup_steps = 2000
    config.optimizer.schedule = "cosine"

    config.eval.every_steps = 500
    config.eval.sequences = 64
    config.checkpoint.every_steps = 100
    config.log.every_steps = 1  # steps are long, so each has a line

    if variant.long or variant["1m"]:
        config.parallel.scan_layers = True  # a layer has 8 ring steps, so 32 unrolled layers would compile too long
        # A microbatch is one sequence over all 8 GPUs: 16,384 or 131,072 tokens on each.
        config.data.seq_len = 1_048_576 if variant["1m"] else 131_072
        # A step has 16 sequences of 131,072 tokens (2.1 M tokens), or one sequence of 1,048,576 tokens without accumulation.
        config.train.global_batch = config.train.grad_accum = 1 if variant["1m"] else 16
        config.train.steps = 2000
        config.eval.sequences = 8
        config.mesh.seq = 8
        config.parallel.context = "ring"  # its communication overlaps with attention, on any number of GPUs
        # Enough for documents of 512 tokens on average; 16,384 for 1m. For each document, cuDNN's backward pass needs workspace
        # of 1028 bytes x heads x tokens of a chunk. It runs in parts, so that the workspaces do not exist at the same time.
        config.data.max_segments = 64 if variant["1m"] else 256
        # Long wavelengths are stretched as in Llama 3.1, whose factor is 8 for 131,072 tokens.
        config.model.rope_scaling = "llama3"
        config.model.rope_factor = 128.0 if variant["1m"] else 8.0
        config.optimizer.lr = 3e-5
        config.optimizer.lr_min = 3e-6
        config.optimizer.warmup_steps = 100
    if variant["1m"]:
        # Attention is nine tenths of the step, so it is not recomputed. Its outputs, 32 GiB, are offloaded to host memory.
        config.remat.policy = "custom"
        config.remat.tensors = "attention_out=offload,attention_lse=keep"

    if variant.half:
        config.model.num_layers = 16
        config.train.global_batch = 8
        config.train.grad_accum = 8
        config.optimizer.warmup_steps = 10  # a short run for measurements must be longer than the warmup
        config.eval.every_steps = 0
        config.data.eval_source = ""
        config.sample.max_tokens = 0
    return config
