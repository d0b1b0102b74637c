"""Moments in host memory: steps and checkpoints as without offload. proofs/test_plan_memory.py has the plan's figures."""

from typing import Any

import helpers
import jax
import numpy as np
import pytest
from states import ALLOWED, SIZES, assert_same, resumed, save, trained

from jaxtrain.train import compiler, memory, state

OFFLOAD = {"optimizer.offload": "moments"}
SPLIT = {"mesh.fsdp": 2, "mesh.tensor": 2, "train.grad_accum": 2}


def moments(current: Any) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(current)
    return {jax.tree_util.keystr(path): a for path, a in leaves if state.is_moment(path)}


@pytest.fixture(scope="module")
def both() -> dict[str, Any]:
    """Return the states after two clipped steps, without offload and with it. The first moments are in int8 blocks, the second
    in float32.
    """
    # every gradient's norm is above clip_norm, so every step clips
    mixed = SIZES | SPLIT | {"dtypes.m": "int8", "dtypes.v": "f32", "optimizer.clip_norm": 0.1}
    return {name: trained(helpers.tiny(mixed | changes)) for name, changes in (("none", {}), ("moments", OFFLOAD))}


def test_moments_rest_on_the_host(both):
    run = helpers.tiny(SIZES | SPLIT | OFFLOAD | {"dtypes.m": "int8", "dtypes.v": "f32"})
    for current in (both["moments"], helpers.fresh_state(run)):
        assert {a.sharding.memory_kind for a in moments(current).values()} == {"pinned_host"}
        assert {a.sharding.memory_kind for a in jax.tree.leaves(current.params)} == {"device"}
        assert current.optimizer[0].count.sharding.memory_kind == "device"


def test_numbers_are_the_same_to_the_bit(both):
    assert_same(*(state.to_tensors(both[name]) for name in ("moments", "none")))
    assert int(both["moments"].optimizer[0].count) == 2


def test_checkpoints_do_not_tell_where_moments_rest(both, tmp_path):
    run = helpers.tiny(SIZES | SPLIT | OFFLOAD | {"dtypes.m": "int8", "dtypes.v": "f32"})
    tensors = save(run, both["moments"], tmp_path)
    for changes in ({}, OFFLOAD):
        current = resumed(helpers.tiny(SIZES | {"dtypes.m": "int8", "dtypes.v": "f32"} | changes), tmp_path)
        kinds = {a.sharding.memory_kind for a in moments(current).values()}
        assert kinds == {"pinned_host" if changes else "device"}
        assert_same(state.to_tensors(current), tensors)
    changed = resumed(helpers.tiny(SIZES | OFFLOAD | ALLOWED), tmp_path)  # m is in float32 from here on
    assert {a.dtype.name for a in moments(changed).values()} == {"float32"}
    assert {a.sharding.memory_kind for a in moments(changed).values()} == {"pinned_host"}


def test_memory_is_counted_where_it_is():
    program = helpers.program(helpers.tiny(SIZES | SPLIT | OFFLOAD | {"dtypes.m": "int8", "dtypes.v": "f32"}))
    resting = compiler.local_bytes(program.state.optimizer)
    everything = compiler.local_bytes((program.state, program.batch))
    assert compiler.local_bytes(compiler.on_device(program)) == pytest.approx(everything - resting, abs=8)
    whole = sum(np.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(program.state)) / 2**30
    with pytest.raises(memory.OutOfMemory, match="Offloaded arrays take "):
        memory.check_host_memory(program, 1.01 * whole)
    memory.check_host_memory(program, 2 * whole)
    with pytest.raises(memory.OutOfMemory, match="Offloaded arrays take "):  # activations too
        memory.check_host_memory(program, 2 * whole, offloaded_activations=2**30)
