"""Layers on pipeline stages: where they lie, when each stage does what, and that no checkpoint knows of it."""

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
from jaxtrain.stages import SCHEDULES, Arrangement, Schedule
from jaxtrain.state import (
    TrainState,
    abstract_tensors,
    digests_by_name,
    from_tensors,
    named_leaves,
    to_digests,
    to_host,
    to_tensors,
)

# ---- Where layers lie


def test_layers_lie_group_by_group():
    assert Arrangement(8, 4).order == (0, 1, 2, 3, 4, 5, 6, 7)
    assert Arrangement(6, 4).order == (0, 1, 2, 3, 4, None, 5, None)
    # Groups of all: 01 23 45 67, of which stage 0 holds the first and the third.
    assert Arrangement(8, 2, 2).order == (0, 1, 4, 5, 2, 3, 6, 7)
    assert Arrangement(6, 2, 2).order == (0, 1, 4, None, 2, 3, 5, None)


@pytest.mark.parametrize("layers", [4, 5, 7, 8, 32])
@pytest.mark.parametrize(("stages", "groups"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_a_microbatch_passes_every_layer_once_and_in_order(layers: int, stages: int, groups: int):
    lying = Arrangement(layers, stages, groups)
    assert lying.places == len(lying.order) == stages * groups * lying.per_group
    held = [lying.order[s * groups * lying.per_group :][: groups * lying.per_group] for s in range(stages)]
    path = [held[s][g * lying.per_group :][: lying.per_group] for g in range(groups) for s in range(stages)]
    passed = [layer for group in path for layer in group]
    assert [layer for layer in passed if layer is not None] == list(range(layers))
    filled = [sum(layer is not None for layer in group) for group in path]
    assert max(filled) - min(filled) <= 1
    assert tuple(turn for turn, layer in enumerate(passed) if layer is not None) == lying.turns


# ---- When each stage does what

CASES = [
    *[(name, stages, 1, m) for name in ("1f1b", "gpipe") for stages in (2, 3, 4) for m in (1, 2, 3, 4, 8, 17)],
    *[("interleaved", stages, groups, stages * runs) for stages in (2, 4) for groups in (2, 3) for runs in (1, 2, 5)],
]


def done_by(s: Schedule) -> tuple[dict[tuple[int, int, int], int], dict[tuple[int, int, int], int]]:
    """(stage, group, microbatch) -> tick, forward and backward; nothing is done twice."""
    forward, backward = {}, {}
    for stage in range(s.stages):
        for u in range(s.units):
            assert (stage, *s.forward_unit(u)) not in forward
            forward[stage, *s.forward_unit(u)] = u + stage
            assert (stage, *s.backward_unit(u)) not in backward
            backward[stage, *s.backward_unit(u)] = u + s.wait + s.stages - 1 - stage
    return forward, backward


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_unit_is_done_once_and_after_what_it_needs(case: tuple[str, int, int, int]):
    s = Schedule(*case)
    forward, backward = done_by(s)
    every = {(stage, g, m) for stage in range(s.stages) for g in range(s.groups) for m in range(s.microbatches)}
    assert forward.keys() == backward.keys() == every
    for stage, g, m in every:
        before = (stage - 1, g, m) if stage else (s.stages - 1, g - 1, m)
        if before in every:
            assert forward[before] < forward[stage, g, m]
            assert backward[stage, g, m] < backward[before]
        assert forward[stage, g, m] < backward[stage, g, m]  # a tick's two halves do not wait for each other
    assert {*forward.values()} == {*range(s.forward_ticks)}
    assert {*backward.values()} == {*range(s.wait, s.ticks)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_slot_is_used_twice_at_a_time(case: tuple[str, int, int, int]):
    s = Schedule(*case)
    forward, backward = done_by(s)
    by_forward, by_backward, count = s.slots
    slot = {s.forward_unit(u): by_forward[u] for u in range(s.units)}
    assert all(by_backward[w] == slot[s.backward_unit(w)] for w in range(s.units))
    assert {*by_forward} == set(range(count))
    for stage in range(s.stages):
        for i in range(count):
            held = sorted((forward[stage, *unit], backward[stage, *unit]) for unit, at in slot.items() if at == i)
            # What a stage runs in ticks where the others are not done yet writes into its slot too.
            held += [(u + stage, u + stage) for u in range(s.units, s.forward_ticks) if by_forward[u] == i]
            held.sort()
            assert all(end < begin for (_, end), (begin, _) in zip(held, held[1:], strict=False))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bubble_is_what_stages_idle(case: tuple[str, int, int, int]):
    s = Schedule(*case)
    forward, backward = done_by(s)
    # A tick of one half takes half as long, but the ticks in which some stage goes both ways take whole.
    took = sum((t < s.forward_ticks) + (t >= s.wait) for t in range(s.ticks))
    assert took == 2 * (s.units + s.stages - 1)
    for stage in range(s.stages):
        busy = sum(key[0] == stage for key in forward) + sum(key[0] == stage for key in backward)
        assert s.bubble == pytest.approx((took - busy) / took)


def test_what_waits_is_bounded_by_the_stages_and_not_by_the_microbatches():
    for stages in (2, 4, 8):
        assert Schedule("1f1b", stages, 1, 64).in_flight == Schedule("1f1b", stages, 1, 512).in_flight == 2 * stages
        assert Schedule("gpipe", stages, 1, 64).in_flight >= 64
        for groups in (2, 3):
            few, many = (Schedule("interleaved", stages, groups, runs * stages) for runs in (8, 64))
            assert few.slots[2] == many.slots[2] == (groups + 1) * stages
    assert {case[0] for case in CASES} == set(SCHEDULES)


# ---- What a state is outside

SIX = {"model.num_layers": 6, "train.grad_accum": 4}
GROUPS = {"pipeline.schedule": "interleaved", "pipeline.groups": 2}
LAYOUTS = {
    "one device": {},
    "2 stages": {"mesh.stage": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
    "4 stages, 6 layers": {"mesh.stage": 4, "mesh.data": 2},
    "2 stages of 2 groups": {"mesh.stage": 2, "mesh.fsdp": 2, "mesh.data": 2, **GROUPS},
    "4 stages of 2 groups": {"mesh.stage": 4, **GROUPS},
}


def run_on(name: str):
    return helpers.tiny(SIX | LAYOUTS[name])


def some(name: str) -> TrainState:
    """A few of the arrays of a run's state, by their shapes: stacked and not, matrices and vectors, and a moment of each."""
    made = helpers.program(run_on(name)).state
    moments = made.optimizer[0].mu

    def few(tree):
        layers = {"attention": {"wq": tree["layers"]["attention"]["wq"]}, "norm": tree["layers"]["attention_norm"]}
        return {"embed": tree["embed"], "layers": layers}

    return TrainState(made.step, few(made.params), {"mu": few(moments)}, layers=made.layers)


def numbered(name: str) -> TrainState:
    """`some` with numbers, among them those that sums of floats would not keep."""
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
OFTEN = [pytest.param(name, marks=pytest.mark.more) if name == "4 stages of 2 groups" else name for name in LAYOUTS]


@pytest.mark.parametrize("name", OFTEN)
def test_initial_values_do_not_depend_on_stages(name: str):
    plain, state = helpers.fresh_state(run_on("one device")), helpers.fresh_state(run_on(name))
    assert bits(to_tensors(state)) == bits(to_tensors(plain))
    for leaf in named_leaves(state):
        if leaf.stacked:
            assert leaf.array.shape[0] == len(leaf.order)
            empty = [place for place, layer in enumerate(leaf.order) if layer is None]
            assert not np.asarray(leaf.array)[empty].any()


@pytest.mark.parametrize("name", OFTEN)
def test_every_way_out_has_the_same_names_and_bits(name: str):
    state = numbered(name)
    expected = to_tensors(numbered("one device"))
    assert bits(to_tensors(state)) == bits(expected)
    assert bits(to_host(state, "")) == bits(expected)
    sums = digests.of_many(expected)
    found = digests_by_name(to_digests(state))
    assert found.keys() == sums.keys()
    assert all((found[name] == sums[name]).all() for name in sums)
    snapshot = Snapshots(some(name)).take(state)
    assert bits(snapshot.tensors) == bits(expected)
    assert {k: v.tolist() for k, v in snapshot.sums().items()} == {k: v.tolist() for k, v in sums.items()}


@pytest.mark.parametrize("written", OFTEN)
def test_a_checkpoint_of_any_arrangement_is_every_others(written: str, tmp_path: Path):
    state = numbered(written)
    expected = bits(to_tensors(state))
    store = Checkpoints(tmp_path, finite=False)
    store.save(1, to_tensors(state), {})
    store.wait()
    for name in LAYOUTS:
        abstract = some(name)
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
    for i, name in enumerate([*list(EXPERT_LAYOUTS)[1:], "one device"]):  # each reads what the one before has written
        store = Checkpoints(tmp_path / str(i))
        store.save(1, to_tensors(state), {})
        store.wait()
        state = from_tensors(made[name], store.restore(1, abstract_tensors(made[name])))
        assert bits(to_host(state, "")) == expected


def test_the_digest_of_a_base_does_not_depend_on_stages():
    found = {name: lora.digest(helpers.fresh_state(run_on(name)).params, some(name).layers) for name in list(LAYOUTS)[:-1]}
    assert len(set(found.values())) == 1
    state = helpers.fresh_state(run_on("4 stages, 6 layers"))
    changed = jax.tree.map(lambda x: x[::-1] if x.shape[0] == 8 else x, state.params)
    assert lora.digest(changed, state.layers) not in found.values()


def sizes(text: str) -> set[int]:
    """Elements of every array that a device holds in a compiled program."""
    return {int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"(?:f32|u32)\[([\d,]+)\]", text)}


def test_no_device_holds_more_of_a_stack_than_its_own_part():
    mesh = jax.make_mesh((4, 2), ("stage", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    order, home = Arrangement(6, 4).order, NamedSharding(mesh, P("stage", "fsdp"))
    a = jax.ShapeDtypeStruct((8, 24, 40), jnp.float32, sharding=home)
    layer = jax.ShapeDtypeStruct(a.shape[1:], a.dtype, sharding=stacks.home_of_layer(a.shape, home))
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
    assert stacks.home_of_layer(a.shape, home).spec == P(None, None)
    w = stacks.stack([jax.device_put(x, stacks.home_of_layer(a.shape, home)) for x in layers], order, a)
    assert (np.asarray(w)[[order.index(layer) for layer in range(6)]] == np.stack(layers)).all()
    for place, layer in enumerate(order):
        assert (np.asarray(stacks.copy_layer(a.shape, home)(w, place)) == (0 if layer is None else layers[layer])).all()
