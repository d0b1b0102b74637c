"""Llama 2 7B from scratch, sequences of 4096 tokens; sized for one node of 8 GPUs.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:NousResearch/Llama-2-7b-hf \\
        --output=data/fineweb-edu-llama2.tok --validation=0.001
    ./run.sh --config=configs/llama2_7b.py --workdir=runs/llama2_7b

Mesh, microbatch and remat are what this search found; to see the plan of this or any other machine, leave out --search:

    ./run.sh plan --config=configs/llama2_7b.py --topology=h200:8 --search --budget=600

Another number of GPUs keeps the batch and changes the accumulation: --config=configs/llama2_7b.py:gpus=16
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg
from jaxtrain.models import preset


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Variant `gpus=8`: how many GPUs the batch is divided over."""
    variant = parse_arg(arg, gpus=8)
    config = default_config()
    config.model.update(preset("llama2_7b"))

    config.data.source = "data/fineweb-edu-llama2.tok"
    config.data.eval_source = "data/fineweb-edu-llama2.val.tok"
    config.data.tokenizer = "hf:NousResearch/Llama-2-7b-hf"  # the original asks for a licence click first
    config.data.seq_len = 4096

    # 512 x 4096 = 2.1 M tokens a step; Llama 2 used 4 M, which one node would take twice as long for.
    # Two sequences a GPU at a time are 8192 tokens, enough rows to keep every matmul busy. The step peaks at 42 GiB by plan.
    config.train.global_batch = max(512, variant.gpus)
    config.train.grad_accum = max(1, 256 // variant.gpus)
    config.train.steps = 50_000  # 105 B tokens

    config.mesh.fsdp = -1  # weights, moments and batch are split over the GPUs of a node
    # Whatever costs a GEMM or an attention call is kept; norms, rotary and the gate's product are computed again.
    config.remat.policy = "auto"
    config.parallel.scan_layers = False  # faster than a loop over layers, and less memory; compiles longer

    config.optimizer.lr = 3e-4
    config.optimizer.lr_min = 3e-5
    config.optimizer.warmup_steps = 2000
    config.optimizer.schedule = "cosine"

    config.eval.every_steps = 500
    config.checkpoint.every_steps = 100
    config.log.every_steps = 1  # a step takes long enough to deserve its line
    return config
