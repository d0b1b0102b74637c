"""Experts in FP8: matmuls against the formats' definitions, layouts, rounds of dispatch, and the compiled program."""

import functools
from collections.abc import Mapping

import helpers
import jax
import jax.numpy as jnp
import matrix
import numpy as np
import pytest
from fp8_helpers import emulated, first_gradients, names
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import reset_gpu_interpret_mode_state
from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

from jaxtrain import launch, precision
from jaxtrain.kernels import fp8
from jaxtrain.kernels.experts import eight, feed_forward, pallas
from jaxtrain.models.layers import GATED
from jaxtrain.plan import result
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.make import read_plan
from jaxtrain.plan.topology import parse
from jaxtrain.train.definition import numerics_of
from jaxtrain.zero import ComputeCopy, make_zero

NODE = parse("h200:8")
R, D, F = 24, 32, 48  # rows of each expert


def held(w_EDF: jax.Array) -> fp8.Float8:
    return fp8.encode(w_EDF, stacked=False, over=())


@functools.cache
def arrays(experts: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return x (E R, D), h (E R, F), gradients of very different sizes (E R, F), and weights (E, D, F)."""
    keys = jax.random.split(jax.random.key(experts), 4)
    x_RD, h_RF = (jax.random.normal(k, (experts * R, n), jnp.bfloat16) for k, n in zip(keys, (D, F), strict=False))
    spread = jnp.exp2(jax.random.randint(keys[2], (experts * R, F), -18, 1).astype(jnp.bfloat16))
    return x_RD, h_RF, h_RF * spread, 0.02 * jax.random.normal(keys[3], (experts, D, F))


def close(got: jax.Array, eqn: str, a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether a result agrees with the exact einsum, up to one rounding to bfloat16 and sums in float32."""
    want, terms = np.einsum(eqn, a, b), np.einsum(eqn, abs(a), abs(b))
    off = abs(np.asarray(got, np.float64).reshape(want.shape) - want)
    return bool(np.count_nonzero(want) and (off <= 2.0**-8 * abs(want) + 128 * 2.0**-24 * terms).all())


@pytest.mark.parametrize("experts", [1, 3])
def test_matmuls_are_those_of_rounded_numbers(experts):
    """Each expert multiplies its own rows. Rows that are gradients have type e5m2, others e4m3."""
    x_RD, h_RF, d_RF, w_EDF = arrays(experts)
    x, h, d = ((emulated(a, t).reshape(experts, R, -1)) for a, t in ((x_RD, fp8.E4M3), (h_RF, fp8.E4M3), (d_RF, fp8.E5M2)))
    w, w8 = emulated(w_EDF, fp8.E4M3), held(w_EDF)
    assert close(eight.times(x_RD, w8, "D", gradient=False), "ERD,EDF->ERF", x, w)
    assert close(eight.times(h_RF, w8, "F", gradient=False), "ERF,EDF->ERD", h, w)
    assert close(eight.times(d_RF, w8, "F", gradient=True), "ERF,EDF->ERD", d, w)
    assert close(eight.outer(x_RD, d_RF, experts, jnp.bfloat16, "F"), "ERD,ERF->EDF", x, d)
    dy, h5 = emulated(x_RD, fp8.E5M2).reshape(experts, R, -1), h
    assert close(eight.outer(x_RD, h_RF, experts, jnp.bfloat16, "D"), "ERD,ERF->EDF", dy, h5)


SIZES = (40, 0, 29)  # of 72 rows; the last 3 belong to no expert


def by_rows(a: np.ndarray, w: np.ndarray, eqn: str) -> np.ndarray:
    """Return each row times its own expert's weight, and zeros for rows without an expert."""
    used = sum(SIZES)
    made = np.einsum(eqn, a[:used], np.repeat(w, SIZES, axis=0))
    return np.concatenate([made, np.zeros((len(a) - used, made.shape[1]))])


@pytest.mark.parametrize("impl", ["ragged", "pallas"])
def test_matmuls_of_uneven_rows_are_those_of_rounded_numbers(impl, monkeypatch):
    """Matmuls over D in e4m3 and over F in e5m2 equal those of rounded rows. Rows without an expert hold NaN, which neither a
    result nor the scale may contain.
    """
    reset_gpu_interpret_mode_state()
    monkeypatch.setattr(pallas, "INTERPRET", InterpretGPUParams())
    x_RD, _, d_RF, w_EDF = arrays(3)
    nobody, sizes_E = jnp.arange(3 * R)[:, None] >= sum(SIZES), jnp.array(SIZES)
    w = emulated(w_EDF, fp8.E4M3)
    for rows, dtype, contract, eqn in ((x_RD, fp8.E4M3, "D", "rd,rdf->rf"), (d_RF, fp8.E5M2, "F", "rf,rdf->rd")):
        a = emulated(jnp.where(nobody, 0, rows), dtype)
        want, terms = by_rows(a, w, eqn), by_rows(abs(a), abs(w), eqn)
        given = jnp.where(nobody, jnp.nan, rows)
        got = eight.times_uneven(impl, given, held(w_EDF), sizes_E, contract, dtype == fp8.E5M2)
        assert got.dtype == jnp.bfloat16 and np.count_nonzero(want)
        off = abs(np.asarray(got, np.float64) - want)
        assert (off <= 2.0**-8 * abs(want) + 128 * 2.0**-24 * terms).all()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_stays_so(bad):
    """One element that is not finite makes all rows of the device NaN, of other experts too: they share a scale."""
    x_RD, _, d_RF, w_EDF = arrays(3)
    x_RD = x_RD.at[0, 0].set(bad)
    assert np.isnan(np.asarray(eight.times(x_RD, held(w_EDF), "D", gradient=False), np.float32)).all()
    assert np.isnan(np.asarray(eight.outer(x_RD, d_RF, 3, jnp.bfloat16, "F"), np.float32)).all()


# ---- A whole step


@pytest.mark.parametrize(
    "name",
    helpers.few(
        (
            "experts with room: expert4xseq2/remat.policy=full",
            "experts with room: expert2xtensor2xseq2/train.grad_accum=2/train.accumulate=layer",
            "experts: expert2xfsdp4/sharding.rules.experts=expert",
        ),
        "experts: expert2xfsdp4/sharding.rules.experts=expert",
    ),
)
def test_layouts_take_the_steps_of_one_device(name):
    """Losses, gradients and weights differ from one device's within the bounds of rounding (parity/compare.py). Each device has
    its own FP8 scales.
    """
    comparison = matrix.against_one_device(name, "fp8")
    assert not comparison.wrong, comparison.wrong


MOE = {"precision": "fp8", "model.num_layers": 2, "model.num_experts": 4, "model.d_ff": 64, "data.packing": "none"}
ALONE = {"mesh.expert": 4, "mesh.data": 2}


@functools.cache
def losses(*given) -> np.ndarray:
    return np.asarray(helpers.train(helpers.tiny(MOE | ALONE | dict(given)), 20).loss)


@pytest.mark.more
def test_losses_follow_those_in_bfloat16():
    """The loss falls over 20 steps, within 1% of bfloat16's, with one expert a device and no dropped tokens."""
    wide, eight_bits = losses(("precision", "bf16")), losses()
    assert eight_bits[-1] < 0.95 * eight_bits[0]
    assert (abs(eight_bits / wide - 1) < 0.01).all() and (eight_bits != wide).any()


@pytest.mark.more
def test_further_rounds_lose_nothing():
    """With a buffer for half of the tokens, losses change by less than 0.1%. Dispatch then takes two rounds, and the rows of
    each round have their own FP8 scale.
    """
    assert (abs(losses(("moe.buffer", 0.5)) / losses() - 1) < 1e-3).all()


@pytest.mark.more
def test_remat_gives_the_same_gradients():
    """Gradients are equal, bit for bit: a gathered weight's bits and scale equal the recomputed ones."""
    kept, again = (first_gradients(helpers.tiny(MOE | ALONE | {"remat.policy": p})) for p in ("none", "full"))
    for name, a in kept.items():
        assert np.array_equal(a, again[name]), name


Products = list[tuple[str, str, bool | str]]  # (times or outer, the contracted axis or "", which rows are a gradient)


def products(given: Mapping[str, object], monkeypatch: pytest.MonkeyPatch) -> tuple[Products, Products]:
    """Return the FP8 matmuls of one block of experts, each list in the order of tracing: (forward pass, backward pass)."""
    run = helpers.tiny(MOE | given)
    placement, numerics, model = helpers.program(run).placement, numerics_of(run), run.model
    zero = make_zero(run, placement, numerics)
    spec = feed_forward.Spec(
        model.num_experts, GATED["silu"], "auto", run.moe.capacity_factor, run.moe.buffer, placement, numerics
    )
    made: Products = []
    times, times_uneven, outer = eight.times, eight.times_uneven, eight.outer

    def seen_times(rows, w, contract, gradient):
        made.append(("times", contract, gradient))
        return times(rows, w, contract, gradient)

    def seen_uneven(impl, rows, w, sizes_E, contract, gradient):
        made.append(("uneven", contract, gradient))
        return times_uneven(impl, rows, w, sizes_E, contract, gradient)

    def seen_outer(rows_RD, rows_RF, experts, out, gradient):
        made.append(("outer", "", gradient))
        return outer(rows_RD, rows_RF, experts, out, gradient)

    monkeypatch.setattr(eight, "times", seen_times)
    monkeypatch.setattr(eight, "times_uneven", seen_uneven)
    monkeypatch.setattr(eight, "outer", seen_outer)

    def forward(x, w):
        used = zero.gather_weight(ComputeCopy(held(w), w), feed_forward.AXES)
        share = jnp.ones((*x.shape[:2], 2))
        y, _ = feed_forward.feed_forward(x, share, share.astype(jnp.int32) - 1, used, used, used, None, spec)
        made.append(("", "", ""))
        return y.astype(jnp.float32).sum()

    x, w = jnp.ones((8, 16, D), jnp.bfloat16), jnp.ones((model.num_experts, D, F))
    specs = placement.spec(("batch", "sequence", None)), placement.spec(feed_forward.AXES)
    jax.eval_shape(placement.shard_map(jax.grad(forward, (0, 1)), specs, specs), x, w)
    at = made.index(("", "", ""))
    return made[:at], made[at + 1 :]


FORWARD: Products = [("times", "D", False), ("times", "D", False), ("times", "F", False)]
BACKWARD: Products = [
    *(("times", "D", True), ("times", "F", True), ("times", "F", True)),
    *(("outer", "", "F"), ("outer", "", "F"), ("outer", "", "D")),
]


def test_gradients_are_rounded_as_such(monkeypatch):
    assert products({"moe.capacity_factor": 2.0}, monkeypatch) == (FORWARD, BACKWARD)


def test_gradients_of_weights_of_uneven_rows_are_not_in_8_bits(monkeypatch):
    forward, backward = ([("uneven", *p[1:]) for p in made if p[0] == "times"] for made in (FORWARD, BACKWARD))
    assert products({}, monkeypatch) == (forward, backward)


def test_further_rounds_multiply_in_8_bits_too(monkeypatch):
    """The second round of dispatch uses the FP8 types of the first. The backward pass recomputes gate and up."""
    forward, backward = products(ALONE | {"moe.buffer": 0.5}, monkeypatch)
    assert set(forward) == {*FORWARD} and len(forward) >= 2 * len(FORWARD)
    assert set(backward) == {*FORWARD[:1], *BACKWARD} and len(backward) >= 2 * len(BACKWARD) + 2


# ---- Which matmuls are in FP8


def test_all_matmuls_of_a_model_with_experts_are_in_8_bits():
    shared = {f"layers.mlp.shared.{name}" for name in ("gate", "up", "down")}
    others = {f"layers.attention.{name}" for name in ("wq", "wk", "wv", "wo")} | {
        name.replace("shared.", "") for name in shared
    }
    assert names(helpers.tiny(MOE | ALONE)) == others
    run = helpers.tiny(MOE | ALONE | {"model.shared_d_ff": 32})
    assert names(run) == others | shared == {*precision.matmuls(run.model)}


@pytest.mark.more
def test_rows_in_groups_with_a_capacity_train():
    """A run trains with the settings that the error about uneven rows recommends (test_mesh_rules.py)."""
    run = helpers.tiny(MOE | {"mesh.expert": 2, "mesh.fsdp": 4, "moe.capacity_factor": 2.0})
    assert "layers.mlp.gate" in names(run)
    assert helpers.train(run, 2).loss[-1] > 0


def planned(*overrides: str) -> result.Plan:
    pytest.importorskip("jax_cuda12_plugin", reason="needs the `plan` extra")
    model = ("num_layers=2", "d_model=1024", "d_ff=1024", "num_heads=8", "num_kv_heads=4", "vocab_size=2048")
    argv = ["--config=configs/mixtral_8x7b.py", "--config.precision=fp8", "--config.remat.policy=none", *overrides]
    batch = ("--config.train.global_batch=16", "--config.train.grad_accum=2", "--config.data.seq_len=1024")
    run = launch.load([*argv, *batch, *(f"--config.model.{o}" for o in model)]).run
    return read_plan(compile_step(run, NODE), run, NODE)


ROUTER = 3  # matmuls of a layer's router, in float32


@pytest.mark.more
def test_products_of_uneven_rows_are_fp8_calls():
    """All matmuls are FP8 calls, except the router's and those of the experts' three weight gradients."""
    made = planned("--config.mesh.expert=2", "--config.mesh.fsdp=4")
    assert made.matmuls and (made.matmuls.eight, made.matmuls.products) == (18.0, 21.0 + ROUTER)
    assert not [w for w in made.warnings if "fp8" in w]


@pytest.mark.more
@pytest.mark.parametrize(
    "layout",
    [(), ("--config.mesh.expert=2", "--config.mesh.fsdp=4", "--config.moe.capacity_factor=2")],
    ids=["one each", "capacity"],
)
def test_every_matmul_is_an_fp8_call(layout):
    """Only the router's matmuls are not FP8 calls. Cases: one expert a device, and four experts with a capacity, which makes
    their numbers of rows equal.
    """
    made = planned(*layout)
    assert made.matmuls and (made.matmuls.eight, made.matmuls.products) == (21.0, 21.0 + ROUTER)
    assert all("router" in name for name in made.matmuls.wide)
    assert not [w for w in made.warnings if "fp8" in w]


@pytest.mark.more
def test_experts_left_wide_are_named():
    made = planned("--config.mesh.expert=2", "--config.mesh.fsdp=4", "--config.fp8.exclude=mlp.gate,mlp.up,mlp.down")
    assert made.matmuls and (made.matmuls.eight, made.matmuls.products) == (12.0, 21.0 + ROUTER)
    assert sum("mlp/experts" in name for name in made.matmuls.wide) >= 3
