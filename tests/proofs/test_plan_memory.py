"""Memory of a step: a replay of XLA's buffer assignment gives XLA's own peak, by class of arrays and by saved activation.

Also cuDNN's workspace, moments on the host, and remat.policy=auto, which saves the activations that fit. Steps are compiled
ahead of time for GPUs.
"""

import dataclasses
import math
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from plans import LOOP, ONE_EACH, TWO, compiled, config, module, plan

from jaxtrain import activations
from jaxtrain.activations import KEPT
from jaxtrain.kernels.attention import cudnn
from jaxtrain.page.numbers import size
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.make import read_plan
from jaxtrain.plan.program import assignment, buffers, hlo
from jaxtrain.plan.report import sections
from jaxtrain.plan.topology import devices, parse
from jaxtrain.train import state
from jaxtrain.train.memory import taken_gib
from jaxtrain.train.program import build

LAYERS = 8  # with few layers, XLA unrolls loops, and some stacks disappear
BASE = (f"model.num_layers={LAYERS}", *ONE_EACH, LOOP)
TOKENS = 8192  # on each GPU
STACKED = LAYERS - 1  # the last layer's backward pass comes at once: its saved activations are in no stack
STACK = STACKED * TOKENS * 2 / buffers.GIB  # GiB of one bfloat16 number for each token and stacked layer
MIB = 2**20
NONE = assignment.Workspace({}, "formula")  # XLA's own figures, which are the reference, exclude cuDNN's workspace
MATMULS = "q=keep,k=keep,v=keep,attention_out=keep,attention_lse=keep,residual=keep,mlp_gate=keep,mlp_up=keep"
OFFLOAD = "q=keep,attention_out=keep,attention_lse=keep,residual=offload,mlp_up=offload"
REMAT = {
    "saved": ("remat.policy=custom", f"remat.tensors={MATMULS}"),
    "full": ("remat.policy=full", "remat.tensors=", "mesh.fsdp=4", "mesh.tensor=2"),
    "offloaded": ("remat.policy=custom", f"remat.tensors={OFFLOAD}"),
}


@pytest.fixture(scope="module", params=REMAT)
def held(request):
    return of(request.param)


def of(name: str):
    """Return (compiled step, its memory without workspaces)."""
    which = ("h200:8", *BASE, *REMAT[name])
    step = compiled(*which)[1]
    return step, buffers.memory(assignment.read(step.buffers), step.program, module(*which), step.card, NONE)


def shards_gib(tree) -> float:
    leaves = jax.tree.leaves(tree)
    return sum(a.dtype.itemsize * math.prod(a.sharding.shard_shape(a.shape)) for a in leaves) / buffers.GIB


def test_the_peak_is_xlas_and_the_classes_add_up_to_it(held):
    """The allocated memory exceeds the peak by the heap's fragmentation. XLA's temp_size_in_bytes counts a few scalars more."""
    step, memory = held
    analysis = step.executable.memory_analysis()
    assert memory.peak_gib == analysis.peak_memory_in_bytes / buffers.GIB
    assert math.isclose(sum(memory.by_class.values()), memory.peak_gib, rel_tol=1e-12)
    assert memory.arguments_gib * buffers.GIB == analysis.argument_size_in_bytes
    assert memory.temp_gib * buffers.GIB == pytest.approx(analysis.temp_size_in_bytes, abs=1024)
    assert taken_gib(step.executable) == pytest.approx(memory.taken_gib, abs=1e-6) and memory.taken_gib >= memory.peak_gib


def test_state_and_batch_are_counted_to_the_byte_and_once(held):
    """Parameters, moments and batch count once, with their exact bytes: the new state reuses the memory of the old one."""
    step, memory = held
    current = step.program.state
    adam = current.optimizer[0]
    assert memory.by_class["parameters"] == shards_gib(current.params)
    assert memory.by_class["first moment"] == shards_gib(adam.mu)
    assert memory.by_class["second moment"] == shards_gib(adam.nu)
    assert memory.by_class["batch"] == shards_gib(step.program.batch)
    assert memory.by_class["other optimizer state"] == shards_gib((current.step, adam.count, current.guard))


def test_the_list_of_buffers_covers_the_peak(held):
    _, memory = held
    sizes = [b.gib for b in memory.largest]
    assert sizes == sorted(sizes, reverse=True)
    for kind, total in memory.by_class.items():
        listed = sum(b.gib for b in memory.largest if b.kind == kind)
        assert listed <= total * (1 + 1e-12) and total - listed < 32 * MIB / buffers.GIB, kind
    assert any(b.source.startswith("jaxtrain/") for b in memory.largest)


def test_the_timeline_reaches_the_peak_through_the_phases_of_a_step(held):
    _, memory = held
    assert len(memory.timeline) <= buffers.POINTS
    assert max(gib for gib, _ in memory.timeline) == pytest.approx(memory.peak_gib, rel=1e-12)
    assert min(gib for gib, _ in memory.timeline) >= memory.arguments_gib
    sums = [sum(gib) for gib in zip(*(c.gib for c in memory.over_time), strict=True)]
    assert sums == pytest.approx([gib for gib, _ in memory.timeline], rel=1e-9)
    at_peak = {c.name: c.gib[sums.index(max(sums))] for c in memory.over_time}
    assert {kind: gib for kind, gib in at_peak.items() if gib} == pytest.approx(memory.by_class)
    first = list(dict.fromkeys(phase for _, phase in memory.timeline))
    order = [phase for phase in first if phase in ("forward layers", "loss", "optimizer")]
    assert order == ["forward layers", "loss", "optimizer"] and "backward layers" in first


def test_saved_activations_have_their_names():
    """The names are those of the policy. With full remat only layer inputs are saved. Offloaded activations are on the host."""
    d_model, d_ff, kv = 4096, 14336, 1024
    _, memory = of("saved")
    assert memory.saved["mlp_gate, mlp_up"] == 2 * STACK * d_ff
    assert memory.saved["q, attention_out"] == memory.saved["layer input, residual"] == 2 * STACK * d_model
    assert memory.saved["k, v"] == 2 * STACK * kv and memory.saved["attention_lse"] > 0
    assert math.isclose(sum(memory.saved.values()), memory.by_class["saved activations"], rel_tol=1e-12)
    _, memory = of("full")
    assert memory.saved == {"layer input": STACK * d_model}
    step, memory = of("offloaded")
    assert memory.host_gib == STACK * (d_model + d_ff)
    assert memory.host_gib * buffers.GIB == step.executable.memory_analysis().host_temp_size_in_bytes
    assert not any("mlp_up" in name or "residual" in name for name in memory.saved)
    assert memory.saved["q, attention_out"] == 2 * STACK * d_model and memory.saved["layer input"] == STACK * d_model
    assert {k.name for k in buffers.kept_activations(step.program) if k.offloaded} == {"residual", "mlp_up"}


def test_the_head_is_told_apart_in_the_loss():
    """At the peak of a shallow model, memory holds the head's gradient, the gathered head and one chunk of logits."""
    _, memory = of("saved")
    head = 4096 * 128256 / buffers.GIB
    assert "(loss)" in memory.peak_at
    assert memory.by_class["gradients"] >= 4 * head and memory.by_class["gathered weights"] >= 2 * head
    assert memory.by_class["logits and loss"] >= 4 * 2048 * 128256 / buffers.GIB
    shapes = {b.shape: b.kind for b in memory.largest}
    assert shapes["f32[4096,128256]"] == "gradients" and shapes["bf16[4096,128256]"] == "gathered weights"
    assert shapes["f32[2048,128256]"] == "logits and loss"


@pytest.mark.parametrize("policy", [("full",), ("attention",), ("custom", f"remat.tensors={MATMULS}")], ids=lambda p: p[0])
def test_saved_activations_are_read_from_the_program(policy):
    name, *tensors = policy
    run = config(*BASE, f"remat.policy={name}", *(tensors or ("remat.tensors=",)))
    kept = buffers.kept_activations(build(run, devices(parse("h200:8"))))
    of_this_model = activations.kept(run.remat) - {*activations.LATENTS}
    assert {k.name for k in kept} == of_this_model | {"layer input"}
    assert not any(k.again or k.offloaded for k in kept) and all(k.dims[0] == STACKED for k in kept)


def test_a_group_of_layers_saves_its_input_alone():
    run = config(*BASE, "remat.policy=full", "remat.tensors=", "model.num_layers=8", "remat.every=2")
    kept = buffers.kept_activations(build(run, devices(parse("h200:8"))))
    assert [(k.name, k.dims[0]) for k in kept] == [("layer input", 3)]  # the last of four groups is in no stack


@pytest.mark.more
def test_two_microbatches_hold_the_saved_activations_of_one():
    """XLA unrolls a loop of two trips. Without the barrier in train/gradients.py, it ran both forward passes first, with 32%
    more memory than four microbatches need.
    """

    def temporaries(accum: int) -> int:
        sizes = ("model.num_layers=6", "model.vocab_size=4096", "remat.policy=attention", LOOP)
        batch = (f"train.grad_accum={accum}", f"train.global_batch={16 * accum}")
        step = compiled("h200:8", *sizes, *batch, of="configs/llama3_1b.py")[1]
        return step.executable.memory_analysis().temp_size_in_bytes

    assert temporaries(2) < 1.1 * temporaries(4)


def test_a_torn_proto_is_refused():
    step, _ = of("saved")
    for torn in (step.buffers[: len(step.buffers) // 2], step.buffers[:-1]):
        with pytest.raises(assignment.AssignmentError, match="no whole HloProto"):
            assignment.read(torn)
    with pytest.raises(assignment.AssignmentError, match="holds no buffer assignment: read the file"):
        assignment.read(b"")


# ---- cuDNN's workspace

# With these sizes the peak is during a call that uses cuDNN's workspace.
SMALL = (TWO, "model.vocab_size=1024", "data.seq_len=2048", *ONE_EACH, "data.max_segments=256")
PACKED = ("h200:8", *SMALL)
OF = "configs/llama3_1b.py"


def test_a_plan_counts_the_workspace_once():
    run, step = compiled(*PACKED, of=OF)
    made = plan(*PACKED, of=OF)
    memory, counted = made.memory, assignment.read_workspace(module(*PACKED, of=OF), step.chosen.options)
    heads, kv_heads, head_dim = run.model.num_heads, run.model.num_kv_heads, run.model.d_model // run.model.num_heads
    assert memory.workspace_by == counted.by == "formula"
    assert counted.bytes and memory.workspace_gib == counted.largest / buffers.GIB > 0
    documents = run.data.max_segments + 1
    rows, part = cudnn.part_of(1, 2048, 2048, heads, kv_heads, head_dim, documents)
    one = cudnn.workspace_bytes(rows * documents, 2048, 2048, part, max(1, part * kv_heads // heads), head_dim)
    assert {*counted.bytes.values()} == {one}
    without = step.executable.memory_analysis().peak_memory_in_bytes / buffers.GIB
    assert memory.by_class[buffers.WORKSPACE] == memory.workspace_gib
    assert without < memory.peak_gib <= without + memory.workspace_gib
    assert sum(memory.by_class.values()) == pytest.approx(memory.peak_gib, rel=1e-12)
    assert memory.taken_gib >= memory.peak_gib
    (listed,) = [b for b in memory.largest if b.kind == buffers.WORKSPACE]
    assert listed.shape == f"u8[{counted.largest}]" and "attention" in listed.op_name
    assert f"cuDNN workspace {size(memory.workspace_gib)}, by formula" in sections.memory_details(made).parts


def test_a_program_that_says_its_workspace_is_taken_at_its_word():
    """In HLO compiled with cuDNN, the workspace is an output of the call, u8[bytes]. The plan uses that size."""
    _, step = compiled(*PACKED, of=OF)
    calls = "\n".join(
        line.replace("u8[0]", "u8[777]") if assignment.BACKWARD in line else line for line in step.text.splitlines()
    )
    said = assignment.read_workspace(hlo.parse(calls), step.chosen.options)
    assert said.by.startswith("cudnn") and {*said.bytes.values()} == {777} and not said.missing


def test_deterministic_kernels_take_more():
    parsed = module(*PACKED, of=OF)
    plain, repeatable = (assignment.read_workspace(parsed, options) for options in ({}, {"xla_gpu_deterministic_ops": True}))
    assert repeatable.largest > plain.largest


# ---- Moments on the host


@pytest.fixture(scope="module")
def on_host() -> Any:
    shape = {"precision": "bf16", "model.d_model": 512, "model.num_heads": 4, "model.d_ff": 1024, "data.seq_len": 1024}
    more = {"model.num_layers": 2, "mesh.fsdp": 8, "dtypes.v": "bf16", "optimizer.offload": "moments"}
    run = helpers.tiny(shape | more)
    return run, compile_step(run, parse("h200:8"))


def test_a_plan_sees_moments_on_the_host(on_host):
    """XLA copies one layer's shards at a time, and no kernel reads host memory directly."""
    run, step = on_host
    leaves = jax.tree_util.tree_leaves_with_path(step.program.state)
    moments = [a for path, a in leaves if state.is_moment(path)]
    resting = sum(np.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in moments)
    analysis = step.executable.memory_analysis()
    assert analysis.host_argument_size_in_bytes == resting
    assert analysis.host_alias_size_in_bytes == resting  # updated in place
    assert analysis.host_temp_size_in_bytes == 0
    made = read_plan(step, run, parse("h200:8"))
    assert made.memory.host_gib == pytest.approx(resting / 2**30)
    assert not made.memory.by_class.keys() & {"first moment", "second moment"}
    copies = [k for k in made.kernels if k.kind == "host"]
    assert sum(k.gb for k in copies) >= 2 * resting / 1e9  # copied in both directions, and counted in both memories
    assert made.time.host_exposed_ms > 0
    fusions = [i for c in hlo.parse(step.text).computations.values() for i in c.instructions if i.opcode == "fusion"]
    updates = [i for i in fusions if "/optimizer/" in i.op_name]
    assert updates and not [i for i in updates if any(s.memory_space == 5 for s in hlo.leaves(i.type))]


@pytest.mark.more
def test_unpacked_rows_leave_arguments_that_no_kernel_reads(on_host):
    """With unpacked rows no kernel reads some arguments. The moments stay on the host: they are found by their index among all
    arguments.
    """
    run, step = on_host
    unpacked = dataclasses.replace(run, data=dataclasses.replace(run.data, packing="none"))
    other = compile_step(unpacked, parse("h200:8")).executable.memory_analysis()
    assert other.host_argument_size_in_bytes == step.executable.memory_analysis().host_argument_size_in_bytes > 0


# ---- remat.policy=auto: it saves the outputs of matmuls, and if they do not fit, first drops those that are cheap to recompute


def auto(*overrides: str):
    return config(*ONE_EACH, "remat.policy=auto", "remat.tensors=", *overrides)


def test_a_step_that_is_too_big_saves_less_until_it_fits():
    """XLA decides whether a step fits: here JAX may use 3.5 GiB of the GPU. remat.policy=auto then saves fewer activations."""
    few = "data.max_segments=2"  # with more documents a row, cuDNN's workspace would not fit
    run = auto(TWO, "model.vocab_size=4096", "train.memory_fraction=0.025", few)
    step = compile_step(run, parse("h200:8"))
    limit = step.card.usable_gib
    assert limit == pytest.approx(0.025 * 139.8, abs=0.02)
    assert frozenset() < activations.kept(step.run.remat) < set(KEPT["auto"])
    assert taken_gib(step.executable) <= limit
