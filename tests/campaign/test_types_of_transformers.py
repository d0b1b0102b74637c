"""The list of model types, and the types under another name, compared with transformers itself."""

import json
from pathlib import Path

import hugging_face
import numpy as np
import packages
import pytest
from hugging_face import TOKENS

from benchmarks import model_types
from jaxtrain.hf.folder import open_folder
from jaxtrain.hf.importing import origin_of
from jaxtrain.hf.model import logits_function
from jaxtrain.models.hugging_face import format_of
from jaxtrain.models.not_supported import SAME

REFERENCE = Path(__file__).resolve().parents[1] / "reference"


def test_the_list_of_types_is_that_of_transformers():
    packages.reference()
    stored = json.loads(model_types.STORED.read_text())
    assert json.loads(hugging_face.ask(REFERENCE / "model_types.py").splitlines()[-1]) == stored


@pytest.mark.parametrize(("kind", "like"), [("internlm3", "llama"), ("iquestcoder", "llama")])
def test_a_type_under_another_name_computes_what_its_family_does(tmp_path, kind, like):
    """Those of SAME that transformers computes as models of text alone. test_text_part.py has text parts.

    like: the family whose config.json it gets.
    """
    packages.reference()
    described = hugging_face.settings(like) | {"model_type": kind, "architectures": None, "vocab_size": 128}
    described["head_dim"] = described["hidden_size"] // described["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    folder = tmp_path / kind
    hugging_face.ask(REFERENCE / "fresh_models.py", tmp_path / "config.json", folder)
    np.save(tmp_path / "tokens.npy", TOKENS)
    hugging_face.ask(REFERENCE / "logits.py", tmp_path / "tokens.npy", folder)
    written = json.loads((folder / "config.json").read_text())
    assert written["model_type"] == kind
    found = open_folder(folder, {"model_type": format_of(SAME[kind]).model_type, "architectures": None})
    ours, theirs = logits_function(origin_of(found))(TOKENS, np.ones_like(TOKENS)), np.load(folder / "logits.npy")
    assert theirs.std() > 0.5 and np.abs(ours - theirs).max() < hugging_face.SAME
