"""Llama 2 7B from scratch, sequences of 4096 tokens; sized for one node of 8 GPUs.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:NousResearch/Llama-2-7b-hf \\
        --output=data/fineweb-edu-llama2.tok --validation=0.001
    ./run.sh --config=configs/llama2_7b.py --workdir=runs/llama2_7b

The command below searched for mesh, microbatch and remat. Without --search, it plans this config, for this or another machine:

    ./run.sh plan --config=configs/llama2_7b.py --topology=h200:8 --search --budget=600

On up to 512 GPUs, the batch is the same and the accumulation changes: --config=configs/llama2_7b.py:gpus=16
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg
from jaxtrain.models import preset


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Return the config. Variant: `gpus=8` (number of GPUs that shard the batch)."""
    variant = parse_arg(arg, gpus=8)
    config = default_config()
    config.model.update(preset("llama2_7b"))

    config.data.source = "data/fineweb-edu-llama2.tok"
    config.data.eval_source = "data/fineweb-edu-llama2.val.tok"
    config.data.tokenizer = "hf:NousResearch/Llama-2-7b-hf"  # this copy needs no accepted licence
    config.data.seq_len = 4096

    # 512 x 4096 = 2.1 M tokens per step. Llama 2 used 4 M, a step of twice the time on one node. Two sequences per GPU and
    # microbatch are 8192 tokens, enough rows for efficient matmuls. The planned peak is 42 GiB.
    config.train.global_batch = max(512, variant.gpus)
    config.train.grad_accum = max(1, 256 // variant.gpus)
    config.train.steps = 50_000  # 105 B tokens

    config.mesh.fsdp = -1  # weights, moments and batch are sharded over the GPUs of a node
    # Results of matmuls and attention calls are saved. Norms, rotary embedding and the activation function are recomputed.
    config.remat.policy = "auto"
    config.parallel.scan_layers = False  # faster and less memory than a loop over layers, with a longer compile

    config.optimizer.lr = 3e-4
    config.optimizer.lr_min = 3e-5
    config.optimizer.warmup_steps = 2000
    config.optimizer.schedule = "cosine"

    config.eval.every_steps = 500
    config.checkpoint.every_steps = 100
    config.log.every_steps = 1  # steps are long, so each has a line
    return config
