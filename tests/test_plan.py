"""The train step of the shipped configs, compiled by XLA:GPU for 8 described H200s.

What it gathers, reduces, shards and donates is read from the partitioned, scheduled program itself. No GPU and no driver: the
`plan` extra is enough.
"""

import importlib.util
import math
import re
from importlib import resources

import jax
import pytest

from jaxtrain import hardware, launch, memory
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.topology import devices, parse
from jaxtrain.state import copy, copy_layer, shardings
from jaxtrain.step import build

# No skip where the plugin is missing: on Linux every environment that run.sh makes has one, and these tests are the proof that
# the layouts are what the docs say.
assert importlib.util.find_spec("jax_plugins"), "the CUDA plugin is not installed: ./run.sh test installs the plan extra"

COLLECTIVE = re.compile(
    r"= (?P<shape>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(.*?"
)
CALLED = re.compile(r"(?:body|condition|calls|to_apply|branch_computations)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")


def compiled(*overrides: str):
    loaded = launch.load(overrides)
    assert not loaded.problems, loaded.problems
    step = compile_step(loaded.run, parse("h200:8"))
    return step.program, step.executable


@pytest.fixture(scope="module")
def llama3_8b():
    """Without accumulation: then nothing but layers and loss chunks runs in loops."""
    return compiled("--config=configs/llama3_8b.py", "--config.train.global_batch=8", "--config.train.grad_accum=1")


def computations(hlo: str) -> dict[str, list[str]]:
    """Name -> lines of every computation of a module."""
    out: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        start = re.match(r"(?:ENTRY )?(%[\w.\-]+) .*\{$", line)
        if start:
            lines = out.setdefault(start[1], [])
        elif line.startswith("  "):
            lines.append(line)
    return out


def collectives_in_loops(hlo: str) -> list[tuple[str, str, str]]:
    """(kind, result shapes, op_name) of every collective that runs inside a while loop, called computations included."""
    found = computations(hlo)
    todo = {name for lines in found.values() for line in lines for name in re.findall(r"body=(%[\w.\-]+)", line)}
    inside: set[str] = set()
    while todo:
        name = todo.pop()
        inside.add(name)
        called = {c for line in found[name] for group in CALLED.findall(line) for c in group.split(", ")}
        todo |= (called & found.keys()) - inside
    out = []
    for name in inside:
        for line in found[name]:
            match = COLLECTIVE.search(line)
            if match:
                source = re.search(r'op_name="([^"]*)"', line)
                out.append((match["kind"], match["shape"], source[1] if source else ""))
    return out


def wide(found: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Those that carry float32, outside the loss (whose softmax statistics are float32 by intent)."""
    return [c for c in found if "f32[" in c[1] and "(loss)" not in c[2]]


def test_weights_travel_in_bfloat16(llama3_8b):
    program, step = llama3_8b
    found = collectives_in_loops(step.as_text())
    assert not wide(found), wide(found)
    kinds = {kind for kind, _, _ in found}
    assert kinds == {"all-gather", "reduce-scatter"}
    gathered = " ".join(shape for kind, shape, _ in found if kind == "all-gather")
    for weight in ("bf16[4096,14336]", "bf16[4096,32,128]", "bf16[4096,8,128]"):
        assert weight in gathered, weight
    reduced = " ".join(shape for kind, shape, _ in found if kind == "reduce-scatter")
    for shard in ("bf16[512,14336]", "bf16[512,8,128]", "bf16[512,32,128]"):
        assert shard in reduced, shard


def test_the_reader_can_tell_float32_gathers(llama3_8b):
    """The check above can fail: with float32 compute every gather is float32."""
    _, step = compiled("--config=configs/llama3_8b.py", "--config.precision=f32", "--config.model.num_layers=2")
    assert any(kind == "all-gather" for kind, _, _ in wide(collectives_in_loops(step.as_text())))


def test_attention_is_cudnn_and_runs_forward_once(llama3_8b):
    program, step = llama3_8b
    assert program.attention == "cudnn"
    text = step.as_text()
    # A loop that is unrolled or peeled shows its body several times; forward and backward calls must stay in balance.
    forward = text.count('custom_call_target="__cudnn$fmhaSoftmax"')
    backward = text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"')
    assert forward and backward
    remade = [
        line
        for line in text.splitlines()
        if 'custom_call_target="__cudnn$fmhaSoftmax"' in line and "rematted_computation" in line
    ]
    assert not remade, "output and logsumexp are kept, so attention must not run forward again"


def test_full_remat_runs_attention_again():
    """The check above can fail."""
    _, step = compiled("--config=configs/llama3_8b.py", "--config.remat.policy=full", "--config.model.num_layers=2")
    assert any(
        'custom_call_target="__cudnn$fmhaSoftmax"' in line and "rematted_computation" in line
        for line in step.as_text().splitlines()
    )


def test_moments_are_sharded_like_parameters(llama3_8b):
    program, step = llama3_8b
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
    program, step = llama3_8b
    leaves = jax.tree.leaves(program.state)
    per_device = sum(a.dtype.itemsize * math.prod(a.sharding.shard_shape(a.shape)) for a in leaves)
    assert step.memory_analysis().alias_size_in_bytes >= per_device


def test_head_is_gathered_once_and_its_gradient_reduced_once(llama3_8b):
    """Once a microbatch, in bfloat16, and not in the loop over the chunks of the loss."""
    _, step = llama3_8b
    head = [
        (match["kind"], name)
        for lines in computations(step.as_text()).values()
        for line in lines
        if (match := COLLECTIVE.search(line)) and (name := re.search(r'op_name="([^"]*)"', line)) and "(loss)" in name[1]
        if "[4096,128256]" in line
    ]
    assert sorted(kind for kind, _ in head) == ["all-gather", "reduce-scatter"]
    assert not [c for c in collectives_in_loops(step.as_text()) if "(loss)" in c[2]]


@pytest.mark.parametrize("mesh", [("fsdp=4", "tensor=2"), ("data=2", "fsdp=4")])
def test_other_meshes_keep_weights_narrow(mesh):
    overrides = [f"--config.mesh.{m}" for m in mesh]
    _, step = compiled("--config=configs/llama3_8b.py", "--config.model.num_layers=4", *overrides)
    found = collectives_in_loops(step.as_text())
    assert not wide(found), wide(found)


def test_llama3_70b_fits_one_node():
    """By the compiler's buffer assignment, below what the memory budget leaves of an H200."""
    _, step = compiled("--config=configs/llama3_70b.py")
    spec = (resources.files("jaxtrain.plan") / "specs" / "h200.txtpb").read_text()
    card_gib = int(re.findall(r"device_memory_size: (\d+)", spec)[0]) / 2**30
    usable = card_gib * hardware.memory_fraction(card_gib)
    assert step.memory_analysis().peak_memory_in_bytes / 2**30 < usable


@pytest.mark.parametrize("mesh", [(), ("data=2", "fsdp=2", "tensor=2")])
def test_copies_for_a_checkpoint_go_to_host_memory(mesh):
    """Each byte once, replicas sharing the work; nothing moves between devices, and one layer at a time is held."""
    loaded = launch.load(["--config=configs/llama3_8b.py", *(f"--config.mesh.{m}" for m in mesh)])
    params = build(loaded.run, devices(parse("h200:8"))).state.params
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
        assert not COLLECTIVE.search(step.as_text())


def test_a_host_without_room_for_a_checkpoint_is_named():
    program = build(launch.load(["--config=configs/llama3_8b.py"]).run, devices(parse("h200:8")))
    memory.check_host_memory(program, 100.0)
    with pytest.raises(memory.OutOfMemory, match="takes 89.7. GiB; 64.00 GiB may be pinned"):
        memory.check_host_memory(program, 64.0)
