"""Tokenizers: bytes and Hugging Face's files, the tokens that begin and end a document, and prompts."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import tokenizers.processors
from token_files import BYTE, command, open_batches, train_bpe, write_file

from jaxtrain.config import schema
from jaxtrain.data import opening
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.tokenfile import TokenFile
from jaxtrain.train import generation
from jaxtrain.train import run as train


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    path = train_bpe(tmp_path_factory.mktemp("bpe"), ["<s>", "<|endoftext|>", "<stop>"])
    tok = tokenizers.Tokenizer.from_file(str(path))
    tok.enable_truncation(5)  # these must not cut documents
    tok.save(str(path))
    return path


def test_hugging_face_tokenizer(tmp_path, bpe):
    tok = text_tokenizers.load_tokenizer(str(bpe))
    text = "def naïve(x): return '<|endoftext|>' 𝄞 " * 5
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert tok.encode_batch([text, "a"])[0].tolist() == ids
    assert tok.vocab_size == 700
    assert tok.decode([tok.eot]) == "<|endoftext|>"
    assert tok.eot not in ids  # text cannot imitate the end of a document
    stop = text_tokenizers.load_tokenizer(str(bpe), "<stop>")
    assert (stop.decode([stop.eot]), stop.sha256) == ("<stop>", tok.sha256)
    assert text_tokenizers.load_tokenizer(str(bpe.parent)).sha256 == tok.sha256
    with pytest.raises(text_tokenizers.TokenizerError, match="<nope>"):
        text_tokenizers.load_tokenizer(str(bpe), "<nope>")
    unknown = tmp_path / "u.json"
    unknown.write_text(bpe.read_text().replace("<|endoftext|>", "<fin>"))
    (tmp_path / "a.txt").write_text(text)
    assert text_tokenizers.load_tokenizer(str(unknown)).eot is None
    code, said = command(tmp_path, "prepare", "--input=a.txt", "--output=a.tok", "--tokenizer=u.json")
    assert code == 2 and "--eot" in said
    assert command(tmp_path, "prepare", "--input=a.txt", "--output=a.tok", f"--tokenizer={bpe}", "--eot=<stop>")[0] == 0
    file = TokenFile.open(tmp_path / "a.tok")
    assert file.tokens[:].tolist() == [*ids, stop.eot]
    assert "def naïve" in command(tmp_path, "show", "a.tok")[1]
    unknown.rename(bpe.with_name("fin.json"))  # --eot is remembered
    made = command(tmp_path, "prepare", "--input=a.txt", "--output=b.tok", f"--tokenizer={bpe.parent}/fin.json", "--eot=<fin>")
    assert made[0] == 0 and "def naïve" in command(tmp_path, "show", "b.tok")[1]


def test_a_file_that_cannot_be_read_is_named(tmp_path, bpe, monkeypatch):
    with pytest.raises(text_tokenizers.TokenizerError, match=f"{tmp_path}/tokenizer.json"):
        text_tokenizers.load_tokenizer(str(tmp_path))

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(text_tokenizers.TokenizerError, match=f"{bpe}: Permission denied"):
        text_tokenizers.read_beside(str(bpe))


def test_bytes_of_first_tokens(tmp_path, bpe):
    """First tokens of documents are not predicted, so their bytes do not count. A character that is cut is the next token's."""
    texts = ["def naïve(x):\n" * 40, " lead", "self", "€uro", "ï"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    package = tokenizers.Tokenizer.from_file(str(bpe))
    merged = [len(package.encode(text).tokens[0]) for text in texts[:3]]  # byte-level: a letter of its alphabet for each byte
    assert merged[0] == 3 and min(merged) > 1
    for spec, first_bytes in (("byte", 5), (str(bpe), sum(merged))):
        assert command(tmp_path, "prepare", "--input=a.jsonl", "--output=a.tok", f"--tokenizer={spec}", "--force")[0] == 0
        header = TokenFile.open(tmp_path / "a.tok").header
        assert header["first_bytes"] == first_bytes
        predicted = sum(len(text.encode()) for text in texts) - first_bytes
        found = open_batches(tmp_path / "a.tok", global_batch=1, tokenizer=spec).bytes_per_token
        assert found == pytest.approx(predicted / (header["tokens"] - len(texts)))


def test_what_begins_a_document_is_the_tokenizers_own(tmp_path, bpe, monkeypatch):
    """Documents have the ids of the `tokenizers` package. The begin token occurs once, also in text that is read in pieces."""
    package = tokenizers.Tokenizer.from_file(str(bpe))
    package.no_truncation()
    package.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A <stop>", special_tokens=[("<s>", package.token_to_id("<s>")), ("<stop>", package.token_to_id("<stop>"))]
    )
    package.save(str(tmp_path / "t.json"))
    tok = text_tokenizers.load_tokenizer(str(tmp_path / "t.json"))
    assert (tok.bos, BYTE.bos) == ((package.token_to_id("<s>"),), ())
    assert text_tokenizers.load_tokenizer(str(bpe)).bos == ()
    documents = ["def naïve(x):\n" * 40, "<s>", "a" * 300]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (tmp_path / "b.txt").write_text(documents[0])
    monkeypatch.setattr("jaxtrain.data.documents.PIECE_BYTES", 64)  # the text file is read in many pieces
    for name in ("a.jsonl", "b.txt"):
        assert command(tmp_path, "prepare", f"--input={name}", f"--output={name}.tok", "--tokenizer=t.json")[0] == 0
    package.encode_special_tokens = True
    whole = TokenFile.open(tmp_path / "a.jsonl.tok")
    assert whole.tokens[:].tolist() == [i for text in documents for i in (*package.encode(text).ids[:-1], tok.eot)]
    assert whole.header["source_bytes"] == sum(len(text.encode()) for text in documents)
    assert whole.header["first_bytes"] == 0
    pieces = TokenFile.open(tmp_path / "b.txt.tok")
    assert np.flatnonzero(pieces.tokens[:] == tok.bos[0]).tolist() == [0]
    assert tok.decode(pieces.tokens[1:-1]) == documents[0]
    assert generation.prompt_ids(tok, "def", 700) == package.encode("def").ids[:-1]
    assert generation.prompt_ids(tok, "", 700) == [*tok.bos]
    assert generation.prompt_ids(BYTE, "", 257) == BYTE.encode("\n")
    with pytest.raises(text_tokenizers.TokenizerError, match="words"):
        generation.prompt_ids(SimpleNamespace(name="words", bos=(), encode=str.split), "", 257)
    with pytest.raises(text_tokenizers.TokenizerError, match="model has 3"):
        generation.prompt_ids(tok, "def", 3)


def test_a_prompt_that_the_model_cannot_read_is_refused_before_the_run(tmp_path, bpe, monkeypatch):
    """A model whose vocabulary covers only the ids of its token file can train."""
    monkeypatch.chdir(tmp_path)
    info = text_tokenizers.tokenizer_info(text_tokenizers.load_tokenizer(str(bpe)))
    write_file(tmp_path / "low.tok", [[5, 6, 7, 8] * 400], **info)
    asked = schema.default_config()
    asked.model.vocab_size = 16
    asked.data.update(source="low.tok", tokenizer=str(bpe), seq_len=64)
    asked.sample.update(prompt="def", max_tokens=4)
    asked.eval.every_steps, asked.paths.cache = 0, ""
    with pytest.raises(schema.ConfigError, match="'def'"):
        train.run(asked, "run")
    assert not (tmp_path / "run").exists()


def test_tokens_of_another_tokenizer_are_refused_and_hub_names_need_no_network(tmp_path, bpe):
    info = text_tokenizers.tokenizer_info(text_tokenizers.load_tokenizer(str(bpe)))
    for name, recorded in (("p", info), ("h", {**info, "name": "hf:no/such"})):
        write_file(tmp_path / f"{name}.tok", [[5] * 40], **recorded)
    for names, tokenizer, keys in (
        ("p", str(bpe), []),
        ("h", "hf:no/such", []),  # the file is not on this machine: the name decides
        ("h", str(bpe), []),  # the same definition under another name
        ("ph", "byte", ["data.tokenizer"]),  # one wrong key is one problem
        ("h", "hf:no/other", ["data.tokenizer"]),
    ):
        source = ",".join(f"{tmp_path}/{name}.tok" for name in names)
        problems = opening.check_data(schema.Data(source=source, tokenizer=tokenizer, seq_len=16), 700, False)
        assert [p.key for p in problems] == keys, (names, tokenizer)


SINGLE = [{"Sequence": {"id": "A", "type_id": 0}}]  # of a text, what transformers writes for a post-processor of none
PAIR = [*SINGLE, {"Sequence": {"id": "B", "type_id": 1}}]


def test_a_tokenizer_written_in_another_way_is_the_same(tmp_path, bpe):
    """White space, the order of keys, escapes, the form of merges, defaults, padding and truncation change no id. Any other
    change is refused, with a remedy that can work.
    """
    found = json.loads(bpe.read_text())
    model = found["model"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    merges, added = model["merges"], [*found["added_tokens"], {"id": 700, "content": "<new>", "special": True, **flags}]
    same = [
        found
        | {
            "truncation": None,
            "padding": {
                "strategy": {"Fixed": 8},
                "direction": "Left",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<s>",
            },
        },
        found | {"model": model | {"merges": [" ".join(pair) for pair in merges]}},
        found | {"model": {key: value for key, value in model.items() if value not in (None, False)}},
        found | {"added_tokens": found["added_tokens"][::-1]},
        found | {"pre_tokenizer": {k: x for k, x in found["pre_tokenizer"].items() if k != "use_regex"}},
        {key: value for key, value in found.items() if value is not None},
        found | {"post_processor": {"type": "TemplateProcessing", "single": SINGLE, "pair": PAIR, "special_tokens": {}}},
    ]
    others = [
        found | {"model": model | {"merges": merges[:-1]}},
        found | {"model": model | {"merges": [*merges[:-2], merges[-1], merges[-2]]}},
        found | {"model": model | {"byte_fallback": True}},
        found | {"added_tokens": added},
        found | {"normalizer": {"type": "NFKC"}},
        found | {"pre_tokenizer": found["pre_tokenizer"] | {"use_regex": False}},
        found
        | {"pre_tokenizer": found["pre_tokenizer"] | {"add_prefix_space": not found["pre_tokenizer"]["add_prefix_space"]}},
    ]
    texts = {json.dumps(found, indent=2, ensure_ascii=False): True, json.dumps(found, sort_keys=True): True}
    texts |= {json.dumps(each): True for each in same} | {json.dumps(each): False for each in others}
    tok = text_tokenizers.load_tokenizer(str(bpe))
    place = tmp_path / "moved"
    place.mkdir()
    for name, (text, equal) in enumerate(texts.items()):
        (place / "tokenizer.json").write_text(text, encoding="utf-8")
        info = text_tokenizers.tokenizer_info(tok) | {"name": str(place)}
        write_file(tmp_path / "t.tok", [[5] * 40], **info)
        data = schema.Data(source=str(tmp_path / "t.tok"), tokenizer=str(place), seq_len=16)
        problems = opening.check_data(data, 700, False)
        assert [p.key for p in problems] == ([] if equal else ["data.tokenizer"]), name
        assert all(f"data.tokenizer={place}" not in p.remedy for p in problems), "the present value is no remedy"
        text_tokenizers.load_tokenizer.cache_clear()
        other = text_tokenizers.load_tokenizer(str(place))
        assert (other.sha256 == tok.sha256) == equal, name
        assert not equal or other.encode("def f(x): return naïve") == tok.encode("def f(x): return naïve"), name
        where = {"data": {"fingerprint": {"tokenizer": info}}}
        before, now = text_tokenizers.tokenizer_hashes(where, str(place))["data.tokenizer"]
        assert (before == now) == equal, name
    write_file(tmp_path / "t.tok", [[5] * 40], **text_tokenizers.tokenizer_info(tok))  # the file's own tokenizer is still there
    (problem,) = opening.check_data(data, 700, False)
    named = problem.remedy.partition("data.tokenizer=")[2].partition(" or ")[0]
    assert not opening.check_data(schema.Data(source=data.source, tokenizer=named, seq_len=16), 700, False)
