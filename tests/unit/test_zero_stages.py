"""What `sharding.zero` and `sharding.gather` ask of a step: gathered weights, and axes summed at its end. No compile."""

from typing import Any

import helpers
import jax.numpy as jnp
import pytest

from jaxtrain.sharding import make_placement
from jaxtrain.step import numerics_of
from jaxtrain.zero import stage

MESH = {"mesh.data": 2, "mesh.fsdp": 4}
EXPERTS = {"mesh.fsdp": 2, "mesh.expert": 2, "mesh.seq": 2, "model.num_experts": 4, "sharding.rules.experts": "expert"}
WEIGHT, BIAS, EXPERT = ("layers", "embed", "mlp"), ("layers", "heads", "head_dim"), ("layers", "experts", "expert_embed", "mlp")


@pytest.mark.parametrize(
    ("asked", "whole", "late_weight", "late_bias"),
    [
        # One microbatch: the backward pass sums at once, but for stage 1.
        ({"sharding.zero": 0}, False, (), ()),
        ({"sharding.zero": 1}, True, ("data", "fsdp"), ("data", "fsdp")),
        ({"sharding.zero": 2}, True, (), ()),
        ({"sharding.zero": 3}, False, (), ()),
        ({"sharding.gather": "step"}, True, ("data", "fsdp"), ("data", "fsdp")),
        # Several: axes that do not shard a weight are summed at the end.
        ({"sharding.zero": 0, "train.grad_accum": 2}, False, ("data", "fsdp"), ("data", "fsdp")),
        ({"sharding.zero": 2, "train.grad_accum": 2}, True, ("data",), ("data", "fsdp")),
        ({"sharding.zero": 3, "train.grad_accum": 2}, False, ("data",), ("data", "fsdp")),
        ({"sharding.gather": "forward", "train.grad_accum": 2}, False, ("data",), ("data", "fsdp")),
    ],
)
def test_a_stage_gathers_and_sums_as_its_name_says(asked: dict[str, Any], whole: bool, late_weight, late_bias):
    held = stage_of(MESH | asked)
    assert held.whole == whole
    assert (held.late(WEIGHT), held.late(BIAS)) == (late_weight, late_bias)


def test_experts_gradients_are_not_summed_over_the_axis_that_divides_them():
    held = stage_of(EXPERTS | {"sharding.zero": 1})
    assert {*held.late(EXPERT)} == {"fsdp", "seq"}
    assert {*held.late(WEIGHT)} == {"fsdp", "expert", "seq"}


def stage_of(asked: dict[str, Any]):
    run = helpers.tiny(asked)
    placement = make_placement(run, helpers.devices_of(run))
    return stage(run, placement, numerics_of(run), jnp.dtype("float32"), eight={}, exact={}, trained={}, adds=False)
