"""Random weights of a Hugging Face model, derived from names and shapes alone: equal in every Python. Needs only NumPy."""

import zlib

import numpy as np

DOCUMENTS = (20, 12)  # tokens of each document whose loss is differentiated

# Rotary settings of transformers' "yarn" form, on heads of 16 and a base of 3000.
YARN = (
    {"factor": 4.0, "original_max_position_embeddings": 2048},
    {"factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    {"factor": 2.5, "original_max_position_embeddings": 512, "beta_fast": 8.0, "beta_slow": 2.0},
    {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7},
    {"factor": 4.0, "original_max_position_embeddings": 2048, "attention_factor": 1.25, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"factor": 1.0, "original_max_position_embeddings": 2048},
    # At both bounds the same pair, and beyond the last pair: at 2 turns of 12 tokens, and at 1 turn of a million.
    {"factor": 4.0, "original_max_position_embeddings": 12, "beta_fast": 2.0, "beta_slow": 1.95},
    {"factor": 4.0, "original_max_position_embeddings": 1_000_000_000_000, "truncate": False},
)


def random_weight(name, shape):
    """Return float32 weights, so large that scores and logits reach their caps and no norm or bias can be
    left out unnoticed.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if "norm" in name:
        return (0.6 + 0.3 * rng.standard_normal(shape)).astype(np.float32)
    return ((0.3 if "bias" in name else 0.14) * rng.standard_normal(shape)).astype(np.float32)


def random_tokens(vocab, shape=(2, 32), seed=0):
    """Return int32 token ids."""
    return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)
