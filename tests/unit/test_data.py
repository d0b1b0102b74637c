"""Token files, their preparation, and batches as a pure function of (seed, step)."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import open_batches, random_documents, texts, write_conversations, write_file

from jaxtrain.config import schema
from jaxtrain.config.shapes import BATCH_KEYS
from jaxtrain.data import opening, stdlib, tokenfile, windows
from jaxtrain.data.batches import open_source, resolve_max_segments
from jaxtrain.data.tokenfile import TokenFile, TokenWriter, verify_file


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


@pytest.mark.parametrize(("mean", "T", "max_segments"), [(5, 16, 32), (5, 16, 2), (40, 7, 1), (3, 1, 1)])
@pytest.mark.parametrize("packing", ["documents", "none"])
def test_rows_equal_a_token_by_token_oracle(tmp_path, mean, T, max_segments, packing):
    documents = random_documents(mean * 100 + T, 40, mean)
    path = write_file(tmp_path / "a.tok", documents)
    batches = open_batches(path, T, global_batch=3, packing=packing, max_segments=max_segments)
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
                assert batch[key].dtype == dtype and batch[key].shape == (3, T)
                assert batch[key][r].tolist() == want[key], (key, step, r)
            if index[r] < count:
                seen.append(int(window))
                masked += want["segments"].count(0)
                total += T
    assert sorted(seen) == list(range(count))
    assert batches.masked_fraction == pytest.approx(masked / total)


@pytest.mark.parametrize("conversations", [False, True])
def test_batches_are_a_pure_function_of_seed_and_step(tmp_path, conversations):
    if conversations:
        path = write_conversations(tmp_path / "a.tok", np.random.default_rng(1).integers(2, 40, 300).tolist())
    else:
        path = write_file(tmp_path / "a.tok", random_documents(1, 200, 30))
    one, two = open_batches(path, seed=5), open_batches(path, seed=5)
    later = [two.batch(s) for s in (90, 3, 41)]  # out of order, epochs apart
    for s, want in zip((90, 3, 41), later, strict=True):
        for rows in (slice(None), slice(1, 3), np.asarray([3, 0], np.int64)):
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


@pytest.mark.parametrize("longest", [9, 30])
def test_borders_of_documents_in_windows(monkeypatch, longest):
    starts = np.cumsum(np.r_[0, np.random.default_rng(longest).integers(1, longest, 500)])
    columns = [[s % 32 for s in starts if w * 32 < s < w * 32 + 32] for w in range(60)]
    for windows_together in (1, 7, 100):
        monkeypatch.setattr(windows, "WINDOWS", windows_together)
        for max_segments in (1, 5):
            masked = sum(32 - found[max_segments - 1] for found in columns if len(found) >= max_segments)
            assert windows.count_documents(starts, 60, 32, max_segments) == (max(map(len, columns)) + 1, masked)
        assert windows.count_documents(np.asarray([0]), 60, 32, 1) == (1, 0)


def test_max_segments_of_0_is_what_the_data_has(tmp_path):
    """The step is built for the data set whose rows have the most documents, up to 32 in a row."""
    opened = [open_batches(write_file(tmp_path / f"{n}.tok", random_documents(1, 60, n))) for n in (40, 5)]
    for batches in opened:
        rows = [batches.batch(step) for step in range(-(-batches.sources[0].windows // 4))]
        assert batches.max_segments == max(row["segments"].max() for row in rows) < 16
        assert batches.masked_fraction == 0 and batches.fingerprint["max_segments"] == 32
    many = open_batches(write_file(tmp_path / "a.tok", [[1]] * 400), seq_len=100)
    assert many.max_segments == many.batch(0)["segments"].max() == 32 and many.masked_fraction > 0
    run = schema.RunConfig()
    assert resolve_max_segments(run, *opened).data.max_segments == opened[1].max_segments
    assert resolve_max_segments(run, opened[0], object()).data.max_segments == 32, "a source of one's own does not say"
    asked = schema.RunConfig(data=schema.Data(max_segments=3))
    assert resolve_max_segments(asked, *opened) is asked
    with pytest.raises(schema.ConfigError, match=r"data.max_segments = 0: .* 40"):
        resolve_max_segments(run, SimpleNamespace(max_segments=40))


def test_synthetic_is_deterministic_learnable_and_says_so(tmp_path):
    data = schema.Data(source="synthetic", seq_len=256, max_segments=8)

    def make(split="train", seed=0):
        return open_source(data, "", split=split, global_batch=8, data_dir=tmp_path, seed=seed)

    a, b = make(), make()
    assert a.synthetic and a.masked_fraction == 0
    x, y = a.batch(11), b.batch(11)
    assert all(np.array_equal(x[k], y[k]) and x[k].dtype == BATCH_KEYS[k] for k in BATCH_KEYS)
    assert np.array_equal(x["tokens"][:, 1:], x["targets"][:, :-1])
    assert np.array_equal(a.batch(11, slice(2, 5))["tokens"], x["tokens"][2:5])
    for other in (make("validation"), make(seed=1)):
        assert not np.array_equal(other.batch(11)["tokens"], x["tokens"])
    assert x["segments"].max() == 4
    # the strides make at most four symbols likely after a given one, of 256
    pairs = np.concatenate([np.stack([v["tokens"], v["targets"]])[:, v["weights"] > 0] for v in map(a.batch, range(40))], 1)
    following = np.bincount(pairs[1][pairs[0] == 7], minlength=257)
    assert np.sort(following)[-4:].sum() > 0.8 * following.sum()


def test_stdlib_split_is_disjoint_by_file_and_made_once(tmp_path):
    train, validation = stdlib.stdlib_files(tmp_path)
    stamp = train.stat().st_mtime_ns
    assert stdlib.stdlib_files(tmp_path) == (train, validation) and train.stat().st_mtime_ns == stamp
    files = stdlib.list_files()
    sides = {r: stdlib.is_validation(r) for r, _ in files}
    assert not any({"test", "tests", "site-packages"} & set(Path(r).parts) for r in sides)
    opened = [TokenFile.open(p) for p in (train, validation)]
    assert [f.header["documents"] for f in opened] == [list(sides.values()).count(s) for s in (False, True)]
    # the validation token file holds exactly the files of the validation side
    assert texts(validation) == [p.read_bytes().decode(errors="replace") for r, p in files if sides[r]]
    # a slower process that writes the same file leaves it: another has opened it, and refuses to continue with another file
    stdlib.write_split(validation, files[:3])
    assert sorted(tmp_path.iterdir()) == sorted([train, validation]) and verify_file(validation) == ""
    assert TokenFile.open(validation).header == opened[1].header
    for split, file in zip(("train", "validation"), opened, strict=True):
        batches = open_source(schema.Data(), "", split=split, global_batch=2, data_dir=tmp_path)
        assert batches.fingerprint["files"][0]["content_sha256"] == file.header["content_sha256"]
        first = file.header["documents"]  # their first bytes are no targets, and their ends are targets without bytes
        assert batches.bytes_per_token == pytest.approx(1 - first / file.header["source_bytes"])


def test_token_files_are_joined_and_read_back(tmp_path):
    for vocab, dtype in ((257, np.uint16), (70_000, np.uint32)):
        parts = ([[1, 2, 3], [], [vocab - 1]], [[3]])
        files = [
            TokenFile.open(write_file(tmp_path / f"{vocab}.{k}.tok", ids, vocab_size=vocab)) for k, ids in enumerate(parts)
        ]
        with TokenWriter(tmp_path / "all.tok", files[0].header["tokenizer"]) as writer:
            for file in files:
                writer.append(file)
        file = TokenFile.open(tmp_path / "all.tok")
        assert file.tokens.dtype == dtype
        assert file.tokens[:].tolist() == [1, 2, 3, 256, 256, vocab - 1, 256, 3, 256]
        assert file.doc_offsets[:].tolist() == [0, 4, 5, 7, 9]
        found = [file.header[key] for key in ("tokens", "documents", "source_bytes", "largest_id")]
        assert found == [9, 4, 5, max(vocab - 1, 256)] and verify_file(file.path) == ""
    with pytest.raises(tokenfile.TokenFileError, match="bad.tok"):
        write_file(tmp_path / "bad.tok", [[1, 257]])
    assert not list(tmp_path.glob("bad*"))


def test_check_reports_every_problem(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    train = write_file(tmp_path / "a.tok", [[1] * 99])
    held = write_file(tmp_path / "a.val.tok", [[1] * 99])
    write_file(tmp_path / "tiny.tok", [[1] * 9])
    (tmp_path / "junk.tok").write_text("no token file at all, but long enough to be one" * 3)

    def found(keys="", vocab=264, need_eval=False, **settings):
        data = schema.Data(**{"source": str(train), "seq_len": 16, **settings})
        problems = opening.check_data(data, vocab, need_eval)
        assert [p.key for p in problems] == keys.split()
        return " ".join(p.remedy for p in problems)

    found()
    found(source="stdlib", need_eval=True)
    found(need_eval=True, eval_source=str(held))
    found(source=f"{train}=0.5,{held}=2")
    found(source="json:loads")
    found("data.source", source=f"{tmp_path}/no.tok", tokenizer="hf:org/name")
    found("data.eval_source", need_eval=True, eval_source=f"{tmp_path}/no.val.tok")
    assert str(held) in found("data.eval_source", need_eval=True)
    found("data.source", source=f"{tmp_path}/junk.tok")
    found("data.tokenizer", tokenizer=f"{tmp_path}/tokenizer.json")
    found("data.tokenizer", source="stdlib", tokenizer=f"{tmp_path}/tokenizer.json")
    for source, vocab in ((str(train), 256), ("stdlib", 256), ("synthetic", 100)):
        found("model.vocab_size", vocab, source=source)
    found("data.seq_len", source=f"{tmp_path}/tiny.tok")
    for source in (f"{train}=0", f"{train}=x", f"{train}=nan", "", "no_such_module:data"):
        found("data.source", source=source)
    found("data.source data.source data.seq_len", source=f"{tmp_path}/x.tok=1,{tmp_path}/junk.tok=1,{tmp_path}/tiny.tok=1")
    with pytest.raises(schema.ConfigError, match="data.source"):
        open_batches(tmp_path / "x.tok")


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30),
    T=st.integers(1, 24),
    seed=st.integers(0, 2),
    max_segments=st.sampled_from([0, 2]),
)
def test_best_fit_keeps_documents_whole(tmp_path_factory, lengths, T, seed, max_segments):
    """An epoch has every target once. The ids are consecutive through the file."""
    ends = np.cumsum(lengths).tolist()
    documents = [list(range(end - n, end - 1)) for end, n in zip(ends, lengths, strict=True)]
    path = write_file(tmp_path_factory.mktemp("fit") / "a.tok", documents, vocab_size=2000, eot=1999)
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
