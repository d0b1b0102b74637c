"""Text parts of models that also see or hear, as transformers saves and computes the whole models."""

from pathlib import Path

import hugging_face
import numpy as np
import packages
import pytest
from hugging_face import SAME as TOLERANCE
from hugging_face import exported, random_tokens

from jaxtrain.commands import hf as command
from jaxtrain.hf.folder import open_folder
from jaxtrain.hf.importing import origin_of
from jaxtrain.hf.model import logits_function
from jaxtrain.models.hugging_face import HuggingFaceError, format_of
from jaxtrain.models.not_supported import SAME

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "tests" / "reference"
TOKENS = random_tokens(120)  # without those that stand for pictures and sounds
# Folder -> model_type of its text part, for those that are imported under another name.
RENAMED = {"qwen2_5_vl": "qwen2_5_vl_text", "qwen3_vl": "qwen3_vl_text", "emu3": "emu3_text_model"}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with those of whole_models.py."""
    packages.reference()
    place = tmp_path_factory.mktemp("wholes")
    np.save(place / "tokens.npy", TOKENS)
    hugging_face.ask(REFERENCE / "whole_models.py", place / "tokens.npy", place)
    return place


def test_logits_of_text_are_those_of_the_whole_model(wholes):
    folders = sorted(folder for folder in wholes.iterdir() if folder.is_dir())
    assert len(folders) >= 14 and RENAMED.keys() <= {folder.name for folder in folders}
    for folder in folders:
        changes = {}
        if folder.name in RENAMED:
            changes = {"model_type": format_of(SAME[RENAMED[folder.name]]).model_type}
            with pytest.raises(HuggingFaceError, match=f"--set model_type={changes['model_type']} "):
                open_folder(folder)
        found, theirs = open_folder(folder, changes), np.load(folder / "logits.npy")
        assert len(found.all_tensors) > len(found.tensors) and found.matched[1] == {}, folder.name
        ours = logits_function(origin_of(found))(TOKENS, np.ones_like(TOKENS))
        assert theirs.std() > 0.5 and np.abs(ours - theirs).max() < TOLERANCE, folder.name


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma3", "gemma3_new_names", "smolvlm"])
def test_check_and_export_of_a_text_part(wholes, tmp_path, monkeypatch, name):
    """The export has the class of text alone, which transformers loads."""
    monkeypatch.setenv("JAXTRAIN_REFERENCE_PYTHON", packages.reference())
    whole, ours, back = wholes / name, tmp_path / "ours", tmp_path / "back"
    assert command.main(["import", str(whole), f"--out={ours}"]) == 0
    exported(ours, back)
    for checkpoint, folder in ((ours, whole), (whole, whole), (ours, back), (whole, back)):
        assert command.main(["check", str(checkpoint), str(folder), f"--tolerance={TOLERANCE}"]) == 0
    np.save(tmp_path / "tokens.npy", TOKENS)
    hugging_face.ask(REFERENCE / "logits.py", tmp_path / "tokens.npy", back)
    assert np.abs(np.load(back / "logits.npy") - np.load(whole / "logits.npy")).max() < 1e-5
    out = tmp_path / "logits.npy"
    assert command.main(["logits", str(whole), f"--tokens={tmp_path / 'tokens.npy'}", f"--out={out}"]) == 0
    assert np.abs(np.load(out) - np.load(whole / "logits.npy")).max() < TOLERANCE
