"""FP8: matmuls of layers and experts against the formats' definitions, layouts, remat, exclusions, and the program."""

import dataclasses
import functools
import json
import re
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import reset_gpu_interpret_mode_state
from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
from jax.extend.core import jaxprs_in_params
from kernel_bounds import FORMATS, in_8_bits

from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import ConfigError
from jaxtrain.data import loading
from jaxtrain.kernels import fp8
from jaxtrain.kernels.dot import dot
from jaxtrain.kernels.experts import feed_forward, grouped_matmul, pallas
from jaxtrain.models import flops, layers, precision
from jaxtrain.models.zero import ComputeCopy
from jaxtrain.plan import fit, result
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.make import read_plan
from jaxtrain.plan.program import collectives, hlo, warnings
from jaxtrain.plan.program.op_cost import OpCost
from jaxtrain.plan.topology import parse_topology
from jaxtrain.report.shardings import run_shardings
from jaxtrain.step.definition import fp8_weights
from jaxtrain.step.state import abstract_tensors
from jaxtrain.step.validate import validate_step
from jaxtrain.train import parity
from jaxtrain.train.parity_layouts import to_float32


@pytest.mark.parametrize("dtype", FORMATS)
def test_scales(dtype):
    """The scale is a power of two. The largest element fits; with half of the scale it would reach or exceed the format's
    maximum.
    """
    most = float(jnp.finfo(dtype).max)
    amax = np.array([1e-30, 3e-5, 0.7, 1.0, most, 2 * most, 1e4, 3e38], np.float32)
    scale = np.asarray(jax.jit(fp8.amax_scale, static_argnums=1)(amax, dtype))
    assert np.array_equal(np.log2(scale), np.round(np.log2(scale)))
    assert (amax / scale <= most).all() and (amax / scale >= most / 2).all()
    odd = np.asarray(fp8.amax_scale(jnp.array([0.0, np.inf, np.nan, 1e-37]), dtype))
    assert odd[0] == 1.0 and np.isnan(odd[1:3]).all() and odd[3] == fp8.SMALLEST


def close(got: Any, want: np.ndarray, terms: np.ndarray) -> bool:
    """Return whether a result agrees with the exact one, up to one rounding to bfloat16 and sums in float32.

    terms: the sums of the products' absolute values.
    """
    off = abs(np.asarray(got, np.float64).reshape(want.shape) - want)
    return bool(np.count_nonzero(want) and (off <= 2.0**-8 * abs(want) + 128 * 2.0**-24 * terms).all())


def held(w: jax.Array) -> fp8.Float8:
    return fp8.encode(w, stacked=False, over=())


# ---- Matmuls of a layer

PRODUCTS = {"BTD,DF->BTF": ((4, 24, 32), (32, 48)), "BTNH,DNH->BTD": ((4, 24, 6, 8), (64, 6, 8))}
AXES = {"BTD,DF->BTF": ("embed", "mlp"), "BTNH,DNH->BTD": ("embed", "heads", "head_dim")}


@functools.cache
def compiled(eqn):
    run = helpers.tiny({"precision": "fp8"})
    zero = helpers.program(run).zero

    @jax.jit
    def all_three(x, w, dy):
        def multiply(x, w):
            return dot(eqn, x, zero.gather_weight(ComputeCopy(held(w), w), AXES[eqn]), zero.numerics)

        y, vjp = jax.vjp(multiply, x, w)
        return y, *vjp(dy)

    return all_three


def product(eqn, x, w, dy):
    """Return y, dx and dw of the einsum `eqn` with a weight in FP8, on one device."""
    return [np.asarray(a, np.float64) for a in compiled(eqn)(x, w, dy)]


def arrays(eqn):
    (x_shape, w_shape), keys = PRODUCTS[eqn], jax.random.split(jax.random.key(0), 3)
    y_shape = jax.eval_shape(lambda x, w: jnp.einsum(eqn, x, w), *(jnp.zeros(s) for s in (x_shape, w_shape))).shape
    x, dy = (jax.random.normal(k, s, jnp.bfloat16) for k, s in ((keys[0], x_shape), (keys[1], y_shape)))
    # Gradients of very different sizes, some of which only e5m2 can represent.
    dy *= jnp.exp2(jax.random.randint(keys[1], y_shape, -18, 1).astype(jnp.bfloat16))
    return x, 0.02 * jax.random.normal(keys[2], w_shape), dy


@pytest.mark.parametrize("eqn", PRODUCTS)
def test_matmuls_are_those_of_rounded_numbers(eqn):
    x, w, dy = arrays(eqn)
    x8, w8, dy8 = in_8_bits(x, fp8.E4M3), in_8_bits(w, fp8.E4M3), in_8_bits(dy, fp8.E5M2)
    inputs, y = eqn.split("->")
    xs, ws = inputs.split(",")
    back = ((eqn, x8, w8), (f"{y},{ws}->{xs}", dy8, w8), (f"{xs},{y}->{ws}", x8, dy8))
    for got, (formula, a, b) in zip(product(eqn, x, w, dy), back, strict=True):
        assert close(got, np.einsum(formula, a, b), np.einsum(formula, abs(a), abs(b))), formula


@pytest.mark.parametrize(("where", "bad"), [("x", np.inf), ("w", np.nan), ("dy", -np.inf)])
def test_what_is_not_finite_stays_so(where, bad):
    """Each result that reads the infinity or NaN is all NaN. A saturating conversion to e4m3 would turn infinity into 448, and
    hide that the run diverged. Zeros give zeros.
    """
    eqn = "BTD,DF->BTF"
    given = dict(zip(("x", "w", "dy"), arrays(eqn), strict=True))
    assert all((a == 0).all() for a in product(eqn, *(jnp.zeros_like(a) for a in given.values())))
    given[where] = given[where].at[(0,) * given[where].ndim].set(bad)
    made = dict(zip(("y", "dx", "dw"), product(eqn, **given), strict=True))
    touched = {"x": ("y", "dw"), "w": ("y", "dx"), "dy": ("dx", "dw")}[where]
    assert {name for name, a in made.items() if np.isnan(a).all()} == {*touched}
    assert all(np.isfinite(a).all() for name, a in made.items() if name not in touched)


def feed_forward_of(activation, bounded):
    """Return a compiled function (x, weights, dy) -> y, dx, the gradients of gate, up and down, and the two projections.
    bounded: use `gated_linear` instead of three `dot`s.
    """

    @jax.jit
    def run(x, weights, dy):
        def block(x, weights):
            gate_up_down = [dataclasses.replace(held(w), gradient=w) for w in weights]
            gate, up = (fp8.dot("BTD,DF->BTF", x, w) for w in gate_up_down[:2])
            if bounded:
                return fp8.gated_linear(x, *gate_up_down, activation), (gate, up)
            return fp8.dot("BTF,DF->BTD", activation(gate) * up, gate_up_down[2]), (gate, up)

        y, back, projections = jax.vjp(block, x, weights, has_aux=True)
        dx, grads = back(dy)
        return y, dx, *grads, *projections

    return run


@pytest.mark.parametrize("activation", layers.NONLINEARITIES)
def test_gradients_scaled_by_a_bound(activation):
    """Compare `gated_linear` with three plain matmuls. The output and down's gradient have equal bits.

    The gradients of gate and up have other scales than with plain matmuls. The largest gradient of their product h is at most
    dh = sum of |dy| |w|. So their scales are at most s = 2 SLOPE dh max(|gate|, |up|) / 57344. An element differs by at most s
    2^-16: half of the smallest number with each of the two scales. The results are rounded to bfloat16, and dx is a sum of two
    rounded results. SLOPE is at least the slope of each activation, and also covers four roundings to bfloat16.
    """
    f = layers.NONLINEARITIES[activation]
    slopes = jax.vmap(jax.grad(f))(jnp.linspace(-30, 30, 60_001))
    assert float(f(0.0)) == 0 and 1 < float(abs(slopes).max()) * (1 + 2.0**-8) ** 4 < fp8.SLOPE

    B, T, D, F, u = 2, 24, 32, 48, 2.0**-8
    keys = jax.random.split(jax.random.key(0), 5)
    both = [feed_forward_of(f, bounded) for bounded in (False, True)]
    for size in (0.1, 30.0):
        x, dy = (size * jax.random.normal(k, (B, T, D), jnp.bfloat16) for k in keys[:2])
        dy *= jnp.exp2(jax.random.randint(keys[1], dy.shape, -18, 1).astype(jnp.bfloat16))
        weights = [0.1 * jax.random.normal(k, (D, F), jnp.bfloat16) for k in keys[2:]]
        plain, bounded = ([np.asarray(a, np.float64) for a in made(x, weights, dy)] for made in both)
        for same in (0, 4):
            assert np.array_equal(plain[same], bounded[same])
        x, dy, gate, up, down = (abs(np.asarray(a, np.float64)) * (1 + 2.0**-3) for a in (x, dy, *weights))  # in 8 bits
        most = max(a.max() for a in map(abs, plain[5:]))
        apart = 2 * fp8.SLOPE * np.einsum("btd,df->btf", dy, down).max() * (1 + u) * most / 57344 * 2.0**-16
        dx, d_gate, d_up = (abs(a - b) for a, b in zip(plain[1:4], bounded[1:4], strict=True))
        assert (dx <= apart * (gate + up).sum(1) + 4 * u * (abs(plain[1]) + abs(bounded[1])).max()).all()
        limit = apart * x.sum((0, 1))[:, None]
        for a, b, d in zip(plain[2:4], bounded[2:4], (d_gate, d_up), strict=True):
            assert (d <= limit + 2 * u * np.maximum(abs(a), abs(b))).all()
            assert np.count_nonzero(a)


# ---- Matmuls of experts

R, D, F, E = 24, 32, 48, 3  # rows of each expert


@functools.cache
def of_experts() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return x (E R, D), h (E R, F), gradients of very different sizes (E R, F), and weights (E, D, F)."""
    keys = jax.random.split(jax.random.key(E), 4)
    x_RD, h_RF = (jax.random.normal(k, (E * R, n), jnp.bfloat16) for k, n in zip(keys, (D, F), strict=False))
    spread = jnp.exp2(jax.random.randint(keys[2], (E * R, F), -18, 1).astype(jnp.bfloat16))
    return x_RD, h_RF, h_RF * spread, 0.02 * jax.random.normal(keys[3], (E, D, F))


def test_matmuls_of_experts_are_those_of_rounded_numbers():
    """Each expert multiplies its own rows. Rows that are gradients have type e5m2, others e4m3."""
    x_RD, h_RF, d_RF, w_EDF = of_experts()
    x, h, w, d, dy = (
        in_8_bits(a, t).reshape(E, -1, a.shape[-1])
        for a, t in ((x_RD, fp8.E4M3), (h_RF, fp8.E4M3), (w_EDF, fp8.E4M3), (d_RF, fp8.E5M2), (x_RD, fp8.E5M2))
    )
    sizes_E, fast = jnp.full((E,), R), jax.lax.Precision.DEFAULT

    def times(rows: jax.Array, contract: str, gradient: bool) -> jax.Array:
        return grouped_matmul.times("even", rows, held(w_EDF), sizes_E, contract, fast, gradient)

    def outer(a_RD: jax.Array, b_RF: jax.Array, gradient: str) -> jax.Array:
        return grouped_matmul.outer("even", a_RD, b_RF, sizes_E, jnp.dtype(jnp.bfloat16), fast, gradient)

    for got, eqn, a, b in (
        (times(x_RD, "D", gradient=False), "ERD,EDF->ERF", x, w),
        (times(h_RF, "F", gradient=False), "ERF,EDF->ERD", h, w),
        (times(d_RF, "F", gradient=True), "ERF,EDF->ERD", d, w),
        (outer(x_RD, d_RF, "F"), "ERD,ERF->EDF", x, d),
        (outer(x_RD, h_RF, "D"), "ERD,ERF->EDF", dy, h),
    ):
        assert close(got, np.einsum(eqn, a, b), np.einsum(eqn, abs(a), abs(b))), eqn
    for made in (
        times(x_RD.at[0, 0].set(np.inf), "D", gradient=False),
        outer(x_RD.at[0, 0].set(np.nan), d_RF, "F"),
    ):  # all rows of a device share a scale, those of other experts too
        assert np.isnan(np.asarray(made, np.float32)).all()


ROWS = (40, 0, 29)  # of 72; the last 3 belong to no expert


@pytest.mark.parametrize("impl", ["ragged", "pallas"])
def test_matmuls_of_uneven_rows_are_those_of_rounded_numbers(impl, monkeypatch):
    """Matmuls over D in e4m3 and over F in e5m2 equal those of rounded rows. Rows without an expert hold NaN, which neither a
    result nor the scale may contain.
    """
    reset_gpu_interpret_mode_state()
    monkeypatch.setattr(pallas, "INTERPRET", InterpretGPUParams())
    x_RD, _, d_RF, w_EDF = of_experts()
    used = sum(ROWS)
    nobody, w = jnp.arange(E * R)[:, None] >= used, in_8_bits(w_EDF, fp8.E4M3)
    for rows, dtype, contract, eqn in ((x_RD, fp8.E4M3, "D", "rd,rdf->rf"), (d_RF, fp8.E5M2, "F", "rf,rdf->rd")):
        given = jnp.where(nobody, jnp.nan, rows)
        how = contract, jax.lax.Precision.DEFAULT, dtype == fp8.E5M2
        got = np.asarray(grouped_matmul.times(impl, given, held(w_EDF), jnp.array(ROWS), *how), np.float64)
        a, by_row = in_8_bits(rows[:used], dtype), np.repeat(w, ROWS, axis=0)  # the weight of each row's expert
        assert close(got[:used], np.einsum(eqn, a, by_row), np.einsum(eqn, abs(a), abs(by_row)))
        assert not got[used:].any()


# ---- A whole step

SMALL = {"precision": "fp8", "model.num_layers": 2, "data.packing": "none", "data.seq_len": 32}
MOE = SMALL | {"model.num_experts": 4, "model.d_ff": 64}
FSDP = {"mesh.fsdp": 2, "remat.policy": "full"}
ALONE = {"mesh.expert": 4, "mesh.data": 2}


DENSE_LAYOUT = {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.seq": 2, "sharding.zero": 1}
EXPERTS_LAYOUT = {"mesh.expert": 2, "mesh.fsdp": 4, "sharding.rules.experts": "expert"}
EIGHT_EXPERTS = {"model.num_experts": 8, "model.d_ff": 32, "model.shared_d_ff": 32}


@pytest.mark.parametrize(
    ("model", "layout"),
    [({}, DENSE_LAYOUT), pytest.param(EIGHT_EXPERTS, EXPERTS_LAYOUT, marks=pytest.mark.more)],
    ids=["dense", "experts"],
)
def test_a_layout_takes_the_step_of_one_device(model, layout):
    """Loss, gradients and weights differ from one device's within the bounds of rounding (train/parity.py), with matmuls and
    attention's forward pass in FP8. Each device has its own scales.
    """
    usual = {
        "precision": "fp8",
        "attention.forward": "fp8",
        "model.num_layers": 1,
        "model.init_std": 0.2,
        "data.max_segments": 6,
    }
    one, run = helpers.tiny(usual | model), helpers.tiny(usual | model | layout)
    reference, exact = (helpers.first_steps(r, 1) for r in (one, to_float32(one)))
    bounds = parity.bounds(reference, exact, len(helpers.devices_of(run)), run.train.global_batch * run.data.seq_len)
    comparison = parity.compare_runs(helpers.first_steps(run, 1), reference, bounds)
    assert not comparison.violations, comparison.violations


def first_gradients(run) -> dict[str, np.ndarray]:
    """Return the gradients of the first step, by tensor. XLA may not skip roundings to bfloat16 that the program contains."""
    made = helpers.program(run)
    step = made.train_step.lower(made.state, made.batch).compile(compiler_options={"xla_allow_excess_precision": False})
    return parity.take_steps(made, step, helpers.fresh_state(run), lambda i: helpers.host_batch(run, i), 1)[0].gradients


@pytest.mark.more
@pytest.mark.parametrize("model", [SMALL, MOE | ALONE], ids=["dense", "experts"])
def test_remat_gives_the_same_gradients(model):
    """Gradients are equal, bit for bit: saved FP8 arrays equal the recomputed ones."""
    kept, again = (first_gradients(helpers.tiny(model | {"remat.policy": policy})) for policy in ("none", "full"))
    for name, a in kept.items():
        assert np.array_equal(a, again[name]), name


def test_checkpoints_do_not_change():
    """A run may change from bfloat16 to FP8 on resume, and back: the state has the same tensors, types and layouts."""
    eight_bits, sixteen = (helpers.program(helpers.tiny(SMALL | {"precision": p})).state for p in ("fp8", "bf16"))
    assert abstract_tensors(eight_bits) == abstract_tensors(sixteen)
    assert {str(a.dtype) for a in jax.tree.leaves(eight_bits)} == {"float32", "int32"}


# ---- Which matmuls are in FP8

ALL = {f"layers.attention.w{c}" for c in "qkvo"} | {f"layers.mlp.{name}" for name in ("gate", "up", "down")}


def names(changes: dict[str, Any]) -> set[str]:
    """Return the names of the weights whose matmuls a run computes in FP8."""
    run = helpers.tiny(changes)
    found = jax.tree_util.tree_leaves_with_path(fp8_weights(run.precision, run.fp8.exclude, helpers.program(run).definition))
    return {".".join(key.key for key in path) for path, yes in found if yes}


def test_weights_are_excluded_by_name():
    assert names({"precision": "bf16"}) == set()
    assert names(SMALL) == ALL == {*precision.matmul_weights(helpers.tiny(SMALL).model)}
    assert names(SMALL | {"fp8.exclude": "wo, mlp.down"}) == ALL - {"layers.attention.wo", "layers.mlp.down"}
    assert names(SMALL | {"fp8.exclude": "attention"}) == {name for name in ALL if "mlp" in name}
    shared = {f"layers.mlp.shared.{name}" for name in ("gate", "up", "down")}
    assert names(MOE | ALONE) == ALL and names(MOE | ALONE | {"model.shared_d_ff": 32}) == ALL | shared
    run = helpers.tiny(SMALL | FSDP | {"fp8.exclude": "wo"})
    rows = run_shardings(run, helpers.devices_of(run)).filter(kind="gathered")
    assert {r.name for r in rows if r.dtype == "u8"} == ALL - {"layers.attention.wo"}
    with pytest.raises(ConfigError, match="fp8.exclude"):  # a family of one's own is checked when it is made
        helpers.program(helpers.tiny(SMALL | {"model.family": "helpers:WiderFamily", "fp8.exclude": "router"}))


def rounded(changes: dict[str, Any]) -> dict[Any, int]:
    """Return how many arrays one block of experts rounds to each format of FP8, forward and backward."""
    run = helpers.tiny(MOE | changes)
    zero = helpers.program(run).zero
    placement = zero.placement
    how = run.moe.capacity_factor, placement, zero.numerics
    spec = feed_forward.ExpertsSpec(run.model.num_experts, layers.GATED["silu"], "auto", *how)

    def block(x, w):
        used = zero.gather_weight(ComputeCopy(held(w), w), feed_forward.AXES)
        share = jnp.ones((*x.shape[:2], 2))
        weights = feed_forward.Weights(used, used, used, None, {})
        y, _ = feed_forward.feed_forward(x, share, share.astype(jnp.int32) - 1, weights, spec)
        return y.astype(jnp.float32).sum()

    found = dict.fromkeys(FORMATS, 0)

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            made = eqn.params.get("new_dtype")
            found.update({dtype: n + (made == dtype) for dtype, n in found.items()})
            for body in jaxprs_in_params(eqn.params):
                walk(body)

    x, w = jnp.ones((8, 16, D), jnp.bfloat16), jnp.ones((run.model.num_experts, D, F))
    specs = placement.spec(("batch", "sequence", None)), placement.spec(feed_forward.AXES)
    walk(jax.make_jaxpr(placement.shard_map(jax.grad(block, (0, 1)), specs, specs))(x, w).jaxpr)
    return found


def test_gradients_of_experts_are_rounded_as_such():
    """Gradients are in e5m2, in three matmuls for gradients of rows and three for those of weights, which are not in 8 bits if
    rows are uneven. The second round of dispatch rounds as the first.
    """
    even, uneven = rounded({"moe.capacity_factor": 2.0}), rounded({})
    assert (even[fp8.E5M2], uneven[fp8.E5M2], rounded(ALONE)[fp8.E5M2]) == (6, 3, 2 * 6)
    assert even[fp8.E4M3] - uneven[fp8.E4M3] == 3


def test_gpus_without_fp8_are_refused():
    for sm in (86, 89, 0):
        found = validate_step(helpers.tiny(SMALL), Devices("gpu", "NVIDIA L4", 1, 24.0, "test", sm))
        assert ("precision" in [p.key for p in found]) == (sm == 86)


# ---- The compiled program

LLAMA, MIXTRAL, NODE = "configs/llama3_8b.py", "configs/mixtral_8x7b.py", parse_topology("h200:8")
SIZES = ("num_layers=2", "d_model=1024", "d_ff=2048", "num_heads=8", "num_kv_heads=4", "vocab_size=2048")


@functools.cache
def planned(config: str, *others: str):
    pytest.importorskip("jax_cuda12_plugin", reason="needs the `plan` extra")
    values = ("precision=fp8", "train.grad_accum=2", "train.global_batch=16", *(f"model.{o}" for o in SIZES), *others)
    run = loading.load_config([f"--config={config}", *(f"--config.{o}" for o in values)]).run
    made = compile_step(run, NODE)
    return run, made, read_plan(made, NODE)


@pytest.mark.long
@pytest.mark.more
@pytest.mark.parametrize(("mesh", "in_8_bits"), [((), 21), (("mesh.expert=2", "mesh.fsdp=4"), 18)], ids=["one each", "uneven"])
def test_matmuls_of_experts_are_fp8_calls(mesh, in_8_bits):
    """All 21 matmuls of a layer are FP8 calls, but not three of the router, nor gradients of weights with uneven rows."""
    _, _, made = planned(MIXTRAL, "remat.policy=none", "data.seq_len=1024", *mesh)
    assert (made.matmuls.eight, made.matmuls.products) == (in_8_bits, 24)
    assert not [w for w in made.warnings if "fp8" in w]


def test_every_matmul_of_a_layer_is_an_fp8_call():
    run, compiled, made = planned(LLAMA)
    assert made.matmuls == result.Matmuls(21.0, 21.0, ())
    assert not [w for w in made.warnings if "fp8" in w]
    assert [*warnings.fp8_warnings(compiled.program, result.Matmuls(21.0, 20.0, ("forward mlp",)))]
    assert result.from_json(json.loads(json.dumps(result.to_json(made)))) == made


def test_weights_that_do_not_learn_have_fewer_products():
    """A frozen weight has two matmuls, or one in the first layer. Matmuls of adapters stay in bfloat16."""
    run = helpers.tiny(SMALL | {"lora.rank": 4, "lora.targets": "wq", "model.family": "llama"})
    program, wide = helpers.program(run), tuple(f"backward lora {i}" for i in range(9))
    assert not [*warnings.fp8_warnings(program, result.Matmuls(20.0, 14 - 7 / 2, wide))]
    assert [*warnings.fp8_warnings(program, result.Matmuls(20.0, 10.0, wide))]


def test_gradients_are_added_up_in_full():
    """With XLA's default precision, cuBLASLt sums faster and less exactly. Only forward matmuls use the default precision."""
    _, compiled, _ = planned(LLAMA)
    calls = [line for line in compiled.text.splitlines() if 'custom_call_target="__cublas$lt$matmul$f8"' in line]
    asked = {
        (set(re.findall(r"DEFAULT|HIGHEST", line.split("operand_precision")[1][:60])).pop(), "transpose(" in line)
        for line in calls
    }
    assert asked == {("DEFAULT", False), ("HIGHEST", True)}


def test_weights_travel_in_fp8_and_scales_once_a_step():
    run, compiled, made = planned(LLAMA)
    gathers = [c for c in made.collectives if c.kind == "all-gather"]
    assert any("f8e4m3fn" in c.dtype for c in gathers)
    # One byte for each weight of a layer, twice a microbatch but once for the last layer, and two bytes for each weight of the
    # head. Some weights are sent as plain bytes. Scales of norms, and segments, are combined with them.
    counts = flops.parameters(run.model)
    layer = (counts["attention"] + counts["mlp"]) / run.model.num_layers
    sent = run.train.grad_accum * (layer * (2 * run.model.num_layers - 1) + 2 * counts["head"]) * 7 / 8
    assert sum(c.wire_gib for c in gathers) * 2**30 == pytest.approx(sent, rel=0.02)
    found = collectives.read_collectives(hlo.parse_hlo(compiled.text), made.mesh, NODE.gpus).values()
    scales = [f for f in found if "/fp8.py" in f.source and f.kind == "all-reduce"]
    assert scales and all(f.count == 1 for f in scales)


def test_rates_differ_by_type():
    """The plan uses the measured 1,280 TFLOP/s for FP8 matmuls, and 720 for bfloat16."""
    run, _, made = planned(LLAMA)
    assert fit.least_memory(run, NODE).gib <= made.memory.peak_gib
    product = OpCost("gemm", flops=1e15)
    eight_bits = dataclasses.replace(product, fp8=True).seconds(made.rates)
    assert eight_bits == pytest.approx(product.seconds(made.rates) * 720 / 1280, rel=1e-3)
