"""Optimizers: Muon against its definition; states in few bits, on the host and in checkpoints; bfloat16 master weights."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import schema
from jaxtrain.config.layout import Arrangement
from jaxtrain.config.shapes import is_vector
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.optim import muon
from jaxtrain.optim.optimizer import FLOAT32, adam_with_dtypes, make_optimizer, make_schedule
from jaxtrain.optim.rounding import Rounding
from jaxtrain.optim.update import make_streamed_update, make_update
from jaxtrain.sharding import make_placement
from jaxtrain.step import compiler, memory
from jaxtrain.step.batch import place_batch
from jaxtrain.step.state import is_moment, to_tensors
from jaxtrain.train.initial_state import choose_start, initial_state


def trained(run: schema.RunConfig, steps: int = 2) -> Any:
    return stepped(run, helpers.fresh_state(run), range(steps))


def stepped(run: schema.RunConfig, current: Any, steps: range) -> Any:
    """Take these steps from a state, whose buffers are donated, and return the new state."""
    made = helpers.program(run)
    for i in steps:
        batch = place_batch(helpers.host_batch(run, i), made.batch, made.context)
        current, _ = helpers.train_step(run)(current, batch)
    return current


def save(run: schema.RunConfig, current: Any, folder: Path) -> dict[str, np.ndarray]:
    tensors = to_tensors(current)
    checkpoints = Checkpoints(folder)
    meta = {"config": schema.to_dict(run), "data": {"tokens": 0, "fingerprint": {}}}
    checkpoints.save(int(current.step), tensors, meta)
    checkpoints.close()
    return {name: np.asarray(x) for name, x in tensors.items()}


def resumed(run: schema.RunConfig, folder: Path) -> Any:
    """Return the state from which a run starts that resumes from `folder`, or begins with init.from."""
    checkpoints, program = Checkpoints(folder), helpers.program(run)
    start = choose_start(run, checkpoints, program)
    assert start.resumed != bool(run.init.from_)
    return initial_state(program, start, checkpoints, print)[0]


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(x), err_msg=name)


@pytest.mark.parametrize("beta2", [0.98, 0.99])
def test_second_moments_in_bfloat16_follow_gradients_only_where_they_decay_fast(beta2):
    """Up to a beta2 of 0.98, updates differ by less than 1% from those with float32 moments. `validate` refuses a higher beta2.

    Gradients span three decades. From step 1,000 on, they are multiplied by 0.03.
    """
    rng, n, steps = np.random.default_rng(0), 256, 3000
    scales = np.where(np.arange(steps) < 1000, 1.0, 0.03)[:, None]
    grads = jnp.asarray(10 ** rng.uniform(-4, -1, n) * scales * rng.standard_normal((steps, n)), jnp.float32)

    def updates(v: str) -> np.ndarray:
        tx = adam_with_dtypes("f32", v, {"w": ("embed",)}, 0.9, beta2, 1e-12)

        def step(i, carry):
            state, total = carry
            u, state = tx.update({"w": grads[i]}, state)
            return state, total + jnp.where(i >= steps - 1000, jnp.abs(u["w"]), 0)

        return np.asarray(jax.lax.fori_loop(0, steps, step, (tx.init({"w": grads[0]}), jnp.zeros(n)))[1])

    off = np.sqrt(np.mean((updates("bf16") / updates("f32") - 1) ** 2))
    assert (off < 0.01) == (beta2 <= 0.98), off


# ---- Moments in 8-bit blocks, on devices and on the host. proofs/test_plan_memory.py has the plan's figures

# Blocks need 4096 elements a layer: heads of 16 give attention's weights blocks too. Every step clips its gradients.
SIZES = {"model.num_layers": 2, "model.head_dim": 16, "model.d_ff": 512, "data.seq_len": 32, "optimizer.clip_norm": 0.1}
INT8 = {"dtypes.m": "int8", "dtypes.v": "int8"}
SPLIT = {"mesh.fsdp": 2, "mesh.tensor": 2, "train.grad_accum": 2}
OFFLOAD = {"optimizer.offload": "moments"}
ALLOWED = {"checkpoint.allow_change": "dtypes.m,dtypes.v"}
GATE = "layers.1.mlp.gate"


def kinds(tree: Any) -> set[str]:
    return {a.sharding.memory_kind for a in jax.tree.leaves(tree)}


def moments(current: Any) -> list[jax.Array]:
    return [a for path, a in jax.tree_util.tree_leaves_with_path(current) if is_moment(path)]


@pytest.fixture(scope="module")
def offloaded() -> Any:
    """Return the state after two steps with moments in 8-bit blocks on the host."""
    return trained(helpers.tiny(SIZES | INT8 | SPLIT | OFFLOAD))


def test_blocks_are_split_like_the_parameters(offloaded):
    adam, param = offloaded.optimizer[0], offloaded.params["layers"]["mlp"]["gate"]
    for moment in (adam.mu, adam.nu):
        gate = moment["layers"]["mlp"]["gate"]
        assert gate.codes.dtype == jnp.uint8 and gate.codes.shape == param.shape and gate.scales.shape == (2, 64, 2)
        assert gate.codes.sharding.spec == gate.scales.sharding.spec == param.sharding.spec
        assert moment["layers"]["attention"]["wq"].scales.shape == (2, 64, 8, 1)
        for kept in (moment["head"], moment["embed"]["embedding"], moment["layers"]["mlp_norm"]["scale"]):
            assert kept.dtype == jnp.float32
    assert kinds(moments(offloaded)) == {"pinned_host"}
    assert kinds(offloaded.params) == kinds(adam.count) == {"device"}


def test_steps_are_the_same_to_the_bit_wherever_moments_rest(offloaded):
    assert_same(to_tensors(offloaded), to_tensors(trained(helpers.tiny(SIZES | INT8 | SPLIT))))
    assert int(offloaded.optimizer[0].count) == 2


@pytest.mark.more
def test_a_checkpoint_of_blocks_resumes_on_other_meshes_and_in_no_other_type(offloaded, tmp_path: Path):
    tensors = save(helpers.tiny(SIZES | INT8 | SPLIT | OFFLOAD), offloaded, tmp_path / "int8")
    assert tensors[f"optimizer.mu.{GATE}.codes"].std() > 0
    for changes in ({}, OFFLOAD):
        current = resumed(helpers.tiny(SIZES | INT8 | changes), tmp_path / "int8")
        assert kinds(moments(current)) == {"pinned_host" if changes else "device"}
        assert_same(to_tensors(current), tensors)
    for changes, keys in (({}, ["dtypes.m", "dtypes.v"]), (INT8 | {"dtypes.v": "bf16"}, ["dtypes.v"])):
        for allowed in ("", "dtypes.m,dtypes.v"):
            with pytest.raises(schema.ConfigError) as error:
                resumed(helpers.tiny(SIZES | changes | {"checkpoint.allow_change": allowed}), tmp_path / "int8")
            assert [p.key for p in error.value.problems] == keys
    new = {"init.from": str(tmp_path / "int8"), "init.what": "weights+optimizer"}
    with pytest.raises(schema.ConfigError) as error:
        resumed(helpers.tiny(SIZES | new), tmp_path / "other")
    assert [p.key for p in error.value.problems] == ["init.what"]
    with pytest.raises(schema.ConfigError) as error:
        resumed(helpers.tiny(SIZES | new | {"optimizer.name": "muon"}), tmp_path / "other")
    assert [p.key for p in error.value.problems] == ["init.what"]
    current = resumed(helpers.tiny(SIZES | INT8 | new), tmp_path / "other")
    for name, x in to_tensors(current).items():
        if ".mu." in name or ".nu." in name:
            np.testing.assert_array_equal(x, tensors[name])


@pytest.mark.more
def test_moments_resume_in_bfloat16_and_back_where_it_is_allowed(tmp_path: Path):
    wide, types = helpers.tiny(SIZES), {"dtypes.m": "bf16", "dtypes.v": "bf16"}
    tensors = save(wide, trained(wide), tmp_path / "f32")
    with pytest.raises(schema.ConfigError, match="dtypes.m"):
        resumed(helpers.tiny(SIZES | types), tmp_path / "f32")
    narrow = helpers.tiny(SIZES | types | ALLOWED)
    rounded = save(narrow, resumed(narrow, tmp_path / "f32"), tmp_path / "bf16")
    back = to_tensors(resumed(helpers.tiny(SIZES | ALLOWED), tmp_path / "bf16"))
    names = [name for name in tensors if ".mu." in name or ".nu." in name]
    assert names and any(tensors[name].any() for name in names)
    for name in names:
        np.testing.assert_array_equal(rounded[name], tensors[name].astype(jnp.bfloat16))
        np.testing.assert_array_equal(back[name], rounded[name].astype(np.float32))


def test_memory_is_counted_where_it_is():
    program = helpers.program(helpers.tiny(SIZES | INT8 | SPLIT | OFFLOAD))
    resting = compiler.local_bytes(program.state.optimizer)
    everything = compiler.local_bytes((program.state, program.batch))
    assert compiler.local_bytes(compiler.device_arguments(program)) == pytest.approx(everything - resting, abs=8)
    whole = sum(np.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(program.state)) / 2**30
    memory.check_host_memory(program, 2 * whole)
    with pytest.raises(memory.OutOfMemory):
        memory.check_host_memory(program, 1.01 * whole)
    with pytest.raises(memory.OutOfMemory):
        memory.check_host_memory(program, 2 * whole, offloaded_activations=2**30)


# ---- Master weights in bfloat16


def test_random_bits_of_weights_are_unbiased_and_of_each_step_seed_layer_and_parameter():
    p = {"layers": {"a": jnp.ones((3, 128, 128), jnp.bfloat16), "b": jnp.ones((3, 128, 128), jnp.bfloat16)}}
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) + 2**-10, p)  # an eighth of the distance to the next number

    def rounded_up(step: int, seed: int = 0) -> np.ndarray:  # (parameters, layers, 128, 128)
        made = jax.jit(Rounding(seed).round_params)(exact, p, jnp.int32(step))["layers"]
        return np.stack([made["a"] > 1, made["b"] > 1])

    up = rounded_up(7)
    assert abs(up.mean() - 1 / 8) < 5 * np.sqrt(1 / 8 * 7 / 8 / up.size) and (rounded_up(7) == up).all()
    for other in (rounded_up(8), rounded_up(7, seed=1), np.roll(up, 1, 0), np.roll(up, 1, 1)):
        assert abs((up & other).mean() - 1 / 64) < 6 * np.sqrt(1 / 64 / up.size)


def test_random_bits_do_not_depend_on_the_layout():
    """Stochastic rounding gives the same weights on one and on four devices, on stages with reordered layers, and for one
    layer at a time.
    """
    rng = np.random.default_rng(0)
    w, e = rng.standard_normal((6, 8, 16)).astype(np.float32), rng.standard_normal((32, 8)).astype(np.float32)
    exact = {"embed": jnp.asarray(e), "layers": {"w": jnp.asarray(w)}}

    def rounded(exact, rounding, layer=None):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact)
        return rounding.round_params(exact, params, jnp.int32(5), layer)

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
    alone = jax.jit(lambda x, layer: rounded({"layers": {"w": x}}, Rounding(3), layer))
    for layer in range(6):
        np.testing.assert_array_equal(staged[order.index(layer)], one["layers"]["w"][layer])
        np.testing.assert_array_equal(alone(w[layer], jnp.int32(layer))["layers"]["w"], one["layers"]["w"][layer])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_streamed_update_is_that_of_all_at_once(name):
    """An update layer by layer from the host equals the update of all layers at once, with clipping and rounding. Layers have
    different random bits. Muon's matmuls may sum in another order.
    """
    masters = "bf16" if name == "adamw" else "f32"
    axes = {"embed": ("vocab", "embed"), "layers": {"w": ("layers", "embed", "mlp")}}
    types = schema.Dtypes(masters, "bf16", "f32", "f32", "f32")
    placement = make_placement(helpers.tiny(), jax.devices()[:1])
    how = (schema.Optimizer(name=name), types, axes, placement, FLOAT32)
    tx = make_optimizer(*how)
    dtype = jnp.bfloat16 if name == "adamw" else jnp.float32
    params = {"embed": jnp.ones((6, 8), dtype), "layers": {"w": jnp.ones((3, 8, 64), dtype)}}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 1e-7, jnp.float32), params)  # near eps: clipping changes the update
    given = (tx.init(params), params, jnp.float32(0.5), jnp.float32(1e-3), True, jnp.int32(4))
    whole, parts = (
        jax.jit(update)(grads, *given) for update in (make_update(tx, Rounding(0)), make_streamed_update(*how, Rounding(0)))
    )
    if name == "muon":
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), parts, whole)
        return
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    layers = np.asarray(whole[0]["layers"]["w"].astype(jnp.float32))
    assert 0 < (layers[0] < 1).mean() < 1 and (layers[0] != layers[1]).any()


MASTERS = {
    "precision": "bf16",
    "dtypes.params": "bf16",
    "dtypes.m": "bf16",
    "model.num_layers": 2,
    "model.qkv_bias": True,
    "model.qk_norm": True,
    "data.seq_len": 32,
    "optimizer.schedule": "constant",
    "optimizer.lr": 1e-4,
    "optimizer.warmup_steps": 0,
}


@pytest.mark.more
def test_all_weights_move_where_masters_are_bfloat16():
    """At a learning rate of 1e-4, an update of 1.0 moves most weights by far less than half of bfloat16's spacing. Stochastic
    rounding still changes them.
    """
    run = helpers.tiny(MASTERS)
    before, after = helpers.initial_tensors(run), helpers.train(run, 3).tensors
    moved = {name: (after[name] != x).mean() for name, x in before.items() if name.startswith("params.")}
    vectors = {name for name in moved if is_vector(name)}
    assert len(vectors) == 2 * 7 + 1
    for name in moved:
        assert before[name].dtype == after[name].dtype == (np.float32 if name in vectors else jnp.bfloat16), name
        assert moved[name] == 1.0 if name in vectors and "bk" not in name else moved[name] > 0, (name, moved[name])
    assert {after[name].dtype.name for name in after if ".mu." in name} == {"bfloat16"}
    assert {after[name].dtype.name for name in after if ".nu." in name} == {"float32"}

    # In the first step, which has equal gradients, weights move on average as float32 masters do. With rounding to nearest,
    # weights above 0.03 would not move.
    wide = helpers.tiny(MASTERS | {"dtypes.params": "f32"})
    for name in ("params.layers.0.mlp.gate", "params.layers.1.attention.wq"):
        first = [helpers.train(r, 1).tensors[name].astype(np.float64) for r in (run, wide)]
        start = [helpers.initial_tensors(r)[name].astype(np.float64) for r in (run, wide)]
        large = np.abs(start[0]) > 0.03
        ours, theirs = ((x - y)[large] for x, y in zip(first, start, strict=True))
        along = np.sign(theirs)
        assert (ours * along).mean() == pytest.approx((theirs * along).mean(), rel=0.35), name


# ---- Muon

MUON = {"optimizer.name": "muon"}
SMALL = MUON | {"model.num_layers": 2, "data.seq_len": 32}
RECIPE = schema.Optimizer(name="muon", weight_decay=0.3, momentum=0.9, beta1=0.8, beta2=0.9, eps=1e-6)
TYPES = schema.Dtypes("f32", "f32", "f32", "f32", "f32")
BF16 = Numerics(jnp.dtype("bfloat16"), jnp.dtype("bfloat16"), jnp.dtype("float32"))
LR = jnp.float32(0.02)

AXES = {
    "embed": {"embedding": ("vocab", "embed")},
    "layers": {
        "wq": ("layers", "embed", "heads", "head_dim"),
        "down": ("layers", "embed", "mlp"),
        "experts": ("layers", "experts", "expert_embed", "mlp"),  # each expert's matrix separately
        "bq": ("layers", "heads", "head_dim"),
        "scale": ("layers", "embed"),
    },
}
SHAPES = {"embedding": (24, 8), "wq": (3, 8, 4, 6), "down": (3, 8, 16), "bq": (3, 4, 6), "scale": (3, 8)}
SHAPES |= {"experts": (3, 4, 8, 12)}
HIDDEN = {"wq": (8, 24), "down": (8, 16), "experts": (8, 12)}  # (rows, columns)


def toy(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: rng.standard_normal(SHAPES[path[-1].key]).astype(np.float32),
        AXES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def by_name(tree: Any) -> dict[str, np.ndarray]:
    return {path[-1].key: np.asarray(x, np.float64) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


# The definition, in float64: its polynomial is applied to singular values, not to matrices


def about_orthogonal(x: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    u, s, vt = np.linalg.svd(x.reshape(-1, *shape), full_matrices=False)
    s = s / np.sqrt((s**2).sum(-1, keepdims=True))
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return ((u * s[:, None]) @ vt).reshape(x.shape)


def muon_step(p, g, m, shape, o: schema.Optimizer, lr: float):
    m = o.momentum * m + (1 - o.momentum) * g
    u = 0.2 * np.sqrt(max(shape)) * about_orthogonal((1 - o.momentum) * g + o.momentum * m, shape)
    return p - lr * (u + o.weight_decay * p), m


def adam_step(p, g, m, v, t: int, decay: float, o: schema.Optimizer, lr: float):
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


MESHES = {
    "one device": {},
    "data2xexpert2xtensor2": {"mesh.data": 2, "mesh.expert": 2, "mesh.tensor": 2},  # more devices than layers
    "stage3xfsdp2": {"mesh.stage": 3, "mesh.fsdp": 2},
}


@pytest.mark.parametrize("mesh", MESHES)
def test_first_three_steps_are_the_definitions(mesh, expected):
    placement = placed(MESHES[mesh])
    tx = make_optimizer(RECIPE, TYPES, AXES, placement)
    homes = jax.tree.map(lambda p, a: placement.sharding(a), toy(0), AXES)
    params, update = jax.device_put(toy(0), homes), jax.jit(make_update(tx, Rounding(0)))
    current = jax.jit(tx.init)(params)
    for t, wanted in enumerate(expected):
        params, current = update(jax.device_put(toy(t + 1), homes), current, params, None, LR, True, jnp.int32(t))
        got = by_name(params)
        for n, x in wanted.items():
            np.testing.assert_allclose(got[n], x, rtol=2e-5, atol=2e-5, err_msg=f"{n}, step {t + 1}")
    moved = {n: np.abs(x - by_name(toy(0))[n]).max() for n, x in expected[-1].items()}
    assert min(moved.values()) > 0.01


def test_first_three_steps_of_a_run():
    """Clipped and scheduled steps change weights as the definition does. The stored momentum gives the gradients."""
    run = helpers.tiny(SMALL)
    rates = make_schedule(run.optimizer, run.train.steps)
    before, o = helpers.initial_tensors(run), run.optimizer
    for t in range(3):
        after = helpers.train(run, t + 1).tensors
        for name in ("layers.0.attention.wq", "layers.1.attention.wo", "layers.0.attention.wk", "layers.1.mlp.down"):
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


def test_momentum_is_stored_in_its_type():
    """The first update equals that with float32 momentum: it uses the new momentum before rounding. The next stay near."""
    axes = {"layers": {"w": ("layers", "embed", "mlp")}, "head": ("vocab", "embed")}
    rng = np.random.default_rng(0)
    trees = [
        {"layers": {"w": jnp.asarray(rng.standard_normal((2, 16, 256)), jnp.float32)}, "head": jnp.ones((4, 16))}
        for _ in range(4)
    ]
    kept, exact = (make_optimizer(RECIPE, dataclasses.replace(TYPES, m=kind), axes) for kind in ("int8", "f32"))
    s, t = kept.init(trees[0]), exact.init(trees[0])
    step, exact_step = jax.jit(kept.update), jax.jit(exact.update)
    for i in range(3):
        got, s = step(trees[i + 1], s, trees[0])
        wanted, t = exact_step(trees[i + 1], t, trees[0])
        difference = np.abs(got["layers"]["w"] - wanted["layers"]["w"]).max()
        assert difference < 0.04 and (difference == 0) == (i == 0)
    stored = s[0].mu["layers"]["w"]
    assert {x.dtype.name for x in jax.tree.leaves(stored)} == {"uint8", "float32"}
    assert s[0].nu["layers"]["w"] == optax.MaskedNode()


@pytest.mark.parametrize("settings", [pytest.param(MASTERS, marks=pytest.mark.more), SMALL], ids=["bf16 masters", "muon"])
def test_stopped_and_resumed(settings, tmp_path: Path):
    """Two steps, a checkpoint, a restore and one more step equal three steps, bit for bit: weights are rounded alike."""
    run = helpers.tiny(settings)
    save(run, trained(run), tmp_path)
    assert_same(to_tensors(stepped(run, resumed(run, tmp_path), range(2, 3))), helpers.train(run, 3).tensors)


def updates(o: schema.Optimizer) -> tuple[dict[str, np.ndarray], Any]:
    tx = make_optimizer(o, TYPES, AXES)
    made, current = jax.jit(tx.update)(toy(1), jax.jit(tx.init)(toy(0)), toy(0))
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
