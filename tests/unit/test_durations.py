"""Durations and counts as people say them."""

import math

import pytest

from jaxtrain.config.counts import short_count
from jaxtrain.config.durations import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ((0.0,), "0 s"),
        ((0.01,), "<0.1 s"),
        ((5.4,), "5.4 s"),
        ((9.97,), "10 s"),
        ((119.0,), "119 s"),
        ((125.0,), "2.1 min"),
        ((2340.0,), "39 min"),
        ((5400.0,), "1.5 h"),
        ((15_120.0,), "4.2 h"),
        ((1_036_800.0,), "12 days"),
        ((864_000_000.0,), "10,000 days"),
        ((2340.0, 3660.0), "39 to 61 min"),
        ((7_000.0, 180_000.0), "1.9 h to 2.1 days"),
        ((30.0, 432_000.0), "30 s to 5 days"),
        ((3660.0, 2340.0), "39 to 61 min"),
        ((119.4,), "119 s"),
        ((119.6,), "2 min"),
        ((5_399.0,), "1.5 h"),
        ((172_799.0,), "2 days"),
        ((40.0, 40.2), "40 s"),
        ((-3.0,), "0 s"),
        ((None,), "-"),
        ((math.inf,), "-"),
        ((1.0, math.inf), "-"),
    ],
)
def test_a_duration_has_the_unit_and_the_digits_that_people_say(seconds, text):
    assert duration(*seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (1, "1"),
        (999, "999"),
        (1000, "1.00 k"),
        (9_999, "10.0 k"),
        (262_144, "262 k"),
        (999_499, "999 k"),
        (999_999, "1.00 M"),
        (1_430_000, "1.43 M"),
        (999_999_999, "1.00 B"),
        (1e12, "1,000 B"),
    ],
)
def test_a_count_has_three_digits_and_the_unit_that_they_need(number, text):
    assert short_count(number) == text
