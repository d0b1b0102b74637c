"""Which batches a step reads, after skipped data and in a ramp: compared with a list without the skipped batches."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxtrain.config.ramp import Ramp
from jaxtrain.config.schema import Data, Train
from jaxtrain.train import position


@pytest.mark.parametrize("begin", [0, 3, 6, 7, 9, 12])
@pytest.mark.parametrize("skipped", [(), ((6, 9),), ((0, 2), (6, 9)), ((6, 7), (8, 9), (12, 20))])
def test_a_step_reads_the_next_batch_that_is_not_skipped(begin, skipped):
    """A run that starts inside a skipped range also skips the rest of that range."""
    gone = {batch for first, last in skipped for batch in range(first, last)}
    expected = list(itertools.islice((batch for batch in itertools.count(begin) if batch not in gone), 12))
    place = position.Position(5, begin, skipped)
    assert [place.at(step) for step in range(5, 17)] == expected
    # After a step, all batches up to the batch of that step have been read.
    assert [place.read(step) for step in range(5, 18)] == [begin, *(batch + 1 for batch in expected)]


@pytest.mark.parametrize("begin", [0, 7])
@pytest.mark.parametrize("skipped", [(), ((6, 9),), ((0, 2), (6, 9), (14, 15))])
@pytest.mark.parametrize("step", [0, 1, 3, 4, 6])
def test_a_step_of_a_ramp_reads_the_next_batches_that_are_not_skipped(step, begin, skipped):
    ramp = Ramp(8, ((2, 3), (6, 5)))
    gone = {batch for first, last in skipped for batch in range(first, last)}
    ahead = (batch for batch in itertools.count(begin) if batch not in gone)
    place, read = position.Position(step, begin, skipped, ramp), begin
    for at in range(step, 9):
        assert place.read(at) == read
        expected = list(itertools.islice(ahead, {0: 1, 1: 1, 2: 1, 3: 3, 4: 3}.get(at, 4)))
        assert place.batches(at) == expected and place.at(at) == expected[0]
        read = expected[-1] + 1


def test_rows_of_a_step_of_several_batches():
    class Source:
        def batch(self, number, rows=slice(None)):
            assert len(np.arange(4)[rows])
            return {"tokens": (4 * number + np.arange(4)[rows])[:, None]}

    place = position.Position(0, 0, ((2, 3),), Ramp(12, ((4, 1),)))
    positioned = position.Positioned(Source(), place)
    whole = [*range(4, 8), *range(12, 20)]
    assert positioned.batch(0)["tokens"][:, 0].tolist() == [0, 1, 2, 3]
    assert positioned.batch(1)["tokens"][:, 0].tolist() == whole
    for rows in ([0], [3, 4], [1, 9, 11], [8, 9, 10, 11]):
        assert positioned.batch(1, rows)["tokens"][:, 0].tolist() == [whole[row] for row in rows]


# ---- The record of a whole run


def test_the_entries_of_checkpoints_say_what_every_step_has_read():
    """Attempts with other batches, lengths and seeds, and a rollback, each from a checkpoint of the one before."""
    train, data = Train(global_batch=8, batch_ramp="2:3,4:6"), Data(seq_len=10, seed=1)
    read: dict[int, tuple] = {}  # step -> what it has read
    entries: list = []
    tokens = 0

    def attempt(first: int, last: int, skipped: list, begun_at: int) -> None:
        nonlocal entries, tokens
        ramp = position.parse_ramp(train.batch_ramp, train.global_batch)[0]
        known = [{"tokens": each} for each in skipped]
        place = position.find_position(None, first, begun_at, ramp, data.seq_len, known)  # pyright: ignore[reportArgumentType]
        entries = position.extend_entries(entries, position.position_entry(place, train, data))
        for step in range(first, last):
            read[step] = (place.batches(step), ramp.unit, data.seq_len, data.seed)
        tokens = place.read(last) * ramp.unit * data.seq_len

    attempt(0, 4, [], 0)
    attempt(4, 5, [], tokens)  # the exact continuation
    assert [entry["step"] for entry in entries] == [0] and tokens == (3 * 2 + 2 * 4) * 10
    saved, at = entries, tokens
    attempt(5, 8, [], tokens)
    assert entries == saved
    # Back to step 5: the data of steps 6 and 7 is skipped.
    entries = saved
    attempt(5, 9, [[at + 40, at + 120]], at)
    assert [entry["step"] for entry in entries] == [0, 5]
    attempt(9, 10, [[at + 40, at + 120]], tokens)  # the skipped data lies behind
    assert [entry["step"] for entry in entries] == [0, 5]
    train = dataclasses.replace(train, global_batch=16)
    attempt(10, 12, [[at + 40, at + 120]], tokens)
    data = dataclasses.replace(data, seq_len=20)
    attempt(12, 13, [[at + 40, at + 120]], tokens)
    data = dataclasses.replace(data, seed=2)
    attempt(13, 15, [[at + 40, at + 120]], tokens)
    assert [entry["step"] for entry in entries] == [0, 5, 10, 12, 13]
    for step, wanted in read.items():
        entry = [entry for entry in entries if entry["step"] <= step][-1]
        assert (position.position_of(entry).batches(step), *(entry[key] for key in ("unit", "seq_len", "seed"))) == wanted


@pytest.mark.parametrize(
    ("tokens", "batches"),
    [
        ([], ()),
        ([(600, 900)], ((6, 9),)),
        ([(650, 850)], ((6, 9),)),  # counts whole batches, even if the batch size was different
        ([(600, 700), (700, 800)], ((6, 8),)),
        ([(600, 900), (700, 800)], ((6, 9),)),
        ([(600, 700), (200, 300)], ((2, 3), (6, 7))),
    ],
)
def test_ranges_of_tokens_become_ranges_of_batches(tokens, batches, tmp_path):
    for first, last in tokens:
        position.add_skipped(tmp_path, (first, last), (1, 2), "why", back_to=5)
    assert [tuple(item["tokens"]) for item in position.read_skipped(tmp_path)] == tokens
    place = position.find_position(tmp_path, 5, 510, Ramp(10), seq_len=10)
    assert place == position.Position(5, 6, batches, Ramp(10))


def test_a_list_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / position.NAME).write_text("{")
    with pytest.raises(position.CheckpointError, match=position.NAME):
        position.read_skipped(tmp_path)
