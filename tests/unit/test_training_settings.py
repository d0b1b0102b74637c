"""Refused training settings: each refusal names the key, the rule that is broken, and a fix."""

import helpers
import jax
import pytest

from jaxtrain import validate
from jaxtrain.config import ConfigError
from jaxtrain.hardware import Devices
from jaxtrain.sharding import LayoutError
from jaxtrain.train.program import build

MUON, LORA, OFFLOAD = {"optimizer.name": "muon"}, {"lora.rank": 3, "lora.alpha": 6.0}, {"optimizer.offload": "moments"}
INT8 = {"dtypes.m": "int8", "dtypes.v": "int8"}
OWN = {"optimizer.name": "helpers:slower_adamw"}
WIDE = {"model.head_dim": 16, "model.d_ff": 512}


def group(text, **more):
    return {"optimizer.groups": text, **more}


# Settings, the refused key, words of the rule.
REFUSED = [
    (INT8 | {"model.d_ff": 100, "model.head_dim": 16}, "dtypes.m", "no dimension of mlp.gate"),
    (INT8 | {"model.d_model": 256, "mesh.tensor": 4, "model.head_dim": 32}, "dtypes.m", "would lie on two devices"),
    (INT8 | {"model.d_ff": 16, "model.d_model": 16, "model.head_dim": 2}, "dtypes.m", "no matrix of the layers"),
    (MUON | WIDE | {"dtypes.v": "int8"}, "dtypes.v", "no second moment"),
    (group("head"), "optimizer.groups", "PATTERN:SETTING=VALUE"),
    (group("head:lr"), "optimizer.groups", "SETTING=VALUE"),
    (group("head:rate=1"), "optimizer.groups", "no setting 'rate'"),
    (group("head:lr=fast"), "optimizer.groups", "must be a number"),
    (group("head:lr=-1"), "optimizer.groups", "must be a number"),
    (group("head:weight_decay=nan"), "optimizer.groups", "must be a number"),
    (group("head:lr=1,lr=2"), "optimizer.groups", "set twice"),
    (group("head:lr=1;head:weight_decay=0"), "optimizer.groups", "has a group already"),
    (MUON | group("head:optimizer=sgd"), "optimizer.groups", "no such choice"),
    (group("head:optimizer=muon"), "optimizer.groups", "needs optimizer.name = muon"),
    (OWN | group("head:lr=1"), "optimizer.groups", "would ignore them"),
    ({"optimizer.offload": "params"}, "optimizer.offload", "read twice in each microbatch"),
    ({"optimizer.offload": "all"}, "optimizer.offload", ""),
    (OWN | OFFLOAD, "optimizer.offload", "helpers:slower_adamw"),
    (LORA | {"lora.targets": "wq,w2"}, "lora.targets", ""),
    (LORA | {"lora.targets": " "}, "lora.targets", ""),
    (LORA | {"train.freeze": "embed.*"}, "train.freeze", ""),
    (LORA | {"init.what": "weights+optimizer"}, "init.what", ""),
    (LORA | {"dtypes.m": "int8"}, "dtypes.m", ""),
    (LORA | {"lora.alpha": 0.0}, "lora.alpha", ""),
]
ALLOWED = [
    MUON | WIDE | {"dtypes.v": "int8", "optimizer.groups": "*.gate:optimizer=adamw"},
    MUON | WIDE | {"dtypes.m": "int8"},
    OFFLOAD,
    {"train.freeze": "embed.*"},
]


def problems(settings):
    run = helpers.tiny(settings)
    return validate.validate_step(run, Devices("cpu", "cpu", settings.get("mesh.tensor", 1), 8.0, "test"))


@pytest.mark.parametrize(("settings", "key", "rule"), REFUSED)
def test_a_setting_is_refused_by_its_key_with_the_rule_and_a_fix(settings, key, rule):
    found = [p for p in problems(settings) if p.key == key]
    assert len(found) == 1 and rule in found[0].rule and found[0].remedy


@pytest.mark.parametrize("settings", ALLOWED)
def test_what_stands_beside_a_refusal_is_allowed(settings):
    assert not problems(settings)


# Rules that need the model's own parameters: settings, key, words.
REFUSED_WHEN_BUILT = [
    ({"train.freeze": "embed.*,layers.7.mlp.*"}, "train.freeze", "no parameter is called layers.7.mlp.*"),
    ({"train.freeze": "wq"}, "train.freeze", "no parameter is called wq"),
    ({"train.freeze": "*"}, "train.freeze", "freezes all parameters"),
    (OFFLOAD | {"train.freeze": "layers.*"}, "optimizer.offload", "trains no parameters under 'layers'"),
    (LORA | {"lora.targets": "experts"}, "lora.targets", "gives no adapter to experts"),
]


@pytest.mark.parametrize(("settings", "key", "rule"), REFUSED_WHEN_BUILT)
def test_a_setting_that_does_not_fit_the_model_is_refused(settings, key, rule):
    with pytest.raises(ConfigError) as error:
        build(helpers.tiny(settings), jax.devices()[:1])
    (problem,) = error.value.problems
    assert (problem.key, bool(problem.remedy)) == (key, True) and rule in problem.rule


def test_a_block_on_two_devices_is_no_layout():
    with pytest.raises(LayoutError, match="block"):
        helpers.program(helpers.tiny(INT8 | {"model.d_model": 256, "mesh.tensor": 4, "model.head_dim": 32}))
