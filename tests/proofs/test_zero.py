"""Stages of ZeRO: which arrays each stage shards, and exactly the bytes on the wire that its formula gives.

The collectives are read from the program that XLA:GPU compiles ahead of time for 8 H200s. test_parity.py checks that each stage
takes the steps of one device.
"""

import dataclasses
import math

import helpers
import jax
import numpy as np
import pytest

from jaxtrain import launch
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.program import collectives, hlo
from jaxtrain.plan.topology import parse
from jaxtrain.train.definition import numerics_of
from jaxtrain.train.program import build
from jaxtrain.zero import make_zero

NODE = parse("h200:8")
# Two layers, with every kind of weight that a model can have.
MODEL = {"model.num_layers": 2, "model.qkv_bias": True, "model.qk_norm": True}
STAGES = {
    "zero=0": {"sharding.zero": 0},
    "zero=1": {"sharding.zero": 1},
    "zero=2": {"sharding.zero": 2},
    "zero=3": {"sharding.zero": 3},
    "forward": {"sharding.zero": 3, "sharding.gather": "forward"},
    "step": {"sharding.zero": 3, "sharding.gather": "step"},
}


# ---- Sharded arrays of a stage


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_shards_the_state(stage):
    """Except in zero=0, arrays are sharded over `fsdp`, and the embedding's table over `tensor` and `seq` too. `data`
    replicates them.
    """
    state = helpers.program(helpers.tiny(MODEL | {"mesh.data": 2, "mesh.fsdp": 4} | STAGES[stage])).state
    state = dataclasses.replace(state, guard=())  # a few hundred numbers, replicated on every device
    held = sum(math.prod(a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(state))
    everything = sum(a.size for a in jax.tree.leaves(state))
    assert held / everything == pytest.approx(1 if stage == "zero=0" else 1 / 4, rel=0.01)
    sequence = helpers.tiny(MODEL | {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.seq": 2} | STAGES[stage])
    table = helpers.program(sequence).state.params["embed"]["embedding"]
    assert table.size / math.prod(table.sharding.shard_shape(table.shape)) == (2 if stage == "zero=0" else 8)


def test_gathering_once_a_step_is_stage_1():
    mesh = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "train.grad_accum": 2}
    one, once = (helpers.lowered(helpers.tiny(MODEL | mesh | STAGES[stage])) for stage in ("zero=1", "step"))
    assert one == once


# ---- Communication of a stage

BF16 = 2  # bytes
ACCUM = 2
LAYERS = 2


def sizes(state) -> dict[str, int]:
    """Return the number of weights of each part of the model."""
    count = {k: sum(a.size for a in jax.tree.leaves(v)) for k, v in state.params.items()}
    return {"table": count["embed"], "head": count["head"], "layers": count["layers"], "all": sum(count.values())}


def promised(stage: str, mesh: dict[str, int], w: dict[str, int], rows: int, accum: int) -> dict[tuple[str, str], float]:
    """Return {(kind, mesh axis): bytes that each GPU sends in a step}. `rows`: elements of a microbatch's residual on a GPU.

    `w`: numbers of weights, as `sizes` returns them. If the embedding's table or its gradient is sharded, rows of a microbatch
    are sent instead of the table.
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
        "zero=2": (layers + head, accum * (layers + head), accum * 2 * ring * rows),
        # Forward and backward, except that the last layer's weights are still gathered.
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
def test_a_stage_communicates_what_it_promises(stage, data, accum):
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
    found = [f for f in collectives.read(hlo.parse(step.text), mesh, 8).values() if f.wire_bytes]

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


def test_sums_over_replicas_are_left_to_the_end_where_weights_are_gathered_across_nodes(monkeypatch):
    run = helpers.tiny({"mesh.data": 2, "mesh.fsdp": 4})
    assert run.train.grad_accum == 1

    def steps_on_nodes_of(devices: int):
        monkeypatch.setattr("jaxtrain.sharding.node_of", lambda device: device.id // devices)
        placement = build(run, helpers.devices_of(run)).placement
        return make_zero(run, placement, numerics_of(run)).sums_once, helpers.first_steps(run)

    (inside, want), (across, got) = steps_on_nodes_of(4), steps_on_nodes_of(2)
    assert across and not inside
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-6)
    np.testing.assert_allclose(got.grad_norm, want.grad_norm, rtol=1e-5)


# ---- A user's own parts


@pytest.mark.more
@pytest.mark.parametrize(
    "layout",
    [
        {"mesh.fsdp": 8, "sharding.zero": 1},
        {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "train.grad_accum": 2},
        {"mesh.fsdp": 2, "mesh.seq": 2, "sharding.zero": 2},
    ],
)
def test_a_custom_loss_has_the_whole_head_however_it_is_held(layout):
    own = {"loss.name": "helpers:whole_logits_loss", "model.num_layers": 1}
    ours, theirs = helpers.train(helpers.tiny(layout | own), 2), helpers.train(helpers.tiny({"model.num_layers": 1}), 2)
    np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-5)
    np.testing.assert_allclose(ours.grad_norm, theirs.grad_norm, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("OwnLoopFamily", "run by remat.Plan.run alone"),
        ("TwiceFamily", "run twice"),
        ("LoopedFamily", "run inside a loop"),
        ("HalfFamily", "run in part, 1 of 4 layers"),
        ("TiedFamily", "changed before it is run"),
        ("SquashedFamily", "changed before it is run"),
    ],
)
@pytest.mark.parametrize("accumulate", ["layer", "microbatch"])
def test_a_stack_that_is_not_run_once_whole_and_unchanged_is_refused(family, said, accumulate):
    """A family must run all its layers once, with unchanged weights; otherwise the step raises TypeError.

    Sums of earlier microbatches' gradients would be lost or counted twice, or the change of the weights ignored.
    """
    run = helpers.tiny({"train.grad_accum": 2, "train.accumulate": accumulate, "model.family": f"helpers:{family}"})
    program = helpers.program(run)
    with pytest.raises(TypeError, match=f"{said}.*uses_plan_run"):
        program.train_step.lower(program.state, program.batch)
