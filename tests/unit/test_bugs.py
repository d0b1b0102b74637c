"""Each planted bug changes one place of the current code, and names its tests. test_planted_bugs.py plants them."""

from collections import Counter

from bugs import all_bugs
from ledger import REPO


def test_each_bug_has_a_name_of_its_own_and_tests_of_the_default_suite():
    assert not [name for name, count in Counter(bug.name for bug in all_bugs()).items() if count > 1]
    assert not [bug.name for bug in all_bugs() if not bug.tests.startswith(("unit/", "proofs/", "gpu/"))]


def test_each_bug_changes_one_place_of_the_code():
    files = {bug.file: (REPO / bug.file).read_text() for bug in all_bugs()}
    assert {bug.name: n for bug in all_bugs() if (n := files[bug.file].count(bug.text)) != 1} == {}
    assert not [bug.name for bug in all_bugs() if bug.text == bug.instead]
