"""Train steps with second moments in bfloat16, or with bfloat16 master weights and stochastic rounding."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from states import assert_same, stepped

from jaxtrain import config
from jaxtrain.models.module import is_vector
from jaxtrain.optim.optimizer import FLOAT32, make_optimizer, stored_moments
from jaxtrain.optim.rounding import Rounding
from jaxtrain.optim.update import at_once, streamed
from jaxtrain.sharding import make_placement
from jaxtrain.train.stages import Arrangement
from jaxtrain.train.state import abstract_tensors, from_tensors, to_tensors


@pytest.mark.parametrize("beta2", helpers.few([0.95, 0.98, 0.99, 0.998, 0.999], 0.98, 0.99))
def test_second_moments_in_bfloat16_follow_gradients_only_where_they_decay_fast(beta2):
    """Up to a beta2 of 0.98, updates differ by less than 1% from those with float32 moments. `validate` refuses a higher beta2.

    Gradients span three decades. From step 1,000 on, they are multiplied by 0.03.
    """
    rng, n = np.random.default_rng(0), 2048
    size = jnp.asarray(10 ** rng.uniform(-4, -1, n), jnp.float32)

    def updates(v: str) -> np.ndarray:
        tx = stored_moments("f32", v, {"w": ("embed",)}, 0.9, beta2, 1e-12)

        def step(state, given):
            key, scale = given
            u, state = tx.update({"w": size * scale * jax.random.normal(key, (n,))}, state)
            return state, jnp.abs(u["w"])

        steps = 3000
        scales = jnp.where(jnp.arange(steps) < 1000, 1.0, 0.03)
        seen = jax.lax.scan(step, tx.init({"w": size}), (jax.random.split(jax.random.key(0), steps), scales))[1]
        return np.asarray(seen[-1000:]).mean(0)

    off = np.sqrt(np.mean((updates("bf16") / updates("f32") - 1) ** 2))
    assert (off < 0.01) == (beta2 <= 0.98), off


def test_moments_of_a_run_have_the_types_the_config_names():
    run = helpers.tiny({"dtypes.m": "bf16", "model.num_layers": 1})
    adam = helpers.program(run).state.optimizer[0]
    assert {a.dtype for a in jax.tree.leaves(adam.mu)} == {jnp.dtype("bfloat16")}
    assert {a.dtype for a in jax.tree.leaves(adam.nu)} == {jnp.dtype("float32")}


# ---- Master weights in bfloat16


def test_random_bits_of_weights_are_unbiased_and_of_each_step_layer_and_parameter():
    p = {"layers": {"a": jnp.ones((3, 64, 64), jnp.bfloat16), "b": jnp.ones((3, 64, 64), jnp.bfloat16)}}
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) + 2**-10, p)  # an eighth of the distance to the next number

    def rounded(step: int, seed: int = 0) -> dict[str, np.ndarray]:
        made = Rounding(seed).rounded(exact, p, jnp.int32(step))["layers"]
        return {name: np.asarray(x.astype(jnp.float32)) for name, x in made.items()}

    steps = [rounded(step) for step in range(60)]
    up = np.stack([[s["a"] > 1, s["b"] > 1] for s in steps])  # (steps, parameters, layers, 64, 64)
    n = up.size
    assert abs(up.mean() - 1 / 8) < 5 * np.sqrt(1 / 8 * 7 / 8 / n)
    for axis in range(3):  # neighbouring steps, parameters and layers are independent
        here, there = np.take(up, 0, axis), np.take(up, 1, axis)
        assert abs((here & there).mean() - 1 / 64) < 6 * np.sqrt(1 / 64 / here.size)
    assert (rounded(7)["a"] == steps[7]["a"]).all() and (rounded(7, seed=1)["a"] != steps[7]["a"]).any()


def test_random_bits_do_not_depend_on_the_layout():
    """Stochastic rounding gives the same weights on one and on four devices, on stages with reordered layers, and for one
    layer at a time.
    """
    rng = np.random.default_rng(0)
    w, e = rng.standard_normal((6, 8, 16)).astype(np.float32), rng.standard_normal((32, 8)).astype(np.float32)
    exact = {"embed": jnp.asarray(e), "layers": {"w": jnp.asarray(w)}}

    def rounded(exact, rounding, layer=None):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact)
        return rounding.rounded(exact, params, jnp.int32(5), layer)

    one = rounded(exact, Rounding(3))
    mesh = jax.make_mesh((2, 2), ("stage", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    homes = {"embed": jax.P("fsdp", "stage"), "layers": {"w": jax.P(None, "fsdp", "stage")}}
    homes = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), homes)
    four = jax.jit(lambda x: rounded(x, Rounding(3)), out_shardings=homes)(jax.device_put(exact, homes))
    assert len(four["embed"].sharding.device_set) == 4
    jax.tree.map(np.testing.assert_array_equal, four, one)

    order = Arrangement(6, 2, 2).order  # 2, 2, 1 and 1 layers, interleaved: two positions are empty
    assert None in order and [i for i in order if i is not None] != list(range(6))
    placed = jnp.asarray(np.stack([np.zeros_like(w[0]) if i is None else w[i] for i in order]))
    home = jax.NamedSharding(mesh, jax.P("stage", "fsdp"))
    staged = jax.jit(lambda x: rounded({"layers": {"w": x}}, Rounding(3, order)))(jax.device_put(placed, home))["layers"]["w"]
    for at, layer in enumerate(order):
        if layer is not None:
            np.testing.assert_array_equal(staged[at], one["layers"]["w"][layer])
    for layer in range(6):
        alone = rounded({"layers": {"w": exact["layers"]["w"][layer]}}, Rounding(3), jnp.int32(layer))
        np.testing.assert_array_equal(alone["layers"]["w"], one["layers"]["w"][layer])


def test_a_streamed_update_is_that_of_all_at_once():
    """An update layer by layer from the host equals the update of all layers at once, with clipping and rounding. Layers have
    different random bits.
    """
    axes = {"embed": ("vocab", "embed"), "layers": {"w": ("layers", "embed", "mlp")}}
    types = config.Dtypes("bf16", "bf16", "f32", "f32", "f32")
    placement = make_placement(helpers.tiny(), jax.devices()[:1])
    how = (config.Optimizer(), types, axes, placement, FLOAT32)
    tx = make_optimizer(*how)
    params = {"embed": jnp.ones((6, 8), jnp.bfloat16), "layers": {"w": jnp.ones((3, 8, 64), jnp.bfloat16)}}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 1e-7, jnp.float32), params)  # near eps: clipping changes the update
    given = (tx.init(params), params, jnp.float32(0.5), jnp.float32(1e-3), True, jnp.int32(4))
    whole, parts = (jax.jit(update)(grads, *given) for update in (at_once(tx, Rounding(0)), streamed(*how, Rounding(0))))
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    layers = np.asarray(whole[0]["layers"]["w"].astype(jnp.float32))
    assert 0 < (layers[0] < 1).mean() < 1 and (layers[0] != layers[1]).any()


BF16_MASTERS = {
    "precision": "bf16",
    "dtypes.params": "bf16",
    "model.num_layers": 2,
    "model.qkv_bias": True,
    "model.qk_norm": True,
    "optimizer.schedule": "constant",
    "optimizer.lr": 1e-4,
    "optimizer.warmup_steps": 0,
}


STREAMED, MUON = {"optimizer.offload": "moments"}, {"mesh.fsdp": 4, "optimizer.name": "muon"}


@pytest.mark.parametrize("more", helpers.few([{}, STREAMED, MUON], {}))
def test_all_weights_move_where_masters_are_bfloat16(more):
    """At a learning rate of 1e-4, an update of 1.0 moves most weights by far less than half of bfloat16's spacing. Stochastic
    rounding still changes them.
    """
    run = helpers.tiny(BF16_MASTERS | more)
    before, after = helpers.initial_tensors(run), helpers.train(run, 5).tensors
    moved = {name: (after[name] != x).mean() for name, x in before.items() if name.startswith("params.")}
    vectors = {name for name in moved if is_vector(name)}
    assert len(vectors) == 2 * 7 + 1
    for name in moved:
        assert before[name].dtype == after[name].dtype == (np.float32 if name in vectors else jnp.bfloat16), name
        assert moved[name] == 1.0 if name in vectors and "bk" not in name else moved[name] > 0, (name, moved[name])

    # In the first step, which has equal gradients, weights move on average as float32 masters do. With rounding to nearest,
    # weights above 0.03 would not move.
    wide = helpers.tiny(BF16_MASTERS | more | {"dtypes.params": "f32"})
    for name in ("params.layers.0.mlp.gate", "params.layers.1.attention.wq"):
        first, start = ([of(r)[name].astype(np.float64) for r in (run, wide)] for of in (one_step, helpers.initial_tensors))
        large = np.abs(start[0]) > 0.03
        ours, theirs = ((x - y)[large] for x, y in zip(first, start, strict=True))
        along = np.sign(theirs)
        assert (ours * along).mean() == pytest.approx((theirs * along).mean(), rel=0.35), name


def one_step(run: config.RunConfig) -> dict[str, np.ndarray]:
    return helpers.train(run, 1).tensors


def test_a_resumed_run_rounds_weights_as_one_that_was_not_interrupted():
    run = helpers.tiny(BF16_MASTERS)
    whole = helpers.train(run, 4).tensors
    half = {name: np.asarray(x) for name, x in to_tensors(stepped(run, helpers.fresh_state(run), range(2))).items()}
    state = helpers.program(run).state
    homes = {name: a.sharding for name, a in abstract_tensors(state).items()}
    resumed = stepped(run, from_tensors(state, jax.device_put(half, homes)), range(2, 4))
    assert_same(to_tensors(resumed), whole)
