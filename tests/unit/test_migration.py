"""docs/migration.md: its table is the one that benchmarks.migration writes, and its defaults are those of the config."""

import re

import pytest

from benchmarks import migration
from jaxtrain import launch
from jaxtrain.config import declared, default_config, flatten
from jaxtrain.synonyms import nearest_keys

KEYS = list(declared())
PAGE = migration.PAGE.read_text()
CELLS = [(setting, trainer) for setting in migration.SETTINGS for trainer in migration.TRAINERS]


def test_the_table_is_up_to_date():
    assert migration.page() == PAGE, "run: python -m benchmarks.migration --write"
    assert len(PAGE.encode()) <= 6 * 1024 and len(migration.SETTINGS) == len({*migration.SETTINGS}) == 20


def test_settings_of_the_table_are_keys():
    assert [s for s in migration.SETTINGS if s not in KEYS] == [migration.DERIVED, "--workdir"]
    assert not [name for name in migration.USUAL if f"`{name}`" not in PAGE]


@pytest.mark.parametrize(("setting", "trainer"), CELLS)
def test_a_flag_of_the_table_is_answered_with_its_key(setting: str, trainer: str):
    cell = migration.flag(trainer, setting)
    no_flag = (setting.startswith("mesh.") and trainer != "MaxText") or setting in ("train.global_batch", "train.grad_accum")
    assert cell or no_flag
    for name in re.findall(r"`([^`]+)`", cell):
        answers = [answer.partition("=")[0] for answer in nearest_keys(name, KEYS)]
        assert name in KEYS or ("train.global_batch" if setting == migration.DERIVED else setting) in answers


def test_defaults_are_those_of_the_config():
    _, _, rest = PAGE.partition("## Difference 2: defaults")
    found = dict(re.findall(r"`([a-z_.]+)=([^`]+)`", rest.partition("## Difference 3")[0]))
    defaults = dict(flatten(default_config()))
    assert len(found) >= 8
    assert {key: launch.parse(value, type(defaults[key])) for key, value in found.items()} == {k: defaults[k] for k in found}


def test_quoted_answers_are_printed():
    (block,) = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    command, *answers = block.splitlines()
    loaded = launch.load(command.split()[1:], {"workdir": ""}, {"explain": "text"})
    assert [f"error: {problem}" for problem in loaded.problems] == answers
