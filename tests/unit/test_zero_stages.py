"""The effect of `sharding.zero` and `sharding.gather` on a step: gathered weights, and gradients."""

import types
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.models.zero import make_zero
from jaxtrain.sharding import make_placement

MESH = {"mesh.data": 2, "mesh.fsdp": 4}
WEIGHT, BIAS = ("layers", "embed", "mlp"), ("layers", "heads", "head_dim")

STAGES = [  # and whether weights are gathered once a step
    ({"sharding.zero": 0}, False),
    ({"sharding.zero": 1}, True),
    ({"sharding.zero": 2}, True),
    ({"sharding.zero": 3}, False),
    ({"sharding.gather": "step"}, True),
    ({"sharding.zero": 0, "train.grad_accum": 2}, False),
    ({"sharding.zero": 2, "train.grad_accum": 2}, True),
    ({"sharding.zero": 3, "train.grad_accum": 2}, False),
]


@pytest.mark.parametrize(("asked", "whole"), STAGES)
@pytest.mark.parametrize("axes", [WEIGHT, BIAS])
def test_a_gradient_is_the_sum_of_all_devices_shares_at_every_stage(asked: dict[str, Any], whole: bool, axes: tuple):
    """proofs/test_zero.py has what a stage communicates."""
    run = helpers.tiny(MESH | asked)
    zero = make_zero(run.sharding, make_placement(run, helpers.devices_of(run)))
    assert zero.gather_once == whole
    p = zero.placement
    rng = np.random.default_rng(0)
    w, shares = rng.standard_normal((2, 8, 4)).astype(np.float32), rng.integers(-8, 9, (8, 2, 8, 4)).astype(np.float32)
    definition: Any = types.SimpleNamespace(axes={"w": axes}, exact={"w": False})

    def local(w, share):
        base, copies = zero.step_weights({"w": w}, definition, {"w": False})

        def loss(base):
            used = zero.gather_weight(zero.microbatch_weights(base, copies, base)["w"], axes)
            return (used * share[0]).sum(), used[None]

        grads, used = jax.grad(loss, has_aux=True)(base)
        return zero.reduce_gradients(grads, definition.axes)["w"], used

    of_device = P(p.all_axes)
    grad, used = jax.jit(p.shard_map(local, (p.spec(axes), of_device), (p.spec(axes), of_device)))(w, shares)
    np.testing.assert_array_equal(used, np.broadcast_to(w, (8, *w.shape)))
    np.testing.assert_array_equal(grad, shares.sum(0))
