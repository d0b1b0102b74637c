"""Token files that are damaged, truncated or replaced, before or after a run opens them: reported by name, never trained on."""

import errno
import os
import re
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from token_files import BYTE, open_batches, poke, read_windows, write_file

from jaxtrain.config import schema
from jaxtrain.config.context import Context
from jaxtrain.config.shapes import BATCH_KEYS
from jaxtrain.data import opening
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.tokenfile import TokenFile, TokenFileError, TokenWriter, verify_file
from jaxtrain.data.windows import Windows, open_windows
from jaxtrain.train.batch_feed import AHEAD, BatchFeed

LONGEST = 40  # most tokens of a document; rows of this length hold every conversation in full


def write(path: Path, tokens: int = 800, loss: bool = True, seed: int = 0) -> Path:
    """Write a file of about this many tokens, in documents of 1 to LONGEST tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, LONGEST, 2 * tokens // LONGEST).tolist()
    return write_file(path, [rng.integers(0, 256, n).tolist() for n in lengths], loss)


def windows_of(path: Path, seq_len: int = LONGEST) -> Windows:
    return open_windows(TokenFile.open(path), seq_len, None, 0)


def rows_of(windows: Windows) -> list[np.ndarray | None]:
    return list(windows.rows(np.arange(windows.windows)))


def same(got: list[np.ndarray | None], want: list[np.ndarray | None]) -> bool:
    return all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))


def flip(path: Path, at: int, bit: int = 0) -> None:
    poke(path, at, path.read_bytes()[at] ^ (1 << bit))


def test_a_bit_flipped_before_the_file_is_opened_is_found(tmp_path):
    """Every byte is tested: tokens, loss bits, padding, offsets, header and preamble."""
    path = write(tmp_path / "a.tok", 400)
    want = rows_of(windows_of(path))
    assert verify_file(path) == ""
    for at in range(path.stat().st_size):
        flip(path, at, at % 8)
        with pytest.raises(TokenFileError, match=re.escape(str(path))):
            TokenFile.open(path).check()
        assert at % 16 or verify_file(path), at
        flip(path, at, at % 8)
    TokenFile.open(path).check()
    assert same(rows_of(windows_of(path)), want)


@pytest.mark.parametrize("loss", [False, True])
def test_a_file_that_is_cut_off_is_an_error_and_no_signal(tmp_path, loss):
    whole = write(tmp_path / "whole.tok", 40_000, loss)
    size = whole.stat().st_size
    file = TokenFile.open(whole)
    borders = {file.tokens.begin, file.tokens.end, file.tokens.end + loss * -(-len(file.tokens) // 64) * 8}
    for length in sorted({0, 63, 16_384, size - 1} | {border + d for border in borders for d in (-1, 0, 1)}):
        path = Path(shutil.copy(whole, tmp_path / "a.tok"))
        windows, unused, was = windows_of(path), windows_of(path), path.stat()
        rows_of(windows)
        os.truncate(path, length)
        for each in (windows, unused):
            with pytest.raises(TokenFileError, match=rf"a.tok: .*{size:,} bytes, now {length:,}\b"):
                rows_of(each)
        os.truncate(path, size)  # restoring the size leaves a hole of zeros
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        assert verify_file(path)


@pytest.mark.parametrize("change", ["rewritten", "rewritten with the same", "appended"])
def test_a_file_that_is_written_to_is_named(tmp_path, change):
    path = write(tmp_path / "a.tok")
    other = write(tmp_path / "other.tok", seed=1) if change == "rewritten" else path
    data = other.read_bytes()
    windows = windows_of(path)
    rows_of(windows)
    with path.open("r+b") as f:
        f.write(data + b"x" * (change == "appended"))
        f.truncate()
    os.utime(path)  # the file system's clock must have advanced
    for _ in range(2):
        with pytest.raises(TokenFileError, match=f"^{re.escape(str(path))}: has changed"):
            windows.rows(np.asarray([0]))


def test_no_false_alarm(tmp_path):
    """A file that is deleted or replaced during a run is read to the end of the run in its old state."""
    path = write(tmp_path / "a.tok")
    windows = windows_of(path)
    want = rows_of(windows)
    for harmless in (
        lambda: os.utime(path, ns=(0, path.stat().st_mtime_ns)),
        lambda: os.link(path, tmp_path / "link.tok"),
        lambda: write(tmp_path / "other.tok", seed=1).replace(path),
        path.unlink,
    ):
        harmless()
        assert same(rows_of(windows), want)


@pytest.mark.parametrize("loss", [False, True])
def test_a_disk_that_cannot_be_read_and_one_that_gives_less_than_was_asked_for(tmp_path, monkeypatch, loss):
    """On a network file system or beyond 2 GiB, a read may return less. The rest is read by a further call."""
    path = write(tmp_path / "a.tok", loss=loss)
    want, windows, preadv = rows_of(windows_of(path)), windows_of(path), os.preadv
    file = TokenFile.open(path)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    # Offsets are memory-mapped. An error there would be a signal, so they are read once before.
    for read in (lambda: rows_of(windows), lambda: file.doc_offsets, lambda: open_windows(file, LONGEST, None, 0)):
        with pytest.raises(TokenFileError, match="a.tok: .*Input/output error"):
            read()
    assert "Input/output error" in verify_file(path)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [memoryview(buffers[0]).cast("B")[:100]], at))
    assert same(rows_of(windows), want) and same(rows_of(windows_of(path)), want) and verify_file(path) == ""


def test_the_error_comes_with_the_batch_it_belongs_to(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.tok", loss=False, seed=ord(name))
    batches = open_batches(f"{tmp_path}/a.tok=0.97,{tmp_path}/b.tok=0.03")
    first, second = (s for s in range(16) if str(tmp_path / "b.tok") in read_windows(batches, s))
    assert second >= first + 5
    want = [batches.batch(s) for s in range(first + 1, second)]
    before = threading.active_count()
    os.truncate(tmp_path / "b.tok", 100)
    got = []
    abstract: Any = {"tokens": jax.ShapeDtypeStruct((4, 16), np.int32)}
    feed = BatchFeed(batches, first + 1, abstract, Context())
    with pytest.raises(TokenFileError, match="b.tok: has changed"):
        while True:
            got.append(feed.next(bool))
    feed.close()
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert all(np.array_equal(g[k], w[k]) for k in BATCH_KEYS)
    assert threading.active_count() == before


def test_batches_are_read_ahead_of_the_step():
    """AHEAD batches wait before the first request, and the thread holds one more."""
    made: list[int] = []
    source = SimpleNamespace(batch=lambda step: made.append(step) or {})
    abstract: Any = {"tokens": jax.ShapeDtypeStruct((4, 16), np.int32)}
    feed = BatchFeed(source, 5, abstract, Context())
    ended = time.monotonic() + 60
    while len(made) <= AHEAD and time.monotonic() < ended:
        time.sleep(0.001)
    time.sleep(0.05)
    feed.close()
    assert made == list(range(5, 6 + AHEAD))


def test_a_damaged_file_is_a_problem_of_the_config_before_the_run(tmp_path, monkeypatch):
    path = write(tmp_path / "a.tok", 40_000)
    for at in (70, TokenFile.open(path).tokens.end + 10):
        flip(path, at)
        with pytest.raises(schema.ConfigError) as e:
            open_batches(path)
        assert [(p.key, p.value) for p in e.value.problems] == [("data.source", str(path))]
        flip(path, at)
    flip(path, 70)
    monkeypatch.setattr(opening, "CHECKED_BYTES", path.stat().st_size)
    open_batches(path)  # a larger file is left to `data verify`


def test_a_damaged_part_is_not_joined_into_the_output_with_a_new_checksum(tmp_path):
    part = write(tmp_path / "a.tok")
    flip(part, 300)
    joined = TokenWriter(tmp_path / "b.tok", text_tokenizers.tokenizer_info(BYTE), loss=True)
    with pytest.raises(TokenFileError, match="a.tok: "), joined as writer:
        writer.append(TokenFile.open(part))
    assert not (tmp_path / "b.tok").exists()


def test_what_is_no_whole_token_file_of_this_format_is_refused(tmp_path):
    path = write(tmp_path / "a.tok")
    good = path.read_bytes()
    older = good[:8] + b"\1" + good[9:]
    for damaged in (good[:-1], good[: len(good) // 2], good + b"x", b"", b"jaxtrtok", bytes(64) + good[64:], older):
        path.write_bytes(damaged)
        assert verify_file(path)
        with pytest.raises(TokenFileError, match="a.tok"):
            TokenFile.open(path)
