"""The shape of Llama 3.2 1B from scratch, sequences of 8192 tokens; from one GPU up.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:NousResearch/Meta-Llama-3-8B \\
        --output=data/fineweb-edu-llama3.tok --validation=0.001
    ./run.sh --config=configs/llama3_1b.py --workdir=runs/llama3_1b

Mesh, microbatch and remat are what this search found; to see the plan of this or any other machine, leave out --search:

    ./run.sh plan --config=configs/llama3_1b.py --topology=h200:8 --search --budget=600

On one GPU, the same batch with more accumulation:

    ./run.sh --config=configs/llama3_1b.py:gpus=1 --workdir=runs/llama3_1b
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg
from jaxtrain.models import preset


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Variant `gpus=8`: how many GPUs the batch is divided over."""
    variant = parse_arg(arg, gpus=8)
    config = default_config()
    config.model.update(preset("llama3.2_1b"))

    # Llama 3.2 gives text the same ids as Llama 3, so all sizes train from one token file. To start from published weights
    # with their own special tokens, prepare with --tokenizer=hf:unsloth/Llama-3.2-1B and name it here.
    config.data.source = "data/fineweb-edu-llama3.tok"
    config.data.eval_source = "data/fineweb-edu-llama3.val.tok"
    config.data.tokenizer = "hf:NousResearch/Meta-Llama-3-8B"
    config.data.seq_len = 8192

    # 128 x 8192 = 1 M tokens a step: a small model gains little from more. Four sequences a GPU at a time: 40 GiB by plan.
    config.train.global_batch = max(128, variant.gpus)
    config.train.grad_accum = max(1, 32 // variant.gpus)
    config.train.steps = 20_000  # 21 B tokens, about the 20 a parameter that are compute-optimal

    config.mesh.fsdp = -1
    # Whatever costs a GEMM or an attention call is kept; norms, rotary and the gate's product are computed again.
    config.remat.policy = "auto"
    config.parallel.scan_layers = False  # faster than a loop over layers, and less memory; compiles longer

    # The weights a run ends with are the better for the decay, and a run that is to go on starts from before it:
    # warmup-stable-decay allows both.
    config.optimizer.schedule = "wsd"
    config.optimizer.lr = 6e-4
    config.optimizer.lr_min = 6e-5
    config.optimizer.warmup_steps = 2000

    config.eval.every_steps = 500
    config.eval.sequences = 256
    config.checkpoint.every_steps = 500
    return config
