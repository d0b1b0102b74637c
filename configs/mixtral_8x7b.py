"""Mixtral 8x7B from scratch, sequences of 8192 tokens; sized for one node of 8 GPUs with 141 GB each.

    hf download HuggingFaceFW/fineweb-edu --repo-type=dataset --include 'sample/100BT/*' --local-dir=corpus
    ./run.sh data prepare --input='corpus/**/*.parquet' --tokenizer=hf:mistralai/Mixtral-8x7B-v0.1 \\
        --output=data/fineweb-edu-mixtral.tok --validation=0.001
    ./run.sh --config=configs/mixtral_8x7b.py --workdir=runs/mixtral_8x7b

The plan for this or another machine, and a search for a better mesh:

    ./run.sh plan --config=configs/mixtral_8x7b.py --topology=h200:8
    ./run.sh plan --config=configs/mixtral_8x7b.py --topology=h200:8 --search --budget=600

With one expert per GPU, experts' matmuls can be in FP8 (docs/parallelism.md): --config.precision=fp8

On 16 to 256 GPUs, the batch is the same and the accumulation changes: --config=configs/mixtral_8x7b.py:gpus=16
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg
from jaxtrain.models import preset

GPUS = 8  # number of GPUs without the variant gpus=N


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Return the config. Variant: `gpus=8` (number of GPUs that shard the batch)."""
    variant = parse_arg(arg, gpus=GPUS)
    config = default_config()
    config.model.update(preset("mixtral_8x7b"))

    config.data.source = "data/fineweb-edu-mixtral.tok"
    config.data.eval_source = "data/fineweb-edu-mixtral.val.tok"
    config.data.tokenizer = "hf:mistralai/Mixtral-8x7B-v0.1"  # requires accepting a licence
    config.data.seq_len = 8192

    # 256 x 8192 = 2.1 M tokens per step, with one sequence per GPU and microbatch. With even loads, an expert has 16,384 rows
    # from all GPUs.
    config.train.global_batch = max(256, variant.gpus)
    config.train.grad_accum = max(1, 256 // variant.gpus)
    config.train.steps = 50_000  # 105 B tokens

    # Each GPU of a node has one complete expert of every layer. For a layer, a GPU sends 0.15 GB of tokens to experts and the
    # same back, while fsdp would gather weights of 2.8 GB. The other 1.6 B of the 46.7 B parameters are sharded over the same
    # GPUs.
    config.mesh.expert = 8
    # Weights, moments and gradients in float32 are 16 bytes a parameter, 87 GiB on each of 8 GPUs. Gradients are added to their
    # sum layer by layer, because all gradients of a microbatch would be 22 GiB more. That leaves memory to save the results of
    # experts' matmuls, which makes the planned step 11% faster. The planned peak is 129 GiB.
    config.train.accumulate = "layer"
    config.remat.policy = "auto"

    config.optimizer.lr = 3e-4
    config.optimizer.lr_min = 3e-5
    config.optimizer.warmup_steps = 2000
    config.optimizer.schedule = "cosine"

    config.eval.every_steps = 500
    config.eval.sequences = 64
    config.checkpoint.every_steps = 100
    config.log.every_steps = 1  # steps are long, so each has a line
    return config
