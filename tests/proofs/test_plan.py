"""The train step of the shipped configs, compiled by XLA:GPU for 8 described H200s.

What it gathers, reduces, shards and donates is read from the partitioned, scheduled program itself. No GPU and no driver: the
`plan` extra is enough.
"""

import importlib.util
import math
import re

import jax
import pytest

from jaxtrain import hardware, launch, memory
from jaxtrain.plan.compile import NO_TUNING, Compiled, compile_step
from jaxtrain.plan.expect import ENOUGH, FIRST, Expected, Watch, expect
from jaxtrain.plan.make import make_plan, read_plan
from jaxtrain.plan.program import collectives, hlo
from jaxtrain.plan.rates import PUBLISHED, datasheet
from jaxtrain.plan.result import from_json, to_json
from jaxtrain.plan.search.parallel import Request, plan_many
from jaxtrain.plan.topology import devices, parse
from jaxtrain.stacks import copy, copy_layer
from jaxtrain.state import shardings
from jaxtrain.step import build

# No skip where the plugin is missing: on Linux every environment that run.sh makes has one, and these tests are the proof that
# the layouts are what the docs say.
assert importlib.util.find_spec("jax_plugins"), "the CUDA plugin is not installed: ./run.sh test installs the plan extra"

NODE = parse("h200:8")
ONE_EACH = ("--config.train.global_batch=8", "--config.train.grad_accum=1")  # sequences: one a GPU
FULL = ("--config.remat.policy=full", "--config.compiler.unroll=false")


def config(*overrides: str):
    loaded = launch.load(overrides)
    assert not loaded.problems, loaded.problems
    return loaded.run


def compiled(*overrides: str) -> Compiled:
    return compile_step(config(*overrides), NODE)


def moved(step: Compiled) -> list[collectives.Found]:
    mesh = dict(step.program.placement.mesh.shape)
    return collectives.read(hlo.parse(step.text), mesh, gpus_per_node=8)


def wide(found: list[collectives.Found]) -> list[collectives.Found]:
    """Those of layers that carry float32; the loss and the gradient norm are sums in float32 by intent."""
    return [f for f in found if "f32" in f.dtype and "layers" in f.op_name and "(loss)" not in f.op_name]


def attention_calls(step: Compiled, target: str) -> list[tuple[hlo.Instruction, int]]:
    """Calls of a cuDNN kernel, and how often each runs in a step."""
    calls = [(i, times) for i, _, times, _ in hlo.walk(hlo.parse(step.text)) if i.opcode == "custom-call"]
    return [(i, times) for i, times in calls if i.attributes["custom_call_target"] == f'"{target}"']


@pytest.fixture(scope="module")
def llama3_8b() -> Compiled:
    """As shipped, without accumulation: then nothing but layers and loss chunks runs in loops."""
    return compiled("--config=configs/llama3_8b.py", *ONE_EACH)


@pytest.fixture(scope="module")
def full_remat():
    """The plan of 8B where every layer keeps its input only."""
    run = config("--config=configs/llama3_8b.py", *ONE_EACH, *FULL)
    step = compile_step(run, NODE)
    return run, step, read_plan(step, run, NODE)


def test_weights_travel_in_bfloat16(llama3_8b):
    found = moved(llama3_8b)
    assert not wide(found), wide(found)
    inside = [f for f in found if "layers" in f.op_name and f.wire_bytes]
    assert {f.kind for f in inside} == {"all-gather", "reduce-scatter"}
    assert {f.axis for f in inside} == {"fsdp"}
    # Every weight of a layer is gathered for the forward and for the backward pass, those of the last layer once for both, and
    # its gradient reduced once.
    params = llama3_8b.program.state.params["layers"]
    weights = sum(math.prod(a.shape) for a in jax.tree.leaves(params))
    for kind, times in (("all-gather", 2 - 1 / 32), ("reduce-scatter", 1)):
        of_layers = [f for f in found if f.kind == kind and "(loss)" not in f.op_name and f.dtype == "bf16"]
        sent = sum(f.count * f.wire_bytes for f in of_layers)
        assert sent == pytest.approx(times * 2 * weights * 7 / 8, rel=0.001), kind


@pytest.mark.more
def test_without_tuning_the_program_is_the_same(monkeypatch):
    """What NO_TUNING leaves out decides how a fusion's kernel is written, and nothing that a plan reads."""
    argv = ("--config=configs/llama3_1b.py", "--config.model.num_layers=2", *ONE_EACH)
    steps = []
    for without in (NO_TUNING, {}):
        monkeypatch.setattr("jaxtrain.plan.compile.NO_TUNING", without)
        steps.append(compiled(*argv))  # on one line for both: the program's text tells where it was asked for
    fast, tuned = steps

    def instructions(step: Compiled) -> list[str]:
        kernels = re.compile(r', backend_config=\{"operation_queue_id".*')  # how a fusion's kernel is written
        return [kernels.sub("", line) for line in step.text.splitlines()[1:]]  # the first holds a hash of the options

    assert instructions(fast) == instructions(tuned) and fast.text != tuned.text
    sizes = [s.executable.memory_analysis() for s in (fast, tuned)]
    assert sizes[0].peak_memory_in_bytes == sizes[1].peak_memory_in_bytes
    assert sizes[0].temp_size_in_bytes == sizes[1].temp_size_in_bytes


def test_the_reader_can_tell_float32_gathers():
    """The check above can fail: with float32 compute every gather is float32."""
    step = compiled("--config=configs/llama3_8b.py", "--config.precision=f32", "--config.model.num_layers=4")
    assert any(f.kind == "all-gather" for f in wide(moved(step)))


def test_attention_is_cudnn_and_runs_forward_once(llama3_8b):
    assert llama3_8b.program.attention == "cudnn"
    forward = attention_calls(llama3_8b, "__cudnn$fmhaSoftmax")
    backward = attention_calls(llama3_8b, "__cudnn$fmhaSoftmaxBackward")
    assert sum(times for _, times in forward) == 32
    # Going backward in four parts, so that the workspace is small (kernels/attention/cudnn.py).
    assert sum(times for _, times in backward) == 4 * 32
    again = [i for i, _ in forward if "rematted_computation" in i.op_name]
    assert not again, "output and logsumexp are kept, so attention must not run forward again"


def test_full_remat_runs_attention_again(full_remat):
    """The check above can fail."""
    forward = attention_calls(full_remat[1], "__cudnn$fmhaSoftmax")
    assert sum(times for i, times in forward if "rematted_computation" in i.op_name) == 32


def test_no_gemm_runs_twice(llama3_8b, full_remat):
    """What a step executes is what its formula says: XLA neither repeats a kept GEMM nor computes again on its own."""
    run = config("--config=configs/llama3_8b.py", *ONE_EACH)
    for plan in (read_plan(llama3_8b, run, NODE), full_remat[2]):
        assert plan.flops.hardware_per_step == pytest.approx(plan.flops.expected_per_step, rel=0.01)


def test_moments_are_sharded_like_parameters(llama3_8b):
    program, step = llama3_8b.program, llama3_8b.executable
    state_in, _ = step.input_shardings[0]
    state_out, _ = step.output_shardings
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


def test_state_is_donated(llama3_8b):
    leaves = jax.tree.leaves(llama3_8b.program.state)
    per_device = sum(a.dtype.itemsize * math.prod(a.sharding.shard_shape(a.shape)) for a in leaves)
    assert llama3_8b.executable.memory_analysis().alias_size_in_bytes >= per_device


def test_head_is_gathered_once_and_its_gradient_reduced_once(llama3_8b):
    """Once a microbatch, in bfloat16, and not in the loop over the chunks of the loss."""
    head = [f for f in moved(llama3_8b) if "(loss)" in f.op_name and f.wire_bytes > 1 << 20]
    assert sorted((f.kind, f.count, f.dtype, f.loops) for f in head) == [
        ("all-gather", 1, "bf16", ()),
        ("reduce-scatter", 1, "bf16", ()),
    ]


@pytest.mark.parametrize("mesh", [("fsdp=4", "tensor=2"), pytest.param(("data=2", "fsdp=4"), marks=pytest.mark.more)])
def test_other_meshes_keep_weights_narrow(mesh):
    overrides = [f"--config.mesh.{m}" for m in mesh]
    step = compiled("--config=configs/llama3_8b.py", "--config.model.num_layers=4", *overrides)
    assert not wide(moved(step))


def test_a_thousand_gpus():
    """What leaves a node stands apart, and the way through 128 of them is counted."""
    run = config("--config=configs/llama3_70b.py:gpus=1024", "--config.model.num_layers=2")
    plan = make_plan(run, parse("h200:8x128"), rates=datasheet(NODE.gpu, "bf16"))
    assert plan.fits and plan.mesh["fsdp"] == 1024
    rings = [c for c in plan.collectives if c.kind in ("all-gather", "reduce-scatter") and c.group == 1024]
    assert rings and all(c.network_gib == pytest.approx(c.wire_gib / 8) for c in rings)
    latency_ms = 127 * plan.rates.network_latency_us / 1e3
    assert all(c.ms > c.count * latency_ms for c in rings)


def test_layers_under_one_checkpoint_do_not_abort_xla():
    """A loop over the layers of a group, inside the one over groups, did with a tensor axis."""
    sizes = ("model.num_layers=8", "remat.policy=full", "remat.tensors=", "remat.every=2", "mesh.fsdp=1", "mesh.tensor=8")
    run = config("--config=configs/llama3_70b.py", *(f"--config.{s}" for s in sizes))
    (found,) = plan_many({0: Request(run, NODE)}).values()
    assert found.plan, found.reason


@pytest.mark.parametrize(
    ("num_layers", "every"), [(1, 1), *(pytest.param(*sizes, marks=pytest.mark.more) for sizes in ((2, 1), (3, 2)))]
)
def test_few_layers_do_not_abort_xla(num_layers, every):
    """Where they leave no loop over layers, XLA would unroll the one over microbatches around the loss, a loop itself."""
    sizes = (f"model.num_layers={num_layers}", f"remat.every={every}", "model.d_model=512", "model.vocab_size=4096")
    run = config("--config=configs/llama3_1b.py", *(f"--config.{s}" for s in sizes))
    assert run.train.grad_accum > 1
    (found,) = plan_many({0: Request(run, NODE)}).values()
    assert found.plan, found.reason


# ---- The plan as a whole


def test_plan_of_llama3_8b(full_remat):
    """What MaxText 0.2.5 needs for the same work, compiled the same way, is in docs/planned_vs_published.md."""
    _, step, plan = full_remat
    assert plan.fits and plan.attention == "cudnn" and plan.mesh == {"data": 1, "fsdp": 8, "tensor": 1, "seq": 1}
    without = step.executable.memory_analysis().peak_memory_in_bytes / 2**30  # the compiler here has no cuDNN to ask
    assert without < plan.memory.peak_gib <= without + plan.memory.workspace_gib
    assert plan.memory.peak_gib <= 21.5
    assert sum(c.wire_gib for c in plan.collectives) * 2**30 <= 39e9
    # 844 ms is MaxText's program at the same rates. Attention's backward pass in parts, which saves 6 GiB, costs ours 1%.
    assert plan.time.step_ms <= 1.01 * 844
    assert plan.time.exposed_ms < 0.01 * plan.time.step_ms
    assert not plan.warnings


def test_plan_survives_json(full_remat):
    plan = full_remat[2]
    assert from_json(to_json(plan)) == plan
    with pytest.raises(ValueError, match="format 99"):
        from_json(to_json(plan) | {"format": 99})


def test_compiled_options_are_those_of_training(full_remat):
    _, step, plan = full_remat
    assert plan.options == step.chosen.options
    assert "xla_dump_to" not in plan.options
    held = plan.memory.arguments_gib
    limit = held + int(plan.options["xla_gpu_memory_limit_slop_factor"]) / 100 * (0.8 * plan.memory.hbm_gib - held)
    assert limit == pytest.approx(plan.memory.usable_gib, rel=0.01) and limit <= plan.memory.usable_gib


# ---- Planned beside measured


def test_a_run_expects_what_the_plan_says(full_remat):
    run, step, plan = full_remat
    expected = expect(run, step.program, step.executable, NODE.gpu, 8)
    assert expected.step_s == pytest.approx(plan.time.step_ms / 1e3)
    # On a GPU the executable has cuDNN's workspace itself. Here it has none.
    assert expected.peak_gib < plan.memory.taken_gib <= expected.peak_gib + plan.memory.workspace_gib
    assert plan.time.expected_step_ms == pytest.approx([1e3 * s for s in expected.range_s or ()])
    assert expected.rates == plan.rates.source


def test_a_run_that_is_not_as_planned_is_told_once():
    def say(step_s, peak_gib, rates="calibrated on NVIDIA H200", range_s=None):
        watch = Watch(Expected(1.0, 100.0, rates, range_s))
        said = [watch.note(9.0 if n < FIRST else step_s, peak_gib) for n in range(FIRST + ENOUGH + 3)]
        assert not any(said[: FIRST + ENOUGH - 1]) and not any(said[FIRST + ENOUGH :])
        assert watch.record()["measured"] == {"step_s": step_s, "peak_gib": peak_gib}
        return said[FIRST + ENOUGH - 1]

    assert say(1.1, 95.0) == []
    assert say(1.0, None) == []
    (slow,) = say(1.3, 100.0)
    assert "step time: 1.3 s measured, 1 s planned" in slow and "1.30 times" in slow
    assert say(1.3, 100.0, PUBLISHED) == [], "by how much a step is longer than at published kernel rates is not known"
    assert say(1.2, 100.0, PUBLISHED, (1.07, 1.28)) == []
    for outside in (1.0, 1.3):
        (line,) = say(outside, 100.0, PUBLISHED, (1.07, 1.28))
        assert "1.07 to 1.28 s planned" in line
    (big,) = say(1.0, 120.0)
    assert "peak memory: 120 GiB measured, 100 GiB planned" in big


# ---- Checkpoints on GPUs


@pytest.mark.parametrize("mesh", [(), ("data=2", "fsdp=2", "tensor=2")])
def test_copies_for_a_checkpoint_go_to_host_memory(mesh):
    """Each byte once, replicas sharing the work; nothing moves between devices, and one layer at a time is held."""
    run = config("--config=configs/llama3_8b.py", *(f"--config.mesh.{m}" for m in mesh))
    params = build(run, devices(NODE)).state.params
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
    program = build(config("--config=configs/llama3_8b.py"), devices(NODE))
    memory.check_host_memory(program, 100.0)
    with pytest.raises(memory.OutOfMemory, match="takes 89.7. GiB; 64.00 GiB may be pinned"):
        memory.check_host_memory(program, 64.0)


def test_the_reserve_is_what_training_leaves():
    card = NODE.memory_gib
    assert card * hardware.memory_fraction(card) == pytest.approx(card - hardware.RESERVE_GIB, abs=0.02)
