"""Experts: routing and gradients against a plain model, dispatch between devices, grouped matmuls, balanced loads.

tests/matrix.py lists the layouts that train whole models with experts.
"""

import dataclasses
import functools
from collections import Counter

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races, reset_gpu_interpret_mode_state
from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

from jaxtrain.config.schema import Moe
from jaxtrain.config.shapes import EXPERT_METRICS, FIRST_ROUND
from jaxtrain.kernels.attention import Hardware
from jaxtrain.kernels.experts import grouped_matmul, pallas, support
from jaxtrain.kernels.experts.routing import COLUMNS
from jaxtrain.kernels.numerics import Numerics
from jaxtrain.models.layers import Context
from jaxtrain.models.module import Definition
from jaxtrain.models.moe import ExpertsMLP
from jaxtrain.models.zero import make_zero
from jaxtrain.sharding import Placement, make_placement, to_residual
from jaxtrain.step import guard
from jaxtrain.step.balance import Balance
from jaxtrain.step.batch import place_batch
from jaxtrain.step.state import abstract_tensors, to_host
from jaxtrain.train.generation import Sampler
from jaxtrain.train.scoring import Scorer, ScoreRequest

E, K, D, F, B, T = 8, 2, 16, 24, 8, 16
MODEL = {"model.num_experts": E, "model.experts_per_token": K, "model.d_model": D, "model.d_ff": F}
FACTORS = {"balance_loss": 3.0, "z_loss": 0.1, "sequence_balance_loss": 2.0}
NO_LOSSES = Moe()
HIGHEST = jax.lax.Precision.HIGHEST
F32 = Numerics(*[jnp.dtype(jnp.float32)] * 3)
BF16 = Numerics(*[jnp.dtype(jnp.bfloat16)] * 2, jnp.dtype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Case:
    """A block of experts on a mesh."""

    mesh: tuple[tuple[str, int], ...] = ()
    moe: Moe = Moe()
    model: tuple[tuple[str, object], ...] = ()
    tokens_replicated: bool = False
    numerics: Numerics = F32

    @functools.cached_property
    def run(self):
        return helpers.tiny(MODEL | dict(self.model) | {f"mesh.{axis}": size for axis, size in self.mesh})

    @functools.cached_property
    def placement(self) -> Placement:
        placement = make_placement(self.run, helpers.devices_of(self.run))
        return dataclasses.replace(placement, tokens_replicated=self.tokens_replicated)

    @functools.cached_property
    def definition(self) -> Definition:
        zero = dataclasses.replace(make_zero(self.run.sharding, self.placement), numerics=self.numerics)
        ctx = Context(self.numerics, self.placement, zero, moe=self.moe)
        return Definition(lambda rngs: ExpertsMLP(self.run.model, 0.5, 0.5, ctx, rngs))

    def __call__(self, params, x, real):
        """Return this device's partial sum of y, and the statistics, from local shards."""
        model = self.definition.bind(params)
        return model.ctx.zero.gather_module(model)(x, real)

    def jitted(self, f, out_specs):
        """Return jitted `f` of local shards of (params, x, real, y's cotangent), as a function of global arrays."""
        of_params, of_x = self.specs
        return jax.jit(
            self.placement.shard_map(f, (of_params, of_x, self.placement.spec(("batch", "sequence")), of_x), out_specs)
        )

    @property
    def specs(self):
        """Return the PartitionSpecs of parameters, and of x."""
        return self.definition.specs(self.placement), self.placement.spec(("batch", "sequence", None))


@functools.cache
def compiled(case: Case):
    """Return a compiled function (params, x, real, y's cotangent) -> y, statistics, gradients of params and x."""

    def run(params, x, real, by):
        def share(params, x):
            y, statistics = case(params, x, real)
            # The statistics are summed over all devices.
            penalty = sum(FACTORS[name] * statistics[COLUMNS.index(name)] for name in FACTORS)
            return jnp.sum(y * by) + penalty / case.placement.mesh.size, (y, statistics)

        (_, made), grads = jax.value_and_grad(share, (0, 1), has_aux=True)(params, x)
        return *made, grads

    return case.jitted(run, (case.specs[1], jax.P(), case.specs))


LENGTHS = (T, T - 3, T, 1, T, T, T - 5, 0)  # real tokens of each row


def inputs(model=(), seed=0):
    params = Case(model=model).definition.init(jax.random.key(seed))
    # biases start at zero
    for i, name in enumerate(name for name in params if name.endswith("_bias") and name != "router_bias"):
        params[name] = 0.3 * jax.random.normal(jax.random.key(100 + i), params[name].shape)
    keys = jax.random.split(jax.random.key(seed + 1), 2)
    x, by = (jax.random.normal(key, (B, T, D)) for key in keys)
    real = jnp.arange(T)[None, :] < jnp.array(LENGTHS)[:, None]
    return params, x, real, by


def of_kept_groups(ranked, model):
    """Return scores, -inf outside of each token's best groups, found by sorting the groups."""
    groups = ranked.reshape(*ranked.shape[:-1], model.router_groups, -1)
    best = jnp.sort(groups, -1)[..., -2:].sum(-1)
    place = jnp.argsort(jnp.argsort(-best, -1), -1)  # rank 0 is the best
    return jnp.where((place < model.groups_per_token)[..., None], groups, -jnp.inf).reshape(ranked.shape)


def plain(params, x, real, model, keep=None, moe=NO_LOSSES):
    """Return y, statistics and chosen experts, written independently: all experts run on every token, then the chosen ones
    count.

    keep: bool (B, T, K), False for a choice that is dropped.
    """
    logits = x @ params["router"] + params.get("router_logit_bias", 0.0)
    scores = jax.nn.softmax(logits) if model.router == "softmax" else jax.nn.sigmoid(logits)
    best = jnp.argsort(-of_kept_groups(scores + params.get("router_bias", 0.0), model), axis=-1)[..., :K]
    share = jnp.take_along_axis(scores, best, -1)
    share = share / share.sum(-1, keepdims=True) if model.renormalize else share
    share = model.routed_scaling * share * real[..., None] * (1.0 if keep is None else keep)
    gate, up = (jnp.einsum("btd,edf->btef", x, params[w]) + params.get(f"{w}_bias", 0.0) for w in ("gate", "up"))
    every = jnp.einsum("btef,edf->bted", jax.nn.silu(gate) * up, params["down"]) + params.get("down_bias", 0.0)
    y = sum(share[..., j, None] * jnp.take_along_axis(every, best[..., j, None, None], 2)[:, :, 0] for j in range(K))
    if "shared" in params:
        s = params["shared"]
        y = y + (jax.nn.silu(x @ s["gate"]) * (x @ s["up"])) @ s["down"].T
    n = real.sum()
    chosen = ((best[..., None] == jnp.arange(E)) & real[..., None, None]).sum(2)
    load = chosen.sum((0, 1)) / (n * K)
    part = scores / scores.sum(-1, keepdims=True) * real[..., None]
    z = (jnp.log(jnp.exp(logits).sum(-1)) ** 2 * real).sum() / n
    entropy = -(part * jnp.log(jnp.where(part > 0, part, 1.0))).sum() / n
    dropped = 0.0 if keep is None else (~keep & real[..., None]).sum() / (n * K)
    balance = E * (load * part.sum((0, 1)) / n).sum()
    rows = [(row, length) for row, length in enumerate(map(int, LENGTHS)) if length] if moe.sequence_balance_loss else []
    # f_i P_i of DeepSeek-V3, for each row.
    of_rows = [E / (K * n) * jax.lax.stop_gradient(chosen[b].sum(0)) * part[b].sum(0) / n for b, n in rows]
    of_rows = sum(x.sum() for x in of_rows) / max(1, len(rows))
    return y, jnp.concatenate([jnp.stack([balance, of_rows, z, entropy, dropped]), load]), best


@functools.partial(jax.jit, static_argnums=(4, 6))
def plain_gradients(params, x, real, by, model, keep=None, moe=NO_LOSSES):
    def value(params, x):
        y, statistics, _ = plain(params, x, real, model, keep, moe)
        return jnp.sum(y * by) + sum(f * statistics[COLUMNS.index(name)] for name, f in FACTORS.items()), (y, statistics)

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
BIASES = (("model.router_logit_bias", True), ("model.expert_bias", True))
GROUPS = (
    *(("model.router", "sigmoid"), ("model.router_bias", True), ("model.routed_scaling", 2.5)),
    *(("model.router_groups", 4), ("model.groups_per_token", 2)),
)
CASES = {
    "groups": Case((("expert", 2), ("seq", 2), ("fsdp", 2)), Moe(sequence_balance_loss=2.0), GROUPS + SHARED),
    "biases, a capacity with room": Case((("expert", 4), ("fsdp", 2)), Moe(capacity_factor=E / K), model=BIASES),
}


@pytest.mark.parametrize("name", CASES)
def test_every_token_goes_through_its_experts(name):
    """Outputs, statistics and all gradients are those of the plain model. Padding has no effect on them."""
    case = CASES[name]
    params, *rest = inputs(case.model)
    if "router_bias" in params:  # experts 0 and 3, which are in two groups
        params["router_bias"] = jnp.array([0.3, 0, 0, 0.2, 0, 0, 0, 0], jnp.float32)
    given = params, *rest
    assert_same(compiled(case)(*given), plain_gradients(*given, case.run.model, None, case.moe), given[2])


def test_sampling_splits_weights_and_not_tokens():
    """Each device has all tokens. `expert` shards the experts, and `tensor` the width of each expert."""
    case = Case((("expert", 4), ("tensor", 2)), model=SHARED, tokens_replicated=True)
    p, given = case.placement, inputs(SHARED)
    y = case.jitted(lambda params, x, real, by: to_residual(case(params, x, real)[0], p.mesh_axes("mlp"), p), jax.P())(*given)
    params, x, real, _ = given
    with jax.numpy_rank_promotion("allow"):
        wanted = plain(params, x, real, case.run.model)[0]
    np.testing.assert_allclose(np.where(real[..., None], y, 0), np.where(real[..., None], wanted, 0), rtol=1e-4, atol=1e-4)


# Biases of a router: all tokens choose the same two experts; loads are uneven.
BIASED = {"two experts": (0, 0, 0, 10, 0, 0, 10, 0), "uneven": (0, 0.1, 0.05, -0.1, 0, 0.2, 0, -0.1)}
ONE_ROUND, ROUNDS, MORE_ROUNDS = (Case((("expert", n),), model=SIGMOID) for n in (1, 4, 8))
biased = pytest.mark.parametrize("bias", BIASED)


def inputs_of(bias):
    params, *rest = inputs(SIGMOID)
    return params | {"router_bias": jnp.array(BIASED[bias], jnp.float32)}, *rest


@biased
def test_uneven_loads_lose_no_token(bias):
    """Devices receive all tokens of their experts, round by round, so that results equal the plain model's."""
    given = inputs_of(bias)
    got, wanted = compiled(ROUNDS)(*given), plain_gradients(*given, ROUNDS.run.model)
    loads = np.asarray(got[1][len(COLUMNS) :])
    if bias == "two experts":
        np.testing.assert_array_equal(loads, np.where(np.isin(np.arange(E), (3, 6)), 0.5, 0.0))
    assert E * loads.max() > FIRST_ROUND, "more than the first round has room for"
    assert float(got[1][COLUMNS.index("dropped")]) == 0.0
    assert_same(got, wanted, given[2])


@biased
def test_rounds_lose_no_precision_in_bfloat16(bias):
    """Compared with the plain model in float32, many small rounds are hardly less exact than one large round on one device.

    In gradients of weights, the first round's sum is also rounded, by at most 2^-9 of each element. That sum may be twice as
    large as the sum of all rounds. Independent errors add up in squares.
    """
    given, off = inputs_of(bias), []
    y, _, grads = plain_gradients(*given, ROUNDS.run.model)
    wanted = [np.where(given[2][..., None], y, 0), *jax.tree.leaves(grads)]
    for case in (MORE_ROUNDS, ONE_ROUND):
        case = dataclasses.replace(case, numerics=BF16)
        params, x, real, by = given
        y, _, grads = compiled(case)(params, x.astype(jnp.bfloat16), real, by)
        made = [np.where(real[..., None], np.float32(y), 0), *(np.float32(a) for a in jax.tree.leaves(grads))]
        off.append([np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-6) for a, b in zip(made, wanted, strict=True)])
    for many, one in zip(*off, strict=True):
        assert many <= np.hypot(one, 2.0**-8) and many < 0.03


def test_a_capacity_drops_what_comes_last():
    """On each device an expert keeps the first tokens that fit into its buffer. The others are counted as dropped."""
    parts = 4
    case = Case((("expert", parts),), Moe(capacity_factor=0.5))
    params, x, real, by = inputs()
    with jax.numpy_rank_promotion("allow"):
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


# ---- Grouped matmuls. tests/gpu/test_gpu_experts.py compares them with their definition

PRODUCTS = ("times D", "times F", "outer")


@pytest.fixture
def interpreted(monkeypatch):
    """Interpret the Pallas kernels, with fewer columns and slots, so that slots are reused within a tile."""
    reset_gpu_interpret_mode_state()
    monkeypatch.setattr(pallas, "INTERPRET", InterpretGPUParams(detect_races=True))
    monkeypatch.setattr(pallas, "TILES", {name: tile._replace(columns=128, stages=2) for name, tile in pallas.TILES.items()})


def product(name, impl, x_RD, h_RF, w_EDF, sizes):
    if name == "outer":
        return grouped_matmul.outer(impl, x_RD, h_RF, sizes, jnp.dtype(jnp.float32), HIGHEST)
    over = name[-1]
    return grouped_matmul.times(impl, x_RD if over == "D" else h_RF, w_EDF, sizes, over, HIGHEST)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("F", [136, 3])
def test_pallas_multiplies_like_xla(name, F, interpreted):
    """Cases: several tiles each way, the rank of an adapter, tiles with rows of two experts, experts without rows, rows without
    an expert that hold NaN. The interpreter finds no race between copies and loads or stores.
    """
    (R, D), E = (330, 200), 5
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (R, D), (R, F), (E, D, F)
    x, h, w = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    by_pallas, by_xla = (jax.jit(functools.partial(product, name, impl)) for impl in ("pallas", "ragged"))
    for sizes in ((17, 0, 133, 101, 2), (0, 0, 0, 0, 0)):
        nobody = jnp.arange(R)[:, None] >= sum(sizes)
        of_nobody = (jnp.where(nobody, jnp.nan, a) for a in (x, h))
        wanted, got = by_xla(x, h, w, jnp.array(sizes)), by_pallas(*of_nobody, w, jnp.array(sizes))
        assert got.dtype == wanted.dtype
        # Both round float32 sums once: in bfloat16 they differ by one unit in the last place at most.
        one = 2.0**-7 if got.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.float32(got), np.float32(wanted), rtol=one, atol=1e-4)
        assert not get_races().races_found


# In the last case 128 rows need two tiles, because they start between multiples of 8.
TILED = [(17, 0, 133, 101, 2), (0, 0, 330, 0, 0), (0,) * 5, (1, 7, 8, 9, 300), (330, 0, 0, 0, 0), (1, 128, 100, 0, 1)]


@pytest.mark.parametrize("sizes", TILED)
def test_every_row_has_one_tile(sizes):
    """An expert's tiles start at a multiple of 8 and cover its rows without gaps. `visits` has room for all of them."""
    visits, used = jax.jit(pallas.row_tiles, static_argnums=(1, 2))(jnp.array(sizes), 336, 128)
    seen, owner = [], np.repeat(np.arange(6), [*sizes, 336 - sum(sizes)])
    assert int(used[0]) <= len(visits)
    for expert, first, start, stop in np.asarray(visits)[: int(used[0])].tolist():
        assert first % 8 == 0 and first <= start < stop <= first + 128
        assert (owner[start:stop] == expert).all()
        seen += range(start, stop)
    assert seen == list(range(336))


@pytest.mark.parametrize("generation", [(8, 0), (9, 0), (10, 0), None])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_auto_takes_pallas_where_it_can(generation, dtype):
    """For bfloat16 on Hopper, auto chooses Pallas. Elsewhere it chooses XLA's ragged matmul, and moe.impl=pallas is refused."""
    hardware, exact = Hardware("gpu", generation) if generation else Hardware("cpu"), dtype == "float32"
    where_it_can = generation == (9, 0) and not exact
    assert support.choose_matmul("auto", hardware, exact) == ("pallas" if where_it_can else "ragged")
    assert support.choose_matmul("ragged", hardware, exact) == "ragged"
    assert not support.matmul_problems("auto", hardware, exact)
    assert [p.key for p in support.matmul_problems("pallas", hardware, exact)] == ([] if where_it_can else ["moe.impl"])


# ---- Balanced loads

SMALL = {
    "model.num_layers": 1,
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.d_ff": 16,
    "model.num_experts": 4,
    "data.seq_len": 32,
    "train.global_batch": 8,
}


def test_step_moves_the_bias_and_no_gradient_does():
    """A layer's bias moves by moe.bias_rate a step, toward equal loads. The optimizer stores no moment for it. The loss is
    cross entropy alone.
    """
    run = helpers.tiny(
        SMALL | {"model.num_layers": 2, "model.router_bias": True, "model.router": "sigmoid", "moe.bias_rate": 0.25}
    )
    assert [name for name in abstract_tensors(helpers.program(run).state) if "router_bias" in name] == [
        f"params.layers.{i}.mlp.router_bias" for i in range(2)
    ]
    program, batch = helpers.program(run), helpers.host_batch(run, 0)
    state = helpers.start(program)
    mlp = state.params["layers"]["mlp"]
    # scores are below 1, so all tokens choose these experts
    began = np.array([[10.0, 10.0, 0.0, 0.0], [0.0, 10.0, 0.0, 10.0]], np.float32)
    mlp["router_bias"] = jax.device_put(began, mlp["router_bias"].sharding)
    placed = place_batch(batch, program.batch, program.context)
    total, weight, _ = program.eval_step(state.params, placed)
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
    """Each loss is a mean over the layers, times its own factor. kernels/experts/routing.py lists the statistics' columns."""
    balance = Balance(Moe(balance_loss=0.5, sequence_balance_loss=7.0, z_loss=0.001), 2, (0, 1), {})
    rest = [0.0] * (len(COLUMNS) - 3)
    statistics = jnp.asarray([[1.0, 3.0, 30.0, *rest, 0.5, 0.5], [2.0, 4.0, 50.0, *rest, 0.0, 0.0]])
    assert float(balance.penalty(statistics)) == pytest.approx(0.5 * 1.5 + 7.0 * 3.5 + 0.001 * 40.0, rel=1e-6)


def test_microbatches_share_the_losses_and_metrics_of_experts():
    """The same rows in each of two microbatches give the metrics and gradients of one microbatch.

    So do rows whose tokens have a millionth of the weight.
    """
    losses = SMALL | {"moe.balance_loss": 0.5, "moe.z_loss": 0.1}
    once = helpers.host_batch(helpers.tiny(losses), 0)

    def told(accum, factor=1.0):
        run = helpers.tiny(losses | {"train.grad_accum": accum, "train.global_batch": 8 * accum})
        program, given = helpers.program(run), once | {"weights": np.float32(factor) * once["weights"]}
        placed = place_batch({k: np.concatenate([v] * accum) for k, v in given.items()}, program.batch, program.context)
        state, metrics = helpers.train_step(run)(helpers.start(program), placed)
        return {k: float(metrics[k]) for k in ("loss", "grad_norm", *EXPERT_METRICS)}, to_host(state, "optimizer.mu.")

    one, moments = told(1)
    for other in ({"accum": 2}, {"accum": 2, "factor": 1e-6}):
        two, again = told(**other)
        assert two == pytest.approx(one, rel=1e-5), other
        for name, moment in moments.items():
            np.testing.assert_allclose(again[name], moment, rtol=1e-3, atol=1e-7, err_msg=f"{other}: {name}")


# ---- Precision and uses of a whole model


def test_a_router_is_float32_in_every_layout():
    """In bfloat16 runs the router's statistics are equal to the last bit for any sharding.zero: its weight and bias stay
    float32.
    """
    base = SMALL | {"precision": "bf16", "mesh.fsdp": 2, "model.router_bias": True}

    def reported(more):
        run = helpers.tiny(base | more)
        program = helpers.program(run)
        params = helpers.start(program).params
        mlp = params["layers"]["mlp"]
        # These numbers are not in bfloat16: rounding would make the biases equal.
        mlp["router_bias"] = jax.device_put(0.3 + 1e-4 * jnp.arange(4.0)[None], mlp["router_bias"].sharding)
        (_, sums), _ = program.gradients(params, place_batch(helpers.host_batch(run, 0), program.batch, program.context))
        return np.asarray(sums["experts"])

    np.testing.assert_array_equal(reported({"sharding.zero": 1}), reported({}))


def test_what_is_no_training_drops_no_token():
    """A capacity applies to training only: prompts and scored texts use all their experts."""
    tokens = np.arange(12, dtype=np.int32)[None]
    params = helpers.start(helpers.program(helpers.tiny(SMALL))).params

    def made(capacity):
        run = helpers.tiny(SMALL | {"moe.capacity_factor": capacity})
        sampler = Sampler(run, helpers.program(run).placement)
        prompt = jax.jit(sampler.decode).lower(params, sampler.empty_cache(1, 64), tokens).as_text()
        return prompt, Scorer(run, sampler, params, rows=1).score([ScoreRequest(tokens[0].tolist(), 11)])[0]

    assert made(0.25) == made(0.0)
