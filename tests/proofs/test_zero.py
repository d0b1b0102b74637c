"""Stages of ZeRO: the same steps as on one device, and of traffic exactly what each stage promises.

What travels is read from the program that XLA:GPU makes for 8 described H200s.
"""

import dataclasses
import math

import helpers
import jax
import jax.numpy as jnp
import ledger
import matrix
import numpy as np
import pytest
import test_gradients

from jaxtrain import launch
from jaxtrain.config import ConfigError, Problem, RunConfig
from jaxtrain.hardware import Devices
from jaxtrain.parity import compare
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.program import collectives, hlo
from jaxtrain.plan.topology import parse
from jaxtrain.validate import validate_step

NODE = parse("h200:8")
# Two layers, with every kind of weight that a model can have.
MODEL = {"model.num_layers": 2, "model.qkv_bias": True, "model.qk_norm": True}
MESHES = {
    "fsdp=8": {"mesh.fsdp": 8},
    "data=2 x fsdp=4": {"mesh.data": 2, "mesh.fsdp": 4},
    "fsdp=4 x tensor=2": {"mesh.fsdp": 4, "mesh.tensor": 2},
    "data=2 x fsdp=2 x tensor=2": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
}
STAGES = {
    "zero=0": {"sharding.zero": 0},
    "zero=1": {"sharding.zero": 1},
    "zero=2": {"sharding.zero": 2},
    "zero=3": {"sharding.zero": 3},
    "forward": {"sharding.zero": 3, "sharding.gather": "forward"},
    "step": {"sharding.zero": 3, "sharding.gather": "step"},
}
LAST = "data=2 x fsdp=2 x tensor=2"
SEQ = {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.seq": 2}


ALL = [*((m, s, 2) for m in MESHES for s in STAGES), *((LAST, s, 1) for s in STAGES)]
# Every stage once, half of them on all axes; a campaign tries all.
SAMPLE = [
    *((LAST, s, 2) for s in ("zero=0", "zero=3", "forward")),
    ("data=2 x fsdp=4", "zero=1", 2),
    ("fsdp=4 x tensor=2", "zero=2", 2),
    ("fsdp=8", "step", 2),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"mesh", "stage", "accum"} <= {*metafunc.fixturenames}:
        metafunc.parametrize(("mesh", "stage", "accum"), ALL if ledger.is_campaign(metafunc.config) else SAMPLE)


def assert_same_steps(run: RunConfig, reference: RunConfig) -> None:
    theirs = matrix.one_device(reference)
    comparison = compare.compare(helpers.first_steps(run), theirs, compare.bounds(theirs, None, 1, 1))
    assert not comparison.wrong, comparison.wrong


def test_a_stage_takes_the_steps_of_one_device(mesh, stage, accum):
    assert_same_steps(helpers.tiny(MODEL | MESHES[mesh] | STAGES[stage] | {"train.grad_accum": accum}), helpers.tiny(MODEL))


def test_the_sample_has_every_mesh_and_stage():
    assert {m for m, _, _ in SAMPLE} == {*MESHES} and {s for _, s, _ in SAMPLE} == {*STAGES} and {*SAMPLE} <= {*ALL}


@pytest.mark.parametrize(
    ("stage", "accum"),
    [
        pytest.param("zero=0", 2, marks=pytest.mark.more),
        pytest.param("zero=1", 2, marks=pytest.mark.more),
        pytest.param("zero=2", 1, marks=pytest.mark.more),
        ("forward", 2),
    ],
)
def test_a_sequence_axis_splits_weights_too(stage, accum):
    run = helpers.tiny(MODEL | SEQ | STAGES[stage] | {"train.grad_accum": accum})
    assert_same_steps(run, helpers.tiny(MODEL))
    table = helpers.program(run).state.params["embed"]["embedding"]
    assert table.size / math.prod(table.sharding.shard_shape(table.shape)) == (2 if stage == "zero=0" else 8)


@pytest.mark.parametrize("stage", ["zero=1", pytest.param("zero=2", marks=pytest.mark.more)])
def test_a_tied_head_on_a_mesh(stage):
    """The one table gets two gradients, each with devices of its own."""
    tied = MODEL | {"model.tied_head": True}
    run = helpers.tiny(tied | MESHES["data=2 x fsdp=4"] | STAGES[stage] | {"train.grad_accum": 2})
    assert_same_steps(run, helpers.tiny(tied))


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param({"remat.policy": "full", "remat.every": 2}, marks=pytest.mark.more),
        pytest.param({"remat.policy": "dots"}, marks=pytest.mark.more),
        {"remat.policy": "custom", "remat.tensors": "q=keep,mlp_up=keep"},
    ],
    ids=["full", "dots", "custom"],
)
def test_kept_weights_under_every_policy(remat):
    run = helpers.tiny(MODEL | MESHES["fsdp=8"] | STAGES["forward"] | remat)
    assert_same_steps(run, helpers.tiny(MODEL))


@pytest.mark.parametrize(
    ("remat", "layers"),
    [
        pytest.param({"remat.policy": "none"}, 3, marks=pytest.mark.more),
        pytest.param({"remat.policy": "full"}, 1, marks=pytest.mark.more),
        pytest.param({"remat.policy": "dots"}, 3, marks=pytest.mark.more),
        ({"remat.policy": "attention", "train.grad_accum": 2}, 3),
    ],
    ids=lambda x: x.get("remat.policy") if isinstance(x, dict) else None,
)
def test_the_last_layer_apart_under_every_policy(remat, layers):
    """Stacked gradients are written layer by layer: each must land in its own place, with one layer and with several."""
    model = MODEL | {"model.num_layers": layers}
    mesh = MESHES["data=2 x fsdp=4"]
    assert helpers.program(helpers.tiny(model | mesh | remat)).placement.mesh_axes("embed") == ("fsdp",)
    assert_same_steps(helpers.tiny(model | mesh | remat), helpers.tiny(model))


def test_gathering_once_a_step_is_stage_1():
    texts = {
        helpers.lowered(helpers.tiny(MODEL | MESHES[LAST] | STAGES[s] | {"train.grad_accum": 2})) for s in ("zero=1", "step")
    }
    assert len(texts) == 1


@pytest.mark.parametrize("stage", [*(pytest.param(s, marks=pytest.mark.more) for s in ("zero=0", "zero=1")), "zero=2"])
def test_gradients_of_weights_in_bfloat16_are_float32(stage, tmp_path):
    """A weight held in bfloat16 does not round its gradient: sums over microbatches and devices are those of float32."""
    path = tmp_path / "text.tok"
    helpers.text_file(path)
    mesh = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "train.grad_accum": 2} | STAGES[stage]
    true = test_gradients.gradients(path)
    got = test_gradients.gradients(path, precision="bf16", **mesh, **{"dtypes.reduce": "f32"})
    errors = {name: test_gradients.off(got[name], g) for name, g in true.items() if "bk" not in name}
    assert max(errors.values()) < test_gradients.BOUND, errors
    for name, g in got.items():
        some = g[g != 0]
        assert (some.astype(jnp.bfloat16).astype(np.float32) != some).mean() > 0.5, name


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stage_splits_at_rest(stage):
    state = helpers.program(helpers.tiny(MODEL | MESHES["data=2 x fsdp=4"] | STAGES[stage])).state
    state = dataclasses.replace(state, guard=())  # a few hundred numbers, on every device
    held = sum(math.prod(a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(state))
    everything = sum(a.size for a in jax.tree.leaves(state))
    assert held / everything == pytest.approx(1 if stage == "zero=0" else 1 / 4, rel=0.01)


def test_gathers_other_than_per_layer_need_stage_3():
    devices = Devices("cpu", "CPU", 8, 0.0, "test")
    for zero in (0, 1, 2):
        for gather in ("forward", "step"):
            run = helpers.tiny(MESHES["fsdp=8"] | {"sharding.zero": zero, "sharding.gather": gather})
            (problem,) = validate_step(run, devices)
            assert isinstance(problem, Problem) and problem.key == "sharding.gather" and problem.value == gather
            assert f"sharding.zero = {zero}" in problem.rule and "Set sharding.zero to 3" in problem.remedy
    assert not validate_step(helpers.tiny(MESHES["fsdp=8"] | STAGES["step"]), devices)


def test_stage_0_asks_no_dimension_to_divide():
    devices = Devices("cpu", "CPU", 8, 0.0, "test")
    odd = MESHES["fsdp=8"] | {"model.d_model": 60, "model.num_heads": 6, "model.num_kv_heads": 6}
    assert not validate_step(helpers.tiny(odd | STAGES["zero=0"]), devices)
    assert [p.key for p in validate_step(helpers.tiny(odd), devices)] == ["model.d_model"]


# ---- What travels

BF16 = 2  # bytes
ACCUM = 2
LAYERS = 2


def sizes(state) -> dict[str, int]:
    """Elements of the weights, by how they are used."""
    count = {k: sum(a.size for a in jax.tree.leaves(v)) for k, v in state.params.items()}
    return {"table": count["embed"], "head": count["head"], "layers": count["layers"], "all": sum(count.values())}


def promised(stage: str, mesh: dict[str, int], w: dict[str, int], rows: int, accum: int) -> dict[tuple[str, str], float]:
    """(kind, mesh axis) -> bytes that each GPU sends in a step. `rows`: elements of a microbatch's residual stream on a GPU.

    The embedding's rows travel instead of its table where the table, or its gradient, is split.
    """
    data, n = mesh["data"], mesh["fsdp"]
    ring = BF16 * (n - 1) / n
    layers, head, every = ring * w["layers"], ring * w["head"], ring * w["all"]
    over_data = 2 * BF16 * (data - 1) / data
    if stage == "zero=0":
        return {("all-reduce", "data+fsdp" if data > 1 else "fsdp"): 2 * BF16 * (data * n - 1) / (data * n) * w["all"]}
    gathered, reduced, moved = {
        "zero=1": (every, every, 0),
        "step": (every, every, 0),
        "zero=2": (every, accum * (layers + head), accum * ring * rows),  # backward only
        # Forward and backward, but for the last layer, whose weights are still there.
        "zero=3": (accum * (2 * layers - layers / LAYERS + head), accum * (layers + head), accum * 2 * ring * rows),
        "forward": (accum * (layers + head), accum * (layers + head), accum * 2 * ring * rows),
    }[stage]
    found = {("all-gather", "fsdp"): gathered, ("reduce-scatter", "fsdp"): reduced, ("all-to-all", "fsdp"): moved}
    if data > 1:
        found["all-reduce", "data"] = over_data * w["all"] / n
    return {k: v for k, v in found.items() if v}


@pytest.mark.parametrize(
    ("stage", "data", "accum"),
    [
        *(pytest.param(s, 1, ACCUM, marks=() if s in ("zero=0", "zero=3") else pytest.mark.more) for s in STAGES),
        pytest.param("zero=0", 1, 1, marks=pytest.mark.more),
        pytest.param("zero=3", 2, ACCUM, marks=pytest.mark.more),
        ("zero=2", 2, ACCUM),
        pytest.param("zero=1", 2, ACCUM, marks=pytest.mark.more),
    ],
)
def test_what_a_stage_moves(stage, data, accum):
    keys = STAGES[stage] | {
        "model.num_layers": LAYERS,
        "model.vocab_size": 32768,
        "mesh.data": data,
        "mesh.fsdp": 8 // data,
        "train.global_batch": 8 * accum,
        "train.grad_accum": accum,
    }
    loaded = launch.load(["--config=configs/llama3_8b.py", *(f"--config.{k}={v}" for k, v in keys.items())])
    assert not loaded.problems, loaded.problems
    step = compile_step(loaded.run, NODE)
    mesh = dict(step.program.placement.mesh.shape)
    found = [f for f in collectives.read(hlo.parse(step.text), mesh, 8) if f.wire_bytes]

    w = sizes(step.program.state)
    want = promised(stage, mesh, w, loaded.run.data.seq_len * loaded.run.model.d_model, accum)
    got: dict[tuple[str, str], float] = {}
    for f in found:
        if f.count * f.wire_bytes < 1024:  # the loss, the gradient norm, the number of targets
            assert f.dtype == "f32" and f.kind == "all-reduce", f
            continue
        # Tokens, for the embedding, may share a launch with weights.
        assert f.dtype in ("bf16", "s32", "bf16+s32", "s32+bf16"), f
        got[f.kind, f.axis] = got.get((f.kind, f.axis), 0) + f.count * f.wire_bytes
    assert got == pytest.approx(want, rel=2e-3), {k: v / w["all"] for k, v in got.items()}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"mesh.fsdp": 8, "sharding.zero": 1}, marks=pytest.mark.more),
        {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "train.grad_accum": 2},
        pytest.param({"mesh.fsdp": 2, "mesh.seq": 2, "sharding.zero": 2}, marks=pytest.mark.more),
    ],
)
def test_a_loss_of_ones_own_has_the_whole_head_however_it_is_held(layout):
    own = {"loss.name": "helpers:whole_logits_loss", "model.num_layers": 1}
    ours, theirs = helpers.train(helpers.tiny(layout | own), 2), helpers.train(helpers.tiny({"model.num_layers": 1}), 2)
    np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-5)
    np.testing.assert_allclose(ours.grad_norm, theirs.grad_norm, rtol=1e-5)


def test_a_single_layer_is_the_last_one():
    one = {"model.num_layers": 1}
    ours, theirs = helpers.train(helpers.tiny({"mesh.fsdp": 8} | one), 2), helpers.train(helpers.tiny(one), 2)
    np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-5)
    np.testing.assert_allclose(ours.grad_norm, theirs.grad_norm, rtol=1e-5)


# ---- Gradients that are added layer by layer


@pytest.mark.parametrize(
    "unlike", [{"remat.policy": "dots"}, {"remat.policy": "full", "remat.every": 2}, {"sharding.zero": 1}, {"mesh.fsdp": 1}]
)
def test_where_layers_cannot_be_added_one_by_one_it_is_refused(unlike):
    """It needs layers one by one, or a loop with the last one apart."""
    asked = {"mesh.fsdp": 2, "train.grad_accum": 2, "train.accumulate": "layer"} | unlike
    (problem,) = validate_step(helpers.tiny(asked), Devices("cpu", "cpu", asked["mesh.fsdp"], 8.0, "here"))
    assert problem.key == "train.accumulate" and "compiler.unroll" in problem.remedy
    with pytest.raises(ConfigError, match="train.accumulate = 'layer'"):
        helpers.program(helpers.tiny(asked))
    for allowed in ({"compiler.unroll": True}, {"train.grad_accum": 1}):
        assert not validate_step(helpers.tiny(asked | allowed), Devices("cpu", "cpu", asked["mesh.fsdp"], 8.0, "here"))
        helpers.program(helpers.tiny(asked | allowed))


@pytest.mark.parametrize(
    ("family", "said"),
    [("OwnLoopFamily", "does not run it"), ("TwiceFamily", "run twice"), ("HalfFamily", "run in part, 1 of 4 layers")],
)
def test_a_stack_that_nobody_adds_up_is_an_error(family, said):
    """A model that says it adds, and runs its layers by itself, would learn from the last microbatch alone."""
    run = helpers.tiny({"train.grad_accum": 2, "train.accumulate": "layer", "model.family": f"helpers:{family}"})
    program = helpers.program(run)
    with pytest.raises(TypeError, match=f"{said}.*adds_layers"):
        program.train_step.lower(program.state, program.batch)
