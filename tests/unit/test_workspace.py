"""cuDNN's workspace: the formula gives what cuDNN answered, and a plan holds it while the call runs."""

import dataclasses

import pytest
from cudnn_answers import ANSWERS, near, sequences

from jaxtrain.kernels.attention import cudnn
from jaxtrain.plan.program import assignment, buffers, hlo, workspace
from jaxtrain.plan.program.assignment import ALLOCATE, FREE, Allocation, Assignment, Event, Value


@pytest.mark.parametrize("name", ANSWERS)
def test_the_formula_gives_what_cudnn_answered(name):
    case, said = ANSWERS[name]
    sizes = (case[key] for key in ("T", "S", "N", "K", "H"))
    counted = cudnn.workspace_bytes(sequences(case), *sizes, deterministic=case.get("deterministic", False))
    assert near(case, said, counted)


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


# ---- Classes of buffers


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


@pytest.mark.parametrize(
    ("op_name", "kind"),
    [
        ("state.params['layers']['mlp']['gate']", "parameters"),
        ("state.optimizer[0].mu['head']", "first moment"),
        ("state.optimizer[0].nu['head']", "second moment"),
        ("state.optimizer[0].count", "other optimizer state"),
        ("state.guard['losses']", "other optimizer state"),
        ("batch['tokens']", "batch"),
        ("rate", "other arguments"),
    ],
)
def test_arguments_have_the_class_of_their_path(op_name, kind):
    assert buffers.argument_class(op_name) == kind
