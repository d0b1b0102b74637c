"""Schedules, AdamW, groups, clipping and stochastic rounding, compared with formulas and with optax."""

import dataclasses
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config import schema
from jaxtrain.config.schema import ConfigError
from jaxtrain.models.rules import DELTA_KEYS
from jaxtrain.optim import groups
from jaxtrain.optim.optimizer import check_groups, make_optimizer, make_schedule, param_settings, weight_decay_mask
from jaxtrain.optim.rounding import Rounding, to_bfloat16
from jaxtrain.optim.update import make_update
from jaxtrain.step import guard
from jaxtrain.step.state import TrainState
from jaxtrain.step.train_step import make_train_step

F32 = schema.Dtypes("f32", "f32", "f32", "f32", "f32")
AXES = {"embed": {"w": ("vocab", "embed")}, "layers": {"w": ("layers", "embed", "mlp"), "scale": ("layers", "embed")}}


def toy(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"embed": {"w": (5, 3)}, "layers": {"w": (2, 3, 4), "scale": (2, 3)}}
    draw = lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def rate(o: schema.Optimizer, steps: int, step: int) -> float:
    """Return the learning rate of a step: a linear warm-up, the schedule's constant part, and the decay to lr_min."""
    peak = max(1, o.warmup_steps) - 1
    if step <= peak or o.schedule == "constant":
        return o.lr * min(1, (step + 1) / max(1, o.warmup_steps))
    left = steps - 1 - peak
    length = min(o.decay_steps or (steps // 5 if o.schedule == "wsd" else left), left)
    begin = steps - 1 - length if o.schedule == "wsd" else peak
    done = np.clip((step - begin) / length, 0, 1)
    shape = o.decay_shape if o.schedule == "wsd" else o.schedule
    done = {"cosine": (1 - np.cos(np.pi * done)) / 2, "sqrt": np.sqrt(done)}.get(shape, done)
    return o.lr + (o.lr_min - o.lr) * done


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_each_steps_rate_is_the_schedules(schedule):
    for steps, warmup, decay in ((1, 1, 0), (11, 0, 7), (12, 10, 1), (50, 10, 0), (50, 2, 7)):
        o = schema.Optimizer(lr=0.5, lr_min=0.1, warmup_steps=warmup, schedule=schedule, decay_steps=decay)
        found = np.broadcast_to(make_schedule(o, steps)(jnp.arange(steps)), steps)
        np.testing.assert_allclose(found, [rate(o, steps, i) for i in range(steps)], rtol=1e-5)


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
def test_the_decay_of_wsd_has_its_shape(shape):
    o = schema.Optimizer(lr=0.5, lr_min=0.1, warmup_steps=2, schedule="wsd", decay_steps=16, decay_shape=shape)
    found = np.asarray(make_schedule(o, 24)(jnp.arange(24)))
    np.testing.assert_allclose(found, [rate(o, 24, i) for i in range(24)], rtol=1e-6)
    # The peak, a sixteenth, a quarter and a half of the decay, and its end.
    wanted = {
        "linear": [0.5, 0.475, 0.4, 0.3, 0.1],
        "sqrt": [0.5, 0.4, 0.3, 0.5 - 0.4 * 0.5**0.5, 0.1],
        "cosine": [0.5, 0.49615706, 0.44142136, 0.3, 0.1],
    }
    np.testing.assert_allclose(found[[7, 8, 11, 15, 23]], wanted[shape], rtol=1e-6)
    assert found[23] == np.float32(0.1)


def test_decay_and_muon_are_for_matrices_only():
    features = {"model.qkv_bias": True, "model.qk_norm": True}
    axes = helpers.program(helpers.tiny(features)).definition.axes

    def chosen(tree: Any) -> set[str]:
        return {".".join(k.key for k in path) for path, yes in jax.tree_util.tree_leaves_with_path(tree) if yes}

    hidden = {f"layers.attention.{w}" for w in ("wq", "wk", "wv", "wo")} | {f"layers.mlp.{w}" for w in ("gate", "up", "down")}
    assert chosen(weight_decay_mask(axes)) == hidden | {"embed.embedding", "head"}
    for name, wanted in (("muon", hidden), ("adamw", set())):
        assert chosen(jax.tree.map(lambda c: c.muon, param_settings(schema.Optimizer(name=name), axes))) == wanted
    delta = {f"model.{name}": 4 for name in DELTA_KEYS} | {"model.attention_pattern": "dg"}
    of_delta = helpers.program(helpers.tiny(delta)).definition.axes["layers"]["0_of_2"]["delta"]
    assert chosen(weight_decay_mask(of_delta)) == {"wq", "wk", "wv", "wz", "wa", "wb", "wo"}


def test_adamw_equals_optax():
    """Thirty updates on made-up gradients, scaled by -lr(step) as in a train step, equal those of optax.adamw."""
    o = schema.Optimizer(lr=1e-2, lr_min=1e-3, warmup_steps=10, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-6)
    schedule = make_schedule(o, 30)
    ours = make_optimizer(o, F32, AXES)
    mask = {"embed": {"w": True}, "layers": {"w": True, "scale": False}}
    theirs = optax.adamw(schedule, 0.8, 0.9, 1e-6, weight_decay=0.3, mask=mask)
    p, q = toy(0), toy(0)
    s, t = ours.init(p), theirs.init(q)
    step, their_step = jax.jit(ours.update), jax.jit(theirs.update)
    for i in range(30):
        updates, s = step(toy(i + 1), s, p)
        p = jax.tree.map(lambda a, u, i=i: a - schedule(i) * u, p, updates)
        updates, t = their_step(toy(i + 1), t, q)
        q = optax.apply_updates(q, updates)
    for a, b, start in zip(*map(jax.tree.leaves, (p, q, toy(0))), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)
        assert np.abs(a - start).max() > 0.01


# ---- A step


def taken(clip: float, loss: float = 1.0) -> tuple[TrainState, dict[str, Any]]:
    """Take step 3 of gradient descent at a rate of 1/4, for one weight vector whose gradient has the norm 5."""
    params = {"w": jnp.asarray([1.0, 2.0])}

    def gradients(params: Any, batch: Any) -> Any:
        return (jnp.float32(loss), {}), {"w": jnp.asarray([3.0, 4.0])}

    update = make_update(optax.identity(), Rounding(0))
    step = make_train_step(gradients, update, lambda i: 2.0 ** (1 - i), trained={"w": True}, clip_norm=clip)
    state = TrainState(jnp.int32(3), params, optax.EmptyState(), guard.init_guard())
    return step(state, {})


@pytest.mark.parametrize(("clip", "length"), [(0.0, 5.0), (0.5, 0.5), (1000.0, 5.0)])
def test_clipping_shortens_a_gradient_to_the_norm_and_never_lengthens_it(clip, length):
    state, metrics = taken(clip)
    np.testing.assert_allclose(state.params["w"], np.array([1.0, 2.0]) - 0.25 * length * np.array([0.6, 0.8]), rtol=1e-6)
    assert (float(metrics["grad_norm"]), float(metrics["lr"])) == (5.0, 0.25)  # the norm before the clip
    assert int(state.step) == 4


def test_a_step_without_a_number_counts_and_changes_nothing():
    state, metrics = taken(1.0, float("nan"))
    np.testing.assert_array_equal(state.params["w"], [1.0, 2.0])
    assert (int(metrics["verdict"]), int(state.step)) == (guard.NOT_FINITE, 4)


# ---- Groups


def updates(o: schema.Optimizer) -> dict[str, Any]:
    tx = make_optimizer(o, F32, AXES)
    return tx.update(toy(1), tx.init(toy(0)), toy(0))[0]


def test_groups_change_rates_and_decay_exactly():
    """A parameter belongs to the first group that matches. A decay of 0 is a setting too."""
    plain = schema.Optimizer(weight_decay=0.3)
    was, bare = updates(plain), updates(dataclasses.replace(plain, weight_decay=0.0))
    text = "embed.*:weight_decay=0; layers.w*:lr=0.25; layers.*:lr=2,weight_decay=0.5"
    now = updates(dataclasses.replace(plain, groups=text))
    np.testing.assert_array_equal(now["embed"]["w"], bare["embed"]["w"])
    np.testing.assert_array_equal(now["layers"]["w"], np.float32(0.25) * was["layers"]["w"])
    scale = 2 * (bare["layers"]["scale"] + 0.5 * toy(0)["layers"]["scale"])
    np.testing.assert_allclose(now["layers"]["scale"], scale, rtol=1e-6, atol=1e-7)


def test_groups_that_fit_nothing_are_refused():
    """Refused: no such parameter, a layer's number, parameters of earlier groups, and Muon for a vector."""
    for text in ("layers.wx:lr=1", "layers.0.w:lr=1", "layers.*:lr=1;layers.w:lr=2", "layers.s*:optimizer=muon"):
        with pytest.raises(ConfigError):
            check_groups(schema.Optimizer(name="muon", groups=text), AXES)
    check_groups(schema.Optimizer(name="muon", groups="layers.w:lr=1;layers.?*:lr=2;embed*:optimizer=muon"), AXES)
    with pytest.raises(ConfigError, match="haed"):
        helpers.program(helpers.tiny({"optimizer.groups": "haed:lr=1"}))
    assert len(groups.find_group_problems("head:rate=1,lr=x;;body;embed.*:lr=1", "adamw")) == 3


# ---- Master weights in bfloat16


def test_stochastic_rounding_is_unbiased_and_exact_where_nothing_is_cut_off():
    x = jnp.asarray([1.0, -1.0, 1.001, -1.001, 1 + 2**-9, 3e-5, -7.7e4, 0.0, 2**-8 * 1.3, jnp.inf, -jnp.inf], jnp.float32)
    n = 1 << 16  # one element for each pattern of the random bits: each pattern occurs once
    bits = jnp.broadcast_to(jnp.arange(n, dtype=jnp.uint16)[:, None], (n, len(x)))
    made = np.asarray(to_bfloat16(jnp.broadcast_to(x, (n, len(x))), bits).astype(jnp.float32), np.float64)
    finite = np.isfinite(np.asarray(x))
    np.testing.assert_allclose(made.mean(0)[finite], np.asarray(x, np.float64)[finite], rtol=1e-7)
    assert (made[:, ~finite] == np.asarray(x)[~finite]).all()
    assert [len(np.unique(column)) for column in made.T] == [1, 1, 2, 2, 2, 2, 2, 1, 2, 1, 1]
    assert np.isnan(to_bfloat16(jnp.asarray([jnp.nan]), jnp.asarray([65535], jnp.uint16)).astype(jnp.float32)).all()
