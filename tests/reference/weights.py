"""Random weights of a Hugging Face model by names and shapes alone: the same ones in every Python. numpy only."""

import zlib

import numpy as np


def random_weight(name, shape):
    """f32. Wide enough that scores and logits reach their caps; norms and biases too, or they could be left out unnoticed."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if "norm" in name:
        return (0.6 + 0.3 * rng.standard_normal(shape)).astype(np.float32)
    return ((0.3 if "bias" in name else 0.14) * rng.standard_normal(shape)).astype(np.float32)


def random_tokens(vocab, shape=(2, 32), seed=0):
    """int32 ids."""
    return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)
