"""Random settings, most of them invalid: a message's first remedy is typed, and no problem of its key is left."""

import functools
import random
import re
from typing import Any

import pytest
from remedies import named_fix
from test_refusals import EIGHT_CPUS, EIGHT_H200, TINY

from jaxtrain.config import launch, schema
from jaxtrain.config.hardware import Devices
from jaxtrain.config.schema import MESH_AXES, Problem, all_keys
from jaxtrain.data import loading
from jaxtrain.step.validate import validate_step

TINYS = loading.load_config([TINY]).requested  # key -> value
SECTIONS = ("model", "mesh", "pipeline", "moe", "parallel", "sharding", "attention", "remat", "dtypes", "fp8", "train", "loss")
SECTIONS += ("optimizer", "lora", "data", "precision")
ELSEWHERE = {"data.source", "data.eval_source", "data.tokenizer", "train.max_minutes", "train.timeouts"}
KEYS = [key for key in TINYS if key.partition(".")[0] in SECTIONS and key not in ELSEWHERE]
WHOLE = (0, 1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 16, 24, 47, 48, 64, 96, 100, 128, 200, 264, 384, 701)
FLOATS = (0.0, 0.5, 1.0, 2.0, 1e-5, 1e-46, 1e39, 32.0, 0.99999999, 1000.0)
TEXTS = {
    "lora.targets": ("wq,wx", "gate,up", "wq_up,wo"),
    "remat.tensors": ("q=keep", "qq=keep"),
    "train.batch_ramp": ("8:100", "12:5,20:9", "16:2,8:3", "x"),
    "fp8.exclude": ("wo", "mlp", "mlp.dwn"),
    "model.attention_pattern": ("lg", "lllg"),
}
MESHES = (
    (1, 4, 2, 1, 1, 1),
    (1, 2, 2, 2, 1, 1),
    (1, 2, 1, 1, 4, 1),
    (1, 4, 1, 1, 1, 2),
    (1, 1, 8, 1, 1, 1),
    (2, 1, 1, 4, 1, 1),
)
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 0, "num_kv_heads": 4}
Settings = dict[str, Any]


def draw(rng: random.Random) -> Settings:
    def one(key: str) -> Any:
        old, choices = TINYS[key], all_keys()[key].choices
        if key.startswith("sharding.rules."):
            return "+".join(rng.sample(MESH_AXES, rng.choice((0, 1, 2))))
        if isinstance(old, bool):
            return not old
        return rng.choice(WHOLE if isinstance(old, int) else FLOATS if isinstance(old, float) else choices or TEXTS[key])

    usable = [key for key in KEYS if not isinstance(TINYS[key], str) or all_keys()[key].choices or key in TEXTS]
    found = {key: one(key) for key in rng.sample(usable, rng.choice((1, 2, 2, 3)))}
    if rng.random() < 0.5:
        axes = ("data", "fsdp", "tensor", "stage", "seq", "expert")
        found |= {f"mesh.{axis}": size for axis, size in zip(axes, rng.choice(MESHES), strict=True)}
    if rng.random() < 0.25:
        found |= {"model.num_experts": rng.choice((4, 6, 8)), "lora.rank": rng.choice((0, 4))}
    if rng.random() < 0.12:
        found |= {f"model.{name}": size for name, size in LATENT.items()}
    return found


def problems(settings: Settings, devices: Devices) -> list[Problem]:
    tree: Settings = {}
    for key, value in (TINYS | settings).items():
        *path, name = key.split(".")
        functools.reduce(lambda tree, part: tree.setdefault(part, {}), path, tree)[name] = value
    run, wrong = schema.resolve(tree)
    return wrong + validate_step(run, devices)


def typed(fix: str) -> Settings:
    """Return the values of KEY=VALUE as they are typed; {} for a fix in words."""
    words = [word.partition("=") for word in fix.split()]
    if not all(key in TINYS for key, _, _ in words):
        return {}
    try:
        return {key: launch.parse_value(value.strip("'"), type(TINYS[key])) for key, _, value in words}
    except (ValueError, KeyError):
        return {}


@pytest.mark.parametrize("seed", range(12))
def test_the_remedies_of_random_mistakes_are_accepted(seed: int):
    rng, tried = random.Random(seed), 0
    for _ in range(20):
        devices, settings = rng.choice((EIGHT_CPUS, EIGHT_H200)), draw(rng)
        found = problems(settings, devices)
        for problem in found:
            if fix := typed(named_fix(problem)):
                tried += 1
                left = [other for other in problems(settings | fix, devices) if other.key == problem.key]
                before = {re.sub(r"[\d.]+", "", other.rule) for other in found if other is not problem}
                left = [other for other in left if re.sub(r"[\d.]+", "", other.rule) not in before]
                assert not left, (settings, str(problem), fix, left)
    assert tried > 5


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"model.num_heads": 6, "model.num_kv_heads": 3, "model.head_dim": 32, "mesh.tensor": 2}, "model.num_kv_heads", {2, 6}),
        ({"model.d_model": 9}, "model.d_model", {8, 16}),
        ({"data.seq_len": 2, "mesh.seq": 2, "mesh.tensor": 4}, "data.seq_len", {8}),
        ({"model.num_layers": 0, "mesh.stage": 4}, "model.num_layers", {4}),
        ({"model.num_kv_heads": 701}, "model.num_kv_heads", {4}),
        ({"model.num_heads": 0}, "model.num_heads", {4}),
    ],
)
def test_numbers_keep_all_rules_of_their_key(settings: Settings, key: str, value: set[int]):
    (problem,) = problems(settings, EIGHT_CPUS)
    assert problem.key == key
    assert {int(number) for number in re.findall(r"\d+", problem.remedy.partition(", or ")[0])} == value
