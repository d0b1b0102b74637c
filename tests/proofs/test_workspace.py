"""cuDNN's workspace in plans: the formula is cuDNN's own answer, and a plan counts it once, while the call runs.

Asked of cuDNN where the extra `plan-cudnn` is installed, for a described H200. No GPU and no driver.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from jaxtrain import launch
from jaxtrain.kernels.attention import cudnn
from jaxtrain.plan.compile import compile_step
from jaxtrain.plan.make import read_plan
from jaxtrain.plan.numbers import size
from jaxtrain.plan.program import assignment, buffers, hlo, workspace
from jaxtrain.plan.program.assignment import ALLOCATE, FREE, Allocation, Assignment, Event, Value
from jaxtrain.plan.report import figures
from jaxtrain.plan.topology import parse

ALIGNMENT = 1024  # bytes that cuDNN adds to the formula at most, for each sequence that is described to it
LLAMA3_8B = {"rows": 1, "documents": 33, "T": 8192, "S": 8192, "N": 32, "K": 8, "H": 128}

# What cuDNN 9.19.0 answered for an H200: (case, bytes).
ANSWERS = {
    "unpacked": (LLAMA3_8B | {"documents": 0}, 269_484_288),
    "8 documents": (LLAMA3_8B | {"documents": 9}, 2_425_359_104),
    "32 documents": (LLAMA3_8B, 8_892_982_016),
    "window": (LLAMA3_8B | {"window": 1024}, 8_892_982_016),
    "64 heads": (LLAMA3_8B | {"N": 64}, 17_785_955_072),
    "4 rows, head_dim 64": (LLAMA3_8B | {"rows": 4, "H": 64}, 17_855_186_688),
    "one group of heads": (LLAMA3_8B | {"N": 4, "K": 1}, 1_111_630_592),
    "as many keys as queries": (LLAMA3_8B | {"K": 32}, 4_463_801_344),
    "head_dim 256": (LLAMA3_8B | {"H": 256}, 17_751_352_064),
    "256 documents, head_dim 96": (LLAMA3_8B | {"documents": 257, "N": 8, "K": 2, "H": 96}, 13_002_670_848),
    "256 documents": (LLAMA3_8B | {"documents": 257}, 69_257_462_528),
    "odd length": (LLAMA3_8B | {"documents": 5, "T": 1000, "S": 1000, "N": 8, "K": 2}, 41_121_792),
    "off the diagonal": (LLAMA3_8B | {"documents": 2, "T": 4096, "causal": False}, 403_703_040),
    "off the diagonal, unpacked": (LLAMA3_8B | {"documents": 0, "S": 2048, "causal": False}, 168_820_992),
    "off the diagonal, no groups": (LLAMA3_8B | {"documents": 0, "T": 2048, "K": 32, "causal": False}, 33_816_832),
    "deterministic": (LLAMA3_8B | {"documents": 0, "deterministic": True}, 4_430_233_856),
    "deterministic, 32 documents": (LLAMA3_8B | {"deterministic": True}, 146_197_717_760),
    "deterministic, off the diagonal": (
        LLAMA3_8B | {"documents": 2, "T": 4096, "causal": False, "deterministic": True},
        4_564_452_608,
    ),
}


def sequences(case: dict) -> int:
    return case["rows"] * max(1, case["documents"])


def near(case: dict, said: int, counted: int) -> bool:
    return 0 <= said - counted <= ALIGNMENT * sequences(case)


@pytest.mark.parametrize("name", ANSWERS)
def test_the_formula_gives_what_cudnn_answered(name):
    case, said = ANSWERS[name]
    sizes = (case[key] for key in ("T", "S", "N", "K", "H"))
    counted = cudnn.workspace_bytes(sequences(case), *sizes, deterministic=case.get("deterministic", False))
    assert near(case, said, counted)


def test_the_formula_gives_what_cudnn_answers():
    """All in one child process: cuDNN is loaded before JAX, and this process has JAX."""
    cases = [case for case, _ in ANSWERS.values()]
    child = [sys.executable, str(pathlib.Path(__file__).parents[1] / "cudnn_workspaces.py")]
    asked = subprocess.run(child, input=json.dumps(cases), text=True, capture_output=True, timeout=400)
    if asked.returncode == 3:
        pytest.skip(f"cuDNN cannot be asked: {asked.stdout.strip()}")
    assert not asked.returncode, asked.stderr
    for (name, (case, recorded)), line in zip(ANSWERS.items(), asked.stdout.splitlines(), strict=True):
        who, said, otherwise, counted = json.loads(line)
        assert (who, otherwise) == ("cudnn 9.19.0", "formula")
        assert said == recorded, name
        assert near(case, said, counted), name


# ---- A plan counts it once


def heap_of(*sizes: int, call: int) -> tuple[Assignment, str]:
    """Values that come and go one after another, and the name of the instruction that makes number `call`."""
    values = {n: Value(n, size, f"i{n}", (0,), 0) for n, size in enumerate(sizes, 1)}
    heap = tuple(Event(kind, n, f"i{n}", 0) for n in values for kind in (ALLOCATE, FREE))
    gap = 5
    return Assignment(values, (Allocation(max(sizes) + gap, None, False, False, False, 0, tuple(values)),), (heap,)), f"i{call}"


@pytest.mark.parametrize(("taken", "peak"), [(10, 100), (59, 100), (75, 115)])
def test_workspace_is_held_during_its_call_alone(taken, peak):
    """Beside a call's result of 40; the peak of 100 is elsewhere."""
    before, call = heap_of(100, 40, 70, call=2)
    after = workspace.placed(before, workspace.Workspace({call: taken}, "formula"))
    held = [bytes for bytes, _ in assignment.replay(after, assignment.device_heap(after))]
    assert max(held) == peak and held.count(40 + taken) == 1
    assert workspace.growth_gib(before, after) * 2**30 == peak - 100, "gaps stay as they are"
    assert [a.size for a in after.allocations] == [peak + 5]


def test_results_that_share_memory_are_there_before_the_workspace():
    before, call = heap_of(100, 40, call=2)
    (heap,) = before.heaps
    late = Value(3, 30, call, (1,), 0)
    events = (*heap[:3], Event(ALLOCATE, 3, call, 0), *heap[3:], Event(FREE, 3, call, 0))
    shares = dataclasses.replace(before, values=before.values | {3: late}, heaps=(events,))
    after = workspace.placed(shares, workspace.Workspace({call: 200}, "formula"))
    held = [bytes for bytes, _ in assignment.replay(after, assignment.device_heap(after))]
    assert max(held) == 40 + 30 + 200 and held[-1] == 0


def test_a_call_without_results_in_the_heap_is_named():
    before, _ = heap_of(100, call=1)
    with pytest.raises(assignment.AssignmentError, match="bwd.7"):
        workspace.placed(before, workspace.Workspace({"bwd.7": 1}, "formula"))


@pytest.fixture(scope="module")
def small():
    keys = ("model.num_layers=2", "model.vocab_size=1024", "data.seq_len=2048", "train.global_batch=8", "train.grad_accum=1")
    keys += ("data.max_segments=256",)  # so that the peak is there
    run = launch.load(["--config=configs/llama3_1b.py", *(f"--config.{key}" for key in keys)]).run
    machine = parse("h200:8")
    step = compile_step(run, machine)
    return run, step, read_plan(step, run, machine)


def test_a_plan_counts_the_workspace_once(small):
    run, step, plan = small
    memory, counted = plan.memory, workspace.read(hlo.parse(step.text), step.chosen.options)
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
    assert f"cuDNN workspace {size(memory.workspace_gib)}, by formula" in figures.peak_at(plan)


def test_a_program_that_says_its_workspace_is_taken_at_its_word(small):
    """As one that was compiled beside cuDNN does."""
    _, step, _ = small
    calls = "\n".join(
        line.replace("u8[0]", "u8[777]") if workspace.BACKWARD in line else line for line in step.text.splitlines()
    )
    said = workspace.read(hlo.parse(calls), step.chosen.options)
    assert said.by.startswith("cudnn") and {*said.bytes.values()} == {777}
    before = assignment.read(step.buffers)
    assert workspace.placed(before, said) is before


def test_deterministic_kernels_take_more(small):
    _, step, _ = small
    module = hlo.parse(step.text)
    plain, repeatable = (workspace.read(module, options) for options in ({}, {"xla_gpu_deterministic_ops": True}))
    assert repeatable.largest > plain.largest
