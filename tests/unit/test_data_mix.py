"""Mixtures of token files, fixed or scheduled, and the counts that `show` prints for them."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import command, open_batches, random_documents, read_windows, write_file

from jaxtrain.config import schema
from jaxtrain.data import mixture, opening, show
from jaxtrain.data.batches import Batches
from jaxtrain.data.tokenfile import TokenFile
from jaxtrain.data.windows import fit_turns


@pytest.fixture
def files(tmp_path) -> Path:
    write_file(tmp_path / "a.tok", [[1] * 99] * 9)  # 900 tokens
    (tmp_path / "sub").mkdir()
    write_file(tmp_path / "sub" / "b.tok", [[2] * 99])  # 100 tokens
    return tmp_path


def mixed(source: object, seq_len: int = 16, global_batch: int = 8, **keys) -> Batches:
    return open_batches(source, seq_len, global_batch, **keys)


def test_weights_count_by_their_shares(files, monkeypatch):
    monkeypatch.chdir(files)

    def rows_of(source: str) -> list[int]:
        batches = mixed(source)
        return [row for s in range(10) for row in batches.batch(s)["tokens"].tolist()]

    assert rows_of("a.tok=3,sub/b.tok=1") == rows_of("a.tok=0.75,sub/b.tok=0.25")
    assert rows_of("a.tok,sub/b.tok") == rows_of("a.tok=0.9,sub/b.tok=0.1"), "without weights they count by their tokens"


def test_sources_of_a_mixture_have_their_own_order_and_weight_at_any_row(tmp_path):
    for name in ("a", "b"):
        write_file(tmp_path / f"{name}.tok", [[ord(name)] * 99] * 20)
    both = mixed(f"{tmp_path}/a.tok=0.75,{tmp_path}/b.tok=0.25")
    one, other = (both.window_numbers(k, np.arange(both.sources[k].windows)) for k in (0, 1))
    assert sorted(one) == sorted(other) and (one != other).sum() > len(one) / 2
    far, weights = 10**9, np.asarray([0.7, 0.2, 0.1])
    source, within = mixture.interleave(np.arange(far, far + 50), weights)
    assert np.allclose(within, far * weights[source], rtol=1e-6)


def test_bytes_per_token_of_masked_and_mixed_files(tmp_path):
    rng = np.random.default_rng(0)
    plain = write_file(tmp_path / "a.tok", [[1] * 50] * 10)
    masked = write_file(tmp_path / "b.tok", [rng.integers(0, 256, 40).tolist() for _ in range(10)], loss=True)

    def figure(source, packing="documents"):
        return mixed(source, packing=packing).bytes_per_token

    assert figure(plain, "none") == pytest.approx(500 / 510)
    file = TokenFile.open(masked)
    flags = file.loss_flags(0, 410)
    even = int((file.tokens[:] % 2 == 0).sum()) - 10  # end-of-text is even, so its loss bit is 0 here
    first = int(flags[np.asarray(file.doc_offsets[:-1])].sum())
    assert first and figure(masked) == figure(masked, "none") == pytest.approx(1)
    assert figure(plain) == pytest.approx(490 / 500)
    # A conversation of 41 tokens fills a row of 16 alone. It is cut after the last of its first 17 tokens that ends a turn.
    kept = sum(fit_turns(flags[begin : begin + 18]) for begin in file.doc_offsets[:-1])
    held = 410 * 10 * 16 / kept
    both = (0.5 * 490 / 510 + 0.5 * (even - first) / held) / (0.5 * 500 / 510 + 0.5 * (even - first) / held)
    assert figure(f"{plain}=1,{masked}=1") == pytest.approx(both)
    assert figure(write_file(tmp_path / "c.tok", [[1] * 10] * 10, loss=True)) is None


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("a.tok=0.5,sub/b.tok", "data.source"),  # one has a weight, and the other has none
        ("a.tok=0.5,./a.tok=0.5", "data.source"),
        ("a.tok,gone.tok", "data.source"),
        ("a.tok,other.tok", "data.tokenizer"),
    ],
)
def test_mixtures_that_are_wrong_are_refused(files, monkeypatch, source, key):
    monkeypatch.chdir(files)
    write_file(files / "other.tok", [[1] * 99], sha256="x", name="other")
    (problem,) = opening.check_data(schema.Data(source=source, seq_len=16), 264, False)
    assert problem.key == key and problem.remedy


def resume(batches: Batches, kept: dict | None, step: int) -> bool:
    """Continue from a checkpoint of `step` steps, with constant batch size. Returns whether the mixture has changed."""
    return batches.start_mixture(kept, step, step * batches.global_batch)


def saved(batches: Batches, step: int) -> dict:
    tokens = step * batches.global_batch * batches.seq_len
    mixture = batches.mixture.state(step * batches.global_batch)
    return json.loads(json.dumps({"tokens": tokens, "fingerprint": batches.fingerprint, "mixture": mixture}))


def places(batches: Batches, step: int) -> list[tuple[str, int]]:
    """Return (source, index within the source) of each row of a batch."""
    index = np.arange(step * batches.global_batch, (step + 1) * batches.global_batch)
    number, within = batches.mixture.sources_of(index)
    return [(Path(batches.sources[k].name).name, i) for k, i in zip(number.tolist(), within.tolist(), strict=True)]


def test_sources_that_leave_a_mixture_come_back_and_join_it(tmp_path):
    for name in "abc":
        write_file(tmp_path / f"{name}.tok", [[ord(name)] * 99 + [i % 256] for i in range(200)])
    read: dict[str, list[int]] = {}
    kept = None
    sources = ("a.tok=0.5,b.tok=0.5", "b.tok", "c.tok=0.3,b.tok=0.3,a.tok=0.4", "c.tok", "a.tok=0.4,b.tok=0.3,c.tok=0.3")
    for part, source in enumerate(sources):
        batches = mixed(",".join(f"{tmp_path}/{item}" for item in source.split(",")), seq_len=64)
        if kept:
            assert resume(batches, kept, part * 20)
        for step in range(part * 20, part * 20 + 20):
            for name, numbers in read_windows(batches, step).items():
                read.setdefault(Path(name).name, []).extend(numbers)
        kept = saved(batches, part * 20 + 20)
        assert sum(s["tokens"] for s in kept["mixture"]["sources"]) == kept["tokens"]
    for number, name in enumerate("abc"):
        # The windows equal those of a run that reads this source alone from its start, under the same source number.
        got = read[f"{name}.tok"]
        assert got == batches.window_numbers(number, np.arange(len(got))).tolist()
    reordered = mixed(f"{tmp_path}/c.tok=0.3,{tmp_path}/a.tok=0.4,{tmp_path}/b.tok=0.3", seq_len=64)
    assert not resume(reordered, kept, 100)
    assert read_windows(reordered, 100) == read_windows(batches, 100)


def test_a_source_that_was_renamed_goes_on_where_it_stopped(tmp_path):
    """A source is identified by its content. Another file under the same name starts at its beginning."""
    for name in "ab":
        write_file(tmp_path / f"{name}.tok", [[ord(name)] * 99] * 200)
    before = mixed(f"{tmp_path}/a.tok=0.5,{tmp_path}/b.tok=0.5")
    kept = saved(before, 20)
    (tmp_path / "a.tok").rename(tmp_path / "c.tok")
    renamed = mixed(f"{tmp_path}/c.tok=0.5,{tmp_path}/b.tok=0.5")
    assert not resume(renamed, kept, 20)
    assert places(renamed, 20) == [("c.tok" if name == "a.tok" else name, i) for name, i in places(before, 20)]
    write_file(tmp_path / "a.tok", [[3] * 99] * 200)
    other = mixed(f"{tmp_path}/a.tok=0.5,{tmp_path}/b.tok=0.5")
    assert resume(other, kept, 20)
    assert dict(reversed(places(other, 20))) == {"a.tok": 0, "b.tok": 80}


def test_segments_and_masked_tokens_of_a_mixture(tmp_path):
    for name, length in (("a", 3), ("b", 15)):
        write_file(tmp_path / f"{name}.tok", [[1] * length] * 100)
    source = f"{tmp_path}/a.tok=0.75,{tmp_path}/b.tok=0.25"
    a, b = (mixed(f"{tmp_path}/{name}.tok") for name in "ab")
    assert (a.max_segments, b.max_segments, mixed(source).max_segments) == (4, 1, 4)
    one, both = mixed(f"{tmp_path}/a.tok", max_segments=1), mixed(source, max_segments=1)
    assert one.masked_fraction == pytest.approx(0.75) and both.masked_fraction == pytest.approx(0.75 * 0.75)


def weights(count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 50]), min_size=count, max_size=count).filter(any)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(weights(4), st.integers(0, 30)), min_size=1, max_size=5))
def test_whatever_the_mixtures_each_source_gives_its_rows_in_order(parts):
    """Each phase reads its sources in proportion to their weights, to within 4 rows (the number of sources)."""
    read, row = [0] * 4, 0
    for shares, rows in parts:
        part = mixture.MixturePhase(0, row, tuple(shares), tuple(read))
        number, within = part.sources_of(np.arange(row, row + rows), 1)
        for k, i in zip(number.tolist(), within.tolist(), strict=True):
            assert shares[k] and i == read[k]
            read[k] += 1
        assert part.read_before(row + rows, 1) == tuple(read)
        assert all(abs(n - b - rows * w / sum(shares)) < 4 for n, b, w in zip(read, part.read, shares, strict=True))
        row += rows


@settings(max_examples=25, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(1, 12), st.sampled_from([1, 2, 3, 8]), weights(3)), min_size=1, max_size=5),
)
def test_whatever_the_mixtures_and_the_resumes_each_source_is_read_once_in_order(tmp_path_factory, parts):
    """parts: steps, batch size and weights of each attempt of a run."""
    folder = tmp_path_factory.getbasetemp() / "resumes"
    if not folder.exists():
        folder.mkdir()
        for name in "abc":
            write_file(folder / f"{name}.tok", [[ord(name)] * 99] * 50)
    read = dict.fromkeys("abc", 0)
    kept, row, step = None, 0, 0
    for steps, size, shares in parts:
        source = ",".join(f"{folder}/{name}.tok={w}" for name, w in zip("abc", shares, strict=True) if w)
        batches = mixed(source, 16, size)
        begin = -(-row // size) * size  # a resumed run continues at a whole batch, as jaxtrain/train/position.py counts batches
        if kept is not None:
            for each in kept["mixture"]["sources"]:
                assert each["tokens"] == 16 * read[each["name"][0]]
        batches.start_mixture(kept, step, begin)
        row, step = begin + steps * size, step + steps
        for number, within in zip(*batches.mixture.sources_of(np.arange(begin, row)), strict=True):
            name = Path(batches.sources[number].name).name[0]
            assert within == read[name], (step, name)
            read[name] += 1
            assert shares["abc".index(name)] > 0
        kept = {"mixture": batches.mixture.state(row), "tokens": row * 16}
        lines = batches.sources_read(row // size)
        assert not lines or {line["source"][0]: line["tokens"] for line in lines} == {
            line["source"][0]: 16 * read[line["source"][0]] for line in lines
        }


def test_a_resume_with_other_weights_begins_a_phase(files, monkeypatch):
    monkeypatch.chdir(files)
    write_file(files / "c.tok", [[3] * 99] * 20)
    first = mixed("a.tok=0.5,sub/b.tok=0.5", packing="none")
    second = mixed("a.tok=0.25,c.tok=0.75", packing="none")
    assert resume(second, saved(first, 5), 5)
    assert [(p.step, p.weights) for p in second.mixture.phases] == [(0, (0.5, 0.5, 0)), (5, (0.25, 0, 0.75))]
    assert [sorted({name for name, _ in places(second, step)}) for step in range(5, 9)] == [["a.tok", "c.tok"]] * 4
    again = mixed("a.tok=0.25,c.tok=0.75", packing="none")
    assert not resume(again, saved(second, 9), 9)
    lines = {line["source"]: line for line in second.sources_read(9)}
    assert sum(line["tokens"] for line in lines.values()) == 9 * 8 * 16
    assert (lines["a.tok"]["weight"], lines["b.tok"]["weight"], lines["c.tok"]["weight"]) == (0.25, 0, 0.75)


@pytest.mark.parametrize("loss", [True, False])
def test_shown_figures_against_direct_counts(tmp_path, monkeypatch, loss):
    documents = random_documents(1, 107, 30)
    path = write_file(tmp_path / "a.tok", documents, loss=loss)
    monkeypatch.setattr(show, "ROW_TOKENS", 100)
    batches = mixed(path, 32, 1, max_segments=2)
    rows = [batches.batch(s) for s in range(batches.sources[0].windows)]
    code, out = command(tmp_path, "show", "a.tok", "--seq-len=32", "--max-segments=2", "--documents=3")
    padding = np.mean([r["segments"] == 0 for r in rows])
    counts = np.mean([r["weights"] for r in rows])
    sizes = sorted(len(d) + 1 for d in documents)
    figures = [f"{len(rows)} rows", f"{counts:.2%}", f"50%: {sizes[-(-len(sizes) // 2) - 1]:,}"]
    if loss:
        file = TokenFile.open(path)
        ends = file.doc_offsets[:].tolist()
        lost = [b - a - fit_turns(file.loss_flags(a, a + 34)) for a, b in itertools.pairwise(ends) if b - a > 33]
        counted = int(file.loss_flags(0, len(file.tokens)).sum())
        figures += [f"{1 - padding:.2%}", f"{len(lost)}, ", f"{sum(lost):,} tokens", f"{counted:,} tokens"]
    else:
        assert padding == pytest.approx(batches.masked_fraction)
        figures += [f"{padding:.2%}"]
    assert code == 0 and padding > 0 and not [figure for figure in figures if figure not in out]
    write_file(tmp_path / "none.tok", [])
    assert command(tmp_path, "show", "none.tok", "--seq-len=32")[0] == 0
    assert command(tmp_path, "show", "a.tok", "--seq-len=-1")[0] == 2
