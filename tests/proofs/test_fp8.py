"""FP8: matmuls against the formats' definitions, values that are not finite, layouts, remat, exclusions, and the program."""

import dataclasses
import json
import re

import helpers
import jax
import jax.numpy as jnp
import matrix
import ml_dtypes
import numpy as np
import pytest
from fp8_helpers import F8, emulated, first_gradients, names

from jaxtrain import flops, launch, precision
from jaxtrain.config import ConfigError
from jaxtrain.hardware import Devices
from jaxtrain.kernels import fp8
from jaxtrain.kernels.dot import dot
from jaxtrain.models import layers
from jaxtrain.plan import result
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.make import read_plan
from jaxtrain.plan.program import collectives, hlo, warnings
from jaxtrain.plan.program.op_cost import Work
from jaxtrain.plan.report import sections
from jaxtrain.plan.search import bound
from jaxtrain.plan.shardings import describe
from jaxtrain.plan.topology import parse
from jaxtrain.train.definition import numerics_of
from jaxtrain.train.state import abstract_tensors
from jaxtrain.validate import validate_step
from jaxtrain.zero import ComputeCopy, make_zero

NODE = parse("h200:8")


@pytest.mark.parametrize("dtype", F8)
def test_scales(dtype):
    """The scale is a power of two. The largest element fits; with half of the scale it would reach or exceed the format's
    maximum.
    """
    most = float(jnp.finfo(dtype).max)
    amax = np.array([1e-30, 3e-5, 0.7, 1.0, most, 2 * most, 1e4, 3e38], np.float32)
    scale = np.asarray(jax.jit(fp8.scale_of, static_argnums=1)(amax, dtype))
    assert np.array_equal(np.log2(scale), np.round(np.log2(scale)))
    assert (amax / scale <= most).all() and (amax / scale >= most / 2).all()
    odd = np.asarray(fp8.scale_of(jnp.array([0.0, np.inf, np.nan, 1e-37]), dtype))
    assert odd[0] == 1.0 and np.isnan(odd[1:3]).all() and odd[3] == fp8.SMALLEST


PRODUCTS = {"BTD,DF->BTF": ((4, 24, 32), (32, 48)), "BTNH,DNH->BTD": ((4, 24, 6, 8), (64, 6, 8))}
AXES = {"BTD,DF->BTF": ("embed", "mlp"), "BTNH,DNH->BTD": ("embed", "heads", "head_dim")}


def product(eqn, x, w, dy):
    """Return y, dx and dw of the einsum `eqn` with a weight in FP8, on one device."""
    run = helpers.tiny({"precision": "fp8"})
    zero = make_zero(run, helpers.program(run).placement, numerics_of(run))

    @jax.jit
    def all_three(x, w, dy):
        held = fp8.encode(w, stacked=False, over=())
        y, vjp = jax.vjp(lambda x, w: dot(eqn, x, zero.gather_weight(ComputeCopy(held, w), AXES[eqn]), zero.numerics), x, w)
        return y, *vjp(dy)

    return [np.asarray(a, np.float64) for a in all_three(x, w, dy)]


def arrays(eqn, seed=0):
    (x_shape, w_shape), keys = PRODUCTS[eqn], jax.random.split(jax.random.key(seed), 3)
    y_shape = jax.eval_shape(lambda x, w: jnp.einsum(eqn, x, w), *(jnp.zeros(s) for s in (x_shape, w_shape))).shape
    x, dy = (jax.random.normal(k, s, jnp.bfloat16) for k, s in ((keys[0], x_shape), (keys[1], y_shape)))
    # Gradients of very different sizes, some of which only e5m2 can represent.
    dy *= jnp.exp2(jax.random.randint(keys[1], y_shape, -18, 1).astype(jnp.bfloat16))
    return x, 0.02 * jax.random.normal(keys[2], w_shape), dy


@pytest.mark.parametrize("eqn", PRODUCTS)
def test_matmuls_are_those_of_rounded_numbers(eqn):
    """y, dx and dw equal einsums of rounded numbers, up to rounding to bfloat16 (2^-8 of the result) and float32 sums (2^-17 of
    the sum of |terms|).
    """
    x, w, dy = arrays(eqn)
    x8, w8, dy8 = emulated(x, fp8.E4M3), emulated(w, fp8.E4M3), emulated(dy, fp8.E5M2)
    inputs, y = eqn.split("->")
    xs, ws = inputs.split(",")
    back = ((eqn, x8, w8), (f"{y},{ws}->{xs}", dy8, w8), (f"{xs},{y}->{ws}", x8, dy8))
    for got, (formula, a, b) in zip(product(eqn, x, w, dy), back, strict=True):
        want, terms = np.einsum(formula, a, b), np.einsum(formula, abs(a), abs(b))
        assert (abs(got - want) <= 2.0**-8 * abs(want) + 128 * 2.0**-24 * terms).all(), formula
        assert np.count_nonzero(want)


@pytest.mark.parametrize("eqn", PRODUCTS)
def test_matmuls_against_exact_ones(eqn):
    """The error follows from the formats: half a unit in the last mantissa bit of each factor (3 bits in e4m3, 2 in e5m2).

    A small factor is off by half of the format's smallest number times the scale.
    """
    x, w, dy = arrays(eqn, 1)

    def error(a, dtype):
        a = np.abs(np.asarray(a, np.float64))
        info, scale = ml_dtypes.finfo(F8[dtype]), float(fp8.scale_of(jnp.float32(a.max()), dtype))
        return np.maximum(a * 2.0 ** -(info.nmant + 1), scale * float(info.smallest_subnormal) / 2)

    parts = {"x": (x, fp8.E4M3), "w": (w, fp8.E4M3), "dy": (dy, fp8.E5M2)}
    exact = {k: np.asarray(a, np.float64) for k, (a, _) in parts.items()}
    off = {k: error(*v) for k, v in parts.items()}
    inputs, y = eqn.split("->")
    xs, ws = inputs.split(",")
    back = ((eqn, "x", "w"), (f"{y},{ws}->{xs}", "dy", "w"), (f"{xs},{y}->{ws}", "x", "dy"))
    for got, (formula, a, b) in zip(product(eqn, x, w, dy), back, strict=True):
        want = np.einsum(formula, exact[a], exact[b])
        both = np.einsum(formula, abs(exact[a]) + off[a], abs(exact[b]) + off[b])
        allowed = both - np.einsum(formula, abs(exact[a]), abs(exact[b]))
        assert (abs(got - want) <= allowed + 2.0**-8 * both).all(), formula
        assert abs(got - want).max() > 2.0**-8 * abs(want).max()  # the result was rounded at all


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["x", "w", "dy"])
def test_what_is_not_finite_stays_so(where, bad):
    """Each result that reads the infinity or NaN is all NaN. A saturating conversion to e4m3 would turn infinity into 448, and
    hide that the run diverged.
    """
    eqn = "BTD,DF->BTF"
    given = dict(zip(("x", "w", "dy"), arrays(eqn), strict=True))
    given[where] = given[where].at[(0,) * given[where].ndim].set(bad)
    made = dict(zip(("y", "dx", "dw"), product(eqn, **given), strict=True))
    touched = {"x": ("y", "dw"), "w": ("y", "dx"), "dy": ("dx", "dw")}[where]
    assert {name for name, a in made.items() if np.isnan(a).all()} == {*touched}
    assert all(np.isfinite(a).all() for name, a in made.items() if name not in touched)


def test_zeros():
    eqn = "BTD,DF->BTF"
    assert all((a == 0).all() for a in product(eqn, *(jnp.zeros_like(a) for a in arrays(eqn))))


def feed_forward(x, weights, dy, activation, bounded):
    """Return y, dx, the gradients of gate, up and down, and the two projections. bounded: use `gated_linear` instead of
    three `dot`s.
    """

    @jax.jit
    def run(x, weights, dy):
        def block(x, weights):
            held = [dataclasses.replace(fp8.encode(w, stacked=False, over=()), gradient=w) for w in weights]
            gate, up = (fp8.dot("BTD,DF->BTF", x, w) for w in held[:2])
            if bounded:
                return fp8.gated_linear(x, *held, activation), (gate, up)
            return fp8.dot("BTF,DF->BTD", activation(gate) * up, held[2]), (gate, up)

        y, back, projections = jax.vjp(block, x, weights, has_aux=True)
        dx, grads = back(dy)
        return y, dx, *grads, *projections

    return [np.asarray(a, np.float64) for a in run(x, weights, dy)]


@pytest.mark.parametrize("size", [0.1, 30.0])
@pytest.mark.parametrize("activation", layers.NONLINEARITIES)
def test_gradients_scaled_by_a_bound(activation, size):
    """Compare `gated_linear` with three plain matmuls. The output and down's gradient have equal bits.

    The gradients of gate and up have other scales than with plain matmuls. The largest gradient of their product h is at most
    dh = sum of |dy| |w|. So their scales are at most s = 2 SLOPE dh max(|gate|, |up|) / 57344. An element differs by at most s
    2^-16: half of the smallest number with each of the two scales. The results are rounded to bfloat16, and dx is a sum of two
    rounded results.
    """
    B, T, D, F, u = 2, 24, 32, 48, 2.0**-8
    keys = jax.random.split(jax.random.key(0), 5)
    x, dy = (size * jax.random.normal(k, (B, T, D), jnp.bfloat16) for k in keys[:2])
    dy *= jnp.exp2(jax.random.randint(keys[1], dy.shape, -18, 1).astype(jnp.bfloat16))
    weights = [0.1 * jax.random.normal(k, (D, F), jnp.bfloat16) for k in keys[2:]]
    plain, bounded = (feed_forward(x, weights, dy, layers.NONLINEARITIES[activation], b) for b in (False, True))
    for same in (0, 4):
        assert np.array_equal(plain[same], bounded[same])
    x, dy, gate, up, down = (abs(np.asarray(a, np.float64)) * (1 + 2.0**-3) for a in (x, dy, *weights))  # rounded to 8 bits
    most = max(a.max() for a in map(abs, plain[5:]))
    apart = 2 * fp8.SLOPE * np.einsum("btd,df->btf", dy, down).max() * (1 + u) * most / 57344 * 2.0**-16
    dx, d_gate, d_up = (abs(a - b) for a, b in zip(plain[1:4], bounded[1:4], strict=True))
    assert (dx <= apart * (gate + up).sum(1) + 4 * u * (abs(plain[1]) + abs(bounded[1])).max()).all()
    limit = apart * x.sum((0, 1))[:, None]
    for a, b, d in zip(plain[2:4], bounded[2:4], (d_gate, d_up), strict=True):
        assert (d <= limit + 2 * u * np.maximum(abs(a), abs(b))).all()
        assert np.count_nonzero(a)


@pytest.mark.parametrize("activation", layers.NONLINEARITIES)
def test_slopes_of_activations(activation):
    """SLOPE is at least |f'| of each activation f, and also covers four roundings to bfloat16 in the backward pass of
    `gated_linear`.
    """
    f = layers.NONLINEARITIES[activation]
    slopes = jax.vmap(jax.grad(f))(jnp.linspace(-30, 30, 60_001))
    assert float(f(0.0)) == 0 and 1 < float(abs(slopes).max()) * (1 + 2.0**-8) ** 4 < fp8.SLOPE


# ---- A whole step


@pytest.mark.parametrize(
    "name",
    helpers.few(
        (
            "2 queries a key: tensor8",  # two devices share each key/value head
            "2 queries a key: fsdp2xtensor2xseq2/sharding.zero=1",
            "2 queries a key: data2xfsdp4/train.grad_accum=2/sharding.gather=step",
        ),
        "2 queries a key: fsdp2xtensor2xseq2/sharding.zero=1",
    ),
)
def test_layouts_take_the_steps_of_one_device(name):
    """Losses, gradients and weights differ from one device's within the bounds of rounding (parity/compare.py). Each device has
    its own FP8 scales.
    """
    comparison = matrix.against_one_device(name, "fp8")
    assert not comparison.wrong, comparison.wrong


SMALL = {"precision": "fp8", "model.num_layers": 2, "data.packing": "none"}
FSDP = {"mesh.fsdp": 2, "remat.policy": "full"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({}, {"remat.policy": "full"}, marks=pytest.mark.more),
        ({}, {"remat.policy": "dots"}),
        pytest.param(FSDP | {"sharding.gather": "forward"}, FSDP, marks=pytest.mark.more),  # the last layer is outside the loop
    ],
    ids=["full", "dots", "last apart"],
)
def test_remat_gives_the_same_gradients(one, other):
    """Gradients are equal, bit for bit: saved FP8 arrays equal the recomputed ones."""
    kept, again = first_gradients(helpers.tiny(SMALL | one)), first_gradients(helpers.tiny(SMALL | other))
    for name, a in kept.items():
        assert np.array_equal(a, again[name]), name


@pytest.mark.more
def test_losses_follow_those_in_bfloat16():
    """The loss falls over 20 steps, within 1% of bfloat16's. docs/evidence/fp8_training.md has 300 steps of
    benchmarks.numerics.
    """
    eight, sixteen = (helpers.train(helpers.tiny(SMALL | {"precision": p}), 20).loss for p in ("fp8", "bf16"))
    assert eight[-1] < 0.95 * eight[0]
    assert (abs(eight / sixteen - 1) < 0.01).all() and (eight != sixteen).any()


def test_checkpoints_do_not_change():
    """A run may change from bfloat16 to FP8 on resume, and back: the state has the same tensors, types and layouts."""
    eight, sixteen = (helpers.program(helpers.tiny(SMALL | {"precision": p})).state for p in ("fp8", "bf16"))
    assert abstract_tensors(eight) == abstract_tensors(sixteen)
    assert {str(a.dtype) for a in jax.tree.leaves(eight)} == {"float32", "int32"}


# ---- Which matmuls are in FP8


@pytest.mark.parametrize(
    ("exclude", "left_out"),
    [("", ()), ("wo, mlp.down", ("attention.wo", "mlp.down")), ("attention", tuple(f"attention.w{c}" for c in "qkvo"))],
)
def test_weights_are_excluded_by_name(exclude, left_out):
    run = helpers.tiny(SMALL | {"fp8.exclude": exclude})
    assert names(run) == {*precision.matmuls(run.model)} - {f"layers.{name}" for name in left_out}


def test_the_table_of_shardings_shows_them():
    run = helpers.tiny(SMALL | FSDP | {"fp8.exclude": "wo"})
    rows = [r for r in describe(run, helpers.devices_of(run)).entries if r.kind == "gathered"]
    assert {r.name for r in rows if str(r.dtype) == "u8"} == {*precision.matmuls(run.model)} - {"layers.attention.wo"}
    assert {str(r.dtype) for r in rows} == {"u8", "bf16"}


def test_without_fp8_nothing_is_in_8_bits():
    assert names(helpers.tiny({"precision": "bf16"})) == set()


def test_a_family_of_ones_own_is_checked_when_it_is_made():
    run = helpers.tiny(SMALL | {"model.family": "helpers:WiderFamily", "fp8.exclude": "router"})
    with pytest.raises(ConfigError, match="fp8.exclude = 'router': no weight or block is named 'router'"):
        helpers.program(run)


@pytest.mark.parametrize(("sm", "wrong"), [(80, True), (86, True), (89, False), (90, False), (100, False), (0, False)])
def test_gpus_without_fp8_are_refused(sm, wrong):
    run = helpers.tiny(SMALL)
    found = [p for p in validate_step(run, Devices("gpu", "NVIDIA L4", 1, 24.0, "test", sm)) if p.key == "precision"]
    assert bool(found) == wrong
    assert not wrong or "FP8 needs a GPU of compute capability 8.9" in str(found[0])


# ---- The compiled program


def planned(machine):
    pytest.importorskip("jax_cuda12_plugin", reason="needs the `plan` extra")
    overrides = ("num_layers=2", "d_model=1024", "d_ff=2048", "num_heads=8", "num_kv_heads=4", "vocab_size=2048")
    argv = ["--config=configs/llama3_8b.py", "--config.precision=fp8", "--config.train.grad_accum=2"]
    batch = f"--config.train.global_batch={2 * machine.total}"
    run = launch.load([*argv, batch, *(f"--config.model.{o}" for o in overrides)]).run
    compiled = compile_step(run, machine)
    return run, compiled, read_plan(compiled, run, machine)


@pytest.fixture(scope="module")
def plan():
    return planned(NODE)


@pytest.mark.more
def test_every_matmul_is_an_fp8_call_on_one_gpu_too():
    """All 21 matmuls of a layer are FP8 calls. On one GPU nothing is gathered, so the compiler could merge the rounding of a
    stack of weights with the slice of a layer.
    """
    _, _, made = planned(parse("h200:1"))
    assert made.matmuls == result.Matmuls(21.0, 21.0, ())


def test_every_matmul_of_a_layer_is_an_fp8_call(plan):
    run, compiled, made = plan
    assert made.matmuls == result.Matmuls(21.0, 21.0, ())
    assert not [w for w in made.warnings if "fp8" in w]
    short = result.Matmuls(21.0, 20.0, ("forward mlp (layers.py:65), 2 a step",))
    (said,) = warnings.fp8_warnings(run, compiled.program, short)
    assert "of the 21 matmuls of a layer that should be in FP8 only 20 are" in said and "layers.py:65" in said


def test_weights_that_do_not_learn_have_fewer_products():
    """A frozen weight has two matmuls, or one in the first layer. Matmuls of adapters stay in bfloat16; `fp8_warnings` lists
    the first six matmuls that are not in FP8.
    """
    run = helpers.tiny(SMALL | {"lora.rank": 4, "lora.targets": "wq", "model.family": "llama"})
    program, wide = helpers.program(run), tuple(f"backward lora {i}" for i in range(9))
    assert not [*warnings.fp8_warnings(run, program, result.Matmuls(20.0, 14 - 7 / 2, wide))]
    (said,) = warnings.fp8_warnings(run, program, result.Matmuls(20.0, 10.0, wide))
    assert "of the 14 matmuls" in said and "backward lora 5; and 3 more." in said


def test_gradients_are_added_up_in_full(plan):
    """With XLA's default precision, cuBLASLt sums faster and less exactly. Only forward matmuls use the default precision."""
    _, compiled, _ = plan
    calls = [line for line in compiled.text.splitlines() if 'custom_call_target="__cublas$lt$matmul$f8"' in line]
    asked = {
        (set(re.findall(r"DEFAULT|HIGHEST", line.split("operand_precision")[1][:60])).pop(), "transpose(" in line)
        for line in calls
    }
    assert asked == {("DEFAULT", False), ("HIGHEST", True)}


def test_weights_travel_in_fp8_and_scales_once_a_step(plan):
    run, compiled, made = plan
    gathers = [c for c in made.collectives if c.kind == "all-gather"]
    assert any("f8e4m3fn" in c.dtype for c in gathers)
    # One byte for each weight of a layer, twice a microbatch but once for the last layer, and two bytes for each weight of the
    # head. Some weights are sent as plain bytes. Scales of norms, and segments, are combined with them.
    counts = flops.parameters(run.model)
    layer = (counts["attention"] + counts["mlp"]) / run.model.num_layers
    sent = run.train.grad_accum * (layer * (2 * run.model.num_layers - 1) + 2 * counts["head"]) * 7 / 8
    assert sum(c.wire_gib for c in gathers) * 2**30 == pytest.approx(sent, rel=0.02)
    layers = [
        f
        for f in collectives.read(hlo.parse(compiled.text), made.mesh, NODE.gpus).values()
        if "/fp8.py" in f.source and f.kind == "all-reduce"
    ]
    assert layers and all(f.count == 1 for f in layers)


def test_rates_differ_by_type(plan):
    """The plan uses the measured 1,280 TFLOP/s for FP8 matmuls, and 720 for bfloat16."""
    run, _, made = plan
    least = bound.bound(run, NODE, made.rates)
    assert least.step_s <= made.time.step_ms / 1e3 and least.memory_gib <= made.memory.peak_gib
    product = Work("gemm", flops=1e15)
    eight = dataclasses.replace(product, fp8=True).seconds(made.rates)
    assert eight == pytest.approx(product.seconds(made.rates) * 720 / 1280, rel=1e-3)
    assert result.from_json(json.loads(json.dumps(result.to_json(made)))) == made
    assert "matmuls in FP8: 21 of 21 a layer" in sections.matmuls(made)
