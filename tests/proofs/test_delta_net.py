"""Gated delta nets in the stack of layers: arithmetic, layouts, counts, decoding and refusals.

campaign/test_delta_net_runs.py trains, resumes, samples and plans them in child processes.
"""

import helpers
import numpy as np
import pytest

from jaxtrain.train import parity

SMALL = {
    "model.family": "qwen3",
    "model.num_layers": 4,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.d_ff": 48,
    "model.qk_norm": True,
    "model.attention_pattern": "dg",
    "model.linear_key_heads": 2,
    "model.linear_value_heads": 4,
    "model.linear_key_dim": 8,
    "model.linear_value_dim": 8,
    "model.linear_conv": 4,
    "model.init_std": 0.2,  # a wrong mask or position changes the results
    # The norm of an output divides by its length. At a document's first token the length is |q . k| |v|, which may be nearly 0:
    # with the usual 1e-5 the norm would multiply the rounding of q by up to 300.
    "model.norm_eps": 1e-2,
    "data.seq_len": 32,
    "data.max_segments": 6,
    "train.global_batch": 4,
}
EXPERTS = {"model.family": "qwen3_moe", "model.num_experts": 4, "model.experts_per_token": 2, "model.d_ff": 24}
CHUNK, B, T, N, K, V = 16, 2, 90, 3, 8, 12
# Documents that fill a chunk, begin at its border, begin and end within one, and span several; then padding.
LENGTHS = [[16, 16, 3, 1, 40, 14], [1, 50, 5, 25, 4, 5]]
SEGMENTS = np.stack([np.repeat([1, 2, 3, 4, 5, 0], lengths) for lengths in LENGTHS]).astype(np.int32)


one_device = helpers.functools.cache(lambda: helpers.first_steps(helpers.tiny(SMALL), 2))


@pytest.mark.parametrize(
    "more",
    [
        {"mesh.fsdp": 2, "mesh.tensor": 2},
        {"mesh.fsdp": 2, "mesh.seq": 2, "parallel.context": "ulysses"},
        {"mesh.stage": 2, "train.grad_accum": 2},
        {"sharding.zero": 1, "mesh.fsdp": 2},
        {"parallel.scan_layers": False},
        {"train.grad_accum": 2, "train.accumulate": "layer", "mesh.fsdp": 2},
        {"remat.policy": "full"},
    ],
    ids=lambda more: "-".join(f"{k.rpartition('.')[2]}{v}" for k, v in more.items()),
)
def test_layouts_take_the_steps_of_one_device(more):
    """Loss, gradients and weights agree with one device's, within the parity tests' bounds for float32."""
    many = helpers.first_steps(helpers.tiny(SMALL | more), 2)
    compared = parity.compare(many, one_device(), parity.bounds(one_device(), None, 1, 1))
    assert not compared.wrong, compared.wrong
