"""A sequence over several ranks: how ranks share heads and chunks, and that all have equal work. The tests use no arrays."""

import pytest

from jaxtrain.config.context import Context, make_context, pairs_per_rank, ulysses_problem

CONTEXTS = [Context(1, n) for n in (1, 2, 4, 8)]
CONTEXTS += [Context(1, 4, gathered=True), Context(4, 1), Context(2, 2), Context(2, 4, gathered=True)]


def test_zigzag_order_gives_each_rank_an_early_and_a_late_chunk():
    assert Context(1, 1).chunks == (0,)
    assert Context(1, 2).chunks == (0, 3, 1, 2)
    assert Context(2, 4).chunks == (0, 7, 1, 6, 2, 5, 3, 4)
    assert [c.divides for c in (Context(), Context(4, 1), Context(1, 4), Context(2, 4))] == [1, 4, 8, 16]


@pytest.mark.parametrize("context", CONTEXTS, ids=str)
@pytest.mark.parametrize("window", [0, 1 << 10])
def test_ranks_have_the_same_work(context: Context, window: int):
    T = 1 << 16
    work = pairs_per_rank(context, T, window)
    assert len(work) == context.size
    whole = window * (T - window) + window**2 / 2 if window else T**2 / 2
    assert sum(work) == pytest.approx(whole)
    if not window:
        assert max(work) == min(work)


def test_ranks_are_divided_by_method_and_heads():
    expected = {
        ("ring", 8, 8, 8): Context(1, 8),
        ("gather", 8, 8, 8): Context(1, 8, gathered=True),
        ("ulysses", 8, 32, 8): Context(8, 1),
        ("ulysses", 8, 4, 2): Context(4, 2),
        ("ulysses", 8, 32, 1): Context(8, 1),
        ("ulysses", 6, 9, 9): Context(3, 2),
        ("ring", 1, 8, 8): Context(),
    }
    assert {asked: make_context(*asked) for asked in expected} == expected
    assert [bool(ulysses_problem(*asked)) for asked in ((4, 6, 6), (2, 6, 3), (4, 8, 2))] == [True, True, False]
