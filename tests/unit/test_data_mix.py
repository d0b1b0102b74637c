"""Mixtures of token files, fixed or scheduled, and the counts that `show` prints for them."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain import config, position
from jaxtrain.data import __main__ as data_command
from jaxtrain.data import mixture, pipeline
from jaxtrain.data import tokenizer as text_tokenizers
from jaxtrain.data.__main__ import main
from jaxtrain.data.tokenfile import TokenFile, TokenWriter
from jaxtrain.data.windows import whole_turns
from jaxtrain.train.initial_state import Start, continue_sources

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
    write_file(tmp_path / "sub" / "b.tok", [[2] * 99])  # 100 tokens
    return tmp_path


def rows_of(source: str, steps: int = 10) -> list[int]:
    batches = pipeline.open_source(
        config.Data(source=source, seq_len=16), source, split="train", global_batch=8, data_dir="unused"
    )
    return [row for s in range(steps) for row in batches.batch(s)["tokens"].tolist()]


def test_weights_count_by_their_shares(files, monkeypatch):
    monkeypatch.chdir(files)
    assert rows_of("a.tok=3,sub/b.tok=1") == rows_of("a.tok=0.75,sub/b.tok=0.25")
    assert rows_of("a.tok,sub/b.tok") == rows_of("a.tok=0.9,sub/b.tok=0.1"), "by their tokens"


def test_sources_of_a_mixture_have_their_own_order(tmp_path):
    for name in ("a", "b"):
        write_file(tmp_path / f"{name}.tok", [[ord(name)] * 99] * 20)
    source = f"{tmp_path}/a.tok=0.5,{tmp_path}/b.tok=0.5"
    both = pipeline.open_source(
        config.Data(source=source, seq_len=16), source, split="train", global_batch=8, data_dir="unused"
    )
    one, other = (both.window_numbers(k, np.arange(both.sources[k].windows)) for k in (0, 1))
    assert sorted(one) == sorted(other) and (one != other).sum() > len(one) / 2


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
    even = int((np.asarray(file.tokens) % 2 == 0).sum()) - 10  # end-of-text is even, so its loss bit is 0 here
    assert flags.sum() == even
    first = int(flags[np.asarray(file.doc_offsets[:-1])].sum())
    assert first > 0
    assert figure(masked) == pytest.approx(even / (even - first))
    assert figure(masked, "none") == pytest.approx(1)
    # A conversation of 41 tokens fills a row of 16 alone. It is cut after the last of its first 17 tokens that ends a turn.
    kept = sum(whole_turns(flags[begin : begin + 18]) for begin in file.doc_offsets[:-1])
    held = 410 * 10 * 16 / kept
    both = (0.5 * 500 / 510 + 0.5 * even / held) / (0.5 * 500 / 510 + 0.5 * (even - first) / held)
    assert figure(f"{plain}=1,{masked}=1") == pytest.approx(both)
    nothing = write_file(tmp_path / "c.tok", [[1] * 10] * 10, loss=True)
    assert figure(nothing) is None
    with pytest.raises(config.ConfigError, match="no sequence"):
        figure(write_file(tmp_path / "d.tok", [[1] * 50] * 10, loss=True))


@pytest.mark.parametrize(
    ("source", "schedule", "key", "rule"),
    [
        ("a.tok=0.5,sub/b.tok", "", "data.source", "has no weight, and other files have one"),
        ("a.tok=0.5,./a.tok=0.5", "", "data.source", "is named twice"),
        ("a.tok=x", "", "data.source", "a weight is a number above 0"),
        ("a.tok", "a.tok=0.5", "data.source_schedule", "does not begin with a step"),
        ("a.tok", "0: sub/b.tok", "data.source_schedule", "does not begin with a step"),
        ("a.tok", "0.8: sub/b.tok", "data.source_schedule", "does not begin with a step"),
        ("a.tok", "1__0: sub/b.tok", "data.source_schedule", "does not begin with a step"),
        ("a.tok", "_5: sub/b.tok", "data.source_schedule", "does not begin with a step"),
        ("a.tok", "5_: sub/b.tok", "data.source_schedule", "does not begin with a step"),
        ("a.tok", "9: a.tok; 9: sub/b.tok", "data.source_schedule", "step 9 is not after step 9"),
        ("a.tok", "9: a.tok; 8: sub/b.tok", "data.source_schedule", "step 8 is not after step 9"),
        ("a.tok", "9: a.tok=0", "data.source_schedule", "a weight is a number above 0"),
        ("a.tok", "9:", "data.source_schedule", "names no data"),
        ("a.tok", "9: gone.tok", "data.source_schedule", "no such file"),
        ("a.tok", "9: other.tok", "data.tokenizer", "is not the tokenizer of other.tok"),
        ("stdlib", "9: a.tok", "data.source_schedule", "a schedule is for token files"),
        ("synthetic", "9: a.tok", "data.source_schedule", "a schedule is for token files"),
    ],
)
def test_mixtures_that_are_wrong_are_refused(files, monkeypatch, source, schedule, key, rule):
    monkeypatch.chdir(files)
    write_file(files / "other.tok", [[1] * 99], sha256="x", name="other")
    data = config.Data(source=source, source_schedule=schedule, seq_len=16)
    (problem,) = pipeline.check(data, 264, False)
    assert problem.key == key and rule in problem.rule and problem.remedy


def test_digits_of_a_scheduled_step_may_have_single_underscores_between():
    phases, problems = mixture.parse_schedule("800: a.tok; 8_000 : b.tok; 1_0_0_0_0: a.tok")
    assert [step for step, _ in phases] == [800, 8000, 10_000] and not problems


# ---- A mixture that changes on resume or by a schedule


def resume(batches: pipeline.Batches, kept: dict | None, step: int) -> bool:
    """Continue from a checkpoint of `step` steps, with constant batch size. Returns whether the mixture has changed."""
    return batches.start_mixture(kept, step, step * batches.global_batch, lambda step: step * batches.global_batch)


def mixed(source: str, seq_len: int = 16, **keys) -> pipeline.Batches:
    data = config.Data(source=source, seq_len=seq_len, **keys)
    return pipeline.open_source(data, source, split="train", global_batch=8, data_dir="unused")


def saved(batches: pipeline.Batches, step: int) -> dict:
    """Return the data state that a checkpoint of `step` steps holds."""
    tokens = step * batches.global_batch * batches.seq_len
    found = {
        "tokens": tokens,
        "fingerprint": batches.fingerprint,
        "mixture": batches.mixture.state(step * batches.global_batch),
    }
    return json.loads(json.dumps(found))


def places(batches: pipeline.Batches, step: int) -> list[tuple[str, int]]:
    """Return (source, index within the source) of each row of a batch."""
    index = np.arange(step * batches.global_batch, (step + 1) * batches.global_batch)
    number, within = batches.mixture.sources_of(index)
    return [(Path(batches.sources[k].name).name, i) for k, i in zip(number.tolist(), within.tolist(), strict=True)]


def test_a_changed_mixture_skips_and_repeats_nothing(tmp_path):
    """The weights change twice: nine to one, one to one, two to eight, for 10,000 rows each.

    If the new weights applied from row 0, the first change alone would skip 4,000 windows of one source and repeat 4,000 of the
    other.
    """
    for name in "ab":
        write_file(tmp_path / f"{name}.tok", [[ord(name)] * 99] * 3000)
    read = {"a.tok": 0, "b.tok": 0}
    kept, want = None, []
    for part, (a, b) in enumerate([(0.9, 0.1), (0.5, 0.5), (0.2, 0.8)]):
        batches = mixed(f"{tmp_path}/a.tok={a},{tmp_path}/b.tok={b}")
        begin = part * 1250
        for _ in range(2 if kept else 0):  # the second call is a restore after a rollback
            assert resume(batches, kept, begin)
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
        assert [p["step"] for p in kept["mixture"]["phases"]] == [0, 1250, 2500][: part + 1]
    # A later attempt with the same mixture takes the same rows, even those before the changes.
    again = mixed(f"{tmp_path}/a.tok=0.2,{tmp_path}/b.tok=0.8")
    assert not resume(again, kept, 3750)
    for step, met, tokens in want:
        assert places(again, step) == met
        assert np.array_equal(again.batch(step)["tokens"], tokens)
    assert saved(again, 3750)["mixture"] == kept["mixture"]
    # With longer rows, each source continues at the same token.
    longer = mixed(f"{tmp_path}/a.tok=0.2,{tmp_path}/b.tok=0.8", seq_len=32)
    assert not longer.start_mixture(kept, 3750, 15_000, lambda step: (step - 3750) * 8 + 15_000)
    for name, within in places(longer, 1875):
        assert within == pytest.approx(read[name] / 2, abs=8)


def test_sources_that_leave_a_mixture_come_back_and_join_it(tmp_path):
    """Each source keeps its own order of windows, at any position in data.source."""
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
            for name, numbers in batches.windows(step).items():
                read.setdefault(Path(name).name, []).extend(numbers)
        kept = saved(batches, part * 20 + 20)
        assert sum(s["tokens"] for s in kept["mixture"]["sources"]) == kept["tokens"]
    for number, name in enumerate("abc"):
        # The windows equal those of a run that reads this source alone from its start, under the same source number.
        got = read[f"{name}.tok"]
        assert got == batches.window_numbers(number, np.arange(len(got))).tolist()
    reordered = mixed(f"{tmp_path}/c.tok=0.3,{tmp_path}/a.tok=0.4,{tmp_path}/b.tok=0.3", seq_len=64)
    assert not resume(reordered, kept, 100)
    assert reordered.windows(100) == batches.windows(100)


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
    """The number of segments is the largest of all files. The masked fraction is the weighted mean of the files'."""
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
    """Each phase reads its sources in proportion to their weights, to within 4 rows (the number of sources)."""
    read, found, row = [0] * 4, [], 0
    for weights, rows in parts:
        part = mixture.Phase(0, row, tuple(weights), tuple(read))
        number, within = part.sources_of(np.arange(row, row + rows), 1)
        for k, i in zip(number.tolist(), within.tolist(), strict=True):
            assert weights[k] and i == read[k]
            read[k] += 1
        assert part.read_before(row + rows, 1) == tuple(read)
        assert all(abs(n - b - rows * w / sum(weights)) < 4 for n, b, w in zip(read, part.read, weights, strict=True))
        found.append(part)
        row += rows


PHASE = st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 50]), min_size=3, max_size=3).filter(any)


@settings(max_examples=60, deadline=None)
@given(
    phases=st.lists(st.tuples(st.integers(1, 12), PHASE), min_size=1, max_size=4),
    stops=st.lists(st.tuples(st.integers(1, 39), st.sampled_from([1, 2, 3, 8])), max_size=3, unique_by=lambda stop: stop[0]),
)
def test_whatever_the_schedule_and_the_resumes_each_source_is_read_once_in_order(tmp_path_factory, phases, stops):
    """A run of 40 steps with scheduled changes is stopped and resumed, with equal or other global batches."""
    folder = tmp_path_factory.getbasetemp() / "schedule"
    if not folder.exists():
        folder.mkdir()
        for name in "abc":
            write_file(folder / f"{name}.tok", [[ord(name)] * 99] * 50)
    changes = list(itertools.accumulate(step for step, _ in phases))

    def source(weights):
        return ",".join(f"{folder}/{name}.tok={w}" for name, w in zip("abc", weights, strict=True) if w)

    schedule = "; ".join(f"{step}: {source(weights)}" for step, (_, weights) in zip(changes[:-1], phases[1:], strict=True))
    data = config.Data(source=source(phases[0][1]), source_schedule=schedule, seq_len=16)
    weights_at = [phases[sum(step <= at for step in changes[:-1])][1] for at in range(40)]
    read = dict.fromkeys("abc", 0)
    kept, row, begin = None, 0, 0
    for end, size in [*sorted(stops), (40, 4)]:
        batches = pipeline.open_source(data, data.source, split="train", global_batch=size, data_dir="unused")
        first = -(-row // size)  # a resumed run continues at a whole batch, as jaxtrain/position.py counts batches
        if kept is not None:
            for number, source_read in enumerate(kept["mixture"]["sources"]):
                assert source_read["tokens"] == 16 * read[source_read["name"][0]], number
        batches.start_mixture(kept, begin, first * size, lambda step, f=first, b=begin, n=size: (f + step - b) * n)
        for step in range(begin, end):
            for row in range((first + step - begin) * size, (first + step - begin + 1) * size):
                number, within = batches.mixture.sources_of(np.asarray([row]))
                name = Path(batches.sources[number[0]].name).name[0]
                assert within[0] == read[name], (step, name)
                read[name] += 1
                assert weights_at[step]["abc".index(name)] > 0
        row = (first + end - begin) * size
        found = {"mixture": batches.mixture.state(row), "tokens": row * 16}
        kept = json.loads(json.dumps(found))
        begin = end
    for line in batches.sources_read(row // 4):
        assert line["tokens"] == 16 * read[line["source"][0]]


def test_a_schedule_takes_effect_at_its_step_and_a_resume_there_is_no_change(files, monkeypatch):
    """A run that is resumed before, at or after a scheduled step has the batches of a run that was not interrupted."""
    monkeypatch.chdir(files)
    write_file(files / "c.tok", [[3] * 99] * 20)
    keys: dict[str, Any] = {"source_schedule": "5: a.tok=0.25,c.tok=0.75; 9: c.tok", "packing": "none"}
    whole = mixed("a.tok=0.5,sub/b.tok=0.5", **keys)
    names = [sorted({name for name, _ in places(whole, step)}) for step in range(12)]
    assert names == [["a.tok", "b.tok"]] * 5 + [["a.tok", "c.tok"]] * 4 + [["c.tok"]] * 3
    for at in (0, 3, 4, 5, 6, 9, 11):
        kept = saved(whole, at) if at else None
        again = mixed("a.tok=0.5,sub/b.tok=0.5", **keys)
        assert not resume(again, kept, at)
        for step in range(at, 12):
            assert places(again, step) == places(whole, step)
            assert np.array_equal(again.batch(step)["tokens"], whole.batch(step)["tokens"])
        assert saved(again, 12)["mixture"] == saved(whole, 12)["mixture"]
    # A new schedule applies to the remaining steps: the phases that have begun stay.
    kept = saved(whole, 6)
    other = mixed("a.tok=0.5,sub/b.tok=0.5", source_schedule="5: a.tok=0.25,c.tok=0.75; 8: sub/b.tok", packing="none")
    assert not resume(other, kept, 6)
    assert [(p.step, p.weights) for p in other.mixture.phases] == [(0, (0.5, 0.5, 0)), (5, (0.25, 0, 0.75)), (8, (0, 1, 0))]
    late = mixed("a.tok=0.5,sub/b.tok=0.5", source_schedule="4: c.tok", packing="none")
    assert resume(late, kept, 6), "step 4 has passed: its weights begin now, and the run reports a change"
    assert late.mixture.phases[-1].step == 6
    lines = {line["source"]: line for line in whole.sources_read(9)}
    assert sum(line["tokens"] for line in lines.values()) == 9 * 8 * 16
    assert (lines["a.tok"]["weight"], lines["b.tok"]["weight"], lines["c.tok"]["weight"]) == (0.25, 0, 0.75)
    assert lines["c.tok"]["epoch"] == pytest.approx(lines["c.tok"]["tokens"] / (whole.sources[2].windows * 16))
    assert mixed("a.tok").sources_read(3) == []


@pytest.mark.parametrize(
    "schedule",
    [
        "5: a.tok=0.63,sub/b.tok=0.37; 9: a.tok=0.63,sub/b.tok=0.37",  # equal to the weights of the phase before
        "5: a.tok=0.25,sub/b.tok=0.75; 9: a.tok=0.63,sub/b.tok=0.37",
    ],
)
@pytest.mark.parametrize("skipped", [(), ((5, 8),), ((5, 7), (12, 13)), ((4, 6),)])
def test_a_resume_at_any_step_reads_the_rows_of_the_run_that_was_not_interrupted(files, monkeypatch, schedule, skipped):
    """Resumes at a step of data.source_schedule are included, with new or equal weights, and with skipped data that starts
    there.
    """
    monkeypatch.chdir(files)
    source = "a.tok=0.63,sub/b.tok=0.37"
    run = config.RunConfig(data=config.Data(source=source, seq_len=16), train=config.Train(steps=16, global_batch=8))

    def begun(place: position.Position, stored: dict[str, Any]) -> pipeline.Batches:
        batches = mixed(source, source_schedule=schedule)
        said: list[str] = []
        continue_sources(run, Start(place.step, place.step > 0, False, place, (), stored), batches, said.append)
        assert not any("mixture changed" in line for line in said)
        return batches

    def stored(batches: pipeline.Batches, place: position.Position, step: int) -> dict[str, Any]:
        row = place.read(step) * 8
        return json.loads(json.dumps({"tokens": row * 16, "mixture": batches.mixture.state(row)}))

    start = position.Position(0, 0, skipped)
    whole = begun(start, {})
    for at in range(1, 16):
        place = position.Position(at, start.read(at), skipped)
        resumed = begun(place, stored(whole, start, at))
        for step in range(at, 16):
            assert places(resumed, place.at(step)) == places(whole, start.at(step)), (at, step)
        assert stored(resumed, place, 16) == stored(whole, start, 16), at


@pytest.mark.parametrize("loss", [True, False])
def test_shown_figures_against_direct_counts(tmp_path, monkeypatch, capsys, loss):
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 256, int(n)).tolist() for n in rng.exponential(30, 307)]
    path = write_file(tmp_path / "a.tok", documents, loss=loss)
    monkeypatch.setattr(data_command, "ROW_TOKENS", 100)
    file = TokenFile.open(path)
    data = config.Data(source=str(path), seq_len=32, max_segments=2)
    batches = pipeline.open_source(data, data.source, split="train", global_batch=1, data_dir="")
    rows = [batches.batch(s) for s in range(batches.sources[0].windows)]
    assert main(["show", str(path), "--seq-len=32", "--max-segments=2", "--documents=3"]) == 0
    out = capsys.readouterr().out
    padding = np.mean([r["segments"] == 0 for r in rows])
    counts = np.mean([r["weights"] for r in rows])
    held = np.mean([r["segments"].max() for r in rows])
    assert f"{len(rows)} rows, {held:.2f} documents a row, {counts:.2%} of the targets count" in out
    assert padding > 0
    if loss:
        assert f"rows are {1 - padding:.2%} full (at most 2 conversations each)" in out
        ends = file.doc_offsets[:].tolist()
        lost = [b - a - whole_turns(file.loss_flags(a, a + 34)) for a, b in itertools.pairwise(ends) if b - a > 33]
        assert f"conversations cut to fit 33 tokens: {len(lost)}, which lose {sum(lost):,} tokens" in out
    else:
        assert padding == pytest.approx(batches.masked_fraction)
        assert f"{padding:.2%} of the tokens masked beyond 2 documents" in out
    sizes = sorted(len(d) + 1 for d in documents)
    assert f"50%: {sizes[-(-len(sizes) // 2) - 1]:,}" in out
    assert out.count("--- document ") == 3
    counted = int(file.loss_flags(0, len(file.tokens)).sum())
    assert (f"{counted:,} tokens ({counted / len(file.tokens):.2%}) count in the loss" in out) == loss
    assert main(["show", str(write_file(tmp_path / "none.tok", [])), "--seq-len=32"]) == 0
    assert main(["show", str(path), "--seq-len=-1"]) == 2
    assert main(["show", str(tmp_path / "missing.tok")]) == 2
