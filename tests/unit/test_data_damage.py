"""Token files that are damaged, truncated or replaced, before or after a run opens them: reported by name, never trained on."""

import errno
import itertools
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from token_files import first_steps, header_and_end, open_batches, poke

from jaxtrain import config
from jaxtrain.context import Context
from jaxtrain.data import prepare, tokenfile
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.__main__ import main
from jaxtrain.data.tokenfile import TokenFile, TokenFileError, TokenWriter, verify
from jaxtrain.data.windows import Windows, open_windows
from jaxtrain.shapes import BATCH_KEYS
from jaxtrain.train.batch_feed import BatchFeed

LONGEST = 40  # most tokens of a document; rows of this length hold every conversation in full


def write_file(path: Path, tokens: int = 800, loss: bool = True, seed: int = 0) -> Path:
    """Write a file of `tokens` + 1 tokens, in documents of 1 to LONGEST tokens."""
    rng = np.random.default_rng(seed)
    left = tokens + 1
    with TokenWriter(path, text_tokenizers.info(text_tokenizers.ByteTokenizer()), loss=loss) as writer:
        while left:
            length = min(left, 1 + int(rng.integers(0, LONGEST)))
            flags = rng.random(length - 1) < 0.5 if loss else None
            writer.write(rng.integers(0, 256, length - 1), length - 1, flags, 1 if loss else 0)
            writer.end_document(loss=loss)
            left -= length
    return path


def windows_of(file: Path | TokenFile, seq_len: int = LONGEST) -> Windows:
    return open_windows(TokenFile.open(file) if isinstance(file, Path) else file, seq_len, None, 0)


def rows_of(windows: Windows, index: np.ndarray | None = None) -> list[np.ndarray | None]:
    return list(windows.rows(np.arange(windows.windows) if index is None else index))


def same(got: list[np.ndarray | None], want: list[np.ndarray | None]) -> bool:
    return all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))


def flips(path: Path, seed: int) -> list[tuple[int, int, int]]:
    """Return (offset, byte, the byte with one bit flipped) for every byte of a file."""
    data = path.read_bytes()
    bits = np.random.default_rng(seed).integers(0, 8, len(data)).tolist()
    return [(at, byte, byte ^ (1 << bit)) for at, (byte, bit) in enumerate(zip(data, bits, strict=True))]


@pytest.fixture
def small_blocks(monkeypatch) -> int:
    """Make blocks 64 bytes long, so that a file of a few thousand bytes has many blocks."""
    monkeypatch.setattr(tokenfile, "BLOCK", 64)
    return 64


# ---- Flipped bits


@pytest.mark.parametrize("loss", [False, True])
def test_a_bit_flipped_before_the_file_is_opened_is_found(tmp_path, small_blocks, loss):
    """Every byte is tested: tokens, loss bits, padding, offsets, checksums, header and preamble."""
    path = write_file(tmp_path / "a.tok", loss=loss)
    header, end = header_and_end(path)
    assert end > 20 * small_blocks
    want = rows_of(windows_of(path))
    assert verify(path) == []
    found = 0
    for at, byte, flipped in flips(path, 1):
        poke(path, at, flipped)
        try:
            assert not same(rows_of(windows_of(path)), want)
            raise AssertionError(f"a bit of byte {at} went unseen")
        except TokenFileError as e:
            assert str(path) in str(e)
            assert "jaxtrain.data prepare" in str(e), e
            found += 1
        if at % 16 == 0:
            assert verify(path), at
        poke(path, at, byte)
    assert found == path.stat().st_size
    assert same(rows_of(windows_of(path)), want)


@pytest.mark.parametrize("loss", [False, True])
def test_a_block_is_compared_with_its_checksum_at_its_first_use_and_not_again(tmp_path, small_blocks, monkeypatch, loss):
    """Each block is read and checked once, at its first use. A bit that is flipped in an open file before that use is found."""
    path = write_file(tmp_path / "a.tok", loss=loss)
    header, end = header_and_end(path)
    parts, pread, read = tokenfile.layout(header), os.pread, []
    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", lambda fd, n, at: read.extend(range(at, at + n)) or pread(fd, n, at))
        windows = windows_of(path)
        opened = len(read)
        want = rows_of(windows)
        first = read[opened:]
        assert same(rows_of(windows), want)
        assert read[opened:] == first and len({*first}) == len(first)
    # Opening reads the preamble, header, checksums and offsets. Reading rows reads the rest, and blocks that also hold offsets.
    assert {*read[:opened], *first} == {*range(path.stat().st_size)}
    assert {*first} >= {*range(parts["tokens"].start, parts["documents"].start - small_blocks)}
    for at, byte, flipped in flips(path, 2):
        if at not in first:
            continue
        windows = windows_of(path)
        poke(path, at, flipped)
        with pytest.raises(TokenFileError, match=rf"block {at // small_blocks} \(bytes ") as e:
            rows_of(windows)
        assert f"python -m jaxtrain.data verify {path}" in str(e.value)
        poke(path, at, byte)


def test_only_rows_that_need_the_damaged_block_are_refused(tmp_path):
    """A flipped bit affects the rows of its block alone. Blocks have the default size, and ids have 2 or 4 bytes."""
    for vocab, width in ((257, 2), (70_000, 4)):
        path = tmp_path / f"{vocab}.tok"
        rng = np.random.default_rng(vocab)
        info = {**text_tokenizers.info(text_tokenizers.ByteTokenizer()), "vocab_size": vocab}
        with TokenWriter(path, info) as writer:
            for _ in range(200):
                writer.write(rng.integers(0, 256, 700), 700)
                writer.end_document()
        windows = windows_of(path, 512)
        want = rows_of(windows)
        block = 3
        windows = windows_of(path, 512)  # no token of this file has been read yet
        poke(path, block * tokenfile.BLOCK + 77, path.read_bytes()[block * tokenfile.BLOCK + 77] ^ 1)
        first = (block * tokenfile.BLOCK - 64) // width
        last = ((block + 1) * tokenfile.BLOCK - 64) // width
        needs = [w * 512 < last and w * 512 + 513 > first for w in range(windows.windows)]
        assert 0 < sum(needs) < len(needs) / 2
        for w, needed in enumerate(needs):
            if needed:
                with pytest.raises(TokenFileError) as e:
                    windows.rows(np.asarray([w]))
                assert "block 3 (bytes 49,152 to 65,536) does not match" in str(e.value)
            else:
                tokens, _, column, _, _ = windows.rows(np.asarray([w]))
                assert np.array_equal(tokens[0], want[0][w])
                assert np.array_equal(column, want[2][want[1] == w])
        with pytest.raises(TokenFileError, match="block 3 "):  # a batch with one damaged row is refused
            rows_of(windows, np.asarray([0, needs.index(True), 1]))


def test_rows_do_not_depend_on_how_they_are_asked_for(tmp_path, small_blocks):
    """Rows are read one by one, in runs, in any order, and twice. Some documents span several blocks of offsets, some share
    one.
    """
    path = write_file(tmp_path / "a.tok", 3000, loss=False)
    file = TokenFile.open(path)
    tokens, starts = file.tokens[:], file.doc_offsets[:]
    assert file.blocks.count > 10
    rng = np.random.default_rng(3)
    for seq_len in (1, 7, 16, 300, 2999, 3000):
        windows = windows_of(file, seq_len)
        some = rng.integers(0, windows.windows, 40)
        for index in (np.arange(windows.windows), some, np.sort(some), some[:1], some[:0], np.repeat(some[:3], 2)):
            got, row, column, loss, filled = windows.rows(index)
            assert loss is filled is None
            for r, w in enumerate(index.tolist()):
                a = w * seq_len
                assert np.array_equal(got[r], tokens[a : a + seq_len + 1])
                inside = starts[(starts > a) & (starts <= a + seq_len)] - a
                assert np.array_equal(column[row == r], inside)


# ---- A file that changes during a run


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def test_a_file_that_is_cut_off_is_an_error_and_no_signal(tmp_path, monkeypatch):
    """The file is cut off near each border of its parts. A reader then raises an error, and the process gets no SIGBUS.

    One reader has read rows before, and another has not.
    """
    whole = write_file(tmp_path / "whole.tok", 40_000, loss=False)
    size = whole.stat().st_size
    header, end = header_and_end(whole)
    parts = tokenfile.layout(header)
    lengths = {0, 1, 63, 64, 65, 4096, 16_384, end - 1, end, size - 1}
    lengths |= {part.start + d for part in parts.values() for d in (-1, 0, 1)}
    for length in sorted(lengths):
        path = Path(shutil.copy(whole, tmp_path / "a.tok"))
        file = TokenFile.open(path)
        windows, unused, was = windows_of(path), windows_of(file), path.stat()
        rows_of(windows)
        cut(path, length)
        for each in (windows, unused):
            with pytest.raises(TokenFileError) as e:
                rows_of(each)
            assert "a.tok: has changed: " in str(e.value)
            assert f"was cut off ({size:,} bytes, now {length:,}) while it was being read" in str(e.value)
            assert "resumes from its last checkpoint" in str(e.value)
        with pytest.raises(TokenFileError, match=r"bytes [\d,]+ to [\d,]+ are missing"):
            file.blocks.file.read(0, size)  # a read past the end, after the check of the size
        cut(path, size)  # restoring the size leaves a hole of zeros, which is an error too
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        if path.read_bytes()[: parts["tokens"].stop] != whole.read_bytes()[: parts["tokens"].stop]:
            with pytest.raises(TokenFileError, match=r"block \d+ \(bytes .* does not match its checksum"):
                rows_of(unused)


def rewrite_in_place(path: Path) -> None:
    other = write_file(path.with_name("other.tok"), seed=1).read_bytes()
    with path.open("r+b") as f:
        f.write(other)
        f.truncate()


def write_the_same_in_place(path: Path) -> None:
    data = path.read_bytes()
    with path.open("r+b") as f:
        f.write(data)
    os.utime(path)  # the file system's clock must have advanced


def append(path: Path) -> None:
    with path.open("ab") as f:
        f.write(b"x")


CHANGES = {
    rewrite_in_place: "was ",  # truncated, extended, or overwritten
    write_the_same_in_place: "was written to",
    append: "was added to",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_written_to_is_named(tmp_path, change):
    path = write_file(tmp_path / "a.tok")
    windows = windows_of(path)
    rows_of(windows)
    change(path)
    for _ in range(2):
        with pytest.raises(TokenFileError) as e:
            windows.rows(np.asarray([0]))
        assert str(e.value).startswith(f"{path}: has changed: the file {CHANGES[change]}")
        assert "Put that file back, and start the run again" in str(e.value)


def test_no_false_alarm(tmp_path):
    """A file that is deleted or replaced during a run is read to the end of the run in its old state."""
    path = write_file(tmp_path / "a.tok")
    windows = windows_of(path)
    want = rows_of(windows)
    was = path.stat()
    for harmless in (
        lambda: os.utime(path, ns=(was.st_atime_ns + 10**12, was.st_mtime_ns)),
        lambda: shutil.copy2(path, tmp_path / "copy.tok"),
        lambda: path.chmod(0o444),
        lambda: os.link(path, tmp_path / "link.tok"),
        lambda: (tmp_path / "another").write_text("beside it"),
        lambda: verify(path),
        lambda: open_batches(path).batch(0),
        lambda: tmp_path.joinpath("copy.tok").unlink(),
        lambda: write_file(tmp_path / "other.tok", seed=1).replace(path),
        path.unlink,
    ):
        harmless()
        assert same(rows_of(windows), want)


def test_a_disk_that_cannot_be_read_is_said_by_name(tmp_path, small_blocks, monkeypatch):
    path = write_file(tmp_path / "a.tok")
    windows = windows_of(path)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", fail)
        with pytest.raises(TokenFileError, match=r"a.tok: bytes [\d,]+ to [\d,]+ cannot be read \(Input/output error\)"):
            rows_of(windows)
    assert rows_of(windows)


def test_pread_may_give_less_than_was_asked_for(tmp_path, monkeypatch):
    """After a signal, on a network file system or beyond 2 GiB, pread may return less. The rest is read by a further call."""
    path = write_file(tmp_path / "a.tok")
    want, pread = rows_of(windows_of(path)), os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: pread(fd, min(n, 100), at))
    assert same(rows_of(windows_of(path)), want)


def test_files_are_closed_with_what_reads_them(tmp_path):
    path = write_file(tmp_path / "a.tok")

    def opened() -> int:
        links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return sum(link.exists() and link.resolve() == path for link in links)

    files = [windows_of(path) for _ in range(20)]
    assert opened() == 2 * 20  # a memory map has its own descriptor
    del files
    assert opened() == 0


# ---- Errors in batches and runs


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("files", [1, 2])
def test_the_error_comes_with_the_batch_it_belongs_to(tmp_path, small_blocks, prefetch, files):
    """The error comes from the thread that reads ahead. The batches before it are complete, and the thread ends."""
    for name in "ab"[:files]:
        write_file(tmp_path / f"{name}.tok", loss=False, seed=ord(name))
    batches = open_batches(",".join(f"{tmp_path}/{name}.tok=0.5" for name in "ab"[:files]))
    block, step = max(first_steps(batches, files - 1, 9).items(), key=lambda found: found[1])
    assert step >= 4
    want = [batches.batch(s) for s in range(step)]
    before = threading.active_count()
    damaged = tmp_path / f"{'ab'[files - 1]}.tok"
    poke(damaged, block * 64 + 30, damaged.read_bytes()[block * 64 + 30] ^ 2)
    got = []
    abstract: Any = {"tokens": jax.ShapeDtypeStruct((4, 16), np.int32)}
    feed = BatchFeed(batches, 0, abstract, Context(), prefetch)
    with pytest.raises(TokenFileError, match=rf"{damaged.name}: block {block} ") as e:
        while True:
            got.append(feed.next(bool))
    feed.close()
    assert type(e.value) is TokenFileError
    assert len(got) == step
    for g, w in zip(got, want, strict=True):
        assert all(np.array_equal(g[k], w[k]) for k in BATCH_KEYS)
    assert threading.active_count() == before


def test_a_file_of_a_mixture_is_named(tmp_path, monkeypatch):
    for name in "ab":
        write_file(tmp_path / f"{name}.tok", seed=ord(name))
    batches = open_batches(f"{tmp_path}/a.tok=0.5,{tmp_path}/b.tok=0.5")
    batches.batch(0)
    append(tmp_path / "b.tok")
    with pytest.raises(TokenFileError, match="b.tok: has changed"):
        batches.batch(1)


def test_damaged_offsets_are_a_problem_of_the_config_before_the_run(tmp_path):
    path = write_file(tmp_path / "a.tok", 40_000)
    header, end = header_and_end(path)
    poke(path, end - 20, path.read_bytes()[end - 20] ^ 1)
    for packing in ("documents", "none"):
        with pytest.raises(config.ConfigError) as e:
            open_batches(path, packing=packing)
        (problem,) = e.value.problems
        assert (problem.key, problem.value) == ("data.source", str(path))
        assert "does not match its checksum" in problem.rule
        assert f"python -m jaxtrain.data verify {path}" in problem.remedy


# ---- The verify command, and joined parts


def test_verify_names_every_run_of_damaged_blocks(tmp_path, capsys):
    path = write_file(tmp_path / "a.tok", 100_000)
    header, end = header_and_end(path)
    data = bytearray(path.read_bytes())
    for at in (70, *range(3 * 16_384, 6 * 16_384), end - 9):
        data[at] ^= 1
    path.write_bytes(data)
    last = (end - 1) // 16_384
    faults = verify(path)
    assert len(faults) == 3
    assert faults[0] == f"{path}: block 0 (bytes 64 to 16,384) does not match its checksum"
    assert "blocks 3 to 5 (bytes 49,152 to 98,304) do not match their checksums" in faults[1]
    assert f"block {last} (bytes {last * 16_384:,} to {end:,})" in faults[2]
    capsys.readouterr()
    whole = write_file(tmp_path / "b.tok", seed=1)
    assert main(["verify", str(path), str(whole)]) == 1
    out = capsys.readouterr().out
    assert out.count("checksum") == 3 and f"{whole}: " in out and out.rstrip().endswith("intact")


def test_verify_compares_what_the_file_holds_with_its_header(tmp_path, monkeypatch):
    """The checksums of these files are right, and their contents are wrong, as after a bug in the writing program."""
    put = TokenWriter._put

    def written(change) -> list[str]:
        """Return verify's findings for a file into which `change(piece, number of the piece)` was written."""
        number = itertools.count()
        monkeypatch.setattr(TokenWriter, "_put", lambda self, data: put(self, change(bytes(data), next(number))))
        path = tmp_path / "a.tok"
        with TokenWriter(path, {**text_tokenizers.info(text_tokenizers.ByteTokenizer())}, loss=True) as writer:
            for ids in ([1, 2, 3], [4, 5]):
                writer.write(ids, len(ids), np.asarray(ids) > 1, 1)
                writer.end_document()
        monkeypatch.setattr(TokenWriter, "_put", put)
        return verify(path)

    def at(which: int, new: bytes):
        return lambda data, number: new if number == which else data

    # pieces: ids, end-of-text, ids, end-of-text, padding, loss bits, padding, offsets
    assert written(lambda data, _: data) == []
    assert any("id 300 among tokens 0 to 7; the vocabulary has 257" in f for f in written(at(0, b"\x01\0\x2c\x01\x03\0")))
    assert any("document 0 does not end with end-of-text" in f for f in written(at(1, b"\x07\0")))
    assert any("document 1 does not end with end-of-text" in f for f in written(at(3, b"\x07\0")))
    assert any("the largest id is 5, the header says 256" in f for f in written(lambda d, n: b"\1\0" if n in (1, 3) else d))
    assert any("7 tokens have the loss bit, the header says 4" in f for f in written(at(5, b"\x7f")))
    offsets = [np.asarray(o, "<i8").tobytes() for o in ([0, 4, 4], [0, 9, 7], [1, 4, 7])]
    assert any("documents span 0 to 4, tokens 0 to 7" in f for f in written(at(7, offsets[0])))
    assert any("document 0 does not end" in f or "document 1 ends at or before" in f for f in written(at(7, offsets[1])))
    assert any("documents span 1 to 7" in f for f in written(at(7, offsets[2])))


def test_a_damaged_part_is_not_joined_into_the_output_with_new_checksums(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"line {i} " * 20}) + "\n" for i in range(200)))
    make = prepare.make_all

    def damage(job, folder, *rest):
        results = make(job, folder, *rest)
        part = folder / "000002.tok"
        poke(part, 300, part.read_bytes()[300] ^ 1)
        return results

    def run() -> list[str]:
        said = []
        prepare.prepare([f"{tmp_path}/a.jsonl"], tmp_path / "a.tok", shard_mb=0.01, say=said.append)
        return said

    monkeypatch.setattr(prepare, "make_all", damage)
    with pytest.raises(TokenFileError, match=r"000002.tok: block 0 .* the same command makes that part again"):
        run()
    assert not (tmp_path / "a.tok").exists()
    monkeypatch.setattr(prepare, "make_all", make)
    (said,) = run()
    assert "parts are finished; continuing" in said
    assert verify(tmp_path / "a.tok") == []
    file = TokenFile.open(tmp_path / "a.tok")
    text = text_tokenizers.ByteTokenizer().decode(file.tokens[:])
    assert text == "".join(f"line {i} " * 20 for i in range(200))


def test_what_is_no_whole_token_file_is_refused(tmp_path):
    path = write_file(tmp_path / "a.tok")
    good = path.read_bytes()
    for damaged in (good[:-1], good[: len(good) // 2], good + b"x", b"", b"jaxtrtok", bytes(64) + good[64:], b"text " * 100):
        path.write_bytes(damaged)
        assert verify(path)
        with pytest.raises(TokenFileError, match="a.tok"):
            TokenFile.open(path)


def test_files_of_older_formats_say_how_they_are_made_again(tmp_path):
    path = write_file(tmp_path / "a.tok")
    for version in (1, 5, 7):
        poke(path, 8, version)
        with pytest.raises(TokenFileError, match=f"format version {version}; this .* version 6. .* make it again with"):
            TokenFile.open(path)
    path.rename(tmp_path / "stdlib-0123456789ab.train.tok")
    with pytest.raises(TokenFileError, match="Delete it: the next run with data.source=stdlib makes it again"):
        TokenFile.open(tmp_path / "stdlib-0123456789ab.train.tok")
