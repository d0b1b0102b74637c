"""Odd Hugging Face folders beside transformers: the same logits and ids, and the commands that messages name."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import hugging_face
import numpy as np
import odd_folders
import packages
from hugging_face import SAME, TOKENS
from odd_folders import NOTED, READ, WITHOUT_TEXT

from jaxtrain.commands import hf as command
from jaxtrain.commands import sample
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.hf.importing import open_origin
from jaxtrain.hf.model import logits_function

SEGMENTS = np.ones_like(TOKENS)


def compare(folders: list[Path], tokens: Path) -> None:
    """Assert that the logits of folders are those of transformers."""
    np.save(tokens, TOKENS)
    hugging_face.ask(hugging_face.HERE / "logits.py", tokens, *folders)
    for folder in folders:
        theirs = np.load(folder / "logits.npy")
        ours = logits_function(open_origin(str(folder)))(TOKENS, SEGMENTS)
        assert np.abs(ours - theirs).max() < SAME and np.abs(theirs).max() > 0.1, folder


def test_odd_folders_have_the_logits_of_transformers(tmp_path):
    """All folders of the table that are read; transformers looks elsewhere for the base of an adapter."""
    packages.reference()
    good = odd_folders.base(tmp_path / "good", scale=3.0)
    changes = READ | {name: change for name, (change, _) in (NOTED | WITHOUT_TEXT).items() if "adapter" not in name}
    changes = {name: change for name, change in changes.items() if "generation" not in name or name in NOTED}
    folders = []
    for i, (name, change) in enumerate(changes.items()):
        folders.append(odd_folders.changed(good, tmp_path / f"{i} {name.replace('/', ' ')}", change))
        folders[-1].chmod(0o755)  # transformers' logits are written there
    compare([good, *folders], tmp_path / "t.npy")


def test_folders_that_libraries_leave_behind(tmp_path):
    """Saved again in one file beside an index; a tied model by save_model; an adapter in the folder of its base.

    For the last one the message's command is typed: the result has the logits of PEFT.
    """
    packages.reference()
    described = hugging_face.HERE / "golden" / "llama2.5.json"
    hugging_face.ask(hugging_face.HERE / "left_folders.py", described, tmp_path)
    compare([tmp_path / "again", tmp_path / "shared"], tmp_path / "t.npy")
    (again,) = open_origin(str(tmp_path / "again")).notes
    assert odd_folders.INDEX in again and open_origin(str(tmp_path / "shared")).notes == ()
    (note,) = open_origin(str(tmp_path / "adapted")).notes
    typed = shlex.split(note.partition("python -m jaxtrain hf ")[2].partition(";")[0])
    assert command.main([word.replace("--out=RUN", f"--out={tmp_path / 'run'}") for word in typed]) == 0
    peft = hugging_face.HERE / "peft_logits.py"
    hugging_face.ask(peft, tmp_path / "t.npy", tmp_path / "plain", tmp_path / "adapted", tmp_path / "l.npz")
    ours = logits_function(open_origin(str(tmp_path / "run")))(TOKENS, SEGMENTS)
    plain = logits_function(open_origin(str(tmp_path / "adapted")))(TOKENS, SEGMENTS)
    theirs = np.load(tmp_path / "l.npz")["logits"]
    assert np.abs(ours - theirs).max() < SAME < 0.01 < np.abs(plain - theirs).max()


def test_the_command_for_a_tokenizer_in_another_form_is_typed(tmp_path, capsys, monkeypatch):
    """A vocabulary with merges, as GPT-2 and Qwen have. transformers makes a tokenizer.json with the ids of its own."""
    python = packages.reference()
    folder = hugging_face.write_base(tmp_path / "base", ("<|im_end|>",))
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocab | {"he": 258, "hel": 259}))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}')
    monkeypatch.chdir(tmp_path)
    ask = [f"--workdir={folder}", "--prompt=hello", "--max-tokens=2", "--temperature=0"]
    assert sample.main(ask) == 2
    (typed,) = re.findall(r'python (-c ".*")', capsys.readouterr().err)
    subprocess.run([python, *shlex.split(typed)], check=True, capture_output=True)
    assert load_tokenizer("NEW").encode("hello") == [259, vocab["l"], vocab["o"]]
    assert sample.main([*ask, "--tokenizer=NEW"]) == 0
