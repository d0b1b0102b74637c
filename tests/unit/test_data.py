"""Token files, their preparation, and batches as a pure function of (seed, step)."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import BYTE, open_batches, random_documents, write_file

from jaxtrain import config
from jaxtrain.data import mixture, pipeline, stdlib, tokenfile, windows
from jaxtrain.data.tokenfile import TokenFile, TokenWriter, verify
from jaxtrain.shapes import BATCH_KEYS


def oracle_row(documents: list[list[int]], window: int, T: int, packing: str, max_segments: int) -> dict[str, list]:
    """Return one row in the most direct way, token by token."""
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
    documents = random_documents(mean * 100 + T, 60 if mean < 100 else 20, mean)
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
    for i, name in enumerate(weights):  # a token's id is its source's number
        write_file(tmp_path / f"{name}.tok", [[i] * 15] * 50)
    source = ",".join(f"{tmp_path}/{name}.tok={w}" for name, w in weights.items())
    batches = open_batches(source, global_batch=8)
    counts = np.zeros(3)
    for step in range(40):
        first = batches.batch(step)["tokens"][:, 0]
        counts += np.bincount(first, minlength=3)
        assert np.abs(counts - 8 * (step + 1) * np.asarray([0.7, 0.2, 0.1])).max() < 3
    index, within = mixture.interleave(np.arange(1000), [0.7, 0.2, 0.1])
    for k in range(3):
        assert within[index == k].tolist() == list(range(int((index == k).sum())))
    far = 10**9
    s, w = mixture.interleave(np.arange(far, far + 50), [0.7, 0.2, 0.1])
    assert np.allclose(w, far * np.asarray([0.7, 0.2, 0.1])[s], rtol=1e-6)
    assert [f["weight"] for f in batches.fingerprint["files"]] == pytest.approx([0.7, 0.2, 0.1])
    json.dumps(batches.fingerprint)


@pytest.mark.parametrize("longest", [9, 30])
def test_borders_of_documents_in_windows(monkeypatch, longest):
    """The most documents in a window, and the tokens masked beyond max_segments, do not depend on the block size `WINDOWS`."""
    starts = np.cumsum(np.r_[0, np.random.default_rng(longest).integers(1, longest, 500)])
    columns = [[s % 32 for s in starts if w * 32 < s < w * 32 + 32] for w in range(60)]
    for windows_together in (1, 7, 100):
        monkeypatch.setattr(windows, "WINDOWS", windows_together)
        for max_segments in (1, 2, 5):
            masked = sum(32 - found[max_segments - 1] for found in columns if len(found) >= max_segments)
            assert windows.borders(starts, 60, 32, max_segments) == (max(map(len, columns)) + 1, masked)
        assert windows.borders(np.asarray([0]), 60, 32, 1) == (1, 0)


def test_max_segments_of_0_is_what_the_data_has(tmp_path):
    """No token is masked, and the rows equal those of a higher max_segments. The step is built for the data set
    whose rows have the most documents.
    """
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
    # the strides make at most four symbols likely after a given one, of 256
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
    # the validation token file holds exactly the files of the validation side
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
    """An existing file stays: a process that has opened it refuses to continue with another file, even of equal content."""
    files = stdlib.list_files()[:3]
    out = tmp_path / "a.tok"
    stdlib.write_split(out, files)
    before = out.stat().st_ino
    stdlib.write_split(out, files)  # a slower process writes the same file
    assert out.stat().st_ino == before and [p.name for p in tmp_path.iterdir()] == ["a.tok"]
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    stdlib.write_split(out, files)
    stdlib.write_split(tmp_path / "b.tok", files)
    assert out.stat().st_ino == before and {p.name for p in tmp_path.iterdir()} == {"a.tok", "b.tok"}


# ---- Token files


def test_token_file_round_trip_uint16_and_uint32(tmp_path):
    for vocab, dtype in ((257, np.uint16), (70_000, np.uint32)):
        documents = [[1, 2, 3], [], [vocab - 1]]
        file = TokenFile.open(write_file(tmp_path / f"{vocab}.tok", documents, vocab_size=vocab))
        assert file.tokens.dtype == dtype
        assert file.tokens[:].tolist() == [1, 2, 3, 256, 256, vocab - 1, 256]
        assert file.doc_offsets[:].tolist() == [0, 4, 5, 7]
        assert (file.header["tokens"], file.header["documents"], file.header["source_bytes"]) == (7, 3, 4)
        assert verify(file.path) == []
    with pytest.raises(tokenfile.TokenFileError, match="outside the vocabulary"):
        write_file(tmp_path / "bad.tok", [[1, 257]])
    assert not list(tmp_path.glob("bad*"))


def test_files_that_are_joined_keep_their_documents_and_the_largest_id(tmp_path):
    parts = [write_file(tmp_path / f"{k}.tok", ids, vocab_size=70_000) for k, ids in enumerate(([[1, 2], [69_999]], [[3]]))]
    files = [TokenFile.open(part) for part in parts]
    with TokenWriter(tmp_path / "all.tok", files[0].header["tokenizer"]) as writer:
        for file in files:
            writer.append(file)
    file = TokenFile.open(tmp_path / "all.tok")
    assert file.tokens[:].tolist() == [1, 2, 256, 69_999, 256, 3, 256]
    assert file.doc_offsets[:].tolist() == [0, 3, 5, 7]
    assert (file.header["largest_id"], file.header["source_bytes"]) == (69_999, 4)
    assert verify(file.path) == []


# ---- Checks before a run


def keys_of(problems: list[config.Problem]) -> list[str]:
    return [p.key for p in problems]


def test_check_reports_every_problem(tmp_path):
    other = tmp_path / "tokenizer.json"
    other.write_text("{}")
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
    assert keys_of(found(tokenizer=str(other))) == ["data.tokenizer"]
    assert keys_of(found(source="stdlib", tokenizer=str(other))) == ["data.tokenizer"]
    assert keys_of(found(vocab=256)) == ["model.vocab_size"]
    assert keys_of(found(vocab=256, source="stdlib")) == ["model.vocab_size"]
    assert keys_of(found(vocab=100, source="synthetic")) == ["model.vocab_size"]
    assert keys_of(found(source=f"{tmp_path}/tiny.tok")) == ["data.seq_len"]
    for weight in ("0", "-1", "x", "nan", "inf"):
        (bad,) = found(source=f"{a}={weight}")
        assert "weight" in bad.rule
    assert keys_of(found(source="")) == ["data.source"]
    assert keys_of(found(source="no_such_module:data")) == ["data.source"]
    assert len(found(source=f"{tmp_path}/x.tok=1,{tmp_path}/junk.tok=1,{tmp_path}/tiny.tok=0")) == 4
    with pytest.raises(config.ConfigError, match="no such file"):
        open_batches(tmp_path / "x.tok")


def test_a_users_own_source(tmp_path, monkeypatch):
    (tmp_path / "my_source.py").write_text(
        "def make(data, split, global_batch):\n    return data.seq_len, split, global_batch\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = config.Data(source="my_source:make", seq_len=9)
    assert pipeline.open_source(data, "", split="validation", global_batch=3, data_dir=tmp_path) == (9, "validation", 3)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30),
    T=st.integers(1, 24),
    seed=st.integers(0, 2),
    max_segments=st.sampled_from([0, 2]),
)
def test_best_fit_keeps_documents_whole(tmp_path_factory, lengths, T, seed, max_segments):
    """A document of at most T + 1 tokens is one segment, and an epoch has every target once.

    The ids are consecutive through the file, so that each id shows its position in the file.
    """
    documents = [
        list(range(first, first + n - 1)) for first, n in zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False)
    ]
    info = {"vocab_size": 2000, "eot": 1999}
    path = write_file(tmp_path_factory.mktemp("fit") / "a.tok", documents, **info)
    batches = open_batches(path, T, global_batch=1, seed=seed, packing="best_fit", max_segments=max_segments)
    learnt, pieces = [], []
    for step in range(batches.sources[0].windows):
        batch = {k: x[0] for k, x in batches.batch(step).items()}
        assert batch["segments"].max() <= (max_segments or 32)
        for k in range(1, batch["segments"].max() + 1):
            (columns,) = np.nonzero(batch["segments"] == k)
            assert batch["positions"][columns].tolist() == list(range(len(columns)))
            inputs, targets = batch["tokens"][columns], batch["targets"][columns]
            counts = batch["weights"][columns] == 1
            assert counts[:-1].all() and (inputs[1:] == targets[:-1]).all()
            learnt += targets[counts].tolist()
            pieces.append(inputs[0])
        padding = batch["segments"] == 0
        assert not batch["weights"][padding].any() and not batch["positions"][padding].any()
    wanted = [t for ids in documents for t in [*ids[1:], 1999]]
    assert sorted(learnt) == sorted(wanted)
    longer = sum(-(-(n - 1) // T) - 1 for n in lengths if n > T + 1)
    assert len(pieces) == len(lengths) + longer, "a document of at most T + 1 tokens is one segment"


def test_best_fit_pads_a_text_that_is_shorter_than_a_sequence(tmp_path):
    path = write_file(tmp_path / "a.tok", [[1] * 4, [2] * 3])
    (problem,) = pipeline.check(config.Data(source=str(path), seq_len=64), 264, False)
    assert "data.packing=best_fit" in problem.remedy
    data = config.Data(source=str(path), seq_len=64, packing="best_fit")
    assert pipeline.check(data, 264, False) == []
    assert open_batches(path, 64, packing="best_fit").batch(0)["weights"].sum(1).tolist() == [7.0] * 4


def test_a_folder_of_texts_is_named_with_a_pattern(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (".", str(tmp_path)):
        command = pipeline.prepare_command("byte", folder)
        assert f"--input='{folder}/*.jsonl' --output={tmp_path.name}.tok" in command
    assert pipeline.prepare_command("byte", "a/b.jsonl.gz").endswith("--input=a/b.jsonl.gz --output=a/b.tok")
