"""The class of each array in a plan's memory, such as gradients or temporaries."""

import pytest

from jaxtrain.plan.program import assignment, buffers, hlo


@pytest.mark.parametrize(
    "op_name, kind",
    [
        ("transpose(jvp(layers))/while/body/checkpoint/mlp/BTD,FD->BTF/dot_general", "temporaries"),
        ("transpose(jvp(layers))/while/body/checkpoint/mlp/BTD,BTF->DF/dot_general", "gradients"),
        ("transpose(jvp(layers))/while/body/checkpoint/mlp/shard_map/reduce_scatter", "gradients"),
        ("jvp(loss)/shard_map/while/body/exp", "logits and loss"),
    ],
)
def test_as_many_tokens_as_a_weight_has_rows_make_no_gradient(op_name, kind):
    """With sequences of 8192 tokens and a model dimension of 8192, activations have the shape of a weight."""
    metadata = f'metadata={{op_name="jit(train_step)/{op_name}"}}'
    module = hlo.parse_hlo(
        "HloModule m, is_scheduled=true\n\n"
        "ENTRY %main (p: bf16[8192,28672]) -> bf16[8192,28672] {\n"
        '  %p = bf16[8192,28672]{1,0} parameter(0), metadata={op_name="x"}\n'
        f"  ROOT %y = bf16[8192,28672]{{1,0}} negate(%p), {metadata}\n"
        "}\n"
    )
    facts = buffers.BufferFacts(module, frozenset({(8192, 28672)}), frozenset({(1024, 28672)}), {})
    assert buffers.classify(facts, assignment.Value(8192 * 28672 * 2, "y", ())) == (kind, "")


def test_arguments_have_the_class_of_their_path():
    classes = {
        "state.params['layers']['mlp']['gate']": "parameters",
        "state.optimizer[0].mu['head']": "first moment",
        "state.optimizer[0].nu['head']": "second moment",
        "state.optimizer[0].count": "other optimizer state",
        "state.guard['losses']": "other optimizer state",
        "state.ema['layers']['mlp']['gate']": "average of weights",
        "batch['tokens']": "batch",
        "rate": "other arguments",
    }
    assert {name: buffers.argument_class(name) for name in classes} == classes
