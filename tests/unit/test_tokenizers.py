"""Tokenizers: bytes and Hugging Face's files, the tokens that begin and end a document, and prompts."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.processors
import tokenizers.trainers
from token_files import BYTE, command

from jaxtrain import config, generation
from jaxtrain.data import pipeline, readers
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.tokenfile import TokenFile, TokenWriter, verify
from jaxtrain.train import run as train


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    """Return a real byte-level BPE tokenizer.json, trained on a little of the standard library."""
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "<|endoftext|>", "<stop>"], initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator([Path(json.__file__).read_text()], trainer)
    tok.enable_truncation(5)  # these must not cut documents
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tok.save(str(path))
    return path


def test_byte_tokenizer_round_trip():
    text = "naïve 𝄞 \x00\n"
    assert BYTE.decode([*BYTE.encode(text), BYTE.eot]) == text
    assert BYTE.encode_batch([text, ""])[0].tolist() == BYTE.encode(text)
    assert BYTE.decode([0xC3]) == "�"


def test_hugging_face_tokenizer(tmp_path, bpe):
    tok = text_tokenizers.load_tokenizer(str(bpe))
    text = "def naïve(x): return '<|endoftext|>' 𝄞 " * 5
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert tok.encode_batch([text, "a"])[0].tolist() == ids
    assert tok.vocab_size == 600
    assert tok.decode([tok.eot]) == "<|endoftext|>"
    assert tok.eot not in ids  # text cannot imitate the end of a document
    stop = text_tokenizers.load_tokenizer(str(bpe), "<stop>")
    assert (stop.decode([stop.eot]), stop.sha256) == ("<stop>", tok.sha256)
    assert text_tokenizers.load_tokenizer(str(bpe.parent)).sha256 == tok.sha256
    with pytest.raises(text_tokenizers.TokenizerError, match="'<nope>' is not in its vocabulary"):
        text_tokenizers.load_tokenizer(str(bpe), "<nope>")
    unknown = tmp_path / "u.json"
    unknown.write_text(bpe.read_text().replace("<|endoftext|>", "<fin>"))
    with pytest.raises(text_tokenizers.TokenizerError, match="--eot=TOKEN"):
        text_tokenizers.load_tokenizer(str(unknown))
    (tmp_path / "a.txt").write_text(text)
    assert command(tmp_path, "prepare", "--input=a.txt", "--output=a.tok", f"--tokenizer={bpe}", "--eot=<stop>")[0] == 0
    file = TokenFile.open(tmp_path / "a.tok")
    assert file.tokens[:].tolist() == [*ids, stop.eot]
    assert "def naïve" in command(tmp_path, "show", "a.tok")[1]
    assert verify(file.path) == []


def test_a_file_that_cannot_be_read_is_named(tmp_path, bpe, monkeypatch):
    with pytest.raises(text_tokenizers.TokenizerError, match=f"cannot read {tmp_path}/tokenizer.json: no such file"):
        text_tokenizers.load_tokenizer(str(tmp_path))

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    recorded = text_tokenizers.info(text_tokenizers.load_tokenizer(str(bpe)))
    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(text_tokenizers.TokenizerError, match=f"cannot read {bpe}: Permission denied"):
        text_tokenizers.read_beside(str(bpe))
    assert f"cannot read {bpe}: Permission denied" in text_tokenizers.differs(str(bpe), recorded)


def test_what_begins_a_document_is_the_tokenizers_own(tmp_path, bpe, monkeypatch):
    """The begin tokens equal those of the `tokenizers` package. They occur once, at the start of each document."""
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
    monkeypatch.setattr(readers, "PIECE_BYTES", 64)  # the text file is read in many pieces
    for name in ("a.jsonl", "b.txt"):
        assert command(tmp_path, "prepare", f"--input={name}", f"--output={name}.tok", "--tokenizer=t.json")[0] == 0
    package.encode_special_tokens = True
    whole = TokenFile.open(tmp_path / "a.jsonl.tok")
    assert whole.tokens[:].tolist() == [i for text in documents for i in (*package.encode(text).ids[:-1], tok.eot)]
    assert np.count_nonzero(np.asarray(whole.tokens) == tok.bos[0]) == len(documents)
    assert whole.header["source_bytes"] == sum(len(text.encode()) for text in documents)
    pieces = TokenFile.open(tmp_path / "b.txt.tok")
    assert np.flatnonzero(np.asarray(pieces.tokens) == tok.bos[0]).tolist() == [0]
    assert tok.decode(pieces.tokens[1:-1]) == documents[0]
    assert generation.prompt_ids(tok, "def", 600) == package.encode("def").ids[:-1]
    assert generation.prompt_ids(tok, "", 600) == [*tok.bos]
    assert generation.prompt_ids(BYTE, "", 257) == BYTE.encode("\n")
    with pytest.raises(text_tokenizers.TokenizerError, match="makes no token of the prompt ''"):
        generation.prompt_ids(SimpleNamespace(name="words", bos=(), encode=str.split), "", 257)
    with pytest.raises(text_tokenizers.TokenizerError, match="gives the id .* and the model has 3"):
        generation.prompt_ids(tok, "def", 3)


def test_a_prompt_that_the_model_cannot_read_is_refused_before_the_run(tmp_path, bpe, monkeypatch):
    """A model whose vocabulary covers only the ids of its token file can train. A prompt with larger ids would end the run at
    the first sample.
    """
    monkeypatch.chdir(tmp_path)
    tok = text_tokenizers.load_tokenizer(str(bpe))
    with TokenWriter(tmp_path / "low.tok", text_tokenizers.info(tok)) as writer:
        for _ in range(40):
            writer.write([5, 6, 7, 8] * 40, 160)
            writer.end_document()
    asked = config.default_config()
    asked.model.update(num_layers=1, d_model=32, num_heads=2, num_kv_heads=2, d_ff=64, vocab_size=16)
    asked.data.update(source="low.tok", tokenizer=str(bpe), seq_len=64)
    asked.train.update(steps=1, global_batch=8)
    asked.optimizer.warmup_steps = 0
    asked.sample.update(prompt="def", max_tokens=4)
    asked.eval.every_steps, asked.paths.cache = 0, ""
    with pytest.raises(config.ConfigError, match="the prompt 'def', and the model has 16"):
        train.run(asked, "run")
    assert not (tmp_path / "run").exists()


def test_tokens_of_another_tokenizer_are_refused_and_hub_names_need_no_network(tmp_path, bpe):
    info = text_tokenizers.info(text_tokenizers.load_tokenizer(str(bpe)))
    for name, recorded in (("p", info), ("h", {**info, "name": "hf:no/such"})):
        with TokenWriter(tmp_path / f"{name}.tok", recorded) as writer:
            writer.write([5] * 40, 40)
            writer.end_document()

    def found(names, tokenizer):
        source = ",".join(f"{tmp_path}/{n}.tok" for n in names)
        return pipeline.check(config.Data(source=source, tokenizer=tokenizer, seq_len=16), 600, False)

    def keys(problems):
        return [p.key for p in problems]

    assert found("p", str(bpe)) == []
    assert found("h", "hf:no/such") == []  # the file is not on this machine: the name decides
    assert found("h", str(bpe)) == []  # the same definition under another name
    assert keys(found("ph", "byte")) == ["data.tokenizer"], "one wrong key is one problem"
    assert keys(found("h", "hf:no/other")) == ["data.tokenizer"]
