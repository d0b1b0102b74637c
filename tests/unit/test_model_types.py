"""Model types without a family: the tables of them, and the refusals, whose fixes work."""

import json

import hugging_face
import pytest

from benchmarks import model_types
from jaxtrain.hf.folder import model_of, open_folder
from jaxtrain.models import FAMILIES
from jaxtrain.models.hf_keys import FAMILY
from jaxtrain.models.hugging_face import HuggingFaceError, format_of, not_supported
from jaxtrain.models.not_supported import GROUPS, NOT_SUPPORTED, OTHER_TEXT, SAME

STORED = json.loads(model_types.STORED.read_text())["types"]


def test_each_type_of_transformers_is_a_family_or_has_an_entry():
    families = model_types.family_of_type()
    for kind, about in STORED.items():
        known = {kind, about.get("text", kind)}
        assert known & (families.keys() | NOT_SUPPORTED.keys() | SAME.keys()), kind


def test_an_entry_is_no_family_and_its_nearest_is_one():
    families = model_types.family_of_type()
    listed = [kind for _, _, kinds in GROUPS for kind in kinds.split()]
    assert len(listed) == len(set(listed)), "a type is listed twice"
    for table in (NOT_SUPPORTED, SAME, OTHER_TEXT):
        assert sorted(table.keys() & families.keys()) == []
    assert sorted(NOT_SUPPORTED.keys() & SAME.keys()) == []
    assert {nearest for nearest, _ in NOT_SUPPORTED.values()} | set(SAME.values()) <= FAMILIES.keys()
    assert all(lacks and not lacks.endswith(".") for _, lacks in NOT_SUPPORTED.values())


def test_the_refusal_names_the_type_the_nearest_family_what_it_lacks_and_a_fix(tmp_path):
    folder = hugging_face.write(tmp_path / "theirs", "llama", model_type="starcoder2")
    nearest, lacks = NOT_SUPPORTED["starcoder2"]
    with pytest.raises(HuggingFaceError) as error:
        open_folder(folder)
    assert all(word in str(error.value) for word in ("starcoder2", nearest, lacks, f"--set {FAMILY}="))
    own = json.loads((folder / "config.json").read_text()) | {"model_type": "llama", FAMILY: "own_families:like_llama"}
    assert model_of(own).family == "own_families:like_llama"


@pytest.mark.parametrize("kind", SAME)
def test_the_fix_for_a_type_under_another_name_works(tmp_path, kind):
    family = SAME[kind]
    theirs = {"architectures": ["OtherForCausalLM"], "model_type": kind}
    folder = hugging_face.write(tmp_path / "theirs", family, **theirs)
    kept = format_of(family).model_type
    with pytest.raises(HuggingFaceError, match=f"--set model_type={kept} --set architectures=null"):
        open_folder(folder)
    assert open_folder(folder, {"model_type": kept, "architectures": None}).matched[1] == {}


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma2", "gemma3"])
def test_an_unheard_type_is_compared_with_the_family_that_knows_its_keys(name):
    given = hugging_face.settings(name) | {"model_type": "unheard", "new_gate": 2}
    said = not_supported(given, "config.json")
    assert f"is {name}," in said and "new_gate" in said
    assert format_of(name).unread(given) == ["new_gate"]


@pytest.mark.parametrize("given", [{}, {"num_hidden_layers": "4"}, {"head_dim": None, "layer_types": 3, "rope_scaling": [1]}])
def test_an_unheard_type_with_odd_keys_is_refused_by_its_name(given):
    with pytest.raises(HuggingFaceError, match="unheard"):
        model_of({"model_type": "unheard", **given})
