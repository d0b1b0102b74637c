"""Rows that `datasets` wrote, with a tokenizer that transformers saved: the ids are those of transformers and TRL."""

import itertools
import json
from pathlib import Path

import hugging_face
import packages
import pytest
from token_files import command

from jaxtrain.data.tokenfile import TokenFile
from jaxtrain.data.tokenizer import load_tokenizer

SCRIPT = Path(__file__).resolve().parents[1] / "reference" / "rows.py"
BEHIND = [10, 256]  # the line break after a turn, and end-of-text


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    packages.reference()
    root = tmp_path_factory.mktemp("rows")
    hugging_face.ask(SCRIPT, hugging_face.write_base(root / "base", ("<|im_start|>", "<|im_end|>")), root)
    return root


def documents(root, name, *options):
    """Return (ids, ids that count in the loss) of the documents that `data prepare` makes, and what it says."""
    given = [f"--input={name}.parquet", "--tokenizer=tokenizer", f"--output={name}.tok", *options]
    code, out = command(root, "prepare", *given)
    assert code == 0, out
    file = TokenFile.open(root / f"{name}.tok")
    borders = itertools.pairwise(file.doc_offsets[:].tolist())
    return [(file.tokens[a:b].tolist(), file.tokens[a:b][file.loss_flags(a, b)].tolist()) for a, b in borders], out


def test_a_tokenizer_that_transformers_saved_again_is_the_same(written):
    assert load_tokenizer(str(written / "tokenizer")).sha256 == load_tokenizer(str(written / "base")).sha256


@pytest.mark.parametrize("name", ["calls", "tools", "parts"])
def test_conversations_have_the_ids_of_transformers(written, name):
    made, out = documents(written, name, "--chat")
    assert [ids[:-1] for ids, _ in made] == json.loads((written / f"{name}.json").read_text())
    assert ("null" in out) == (name != "parts")  # `datasets` aligned the arguments of calls, and the parameters of tools


@pytest.mark.parametrize("name", ["lists", "turns"])
def test_pairs_that_repeat_their_prompt_have_the_ids_of_trl(written, name):
    made, _ = documents(written, name, "--chat", "--preference")
    ((prompt, *completions),) = json.loads((written / f"{name}.json").read_text())
    assert [ids for ids, _ in made] == [[*prompt, *completion, 256] for completion in completions]
    # TRL counts the line break after the turn; here the control token before it is the end.
    assert [[*counted, *BEHIND[:1]] for _, counted in made] == completions


@pytest.mark.parametrize("name", ["Chinese", "Japanese", "words"])
def test_texts_of_pairs_are_cut_where_trl_cuts_them(written, name):
    made, _ = documents(written, name, "--preference")
    ((prompt, *completions),) = json.loads((written / f"{name}.json").read_text())
    assert [ids for ids, _ in made] == [[*prompt, *completion, 256] for completion in completions]
    assert [counted for _, counted in made] == [[*completion, 256] for completion in completions]
