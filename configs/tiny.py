"""A small model that learns Python from Python: the standard library's own source, byte by byte, on a CPU in minutes.

./run.sh
./run.sh --config=configs/tiny.py --config.train.steps=2000 --workdir=runs/longer
JAX_NUM_CPU_DEVICES=8 ./run.sh --config=configs/tiny.py --config.mesh.tensor=2
"""

import ml_collections

from jaxtrain.config import default_config, parse_arg


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Return the config. It has no variants."""
    parse_arg(arg)
    config = default_config()

    # CPUs emulate bfloat16 and are slower in it. In float32, runs on different meshes also agree to more digits.
    config.precision = "f32"

    config.model.num_layers = 4
    config.model.d_model = 128
    config.model.num_heads = 4
    config.model.num_kv_heads = 2  # grouped-query attention, so that the smallest run uses the same code as large runs
    config.model.d_ff = 384
    config.model.vocab_size = 264  # 256 bytes and the special tokens, padded to a multiple of 8 for sharding

    # At this size, memory bandwidth limits a CPU: recomputing activations is faster than saving them.
    config.remat.policy = "full"

    config.data.source = "stdlib"
    config.data.tokenizer = "byte"
    config.data.seq_len = 128

    config.train.steps = 700
    config.train.global_batch = 16

    # Small models are stable at a high learning rate, and a short run needs one.
    config.optimizer.lr = 4e-3
    config.optimizer.lr_min = 1e-4
    config.optimizer.warmup_steps = 50

    config.sample.prompt = "def "
    config.sample.temperature = 1.0  # below 1, a model this small often writes only spaces, the likeliest byte

    config.eval.every_steps = 200
    config.checkpoint.every_steps = 200
    return config
