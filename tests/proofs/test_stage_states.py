"""Checkpoints, digests and host copies hold the same tensors on every layout, with and without stages, bit for bit."""

from pathlib import Path

import helpers
import jax
import numpy as np
import pytest

from jaxtrain.checkpoint import Checkpoints, digests
from jaxtrain.hf import lora
from jaxtrain.step.state import (
    TrainState,
    abstract_tensors,
    digests_by_name,
    from_tensors,
    named_leaves,
    to_digests,
    to_host,
    to_tensors,
)
from jaxtrain.train.snapshot import Snapshots

SIX = {
    "model.num_layers": 6,
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.d_ff": 16,
    "model.num_experts": 2,
    "model.shared_d_ff": 8,
    "model.router_bias": True,
    "train.grad_accum": 4,
}
LAYOUTS = {
    "one device": {},
    "stages of one group": {"mesh.stage": 4, "mesh.expert": 2},
    "stages of two groups": {
        "mesh.stage": 2,
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
        "pipeline.schedule": "interleaved",
        "pipeline.groups": 2,
    },
}
written = pytest.mark.parametrize("name", LAYOUTS)


def run_on(name: str):
    return helpers.tiny(SIX | LAYOUTS[name])


def some(name: str) -> TrainState:
    """Return a few abstract arrays of a run's state: stacked and not, matrices and vectors, experts, and a moment of each."""
    made = helpers.program(run_on(name)).state
    moments = made.optimizer[0].mu

    def few(tree):
        layers = {"attention": {"wq": tree["layers"]["attention"]["wq"]}, "norm": tree["layers"]["attention_norm"]}
        return {"embed": tree["embed"], "layers": layers | {"mlp": {"gate": tree["layers"]["mlp"]["gate"]}}}

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


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name]])
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


def test_the_digest_of_a_base_does_not_depend_on_stages():
    found = {name: lora.digest(helpers.fresh_state(run_on(name)).params, some(name).layers) for name in LAYOUTS}
    assert len(set(found.values())) == 1
    state = helpers.fresh_state(run_on("stages of one group"))
    changed = jax.tree.map(lambda x: x[::-1] if x.shape[0] == 8 else x, state.params)
    assert lora.digest(changed, state.layers) not in found.values()
