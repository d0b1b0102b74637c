"""The contract tests catch parts that break them, and `--part` takes a part of one's own and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import helpers
import pytest
import test_contract as contract

from jaxtrain.config import RunConfig

REPO = Path(__file__).resolve().parents[2]


def run_with(key: str, name: str) -> RunConfig:
    return helpers.tiny({**contract.SIZES, "model.num_layers": 1, key: f"broken_parts:{name}"})


# Part -> (test that must fail, words that must stand in its message).
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


def tried(*options: str) -> tuple[int, str]:
    """Exit code and output of the suite with these options."""
    env = os.environ | {"PYTHONPATH": f"{REPO}:{REPO / 'tests'}"}
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(line, cwd=REPO, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_part_takes_only_what_is_of_its_kind():
    code, said = tried("--part=data.source=broken_parts:Shifted", "--part-config=data.seq_len=32", "--tb=line")
    assert code == 1 and "positions begin at 0 in each document of a row" in said
    assert "1 failed, 3 passed" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--part=helpers:WiderFamily"], "must be KEY=package.module:name, with KEY one of model.family"),
        (["--part=model.family=llama"], "must be model.family=package.module:name"),
        (["--part=loss.name=no_such_module_here:loss"], "no_such_module_here cannot be imported"),
        (["--part=loss.name=helpers:hlaf"], "helpers.py defines no hlaf"),
        (["--part=loss.name=helpers:half_loss", "--part-config=model.d_modle=3"], "Did you mean model.d_model?"),
        (["--part=loss.name=helpers:half_loss", "--part-config=model.d_model=x"], "model.d_model must be int"),
    ],
    ids=lambda x: x[-1] if isinstance(x, list) else "",
)
def test_options_that_are_wrong(options, words, monkeypatch):
    import conftest

    monkeypatch.syspath_prepend(REPO / "tests")
    with pytest.raises(pytest.UsageError, match=words):
        for option in options:
            name, _, value = option.partition("=")
            conftest.own_part(value) if name == "--part" else conftest.own_key(value)
