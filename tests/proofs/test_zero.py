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

from jaxtrain.data import loading
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.program import collectives, hlo
from jaxtrain.plan.topology import parse_topology
from jaxtrain.step.batch import place_batch
from jaxtrain.step.program import build_program

NODE = parse_topology("h200:8")
# Two layers, with every kind of weight that a model can have.
MODEL = {"model.num_layers": 2, "model.qkv_bias": True, "model.qk_norm": True}
SMALL = {
    "model.num_layers": 1,
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.d_ff": 16,
    "data.seq_len": 16,
    "train.global_batch": 8,
}
STAGES = {f"zero={n}": {"sharding.zero": n} for n in range(4)} | {"forward": {"sharding.gather": "forward"}}


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
    keys = ({"sharding.zero": 1}, {"sharding.gather": "step"})
    one, once = (helpers.lowered(helpers.tiny(SMALL | mesh | key)) for key in keys)
    assert one == once


# ---- Communication of a stage

BF16 = 2  # bytes
ACCUM = 2
LAYERS = 2


def sizes(state) -> dict[str, int]:
    """Return the number of weights of each part of the model."""
    count = {k: sum(a.size for a in jax.tree.leaves(v)) for k, v in state.params.items()}
    return {"table": count["embed"], "head": count["head"], "layers": count["layers"], "all": sum(count.values())}


def promised(stage: str, mesh: dict[str, int], w: dict[str, int], rows: int) -> dict[tuple[str, str], float]:
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
        "zero=2": (layers + head, ACCUM * (layers + head), ACCUM * 2 * ring * rows),
        # Forward and backward, except that the last layer's weights are still gathered.
        "zero=3": (ACCUM * (2 * layers - layers / LAYERS + head), ACCUM * (layers + head), ACCUM * 2 * ring * rows),
        "forward": (ACCUM * (layers + head), ACCUM * (layers + head), ACCUM * 2 * ring * rows),
    }[stage]
    found = {("all-gather", "fsdp"): gathered, ("reduce-scatter", "fsdp"): reduced, ("all-to-all", "fsdp"): moved}
    if data > 1:
        found["all-reduce", "data"] = over_data * w["all"] / n
    return {k: v for k, v in found.items() if v}


@pytest.mark.parametrize(
    ("stage", "data"),
    [
        ("zero=3", 1),
        ("zero=2", 2),
        *(pytest.param(*case, marks=pytest.mark.more) for case in (("zero=0", 1), ("zero=1", 2), ("forward", 1))),
    ],
)
def test_a_stage_communicates_what_it_promises(stage, data):
    keys = STAGES[stage] | {
        "model.num_layers": LAYERS,
        "model.vocab_size": 32768,
        "mesh.data": data,
        "mesh.fsdp": 8 // data,
        "train.global_batch": 8 * ACCUM,
        "train.grad_accum": ACCUM,
    }
    loaded = loading.load_config(["--config=configs/llama3_8b.py", *(f"--config.{k}={v}" for k, v in keys.items())])
    assert not loaded.problems, loaded.problems
    step = compile_step(loaded.run, NODE)
    mesh = dict(step.program.placement.mesh.shape)
    found = [f for f in collectives.read_collectives(hlo.parse_hlo(step.text), mesh, 8).values() if f.wire_bytes]

    w = sizes(step.program.state)
    want = promised(stage, mesh, w, loaded.run.data.seq_len * loaded.run.model.d_model)
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
    run = helpers.tiny(SMALL | {"mesh.data": 2, "mesh.fsdp": 2})
    assert run.train.grad_accum == 1

    def gradients_on_nodes_of(devices: int):
        monkeypatch.setattr("jaxtrain.sharding.node_of", lambda device: device.id // devices)
        made = build_program(run, helpers.devices_of(run))
        batch = place_batch(helpers.host_batch(run, 0), made.batch, made.context)
        return made.zero.sums_once, made.gradients(helpers.start(made).params, batch)

    (inside, wanted), (across, got) = gradients_on_nodes_of(2), gradients_on_nodes_of(1)
    assert across and not inside
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)


# ---- A user's own parts


@pytest.mark.parametrize(
    ("family", "accumulate"),
    [
        ("OwnLoopFamily", "layer"),
        ("LoopedFamily", "microbatch"),
        ("TwiceFamily", "layer"),
        ("HalfFamily", "layer"),
        ("SquashedFamily", "microbatch"),
    ],
)
def test_a_stack_that_is_not_run_once_whole_and_unchanged_is_refused(family, accumulate):
    """A family must run all its layers once, with unchanged weights; otherwise the step raises TypeError.

    Sums of earlier microbatches' gradients would be lost or counted twice, or the change of the weights ignored.
    """
    keys = {"model.num_layers": 2, "train.grad_accum": 2, "train.accumulate": accumulate, "model.family": f"helpers:{family}"}
    program = helpers.program(helpers.tiny(SMALL | keys))
    with pytest.raises(TypeError, match="uses_plan_run"):
        program.train_step.trace(program.state, program.batch)
