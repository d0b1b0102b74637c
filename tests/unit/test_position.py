"""Which batch a step reads after skipped data: compared with a list of batches from which the skipped ones are removed."""

import itertools

import pytest

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
        position.skip(tmp_path, (first, last), (1, 2), "why", back_to=5)
    assert [tuple(item["tokens"]) for item in position.read(tmp_path)] == tokens
    place = position.position(tmp_path, step=5, tokens=510, per_step=100)
    assert place == position.Position(5, 6, batches)


def test_a_list_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / position.NAME).write_text("{")
    with pytest.raises(position.CheckpointError, match=position.NAME):
        position.read(tmp_path)
