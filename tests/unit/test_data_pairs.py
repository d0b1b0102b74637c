"""Preference pairs: how a row becomes a chosen and a rejected completion, and the rows of a batch."""

import json

import numpy as np
import pytest
from token_files import BYTE, command, open_batches, texts

from jaxtrain import config
from jaxtrain.data import pipeline, windows
from jaxtrain.data.rows import PairRows
from jaxtrain.data.template import BYTE_TEMPLATE, ChatTemplate, RowError
from jaxtrain.data.tokenfile import PAIRS, TokenFile, TokenWriter, verify
from jaxtrain.data.tokenizer import info

NAMES = {"eos_token": "<|endoftext|>", "bos_token": ""}
TEMPLATE = ChatTemplate("bytes", BYTE_TEMPLATE, NAMES, BYTE.control_tokens(), "2026-01-01")
# A turn ends within the generation block, as in templates with their own markers.
MARKED = ChatTemplate(
    "marked",
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}",
    NAMES,
    BYTE.control_tokens(),
    "2026-01-01",
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def members(row, template=None):
    """Return (text before the completion, completion that counts) of both members of a pair."""
    piece = PairRows(template, ()).piece(row)
    assert piece is not None and piece.rejected is not None and piece.text == piece.rejected.text
    out = []
    for each in (piece, piece.rejected):
        parts = each.parts or ()
        counts = [part.loss for part in parts]
        assert counts == sorted(counts), "the completion is the end"
        out.append(tuple("".join(part.text for part in parts if part.loss == loss) for loss in (False, True)))
    return out


def rows_of(batches):
    """Return the `PairRows` of batches that have no other source."""
    (source,) = batches.sources
    assert isinstance(source, windows.PairRows)
    return source


def test_a_prompt_and_two_texts():
    row = {"prompt": "Two and two? ", "chosen": "4", "rejected": "5", "score": 3.0}
    assert members(row) == [("Two and two? ", "4"), ("Two and two? ", "5")]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        # the prompt ends between words, and the space belongs to the completion
        ("Q: a\n\nA: hello", "Q: a\n\nA: help", "Q: a\n\nA:"),
        ("Q: a\nhello", "Q: a\ngo", "Q: a\n"),
        ("one two", "one", ""),
    ],
)
def test_a_prompt_that_both_texts_begin_with(chosen, rejected, prompt):
    if not prompt:
        with pytest.raises(RowError, match="prompt is empty"):
            members({"chosen": chosen, "rejected": rejected})
        return
    assert members({"chosen": chosen, "rejected": rejected}) == [(prompt, t.removeprefix(prompt)) for t in (chosen, rejected)]


def test_a_token_that_begins_a_text_is_of_the_prompt():
    piece = PairRows(None, (7,)).piece({"prompt": "", "chosen": "a", "rejected": "b"})
    assert piece is not None
    assert [(part.control, part.loss) for part in piece.parts or ()] == [(7, False), (-1, False), (-1, True)]


HELLO = "### user\nHi\n\n### assistant\n"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("Hi")], "chosen": [assistant("Yes")], "rejected": [assistant("No")]},
        {"chosen": [user("Hi"), assistant("Yes")], "rejected": [user("Hi"), assistant("No")]},
        {"prompt": "Hi", "chosen": [user("Hi"), assistant("Yes")], "rejected": [user("Hi"), assistant("No")]},
        {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
    ],
    ids=["prompt", "whole conversations", "and the prompt as text", "texts"],
)
def test_messages(row):
    end = "<|endoftext|>"
    assert members(row, TEMPLATE) == [(HELLO, f"Yes{end}"), (HELLO, f"No{end}")]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["found", "marked"])
def test_turns_of_the_prompt_do_not_count(template):
    """A user's turn within a completion does not count either."""
    before = [user("a"), assistant("b"), user("c")]
    row = {"chosen": [*before, assistant("d"), user("e"), assistant("f")], "rejected": [*before, assistant("g")]}
    piece = PairRows(template, ()).piece(row)
    assert piece is not None and piece.rejected is not None
    counted = ["".join(p.text for p in each.parts or () if p.loss and p.control < 0) for each in (piece, piece.rejected)]
    assert counted == ["df", "g"]


@pytest.mark.parametrize(
    ("row", "template", "why"),
    [
        ({"prompt": "a", "chosen": "b"}, None, "not a pair"),
        ({"chosen": "a", "rejected": "a"}, None, "are the same"),
        ({"prompt": "z", "chosen": "a", "rejected": "a"}, None, "are the same"),
        ({"prompt": [user("z")], "chosen": [assistant("a")], "rejected": [assistant("a")]}, TEMPLATE, "are the same"),
        ({"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]}, None, "give --chat too"),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("b")]}, TEMPLATE, "the same conversation"),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("b")]}, TEMPLATE, "share no message"),
        ({"prompt": "z", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}, TEMPLATE, "none of"),
        ({"chosen": [user("a"), user("b")], "rejected": [user("a"), user("c")]}, TEMPLATE, "no assistant's turn"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, None, "'rejected' is a number"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": ["x"]}, None, "give --chat too"),
    ],
)
def test_rows_that_are_refused(row, template, why):
    with pytest.raises(RowError, match=why):
        PairRows(template, ()).piece(row)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepare a token file of pairs and its validation file, with the data command."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [{"prompt": f"{i}: " + "a" * (i % 40), "chosen": "b" * (1 + i % 7), "rejected": "c" * (i % 11)} for i in range(300)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = ("prepare", "--preference", "--input=pairs.jsonl", "--output=pairs.tok", "--validation=0.3", "--shard-mb=0.004")
    code, said = command(folder, *how, "--processes=2")
    assert code == 0 and "documents in pairs" in said, said
    return folder, rows


def test_the_file_holds_every_pair_once(prepared):
    """Both members of a pair are in the same file (training or validation), in order, across borders of parts and batches."""
    folder, rows = prepared
    found = []
    for name in ("pairs.tok", "pairs.val.tok"):
        file = TokenFile.open(folder / name)
        assert file.pairs and verify(folder / name) == []
        made = texts(folder / name)
        found += list(zip(made[::2], made[1::2], strict=True))
        offsets = file.doc_offsets[:].tolist()
        for k, text in enumerate(made):
            counted = file.loss_flags(offsets[k], offsets[k + 1])
            completion = len(text) - len(text.rstrip("bc"))
            assert counted.tolist() == [False] * (len(text) - completion) + [True] * (completion + 1)
    assert sorted(found) == sorted((row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]) for row in rows)
    assert 0.2 < len(texts(folder / "pairs.val.tok")) / 600 < 0.4


def test_show_names_the_members(prepared):
    code, said = command(prepared[0], "show", "pairs.tok")
    assert code == 0 and "--- document 1, rejected of pair 0: tokens" in said


def test_a_member_without_the_other_is_damage(tmp_path):
    with TokenWriter(tmp_path / "odd.tok", info(BYTE), loss=True, made={PAIRS: True}) as writer:
        for _ in range(3):
            writer.write([1, 2], 2, np.array([False, True]), 1)
            writer.end_document(loss=True)
    assert ["one is without the other" in fault for fault in verify(tmp_path / "odd.tok")] == [True]


@pytest.mark.parametrize("most", [0, 4, 5])
def test_rows_hold_whole_pairs(prepared, most):
    folder, _ = prepared
    source = open_batches(folder / "pairs.tok", 128, global_batch=8, max_segments=most)
    rows = rows_of(source)
    documents = texts(folder / "pairs.tok")
    seen = []
    for first in range(0, rows.windows, 8):
        batch = source.numbered_rows(rows, np.arange(first, min(first + 8, rows.windows)))
        for r in range(len(batch["tokens"])):
            numbers = rows.documents_of(first + r)
            seen += numbers.tolist()
            segments = batch["segments"][r]
            assert segments.max() == len(numbers) <= (most or 32) and len(numbers) % 2 == 0
            for segment, number in enumerate(numbers.tolist(), 1):
                mine = segments == segment
                text = BYTE.decode(batch["tokens"][r][mine])
                assert text == documents[number][: len(text)] and len(text) >= len(documents[number]) - 1
                assert batch["positions"][r][mine].tolist() == list(range(mine.sum()))
                completion = len(documents[number]) - len(documents[number].rstrip("bc"))
                assert batch["weights"][r][mine].sum() == completion + 1
            assert not batch["weights"][r][segments == 0].any()
    assert sorted(seen) == list(range(len(documents)))
    assert source.pairs and source.left_out == 0 and source.max_segments == (most or rows.documents)


def test_pairs_longer_than_a_row_are_left_out(prepared):
    folder, _ = prepared
    documents = texts(folder / "pairs.tok")
    length = np.array([len(text) + 1 for text in documents]).reshape(-1, 2).sum(1)
    source = open_batches(folder / "pairs.tok", 60)
    kept = [n for row in range(rows_of(source).windows) for n in rows_of(source).documents_of(row).tolist()]
    fits = np.flatnonzero(length <= 61)
    assert 0 < len(fits) < len(length) and source.left_out == len(length) - len(fits)
    assert sorted(kept) == sorted([*(2 * fits), *(2 * fits + 1)])
    with pytest.raises(config.ConfigError, match=f"no pair .* Set {length.max()}"):
        open_batches(folder / "pairs.tok", 4)


def test_references_stand_at_the_first_token(prepared):
    folder, _ = prepared
    source = open_batches(folder / "pairs.tok", 128)
    assert not source.batch(3)["reference"].any()
    count = len(texts(folder / "pairs.tok"))
    source.references[rows_of(source).name] = -1.0 - np.arange(count, dtype=np.float32)
    batch = source.batch(3)
    for r, number in enumerate(source.windows(3)[rows_of(source).name]):
        first = (batch["segments"][r] > 0) & (batch["positions"][r] == 0)
        assert batch["reference"][r][first].tolist() == (-1.0 - rows_of(source).documents_of(number)).tolist()
        assert np.count_nonzero(batch["reference"][r]) == first.sum()


def test_pairs_and_the_loss_that_compares_them(prepared, tmp_path):
    folder, _ = prepared
    with TokenWriter(tmp_path / "text.tok", info(BYTE)) as writer:
        writer.write([1] * 600, 600)
        writer.end_document()
    cases = [
        (str(folder / "pairs.tok"), "cross_entropy", "Set loss.name=dpo"),
        (str(folder / "pairs.tok"), "my.module:loss", ""),
        (str(tmp_path / "text.tok"), "my.module:loss", ""),
        (str(tmp_path / "text.tok"), "dpo", "holds no pairs"),
        ("synthetic", "dpo", "which token files alone hold"),
    ]
    for source, name, why in cases:
        problems = pipeline.check(config.Data(source=source), 264, False, config.Loss(name))
        assert [why in str(problem) for problem in problems] == ([True] if why else []), problems
    assert pipeline.check(config.Data(source=str(folder / "pairs.tok")), 264, False, config.Loss("dpo")) == []


def test_options_of_pairs(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    code, said = command(tmp_path, "prepare", "--preference", "--chat", "--loss=all", "--input=a.jsonl", "--output=a.tok")
    assert code == 2 and "the completions count" in said
    for option in ("--text-key=text", "--separator=x"):
        for kind in ("--chat", "--preference"):
            code, said = command(tmp_path, "prepare", kind, option, "--input=a.jsonl", "--output=a.tok")
            assert code == 2 and f"{kind} does not use it. Fix: leave {option.split('=')[0]} out" in said
    assert not (tmp_path / "a.tok").exists()


def test_pairs_in_a_text_file_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n")
    for option in ("--preference", "--chat"):
        code, said = command(tmp_path, "prepare", option, "--input=a.txt", "--output=a.tok")
        assert code == 2 and f"{option} reads rows of JSON lines" in said and not (tmp_path / "a.tok").exists()


def test_show_refuses_one_document_a_row(prepared):
    code, said = command(prepared[0], "show", "pairs.tok", "--seq-len=64", "--max-segments=1")
    assert code == 2 and "--max-segments = 1: the two members of a pair" in said
