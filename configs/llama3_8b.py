"""Llama 3 8B from scratch, sequences of 8192 tokens; sized for one node of 8 GPUs.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:NousResearch/Meta-Llama-3-8B \\
        --output=data/fineweb-edu-llama3.tok --validation=0.001
    ./run.sh --config=configs/llama3_8b.py --workdir=runs/llama3_8b

Half the layers, to measure on a single GPU (all of 8B in float32 with moments and gradients is 120 GiB):

    ./run.sh --config=configs/llama3_8b.py:half --config.data.source=synthetic --config.train.steps=20

Mesh, microbatch and remat are what this search found; to see the plan of this or any other machine, leave out --search:

    ./run.sh plan --config=configs/llama3_8b.py --topology=h200:8 --search --budget=600

Another number of GPUs keeps the batch and changes the accumulation: --config=configs/llama3_8b.py:gpus=16

Long documents, each sequence over 8 GPUs (docs/parallelism.md says how): 131,072 tokens, or 1,048,576. Both go on from a run
with 8192 tokens, on a file of documents that are long themselves.

    ./run.sh --config=configs/llama3_8b.py:long --config.init.from=runs/llama3_8b --workdir=runs/llama3_8b_long
    ./run.sh plan --config=configs/llama3_8b.py:1m --topology=h200:8
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg
from jaxtrain.models import preset


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Variants: `half` (16 layers, one GPU, a small batch), `gpus=8` (how many GPUs the batch is divided over), `long` and `1m`
    (131,072 and 1,048,576 tokens, on 8 GPUs)."""
    variant = parse_arg(arg, **{"half": False, "gpus": 8, "long": False, "1m": False})
    config = default_config()
    config.model.update(preset("llama3_8b"))

    config.data.source = "data/fineweb-edu-llama3.tok"
    config.data.eval_source = "data/fineweb-edu-llama3.val.tok"
    config.data.tokenizer = "hf:NousResearch/Meta-Llama-3-8B"  # the original asks for a licence click first
    config.data.seq_len = 8192

    # 256 x 8192 = 2.1 M tokens a step, one sequence a GPU at a time: 8192 rows keep every matmul busy. On each of 8 H200s the
    # compiled step takes 50 GiB by plan, so it fits GPUs with 80 GB too.
    config.train.global_batch = max(256, variant.gpus)
    config.train.grad_accum = max(1, 256 // variant.gpus)
    config.train.steps = 50_000  # 105 B tokens, about once through the 100BT sample

    config.mesh.fsdp = -1  # weights, moments and batch are split over the GPUs of a node
    # Whatever costs a GEMM or an attention call is kept, where there is room for it; norms, rotary and the gate's product are
    # computed again.
    config.remat.policy = "auto"
    # Layers one by one are faster by plan than a loop over layers, at little more memory. They compile three times as long.
    config.parallel.scan_layers = False

    config.optimizer.lr = 3e-4
    config.optimizer.lr_min = 3e-5
    config.optimizer.warmup_steps = 2000
    config.optimizer.schedule = "cosine"

    config.eval.every_steps = 500
    config.eval.sequences = 64
    config.checkpoint.every_steps = 100
    config.log.every_steps = 1  # a step takes long enough to deserve its line

    if variant.long or variant["1m"]:
        config.parallel.scan_layers = True  # a layer has 8 steps of a ring: 32 layers of them compile for longer than they gain
        # One sequence at a time over all 8 GPUs: 16,384 or 131,072 tokens on each.
        config.data.seq_len = 1_048_576 if variant["1m"] else 131_072
        # Of the longest, one is a step: 2.1 M tokens otherwise, and no sum of gradients to hold.
        config.train.global_batch = config.train.grad_accum = 1 if variant["1m"] else 16
        config.train.steps = 2000
        config.eval.sequences = 8
        config.mesh.seq = 8
        config.parallel.context = "ring"  # its traffic hides behind attention, and any number of GPUs can take part
        # Documents of 512 tokens and more on average; of 16,384 for 1m. Each costs cuDNN's backward pass 1028 bytes x heads x
        # tokens of a chunk; it runs in parts, so that they are not all there at once.
        config.data.max_segments = 64 if variant["1m"] else 256
        # The long wavelengths stretched as in Llama 3.1, which has 8 for 131,072.
        config.model.rope_scaling = "llama3"
        config.model.rope_factor = 128.0 if variant["1m"] else 8.0
        config.optimizer.lr = 3e-5
        config.optimizer.lr_min = 3e-6
        config.optimizer.warmup_steps = 100
    if variant["1m"]:
        # Attention is nine tenths of the step and must not run twice; its outputs, 32 GiB, wait on the host meanwhile.
        config.remat.policy = "custom"
        config.remat.tensors = "attention_out=offload,attention_lse=keep"

    if variant.half:
        config.model.num_layers = 16
        config.train.global_batch = 8
        config.train.grad_accum = 8
        config.optimizer.warmup_steps = 10  # so that a handful of steps is a valid run
        config.eval.every_steps = 0
        config.data.eval_source = ""
        config.sample.max_tokens = 0
    return config
