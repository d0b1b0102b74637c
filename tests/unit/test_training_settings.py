"""Refused training settings: each refusal names the key and a fix."""

import helpers
import jax
import pytest

from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import ConfigError
from jaxtrain.step import validate
from jaxtrain.step.program import build_program

MUON, LORA, OFFLOAD = {"optimizer.name": "muon"}, {"lora.rank": 3, "lora.alpha": 6.0}, {"optimizer.offload": "moments"}
INT8 = {"dtypes.m": "int8", "dtypes.v": "int8"}
OWN = {"optimizer.name": "helpers:slower_adamw"}
WIDE = {"model.head_dim": 16, "model.d_ff": 512}


def group(text, **more):
    return {"optimizer.groups": text, **more}


# The refused key -> settings.
REFUSED = {
    "dtypes.m": [
        INT8 | {"model.d_ff": 100, "model.head_dim": 16},
        INT8 | {"model.d_model": 256, "mesh.tensor": 4, "model.head_dim": 32},
        INT8 | {"model.d_ff": 16, "model.d_model": 16, "model.head_dim": 2},
        LORA | {"dtypes.m": "int8"},
    ],
    "dtypes.v": [MUON | WIDE | {"dtypes.v": "int8"}],
    "optimizer.groups": [
        *(group(text) for text in ("head", "head:lr", "head:rate=1", "head:lr=fast", "head:lr=-1", "head:weight_decay=nan")),
        *(group(text) for text in ("head:lr=1,lr=2", "head:lr=1;head:weight_decay=0", "head:optimizer=muon")),
        MUON | group("head:optimizer=sgd"),
        OWN | group("head:lr=1"),
    ],
    "optimizer.offload": [{"optimizer.offload": "params"}, {"optimizer.offload": "all"}, OWN | OFFLOAD],
    "lora.targets": [LORA | {"lora.targets": "wq,w2"}, LORA | {"lora.targets": " "}],
    "lora.alpha": [LORA | {"lora.alpha": 0.0}],
    "train.freeze": [LORA | {"train.freeze": "embed.*"}],
    "init.what": [LORA | {"init.what": "weights+optimizer"}],
}
ALLOWED = [
    MUON | WIDE | {"dtypes.v": "int8", "optimizer.groups": "*.gate:optimizer=adamw"},
    MUON | WIDE | {"dtypes.m": "int8"},
    OFFLOAD,
    {"train.freeze": "embed.*"},
]


def problems(settings):
    run = helpers.tiny(settings)
    return validate.validate_step(run, Devices("cpu", "cpu", settings.get("mesh.tensor", 1), 8.0, "test"))


@pytest.mark.parametrize(("key", "settings"), [(key, settings) for key, several in REFUSED.items() for settings in several])
def test_a_setting_is_refused_by_its_key_with_a_fix(key, settings):
    (found,) = (p for p in problems(settings) if p.key == key)
    assert found.rule and found.remedy


@pytest.mark.parametrize("settings", ALLOWED)
def test_what_stands_beside_a_refusal_is_allowed(settings):
    assert not problems(settings)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"train.freeze": "embed.*,layers.7.mlp.*"}, "train.freeze"),
        ({"train.freeze": "*"}, "train.freeze"),
        (OFFLOAD | {"train.freeze": "layers.*"}, "optimizer.offload"),
        (LORA | {"lora.targets": "experts"}, "lora.targets"),
    ],
)
def test_a_setting_that_does_not_fit_the_model_is_refused(settings, key):
    with pytest.raises(ConfigError) as error:
        build_program(helpers.tiny(settings), jax.devices()[:1])
    (problem,) = error.value.problems
    assert (problem.key, bool(problem.remedy)) == (key, True)


def test_a_block_on_two_devices_is_no_layout():
    with pytest.raises(ConfigError):
        helpers.program(helpers.tiny(INT8 | {"model.d_model": 256, "mesh.tensor": 4, "model.head_dim": 32}))
