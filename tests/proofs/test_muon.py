"""Muon against its definition by singular values, on one device and sharded; stored state; resumed runs."""

import dataclasses
import re
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from states import assert_same, resumed, save, stepped, trained

from jaxtrain import config, flops
from jaxtrain.config import ConfigError
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.optim import muon
from jaxtrain.optim.optimizer import FLOAT32, make_optimizer, make_schedule
from jaxtrain.optim.rounding import Rounding
from jaxtrain.optim.update import at_once, streamed
from jaxtrain.plan.search import bound
from jaxtrain.sharding import make_placement
from jaxtrain.train import compiler, state

MUON = {"optimizer.name": "muon"}
SMALL = MUON | {"model.num_layers": 2, "data.seq_len": 32}
RECIPE = config.Optimizer(name="muon", weight_decay=0.3, momentum=0.9, beta1=0.8, beta2=0.9, eps=1e-6)
TYPES = config.Dtypes("f32", "f32", "f32", "f32", "f32")
BF16 = Numerics(jnp.dtype("bfloat16"), jnp.dtype("bfloat16"), jnp.dtype("float32"))
LR = jnp.float32(0.02)

AXES = {
    "embed": {"embedding": ("vocab", "embed")},
    "layers": {
        "wq": ("layers", "embed", "heads", "head_dim"),
        "wk": ("layers", "embed", None, "head_dim"),  # as if ranks shared key/value heads
        "down": ("layers", "embed", "mlp"),
        "experts": ("layers", "experts", "expert_embed", "mlp"),  # each expert's matrix separately
        "bq": ("layers", "heads", "head_dim"),
        "scale": ("layers", "embed"),
    },
}
SHAPES = {"embedding": (24, 8), "wq": (3, 8, 4, 6), "wk": (3, 8, 2, 2), "down": (3, 8, 16), "bq": (3, 4, 6), "scale": (3, 8)}
SHAPES |= {"experts": (3, 4, 8, 12)}
HIDDEN = {"wq": (8, 24), "wk": (8, 4), "down": (8, 16), "experts": (8, 12)}  # (rows, columns)


def toy(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: rng.standard_normal(SHAPES[path[-1].key]).astype(np.float32),
        AXES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def by_name(tree: Any) -> dict[str, np.ndarray]:
    return {path[-1].key: np.asarray(x, np.float64) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


# ---- The definition, in float64: its polynomial is applied to singular values, not to matrices


def about_orthogonal(x: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    u, s, vt = np.linalg.svd(x.reshape(-1, *shape), full_matrices=False)
    s = s / np.sqrt((s**2).sum(-1, keepdims=True))
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return ((u * s[:, None]) @ vt).reshape(x.shape)


def muon_step(p, g, m, shape, o: config.Optimizer, lr: float):
    m = o.momentum * m + (1 - o.momentum) * g
    u = 0.2 * np.sqrt(max(shape)) * about_orthogonal((1 - o.momentum) * g + o.momentum * m, shape)
    return p - lr * (u + o.weight_decay * p), m


def adam_step(p, g, m, v, t: int, decay: float, o: config.Optimizer, lr: float):
    m, v = o.beta1 * m + (1 - o.beta1) * g, o.beta2 * v + (1 - o.beta2) * g * g
    u = m / (1 - o.beta1**t) / (np.sqrt(v / (1 - o.beta2**t)) + o.eps)
    return p - lr * (u + decay * p), m, v


@pytest.fixture(scope="module")
def expected() -> list[dict[str, np.ndarray]]:
    """Return the toy model's parameters after each of three steps, by the definitions of Muon and Adam."""
    p = by_name(toy(0))
    m, v, out = {n: 0 * x for n, x in p.items()}, {n: 0 * x for n, x in p.items()}, []
    for t in (1, 2, 3):
        g, lr = by_name(toy(t)), float(LR)
        for n in p:
            if n in HIDDEN:
                p[n], m[n] = muon_step(p[n], g[n], m[n], HIDDEN[n], RECIPE, lr)
            else:
                decay = RECIPE.weight_decay if n == "embedding" else 0.0
                p[n], m[n], v[n] = adam_step(p[n], g[n], m[n], v[n], t, decay, RECIPE, lr)
        out.append(dict(p))
    return out


def placed(mesh: dict[str, Any]) -> Any:
    run = helpers.tiny(mesh)
    return make_placement(run, helpers.devices_of(run))


def steps(o: config.Optimizer, dtypes: config.Dtypes, mesh: dict[str, Any], numerics: Numerics = FLOAT32, count: int = 3):
    """Return the toy model's parameters after each step, and the last optimizer state."""
    placement = placed(mesh)
    tx = make_optimizer(o, dtypes, AXES, placement, numerics)
    homes = jax.tree.map(lambda p, a: placement.sharding(a), toy(0), AXES)
    params, update = jax.device_put(toy(0), homes), jax.jit(at_once(tx, Rounding(0)))
    current, out = tx.init(params), []
    for t in (1, 2, 3)[:count]:
        params, current = update(jax.device_put(toy(t), homes), current, params, None, LR, True, jnp.int32(t - 1))
        out.append(by_name(params))
    return out, current


MESHES = {
    "one device": {},
    "fsdp8": {"mesh.fsdp": 8},  # more devices than layers
    "data2xfsdp2xtensor2": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
    "layers over stages": {"mesh.stage": 3, "mesh.tensor": 2},
    "experts": {"mesh.expert": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
}


@pytest.mark.parametrize("mesh", MESHES)
def test_first_three_steps_are_the_definitions(mesh, expected):
    for t, (got, wanted) in enumerate(zip(steps(RECIPE, TYPES, MESHES[mesh])[0], expected, strict=True)):
        for n, x in wanted.items():
            np.testing.assert_allclose(got[n], x, rtol=2e-5, atol=2e-5, err_msg=f"{n}, step {t + 1}")
    moved = {n: np.abs(x - by_name(toy(0))[n]).max() for n, x in expected[-1].items()}
    assert min(moved.values()) > 0.01


def test_first_three_steps_of_a_run():
    """Three steps of a run with clipping and a schedule change weights as the definition does. The gradients are derived from
    the stored momentum.
    """
    run = helpers.tiny(SMALL)
    rates = make_schedule(run.optimizer, run.train.steps)
    before, o = helpers.initial_tensors(run), run.optimizer
    for t in range(3):
        after = helpers.train(run, t + 1).tensors
        for name in (f"layers.{i}.{w}" for i in range(2) for w in ("attention.wq", "attention.wo", "attention.wk", "mlp.down")):
            was, now = (tensors[f"optimizer.mu.{name}"].astype(np.float64) for tensors in (before, after))
            g, p = (now - o.momentum * was) / (1 - o.momentum), before[f"params.{name}"].astype(np.float64)
            wanted, _ = muon_step(p, g, was, (p.shape[0], p[0].size), o, float(rates(t)))
            moved = np.abs(wanted - p).max()
            np.testing.assert_allclose(
                after[f"params.{name}"], wanted, rtol=0, atol=2e-3 * moved, err_msg=f"{name}, step {t + 1}"
            )
        before = after
    assert not [n for n in before if ".nu." in n and ("attention.w" in n or "mlp." in n.replace("mlp_norm", ""))]
    assert {n for n in before if ".nu." in n} >= {"optimizer.nu.head", "optimizer.nu.layers.1.mlp_norm.scale"}


# ---- Newton-Schulz


@pytest.mark.parametrize("numerics", [FLOAT32, BF16])
def test_orthogonal_at_any_scale_and_either_way_up(numerics):
    x = np.random.default_rng(0).standard_normal((2, 12, 40)).astype(np.float32)
    x[1] = 0
    wide = np.asarray(muon.newton_schulz(jnp.asarray(x), numerics), np.float64)
    s = np.linalg.svd(wide[0], compute_uv=False)
    assert s.min() > 0.6 and s.max() < 1.25
    assert (wide[1] == 0).all()
    atol = 1e-5 if numerics is FLOAT32 else 0.03
    np.testing.assert_allclose(wide[0], about_orthogonal(x[0].astype(np.float64), (12, 40)), atol=atol)
    for other in (1e-12 * x, 1e12 * x):
        np.testing.assert_allclose(muon.newton_schulz(jnp.asarray(other), numerics), wide, atol=atol)
    tall = muon.newton_schulz(jnp.asarray(x.transpose(0, 2, 1)), numerics)
    np.testing.assert_allclose(np.asarray(tall, np.float64).transpose(0, 2, 1), wide, atol=atol)
    assert tall.dtype == numerics.compute


def test_devices_share_the_layers():
    """Each of 8 devices computes the updates of 2 of 16 layers and never gathers other layers. Layers are exchanged by
    all-to-all, without an all-gather or all-reduce.
    """
    placement, axes = placed({"mesh.fsdp": 4, "mesh.tensor": 2}), {"layers": {"down": AXES["layers"]["down"]}}
    tx = make_optimizer(RECIPE, TYPES, axes, placement)
    home = placement.sharding(axes["layers"]["down"])
    a = {"layers": {"down": jax.ShapeDtypeStruct((16, 8, 6), jnp.float32, sharding=home)}}
    shapes = jax.tree.map(lambda x: x.update(sharding=home) if x.ndim else x, jax.eval_shape(tx.init, a))
    text = jax.jit(lambda g, s: tx.update(g, s, g)).lower(a, shapes).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text and len(re.findall(r" all-to-all\(", text)) == 4
    assert not re.search(r"f32\[16,8,6\]|f32\[16,6,", text)
    assert re.search(r"f32\[2,6,6\]\S* dot\(", text) or re.search(r"f32\[2,6,6\]", text)


# ---- Stored state


@pytest.mark.parametrize(("m", "atol"), [("bf16", 0.02), ("int8", 0.04)])
def test_momentum_is_stored_in_its_type(m, atol):
    """Updates stay near those with float32 momentum. The first update is equal: it uses the new momentum before rounding. Int8
    momentum needs at least 4096 elements a layer.
    """
    axes = {"layers": {"w": ("layers", "embed", "mlp")}, "head": ("vocab", "embed")}
    rng = np.random.default_rng(0)
    trees = [
        {"layers": {"w": jnp.asarray(rng.standard_normal((2, 16, 256)), jnp.float32)}, "head": jnp.ones((4, 16))}
        for _ in range(4)
    ]
    kept, exact = (make_optimizer(RECIPE, dataclasses.replace(TYPES, m=kind), axes) for kind in (m, "f32"))
    s, t = kept.init(trees[0]), exact.init(trees[0])
    for i in range(3):
        got, s = kept.update(trees[i + 1], s, trees[0])
        wanted, t = exact.update(trees[i + 1], t, trees[0])
        difference = np.abs(got["layers"]["w"] - wanted["layers"]["w"]).max()
        assert difference < atol and (difference == 0) == (i == 0)
    stored = s[0].mu["layers"]["w"]
    assert {x.dtype.name for x in jax.tree.leaves(stored)} == ({"bfloat16"} if m == "bf16" else {"uint8", "float32"})
    assert s[0].nu["layers"]["w"] == optax.MaskedNode()


def test_streamed_from_the_host():
    """An update layer by layer agrees with the update of all layers at once, up to the order of sums in matmuls."""
    placement = placed({"mesh.fsdp": 2})
    how = (RECIPE, TYPES, AXES, placement, FLOAT32)
    tx = make_optimizer(*how)
    grads, params = jax.tree.map(jnp.asarray, (toy(1), toy(0)))
    updates = at_once(tx, Rounding(0)), streamed(*how, Rounding(0))
    a, b = (jax.jit(update)(grads, tx.init(params), params, None, LR, True, jnp.int32(0)) for update in updates)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6, atol=1e-7)


def test_stopped_and_resumed(tmp_path):
    """Two steps, a checkpoint, a restore and one more step equal three steps, bit for bit."""
    run = helpers.tiny(SMALL)
    save(run, trained(run, 2), tmp_path)
    current = resumed(run, tmp_path)
    assert current.optimizer[0].nu["layers"]["mlp"]["gate"] == optax.MaskedNode()
    assert_same(state.to_tensors(stepped(run, current, range(2, 3))), helpers.train(run, 3).tensors)
    for changes, rule in (
        ({"optimizer.name": "adamw"}, "can never change on resume: another optimizer stores other tensors"),
        ({"optimizer.momentum": 0.9}, "allow_change=optimizer.momentum"),
    ):
        with pytest.raises(ConfigError, match=rule):
            resumed(helpers.tiny(SMALL | changes), tmp_path)


def test_bounds_count_what_is_held():
    """The bounds of the plan's search count the optimizer state's bytes on a device, and each matmul of Newton-Schulz."""
    run = helpers.tiny(MUON | {"mesh.fsdp": 4, "mesh.tensor": 2, "dtypes.m": "bf16"})
    sizes = {"data": 1, "fsdp": 4, "tensor": 2, "seq": 1}
    held = compiler.local_bytes(helpers.program(run).state.optimizer)
    assert bound.moment_bytes(bound.Layout(run, sizes, 8)) == pytest.approx(held - 4, rel=0.01)  # without the counter
    other = dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, groups="head:optimizer=muon"))
    assert bound.moment_bytes(bound.Layout(other, sizes, 8)) < compiler.local_bytes(helpers.program(other).state.optimizer)
    products = 0
    for rows, columns in 4 * [*2 * [(64, 64)], *2 * [(64, 32)], *3 * [(64, 96)]]:
        short, long = min(rows, columns), max(rows, columns)
        products += 5 * (2 * short * long * short + 2 * short * short * short + 2 * short * short * long)
    assert flops.newton_schulz(run.model) == products


# ---- Groups


def updates(o: config.Optimizer) -> tuple[dict[str, np.ndarray], Any]:
    tx = make_optimizer(o, TYPES, AXES)
    made, current = tx.update(jax.tree.map(jnp.asarray, toy(1)), tx.init(toy(0)), toy(0))
    return {path[-1].key: np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(made)}, current


def test_groups_move_parameters_between_the_two():
    o = dataclasses.replace(RECIPE, groups="*.down:optimizer=adamw;embed.*:optimizer=muon")
    now, current = updates(o)
    adam, _ = updates(dataclasses.replace(RECIPE, name="adamw"))
    was, _ = updates(RECIPE)
    np.testing.assert_array_equal(now["down"], adam["down"])
    np.testing.assert_array_equal(now["wq"], was["wq"])
    g, p = toy(1)["embed"]["embedding"], toy(0)["embed"]["embedding"]
    wanted = 0.2 * np.sqrt(24) * about_orthogonal(g.astype(np.float64), (24, 8)) + RECIPE.weight_decay * p
    np.testing.assert_allclose(now["embedding"], wanted, rtol=1e-4, atol=1e-4)
    assert {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(current[0].nu)} == {"down", "bq", "scale"}
