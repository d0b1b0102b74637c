"""Moments in host memory: the same numbers, the same checkpoints, and what a plan says of the copies; remat policies too."""

import dataclasses
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from test_moments import ALLOWED, SIZES, resumed, save, trained

from jaxtrain import compiler, memory, state, validate
from jaxtrain.hardware import Devices
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.make import read_plan
from jaxtrain.plan.program import hlo
from jaxtrain.plan.topology import parse

OFFLOAD = {"optimizer.offload": "moments"}
SPLIT = {"mesh.fsdp": 2, "mesh.tensor": 2, "train.grad_accum": 2}


def moments(current: Any) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(current)
    return {jax.tree_util.keystr(path): a for path, a in leaves if state.is_moment(path)}


@pytest.fixture(scope="module")
def both() -> dict[str, Any]:
    """States after two steps, with bf16 and 8-bit moments, without offload and with."""
    mixed = SIZES | SPLIT | {"dtypes.m": "int8", "dtypes.v": "f32"}
    return {name: trained(helpers.tiny(mixed | changes)) for name, changes in (("none", {}), ("moments", OFFLOAD))}


def test_moments_rest_on_the_host(both):
    run = helpers.tiny(SIZES | SPLIT | OFFLOAD | {"dtypes.m": "int8", "dtypes.v": "f32"})
    for current in (both["moments"], helpers.fresh_state(run)):
        assert {a.sharding.memory_kind for a in moments(current).values()} == {"pinned_host"}
        assert {a.sharding.memory_kind for a in jax.tree.leaves(current.params)} == {"device"}
        assert current.optimizer[0].count.sharding.memory_kind == "device"


def test_numbers_are_the_same_to_the_bit(both):
    a, b = (state.to_tensors(both[name]) for name in ("none", "moments"))
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), err_msg=name)
    assert int(both["moments"].optimizer[0].count) == 2


def test_checkpoints_do_not_tell_where_moments_rest(both, tmp_path):
    run = helpers.tiny(SIZES | SPLIT | OFFLOAD | {"dtypes.m": "int8", "dtypes.v": "f32"})
    tensors = save(run, both["moments"], tmp_path)
    for changes in ({}, OFFLOAD):
        current = resumed(helpers.tiny(SIZES | {"dtypes.m": "int8", "dtypes.v": "f32"} | changes), tmp_path)
        kinds = {a.sharding.memory_kind for a in moments(current).values()}
        assert kinds == {"pinned_host" if changes else "device"}
        for name, x in state.to_tensors(current).items():
            np.testing.assert_array_equal(np.asarray(x), tensors[name], err_msg=name)
    changed = resumed(helpers.tiny(SIZES | OFFLOAD | ALLOWED), tmp_path)  # m in float32 from now on
    assert {a.dtype.name for a in moments(changed).values()} == {"float32"}
    assert {a.sharding.memory_kind for a in moments(changed).values()} == {"pinned_host"}


def test_memory_is_counted_where_it_is():
    program = helpers.program(helpers.tiny(SIZES | SPLIT | OFFLOAD | {"dtypes.m": "int8", "dtypes.v": "f32"}))
    resting = compiler.local_bytes(program.state.optimizer)
    everything = compiler.local_bytes((program.state, program.batch))
    assert compiler.local_bytes(compiler.on_device(program)) == pytest.approx(everything - resting, abs=8)
    whole = sum(np.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(program.state)) / 2**30
    with pytest.raises(memory.OutOfMemory, match="what is offloaded"):
        memory.check_host_memory(program, 1.01 * whole)
    memory.check_host_memory(program, 2 * whole)
    with pytest.raises(memory.OutOfMemory, match="what is offloaded"):  # activations wait there too
        memory.check_host_memory(program, 2 * whole, waiting=2**30)


@pytest.mark.parametrize("offload", ["params", "all"])
def test_what_cannot_be_offloaded(offload):
    run = helpers.tiny({"optimizer.offload": offload})
    (problem,) = validate.validate_step(run, Devices("cpu", "cpu", 1, 8.0, "test"))
    assert problem.key == "optimizer.offload"
    assert ("read twice in each microbatch" in problem.rule) == (offload == "params")


def test_an_optimizer_of_ones_own_is_not_streamed():
    run = helpers.tiny(OFFLOAD | {"optimizer.name": "helpers:slower_adamw"})
    (problem,) = validate.validate_step(run, Devices("cpu", "cpu", 1, 8.0, "test"))
    assert problem.key == "optimizer.offload" and "helpers:slower_adamw" in problem.rule


# ---- Compiled by XLA:GPU for 8 described H200: no GPU, no driver


@pytest.fixture(scope="module")
def planned() -> Any:
    pytest.importorskip("jax_cuda12_plugin", reason="needs the `plan` extra")
    shape = {"precision": "bf16", "model.d_model": 512, "model.num_heads": 4, "model.d_ff": 1024, "data.seq_len": 1024}
    run = helpers.tiny(shape | {"mesh.fsdp": 8, "dtypes.v": "bf16"} | OFFLOAD)
    return run, compile_step(run, parse("h200:8"))


def test_a_plan_sees_moments_on_the_host(planned):
    run, step = planned
    resting = sum(np.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in moments(step.program.state).values())
    analysis = step.executable.memory_analysis()
    assert analysis.host_argument_size_in_bytes == resting
    assert analysis.host_alias_size_in_bytes == resting  # updated where they are
    assert analysis.host_temp_size_in_bytes == 0
    plan = read_plan(step, run, parse("h200:8"))
    assert plan.memory.host_gib == pytest.approx(resting / 2**30)
    assert not plan.memory.by_class.keys() & {"first moment", "second moment"}
    copies = [k for k in plan.kernels if k.kind == "host"]
    assert sum(k.gb for k in copies) >= 2 * resting / 1e9  # there and back, counted in both memories
    assert plan.time.host_exposed_ms > 0


def test_unpacked_rows_leave_arguments_that_no_kernel_reads(planned):
    """Which of the arguments are moments is told by their place among all of them."""
    run, step = planned
    unpacked = dataclasses.replace(run, data=dataclasses.replace(run.data, packing="none"))
    other = compile_step(unpacked, parse("h200:8")).executable.memory_analysis()
    assert other.host_argument_size_in_bytes == step.executable.memory_analysis().host_argument_size_in_bytes > 0


def test_a_layer_at_a_time_is_on_the_device(planned):
    """Copies that XLA starts and waits for, of one layer's part: no kernel reads host memory itself."""
    _, step = planned
    module = hlo.parse(step.text)
    on_host = [
        i
        for computation in module.computations.values()
        for i in computation.instructions
        if "/optimizer/" in i.op_name and any(s.memory_space == 5 for s in hlo.leaves(i.type)) and i.opcode == "fusion"
    ]
    assert not on_host
