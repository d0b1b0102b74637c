"""What a step holds: XLA's buffer assignment, replayed, adds up to XLA's own peak; classes and names are those of the config.

Compiled by XLA:GPU for 8 described H200s. No GPU and no driver: the `plan` extra is enough.
"""

import math

import jax
import pytest

from jaxtrain import activations, launch
from jaxtrain.memory import taken_gib
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.program import assignment, buffers, hlo
from jaxtrain.plan.program.workspace import Workspace
from jaxtrain.plan.topology import devices, parse
from jaxtrain.step import build

LAYERS = 8  # with few, XLA takes the loops apart, and some stacks with them
BASE = ("--config=configs/llama3_8b.py", "--config.train.global_batch=8", "--config.train.grad_accum=1")
TOKENS = 8192  # on each GPU
STACKED = LAYERS - 1  # the last one's backward pass comes at once: what it keeps is in no stack
STACK = STACKED * TOKENS * 2 / buffers.GIB  # GiB of one number per token and stacked layer in bfloat16
MIB = 2**20
NONE = Workspace({}, "formula")  # XLA's own figures are compared with, and are without cuDNN's
KEPT = "q=keep,k=keep,v=keep,attention_out=keep,attention_lse=keep,residual=keep,mlp_gate=keep,mlp_up=keep"


def config(*overrides: str):
    loop = ("--config.compiler.unroll=false", "--config.remat.policy=custom", f"--config.remat.tensors={KEPT}")
    if any("remat.policy" in o for o in overrides):
        loop = (*loop[:1], "--config.remat.tensors=")
    loaded = launch.load([*BASE, f"--config.model.num_layers={LAYERS}", *loop, *overrides])
    assert not loaded.problems, loaded.problems
    return loaded.run


def held(*overrides: str):
    step = compile_step(config(*overrides), parse("h200:8"))
    read = assignment.read(step.buffers)
    sizes = {"hbm_gib": 139.8, "reserve_gib": 6.0, "usable_gib": 133.8}
    memory = buffers.memory(read, step.program, hlo.parse(step.text), **sizes, workspace=NONE)
    return step, read, memory


@pytest.fixture(scope="module")
def kept():
    """The shipped policy: GEMM and attention outputs stay."""
    return held()


@pytest.fixture(scope="module")
def full():
    return held("--config.remat.policy=full", "--config.mesh.fsdp=4", "--config.mesh.tensor=2")


@pytest.fixture(scope="module")
def offloaded():
    return held("--config.remat.tensors=q=keep,attention_out=keep,attention_lse=keep,residual=offload,mlp_up=offload")


@pytest.fixture(params=["kept", "full", "offloaded"])
def step(request):
    return request.getfixturevalue(request.param)


def shards_gib(tree) -> float:
    leaves = jax.tree.leaves(tree)
    return sum(a.dtype.itemsize * math.prod(a.sharding.shard_shape(a.shape)) for a in leaves) / buffers.GIB


def test_the_peak_is_xlas_and_the_classes_add_up_to_it(step):
    compiled, _, memory = step
    analysis = compiled.executable.memory_analysis()
    assert memory.peak_gib == analysis.peak_memory_in_bytes / buffers.GIB
    assert math.isclose(sum(memory.by_class.values()), memory.peak_gib, rel_tol=1e-12)


def test_allocations_are_xlas_and_exceed_the_peak_by_the_gaps_of_the_heap(step):
    """XLA counts a few scalar results and constants beside the temporaries; here they belong to them."""
    compiled, _, memory = step
    analysis = compiled.executable.memory_analysis()
    assert memory.arguments_gib * buffers.GIB == analysis.argument_size_in_bytes
    assert memory.temp_gib * buffers.GIB == pytest.approx(analysis.temp_size_in_bytes, abs=1024)
    assert taken_gib(compiled.executable) == pytest.approx(memory.taken_gib, abs=1e-6) and memory.taken_gib >= memory.peak_gib


def test_state_and_batch_are_counted_to_the_byte_and_once(step):
    """The new state takes over the memory of the old one."""
    compiled, _, memory = step
    state = compiled.program.state
    adam = state.optimizer[0]
    assert memory.by_class["parameters"] == shards_gib(state.params)
    assert memory.by_class["first moment"] == shards_gib(adam.mu)
    assert memory.by_class["second moment"] == shards_gib(adam.nu)
    assert memory.by_class["batch"] == shards_gib(compiled.program.batch)
    assert memory.by_class["other optimizer state"] == shards_gib((state.step, adam.count, state.guard))


def test_what_the_policy_keeps_is_there_by_name(kept):
    _, _, memory = kept
    d_model, d_ff, kv = 4096, 14336, 1024
    assert memory.saved["mlp_gate, mlp_up"] == 2 * STACK * d_ff
    assert memory.saved["q, attention_out"] == 2 * STACK * d_model
    assert memory.saved["layer input, residual"] == 2 * STACK * d_model
    assert memory.saved["k, v"] == 2 * STACK * kv
    assert memory.saved["attention_lse"] > 0
    assert math.isclose(sum(memory.saved.values()), memory.by_class["saved activations"], rel_tol=1e-12)


def test_full_remat_keeps_only_what_enters_a_layer(full):
    _, _, memory = full
    assert set(memory.saved) == {"layer input"}
    # The residual stream is split over the tensor axis, and so is what enters a layer.
    assert memory.saved["layer input"] == STACK * 4096


def test_offloaded_activations_are_in_host_memory(offloaded):
    compiled, _, memory = offloaded
    assert memory.host_gib == STACK * (4096 + 14336)
    assert memory.host_gib * buffers.GIB == compiled.executable.memory_analysis().host_temp_size_in_bytes
    assert not any("mlp_up" in name or "residual" in name for name in memory.saved)
    assert memory.saved["q, attention_out"] == 2 * STACK * 4096
    assert memory.saved["layer input"] == STACK * 4096
    kept = buffers.kept_activations(compiled.program)
    assert {k.name for k in kept if k.offloaded} == {"residual", "mlp_up"}


def test_the_head_is_told_apart_in_the_loss(kept):
    """At the peak of a shallow model stand the head's gradient, the gathered head and one chunk of logits."""
    _, _, memory = kept
    head = 4096 * 128256 / buffers.GIB
    assert "(loss)" in memory.peak_at
    assert memory.by_class["gradients"] >= 4 * head
    assert memory.by_class["gathered weights"] >= 2 * head
    assert memory.by_class["logits and loss"] >= 4 * 2048 * 128256 / buffers.GIB
    shapes = {b.shape: b.kind for b in memory.largest}
    assert shapes["f32[4096,128256]"] == "gradients" and shapes["bf16[4096,128256]"] == "gathered weights"
    assert shapes["f32[2048,128256]"] == "logits and loss"


def test_the_list_of_buffers_covers_the_peak(step):
    _, _, memory = step
    sizes = [b.gib for b in memory.largest]
    assert sizes == sorted(sizes, reverse=True)
    for kind, size in memory.by_class.items():
        listed = sum(b.gib for b in memory.largest if b.kind == kind)
        assert listed <= size * (1 + 1e-12) and size - listed < 32 * MIB / buffers.GIB, kind
    assert any(b.source.startswith("jaxtrain/") for b in memory.largest)


def test_the_timeline_reaches_the_peak_through_the_phases_of_a_step(step):
    _, _, memory = step
    assert len(memory.timeline) <= buffers.POINTS
    assert max(gib for gib, _ in memory.timeline) == pytest.approx(memory.peak_gib, rel=1e-12)
    assert min(gib for gib, _ in memory.timeline) >= memory.arguments_gib
    first = list(dict.fromkeys(phase for _, phase in memory.timeline))
    order = [phase for phase in first if phase in ("forward layers", "loss", "optimizer")]
    assert order == ["forward layers", "loss", "optimizer"]
    assert "backward layers" in first


@pytest.mark.parametrize("policy", ["full", "attention", "custom"])
def test_kept_activations_are_read_from_the_program(policy):
    run = config(f"--config.remat.policy={policy}")
    kept = buffers.kept_activations(build(run, devices(parse("h200:8"))))
    assert {k.name for k in kept} == activations.kept(run.remat) | {"layer input"}
    assert not any(k.again or k.offloaded for k in kept)
    assert all(k.dims[0] == STACKED for k in kept)


def test_groups_of_layers_are_told_from_what_is_computed_again():
    run = config("--config.remat.policy=full", "--config.remat.every=2")
    kept = buffers.kept_activations(build(run, devices(parse("h200:8"))))
    assert {k.name for k in kept if not k.again} == {"layer input"}
    assert {"mlp_gate", "mlp_up", buffers.WEIGHT} <= {k.name for k in kept if k.again}


@pytest.mark.parametrize(
    "op_name, kind",
    [
        ("transpose(jvp(layers))/while/body/checkpoint/mlp/mul", "temporaries"),
        ("transpose(jvp(layers))/while/body/checkpoint/mlp/BTD,FD->BTF/dot_general", "temporaries"),
        ("transpose(jvp(layers))/while/body/checkpoint/mlp/BTD,BTF->DF/dot_general", "gradients"),
        ("transpose(jvp(layers))/while/body/checkpoint/mlp/shard_map/reduce_scatter", "gradients"),
        ("jvp(loss)/shard_map/while/body/exp", "logits and loss"),
    ],
)
def test_as_many_tokens_as_a_weight_has_rows_make_no_gradient(op_name, kind):
    """Sequences of 8192 tokens and a model dimension of 8192: activations and weights have one shape."""
    metadata = f'metadata={{op_name="jit(train_step)/{op_name}"}}'
    module = hlo.parse(
        "HloModule m, is_scheduled=true\n\n"
        "ENTRY %main (p: bf16[8192,28672]) -> bf16[8192,28672] {\n"
        '  %p = bf16[8192,28672]{1,0} parameter(0), metadata={op_name="x"}\n'
        f"  ROOT %y = bf16[8192,28672]{{1,0}} negate(%p), {metadata}\n"
        "}\n"
    )
    facts = buffers.Facts(module, frozenset({(8192, 28672)}), frozenset({(1024, 28672)}), {}, {}, {})
    assert buffers.classify(facts, assignment.Value(1, 8192 * 28672 * 2, "y", (), 0)) == (kind, "")


def test_a_torn_proto_is_refused(kept):
    compiled, _, _ = kept
    with pytest.raises(assignment.AssignmentError, match="no whole HloProto"):
        assignment.read(compiled.buffers[: len(compiled.buffers) // 2])
    with pytest.raises(assignment.AssignmentError, match="no whole HloProto"):
        assignment.read(compiled.buffers[:-1])
    with pytest.raises(assignment.AssignmentError, match="holds no buffer assignment: read the file"):
        assignment.read(b"")
