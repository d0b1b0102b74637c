"""Two layers of Llama 3 8B, compiled ahead of time for H200s: a step's communication, shards and recompute; warnings of classic
mistakes; and the comparison with golden plans (tests/golden).

All figures are read from the partitioned, scheduled program. The campaign compiles the shipped configs in full.
"""

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import golden_plans
import jax
import jax.numpy as jnp
import pytest
from golden_plans import SHIPPED, GoldenError, compare, from_plan, load, path, save
from jax.sharding import SingleDeviceSharding
from plans import FULL, LOOP, ONE_EACH, TWO, compiled, config, module, plan

from jaxtrain import sharding
from jaxtrain.config import installed, launch
from jaxtrain.models import zero
from jaxtrain.plan.expect import expect
from jaxtrain.plan.make import make_plan
from jaxtrain.plan.program import collectives, hlo
from jaxtrain.plan.rates import datasheet
from jaxtrain.plan.result import Plan, from_json, to_json
from jaxtrain.plan.topology import devices, parse_topology
from jaxtrain.step import compiler, memory
from jaxtrain.step.program import build_program
from jaxtrain.step.stacks import copy_array, copy_layer
from jaxtrain.step.state import shardings
from jaxtrain.train import setup

NODE = parse_topology("h200:8")
LAYERS = 2
SHIPPED_STEP = ("h200:8", TWO, *ONE_EACH)  # unrolled layers, as shipped; one microbatch
RECOMPUTED = ("h200:8", TWO, *ONE_EACH, *FULL)  # every layer saves its input only


def moved(*which: str) -> list[collectives.CollectiveOp]:
    mesh = dict(compiled(*which)[1].program.placement.mesh.shape)
    return [*collectives.read_collectives(module(*which), mesh, gpus_per_node=8).values()]


def attention_calls(target: str, *which: str) -> list[tuple[hlo.Instruction, int]]:
    """Return (call, number of times that it runs in a step) for each call of a cuDNN kernel."""
    calls = [(i, times) for i, _, times, _ in hlo.walk(module(*which)) if i.opcode == "custom-call"]
    return [(i, times) for i, times in calls if i.attributes["custom_call_target"] == f'"{target}"']


def test_every_line_of_the_program_is_read():
    lines = re.findall(r"(?m)^ +(?:ROOT )?%[\w.\-]+ = ", compiled(*RECOMPUTED)[1].text)
    computations = module(*RECOMPUTED).computations.values()
    assert module(*RECOMPUTED).is_scheduled
    assert sum(len(c.instructions) for c in computations) == sum(len(c.by_name) for c in computations) == len(lines)
    assert all(set(i.operands) <= set(c.by_name) for c in computations for i in c.instructions)


@pytest.mark.parametrize("which", [SHIPPED_STEP, RECOMPUTED], ids=["as shipped", "full remat"])
def test_no_float32_is_sent_by_layers_and_no_matmul_runs_twice(which):
    """The step's FLOPs are the formula's: XLA repeats no saved matmul and recomputes nothing on its own."""
    assert not [f for f in moved(*which) if "f32" in f.dtype and "layers" in f.op_name and "(loss)" not in f.op_name]
    flops = plan(*which).flops
    assert flops.hardware_per_step == pytest.approx(flops.expected_per_step, rel=0.01)


def test_each_weight_is_gathered_twice_and_its_gradient_reduced_once():
    """A weight is gathered in both passes. The last layer's weights are gathered once, and so is the head, outside of loops."""
    found = moved(*SHIPPED_STEP)
    inside = [f for f in found if "layers" in f.op_name and f.wire_bytes]
    assert {f.kind for f in inside} == {"all-gather", "reduce-scatter"} and {f.axis for f in inside} == {"fsdp"}
    params = compiled(*SHIPPED_STEP)[1].program.state.params
    head, weights = params["head"].size, sum(a.size for a in jax.tree.leaves(params["layers"]))
    for kind, times in (("all-gather", 2 - 1 / LAYERS), ("reduce-scatter", 1)):
        sent = sum(f.count * f.wire_bytes for f in found if f.kind == kind and "bf16" in f.dtype)
        assert sent == pytest.approx(2 * (times * weights + head) * 7 / 8, rel=0.001), kind
    of_head = sorted((f.kind, f.count, f.dtype, f.loops) for f in found if "(loss)" in f.op_name and f.wire_bytes > 1 << 20)
    assert of_head == [("all-gather", 1, "bf16", ()), ("reduce-scatter", 1, "bf16", ())]


def test_attention_is_cudnn_and_runs_forward_once():
    """The shipped policy saves attention's output and log-sum-exp. With full remat attention's forward pass runs twice."""
    assert compiled(*SHIPPED_STEP)[1].program.kernel.name == "cudnn"
    for which, times in ((SHIPPED_STEP, 1), (RECOMPUTED, 2)):
        forward = attention_calls("__cudnn$fmhaSoftmax", *which)
        assert sum(times for _, times in forward) == times * LAYERS
        again = [times for i, times in forward if "rematted_computation" in i.op_name]
        assert sum(again) == (times - 1) * LAYERS
    # The backward pass has four parts, so that the workspace is small (kernels/attention/cudnn.py).
    assert sum(times for _, times in attention_calls("__cudnn$fmhaSoftmaxBackward", *SHIPPED_STEP)) == 4 * LAYERS


def test_moments_are_sharded_like_parameters_and_state_is_donated():
    step = compiled(*SHIPPED_STEP)[1]
    program = step.program
    wanted = shardings(program.state)
    for got in (step.executable.input_shardings[0][0], step.executable.output_shardings[0]):
        same = jax.tree.map(lambda a, want, have: have.is_equivalent_to(want, len(a.shape)), program.state, wanted, got)
        assert jax.tree.all(same)
    adam = program.state.optimizer[0]
    for moments in (adam.mu, adam.nu):
        same = jax.tree.map(lambda p, m: p.sharding == m.sharding and p.shape == m.shape, program.state.params, moments)
        assert jax.tree.all(same)
    assert not [a for a in jax.tree.leaves(program.state.params) if a.sharding.is_fully_replicated]
    leaves = jax.tree.leaves(program.state)
    per_device = sum(a.dtype.itemsize * math.prod(a.sharding.shard_shape(a.shape)) for a in leaves)
    assert step.executable.memory_analysis().alias_size_in_bytes >= per_device


# ---- The plan as a whole


def test_a_plan_survives_json():
    made = plan(*RECOMPUTED)
    assert from_json(to_json(made)) == made
    with pytest.raises(ValueError, match="99"):
        from_json(to_json(made) | {"format": 99})


def test_compiler_options_are_those_of_training():
    """The plan compiles with the options of training. The scheduler's memory limit is the memory that training may use."""
    _, step = compiled(*RECOMPUTED)
    made = plan(*RECOMPUTED)
    assert made.options == step.chosen.options and "xla_dump_to" not in made.options
    held = made.memory.arguments_gib
    limit = held + int(made.options["xla_gpu_memory_limit_slop_factor"]) / 100 * (0.8 * made.memory.hbm_gib - held)
    assert limit == pytest.approx(made.memory.usable_gib, rel=0.01) and limit <= made.memory.usable_gib


def test_a_run_expects_what_the_plan_says():
    run, step = compiled(*RECOMPUTED)
    made = plan(*RECOMPUTED)
    expected = expect(step.program, step.executable, NODE.gpu, 8)
    assert expected.step_s == pytest.approx(made.time.step_ms / 1e3)
    # On a GPU the executable includes cuDNN's workspace. Here it does not.
    assert expected.peak_gib < made.memory.taken_gib <= expected.peak_gib + made.memory.workspace_gib
    assert made.time.expected_step_ms == pytest.approx([1e3 * s for s in expected.range_s or ()])
    assert expected.rates == made.rates.source == datasheet(NODE.gpu, "bf16").source


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
    text = SimpleNamespace(as_text=lambda: "HloModule of another form")
    no_text: Any = SimpleNamespace(train=text, program=step.program, size=run.train.global_batch)
    assert setup.expected_times(made, no_text, services) is None
    assert len(warnings) == 1


def test_an_empty_list_leaves_no_kernel_for_cuda_graphs(tmp_path):
    """With compiler.GRAPHS empty, XLA's dump of its options for a program for an H200 lists no kernels for CUDA graphs."""
    (device,) = devices(parse_topology("h200:1"))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=SingleDeviceSharding(device))
    kinds = {}
    for name, given in (("default", {}), ("none", {compiler.GRAPHS: ""})):
        jax.jit(lambda x: x + 1).lower(x).compile(compiler_options=given | {"xla_dump_to": str(tmp_path / name)})
        (dumped,) = (tmp_path / name).glob("*.config.pbtxt")
        kinds[name] = re.findall(rf"{compiler.GRAPHS}: (\w+)", dumped.read_text())
    assert "FUSION" in kinds["default"] and kinds["none"] == []


# ---- Checkpoints on GPUs


@pytest.mark.parametrize("mesh", [(), ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")])
def test_copies_for_a_checkpoint_go_to_host_memory(mesh):
    """Each byte is copied once, as replicas divide the copies. Devices do not communicate. Temporary memory is
    at most one layer's shard.
    """
    params = build_program(config(*mesh), devices(NODE)).state.params
    gate, head = params["layers"]["mlp"]["gate"], params["head"]
    index = jax.ShapeDtypeStruct((), "int32")
    for lowered, shape in (
        (copy_layer(gate.shape, gate.sharding).lower(gate, index), gate.shape[1:]),
        (copy_array(head.shape, head.sharding).lower(head), head.shape),
    ):
        step = lowered.compile()
        used, part = step.memory_analysis(), 4 * math.prod(shape) // 8
        assert used.host_output_size_in_bytes == part
        assert used.output_size_in_bytes < 1024 and used.temp_size_in_bytes < part + 4096
        assert not collectives.read_collectives(hlo.parse_hlo(step.as_text()), dict(gate.sharding.mesh.shape), 8)


def test_a_host_without_room_for_a_checkpoint_is_named():
    program = build_program(config(LOOP), devices(NODE))
    memory.check_host_memory(program, 100.0)
    with pytest.raises(memory.OutOfMemory, match=r"89\.7.*64\.00"):
        memory.check_host_memory(program, 64.0)


# ---- Classic mistakes of a layout: the plan warns of one, and no longer of the layout that the warning asks for


def loop(machine: str, *overrides: str) -> Plan:
    """Return a plan of two layers in a loop over layers, as in most configs."""
    return plan(machine, TWO, LOOP, *overrides)


def told(made: Plan, about: str) -> list[str]:
    return [w for w in made.warnings if about in w]


def test_a_healthy_step_gives_no_warning():
    """Only a warning of exposed communication is allowed, because two layers leave little to overlap with."""
    for which in (SHIPPED_STEP, RECOMPUTED):
        assert [w for w in plan(*which).warnings if not w.startswith("exposed communication")] == []


@pytest.mark.more
def test_microbatches_too_small_to_overlap_their_weights():
    made = loop("h200:8", "data.seq_len=512", "train.global_batch=64", "train.grad_accum=8")
    (warning,) = told(made, "too few to overlap")
    (fewer,) = re.findall(r"train.grad_accum=(\d)\.", warning)
    mended = loop("h200:8", "data.seq_len=512", "train.global_batch=64", f"train.grad_accum={fewer}")
    assert mended.time.step_ms < 0.7 * made.time.step_ms
    assert not told(mended, "too few to overlap")


@pytest.mark.more
def test_tensor_groups_across_nodes():
    made = loop("h200:2x2", "mesh.tensor=4", "train.global_batch=2", "train.grad_accum=2")
    (warning,) = told(made, "across nodes")
    assert "mesh.tensor=2" in warning
    # The table of collectives lists its cost.
    over = [c for c in made.collectives if c.axis == "tensor"]
    sent = float(re.findall(r"([\d.]+) GB", warning)[0])
    assert sent == pytest.approx(sum(c.network_gib for c in over) * 2**30 / 1e9, abs=0.01)
    assert f"{sum(c.exposed_ms for c in over):.1f} ms" in warning
    assert not told(loop("h200:2x2", "mesh.tensor=2", "train.global_batch=2", "train.grad_accum=1"), "across nodes")


# ---- Golden plans


def test_every_shipped_config_has_a_golden_plan():
    """tiny.py has none: it trains on CPUs."""
    files = {config.partition(":")[0] for config, _ in SHIPPED.values()}
    assert files == {f"configs/{file.name}" for file in (launch.REPO / "configs").glob("*.py")} - {"configs/tiny.py"}
    assert {file.stem for file in golden_plans.FOLDER.iterdir()} == set(SHIPPED)


# Warnings of shipped configs, by their beginnings.
DESERVED = {
    # Routing statistics are summed over all devices in each layer.
    "gpt_oss_20b": ("exposed communication",),
    # The wait for the experts' tokens is exposed, and routers are gathered in float32, in which they are stored.
    "deepseek_v3": ("exposed communication", "float32 all-gather"),
    "lora_gpt_oss_120b_mxfp4_on_h200_8": ("float32 all-gather",),  # of routers, too
    # Of routers, too. The gathers of 512 experts, or the wait for their tokens, are exposed.
    "qwen3_next_80b_a3b": ("exposed communication", "float32 all-gather"),
    "qwen3_next_80b_a3b_on_8": ("exposed communication", "float32 all-gather"),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_golden_files_are_what_they_say(name, tmp_path):
    """Llama 3 70B fits one node: with float32 master weights its peak is below 132 GiB."""
    kept = load(path(name))
    assert name != "llama3_70b" or kept["peak_gib"] < 132
    assert kept["jaxlib"] == installed.versions()["jaxlib"], golden_plans.WRITE
    assert (kept["config"], kept["topology"]) == SHIPPED[name]
    assert kept["margins"] == golden_plans.MARGINS and kept["peak_gib"] and kept["tflop"] and not kept["overrides"]
    assert not [text for text in kept["warnings"] if not text.startswith(DESERVED.get(name, ("none",)))]
    assert bool(kept["collectives"]) == (not kept["topology"].endswith(":1"))
    save(kept, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path(name).read_bytes()


def planned_now() -> Plan:
    """Return the plan of the program that the current code makes."""
    return make_plan(config(TWO, *ONE_EACH), NODE, rates=datasheet(NODE.gpu, "bf16"), name="configs/llama3_8b.py")


def test_float32_gathers_are_found(monkeypatch):
    """The planted fault clips a weight before its cast, so it is gathered in float32. XLA would move a cast alone before the
    gather.
    """

    def gather(w, how):
        for dim, over in how.dims:
            w = sharding.all_gather(w, over, dim)
        return jnp.clip(w, -100, 100).astype(how.compute)

    broken = jax.custom_vjp(gather, nondiff_argnums=(1,))
    broken.defvjp(lambda w, how: (gather(w, how), jnp.zeros((0,), w.dtype)), sharding._gather_bwd)
    monkeypatch.setattr(zero, "gather_weight", broken)
    differences = compare(from_plan(plan(*SHIPPED_STEP)), planned_now())
    for what in ("all-gather f32 over fsdp: ", "all-gather bf16 over fsdp: ", "new warning: float32 all-gather over fsdp"):
        assert [d for d in differences if d.startswith(what) and "jaxtrain/models/transformer.py:" in d], what


def with_collectives(found) -> Plan:
    return dataclasses.replace(plan(*SHIPPED_STEP), collectives=tuple(found))


def of(section: str, **fields) -> Plan:
    """Return the plan with other figures in one of its sections."""
    healthy = plan(*SHIPPED_STEP)
    return dataclasses.replace(healthy, **{section: dataclasses.replace(getattr(healthy, section), **fields)})


def test_figures_that_changed_are_found_with_their_parts():
    healthy = plan(*SHIPPED_STEP)
    kept, memory, time = from_plan(healthy), healthy.memory, healthy.time
    kernels = (*healthy.kernels, dataclasses.replace(healthy.kernels[0], op_name="recompute mlp", tflop=5.0))
    more = of("flops", hardware_per_step=healthy.flops.hardware_per_step + 5e12)
    warned = dataclasses.replace(healthy, warnings=("all-to-all (3 a step)",))
    for changed, *words in (
        (of("memory", peak_gib=memory.peak_gib + 2.0, saved=memory.saved | {"norm_out": 2.0}), "peak_gib", "norm_out: 2.0"),
        (dataclasses.replace(more, kernels=kernels), "tflop", "recompute mlp: 5.0"),
        (of("time", step_ms=time.step_ms * 1.021), "step_ms"),
        (of("time", exposed_ms=time.exposed_ms + 0.011 * time.step_ms), "exposed_share"),
        (dataclasses.replace(healthy, trip_counts={**healthy.trip_counts, "loss": 8}), "loops.loss"),
        (warned, "new warning"),
    ):
        (difference,) = compare(kept, changed)
        assert difference.startswith(f"{words[0]}: ") and all(word in difference for word in words), difference
    assert compare(kept | {"warnings": ["all-to-all (5 a step)"]}, warned) == []
    for key, value in (("jaxlib", "0.1"), ("topology", "h200:4")):
        with pytest.raises(GoldenError, match=key):
            compare(kept | {key: value}, healthy)


def test_an_added_gather_is_found_with_its_line():
    healthy = plan(*SHIPPED_STEP)
    line = "jaxtrain/models/transformer.py"
    one = next(c for c in healthy.collectives if c.kind == "all-gather" and c.source.startswith(line))
    others = [c for c in healthy.collectives if c is not one]
    added = dataclasses.replace(one, source=f"{line}:999")
    for found, what, where in (
        ([*healthy.collectives, added], "all-gather bf16 over fsdp", f"{line}:999"),
        ([*others, dataclasses.replace(one, wire_gib=one.wire_gib + 1.0)], "all-gather bf16 over fsdp", one.source),
        # the same bytes in smaller collectives
        ([*others, dataclasses.replace(one, count=2 * one.count)], "all-gather bf16 over fsdp", one.source),
        ([c for c in healthy.collectives if c.kind != "all-to-all"], "all-to-all bf16 over fsdp", "jaxtrain/"),
    ):
        (difference,) = compare(from_plan(healthy), with_collectives(found))
        assert difference.startswith(what) and where in difference, difference
