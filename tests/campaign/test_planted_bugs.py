"""One-line bugs, planted in a copy of the repository one at a time: tests of the default suite find each."""

from pathlib import Path

import planted_bugs
import pytest
from bugs import Bug, all_bugs

BUGS = all_bugs()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    planted_bugs.copy_repository(root)
    return root


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_noticed(bug: Bug, copy: Path):
    assert planted_bugs.is_noticed(bug, copy), f"{bug.file}: {bug.text!r} -> {bug.instead!r} survives {bug.tests}"
