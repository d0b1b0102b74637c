"""Schedules, AdamW, groups, clipping and stochastic rounding, compared with formulas and with optax."""

import dataclasses
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import config, resume
from jaxtrain.config import ConfigError
from jaxtrain.optim import groups, muon
from jaxtrain.optim.optimizer import DTYPES, check_groups, choices, decayed, make_optimizer, make_schedule, stored_moments
from jaxtrain.optim.rounding import Rounding, to_bfloat16
from jaxtrain.optim.update import at_once
from jaxtrain.plan.search import bound
from jaxtrain.train import guard
from jaxtrain.train.compiler import local_bytes
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import make_train_step

F32 = config.Dtypes("f32", "f32", "f32", "f32", "f32")
MUON = {"optimizer.name": "muon"}
AXES = {"embed": {"w": ("vocab", "embed")}, "layers": {"w": ("layers", "embed", "mlp"), "scale": ("layers", "embed")}}


def toy(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"embed": {"w": (5, 3)}, "layers": {"w": (2, 3, 4), "scale": (2, 3)}}
    draw = lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def rate(o: config.Optimizer, steps: int, step: int) -> float:
    """Return the learning rate of a step: a linear warm-up, the schedule's constant part, and the decay to lr_min."""
    peak = max(1, o.warmup_steps) - 1
    if step <= peak or o.schedule == "constant":
        return o.lr * min(1, (step + 1) / max(1, o.warmup_steps))
    left = steps - 1 - peak
    length = min(o.decay_steps or (steps // 5 if o.schedule == "wsd" else left), left)
    begin = steps - 1 - length if o.schedule == "wsd" else peak
    done = np.clip((step - begin) / length, 0, 1)
    done = (1 - np.cos(np.pi * done)) / 2 if o.schedule == "cosine" else done
    return o.lr + (o.lr_min - o.lr) * done


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_no_rate_is_below_zero(schedule):
    """The schedule clips the rate at 0. Without this clip, a compiled linear decay of these lengths ends 3e-11 below 0."""
    for steps in (8, 16, 39):
        o = config.Optimizer(lr=1e-3, lr_min=0.0, warmup_steps=2, schedule=schedule)
        assert float(jax.jit(jax.vmap(make_schedule(o, steps)))(jnp.arange(steps)).min()) == 0.0


@pytest.mark.parametrize("warmup", [0, 1, 2, 10])
@pytest.mark.parametrize("steps", [1, 11, 12, 50])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_each_steps_rate_is_the_schedules(schedule, steps, warmup):
    for decay in (0, 1, 7):
        o = config.Optimizer(
            lr=0.5, lr_min=0.1, warmup_steps=min(warmup, steps), schedule=schedule, decay_steps=0 if steps == 1 else decay
        )
        found = np.broadcast_to(make_schedule(o, steps)(jnp.arange(steps)), steps)
        np.testing.assert_allclose(found, [rate(o, steps, i) for i in range(steps)], rtol=1e-5)


def test_decay_and_muon_are_for_matrices_only():
    features = {"model.qkv_bias": True, "model.qk_norm": True}
    axes = helpers.program(helpers.tiny(features)).definition.axes

    def chosen(tree: Any) -> set[str]:
        return {".".join(k.key for k in path) for path, yes in jax.tree_util.tree_leaves_with_path(tree) if yes}

    hidden = {f"layers.attention.{w}" for w in ("wq", "wk", "wv", "wo")} | {f"layers.mlp.{w}" for w in ("gate", "up", "down")}
    assert chosen(decayed(axes)) == hidden | {"embed.embedding", "head"}
    for name, wanted in (("muon", hidden), ("adamw", set())):
        assert chosen(jax.tree.map(lambda c: c.muon, choices(config.Optimizer(name=name), axes))) == wanted


@pytest.mark.parametrize(
    ("axes", "found"),
    [
        (("layers", "embed", "heads", "head_dim"), (1, 1)),
        (("heads", "head_dim", "embed"), (0, 2)),
        (("layers", "experts", "embed", "mlp"), (2, 1)),
        (("vocab", "embed"), (0, 1)),
        (("layers", "heads", "head_dim"), (0, 0)),
        (("layers", "embed"), (0, 0)),
        (("layers", "head_dim"), (0, 0)),
    ],
)
def test_axes_say_where_a_matrix_is(axes, found):
    assert muon.dims(axes) == found


def test_adamw_equals_optax():
    """Thirty updates on made-up gradients, scaled by -lr(step) as in a train step, equal those of optax.adamw."""
    o = config.Optimizer(lr=1e-2, lr_min=1e-3, warmup_steps=10, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-6)
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


@pytest.mark.parametrize(("m", "v"), [("bf16", "f32"), ("f32", "bf16"), ("bf16", "bf16")])
def test_moments_are_stored_in_their_types_and_updated_in_f32(m, v):
    tx = stored_moments(m, v, AXES, 0.9, 0.95, 1e-8)
    exact = optax.scale_by_adam(0.9, 0.95, 1e-8)
    s, t = tx.init(toy(0)), exact.init(toy(0))
    for i in range(3):
        updates, s = tx.update(toy(i + 1), s, toy(0))
        wanted, t = exact.update(toy(i + 1), t, toy(0))
    assert {a.dtype for a in jax.tree.leaves(s.mu)} == {jnp.dtype(DTYPES[m])}
    assert {a.dtype for a in jax.tree.leaves(s.nu)} == {jnp.dtype(DTYPES[v])}
    ours, theirs = updates["layers"]["w"], wanted["layers"]["w"]
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=2e-2)  # bf16 has 8 significant bits
    assert (ours != theirs).any()


# ---- A step


def taken(clip: float, loss: float = 1.0) -> tuple[TrainState, dict[str, Any]]:
    """Take step 3 of gradient descent at a rate of 1/4, for one weight vector whose gradient has the norm 5."""
    params = {"w": jnp.asarray([1.0, 2.0])}

    def gradients(params: Any, batch: Any) -> Any:
        return (jnp.float32(loss), {}), {"w": jnp.asarray([3.0, 4.0])}

    update = at_once(optax.identity(), Rounding(0))
    step = make_train_step(gradients, update, lambda i: 2.0 ** (1 - i), trained={"w": True}, clip_norm=clip)
    state = TrainState(jnp.int32(3), params, optax.EmptyState(), guard.fresh())
    return step(state, {})


@pytest.mark.parametrize(("clip", "length"), [(0.0, 5.0), (0.5, 0.5), (4.0, 4.0), (5.5, 5.0), (1000.0, 5.0)])
def test_clipping_shortens_a_gradient_to_the_norm_and_never_lengthens_it(clip, length):
    state, metrics = taken(clip)
    np.testing.assert_allclose(state.params["w"], np.array([1.0, 2.0]) - 0.25 * length * np.array([0.6, 0.8]), rtol=1e-6)
    assert (float(metrics["grad_norm"]), float(metrics["lr"])) == (5.0, 0.25), "the norm is told before it is clipped"
    assert int(state.step) == 4


def test_a_step_without_a_number_counts_and_changes_nothing():
    state, metrics = taken(1.0, float("nan"))
    np.testing.assert_array_equal(state.params["w"], [1.0, 2.0])
    assert (int(metrics["verdict"]), int(state.step)) == (guard.NOT_FINITE, 4)


# ---- Groups


def updates(o: config.Optimizer) -> dict[str, Any]:
    tx = make_optimizer(o, F32, AXES)
    return tx.update(toy(1), tx.init(toy(0)), toy(0))[0]


def test_groups_change_rates_and_decay_exactly():
    """A parameter belongs to the first group that matches. A decay of 0 is a setting too."""
    plain = config.Optimizer(weight_decay=0.3)
    was, bare = updates(plain), updates(dataclasses.replace(plain, weight_decay=0.0))
    text = "embed.*:weight_decay=0; layers.w*:lr=0.25; layers.*:lr=2,weight_decay=0.5"
    now = updates(dataclasses.replace(plain, groups=text))
    np.testing.assert_array_equal(now["embed"]["w"], bare["embed"]["w"])
    np.testing.assert_array_equal(now["layers"]["w"], np.float32(0.25) * was["layers"]["w"])
    scale = 2 * (bare["layers"]["scale"] + 0.5 * toy(0)["layers"]["scale"])
    np.testing.assert_allclose(now["layers"]["scale"], scale, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("layers.wx:lr=1", "'layers.wx' matches no parameter. There are embed.w, layers.scale"),
        ("layers.0.w:lr=1", "names a layer by number"),
        ("layers.*:lr=1;layers.w:lr=2", "belong to earlier groups: layers.w"),
        ("layers.s*:optimizer=muon", "layers.scale is no matrix"),
    ],
)
def test_groups_that_fit_nothing_are_refused(text, word):
    with pytest.raises(ConfigError) as error:
        check_groups(config.Optimizer(name="muon", groups=text), AXES)
    assert word in str(error.value)
    check_groups(config.Optimizer(name="muon", groups="layers.w:lr=1;layers.?*:lr=2;embed*:optimizer=muon"), AXES)


def test_a_program_is_not_built_with_groups_that_fit_nothing():
    with pytest.raises(ConfigError, match=r"'haed' matches no parameter"):
        helpers.program(helpers.tiny({"optimizer.groups": "haed:lr=1"}))


def test_all_mistakes_in_groups_are_reported():
    assert len(groups.problems("head:rate=1,lr=x;;body;embed.*:lr=1", "adamw")) == 3


def test_groups_on_resume():
    """Rates and decay may change on resume if allowed. The optimizer of a parameter may not."""
    was, rates, moved = (
        config.to_dict(helpers.tiny(MUON | {"optimizer.groups": text})) for text in ("", "head:lr=2", "head:optimizer=muon")
    )
    assert "allow_change=optimizer.groups" in resume.compare(was, rates)[1][0].remedy
    assert not resume.compare(was, rates, "optimizer.groups")[1]
    (problem,) = resume.compare(was, moved, "optimizer.groups")[1]
    assert "can never change" in problem.rule


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


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_plans_count_the_bytes_of_masters_in_either_type(kind):
    run = helpers.tiny({"dtypes.params": kind, "mesh.fsdp": 4})
    layout = bound.Layout(run, dataclasses.asdict(run.mesh), 4)
    assert bound.master_bytes(layout) == local_bytes(helpers.program(run).state.params)
