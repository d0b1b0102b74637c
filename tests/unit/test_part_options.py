"""The suite's options for a user's own part: mistakes in them are reported."""

import conftest
import pytest


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
def test_options_that_are_wrong(options, words):
    with pytest.raises(pytest.UsageError, match=words):
        for option in options:
            name, _, value = option.partition("=")
            conftest.own_part(value) if name == "--part" else conftest.own_key(value)
