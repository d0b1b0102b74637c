"""Mixture files, and what `stats` counts in token files."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain import config
from jaxtrain.data import mixture, pipeline, stats, windows
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.__main__ import main
from jaxtrain.data.tokenfile import TokenFile, TokenWriter
from jaxtrain.data.windows import whole_turns

BYTE = text_tokenizers.ByteTokenizer()


def write_file(path: Path, documents: list[list[int]], loss: bool = False, **info) -> Path:
    with TokenWriter(path, {**text_tokenizers.info(BYTE), **info}, loss=loss) as writer:
        for ids in documents:
            writer.write(ids, len(ids), np.asarray(ids) % 2 == 0 if loss else None, sum(i % 2 == 0 for i in ids))
            writer.end_document()
    return path


@pytest.fixture
def files(tmp_path) -> Path:
    write_file(tmp_path / "a.tok", [[1] * 99] * 9)  # 900 tokens
    (tmp_path / "sub").mkdir()
    write_file(tmp_path / "sub" / "b.tok", [[2] * 99])  # 100
    return tmp_path


def rows_of(source: str, steps: int = 10) -> list[int]:
    batches = pipeline.open_source(
        config.Data(source=source, seq_len=16), source, split="train", global_batch=8, data_dir="unused"
    )
    return [row for s in range(steps) for row in batches.batch(s)["tokens"].tolist()]


def test_weights_count_by_their_shares(files, monkeypatch):
    monkeypatch.chdir(files)
    assert rows_of("a.tok=3,sub/b.tok=1") == rows_of("a.tok=0.75,sub/b.tok=0.25")
    assert main(["mix", "--output=m.mix", "a.tok=3", "sub/b.tok=1"]) == 0
    stored = json.loads(Path("m.mix").read_text())
    for file in stored["files"]:
        file["weight"] *= 7.0  # written by hand
    Path("m.mix").write_text(json.dumps(stored))
    write_file(files / "c.tok", [[3] * 99])
    assert rows_of("m.mix=0.5,c.tok=0.5") == rows_of("a.tok=0.375,sub/b.tok=0.125,c.tok=0.5")


def test_sources_of_a_mixture_have_their_own_order(tmp_path):
    for name in ("a", "b"):
        write_file(tmp_path / f"{name}.tok", [[ord(name)] * 99] * 20)
    source = f"{tmp_path}/a.tok=0.5,{tmp_path}/b.tok=0.5"
    both = pipeline.open_source(
        config.Data(source=source, seq_len=16), source, split="train", global_batch=8, data_dir="unused"
    )
    one, other = (both.window_numbers(k, np.arange(both.sources[k].windows)) for k in (0, 1))
    assert sorted(one) == sorted(other) and (one != other).sum() > len(one) / 2


def test_a_mixture_is_read_like_the_files_that_it_names(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    assert main(["mix", "--output=sub/m.mix", "a.tok=1.4", "sub/b.tok=0.6", "--tokens=2000"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [float(line.split()[2]) for line in table[1:]] == pytest.approx([2000 * 0.7 / 900, 2000 * 0.3 / 100], abs=1e-3)
    stored = json.loads(Path("sub/m.mix").read_text())
    assert [(f["path"], f["tokens"]) for f in stored["files"]] == [("../a.tok", 900), ("b.tok", 100)]
    assert rows_of("sub/m.mix") == rows_of("a.tok=0.7,sub/b.tok=0.3")
    # a mixture has a weight like a file, which its own files share
    write_file(files / "c.tok", [[3] * 99])
    assert rows_of("sub/m.mix=0.5,c.tok=0.5") == rows_of("a.tok=0.35,sub/b.tok=0.15,c.tok=0.5")
    data = config.Data(source="sub/m.mix", eval_source="sub/m.mix", seq_len=16)
    assert pipeline.check(data, 264, True) == []
    # moved together, it holds still; from another folder too
    (files / "moved").mkdir()
    for name in ("a.tok", "sub"):
        (files / name).rename(files / "moved" / name)
    monkeypatch.chdir("/")
    assert rows_of(str(files / "moved/sub/m.mix"), 2)
    assert main(["verify", str(files / "moved/sub/m.mix")]) == 0


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_weights_by_size_and_temperature(files, monkeypatch, temperature):
    monkeypatch.chdir(files)
    weighed = mixture.weigh([("a.tok", None), ("sub/b.tok", None)], "tokens", temperature)
    assert weighed[0][1] / weighed[1][1] == pytest.approx(9 ** (1 / temperature))
    assert math.fsum(w for _, w in weighed) == pytest.approx(1)
    weighed = mixture.weigh([("a.tok", None), ("sub/b.tok", 3.0)], "tokens", temperature)
    assert weighed[0][1] / weighed[1][1] == pytest.approx(3 ** (1 / temperature))
    weighed = mixture.weigh([("a.tok", 8.0), ("sub/b.tok", 2.0)], "weight", temperature)
    assert weighed[0][1] / weighed[1][1] == pytest.approx(4 ** (1 / temperature))


def test_a_file_that_changed_is_refused_by_name(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    assert main(["mix", "--output=m.mix", "a.tok", "sub/b.tok", "--by=tokens"]) == 0
    assert main(["mix", "--output=m.mix", "a.tok", "sub/b.tok", "--by=tokens"]) == 2  # it is there
    write_file(files / "sub" / "b.tok", [[2] * 98 + [3]])  # as many tokens, others
    (problem,) = pipeline.check(config.Data(source="m.mix", seq_len=16), 264, False)
    assert (problem.key, problem.value) == ("data.source", "sub/b.tok")
    assert "is not the file that m.mix was written for" in problem.rule
    capsys.readouterr()
    assert main(["verify", "m.mix"]) == 1
    assert "sub/b.tok: is not the file" in capsys.readouterr().out
    (files / "sub" / "b.tok").unlink()
    (problem,) = pipeline.check(config.Data(source="m.mix", seq_len=16), 264, False)
    assert (problem.value, problem.rule) == ("sub/b.tok", "no such file")
    (problem,) = pipeline.check(config.Data(source="none.mix", seq_len=16), 264, False)
    assert "jaxtrain.data mix" in problem.remedy


def test_mixtures_that_are_wrong_are_refused(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    write_file(files / "other.tok", [[1] * 9], sha256="x", name="other")
    write_file(files / "empty.tok", [])
    for args, said in (
        (["a.tok"], "has no weight"),
        (["a.tok=0"], "above 0"),
        (["a.tok=x"], "a weight is a number"),
        (["a.tok=1", "./a.tok=2"], "named twice"),
        (["a.tok=1", "other.tok=1"], "several tokenizers"),
        (["a.tok=1", "none.tok=1"], "no such file"),
        (["empty.tok", "--by=tokens"], "no tokens"),
        (["a.tok=1", "--temperature=0"], "--temperature"),
        (["a.tok=1", "--tokens=-1"], "--tokens"),
        (["a.tok=1", "--output=m.json"], "ends in .mix"),
    ):
        assert main(["mix", "--output=m.mix", *args]) == 2, args
        assert said in capsys.readouterr().err
        assert not list(files.glob("m.*")), args
    good = {"path": "a.tok", "weight": 1, "tokens": 900, "content_sha256": "0"}
    for stored in (
        "no json",
        "[]",
        {"format": "jaxtrain mixture", "version": 9, "files": []},
        {"format": "jaxtrain mixture", "version": 1, "files": []},
        {"format": "jaxtrain mixture", "version": 1},
        *(
            {"format": "jaxtrain mixture", "version": 1, "files": [{**good, **wrong}]}
            for wrong in ({"weight": 0}, {"weight": "x"})
        ),
        {"format": "jaxtrain mixture", "version": 1, "files": [{"path": "a.tok"}]},
    ):
        Path("m.mix").write_text(stored if isinstance(stored, str) else json.dumps(stored))
        (problem,) = pipeline.check(config.Data(source="m.mix", seq_len=16), 264, False)
        assert "m.mix" in problem.rule, (stored, problem)


def test_bytes_per_token_of_masked_and_mixed_files(tmp_path):
    rng = np.random.default_rng(0)
    plain = write_file(tmp_path / "a.tok", [[1] * 50] * 10)
    masked = write_file(tmp_path / "b.tok", [rng.integers(0, 256, 40).tolist() for _ in range(10)], loss=True)

    def figure(source, packing="documents"):
        data = config.Data(source=str(source), seq_len=16, packing=packing)
        return pipeline.open_source(data, data.source, split="train", global_batch=2, data_dir="").bytes_per_token

    assert figure(plain) == pytest.approx(500 / 500)
    assert figure(plain, "none") == pytest.approx(500 / 510)
    file = TokenFile.open(masked)
    flags = file.loss_flags(0, 410)
    even = int((np.asarray(file.tokens) % 2 == 0).sum()) - 10  # end-of-text is even, and has no bit here
    assert flags.sum() == even
    first = int(flags[np.asarray(file.doc_offsets[:-1])].sum())
    assert first > 0
    assert figure(masked) == pytest.approx(even / (even - first))
    assert figure(masked, "none") == pytest.approx(1)
    # A conversation of 41 tokens has a row of 16 to itself, and is cut behind the last of its first 17 tokens that ends a turn.
    kept = sum(whole_turns(flags[begin : begin + 18]) for begin in file.doc_offsets[:-1])
    held = 410 * 10 * 16 / kept
    both = (0.5 * 500 / 510 + 0.5 * even / held) / (0.5 * 500 / 510 + 0.5 * (even - first) / held)
    assert figure(f"{plain}=1,{masked}=1") == pytest.approx(both)
    nothing = write_file(tmp_path / "c.tok", [[1] * 10] * 10, loss=True)
    assert figure(nothing) is None
    with pytest.raises(config.ConfigError, match="no sequence"):
        figure(write_file(tmp_path / "d.tok", [[1] * 50] * 10, loss=True))


# a mixture that changes on resume


def mixed(source: str, seq_len: int = 16, **keys) -> pipeline.Batches:
    data = config.Data(source=source, seq_len=seq_len, **keys)
    return pipeline.open_source(data, source, split="train", global_batch=8, data_dir="unused")


def saved(batches: pipeline.Batches, step: int) -> dict:
    """What a checkpoint of `step` steps says of the data."""
    tokens = step * batches.global_batch * batches.seq_len
    found = {"tokens": tokens, "fingerprint": batches.fingerprint, "mixture": batches.mixture(step * batches.global_batch)}
    return json.loads(json.dumps(found))


def places(batches: pipeline.Batches, step: int) -> list[tuple[str, int]]:
    """(source, index within it) of each row of a batch."""
    index = np.arange(step * batches.global_batch, (step + 1) * batches.global_batch)
    number, within = batches._places(index)
    return [(Path(batches.sources[k].name).name, i) for k, i in zip(number.tolist(), within.tolist(), strict=True)]


def test_a_changed_mixture_skips_and_repeats_nothing(tmp_path):
    """Nine to one, then halves, then two to eight, for 10,000 rows each. Were turns counted from row 0, the first change alone
    would skip 4,000 windows of one source and repeat 4,000 of the other."""
    for name in "ab":
        write_file(tmp_path / f"{name}.tok", [[ord(name)] * 99] * 3000)
    read = {"a.tok": 0, "b.tok": 0}
    kept, want = None, []
    for part, (a, b) in enumerate([(0.9, 0.1), (0.5, 0.5), (0.2, 0.8)]):
        batches = mixed(f"{tmp_path}/a.tok={a},{tmp_path}/b.tok={b}")
        begin = part * 1250
        for _ in range(2 if kept else 0):  # the second time as after a rollback
            assert batches.go_on(kept, begin, begin * 8)
        before = dict(read)
        for step in range(begin, begin + 1250):
            met = places(batches, step)
            if step % 250 == 0:
                want.append((step, met, batches.batch(step)["tokens"]))
            for name, within in met:
                assert within == read[name], (part, step)
                read[name] += 1
        assert read["a.tok"] - before["a.tok"] == pytest.approx(10_000 * a, abs=2)
        kept = saved(batches, begin + 1250)
        assert {s["name"]: s["tokens"] for s in kept["mixture"]["sources"]} == {k: n * 16 for k, n in read.items()}
        assert [p["step"] for p in kept["mixture"]["parts"]] == [0, 1250, 2500][: part + 1]
    # A later attempt with the same mixture takes the same rows, those before the changes too.
    again = mixed(f"{tmp_path}/a.tok=0.2,{tmp_path}/b.tok=0.8")
    assert not again.go_on(kept, 3750, 30_000)
    for step, met, tokens in want:
        assert places(again, step) == met
        assert np.array_equal(again.batch(step)["tokens"], tokens)
    assert saved(again, 3750)["mixture"] == kept["mixture"]
    # A longer row: places are counted in tokens.
    longer = mixed(f"{tmp_path}/a.tok=0.2,{tmp_path}/b.tok=0.8", seq_len=32)
    assert not longer.go_on(kept, 3750, 15_000)
    for name, within in places(longer, 1875):
        assert within == pytest.approx(read[name] / 2, abs=8)


def test_sources_that_leave_a_mixture_come_back_and_join_it(tmp_path):
    """Each keeps its own order of windows, whatever its place in data.source."""
    for name in "abc":
        write_file(tmp_path / f"{name}.tok", [[ord(name)] * 99 + [i % 256] for i in range(200)])
    read: dict[str, list[int]] = {}
    kept = None
    sources = ("a.tok=0.5,b.tok=0.5", "b.tok", "c.tok=0.3,b.tok=0.3,a.tok=0.4", "c.tok", "a.tok=0.4,b.tok=0.3,c.tok=0.3")
    for part, source in enumerate(sources):
        batches = mixed(",".join(f"{tmp_path}/{item}" for item in source.split(",")), seq_len=64)
        if kept:
            assert batches.go_on(kept, part * 20, part * 160)
        for step in range(part * 20, part * 20 + 20):
            for name, numbers in batches.windows(step).items():
                read.setdefault(Path(name).name, []).extend(numbers)
        kept = saved(batches, part * 20 + 20)
        assert sum(s["tokens"] for s in kept["mixture"]["sources"]) == kept["tokens"]
    for number, name in enumerate("abc"):
        # The windows of a run that reads this source alone, as the one with this number, from its beginning.
        got = read[f"{name}.tok"]
        assert got == batches.window_numbers(number, np.arange(len(got))).tolist()
    with pytest.raises(ValueError, match=r"a.tok: is not in data.source any more"):
        gone = mixed(f"{tmp_path}/b.tok", seq_len=64)
        gone.go_on(kept, 100, 800)
        gone.batch(0)
    reordered = mixed(f"{tmp_path}/c.tok=0.3,{tmp_path}/a.tok=0.4,{tmp_path}/b.tok=0.3", seq_len=64)
    assert not reordered.go_on(kept, 100, 800)
    assert reordered.windows(100) == batches.windows(100)


def test_a_source_that_was_renamed_goes_on_where_it_stopped(tmp_path):
    """It is known by what it holds, and another file of the same name begins anew."""
    for name in "ab":
        write_file(tmp_path / f"{name}.tok", [[ord(name)] * 99] * 200)
    before = mixed(f"{tmp_path}/a.tok=0.5,{tmp_path}/b.tok=0.5")
    kept = saved(before, 20)
    (tmp_path / "a.tok").rename(tmp_path / "c.tok")
    renamed = mixed(f"{tmp_path}/c.tok=0.5,{tmp_path}/b.tok=0.5")
    assert not renamed.go_on(kept, 20, 160)
    assert places(renamed, 20) == [("c.tok" if name == "a.tok" else name, i) for name, i in places(before, 20)]
    write_file(tmp_path / "a.tok", [[3] * 99] * 200)
    other = mixed(f"{tmp_path}/a.tok=0.5,{tmp_path}/b.tok=0.5")
    assert other.go_on(kept, 20, 160)
    assert dict(reversed(places(other, 20))) == {"a.tok": 0, "b.tok": 80}


def test_segments_and_masked_tokens_of_a_mixture(tmp_path):
    """The number of segments is the largest of all files, and the masked part counts by weights."""
    for name, length in (("a", 3), ("b", 15)):
        write_file(tmp_path / f"{name}.tok", [[1] * length] * 100)
    source = f"{tmp_path}/a.tok=0.75,{tmp_path}/b.tok=0.25"
    a, b = (mixed(f"{tmp_path}/{name}.tok") for name in "ab")
    assert (a.max_segments, b.max_segments, mixed(source).max_segments) == (4, 1, 4)
    one, both = mixed(f"{tmp_path}/a.tok", max_segments=1), mixed(source, max_segments=1)
    assert one.masked_fraction == pytest.approx(0.75) and both.masked_fraction == pytest.approx(0.75 * 0.75)


WEIGHTS = st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 50]), min_size=4, max_size=4).filter(any)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WEIGHTS, st.integers(0, 30)), min_size=1, max_size=5))
def test_whatever_the_mixtures_each_source_gives_its_rows_in_order(parts):
    """By the sources' numbers: with each part's rows in their shares, to within the number of sources."""
    read, found, row = [0] * 4, [], 0
    for weights, rows in parts:
        part = windows.Part(row, tuple(weights), tuple(read))
        number, within = part.places(np.arange(row, row + rows))
        for k, i in zip(number.tolist(), within.tolist(), strict=True):
            assert weights[k] and i == read[k]
            read[k] += 1
        assert part.read_before(row + rows) == read
        assert all(abs(n - b - rows * w / sum(weights)) < 4 for n, b, w in zip(read, part.read, weights, strict=True))
        found.append(part)
        row += rows


@pytest.mark.parametrize("loss", [True, False])
def test_stats_against_direct_counts(tmp_path, monkeypatch, capsys, loss):
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 256, int(n)).tolist() for n in rng.exponential(30, 300)]
    documents += documents[:7] + [documents[0]] + [[5]]
    path = write_file(tmp_path / "a.tok", documents, loss=loss)
    monkeypatch.setattr(stats, "DOCUMENTS", 64)
    monkeypatch.setattr(stats, "ROW_TOKENS", 100)
    found = stats.stats(path, 32, 2)
    sizes = np.sort([len(d) + 1 for d in documents])
    assert (found["documents"], found["tokens"]) == (len(documents), sizes.sum())
    for p, value in found["length_percentiles"].items():
        assert value == np.percentile(sizes, p, method="inverted_cdf")
    assert sum(n for *_, n in found["length_histogram"]) == len(documents)
    for a, b, n in found["length_histogram"]:
        assert n == ((sizes >= a) & (sizes < b)).sum()
    seen: dict[tuple, int] = {}
    for d in documents:
        seen[tuple(d)] = seen.get(tuple(d), 0) + 1
    again = {
        "documents": sum(n - 1 for n in seen.values()),
        "tokens": sum((n - 1) * (len(d) + 1) for d, n in seen.items()),
    }
    assert found["duplicates"] == again
    assert again["documents"] >= 8
    file = TokenFile.open(path)
    for hash_bytes in (16, 100, 1 << 20):
        assert stats.duplicates(file, hash_bytes) == again
    data = config.Data(source=str(path), seq_len=32, max_segments=2)
    batches = pipeline.open_source(data, data.source, split="train", global_batch=1, data_dir="")
    rows = [batches.batch(s) for s in range(batches.sources[0].windows)]
    packed = found["packing"]
    assert packed["rows"] == len(rows)
    assert packed["counted"] == pytest.approx(np.mean([r["weights"] for r in rows]))
    assert packed["documents_per_row"] == pytest.approx(np.mean([r["segments"].max() for r in rows]))
    padding = np.mean([r["segments"] == 0 for r in rows])
    assert packed["masked"] == pytest.approx(batches.masked_fraction)
    assert packed["masked"] == pytest.approx(0 if loss else padding)
    assert padding > 0
    if loss:
        assert packed["filled"] == pytest.approx(1 - padding)
        ends = file.doc_offsets[:].tolist()
        lost = [b - a - whole_turns(file.loss_flags(a, a + 34)) for a, b in itertools.pairwise(ends) if b - a > 33]
        assert (packed["truncated_documents"], packed["truncated_tokens"]) == (len(lost), sum(lost))
    assert found["tokens_with_loss"] == int(file.loss_flags(0, len(file.tokens)).sum())
    assert main(["stats", str(path), "--seq-len=32", "--max-segments=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found))
    assert main(["stats", str(path), "--seq-len=32"]) == 0
    out = capsys.readouterr().out
    assert out.count("--- document ") == 3 and "####" in out
    assert main(["stats", str(write_file(tmp_path / "none.tok", []))]) == 0
    assert main(["stats", str(path), "--seq-len=0"]) == 2
    assert main(["stats", str(tmp_path / "missing.tok")]) == 2
