"""Checkpoints, digests and host copies hold the same tensors on every layout, with and without stages, bit for bit."""

import re
from pathlib import Path

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import digests, lora, stacks
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.snapshot import Snapshots
from jaxtrain.train.stages import Arrangement
from jaxtrain.train.state import (
    TrainState,
    abstract_tensors,
    digests_by_name,
    from_tensors,
    named_leaves,
    to_digests,
    to_host,
    to_tensors,
)

SIX = {"model.num_layers": 6, "train.grad_accum": 4}
GROUPS = {"pipeline.schedule": "interleaved", "pipeline.groups": 2}
LAYOUTS = {
    "one device": {},
    "2 stages": {"mesh.stage": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
    "4 stages, 6 layers": {"mesh.stage": 4, "mesh.data": 2},
    "2 stages of 2 groups": {"mesh.stage": 2, "mesh.fsdp": 2, "mesh.data": 2, **GROUPS},
    "4 stages of 2 groups": {"mesh.stage": 4, **GROUPS},
    "a ring, ZeRO 1": {"mesh.fsdp": 2, "mesh.seq": 4, "sharding.zero": 1},
    "ZeRO 0": {"mesh.fsdp": 4, "mesh.tensor": 2, "sharding.zero": 0},
}
OFTEN = ("one device", "4 stages, 6 layers", "2 stages of 2 groups")
written = pytest.mark.parametrize("name", helpers.few(LAYOUTS, *OFTEN))


def run_on(name: str):
    return helpers.tiny(SIX | LAYOUTS[name])


def some(name: str) -> TrainState:
    """Return a few abstract arrays of a run's state: stacked and not, matrices and vectors, and a moment of each."""
    made = helpers.program(run_on(name)).state
    moments = made.optimizer[0].mu

    def few(tree):
        layers = {"attention": {"wq": tree["layers"]["attention"]["wq"]}, "norm": tree["layers"]["attention_norm"]}
        return {"embed": tree["embed"], "layers": layers}

    return TrainState(made.step, few(made.params), {"mu": few(moments)}, layers=made.layers)


def numbered(name: str) -> TrainState:
    """Return the arrays of `some` with random values, and with -0.0, NaN and infinity, which sums of floats would change."""
    abstract = some(name)
    wanted = abstract_tensors(abstract)
    tensors = {}
    for i, (key, a) in enumerate(sorted(wanted.items())):
        x = np.asarray(np.random.default_rng(i).standard_normal(a.shape)).astype(a.dtype)
        if a.ndim:
            x.flat[:3] = -0.0, np.nan, np.inf
        tensors[key] = jax.device_put(x, a.sharding)
    return from_tensors(abstract, tensors)


def bits(tensors) -> dict[str, bytes]:
    return {name: np.asarray(x).tobytes() for name, x in tensors.items()}


FEW = {"model.num_layers": 3, "model.num_experts": 4, "model.shared_d_ff": 32, "model.router_bias": True}
EXPERT_LAYOUTS = {
    "one device": {},
    "experts": {"mesh.expert": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
    "stages and experts": {"mesh.stage": 2, "mesh.expert": 4},
}


@written
def test_initial_values_do_not_depend_on_stages(name: str):
    plain, state = helpers.fresh_state(run_on("one device")), helpers.fresh_state(run_on(name))
    assert bits(to_tensors(state)) == bits(to_tensors(plain))
    for leaf in named_leaves(state):
        if leaf.stacked:
            assert leaf.array.shape[0] == len(leaf.order)
            empty = [place for place, layer in enumerate(leaf.order) if layer is None]
            assert not np.asarray(leaf.array)[empty].any()


@written
def test_every_way_out_has_the_same_names_and_bits(name: str):
    state = numbered(name)
    expected = to_tensors(numbered("one device"))
    assert bits(to_tensors(state)) == bits(expected)
    assert bits(to_host(state, "")) == bits(expected)
    sums = digests.digest_arrays(expected)
    found = digests_by_name(to_digests(state))
    assert found.keys() == sums.keys()
    assert all((found[name] == sums[name]).all() for name in sums)
    snapshot = Snapshots(some(name)).take(state)
    assert bits(snapshot.tensors) == bits(expected)
    assert {k: v.tolist() for k, v in snapshot.sums().items()} == {k: v.tolist() for k, v in sums.items()}


@written
def test_a_checkpoint_of_any_layout_is_every_others(name: str, tmp_path: Path):
    state = numbered(name)
    expected = bits(to_tensors(state))
    store = Checkpoints(tmp_path, finite=False)
    store.save(1, to_tensors(state), {})
    store.wait()
    for other in LAYOUTS:
        abstract = some(other)
        restored = from_tensors(abstract, store.restore(1, abstract_tensors(abstract)))
        assert jax.tree.structure(restored) == jax.tree.structure(abstract)
        for a, x in zip(jax.tree.leaves(abstract), jax.tree.leaves(restored), strict=True):
            assert (a.shape, a.dtype, a.sharding) == (x.shape, x.dtype, x.sharding)
        assert bits(to_host(restored, "")) == expected
        for leaf in named_leaves(restored):
            empty = [place for place, layer in enumerate(leaf.order) if layer is None]
            assert not leaf.stacked or not np.asarray(leaf.array)[empty].any()


def test_experts_are_the_same_tensors_on_every_layout(tmp_path: Path):
    def experts(state: TrainState) -> TrainState:
        return TrainState(state.step, {"layers": {"mlp": state.params["layers"]["mlp"]}}, {}, layers=state.layers)

    runs = {name: helpers.tiny(FEW | mesh) for name, mesh in EXPERT_LAYOUTS.items()}
    made = {name: experts(helpers.program(run).state) for name, run in runs.items()}
    state = experts(helpers.fresh_state(runs["one device"]))
    expected = bits(to_host(state, ""))
    assert "params.layers.2.mlp.router_bias" in expected and "params.layers.2.mlp.shared.gate" in expected
    assert bits(to_host(experts(helpers.fresh_state(runs["stages and experts"])), "")) == expected
    for i, name in enumerate([*list(EXPERT_LAYOUTS)[1:], "one device"]):  # each reads the checkpoint of the one before
        store = Checkpoints(tmp_path / str(i))
        store.save(1, to_tensors(state), {})
        store.wait()
        state = from_tensors(made[name], store.restore(1, abstract_tensors(made[name])))
        assert bits(to_host(state, "")) == expected


def test_the_digest_of_a_base_does_not_depend_on_stages():
    found = {name: lora.digest(helpers.fresh_state(run_on(name)).params, some(name).layers) for name in OFTEN}
    assert len(set(found.values())) == 1
    state = helpers.fresh_state(run_on("4 stages, 6 layers"))
    changed = jax.tree.map(lambda x: x[::-1] if x.shape[0] == 8 else x, state.params)
    assert lora.digest(changed, state.layers) not in found.values()


def sizes(text: str) -> set[int]:
    """Return the numbers of elements that float32 and uint32 arrays of a compiled program have."""
    return {int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"(?:f32|u32)\[([\d,]+)\]", text)}


def test_no_device_holds_more_of_a_stack_than_its_own_part():
    mesh = jax.make_mesh((4, 2), ("stage", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    order, home = Arrangement(6, 4).order, NamedSharding(mesh, P("stage", "fsdp"))
    a = jax.ShapeDtypeStruct((8, 24, 40), jnp.float32, sharding=home)
    layer = jax.ShapeDtypeStruct(a.shape[1:], a.dtype, sharding=stacks.layer_sharding(a.shape, home))
    assert layer.sharding.spec == P(("fsdp", "stage"), None)
    part = 8 * 24 * 40 // 8
    copied = stacks.copy_layer(a.shape, home).lower(a, jax.ShapeDtypeStruct((), jnp.int32)).compile().as_text()
    assert max(sizes(copied)) == part
    stacked = stacks._stacking(order, a.shape, home).lower([layer] * 6).compile().as_text()
    assert max(sizes(stacked)) == part


def test_a_layer_that_does_not_divide_is_whole_on_every_stage():
    mesh = jax.make_mesh((4, 2), ("stage", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    order, home = Arrangement(6, 4).order, NamedSharding(mesh, P("stage"))
    layers = [np.random.default_rng(i).standard_normal((3, 5)).astype(np.float32) for i in range(6)]
    a = jax.ShapeDtypeStruct((8, 3, 5), jnp.float32, sharding=home)
    assert stacks.layer_sharding(a.shape, home).spec == P(None, None)
    w = stacks.stack([jax.device_put(x, stacks.layer_sharding(a.shape, home)) for x in layers], order, a)
    assert (np.asarray(w)[[order.index(layer) for layer in range(6)]] == np.stack(layers)).all()
    for place, layer in enumerate(order):
        assert (np.asarray(stacks.copy_layer(a.shape, home)(w, place)) == (0 if layer is None else layers[layer])).all()
