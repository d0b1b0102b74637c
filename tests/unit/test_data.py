"""Token files, their preparation, and batches as a pure function of (seed, step)."""

import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.processors
import tokenizers.trainers

from jaxtrain import config, generate, train
from jaxtrain.data import bench, pipeline, prepare, readers, shards, stdlib, tokenfile, windows
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.__main__ import main
from jaxtrain.data.tokenfile import TokenFile, TokenWriter
from jaxtrain.data.verify import verify
from jaxtrain.shapes import BATCH_KEYS

BYTE = text_tokenizers.ByteTokenizer()


def write_file(path: Path, documents: list[list[int]], vocab: int = 257, eot: int = 256, name: str = "byte") -> Path:
    info = {**text_tokenizers.info(BYTE), "vocab_size": vocab, "eot": eot, "name": name}
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
    count = batches.sources[0].windows
    assert count == (sum(len(d) + 1 for d in documents) - 1) // T
    seen = []
    for step in range(-(-count // 3)):
        batch = batches.batch(step)
        index = np.arange(step * 3, step * 3 + 3)
        for r, window in enumerate(batches.window_numbers(0, index)):
            want = oracle_row(documents, int(window), T, packing, max_segments)
            for key, dtype in BATCH_KEYS.items():
                assert batch[key].dtype == dtype
                assert batch[key].shape == (3, T)
                assert batch[key][r].tolist() == want[key], (key, step, r)
            if index[r] < count:
                seen.append(int(window))
                masked += want["segments"].count(0)
                total += T
    assert sorted(seen) == list(range(count))
    assert batches.masked_fraction == pytest.approx(masked / total)


def test_batches_are_a_pure_function_of_seed_and_step(tmp_path):
    path = write_file(tmp_path / "a.tok", random_documents(1, 200, 30))
    one, two = open_batches(path, seed=5), open_batches(path, seed=5)
    later = [two.batch(s) for s in (9, 3, 70)]  # out of order, epochs apart
    for s, want in zip((9, 3, 70), later, strict=True):
        got = one.batch(s)
        assert all(np.array_equal(got[k], want[k]) for k in BATCH_KEYS)
        for rows in (slice(1, 3), np.asarray([3, 0], np.int64)):
            part = one.batch(s, rows)
            assert all(np.array_equal(part[k], np.asarray(want[k])[rows]) for k in BATCH_KEYS)
    other = open_batches(path, seed=6)
    assert not all(np.array_equal(other.batch(s)["tokens"], one.batch(s)["tokens"]) for s in range(4))


def test_every_epoch_is_another_permutation(tmp_path):
    path = write_file(tmp_path / "a.tok", random_documents(2, 200, 30))
    batches = open_batches(path)
    n = batches.sources[0].windows
    orders = [batches.window_numbers(0, np.arange(e * n, (e + 1) * n)).tolist() for e in range(3)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] != list(range(n))
    assert batches.epoch(10) == pytest.approx(10 * 4 / n)
    assert batches.tokens_per_epoch == n * 16


def test_mixture_takes_each_source_by_weight_and_in_its_own_order(tmp_path):
    weights = {"a": 0.7, "b": 0.2, "c": 0.1}
    for i, name in enumerate(weights):  # tokens tell the source
        write_file(tmp_path / f"{name}.tok", [[i] * 15] * 50)
    source = ",".join(f"{tmp_path}/{name}.tok={w}" for name, w in weights.items())
    batches = open_batches(source, global_batch=8)
    counts = np.zeros(3)
    for step in range(100):
        first = batches.batch(step)["tokens"][:, 0]
        counts += np.bincount(first, minlength=3)
        assert np.abs(counts - 8 * (step + 1) * np.asarray([0.7, 0.2, 0.1])).max() < 3
    index, within = windows.interleave(np.arange(1000), [0.7, 0.2, 0.1])
    for k in range(3):
        assert within[index == k].tolist() == list(range(int((index == k).sum())))
    far = 10**9
    s, w = windows.interleave(np.arange(far, far + 50), [0.7, 0.2, 0.1])
    assert np.allclose(w, far * np.asarray([0.7, 0.2, 0.1])[s], rtol=1e-6)
    assert [f["weight"] for f in batches.fingerprint["files"]] == pytest.approx([0.7, 0.2, 0.1])
    json.dumps(batches.fingerprint)


def test_masked_tokens_does_not_depend_on_the_chunk():
    rng = np.random.default_rng(0)
    for max_segments in (1, 2, 5):
        starts = np.cumsum(np.r_[0, rng.integers(1, 9, 500)])
        want = windows.masked_tokens(starts, 60, 32, max_segments)
        assert want > 0
        for chunk in (1, 2, 7, 100):
            assert windows.masked_tokens(starts, 60, 32, max_segments, chunk) == want


@pytest.mark.parametrize("seed", range(3))
def test_most_documents_of_a_window(seed):
    starts = np.cumsum(np.r_[0, np.random.default_rng(seed).integers(1, 30, 300)])
    per_window = [sum(w * 32 < s < w * 32 + 32 for s in starts) + 1 for w in range(60)]
    for chunk in (1, 2, 7, 1000):
        assert windows.most_documents(starts, 60, 32, chunk) == max(per_window)
    assert windows.most_documents(np.asarray([0]), 60, 32) == 1


def test_max_segments_of_0_is_what_the_data_has(tmp_path):
    """Nothing is masked, the rows are those of a higher number, and a run's step is built for the most of all its sets."""
    few, more = (write_file(tmp_path / f"{n}.tok", random_documents(1, 60, n)) for n in (40, 5))
    opened = [open_batches(path) for path in (few, more)]
    for batches, path in zip(opened, (few, more), strict=True):
        rows = [batches.batch(step) for step in range(-(-batches.sources[0].windows // 4))]
        assert batches.max_segments == max(row["segments"].max() for row in rows) < 16
        assert batches.masked_fraction == 0 and batches.fingerprint["max_segments"] == 32
        wider = open_batches(path, max_segments=16)
        assert all(np.array_equal(row[k], wider.batch(i)[k]) for i, row in enumerate(rows) for k in row)
    assert opened[0].max_segments < opened[1].max_segments
    run = config.RunConfig()
    assert pipeline.with_documents(run, *opened).data.max_segments == opened[1].max_segments
    synthetic = pipeline.open_source(run.data, "synthetic", split="train", global_batch=1, data_dir=tmp_path)
    assert pipeline.with_documents(run, synthetic).data.max_segments == synthetic.batch(0)["segments"].max() == 4
    assert pipeline.with_documents(run, opened[0], object()).data.max_segments == 32, "a source of one's own does not say"
    asked = dataclasses.replace(run, data=config.Data(max_segments=3))
    assert pipeline.with_documents(asked, *opened) is asked
    many = SimpleNamespace(max_segments=40)
    with pytest.raises(config.ConfigError, match=r"data.max_segments = 0: a data source has 40 documents .* Set it to 40"):
        pipeline.with_documents(run, many)
    assert pipeline.with_documents(asked, many) is asked


def test_max_segments_of_0_is_32_at_most(tmp_path):
    path = write_file(tmp_path / "a.tok", [[1]] * 400)
    batches, limited = open_batches(path, seq_len=100), open_batches(path, seq_len=100, max_segments=32)
    assert batches.max_segments == batches.batch(0)["segments"].max() == 32
    assert batches.masked_fraction == limited.masked_fraction > 0


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_iterate_yields_the_steps_in_order_raises_and_stops(tmp_path, prefetch):
    batches = open_batches(write_file(tmp_path / "a.tok", random_documents(3, 100, 30)))
    before = threading.active_count()
    steps = pipeline.iterate(batches, 7, prefetch)
    for step, got in zip(range(7, 12), steps, strict=False):
        want = batches.batch(step)
        assert all(np.array_equal(got[k], want[k]) for k in BATCH_KEYS)
    steps.close()
    assert threading.active_count() == before
    part = next(pipeline.iterate(batches, 2, prefetch, rows=slice(0, 2)))
    assert np.array_equal(part["tokens"], batches.batch(2)["tokens"][:2])

    class Failing:
        def batch(self, step):
            if step == 3:
                raise RuntimeError("disk gone at step 3")
            return {"step": np.asarray(step)}

    got = []
    with pytest.raises(RuntimeError, match="disk gone at step 3"):
        for batch in pipeline.iterate(Failing(), 1, prefetch):
            got.append(int(batch["step"]))
    assert got == [1, 2]


def test_synthetic_is_deterministic_learnable_and_says_so(tmp_path):
    data = config.Data(source="synthetic", seq_len=256, max_segments=8)

    def make(split="train", seed=0):
        return pipeline.open_source(data, "", split=split, global_batch=8, data_dir=tmp_path, seed=seed)

    a, b = make(), make()
    assert a.synthetic
    assert a.masked_fraction == 0
    x, y = a.batch(11), b.batch(11)
    assert all(np.array_equal(x[k], y[k]) and x[k].dtype == BATCH_KEYS[k] for k in BATCH_KEYS)
    assert np.array_equal(x["tokens"][:, 1:], x["targets"][:, :-1])
    assert np.array_equal(a.batch(11, slice(2, 5))["tokens"], x["tokens"][2:5])
    assert not np.array_equal(make("validation").batch(11)["tokens"], x["tokens"])
    assert not np.array_equal(make(seed=1).batch(11)["tokens"], x["tokens"])
    assert x["segments"].max() == 4
    assert ((x["targets"] == 256) | (x["tokens"] < 256)).any()
    # after one symbol at most four others are likely (the strides): far fewer than 256
    pairs = np.concatenate(
        [np.stack([v["tokens"], v["targets"]])[:, v["weights"] > 0] for v in map(a.batch, range(40))], axis=1
    )
    following = np.bincount(pairs[1][pairs[0] == 7], minlength=257)
    assert np.sort(following)[-4:].sum() > 0.8 * following.sum()


def test_stdlib_split_is_disjoint_by_file_and_made_once(tmp_path):
    train, validation = stdlib.stdlib_files(tmp_path)
    stamp = train.stat().st_mtime_ns
    assert stdlib.stdlib_files(tmp_path) == (train, validation)
    assert train.stat().st_mtime_ns == stamp
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([train.name, validation.name])
    files = stdlib.list_files()
    sides = {r: stdlib.is_validation(r) for r, _ in files}
    assert not any({"test", "tests", "site-packages"} & set(Path(r).parts) for r in sides)
    opened = [TokenFile.open(p) for p in (train, validation)]
    assert [f.header["documents"] for f in opened] == [list(sides.values()).count(s) for s in (False, True)]
    assert 0.01 < opened[1].header["tokens"] / opened[0].header["tokens"] < 0.2
    # the validation file holds exactly the validation files
    documents = [p.read_bytes().decode(errors="replace") for r, p in files if sides[r]]
    tokens, offsets = opened[1].tokens, opened[1].doc_offsets
    for i, text in enumerate(documents):
        assert BYTE.decode(tokens[offsets[i] : offsets[i + 1]]) == text
        assert tokens[offsets[i + 1] - 1] == BYTE.eot
    assert verify(validation) == []
    data = config.Data()
    for split, file in zip(("train", "validation"), opened, strict=True):
        batches = pipeline.open_source(data, "", split=split, global_batch=2, data_dir=tmp_path)
        assert batches.fingerprint["files"][0]["content_sha256"] == file.header["content_sha256"]
        assert batches.bytes_per_token == pytest.approx(1.0)


def test_the_stdlib_files_are_never_replaced(tmp_path, monkeypatch):
    """A process of a run that has opened one refuses to go on with another, whatever it holds."""
    files = stdlib.list_files()[:3]
    out = tmp_path / "a.tok"
    stdlib.write_split(out, files)
    before = out.stat().st_ino
    stdlib.write_split(out, files)  # one that was slower
    assert out.stat().st_ino == before and [p.name for p in tmp_path.iterdir()] == ["a.tok"]
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    stdlib.write_split(out, files)
    stdlib.write_split(tmp_path / "b.tok", files)
    assert out.stat().st_ino == before and {p.name for p in tmp_path.iterdir()} == {"a.tok", "b.tok"}


def test_two_processes_may_make_the_stdlib_files_at_once(tmp_path):
    code = f"from jaxtrain.data.stdlib import stdlib_files; print(*stdlib_files({str(tmp_path)!r}))"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [p.communicate(timeout=60)[0].split() for p in both]
    assert [p.returncode for p in both] == [0, 0]
    assert outputs[0] == outputs[1]
    assert sorted(str(p) for p in tmp_path.iterdir()) == sorted(outputs[0])
    assert verify(outputs[0][0]) == []


# token files


def test_token_file_round_trip_uint16_and_uint32(tmp_path):
    for vocab, dtype in ((257, np.uint16), (70_000, np.uint32)):
        documents = [[1, 2, 3], [], [vocab - 1]]
        file = TokenFile.open(write_file(tmp_path / f"{vocab}.tok", documents, vocab=vocab))
        assert file.tokens.dtype == dtype
        assert file.tokens[:].tolist() == [1, 2, 3, 256, 256, vocab - 1, 256]
        assert file.doc_offsets[:].tolist() == [0, 4, 5, 7]
        assert (file.header["tokens"], file.header["documents"], file.header["source_bytes"]) == (7, 3, 4)
        assert verify(file.path) == []
    with pytest.raises(tokenfile.TokenFileError, match="outside the vocabulary"):
        write_file(tmp_path / "bad.tok", [[1, 257]])
    assert not list(tmp_path.glob("bad*"))


def test_verify_finds_any_flipped_byte_and_names_the_block(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenfile, "BLOCK", 1 << 10)
    path = write_file(tmp_path / "a.tok", random_documents(4, 100, 100))
    good = path.read_bytes()
    header, end = tokenfile.read_header(path)
    table = tokenfile.layout(header)["checksums"]
    assert table.start == end > 5 << 10
    rng = np.random.default_rng(0)
    places = rng.integers(tokenfile.PREAMBLE.size, len(good), 40).tolist()
    for at in (*places, *range(tokenfile.PREAMBLE.size), end, table.stop - 1):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        (fault, *more) = verify(path)
        assert not more, more
        if at >= tokenfile.PREAMBLE.size:
            assert ("header" if at >= table.stop else "the checksums of blocks" if at >= end else f"block {at >> 10} ") in fault
    for damaged in (good[:-1], good[: len(good) // 2], good + b"x", b"", b"jaxtrtok", bytes(64) + good[64:], b"text " * 100):
        path.write_bytes(damaged)
        assert verify(path)
        with pytest.raises(tokenfile.TokenFileError, match="a.tok"):
            TokenFile.open(path)


# preparation


def cli(*args: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environ}
    command = [sys.executable, "-m", "jaxtrain.data", *args]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def texts(path: Path) -> list[str]:
    file = TokenFile.open(path)
    return [BYTE.decode(file.tokens[a:b]) for a, b in itertools.pairwise(file.doc_offsets[:].tolist())]


def make_corpus(folder: Path, count: int = 40) -> list[str]:
    """The same documents as text, JSON lines (plain and gzip) and Parquet."""
    documents = [f"Document {i}: " + "naïve café " * (i % 7 + 1) + "\n" for i in range(count)]
    (folder / "txt").mkdir()
    for i, text in enumerate(documents):
        (folder / "txt" / f"{i:03}.txt").write_text(text)
    lines = "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(documents))
    (folder / "all.jsonl").write_text(lines)
    (folder / "all.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pyarrow.table({"id": list(range(count)), "body": documents})
    pyarrow.parquet.write_table(table, folder / "all.parquet", row_group_size=7)
    return documents


@pytest.mark.parametrize("pattern", ["txt/*.txt", "**/*.txt", "all.jsonl", "all.jsonl.gz", "all.parquet"])
def test_prepare_reads_every_format_alike(tmp_path, monkeypatch, pattern):
    documents = make_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    (header,) = prepare.prepare([pattern], Path("out.tok"), text_key="body")
    assert texts(Path("out.tok")) == documents
    assert header["source_bytes"] == sum(len(d.encode()) for d in documents)
    assert verify("out.tok") == []
    prepare.prepare([pattern], Path("split.tok"), text_key="body", validation=0.3)
    train, validation = texts(Path("split.tok")), texts(Path("split.val.tok"))
    assert sorted(train + validation) == sorted(documents)
    assert 3 < len(validation) < 25
    prepare.prepare([pattern], Path("again.tok"), text_key="body", validation=0.3)
    assert Path("again.val.tok").read_bytes() == Path("split.val.tok").read_bytes()


def test_long_text_is_one_document_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE_BYTES", 50)
    monkeypatch.setattr(shards, "BATCH_BYTES", 100)
    for name, text in (("lines", "zwölf Boxkämpfer\n" * 40), ("one line", "ü€𝄞" * 333), ("short", "x"), ("exact", "y" * 50)):
        (tmp_path / "a.txt").write_text(text)
        prepare.prepare([str(tmp_path / "a.txt")], tmp_path / "a.tok", force=True)
        assert texts(tmp_path / "a.tok") == [text], name
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 40 + b"bad \xff byte\n")
    said = []
    with pytest.raises(prepare.PrepareError):
        prepare.prepare([str(tmp_path / "a.txt")], tmp_path / "a.tok", force=True, say=said.append)
    assert said == [f"{tmp_path}/a.txt:41: not UTF-8 (invalid start byte, byte 0xff)"]


def test_bad_lines_are_named_counted_and_stop(tmp_path):
    lines = [b'{"text": "one"}', b'{"text": 3}', b"", b"not json", b'{"x": "y"}', b"\xff", b"[1]", b'{"text": "\\ud800"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b'{"text": "two"}']))
    done = cli("prepare", "--input=a.jsonl", "--output=a.tok", cwd=tmp_path)
    assert done.returncode == 2
    for number in (2, 4, 5, 6, 7, 8):
        assert f"a.jsonl:{number}: " in done.stderr
    assert "6 bad lines in a.jsonl; nothing was written" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    done = cli("prepare", "--input=a.jsonl", "--output=a.tok", "--skip-bad-lines", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "6 bad lines left out" in done.stderr
    assert texts(tmp_path / "a.tok") == ["one", "two"]
    (tmp_path / "many.jsonl").write_bytes(b"{\n" * 50)
    done = cli("prepare", "--input=many.jsonl", "--output=b.tok", cwd=tmp_path)
    assert done.stderr.count("many.jsonl:") == prepare.SHOWN
    assert "50 bad lines" in done.stderr
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "n.parquet")
    done = cli("prepare", "--input=n.parquet", "--output=b.tok", cwd=tmp_path)
    assert (done.returncode, "n.parquet:2: 'text' is NoneType" in done.stderr) == (2, True)


def test_commands_that_are_wrong_exit_2_and_write_nothing(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text\n")
    (tmp_path / "old.tok").write_text("mine")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 99)[:-20])
    (tmp_path / "fake.parquet").write_text("no parquet")
    (tmp_path / "t.json").write_text("{}")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for said, *args in (
        ("matches no file", "--input=none*", "--output=b.tok"),
        ("is a folder", "--input=.", "--output=b.tok"),
        ("ends in .tok", "--input=a.txt", "--output=b.bin"),
        ("old.tok exists", "--input=a.txt", "--output=old.tok"),
        ("cannot read nowhere.json", "--input=a.txt", "--output=b.tok", "--tokenizer=nowhere.json"),
        ("not a tokenizer.json", "--input=a.txt", "--output=b.tok", "--tokenizer=t.json"),
        ("could not be fetched", "--input=a.txt", "--output=b.tok", "--tokenizer=hf:no/such"),
        ("id 256 ends", "--input=a.txt", "--output=b.tok", "--eot=</s>"),
        ("--format=jsonl", "--input=t.json", "--output=b.tok"),
        ("already a token file", "--input=old.tok", "--output=b.tok"),
        ("cannot be read to its end", "--input=cut.jsonl.gz", "--output=b.tok"),
        ("not readable as Parquet", "--input=fake.parquet", "--output=b.tok"),
        ("would hold no document", "--input=a.txt", "--output=b.tok", "--validation=0.001"),
        ("less than 1", "--input=a.txt", "--output=b.tok", "--validation=1.5"),
    ):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # fails at once, not after five attempts
        done = main_here(tmp_path, "prepare", *args)
        assert done[0] == 2, (args, done)
        assert said in done[1], (args, done)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before, args
    assert main_here(tmp_path, "prepare", "--input=a.txt", "--output=old.tok", "--force")[0] == 0
    assert texts(tmp_path / "old.tok") == ["some text\n"]


def main_here(folder: Path, *args: str) -> tuple[int, str]:
    """(exit code, output) of the command line in this process."""
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main(list(args))
        except SystemExit as e:
            code = e.code
    return code if isinstance(code, int) else 1, out.getvalue()


def test_verify_show_and_bench_commands(tmp_path):
    (tmp_path / "a.txt").write_text("hello there\n")
    assert main_here(tmp_path, "prepare", "--input=a.txt", "--output=a.tok")[0] == 0
    code, out = main_here(tmp_path, "verify", "a.tok")
    assert (code, "intact" in out) == (0, True)
    code, out = main_here(tmp_path, "show", "a.tok", "--documents=1")
    assert (code, "hello there" in out) == (0, True)
    data = bytearray((tmp_path / "a.tok").read_bytes())
    data[70] ^= 1
    (tmp_path / "b.tok").write_bytes(data)
    code, out = main_here(tmp_path, "verify", "a.tok", "b.tok", "c.tok")
    assert code == 1
    assert "a.tok" in out and "b.tok: block 0" in out and "c.tok" in out
    assert main_here(tmp_path, "show", "c.tok")[0] == 2
    assert main_here(tmp_path, "bench", "--seconds=0")[0] == 2
    assert main_here(tmp_path, "polish")[0] == 2
    assert main_here(tmp_path, "prepare", "--help")[0] == 0


def test_bench_reports_the_speed_of_real_batches(monkeypatch):
    monkeypatch.setattr(bench, "TOKENS", 1_000_000)
    result = bench.bench(batch=8, seq_len=512, seconds=0.2)
    assert result["tokens_per_s"] == pytest.approx(8 * 512 / result["batch_us"] * 1e6, rel=1e-6)
    assert result["tokens_per_s"] > 1e6  # far below what any machine reaches; the command shows the figure itself


def test_two_writers_of_one_output_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with shards.Folder(tmp_path / "a.tok.partial", {}, print):
        code, out = main_here(tmp_path, "prepare", "--input=a.txt", "--output=a.tok")
        assert (code, "another process is writing it" in out) == (2, True)
    with (
        TokenWriter(tmp_path / "a.tok", text_tokenizers.info(BYTE)),
        pytest.raises(tokenfile.TokenFileError, match="writing it"),
    ):
        TokenWriter(tmp_path / "a.tok", text_tokenizers.info(BYTE))
    assert texts(tmp_path / "a.tok") == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tok", "a.txt"]


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE_BYTES", 1 << 19)
    monkeypatch.setattr(shards, "BATCH_BYTES", 1 << 19)
    line = json.dumps({"text": "x" * 900}) + "\n"
    peaks = []
    for count in (5_000, 30_000):
        (tmp_path / "a.jsonl").write_text(line * count)
        (tmp_path / "a.txt").write_text(line * count)
        tracemalloc.start()
        prepare.prepare([f"{tmp_path}/a.*"], tmp_path / "out.tok", force=True)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0], peaks
    assert peaks[1] < (tmp_path / "a.jsonl").stat().st_size / 3, peaks


# tokenizers


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    """A real byte-level BPE tokenizer.json, trained on a little of the standard library."""
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "<|endoftext|>", "<stop>"], initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator([Path(json.__file__).read_text()], trainer)
    tok.enable_truncation(5)  # must not cut documents
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
    assert tok.eot not in ids  # text cannot forge the end of a document
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
    assert main_here(tmp_path, "prepare", "--input=a.txt", "--output=a.tok", f"--tokenizer={bpe}", "--eot=<stop>")[0] == 0
    file = TokenFile.open(tmp_path / "a.tok")
    assert file.tokens[:].tolist() == [*ids, stop.eot]
    assert "def naïve" in main_here(tmp_path, "show", "a.tok")[1]
    assert verify(file.path) == []


def test_what_begins_a_document_is_the_tokenizers_own(tmp_path, bpe, monkeypatch):
    """As `tokenizers` itself encodes a text, and transformers and vLLM with it; once for each document, and only there."""
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
        assert main_here(tmp_path, "prepare", f"--input={name}", f"--output={name}.tok", "--tokenizer=t.json")[0] == 0
    package.encode_special_tokens = True
    whole = TokenFile.open(tmp_path / "a.jsonl.tok")
    assert whole.tokens[:].tolist() == [i for text in documents for i in (*package.encode(text).ids[:-1], tok.eot)]
    assert np.count_nonzero(np.asarray(whole.tokens) == tok.bos[0]) == len(documents)
    assert whole.header["source_bytes"] == sum(len(text.encode()) for text in documents)
    pieces = TokenFile.open(tmp_path / "b.txt.tok")
    assert np.flatnonzero(np.asarray(pieces.tokens) == tok.bos[0]).tolist() == [0]
    assert tok.decode(pieces.tokens[1:-1]) == documents[0]
    assert generate.prompt_ids(tok, "def", 600) == package.encode("def").ids[:-1]
    assert generate.prompt_ids(tok, "", 600) == [*tok.bos]
    assert generate.prompt_ids(BYTE, "", 257) == BYTE.encode("\n")
    with pytest.raises(text_tokenizers.TokenizerError, match="makes no token of the prompt ''"):
        generate.prompt_ids(SimpleNamespace(name="words", bos=(), encode=str.split), "", 257)
    with pytest.raises(text_tokenizers.TokenizerError, match="gives the id .* and the model has 3"):
        generate.prompt_ids(tok, "def", 3)


def test_a_prompt_that_the_model_cannot_read_is_refused_before_the_run(tmp_path, bpe, monkeypatch):
    """A model as small as its file's largest id trains; a prompt of other tokens would end it at the first sample."""
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


# checks before a run


def keys_of(problems: list[config.Problem]) -> list[str]:
    return [p.key for p in problems]


def test_check_reports_every_problem(tmp_path, bpe):
    train = write_file(tmp_path / "a.tok", [[1] * 99])
    held = write_file(tmp_path / "a.val.tok", [[1] * 99])
    write_file(tmp_path / "tiny.tok", [[1] * 9])
    (tmp_path / "junk.tok").write_text("no token file at all, but long enough to be one" * 3)
    a = str(train)

    def found(vocab=264, need_eval=False, **keys):
        return pipeline.check(config.Data(**{"source": a, "seq_len": 16, **keys}), vocab, need_eval)

    assert found() == []
    assert pipeline.check(config.Data(), 264, True) == []
    assert found(source="synthetic", need_eval=True) == []
    assert found(need_eval=True, eval_source=str(held)) == []
    assert found(source=f"{a}=0.5,{held}=2") == []
    assert found(source="json:loads") == []
    (missing,) = found(source=f"{tmp_path}/no.tok", tokenizer="hf:org/name")
    assert missing.key == "data.source"
    assert "hf download" in missing.remedy
    assert f"--tokenizer=hf:org/name --validation=0.001 --output={tmp_path}/no.tok" in missing.remedy
    (missing,) = found(need_eval=True, eval_source=f"{tmp_path}/no.val.tok")
    assert missing.key == "data.eval_source"
    assert f"--output={tmp_path}/no.tok" in missing.remedy
    (needs,) = found(need_eval=True)
    assert (needs.key, str(held) in needs.remedy) == ("data.eval_source", True)
    assert "not a token file" in found(source=f"{tmp_path}/junk.tok")[0].rule
    assert keys_of(found(tokenizer=str(bpe))) == ["data.tokenizer"]
    assert keys_of(found(source="stdlib", tokenizer=str(bpe))) == ["data.tokenizer"]
    assert keys_of(found(vocab=256)) == ["model.vocab_size"]
    assert keys_of(found(vocab=256, source="stdlib")) == ["model.vocab_size"]
    assert keys_of(found(vocab=100, source="synthetic")) == ["model.vocab_size"]
    assert keys_of(found(source=f"{tmp_path}/tiny.tok")) == ["data.seq_len"]
    for weight in ("0", "-1", "x", "nan", "inf"):
        (bad,) = found(source=f"{a}={weight}")
        assert "weight" in bad.rule
    assert keys_of(found(source="")) == ["data.source"]
    assert keys_of(found(source="no_such_module:data")) == ["data.source"]
    assert len(found(source=f"{tmp_path}/x.tok,{tmp_path}/junk.tok,{tmp_path}/tiny.tok=0")) == 4
    with pytest.raises(config.ConfigError, match="no such file"):
        open_batches(tmp_path / "x.tok")


def test_tokens_of_another_tokenizer_are_refused_and_hub_names_need_no_network(tmp_path, bpe):
    info = text_tokenizers.info(text_tokenizers.load_tokenizer(str(bpe)))
    for name, recorded in (("p", info), ("h", {**info, "name": "hf:no/such"})):
        with TokenWriter(tmp_path / f"{name}.tok", recorded) as writer:
            writer.write([5] * 40, 40)
            writer.end_document()

    def found(names, tokenizer):
        source = ",".join(f"{tmp_path}/{n}.tok" for n in names)
        return pipeline.check(config.Data(source=source, tokenizer=tokenizer, seq_len=16), 600, False)

    assert found("p", str(bpe)) == []
    assert found("h", "hf:no/such") == []  # not on this machine: the name must do
    assert found("h", str(bpe)) == []  # the same definition under another name
    assert keys_of(found("ph", "byte")) == ["data.tokenizer"] * 2
    assert keys_of(found("h", "hf:no/other")) == ["data.tokenizer"]


def test_a_users_own_source(tmp_path, monkeypatch):
    (tmp_path / "my_source.py").write_text(
        "def make(data, split, global_batch):\n    return data.seq_len, split, global_batch\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = config.Data(source="my_source:make", seq_len=9)
    assert pipeline.open_source(data, "", split="validation", global_batch=3, data_dir=tmp_path) == (9, "validation", 3)


def test_check_and_the_command_line_import_no_jax():
    code = (
        "import sys; from jaxtrain import config; from jaxtrain.data import pipeline, __main__;"
        "pipeline.check(config.Data(), 264, True); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
