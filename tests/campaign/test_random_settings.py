"""Random settings (tests/random_settings.py): refused with fixes that work, or equal to one device."""

import pytest
import random_settings


@pytest.mark.parametrize("first", range(0, 12, 3))
def test_draws_train_as_one_device(first: int):
    """Three draws, the first of them on stages with different numbers of layers."""
    wrong = {seed: random_settings.judge(seed).wrong for seed in range(first, first + 3)}
    assert not any(wrong.values()), wrong


def test_fixes_of_refused_draws_work():
    """Each message names one setting; typed one after another, they lead to a program that can be built."""
    wrong = {seed: random_settings.mended(random_settings.draw(seed)).wrong for seed in range(1000, 1060)}
    assert not any(wrong.values()), {seed: text for seed, text in wrong.items() if text}
