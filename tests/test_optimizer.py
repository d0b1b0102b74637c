"""Schedules, weight decay's mask, stored moments, clipping, and AdamW against optax's own."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import config
from jaxtrain.optimizer import DTYPES, decayed, make_optimizer, make_schedule, stored_moments

BASE = config.Optimizer(lr=1.0, lr_min=0.1, warmup_steps=10)
F32 = config.Dtypes("f32", "f32", "f32", "f32", "f32")


def rates(steps: int, **changes) -> np.ndarray:
    """Learning rate at each step, and at `steps`, which is never taken."""
    schedule = make_schedule(dataclasses.replace(BASE, **changes), steps)
    return np.array([float(schedule(jnp.asarray(i))) for i in range(steps + 1)])


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_warmup(schedule):
    lr = rates(100, schedule=schedule)
    np.testing.assert_allclose(lr[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert lr[10] == pytest.approx(1.0)
    assert lr.max() == pytest.approx(1.0)
    assert rates(100, schedule=schedule, warmup_steps=0)[0] == pytest.approx(1.0)
    assert rates(100, schedule=schedule, warmup_steps=1)[:2] == pytest.approx([1.0, 1.0], rel=2e-3, abs=1e-2)


def test_constant():
    assert (rates(100, schedule="constant")[10:] == 1.0).all()


def test_cosine():
    lr = rates(110, schedule="cosine")
    expected = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * np.arange(101) / 100))
    np.testing.assert_allclose(lr[10:], expected, rtol=1e-5)
    assert lr[-1] == pytest.approx(0.1)


def test_linear_and_decay_steps():
    lr = rates(110, schedule="linear")
    np.testing.assert_allclose(lr[10:], np.linspace(1.0, 0.1, 101), rtol=1e-5)
    short = rates(110, schedule="linear", decay_steps=50)
    np.testing.assert_allclose(short[10:61], np.linspace(1.0, 0.1, 51), rtol=1e-5)
    np.testing.assert_allclose(short[61:], 0.1, rtol=1e-5)


def test_warmup_stable_decay():
    lr = rates(100, schedule="wsd")  # the last fifth decays
    np.testing.assert_allclose(lr[9:81], 1.0, rtol=1e-6)
    np.testing.assert_allclose(lr[80:], np.linspace(1.0, 0.1, 21), rtol=1e-5)
    longer = rates(100, schedule="wsd", decay_steps=40)
    np.testing.assert_allclose(longer[60:], np.linspace(1.0, 0.1, 41), rtol=1e-5)


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


def test_learning_rate_of_a_step_is_the_schedules():
    run = helpers.tiny()
    schedule = make_schedule(run.optimizer, run.train.steps)
    np.testing.assert_allclose(helpers.train(run, 20).lr, [float(schedule(i)) for i in range(20)], rtol=1e-6)
