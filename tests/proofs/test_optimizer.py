"""Schedules, weight decay's mask, stored moments, clipping, and AdamW against optax's own."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import config
from jaxtrain.compiler import local_bytes
from jaxtrain.models.module import is_vector
from jaxtrain.optimizer import DTYPES, decayed, make_optimizer, make_schedule, stored_moments
from jaxtrain.plan.search import bound
from jaxtrain.rounding import Rounding, to_bfloat16
from jaxtrain.stages import Arrangement
from jaxtrain.state import abstract_tensors, from_tensors, to_tensors
from jaxtrain.step import place_batch

BASE = config.Optimizer(lr=1.0, lr_min=0.1, warmup_steps=10)
F32 = config.Dtypes("f32", "f32", "f32", "f32", "f32")


def rates(steps: int, **changes) -> np.ndarray:
    """The learning rate of each step."""
    schedule = make_schedule(dataclasses.replace(BASE, **changes), steps)
    return np.array([float(schedule(jnp.asarray(i))) for i in range(steps)])


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_warmup(schedule):
    lr = rates(100, schedule=schedule)
    np.testing.assert_allclose(lr[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert lr.max() == pytest.approx(1.0)
    for warmup in (0, 1):
        assert rates(100, schedule=schedule, warmup_steps=warmup)[0] == pytest.approx(1.0)
    assert (rates(100, schedule=schedule, warmup_steps=0) == rates(100, schedule=schedule, warmup_steps=1)).all()


@pytest.mark.parametrize("warmup", [0, 1, 2, 10])
@pytest.mark.parametrize("steps", [11, 12, 50])
@pytest.mark.parametrize(("schedule", "decay"), [("cosine", 0), ("linear", 0), ("wsd", 0), ("wsd", 1)])
def test_the_peak_is_reached_and_the_last_step_takes_lr_min(schedule, decay, steps, warmup):
    lr = rates(steps, schedule=schedule, decay_steps=decay, warmup_steps=warmup)
    peak = max(1, warmup) - 1
    assert lr[peak] == pytest.approx(1.0) and (lr[:peak] < 0.99).all()
    assert lr[-1] == pytest.approx(0.1) and (lr[:-1] > 0.1001 * (np.arange(steps - 1) >= peak)).all()
    if schedule != "wsd":
        assert (lr[peak + 1 :] < 1).all(), "the peak is taken once"
    else:
        at_peak = steps - 1 - peak - min(decay or steps // 5, steps - 1 - peak)
        np.testing.assert_allclose(lr[peak : peak + at_peak + 1], 1.0, rtol=1e-6)
        assert (lr[peak + at_peak + 1 :] < 1).all()


def test_a_run_of_one_step_takes_the_peak():
    for schedule in ("constant", "cosine", "linear", "wsd"):
        assert rates(1, schedule=schedule, warmup_steps=0) == pytest.approx([1.0])


def test_constant():
    assert (rates(100, schedule="constant")[9:] == 1.0).all()


def test_cosine():
    lr = rates(110, schedule="cosine")
    expected = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * np.arange(101) / 100))
    np.testing.assert_allclose(lr[9:], expected, rtol=1e-5)


def test_linear_and_decay_steps():
    lr = rates(110, schedule="linear")
    np.testing.assert_allclose(lr[9:], np.linspace(1.0, 0.1, 101), rtol=1e-5)
    short = rates(110, schedule="linear", decay_steps=50)
    np.testing.assert_allclose(short[9:60], np.linspace(1.0, 0.1, 51), rtol=1e-5)
    np.testing.assert_allclose(short[60:], 0.1, rtol=1e-5)


def test_warmup_stable_decay():
    lr = rates(100, schedule="wsd")  # the last fifth decays
    np.testing.assert_allclose(lr[9:80], 1.0, rtol=1e-6)
    np.testing.assert_allclose(lr[79:], np.linspace(1.0, 0.1, 21), rtol=1e-5)
    longer = rates(100, schedule="wsd", decay_steps=40)
    np.testing.assert_allclose(longer[59:], np.linspace(1.0, 0.1, 41), rtol=1e-5)


def test_decay_is_on_matrices_only():
    features = {"model.qkv_bias": True, "model.qk_norm": True}
    mask = decayed(helpers.program(helpers.tiny(features)).definition.axes)
    named = {".".join(k.key for k in path): value for path, value in jax.tree_util.tree_leaves_with_path(mask)}
    matrices = {
        *("embed.embedding", "head", "layers.mlp.gate", "layers.mlp.up", "layers.mlp.down"),
        *(f"layers.attention.{w}" for w in ("wq", "wk", "wv", "wo")),
    }
    others = {
        *("final_norm.scale", "layers.attention_norm.scale", "layers.mlp_norm.scale"),
        *(f"layers.attention.{b}" for b in ("bq", "bk", "bv", "q_norm.scale", "k_norm.scale")),
    }
    assert {name for name, value in named.items() if value} == matrices
    assert {name for name, value in named.items() if not value} == others


def toy(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(rng.standard_normal((5, 3)), jnp.float32),
        "scale": jnp.asarray(rng.standard_normal(3), jnp.float32),
    }


def test_adamw_equals_optax():
    """Thirty steps on made-up gradients, with the step's own -lr(step) against optax's schedule and mask."""
    o = dataclasses.replace(BASE, lr=1e-2, lr_min=1e-3, schedule="cosine", weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-6)
    axes = {"w": ("embed", "mlp"), "scale": ("embed",)}
    schedule = make_schedule(o, 30)
    ours, theirs = (
        make_optimizer(o, F32, axes),
        optax.adamw(schedule, 0.8, 0.9, 1e-6, weight_decay=0.3, mask={"w": True, "scale": False}),
    )
    p, q = toy(0), toy(0)
    s, t = ours.init(p), theirs.init(q)
    for i in range(30):
        grads = toy(i + 1)
        updates, s = ours.update(grads, s, p)
        p = jax.tree.map(lambda a, u, i=i: a - schedule(i) * u, p, updates)
        updates, t = theirs.update(grads, t, q)
        q = optax.apply_updates(q, updates)
    for name in p:
        np.testing.assert_allclose(p[name], q[name], rtol=2e-6, atol=1e-7)
        assert np.abs(np.asarray(p[name]) - np.asarray(toy(0)[name])).max() > 0.01


@pytest.mark.parametrize(("m", "v"), [("bf16", "f32"), ("f32", "bf16"), ("bf16", "bf16")])
def test_moments_are_stored_in_their_types_and_updated_in_f32(m, v):
    tx = stored_moments(m, v, {"w": ("embed", "mlp"), "scale": ("embed",)}, 0.9, 0.95, 1e-8)
    exact = optax.scale_by_adam(0.9, 0.95, 1e-8)
    p = toy(0)
    s, t = tx.init(p), exact.init(p)
    for i in range(3):
        updates, s = tx.update(toy(i + 1), s, p)
        wanted, t = exact.update(toy(i + 1), t, p)
    assert {a.dtype for a in jax.tree.leaves(s.mu)} == {jnp.dtype(DTYPES[m])}
    assert {a.dtype for a in jax.tree.leaves(s.nu)} == {jnp.dtype(DTYPES[v])}
    assert updates["w"].dtype == jnp.float32
    np.testing.assert_allclose(updates["w"], wanted["w"], rtol=2e-2, atol=2e-2)  # bf16 holds 8 bits
    assert (updates["w"] != wanted["w"]).any()


@pytest.mark.parametrize("beta2", [0.95, 0.98, 0.99, 0.998, 0.999])
def test_second_moments_in_bfloat16_follow_gradients_only_where_they_decay_fast(beta2):
    """Gradients of three decades, then 0.03 times as large. Where updates are off by 1%, the config check refuses."""
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


def test_clip_scales_the_gradient_to_the_norm():
    """After one step from zero, the first moment is (1 - beta1) x the gradient that reached the optimizer."""
    one = {"train.steps": 1, "optimizer.warmup_steps": 0, "model.num_layers": 1, "data.seq_len": 32}
    free, clipped = (helpers.tiny({**one, "optimizer.clip_norm": c}) for c in (0.0, 0.25))

    def norm(run: config.RunConfig) -> float:
        tensors = helpers.train(run, 1).tensors
        squares = [(a.astype(float) ** 2).sum() for name, a in tensors.items() if name.startswith("optimizer.mu.")]
        return float(np.sqrt(sum(squares))) / (1 - run.optimizer.beta1)

    reported = [helpers.train(run, 1).grad_norm[0] for run in (free, clipped)]
    assert reported[0] == pytest.approx(reported[1], rel=1e-6)  # the norm before clipping
    assert reported[0] > 0.5
    assert norm(free) == pytest.approx(reported[0], rel=1e-5)
    assert norm(clipped) == pytest.approx(0.25, rel=1e-5)
    above = helpers.train(helpers.tiny({**one, "optimizer.clip_norm": 1e3}), 1).tensors
    for name, tensor in helpers.train(free, 1).tensors.items():
        np.testing.assert_array_equal(above[name], tensor, err_msg=f"{name}: a gradient below the limit is left alone")


def test_learning_rate_of_a_step_is_the_schedules():
    run = helpers.tiny()
    schedule = make_schedule(run.optimizer, run.train.steps)
    np.testing.assert_allclose(helpers.train(run, 20).lr, [float(schedule(i)) for i in range(20)], rtol=1e-6)


# ---- Master weights in bfloat16


def test_stochastic_rounding_is_unbiased_and_exact_where_nothing_is_cut_off():
    x = jnp.asarray([1.0, -1.0, 1.001, -1.001, 1 + 2**-9, 3e-5, -7.7e4, 0.0, 2**-8 * 1.3, jnp.inf, -jnp.inf], jnp.float32)
    n = 1 << 16  # as many as there are bits: each occurs once
    bits = jnp.broadcast_to(jnp.arange(n, dtype=jnp.uint16)[:, None], (n, len(x)))
    made = np.asarray(to_bfloat16(jnp.broadcast_to(x, (n, len(x))), bits).astype(jnp.float32), np.float64)
    finite = np.isfinite(np.asarray(x))
    np.testing.assert_allclose(made.mean(0)[finite], np.asarray(x, np.float64)[finite], rtol=1e-7)
    assert (made[:, ~finite] == np.asarray(x)[~finite]).all()
    assert [len(np.unique(column)) for column in made.T] == [1, 1, 2, 2, 2, 2, 2, 1, 2, 1, 1]
    assert np.isnan(to_bfloat16(jnp.asarray([jnp.nan]), jnp.asarray([65535], jnp.uint16)).astype(jnp.float32)).all()


def test_random_bits_of_weights_are_unbiased_and_of_each_step_layer_and_parameter():
    p = {"layers": {"a": jnp.ones((3, 64, 64), jnp.bfloat16), "b": jnp.ones((3, 64, 64), jnp.bfloat16)}}
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) + 2**-10, p)  # an eighth of the way to the next number

    def rounded(step: int, seed: int = 0) -> dict[str, np.ndarray]:
        made = Rounding(seed).rounded(exact, p, jnp.int32(step))["layers"]
        return {name: np.asarray(x.astype(jnp.float32)) for name, x in made.items()}

    steps = [rounded(step) for step in range(60)]
    up = np.stack([[s["a"] > 1, s["b"] > 1] for s in steps])  # (steps, parameters, layers, 64, 64)
    n = up.size
    assert abs(up.mean() - 1 / 8) < 5 * np.sqrt(1 / 8 * 7 / 8 / n)
    for axis in range(3):  # neighbours along steps, parameters and layers have nothing to do with each other
        here, there = np.take(up, 0, axis), np.take(up, 1, axis)
        assert abs((here & there).mean() - 1 / 64) < 6 * np.sqrt(1 / 64 / here.size)
    assert (rounded(7)["a"] == steps[7]["a"]).all() and (rounded(7, seed=1)["a"] != steps[7]["a"]).any()


def test_random_bits_do_not_depend_on_the_layout():
    """On four devices, on stages that hold the layers in another order, and layer by layer: the bits of one device."""
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

    order = Arrangement(6, 2, 2).order  # 2, 2, 1 and 1 layers, interleaved: two places are empty
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


@pytest.mark.parametrize("more", [{}, {"optimizer.offload": "moments"}, {"mesh.fsdp": 4, "optimizer.name": "muon"}])
def test_all_weights_move_where_masters_are_bfloat16(more):
    """At a learning rate of 1e-4 an update of 1.0, or of most weights, is far below half of bfloat16's steps."""
    run = helpers.tiny(BF16_MASTERS | more)
    before, after = helpers.initial_tensors(run), helpers.train(run, 5).tensors
    moved = {name: (after[name] != x).mean() for name, x in before.items() if name.startswith("params.")}
    vectors = {name for name in moved if is_vector(name)}
    assert len(vectors) == 2 * 7 + 1
    for name in moved:
        assert before[name].dtype == after[name].dtype == (np.float32 if name in vectors else jnp.bfloat16), name
        assert moved[name] == 1.0 if name in vectors and "bk" not in name else moved[name] > 0, (name, moved[name])

    # In the first step, which has the same gradients, as much as float32 masters do on average. Rounded to nearest, weights
    # above 0.03 would stay as they are.
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
    step, made = helpers.train_step(run), helpers.program(run)

    def on(state, first: int, last: int):
        for i in range(first, last):
            state, _ = step(state, place_batch(helpers.host_batch(run, i), made.batch, made.context))
        return state

    whole = on(helpers.fresh_state(run), 0, 4)
    half = {name: np.asarray(x) for name, x in to_tensors(on(helpers.fresh_state(run), 0, 2)).items()}
    homes = {name: a.sharding for name, a in abstract_tensors(made.state).items()}
    resumed = on(from_tensors(made.state, jax.device_put(half, homes)), 2, 4)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_plans_count_the_bytes_of_masters_in_either_type(kind):
    run = helpers.tiny({"dtypes.params": kind, "mesh.fsdp": 4})
    layout = bound.Layout(run, dataclasses.asdict(run.mesh), 4)
    assert bound.master_bytes(layout) == local_bytes(helpers.program(run).state.params)
