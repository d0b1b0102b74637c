"""The text part of a folder whose model also sees or hears: names, keys, what is left out, and refusals."""

import json
from pathlib import Path

import hugging_face
import numpy as np
import pytest
from hugging_face import tensors_of
from safetensors.numpy import save_file

from jaxtrain.hf.folder import HfFolder, model_of, open_folder
from jaxtrain.hf.importing import open_origin
from jaxtrain.models import presets
from jaxtrain.models.hf_keys import FAMILY
from jaxtrain.models.hugging_face import HuggingFaceError, text_config

SEES = {"vision_tower.patch.weight": np.ones((4, 3), np.float32), "multi_modal_projector.bias": np.ones(5, np.int64)}
SIZE = 4 * 3 * 4 + 5 * 8  # bytes of SEES
# Version of transformers -> name in a folder of the whole model, from the name in a folder of the text part.
PLACES = {
    "4": lambda name: f"language_model.{name}",
    "5": lambda name: name.replace("model.", "model.language_model.", 1),
    "Idefics3": lambda name: name.replace("model.", "model.text_model.", 1),
    "Qwen2-VL": lambda name: name,
}


def write(folder: Path, name: str = "gemma3", place: str = "5", more: dict | None = None, **changes) -> tuple[Path, HfFolder]:
    """Write a folder of text and, in `folder`, one of a whole model with this text part. Return (the whole's, the text's).

    more: further tensors. changes: keys of the whole's config.json; None removes a key.
    """
    text = hugging_face.write(folder / "text", name)
    described = json.loads((text / "config.json").read_text())
    whole = {"model_type": "sees", "architectures": ["SeesForConditionalGeneration"], "text_config": described, **changes}
    out = folder / "whole"
    out.mkdir()
    (out / "config.json").write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))
    save_file({PLACES[place](k): v for k, v in tensors_of(text).items()} | SEES | (more or {}), out / "model.safetensors")
    return out, open_folder(text)


@pytest.mark.parametrize("name", ["gemma3", "mistral"])  # a tied head, and one beside the text part's tensors
@pytest.mark.parametrize("place", PLACES)
def test_the_text_part_is_that_of_a_folder_of_text(tmp_path, name, place):
    folder, text = write(tmp_path, name, place)
    found = open_folder(folder)
    assert found.model == text.model and found.matched == text.matched and found.dtype == text.dtype
    assert found.tensors.keys() == text.tensors.keys() and found.bytes == text.bytes
    assert all(np.array_equal(found.read(key), text.read(key)) for key in text.tensors)
    note = open_origin(str(folder)).notes[0]
    assert all(word in note for word in ("sees", "2 tensors", f"{SIZE} bytes", "multi_modal_projector", "vision_tower"))
    assert len(found.notes) == 1 + len(text.notes)


def test_keys_beside_text_config_that_count():
    text = hugging_face.settings("llama2") | {"tie_word_embeddings": None, "eos_token_id": 2}
    whole = {"model_type": "sees", "text_config": text, "tie_word_embeddings": True, "eos_token_id": [1, 106]}
    found = text_config(whole, {}, "config.json")
    assert (found["tie_word_embeddings"], found["eos_token_id"], found["model_type"]) == (True, [1, 106], "llama")
    assert text_config(whole, {"tie_word_embeddings": False}, "config.json")["tie_word_embeddings"] is False


@pytest.mark.parametrize("of_text", [True, False])
@pytest.mark.parametrize("name", ["llama2", "gemma3"])
def test_if_two_values_differ_the_head_is_tied_unless_it_is_stored(tmp_path, name, of_text):
    """transformers 4 read the value in text_config, and transformers 5 reads the one beside it."""
    folder, text = write(tmp_path, name, tie_word_embeddings=not of_text)
    described = json.loads((folder / "config.json").read_text())
    described["text_config"]["tie_word_embeddings"] = of_text
    (folder / "config.json").write_text(json.dumps(described))
    assert open_folder(folder).matched == text.matched
    assert text.model.tied_head == (name == "gemma3")


def test_keys_that_transformers_4_left_out_of_text_config():
    """The config.json of google/gemma-3-4b-it and of the larger ones, shortened."""
    rope = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, "model_type": "gemma3_text"}
    sizes = {
        "gemma3_4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
        "gemma3_12b": {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16}
        | {"num_key_value_heads": 8},
        "gemma3_27b": {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32}
        | {"num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168},
    }
    for name, keys in sizes.items():
        whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": keys | rope}
        found = model_of(text_config(whole, {}, "config.json"))
        wanted = presets()[name]
        assert {key: getattr(found, key) for key in wanted if key != "attention_pattern"} == {
            key: value for key, value in wanted.items() if key != "attention_pattern"
        }, name
        assert found.kinds == ("lllllg" * found.num_layers)[: found.num_layers]


# What is changed -> (keys of the whole's config.json, further tensors, what the error names).
REFUSED = {
    "another way of text": ({"model_type": "paligemma"}, {}, "paligemma"),
    "no language model": ({"architectures": ["SeesForSequenceClassification"]}, {}, "SeesForSequenceClassification"),
    "no type of text": ({"text_config": {}}, {}, "text_config: model_type = None"),
    "text of no family": ({"text_config": {"model_type": "ministral3"}}, {}, "ministral3.* mistral"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config"),
    "two places": ({}, {"language_model.model.layers.0.x": np.ones(1, np.float32)}, r"language_model\.model\.layers\."),
    "other dtype": ({}, {"model.language_model.ids": np.ones(1, np.int64)}, r"model\.ids has dtype I64"),
    "unknown text": ({}, {"model.language_model.gate.weight": np.ones(1, np.float32)}, r"model\.gate\.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(tmp_path, name):
    keys, more, word = REFUSED[name]
    folder, _ = write(tmp_path, more=more, **keys)
    with pytest.raises(HuggingFaceError, match=word):
        open_origin(str(folder))


def test_two_heads_and_no_place_are_refused(tmp_path):
    folder, text = write(tmp_path, "llama2", "4", {"lm_head.weight": np.ones((128, 64), np.float32)})
    with pytest.raises(HuggingFaceError, match=r"language_model\.lm_head\.weight"):
        open_origin(str(folder))
    save_file(SEES, folder / "model.safetensors")
    with pytest.raises(HuggingFaceError, match="none"):
        open_origin(str(folder))


def test_changes_are_those_of_the_text_part(tmp_path):
    folder, text = write(tmp_path, "llama")
    described = json.loads((folder / "config.json").read_text())
    assert open_folder(folder, {"rms_norm_eps": 0.25}).model.norm_eps == 0.25
    described["text_config"]["model_type"] = "qwen_text"
    (folder / "config.json").write_text(json.dumps(described))
    assert open_folder(folder, {"model_type": "llama"}).model == text.model
    # A family of one's own for the whole model reads all of its config.json, without a text part.
    described |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(HuggingFaceError, match="no key 'num_hidden_layers'"):
        open_folder(folder, {FAMILY: "own_families:like_llama"})


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"type": "mrope"}, {"type": "mrope", "mrope_interleaved": True}])
def test_positions_in_pictures_do_not_change_text(rope):
    given = hugging_face.settings("qwen2", 4)
    found = text_config({"text_config": given | {"rope_scaling": {**rope, "mrope_section": [4, 2, 2]}}}, {}, "config.json")
    assert model_of(found) == model_of(given)
