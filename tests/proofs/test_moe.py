"""Experts: routing and gradients against a plain model of them, exchanges between devices, grouped matmuls, even loads.

Layouts of whole models stand in matrix.py, with all others.
"""

import dataclasses
import functools
from collections import Counter

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import Moe
from jaxtrain.generate import Sampler
from jaxtrain.kernels.attention import Hardware, Unsupported
from jaxtrain.kernels.experts import grouped
from jaxtrain.kernels.experts.routing import COLUMNS
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.models.layers import Context
from jaxtrain.models.module import Definition
from jaxtrain.models.moe import ExpertsMLP
from jaxtrain.plan import topology
from jaxtrain.scoring import Scored, Scorer
from jaxtrain.shapes import EXPERT_METRICS
from jaxtrain.sharding import Placement, make_placement, to_residual
from jaxtrain.train import guard
from jaxtrain.train.balance import Balance
from jaxtrain.train.batch import place_batch
from jaxtrain.train.state import abstract_tensors, to_tensors
from jaxtrain.zero import make_zero

E, K, D, F, B, T = 8, 2, 16, 24, 8, 16
MODEL = {"model.num_experts": E, "model.experts_per_token": K, "model.d_model": D, "model.d_ff": F}
HIGHEST = jax.lax.Precision.HIGHEST
F32 = Numerics(*[jnp.dtype(jnp.float32)] * 3)


@dataclasses.dataclass(frozen=True)
class Case:
    """A block of experts on a mesh."""

    mesh: tuple[tuple[str, int], ...] = ()
    moe: Moe = Moe()
    model: tuple[tuple[str, object], ...] = ()
    tokens_replicated: bool = False

    @functools.cached_property
    def run(self):
        return helpers.tiny(MODEL | dict(self.model) | {f"mesh.{axis}": size for axis, size in self.mesh})

    @functools.cached_property
    def placement(self) -> Placement:
        placement = make_placement(self.run, helpers.devices_of(self.run))
        return dataclasses.replace(placement, tokens_replicated=self.tokens_replicated)

    @functools.cached_property
    def definition(self) -> Definition:
        ctx = Context(F32, self.placement, make_zero(self.run, self.placement, F32), moe=self.moe)
        return Definition(lambda rngs: ExpertsMLP(self.run.model, 0.5, 0.5, ctx, rngs))

    def __call__(self, params, x, real):
        """y, this device's term of it, and statistics, of local shards."""
        model = self.definition.bind(params)
        return model.ctx.zero.gather_module(model)(x, real)

    def jitted(self, f, out_specs):
        """`f` of local shards of (params, x, real, what y is multiplied by), as a function of whole arrays."""
        of_params, of_x = self.specs
        return jax.jit(
            self.placement.shard_map(f, (of_params, of_x, self.placement.spec(("batch", "sequence")), of_x), out_specs)
        )

    @property
    def specs(self):
        """Of parameters, and of x."""
        return self.definition.specs(self.placement), self.placement.spec(("batch", "sequence", None))


@functools.cache
def compiled(case: Case):
    """(params, x, real, what y is multiplied by) -> y, statistics, gradients of params and x."""

    def run(params, x, real, by):
        def share(params, x):
            y, statistics = case(params, x, real)
            # Statistics are those of all devices.
            return jnp.sum(y * by) + (3.0 * statistics[0] + 0.1 * statistics[1]) / case.placement.mesh.size, (y, statistics)

        (_, made), grads = jax.value_and_grad(share, (0, 1), has_aux=True)(params, x)
        return *made, grads

    return case.jitted(run, (case.specs[1], jax.P(), case.specs))


def inputs(model=(), seed=0):
    params = Case(model=model).definition.init(jax.random.key(seed))
    keys = jax.random.split(jax.random.key(seed + 1), 2)
    x, by = (jax.random.normal(key, (B, T, D)) for key in keys)
    real = jnp.arange(T)[None, :] < jnp.array([T, T - 3, T, 1, T, T, T - 5, 0])[:, None]
    return params, x, real, by


def plain(params, x, real, model, keep=None):
    """Every expert of every token, and of those the chosen: what a block of experts computes, without any of its code.

    keep: bool (B, T, K), False for a choice that is dropped.
    """
    with jax.numpy_rank_promotion("allow"):
        return _plain(params, x, real, model, keep)


def _plain(params, x, real, model, keep):
    logits = x @ params["router"]
    scores = jax.nn.softmax(logits) if model.router == "softmax" else jax.nn.sigmoid(logits)
    best = jnp.argsort(-(scores + params.get("router_bias", 0.0)), axis=-1)[..., :K]
    share = jnp.take_along_axis(scores, best, -1)
    share = share / share.sum(-1, keepdims=True) if model.renormalize else share
    share = share * real[..., None] * (1.0 if keep is None else keep)
    every = jax.nn.silu(jnp.einsum("btd,edf->btef", x, params["gate"])) * jnp.einsum("btd,edf->btef", x, params["up"])
    every = jnp.einsum("btef,edf->bted", every, params["down"])
    y = sum(share[..., j, None] * jnp.take_along_axis(every, best[..., j, None, None], 2)[:, :, 0] for j in range(K))
    if "shared" in params:
        s = params["shared"]
        y = y + (jax.nn.silu(x @ s["gate"]) * (x @ s["up"])) @ s["down"].T
    n = real.sum()
    load = ((best[..., None] == jnp.arange(E)) & real[..., None, None]).sum((0, 1, 2)) / (n * K)
    part = scores / scores.sum(-1, keepdims=True) * real[..., None]
    z = (jnp.log(jnp.exp(logits).sum(-1)) ** 2 * real).sum() / n
    entropy = -(part * jnp.log(jnp.where(part > 0, part, 1.0))).sum() / n
    dropped = 0.0 if keep is None else (~keep & real[..., None]).sum() / (n * K)
    balance = E * (load * part.sum((0, 1)) / n).sum()
    return y, jnp.concatenate([jnp.stack([balance, z, entropy, dropped]), load]), best


@functools.partial(jax.jit, static_argnums=4)
def plain_gradients(params, x, real, by, model, keep=None):
    def value(params, x):
        y, statistics, _ = plain(params, x, real, model, keep)
        load = jax.lax.stop_gradient(statistics[len(COLUMNS) :])
        scores = jax.nn.softmax(x @ params["router"]) if model.router == "softmax" else jax.nn.sigmoid(x @ params["router"])
        mean = (scores / scores.sum(-1, keepdims=True) * real[..., None]).sum((0, 1)) / real.sum()
        return jnp.sum(y * by) + 3.0 * E * (load * mean).sum() + 0.1 * statistics[1], (y, statistics)

    with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
        (_, made), grads = jax.value_and_grad(value, (0, 1), has_aux=True)(params, x)
    return *made, grads


def assert_same(got, wanted, real):
    (y, statistics, grads), (y_, statistics_, grads_) = got, wanted
    np.testing.assert_allclose(np.where(real[..., None], y, 0), np.where(real[..., None], y_, 0), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(statistics, statistics_, rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(grads_)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_), strict=True):
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(b) + 1e-6


SHARED = (("model.shared_d_ff", 8),)
SIGMOID = (("model.router", "sigmoid"), ("model.router_bias", True), ("model.renormalize", False))
CASES = {
    "one device": Case(model=SHARED),
    "pallas": Case(moe=Moe(impl="pallas")),
    "expert=8, in rounds; sigmoid, biased, as they are": Case((("expert", 8),), Moe(buffer=1.0), SIGMOID),
    "a capacity with room": Case((("expert", 4), ("fsdp", 2)), Moe(capacity_factor=E / K)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_token_goes_through_its_experts(name):
    """Outputs, statistics and all gradients are those of the plain model; padding has no part in them."""
    case = CASES[name]
    given = inputs(case.model)
    assert_same(compiled(case)(*given), plain_gradients(*given, case.run.model), given[2])


@pytest.mark.parametrize("over", helpers.few(["expert", "fsdp"], "expert"))
def test_sampling_splits_weights_and_not_tokens(over):
    """Where each device has all tokens, and of the experts some, or at rest a part of D; and of every expert's width a part."""
    case = Case(((over, 4), ("tensor", 2)), Moe(buffer=1.0), SHARED, tokens_replicated=True)
    p, given = case.placement, inputs(SHARED)
    y = case.jitted(lambda params, x, real, by: to_residual(case(params, x, real)[0], p.mesh_axes("mlp"), p), jax.P())(*given)
    params, x, real, _ = given
    wanted = plain(params, x, real, case.run.model)[0]
    np.testing.assert_allclose(np.where(real[..., None], y, 0), np.where(real[..., None], wanted, 0), rtol=1e-4, atol=1e-4)


def test_all_tokens_on_one_expert_lose_none():
    """Where a bias sends every token to the same two experts, their devices get them all, round by round."""
    case = CASES["expert=8, in rounds; sigmoid, biased, as they are"]
    params, *rest = inputs(SIGMOID)
    params |= {"router_bias": jnp.zeros((E,)).at[jnp.array([3, 6])].set(10.0)}
    got, wanted = compiled(case)(params, *rest), plain_gradients(params, *rest, case.run.model)
    loads = np.asarray(got[1][len(COLUMNS) :])
    np.testing.assert_array_equal(loads, np.where(np.isin(np.arange(E), (3, 6)), 0.5, 0.0))
    assert float(got[1][COLUMNS.index("dropped")]) == 0.0
    assert_same(got, wanted, rest[1])


@pytest.mark.parametrize("parts", helpers.few([1, 4], 4))
def test_a_capacity_drops_what_comes_last(parts):
    """Of each device's tokens an expert takes the first that its buffer holds; the others are counted."""
    case = Case((("expert", parts),), Moe(capacity_factor=0.5))
    params, x, real, by = inputs()
    best = np.asarray(plain(params, x, real, case.run.model)[2])
    room = B * T * K // parts // E // 2  # half of an even share
    keep = np.zeros((B, T, K), bool)
    for rows in np.split(np.arange(B), parts):
        taken = Counter()
        for b, t, j in np.ndindex(len(rows), T, K):
            at, expert = (rows[b], t, j), best[rows[b], t, j]
            if real[rows[b], t]:
                taken[expert] += 1
                keep[at] = taken[expert] <= room
    got = compiled(case)(params, x, real, by)
    assert 0.02 < float(got[1][COLUMNS.index("dropped")]) < 0.5
    assert_same(got, plain_gradients(params, x, real, by, case.run.model, keep), real)


# ---- Grouped matmuls

SIZES = ((14, 14, 14, 14, 14), (0, 67, 0, 0, 0), (0, 0, 0, 0, 70), (0, 0, 0, 0, 0), (17, 0, 33, 1, 2))
PRODUCTS = ("times D", "times F", "outer")


@functools.cache
def product(name, impl):
    def run(x_RD, h_RF, w_EDF, sizes):
        if name == "outer":
            return grouped.outer(impl, x_RD, h_RF, sizes, jnp.dtype(jnp.float32), HIGHEST)
        over = name[-1]
        return grouped.times(impl, x_RD if over == "D" else h_RF, w_EDF, sizes, over, HIGHEST)

    return jax.jit(run)


@pytest.mark.parametrize("dtype", helpers.few(["float32", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("name", PRODUCTS)
def test_pallas_multiplies_like_xla(name, dtype):
    """Interpreted: tiles with rows of several experts, experts without rows, and rows that are nobody's, which hold NaN."""
    (R, D, F), E = (70, 40, 24), 5
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (R, D), (R, F), (E, D, F)
    x, h, w = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))
    for sizes in SIZES:
        nobody = jnp.arange(R)[:, None] >= sum(sizes)
        of_nobody = (jnp.where(nobody, jnp.nan, a) for a in (x, h))
        wanted = product(name, "ragged")(x, h, w, jnp.array(sizes))
        got = product(name, "pallas")(*of_nobody, w, jnp.array(sizes))
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(
            np.float32(got), np.float32(wanted), rtol=1e-2 if got.dtype == "bfloat16" else 1e-5, atol=1e-5
        )


@pytest.mark.parametrize("name", PRODUCTS)
def test_pallas_lowers_for_a_gpu(name):
    """The compiler for an H200 takes the kernels, and not the way around them."""
    mesh = jax.sharding.Mesh(np.array(topology.devices(topology.parse("h200:1"))), ("device",))
    whole = jax.NamedSharding(mesh, jax.P())
    shapes = ((512, 256), "bfloat16"), ((512, 128), "bfloat16"), ((4, 256, 128), "bfloat16"), ((4,), "int32")
    arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=whole) for shape, dtype in shapes]
    manual = jax.shard_map(product(name, "auto"), mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    text = str(jax.jit(manual).lower(*arrays).compile().as_text())
    assert "jaxtrain_experts_" in text and "dot(" not in text


def test_an_old_gpu_is_told_what_to_set():
    with pytest.raises(Unsupported, match="moe.impl=ragged"):
        grouped.check("auto", Hardware("gpu", (7, 5)))
    grouped.check("ragged", Hardware("gpu", (7, 5)))
    grouped.check("auto", Hardware("cpu"))


# ---- Even loads


def test_step_moves_the_bias_and_no_gradient_does():
    """Of each layer by its own loads, in whole steps of its rate; no moment is kept of it. The loss is cross entropy alone."""
    base = {"model.num_layers": 2, "model.num_experts": 4, "model.router_bias": True, "model.router": "sigmoid"}
    run = helpers.tiny(base | {"moe.bias_rate": 0.25})
    assert [name for name in abstract_tensors(helpers.program(run).state) if "router_bias" in name] == [
        f"params.layers.{i}.mlp.router_bias" for i in range(2)
    ]
    state, batch = helpers.fresh_state(run), helpers.host_batch(run, 0)
    mlp = state.params["layers"]["mlp"]
    began = np.array([[10.0, 10.0, 0.0, 0.0], [0.0, 10.0, 0.0, 10.0]], np.float32)  # scores are below 1: all go to these
    mlp["router_bias"] = jax.device_put(began, mlp["router_bias"].sharding)
    program = helpers.program(run)
    placed = place_batch(batch, program.batch, program.context)
    total, weight = program.eval_step(state.params, placed)
    state, metrics = helpers.train_step(run)(state, placed)
    np.testing.assert_allclose(metrics["loss"], total / weight, rtol=1e-6)
    bias = np.asarray(state.params["layers"]["mlp"]["router_bias"])
    np.testing.assert_array_equal(bias, began + np.where(began > 0, -0.25, 0.25))
    assert metrics["expert_load_max"] == pytest.approx(2.0) and metrics["dropped_tokens"] == 0.0
    assert metrics["balance_loss"] > 0.9 and metrics["router_z_loss"] > 0 and metrics["router_entropy"] <= np.log(4) + 1e-6
    broken = place_batch(batch | {"weights": np.full_like(batch["weights"], np.nan)}, program.batch, program.context)
    state, metrics = helpers.train_step(run)(state, broken)
    assert int(metrics["verdict"]) == guard.NOT_FINITE
    np.testing.assert_array_equal(state.params["layers"]["mlp"]["router_bias"], bias, err_msg="a skipped step moves no bias")


def test_losses_of_experts_by_hand():
    """Means over the layers, each with its own factor; columns are those of kernels/experts/routing.py."""
    balance = Balance(Moe(balance_loss=0.5, z_loss=0.001), 2, (1, 0), (0, 1), {})
    statistics = jnp.asarray([[1.0, 30.0, *[0.0] * (len(COLUMNS) - 2), 0.5, 0.5], [2.0, 50.0, *[0.0] * len(COLUMNS)]])
    assert float(balance.penalty(statistics)) == pytest.approx(0.5 * 1.5 + 0.001 * 40.0, rel=1e-6)


def test_microbatches_share_the_losses_and_metrics_of_experts():
    """The same rows twice, as two microbatches, are what they are once: in metrics, and in the gradient of all losses.

    So are rows whose tokens weigh a millionth of what they did.
    """
    losses = {"model.num_layers": 1, "model.num_experts": 4, "moe.balance_loss": 0.5, "moe.z_loss": 0.1}
    once = helpers.host_batch(helpers.tiny(losses | {"train.global_batch": 8}), 0)

    def told(accum, factor=1.0):
        run = helpers.tiny(losses | {"train.grad_accum": accum, "train.global_batch": 8 * accum})
        program, given = helpers.program(run), once | {"weights": np.float32(factor) * once["weights"]}
        placed = place_batch({k: np.concatenate([v] * accum) for k, v in given.items()}, program.batch, program.context)
        state, metrics = helpers.train_step(run)(helpers.fresh_state(run), placed)
        moments = {n: np.asarray(a) for n, a in to_tensors(state).items() if n.startswith("optimizer.mu.")}
        return {k: float(metrics[k]) for k in ("loss", "grad_norm", *EXPERT_METRICS)}, moments

    one, moments = told(1)
    for other in ({"accum": 2}, {"accum": 2, "factor": 1e-6}):
        two, again = told(**other)
        assert two == pytest.approx(one, rel=1e-5), other
        for name, moment in moments.items():
            np.testing.assert_allclose(again[name], moment, rtol=1e-3, atol=1e-7, err_msg=f"{other}: {name}")


# ---- Numbers and uses of a whole model


@pytest.mark.parametrize("zero", helpers.few([1, 2], 1))
def test_a_router_is_float32_in_every_layout(zero):
    """In bfloat16 runs: what it reports is the same to the last bit, however the step holds its weight and its bias."""
    base = {"precision": "bf16", "model.num_layers": 1, "model.num_experts": 4, "mesh.fsdp": 2, "model.router_bias": True}

    def reported(more):
        run = helpers.tiny(base | more)
        state, program = helpers.fresh_state(run), helpers.program(run)
        mlp = state.params["layers"]["mlp"]
        # No bfloat16 numbers; rounded, the biases were equal.
        mlp["router_bias"] = jax.device_put(0.3 + 1e-4 * jnp.arange(4.0)[None], mlp["router_bias"].sharding)
        placed = place_batch(helpers.host_batch(run, 0), program.batch, program.context)
        metrics = helpers.train_step(run)(state, placed)[1]
        return [np.asarray(metrics[name]) for name in EXPERT_METRICS]

    np.testing.assert_array_equal(reported({"sharding.zero": zero}), reported({}))


def test_what_is_no_training_drops_no_token():
    """A capacity is for training: a prompt's tokens, and a text's that is scored, go through all their experts."""
    base = {"model.num_layers": 1, "model.num_experts": 4, "model.init_std": 0.2}
    tokens = np.arange(12, dtype=np.int32)[None]
    params = helpers.fresh_state(helpers.tiny(base)).params

    def made(capacity):
        run = helpers.tiny(base | {"moe.capacity_factor": capacity})
        sampler = Sampler(run, helpers.program(run).placement)
        logits, _ = jax.jit(sampler.decode)(params, sampler.empty_cache(1, 64), tokens)
        return logits, Scorer(run, sampler, params, rows=1).score([Scored(tokens[0].tolist(), 11)])[0]

    (logits, score), (logits_, score_) = made(0.25), made(0.0)
    np.testing.assert_array_equal(logits, logits_)
    assert score == score_
