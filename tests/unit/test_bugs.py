"""Each planted bug fits the code and names tests. planted_bugs.py plants them."""

import planted_bugs


def test_each_bug_changes_one_place_of_the_code_and_names_tests():
    assert planted_bugs.stale() == []
