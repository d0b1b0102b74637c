"""Each broken part fails the test of test_contract.py whose rule it breaks. Mistakes in the suite's options are reported."""

import json

import broken_parts
import conftest
import helpers
import pytest
import test_contract as contract

from jaxtrain import main
from jaxtrain.config import launch
from jaxtrain.config.schema import RunConfig


def run_with(key: str, name: str, **more: str) -> RunConfig:
    return helpers.tiny({**contract.SIZES, "model.num_layers": 1, **more, key: f"broken_parts:{name}"})


BROKEN = {
    ("model.family", "unruled"): contract.test_family_builds,
    ("model.family", "dead"): contract.test_family_gradients_live,
    ("model.family", "peeking"): contract.test_family_is_causal,
    ("model.family", "mixing"): contract.test_family_keeps_documents_apart,
    ("model.family", "forgetful"): contract.test_family_decodes_with_a_cache_what_it_computes_without,
    ("loss.name", "leaning"): contract.test_loss_drops_tokens_of_weight_zero,
    ("loss.name", "half_gradient"): contract.test_loss_has_the_gradient_of_its_value,
    ("optimizer.name", "restless"): contract.test_optimizer_leaves_weights_that_have_no_gradient,
    ("optimizer.name", "whole_moments"): contract.test_optimizer_state_is_split_like_the_parameters,
    ("data.source", "Counting"): contract.test_source_batches_follow_from_the_step,
    ("data.source", "Crossing"): contract.test_source_documents_are_consistent,
    ("data.source", "Shifted"): contract.test_source_documents_are_consistent,
}


@pytest.mark.parametrize("part", BROKEN, ids=lambda part: part[1])
def test_what_breaks_a_contract_is_found(part):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        BROKEN[part](part, run_with(*part))


def test_an_axis_of_ones_own_needs_only_its_rule():
    rule = dict([conftest.own_key("sharding.rules.colour=fsdp")])
    part = "model.family", "unruled"
    contract.test_family_builds(part, run_with(*part, **rule))


def test_a_setting_of_ones_own_has_the_type_of_its_text():
    given = ("own.gain=1.5", "own.layers=2", "own.gated=true", "own.kind=focal")
    settings = dict(map(conftest.own_key, given))
    assert settings == {"own.gain": 1.5, "own.layers": 2, "own.gated": True, "own.kind": "focal"}
    assert run_with("optimizer.name", "restless", **settings).own == tuple(
        sorted((key.removeprefix("own."), value) for key, value in settings.items())
    )


@pytest.mark.parametrize(
    "option",
    [
        "--part=helpers:WiderFamily",
        "--part=model.family=llama",
        "--part=loss.name=no_such_module_here:loss",
        "--part=loss.name=helpers:hlaf",
        "--part-config=model.d_modle=3",
        "--part-config=model.d_model=x",
    ],
)
def test_options_that_are_wrong(option):
    name, _, value = option.partition("=")
    with pytest.raises(pytest.UsageError):
        conftest.own_part(value) if name == "--part" else conftest.own_key(value)


def test_a_run_ends_with_the_line_of_the_broken_part(tmp_path, capsys):
    """An error of a part after the start of the run: code 1, the line first, and the line in receipt.json and log.txt."""
    tiny = "data.source=synthetic model.num_layers=1 model.d_model=32 model.d_ff=32 data.seq_len=32 train.global_batch=8"
    given = [f"--config.{setting}" for setting in (*tiny.split(), "train.steps=1", "loss.name=broken_parts:misspelt")]
    assert main.main([f"--config={launch.REPO}/configs/tiny.py", f"--workdir={tmp_path}", *given]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "loss.name = 'broken_parts:misspelt': KeyError" in line and f"{broken_parts.__file__}:" in line
    attempt = json.loads((tmp_path / "receipt.json").read_text())
    assert attempt["exit_code"] == 1 and attempt["reason"] in line
    log = (tmp_path / "log.txt").read_text()
    assert attempt["reason"] in log and "Traceback" in log
