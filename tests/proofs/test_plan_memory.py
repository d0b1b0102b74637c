"""Memory of a step: a replay of XLA's buffer assignment gives XLA's own peak, by class of arrays and by saved activation.

Also cuDNN's workspace, moments on the host, and remat.policy=auto, which saves the activations that fit. Steps are compiled
ahead of time for GPUs.
"""

import math
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from plans import LOOP, ONE_EACH, TWO, compiled, config, module

from jaxtrain.models import activations
from jaxtrain.models.activations import SAVED
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.make import read_plan
from jaxtrain.plan.program import assignment, buffers, hlo
from jaxtrain.plan.topology import parse_topology
from jaxtrain.step import state
from jaxtrain.step.memory import taken_gib

LAYERS = 8  # with few layers, XLA unrolls loops, and some stacks disappear
BASE = (f"model.num_layers={LAYERS}", *ONE_EACH, LOOP)
TOKENS = 8192  # on each GPU
STACKED = LAYERS - 1  # the last layer's backward pass comes at once: its saved activations are in no stack
STACK = STACKED * TOKENS * 2 / buffers.GIB  # GiB of one bfloat16 number for each token and stacked layer
MIB = 2**20
NONE = assignment.Workspace({}, "formula")  # XLA's own figures, which are the reference, exclude cuDNN's workspace
MATMULS = "q=keep,k=keep,v=keep,attention_out=keep,attention_lse=keep,residual=keep,mlp_gate=keep,mlp_up=keep"
OFFLOAD = MATMULS.replace("residual=keep", "residual=offload").replace("mlp_up=keep", "mlp_up=offload")
REMAT = {
    "offloaded": ("remat.policy=custom", f"remat.tensors={OFFLOAD}", "train.ema_decay=0.999"),
    "full": ("remat.policy=full", "remat.tensors=", "mesh.fsdp=4", "mesh.tensor=2"),
}


@pytest.fixture(params=["offloaded", pytest.param("full", marks=pytest.mark.more)])
def held(request):
    return of(request.param)


def of(name: str):
    """Return (compiled step, its memory without workspaces)."""
    which = ("h200:8", *BASE, *REMAT[name])
    step = compiled(*which)[1]
    return step, buffers.step_memory(assignment.read_assignment(step.buffers), step.program, module(*which), step.card, NONE)


def shards_gib(tree) -> float:
    leaves = jax.tree.leaves(tree)
    return sum(a.dtype.itemsize * math.prod(a.sharding.shard_shape(a.shape)) for a in leaves) / buffers.GIB


def test_the_peak_is_xlas_and_the_classes_add_up_to_it(held):
    """The allocated memory exceeds the peak by the heap's fragmentation. XLA's temp_size_in_bytes counts a few scalars more.

    Parameters, moments and batch count once, with their exact bytes: the new state reuses the memory of the old one.
    """
    step, memory = held
    analysis = step.executable.memory_analysis()
    assert memory.peak_gib == analysis.peak_memory_in_bytes / buffers.GIB
    assert math.isclose(sum(memory.by_class.values()), memory.peak_gib, rel_tol=1e-12)
    assert math.isclose(sum(memory.temporaries.values()), memory.by_class["temporaries"], rel_tol=1e-12)
    assert any(name.endswith((" mlp", " attention")) for name in memory.temporaries)
    assert memory.arguments_gib * buffers.GIB == analysis.argument_size_in_bytes
    assert memory.temp_gib * buffers.GIB == pytest.approx(analysis.temp_size_in_bytes, abs=1024)
    assert taken_gib(step.executable) == pytest.approx(memory.taken_gib, abs=1e-6) and memory.taken_gib >= memory.peak_gib
    current = step.program.state
    adam = current.optimizer[0]
    assert memory.by_class["parameters"] == shards_gib(current.params)
    assert memory.by_class["first moment"] == shards_gib(adam.mu)
    assert memory.by_class["second moment"] == shards_gib(adam.nu)
    assert memory.by_class.get("average of weights", 0.0) == shards_gib(current.ema)
    assert memory.by_class["batch"] == shards_gib(step.program.batch)
    assert memory.by_class["other optimizer state"] == shards_gib((current.step, adam.count, current.guard))


def test_buffers_and_timeline_cover_the_peak(held):
    _, memory = held
    sizes = [b.gib for b in memory.largest]
    assert sizes == sorted(sizes, reverse=True)
    for kind, total in memory.by_class.items():
        listed = sum(b.gib for b in memory.largest if b.kind == kind)
        assert listed <= total * (1 + 1e-12) and total - listed < 32 * MIB / buffers.GIB, kind
    assert any(b.source.startswith("jaxtrain/") for b in memory.largest)
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
    """The names are those of the policy. Offloaded activations are on the host."""
    d_model, d_ff, kv = 4096, 14336, 1024
    step, memory = of("offloaded")
    assert memory.host_gib == STACK * (d_model + d_ff)
    assert memory.host_gib * buffers.GIB == step.executable.memory_analysis().host_temp_size_in_bytes
    assert not any("mlp_up" in name or "residual" in name for name in memory.saved)
    assert memory.saved["q, attention_out"] == 2 * STACK * d_model and memory.saved["layer input"] == STACK * d_model
    assert memory.saved["mlp_gate"] == STACK * d_ff and memory.saved["k, v"] == 2 * STACK * kv
    assert memory.saved["attention_lse"] > 0
    assert math.isclose(sum(memory.saved.values()), memory.by_class["saved activations"], rel_tol=1e-12)
    assert {k.name for k in buffers.loop_activations(step.program) if k.offloaded} == {"residual", "mlp_up"}


@pytest.mark.more
def test_two_microbatches_hold_the_saved_activations_of_one():
    """XLA unrolls a loop of two trips. Without the barrier in step/gradients.py, it ran both forward passes first, with 32%
    more memory than four microbatches need.
    """

    def temporaries(accum: int) -> int:
        sizes = ("model.num_layers=6", "model.vocab_size=4096", "remat.policy=attention", LOOP)
        batch = (f"train.grad_accum={accum}", f"train.global_batch={16 * accum}")
        step = compiled("h200:8", *sizes, *batch, of="configs/llama3_1b.py")[1]
        return step.executable.memory_analysis().temp_size_in_bytes

    assert temporaries(2) < 1.1 * temporaries(4)


def test_a_torn_proto_is_refused():
    step, _ = of("offloaded")
    for torn in (step.buffers[: len(step.buffers) // 2], step.buffers[:-1], b""):
        with pytest.raises(hlo.HloError):
            assignment.read_assignment(torn)


# ---- cuDNN's workspace


def test_a_workspace_is_what_the_program_says_and_deterministic_kernels_take_more():
    """In HLO compiled with cuDNN, the workspace is an output of the call, u8[bytes]. The plan uses that size."""
    step, _ = of("offloaded")
    plain, repeatable = (
        assignment.read_workspace(step.module, options) for options in ({}, {"xla_gpu_deterministic_ops": True})
    )
    assert repeatable.largest > plain.largest
    calls = "\n".join(
        line.replace("u8[0]", "u8[777]") if assignment.BACKWARD in line else line for line in step.text.splitlines()
    )
    said = assignment.read_workspace(hlo.parse_hlo(calls), step.chosen.options)
    assert said.by.startswith("cudnn") and {*said.bytes.values()} == {777} and not said.unassigned


# ---- Moments on the host


@pytest.fixture(scope="module")
def on_host() -> Any:
    shape = {"precision": "bf16", "model.d_model": 512, "model.num_heads": 4, "model.d_ff": 1024, "data.seq_len": 1024}
    more = {"model.num_layers": 2, "mesh.fsdp": 8, "dtypes.v": "bf16", "optimizer.offload": "moments"}
    run = helpers.tiny(shape | more)
    return run, compile_step(run, parse_topology("h200:8"))


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
    made = read_plan(step, parse_topology("h200:8"))
    assert made.memory.host_gib == pytest.approx(resting / 2**30)
    assert not made.memory.by_class.keys() & {"first moment", "second moment"}
    copies = [k for k in made.kernels if k.kind == "host"]
    assert sum(k.gb for k in copies) >= 2 * resting / 1e9  # copied in both directions, and counted in both memories
    assert made.time.host_exposed_ms > 0
    fusions = [i for c in step.module.computations.values() for i in c.instructions if i.opcode == "fusion"]
    updates = [i for i in fusions if "/optimizer/" in i.op_name]
    assert updates and not [i for i in updates if any(s.memory_space == 5 for s in hlo.leaves(i.type))]


# ---- remat.policy=auto


@pytest.mark.more
def test_a_step_that_is_too_big_saves_less_until_it_fits():
    """XLA decides whether a step fits: here JAX may use 3.5 GiB of the GPU. remat.policy=auto then saves fewer activations."""
    few = "data.max_segments=2"  # with more documents a row, cuDNN's workspace would not fit
    small = (TWO, "model.vocab_size=4096", "train.memory_fraction=0.025", few, LOOP)
    step = compile_step(config(*ONE_EACH, "remat.policy=auto", "remat.tensors=", *small), parse_topology("h200:8"))
    limit = step.card.usable_gib
    assert limit == pytest.approx(0.025 * 139.8, abs=0.02)
    assert frozenset() < activations.saved_activations(step.program.run.remat) < set(SAVED["auto"])
    assert taken_gib(step.executable) <= limit
