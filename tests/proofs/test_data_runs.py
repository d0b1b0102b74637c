"""A run on text and conversations: messages about rows with padding, and an error before it trains on a damaged block."""

import json

import pytest
from token_files import first_steps, open_batches, poke, random_documents, write_conversations, write_file

from jaxtrain import config
from jaxtrain.data import tokenfile
from jaxtrain.data.tokenfile import TokenFileError
from jaxtrain.train import run as train


def test_a_run_says_what_rows_lack_and_ends_at_a_damaged_block(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_conversations(tmp_path / "chat.tok", [100, 65, 66, 10, *[4] * 40])
    path = write_file(tmp_path / "text.tok", random_documents(0, 12_000, 30))
    source = "chat.tok=0.5,text.tok=0.5"
    asked = config.default_config()
    asked.model.update(num_layers=1, d_model=32, num_heads=2, num_kv_heads=2, d_ff=64, vocab_size=264)
    asked.data.update(source=source, seq_len=64, max_segments=3)
    asked.train.update(steps=60, global_batch=8)
    asked.optimizer.warmup_steps = 0
    asked.sample.every_steps = asked.sample.max_tokens = 0
    asked.eval.every_steps, asked.checkpoint.every_steps, asked.paths.cache, asked.log.every_steps = 0, 0, "", 1
    batches = open_batches(source, 64, 8, max_segments=3, seed=asked.data.seed)
    block, step = max(first_steps(batches, 1, 40).items(), key=lambda found: found[1])
    assert step > 10
    at = block * tokenfile.BLOCK + 5000
    poke(path, at, path.read_bytes()[at] ^ 64)
    with pytest.raises(TokenFileError, match=rf"text.tok: block {block} "):
        result = train.run(asked, "run")
        raise result.error or AssertionError("it was not seen")
    said = capsys.readouterr().out
    cut = "data: 2 conversations of more than data.seq_len=64 + 1 tokens lose 36 of all 401 tokens (9.0%)."
    assert cut in said
    assert "chat.tok are 33% full, since each holds at most data.max_segments=3 documents" in said
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    done = max((line["step"] for line in lines if line["kind"] == "train"), default=0)
    assert step - 1 <= done <= step  # a step counts from 1 when it is done, and the last step's metrics may be missing
    assert f"text.tok: block {block} " in (tmp_path / "run" / "receipt.json").read_text()
