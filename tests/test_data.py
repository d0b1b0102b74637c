"""Token files, their preparation, and batches as a pure function of (seed, step)."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxtrain import config
from jaxtrain.data import pipeline, stdlib, tokenfile
from jaxtrain.data import tokenizer as tokenizers
from jaxtrain.data.tokenfile import TokenFile, TokenWriter
from jaxtrain.shapes import BATCH_KEYS

BYTE = tokenizers.ByteTokenizer()


def write_file(path: Path, documents: list[list[int]], vocab: int = 257, eot: int = 256, name: str = "byte") -> Path:
    info = {**tokenizers.info(BYTE), "vocab_size": vocab, "eot": eot, "name": name}
    with TokenWriter(path, info) as writer:
        for ids in documents:
            writer.write(ids, len(ids))
            writer.end_document()
    return path


def random_documents(seed: int, count: int, mean: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, max(0, int(n))).tolist() for n in rng.exponential(mean, count)]


def open_batches(path, *, seq_len=16, global_batch=4, split="train", data_dir="unused", **keys) -> pipeline.Batches:
    data = config.Data(source=str(path), seq_len=seq_len, **keys)
    return pipeline.open_source(data, data.source, split=split, global_batch=global_batch, data_dir=data_dir)


def oracle_row(documents: list[list[int]], window: int, T: int, packing: str, max_segments: int) -> dict[str, list]:
    """One row, token by token, in the most direct way."""
    stream = [(t, d) for d, ids in enumerate(documents) for t in [*ids, 256]]
    row = {k: [] for k in BATCH_KEYS}
    segment, position = 0, 0
    for i in range(window * T, window * T + T):
        (token, doc), (target, next_doc) = stream[i], stream[i + 1]
        if i == window * T or (packing == "documents" and stream[i - 1][1] != doc):
            segment, position = segment + 1, 0
        masked = segment > max_segments
        weight = 0.0 if masked or (packing == "documents" and next_doc != doc) else 1.0
        values = (token, target, 0 if masked else segment, 0 if masked else position, weight)
        for k, v in zip(BATCH_KEYS, values, strict=True):
            row[k].append(v)
        position += 1
    return row


@pytest.mark.parametrize(
    ("mean", "T", "max_segments"), [(5, 16, 32), (5, 16, 2), (1, 16, 3), (40, 16, 1), (100, 7, 4), (3, 1, 1)]
)
@pytest.mark.parametrize("packing", ["documents", "none"])
def test_rows_equal_a_token_by_token_oracle(tmp_path, mean, T, max_segments, packing):
    documents = random_documents(mean * 100 + T, 60, mean)
    batches = open_batches(
        write_file(tmp_path / "a.tok", documents), seq_len=T, global_batch=3, packing=packing, max_segments=max_segments
    )
    masked = total = 0
    windows = batches.sources[0].windows
    assert windows == (sum(len(d) + 1 for d in documents) - 1) // T
    seen = []
    for step in range(-(-windows // 3)):
        batch = batches.batch(step)
        index = np.arange(step * 3, step * 3 + 3)
        for r, window in enumerate(batches.windows(0, index)):
            want = oracle_row(documents, int(window), T, packing, max_segments)
            for key, dtype in BATCH_KEYS.items():
                assert batch[key].dtype == dtype
                assert batch[key].shape == (3, T)
                assert batch[key][r].tolist() == want[key], (key, step, r)
            if index[r] < windows:
                seen.append(int(window))
                masked += want["segments"].count(0)
                total += T
    assert sorted(seen) == list(range(windows))
    assert batches.masked_fraction == pytest.approx(masked / total)
