"""Token files that are damaged, truncated or replaced, before or after a run opens them: reported by name, never trained on."""

import errno
import itertools
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
from token_files import BYTE, first_steps, open_batches, poke, write_file

from jaxtrain.config import schema
from jaxtrain.config.context import Context
from jaxtrain.config.shapes import BATCH_KEYS
from jaxtrain.data import tokenfile
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.tokenfile import TokenFile, TokenFileError, TokenWriter, verify
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


@pytest.fixture
def small_blocks(monkeypatch) -> int:
    """Make blocks 64 bytes long, so that a file of a few thousand bytes has many blocks."""
    monkeypatch.setattr(tokenfile, "BLOCK", 64)
    return 64


def test_a_bit_flipped_before_the_file_is_opened_is_found(tmp_path, small_blocks):
    """Every byte is tested: tokens, loss bits, padding, offsets, checksums, header and preamble."""
    path = write(tmp_path / "a.tok", 400)
    assert TokenFile.open(path).blocks.end > 15 * small_blocks
    want = rows_of(windows_of(path))
    assert verify(path) == []
    for at in range(path.stat().st_size):
        flip(path, at, at % 8)
        with pytest.raises(TokenFileError, match=re.escape(str(path))):
            rows_of(windows_of(path))
        assert at % 16 or verify(path), at
        flip(path, at, at % 8)
    assert same(rows_of(windows_of(path)), want)


def test_a_block_is_compared_with_its_checksum_at_its_first_use_and_not_again(tmp_path, small_blocks, monkeypatch):
    path = write(tmp_path / "a.tok", 400)
    parts, pread, read = tokenfile.layout(TokenFile.open(path).header), os.pread, []

    def noted(fd: int, n: int, at: int) -> bytes:
        read.extend(range(at, at + n))
        return pread(fd, n, at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", noted)
        windows = windows_of(path)
        opened = len(read)
        want = rows_of(windows)
        first = read[opened:]
        assert same(rows_of(windows), want)
        assert read[opened:] == first and len({*first}) == len(first)
    # Opening reads the preamble, header, checksums and offsets. Reading rows reads the rest, and blocks that also hold offsets.
    assert {*read[:opened], *first} == {*range(path.stat().st_size)}
    assert {*first} >= {*range(parts["tokens"].start, parts["documents"].start - small_blocks)}


def test_only_rows_that_need_the_damaged_block_are_refused(tmp_path):
    """Blocks have the default size, and ids have 2 or 4 bytes."""
    for vocab, width in ((257, 2), (70_000, 4)):
        documents, block = np.random.default_rng(vocab).integers(0, 256, (200, 700)).tolist(), 3
        path = write_file(tmp_path / f"{vocab}.tok", documents, vocab_size=vocab)
        want = rows_of(windows_of(path, 512))
        windows = windows_of(path, 512)  # no token of this file has been read yet
        flip(path, block * tokenfile.BLOCK + 77)
        first = (block * tokenfile.BLOCK - 64) // width
        last = ((block + 1) * tokenfile.BLOCK - 64) // width
        needs = [w * 512 < last and w * 512 + 513 > first for w in range(windows.windows)]
        assert 0 < sum(needs) < len(needs) / 2
        for w, needed in enumerate(needs):
            if needed:
                with pytest.raises(TokenFileError, match=r"block 3 \(bytes 49,152 to 65,536\)"):
                    windows.rows(np.asarray([w]))
            else:
                tokens, _, column, _, _ = windows.rows(np.asarray([w]))
                assert np.array_equal(tokens[0], want[0][w])
                assert np.array_equal(column, want[2][want[1] == w])
        with pytest.raises(TokenFileError, match="block 3 "):  # a batch with one damaged row is refused
            windows.rows(np.asarray([0, needs.index(True), 1]))


def test_a_file_that_is_cut_off_is_an_error_and_no_signal(tmp_path):
    whole = write(tmp_path / "whole.tok", 40_000, loss=False)
    size = whole.stat().st_size
    parts = tokenfile.layout(TokenFile.open(whole).header)
    lengths = {0, 63, 16_384, size - 1} | {part.start + d for part in parts.values() for d in (-1, 0, 1)}
    for length in sorted(lengths):
        path = Path(shutil.copy(whole, tmp_path / "a.tok"))
        windows, unused, was = windows_of(path), windows_of(path), path.stat()
        rows_of(windows)
        os.truncate(path, length)
        for each in (windows, unused):
            with pytest.raises(TokenFileError, match=rf"a.tok: .*{size:,} bytes, now {length:,}\b"):
                rows_of(each)
        os.truncate(path, size)  # restoring the size leaves a hole of zeros, which is an error too
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        if path.read_bytes()[: parts["tokens"].stop] != whole.read_bytes()[: parts["tokens"].stop]:
            with pytest.raises(TokenFileError, match=r"block \d+ "):
                rows_of(unused)


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


def test_a_disk_that_cannot_be_read_and_one_that_gives_less_than_was_asked_for(tmp_path, small_blocks, monkeypatch):
    """After a signal, on a network file system or beyond 2 GiB, pread may return less. The rest is read by a further call."""
    path = write(tmp_path / "a.tok")
    want, windows, pread = rows_of(windows_of(path)), windows_of(path), os.pread

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(TokenFileError, match="a.tok: .*Input/output error"):
        rows_of(windows)
    monkeypatch.setattr(os, "pread", lambda fd, n, at: pread(fd, min(n, 100), at))
    assert same(rows_of(windows), want) and same(rows_of(windows_of(path)), want)


def test_the_error_comes_with_the_batch_it_belongs_to(tmp_path, small_blocks):
    for name in "ab":
        write(tmp_path / f"{name}.tok", loss=False, seed=ord(name))
    batches = open_batches(f"{tmp_path}/a.tok=0.5,{tmp_path}/b.tok=0.5")
    block, step = max(first_steps(batches, 1, 9).items(), key=lambda found: found[1])
    assert step >= 4
    want = [batches.batch(s) for s in range(step)]
    before = threading.active_count()
    flip(tmp_path / "b.tok", block * 64 + 30)
    got = []
    abstract: Any = {"tokens": jax.ShapeDtypeStruct((4, 16), np.int32)}
    feed = BatchFeed(batches, 0, abstract, Context())
    with pytest.raises(TokenFileError, match=rf"b.tok: block {block} "):
        while True:
            got.append(feed.next(bool))
    feed.close()
    assert len(got) == step
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


def test_damaged_offsets_are_a_problem_of_the_config_before_the_run(tmp_path):
    path = write(tmp_path / "a.tok", 40_000)
    flip(path, TokenFile.open(path).blocks.end - 20)
    with pytest.raises(schema.ConfigError) as e:
        open_batches(path)
    assert [(p.key, p.value) for p in e.value.problems] == [("data.source", str(path))]


def test_verify_names_every_run_of_damaged_blocks(tmp_path):
    path = write(tmp_path / "a.tok", 100_000)
    end = TokenFile.open(path).blocks.end
    data = bytearray(path.read_bytes())
    for at in (70, *range(3 * 16_384, 6 * 16_384), end - 9):
        data[at] ^= 1
    path.write_bytes(data)
    last = (end - 1) // 16_384
    runs = ["block 0 (", "blocks 3 to 5 (bytes 49,152 to 98,304)", f"block {last} (bytes {last * 16_384:,} to {end:,})"]
    assert [run in fault for run, fault in zip(runs, verify(path), strict=True)] == [True] * 3


def test_verify_compares_what_the_file_holds_with_its_header(tmp_path, monkeypatch):
    """The checksums of these files are right, and their contents are wrong, as after a bug in the writing program."""
    put = TokenWriter._put

    def written(pieces: tuple[int, ...] = (), new: bytes = b"") -> str:
        # pieces: ids, end-of-text, ids, end-of-text, padding, loss bits, padding, offsets
        number = itertools.count()
        monkeypatch.setattr(TokenWriter, "_put", lambda self, data: put(self, new if next(number) in pieces else data))
        with TokenWriter(tmp_path / "a.tok", text_tokenizers.info(BYTE), loss=True) as writer:
            for ids in ([1, 2, 3], [4, 5]):
                writer.write(ids, len(ids), np.asarray(ids) > 1, 1)
                writer.end_document()
        monkeypatch.setattr(TokenWriter, "_put", put)
        return " ".join(verify(tmp_path / "a.tok"))

    assert written() == ""
    assert "id 300 " in written((0,), b"\x01\0\x2c\x01\x03\0")
    assert "document 0 " in written((1,), b"\x07\0") and "document 1 " in written((3,), b"\x07\0")
    assert "largest id" in written((1, 3), b"\1\0")
    assert "loss bit" in written((5,), b"\x7f")
    for offsets in ([0, 4, 4], [0, 9, 7], [1, 4, 7]):
        assert "document" in written((7,), np.asarray(offsets, "<i8").tobytes()), offsets


def test_a_damaged_part_is_not_joined_into_the_output_with_new_checksums(tmp_path):
    part = write(tmp_path / "a.tok")
    flip(part, 300)
    joined = TokenWriter(tmp_path / "b.tok", text_tokenizers.info(BYTE), loss=True)
    with pytest.raises(TokenFileError, match=r"a.tok: block 0 "), joined as writer:
        writer.append(TokenFile.open(part))
    assert not (tmp_path / "b.tok").exists()


def test_what_is_no_whole_token_file_of_this_format_is_refused(tmp_path):
    path = write(tmp_path / "a.tok")
    good = path.read_bytes()
    older = good[:8] + b"\1" + good[9:]
    for damaged in (good[:-1], good[: len(good) // 2], good + b"x", b"", b"jaxtrtok", bytes(64) + good[64:], older):
        path.write_bytes(damaged)
        assert verify(path)
        with pytest.raises(TokenFileError, match="a.tok"):
            TokenFile.open(path)
