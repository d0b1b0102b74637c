"""Preference pairs: how a row becomes a chosen and a rejected completion, and the rows of a batch."""

import json

import numpy as np
import pytest
from token_files import BYTE, command, open_batches, read_windows, texts, write_file

from jaxtrain.config import schema
from jaxtrain.data import opening
from jaxtrain.data.chat_template import BYTE_TEMPLATE, ChatTemplate, RowError
from jaxtrain.data.rows import PreferenceRows
from jaxtrain.data.tokenfile import TokenFile, verify_file

NAMES = {"eos_token": "<|endoftext|>", "bos_token": ""}
TEMPLATE = ChatTemplate("bytes", BYTE_TEMPLATE, NAMES, BYTE.control_tokens(), "2026-01-01")


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


WHOLE = {"chosen": [user("Hi"), assistant("Yes")], "rejected": [user("Hi"), assistant("No")]}
HELLO, YES, NO = "### user\nHi\n\n### assistant\n", "Yes<|endoftext|>", "No<|endoftext|>"


@pytest.mark.parametrize(
    ("row", "template", "want"),
    [
        ({"prompt": "Two and two? ", "chosen": "4", "rejected": "5", "score": 3.0}, None, ("Two and two? ", "4", "5")),
        # A prompt that both texts begin with ends between words, and the space belongs to the completion.
        ({"chosen": "Q: a\n\nA: hello", "rejected": "Q: a\n\nA: help"}, None, ("Q: a\n\nA:", " hello", " help")),
        ({"chosen": "Q: a\nhello", "rejected": "Q: a\ngo"}, None, ("Q: a\n", "hello", "go")),
        ({"prompt": [user("Hi")], "chosen": [assistant("Yes")], "rejected": [assistant("No")]}, TEMPLATE, (HELLO, YES, NO)),
        (WHOLE, TEMPLATE, (HELLO, YES, NO)),
        ({"prompt": "Hi", **WHOLE}, TEMPLATE, (HELLO, YES, NO)),
        ({"prompt": "Hi", "chosen": "Yes", "rejected": "No"}, TEMPLATE, (HELLO, YES, NO)),
    ],
)
def test_rows(row, template, want):
    prompt, *completions = want
    members = PreferenceRows(template, ()).pieces(row)
    assert members[0].text == members[1].text
    for each, completion in zip(members, completions, strict=True):
        counts = [part.loss for part in each.chunks]
        assert counts == sorted(counts), "the completion is the end"
        found = ["".join(part.text for part in each.chunks if part.loss == loss) for loss in (False, True)]
        assert found == [prompt, completion]


def test_a_token_that_begins_a_text_is_of_the_prompt():
    piece, _ = PreferenceRows(None, (7,)).pieces({"prompt": "", "chosen": "a", "rejected": "b"})
    assert [(part.control, part.loss) for part in piece.chunks] == [(7, False), (-1, False), (-1, True)]


def test_turns_of_the_prompt_do_not_count():
    """A user's turn within a completion does not count either."""
    before = [user("a"), assistant("b"), user("c")]
    row = {"chosen": [*before, assistant("d"), user("e"), assistant("f")], "rejected": [*before, assistant("g")]}
    members = PreferenceRows(TEMPLATE, ()).pieces(row)
    counted = ["".join(p.text for p in each.chunks if p.loss and p.control < 0) for each in members]
    assert counted == ["df", "g"]


@pytest.mark.parametrize(
    ("row", "template"),
    [
        ({"prompt": "a", "chosen": "b"}, None),
        ({"chosen": "one two", "rejected": "one"}, None),  # no common prompt
        ({"chosen": "a", "rejected": "a"}, None),
        ({"prompt": "z", "chosen": "a", "rejected": "a"}, None),
        ({"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]}, None),  # needs --chat
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("b")]}, TEMPLATE),
        ({"prompt": "z", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}, TEMPLATE),
        ({"chosen": [user("a"), user("b")], "rejected": [user("a"), user("c")]}, TEMPLATE),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, None),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": ["x"]}, None),
    ],
)
def test_rows_that_are_refused(row, template):
    with pytest.raises(RowError):
        PreferenceRows(template, ()).pieces(row)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepare a token file of pairs and its validation file, with the data command."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [{"prompt": f"{i}: " + "a" * (i % 40), "chosen": "b" * (1 + i % 7), "rejected": "c" * (i % 11)} for i in range(300)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = ("prepare", "--preference", "--input=pairs.jsonl", "--output=pairs.tok", "--validation=0.3", "--shard-mb=0.004")
    code, said = command(folder, *how, "--processes=1")
    assert code == 0, said
    return folder, rows


def test_the_file_holds_every_pair_once(prepared):
    """Both members of a pair are in the same file (training or validation), in order, across borders of parts and batches."""
    folder, rows = prepared
    found = []
    for name in ("pairs.tok", "pairs.val.tok"):
        file = TokenFile.open(folder / name)
        assert file.pairs and verify_file(folder / name) == ""
        made = texts(folder / name)
        found += list(zip(made[::2], made[1::2], strict=True))
        offsets = file.doc_offsets[:].tolist()
        for k, text in enumerate(made):
            counted = file.loss_flags(offsets[k], offsets[k + 1])
            completion = len(text) - len(text.rstrip("bc"))
            assert counted.tolist() == [False] * (len(text) - completion) + [True] * (completion + 1)
    assert sorted(found) == sorted((row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]) for row in rows)
    assert 0.2 < len(made) / 600 < 0.4
    code, said = command(folder, "show", "pairs.tok", "--seq-len=64", "--max-segments=1")
    assert code == 2 and "--max-segments = 1" in said


@pytest.mark.parametrize("most", [0, 4, 5])
def test_rows_hold_whole_pairs(prepared, most):
    folder, _ = prepared
    source = open_batches(folder / "pairs.tok", 128, global_batch=8, max_segments=most)
    rows = source.sources[0]
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
    rows = source.sources[0]
    kept = [n for row in range(rows.windows) for n in rows.documents_of(row).tolist()]
    fits = np.flatnonzero(length <= 61)
    assert 0 < len(fits) < len(length) and source.left_out == len(length) - len(fits)
    assert sorted(kept) == sorted([*(2 * fits), *(2 * fits + 1)])
    with pytest.raises(schema.ConfigError, match=f"data.seq_len.* {length.max()}"):
        open_batches(folder / "pairs.tok", 4)


def test_references_stand_at_the_first_token(prepared):
    folder, _ = prepared
    source = open_batches(folder / "pairs.tok", 128)
    rows = source.sources[0]
    assert not source.batch(3)["reference"].any()
    count = len(texts(folder / "pairs.tok"))
    source.references[rows.name] = -1.0 - np.arange(count, dtype=np.float32)
    batch = source.batch(3)
    for r, number in enumerate(read_windows(source, 3)[rows.name]):
        first = (batch["segments"][r] > 0) & (batch["positions"][r] == 0)
        assert batch["reference"][r][first].tolist() == (-1.0 - rows.documents_of(number)).tolist()
        assert np.count_nonzero(batch["reference"][r]) == first.sum()


def test_pairs_and_the_loss_that_compares_them(prepared, tmp_path):
    folder, _ = prepared
    pairs, text = str(folder / "pairs.tok"), str(write_file(tmp_path / "text.tok", [[1] * 600]))
    for source, name, keys in (
        (pairs, "cross_entropy", ["data.source"]),
        (pairs, "my.module:loss", []),
        (text, "my.module:loss", []),
        (text, "dpo", ["data.source"]),
        (pairs, "dpo", []),
    ):
        problems = opening.check_data(schema.Data(source=source), 264, False, schema.Loss(name))
        assert [problem.key for problem in problems] == keys, (source, name)


def test_options_that_pairs_do_not_use_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (tmp_path / "a.txt").write_text("some text\n")
    for named, *options in (
        ("--loss", "--preference", "--chat", "--loss=all"),
        *((option, kind, f"{option}=x") for option in ("--text-key", "--separator") for kind in ("--chat", "--preference")),
    ):
        code, said = command(tmp_path, "prepare", *options, "--input=a.jsonl", "--output=a.tok")
        assert code == 2 and f"error: {named}" in said
    for kind in ("--preference", "--chat"):
        code, said = command(tmp_path, "prepare", kind, "--input=a.txt", "--output=a.tok")
        assert code == 2 and kind in said
    assert not (tmp_path / "a.tok").exists()
