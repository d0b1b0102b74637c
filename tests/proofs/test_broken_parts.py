"""test_contract.py detects families, losses, optimizers and sources that break its rules.

Each broken part here fails the test of the rule that it breaks, with a message that gives the rule.
"""

import helpers
import pytest
import test_contract as contract

from jaxtrain.config import RunConfig


def run_with(key: str, name: str) -> RunConfig:
    return helpers.tiny({**contract.SIZES, "model.num_layers": 1, key: f"broken_parts:{name}"})


# Part -> (test that must fail, words of its message).
BROKEN = {
    ("model.family", "unruled"): (contract.test_family_builds, "axes of parameters have rules.*'colour'"),
    ("model.family", "dead"): (contract.test_family_gradients_live, "every parameter learns: the gradient of more"),
    ("model.family", "peeking"): (contract.test_family_is_causal, "attention is causal"),
    ("model.family", "mixing"): (contract.test_family_keeps_documents_apart, "documents of a packed row do not see each other"),
    ("model.family", "forgetful"): (
        contract.test_family_decodes_with_a_cache_what_it_computes_without,
        "decoding token by token",
    ),
    ("loss.name", "mean"): (contract.test_loss_is_a_sum_over_tokens, "weighted sum over tokens"),
    ("loss.name", "counting_all"): (contract.test_loss_drops_tokens_of_weight_zero, "a token of weight 0 has no gradient"),
    ("loss.name", "leaning"): (contract.test_loss_drops_tokens_of_weight_zero, "a token of weight 0 has no gradient"),
    ("loss.name", "half_gradient"): (contract.test_loss_has_the_gradient_of_its_value, "the gradient of hidden states is that"),
    ("optimizer.name", "uphill"): (contract.test_optimizer_goes_downhill, "the first step goes downhill"),
    ("optimizer.name", "restless"): (contract.test_optimizer_leaves_weights_that_have_no_gradient, "changes nothing: it moves"),
    ("optimizer.name", "whole_moments"): (contract.test_optimizer_state_is_split_like_the_parameters, "is made of trees"),
    ("optimizer.name", "fixed_moment"): (contract.test_optimizer_state_is_split_like_the_parameters, "is split like it"),
    ("data.source", "Wide"): (contract.test_source_gives_the_arrays_of_a_batch, "tokens is int32, not int64"),
    ("data.source", "Counting"): (contract.test_source_batches_follow_from_the_step, "function of its step alone: tokens"),
    ("data.source", "Crossing"): (contract.test_source_documents_are_consistent, "last token of a document has no target"),
    ("data.source", "Shifted"): (contract.test_source_documents_are_consistent, "positions begin at 0"),
    ("data.source", "Timeless"): (contract.test_source_epochs_go_forward, "epochs go forward"),
}


@pytest.mark.parametrize(
    ("part", "caught"), BROKEN.items(), ids=lambda x: x[1] if isinstance(x[1], str) and "." not in x[1] else ""
)
def test_what_breaks_a_contract_is_named(part, caught):
    test, words = caught
    with pytest.raises((AssertionError, pytest.fail.Exception), match=words):
        test(part, run_with(*part))


def test_an_axis_of_ones_own_needs_only_its_rule():
    import conftest

    rule = dict([conftest.own_key("sharding.rules.colour=fsdp")])
    run = helpers.tiny({**contract.SIZES, "model.num_layers": 1, **rule, "model.family": "broken_parts:unruled"})
    contract.test_family_builds(("model.family", "broken_parts:unruled"), run)
