"""The effect of `sharding.zero` and `sharding.gather` on a step: gathered weights, and mesh axes of the sums at its end."""

import types
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from jaxtrain.config import MESH_AXES
from jaxtrain.sharding import make_placement
from jaxtrain.train.definition import numerics_of
from jaxtrain.zero import Zero, make_zero

MESH = {"mesh.data": 2, "mesh.fsdp": 4}
EXPERTS = {"mesh.fsdp": 2, "mesh.expert": 2, "mesh.seq": 2, "model.num_experts": 4, "sharding.rules.experts": "expert"}
WEIGHT, BIAS, EXPERT = ("layers", "embed", "mlp"), ("layers", "heads", "head_dim"), ("layers", "experts", "expert_embed", "mlp")

STAGES = [
    # One microbatch: the backward pass sums at once, except for stage 1.
    ({"sharding.zero": 0}, False, set(), set()),
    ({"sharding.zero": 1}, True, {"data", "fsdp"}, {"data", "fsdp"}),
    ({"sharding.zero": 2}, True, set(), set()),
    ({"sharding.zero": 3}, False, set(), set()),
    ({"sharding.gather": "step"}, True, {"data", "fsdp"}, {"data", "fsdp"}),
    # Several microbatches: axes that do not shard a weight are summed at the end.
    ({"sharding.zero": 0, "train.grad_accum": 2}, False, {"data", "fsdp"}, {"data", "fsdp"}),
    ({"sharding.zero": 2, "train.grad_accum": 2}, True, {"data"}, {"data", "fsdp"}),
    ({"sharding.zero": 3, "train.grad_accum": 2}, False, {"data"}, {"data", "fsdp"}),
    ({"sharding.gather": "forward", "train.grad_accum": 2}, False, {"data"}, {"data", "fsdp"}),
]


@pytest.mark.parametrize(("asked", "whole", "late_weight", "late_bias"), STAGES)
def test_a_stage_gathers_and_sums_as_its_name_says(asked: dict[str, Any], whole: bool, late_weight, late_bias):
    zero = zero_of(MESH | asked)
    assert zero.gather_once == whole
    for axes, late in ((WEIGHT, late_weight), (BIAS, late_bias)):
        assert summed(zero, axes) == (sorted({"data", "fsdp"} - late), sorted(late))


def test_experts_gradients_are_not_summed_over_the_axis_that_divides_them():
    zero = zero_of(EXPERTS | {"sharding.zero": 1})
    assert summed(zero, EXPERT) == ([], ["fsdp", "seq"])
    assert summed(zero, WEIGHT) == ([], ["expert", "fsdp", "seq"])


@pytest.mark.parametrize("asked", [asked for asked, *_ in STAGES])
@pytest.mark.parametrize("axes", [WEIGHT, BIAS])
def test_a_gradient_is_the_sum_of_all_devices_shares_at_every_stage(asked: dict[str, Any], axes: tuple):
    zero = zero_of(MESH | asked)
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


def zero_of(asked: dict[str, Any]) -> Zero:
    run = helpers.tiny(asked)
    return make_zero(run, make_placement(run, helpers.devices_of(run)), numerics_of(run))


def summed(zero: Zero, axes: tuple) -> tuple[list[str], list[str]]:
    """Return the mesh axes over which a gradient is summed in its layer, and those at the end of the step.
    They are read from the traced functions, without a compile.
    """

    def over(f: Any) -> list[str]:
        w = jax.ShapeDtypeStruct((2, *(8,) * (len(axes) - 1)), jnp.float32)
        found: list[str] = []

        def walk(jaxpr: Any) -> None:
            for eqn in jaxpr.eqns:
                if eqn.primitive.name in ("reduce_scatter", "psum"):
                    found.extend(a for a in eqn.params.get("axes", eqn.params.get("axis_name")) if a in MESH_AXES)
                for body in jaxprs_in_params(eqn.params):
                    walk(body)

        walk(jax.make_jaxpr(zero.placement.shard_map(f, (P(),), P()))(w).jaxpr)
        return sorted(found)

    return over(jax.grad(lambda w: zero.gather_weight(w, axes).sum())), over(
        lambda g: zero.reduce_gradients({"w": g}, {"w": axes})
    )
