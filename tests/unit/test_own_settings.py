"""The section `own`: settings that a user's own family, loss, optimizer or data source receives."""

import copy
import pickle

import helpers
import jax
import pytest

from jaxtrain.config import schema
from jaxtrain.config.schema import Own, own_settings
from jaxtrain.data import loading
from jaxtrain.step import resume

FILE = """
from jaxtrain.config import default_config

def get_config(arg=None):
    config = default_config()
    config.loss.name = "mylab.losses:focal"
    config.own.gamma = 2.0
    config.own.layers = 3
    config.own.gated = True
    config.own.kind = "focal"
    return config
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "lab.py"
    path.write_text(FILE, encoding="utf-8")
    return path


def load(file, *argv):
    return loading.load_config([f"--config={file}", *argv])


def test_keys_of_the_file_keep_their_type_on_the_command_line(file):
    loaded = load(file, "--config.own.gamma=3", "--config.own.gated=false", "--config.own.kind=plain")
    assert not loaded.problems
    assert loaded.run.own == (("gamma", 3.0), ("gated", False), ("kind", "plain"), ("layers", 3))
    assert loaded.origins["own.gamma"] == "command line" and loaded.origins["own.layers"] == "file"
    assert schema.to_dict(loaded.run)["own"] == {"gamma": 3.0, "layers": 3, "gated": False, "kind": "plain"}
    assert schema.resolve(schema.to_dict(loaded.run))[0] == loaded.run


@pytest.mark.parametrize(
    ("argument", "key", "named"),
    [
        ("--config.own.layers=2.5", "own.layers", "whole number"),
        ("--config.own.width=2", "own.width", "config.own.width = "),
        ("--config.own.gama=3", "own.gama", "own.gamma"),
        ("--config.loss.gama=3", "loss.gama", "config.own.gama"),
        ("--config.own=3", "own", "own.gamma"),
    ],
)
def test_other_keys_are_refused_with_one_problem(file, argument, key, named):
    (problem,) = load(file, argument).problems
    assert problem.key == key and named in str(problem)


def test_a_key_without_a_file_names_the_file(tmp_path):
    file = tmp_path / "plain.py"
    file.write_text("from jaxtrain.config import default_config as get_config\n", encoding="utf-8")
    (problem,) = load(file, "--config.own.gamma=3").problems
    assert problem.key == "own.gamma" and "config.own.gamma = " in problem.remedy


@pytest.mark.parametrize("value", [None, [1, 2], {"a": 1}, float("nan"), float("inf"), 2 + 1j])
def test_a_value_is_true_or_false_a_number_or_text(value):
    run, problems = schema.resolve({"own": {"x": value}})
    assert [p.key for p in problems] == ["own.x"] and not run.own


@pytest.mark.parametrize("name", ["_x", "a b", "2x", "unread", ""])
def test_a_name_is_an_attribute(name):
    _, problems = schema.resolve({"own": {name: 1}})
    assert [p.key for p in problems] == [f"own.{name}"]


def test_parts_receive_attributes_and_what_nobody_reads_is_known():
    own = own_settings((("gamma", 2.0), ("gated", False)))
    assert own.unread == ["gamma", "gated"]
    assert own.gamma == 2.0 and getattr(own, "beta", 0.5) == 0.5
    assert own.unread == ["gated"]
    with pytest.raises(AttributeError, match=r"own\.beta"):
        _ = own.beta
    assert own_settings((("gamma", 2), ("gated", False))) != own  # an integer makes other programs than a float
    same = Own((("gamma", 2.0), ("gated", False)))
    assert own == same and hash(own) == hash(same) and own != Own((("gamma", 1.0), ("gated", False)))
    assert copy.deepcopy(own) == pickle.loads(pickle.dumps(own)) == own


def test_a_program_hands_them_to_family_loss_and_optimizer():
    parts = {"model.family": "own_lab:Family", "loss.name": "own_lab:focal", "optimizer.name": "own_lab:slow_adamw"}
    settings = {"gain": 1.5, "gamma": 2.5, "slow": 0.5, "unknown": 1}
    run = helpers.tiny({**parts, "own": settings})
    program = helpers.program(run)
    jax.eval_shape(program.train_step, program.state, program.batch)
    assert own_settings(run.own).unread == ["unknown"]


@pytest.mark.parametrize(("before", "after"), [({"gamma": 2.0}, {"gamma": 3.0}), ({}, {"gamma": 3.0}), ({"gamma": 2.0}, {})])
def test_a_change_on_resume_must_be_allowed(before, after):
    old, new = (schema.to_dict(schema.resolve({"own": own})[0]) for own in (before, after))
    notes, problems = resume.compare_configs(old, new)
    assert [p.key for p in problems] == ["own.gamma"] and "allow_change=own.gamma" in problems[0].remedy and not notes
    notes, problems = resume.compare_configs(old, new, "own.gamma")
    assert len(notes) == 1 and not problems
    assert resume.compare_configs(old, old) == ([], [])
    _, problems = resume.compare_configs(old, new, "own.gamma,own.gama")
    assert [(p.key, p.value) for p in problems] == [("checkpoint.allow_change", "own.gama")]
