"""Rows of conversations at the lengths of two published sets: padding, whole conversations, equal rows in any process.

recorded/conversation_lengths.json has 401 quantiles of the number of tokens in a conversation, with their sources: requests and
answers of a service (Azure), and HH-RLHF's conversations by a byte-level BPE of 2,500 tokens.
"""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import helpers
import numpy as np
import pytest
import runs
from token_files import BYTE

from jaxtrain.config import schema
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data import windows
from jaxtrain.data.batches import open_source
from jaxtrain.data.tokenfile import TokenWriter

SETS = json.loads((Path(__file__).parents[1] / "recorded/conversation_lengths.json").read_text())
END = 1 << 20  # an id above the numbers of all conversations


def write(path: Path, lengths: list[int]) -> Path:
    """Write conversations: k is repeated, then END. The second half of each conversation counts in the loss."""
    with TokenWriter(path, {**tokenizers.tokenizer_info(BYTE), "vocab_size": END + 1, "eot": END}, loss=True) as writer:
        for k, n in enumerate(lengths):
            writer.write(np.full(n - 1, k), n, np.arange(n - 1) >= n // 2, n)
            writer.end_document(loss=True)
    return path


def drawn(which: dict, count: int) -> list[int]:
    return np.random.default_rng(0).choice(which["quantiles"], count).tolist()


@pytest.mark.parametrize("seq_len", helpers.few([4096, 8192], 8192))
@pytest.mark.parametrize("which", SETS, ids=lambda which: which["name"].split()[0])
def test_padding_and_whole_conversations(tmp_path: Path, which: dict, seq_len: int) -> None:
    """By default padding is below 3%. Each conversation that fits into a row is in one row once, and its answer follows its
    whole prompt.
    """
    lengths = drawn(which, which["conversations"])
    source = write(tmp_path / "a.tok", lengths)
    data = schema.Data(source=str(source), seq_len=seq_len)
    batches = open_source(data, data.source, split="train", global_batch=8, data_dir="")
    (packed,) = batches.sources
    assert isinstance(packed, windows.PackedRows)
    fits = [n <= seq_len + 1 for n in lengths]
    assert batches.truncated[0] == fits.count(False)
    padding, met, tokens = 0, [], 0
    for first in range(0, packed.windows, 64):
        batch = windows.make_batch(*packed.rows(np.arange(first, min(first + 64, packed.windows))), True, batches.max_segments)
        padding += int((batch["segments"] == 0).sum())
        tokens += batch["tokens"].size
        for token, segment, weight, position in zip(
            *(batch[k] for k in ("tokens", "segments", "weights", "positions")), strict=True
        ):
            for number in range(1, int(segment.max()) + 1):
                own = np.flatnonzero(segment == number)
                k = int(token[own[0]])
                met.append(k)
                # A document's last target may be the row's last target, which is no input.
                assert (token[own[:-1]] == k).all() and (position[own] == np.arange(len(own))).all()
                if fits[k]:
                    assert lengths[k] - 1 <= len(own) <= lengths[k]
                    assert np.flatnonzero(weight[own])[0] == lengths[k] // 2 - 1  # the target after the prompt's last token
    assert sorted(met) == [k for k in range(len(lengths)) if fits[k] or lengths[k] // 2 <= seq_len]
    longer = batches.truncated[0]
    print(f"{which['name']}, {seq_len}: {len(lengths)} conversations, {longer} longer, {padding / tokens:.2%} padding")
    assert padding / tokens < 0.03


def digests(source: str, rows: list[int], first: int) -> dict[str, str]:
    """Return a digest of each of the rows `rows` in the batches from `first` to 11, by "step row"."""
    data = schema.Data(source=source, seq_len=1024)
    batches = open_source(data, source, split="train", global_batch=8, data_dir="")
    found = {}
    for step in range(first, 12):
        batch = batches.batch(step, np.array(rows))
        for i, row in enumerate(rows):
            content = b"".join(np.ascontiguousarray(batch[k][i]).tobytes() for k in sorted(batch))
            found[f"{step} {row}"] = hashlib.sha256(content).hexdigest()
    return found


OTHER_PROCESS = "import json, sys, test_packing as t; print(json.dumps(t.digests(sys.argv[1], *json.loads(sys.argv[2]))))"


def test_rows_are_the_same_in_any_number_of_processes_and_after_a_resume(tmp_path: Path) -> None:
    """A process that reads every second row from step 5 on has the rows of one that reads all from the first step."""
    for k, which in enumerate(SETS):
        write(tmp_path / f"{k}.tok", [min(n, 1500) for n in drawn(which, 400)])
    mixture = f"{tmp_path}/0.tok=0.5,{tmp_path}/1.tok=0.5"
    whole = digests(mixture, [*range(8)], 0)
    assert len(whole) == 96 and len(set(whole.values())) == 96
    assert digests(mixture, [0, 4], 0) == {key: digest for key, digest in whole.items() if key[-1] in "04"}
    folders = {"PYTHONPATH": os.pathsep.join(str(runs.REPO / name) for name in ("", "tests", "tests/proofs"))}
    line = [sys.executable, "-c", OTHER_PROCESS, mixture, "[[1, 3, 5, 7], 5]"]
    other = json.loads(subprocess.run(line, stdout=subprocess.PIPE, check=True, env=os.environ | folders).stdout)
    assert other == {key: digest for key, digest in whole.items() if int(key.split()[0]) >= 5 and int(key[-1]) % 2}


def test_fifty_conversations_fill_a_batch_of_the_defaults(tmp_path: Path) -> None:
    """A short last row is padded, and conversations come again where a batch has more rows than there are."""
    defaults = schema.RunConfig()
    source = write(tmp_path / "talk.tok", [40] * 50)
    data = dataclasses.replace(defaults.data, source=str(source))
    batches = open_source(data, data.source, split="train", global_batch=defaults.train.global_batch, data_dir="")
    batch = batches.batch(0)
    assert batch["tokens"].shape == (defaults.train.global_batch, data.seq_len) and batches.max_segments >= 2
    assert (batch["segments"] == 0).any() and batch["weights"].any(axis=1).all()
    assert batches.epoch(1) > 1
