"""The shape of Llama 3.2 1B from scratch, sequences of 8192 tokens; from one GPU up.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:NousResearch/Meta-Llama-3-8B \\
        --output=data/fineweb-edu-llama3.tok --validation=0.001
    ./run.sh --config=configs/llama3_1b.py --workdir=runs/llama3_1b

The command below searched for mesh, microbatch and remat. Without --search, it plans this config, for this or another machine:

    ./run.sh plan --config=configs/llama3_1b.py --topology=h200:8 --search --budget=600

One GPU has the same batch with more accumulation:

    ./run.sh --config=configs/llama3_1b.py:gpus=1 --workdir=runs/llama3_1b
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg
from jaxtrain.models import preset


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Return the config. Variant: `gpus=8` (number of GPUs that shard the batch)."""
    variant = parse_arg(arg, gpus=8)
    config = default_config()
    config.model.update(preset("llama3.2_1b"))

    # The tokenizers of Llama 3.2 and Llama 3 give text the same ids, so all sizes train from one token file. To start from
    # published weights with their own special tokens, prepare with --tokenizer=hf:unsloth/Llama-3.2-1B and set that tokenizer
    # here.
    config.data.source = "data/fineweb-edu-llama3.tok"
    config.data.eval_source = "data/fineweb-edu-llama3.val.tok"
    config.data.tokenizer = "hf:NousResearch/Meta-Llama-3-8B"
    config.data.seq_len = 8192

    # 128 x 8192 = 1 M tokens per step: a small model gains little from a larger batch. With four sequences per GPU and
    # microbatch, the planned peak is 40 GiB.
    config.train.global_batch = max(128, variant.gpus)
    config.train.grad_accum = max(1, 32 // variant.gpus)
    config.train.steps = 20_000  # 21 B tokens, about 20 per parameter, which is compute-optimal

    config.mesh.fsdp = -1
    # Results of matmuls and attention calls are saved. Norms, rotary embedding and the activation function are recomputed.
    config.remat.policy = "auto"
    config.parallel.scan_layers = False  # faster and less memory than a loop over layers, with a longer compile

    # Warmup-stable-decay: the decay improves the final weights, and a longer run can resume from a checkpoint before the decay.
    config.optimizer.schedule = "wsd"
    config.optimizer.lr = 6e-4
    config.optimizer.lr_min = 6e-5
    config.optimizer.warmup_steps = 2000

    config.eval.every_steps = 500
    config.eval.sequences = 256
    config.checkpoint.every_steps = 500
    return config
