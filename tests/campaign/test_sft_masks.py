"""Tokens and loss masks of conversations compared with TRL and transformers, for the chat templates of the TRL package."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import hugging_face
import numpy as np
import pytest
import token_files

from jaxtrain.data import prepare
from jaxtrain.data.chat_template import ChatTemplate, RowError, load_template
from jaxtrain.data.rows import Piece, parse_conversation
from jaxtrain.data.tokenfile import TokenFile
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer

SCRIPT = Path(hugging_face.HERE) / "sft_masks.py"
Made = list[tuple[list[int], list[bool]]]
STOPS = {"glm4moe": "<|user|>"}  # has no token that ends an answer: the header of the next message ends a generation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which sft_masks.py writes a subfolder for each chat template."""
    out = tmp_path_factory.mktemp("masks")
    hugging_face.ask(SCRIPT, out / "templates")
    return out / "templates"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def theirs(folder: Path, rows: str) -> Made:
    return [(row["ids"], row["counts"]) for row in lines(folder / f"{rows}.theirs.jsonl")]


def end_of_text(folder: Path) -> str:
    return json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]


def prepared(folder: Path, rows: str, to: Path) -> list[tuple[list[int], list[bool]] | None]:
    """Return the tokens and loss flags of each row that `data prepare --chat` makes of `rows`.jsonl; None: it is refused."""
    command = ["prepare", "--chat", f"--tokenizer={folder}", f"--chat-template={folder}/training.jinja"]
    command += [f"--eot={end_of_text(folder)}", f"--input={folder}/{rows}.jsonl", f"--output={to}", "--force", "--processes=1"]
    code, out = token_files.command(to.parent, *command, "--skip-bad-lines")
    assert code == 0, out
    refused = {int(number) - 1 for told in re.findall(rf"{rows}\.jsonl:([\d, ]+): ", out) for number in told.split(", ")}
    file = TokenFile.open(to)
    made = [
        (file.tokens[a:b].tolist(), file.loss_flags(a, b).tolist()) for a, b in itertools.pairwise(file.doc_offsets[:].tolist())
    ]
    # A token file ends each document with the end-of-text token. SFTTrainer does not, unless the template writes it.
    out_of, found = iter(made), []
    for i, (other, _) in enumerate(theirs(folder, rows)):
        ids, flags = ([], []) if i in refused else next(out_of)
        each = (ids[:-1], flags[:-1]) if len(ids) == len(other) + 1 else (ids, flags)
        found.append(None if i in refused else each)
    assert next(out_of, None) is None
    return found


def loses_thoughts(tok: Tokenizer, row: dict[str, Any], ids: list[int]) -> bool:
    """Return whether the thoughts of the last answer are missing in the text of these ids."""
    thoughts = row["messages"][-1]["content"].partition("</think>")[0].removeprefix("<think>").strip()
    return bool(thoughts) and thoughts.splitlines()[0] not in tok.decode(np.asarray(ids))


def written(tok: Tokenizer, made: ChatTemplate, row: dict[str, Any]) -> tuple[list[int], list[bool]]:
    """Return the tokens and loss flags that jaxtrain makes of one conversation."""
    _, parts = made.split_conversation(parse_conversation(row), "assistant")
    ((ids, flags, _),) = prepare.encode_pieces(tok, [Piece("", 0, chunks=tuple(parts))])
    assert flags is not None
    return ids.tolist(), flags.tolist()


def load(folder: Path, template: str) -> tuple[Tokenizer, ChatTemplate]:
    tok = load_tokenizer(str(folder), end_of_text(folder))
    return tok, load_template(str(folder), tok, str(folder / template), "2026-01-01")


def beyond_the_answer(tok: Tokenizer, header: str, ids: list[int], flags: list[bool], other: list[bool]) -> tuple[bool, str]:
    """Return whether two lists of flags differ, and the text of the tokens that differ, without the pieces of `header`."""
    text = "".join(tok.decode(np.asarray([i])) for i, here, there in zip(ids, flags, other, strict=True) if here != there)
    for piece in pieces(tok, header):
        text = text.replace(piece, "")
    return flags != other, text.strip()


def test_marked_turns_are_those_of_trl(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare `data prepare --chat` with SFTTrainer: several turns, system messages, reasoning, tool calls and their results.

    With the same template, tokens and flags are equal, except for some answers that begin with white space. A token of
    transformers may cross the border of such a turn. jaxtrain's tokens never do, as in a generation. Rows whose last thoughts a
    template leaves out are refused.
    """
    counted, apart = Counter(), Counter()
    for each in sorted(folder.iterdir()):
        tok, rows = load_tokenizer(str(each), end_of_text(each)), lines(each / "messages.jsonl")
        kinds = [line["kind"] for line in lines(each / "messages.kinds.jsonl")]
        for kind, row, their, our in zip(
            kinds, rows, theirs(each, "messages"), prepared(each, "messages", tmp_path / "a.tok"), strict=True
        ):
            if our is None:
                assert loses_thoughts(tok, row, their[0]), each.name
                counted.update(refused=1)
                continue
            counted.update(conversations=1, tokens=len(their[0]), in_the_loss=sum(their[1]))
            apart[kind] += our != their
    with capsys.disabled():
        print(f"\n{len([*folder.iterdir()])} templates, {dict(counted)}, not equal: {dict(+apart)}")
    assert counted["conversations"] > 1000 and set(+apart) <= {"white space"}
    assert apart["white space"] < counted["conversations"] / 20


def test_completions_are_those_of_trl(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows have a prompt with earlier answers, and a completion. Only the completion is in the loss.

    Flags may differ in two places. TRL also trains on the end of line after the completion. In some templates, the marked
    answers include the generation prompt, which TRL's completions do not.
    """
    counted = Counter()
    for each in sorted(folder.iterdir()):
        tok, made = load(each, "training.jinja")
        header = generation_prompt(made)
        rows, got = lines(each / "completion.jsonl"), prepared(each, "completion", tmp_path / "a.tok")
        for row, found, (other, counts) in zip(rows, got, theirs(each, "completion"), strict=True):
            assert found is not None, each.name
            ids, flags = found
            assert ids == other, each.name
            differs, text = beyond_the_answer(tok, header, ids, flags, counts)
            assert not text, (each.name, row)
            counted.update(completions=1, tokens=len(ids), equal=not differs)
    with capsys.disabled():
        print(f"\n{dict(counted)}")
    assert counted["completions"] > 300


def test_turns_without_marks_are_those_of_trls_marked_templates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare a model's template without marks of the answers (jaxtrain) and TRL's template with marks for this model.

    If both give the same tokens, TRL's flags differ only at the end of line after a turn. In some templates they also differ at
    the generation prompt before the turn.
    """
    counted, refused = Counter(), Counter()
    for each in sorted(folder.iterdir()):
        tok, made = load(each, "original.jinja")
        if made.marks_turns:
            continue
        header = generation_prompt(made)
        for row, (other, counts) in zip(lines(each / "messages.jsonl"), theirs(each, "messages"), strict=True):
            try:
                ids, flags = written(tok, made, row)
            except RowError as error:
                refused[each.name] += 1
                assert any(said in str(error) for said in ("generation %}", "cannot write", "does not write"))
                continue
            counted.update(conversations=1, same_text=ids == other)
            if ids == other:
                differs, text = beyond_the_answer(tok, header, ids, flags, counts)
                assert text.replace(STOPS.get(each.name, " "), "") == "", (each.name, row)
                counted.update(equal=not differs)
                counted.update(tokens=len(ids))
    with capsys.disabled():
        print(f"\n{dict(counted)}, refused: {dict(refused)}")
    assert counted["same_text"] > 600


def generation_prompt(made: ChatTemplate) -> str:
    """Return the text with which a template begins an answer."""
    asked = parse_conversation({"messages": [{"role": "user", "content": "a"}]})
    before, after = made.render(asked), made.render(asked, prompt=True)
    return after.removeprefix(before)


def pieces(tok: Tokenizer, text: str) -> list[str]:
    """Return the control tokens of a text, and the words between them."""
    control = "|".join(re.escape(token.text) for token in tok.control_tokens())
    return [word for piece in re.split(f"({control})", text) for word in piece.split()]
