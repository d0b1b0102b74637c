"""Two layers of Llama 3 8B, compiled ahead of time for H200s: a step's communication, shards and recompute.

All figures are read from the partitioned, scheduled program. The campaign compiles the shipped configs in full.
"""

import math
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from plans import FULL, LOOP, ONE_EACH, TWO, compiled, config, module, plan

from jaxtrain import hardware
from jaxtrain.plan.expect import ENOUGH, FIRST, Expected, Watch, expect
from jaxtrain.plan.program import collectives, hlo
from jaxtrain.plan.rates import PUBLISHED, datasheet
from jaxtrain.plan.result import from_json, to_json
from jaxtrain.plan.topology import devices, parse
from jaxtrain.stacks import copy, copy_layer
from jaxtrain.train import memory, setup
from jaxtrain.train.program import build
from jaxtrain.train.state import shardings

NODE = parse("h200:8")
LAYERS = 2
SHIPPED = ("h200:8", TWO, *ONE_EACH)  # unrolled layers, as shipped; one microbatch
RECOMPUTED = ("h200:8", TWO, *ONE_EACH, *FULL)  # every layer saves its input only


def moved(*which: str) -> list[collectives.Found]:
    mesh = dict(compiled(*which)[1].program.placement.mesh.shape)
    return [*collectives.read(module(*which), mesh, gpus_per_node=8).values()]


def attention_calls(target: str, *which: str) -> list[tuple[hlo.Instruction, int]]:
    """Return (call, number of times that it runs in a step) for each call of a cuDNN kernel."""
    calls = [(i, times) for i, _, times, _ in hlo.walk(module(*which)) if i.opcode == "custom-call"]
    return [(i, times) for i, times in calls if i.attributes["custom_call_target"] == f'"{target}"']


@pytest.mark.parametrize("which", [SHIPPED, RECOMPUTED], ids=["as shipped", "full remat"])
def test_layers_communicate_no_float32(which):
    """No collective of the layers is in float32. test_golden_compare.py has a step that gathers weights in float32."""
    found = [f for f in moved(*which) if "f32" in f.dtype and "layers" in f.op_name and "(loss)" not in f.op_name]
    assert not found


def test_each_weight_is_gathered_twice_and_its_gradient_reduced_once():
    """A weight is gathered in the forward and in the backward pass. The last layer's weights and the head are gathered once."""
    found = moved(*SHIPPED)
    inside = [f for f in found if "layers" in f.op_name and f.wire_bytes]
    assert {f.kind for f in inside} == {"all-gather", "reduce-scatter"} and {f.axis for f in inside} == {"fsdp"}
    params = compiled(*SHIPPED)[1].program.state.params
    head, weights = params["head"].size, sum(a.size for a in jax.tree.leaves(params["layers"]))
    for kind, times in (("all-gather", 2 - 1 / LAYERS), ("reduce-scatter", 1)):
        sent = sum(f.count * f.wire_bytes for f in found if f.kind == kind and "bf16" in f.dtype)
        assert sent == pytest.approx(2 * (times * weights + head) * 7 / 8, rel=0.001), kind


def test_head_is_gathered_once_and_its_gradient_reduced_once():
    """The head is gathered once a microbatch, in bfloat16, outside of the loop over the loss's chunks."""
    head = [f for f in moved(*SHIPPED) if "(loss)" in f.op_name and f.wire_bytes > 1 << 20]
    assert sorted((f.kind, f.count, f.dtype, f.loops) for f in head) == [
        ("all-gather", 1, "bf16", ()),
        ("reduce-scatter", 1, "bf16", ()),
    ]


def test_attention_is_cudnn_and_runs_forward_once():
    """The shipped policy saves attention's output and log-sum-exp. With full remat attention's forward pass runs twice."""
    assert compiled(*SHIPPED)[1].program.kernel.name == "cudnn"
    for which, times in ((SHIPPED, 1), (RECOMPUTED, 2)):
        forward = attention_calls("__cudnn$fmhaSoftmax", *which)
        assert sum(times for _, times in forward) == times * LAYERS
        again = [times for i, times in forward if "rematted_computation" in i.op_name]
        assert sum(again) == (times - 1) * LAYERS
    # The backward pass has four parts, so that the workspace is small (kernels/attention/cudnn.py).
    assert sum(times for _, times in attention_calls("__cudnn$fmhaSoftmaxBackward", *SHIPPED)) == 4 * LAYERS


@pytest.mark.parametrize("which", [SHIPPED, RECOMPUTED], ids=["as shipped", "full remat"])
def test_no_matmul_runs_twice(which):
    """The step's FLOPs are the formula's: XLA repeats no saved matmul and recomputes nothing on its own."""
    flops = plan(*which).flops
    assert flops.hardware_per_step == pytest.approx(flops.expected_per_step, rel=0.01)


def test_moments_are_sharded_like_parameters():
    step = compiled(*SHIPPED)[1]
    program = step.program
    state_in, _ = step.executable.input_shardings[0]
    state_out, _ = step.executable.output_shardings
    wanted = shardings(program.state)
    for got in (state_in, state_out):
        same = jax.tree.map(lambda a, want, have: have.is_equivalent_to(want, len(a.shape)), program.state, wanted, got)
        assert jax.tree.all(same)
    adam = program.state.optimizer[0]
    for moments in (adam.mu, adam.nu):
        same = jax.tree.map(lambda p, m: p.sharding == m.sharding and p.shape == m.shape, program.state.params, moments)
        assert jax.tree.all(same)
    whole = [a for a in jax.tree.leaves(program.state.params) if a.sharding.is_fully_replicated]
    assert not whole, "every weight of this model is split over fsdp"


def test_state_is_donated():
    step = compiled(*SHIPPED)[1]
    leaves = jax.tree.leaves(step.program.state)
    per_device = sum(a.dtype.itemsize * math.prod(a.sharding.shard_shape(a.shape)) for a in leaves)
    assert step.executable.memory_analysis().alias_size_in_bytes >= per_device


def test_a_thousand_gpus():
    """Bytes between nodes are an eighth of the bytes on the wire. A collective's time includes the network latency of 127 hops
    between 128 nodes.
    """
    made = plan("h200:8x128", TWO, "mesh.data=1", of="configs/llama3_70b.py:gpus=1024")
    assert made.fits and made.mesh["fsdp"] == 1024
    rings = [c for c in made.collectives if c.kind in ("all-gather", "reduce-scatter") and c.group == 1024]
    assert rings and all(c.network_gib == pytest.approx(c.wire_gib / 8) for c in rings)
    latency_ms = 127 * made.rates.network_latency_us / 1e3
    assert all(c.ms > c.count * latency_ms for c in rings)


# ---- The plan as a whole


def test_a_plan_survives_json():
    made = plan(*RECOMPUTED)
    assert from_json(to_json(made)) == made
    with pytest.raises(ValueError, match="format 99"):
        from_json(to_json(made) | {"format": 99})


def test_compiler_options_are_those_of_training():
    """The plan compiles with the options of training. The scheduler's memory limit is the memory that training may use."""
    _, step = compiled(*RECOMPUTED)
    made = plan(*RECOMPUTED)
    assert made.options == step.chosen.options and "xla_dump_to" not in made.options
    held = made.memory.arguments_gib
    limit = held + int(made.options["xla_gpu_memory_limit_slop_factor"]) / 100 * (0.8 * made.memory.hbm_gib - held)
    assert limit == pytest.approx(made.memory.usable_gib, rel=0.01) and limit <= made.memory.usable_gib


def test_the_reserve_is_what_training_leaves():
    card = NODE.memory_gib
    assert card * hardware.memory_fraction(card) == pytest.approx(card - hardware.RESERVE_GIB, abs=0.02)


def test_a_run_expects_what_the_plan_says():
    run, step = compiled(*RECOMPUTED)
    made = plan(*RECOMPUTED)
    expected = expect(run, step.program, step.executable, NODE.gpu, 8)
    assert expected.step_s == pytest.approx(made.time.step_ms / 1e3)
    # On a GPU the executable includes cuDNN's workspace. Here it does not.
    assert expected.peak_gib < made.memory.taken_gib <= expected.peak_gib + made.memory.workspace_gib
    assert made.time.expected_step_ms == pytest.approx([1e3 * s for s in expected.range_s or ()])
    assert expected.rates == made.rates.source == datasheet(NODE.gpu, "bf16").source


def test_a_run_that_is_not_as_planned_is_told_once():
    def say(step_s, peak_gib, rates="calibrated on NVIDIA H200", range_s=None):
        watch = Watch(Expected(1.0, 100.0, rates, range_s))
        said = [watch.note(9.0 if n < FIRST else step_s, peak_gib) for n in range(FIRST + ENOUGH + 3)]
        assert not any(said[: FIRST + ENOUGH - 1]) and not any(said[FIRST + ENOUGH :])
        assert watch.record()["measured"] == {"step_s": step_s, "peak_gib": peak_gib}
        return said[FIRST + ENOUGH - 1]

    assert say(1.1, 95.0) == say(1.0, None) == []
    (slow,) = say(1.3, 100.0)
    assert "step time: 1.3 s measured, 1 s planned" in slow and "1.30 times" in slow
    assert len(say(0.8, 100.0)) == 1
    assert say(1.3, 100.0, PUBLISHED) == [], "by how much a step is longer than at published kernel rates is not known"
    assert say(1.2, 100.0, PUBLISHED, (1.07, 1.28)) == []
    for outside in (1.0, 1.3):
        (line,) = say(outside, 100.0, PUBLISHED, (1.07, 1.28))
        assert "1.07 to 1.28 s planned" in line
    (big,) = say(1.0, 120.0)
    assert "peak memory: 120 GiB measured, 100 GiB planned" in big
    assert len(say(1.0, 80.0)) == 1


def test_a_step_that_cannot_be_planned_is_trained(monkeypatch):
    """A plan reads XLA's text. If the text has another form, any error can follow; the run has only no plan to compare with."""
    run, step = compiled(*RECOMPUTED)
    on_gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", process_index=0, id=0)
    monkeypatch.setattr(setup.jax, "local_devices", lambda: [on_gpu])
    monkeypatch.setattr(setup.jax, "devices", lambda: [on_gpu])
    monkeypatch.setattr(setup, "node_of", lambda device: 0)
    warnings: list[str] = []
    services: Any = SimpleNamespace(console=SimpleNamespace(warn=warnings.append))
    made: Any = SimpleNamespace(run=run, program=step.program)
    no_text: Any = SimpleNamespace(train=SimpleNamespace(as_text=lambda: "HloModule of another form"))
    assert setup.expected_times(made, no_text, services) is None
    assert len(warnings) == 1


# ---- Checkpoints on GPUs


@pytest.mark.parametrize("mesh", [(), ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")])
def test_copies_for_a_checkpoint_go_to_host_memory(mesh):
    """Each byte is copied once, as replicas divide the copies. Devices do not communicate. Temporary memory is
    at most one layer's shard.
    """
    params = build(config(*mesh), devices(NODE)).state.params
    gate, head = params["layers"]["mlp"]["gate"], params["head"]
    index = jax.ShapeDtypeStruct((), "int32")
    for lowered, shape in (
        (copy_layer(gate.shape, gate.sharding).lower(gate, index), gate.shape[1:]),
        (copy(head.shape, head.sharding).lower(head), head.shape),
    ):
        step = lowered.compile()
        used, part = step.memory_analysis(), 4 * math.prod(shape) // 8
        assert used.host_output_size_in_bytes == part
        assert used.output_size_in_bytes < 1024 and used.temp_size_in_bytes < part + 4096
        assert not collectives.read(hlo.parse(step.as_text()), dict(gate.sharding.mesh.shape), 8)


def test_a_host_without_room_for_a_checkpoint_is_named():
    program = build(config(LOOP), devices(NODE))
    memory.check_host_memory(program, 100.0)
    with pytest.raises(memory.OutOfMemory, match="copies 89.7. GiB to the host; 64.00 GiB may be pinned"):
        memory.check_host_memory(program, 64.0)
