"""Token files for tests: written from lists of ids, read back as texts, and the data command in this process."""

import contextlib
import io
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxtrain.commands.data import main
from jaxtrain.config import schema
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.batches import Batches, open_source
from jaxtrain.data.tokenfile import TokenFile, TokenWriter

BYTE = text_tokenizers.ByteTokenizer()


def write_file(path: Path, documents: Sequence[Sequence[int]], loss: bool = False, **info: object) -> Path:
    """Write a token file with these documents of ids. Each id counts as one byte of text. With `loss`, even ids count."""
    with TokenWriter(path, {**text_tokenizers.tokenizer_info(BYTE), **info}, loss=loss) as writer:
        for ids in documents:
            flags = np.asarray(ids, np.int64) % 2 == 0 if loss else None
            writer.write(list(ids), len(ids), flags, int(np.sum(flags)) if loss else 0, 1)
            writer.end_document()
    return path


def write_conversations(path: Path, lengths: Sequence[int], loss: bool = True, first: int = 0) -> Path:
    """Write conversations k = 0, 1, ..., of lengths[k] tokens. Each token is (first + k) % 256; the last is 256 (end-of-text).

    With `loss`, the tokens of the second half of each conversation count in the loss.
    """
    with TokenWriter(path, text_tokenizers.tokenizer_info(BYTE), loss=loss) as writer:
        for k, n in enumerate(lengths):
            ids = [(first + k) % 256] * (n - 1)
            writer.write(ids, n - 1, np.arange(n - 1) >= n // 2 if loss else None, (n - 1 - n // 2) * loss)
            writer.end_document(loss=loss)
    return path


def random_documents(seed: int, count: int, mean: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, max(0, int(n))).tolist() for n in rng.exponential(mean, count)]


def open_batches(source: Path | str, seq_len: int = 16, global_batch: int = 4, **keys: object) -> Batches:
    data = schema.Data(source=str(source), seq_len=seq_len, **keys)  # pyright: ignore[reportArgumentType]
    return open_source(data, data.source, split="train", global_batch=global_batch, data_dir="unused")


def texts(path: Path) -> list[str]:
    """Return the documents of a byte-level token file as text."""
    file = TokenFile.open(path)
    return [BYTE.decode(file.tokens[a:b]) for a, b in itertools.pairwise(file.doc_offsets[:].tolist())]


def write_lines(path: Path, count: int, words: int = 40) -> Path:
    """Write JSON lines with one document each."""
    path.write_text("".join(json.dumps({"text": f"line {i}: " + "some words " * (i % words)}) + "\n" for i in range(count)))
    return path


def finished(folder: Path) -> list[Path]:
    """Return the token files of finished parts of a.tok, without those for validation."""
    return sorted((folder / "a.tok.partial").glob("??????.tok"))


def train_bpe(folder: Path, special: Sequence[str | AddedToken], **parts: Any) -> Path:
    """Train a tokenizer.json of 700 tokens, byte-level unless `parts` are given, on a module of the standard library."""
    tok = Tokenizer(models.BPE(unk_token="<unk>" if "<unk>" in special else None))
    parts = parts or {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False), "decoder": decoders.ByteLevel()}
    for name, part in parts.items():
        setattr(tok, name, part)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False)
    tok.train_from_iterator([Path(json.__file__).read_text()], trainer)
    folder.mkdir(exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def command(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run `python -m jaxtrain data` in this process, in a folder. Returns (exit code, output)."""
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main(list(arguments))
        except SystemExit as e:
            code = e.code
    return code if isinstance(code, int) else 1, out.getvalue()


def poke(path: Path, at: int, byte: int) -> None:
    """Overwrite one byte of a file, and restore its modification time, so that only a checksum can detect the change."""
    was = path.stat()
    with path.open("r+b") as f:
        f.seek(at)
        f.write(bytes([byte]))
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def read_windows(batches: Batches, step: int) -> dict[str, list[int]]:
    """Return the numbers of the windows in a batch, by the path of their source, in the order of the rows."""
    index = step * batches.global_batch + np.arange(batches.global_batch)
    source, within = batches.mixture.sources_of(index)
    return {
        batches.sources[k].name: batches.window_numbers(k, within[source == k]).tolist() for k in np.unique(source).tolist()
    }
